"""How the queries of a masked call are cut into rows of tiles, and batch entries into stacks.

High tiles read keys and values less often, and BLAS is faster with them, but the keys that some
query of a tile sees are computed for all of them. Where rows of blocks see about the same keys,
tiles are as high as without a mask, and where they do not, each row of blocks has its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from fa_cupy._bitmask import BitMask
from fa_cupy.cpu.masks import entries, thin
from fa_cupy.layouts import BLOCK
from fa_cupy.masks import export
from fa_cupy.tiled import tile_sizes

Array = npt.NDArray[Any]

# Most queries of a task without other blocks than sparse ones, and than thin ones.
_MOST_SPARSE = 1024
_MOST_THIN = 256
# Time of a tile by the rows of blocks that it is high, for each of its blocks; and that of a row of
# tiles apart from them.
_BLOCK_COST = {1: 1.15, 2: 1.05, 3: 1.02}
_ROW_COST = 0.5
# Batch entries share the unpacking of a mask; more of them would make narrow tiles.
_MOST_STACKED = 4


def of_small(mask: BitMask) -> Array:
    """Return a mask of small matrices (`Grid.is_small`) as an array that broadcasts to its shape.

    That takes no more memory than the mask.
    """
    shared = tuple(slice(1) if step == 0 else slice(None) for step in mask.entries.strides)
    numbers = mask.entries[shared]
    seen = export.of_small(mask._grid, mask._store.host(), numbers.reshape(-1))
    return seen.reshape(*numbers.shape, *mask._grid)


def tile_of(mask: BitMask, tile: tile_sizes.Tile) -> tile_sizes.Tile:
    """Return a tile like `tile` whose edges lie on those of blocks, or half of one."""
    if _is_single(mask):
        return tile
    height = max(1, tile.tile_m // BLOCK) * BLOCK if tile.tile_m > BLOCK // 2 else BLOCK // 2
    return tile_sizes.Tile(height, max(1, tile.tile_n // BLOCK) * BLOCK)


def width(mask: BitMask, tile: tile_sizes.Tile, stacked: int, rows: int) -> int:
    """Return how many keys a tile of so many batch entries and queries has, of as many scores."""
    if _is_single(mask):
        return tile.tile_n
    scores = tile.tile_m * tile.tile_n // max(1, stacked * rows)
    return max(1, scores // BLOCK) * BLOCK


def most_stacked(mask: BitMask, tile: tile_sizes.Tile, room: int, most: int) -> int:
    """Return how many batch entries are stacked at most.

    `room` are as many as leave enough tasks, `most` what they are of an array as mask.
    """
    if _is_single(mask):
        return most
    return min(_MOST_STACKED, room, tile.tile_m * tile.tile_n // BLOCK**2)


def of_one_matrix(mask: BitMask, stacks: Iterable[list[Any]]) -> Iterator[list[Any]]:
    """Yield stacks whose fifth array is the entries of a mask, in parts of one matrix each.

    What one matrix shows need not be computed for others. Those of a single block stay together.
    """
    for x in stacks:
        numbers = x[4][:, 0, 0]
        ends = [0, *(np.flatnonzero(np.diff(numbers)) + 1), len(numbers)]
        if _is_single(mask) or len(ends) == 2:
            yield x
            continue
        for begin, end in itertools.pairwise(ends):
            yield [None if array is None else array[begin:end] for array in x]


def _is_single(mask: BitMask) -> bool:
    """Whether each matrix is a block that is computed as a tile."""
    return mask._grid.q_tiles * mask._grid.k_tiles == 1 and not entries.any_of(mask)


def bounds(mask: BitMask, height: int) -> list[tuple[int, int]]:
    """Return (begin, end) of the queries of each task, `height` of them at most as a rule.

    There may be more where all blocks are sparse.
    """
    q_len, most = mask._grid.q_len, height // BLOCK
    if most == 0 or _is_single(mask):
        return [(begin, min(begin + height, q_len)) for begin in range(0, q_len, height)]
    heights = _heights(mask, most)
    found: list[tuple[int, int]] = []
    for group, step in enumerate(heights):
        begin, end = (min(i * most * BLOCK, q_len) for i in (group, group + 1))
        if step:
            starts = range(begin, end, int(step) * BLOCK)
            found += [(row, min(row + int(step) * BLOCK, end)) for row in starts]
        elif group and not heights[group - 1] and end - found[-1][0] <= _MOST_SPARSE:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return found


def _heights(mask: BitMask, most: int) -> Array:
    """Return how many rows of blocks the tiles have of each `most`; 0 where all are sparse."""
    lists, grid = mask._store.host(), mask._grid
    used = np.unique(mask.entries).astype(np.int64)
    t = (used[:, None] * grid.q_tiles + np.arange(grid.q_tiles)).reshape(-1)
    row, place, tile = lists.listed(t, full=False)
    full_row, _, full_tile = lists.listed(t, full=True)
    groups = -(-grid.q_tiles // most)
    heights = np.zeros(groups, np.int64)
    if thin.any_of(mask):
        is_thin = mask._store.bits_of_each()[place] < thin.LEAST_BITS
        heights[row[is_thin] % grid.q_tiles // most] = min(most, _MOST_THIN // BLOCK)
        row, tile = row[~is_thin], tile[~is_thin]
    row, tile = np.concatenate([row, full_row]), np.concatenate([tile, full_tile])
    matrix, q_tile = np.divmod(row, grid.q_tiles)
    heights[q_tile // most] = 1
    least = np.full(groups, np.inf)
    for height in (h for h in (1, 2, most) if h <= most):
        steps = -(-most // height)
        # Blocks of keys that some query of a tile sees, each once.
        of_tile = (matrix * groups + q_tile // most) * steps + q_tile % most // height
        seen = np.unique(of_tile * grid.k_tiles + tile) // grid.k_tiles // steps % groups
        cost = np.bincount(seen, minlength=groups) * (height * _BLOCK_COST.get(height, 1.0))
        cost += _ROW_COST * steps * len(used)
        better = (
            (cost < least) & (heights > 0) & (np.bincount(q_tile // most, minlength=groups) > 0)
        )
        heights[better], least[better] = height, cost[better]
    return heights
