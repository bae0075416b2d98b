"""The host side of ``bwd_dkdv_sm80``, which computes dK and dV where there is no wgmma."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from fa_cupy.gpu.kernels.backward import BackwardSm80, Launches, Traits, strided_params
from fa_cupy.gpu.kernels.variant import DTYPE_NAMES
from fa_cupy.gpu.plan import Step

_WORK_BYTES = 64  # Work


@dataclass(frozen=True, kw_only=True)
class BwdDkdvSm80(BackwardSm80):
    """A row of ``bwd_dkdv_sm80``; `stages` are tiles of dO in flight.

    Attributes
    ----------
    score_groups, sum_groups : int
        Warps that share the queries of a tile, and those that share columns of the sums.
    """

    score_groups: int = 1
    sum_groups: int = 1

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage)``, which the kernel checks."""
        tiles = 2 * self.dim * (2 * self.tile_n + (2 + self.stages) * self.tile_m)
        exchange = self.score_groups > 1 or self.sum_groups > 1
        weights = 4 * (self.tile_m * self.tile_n if exchange else 8)
        bias = 2 * self.tile_m * self.tile_n if self.stages_bias else 0
        return tiles + weights + bias + 2 * 8 * self.tile_m + _WORK_BYTES

    @property
    def stages_bias(self) -> bool:
        """Whether a bias of pairs comes by way of shared memory: ``kStageBias``."""
        fits = self.dim <= 64 and not self.sparse
        return fits and self.score is not None and self.score.has_16_bit_pairs

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        groups = ("FA_SCORE_GROUPS", self.score_groups), ("FA_SUM_GROUPS", self.sum_groups)
        return (*super().defines, *groups)

    def step(self, traits: Traits, launches: Launches) -> Step:
        """Return the launch: a block for each tile of keys."""
        params, addresses = strided_params(traits, launches, self.tile_m, by_key=True)
        grid = traits.entries // traits.group * -(-traits.problem.k_len // self.tile_n)
        return Step(self, grid, params, addresses)


def _rows() -> Iterator[BwdDkdvSm80]:
    # dim, tile_m, tile_n, warps, stages, score_groups, sum_groups, why. All fit the 99 KB of the
    # smallest targets.
    rows = (
        (32, 64, 128, 4, 2, 1, 1, "32 keys a warp, whose weights stay in registers"),
        (64, 32, 128, 4, 2, 1, 1, "as for 32; sums are half of the registers"),
        (96, 64, 64, 4, 2, 2, 2, "32 keys a warp: every fragment of Q and dO serves two products"),
        (128, 64, 64, 4, 1, 2, 2, "as for 96; two tiles of dO would not fit"),
        (192, 32, 64, 8, 1, 2, 4, "sums of 32 keys and 48 columns a warp"),
        (256, 32, 32, 4, 1, 2, 4, "64 keys would leave no room for Q and dO"),
    )
    for dim, tile_m, tile_n, warps, stages, score_groups, sum_groups, why in rows:
        for dtype, sparse in product(DTYPE_NAMES, (False, True)):
            yield BwdDkdvSm80(
                source="attention/bwd_dkdv_sm80", dtype=dtype, dim=dim, tile_m=tile_m,
                tile_n=tile_n, warps=warps, stages=stages, score_groups=score_groups,
                sum_groups=sum_groups, blocks=8 // warps, sparse=sparse, why=why,
            )  # fmt: skip


VARIANTS = tuple(_rows())
