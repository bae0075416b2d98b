"""The host side of ``fwd_combine``, which joins the splits of ``fwd_splitkv``."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from fa_cupy.gpu.kernels.attention.splitkv.params import SplitkvVariant
from fa_cupy.gpu.kernels.variant import DTYPE_NAMES


@dataclass(frozen=True, kw_only=True)
class FwdCombine(SplitkvVariant):
    """A row of ``fwd_combine``: a block for each row of the output."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage)``, which the kernel checks."""
        return 4 * self.warps * (self.dim + 2)


VARIANTS: tuple[FwdCombine, ...] = tuple(
    FwdCombine(
        source="attention/fwd_combine", dtype=dtype, dim=dim, tile_m=1, tile_n=1, warps=8, stages=1,
        why="eight warps have up to 64 splits of a row on their way at once",
    )
    for dim, dtype in product((64, 128, 256), DTYPE_NAMES)
)  # fmt: skip
