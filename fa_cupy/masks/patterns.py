"""Blocks of masks that are described by a few numbers: segments of a sequence, local windows.

Only blocks in which a key may be visible are looked at, and only bits of partial ones are compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fa_cupy import layouts
from fa_cupy.layouts import BLOCK
from fa_cupy.masks import blocks
from fa_cupy.masks.blocks import WORDS, Blocks, Grid

Array = npt.NDArray[Any]
Reach = Sequence[tuple[int, int]]  # of each axis, how many positions before and after are visible


_CHUNK = 8  # blocks compared at a time, whose numbers stay in a cache

# Segments


def of_segments(grid: Grid, q_ids: Array, k_ids: Array | None) -> Blocks:
    """Return the blocks of a mask in which queries see the keys of their segment.

    Parameters
    ----------
    grid : Grid
    q_ids : ndarray of int, shape (q_len,)
        Segments in any order; a negative number is none.
    k_ids : ndarray of int, shape (k_len,), or None
        None for those of the queries.
    """
    numbers = _numbered([q_ids] if k_ids is None else [q_ids, k_ids])
    (q, q_met, q_one), (k, k_met, k_one) = (
        _by_tile(x, sum(map(len, numbers))) for x in (numbers[0], numbers[-1])
    )
    together = (q_met @ k_met.T).tocoo()  # blocks of a query and a key of one segment
    keys = np.sort(together.row.astype(np.int64) * grid.k_tiles + together.col)
    q_tile, k_tile = np.divmod(keys, max(1, grid.k_tiles))
    full = q_one[q_tile] & k_one[k_tile]
    mixed = np.flatnonzero(~full)
    words = np.empty((len(mixed), *WORDS), np.uint32)
    for part in blocks.chunks(len(mixed)):
        queries, others = q[q_tile[mixed[part]], :, None], k[k_tile[mixed[part]], None, :]
        words[part] = layouts.pack((queries == others) & (queries >= 0))
    return blocks.tightened(grid, keys[mixed], words, keys[full])


def _numbered(ids: list[Array]) -> list[Array]:
    """Return segments as int32 numbers from 0 on, the same in all arrays, and -1 for none."""
    # As uint64, since integers of mixed signs have no common dtype.
    values = np.concatenate([x.astype(np.uint64) for x in ids])
    numbers = np.unique(values, return_inverse=True)[1].astype(np.int32)
    numbers[np.concatenate([x < 0 for x in ids])] = -1
    return np.split(numbers, np.cumsum([len(x) for x in ids])[:-1])


def _by_tile(numbers: Array, count: int) -> tuple[Array, Any, Array]:
    """Return what is known of tiles of 128 positions in `count` segments.

    Returns
    -------
    padded : ndarray of int32, shape (tiles, 128)
        The numbers, and -1 beyond the last one.
    met : sparse array of bool, shape (tiles, count)
        True where a segment has a position in a tile.
    one : ndarray of bool, shape (tiles,)
        Whether all positions of a tile belong to one segment.
    """
    from scipy import sparse

    tiles = -(-len(numbers) // BLOCK)
    padded = np.full((tiles, BLOCK), -1, np.int32)
    padded.reshape(-1)[: len(numbers)] = numbers
    at = np.flatnonzero(numbers >= 0)
    coordinates = (at // BLOCK, numbers[at])
    met = sparse.csr_array((np.ones(len(at), np.bool_), coordinates), shape=(tiles, count))
    one = (padded == padded[:, :1]) & (padded >= 0)
    if tiles:
        one[-1, (len(numbers) - 1) % BLOCK + 1 :] = True
    return padded, met, one.all(axis=1)


# Windows


def of_window(shape: Sequence[int], reach: Reach) -> Blocks:
    """Return the blocks of a mask in which positions of an array see those nearby.

    Parameters
    ----------
    shape : sequence of int
        Of the array, whose positions are numbered in C order.
    reach : sequence of (before, after)
        For each axis.

    Notes
    -----
    If the first axis had no ends, two blocks would have the same bits when both tiles are moved
    along it by the same number of whole steps. So bits are computed for one tile of queries of each
    period, and the rows of the others are copies, cut at the ends of the matrix.
    """
    length = math.prod(shape)
    grid = Grid(length, length)
    step = math.prod(shape[1:])
    period = step // math.gcd(step, BLOCK) if length else 1
    partial, words, full = [], [np.empty((0, *WORDS), np.uint32)], []
    places, known = [], 0
    for first in range(min(period, grid.q_tiles)):
        tiles = _reached(shape, reach, first)
        bits = _window_words(shape, reach, first, tiles)
        state = bits.any(axis=(1, 2, 3)).astype(np.int8)
        state += (bits == 0xFFFFFFFF).all(axis=(1, 2, 3))
        kept = bits[state == blocks.PARTIAL]
        q_tile = np.arange(first, grid.q_tiles, period)[:, None]
        place = np.arange(known, known + len(kept))
        some = _keys(grid, q_tile, tiles[state == blocks.PARTIAL] - first)
        partial.append(some[some >= 0])
        places.append(np.broadcast_to(place, some.shape)[some >= 0])
        whole = _keys(grid, q_tile, tiles[state == blocks.FULL] - first)
        full.append(whole[whole >= 0])
        words.append(kept)
        known += len(kept)
    none = np.empty(0, np.int64)
    keys = np.concatenate([none, *partial])
    order = np.argsort(keys)
    chosen = np.concatenate([none, *places])[order]
    made = np.concatenate(words)[chosen]
    return blocks.tightened(grid, keys[order], made, np.sort(np.concatenate([none, *full])))


def _keys(grid: Grid, q_tile: Array, steps: Array) -> Array:
    """Return the keys of blocks `steps` to the right of the diagonal, -1 outside the matrix."""
    k_tile = q_tile + steps
    inside = (k_tile >= 0) & (k_tile < grid.k_tiles)
    keys: Array = np.where(inside, q_tile * grid.k_tiles + k_tile, -1)
    return keys


def _reached(shape: Sequence[int], reach: Reach, tile: int) -> Array:
    """Return the tiles of keys that a tile of queries sees, if the first axis had no ends."""
    first, last = BLOCK * tile, BLOCK * (tile + 1) - 1
    before, after = reach[-1]
    if len(shape) == 1:
        return np.arange((first - before) // BLOCK, (last + after) // BLOCK + 1)
    # The queries are pieces of lines along the last axis. What a piece sees of a line is a piece.
    width, outer = shape[-1], shape[:-1]
    lines = np.arange(first // width, last // width + 1)
    begin = np.maximum(np.maximum(first - lines * width, 0) - before, 0)
    end = np.minimum(np.minimum(last - lines * width, width - 1) + after, width - 1)
    steps = np.meshgrid(*(np.arange(-a, b + 1) for a, b in reach[:-1]), indexing="ij")
    number, inside = np.zeros(1, np.int64), np.ones(1, np.bool_)
    for axis, (at, by) in enumerate(zip(_coordinates(outer, lines), steps, strict=True)):
        seen = at[:, None] + by.reshape(-1)
        number = number * outer[axis] + seen
        if axis:
            inside = inside & (seen >= 0) & (seen < outer[axis])
    inside = np.broadcast_to(inside, number.shape)
    low = ((number * width + begin[:, None])[inside]) // BLOCK
    high = ((number * width + end[:, None])[inside]) // BLOCK + 1
    base, size = int(low.min()), int(high.max() - low.min()) + 1
    open_pieces = np.bincount(low - base, minlength=size) - np.bincount(high - base, minlength=size)
    return base + np.flatnonzero(np.cumsum(open_pieces))


def _window_words(shape: Sequence[int], reach: Reach, tile: int, tiles: Array) -> Array:
    """Return the words of blocks of a tile of queries, if the first axis had no ends."""
    within = np.arange(BLOCK)
    # Unsigned numbers in which no distance is taken for another one.
    kind = np.min_scalar_type(4 * (max(shape) + 4 * BLOCK))
    queries = [q.astype(kind) for q in _coordinates(shape, BLOCK * tile + within)]
    words = np.empty((len(tiles), *WORDS), np.uint32)
    size = (min(_CHUNK, len(tiles)), BLOCK, BLOCK)
    buffers = np.empty(size, kind), np.empty(size, np.bool_), np.empty(size, np.bool_)
    for begin in range(0, len(tiles), _CHUNK):
        some = tiles[begin : begin + _CHUNK, None]
        distance, near, seen = (x[: len(some)] for x in buffers)
        seen.fill(True)
        keys = _coordinates(shape, BLOCK * some + within)
        for (before, after), q, k in zip(reach, queries, keys, strict=True):
            np.subtract(k.astype(kind)[:, None, :], (q - kind.type(before))[:, None], out=distance)
            seen &= np.less_equal(distance, kind.type(before + after), out=near)
        words[begin : begin + _CHUNK] = layouts.pack(seen)
    return words


def _coordinates(shape: Sequence[int], positions: Array) -> list[Array]:
    """Return the coordinates of positions in C order, the first axis without ends."""
    found = []
    for n in shape[:0:-1]:
        positions, at = np.divmod(positions, n)
        found.append(at)
    return [positions, *found[::-1]]
