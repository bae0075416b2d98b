"""What masks are turned into: arrays of bool, of block states, sparse matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fa_cupy import layouts
from fa_cupy.layouts import BLOCK
from fa_cupy.masks import entries as sparse_entries
from fa_cupy.masks.blocks import FULL, PARTIAL, BlockLists, Blocks, Grid, chunks, joined

Array = npt.NDArray[Any]


def used(grid: Grid, lists: BlockLists, entries: Array) -> tuple[list[Blocks], Array]:
    """Return the matrices that some entry uses, and the entries by their numbers there."""
    numbers, places = np.unique(entries, return_inverse=True)
    return [lists.blocks(grid, int(n)) for n in numbers], places.reshape(entries.shape)


def compact(grid: Grid, lists: BlockLists, entries: Array) -> tuple[BlockLists, Array]:
    """Return the lists without matrices that no entry uses, and the entries by their numbers."""
    matrices, entries = used(grid, lists, entries)
    if len(matrices) * grid.q_tiles + 1 < len(lists.full_begin):
        lists = joined(grid, matrices)
    return lists, entries


def listed(grid: Grid, lists: BlockLists, entries: Array) -> tuple[int, int]:
    """Return how many blocks are partial and full, those that entries share each time."""
    numbers = entries.astype(np.int64).reshape(-1)
    rows = numbers * grid.q_tiles
    partial, full = (
        int((begin[rows + grid.q_tiles] - begin[rows]).sum())
        for begin in (lists.partial_begin, lists.full_begin)
    )
    if len(lists.entry_keys):
        for matrix, times in zip(*np.unique(numbers, return_counts=True), strict=True):
            codes = lists.blocks(grid, int(matrix)).entries
            partial += int(times) * len(sparse_entries.listed(codes, grid.k_tiles))
    return partial, full


def bits_of_row(lists: BlockLists, t: int, begin: int, end: int) -> tuple[Array, Array]:
    """Return what is not empty of a row of blocks, sparse blocks left out.

    Parameters
    ----------
    lists : BlockLists
    t : int
        The row.
    begin, end : int
        Key tiles to look among.

    Returns
    -------
    tiles : ndarray of int32, shape (n,)
        Key tiles, ascending.
    bits : ndarray of bool, shape (n, 128, 128)
        All True for full blocks, outside the matrix too.
    """
    partial, words, full = lists.row(t, begin, end)
    tiles = np.concatenate([partial, full])
    bits = np.ones((len(tiles), BLOCK, BLOCK), np.bool_)
    bits[: len(partial)] = layouts.unpack(words)
    if not len(partial) or not len(full):
        return tiles, bits
    order = np.argsort(tiles)
    return tiles[order], bits[order]


def block_states(grid: Grid, lists: BlockLists, entries: Array) -> npt.NDArray[np.int8]:
    """Return the state of each block, shape (..., q_tiles, k_tiles)."""
    states = np.zeros((*entries.shape, grid.q_tiles * grid.k_tiles), np.int8)
    for index in np.ndindex(entries.shape):
        blocks = lists.blocks(grid, int(entries[index]))
        states[index][blocks.partial] = PARTIAL
        states[index][sparse_entries.listed(blocks.entries, grid.k_tiles)] = PARTIAL
        states[index][blocks.full] = FULL
    return states.reshape(*entries.shape, grid.q_tiles, grid.k_tiles)


def dense(grid: Grid, lists: BlockLists, entries: Array) -> npt.NDArray[np.bool_]:
    """Return the mask as an array of bool, shape (..., q_len, k_len)."""
    if grid.is_single:
        return of_single(grid, lists, entries.reshape(-1)).reshape(*entries.shape, *grid)
    seen = np.empty((*entries.shape, *grid), np.bool_)
    whole = np.empty((BLOCK, grid.k_tiles, BLOCK), np.bool_)
    for index in np.ndindex(entries.shape):
        for q_tile, begin, end in grid.rows():
            t = int(entries[index]) * grid.q_tiles + q_tile
            tiles, bits = bits_of_row(lists, t, 0, grid.k_tiles)
            whole.fill(False)
            whole[:, tiles] = bits.swapaxes(0, 1)
            seen[index][begin:end] = whole.reshape(BLOCK, -1)[: end - begin, : grid.k_len]
        firsts, keys = lists.entries_of(grid, int(entries[index]))
        seen[index][np.repeat(np.arange(grid.q_len), np.diff(firsts)), keys] = True
    return seen


def of_small(grid: Grid, lists: BlockLists, numbers: Array) -> npt.NDArray[np.bool_]:
    """Return matrices that are small (`Grid.is_small`) as an array, all at once."""
    seen = np.zeros(len(numbers) * grid.q_len * grid.k_len, np.bool_)
    if len(lists.entry_keys) and len(numbers):
        first, last = int(numbers[0]), int(numbers[-1])
        if last - first == len(numbers) - 1 and (np.diff(numbers) == 1).all():
            ends = lists.entry_begin[first * grid.q_len : (last + 1) * grid.q_len + 1]
            counts, keys = np.diff(ends), lists.entry_keys[ends[0] : ends[-1]]
        else:
            rows = numbers[:, None].astype(np.int64) * grid.q_len + np.arange(grid.q_len)
            begin = lists.entry_begin[rows.reshape(-1)]
            counts = lists.entry_begin[rows.reshape(-1) + 1] - begin
            # Places of all keys: those of a row follow each other.
            before = np.cumsum(counts) - counts
            keys = lists.entry_keys[np.repeat(begin - before, counts) + np.arange(counts.sum())]
        seen[np.repeat(np.arange(0, seen.size, grid.k_len), counts) + keys] = True
    found = seen.reshape(len(numbers), *grid)
    found[lists.full_begin[numbers + 1] > lists.full_begin[numbers]] = True
    return found


def of_single(grid: Grid, lists: BlockLists, numbers: Array) -> npt.NDArray[np.bool_]:
    """Return matrices of a single block (`Grid.is_single`) as an array."""
    seen = of_small(grid, lists, numbers)
    begin = lists.partial_begin
    partial = np.flatnonzero(begin[numbers + 1] > begin[numbers])
    for part in chunks(len(partial)):
        at = partial[part]
        rows = layouts.row_bytes(lists.words[begin[numbers[at]]])[:, : grid.q_len]
        seen[at] = np.unpackbits(rows, axis=2, count=grid.k_len, bitorder="little")
    return seen


def sums(grid: Grid, lists: BlockLists, entries: Array, axes: Sequence[int]) -> Array:
    """Return numbers of visible pairs: the mask summed over `axes`, which are counted from 0."""
    over = tuple(axis for axis in axes if axis < entries.ndim)
    by_query, by_key = (entries.ndim + i in axes for i in (1, 0))
    if grid.is_small and not (by_query or by_key):
        counted: Array = dense(grid, lists, entries).sum(axis=over, dtype=np.int64)
        return counted
    if not (by_query or by_key):
        kept = [n for axis, n in enumerate(entries.shape) if axis not in over]
        total = np.zeros((*kept, *grid), np.int64)
        for index in np.ndindex(entries.shape):
            place = tuple(i for axis, i in enumerate(index) if axis not in over)
            total[place] += dense(grid, lists, entries[index])
        return total
    if grid.is_small:
        numbers, places = np.unique(entries, return_inverse=True)
        places = places.reshape(entries.shape)
        seen = of_small(grid, lists, numbers)
        counts = seen.sum(axis=2 if by_query else 1, dtype=np.int64)
    else:
        matrices, places = used(grid, lists, entries)
        counts = np.zeros((len(matrices), grid.q_len if by_query else grid.k_len), np.int64)
        for matrix, of_matrix in zip(matrices, counts, strict=True):
            of_matrix += seen_by(grid, matrix, keys=not by_query)
    if by_query and by_key:
        over = (*over, entries.ndim)
    found: Array = counts[places].sum(axis=over)
    return found


def seen_by(grid: Grid, matrix: Blocks, keys: bool) -> npt.NDArray[np.int64]:
    """Return how many keys each query of a matrix sees, or how many queries see each key."""
    own, other = (1, 0) if keys else (0, 1)
    tiles = (grid.q_tiles, grid.k_tiles)
    found = np.zeros((tiles[own], BLOCK), np.int64)
    at = np.divmod(matrix.full, max(1, grid.k_tiles))
    across = np.minimum(BLOCK, grid[other] - BLOCK * at[other])
    found += np.bincount(at[own], across, minlength=tiles[own]).astype(np.int64)[:, None]
    at = np.divmod(matrix.partial, max(1, grid.k_tiles))
    for part in chunks(len(matrix.partial)):
        bits = layouts.unpack(matrix.words[part])
        np.add.at(found, at[own][part], bits.sum(axis=1 + other, dtype=np.int64))
    counts: npt.NDArray[np.int64] = found.reshape(-1)[: grid[own]]
    pairs = sparse_entries.decoded(matrix.entries)[own]
    counts += np.bincount(pairs, minlength=grid[own])
    return counts


def csr(grid: Grid, lists: BlockLists, entry: int) -> Any:
    """Return one matrix of the mask as a `scipy.sparse.csr_array` of bool."""
    from scipy import sparse

    parts = [lists.blocks(grid, entry).entries]
    for q_tile, begin, end in grid.rows():
        tiles, bits = bits_of_row(lists, entry * grid.q_tiles + q_tile, 0, grid.k_tiles)
        rows, tile, col = np.nonzero(bits.swapaxes(0, 1)[: end - begin])
        cols = tiles[tile].astype(np.int64) * BLOCK + col
        inside = cols < grid.k_len
        parts.append(sparse_entries.encoded(begin + rows[inside], cols[inside]))
    codes = np.concatenate(parts)  # in order but for the first part
    rows, indices = sparse_entries.decoded(np.sort(codes) if len(parts[0]) else codes)
    counts = np.bincount(rows, minlength=grid.q_len)
    indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    return sparse.csr_array((np.ones(len(indices), np.bool_), indices, indptr), shape=grid)
