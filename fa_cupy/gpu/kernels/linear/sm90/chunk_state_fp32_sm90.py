"""The rows of ``chunk_state_fp32_sm90``: states of segments, of float32."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fa_cupy.gpu.kernels.linear.variant import ProductSm90Variant


@dataclass(frozen=True, kw_only=True)
class ChunkStateFp32Sm90(ProductSm90Variant):
    """A row of ``chunk_state_fp32_sm90``: `splitters` warpgroups split float32 in turns."""

    splitters: int
    sums_states: ClassVar[bool] = True

    @functools.cached_property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage)``, which the kernel checks."""
        rows = self.stages * (self.dim + self.tile_n + 1)
        return 4 * self.tile_m * rows + 24 * self.stages + self.work_bytes

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (*super().defines, ("FA_SPLIT_WARPGROUPS", self.splitters))


def _variants() -> Iterator[ChunkStateFp32Sm90]:
    # dim, tile_n, stages, splitters, why. A chunk of 64 rows takes 32 KB of loads at dims of 64 and
    # 64 KB at dims of 128.
    rows = (
        (64, 64, 6, 2, "four chunks of 32 KB under way"),
        (64, 128, 4, 1, "two chunks of 48 KB under way"),
        (128, 64, 4, 1, "two chunks of 48 KB under way"),
        (128, 128, 3, 1, "a chunk of 64 KB under way"),
    )
    for dim, tile_n, stages, splitters, why in rows:
        yield ChunkStateFp32Sm90(
            source="linear/chunk_state_fp32_sm90", dtype="float32", dim=dim, tile_m=64,
            tile_n=tile_n, warps=4 * splitters + tile_n // 16, stages=stages, splitters=splitters,
            blocks=1, why=why,
        )  # fmt: skip


VARIANTS: tuple[ChunkStateFp32Sm90, ...] = tuple(_variants())
