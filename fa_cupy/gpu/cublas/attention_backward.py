"""Gradients of attention by batched cuBLAS products on tiles, on CuPy arrays.

Takes every dtype and head_dim, in float32 or float64 arithmetic. Columns of tiles follow on each
other on one stream, so that sums have one order, and `fa_cupy.gpu.cublas.blas` gives each stream a
workspace of its own: results are bitwise repeatable. Nothing waits for the device but one look at
the end at whether all terms are finite; if not, all is computed again `exact`. It also says whether
there are far rows, which are computed again with maximum and sum of their weights kept apart (see
`fa_cupy.tiled.attention_backward`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import cupy
import numpy as np

from fa_cupy._bitmask import BitMask
from fa_cupy.core import attention_problem
from fa_cupy.gpu import workspace
from fa_cupy.gpu.cublas import attention, elementwise, linear_elementwise, tile_ops
from fa_cupy.gpu.cublas.mask_tiles import TABLE_M, MaskTiles
from fa_cupy.gpu.masks.dropout import TileDropout
from fa_cupy.score.program import Operands as ScoreOperands
from fa_cupy.score.tiles import TileScore
from fa_cupy.tiled import attention_backward, batching, gradients
from fa_cupy.tiled.gradients import Operands


def backward(
    problem: attention_problem.Problem,
    inputs: tuple[Any, ...],
    results: tuple[Any, ...],
    need: tuple[str, ...],
    empty: Callable[..., Any],
    sinks: Any = None,
    score: ScoreOperands | None = None,
) -> dict[str, Any]:
    """Return the gradients named by `need`, for CuPy arrays on the current device and stream.

    Parameters
    ----------
    problem : Problem
        From `fa_cupy.core.attention_problem.attention_problem`.
    inputs : tuple of cupy.ndarray or None
        q, k, v, bias and mask, which `problem` was made from; the mask may be a BitMask.
    results : tuple of cupy.ndarray or None
        Output and LSE, and the gradients of both; that of the LSE may be None.
    need : tuple of str
        Of "q", "k", "v", "bias", "sinks" and, as "score.x", the arrays of a score.
    empty : callable
        ``empty(shape, dtype, like)`` returns memory for a result.
    sinks : cupy.ndarray or None
    score : Operands or None
        The score expression, if `problem` has one.
    """
    refuse(problem, need)
    dtype = attention_problem.sum_dtype(problem.dtype)
    grads = gradients.gradients(cupy, problem, inputs, need, dtype, empty, sinks, score)
    # 16-bit inputs are exact in TF32, and weights rounded to it lose no more than to float16.
    steps = _Steps(dtype, problem.dtype.itemsize == 2)
    if problem.q_len and (problem.k_len or "sinks" in need):
        inputs = inputs if problem.k_len else (*inputs[:4], None)  # no key is hidden
        entries = gradients.batch_entries(cupy, problem, inputs[4], score)
        seen = [grad.view for grad in grads.values()]
        views = gradients.views(problem, inputs, results, seen, dtype, entries)
        arrays = gradients.arrays(cupy, inputs, results, grads, dtype, sinks, entries)
        present = [view for view in views if view is not None]
        bits = inputs[4] if isinstance(inputs[4], BitMask) else None
        # Queries that few of a tile's keys are seen by are computed for all of them.
        tile_n = attention._tile_n(problem) if bits is None else TABLE_M
        entries_of = attention._stack_length(present)
        stack, tile_m = attention._tile(problem, dtype, entries_of, problem.q_len, tile_n)
        of = None if score is None else partial(_tile_score, score, dtype)
        dropped = None if problem.dropout is None else partial(TileDropout, problem.dropout)
        stacks = []
        for found in batching.stacks(cupy, arrays, views, stack):
            sparse = gradients.sparse(bits, found, MaskTiles)
            x = gradients.operands(found, [*grads], *sparse, score=of, dropout=dropped)
            stacks.append(x)
        for x in stacks:
            for rows in _bounds(problem.q_len, tile_m):
                attention_backward.prepare(steps, x, *rows)
        if results[1].size:
            least = attention_backward.least_far(problem)
            elementwise.mark_far(results[1], least, steps.spoiled)
        _columns(steps, problem, stacks, (tile_m, tile_n), exact=False)
        spoiled, far = steps.spoiled.get().tolist()
        if far:
            stacks = [_kept_apart(steps, problem, x, (tile_m, tile_n)) for x in stacks]
            spoiled = _again(steps, problem, stacks, (tile_m, tile_n), grads, exact=False)
        if spoiled:
            _again(steps, problem, stacks, (tile_m, tile_n), grads, exact=True)
        for x in stacks:
            attention_backward.add_to_sinks(steps, x)
    return gradients.finished(steps, need, grads, empty, score)


def refuse(problem: attention_problem.Problem, need: tuple[str, ...]) -> None:
    """Raise, before anything is launched, if the stream is captured: products cannot be."""
    what = attention.described(problem)
    if any(name.startswith("score.") for name in need):
        what = "the gradient of an array of a score"
    workspace.refuse_products("attention_backward", what)


def _tile_score(score: ScoreOperands, dtype: np.dtype[Any], b: Any, h: Any) -> TileScore:
    return TileScore(cupy, score, b, h, dtype)


def _kept_apart(
    steps: _Steps, problem: attention_problem.Problem, x: Operands, tile: tuple[int, int]
) -> Operands:
    """Return a stack with maxima and sums of its far rows."""
    tile_m, tile_n = tile
    x, far = attention_backward.far_rows(steps, problem, x, tile_m)
    columns = [*_bounds(problem.k_len, tile_n)]
    for rows in far:
        attention_backward.keep_apart(steps, problem, x, rows, columns, tile_m)
    return x


def _again(
    steps: _Steps,
    problem: attention_problem.Problem,
    stacks: list[Operands],
    tile: tuple[int, int],
    grads: dict[str, gradients.Gradient],
    exact: bool,
) -> bool:
    """Compute all columns from the start, and return whether a term was not finite."""
    for grad in grads.values():
        grad.clear()
    steps.spoiled.fill(0)
    _columns(steps, problem, stacks, tile, exact)
    return bool(steps.spoiled.get()[0])


def _bounds(length: int, size: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, length, size):
        yield begin, min(begin + size, length)


def _columns(
    steps: _Steps,
    problem: attention_problem.Problem,
    stacks: list[Operands],
    tile: tuple[int, int],
    exact: bool,
) -> None:
    tile_m, tile_n = tile
    for x in stacks:
        for keys in _bounds(problem.k_len, tile_n):
            add = partial(gradients.add, steps, x, keys)
            attention_backward.column(steps, problem, x, keys, tile_m, add, exact)


class _Steps(attention._Steps):
    """`tiled.attention_backward.Steps` for CuPy arrays on the current device and stream.

    `spoiled` has two elements: set where a term is not finite, and where a row is far.
    """

    def __init__(self, dtype: np.dtype[Any], tf32: bool) -> None:
        super().__init__(dtype, tf32, tasks=2)

    def matmul(self, a: Any, b: Any, out: Any, add: bool = False) -> None:
        # `a` is never the caller's memory here: TF32 is for 16-bit inputs, which are converted.
        if self._tf32:
            elementwise.round_to_tf32(a)
        tile_ops.Steps.matmul(self, a, b, out, add)

    def weigh(self, scores: Any, top: Any, total: Any | None) -> None:
        elementwise.weigh(top, scores.shape[-1], scores)
        if total is not None:
            cupy.divide(scores, total, out=scores)

    def weigh_pairs(
        self, scores: Any, top: Any, total: Any | None, dscores: Any, base: Any
    ) -> None:
        divides = total is not None
        sums = total if divides else top  # an array that is not read
        elementwise.weigh_pairs(top, sums, divides, base, scores.shape[-1], scores, dscores)

    def scale(self, x: Any, factor: float) -> None:
        elementwise.scale(factor, x)

    def finite(self, x: Any) -> bool:
        if x.size:
            linear_elementwise.mark(x, self.spoiled)
        return True  # not known before `spoiled` is read
