"""The host side of ``bwd_dkdv_sm90``, which computes dK and dV where dims are wide."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from fa_cupy.gpu.kernels.backward import WORK_STAGES, BackwardSm90, Launches, Traits
from fa_cupy.gpu.kernels.variant import DROPOUT_ENTRY_BYTES, DTYPE_NAMES
from fa_cupy.gpu.plan import Step

_WORK_BYTES = 44  # WorkTile


@dataclass(frozen=True, kw_only=True)
class BwdDkdvSm90(BackwardSm90):
    """A row of ``bwd_dkdv_sm90``: a warpgroup for dV, one for dK, and one that feeds them.

    Attributes
    ----------
    sum_first : int
        Bit 0: a tile's dV comes before the scores of the next one, not during its exponentials.
        Bit 1: so does dK. Tiles are given back sooner then.
    """

    sum_first: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage)``, which the kernel checks."""
        tiles = 64 * self.row_bytes * (2 + 2 * self.stages)
        barriers = 4 + 5 * self.stages + 2 * WORK_STAGES
        notes = 8 * barriers + WORK_STAGES * _WORK_BYTES + self.notes
        end = self.end_of_offsets(notes)
        kept = (512 + DROPOUT_ENTRY_BYTES) * self.stages if self.dropout else 0
        return tiles + (4 * 64 * 64 + 512) * self.stages + -(-end // 16) * 16 + kept

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (*super().defines, ("FA_ACCUMULATE_FIRST", self.sum_first))

    def step(self, traits: Traits, launches: Launches) -> Step:
        """Return the launch: a part of the work for each tile of keys."""
        boxes = {"q": self.tile_m, "dout": self.tile_m, "k": self.tile_n, "v": self.tile_n}
        blocks = traits.entries // traits.group * -(-traits.problem.k_len // self.tile_n)
        return self.mapped_step(traits, launches, blocks, boxes)


VARIANTS = tuple(
    BwdDkdvSm90(
        source="attention/bwd_dkdv_sm90", dtype=dtype, dim=dim, tile_m=64, tile_n=64, warps=12,
        stages=2, sum_first=2, sparse=sparse,
        why="dK and dV of 64 keys are all registers that two warpgroups have for sums",
    )
    for dim, dtype, sparse in product((192, 256), DTYPE_NAMES, (False, True))
)  # fmt: skip
