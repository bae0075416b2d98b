"""Causal products on NumPy arrays, as scans over their rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fa_cupy.core import arrays, broadcasting, linear_problem
from fa_cupy.cpu import feature_maps, single_step
from fa_cupy.cpu.executor import Machine
from fa_cupy.tiled import chunked_scan, linear_gradients, segmented_scan
from fa_cupy.tiled.chunked_scan import Operand, Steps
from fa_cupy.tiled.segmented_scan import Reader, Scan, Side

Array = npt.NDArray[Any]


def cached(
    q: Any, k: Any, v: Any, initial: Any, return_state: Any, reverse: Any, algorithm: Any, out: Any
) -> Any:
    """Answer a call of `fa_cupy.causal_product` that was checked once before; None otherwise."""
    step = single_step.lookup(single_step.key_of(q, k, v, initial, None, None))
    if step is None or out is not None:
        return None
    if algorithm.__class__ is not str or algorithm not in linear_problem.ANY:
        return None
    if not return_state.__class__ is reverse.__class__ is bool:
        return None
    found = step(q, k, v, initial, None)
    return found if return_state else found[0]


def cached_normalised(
    q: Any, k: Any, v: Any, feature_map: Any, eps: Any, is_causal: Any, initial: Any,
    return_state: Any, out: Any,
) -> Any:  # fmt: skip
    """Answer a call of `fa_cupy.linear_attention` that was checked once before; None otherwise."""
    if not (feature_map.__class__ is str and eps.__class__ in (float, int)) or out is not None:
        return None
    if not return_state.__class__ is is_causal.__class__ is bool:
        return None
    feature = None if feature_map == "identity" else feature_map
    step = single_step.lookup(single_step.key_of(q, k, v, initial, feature, eps))
    if step is None:
        return None
    found = step(q, k, v, initial, None)
    return found if return_state else found[0]


def product(
    problem: linear_problem.Product,
    q: Array,
    k: Array,
    v: Array,
    initial: Array | None,
    out: Array | None,
    *,
    reverse: bool,
    return_state: bool,
    algorithm: str = "chunked",
) -> tuple[Array, Array | None]:
    """Solve `problem` for NumPy arrays.

    Parameters
    ----------
    problem : Product
        From `fa_cupy.core.linear_problem.product_problem`.
    q, k, v, initial : numpy.ndarray or None
        The arrays that `problem` was made from.
    out : numpy.ndarray or None
        Array for the output; None allocates one laid out in memory as `q` is.
    reverse, return_state : bool
    algorithm : str
        Checked already; there is one here.

    Returns
    -------
    out : numpy.ndarray
        Of shape ``problem.out_shape``.
    state : numpy.ndarray or None
        Of shape ``problem.state_shape``.
    """
    step = single_step.step_for(problem, q, k, v, initial)
    if step is not None:
        single_step.remember(single_step.key_of(q, k, v, initial, None, None), step)
        found, last = step(q, k, v, initial, out)
        return found, last if return_state else None
    if out is None:
        out = arrays.empty_laid_out(np, problem.out_shape, q, problem.dtype)
    state = np.empty(problem.state_shape, problem.state_dtype) if return_state else None
    machine = Machine(problem.state_dtype)
    segmented_scan.product(machine, problem, q, k, v, initial, out, state, reverse=reverse)
    return out, state


def _scan_of(
    problem: linear_problem.Product, k: Array, v: Array, readers: tuple[Reader, ...], reverse: bool
) -> Scan:
    keys, values = Side(k, problem.k), Side(v, problem.v)
    return Scan(Machine(problem.state_dtype), problem, keys, values, readers, reverse)


def _state(array: Array | None, view: segmented_scan.View | None) -> Side:
    return Side(array, view, rows=False)


def linear_attention(
    problem: linear_problem.Product,
    q: Array,
    k: Array,
    v: Array,
    initial: Array | None,
    out: Array | None,
    *,
    feature: str | None,
    eps: float,
    is_causal: bool,
    return_state: bool,
) -> tuple[Array, Array | None]:
    """Solve `problem`, and divide by the sums of the weights; see `product`.

    `feature` names the feature map of q and k; None leaves them as they are.
    """
    step = single_step.step_for(problem, q, k, v, initial, feature=feature, eps=eps)
    if step is not None:
        single_step.remember(single_step.key_of(q, k, v, initial, feature, eps), step)
        found, last = step(q, k, v, initial, out)
        return found, last if return_state else None
    if out is None:
        out = arrays.empty_laid_out(np, problem.out_shape, q, problem.dtype)

    def normalised(sums: Array) -> Array:
        weighted, weights = sums[..., :-1], sums[..., -1:]
        np.add(weights, sums.dtype.type(eps), out=weights)
        np.divide(weighted, weights, out=weighted)
        return weighted

    wanted = return_state or not is_causal
    state = np.empty(problem.state_shape, problem.state_dtype) if wanted else None
    apply = None if feature is None else feature_maps.IN_PLACE[feature]
    reader = Reader(
        Side(q, problem.q, copies=True, feature=apply),
        Side(out, problem.view(out.shape, out.strides), copies=True),
        finish=normalised,
    )
    keys, values = Side(k, problem.k, feature=apply), Side(v, problem.v, ones=True)
    machine = Machine(problem.state_dtype)
    readers = (reader,) if is_causal else ()
    scan = Scan(machine, problem, keys, values, readers, reverse=False)
    scan.run(_state(initial, problem.initial), state)
    if state is not None and not is_causal:
        memory = _state(state, problem.view(state.shape, state.strides))
        segmented_scan.read(machine, problem, reader, memory)
    return out, state if return_state else None


def linear_attention_backward(
    problem: linear_problem.Product,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    initial: Array | None,
    dstate: Array | None,
    *,
    feature: str | None,
    eps: float,
    is_causal: bool,
) -> tuple[Array, Array, Array, Array | None]:
    """Return the gradients of linear attention by q, k, v and the initial state."""
    dtype = problem.state_dtype
    with np.errstate(all="ignore"):
        x, y = _featured(q, feature, dtype), _featured(k, feature, dtype)
        values = np.empty((*v.shape[:-1], v.shape[-1] + 1), dtype)
        np.copyto(values[..., :-1], v, casting="unsafe")
        values[..., -1] = 1
        grads = dout.astype(dtype, copy=False)
        given = linear_gradients.Given(x, y, values, initial, eps, is_causal)
        dx, dy, dvalues, dinitial = linear_gradients.gradients(_Products(), given, grads, dstate)
        if feature is not None:
            feature_maps.GRADIENTS[feature](x, dx)
            feature_maps.GRADIENTS[feature](y, dy)
        dv = arrays.empty_laid_out(np, v.shape, v, v.dtype)
        np.copyto(dv, dvalues[..., :-1], casting="unsafe")
        return dx.astype(q.dtype, copy=False), dy.astype(k.dtype, copy=False), dv, dinitial


class _Products:
    """`tiled.linear_gradients.Products` for NumPy."""

    xp: Any = np

    @staticmethod
    def product(
        problem: linear_problem.Product, x: Array, y: Array, values: Array, initial: Array | None
    ) -> Array:
        found, _ = product(problem, x, y, values, initial, None, reverse=False, return_state=False)
        return found

    @staticmethod
    def backward(
        problem: linear_problem.Product, dsums: Array, x: Array, y: Array, values: Array,
        initial: Array | None, dstate: Array | None,
    ) -> tuple[Array, Array, Array, Array | None]:  # fmt: skip
        return backward(problem, dsums, x, y, values, initial, dstate, reverse=False)

    @staticmethod
    def total(
        problem: linear_problem.Product, y: Array, values: Array, initial: Array | None
    ) -> Array:
        state = np.empty(problem.state_shape, problem.state_dtype)
        scan = _scan_of(problem, y, values, (), False)
        scan.run(_state(initial, problem.initial), state)
        return state

    @staticmethod
    def read(rows: Array, state: Array) -> Array:
        # No keys: what is read is the initial state.
        k, v = (np.empty((*state.shape[:-2], 0, n), rows.dtype) for n in state.shape[-2:])
        problem = linear_problem.product_problem("read", rows, k, v, state, aligned=False)
        out = np.empty(problem.out_shape, rows.dtype)
        reader = Reader(
            Side(rows, problem.q, copies=True),
            Side(out, problem.view(out.shape, out.strides), copies=True),
        )
        machine = Machine(problem.state_dtype)
        segmented_scan.read(machine, problem, reader, _state(state, problem.initial))
        return out


def _featured(x: Array, feature: str | None, dtype: np.dtype[Any]) -> Array:
    """Return the features of `x` in `dtype`; `x` itself where that is what they are."""
    if feature is None:
        return x.astype(dtype, copy=False)
    found = x.astype(dtype)
    feature_maps.IN_PLACE[feature](found)
    return found


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
    # With the batch axes of the output, or of the states; summed to those of the inputs at the end.
    dq = _Gradient(q, (*problem.out_shape[:-1], problem.qk_dim), problem, copies=True)
    rows = (*problem.state_shape[:-2], problem.k_len)
    dk = _Gradient(k, (*rows, problem.qk_dim), problem, copies=False)
    dv = _Gradient(v, (*rows, problem.v_dim), problem, copies=False)
    grads = Side(dout, problem.view(dout.shape, dout.strides), copies=True)
    queries = Side(q, problem.q, copies=True)
    keys, values = Side(k, problem.k), Side(v, problem.v)

    reader = Reader(grads, dq.side, flipped=True)
    _scan_of(problem, k, v, (reader,), reverse).run(_state(initial, problem.initial))

    readers = (Reader(values, dk.side, flipped=True), Reader(keys, dv.side))
    machine = Machine(problem.state_dtype)
    scan = Scan(machine, problem, queries, grads, readers, not reverse)
    first = None if dstate is None else problem.view(dstate.shape, dstate.strides)
    last = None if initial is None else np.empty(problem.state_shape, problem.state_dtype)
    scan.run(_state(dstate, first), last)
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


def states(
    problem: linear_problem.Product,
    k: Array,
    v: Array,
    initial: Array | None,
    ends: Array,
    *,
    reverse: bool,
) -> Array:
    """Return the states at `ends`, ascending, of shape (*state_batch, len(ends), E, M)."""
    shape = (*problem.state_shape[:-2], len(ends), *problem.state_shape[-2:])
    found = np.empty(shape, problem.state_dtype)
    # Each state is the one before it in the scan's order and what the rows between them add.
    bounds = [0, *ends.tolist(), problem.k_len]
    spans = [*itertools.pairwise(bounds)][slice(1, None) if reverse else slice(None, -1)]
    sides = [
        Side(k, problem.k),
        Side(v, problem.v),
        Side(found, problem.view(shape, found.strides, tail=3)),
        _state(initial, problem.initial),
    ]
    machine = Machine(problem.state_dtype)
    stacks = [*segmented_scan.stacks_of(machine, problem, sides)]

    def work(steps: Steps, task: tuple[list[Array], int], exact: bool) -> bool:
        (a, b, out, _), index = task
        out[:, index] = 0
        span = spans[index]
        chunked_scan.total(steps, machine.sizes, Operand(a), Operand(b), *span, out[:, index])
        return True

    tasks = [(stack, index) for stack in stacks for index in range(len(ends))]
    machine.run(tasks, work, 2 * math.prod(problem.state_shape) * problem.k_len)
    order = range(len(ends))
    for _, _, out, before in stacks:
        for index in reversed(order) if reverse else order:
            if before is not None:
                with np.errstate(all="ignore"):
                    np.add(out[:, index], before, out=out[:, index])
            before = out[:, index]
    return found


def readings(
    problem: linear_problem.Product,
    q: Array,
    k: Array,
    v: Array,
    initial: Array | None,
    ends: Array,
    *,
    reverse: bool,
) -> Array:
    """Return what row i of `q` reads from the state at ``ends[i]``, of shape problem.out_shape."""
    order = np.argsort(ends, kind="stable")
    ascending = bool((np.diff(ends) >= 0).all())
    if not ascending:
        q = q[..., order, :]
        problem = linear_problem.product_problem("prefix_state", q, k, v, initial, aligned=False)
    out = arrays.empty_laid_out(np, problem.out_shape, q, problem.dtype)
    reader = Reader(
        Side(q, problem.q, copies=True, rows=False),
        Side(out, problem.view(out.shape, out.strides), copies=True, rows=False),
        ends=ends[order],
    )
    _scan_of(problem, k, v, (reader,), reverse).run(_state(initial, problem.initial))
    found: Array = out if ascending else out[..., np.argsort(order), :]
    return found
