"""Causal products of packed sequences on NumPy arrays, and linear attention.

Most calls have a plan (`fa_cupy.cpu.packed.plans`). Others, of batch axes that broadcast, and those
of one long sequence with few batch entries, are calls for each sequence, on views of its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fa_cupy.core import arrays
from fa_cupy.core.linear_problem import Product, product_problem
from fa_cupy.cpu import causal_product_backward as whole_backward
from fa_cupy.cpu import linear_attention as whole
from fa_cupy.cpu.packed.plans import Rows, clear_others, plan_of, rows_of
from fa_cupy.cpu.products.executor import Machine
from fa_cupy.keys.layout import KeyArrays

Array = npt.NDArray[Any]
_NAME = "causal_product"
# So many rows are summed at once.
_FEW_ROWS = 256


def product(
    problem: Product, q: Array, k: Array, v: Array, initial: Array | None, out: Array | None,
    keys: KeyArrays, *, reverse: bool, return_state: bool, algorithm: str = "chunked",
) -> tuple[Array, Array | None]:  # fmt: skip
    """Solve `problem`; as `fa_cupy.cpu.linear_attention.product`, for packed sequences.

    `keys` holds the offsets, which are checked.
    """
    rows = rows_of(keys.q_offsets, keys.k_offsets)
    options = {"reverse": reverse, "return_state": return_state}
    return _product(problem, q, k, v, initial, out, rows, **options)


def _product(
    problem: Product, q: Array, k: Array, v: Array, initial: Array | None, out: Array | None,
    rows: Rows, *, reverse: bool, return_state: bool,
) -> tuple[Array, Array | None]:  # fmt: skip
    plan = _plan(_NAME, rows, problem, q, k, v, initial)
    if plan is not None and plan.takes(out):
        found: tuple[Array, Array | None] = plan.sequences(
            q, k, v, initial, out, rows, return_state, reverse
        )
        return found
    call = _Call.of(problem, q, k, v, initial, out, rows, return_state)
    for own in call.sequences():
        result, last = whole.product(
            product_problem(_NAME, *own.inputs), *own.inputs, own.out,
            reverse=reverse, return_state=return_state,
        )  # fmt: skip
        own.write(result, last)
    return call.out, call.state


def linear_attention(
    problem: Product, q: Array, k: Array, v: Array, initial: Array | None, out: Array | None,
    keys: KeyArrays, *, feature: str | None, eps: float, is_causal: bool, return_state: bool,
) -> tuple[Array, Array | None]:  # fmt: skip
    """Solve `problem`, and divide by the sums of the weights of each sequence."""
    name = "linear_attention"
    rows = rows_of(keys.q_offsets, keys.k_offsets)
    plan = _plan(name, rows, problem, q, k, v, initial, is_causal, feature=feature, eps=eps)
    if plan is not None and plan.takes(out):
        found: tuple[Array, Array | None] = plan.sequences(
            q, k, v, initial, out, rows, return_state, False, is_causal
        )
        return found
    call = _Call.of(problem, q, k, v, initial, out, rows, return_state)
    for own in call.sequences():
        of_one = product_problem(name, *own.inputs, aligned=is_causal, normalised=True)
        result, last = whole.linear_attention(
            of_one, *own.inputs, own.out,
            feature=feature, eps=eps, is_causal=is_causal, return_state=return_state,
        )  # fmt: skip
        own.write(result, last)
    return call.out, call.state


def backward(
    problem: Product, dout: Array, q: Array, k: Array, v: Array, initial: Array | None,
    dstate: Array | None, keys: KeyArrays, *, reverse: bool,
) -> tuple[Array, Array, Array, Array | None]:  # fmt: skip
    """Return the gradients of a causal product by q, k, v and the initial states."""
    rows = rows_of(keys.q_offsets, keys.k_offsets)
    return _backward(problem, dout, q, k, v, initial, dstate, rows, reverse)


def _backward(
    problem: Product, dout: Array, q: Array, k: Array, v: Array, initial: Array | None,
    dstate: Array | None, rows: Rows, reverse: bool,
) -> tuple[Array, Array, Array, Array | None]:  # fmt: skip
    name = "causal_product_backward"
    # A plan reads strides of dout, too, which is no part of its key.
    plan = _plan(name, rows, problem, q, k, v, initial, gradients=True)
    if plan is not None:
        found: tuple[Array, Array, Array, Array | None] = plan.sequences(
            dout, q, k, v, initial, dstate, rows, reverse
        )
        return found
    grads = [arrays.empty_laid_out(np, x.shape, x, x.dtype) for x in (q, k, v)]
    for grad in grads:
        clear_others(grad, rows.q)
    dinitial = None if initial is None else np.empty(initial.shape, initial.dtype)
    for number, own in enumerate(rows.q):
        x, a, b = (array[..., own, :] for array in (q, k, v))
        first, last = (None if y is None else y[..., number, :, :] for y in (initial, dstate))
        of_one = product_problem(name, x, a, b, first)
        *found_rows, dfirst = whole_backward.backward(
            of_one, dout[..., own, :], x, a, b, first, last, reverse=reverse
        )
        for grad, part in zip(grads, found_rows, strict=True):
            grad[..., own, :] = part
        if dinitial is not None:
            dinitial[..., number, :, :] = dfirst
    dq, dk, dv = grads
    return dq, dk, dv, dinitial


def linear_attention_backward(
    problem: Product, dout: Array, q: Array, k: Array, v: Array, initial: Array | None,
    dstate: Array | None, keys: KeyArrays, *, feature: str | None, eps: float, is_causal: bool,
) -> tuple[Array, Array, Array, Array | None]:  # fmt: skip
    """Return the gradients of linear attention by q, k, v and the initial states."""
    products = _Products(rows_of(keys.q_offsets, keys.k_offsets))
    return whole.gradients(
        products, problem, dout, q, k, v, initial, dstate,
        feature=feature, eps=eps, is_causal=is_causal,
    )  # fmt: skip


def _plan(name: str, rows: Rows, problem: Product, *inputs: Any, **options: Any) -> Any:
    """Return the plan of a call; None where a long sequence is most of the work of few entries."""
    longest = max([own.stop - own.start for own in rows.k], default=0)
    if 2 * longest > problem.k_len and Machine.segments(longest, int(np.prod(problem.batch))) > 1:
        return None
    return plan_of(name, problem, *inputs, **options)


class _Own(NamedTuple):
    """The arrays of one sequence, as views of the call's."""

    inputs: tuple[Any, Any, Any, Any]  # q, k, v and the initial state
    out: Array
    state: Array | None

    def write(self, out: Array, state: Array | None) -> None:
        """Write results, unless they are there."""
        if out is not self.out:
            np.copyto(self.out, out)
        if self.state is not None:
            assert state is not None
            self.state[...] = state


class _Call(NamedTuple):
    """The arrays of a call that is computed sequence by sequence."""

    inputs: tuple[Any, ...]
    out: Array
    state: Array | None
    rows: Rows

    @classmethod
    def of(
        cls, problem: Product, q: Array, k: Array, v: Array, initial: Array | None,
        out: Array | None, rows: Rows, return_state: bool,
    ) -> _Call:  # fmt: skip
        """Allocate results; rows of no sequence become 0."""
        if out is None:
            out = arrays.empty_laid_out(np, problem.out_shape, q, problem.dtype)
        clear_others(out, rows.q)
        state = np.empty(problem.state_shape, problem.state_dtype) if return_state else None
        return cls((q, k, v, initial), out, state, rows)

    def sequences(self) -> Iterator[_Own]:
        """Yield the arrays of each sequence."""
        q, k, v, initial = self.inputs
        for number, (asking, own) in enumerate(zip(self.rows.q, self.rows.k, strict=True)):
            first, last = (
                None if x is None else x[..., number, :, :] for x in (initial, self.state)
            )
            inputs = q[..., asking, :], k[..., own, :], v[..., own, :], first
            yield _Own(inputs, self.out[..., asking, :], last)


class _Products(whole.Products):
    """Those of packed sequences."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def clear(self, grad: Array, of_keys: bool) -> None:
        clear_others(grad, self._rows.k if of_keys else self._rows.q)

    def product(
        self, problem: Product, x: Array, y: Array, values: Array, initial: Array | None
    ) -> Array:
        found, _ = _product(
            problem, x, y, values, initial, None, self._rows, reverse=False, return_state=False
        )
        return found

    def backward(
        self, problem: Product, dsums: Array, x: Array, y: Array, values: Array,
        initial: Array | None, dstate: Array | None,
    ) -> tuple[Array, Array, Array, Array | None]:  # fmt: skip
        return _backward(problem, dsums, x, y, values, initial, dstate, self._rows, False)

    def total(
        self, problem: Product, y: Array, values: Array, initial: Array | None, of_keys: bool
    ) -> Array:
        state = np.empty(problem.state_shape, problem.state_dtype)
        for number, own in enumerate(self._rows.k if of_keys else self._rows.q):
            first = None if initial is None else initial[..., number, :, :]
            parts = y[..., own, :], values[..., own, :]
            found = state[..., number, :, :]
            if _few(own, *parts, *(() if first is None else (first,))):
                np.matmul(parts[0].swapaxes(-1, -2), parts[1], out=found)
                if first is not None:
                    found += first
                continue
            # Views of the call's batch: its queries say how heads of keys and values are grouped.
            of_y, of_values = (problem.view(x.shape, x.strides) for x in parts)
            of_one = replace(
                problem, k_len=own.stop - own.start, k=of_y, v=of_values,
                initial=None if first is None else problem.view(first.shape, first.strides),
                state_shape=(*problem.state_shape[:-3], *problem.state_shape[-2:]), offsets=None,
            )  # fmt: skip
            found[...] = super().total(of_one, *parts, first, of_keys)
        return state

    def read(self, rows: Array, state: Array, of_keys: bool) -> Array:
        found: Array | None = None
        for number, own in enumerate(self._rows.k if of_keys else self._rows.q):
            part, memory = rows[..., own, :], state[..., number, :, :]
            if _few(own, part, memory):
                part = part @ memory
            else:
                part = super().read(part, memory, of_keys)
            if found is None:
                found = np.zeros((*part.shape[:-2], rows.shape[-2], part.shape[-1]), part.dtype)
            found[..., own, :] = part
        if found is None:  # of no sequence
            nothing = np.zeros((*state.shape[:-3], *state.shape[-2:]), state.dtype)
            found = super().read(np.zeros_like(rows), nothing, of_keys)
        return found


def _few(rows: slice, *arrays: Array) -> bool:
    """Whether few rows are multiplied, of arrays without an axis that broadcasts."""
    first, *others = (x.shape[:-2] for x in arrays)
    return rows.stop - rows.start <= _FEW_ROWS and all(shape == first for shape in others)
