"""Gradients of attention on NumPy arrays: the tiled algorithm, spread over threads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fa_cupy._bitmask import BitMask
from fa_cupy.core import attention_problem
from fa_cupy.core.sparse_bias import SparseBias, Sums
from fa_cupy.cpu import thread_pool
from fa_cupy.cpu.masks import entries, entries_backward
from fa_cupy.cpu.masks.tiles import MaskTiles
from fa_cupy.cpu.ordered_sum import InOrder
from fa_cupy.cpu.tile_ops import Steps
from fa_cupy.layouts import BLOCK
from fa_cupy.score.program import Operands as ScoreOperands
from fa_cupy.score.tiles import TileScore
from fa_cupy.tiled import attention_backward, batching, gradients, tile_sizes
from fa_cupy.tiled.gradients import Gradient, Operands

Array = npt.NDArray[Any]

# As in `fa_cupy.cpu.attention`.
_PARALLEL_FLOP = 2e7
_LEAST_TASKS = 16
_LEAST_N = 64
# Most keys of a tile: more would compute more scores above the diagonal in vain.
_MOST_N = 512


def backward(
    problem: attention_problem.Problem,
    inputs: tuple[Any, ...],
    results: tuple[Any, ...],
    need: tuple[str, ...],
    empty: Callable[..., Any],
    sinks: Array | None = None,
    score: ScoreOperands | None = None,
) -> dict[str, Array]:
    """Return the gradients named by `need`, for NumPy arrays.

    Parameters
    ----------
    problem : Problem
        From `fa_cupy.core.attention_problem.attention_problem`.
    inputs : tuple of numpy.ndarray or None
        q, k, v, bias and mask, which `problem` was made from; the bias may be a SparseBias, the
        mask a BitMask.
    results : tuple of numpy.ndarray or None
        Output and LSE, and the gradients of both; that of the LSE may be None.
    need : tuple of str
        Of "q", "k", "v", "bias", "sinks" and, as "score.x", the arrays of a score.
    empty : callable
        ``empty(shape, dtype, like)`` returns memory for a result.
    sinks : numpy.ndarray or None
    score : Operands or None
        The score expression, if `problem` has one.
    """
    dtype = attention_problem.sum_dtype(problem.dtype)
    grads = gradients.gradients(np, problem, inputs, need, dtype, empty, sinks, score)
    if problem.q_len and (problem.k_len or "sinks" in need):
        inputs = inputs if problem.k_len else (*inputs[:4], None)  # no key is hidden
        with np.errstate(all="ignore"):
            _run(problem, inputs, results, grads, dtype, sinks, score)
    with np.errstate(all="ignore"):
        return gradients.finished(Steps(dtype), need, grads, empty, score)


class _Task(NamedTuple):
    """Some keys of one stack of batch entries."""

    number: int
    x: Operands
    keys: tuple[int, int]


def _run(
    problem: attention_problem.Problem,
    inputs: tuple[Any, ...],
    results: tuple[Any, ...],
    grads: dict[str, Gradient | Sums],
    dtype: np.dtype[Any],
    sinks: Array | None,
    score: ScoreOperands | None,
) -> None:
    bits = inputs[4] if isinstance(inputs[4], BitMask) else None
    tile = _tile(problem, dtype, bits is not None)
    main = Steps(dtype)
    columns = [
        (begin, min(begin + tile.tile_n, problem.k_len))
        for begin in range(0, problem.k_len, tile.tile_n)
    ]
    stacks = _operands(problem, inputs, results, grads, tile, dtype, sinks, score)
    pairs = _Entries(problem, bits, inputs[3])
    stacks = _prepared(problem, stacks, columns, tile, main, pairs.of)
    for x in stacks:
        attention_backward.add_to_sinks(main, x)
    _add_columns(problem, stacks, columns, tile, main)
    left = []
    for x in stacks:
        found = pairs.of(x)
        if found is not None:
            turned = partial(pairs.turned, x)
            if not entries_backward.add(main, problem, x, found, turned):
                left.append(_of_sparse_blocks(x))
    _add_columns(problem, left, columns, tile, main)


class _Entries:
    """The entries of sparse blocks, by matrix, made when they are first asked for."""

    def __init__(self, problem: attention_problem.Problem, mask: Any, bias: Any) -> None:
        self._problem, self._bias = problem, bias
        self._mask = mask if isinstance(mask, BitMask) and entries.any_of(mask) else None
        self._found: dict[int, entries.Entries] = {}
        self._turned: dict[int, entries_backward.Turned] = {}

    def of(self, x: Operands) -> entries.Entries | None:
        """Return those of a stack of batch entries; None without any."""
        if self._mask is None or not isinstance(x.mask, MaskTiles):
            return None
        matrix = x.mask.matrix
        if matrix not in self._found:
            parts = self._problem, self._mask, matrix, self._bias
            self._found[matrix] = entries.Entries.of(*parts)
        return self._found[matrix]

    def turned(self, x: Operands) -> entries_backward.Turned:
        """Return those of a stack in the order of keys."""
        assert isinstance(x.mask, MaskTiles)
        matrix, found = x.mask.matrix, self.of(x)
        assert found is not None
        if matrix not in self._turned:
            self._turned[matrix] = entries_backward.Turned.of(found, self._problem.k_len)
        return self._turned[matrix]


def _of_sparse_blocks(x: Operands) -> Operands:
    """Return operands whose tiles have the sparse blocks of the mask alone."""
    assert isinstance(x.mask, MaskTiles)
    assert isinstance(x.columns, MaskTiles)
    only = {"words": False, "sparse": True}
    return replace(x, mask=x.mask.only(**only), columns=x.columns.only(**only))


def _add_columns(
    problem: attention_problem.Problem,
    stacks: list[Operands],
    columns: list[tuple[int, int]],
    tile: tile_sizes.Tile,
    main: Steps,
) -> None:
    """Add what all tiles add."""
    sums = InOrder(lambda target, term: gradients.accumulate(main, target, term))
    tasks: list[_Task] = []
    scores = 0
    for x in stacks:
        for keys in columns:
            task = _Task(len(tasks), x, keys)
            tiles = [*attention_backward.row_tiles(problem, keys, tile.tile_m, x.columns)]
            for rows in tiles:
                scores += x.q.shape[0] * (rows[1] - rows[0]) * (keys[1] - keys[0])
                for name in x.grads.keys() - {"k", "v"}:
                    sums.expect(_place(task, name, rows, tile), task.number)
            if tiles:
                for name in x.grads.keys() & {"k", "v"}:
                    sums.expect(_place(task, name, (0, 0), tile), task.number)
                tasks.append(task)

    def new_worker() -> Callable[[_Task], None]:
        steps = Steps(main.dtype)

        def work(task: _Task) -> None:
            def add(name: str, rows: tuple[int, int], term: Array | None) -> None:
                target = gradients.target(task.x, name, rows, task.keys)
                if term is not None:
                    term = gradients.reduced(target, term)
                sums.add(_place(task, name, rows, tile), task.number, target, term)

            with np.errstate(all="ignore"):
                attention_backward.column(steps, problem, task.x, task.keys, tile.tile_m, add)

        return work

    flop = scores * (6 * problem.head_dim + 4 * problem.v_dim)
    thread_pool.run(tasks, new_worker, parallel=flop > _PARALLEL_FLOP)


def _prepared(
    problem: attention_problem.Problem,
    stacks: list[Operands],
    columns: list[tuple[int, int]],
    tile: tile_sizes.Tile,
    steps: Steps,
    of_stack: Callable[[Operands], entries.Entries | None],
) -> list[Operands]:
    """Return the stacks with what is known of a query before the first column of tiles."""
    ready, tasks, scores = [], [], 0
    for x in stacks:
        for begin in range(0, problem.q_len, tile.tile_m):
            attention_backward.prepare(steps, x, begin, min(begin + tile.tile_m, problem.q_len))
        x, far = attention_backward.far_rows(steps, x, tile.tile_m)
        ready.append(x)
        tasks += [(x, rows, of_stack(x)) for rows in far]
        scores += sum(x.q.shape[0] * (end - begin) * problem.k_len for begin, end in far)

    def new_worker() -> Callable[[Any], None]:
        own = Steps(steps.dtype)

        def work(task: tuple[Operands, tuple[int, int], entries.Entries | None]) -> None:
            x, rows, pairs = task
            more: Any = ()
            if pairs is not None:
                dense = replace(x, k=entries.dense_of(x.k, own.dtype))
                more = entries.padded(own, problem, dense, pairs, rows)
            # Of a graph's many tiles nearly all are empty here.
            seen = x.mask.columns(rows, columns) if isinstance(x.mask, MaskTiles) else columns
            with np.errstate(all="ignore"):
                attention_backward.keep_apart(own, problem, x, rows, seen, tile.tile_m, more)

        return work

    if tasks:
        parallel = 2 * scores * problem.head_dim > _PARALLEL_FLOP
        thread_pool.run(tasks, new_worker, parallel)
    return ready


def _place(task: _Task, name: str, rows: tuple[int, int], tile: tile_sizes.Tile) -> tuple[Any, ...]:
    """Name the part of a gradient that a term is added to: parts are equal or disjoint."""
    grad = task.x.grads[name]
    if isinstance(grad, Sums):
        return name, id(grad), rows[0] // tile.tile_m, task.keys[0]
    all_pairs = name not in ("q", "k", "v")  # the gradient has an axis for rows, and one for keys
    row = rows[0] // tile.tile_m if not all_pairs or grad.strides[1] else 0
    key = task.keys[0] if name != "q" and (not all_pairs or grad.strides[2]) else 0
    return name, grad.ctypes.data, row, key


def _tile(
    problem: attention_problem.Problem, dtype: np.dtype[Any], sparse: bool
) -> tile_sizes.Tile:
    most, entries = _MOST_N, math.prod(problem.batch)
    if problem.lower is not None and problem.upper is not None:
        # A tile's keys are together seen by tile_n queries more than each of them is.
        most = min(most, max(_LEAST_N, problem.upper - problem.lower))
    while most > _LEAST_N and entries * math.ceil(problem.k_len / most) < _LEAST_TASKS:
        most //= 2
    # Keys and queries have changed places: a column of tiles reads all queries.
    tile_n, tile_m = tile_sizes.tile_sizes(
        problem.head_dim + problem.v_dim,
        problem.head_dim + problem.v_dim,
        dtype.itemsize,
        tile_sizes.CPU_CACHE_BYTES,
        problem.k_len,
        problem.q_len,
        score_itemsize=2 * dtype.itemsize,  # weights and gradients of scores
        max_m=most,
    )
    if sparse:  # edges on those of blocks
        return tile_sizes.Tile(
            max(1, tile_m // BLOCK) * BLOCK, BLOCK if tile_n > _LEAST_N else _LEAST_N
        )
    columns = math.ceil(problem.k_len / tile_n) or 1
    return tile_sizes.Tile(tile_m, math.ceil(problem.k_len / columns / 16) * 16 or 16)


def _operands(
    problem: attention_problem.Problem,
    inputs: tuple[Any, ...],
    results: tuple[Any, ...],
    grads: dict[str, Gradient | Sums],
    tile: tile_sizes.Tile,
    dtype: np.dtype[Any],
    sinks: Array | None,
    score: ScoreOperands | None,
) -> list[Operands]:
    """Return the stacks of batch entries."""
    bits = inputs[4] if isinstance(inputs[4], BitMask) else None
    arrays, views = gradients.arrays(np, problem, inputs, results, grads, dtype, sinks, score)
    of = None if score is None else partial(_tile_score, score, dtype)
    one_by_one = bits is not None and entries.any_of(bits)
    of_mask = partial(MaskTiles, sparse=not one_by_one)
    whole = tile_sizes.footprint(
        tile.tile_n, tile.tile_m, problem.head_dim, problem.v_dim, 2 * dtype.itemsize
    )
    most = min(tile_sizes.CPU_CACHE_BYTES // whole, math.prod(problem.batch) // _LEAST_TASKS)
    if bits is not None and entries.differ(bits):
        most = 1
    found = []
    for stack in batching.stacks(np, arrays, views, max(1, most)):
        sparse = gradients.sparse(bits, stack, of_mask)
        x = gradients.operands(stack, [*grads], *sparse, score=of)
        if isinstance(inputs[3], SparseBias):
            x = replace(x, bias=inputs[3])
            if "bias" in grads:
                x.grads["bias"] = grads["bias"]
        found.append(x)
    return found


def _tile_score(score: ScoreOperands, dtype: np.dtype[Any], b: Array, h: Array) -> TileScore:
    return TileScore(np, score, b, h, dtype)
