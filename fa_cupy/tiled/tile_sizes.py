"""Tile sizes from a memory budget, and the memory traffic that follows from them.

A tile of attention holds, at one time,

====================  =====================  ==================================
what                  elements               lives for
====================  =====================  ==================================
queries               tile_m * head_dim      one row of tiles
keys                  tile_n * head_dim      one tile
values                tile_n * v_dim         one tile
scores                tile_m * tile_n        one tile
output accumulator    tile_m * v_dim         one row of tiles
maximum and sum       2 * tile_m             one row of tiles
====================  =====================  ==================================

and all of it has to fit the fast memory (`footprint` <= budget): a core's cache on a CPU, a
multiprocessor's shared memory on a GPU.

Among the pairs that fit, `tile_sizes` takes the one that moves the fewest elements for each score.
Keys and values are read once for every `tile_m` queries, which is (head_dim + v_dim) / tile_m
elements a score; the accumulator is read and written once for every `tile_n` keys, which is
2 * v_dim / tile_n elements a score.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# What a tile may take of a CPU core's caches: its L2, 1 or 2 MB on current server cores, and a
# share of the L3. Tiles that fit a 1 MB L2 measured 5 to 10 % slower, because every call on a tile
# costs some microseconds. Fixed rather than asked of the machine, so that results do not depend on
# it.
CPU_CACHE_BYTES = 3 << 20

# Largest dynamic shared memory of a thread block (CUDA C++ programming guide, "Technical
# specifications per compute capability").
SHARED_BYTES = {
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
}

# Tile edges tried: multiples of 16, which suits vector registers and tensor cores alike.
_EDGES = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


class Tile(NamedTuple):
    """Queries and keys of one tile of scores."""

    tile_m: int
    tile_n: int


def footprint(
    tile_m: int, tile_n: int, head_dim: int, v_dim: int, itemsize: int, score_itemsize: int = 0
) -> int:
    """Return the bytes that one tile holds.

    Parameters
    ----------
    tile_m, tile_n : int
        Queries and keys of the tile.
    head_dim, v_dim : int
        Sizes of the last axes of queries and values.
    itemsize : int
        Bytes of an input element.
    score_itemsize : int, optional
        Bytes of a score, a statistic or an accumulator element where they are wider than the
        inputs; `itemsize` by default.
    """
    inputs = tile_m * head_dim + tile_n * head_dim + tile_n * v_dim
    own = tile_m * tile_n + tile_m * v_dim + 2 * tile_m
    return inputs * itemsize + own * (score_itemsize or itemsize)


def tile_sizes(
    head_dim: int,
    v_dim: int,
    itemsize: int,
    budget_bytes: int,
    q_len: int,
    k_len: int,
    *,
    score_itemsize: int = 0,
    max_m: int = 1024,
    max_n: int = 1024,
) -> Tile:
    """Return the tile that moves the fewest elements a score among those that fit.

    Parameters
    ----------
    head_dim, v_dim, itemsize, score_itemsize
        As in `footprint`.
    budget_bytes : int
        Fast memory that the tile may take.
    q_len, k_len : int
        Problem size; no edge is longer than needed to cover it.
    max_m, max_n : int, optional
        Upper bounds on the edges.

    Returns
    -------
    Tile
        At least 16 by 16, even where that exceeds the budget: the work has to be done anyway.

    Examples
    --------
    >>> tile_sizes(64, 64, 4, 1 << 20, 4096, 4096)
    Tile(tile_m=384, tile_n=384)
    """
    best, best_cost = Tile(_EDGES[0], _EDGES[0]), float("inf")
    for m in _edges(q_len, max_m):
        for n in _edges(k_len, max_n):
            if footprint(m, n, head_dim, v_dim, itemsize, score_itemsize) > budget_bytes:
                continue
            cost = (head_dim + v_dim) / m + 2 * v_dim / n
            if cost < best_cost:
                best, best_cost = Tile(m, n), cost
    return best


def listed_runs(
    some: npt.NDArray[np.bool_], whole: npt.NDArray[np.bool_], step: int, keys: tuple[int, int]
) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of keys in runs of blocks that a tile of queries sees, or does in part.

    Parameters
    ----------
    some, whole : ndarray of bool
        Of each block of `step` keys: whether some query sees it, and whether all see all of it.
    step : int
    keys : (int, int)
        Ends of the keys that count.
    """
    state = np.add(some, whole, dtype=np.int8)
    changes = np.flatnonzero(np.diff(state)) + 1
    for begin, end in zip([0, *changes], [*changes, len(state)], strict=True):
        first, last = max(keys[0], begin * step), min(keys[1], end * step)
        if begin < end and state[begin] and first < last:
            yield int(first), int(last)


def joined_runs(runs: Iterable[tuple[int, int]], tile_n: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the runs of keys of tiles with `tile_n` keys at most.

    Parameters
    ----------
    runs : iterable of (int, int)
        (begin, end), ascending.
    tile_n : int

    Examples
    --------
    >>> list(joined_runs([(0, 128), (256, 384), (512, 1024)], 512))
    [[(0, 128), (256, 384), (512, 768)], [(768, 1024)]]
    """
    tile: list[tuple[int, int]] = []
    left = tile_n
    for begin, end in runs:
        while begin < end:
            stop = min(end, begin + left)
            tile.append((begin, stop))
            left -= stop - begin
            begin = stop
            if not left:
                yield tile
                tile, left = [], tile_n
    if tile:
        yield tile


def _edges(length: int, largest: int) -> Iterable[int]:
    for edge in _EDGES:
        if edge <= largest:
            yield edge
        if edge >= length:
            return


class Traffic(NamedTuple):
    """Bytes read from and written to main memory by one head of attention."""

    tiled: int
    plain: int


def traffic(
    q_len: int, k_len: int, head_dim: int, v_dim: int, itemsize: int, tile_m: int
) -> Traffic:
    """Return the main-memory traffic of tiled and of plain attention.

    Tiled attention reads queries and writes the output once, and reads all keys and values once
    for each of the ceil(q_len / tile_m) rows of tiles. Plain attention reads and writes the same
    arrays once, and besides them writes the scores, reads them for the softmax, writes the weights
    and reads those for the second product.

    Parameters
    ----------
    q_len, k_len, head_dim, v_dim : int
        Problem size, for one head.
    itemsize : int
        Bytes of an element, of the scores too.
    tile_m : int
        Queries of a tile.

    Examples
    --------
    >>> moved = traffic(4096, 4096, 64, 64, 2, tile_m=128)
    >>> moved.tiled, moved.plain
    (34603008, 136314880)
    """
    once = q_len * (head_dim + v_dim)
    keys_and_values = k_len * (head_dim + v_dim)
    rows = -(-q_len // tile_m)
    return Traffic(
        tiled=(once + rows * keys_and_values) * itemsize,
        plain=(once + keys_and_values + 4 * q_len * k_len) * itemsize,
    )
