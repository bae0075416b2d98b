"""Exact attention on NumPy arrays: the tiled algorithm, spread over threads.

What follows from the shapes, strides, dtypes and options of a call is a `Call`, which is made once
and kept: a small problem takes less time than its checks.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fa_cupy._bitmask import BitMask
from fa_cupy.core import arrays as core_arrays
from fa_cupy.core import attention_problem
from fa_cupy.core.plan_cache import NUMBERS, TEXTS, lookup, remember, window_key
from fa_cupy.core.sparse_bias import SparseBias
from fa_cupy.cpu import decoding, key_entries, one_tile, thread_pool, wide_rows
from fa_cupy.cpu.masks import rows as mask_rows
from fa_cupy.cpu.masks import single
from fa_cupy.cpu.masks.entries import dense_of
from fa_cupy.cpu.masks.thin import Pairs
from fa_cupy.cpu.masks.tiles import MaskTiles
from fa_cupy.cpu.packed.sequences import SequenceTasks
from fa_cupy.cpu.packed.short_entries import Group, ShortEntries
from fa_cupy.cpu.tile_ops import Steps
from fa_cupy.dropout.decisions import TileDropout
from fa_cupy.keys.layout import KeyArrays
from fa_cupy.score.program import Operands as ScoreOperands
from fa_cupy.score.program import entries as score_entries
from fa_cupy.score.tiles import TileScore
from fa_cupy.tiled import attention as tiled_attention
from fa_cupy.tiled import batching, tile_sizes

Array = npt.NDArray[Any]
View = attention_problem.View

# Work below this runs in the calling thread.
_PARALLEL_FLOP = 1e8
# Most queries of a tile: more would compute more scores above the diagonal in vain.
_MOST_M = 512
# Problems are split into so many tasks where that leaves tiles of so many queries, and into fewer
# where tasks would have less work than this. All are fixed, so that results do not depend on the
# number of threads.
_MOST_TASKS = 16
_LEAST_M = 64
_TASK_FLOP = 3e7
# The number of queries whose products take as long as reading their keys from memory.
_READING_QUERIES = 8
# The same for entries with lengths of their own, about half of the longest one each.
_PARALLEL_ENTRIES_FLOP = 5e7
# The most work of a group of short entries, and how many numbers of keys have plans that are kept.
_GROUP_FLOP = 4e7
_MOST_PLANS = 256
# Keys and values that are read once do not have to fit the cache, unless they are converted.
_FEW_QUERIES, _FEW_N = 16, 8192
# From so many stacks on, arrays are packed if that makes few of them, in so many bytes; and which
# arrays are results.
_MOST_PARTS = 64
_PACKED_BYTES = 64 << 20
_RESULTS = {5, 6}
# Rows wider than this do not have to fit the cache: the BLAS library copies what it works on. Tiles
# of them have so many queries at most, and so many elements of queries, or of copies of keys.
_CACHED_DIM = 512
_LARGE_M, _LARGE_N = 128, 512
_LARGE_ELEMENTS = 4 << 20


def cached(
    q: Any, k: Any, v: Any, bias: Any, mask: Any, scale: Any, is_causal: Any, causal_align: Any,
    window: Any, softcap: Any, sinks: Any, precision: Any, return_lse: Any, k_lengths: Any,
    page_table: Any, q_offsets: Any, k_offsets: Any, out: Any,
) -> Any:  # fmt: skip
    """Answer a call of `fa_cupy.attention` on NumPy arrays; None where it needs preparation.

    As on a GPU, the key holds the arguments unchecked: only calls that were once checked are in the
    table, and only values of types that are equal where they mean the same make a key.
    """
    if out is not None or not (type(q) is type(k) is type(v) is np.ndarray):
        return None
    if not (
        scale.__class__ in NUMBERS
        and softcap.__class__ in NUMBERS
        and is_causal.__class__ is return_lse.__class__ is bool
        and causal_align.__class__ in TEXTS
        and precision.__class__ in TEXTS
    ):
        return None
    key: Any = (
        "attention", "numpy", q.shape, q.strides, q.dtype, k.shape, k.strides, k.dtype, v.shape,
        v.strides, v.dtype, scale, is_causal, causal_align, softcap, precision,
    )  # fmt: skip
    bits = None
    if bias is not None or mask is not None or sinks is not None or window is not None:
        extra = [window_key(window)]
        if type(mask) is BitMask and k_lengths is page_table is q_offsets is k_offsets is None:
            bits = single.bits_of(mask)
            extra.append((mask._grid, mask.entries.shape))
        for x in (bias, mask if bits is None else bits, sinks):
            if not (x is None or type(x) is np.ndarray):
                return None
            extra.append(None if x is None else (x.shape, x.strides, x.dtype))
        if extra[0] is False:
            return None
        key = (*key, *extra)
    keys = None
    if not (k_lengths is page_table is q_offsets is k_offsets is None):
        keys = key_entries.key_arrays(k_lengths, page_table, q_offsets, k_offsets)
        if keys is None:
            return None
        extra = [None if x is None else (x.shape, x.strides, x.dtype) for x in keys]
        key = (*key, "keys", k_offsets is None, *extra)
        k_lengths, page_table = keys[:2]
    call = lookup(key)
    if call is None:
        problem = attention_problem.attention_problem(
            q, k, v, bias, mask, scale=scale, is_causal=is_causal, causal_align=causal_align,
            window=window, softcap=softcap, sinks=sinks, precision=precision, k_lengths=k_lengths,
            page_table=page_table, q_offsets=q_offsets, k_offsets=k_offsets,
        )  # fmt: skip
        call = remember(key, Call(problem, q, bits=bits))
    if keys is not None:
        key_entries.check(call.problem, keys)
    result, lse = call(q, k, v, bias, mask if bits is None else bits, None, sinks, keys=keys)
    return (result, lse) if return_lse else result


def attention(
    problem: attention_problem.Problem,
    q: Array,
    k: Array,
    v: Array,
    bias: Array | SparseBias | None,
    mask: Array | BitMask | tuple[BitMask, ...] | None,
    out: Array | None,
    return_lse: bool,
    sinks: Array | None = None,
    score: ScoreOperands | None = None,
    keys: KeyArrays | None = None,
) -> tuple[Array, Array | None]:
    """Solve `problem` for NumPy arrays.

    Parameters
    ----------
    problem : Problem
        From `fa_cupy.core.attention_problem.attention_problem`.
    q, k, v, bias, mask : numpy.ndarray or None
        The arrays that `problem` was made from; `mask` may be a BitMask, `bias` a SparseBias. With
        offsets it may be a tuple of a BitMask for each sequence.
    out : numpy.ndarray or None
        Array for the output; None allocates one laid out in memory as `q` is.
    return_lse : bool
        Whether the LSE is wanted.
    sinks : numpy.ndarray or None
        As the other arrays.
    score : Operands or None
        The score expression, if `problem` has one.
    keys : KeyArrays or None
        The key lengths and the page table, or the offsets, if `problem` has them.

    Returns
    -------
    out : numpy.ndarray
        Of shape ``problem.out_shape``.
    lse : numpy.ndarray or None
        Of shape ``problem.out_shape[:-1]``: float64 for float64 input, otherwise float32.
    """
    bits = None
    # A sparse bias has an element for each pair of a matrix, whose queries stay as they are.
    sparse = isinstance(bias, SparseBias)
    if isinstance(mask, BitMask) and problem.mask is not None and not sparse:
        if keys is None:
            bits = single.bits_of(mask)
        elif mask._grid.is_small:
            mask = mask_rows.of_small(mask)
            seen = attention_problem.batch_view(problem, mask, problem.q_len, problem.k_len)
            problem = replace(problem, mask=seen)
    mask = mask if bits is None else bits
    blocks = mask if isinstance(mask, BitMask) else None
    call = Call(problem, q, None if out is None else out.strides, blocks, bits, sparse)
    out, lse = call(q, k, v, bias, mask, out, sinks, score, keys)
    return out, lse if return_lse else None


class _Rows(NamedTuple):
    """Queries that a task has."""

    begin: int
    end: int
    cost: int  # number of scores of one batch entry


class _Task(NamedTuple):
    """Some queries of one stack of batch entries."""

    stack: _Stack
    rows: _Rows


class Call:
    """One kind of call: how it is cut into tasks, and what they do.

    Parameters
    ----------
    problem : Problem
    q : numpy.ndarray
        Queries like those of the calls.
    strides : tuple of int, optional
        Of the output; by default it lies in memory as the queries do.
    mask : BitMask, optional
        The mask of the only call, if it is one of bits.
    bits : ndarray of uint8, optional
        From `cpu.masks.single.bits_of`: calls have such a mask in place of an array of bool.
    sparse_bias : bool
        Whether the only call has a sparse bias.
    """

    def __init__(
        self,
        problem: attention_problem.Problem,
        q: Array,
        strides: tuple[int, ...] | None = None,
        mask: BitMask | None = None,
        bits: Array | None = None,
        sparse_bias: bool = False,
    ) -> None:
        self._dtype = dtype = attention_problem.sum_dtype(problem.dtype)
        shape, self._out_dtype = problem.out_shape, problem.dtype
        order = core_arrays.memory_order(shape, q)
        self._memory, self._lse_shape = [shape[axis] for axis in order], shape[:-1]
        in_order = order == [*range(len(order))]
        self._axes = None if in_order else [order.index(axis) for axis in range(len(order))]
        if strides is None:
            strides = core_arrays.dense_strides(shape, problem.dtype.itemsize, order)
        column = (*shape[:-1], 1)
        lse_strides = core_arrays.dense_strides(column, dtype.itemsize, range(len(column)))
        out_views = [
            attention_problem.out_view(problem, *view)
            for view in ((shape, strides), (column, lse_strides))
        ]
        self.problem = problem
        self._tasks: _Tasks | _EntryTasks | SequenceTasks | None = None
        self._small: one_tile.OneTile | None = None
        if not math.prod(shape[:-1]):  # however many batch entries there are
            return
        if problem.offsets is not None:
            self._tasks = SequenceTasks(problem, out_views, dtype, _Tasks, Call)
        elif problem.k_lengths is None and problem.pages is None:
            self._tasks = _Tasks(problem, out_views, dtype, mask, bits, sparse_bias)
            parallel = self._tasks.parallel
            if one_tile.suits(problem, dtype, parallel):
                self._small = one_tile.OneTile(problem, dtype, parallel)
        else:
            self._tasks = _EntryTasks(problem, out_views, dtype)

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        bias: Array | SparseBias | None,
        mask: Array | BitMask | tuple[BitMask, ...] | None,
        out: Array | None,
        sinks: Array | None,
        score: ScoreOperands | None = None,
        keys: KeyArrays | None = None,
    ) -> tuple[Array, Array]:
        """Return output and LSE; the output is `out` where that is given."""
        if out is None:
            out = np.empty(self._memory, self._out_dtype)
            if self._axes is not None:
                out = out.transpose(self._axes)
        lse = np.empty(self._lse_shape, self._dtype)
        if self._small is not None and self._small.attend(q, k, v, out, lse):
            return out, lse
        arrays = q, k, v, bias, mask, out, lse, sinks
        if isinstance(self._tasks, (_EntryTasks, SequenceTasks)):
            assert keys is not None
            self._tasks.run(arrays, score, keys)
        elif self._tasks is not None:
            self._tasks.run(arrays, score)
        return out, lse


class _Tasks:
    """The tasks of one kind of call, which has some queries."""

    def __init__(
        self,
        problem: attention_problem.Problem,
        out_views: Sequence[View],
        dtype: np.dtype[Any],
        mask: BitMask | None,
        bits: Array | None = None,
        sparse_bias: bool = False,
    ) -> None:
        self._dtype = dtype
        self._height = 0 if bits is None else problem.q_len  # rows of what `bits` has together
        if bits is not None:
            problem = single.with_bits(problem, bits)
        self.problem = problem
        out, lse = out_views
        if mask is None and not sparse_bias:
            self.problem, out, lse = decoding.heads_as_queries(problem, out, lse)
        problem, self._bits = self.problem, mask
        wanted = _wanted_tasks(problem)
        self._in_place = key_entries.reads_in_place(problem, dtype)
        self.tile = tile = planned_tile(problem, dtype)
        if mask is not None:
            self.tile = tile = mask_rows.tile_of(mask, tile)
        self._rows = _rows(problem, tile.tile_m, mask)
        whole = _bytes_of_entry(problem, tile, dtype)
        most = tile_sizes.CPU_CACHE_BYTES // whole
        if not self._in_place:  # heads of a page lie side by side, and tasks get parts of the keys
            most = min(most, math.prod(problem.batch) // wanted)
        if mask is not None:
            tasks = len(self._rows) * math.prod(problem.batch)
            most = mask_rows.most_stacked(mask, tile, tasks // wanted, most)
        self._views = [
            problem.q, problem.k, problem.v, problem.bias, problem.mask, out, lse, problem.sinks,
        ]  # fmt: skip
        self._most = max(1, most)
        self._layout = batching.Layout(self._views, self._most)
        self._packed: dict[int, View] = {}
        # A view of pages is right in the first one only, and cannot be copied as a whole.
        self._numbered = problem.score is not None or problem.dropout is not None
        plain = mask is None and not self._numbered and problem.pages is None
        if self._layout.count >= _MOST_PARTS and plain:
            self._packed = self._pack()
        scores = math.prod(problem.batch) * sum(rows.cost for rows in self._rows)
        #: How long it takes, in operations of a product, and whether threads share it.
        self.cost = scores * _flop_per_score(problem)
        self.parallel = self.cost > _PARALLEL_FLOP
        alone = self._layout.count * len(self._rows)
        one = [(0, problem.k_len)]
        self._wide = mask is None and wide_rows.suits(problem)
        self._keys = one if mask is not None else decoding.key_bounds(problem, alone, wanted)

    def _pack(self) -> dict[int, View]:
        """Return the views of arrays that are packed, so that there are few stacks of entries.

        That is done where it makes a fourth of them or less, for arrays that repeat nothing.
        """
        p, of_mask = self.problem, np.dtype(np.bool_)
        kinds = [p.dtype] * 3 + [p.bias_dtype, of_mask, p.dtype, self._dtype, p.sinks_dtype]
        views, packed, size = [*self._views], {}, 0
        for i, (view, kind) in enumerate(zip(views, kinds, strict=True)):
            if view is None or kind is None or batching.is_dense(view):
                continue
            if all(stride or n == 1 for n, stride in zip(*view, strict=True)):
                packed[i], axes = view, range(len(view.shape))
                dense = core_arrays.dense_strides(view.shape, kind.itemsize, axes)
                views[i] = View(view.shape, dense)
                size += math.prod(view.shape) * kind.itemsize
        layout = batching.Layout(views, self._most)
        if size > _PACKED_BYTES or 4 * layout.count > self._layout.count:
            return {}
        self._views, self._layout = views, layout
        return packed

    def run(
        self,
        arrays: Sequence[Any],
        score: ScoreOperands | None,
        entry: key_entries.Entry | None = None,
    ) -> None:
        """Do all tasks, the largest of each stack first, so that threads end together.

        `entry` says which one of a larger problem this is.
        """
        if not self._packed:
            return self._run(arrays, score, entry)
        seen, own = {}, [*arrays]
        for i, view in self._packed.items():
            seen[i] = np.lib.stride_tricks.as_strided(arrays[i], *view)
            own[i] = np.empty(view.shape, arrays[i].dtype) if i in _RESULTS else seen[i].copy()
        self._run(own, score, entry)
        for i in seen.keys() & _RESULTS:
            np.copyto(seen[i], own[i])

    def _run(
        self,
        arrays: Sequence[Any],
        score: ScoreOperands | None,
        entry: key_entries.Entry | None,
    ) -> None:
        stacks = self._stacks(arrays, score, entry)
        if len(self._keys) > 1:
            return self._run_parts(stacks)
        if self._wide:
            shared = partial(wide_rows.attend, self.problem, dtype=self._dtype)
            stacks = [x for x in stacks if not shared(x.borrow(), parallel=self.parallel)]
        tasks = [_Task(stack, rows) for stack in stacks for rows in self._rows]
        thread_pool.run(tasks, lambda: self._work, self.parallel and len(tasks) > 1)

    def _run_parts(self, stacks: list[_Stack]) -> None:
        """Do the tasks of parts of the keys, and combine what they give."""
        problem, dtype, tile_n = self.problem, self._dtype, self.tile.tile_n
        parts = {
            stack: [decoding.Part(problem, stack.borrow(), dtype, *keys) for keys in self._keys]
            for stack in stacks
        }

        def work(part: decoding.Part) -> None:
            steps = Steps.unused(dtype)
            with np.errstate(all="ignore"):
                part.attend(steps, tile_n)
            steps.keep()

        tasks = [part for some in parts.values() for part in some]
        thread_pool.run(tasks, lambda: work, self.parallel)
        steps = Steps.unused(dtype)
        with np.errstate(all="ignore"):
            for stack, some in parts.items():
                decoding.combine(steps, problem, _to_copy(stack.borrow()), some, tile_n)
        steps.keep()

    def _stacks(
        self,
        arrays: Sequence[Any],
        score: ScoreOperands | None,
        entry: key_entries.Entry | None,
    ) -> list[_Stack]:
        layout, bits = self._layout, self._bits
        places: tuple[Array, ...] = ()
        if bits is not None:
            arrays = (*arrays[:4], bits.entries[..., None, None], *arrays[5:])
        if self._numbered:
            b, h = score_entries(np, self.problem.out_shape[:-2])
            places = b if entry is None else b + entry.first, h
            views = [attention_problem.batch_view(self.problem, x, 1, 1) for x in places]
            layout = batching.Layout([*self._views, *views], self._most)
        found = []
        stacks = layout.stacks(np, (*arrays, *places))
        by_pairs: dict[int, Pairs | None] = {}
        dropout = self.problem.dropout
        if bits is not None and self.problem.k_len:
            stacks = mask_rows.of_one_matrix(bits, stacks)
        for x in stacks:
            pairs = None
            if self._height:
                x[4] = single.MatrixMask(x[4], self._height, self.problem.k_len)
            if bits is not None and self.problem.k_len:
                matrix = int(x[4][0, 0, 0])
                if matrix not in by_pairs and dropout is None:  # which is one of tiles
                    by_pairs[matrix] = Pairs.of(self.problem, bits, matrix, arrays[3])
                pairs = by_pairs.get(matrix)
                x[4] = MaskTiles(
                    bits,
                    x[4][:, 0, 0],
                    sparse=pairs is None or pairs.entries is None,
                    thin=pairs is None or pairs.thin is None,
                )
            if isinstance(arrays[3], SparseBias):
                x[3] = arrays[3]
            if entry is not None and entry.source is not None:
                x[1:3] = entry.source.rows(x[1], x[2], self._in_place)
            made = None if score is None else TileScore(np, score, x[8], x[9], self._dtype)
            dropped = None if dropout is None else TileDropout(dropout, x[8], x[9])
            operands = tiled_attention.Operands(*x[:8], score=made, dropout=dropped)
            found.append(_Stack(operands, self._dtype, len(self._rows), pairs))
        return found

    def _work(self, task: _Task) -> None:
        problem, tile_m, tile_n = self.problem, *self.tile
        x, begin, end = task.stack.borrow(), task.rows.begin, task.rows.end
        steps = Steps.unused(self._dtype)
        with np.errstate(all="ignore"):
            more = None
            if task.stack.pairs is not None:
                attend = partial(task.stack.pairs.attend, steps, problem, x)
                more = partial(attend, row_begin=begin, row_end=end)
            if self._bits is not None:
                tile_n = mask_rows.width(self._bits, self.tile, len(x.q), end - begin)
            if not tiled_attention.attend(steps, problem, x, begin, end, tile_n, more):
                if isinstance(x.mask, MaskTiles):
                    x = replace(x, mask=x.mask.only(words=True, sparse=True))
                x = _to_copy(x)
                for row in range(begin, end, tile_m):
                    rows = (row, min(row + tile_m, end), tile_n)
                    tiled_attention.attend_exactly(steps, problem, x, *rows)
        task.stack.give_back()
        steps.keep()


def _to_copy(x: tiled_attention.Operands) -> tiled_attention.Operands:
    """Return operands whose pages are copied: `attend_exactly` changes keys and values."""
    if isinstance(x.k, key_entries.PagedRows):
        return replace(x, k=x.k.to_copy(), v=x.v.to_copy())
    return x


class _EntryTasks:
    """The tasks of one kind of call with key lengths or pages.

    Entries that are large use all threads, one after the other. Of the others each is one task, or
    a group of short ones is.
    """

    def __init__(
        self, problem: attention_problem.Problem, views: Sequence[View], dtype: np.dtype[Any]
    ) -> None:
        self._dtype = dtype
        self._entries = key_entries.Entries(problem, *views)
        self._short = ShortEntries.of(problem, dtype, *views)
        # By the number of keys and whether they are all entries: all else is the same.
        self._plans: dict[tuple[int, bool], _Tasks] = {}
        self._paged = problem.pages is not None

    def run(self, arrays: Sequence[Any], score: ScoreOperands | None, keys: KeyArrays) -> None:
        """Do all tasks."""
        lengths = self._entries.lengths(keys)
        alone: Sequence[int] = range(lengths.size)
        groups: list[Group] = []
        if self._short is not None:
            found = [*self._short.groups(lengths.reshape(-1).tolist(), _GROUP_FLOP)]
            groups = [x for x in found if isinstance(x, Group)]
            alone = [x for x in found if not isinstance(x, Group)]
        if alone and not groups and not self._paged:
            length = int(lengths.flat[0])
            if (lengths == length).all():
                entry = self._entries.together(arrays, length)
                return self._plan(entry, True).run(entry.arrays, score, entry)
        tasks: list[tuple[Any, ...]] = [(group.cost, group) for group in groups]
        if alone:
            for entry in self._entries.each(arrays, keys, lengths, alone):
                plan = self._plan(entry)
                if plan.parallel:
                    plan.run(entry.arrays, score, entry)
                else:
                    tasks.append((plan.cost, plan, entry))
        tasks.sort(key=lambda task: -task[0])
        seen = None if self._short is None or not groups else self._short.seen(arrays)
        flat = lengths.reshape(-1)
        missed: list[int] = []

        def work(task: tuple[Any, ...]) -> None:
            if len(task) == 3:
                _, plan, entry = task
                plan.run(entry.arrays, score, entry)
            else:
                missed.extend(self._attend_group(seen, task[1], flat))

        cost = sum(task[0] for task in tasks)
        thread_pool.run(tasks, lambda: work, cost > _PARALLEL_ENTRIES_FLOP)
        for entry in self._entries.each(arrays, keys, lengths, sorted(missed)) if missed else ():
            self._plan(entry).run(entry.arrays, score, entry)

    def _attend_group(self, seen: Any, group: Group, lengths: Array) -> Sequence[int]:
        """Compute a group of short entries; return the numbers of those that are to be again."""
        assert self._short is not None
        steps = Steps.unused(self._dtype)
        with np.errstate(all="ignore"):
            right = self._short.attend(steps, seen, group, lengths)
        steps.keep()
        return () if right else range(group.begin, group.end)

    def _plan(self, entry: key_entries.Entry, together: bool = False) -> _Tasks:
        plan = self._plans.get((entry.length, together))
        if plan is None:
            problem, *views = self._entries.problem_of(entry, together)
            plan = _Tasks(problem, views, self._dtype, None)
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[entry.length, together] = plan
        return plan


def _flop_per_score(problem: attention_problem.Problem) -> float:
    """Return how long a score takes, in operations of a product.

    Reading keys for few queries takes as long as the products of `_READING_QUERIES`.
    """
    reading = max(1.0, _READING_QUERIES / max(1, problem.q_len))
    return 2 * (problem.head_dim + problem.v_dim) * reading


def _wanted_tasks(problem: attention_problem.Problem) -> int:
    """Return how many tasks a problem should be split into."""
    scores = math.prod(problem.batch) * problem.q_len * problem.k_len
    return max(1, min(_MOST_TASKS, int(scores * _flop_per_score(problem) / _TASK_FLOP)))


def _bytes_of_entry(
    problem: attention_problem.Problem, tile: tile_sizes.Tile, dtype: np.dtype[Any]
) -> int:
    """Return what a tile of one batch entry takes of the cache, keys that are read once apart."""
    if _reads_once(problem, dtype):
        rows = problem.q_len * (tile.tile_n + problem.head_dim + problem.v_dim + 2)
        return max(1, rows * dtype.itemsize)
    return tile_sizes.footprint(*tile, problem.head_dim, problem.v_dim, dtype.itemsize)


def _reads_once(problem: attention_problem.Problem, dtype: np.dtype[Any]) -> bool:
    """Whether keys and values are read once, from where they are."""
    direct = problem.dtype == dtype
    if problem.pages is not None:
        direct = key_entries.reads_in_place(problem, dtype)
    return direct and problem.q_len <= _FEW_QUERIES


def planned_tile(problem: attention_problem.Problem, dtype: np.dtype[Any]) -> tile_sizes.Tile:
    """Return the tile for a problem without a BitMask, computed in `dtype`."""
    wanted = _wanted_tasks(problem)
    most, entries = _MOST_M, math.prod(problem.batch)
    if problem.lower is not None and problem.upper is not None:
        # A tile's queries together see tile_m keys more than each of them does.
        most = min(most, max(_LEAST_M, problem.upper - problem.lower))
    if problem.upper is not None:
        # Few scores above the diagonal are computed in vain, and tiles are not too small to pay.
        most = min(most, max(4 * _LEAST_M, problem.q_len // 4))
    while most > _LEAST_M and entries * math.ceil(problem.q_len / most) < wanted:
        most //= 2
    if max(problem.head_dim, problem.v_dim) > _CACHED_DIM:
        tile = _tile_of_wide_rows(problem, dtype)
    else:
        tile = tile_sizes.tile_sizes(
            problem.head_dim,
            problem.v_dim,
            dtype.itemsize,
            tile_sizes.CPU_CACHE_BYTES,
            problem.q_len,
            problem.k_len,
            max_m=most,
        )
    if _reads_once(problem, dtype):
        tile = tile._replace(tile_n=min(_FEW_N, max(1, problem.k_len)))
    # Even tiles, rather than a short one at the end.
    rows = math.ceil(problem.q_len / tile.tile_m) or 1
    return tile._replace(tile_m=math.ceil(problem.q_len / rows / 16) * 16 or 16)


def _tile_of_wide_rows(problem: attention_problem.Problem, dtype: np.dtype[Any]) -> tile_sizes.Tile:
    """Return the tile for a head_dim beyond `_CACHED_DIM`."""
    few = max(16, _LARGE_ELEMENTS // max(problem.head_dim, problem.v_dim) // 16 * 16)
    tile_n = _LARGE_N if problem.dtype == dtype else min(_LARGE_N, few)
    return tile_sizes.Tile(min(_LARGE_M, few), min(tile_n, max(1, problem.k_len)))


def _rows(problem: attention_problem.Problem, tile_m: int, mask: BitMask | None) -> list[_Rows]:
    """Return the queries of each task of a stack, those with the most scores first."""
    bounds = [
        (begin, min(begin + tile_m, problem.q_len)) for begin in range(0, problem.q_len, tile_m)
    ]
    if mask is not None and problem.k_len:
        bounds = mask_rows.bounds(mask, tile_m)
    rows = []
    for begin, end in bounds:
        first, last = tiled_attention.visible_keys(problem, begin, end)
        rows.append(_Rows(begin, end, (end - begin) * (last - first)))
    return sorted(rows, key=lambda row: -row.cost)


class _Stack:
    """Operands of stacked batch entries.

    With `pairs`, keys and values are dense and of compute dtype while they are in use.
    """

    def __init__(
        self,
        x: tiled_attention.Operands,
        dtype: np.dtype[Any],
        users: int,
        pairs: Pairs | None,
    ) -> None:
        self.pairs = pairs
        self._given = self._ready = x
        self._dtype = dtype
        self._users = users
        self._lock = threading.Lock()

    def borrow(self) -> tiled_attention.Operands:
        if self.pairs is None:
            return self._given
        with self._lock:
            x = self._given
            if self._ready is x:
                k, v = (dense_of(a, self._dtype) for a in (x.k, x.v))
                self._ready = replace(x, k=k, v=v)
            return self._ready

    def give_back(self) -> None:
        if self.pairs is None:
            return
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._ready = self._given
