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
STATE_PREFIX_SUM_FP64 = dataclasses.replace(STATE_PREFIX_SUM, dtype="float64")
_ROWS = {
    (row.dtype == "float64", packed): row.for_sequences(packed)
    for row in (STATE_PREFIX_SUM, STATE_PREFIX_SUM_FP64)
    for packed in (False, True)
}


def state_prefix_sum(row: ProductVariant) -> StatePrefixSum:
    """Return what sums the states of segments that `row` reads."""
    return _ROWS[row.dtype == "float64", row.packed]
