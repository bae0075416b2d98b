"""Slices of masks along queries and keys, at any offset."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fa_cupy import layouts
from fa_cupy.core import checks
from fa_cupy.layouts import BLOCK
from fa_cupy.masks import blocks, entries
from fa_cupy.masks.blocks import FULL, PARTIAL, WORDS, Blocks, Grid

Array = npt.NDArray[Any]
Span = tuple[int, int]  # begin and end of positions


def parts_of(index: Any, shape: tuple[int, ...]) -> tuple[Any, Span, Span]:
    """Return the index of batch entries, and the spans of queries and keys.

    Parameters
    ----------
    index : object
        As of an array of `shape`: for axes of the batch any, for the last two slices of step 1.
    shape : tuple of int
        Of the mask.

    Raises
    ------
    IndexError, TypeError
        For too many indices, and for queries or keys without a slice of step 1.
    """
    given = index if isinstance(index, tuple) else (index,)
    batch = len(shape) - 2
    axes = [_axes_of(part) for part in given]
    dots = sum(part is Ellipsis for part in given)
    spans = [(0, n) for n in shape[-2:]]
    if not dots and sum(axes) <= batch:
        return index, spans[0], spans[1]
    if dots > 1 or sum(axes) > len(shape):
        what = f"{dots} Ellipses, want one" if dots > 1 else f"{sum(axes)} indices"
        raise IndexError(f"BitMask: the index of a mask of shape {shape} has {what}")
    of_batch, axis = [], 0
    for part, count in zip(given, axes, strict=True):
        if axis + count <= batch:
            of_batch.append(part)
        elif part is Ellipsis:
            pass  # it stands for queries, for keys or for nothing
        elif axis < batch or not isinstance(part, slice):
            what = "queries" if axis <= batch else "keys"
            raise IndexError(f"BitMask: {what} have index {checks.show(part)}, want a slice")
        else:
            spans[axis - batch] = _span(part, shape[axis])
        axis += len(shape) - sum(axes) if part is Ellipsis else count
    return tuple(of_batch), spans[0], spans[1]


def _axes_of(part: Any) -> int:
    """Return how many axes a part of an index takes."""
    if part is None or part is Ellipsis or isinstance(part, (bool, np.bool_)):
        return 0
    if isinstance(part, list):
        try:
            part = np.asarray(part)
        except ValueError:  # lists of several lengths; NumPy's error tells more
            return 1
    return part.ndim if getattr(part, "dtype", None) == np.bool_ else 1


def _span(part: slice, length: int) -> Span:
    try:
        begin, end, step = part.indices(length)
    except (TypeError, ValueError) as error:
        raise type(error)(f"BitMask: {error}") from None
    if step != 1:
        raise IndexError(f"BitMask: a slice of queries or keys has step {step}, want 1")
    return begin, max(begin, end)


def cut(grid: Grid, matrix: Blocks, rows: Span, cols: Span) -> Blocks:
    """Return the blocks of a part of a matrix.

    Each block of the part covers up to four old ones, the same quarters of all. Where all of them
    are full, it is full. The bits of others are put together.
    """
    own = Grid(rows[1] - rows[0], cols[1] - cols[0])
    row, key = entries.decoded(matrix.entries)
    inside = (rows[0] <= row) & (row < rows[1]) & (cols[0] <= key) & (key < cols[1])
    codes = entries.encoded(row[inside] - rows[0], key[inside] - cols[0])
    dense = _cut_words(grid, own, matrix, rows[0], cols[0])
    if not len(codes):
        return dense
    return blocks.combined(own, dense, blocks.of_entries(own, codes), np.bitwise_or)


def _cut_words(grid: Grid, own: Grid, matrix: Blocks, row: int, col: int) -> Blocks:
    """Return the blocks of the part of size `own` from a row and a column, without entries."""
    pieces = [(r, c) for r in _pieces(row) for c in _pieces(col)]
    keys = _candidates(grid, own, matrix, pieces)
    q_tile, k_tile = np.divmod(keys, max(1, own.k_tiles))
    old, states = [], []
    for (q_step, q_part, _), (k_step, k_part, _) in pieces:
        # A quarter beyond the end of the part decides nothing.
        inside = (BLOCK * q_tile + q_part.start < own.q_len) & (
            BLOCK * k_tile + k_part.start < own.k_len
        )
        old.append(np.where(inside, (q_tile + q_step) * grid.k_tiles + k_tile + k_step, 0))
        states.append(np.where(inside, matrix.find(old[-1])[0], FULL))
    full = np.all([state == FULL for state in states], axis=0)
    mixed = np.flatnonzero(~full)
    if len(pieces) == 1:  # blocks are where they were
        words = matrix.words[matrix.find(old[0][mixed])[1]]
        return blocks.tightened(own, keys[mixed], words, keys[full])
    words = np.empty((len(mixed), *WORDS), np.uint32)
    for chunk in blocks.chunks(len(mixed)):
        bits = np.zeros((chunk.stop - chunk.start, BLOCK, BLOCK), np.bool_)
        for ((_, *r), (_, *c)), at, state in zip(pieces, old, states, strict=True):
            found = _bits(matrix, at[mixed[chunk]], state[mixed[chunk]])
            bits[:, r[0], c[0]] = found[:, r[1], c[1]]
        words[chunk] = layouts.pack(bits)
    return blocks.tightened(own, keys[mixed], words, keys[full])


def _pieces(begin: int) -> list[tuple[int, slice, slice]]:
    """Return which old tiles a new one covers: (old number - new one, part of new, part of old)."""
    tile, at = divmod(begin, BLOCK)
    if not at:
        return [(tile, slice(0, BLOCK), slice(0, BLOCK))]
    return [
        (tile, slice(0, BLOCK - at), slice(at, BLOCK)),
        (tile + 1, slice(BLOCK - at, BLOCK), slice(0, at)),
    ]


def _candidates(grid: Grid, own: Grid, matrix: Blocks, pieces: Any) -> Array:
    """Return the keys of blocks of the part that cover an old one that is not empty."""
    q_tile, k_tile = np.divmod(np.concatenate([matrix.partial, matrix.full]), max(1, grid.k_tiles))
    found = [np.empty(0, np.int64)]
    for (q_step, *_), (k_step, *_) in pieces:
        q, k = q_tile - q_step, k_tile - k_step
        inside = (q >= 0) & (q < own.q_tiles) & (k >= 0) & (k < own.k_tiles)
        found.append(q[inside] * own.k_tiles + k[inside])
    return np.unique(np.concatenate(found))


def _bits(matrix: Blocks, keys: Array, states: Array) -> Array:
    """Return the bits of blocks, shape (n, 128, 128); a full block is True outside too."""
    bits = np.zeros((len(keys), BLOCK, BLOCK), np.bool_)
    bits[states == FULL] = True
    partial = np.flatnonzero(states == PARTIAL)
    place = matrix.find(keys[partial])[1]
    bits[partial] = layouts.unpack(matrix.words[place])
    return bits
