"""The host side of ``fwd_combine``, which joins the splits of ``fwd_splitkv``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from fa_cupy.gpu.kernels.attention.splitkv.params import SplitkvVariant
from fa_cupy.gpu.kernels.variant import DTYPE_NAMES
from fa_cupy.gpu.plan import Step

_SPLITS_AT_A_TIME = 8  # kSplits in fwd_combine.cu


@dataclass(frozen=True, kw_only=True)
class FwdCombine(SplitkvVariant):
    """A row of ``fwd_combine``."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage)``, which the kernel checks."""
        return 4 * self.warps * (self.dim + 2)

    def warps_of_row(self, splits: int) -> int:
        """Return how many warps join the splits of a row: a power of two, one for eight splits."""
        wanted = -(-splits // _SPLITS_AT_A_TIME)
        return min(self.warps, 1 << (wanted - 1).bit_length())

    def step(self, params: np.ndarray[Any, Any], addresses: Mapping[str, str]) -> Step:
        """Return the launch for the struct and the addresses of that of the splits."""
        own = params.copy()
        own["row_warps"] = warps = self.warps_of_row(int(own["splits"][0]))
        return Step(self, -(-int(own["rows"][0]) * warps // self.warps), own, addresses)


VARIANTS: tuple[FwdCombine, ...] = tuple(
    FwdCombine(
        source="attention/fwd_combine", dtype=dtype, dim=dim, tile_m=1, tile_n=1, warps=8, stages=1,
        why="up to eight rows, or up to 64 splits of one on their way at once",
    )
    for dim, dtype in product((64, 128, 256), DTYPE_NAMES)
)  # fmt: skip
