"""Causal products of one row, as a stream that comes row by row makes them.

A product of one row takes a few microseconds, less than views of arrays, chunks and tasks. So the
plan of such calls computes all batch entries by a few operations at once::

    state = initial + k.mT @ v
    out = q @ state
"""

from __future__ import annotations

import functools
import math
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from fa_cupy.core import arrays, linear_problem
from fa_cupy.cpu import blas
from fa_cupy.cpu.products import feature_maps

Array = npt.NDArray[Any]
Result = tuple[Array, Array]
Sizes = tuple[int, ...]

# Multiplications beyond which the work is worth several threads.
_MOST = 5_000_000
# Numbers beyond which scratch memory is not kept between calls, and how many plans keep any.
_MOST_KEPT = 16_384
_MOST_KEEPERS = 256


class _Scratch:
    """Memory for the features and values of one call, and all views of it that a call needs."""

    __slots__ = ("found", "k", "multiply", "q", "rows", "v", "weighted", "weights", "x")

    def __init__(
        self, dtype: np.dtype[Any], q: Sizes, k: Sizes, v: Sizes, copies: int, cols: int
    ) -> None:
        n, dim = math.prod(k[:-2]), k[-1]
        self.rows = np.empty(math.prod(q) + math.prod(k), dtype)
        x, y = self.rows[: math.prod(q)], self.rows[math.prod(q) :]
        self.q, self.k = x.reshape(q), y.reshape(k)
        self.x = x.reshape(n, copies, dim)
        values = np.ones((n, 1, cols), dtype)
        self.v = values.reshape(*v[:-1], cols)[..., : v[-1]]
        self.multiply = blas.outer_products(y.reshape(n, dim, 1), values)
        self.found = np.empty((n, copies, cols), dtype)
        self.weighted, self.weights = self.found[..., :-1], self.found[..., -1:]


# What those plans keep, the oldest first.
_keepers: deque[list[_Scratch]] = deque()


class Step:
    """Calls of one kind: of arrays of one dtype, shapes and strides, with the same options."""

    def __init__(
        self, problem: linear_problem.Product, q: Array, k: Array, v: Array, feature: str | None,
        eps: float | None,
    ) -> None:  # fmt: skip
        self._dtype = dtype = problem.state_dtype
        n, (dim, cols) = math.prod(k.shape[:-2]), problem.state_shape[-2:]
        copies = math.prod(problem.out_shape[:-2]) // n
        self._new_scratch = functools.partial(
            _Scratch, dtype, q.shape, k.shape, v.shape, copies, cols
        )
        self._kept: list[_Scratch] = []  # not in use by a call now
        self._keeps = n * (copies + 1) * (dim + cols) <= _MOST_KEPT
        self._feature = None if feature is None else feature_maps.IN_PLACE[feature]
        # As an array: ufuncs take it in half the time of a number.
        with np.errstate(all="ignore"):
            self._eps = None if eps is None else np.array(eps, dtype)
        # Products that NumPy's library would spread over threads; see `blas`.
        self._large = copies * dim * cols > (blas.SERIAL if copies > 1 else blas.SERIAL_SUMS)
        self._memory, self._state_shape = (n, dim, cols), problem.state_shape
        order = arrays.memory_order(problem.out_shape, q)
        self._out_shape, self._out_dtype = problem.out_shape, problem.dtype
        self._out_memory = [problem.out_shape[axis] for axis in order]
        self._axes = [order.index(axis) for axis in range(len(order))]
        # Whether the output lies in memory as it is computed.
        self._direct = problem.dtype == dtype and order == [*range(len(order))]

    def __call__(
        self, q: Array, k: Array, v: Array, initial: Array | None, out: Any, *unused: bool
    ) -> Result:
        """Return the output, which is `out` where that is given, and the state."""
        try:
            scratch = self._kept.pop()  # no other thread gets it
        except IndexError:
            scratch = self._new_scratch()
            if self._keeps:
                _keepers.append(self._kept)
                if len(_keepers) > _MOST_KEEPERS:
                    _keepers.popleft().clear()
        with np.errstate(all="ignore"):
            scratch.q[...] = q
            scratch.k[...] = k
            scratch.v[...] = v
            if self._feature is not None:
                self._feature(scratch.rows)
            state = np.empty(self._memory, self._dtype)
            scratch.multiply(state)
            last = state.reshape(self._state_shape)
            if initial is not None:
                np.add(last, initial, last)
            found = self._read(scratch, state).reshape(self._out_shape)
            if out is None and self._direct:
                out = found
            else:
                if out is None:
                    out = np.empty(self._out_memory, self._out_dtype).transpose(self._axes)
                np.copyto(out, found, casting="unsafe")
        if self._keeps:
            self._kept.append(scratch)
        return out, last

    def _read(self, scratch: _Scratch, state: Array) -> Array:
        """Return what rows find in the state, normalised if that is wanted, in new memory."""
        found = np.empty_like(scratch.found) if self._eps is None else scratch.found
        if not (self._large and blas.matmul(scratch.x, state, found, False)):
            np.matmul(scratch.x, state, found)
        if self._eps is None:
            return found
        np.add(scratch.weights, self._eps, scratch.weights)
        quotient: Array = np.divide(scratch.weighted, scratch.weights)
        return quotient

    @staticmethod
    def takes(out: Any) -> bool:
        """Whether the output can be written there."""
        return True


def step_for(
    problem: linear_problem.Product, q: Array, k: Array, v: Array, feature: str | None,
    eps: float | None,
) -> Step | None:  # fmt: skip
    """Return what does a call of one row; None where that is much work."""
    work = math.prod((*problem.out_shape[:-2], problem.qk_dim, problem.v_dim))
    return Step(problem, q, k, v, feature, eps) if work <= _MOST else None
