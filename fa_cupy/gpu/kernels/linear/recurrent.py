"""The rows of ``recurrent``: float32 row by row, for keys of any number of columns."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fa_cupy.gpu.kernels.linear.variant import ProductVariant


@dataclass(frozen=True, kw_only=True)
class Recurrent(ProductVariant):
    """A row of ``recurrent``: `tile_m` rows in each of `stages` buffers."""

    algorithm: ClassVar[str] = "recurrent"

    @functools.cached_property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: rings of Q, K and V."""
        return 4 * self.stages * self.tile_m * (2 * self.dim + self.tile_n)


def _variants() -> Iterator[Recurrent]:
    # dim, tile_m, stages, blocks, why. 64 value columns: 16 threads, times one for 8 key columns.
    rows = (
        (32, 32, 3, 4, "16 KB a stage, two of them under way"),
        (64, 32, 3, 2, "24 KB a stage, two of them under way"),
        (128, 32, 2, 2, "40 KB a stage, one of them under way"),
        (256, 16, 2, 1, "36 KB a stage, one of them under way; wider keys in turns"),
    )
    for dim, tile_m, stages, blocks, why in rows:
        yield Recurrent(
            source="linear/recurrent", dtype="float32", dim=dim, tile_m=tile_m, tile_n=64,
            warps=dim // 16, stages=stages, blocks=blocks, why=why,
        )  # fmt: skip


VARIANTS: tuple[Recurrent, ...] = tuple(_variants())
