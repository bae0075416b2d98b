"""The row of ``recurrent_fp64``: float64 row by row, for keys of any number of columns."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

from fa_cupy.gpu.kernels.linear.variant import ProductVariant


@dataclass(frozen=True, kw_only=True)
class RecurrentFp64(ProductVariant):
    """The row of ``recurrent_fp64``: `tile_m` rows in a buffer, a thread for a value column."""

    algorithm: ClassVar[str] = "recurrent"

    @functools.cached_property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: rows of Q and K."""
        return 8 * self.tile_m * 2 * self.dim


VARIANTS: tuple[RecurrentFp64, ...] = (
    RecurrentFp64(
        source="linear/recurrent_fp64", dtype="float64", dim=32, tile_m=32, tile_n=64, warps=2,
        stages=1, blocks=4, packed=True, why="32 key columns in the registers of a thread",
    ),
)  # fmt: skip
