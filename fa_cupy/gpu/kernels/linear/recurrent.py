"""The rows of ``recurrent`` and ``recurrent_fp64``: row by row, for keys of any width."""

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


@dataclass(frozen=True, kw_only=True)
class RecurrentFp64(ProductVariant):
    """The row of ``recurrent_fp64``: `tile_m` rows in a buffer, a thread for a value column."""

    algorithm: ClassVar[str] = "recurrent"

    @functools.cached_property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: rows of Q and K."""
        return 8 * self.tile_m * 2 * self.dim


DOUBLE: tuple[RecurrentFp64, ...] = (
    RecurrentFp64(
        source="linear/recurrent_fp64", dtype="float64", dim=32, tile_m=32, tile_n=64, warps=2,
        stages=1, blocks=4, packed=True, why="32 key columns in the registers of a thread",
    ),
)  # fmt: skip
