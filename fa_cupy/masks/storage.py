"""The lists of a mask where they were made, and wherever they have been copied to."""

from __future__ import annotations

from typing import Any

import numpy as np

from fa_cupy.core import backends
from fa_cupy.masks import blocks
from fa_cupy.masks.blocks import BlockLists, Grid


class Store:
    """The lists of a mask, on the CPU, on GPUs or on both.

    They are copied where they are needed when they first are, and kept there: a mask never changes.
    Slices of a mask share its store.

    Lists on a device have words for all partial blocks, sparse ones too. Kernels that read pairs
    one by one have lists of their own (`fa_cupy.gpu.masks.pair_lists`), for which no sparse block
    is unfolded.

    Parameters
    ----------
    grid : Grid
    lists : BlockLists
        Of NumPy or CuPy arrays.
    device : int, optional
        The CUDA device where the mask belongs; None for the CPU.
    found_on : int, optional
        The CUDA device that `lists` are on; None for the CPU.

    Attributes
    ----------
    device : int or None
    device_masks : dict
        `fa_cupy.gpu.masks.device_mask.DeviceMask` by device.
    device_tables : dict
        `fa_cupy.gpu.masks.block_tables.Tables` by device, behind what waits for them.
    pairs : dict
        What `fa_cupy.gpu.masks.pair_lists` has found and made, and copies of it by device.
    """

    __slots__ = (
        "_counts", "_grid", "_outline", "_places", "device", "device_masks", "device_tables",
        "pairs",
    )  # fmt: skip

    def __init__(
        self,
        grid: Grid,
        lists: BlockLists,
        device: int | None = None,
        found_on: int | None = None,
    ) -> None:
        self.device = device
        self._grid = grid
        self.device_masks: dict[int, Any] = {}
        self.device_tables: dict[int, Any] = {}
        self.pairs: dict[Any, Any] = {}
        self._outline: BlockLists | None = None
        self._counts: Any = None
        self._places: dict[int | None, BlockLists] = {found_on: lists}
        if found_on is None:
            _freeze(lists)

    @property
    def home(self) -> BlockLists:
        """The lists where the mask belongs."""
        return self.host() if self.device is None else self.on(self.device)

    @property
    def nbytes(self) -> int:
        """Bytes of the lists, once."""
        return sum(array.nbytes for array in self._any())

    def host(self) -> BlockLists:
        """Return the lists as NumPy arrays, read-only."""
        found = self._places.get(None)
        if found is None:
            device_mask = backends.gpu("masks.device_mask")
            found = blocks.canonical(self._grid, device_mask.to_host(self._any()))
            self._places[None] = _freeze(found)
        return found

    def bits_of_each(self) -> Any:
        """Return how many bits each block with words has, an array of int32, on the CPU."""
        if self._counts is None:
            self._counts = blocks.bits_of_each(self.host().words)
        return self._counts

    def with_words(self) -> BlockLists:
        """Return the lists as NumPy arrays, with words for sparse blocks too."""
        lists = self.host()
        return blocks.expanded(self._grid, lists) if len(lists.entry_keys) else lists

    def outline(self) -> BlockLists:
        """Return the lists as NumPy arrays, all but the words, which may be a CuPy array.

        What asks for states of blocks only does not fetch the words, by far the most memory.
        """
        if None in self._places:
            return self._places[None]
        lists = self._any()
        return self.device_outline()._replace(words=lists.words)

    def device_outline(self) -> BlockLists:
        """Return the lists that `on` gives, as NumPy arrays; their words may be missing."""
        if self._outline is None:
            if None in self._places:
                lists = self._places[None]
                has_entries = len(lists.entry_keys)
                self._outline = blocks.outlined(self._grid, lists) if has_entries else lists
            else:
                device_mask = backends.gpu("masks.device_mask")
                there = self._any()
                self._outline = device_mask.to_host(there._replace(words=there.words[:0]))
        return self._outline

    def on(self, device: int) -> BlockLists:
        """Return the lists as CuPy arrays on a device."""
        found = self._places.get(device)
        if found is None:
            device_mask = backends.gpu("masks.device_mask")
            found = self._places[device] = device_mask.to_device(self.with_words(), device)
        return found

    @property
    def on_device_only(self) -> bool:
        """Whether the lists are on devices and not on the CPU."""
        return None not in self._places

    def only_on(self, device: int) -> bool:
        """Whether the lists are on a device and not on the CPU: what needs them works there."""
        return device in self._places and None not in self._places

    def _any(self) -> BlockLists:
        return next(iter(self._places.values()))


def _freeze(lists: BlockLists) -> BlockLists:
    for array in lists:
        if isinstance(array, np.ndarray):
            array.flags.writeable = False
    return lists
