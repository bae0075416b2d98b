"""The host side of ``bwd_sm90``, which computes dK and dV and adds up dQ in float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from fa_cupy.gpu.kernels.backward import Launches, Traits
from fa_cupy.gpu.kernels.backward_sm90 import GROUPS, WORK_STAGES, BackwardSm90
from fa_cupy.gpu.kernels.variant import DTYPE_NAMES
from fa_cupy.gpu.plan import Step

#: Of dQ of a tile, one a warpgroup; each has 64 columns of `dq_tile_m` queries.
PIECES = 2
_WORK_BYTES = 52  # WorkTile


@dataclass(frozen=True, kw_only=True)
class BwdSm90(BackwardSm90):
    """A row of ``bwd_sm90``: one warpgroup feeds two others, each of 64 keys.

    Attributes
    ----------
    o_stages : int
        Tiles of dO in flight; `stages` are those of Q.
    slots : int
        Places for a warpgroup's results on their way out.
    stores : int
        Threads that store results, each of which waits for turns. Three leave one that loads.
    keep_sums : bool
        Whether the L2 cache is to keep the sums of dQ rather than Q and dO.
    late : bool
        Whether dK of a tile is computed beside the exponentials of the next one.
    soon : bool
        Whether the scores of the next tile start before dV of this one is done; that takes more
        registers.
    delayed : bool
        Whether dQ is that of the tile before, so that the two warpgroups need not keep step.
    last_first : bool
        Whether blocks of keys are given out from the last one on; see kReverseKvOrder.
    """

    o_stages: int
    slots: int
    stores: int
    keep_sums: bool
    late: bool
    soon: bool
    delayed: bool
    last_first: bool

    @property
    def dq_tile_m(self) -> int:
        """Queries of a piece of dQ: kDqTileM."""
        return self.tile_m if self.dim > 64 else self.tile_m // 2

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage)``, which the kernel checks."""
        tiles = self.row_bytes * (2 * self.tile_n + (self.stages + self.o_stages) * self.tile_m)
        ds_stages = 2 if self.delayed else 1  # kDsStages
        scores = 2 * self.tile_m * self.tile_n * ds_stages
        rows = 8 * self.tile_m * self.stages
        slots = GROUPS * self.slots
        rings = self.stages + self.o_stages + ds_stages + slots + WORK_STAGES
        tickets = self.slots if self.stores == self.slots else self.stores * self.slots
        barriers = 4 + 2 * rings + GROUPS * (tickets - self.slots)
        end = 8 * barriers + WORK_STAGES * _WORK_BYTES + self.notes
        return tiles + scores + slots * 4 * 64 * self.dq_tile_m + rows + -(-end // 16) * 16

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            *super().defines,
            ("FA_DOUT_STAGES", self.o_stages),
            ("FA_STAGING_STAGES", self.slots),
            ("FA_STORE_THREADS", self.stores),
            ("FA_KEEP_DQ_ACCUM", int(self.keep_sums)),
            ("FA_DEFER_DK", int(self.late)),
            ("FA_OVERLAP_NEXT_S", int(self.soon)),
            ("FA_DEFER_DQ", int(self.delayed)),
            ("FA_REVERSE_KV_ORDER", int(self.last_first)),
        )

    def query_tiles(self, traits: Traits) -> int:
        """Return the tiles of queries of a call."""
        return traits.entries * -(-traits.problem.q_len // self.tile_m)

    def scratch(self, traits: Traits, rows: int) -> dict[str, int]:
        """Return the sums of dQ."""
        return {"dq_accum": 4 * 64 * self.dq_tile_m * PIECES * self.query_tiles(traits)}

    def counters(self, traits: Traits) -> dict[str, int]:
        """Return whose turn it is to add to each tile of dQ, and the counters of tiles."""
        return {"dq_semaphore": 4 * self.query_tiles(traits), **super().counters(traits)}

    def step(self, traits: Traits, launches: Launches) -> Step:
        """Return the launch: a part of the work for each tile of keys."""
        boxes = {"q": self.tile_m, "dout": self.tile_m, "k": self.tile_n, "v": self.tile_n}
        blocks = traits.entries // traits.group * -(-traits.problem.k_len // self.tile_n)
        return self.mapped_step(traits, launches, blocks, boxes)


def _rows() -> Iterator[BwdSm90]:
    # dim, tile_m, stages, stores, delayed, sections, why
    rows = (
        (64, 128, 2, 3, True, (16, 8), "K and V are read once for 128 queries, turns may be late"),
        (96, 64, 3, 3, False, (16, 16), "as for 128; late turns cost more with two stores"),
        (128, 64, 3, 2, False, (16, 16), "dK and dV fill half of the registers; Q stays longer"),
    )
    for dim, tile_m, stages, stores, delayed, sections, why in rows:
        for dtype, sparse in product(DTYPE_NAMES, (False, True)):
            yield BwdSm90(
                source="attention/bwd_sm90", dtype=dtype, dim=dim, tile_m=tile_m, tile_n=128,
                warps=12, stages=stages, o_stages=2, slots=2, stores=3 if sparse else stores,
                keep_sums=sparse, late=not delayed, soon=not delayed, delayed=delayed,
                last_first=delayed, sections=sections, why=why, sparse=sparse,
            )  # fmt: skip


VARIANTS = tuple(_rows())
