"""Attention over mask blocks with few bits that are 1, though enough to be kept as words.

Of a block with one pair in twenty, most of the work of a tile is in vain. The pairs of such *thin*
blocks are found bit by bit when they are computed, as a list of them takes more memory than words.
From there on they are entries as those of sparse blocks are (`fa_cupy.cpu.masks.entries`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fa_cupy import layouts
from fa_cupy._bitmask import BitMask
from fa_cupy.core.attention_problem import Problem
from fa_cupy.core.sparse_bias import SparseBias
from fa_cupy.cpu.masks import entries
from fa_cupy.cpu.tile_ops import Steps
from fa_cupy.layouts import BLOCK
from fa_cupy.masks.blocks import NOTHING
from fa_cupy.tiled import attention as tiled_attention
from fa_cupy.tiled import tile_sizes
from fa_cupy.tiled.softmax import Rows

Array = npt.NDArray[Any]

#: Bits of a block from which on a tile with a mask takes less time (validation/NOTES.md, "Masks").
LEAST_BITS = 1024
# Bits that are looked at together.
_BITS = 1 << 20


def any_of(mask: BitMask) -> bool:
    """Return whether a mask has thin blocks. Matrices of one block are stacked instead."""
    several = mask._grid.q_tiles * mask._grid.k_tiles > 1
    return several and bool((mask._store.bits_of_each() < LEAST_BITS).any())


def among(mask: BitMask, places: Array) -> Array:
    """Return which blocks are thin, given the places of their words as of `BlockLists.places`."""
    found = places >= 0
    found[found] = mask._store.bits_of_each()[places[found]] < LEAST_BITS
    return found


class Thin:
    """The thin blocks of one matrix of a mask.

    Parameters
    ----------
    problem : Problem
    mask : BitMask
    matrix : int
    bias : object
        May be a SparseBias.
    """

    def __init__(self, problem: Problem, mask: BitMask, matrix: int, bias: Any) -> None:
        self._problem, self._mask = problem, mask
        self._bias = bias if isinstance(bias, SparseBias) else None
        self._first = matrix * mask._grid.q_tiles

    def attend(
        self,
        steps: Steps,
        x: tiled_attention.Operands,
        rows: Rows,
        row_begin: int,
        row_end: int,
    ) -> None:
        """Add the pairs of some queries of all stacked batch entries to their running state.

        Keys and values are dense arrays of the compute dtype.
        """
        for chunk in self._chunks(row_begin, row_end):
            if not rows.started:
                tiled_attention.start_empty(rows)
            rows.unshifted = False
            entries.add(steps, self._problem, x, chunk, rows, row_begin)

    def _chunks(self, row_begin: int, row_end: int) -> Iterator[entries.Chunk]:
        """Yield the pairs of some queries, those of neighbouring keys together."""
        lists, grid = self._mask._store.host(), self._mask._grid
        t = self._first + np.arange(row_begin // BLOCK, -(-row_end // BLOCK))
        places = lists.places(t, 0, grid.k_tiles)
        places[~among(self._mask, places)] = NOTHING
        some = np.logical_or.reduce(places != NOTHING, axis=0)
        begin, end = tiled_attention.visible_keys(self._problem, row_begin, row_end)
        keys = begin // BLOCK * BLOCK, -(-end // BLOCK) * BLOCK
        runs = tile_sizes.listed_runs(some, np.zeros_like(some), BLOCK, keys)
        most = max(1, _BITS // (len(t) * BLOCK**2)) * BLOCK
        for tile in tile_sizes.joined_runs(runs, most):
            listed = np.concatenate([np.arange(a // BLOCK, b // BLOCK) for a, b in tile])
            within = row_begin % BLOCK, row_end - row_begin
            at = _visible(lists.words, places[:, listed], *within)
            width = BLOCK * len(listed)
            first = np.searchsorted(at, width * np.arange(row_end - row_begin + 1))
            row = np.repeat(np.arange(row_begin, row_end), np.diff(first))
            column = at - width * (row - row_begin)
            key = BLOCK * listed.astype(np.int32)[:, None] + np.arange(BLOCK, dtype=np.int32)
            key = key.reshape(-1).take(column)
            inside = self._inside(row, key, (row_begin, row_end), tile)
            if inside is not None:
                row, key = row[inside], key[inside]
                first = np.searchsorted(row, np.arange(row_begin, row_end + 1))
            if not len(key):
                continue
            bias = None
            if self._bias is not None:
                bias = self._bias.at(self._bias.structure.places(row, key))
            part = slice(0, len(key))
            yield entries.Chunk(row_begin, row_end, first.astype(np.int32), key, part, bias)

    def _inside(
        self, row: Array, key: Array, rows: tuple[int, int], runs: tiled_attention.Runs
    ) -> Array | None:
        """Return which pairs are inside the band; None if all are."""
        lower, upper = self._problem.lower, self._problem.upper
        first, last = runs[0][0], runs[-1][1] - 1
        below = lower is not None and first < rows[1] - 1 + lower
        above = upper is not None and last > rows[0] + upper
        if not (below or above):
            return None
        least = -np.inf if lower is None else lower
        most = np.inf if upper is None else upper
        inside: Array = (key - row >= least) & (key - row <= most)
        return inside


def _visible(words: Array, places: Array, row_begin: int, rows: int) -> Array:
    """Return where bits of some rows are 1, in the blocks with words at `places` side by side."""
    blocks = np.zeros((*places.shape, BLOCK, BLOCK // 8), np.uint8)
    listed = places >= 0
    blocks[listed] = layouts.row_bytes(words[places[listed]])
    by_row = blocks.swapaxes(1, 2).reshape(-1, places.shape[1] * BLOCK // 8)
    packed = by_row[row_begin : row_begin + rows].reshape(-1)
    # Where fewer than a tenth are True, NumPy looks for the next True each time, which processors
    # cannot predict. Looking at all alike takes half of that time.
    more = np.full(len(packed) // 8, 0xFF, np.uint8)
    bits = np.unpackbits(np.concatenate([packed, more]), bitorder="little").view(np.bool_)
    return np.flatnonzero(bits)[: -8 * len(more) or None]


class Pairs(NamedTuple):
    """What of one matrix of a mask is computed by pairs, not by tiles."""

    entries: entries.Entries | None
    thin: Thin | None

    @classmethod
    def of(cls, problem: Problem, mask: BitMask, matrix: int, bias: Any) -> Pairs | None:
        """Return that of one matrix, None if all is tiles. `bias` may be a SparseBias."""
        found = cls(
            entries.Entries.of(problem, mask, matrix, bias) if entries.any_of(mask) else None,
            Thin(problem, mask, matrix, bias) if any_of(mask) else None,
        )
        return None if found.entries is None and found.thin is None else found

    def attend(
        self,
        steps: Steps,
        problem: Problem,
        x: tiled_attention.Operands,
        rows: Rows,
        row_begin: int,
        row_end: int,
    ) -> None:
        """Add the pairs of some queries of all stacked batch entries to their running state.

        Keys and values are dense arrays of the compute dtype.
        """
        if self.entries is not None:
            entries.attend(steps, problem, x, self.entries, rows, row_begin, row_end)
        if self.thin is not None:
            self.thin.attend(steps, x, rows, row_begin, row_end)
