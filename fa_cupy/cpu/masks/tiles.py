"""Tiles of bit masks, as the tiled algorithm reads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from fa_cupy._bitmask import BitMask
from fa_cupy.cpu.masks import thin
from fa_cupy.cpu.tile_ops import PackedMask
from fa_cupy.layouts import BLOCK, SLAB, row_bytes
from fa_cupy.masks.blocks import NOTHING, WHOLE
from fa_cupy.masks.export import of_small
from fa_cupy.tiled import tile_sizes

Array = npt.NDArray[Any]

_BYTES = BLOCK // 8  # of a row of a block
_MOST_TABLES = 8  # kept of a mask: the threads of a call are at a few rows of tiles at a time


class MaskTiles:
    """The mask of stacked batch entries: a `tiled.attention.SparseMask`.

    Parameters
    ----------
    mask : BitMask
    entries : ndarray of int, shape (n,)
        What of ``mask.entries`` belongs to each of the stack.
    words, thin, sparse : bool
        Whether blocks that are full or have words are read, whether thin ones (`cpu.masks.thin`)
        are among these, and whether sparse blocks are read. Those that are not count as empty.
    """

    joins = True

    def __init__(
        self,
        mask: BitMask,
        entries: Array,
        words: bool = True,
        sparse: bool = True,
        thin: bool = True,
    ) -> None:
        self._mask, self._all = mask, entries
        self._lists, self._grid = mask._store.host(), mask._grid
        self._words, self._sparse = words, sparse and bool(len(self._lists.entry_keys))
        self._thin = thin
        self._q_tiles, self._k_tiles = mask._grid.q_tiles, mask._grid.k_tiles
        # Neighbours share an entry as a rule, and their tiles are then one.
        self._entries = entries[:1] if (entries == entries[0]).all() else entries
        self._n = len(entries)
        self._small = self._of_small() if self._grid.is_small else None
        self._tables: dict[tuple[int, int], Array] = {}

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

    def __getitem__(self, tile: tuple[slice, slice, slice]) -> Array | PackedMask | None:
        rows, keys = tile[1:]
        if self._small is not None:
            shape = (self._n, rows.stop - rows.start, keys.stop - keys.start)
            return np.broadcast_to(self._small[:, rows, keys], shape)
        above, left = rows.start // BLOCK, keys.start // BLOCK
        places = self._places(rows.start, rows.stop)[:, :, left : -(-keys.stop // BLOCK)]
        if (places == WHOLE).all():
            return None
        # Of a single row of blocks, the first rows may be enough.
        slabs = BLOCK // SLAB
        if places.shape[1] == 1:
            slabs = -(-(rows.stop - above * BLOCK) // SLAB)
        packed = np.zeros((*places.shape[:2], slabs * SLAB, places.shape[2], _BYTES), np.uint8)
        blocks = packed.swapaxes(2, 3)
        blocks[places == WHOLE] = 0xFF
        listed = places >= 0
        blocks[listed] = row_bytes(self._lists.words[places[listed], :slabs])
        flat = packed.reshape(len(packed), -1, places.shape[2] * _BYTES)
        if self._sparse:
            self._set_pairs(flat, above * BLOCK, left * BLOCK)
        first, last = keys.start - left * BLOCK, keys.stop - left * BLOCK
        seen = flat[:, rows.start - above * BLOCK : rows.stop - above * BLOCK]
        return PackedMask(seen[:, :, first // 8 : -(-last // 8)], first % 8, last - first)

    def _set_pairs(self, packed: Array, row_begin: int, key_begin: int) -> None:
        """Set the bits of what is visible in sparse blocks."""
        bits = 8 * packed.shape[2]
        for i, entry in enumerate(self._entries):
            row, key = self._pairs(int(entry), row_begin, row_begin + packed.shape[1])
            key = key.astype(np.int64) - key_begin
            here = (key >= 0) & (key < bits)
            byte, bit = np.divmod(key[here], 8)
            np.bitwise_or.at(packed[i], (row[here], byte), np.uint8(1) << bit.astype(np.uint8))

    def _places(self, row_begin: int, row_end: int) -> Array:
        """Return where the blocks of some rows have their words, for each entry and q_tile."""
        span = row_begin // BLOCK, -(-row_end // BLOCK)
        found = self._tables.get(span)
        if found is None:
            first = self._entries.astype(np.int64)[:, None] * self._q_tiles
            t = (first + np.arange(*span)).reshape(-1)
            if self._words:
                table = self._lists.places(t, 0, self._k_tiles)
                if not self._thin:
                    table[thin.among(self._mask, table)] = NOTHING
            else:
                table = np.full((len(t), self._k_tiles), NOTHING, np.int32)
            found = table.reshape(len(self._entries), -1, self._k_tiles)
            if len(self._tables) >= _MOST_TABLES:
                self._tables.clear()
            self._tables[span] = found
        return found

    def _shown(self, row_begin: int, row_end: int) -> tuple[Array, Array]:
        """Return which key tiles are not empty for some of the rows, and which full for all."""
        if self._small is not None:
            rows = self._small[:, row_begin:row_end].reshape(-1, 1)
            return np.logical_or.reduce(rows), np.logical_and.reduce(rows)
        places = self._places(row_begin, row_end)
        some: Array = np.logical_or.reduce(places != NOTHING, axis=(0, 1))
        if self._sparse:
            begin, end = row_begin // BLOCK * BLOCK, -(-row_end // BLOCK) * BLOCK
            for entry in self._entries:
                some[self._pairs(int(entry), begin, end)[1] // BLOCK] = True
        whole: Array = np.logical_and.reduce(places == WHOLE, axis=(0, 1))
        return some, whole

    def _pairs(self, entry: int, row_begin: int, row_end: int) -> tuple[Array, Array]:
        """Return rows, from `row_begin` on, and keys of what is visible in sparse blocks."""
        last = min(row_end, self._grid.q_len)
        at = entry * self._grid.q_len
        begin = self._lists.entry_begin[at + row_begin : at + last + 1]
        rows = np.repeat(np.arange(last - row_begin), np.diff(begin))
        return rows, self._lists.entry_keys[begin[0] : begin[-1]]
