"""The rows of ``chunk_state_sm90``: states of segments, of 16-bit elements."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fa_cupy.gpu.kernels.linear.variant import ProductSm90Variant
from fa_cupy.gpu.kernels.variant import DTYPE_NAMES


@dataclass(frozen=True, kw_only=True)
class ChunkStateSm90(ProductSm90Variant):
    """A row of ``chunk_state_sm90``: a warpgroup feeds."""

    sums_states: ClassVar[bool] = True

    @functools.cached_property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage)``, which the kernel checks."""
        rows = self.stages * (self.dim + self.tile_n)
        return 2 * self.tile_m * rows + 16 * self.stages + self.work_bytes


def _variants() -> Iterator[ChunkStateSm90]:
    # dim, tile_n, stages, blocks, why.
    rows = (
        (64, 64, 6, 2, "ten chunks of 16 KB under way on a multiprocessor"),
        (64, 128, 4, 2, "six chunks of 24 KB under way; K is read once for 128 value columns"),
        (128, 64, 8, 1, "seven chunks of 24 KB under way; two blocks would have 128 registers"),
        (128, 128, 6, 1, "five chunks of 32 KB under way"),
    )
    for dim, tile_n, stages, blocks, why in rows:
        for dtype in DTYPE_NAMES:
            yield ChunkStateSm90(
                source="linear/chunk_state_sm90", dtype=dtype, dim=dim, tile_m=64, tile_n=tile_n,
                warps=4 + tile_n // 16, stages=stages, blocks=blocks, why=why,
            )  # fmt: skip


VARIANTS: tuple[ChunkStateSm90, ...] = tuple(_variants())
