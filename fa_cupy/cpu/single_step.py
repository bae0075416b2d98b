"""Causal products of one row, as a stream that comes row by row makes them.

A product of one row takes a few microseconds, less than what goes before it in general: checks,
views of arrays, chunks, tasks. So a call of a kind that was seen before gets by without them, and
all its batch entries are computed by a few operations at once::

    state = initial + k.mT @ v
    out = q @ state
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from fa_cupy.core import arrays, linear_problem
from fa_cupy.cpu import blas, feature_maps

Array = npt.NDArray[Any]
Result = tuple[Array, Array]

# Multiplications beyond which the work is worth several threads.
_MOST = 5_000_000
_MOST_STEPS = 1024
_steps: dict[Any, Step] = {}


class Step:
    """Calls of one kind: of arrays of one dtype, shapes and strides, with the same options."""

    def __init__(
        self, problem: linear_problem.Product, q: Array, k: Array, feature: str | None,
        eps: float | None,
    ) -> None:  # fmt: skip
        self._dtype = problem.state_dtype
        self._entries = math.prod(k.shape[:-2])
        self._copies = math.prod(problem.out_shape[:-2]) // self._entries
        self._dims = problem.qk_dim, problem.v_dim
        self._feature = None if feature is None else feature_maps.IN_PLACE[feature]
        self._eps = None if eps is None else problem.state_dtype.type(eps)
        self._out_shape, self._state_shape = problem.out_shape, problem.state_shape
        self._out_dtype = problem.dtype
        order = arrays.memory_order(problem.out_shape, q)
        self._memory = [problem.out_shape[axis] for axis in order]
        self._axes = [order.index(axis) for axis in range(len(order))]
        # Whether the output lies in memory as it is computed.
        self._direct = problem.dtype == problem.state_dtype and order == [*range(len(order))]
        size = problem.qk_dim * problem.state_shape[-1]
        # Products that NumPy's library would spread over threads; see `blas`.
        self._large = self._copies * size > (blas.SERIAL if self._copies > 1 else blas.SERIAL_SUMS)

    def __call__(self, q: Array, k: Array, v: Array, initial: Array | None, out: Any) -> Result:
        """Return the output, which is `out` where that is given, and the state."""
        n, copies, (dim, cols) = self._entries, self._copies, self._dims
        with np.errstate(all="ignore"):
            size = n * copies * dim
            rows = np.empty(size + n * dim, self._dtype)
            x, y = rows[:size], rows[size:]
            np.copyto(x.reshape(q.shape), q, casting="unsafe")
            np.copyto(y.reshape(k.shape), k, casting="unsafe")
            if self._feature is not None:
                self._feature(rows)
            values = np.empty((n, 1, self._state_shape[-1]), self._dtype)
            np.copyto(values[..., :cols], v.reshape(n, 1, cols), casting="unsafe")
            if self._eps is not None:
                values[..., cols] = 1
            state = np.empty((n, dim, values.shape[2]), self._dtype)
            keys = y.reshape(n, dim, 1)
            if not blas.matmul(keys, values, state, False):
                np.multiply(keys, values, out=state)
            last = state.reshape(self._state_shape)
            if initial is not None:
                np.add(last, initial, out=last)
            return self._read(x.reshape(n, copies, dim), state, out), last

    def _read(self, x: Array, state: Array, out: Array | None) -> Array:
        """Return what rows find in the state, normalised if that is wanted."""
        found = np.empty((x.shape[0], x.shape[1], state.shape[2]), self._dtype)
        if not (self._large and blas.matmul(x, state, found, False)):
            np.matmul(x, state, out=found)
        if self._eps is not None:
            weights = found[..., -1:]
            np.add(weights, self._eps, out=weights)
            found = np.divide(found[..., :-1], weights)
        result = found.reshape(self._out_shape)
        if out is None:
            if self._direct:
                return result
            out = np.empty(self._memory, self._out_dtype).transpose(self._axes)
        np.copyto(out, result, casting="unsafe")
        return out


def step_for(
    problem: linear_problem.Product, q: Array, k: Array, v: Array, initial: Array | None, *,
    feature: str | None = None, eps: float | None = None,
) -> Step | None:  # fmt: skip
    """Return what does a call; None where it has more rows than one, or is another matter.

    Parameters
    ----------
    problem : Product
    q, k, v, initial : numpy.ndarray or None for the last
        The arrays that it was made from.
    feature : str or None
        Name of a feature map.
    eps : float or None
        Added to the sum of weights that the output is divided by; None for no division.
    """
    if problem.q_len != 1 or problem.k_len != 1:
        return None
    batch, own = problem.out_shape[:-2], k.shape[:-2]
    work = math.prod((*batch, problem.qk_dim, problem.v_dim))
    if not 0 < work <= _MOST or any(x.shape[:-2] != own for x in (v, initial) if x is not None):
        return None
    # Queries of one state follow each other: there is one of each, or they are a group of heads.
    if q.shape[:-2] != batch or len(own) != len(batch) or own[:-1] != batch[:-1]:
        return None
    return Step(problem, q, k, feature, eps)


def key_of(q: Any, k: Any, v: Any, initial: Any, *options: Any) -> Any:
    """Return what a call looks like; None if it is none of one row of NumPy arrays."""
    if not (type(k) is type(v) is type(q) is np.ndarray and q.shape[-2:-1] == (1,)):
        return None
    facts = q.shape, q.strides, q.dtype, k.shape, k.dtype, v.shape, v.dtype
    if initial is None:
        return facts, options
    if type(initial) is not np.ndarray:
        return None
    return facts, initial.shape, initial.dtype, options


def remember(key: Any, step: Step) -> None:
    """Keep `step` for calls that look like `key`."""
    if key is not None:
        if len(_steps) >= _MOST_STEPS:
            _steps.clear()
        _steps[key] = step


lookup: Callable[[Any], Step | None] = _steps.get
