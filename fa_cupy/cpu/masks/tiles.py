"""Tiles of bit masks, as the tiled algorithm reads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from fa_cupy._bitmask import BitMask
from fa_cupy.layouts import BLOCK
from fa_cupy.masks.export import bits_of_row, of_small
from fa_cupy.tiled import tile_sizes

Array = npt.NDArray[Any]


def mask_tile(tile: tile_sizes.Tile) -> tile_sizes.Tile:
    """Return a tile like `tile` whose edges lie on those of blocks.

    As high as a block or half of one: a higher tile would compute what is empty for some of its
    queries.
    """
    height = BLOCK if tile.tile_m > BLOCK // 2 else BLOCK // 2
    return tile_sizes.Tile(height, max(1, tile.tile_n // BLOCK) * BLOCK)


class MaskTiles:
    """The mask of stacked batch entries: a `tiled.attention.SparseMask`.

    Parameters
    ----------
    mask : BitMask
    entries : ndarray of int, shape (n,)
        What of ``mask.entries`` belongs to each of the stack.
    words, sparse : bool
        Whether blocks that are full or have words are read, and whether sparse blocks are. Those
        that are not read count as empty.
    """

    def __init__(
        self, mask: BitMask, entries: Array, words: bool = True, sparse: bool = True
    ) -> None:
        self._mask, self._all = mask, entries
        self._lists, self._grid = mask._store.host(), mask._grid
        self._words, self._sparse = words, sparse and bool(len(self._lists.entry_keys))
        self._q_tiles, self._k_tiles = mask._grid.q_tiles, mask._grid.k_tiles
        # Neighbours share an entry as a rule, and their tiles are then one.
        self._entries = entries[:1] if (entries == entries[0]).all() else entries
        self._n = len(entries)
        self._small = self._of_small() if self._grid.is_small else None

    def _of_small(self) -> Array:
        """Return the mask of all entries at once, where a matrix is a single small block."""
        lists = self._lists
        if not self._words:
            lists = lists._replace(full_begin=np.zeros_like(lists.full_begin))
        if not self._sparse:
            lists = lists._replace(entry_keys=lists.entry_keys[:0])
        return of_small(self._grid, lists, self._entries)

    @property
    def matrix(self) -> int:
        """The matrix of the first of the stack."""
        return int(self._all[0])

    def only(self, words: bool, sparse: bool) -> MaskTiles:
        """Return the mask with other blocks to be read."""
        return MaskTiles(self._mask, self._all, words, sparse)

    def runs(self, rows: tuple[int, int], keys: tuple[int, int]) -> Iterator[tuple[int, int]]:
        """Return runs of keys whose blocks are full for all entries and rows, or for some not."""
        return tile_sizes.listed_runs(*self._shown(*rows), BLOCK, keys)

    def columns(
        self, rows: tuple[int, int], columns: list[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """Return those columns of tiles, (begin, end) of keys, that some of the rows see."""
        some, _ = self._shown(*rows)
        return [
            (begin, end) for begin, end in columns if some[begin // BLOCK : -(-end // BLOCK)].any()
        ]

    def __getitem__(self, tile: tuple[slice, slice, slice]) -> Array:
        rows, keys = tile[1:]
        q_tiles = range(rows.start // BLOCK, -(-rows.stop // BLOCK))
        begin, end = keys.start // BLOCK, -(-keys.stop // BLOCK)
        some, whole = self._shown(rows.start, rows.stop)
        shape = (self._n, rows.stop - rows.start, keys.stop - keys.start)
        if self._small is not None:
            return np.broadcast_to(self._small[:, rows, keys], shape)
        for value, uniform in ((True, whole[begin:end].all()), (False, not some[begin:end].any())):
            if uniform:
                return np.broadcast_to(np.bool_(value), shape)
        bits = np.zeros((len(self._entries), len(q_tiles), BLOCK, end - begin, BLOCK), np.bool_)
        for i, entry in enumerate(self._entries):
            for j, q_tile in enumerate(q_tiles):
                if self._words:
                    t = self._row(entry, q_tile)
                    listed, blocks = bits_of_row(self._lists, t, begin, end)
                    bits[i, j][:, listed - begin] = blocks.swapaxes(0, 1)
                if self._sparse:
                    row, key = self._pairs(entry, q_tile)
                    some = (key >= begin * BLOCK) & (key < end * BLOCK)
                    row, key = row[some], key[some] - begin * BLOCK
                    bits[i, j][row, key // BLOCK, key % BLOCK] = True
        flat = bits.reshape(len(bits), len(q_tiles) * BLOCK, (end - begin) * BLOCK)
        above, left = q_tiles.start * BLOCK, begin * BLOCK
        seen = flat[:, rows.start - above : rows.stop - above, keys.start - left : keys.stop - left]
        return np.broadcast_to(seen, shape)

    def _shown(self, row_begin: int, row_end: int) -> tuple[Array, Array]:
        """Return which key tiles are not empty for some of the rows, and which full for all."""
        if self._small is not None:
            rows = self._small[:, row_begin:row_end].reshape(-1, 1)
            return np.logical_or.reduce(rows), np.logical_and.reduce(rows)
        some, whole = np.zeros(self._k_tiles, np.bool_), np.ones(self._k_tiles, np.bool_)
        for entry in self._entries:
            for q_tile in range(row_begin // BLOCK, -(-row_end // BLOCK)):
                shown = np.zeros(self._k_tiles, np.bool_)
                if self._words:
                    partial, full = self._lists.tiles(self._row(entry, q_tile))
                    some[partial] = some[full] = True
                    shown[full] = True
                if self._sparse:
                    some[self._pairs(entry, q_tile)[1] // BLOCK] = True
                whole &= shown
        return some, whole

    def _pairs(self, entry: int, q_tile: int) -> tuple[Array, Array]:
        """Return rows, of the row of blocks, and keys of what is visible in its sparse blocks."""
        first = int(entry) * self._grid.q_len + q_tile * BLOCK
        last = min(first + BLOCK, (int(entry) + 1) * self._grid.q_len)
        begin = self._lists.entry_begin[first : last + 1]
        rows = np.repeat(np.arange(last - first), np.diff(begin))
        return rows, self._lists.entry_keys[begin[0] : begin[-1]]

    def _row(self, entry: int, q_tile: int) -> int:
        return int(entry) * self._q_tiles + q_tile
