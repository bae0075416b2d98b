"""The host side of ``bwd_dq_pairs``, which computes dQ over the visible pairs of a mask."""

from __future__ import annotations

from dataclasses import dataclass

from fa_cupy.gpu.kernels.attention.pairs.pair_gradients import BwdPairs, PairLaunches
from fa_cupy.gpu.kernels.attention.pairs.pair_rows import rows_of
from fa_cupy.gpu.plan import Step


@dataclass(frozen=True, kw_only=True)
class BwdDqPairs(BwdPairs):
    """A row of ``bwd_dq_pairs``."""


VARIANTS = tuple(
    rows_of(BwdDqPairs, "bwd_dq_pairs", 4, "16 keys and values on their way, and 4 of wide ones")
)


def steps(variant: BwdDqPairs, launches: PairLaunches) -> list[Step]:
    """Return the launches of dQ, and of the gradient of a number for each pair."""
    return launches.steps(variant, by_key=False) + launches.bias_steps(variant)
