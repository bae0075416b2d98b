"""Exact attention on NumPy arrays: the tiled algorithm, spread over threads."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fa_cupy._bitmask import BitMask
from fa_cupy.core import arrays as core_arrays
from fa_cupy.core import attention_problem
from fa_cupy.core.sparse_bias import SparseBias
from fa_cupy.cpu import thread_pool
from fa_cupy.cpu.masks import rows as mask_rows
from fa_cupy.cpu.masks.entries import dense_of
from fa_cupy.cpu.masks.thin import Pairs
from fa_cupy.cpu.masks.tiles import MaskTiles
from fa_cupy.cpu.tile_ops import Steps
from fa_cupy.score.program import Operands as ScoreOperands
from fa_cupy.score.program import entries as score_entries
from fa_cupy.score.tiles import TileScore
from fa_cupy.tiled import attention as tiled_attention
from fa_cupy.tiled import batching, tile_sizes

Array = npt.NDArray[Any]

# Work below this runs in the calling thread: starting a thread costs about 0.1 ms.
_PARALLEL_FLOP = 2e7
# Most queries of a tile: more would compute more scores above the diagonal in vain.
_MOST_M = 512
# Small problems are split into this many tasks where that leaves tiles of so many queries. Both
# are fixed, so that results do not depend on the number of threads.
_LEAST_TASKS = 16
_LEAST_M = 64
# Float16 keys and values are converted once per batch entry up to this many bytes of float32, and
# once per tile beyond.
_CONVERTED_BYTES = 64 << 20


def attention(
    problem: attention_problem.Problem,
    q: Array,
    k: Array,
    v: Array,
    bias: Array | SparseBias | None,
    mask: Array | BitMask | None,
    out: Array | None,
    return_lse: bool,
    sinks: Array | None = None,
    score: ScoreOperands | None = None,
) -> tuple[Array, Array | None]:
    """Solve `problem` for NumPy arrays.

    Parameters
    ----------
    problem : Problem
        From `fa_cupy.core.attention_problem.attention_problem`.
    q, k, v, bias, mask : numpy.ndarray or None
        The arrays that `problem` was made from; `mask` may be a BitMask, `bias` a SparseBias.
    out : numpy.ndarray or None
        Array for the output; None allocates one laid out in memory as `q` is.
    return_lse : bool
        Whether the LSE is wanted.
    sinks : numpy.ndarray or None
        As the other arrays.
    score : Operands or None
        The score expression, if `problem` has one.

    Returns
    -------
    out : numpy.ndarray
        Of shape ``problem.out_shape``.
    lse : numpy.ndarray or None
        Of shape ``problem.out_shape[:-1]``: float64 for float64 input, otherwise float32.
    """
    dtype = attention_problem.sum_dtype(problem.dtype)
    if out is None:
        out = core_arrays.empty_like_layout(np, problem, q, problem.dtype)
    lse = np.empty(problem.out_shape[:-1], dtype)
    if lse.size == 0:  # however many batch entries there are
        return out, lse if return_lse else None
    if isinstance(mask, BitMask) and problem.mask is not None and mask._grid.is_small:
        mask = mask_rows.of_small(mask)
        seen = attention_problem.batch_view(problem, mask, problem.q_len, problem.k_len)
        problem = replace(problem, mask=seen)
    tile = _tile(problem, dtype)
    if isinstance(mask, BitMask):
        tile = mask_rows.tile_of(mask, tile)
    tasks = _tasks(problem, (q, k, v, bias, mask, out, lse, sinks), tile, dtype, score)

    def new_worker() -> Callable[[_Task], None]:
        steps = Steps(dtype)

        def work(task: _Task) -> None:
            x, begin, end = task.stack.borrow(), task.row_begin, task.row_end
            more, width = None, tile.tile_n
            if task.stack.pairs is not None:
                attend = partial(task.stack.pairs.attend, steps, problem, x)
                more = partial(attend, row_begin=begin, row_end=end)
            if isinstance(mask, BitMask):
                width = mask_rows.width(mask, tile, len(x.q), end - begin)
            with np.errstate(all="ignore"):
                if not tiled_attention.attend(steps, problem, x, begin, end, width, more):
                    if isinstance(x.mask, MaskTiles):
                        x = replace(x, mask=x.mask.only(words=True, sparse=True))
                    for row in range(begin, end, tile.tile_m):
                        rows = (row, min(row + tile.tile_m, end), width)
                        tiled_attention.attend_exactly(steps, problem, x, *rows)
            task.stack.give_back()

        return work

    flop = 2 * sum(t.cost for t in tasks) * (problem.head_dim + problem.v_dim)
    thread_pool.run(tasks, new_worker, parallel=flop > _PARALLEL_FLOP)
    return out, lse if return_lse else None


def _tile(problem: attention_problem.Problem, dtype: np.dtype[Any]) -> tile_sizes.Tile:
    most, entries = _MOST_M, math.prod(problem.batch)
    if problem.lower is not None and problem.upper is not None:
        # A tile's queries together see tile_m keys more than each of them does.
        most = min(most, max(_LEAST_M, problem.upper - problem.lower))
    while most > _LEAST_M and entries * math.ceil(problem.q_len / most) < _LEAST_TASKS:
        most //= 2
    tile = tile_sizes.tile_sizes(
        problem.head_dim,
        problem.v_dim,
        dtype.itemsize,
        tile_sizes.CPU_CACHE_BYTES,
        problem.q_len,
        problem.k_len,
        max_m=most,
    )
    # Even tiles, rather than a short one at the end.
    rows = math.ceil(problem.q_len / tile.tile_m) or 1
    return tile._replace(tile_m=math.ceil(problem.q_len / rows / 16) * 16 or 16)


class _Task(NamedTuple):
    """Some queries of one stack of batch entries."""

    stack: _Stack
    row_begin: int
    row_end: int
    cost: int  # number of scores


def _tasks(
    problem: attention_problem.Problem,
    arrays: tuple[Any, ...],
    tile: tile_sizes.Tile,
    dtype: np.dtype[Any],
    score: ScoreOperands | None,
) -> list[_Task]:
    """Split the problem, the largest tasks of each stack first, so that threads end together."""
    mask, out, lse, sinks = arrays[4:]
    bits = mask if isinstance(mask, BitMask) else None
    if bits is not None:
        arrays = (*arrays[:4], bits.entries[..., None, None], out, lse, sinks)
    out_view = attention_problem.out_view(problem, out.shape, out.strides)
    lse_view = attention_problem.out_view(problem, (*lse.shape, 1), (*lse.strides, lse.itemsize))
    views = [
        problem.q, problem.k, problem.v, problem.bias, problem.mask, out_view, lse_view,
        problem.sinks,
    ]  # fmt: skip
    if score is not None:
        places = score_entries(np, problem.out_shape[:-2])
        arrays = (*arrays, *places)
        views += [attention_problem.batch_view(problem, x, 1, 1) for x in places]
    rows = []
    bounds = [
        (begin, min(begin + tile.tile_m, problem.q_len))
        for begin in range(0, problem.q_len, tile.tile_m)
    ]
    if bits is not None and problem.k_len:
        bounds = mask_rows.bounds(bits, tile.tile_m)
    for begin, end in bounds:
        first, last = tiled_attention.visible_keys(problem, begin, end)
        rows.append((begin, end, (end - begin) * (last - first)))
    rows.sort(key=lambda row: -row[2])

    whole = tile_sizes.footprint(*tile, problem.head_dim, problem.v_dim, dtype.itemsize)
    tasks = []
    most = min(tile_sizes.CPU_CACHE_BYTES // whole, math.prod(problem.batch) // _LEAST_TASKS)
    if bits is not None:
        most = mask_rows.most_stacked(bits, tile, len(bounds), math.prod(problem.batch), most)
    by_pairs: dict[int, Pairs | None] = {}
    stacks = batching.stacks(np, arrays, views, max(1, most))
    if bits is not None and problem.k_len:
        stacks = mask_rows.of_one_matrix(bits, stacks)
    for x in stacks:
        pairs = None
        if bits is not None and problem.k_len:
            matrix = int(x[4][0, 0, 0])
            if matrix not in by_pairs:
                by_pairs[matrix] = Pairs.of(problem, bits, matrix, arrays[3])
            pairs = by_pairs[matrix]
            apart = (pairs.entries is not None, pairs.thin is not None) if pairs else (False, False)
            x[4] = MaskTiles(bits, x[4][:, 0, 0], sparse=not apart[0], thin=not apart[1])
        if isinstance(arrays[3], SparseBias):
            x[3] = arrays[3]
        made = None if score is None else TileScore(np, score, x[8], x[9], dtype)
        operands = tiled_attention.Operands(*x[:8], score=made)
        stack = _Stack(operands, dtype, len(rows), pairs)
        n = x[0].shape[0]
        tasks += [_Task(stack, begin, end, n * cost) for begin, end, cost in rows]
    return tasks


class _Stack:
    """Operands of stacked batch entries, float16 keys and values converted while in use.

    With `pairs`, keys and values are dense and of compute dtype too.
    """

    def __init__(
        self,
        x: tiled_attention.Operands,
        dtype: np.dtype[Any],
        users: int,
        pairs: Pairs | None,
    ) -> None:
        elements = x.k.size + x.v.size
        self._convert = x.k.dtype == np.float16 and elements * dtype.itemsize <= _CONVERTED_BYTES
        self._convert |= pairs is not None
        self.pairs = pairs
        self._given = self._ready = x
        self._dtype = dtype
        self._users = users
        self._lock = threading.Lock()

    def borrow(self) -> tiled_attention.Operands:
        with self._lock:
            x = self._given
            if self._convert and self._ready is x:
                k, v = (dense_of(a, self._dtype) for a in (x.k, x.v))
                self._ready = replace(x, k=k, v=v)
            return self._ready

    def give_back(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._ready = self._given
