"""The rows of ``chunk_state_sm80``: states of segments, of 16-bit elements."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fa_cupy.gpu.kernels.linear.variant import WORK_BYTES, ProductVariant
from fa_cupy.gpu.kernels.variant import DTYPE_NAMES


@dataclass(frozen=True, kw_only=True)
class ChunkStateSm80(ProductVariant):
    """A row of ``chunk_state_sm80``, of four warps for each part of the key columns."""

    sums_states: ClassVar[bool] = True

    @functools.cached_property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: rings of K and V."""
        return 2 * self.stages * self.tile_m * (self.dim + self.tile_n) + WORK_BYTES

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (*super().defines, ("FA_KEY_PARTS", self.warps // 4))


def _variants() -> Iterator[ChunkStateSm80]:
    # dim, tile_n, tile_m, stages, warps, blocks, why.
    rows = (
        (32, 64, 64, 4, 4, 3, "16 columns a warp"),
        (64, 64, 64, 4, 4, 3, "as for 32"),
        (96, 128, 64, 3, 4, 2, "32 columns a warp: K is read once for 96"),
        (128, 128, 64, 3, 8, 1, "64 x 32 elements of the state a warp"),
        (256, 64, 32, 4, 8, 1, "128 x 16 elements of the state a warp"),
    )
    for dim, tile_n, tile_m, stages, warps, blocks, why in rows:
        for dtype in DTYPE_NAMES:
            yield ChunkStateSm80(
                source="linear/chunk_state_sm80", dtype=dtype, dim=dim, tile_m=tile_m,
                tile_n=tile_n, warps=warps, stages=stages, blocks=blocks, why=why,
            )  # fmt: skip


VARIANTS: tuple[ChunkStateSm80, ...] = tuple(_variants())
