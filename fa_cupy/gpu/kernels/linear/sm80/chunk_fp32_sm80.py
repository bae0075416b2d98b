"""The rows of ``chunk_fp32_sm80``: chunks of float32."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fa_cupy.gpu.kernels.linear.variant import WORK_BYTES, ProductVariant


@dataclass(frozen=True, kw_only=True)
class ChunkFp32Sm80(ProductVariant):
    """A row of ``chunk_fp32_sm80``: float32 as pairs of float16, three teams of warps.

    Attributes
    ----------
    split_warps, score_warps : int
        Those that make the pairs, and those with 16 rows of scores each; 0: split warps have them,
        too. Each of the others has 16 value columns.
    """

    split_warps: int
    score_warps: int
    algorithm: ClassVar[str] = "chunked"

    @functools.cached_property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: buffers of Q, K and V, two tiles of scores, exponents, notes."""
        rows = self.stages * (2 * self.dim + self.tile_n) + 2 * self.tile_m
        exponents = (2 * self.stages + 2) * self.tile_m
        notes = self.stages * self.split_warps + self.tile_n
        return 4 * (rows * self.tile_m + exponents + notes) + WORK_BYTES + 8

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        teams = ("FA_SPLIT_WARPS", self.split_warps), ("FA_SCORE_WARPS", self.score_warps)
        return (*super().defines, *teams, ("FA_THREADS", self.threads))


def _variants() -> Iterator[ChunkFp32Sm80]:
    # dim and tile_n, tile_m, score warps, blocks, why. 4 warps split, one has 16 value columns.
    rows = (
        (32, 32, 2, 2, "two blocks on a multiprocessor hide each other's barriers"),
        (64, 64, 4, 1, "a warp of each team on each quarter; 48 KB under way in registers"),
        (64, 32, 2, 1, "for 99 KB of shared memory"),
        (96, 32, 2, 1, "36 KB under way in registers"),
        (128, 32, 0, 1, "12 warps, or the state would not fit in registers"),
    )
    for dim, tile_m, score_warps, blocks, why in rows:
        yield ChunkFp32Sm80(
            source="linear/chunk_fp32_sm80", dtype="float32", dim=dim, tile_m=tile_m,
            tile_n=dim, warps=4 + score_warps + dim // 16, stages=3, split_warps=4,
            score_warps=score_warps, blocks=blocks, why=why,
        )  # fmt: skip


VARIANTS: tuple[ChunkFp32Sm80, ...] = tuple(_variants())
