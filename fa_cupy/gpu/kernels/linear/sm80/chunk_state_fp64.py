"""The rows of ``chunk_state_fp64``: states of segments, of float64."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fa_cupy.gpu.kernels.linear.sm80.chunk_fp64 import Fp64Variant
from fa_cupy.gpu.kernels.linear.variant import WORK_BYTES


@dataclass(frozen=True, kw_only=True)
class ChunkStateFp64(Fp64Variant):
    """A row of ``chunk_state_fp64``."""

    sums_states: ClassVar[bool] = True

    @functools.cached_property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: chunks of K and V."""
        return 8 * self.stages * self.tile_m * (self.dim + self.tile_n) + WORK_BYTES


def _variants() -> Iterator[ChunkStateFp64]:
    # dim, tile_n, tile_m, stages, warps, key parts, blocks, wide, why.
    rows = (
        (32, 32, 32, 3, 4, 2, 4, True, "parts of the keys, so that there are more warps"),
        (64, 64, 32, 3, 8, 2, 1, True, "as for 32"),
        (96, 96, 16, 3, 6, 1, 1, True, "16 columns a warp"),
        (128, 64, 16, 3, 8, 2, 2, True, "two blocks hide each other's barriers"),
        (192, 64, 16, 3, 8, 2, 1, True, "parts of the keys, or the state would not fit"),
        (256, 64, 16, 3, 8, 2, 1, True, "as for 192"),
        (32, 64, 16, 3, 4, 1, 4, False, "16 columns a warp"),
        (64, 64, 16, 3, 4, 1, 3, False, "as for 32"),
        (128, 64, 16, 3, 4, 1, 2, False, "as for 32"),
        (256, 64, 16, 2, 8, 2, 1, False, "as for the row of SM90"),
    )
    for dim, tile_n, tile_m, stages, warps, key_parts, blocks, wide, why in rows:
        yield ChunkStateFp64(
            source="linear/chunk_state_fp64", dtype="float64", dim=dim, tile_m=tile_m,
            tile_n=tile_n, warps=warps, stages=stages, blocks=blocks, wide=wide,
            key_parts=key_parts, why=why,
        )  # fmt: skip


VARIANTS: tuple[ChunkStateFp64, ...] = tuple(_variants())
