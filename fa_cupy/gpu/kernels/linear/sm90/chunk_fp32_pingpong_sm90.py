"""The row of ``chunk_fp32_pingpong_sm90``: chunks of float32, dims up to 64."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fa_cupy.gpu.kernels.linear.variant import ProductSm90Variant


@dataclass(frozen=True, kw_only=True)
class ChunkFp32PingpongSm90(ProductSm90Variant):
    """A row of ``chunk_fp32_pingpong_sm90``: two warpgroups take turns at scores and outputs."""

    algorithm: ClassVar[str] = "chunked"

    @functools.cached_property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage)``, which the kernel checks."""
        chunk = 4 * self.tile_m * (2 * self.dim + self.tile_n) + 6 * self.tile_m + self.tile_n + 16
        state = 4 * self.tile_n * (self.dim + 1) + 16  # there are two
        return self.stages * (chunk + 7 * 8) + 2 * state + self.work_bytes + 8


def _variants() -> Iterator[ChunkFp32PingpongSm90]:
    yield ChunkFp32PingpongSm90(
        source="linear/chunk_fp32_pingpong_sm90", dtype="float32", dim=64, tile_m=64, tile_n=64,
        warps=16, stages=3, blocks=1,
        why="each warpgroup has the time of two chunks for one; one of 48 KB under way",
    )  # fmt: skip


VARIANTS: tuple[ChunkFp32PingpongSm90, ...] = tuple(_variants())
