"""The host side of ``bwd_dq_sm80``, which computes dQ where there is no wgmma."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from fa_cupy.gpu.kernels.backward import BackwardSm80, Launches, Traits, strided_params
from fa_cupy.gpu.kernels.variant import DTYPE_NAMES
from fa_cupy.gpu.plan import Step


@dataclass(frozen=True, kw_only=True)
class BwdDqSm80(BackwardSm80):
    """A row of ``bwd_dq_sm80``; `stages` are tiles of V in flight."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage)``, which the kernel checks."""
        return 2 * self.dim * (2 * self.tile_m + (2 + self.stages) * self.tile_n)

    def step(self, traits: Traits, launches: Launches) -> Step:
        """Return the launch: a block for each tile of queries."""
        params, addresses = strided_params(traits, launches, self.tile_m, by_key=False)
        grid = traits.entries * -(-traits.problem.q_len // self.tile_m)
        return Step(self, grid, params, addresses)


def _rows() -> Iterator[BwdDqSm80]:
    # dim, tile_m, tile_n, stages, why. All fit the 99 KB of the smallest targets.
    rows = (
        (32, 128, 64, 2, "32 queries a warp: every fragment of K and V serves two products"),
        (64, 128, 32, 2, "as for 32"),
        (96, 128, 32, 2, "as for 32"),
        (128, 128, 32, 1, "as for 32; two tiles of V would not fit"),
        (192, 64, 32, 1, "16 queries a warp, or dQ would not fit in registers"),
        (256, 64, 16, 1, "as for 192; Q and dO leave room for no more keys"),
    )
    for dim, tile_m, tile_n, stages, why in rows:
        for dtype, sparse in product(DTYPE_NAMES, (False, True)):
            yield BwdDqSm80(
                source="attention/bwd_dq_sm80", dtype=dtype, dim=dim, tile_m=tile_m,
                tile_n=tile_n, warps=4, stages=stages, blocks=2, sparse=sparse, why=why,
            )  # fmt: skip


VARIANTS = tuple(_rows())
