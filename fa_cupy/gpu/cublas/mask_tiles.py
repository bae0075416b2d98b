"""Tiles of bit masks, as the tiled algorithm reads them on CuPy arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import cupy
import numpy as np

from fa_cupy._bitmask import BitMask
from fa_cupy.gpu.cublas import elementwise
from fa_cupy.gpu.masks.binding import device_lists, host_lists
from fa_cupy.layouts import BLOCK
from fa_cupy.masks.blocks import NOTHING, WHOLE
from fa_cupy.tiled import tile_sizes

#: Most queries of a tile: keys that few of them see are computed for all.
TABLE_M = 512


class TableTile(NamedTuple):
    """What a mask says of a tile of scores.

    Attributes
    ----------
    table : cupy.ndarray of int32, shape (1 or n, q_tiles, k_tiles)
        Of the blocks around the tile, as `gpu.cublas.elementwise.mask_blocks` reads it.
    words : cupy.ndarray of uint32
    row, column : int
        Where the tile begins, from the first block of the table.
    empty : bool
        Whether no score of the tile counts.
    """

    table: Any
    words: Any
    row: int
    column: int
    empty: bool

    def hide(self, scores: Any) -> None:
        """Set scores (n, m, columns), dense, to -inf where the mask is False."""
        elementwise.mask_blocks(
            self.table, self.words, *self.table.shape, *scores.shape[1:], self.row, self.column,
            scores,
        )  # fmt: skip


class MaskTiles:
    """The mask of stacked batch entries on the current device: a `tiled.attention.SparseMask`.

    Parameters
    ----------
    mask : BitMask
    entries : ndarray of int, shape (n,)
        What of ``mask.entries`` belongs to each of the stack.
    """

    joins = False  # `TableTile.hide` takes dense scores

    def __init__(self, mask: BitMask, entries: np.ndarray[Any, Any]) -> None:
        self._lists = host_lists(mask)
        self._words = device_lists(mask, cupy.cuda.Device().id).words
        self._q_tiles, self._k_tiles = (-(-n // BLOCK) for n in mask.shape[-2:])
        self._entries = entries[:1] if (entries == entries[0]).all() else entries
        self._range: tuple[int, int] | None = None  # of query tiles, for which these are:
        self._table = np.empty((0, 0, 0), np.int32)
        self._sent: Any = None

    def runs(self, rows: tuple[int, int], keys: tuple[int, int]) -> Iterator[tuple[int, int]]:
        """Return runs of keys whose blocks are full for all entries and rows, or for some not."""
        table = self._of_rows(*rows)
        some, whole = (table != NOTHING).any(axis=(0, 1)), (table == WHOLE).all(axis=(0, 1))
        return tile_sizes.listed_runs(some, whole, BLOCK, keys)

    def __getitem__(self, tile: tuple[slice, slice, slice]) -> TableTile | None:
        """Return what `TableTile.hide` goes by; None where nothing is hidden."""
        rows, keys = tile[1:]
        span, begin, end = _span(rows.start, rows.stop), *_span(keys.start, keys.stop)
        known = span == self._range
        here = self._table[:, :, begin:end] if known else self._listed(span, begin, end)
        if (here == WHOLE).all():
            return None
        empty = bool((here == NOTHING).all())
        if not known:  # other queries than those that `runs` was asked for: a column of tiles
            table, column = cupy.asarray(here), keys.start % BLOCK
        else:
            if self._sent is None:
                self._sent = cupy.asarray(self._table)
            table, column = self._sent, keys.start
        return TableTile(table, self._words, rows.start % BLOCK, column, empty)

    def _of_rows(self, row_begin: int, row_end: int) -> np.ndarray[Any, Any]:
        """Return the table of these queries: all key tiles of the query tiles that they are in."""
        span = _span(row_begin, row_end)
        if span != self._range:
            self._table = self._listed(span, 0, self._k_tiles)
            self._range, self._sent = span, None
        return self._table

    def _listed(self, span: tuple[int, int], begin: int, end: int) -> np.ndarray[Any, Any]:
        """Return the table of these query tiles and key tiles."""
        t = self._entries.astype(np.int64)[:, None] * self._q_tiles + np.arange(*span)
        places = self._lists.places(t.reshape(-1), begin, end)
        return places.reshape(*t.shape, end - begin)


def _span(begin: int, end: int) -> tuple[int, int]:
    """Return (first, last + 1) of the blocks that these rows or keys are in."""
    return begin // BLOCK, -(-end // BLOCK)
