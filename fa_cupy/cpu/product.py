"""Causal products on NumPy arrays, as scans over their rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from fa_cupy import _arrays, _product
from fa_cupy.cpu import _features, _scan, _threads
from fa_cupy.cpu._scan import Operand
from fa_cupy.cpu._segments import (
    NOTHING,
    PARALLEL_FLOP,
    Gradient,
    Reader,
    Scan,
    Side,
    stacks_of,
    summed,
)
from fa_cupy.cpu._steps import Steps

Array = npt.NDArray[Any]


def product(
    problem: _product.Product,
    q: Array,
    k: Array,
    v: Array,
    initial: Array | None,
    out: Array | None,
    *,
    reverse: bool,
    return_state: bool,
    algorithm: str = "chunked",
    ends: Array | None = None,
) -> tuple[Array, Array | None]:
    """Solve `problem` for NumPy arrays.

    Parameters
    ----------
    problem : Product
        From `fa_cupy._product.product_problem`.
    q, k, v, initial : numpy.ndarray or None
        The arrays that `problem` was made from.
    out : numpy.ndarray or None
        Array for the output; None allocates one laid out in memory as `q` is.
    reverse, return_state : bool
    algorithm : str
        Checked already; there is one here.
    ends : numpy.ndarray of int, optional
        In ascending order, the position that each row of `q` reads at; its own by default.

    Returns
    -------
    out : numpy.ndarray
        Of shape ``problem.out_shape``.
    state : numpy.ndarray or None
        Of shape ``problem.state_shape``.
    """
    assert problem.q is not None
    if out is None:
        out = _arrays.empty_laid_out(np, problem.out_shape, q, problem.dtype)
    state = np.empty(problem.state_shape, problem.state_dtype) if return_state else None
    reader = Reader(
        Side(q, problem.q, copies=True, rows=ends is None),
        Side(out, problem.view(out.shape, out.strides), copies=True, rows=ends is None),
        ends=ends,
    )
    scan = Scan(problem, Side(k, problem.k), Side(v, problem.v), (reader,), reverse)
    scan.run(Side(initial, problem.initial, rows=False), state)
    return out, state


def linear_attention(
    problem: _product.Product,
    q: Array,
    k: Array,
    v: Array,
    out: Array | None,
    *,
    feature: str | None,
    eps: float,
) -> Array:
    """Solve `problem`, and divide by the sums of the weights.

    `feature` names the feature map of q and k; None leaves them as they are.
    """
    assert problem.q is not None
    if out is None:
        out = _arrays.empty_laid_out(np, problem.out_shape, q, problem.dtype)

    def normalised(sums: Array) -> Array:
        weighted, weights = sums[..., :-1], sums[..., -1:]
        np.add(weights, sums.dtype.type(eps), out=weights)
        np.divide(weighted, weights, out=weighted)
        return weighted

    apply = None if feature is None else _features.IN_PLACE[feature]
    reader = Reader(
        Side(q, problem.q, copies=True, feature=apply),
        Side(out, problem.view(out.shape, out.strides), copies=True),
        finish=normalised,
    )
    keys, values = Side(k, problem.k, feature=apply), Side(v, problem.v, ones=True)
    Scan(problem, keys, values, (reader,), reverse=False).run(NOTHING)
    return out


def backward(
    problem: _product.Product,
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
    assert problem.q is not None
    # With the batch axes of the output, or of the states; summed to those of the inputs at the end.
    dq = Gradient(q, (*problem.out_shape[:-1], problem.qk_dim), problem, copies=True)
    rows = (*problem.state_shape[:-2], problem.k_len)
    dk = Gradient(k, (*rows, problem.qk_dim), problem, copies=False)
    dv = Gradient(v, (*rows, problem.v_dim), problem, copies=False)
    grads = Side(dout, problem.view(dout.shape, dout.strides), copies=True)
    queries = Side(q, problem.q, copies=True)
    keys, values = Side(k, problem.k), Side(v, problem.v)

    reader = Reader(grads, dq.side, flipped=True)
    scan = Scan(problem, keys, values, (reader,), reverse)
    scan.run(Side(initial, problem.initial, rows=False))

    readers = (Reader(values, dk.side, flipped=True), Reader(keys, dv.side))
    scan = Scan(problem, queries, grads, readers, not reverse)
    first = None if dstate is None else problem.view(dstate.shape, dstate.strides)
    last = None if initial is None else np.empty(problem.state_shape, problem.state_dtype)
    scan.run(Side(dstate, first, rows=False), last)
    dinitial = None if last is None or initial is None else summed(last, initial.shape)
    return dq.finished(), dk.finished(), dv.finished(), dinitial


def states(
    problem: _product.Product,
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
        Side(initial, problem.initial, rows=False),
    ]
    stacks = [*stacks_of(problem, sides)]

    def new_worker() -> Callable[[tuple[list[Array], int]], None]:
        steps = Steps(problem.state_dtype)

        def work(task: tuple[list[Array], int]) -> None:
            (a, b, out, _), index = task
            out[:, index] = 0
            with np.errstate(all="ignore"):
                _scan.total(steps, Operand(a), Operand(b), *spans[index], out[:, index])

        return work

    tasks = [(stack, index) for stack in stacks for index in range(len(ends))]
    flop = 2 * math.prod(problem.state_shape) * problem.k_len
    _threads.run(tasks, new_worker, parallel=flop > PARALLEL_FLOP)
    order = range(len(ends))
    for _, _, out, before in stacks:
        for index in reversed(order) if reverse else order:
            if before is not None:
                with np.errstate(all="ignore"):
                    np.add(out[:, index], before, out=out[:, index])
            before = out[:, index]
    return found
