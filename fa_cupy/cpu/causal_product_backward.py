"""Gradients of causal products on NumPy arrays, which are scans too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fa_cupy.core import arrays, broadcasting, linear_problem
from fa_cupy.core.plan_cache import lookup
from fa_cupy.cpu.products.executor import Machine
from fa_cupy.cpu.products.plans import key_of, plan_of
from fa_cupy.tiled import segmented_scan
from fa_cupy.tiled.segmented_scan import Reader, Scan, Side

Array = npt.NDArray[Any]


def cached(dout: Any, q: Any, k: Any, v: Any, initial: Any, reverse: Any, dstate: Any) -> Any:
    """Answer a call of `fa_cupy.causal_product_backward` that was checked once before, or None."""
    plan = lookup(_key(dout, q, k, v, initial, dstate))
    if plan is None or reverse.__class__ is not bool:
        return None
    found = plan(dout, q, k, v, initial, dstate, reverse)
    return found if initial is not None else found[:3]


def _key(dout: Any, q: Any, k: Any, v: Any, initial: Any, dstate: Any) -> Any:
    if type(dout) is not np.ndarray:
        return None
    of_state = None
    if dstate is not None:
        if type(dstate) is not np.ndarray:
            return None
        of_state = dstate.shape, dstate.dtype
    facts = dout.shape, dout.strides, dout.dtype, of_state
    return key_of("causal_product_backward", q, k, v, initial, facts)


def backward(
    problem: linear_problem.Product,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    initial: Array | None,
    dstate: Array | None,
    *,
    reverse: bool,
) -> tuple[Array, Array, Array, Array | None]:
    """Return the gradients of a causal product with respect to q, k, v and the initial state.

    One scan in the direction of the product rebuilds its states, from which `dout` reads dq. One
    in the other direction sums ``q.mT @ dout``, from which v reads dk and k reads dv.
    """
    key = _key(dout, q, k, v, initial, dstate)
    plan = plan_of(key, problem, q, k, v, initial, gradients=True)
    if plan is not None:
        grads: tuple[Array, Array, Array, Array | None] = plan(
            dout, q, k, v, initial, dstate, reverse
        )
        return grads
    # With the batch axes of the output, or of the states; summed to those of the inputs at the end.
    dq = _Gradient(q, (*problem.out_shape[:-1], problem.qk_dim), problem, copies=True)
    rows = (*problem.state_shape[:-2], problem.k_len)
    dk = _Gradient(k, (*rows, problem.qk_dim), problem, copies=False)
    dv = _Gradient(v, (*rows, problem.v_dim), problem, copies=False)
    dsums = Side(dout, problem.view(dout.shape, dout.strides), copies=True)
    queries = Side(q, problem.q, copies=True)
    keys, values = Side(k, problem.k), Side(v, problem.v)

    reader = Reader(dsums, dq.side, flipped=True)
    scan_of(problem, k, v, (reader,), reverse).run(state_side(initial, problem.initial))

    readers = (Reader(values, dk.side, flipped=True), Reader(keys, dv.side))
    machine = Machine(problem.state_dtype)
    scan = Scan(machine, problem, queries, dsums, readers, not reverse)
    first = None if dstate is None else problem.view(dstate.shape, dstate.strides)
    last = None if initial is None else np.empty(problem.state_shape, problem.state_dtype)
    scan.run(state_side(dstate, first), last)
    with np.errstate(all="ignore"):
        found = dq.finished(), dk.finished(), dv.finished()
        return *found, None if initial is None else broadcasting.summed(last, initial.shape)


class _Gradient:
    """The gradient of an array, with the batch axes of a level of the problem until it is done."""

    def __init__(
        self, of: Array, shape: Sequence[int], problem: linear_problem.Product, copies: bool
    ):
        whole = of.shape == tuple(shape)
        self._of = of
        self._found = (
            arrays.empty_laid_out(np, of.shape, of, of.dtype)
            if whole
            else np.empty(shape, problem.state_dtype)
        )
        self.side = Side(self._found, problem.view(shape, self._found.strides), copies)

    def finished(self) -> Array:
        """Return the gradient in the shape and dtype of the array."""
        if self._found.shape == self._of.shape:
            return self._found
        total: Array = broadcasting.summed(self._found, self._of.shape)
        return total.astype(self._of.dtype)


def scan_of(
    problem: linear_problem.Product, k: Array, v: Array, readers: tuple[Reader, ...], reverse: bool
) -> Scan:
    """Return a scan over all rows of k and v."""
    keys, values = Side(k, problem.k), Side(v, problem.v)
    return Scan(Machine(problem.state_dtype), problem, keys, values, readers, reverse)


def state_side(array: Array | None, view: segmented_scan.View | None) -> Side:
    """Return a state as a side of a scan."""
    return Side(array, view, rows=False)
