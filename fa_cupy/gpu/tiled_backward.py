"""Gradients of attention by batched cuBLAS products on tiles, on CuPy arrays.

Takes every dtype and head_dim, in float32 or float64 arithmetic. Columns of tiles follow on each
other on one stream, so that sums have one order, and `fa_cupy.gpu._blas` gives each stream a
workspace of its own: results are bitwise repeatable. Nothing waits for the device but one look at
the end at whether all terms are finite; if not, all is computed again `exact`
(see `fa_cupy._tiled_backward`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import cupy
import numpy as np

from fa_cupy import _check, _gradients, _stacks, _tiled_backward
from fa_cupy._gradients import Operands
from fa_cupy._masks import BitMask
from fa_cupy.gpu import _product_kernels, _steps, _tile_kernels, tiled, workspace
from fa_cupy.gpu._mask_tiles import TABLE_M, MaskTiles


def backward(
    problem: _check.Problem,
    inputs: tuple[Any, ...],
    results: tuple[Any, ...],
    need: tuple[str, ...],
    empty: Callable[..., Any],
) -> dict[str, Any]:
    """Return the gradients named by `need`, for CuPy arrays on the current device and stream.

    Parameters
    ----------
    problem : Problem
        From `fa_cupy._check.attention_problem`.
    inputs : tuple of cupy.ndarray or None
        q, k, v, bias and mask, which `problem` was made from; the mask may be a BitMask.
    results : tuple of cupy.ndarray or None
        Output and LSE, and the gradients of both; that of the LSE may be None.
    need : tuple of str
        Of "q", "k", "v" and "bias".
    empty : callable
        ``empty(shape, dtype, like)`` returns memory for a result.
    """
    dims = f"head_dim {problem.head_dim} and v_dim {problem.v_dim}"
    what = "the gradient of a bias" if "bias" in need else f"{problem.dtype} with {dims}"
    workspace.refuse_products("attention_backward", what)
    dtype = _check.sum_dtype(problem.dtype)
    grads = _gradients.gradients(cupy, problem, inputs, need, dtype, empty)
    # 16-bit inputs are exact in TF32, and weights rounded to it lose no more than to float16.
    steps = _Steps(dtype, problem.dtype.itemsize == 2)
    if problem.q_len and problem.k_len:
        arrays, views = _gradients.arrays(cupy, problem, inputs, results, grads, dtype)
        present = [view for view in views if view is not None]
        stack, tile_m = tiled._tile(problem, dtype, tiled._stack_length(present), problem.q_len)
        bits = inputs[4] if isinstance(inputs[4], BitMask) else None
        # Queries that few of a tile's keys are seen by are computed for all of them.
        tile_n = tiled._TILE_N if bits is None else TABLE_M
        stacks = [
            _gradients.operands(found, [*grads], *_gradients.sparse(bits, found, MaskTiles))
            for found in _stacks.stacks(cupy, arrays, views, stack)
        ]
        for x in stacks:
            for begin in range(0, problem.q_len, tile_m):
                _tiled_backward.prepare(steps, x, begin, min(begin + tile_m, problem.q_len))
        _columns(steps, problem, stacks, (tile_m, tile_n), exact=False)
        if steps.spoiled.get()[0]:
            for grad in grads.values():
                grad.clear()
            _columns(steps, problem, stacks, (tile_m, tile_n), exact=True)
    return {name: grad.finished(steps) for name, grad in grads.items()}


def _columns(
    steps: _Steps,
    problem: _check.Problem,
    stacks: list[Operands],
    tile: tuple[int, int],
    exact: bool,
) -> None:
    tile_m, tile_n = tile
    for x in stacks:
        for begin in range(0, problem.k_len, tile_n):
            keys = begin, min(begin + tile_n, problem.k_len)
            add = partial(_add, steps, x, keys)
            _tiled_backward.column(steps, problem, x, keys, tile_m, add, exact)


def _add(
    steps: _Steps, x: Operands, keys: tuple[int, int], name: str, rows: tuple[int, int], term: Any
) -> None:
    if term is not None:
        target = _gradients.target(x, name, rows, keys)
        _gradients.accumulate(steps, target, _gradients.reduced(target, term))


class _Steps(tiled._Steps):
    """`_tiled_backward.Steps` for CuPy arrays on the current device and stream.

    `spoiled` has one element, which is set where a term is not finite.
    """

    def __init__(self, dtype: np.dtype[Any], tf32: bool) -> None:
        super().__init__(dtype, tf32, tasks=1)

    def matmul(self, a: Any, b: Any, out: Any, add: bool = False) -> None:
        # `a` is never the caller's memory here: TF32 is for 16-bit inputs, which are converted.
        if self._tf32:
            _tile_kernels.round_to_tf32(a)
        _steps.Steps.matmul(self, a, b, out, add)

    def weigh(self, scores: Any, lse: Any) -> None:
        _tile_kernels.weigh(lse, scores.shape[-1], scores)

    def scale(self, x: Any, factor: float) -> None:
        _tile_kernels.scale(factor, x)

    def finite(self, x: Any) -> bool:
        if x.size:
            _product_kernels.mark(x, self.spoiled)
        return True  # not known before `spoiled` is read
