"""From arrays, indices, sparse matrices and functions to blocks, one row of blocks at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fa_cupy import layouts
from fa_cupy.layouts import BLOCK
from fa_cupy.masks import blocks, entries
from fa_cupy.masks import checks as inputs
from fa_cupy.masks.blocks import FULL, PARTIAL, BlockLists, Blocks, Builder, Grid

Array = npt.NDArray[Any]
Made = TypeVar("Made")

_ENTRIES = 1 << 20  # elements of a sparse matrix that are looked at together: 8 MB of codes


def from_rows(
    make: Callable[[Grid, Sequence[Blocks] | BlockLists, Array], Made],
    grid: Grid,
    array: Array,
    add_row: Callable[[Builder, Array, int, int, int], None],
) -> Made:
    """Return ``make(grid, matrices, entries)`` for an array with a matrix a batch entry.

    Parameters
    ----------
    make : callable
    grid : Grid
        Of the matrices.
    array : ndarray, shape (..., q_len, any)
        A batch axis of stride 0 is gone through once.
    add_row : callable
        ``add_row(builder, matrix, q_tile, begin, end)`` adds one row of blocks.
    """
    batch = array.shape[:-2]
    own = [min(n, 1) if stride == 0 else n for n, stride in zip(batch, array.strides, strict=False)]
    places = np.broadcast_to(np.arange(math.prod(own)).reshape(own), batch)
    if grid.is_small and add_row is add_dense:
        own_matrices = array[tuple(slice(n) for n in own)]
        return make(grid, blocks.of_small(own_matrices.reshape(-1, *grid)), places)
    matrices = []
    for index in np.ndindex(*own):
        builder = Builder(grid)
        for row in grid.rows():
            add_row(builder, array[index], *row)
        matrices.append(builder.finish())
    return make(grid, matrices, places)


def add_dense(builder: Builder, matrix: Array, q_tile: int, begin: int, end: int) -> None:
    """Add a row of blocks of a matrix of bool."""
    if matrix.size and 0 in matrix.strides:  # an empty array may have any strides
        _add_repeated(builder, matrix, q_tile, begin, end)
        return
    for part in blocks.chunks(builder.grid.k_tiles):
        some = matrix[begin:end, part.start * BLOCK : part.stop * BLOCK]
        builder.add(q_tile, np.arange(part.start, part.stop), _words_of(some))


def _add_repeated(builder: Builder, matrix: Array, q_tile: int, begin: int, end: int) -> None:
    """Add a row of blocks of a matrix whose rows, or columns, are all the same one in memory."""
    grid = builder.grid
    some, whole = np.zeros(grid.k_tiles, np.bool_), np.zeros(grid.k_tiles, np.bool_)
    if matrix.strides[0] == 0:
        firsts = BLOCK * np.arange(grid.k_tiles)
        np.logical_or.reduceat(matrix[0], firsts, out=some)
        np.logical_and.reduceat(matrix[0], firsts, out=whole)
    else:
        column = matrix[begin:end, 0]
        some[:], whole[:] = column.any(), column.all()
    builder.add_full(q_tile, np.flatnonzero(whole))
    adding_listed(q_tile * grid.k_tiles + np.flatnonzero(some & ~whole))(
        builder, matrix, q_tile, begin, end
    )


def adding_listed(keys: Array) -> Callable[[Builder, Array, int, int, int], None]:
    """Return a function for `from_rows` that adds the blocks with these keys, ascending, only."""

    def add(builder: Builder, matrix: Array, q_tile: int, begin: int, end: int) -> None:
        grid = builder.grid
        first, last = np.searchsorted(keys, [q_tile * grid.k_tiles, (q_tile + 1) * grid.k_tiles])
        tiles = keys[first:last] - q_tile * grid.k_tiles
        for part in blocks.chunks(len(tiles)):
            cols = (BLOCK * tiles[part, None] + np.arange(BLOCK)).reshape(-1)
            cols = cols[cols < grid.k_len]  # only the last block sticks out
            builder.add(q_tile, tiles[part], _words_of(matrix[begin:end, cols]))

    return add


def add_indices(builder: Builder, matrix: Array, q_tile: int, begin: int, end: int) -> None:
    """Add a row of blocks in which each query sees the keys of its row of `matrix`."""
    keys = matrix[begin:end]
    queries, place = np.nonzero(keys >= 0)
    codes = entries.encoded(begin + queries, keys[queries, place].astype(np.int64))
    builder.add_entries(entries.united(codes))


def of_csr(grid: Grid, csr: Any) -> Blocks:
    """Return the blocks of a canonical CSR matrix."""
    builder = Builder(grid)
    row = 0
    while row < grid.q_len:
        # As many rows of blocks as have `_ENTRIES` elements, one at least.
        last = np.searchsorted(csr.indptr, csr.indptr[row] + _ENTRIES, side="right") - 1
        end = min(grid.q_len, max(row + BLOCK, int(last) // BLOCK * BLOCK))
        ends = csr.indptr[row : end + 1]
        part = slice(ends[0], ends[-1])
        rows = np.repeat(np.arange(row, end), np.diff(ends))
        codes = entries.encoded(rows, csr.indices[part])
        stored = csr.data[part] != 0
        builder.add_entries(codes if stored.all() else codes[stored])
        row = end
    return builder.finish()


def of_function(
    name: str,
    grid: Grid,
    function: Callable[..., Any],
    block_states: Callable[..., Any] | None,
    index: tuple[int, ...],
) -> Blocks:
    """Return the blocks of a batch entry; see `fa_cupy.BitMask.from_function`."""
    builder = Builder(grid)
    k_begin = BLOCK * np.arange(grid.k_tiles)
    k_end = np.minimum(k_begin + BLOCK, grid.k_len)
    for q_tile, begin, end in grid.rows():
        asked = np.arange(grid.k_tiles)
        if block_states is not None:
            found = block_states(*index, begin, end, k_begin.copy(), k_end.copy())
            states = inputs.fitted(name, "block_states", found, k_begin.shape)
            inputs.check_states(name, "what block_states returns", states, kinds="iu")
            builder.add_full(q_tile, np.flatnonzero(states == FULL))
            asked = np.flatnonzero(states == PARTIAL)
        queries = np.arange(begin, end)[:, None]
        for part in blocks.chunks(len(asked)):
            keys = (k_begin[asked[part], None] + np.arange(BLOCK)).reshape(1, -1)
            keys = keys[:, keys[0] < grid.k_len]  # only the last block sticks out
            found = function(*index, queries, keys)
            seen = inputs.fitted(name, "function", found, (end - begin, keys.shape[1]))
            if seen.dtype != np.bool_:
                raise TypeError(f"{name}: function returns dtype {seen.dtype}, want bool")
            builder.add(q_tile, asked[part], _words_of(seen))
    return builder.finish()


def _words_of(seen: Array) -> Array:
    """Return the words of one row of blocks from its bits, shape (at most 128, cols)."""
    count = -(-seen.shape[1] // BLOCK)
    bits = np.zeros((BLOCK, count * BLOCK), np.bool_)
    bits[: seen.shape[0], : seen.shape[1]] = seen
    words: Array = layouts.pack(bits.reshape(BLOCK, count, BLOCK).swapaxes(0, 1))
    return words
