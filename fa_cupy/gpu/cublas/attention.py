"""Attention by batched cuBLAS products on tiles: what the dedicated kernels do not serve.

Takes every dtype and head_dim, in float32 or float64 arithmetic. Several batch entries are stacked
so that each product fills the device. Nothing waits for the device but one look at the end at
whether all results are finite (see `fa_cupy.tiled.attention`).
"""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from fa_cupy._bitmask import BitMask
from fa_cupy.core import attention_problem
from fa_cupy.gpu import workspace
from fa_cupy.gpu.cublas import blas, elementwise, row_softmax, tile_ops
from fa_cupy.gpu.cublas.mask_tiles import TABLE_M, MaskTiles, TableTile
from fa_cupy.gpu.masks.dropout import TileDropout
from fa_cupy.score.program import Operands as ScoreOperands
from fa_cupy.score.program import entries as score_entries
from fa_cupy.score.tiles import TileScore
from fa_cupy.tiled import attention as tiled_attention
from fa_cupy.tiled import batching, softcap

# Elements of the largest scratch array. A gemm reaches its full speed from about 32768 rows by 1024
# columns on; a product this size also takes longer than its launch.
_SCRATCH_SIZE = 32 << 20
# The same under a score expression, whose steps each make an array of that size, of integers with
# twice as many bytes.
_EXPRESSION_SIZE = 8 << 20
_TILE_N = 1024
# The same where every query sees every key: with fewer tiles of keys, accumulators are read and
# written less often.
_WIDE_TILE_N = 4096
# Fewest queries of a tile: below this, reading keys and values costs as much as the products.
_LEAST_M = 1024
# Most queries of a tile under a band, where scores above the diagonal are computed in vain.
_MOST_BAND_M = 2048


def attention(
    problem: attention_problem.Problem,
    q: Any,
    k: Any,
    v: Any,
    bias: Any | None,
    mask: Any | BitMask | None,
    out: Any | None,
    return_lse: bool,
    sinks: Any | None = None,
    score: ScoreOperands | None = None,
) -> tuple[Any, Any | None]:
    """Solve `problem` for CuPy arrays on the current device and stream.

    Parameters
    ----------
    problem : Problem
        From `fa_cupy.core.attention_problem.attention_problem`.
    q, k, v, bias, mask : cupy.ndarray or None
        The arrays that `problem` was made from; `mask` may be a BitMask.
    out : cupy.ndarray or None
        Array for the output; None allocates one laid out in memory as `q` is.
    return_lse : bool
        Whether the LSE is wanted.
    sinks : cupy.ndarray or None
        As the other arrays.
    score : Operands or None
        The score expression, if `problem` has one.

    Returns
    -------
    out : cupy.ndarray
        Of shape ``problem.out_shape``.
    lse : cupy.ndarray or None
        Of shape ``problem.out_shape[:-1]``: float64 for float64 input, otherwise float32.
    """
    workspace.refuse_products("attention", described(problem))
    if out is None:
        out = workspace.empty(problem.out_shape, problem.dtype, q)
    dtype = attention_problem.sum_dtype(problem.dtype)
    lse = (workspace if return_lse else cupy).empty(problem.out_shape[:-1], dtype)
    if lse.size == 0:  # however many batch entries there are
        return out, lse if return_lse else None
    out_view = attention_problem.out_view(problem, out.shape, out.strides)
    lse_view = attention_problem.out_view(problem, (*lse.shape, 1), (*lse.strides, lse.itemsize))
    dropout = problem.dropout
    numbered = score is not None or dropout is not None
    places = [*score_entries(cupy, problem.out_shape[:-2])] if numbered else []
    views = [
        problem.q, problem.k, problem.v, problem.bias, problem.mask, out_view, lse_view,
        problem.sinks, *[attention_problem.batch_view(problem, x, 1, 1) for x in places],
    ]  # fmt: skip
    present = [view for view in views if view is not None]

    bits = mask if isinstance(mask, BitMask) and problem.mask is not None else None
    most = problem.q_len if bits is None else TABLE_M
    tile_n = _tile_n(problem)
    stack, tile_m = _tile(problem, dtype, _stack_length(present), most, tile_n)
    tasks = []
    seen = mask if bits is None else bits.entries
    for x in batching.stacks(cupy, (q, k, v, bias, seen, out, lse, sinks, *places), views, stack):
        if bits is not None:
            x[4] = MaskTiles(bits, x[4][:, 0, 0])
        made = None if score is None else TileScore(cupy, score, x[8], x[9], dtype)
        dropped = None if dropout is None else TileDropout(dropout, x[8], x[9])
        operands = tiled_attention.Operands(*x[:8], score=made, dropout=dropped)
        for begin in range(0, problem.q_len, tile_m):
            rows = (begin, min(begin + tile_m, problem.q_len))
            tasks.append((operands, *rows, tile_n))
    # 16-bit inputs are exact in TF32, and weights rounded to it lose no more than weights rounded
    # to float16, so that these may use the tensor cores.
    tf32 = problem.precision == "tf32" or problem.dtype.itemsize == 2
    steps = _Steps(dtype, tf32, len(tasks))
    for task in tasks:
        tiled_attention.attend(steps, problem, *task)
    for index in np.flatnonzero(steps.spoiled.get()):
        tiled_attention.attend_exactly(steps, problem, *tasks[index])
    return out, lse if return_lse else None


def described(problem: attention_problem.Problem) -> str:
    """Return what it is in a problem that no kernel serves, for a message."""
    more = "" if problem.precision is None else f", precision {problem.precision!r}"
    more += "" if problem.score is None else " and a score"
    dims = f"head_dim {problem.head_dim}, v_dim {problem.v_dim}"
    return f"{problem.dtype} with {problem.q_len} queries, {dims}{more}"


def _stack_length(views: list[attention_problem.View]) -> int:
    return batching.merged(views[0].shape[:-2], [v.strides[:-2] for v in views]).shape[-1]


def _tile_n(problem: attention_problem.Problem) -> int:
    """Return the keys of a tile."""
    sparse = problem.mask is not None or _is_banded(problem)
    # Of few queries many entries are stacked, and keys and values of all of them may be copied.
    narrow = sparse or problem.score is not None or problem.q_len < _LEAST_M
    return _TILE_N if narrow else _WIDE_TILE_N


def _is_banded(problem: attention_problem.Problem) -> bool:
    return problem.lower is not None or problem.upper is not None


def _tile(
    problem: attention_problem.Problem,
    dtype: np.dtype[Any],
    entries: int,
    most: int,
    tile_n: int,
) -> tuple[int, int]:
    """Return how many batch entries to stack, of at most `entries`, and tile_m, at most `most`."""
    keys = min(tile_n, max(problem.k_len, _TILE_N))
    widest = max(keys, problem.head_dim, problem.v_dim)
    scratch = _SCRATCH_SIZE if problem.score is None else _EXPRESSION_SIZE
    rows = max(1, scratch // widest)
    most = min(most, problem.q_len, _MOST_BAND_M if _is_banded(problem) else most)
    tile_m = max(1, min(most, rows, max(_LEAST_M, rows // max(1, entries))))
    return max(1, rows // tile_m), tile_m


class _Steps(tile_ops.Steps):
    """`tiled.attention.Steps` for CuPy arrays on the current device and stream.

    `spoiled` has one element for each row of tiles in turn, which is set where a result is not
    finite.
    """

    def __init__(self, dtype: np.dtype[Any], tf32: bool, tasks: int) -> None:
        super().__init__(dtype, tf32)
        self.spoiled = cupy.zeros(tasks, np.int32)
        self._finished = 0

    def queries(self, q: Any, factor: float) -> tuple[Any, float]:
        return self.operand("q", q), factor

    def scores(self, queries: tuple[Any, float], first: int, k: Any, out: Any) -> None:
        q, factor = queries
        # For a factor of 0 cuBLAS would not look at the product, and 0 * NaN is NaN. Of few rows it
        # multiplies queries by the factor first, which can make them infinite if it is above 1.
        fits = 0 < abs(factor) <= 1 and softcap.folds(factor)
        now, later = (factor, 1.0) if fits else (1.0, factor)
        blas.matmul(self._blas, q[:, first:], k, out, transposed=True, factor=now)
        if later != 1:
            elementwise.scale(later, out)

    def matmul(self, a: Any, b: Any, out: Any, add: bool = False) -> None:
        if self._tf32:
            elementwise.round_to_tf32(a)
        blas.matmul(self._blas, a, b, out, transposed=False, add=add)

    def add_bias(self, scores: Any, bias: Any) -> None:
        if bias.dtype == attention_problem.BFLOAT16:
            bias = elementwise.from_bfloat16(bias.view(np.uint16))
        elif bias.dtype.itemsize > scores.dtype.itemsize:
            bias = softcap.in_range(cupy, bias, scores.dtype)
        cupy.add(scores, bias, out=scores, casting="unsafe")

    def hidden(self, mask: Any) -> bool:
        return isinstance(mask, TableTile) and mask.empty

    def mask_scores(self, scores: Any, mask: Any) -> None:
        if isinstance(mask, TableTile):
            mask.hide(scores)
        else:
            elementwise.mask_scores(mask, scores)

    def band_scores(self, scores: Any, shift: int, lower: int | None, upper: int | None) -> None:
        _, m, n = scores.shape
        least = -m if lower is None else lower - shift
        most = n if upper is None else upper - shift
        elementwise.band_scores(m, n, least, most, scores)

    def softmax(self, rows: tiled_attention.Rows, scores: Any) -> None:
        decay = self.scratch("decay", rows.top.shape)
        row_softmax.row_softmax(scores, rows.top, rows.total, decay, rows.started)
        if rows.started:
            elementwise.scale_rows(decay, rows.acc.shape[-1], rows.acc)
        rows.started = True

    def finish(self, rows: tiled_attention.Rows, out: Any, lse: Any) -> bool:
        elementwise.close_rows(rows.top, rows.total, lse)
        flag = self.spoiled[self._finished : self._finished + 1]
        self._finished += 1
        if rows.acc.size:
            elementwise.divide_rows(rows.total, rows.acc.shape[-1], rows.acc, flag)
            self.store(out, rows.acc)
        return True  # not known before `spoiled` is read
