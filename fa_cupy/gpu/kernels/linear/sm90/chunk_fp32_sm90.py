"""The rows of ``chunk_fp32_sm90``: chunks of float32."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fa_cupy.gpu.kernels.linear.variant import ProductSm90Variant


@dataclass(frozen=True, kw_only=True)
class ChunkFp32Sm90(ProductSm90Variant):
    """A row of ``chunk_fp32_sm90``: a warpgroup splits float32, another one makes scores.

    One chunk lies in shared memory as pairs of float16, next to `stages` of them as they come.
    """

    algorithm: ClassVar[str] = "chunked"

    @functools.cached_property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage)``, which the kernel checks."""
        columns = (self.stages + 1) * (2 * self.dim + self.tile_n) + 64
        notes = 4 * self.tile_m + self.tile_n + 4
        barriers = 3 * self.stages + 7
        return 4 * (self.tile_m * columns + notes) + 8 * barriers + self.work_bytes + 8


def _variants() -> Iterator[ChunkFp32Sm90]:
    # dim, tile_n, stages, why. A chunk of 64 rows takes 96 KB of loads at dims of 128, and as much
    # as pairs of float16. Dims of 64 are those of `chunk_fp32_pingpong_sm90`.
    rows = (
        (64, 128, 2, "scores once for 128 value columns; 64 KB under way"),
        (128, 64, 1, "80 KB under way; more blocks where there are few batch entries"),
        (128, 128, 1, "Q, K and V come and go apart: all that 227 KB have room for"),
    )
    for dim, tile_n, stages, why in rows:
        yield ChunkFp32Sm90(
            source="linear/chunk_fp32_sm90", dtype="float32", dim=dim, tile_m=64,
            tile_n=tile_n, warps=8 + tile_n // 16, stages=stages, blocks=1, why=why,
        )  # fmt: skip


VARIANTS: tuple[ChunkFp32Sm90, ...] = tuple(_variants())
