"""The host side of ``bwd_sm90``, which computes dK and dV and adds up dQ in float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar

from fa_cupy.gpu.kernels.backward import GROUPS, WORK_STAGES, BackwardSm90, Launches, Traits
from fa_cupy.gpu.kernels.score import ScoreMod
from fa_cupy.gpu.kernels.variant import DROPOUT_ENTRY_BYTES, DTYPE_NAMES
from fa_cupy.gpu.plan import Step

#: Parts of a tile of dQ: each consumer computes one, of 64 columns by `dq_tile_m` queries.
PIECES = 2
_WORK_BYTES = 52  # WorkTile
# Tiles of 64 queries at dim 64, where those of 128 leave too few registers.
_NARROW: dict[str, Any] = {"tile_m": 64, "stages": 3, "defer_dq": False}
# A tile of a bias has the place of a buffer for results above dim 64. ms at dim 128 with a bias in
# float32, full and causal: 2.94 and 1.77; in the place of a stage of Q and one of dO 3.77 and 2.01.
_WITH_BIAS: dict[str, Any] = {"staging_stages": 1}


@dataclass(frozen=True, kw_only=True)
class BwdSm90(BackwardSm90):
    """A variant of ``bwd_sm90``: a producer warpgroup and two consumers, each with 64 keys.

    Attributes
    ----------
    dout_stages : int
        Tiles of dO in flight; `stages` are those of Q.
    staging_stages : int
        Buffers for a warpgroup's results on their way out.
    store_threads : int
        Threads that store results. Each waits until the semaphore of a tile of queries reaches the
        number of its block. Three leave one that loads.
    defer_dq : bool
        The schedule. True: a step computes dQ of the tile before, so that no consumer waits for the
        other, and the scheduler starts with the last block of keys. False: a step computes dK of
        the tile before during its exponentials, and the scheduler starts with the first block.
    """

    # On entries that are as long as a group may be, the kernel limits the spread too. Without that,
    # full, 16 heads of 128 dims, TFLOP/s by entries of a group (16, 8, 4, 2, 1): 32,768 tokens 551,
    # 561, 580, 587, 546; 65,536 425, 554, 557, 580, 576; 131,072 384, 417, 497, 534, with the limit
    # 534, 551, 556 for 8, 4, 2. Causal 262,144 (16, 4, 2) 381, 556, 556; 16,384 (16, 8, 4) 599,
    # 600, 542.
    rows_of_l2_group: ClassVar[int] = 1 << 17
    dout_stages: int
    staging_stages: int
    store_threads: int
    defer_dq: bool

    @property
    def dq_tile_m(self) -> int:
        """Queries of a piece of dQ: kDqTileM."""
        return self.tile_m if self.dim > 64 else self.tile_m // 2

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage)``, which the kernel checks."""
        tiles = self.row_bytes * (2 * self.tile_n + (self.stages + self.dout_stages) * self.tile_m)
        ds_stages = 2 if self.defer_dq else 1  # kDsStages
        scores = 2 * self.tile_m * self.tile_n * ds_stages
        rows = 8 * self.tile_m * self.stages
        staging = GROUPS * self.staging_stages
        rings = self.stages + self.dout_stages + ds_stages + staging + WORK_STAGES
        alike = self.store_threads == self.staging_stages  # kStagingBarriers
        staging_barriers = staging if alike else staging * self.store_threads
        barriers = 4 + 2 * rings + staging_barriers - staging
        notes = 8 * barriers + WORK_STAGES * _WORK_BYTES + self.notes
        end = self.end_of_offsets(notes)
        # A first call takes a step for each function: none is called for plain scores.
        bias = self.bias_bytes * self.tile_m * self.tile_n if self.score else 0
        staged = staging * 4 * 64 * self.dq_tile_m
        kept = DROPOUT_ENTRY_BYTES * self.stages + 8 * self.tile_m * GROUPS if self.dropout else 0
        return tiles + scores + bias + staged + rows + -(-end // 16) * 16 + kept

    @property
    def bias_bytes(self) -> int:
        """Bytes of an element of a bias that comes by way of shared memory; 0 of any other."""
        return 0 if self.sparse or self.score is None else self.score.staged_bytes

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            *super().defines,
            ("FA_DOUT_STAGES", self.dout_stages),
            ("FA_STAGING_STAGES", self.staging_stages),
            ("FA_STORE_THREADS", self.store_threads),
            ("FA_DEFER_DQ", int(self.defer_dq)),
            ("FA_LONG_ROWS", self.rows_of_l2_group),
            *((("FA_STAGE_BIAS", 1),) if self.score and self.bias_bytes else ()),
        )

    def for_score(self, score: ScoreMod | None) -> BwdSm90:
        """Return the build of this row for calls with such scores."""
        if score is None:
            return self
        fits = self.tile_m < 128 or (_fits_wide_tiles(score) and not self.packed)
        row = replace(self, score=score, **({} if fits else _NARROW))
        return replace(row, **_WITH_BIAS) if row.bias_bytes and row.dim > 64 else row

    def for_sequences(self, packed: bool) -> BwdSm90:
        """Return the build of this row for packed sequences, or for none."""
        if not packed:
            return self
        # What rows see of keys takes the registers that wide tiles leave to other scores.
        fits = self.tile_m < 128 or self.score is None
        return replace(self, packed=True, **({} if fits else _NARROW))

    def for_dropout(self, dropout: bool) -> BwdSm90:
        """Return the build of this row that drops weights, or the one that does not.

        Wide tiles leave no shared memory for the decisions, nor do barriers of three threads that
        store, under a mask.
        """
        if not dropout:
            return self
        narrow = _NARROW if self.tile_m == 128 else {}
        return replace(self, dropout=True, store_threads=2, **narrow)

    def step(self, traits: Traits, launches: Launches) -> Step:
        """Return the launch: a part of the work for each tile of keys."""
        tiles = traits.entries * -(-traits.problem.q_len // self.tile_m)
        launches.scratch["dq_accum"] = 4 * 64 * self.dq_tile_m * PIECES * tiles
        launches.counters["dq_semaphore"] = 4 * tiles  # whose turn it is to add to each
        boxes = {"q": self.tile_m, "dout": self.tile_m, "k": self.tile_n, "v": self.tile_n}
        blocks = traits.entries // traits.group * -(-traits.problem.k_len // self.tile_n)
        step = self.mapped_step(traits, launches, blocks, boxes)
        sums = {name: name for name in ("dq_accum", "dq_semaphore")}
        return step._replace(addresses={**step.addresses, **sums})


def _fits_wide_tiles(score: ScoreMod) -> bool:
    """Whether tiles of 128 queries leave the registers that such scores take.

    They leave none for slopes, for what differs from query to query, or to make 32 bits of a
    float16; of a bfloat16 they are made by a shift. ALiBi in bfloat16 has 516 TFLOP/s at dim 64
    with tiles of 128, 369 with 64; a bias of pairs 184 and 248.
    """
    if score.program is not None:
        of_queries = any("i" in reads for reads in score.program.operands())
        return score.program.adds and not of_queries and not score.differs_by_key
    return (
        not score.softcap
        and score.bias_axes in ("", "key")
        and score.bias_dtype in ("", "float32", "bfloat16")
    )


def _rows() -> Iterator[BwdSm90]:
    # dim, tile_m, stages, store_threads, defer_dq, l2_groups, why
    rows = (
        (64, 128, 2, 3, True, (16, 8, 16), "K and V serve 128 queries; late dQ costs little"),
        (96, 64, 3, 3, False, (16, 16, 8), "as for 128; with two stores late dQ would cost more"),
        (128, 64, 3, 2, False, (16, 16, 8), "dK and dV fill half of the registers; Q stays longer"),
    )
    for dim, tile_m, stages, store_threads, defer_dq, l2_groups, why in rows:
        for dtype, sparse in product(DTYPE_NAMES, (False, True)):
            yield BwdSm90(
                source="attention/bwd_sm90", dtype=dtype, dim=dim, tile_m=tile_m, tile_n=128,
                warps=12, stages=stages, dout_stages=2, staging_stages=2,
                store_threads=3 if sparse else store_threads, defer_dq=defer_dq,
                l2_groups=l2_groups, why=why, sparse=sparse,
            )  # fmt: skip


VARIANTS = tuple(_rows())
