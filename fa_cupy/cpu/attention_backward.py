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
from fa_cupy.tiled.softmax import all_near

Array = npt.NDArray[Any]

# A task has so much work at least, more than starting a thread and the calls of NumPy for a tile
# take, until there are so many tasks. What is too little for two tasks runs in the calling thread.
_TASK_FLOP = 4e7
_LEAST_TASKS = 16
_LEAST_N = 64
# Most keys of a tile: more would compute more scores above the diagonal in vain.
_MOST_N = 512


class Plan(NamedTuple):
    """What follows from shapes, strides, dtypes and options, and not from data."""

    problem: attention_problem.Problem
    need: tuple[str, ...]
    dtype: np.dtype[Any]  # of sums
    forms: dict[str, gradients.Form]
    tile: tile_sizes.Tile
    columns: list[tuple[int, int]]  # of tiles: (begin, end) of keys
    stacks: batching.Layout | None  # of the arrays; None where there is nothing to compute
    direct: frozenset[str]  # gradients that products are written to where they lie
    written: bool  # whether that leaves none of their elements out
    alone: bool  # whether the task of a column prepares its queries, which no other task reads


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
    plan = _planned(problem, inputs, results, need, sinks, score)
    return _run(plan, inputs, results, empty, sinks, score)


def _planned(
    problem: attention_problem.Problem,
    inputs: tuple[Any, ...],
    results: tuple[Any, ...],
    need: tuple[str, ...],
    sinks: Array | None,
    score: ScoreOperands | None,
) -> Plan:
    """Return the plan of a call. Of its arrays only metadata are read, but for those of masks."""
    dtype = attention_problem.sum_dtype(problem.dtype)
    forms = gradients.forms(problem, inputs, need, dtype, sinks, score)
    bits = inputs[4] if isinstance(inputs[4], BitMask) else None
    tile = _tile(problem, dtype, bits is not None)
    columns = [
        (begin, min(begin + tile.tile_n, problem.k_len))
        for begin in range(0, problem.k_len, tile.tile_n)
    ]
    stacks = None
    if problem.q_len and (problem.k_len or "sinks" in need):
        seen = [form.view for form in forms.values()]
        seen += [None] * (isinstance(inputs[3], SparseBias) and "bias" in need)
        entries = gradients.batch_entries(np, problem, inputs[4] if columns else None, score)
        views = gradients.views(problem, inputs, results, seen, dtype, entries)
        stacks = batching.Layout(views, _stacked(problem, tile, dtype, bits))
    names = [name for name in ("q", "k", "v") if name in forms]
    direct = {
        name
        for name in names
        if forms[name].takes_products() and (name != "q" or len(columns) == 1)
    }
    band = problem.lower is not None or problem.upper is not None
    written = stacks is not None and len(columns) > 0 and inputs[4] is None and not band
    alone = len(columns) == 1 and bits is None and "sinks" not in need
    return Plan(
        problem, need, dtype, forms, tile, columns, stacks, frozenset(direct), written, alone
    )


class _Task(NamedTuple):
    """Some keys of one stack of batch entries."""

    number: int
    x: Operands
    keys: tuple[int, int]


def _run(
    plan: Plan,
    inputs: tuple[Any, ...],
    results: tuple[Any, ...],
    empty: Callable[..., Any],
    sinks: Array | None = None,
    score: ScoreOperands | None = None,
) -> dict[str, Array]:
    """Return the gradients that a plan is made for."""
    grads: dict[str, Gradient | Sums] = {}
    for name, form in plan.forms.items():
        grads[name] = found = Gradient(np, form, form.empty(np))
        if not (plan.written and name in plan.direct):
            found.clear()
    if "bias" in plan.need and isinstance(inputs[3], SparseBias):
        grads["bias"] = Sums(inputs[3])
    main = Steps(plan.dtype)
    with np.errstate(all="ignore"):
        if plan.stacks is not None:
            inputs = inputs if plan.columns else (*inputs[:4], None)  # no key is hidden
            stacks = _operands(plan, plan.stacks, inputs, results, grads, sinks, score)
            _add_all(plan, stacks, main, _Entries(plan.problem, inputs[4], inputs[3]))
        return gradients.finished(main, plan.need, grads, empty, score)


def _add_all(plan: Plan, stacks: list[Operands], main: Steps, pairs: _Entries) -> None:
    """Add everything to the gradients of all stacks."""
    stacks = _prepared(plan, stacks, main, pairs)
    _add_columns(plan, stacks, main)
    left = []
    for x in stacks:
        attention_backward.add_to_sinks(main, x)
        found = pairs.of(x)
        if found is not None:
            turned = partial(pairs.turned, x)
            if not entries_backward.add(main, plan.problem, x, found, turned):
                left.append(_of_sparse_blocks(x))
    if left:
        _add_columns(plan, left, main)


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
    mask, columns = x.mask.only(**only), x.columns.only(**only)
    return replace(x, mask=mask, columns=columns, direct=frozenset())


def _add_columns(plan: Plan, stacks: list[Operands], main: Steps) -> None:
    """Add what all tiles add."""
    problem, tile = plan.problem, plan.tile
    sums = InOrder(partial(gradients.accumulate, main))
    tasks: list[_Task] = []
    scores = 0
    for x in stacks:
        in_order = x.grads.keys() - x.direct
        of_tiles, of_columns = in_order - {"k", "v"}, in_order & {"k", "v"}
        for keys in plan.columns:
            task = _Task(len(tasks), x, keys)
            tiles = [*attention_backward.row_tiles(problem, keys, tile.tile_m, x.columns)]
            for rows in tiles:
                scores += x.q.shape[0] * (rows[1] - rows[0]) * (keys[1] - keys[0])
                for name in of_tiles:
                    sums.expect(_place(task, name, rows, tile), task.number)
            if tiles:
                for name in of_columns:
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
                if plan.alone:
                    _prepare(steps, task.x, tile.tile_m)
                attention_backward.column(steps, problem, task.x, task.keys, tile.tile_m, add)

        return work

    flop = scores * (6 * problem.head_dim + 4 * problem.v_dim)
    thread_pool.run(tasks, new_worker, parallel=flop > _TASK_FLOP)


def _prepare(steps: Steps, x: Operands, tile_m: int) -> None:
    for begin in range(0, x.q.shape[1], tile_m):
        attention_backward.prepare(steps, x, begin, min(begin + tile_m, x.q.shape[1]))


def _prepared(plan: Plan, stacks: list[Operands], steps: Steps, pairs: _Entries) -> list[Operands]:
    """Return the stacks with what is known of a query before the first column of tiles.

    If `plan.alone`, that is only what is known of far rows.
    """
    problem, tile_m = plan.problem, plan.tile.tile_m
    ready, tasks, scores = [], [], 0
    for x in stacks:
        if not plan.alone:
            _prepare(steps, x, tile_m)
        far: list[tuple[int, int]] = []
        if x.top is None:
            x, far = attention_backward.far_rows(steps, x, tile_m)
        ready.append(x)
        tasks += [(x, rows, pairs.of(x)) for rows in far]
        scores += sum(x.q.shape[0] * (end - begin) * problem.k_len for begin, end in far)

    def new_worker() -> Callable[[Any], None]:
        own = Steps(steps.dtype)

        def work(task: tuple[Operands, tuple[int, int], entries.Entries | None]) -> None:
            x, rows, found = task
            more: Any = ()
            if found is not None:
                dense = replace(x, k=entries.dense_of(x.k, own.dtype))
                more = entries.padded(own, problem, dense, found, rows)
            # Of a graph's many tiles nearly all are empty here.
            seen = plan.columns
            if isinstance(x.mask, MaskTiles):
                seen = x.mask.columns(rows, seen)
            with np.errstate(all="ignore"):
                attention_backward.keep_apart(own, problem, x, rows, seen, tile_m, more)

        return work

    if tasks:
        parallel = 2 * scores * problem.head_dim > _TASK_FLOP
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
    wanted = _LEAST_TASKS if sparse else _tasks(problem)
    while most > _LEAST_N and entries * math.ceil(problem.k_len / most) < wanted:
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


def _tasks(problem: attention_problem.Problem) -> int:
    """Return how many tasks the work is worth, as if all keys were seen."""
    pairs = math.prod(problem.batch) * problem.q_len * problem.k_len
    flop = pairs * (6 * problem.head_dim + 4 * problem.v_dim)
    return max(1, min(_LEAST_TASKS, int(flop / _TASK_FLOP)))


def _stacked(
    problem: attention_problem.Problem,
    tile: tile_sizes.Tile,
    dtype: np.dtype[Any],
    bits: BitMask | None,
) -> int:
    """Return how many batch entries are stacked at most."""
    if bits is not None and entries.differ(bits):
        return 1
    whole = tile_sizes.footprint(
        tile.tile_n, tile.tile_m, problem.head_dim, problem.v_dim, 2 * dtype.itemsize
    )
    wanted = _tasks(problem) if bits is None else _LEAST_TASKS
    return max(1, min(tile_sizes.CPU_CACHE_BYTES // whole, math.prod(problem.batch) // wanted))


def _operands(
    plan: Plan,
    stacks: batching.Layout,
    inputs: tuple[Any, ...],
    results: tuple[Any, ...],
    grads: dict[str, Gradient | Sums],
    sinks: Array | None,
    score: ScoreOperands | None,
) -> list[Operands]:
    """Return the stacks of batch entries."""
    problem, dtype, lse = plan.problem, plan.dtype, results[1]
    bits = inputs[4] if isinstance(inputs[4], BitMask) else None
    of_entries = gradients.batch_entries(np, problem, bits, score)
    arrays = gradients.arrays(np, inputs, results, grads, dtype, sinks, of_entries)
    of = None if score is None else partial(_tile_score, score, dtype)
    one_by_one = bits is not None and entries.any_of(bits)
    of_mask = partial(MaskTiles, sparse=not one_by_one)
    near = lse.size > 0 and all_near(lse)
    found = []
    for stack in stacks.stacks(np, arrays):
        sparse = gradients.sparse(bits, stack, of_mask)
        x = gradients.operands(stack, [*grads], *sparse, score=of, near=near, direct=plan.direct)
        if isinstance(inputs[3], SparseBias):
            x = replace(x, bias=inputs[3])
            if "bias" in grads:
                x.grads["bias"] = grads["bias"]
        found.append(x)
    return found


def _tile_score(score: ScoreOperands, dtype: np.dtype[Any], b: Array, h: Array) -> TileScore:
    return TileScore(np, score, b, h, dtype)
