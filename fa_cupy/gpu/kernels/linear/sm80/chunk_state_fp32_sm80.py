"""The rows of ``chunk_state_fp32_sm80``: states of segments, of float32."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fa_cupy.gpu.kernels.linear.variant import WORK_BYTES, ProductVariant


@dataclass(frozen=True, kw_only=True)
class ChunkStateFp32Sm80(ProductVariant):
    """A row of ``chunk_state_fp32_sm80``: two teams of warps.

    Attributes
    ----------
    split_warps : int
        Those that make the pairs; each of the others has 16 value columns.
    """

    split_warps: int
    sums_states: ClassVar[bool] = True

    @functools.cached_property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: buffers of K and V, and exponents."""
        row = self.dim + self.tile_n + 1
        return 4 * self.stages * self.tile_m * row + WORK_BYTES

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        teams = ("FA_SPLIT_WARPS", self.split_warps), ("FA_THREADS", self.threads)
        return (*super().defines, *teams)


def _variants() -> Iterator[ChunkStateFp32Sm80]:
    # dim and tile_n, tile_m, blocks, why. Warps: 4 that split, one for 16 columns.
    rows = (
        (32, 64, 3, "16 KB a buffer"),
        (64, 64, 1, "32 KB a buffer"),
        (96, 32, 1, "24 KB a buffer"),
        (128, 32, 1, "two state warps on each quarter; 32 KB a buffer"),
    )
    for dim, tile_m, blocks, why in rows:
        yield ChunkStateFp32Sm80(
            source="linear/chunk_state_fp32_sm80", dtype="float32", dim=dim, tile_m=tile_m,
            tile_n=dim, warps=4 + dim // 16, stages=2, split_warps=4, blocks=blocks, why=why,
        )  # fmt: skip


VARIANTS: tuple[ChunkStateFp32Sm80, ...] = tuple(_variants())
