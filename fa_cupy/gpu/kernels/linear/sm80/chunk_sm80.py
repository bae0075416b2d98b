"""The rows of ``chunk_sm80``: chunks of 16-bit elements."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fa_cupy.gpu.kernels.linear.variant import WORK_BYTES, ProductVariant
from fa_cupy.gpu.kernels.variant import DTYPE_NAMES


@dataclass(frozen=True, kw_only=True)
class ChunkSm80(ProductVariant):
    """A row of ``chunk_sm80``.

    Attributes
    ----------
    score_warps, state_warps : int
        The warps of its two teams.
    """

    score_warps: int
    state_warps: int
    algorithm: ClassVar[str] = "chunked"

    @functools.cached_property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: rings of Q, K and V, two tiles of scores and notes."""
        rings = 2 * self.stages * self.dim + (self.stages + 1) * self.tile_n
        return (
            2 * self.tile_m * (rings + 2 * self.tile_m) + 8 * (self.tile_m // 16 + 4) + WORK_BYTES
        )

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        teams = ("FA_SCORE_WARPS", self.score_warps), ("FA_STATE_WARPS", self.state_warps)
        return (*super().defines, *teams)


def _variants() -> Iterator[ChunkSm80]:
    # dim, tile_n, tile_m, stages, state warps, blocks, why. A chunk of 64 rows at dims of 64 is
    # 32 KB of traffic. Two of these are to be under way on each multiprocessor.
    rows = (
        (32, 32, 64, 4, 2, 2, "two blocks on a multiprocessor hide each other's barriers"),
        (64, 64, 64, 4, 4, 1, "two chunks of 24 KB under way"),
        (64, 64, 64, 3, 4, 2, "for 99 KB of shared memory; two blocks where there are 227"),
        (96, 96, 64, 4, 3, 1, "32 columns a warp: three warps own 96"),
        (96, 96, 32, 4, 3, 1, "for 99 KB of shared memory"),
        (128, 128, 64, 4, 4, 1, "two chunks of 48 KB under way"),
        (128, 128, 32, 4, 4, 1, "for 163 KB of shared memory"),
        (128, 128, 32, 3, 4, 1, "for 99 KB of shared memory"),
        (256, 64, 32, 4, 4, 1, "16 columns a warp, or the state would not fit in registers"),
    )
    for dim, tile_n, tile_m, stages, state_warps, blocks, why in rows:
        for dtype in DTYPE_NAMES:
            yield ChunkSm80(
                source="linear/chunk_sm80", dtype=dtype, dim=dim, tile_m=tile_m, tile_n=tile_n,
                warps=4 + state_warps, stages=stages, score_warps=4, state_warps=state_warps,
                blocks=blocks, why=why,
            )  # fmt: skip


VARIANTS: tuple[ChunkSm80, ...] = tuple(_variants())
