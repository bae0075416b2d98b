"""Attention of small problems: the formula straight through, all batch entries in one tile.

A tile of the tiled algorithm costs a hundred calls of functions, whatever its size. Here it costs
twenty, and a softmax that is not online. What the formula gets wrong is never finite, so that one
look at the output says whether the tiled algorithm has to compute it again.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from fa_cupy.core.attention_problem import Problem, View
from fa_cupy.cpu import thread_pool, wide_rows
from fa_cupy.cpu.tile_ops import Steps, band_limits, exact, row_maxima
from fa_cupy.tiled import batching

Array = npt.NDArray[Any]

# Most keys, most scores of a batch entry, the same where a band hides some, and most of those that
# are stacked.
_MOST_KEYS = 512
_MOST_SCORES, _MOST_IN_BAND = 1 << 18, 1 << 14
_STACKED_SCORES = 1 << 17
# So many stacks are enough for threads.
_LEAST_STACKS = 4
# A factor of products within these bounds: a product that overflows is then so far from every other
# one that it has no weight, or all of the row, and one that underflows changes no score. Where only
# a part of its sum overflows, the score is lost, as it is in tiles.
_LEAST_FACTOR, _MOST_FACTOR = 2.0**-20, 2.0**20


def suits(problem: Problem, dtype: np.dtype[Any], parallel: bool) -> bool:
    """Whether `OneTile` solves a problem, whose sums are of `dtype`.

    Its arrays are dense, in compute dtype and without heads that share keys, and its scores are
    products under a band. Where threads share the work, stacks suffice for that.
    """
    p = problem
    if parallel and len(_stacks(p)) < _LEAST_STACKS:
        return False
    most = _MOST_SCORES if p.lower is p.upper is None else _MOST_IN_BAND
    if not (
        p.k_len <= _MOST_KEYS
        and 0 < p.q_len * p.k_len <= most
        and p.head_dim
        and p.v_dim
        and p.dtype == dtype
    ):
        return False
    other = p.bias, p.mask, p.sinks, p.score, p.dropout, p.k_lengths, p.pages, p.offsets
    if p.softcap or any(x is not None for x in other):
        return False
    if not _LEAST_FACTOR <= abs(p.scale) <= _MOST_FACTOR:
        return False
    if wide_rows.suits(p):
        return False
    return all(_is_packed(view, dtype) for view in (p.q, p.k, p.v))


def _is_packed(view: View, dtype: np.dtype[Any]) -> bool:
    """Whether a view has each element once, without gaps, in C order."""
    steps = (stride for n, stride in zip(*view, strict=True) if n > 1)
    return batching.is_dense(view) and min(steps, default=dtype.itemsize) == dtype.itemsize


def _stacks(p: Problem) -> list[slice]:
    """Return which batch entries are computed together."""
    step = max(1, _STACKED_SCORES // max(1, p.q_len * p.k_len))
    return [slice(begin, begin + step) for begin in range(0, math.prod(p.batch), step)]


class OneTile:
    """A kind of call that `suits`.

    Parameters
    ----------
    problem : Problem
    dtype : numpy.dtype
        Of sums.
    parallel : bool
        Whether threads share the stacks of batch entries.
    """

    def __init__(self, problem: Problem, dtype: np.dtype[Any], parallel: bool) -> None:
        p = problem
        self._dtype, self._parallel = dtype, parallel
        n = math.prod(p.batch)
        self._shapes = (
            (n, p.q_len, p.head_dim), (n, p.k_len, p.head_dim), (n, p.k_len, p.v_dim),
            (n, p.q_len, p.v_dim), (n, p.q_len, 1),
        )  # fmt: skip
        self._stacks = _stacks(p)
        self._factor = exact(p.scale, dtype)
        self._limits: Array | None = None
        if p.lower is not None or p.upper is not None:
            self._limits = band_limits(dtype, p.q_len, p.k_len, p.lower, p.upper)

    def attend(self, q: Array, k: Array, v: Array, out: Array, lse: Array) -> bool:
        """Set output, of any strides, and LSE; return whether they are right."""
        if not out.flags.c_contiguous:
            dense = np.empty(out.shape, self._dtype)
            right = self.attend(q, k, v, dense, lse)
            np.copyto(out, dense)
            return right
        arrays = zip((q, k, v, out, lse), self._shapes, strict=True)
        seen = [x.reshape(shape) for x, shape in arrays]
        alone = len(self._stacks) == 1
        wrong: list[slice] = []

        def work(stack: slice) -> None:
            if not self._attend(*(seen if alone else [x[stack] for x in seen])):
                wrong.append(stack)

        thread_pool.run(self._stacks, lambda: work, self._parallel)
        return not wrong

    def _attend(self, q: Array, k: Array, v: Array, out: Array, lse: Array) -> bool:
        steps = Steps.unused(self._dtype)
        scores = steps.scratch("scores", (*q.shape[:2], k.shape[1]))
        top = steps.scratch("top", lse.shape)
        total = steps.scratch("total", lse.shape)
        with np.errstate(all="ignore"):
            steps.matmul(q, k.swapaxes(1, 2), scores)
            np.multiply(scores, self._factor, out=scores, casting="unsafe")
            if self._limits is not None:
                np.fmin(scores, self._limits, out=scores)
            row_maxima(scores, top)
            np.subtract(scores, top, out=scores)
            np.exp(scores, out=scores)
            steps.sum_rows(scores, total)
            steps.matmul(scores, v, out)
            np.divide(out, total, out=out)
            np.log(total, out=total)
            np.add(top, total, out=lse)
        steps.keep()
        return steps.finite(out)
