"""The row of ``state_prefix_sum``: the states before the segments of a sequence."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from fa_cupy.gpu.kernels.linear.variant import ProductVariant


@dataclass(frozen=True, kw_only=True)
class StatePrefixSum(ProductVariant):
    """The row of ``state_prefix_sum``, one thread an element of the state."""

    @functools.cached_property
    def shared_bytes(self) -> int:
        """None."""
        return 0


STATE_PREFIX_SUM = StatePrefixSum(
    source="linear/state_prefix_sum", dtype="float32", dim=256, tile_m=1, tile_n=256, warps=8,
    stages=1, blocks=4, why="whole lines of states a warp",
)  # fmt: skip
PACKED_STATE_PREFIX_SUM = dataclasses.replace(STATE_PREFIX_SUM, packed=True)
