"""Tiles of bit masks, as the tiled algorithm reads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from fa_cupy._bitmask import BitMask
from fa_cupy.layouts import BLOCK
from fa_cupy.masks.export import bits_of_row
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
    """

    def __init__(self, mask: BitMask, entries: Array) -> None:
        self._lists = mask._store.host()
        self._q_tiles, self._k_tiles = (-(-n // BLOCK) for n in mask.shape[-2:])
        # Neighbours share an entry as a rule, and their tiles are then one.
        self._entries = entries[:1] if (entries == entries[0]).all() else entries
        self._n = len(entries)

    def runs(self, rows: tuple[int, int], keys: tuple[int, int]) -> Iterator[tuple[int, int]]:
        """Return runs of keys whose blocks are full for all entries and rows, or for some not."""
        return tile_sizes.listed_runs(*self._shown(*rows), BLOCK, keys)

    def __getitem__(self, tile: tuple[slice, slice, slice]) -> Array:
        rows, keys = tile[1:]
        q_tiles = range(rows.start // BLOCK, -(-rows.stop // BLOCK))
        begin, end = keys.start // BLOCK, -(-keys.stop // BLOCK)
        some, whole = self._shown(rows.start, rows.stop)
        shape = (self._n, rows.stop - rows.start, keys.stop - keys.start)
        for value, uniform in ((True, whole[begin:end].all()), (False, not some[begin:end].any())):
            if uniform:
                return np.broadcast_to(np.bool_(value), shape)
        bits = np.zeros((len(self._entries), len(q_tiles), BLOCK, end - begin, BLOCK), np.bool_)
        for i, entry in enumerate(self._entries):
            for j, q_tile in enumerate(q_tiles):
                listed, blocks = bits_of_row(self._lists, self._row(entry, q_tile), begin, end)
                bits[i, j][:, listed - begin] = blocks.swapaxes(0, 1)
        flat = bits.reshape(len(bits), len(q_tiles) * BLOCK, (end - begin) * BLOCK)
        above, left = q_tiles.start * BLOCK, begin * BLOCK
        seen = flat[:, rows.start - above : rows.stop - above, keys.start - left : keys.stop - left]
        return np.broadcast_to(seen, shape)

    def _shown(self, row_begin: int, row_end: int) -> tuple[Array, Array]:
        """Return which key tiles are not empty for some of the rows, and which full for all."""
        some, whole = np.zeros(self._k_tiles, np.bool_), np.ones(self._k_tiles, np.bool_)
        for entry in self._entries:
            for q_tile in range(row_begin // BLOCK, -(-row_end // BLOCK)):
                partial, _, full = self._lists.row(self._row(entry, q_tile), 0, self._k_tiles)
                some[partial] = some[full] = True
                shown = np.zeros(self._k_tiles, np.bool_)
                shown[full] = True
                whole &= shown
        return some, whole

    def _row(self, entry: int, q_tile: int) -> int:
        return int(entry) * self._q_tiles + q_tile
