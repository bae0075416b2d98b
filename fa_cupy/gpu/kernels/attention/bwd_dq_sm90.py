"""The host side of ``bwd_dq_sm90``, which computes dQ where dims are wide."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from fa_cupy.gpu.kernels.backward import GROUPS, WORK_STAGES, BackwardSm90, Launches, Traits
from fa_cupy.gpu.kernels.variant import DROPOUT_ENTRY_BYTES, DTYPE_NAMES
from fa_cupy.gpu.plan import Step

_WORK_BYTES = 48  # WorkTile


@dataclass(frozen=True, kw_only=True)
class BwdDqSm90(BackwardSm90):
    """A row of ``bwd_dq_sm90``: two warpgroups of 64 queries each, and one that feeds them.

    Attributes
    ----------
    v_stages : int
        Tiles of V in flight; `stages` are those of K.
    sum_first : int
        1: a tile's dQ comes before the scores of the next one, not during its exponentials.
    """

    v_stages: int
    sum_first: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage)``, which the kernel checks."""
        tiles = self.row_bytes * (2 * self.tile_m + (self.stages + self.v_stages) * self.tile_n)
        barriers = 2 * (GROUPS + self.stages + self.v_stages + WORK_STAGES)
        work = _WORK_BYTES + DROPOUT_ENTRY_BYTES * self.dropout
        end = 8 * barriers + WORK_STAGES * work + self.notes
        return tiles + 8 * self.tile_m + -(-end // 16) * 16

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        more = ("FA_V_STAGES", self.v_stages), ("FA_ACCUMULATE_FIRST", self.sum_first)
        return (*super().defines, *more)

    def step(self, traits: Traits, launches: Launches) -> Step:
        """Return the launch: a part of the work for each tile of queries."""
        # Each warpgroup has boxes of queries of its own.
        boxes = {"k": self.tile_n, "v": self.tile_n}
        blocks = traits.entries * -(-traits.problem.q_len // self.tile_m)
        return self.mapped_step(traits, launches, blocks, boxes, by_key=False)


VARIANTS = tuple(
    BwdDqSm90(
        source="attention/bwd_dq_sm90", dtype=dtype, dim=dim, tile_m=128, tile_n=64, warps=12,
        stages=2, v_stages=v_stages, sum_first=1, sparse=sparse,
        why="Q and dO of 128 queries leave room for three tiles of 64 keys at 256",
    )
    for (dim, v_stages), dtype, sparse in product(((192, 2), (256, 1)), DTYPE_NAMES, (False, True))
)  # fmt: skip
