"""Operators of masks, computed on the CPU."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fa_cupy.masks import blocks as masks_blocks
from fa_cupy.masks import export
from fa_cupy.masks.blocks import BlockLists, Blocks, Grid
from fa_cupy.masks.storage import Store

Array = npt.NDArray[Any]
Mask = TypeVar("Mask", bound="Algebra")


class Algebra:
    """The operators of `fa_cupy.BitMask`. Results belong to the device of the operands."""

    __slots__ = ()

    entries: Array
    _grid: Grid
    _store: Store

    @classmethod
    def _of(
        cls: type[Mask], grid: Grid, matrices: Any, entries: Array, device: int | None = None
    ) -> Mask:
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, ...]:
        """Batch axes, number of queries, number of keys."""
        return (*self.entries.shape, *self._grid)

    def __invert__(self: Mask) -> Mask:
        matrices, entries = export.used(self._grid, self._store.host(), self.entries)
        blocks = [masks_blocks.inverted(self._grid, m) for m in matrices]
        return self._of(self._grid, blocks, entries, self._store.device)

    def __and__(self, other: Any) -> Any:
        return self._combined(other, "&", np.bitwise_and)

    def __or__(self, other: Any) -> Any:
        return self._combined(other, "|", np.bitwise_or)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Algebra):
            return NotImplemented
        if self.shape != other.shape:
            return False
        pairs = set(zip(self.entries.flat, other.entries.flat, strict=True))
        return all(
            np.array_equal(mine, theirs)
            for a, b in pairs
            for mine, theirs in zip(self._blocks(a), other._blocks(b), strict=True)
        )

    def _combined(self, other: Any, sign: str, op: Any) -> Any:
        if not isinstance(other, Algebra):
            return NotImplemented
        if self._grid != other._grid:
            raise ValueError(
                f"BitMask: {sign} of shapes {self.shape} and {other.shape}, want equal lengths"
            )
        try:
            a, b = np.broadcast_arrays(self.entries, other.entries)
        except ValueError:
            raise ValueError(
                f"BitMask: {sign} of shapes {self.shape} and {other.shape}, whose batch axes do "
                "not broadcast"
            ) from None
        count = 1 + int(b.max(initial=0))
        pairs, entries = np.unique(a.astype(np.int64) * count + b, return_inverse=True)
        made = [
            masks_blocks.combined(
                self._grid, self._blocks(p // count), other._blocks(p % count), op
            )
            for p in pairs
        ]
        devices = [mask._store.device for mask in (self, other)]
        device = devices[1] if devices[0] is None else devices[0]
        return self._of(self._grid, made, entries.reshape(a.shape), device)

    def _blocks(self, matrix: int) -> Blocks:
        lists: BlockLists = self._store.host()
        return lists.blocks(self._grid, int(matrix))
