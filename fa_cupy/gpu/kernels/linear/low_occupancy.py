"""The rows of ``low_occupancy``: float32 by many small blocks, where there are few sequences."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fa_cupy.gpu.kernels.linear.variant import ProductVariant


@dataclass(frozen=True, kw_only=True)
class LowOccupancy(ProductVariant):
    """A row of ``low_occupancy``: a warp for every 8 rows of a tile."""

    algorithm: ClassVar[str] = "low_occupancy"

    @functools.cached_property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: the rings, and what each warp has summed."""
        rings = self.stages * self.tile_m * (2 * self.dim + self.tile_n)
        return 4 * (rings + self.warps * self.dim * self.tile_n)


def _variants() -> Iterator[LowOccupancy]:
    # dim, tile_m, stages, blocks, why.
    rows = (
        (32, 64, 3, 2, "8 warps, 16 KB a stage"),
        (64, 128, 2, 1, "16 warps: long sequences alone on a multiprocessor take fewer tiles"),
        (64, 32, 3, 3, "4 warps, 17 KB a stage"),
        (128, 64, 2, 1, "8 warps, 66 KB a stage"),
        (128, 32, 2, 2, "4 warps, 33 KB a stage"),
        (256, 16, 2, 2, "2 warps, 33 KB a stage; wider keys in turns"),
    )
    for dim, tile_m, stages, blocks, why in rows:
        yield LowOccupancy(
            source="linear/low_occupancy", dtype="float32", dim=dim, tile_m=tile_m, tile_n=4,
            warps=tile_m // 8, stages=stages, blocks=blocks, why=why,
        )  # fmt: skip


VARIANTS: tuple[LowOccupancy, ...] = tuple(_variants())
