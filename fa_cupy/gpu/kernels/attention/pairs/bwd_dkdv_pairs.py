"""The host side of ``bwd_dkdv_pairs``, which computes dK and dV over the pairs of a mask."""

from __future__ import annotations

from dataclasses import dataclass

from fa_cupy.gpu.kernels.attention.pairs.pair_gradients import BwdPairs, PairLaunches
from fa_cupy.gpu.kernels.attention.pairs.pair_rows import rows_of
from fa_cupy.gpu.plan import Step


@dataclass(frozen=True, kw_only=True)
class BwdDkdvPairs(BwdPairs):
    """A row of ``bwd_dkdv_pairs``."""


VARIANTS = tuple(
    rows_of(BwdDkdvPairs, "bwd_dkdv_pairs", 2, "sums of two vectors leave registers for few pairs")
)


def steps(variant: BwdDkdvPairs, launches: PairLaunches) -> list[Step]:
    """Return the launches of dK and dV, after those of dQ."""
    return launches.steps(variant, by_key=True)
