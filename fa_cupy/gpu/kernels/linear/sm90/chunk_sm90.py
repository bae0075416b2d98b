"""The rows of ``chunk_sm90``: chunks of 16-bit elements."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fa_cupy.gpu.kernels.linear.variant import ProductSm90Variant
from fa_cupy.gpu.kernels.variant import DTYPE_NAMES


@dataclass(frozen=True, kw_only=True)
class ChunkSm90(ProductSm90Variant):
    """A row of ``chunk_sm90``: a warpgroup feeds, another one makes scores.

    Attributes
    ----------
    p_slots : int
        Places for the weights of a chunk.
    out_slots : int
        Places for finished chunks of the output.
    """

    p_slots: int
    out_slots: int
    algorithm: ClassVar[str] = "chunked"

    @functools.cached_property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage)``, which the kernel checks."""
        rows = self.stages * (2 * self.dim + self.tile_n)
        rows += self.p_slots * 64 + self.out_slots * self.tile_n
        notes = self.p_slots * (24 + 4 * self.tile_n)
        barriers = 2 * (self.stages + self.p_slots + self.out_slots * self.groups)
        return 2 * self.tile_m * rows + notes + 8 * barriers + self.work_bytes

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            *super().defines,
            ("FA_P_STAGES", self.p_slots),
            ("FA_OUT_STAGES", self.out_slots),
        )


def _variants() -> Iterator[ChunkSm90]:
    # dim, tile_n, stages, p_slots, out_slots, blocks, why. A multiprocessor has 32 KB a
    # microsecond; a chunk of 64 rows takes 24 KB of loads at dims of 64, 48 KB at dims of 128.
    rows = (
        (64, 64, 5, 3, 4, 1, "three chunks of 24 KB and three outputs under way"),
        (64, 64, 3, 2, 2, 2, "two blocks on a multiprocessor fill each other's waits"),
        (64, 128, 4, 3, 2, 1, "scores once for 128 value columns"),
        (128, 64, 4, 3, 2, 1, "as for 64; more blocks where there are few batch entries"),
        (128, 128, 4, 2, 1, 1, "two chunks of 48 KB under way"),
    )
    for dim, tile_n, stages, p_slots, out_slots, blocks, why in rows:
        for dtype in DTYPE_NAMES:
            yield ChunkSm90(
                source="linear/chunk_sm90", dtype=dtype, dim=dim, tile_m=64, tile_n=tile_n,
                warps=8 + tile_n // 16, stages=stages, p_slots=p_slots, out_slots=out_slots,
                blocks=blocks, why=why,
            )  # fmt: skip


VARIANTS: tuple[ChunkSm90, ...] = tuple(_variants())
