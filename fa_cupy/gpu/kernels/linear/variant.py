"""What a row of the table of causal products says: one compiled variant of one kernel."""

from __future__ import annotations

from dataclasses import dataclass

from fa_cupy.gpu.kernels.linear.params import PRODUCT_PARAMS
from fa_cupy.gpu.kernels.variant import Variant

DTYPE_NAMES = ("float16", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class ProductVariant(Variant):
    """A row of a kernel that walks chunks: `tile_m` rows each, for `tile_n` value columns.

    Attributes
    ----------
    blocks : int
        Blocks that should fit on a multiprocessor.
    """

    blocks: int

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            ("FA_BF16", int(self.dtype == "bfloat16")),
            ("FA_DIM", self.dim),
            ("FA_TILE_M", self.tile_m),
            ("FA_TILE_N", self.tile_n),
            ("FA_STAGES", self.stages),
            ("FA_BLOCKS", self.blocks),
            ("FA_SHARED_BYTES", self.shared_bytes),
            ("FA_PARAMS_BYTES", PRODUCT_PARAMS.itemsize),
        )

    @property
    def rank(self) -> tuple[int, ...]:
        """Of the rows that serve a call, the one of the lowest rank gets it."""
        return (self.dim, -self.tile_m, -self.stages)
