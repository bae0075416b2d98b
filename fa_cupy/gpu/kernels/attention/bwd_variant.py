"""What a row of the kernels of attention backward says: one compiled variant of one kernel."""

from __future__ import annotations

from dataclasses import dataclass

from fa_cupy.gpu.driver.targets import SHARED_LIMIT
from fa_cupy.gpu.kernels.attention.attention_params import ATTENTION_PARAMS
from fa_cupy.gpu.kernels.attention.bwd_params import (
    BACKWARD_PARAMS,
    BWD_CONVERT_DQ_PARAMS,
    BWD_PREPROCESS_PARAMS,
    BWD_SM90_PARAMS,
    NONFINITE_PARAMS,
)
from fa_cupy.gpu.kernels.variant import Variant

_GROUPS, _WORK_STAGES = 2, 2  # kGroups, kWorkStages in bwd_sm90.cuh
# WorkTile there, in bwd_dkdv_sm90.cu and in bwd_dq_sm90.cu
_WORK_BYTES, _KEY_WORK_BYTES, _QUERY_WORK_BYTES = 52, 44, 48
_NOTE_BYTES = 8  # MaskTileInfo
_CURSOR_BYTES, _CURSORS = 20, 4  # MaskCursor, kCursors


@dataclass(frozen=True, kw_only=True)
class BackwardVariant(Variant):
    """A row of a kernel that runs where tensor maps and wgmma are.

    Attributes
    ----------
    l2_groups : tuple of int
        Entries of a group, without a band and under one. The blocks of keys of a group's entries
        are given out in turn, and share the L2 cache. A block of keys may wait for those before it
        of its entry, so a group should have several entries; blocks of one entry read the same
        queries, so it should not have too many.
    """

    l2_groups: tuple[int, int] = (16, 16)

    @property
    def targets(self) -> tuple[str, ...]:
        """The only target that has wgmma."""
        return ("sm_90a",)

    @property
    def rank(self) -> tuple[int, ...]:
        """Of the rows that serve a call, the one of the lowest rank gets it: smaller dims first."""
        return (self.dim,)

    @property
    def piece_m(self) -> int:
        """Queries of a piece of dQ; 0 where a row adds none up."""
        return 0

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            ("FA_BF16", int(self.dtype == "bfloat16")),
            ("FA_SHARED_BYTES", self.shared_bytes),
            ("FA_PARAMS_BYTES", ATTENTION_PARAMS.itemsize),
        )

    @property
    def tiles(self) -> tuple[tuple[str, int], ...]:
        """Those of a kernel that tensor maps feed."""
        return (
            ("FA_DIM", self.dim),
            ("FA_TILE_M", self.tile_m),
            ("FA_TILE_N", self.tile_n),
            ("FA_STAGES", self.stages),
            ("FA_SPARSE", int(self.sparse)),
            ("FA_SM90_PARAMS_BYTES", BWD_SM90_PARAMS.itemsize),
        )

    @property
    def notes(self) -> int:
        """Bytes of what is told of the tiles in flight, under a mask, and of where feeders are."""
        cursors = _CURSORS if self.sparse else 1
        return _NOTE_BYTES * (self.stages if self.sparse else 1) + _CURSOR_BYTES * cursors


@dataclass(frozen=True, kw_only=True)
class BwdSm90(BackwardVariant):
    """A row of ``bwd_sm90``: one warpgroup feeds two others, each of 64 keys.

    Attributes
    ----------
    dout_stages : int
        Tiles of dO in flight; `stages` are those of Q.
    staging_stages : int
        Buffers for a warpgroup's results on their way out.
    store_threads : int
        Threads that store results, each of which waits for turns. Three leave one that loads.
    defer_dq : bool
        The schedule. True: dQ is that of the tile before, so that neither warpgroup waits for the
        other, and blocks of keys are given out from the last one on. False: dK is that of the tile
        before, and runs beside the exponentials; blocks of keys are given out from the first one
        on.
    """

    dout_stages: int
    staging_stages: int
    store_threads: int
    defer_dq: bool

    @property
    def piece_m(self) -> int:
        """Queries of a tile of dQ: kDqTileM."""
        return self.tile_m if self.dim > 64 else self.tile_m // 2

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage)``, which the kernel checks."""
        row = 128 * -(-self.dim // 64)  # bytes, in blocks of 64 columns
        tiles = row * (2 * self.tile_n + (self.stages + self.dout_stages) * self.tile_m)
        ds_stages = 2 if self.defer_dq else 1  # kDsStages
        scores = 2 * self.tile_m * self.tile_n * ds_stages
        rows = 8 * self.tile_m * self.stages
        staging = _GROUPS * self.staging_stages
        rings = self.stages + self.dout_stages + ds_stages + staging + _WORK_STAGES
        alike = self.store_threads == self.staging_stages  # kStagingBarriers
        staging_barriers = staging if alike else staging * self.store_threads
        barriers = 4 + 2 * rings + staging_barriers - staging
        end = 8 * barriers + _WORK_STAGES * _WORK_BYTES + self.notes
        return tiles + scores + staging * 4 * 64 * self.piece_m + rows + -(-end // 16) * 16

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            *super().defines,
            *self.tiles,
            ("FA_DOUT_STAGES", self.dout_stages),
            ("FA_STAGING_STAGES", self.staging_stages),
            ("FA_STORE_THREADS", self.store_threads),
            ("FA_DEFER_DQ", int(self.defer_dq)),
        )


@dataclass(frozen=True, kw_only=True)
class BwdDkdvSm90(BackwardVariant):
    """A row of ``bwd_dkdv_sm90``: a warpgroup for dV, one for dK, and one that feeds them.

    Attributes
    ----------
    sum_first : int
        Bit 0: a tile's dV comes before the scores of the next one, not beside its exponentials.
        Bit 1: so does dK. Tiles are given back sooner then.
    """

    sum_first: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage)``, which the kernel checks."""
        row = 128 * -(-self.dim // 64)  # bytes, in blocks of 64 columns
        tiles = 64 * row * (2 + 2 * self.stages)
        barriers = 4 + 5 * self.stages + 2 * _WORK_STAGES
        end = 8 * barriers + _WORK_STAGES * _KEY_WORK_BYTES + self.notes
        return tiles + (4 * 64 * 64 + 512) * self.stages + -(-end // 16) * 16

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (*super().defines, *self.tiles, ("FA_ACCUMULATE_FIRST", self.sum_first))


@dataclass(frozen=True, kw_only=True)
class BwdDqSm90(BackwardVariant):
    """A row of ``bwd_dq_sm90``: two warpgroups of 64 queries each, and one that feeds them.

    Attributes
    ----------
    v_stages : int
        Tiles of V in flight; `stages` are those of K.
    sum_first : int
        1: a tile's dQ comes before the scores of the next one, not beside its exponentials.
    """

    v_stages: int
    sum_first: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage)``, which the kernel checks."""
        row = 128 * -(-self.dim // 64)  # bytes, in blocks of 64 columns
        tiles = row * (2 * self.tile_m + (self.stages + self.v_stages) * self.tile_n)
        barriers = 2 * (_GROUPS + self.stages + self.v_stages + _WORK_STAGES)
        end = 8 * barriers + _WORK_STAGES * _QUERY_WORK_BYTES + self.notes
        return tiles + 8 * self.tile_m + -(-end // 16) * 16

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        more = ("FA_V_STAGES", self.v_stages), ("FA_ACCUMULATE_FIRST", self.sum_first)
        return (*super().defines, *self.tiles, *more)


@dataclass(frozen=True, kw_only=True)
class BwdPreprocess(BackwardVariant):
    """A row of ``bwd_preprocess``, for all dims, which runs anywhere.

    A thread reads `tile_m` queries.
    """

    @property
    def targets(self) -> tuple[str, ...]:
        """All."""
        return tuple(SHARED_LIMIT)

    @property
    def shared_bytes(self) -> int:
        """None."""
        return 0

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            *super().defines,
            ("FA_THREADS", self.threads),
            ("FA_UNROLL", self.tile_m),
            ("FA_PREPROCESS_PARAMS_BYTES", BWD_PREPROCESS_PARAMS.itemsize),
        )


@dataclass(frozen=True, kw_only=True)
class BwdConvertDq(BackwardVariant):
    """A row of ``bwd_convert_dq``, for all dims."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: a piece, rounded."""
        return 2 * self.tile_m * self.tile_n

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            *super().defines,
            ("FA_THREADS", self.threads),
            ("FA_TILE_M", self.tile_m),
            ("FA_CONVERT_DQ_PARAMS_BYTES", BWD_CONVERT_DQ_PARAMS.itemsize),
        )


@dataclass(frozen=True, kw_only=True)
class BwdNonfinite(BackwardVariant):
    """A row of ``bwd_nonfinite``, which runs anywhere."""

    @property
    def targets(self) -> tuple[str, ...]:
        """All that have its shared memory."""
        return tuple(t for t, limit in SHARED_LIMIT.items() if self.shared_bytes <= limit)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage)``, which the kernel checks."""
        pitch = self.tile_m + 4  # kPitch
        return 4 * (2 * self.tile_n * pitch + self.warps + 1)

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            *super().defines,
            ("FA_DIM", self.dim),
            ("FA_THREADS", self.threads),
            ("FA_BACKWARD_PARAMS_BYTES", BACKWARD_PARAMS.itemsize),
            ("FA_NONFINITE_PARAMS_BYTES", NONFINITE_PARAMS.itemsize),
        )
