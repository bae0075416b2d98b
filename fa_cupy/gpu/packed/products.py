"""Causal products of packed sequences on CuPy arrays, and linear attention.

Kernels take sequences as a batch axis, and find the rows of each in offsets that stay in device
memory. All that they compute is made of causal products::

    total state = state that a product of the keys leaves
    state read  = product with keys and values of zeros, from that state on

A product whose rows are 16-bit numbers of dims that no kernel takes is one of float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cupy
import numpy as np
from cupy.cuda import runtime

from fa_cupy.core.broadcasting import View
from fa_cupy.core.linear_problem import Product, product_problem
from fa_cupy.core.plan_cache import UNKNOWN, lookup, remember
from fa_cupy.gpu import causal_product_backward, workspace
from fa_cupy.gpu import linear_attention as whole
from fa_cupy.gpu.arrays import fits, kernel_takes, packed_copy, require_whole_elements
from fa_cupy.gpu.causal_product import without_queries
from fa_cupy.gpu.causal_product_backward import Term
from fa_cupy.gpu.cublas import tile_ops
from fa_cupy.gpu.kernels import products
from fa_cupy.gpu.kernels.linear.packed.sequence_spans import SPANS
from fa_cupy.gpu.kernels.linear.params import Job, packed_job
from fa_cupy.gpu.plan import Plan
from fa_cupy.keys.layout import KeyArrays, on_device

_NAME = "causal_product"


class Packing(NamedTuple):
    """The offsets of a call, on the device, and the product whose lengths they have."""

    problem: Product
    offsets: tuple[Any, Any]

    @classmethod
    def of(cls, name: str, problem: Product, keys: KeyArrays) -> Packing:
        """Move offsets to the device that are on the host."""
        if isinstance(keys.q_offsets, np.ndarray) or isinstance(keys.k_offsets, np.ndarray):
            workspace.refuse(name, "offsets are copied from the host, which cannot be captured")
        moved = on_device("cupy", keys)
        return cls(problem, (moved.q_offsets, moved.k_offsets))

    def run(self, plan: Plan, arrays: Sequence[Any]) -> None:
        """Run a plan on arrays that may be None."""
        arrays = [*arrays, *self.offsets]
        plan.run(tuple([0 if x is None or not x.size else x.data.ptr for x in arrays]))

    def gradients(self, terms: Sequence[Term]) -> None:
        """Compute the products of gradients."""
        compute(self, terms, zero_invalid=True)

    def plan(self, make: Callable[..., Plan | None], jobs: tuple[Job, ...], *options: Any) -> Any:
        """Return a plan, made at most once."""
        problem = self.problem
        device = runtime.getDevice()
        lengths = problem.q_len, problem.k_len, problem.offsets
        key = f"packed {make.__name__}", device, jobs, lengths, options
        plan = lookup(key, UNKNOWN)
        if plan is UNKNOWN:
            plan = remember(key, make(jobs, problem, workspace.launcher(device), *options))
        return plan


def product(
    problem: Product, q: Any, k: Any, v: Any, initial: Any, out: Any, keys: KeyArrays, *,
    reverse: bool, return_state: bool, algorithm: str = "auto",
) -> tuple[Any, Any]:  # fmt: skip
    """Solve `problem` on the current device and stream; as `fa_cupy.cpu.packed.products` does."""
    require_whole_elements(_NAME, q=q, k=k, v=v, initial_state=initial, out=out)
    if out is None:
        out = workspace.empty(problem.out_shape, problem.dtype, q)
    state = workspace.empty(problem.state_shape, problem.state_dtype) if return_state else None
    term = Term(problem, q, k, v, out, initial, state, reverse)
    compute(Packing.of(_NAME, problem, keys), (term,), algorithm=algorithm)
    return out, state


def backward(
    problem: Product, dout: Any, q: Any, k: Any, v: Any, initial: Any, dstate: Any,
    keys: KeyArrays, *, reverse: bool,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Return the gradients of a causal product by q, k, v and the initial states."""
    packing = Packing.of("causal_product_backward", problem, keys)

    return causal_product_backward.backward(
        problem, dout, q, k, v, initial, dstate, reverse=reverse, compute_terms=packing.gradients
    )


def linear_attention(
    problem: Product, q: Any, k: Any, v: Any, initial: Any, out: Any, keys: KeyArrays, *,
    feature: str | None, eps: float, is_causal: bool, return_state: bool,
) -> tuple[Any, Any]:  # fmt: skip
    """Solve `problem`, and divide by the sums of the weights of each sequence."""
    packing = Packing.of("linear_attention", problem, keys)
    return whole.attention_by(
        _Products(packing, False), problem, q, k, v, initial, out,
        feature=feature, eps=eps, is_causal=is_causal, return_state=return_state,
    )  # fmt: skip


def linear_attention_backward(
    problem: Product, dout: Any, q: Any, k: Any, v: Any, initial: Any, dstate: Any,
    keys: KeyArrays, *, feature: str | None, eps: float, is_causal: bool,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Return the gradients of linear attention by q, k, v and the initial states."""
    packing = Packing.of("linear_attention_backward", problem, keys)
    return whole.gradients_by(
        _Products(packing, True), problem, dout, q, k, v, initial, dstate,
        feature=feature, eps=eps, is_causal=is_causal,
    )  # fmt: skip


def compute(
    packing: Packing, terms: Sequence[Term], *, of_keys: bool = False, zero_invalid: bool = False,
    algorithm: str = "auto",
) -> None:  # fmt: skip
    """Write the outputs of products, and the states that are not None, in launches of one plan.

    Parameters
    ----------
    packing : Packing
    terms : sequence of Term
    of_keys : bool, optional
        Whether rows lie as those of the keys do, where these are packed otherwise.
    zero_invalid : bool, optional
        Whether results of sequences whose offsets are out of range become 0; else NaN.
    algorithm : str, optional
    """
    some = [_Ready.of(term) for term in terms if not _is_trivial(term)]
    how = SPANS[of_keys], zero_invalid
    if not some:
        return
    plan = packing.plan(products.packed_plan, tuple(x.job(*how) for x in some), algorithm)
    if plan is None and algorithm in ("auto", "chunked"):  # wide rows of 16 bits
        some = [x.widened() for x in some]
        plan = packing.plan(products.packed_plan, tuple(x.job(*how) for x in some), algorithm)
    if plan is None:
        first = some[0].term.problem
        what = "no device below compute capability 8.0 and"
        if algorithm not in ("auto", "chunked"):
            what = f"algorithm {algorithm!r} has no kernel of packed sequences for"
        raise NotImplementedError(
            f"{_NAME}: q_offsets with {first.dtype} and {first.k_len} rows: {what} 2**31 - 2**16 "
            "rows at most are supported"
        )
    packing.run(plan, [array for x in some for array in x.arrays])
    for x in some:
        x.finish()


def _is_trivial(term: Term) -> bool:
    """Write results that take no product, and return whether they are all."""
    problem, out, state = term.problem, term.out, term.state
    assert problem.offsets is not None
    wanted = out.size or (state is not None and state.size)
    if wanted and problem.qk_dim and problem.offsets.sequences:
        return False
    if out.size:  # no product to sum, whatever the values hold
        out[...] = cupy.zeros((), problem.dtype)
    return True


class _Ready(NamedTuple):
    """A product as kernels take it.

    Attributes
    ----------
    term : Term
        With copies of arrays that kernels cannot read, and views of them.
    result : array
        Where the output goes; that of `term` or a copy.
    """

    term: Term
    result: Any

    @classmethod
    def of(cls, term: Term) -> _Ready:
        """Make copies where kernels need some."""
        if not term.out.size:  # as `fa_cupy.gpu.causal_product.compute`
            problem = without_queries(term.problem)
            out = cupy.empty(problem.out_shape, problem.dtype)
            return (
                cls.of(term._replace(problem=problem, q=term.k, out=out))
                if out.size
                else cls(term._replace(problem=problem, q=term.k, out=out), out)
            )
        changed: dict[str, Any] = {}
        arrays: dict[str, Any] = {}
        problem = term.problem
        for name, array in (("q", term.q), ("k", term.k), ("v", term.v)):
            view = getattr(problem, name)
            if not kernel_takes(view, problem.dtype):
                arrays[name], changed[name] = packed_copy(view, array)
        result = term.out
        if not fits(result, problem.dtype):
            result = cupy.empty(result.shape, problem.dtype)
        problem = dataclasses.replace(problem, **changed)
        return cls(term._replace(problem=problem, **arrays), result)

    def widened(self) -> _Ready:
        """Return the same product in float32."""
        problem, wide = self.term.problem, np.dtype(np.float32)
        if problem.dtype.itemsize != 2:
            return self
        changed: dict[str, Any] = {}
        arrays = {}
        for name in ("q", "k", "v"):
            copy, view = packed_copy(getattr(problem, name), getattr(self.term, name))
            arrays[name] = tile_ops.widened(copy, wide)
            changed[name] = View(view.shape, tuple(2 * step for step in view.strides))
        problem = dataclasses.replace(problem, dtype=wide, **changed)
        result = cupy.empty(self.result.shape, wide)
        return _Ready(self.term._replace(problem=problem, **arrays), result)

    @property
    def arrays(self) -> tuple[Any, ...]:
        """In the order of plans."""
        term = self.term
        return term.q, term.k, term.v, self.result, term.initial, term.state

    def job(self, spans: str, zero_invalid: bool) -> Job:
        """Return what a plan is made from."""
        problem, state = self.term.problem, self.term.state
        view = problem.view(self.result.shape, self.result.strides)
        out = View((*problem.batch, *view.shape[-2:]), view.strides)
        last = None
        if state is not None:
            view = problem.state_view(state)
            last = View((*problem.batch, *view.shape[-3:]), view.strides)
        return packed_job(problem, out, last, self.term.reverse, spans, zero_invalid)

    def finish(self) -> None:
        """Write the output where the caller wants it."""
        if self.result is not self.term.out:
            tile_ops.store(self.term.out, self.result)


class _Products(whole.Products):
    """Those of packed sequences."""

    def __init__(self, packing: Packing, zero_invalid: bool) -> None:
        self._packing, self._zero_invalid = packing, zero_invalid

    def require(self, name: str, is_causal: bool, *problems: Product) -> None:
        """Kernels serve all."""

    def product(
        self, problem: Product, x: Any, y: Any, values: Any, initial: Any, state: Any = None
    ) -> Any:
        found = cupy.empty(problem.out_shape, problem.dtype)
        self._compute(Term(problem, x, y, values, found, initial, state, False), False)
        return found

    def backward(
        self, problem: Product, dsums: Any, x: Any, y: Any, values: Any, initial: Any, dstate: Any
    ) -> tuple[Any, Any, Any, Any]:
        with workspace.computing(runtime.getDevice()):
            return causal_product_backward.backward(
                problem, dsums, x, y, values, initial, dstate, reverse=False,
                compute_terms=self._packing.gradients,
            )  # fmt: skip

    def total(self, problem: Product, y: Any, values: Any, initial: Any, of_keys: bool) -> Any:
        state = cupy.empty(problem.state_shape, problem.state_dtype)
        # Queries of zeros, one row that all of them are: nothing is made of their products.
        zeros = cupy.zeros((problem.qk_dim,), problem.dtype)
        shape = (*problem.batch, problem.k_len, problem.qk_dim)
        steps = (*[0] * (len(shape) - 1), problem.dtype.itemsize)
        queries = View(shape, steps)
        out_shape = (*problem.out_shape[:-2], problem.k_len, problem.v_dim)
        leaving = dataclasses.replace(problem, q=queries, q_len=problem.k_len, out_shape=out_shape)
        found = cupy.empty(out_shape, problem.dtype)
        self._compute(Term(leaving, zeros, y, values, found, initial, state, False), of_keys)
        return state

    def read(self, rows: Any, state: Any, of_keys: bool) -> Any:
        # Keys and values of zeros, of as many heads as there are states.
        *batch, _, dim, cols = state.shape
        k, v = (
            cupy.broadcast_to(cupy.zeros((n,), rows.dtype), (*batch, rows.shape[-2], n))
            for n in (dim, cols)
        )
        problem = product_problem(_NAME, rows, k, v, state, offsets=self._packing.problem.offsets)
        found = cupy.empty(problem.out_shape, problem.dtype)
        self._compute(Term(problem, rows, k, v, found, state, None, False), of_keys)
        return found

    def finish(self, *arrays: tuple[Any, bool], dinitial: Any = None) -> None:
        offsets = self._packing.problem.offsets
        assert offsets is not None
        pairs = [(x, of_keys) for x, of_keys in arrays if x.size]
        if not offsets.sequences:
            for x, _ in pairs:
                x[...] = cupy.zeros((), x.dtype)
            return
        jobs = [self._of_rows(x, of_keys) for x, of_keys in pairs]
        given: list[Any] = [y for x, _ in pairs for y in (None, None, None, x, None, None)]
        if dinitial is not None and dinitial.size:
            jobs.append(self._of_states(dinitial))
            given += [None] * 5 + [dinitial]
        if jobs:
            plan = self._packing.plan(products.other_rows_plan, tuple(jobs))
            self._packing.run(plan, given)

    def _compute(self, term: Term, of_keys: bool) -> None:
        compute(self._packing, (term,), of_keys=of_keys, zero_invalid=self._zero_invalid)

    def _of_rows(self, x: Any, of_keys: bool) -> Job:
        """Return the job that writes rows of no sequence."""
        problem = dataclasses.replace(
            product_problem(_NAME, x, x, x), offsets=self._packing.problem.offsets
        )
        assert problem.q is not None
        return packed_job(problem, problem.q, None, False, SPANS[of_keys], self._zero_invalid)

    def _of_states(self, state: Any) -> Job:
        """Return the job that writes states of sequences that are out of range."""
        offsets = self._packing.problem.offsets
        x, y = (state[..., 0, :1, :1], state[..., 0, :1, :])  # no row of them is written
        problem = product_problem(_NAME, x, x, y)
        problem = dataclasses.replace(problem, qk_dim=state.shape[-2], offsets=offsets)
        last = View(
            (*problem.batch, *state.shape[-3:]), problem.view(state.shape, state.strides, 3).strides
        )
        return packed_job(problem, problem.v, last, False, SPANS[0], self._zero_invalid)
