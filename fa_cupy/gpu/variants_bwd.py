"""The kernels of attention backward: one row a compiled variant, with the reason for its tile.

Pure data, as `fa_cupy.gpu.variants`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fa_cupy.gpu.params import ATTENTION_PARAMS
from fa_cupy.gpu.rows import SHARED_LIMIT, Variant
from fa_cupy.gpu.structs_bwd import (
    BACKWARD_PARAMS,
    BWD_ROUND_PARAMS,
    BWD_ROWS_PARAMS,
    BWD_SM90_PARAMS,
    REDO_THREADS,
    ROUND_THREADS,
    ROWS_THREADS,
    ROWS_UNROLL,
)

DTYPE_NAMES = ("float16", "bfloat16")
_GROUPS, _SLOTS, _WORK_STAGES = 2, 2, 2  # kGroups, kSlots, kWorkStages in bwd_sm90.cuh
_SLOT_BYTES = 64 * 64 * 4  # a piece of dQ
_WORK_BYTES, _KEY_WORK_BYTES = 48, 40  # Work there, and in bwd_keys_sm90.cu


@dataclass(frozen=True, kw_only=True)
class BackwardVariant(Variant):
    """A row of a kernel that runs where tensor maps and wgmma are.

    Attributes
    ----------
    sections : tuple of int
        Entries that take turns at giving the next block of keys, without a band and under one. A
        block of keys may wait for those before it, so those that run together should be of some
        entries; those of one entry read the same queries, so there should not be too many.
    """

    sections: tuple[int, int] = (16, 16)

    @property
    def targets(self) -> tuple[str, ...]:
        """The only target that has wgmma."""
        return ("sm_90a",)

    @property
    def rank(self) -> tuple[int, ...]:
        """Smaller dims first."""
        return (self.dim,)

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            ("FA_BF16", int(self.dtype == "bfloat16")),
            ("FA_SHARED_BYTES", self.shared_bytes),
            ("FA_PARAMS_BYTES", ATTENTION_PARAMS.itemsize),
            ("FA_ROW_MAJOR", 0),  # words of masks, which headers know of
        )

    @property
    def tiles(self) -> tuple[tuple[str, int], ...]:
        """Those of a kernel that tensor maps feed."""
        return (
            ("FA_DIM", self.dim),
            ("FA_TILE_M", self.tile_m),
            ("FA_TILE_N", self.tile_n),
            ("FA_STAGES", self.stages),
            ("FA_SM90_PARAMS_BYTES", BWD_SM90_PARAMS.itemsize),
        )


@dataclass(frozen=True, kw_only=True)
class BwdSm90(BackwardVariant):
    """A row of ``bwd_sm90``: one warpgroup feeds two others, each of 64 keys.

    Attributes
    ----------
    o_stages : int
        Tiles of dO in flight; `stages` are those of Q.
    """

    o_stages: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage)``, which the kernel checks."""
        row = 128 * -(-self.dim // 64)  # bytes, in blocks of 64 columns
        tiles = row * (2 * self.tile_n + (self.stages + self.o_stages) * self.tile_m)
        ds_stages = self.tile_m // 64  # kDsStages
        scores = 2 * self.tile_m * self.tile_n * ds_stages
        rows = 8 * self.tile_m * self.stages
        rings = self.stages + self.o_stages + ds_stages + _GROUPS * _SLOTS + _WORK_STAGES
        barriers = 4 + 2 * rings
        end = 8 * barriers + _WORK_STAGES * _WORK_BYTES
        return tiles + scores + _GROUPS * _SLOTS * _SLOT_BYTES + rows + -(-end // 16) * 16

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            *super().defines,
            *self.tiles,
            ("FA_O_STAGES", self.o_stages),
        )


@dataclass(frozen=True, kw_only=True)
class BwdKeysSm90(BackwardVariant):
    """A row of ``bwd_keys_sm90``: a warpgroup for dV, one for dK, and one that feeds them."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage)``, which the kernel checks."""
        row = 128 * -(-self.dim // 64)  # bytes, in blocks of 64 columns
        tiles = 64 * row * (2 + 2 * self.stages)
        end = 8 * (4 + 5 * self.stages + 2 * _WORK_STAGES) + _WORK_STAGES * _KEY_WORK_BYTES
        return tiles + (_SLOT_BYTES + 512) * self.stages + -(-end // 16) * 16

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (*super().defines, *self.tiles)


@dataclass(frozen=True, kw_only=True)
class BwdQueriesSm90(BackwardVariant):
    """A row of ``bwd_queries_sm90``: two warpgroups of 64 queries each, and one that feeds them.

    Attributes
    ----------
    v_stages : int
        Tiles of V in flight; `stages` are those of K.
    """

    v_stages: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage)``, which the kernel checks."""
        row = 128 * -(-self.dim // 64)  # bytes, in blocks of 64 columns
        tiles = row * (2 * self.tile_m + (self.stages + self.v_stages) * self.tile_n)
        barriers = 2 * (_GROUPS + self.stages + self.v_stages + _WORK_STAGES)
        end = 8 * barriers + _WORK_STAGES * _WORK_BYTES
        return tiles + 8 * self.tile_m + -(-end // 16) * 16

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (*super().defines, *self.tiles, ("FA_V_STAGES", self.v_stages))


@dataclass(frozen=True, kw_only=True)
class BwdRows(BackwardVariant):
    """A row of ``bwd_rows``, for all dims, which runs anywhere."""

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
            ("FA_UNROLL", ROWS_UNROLL),
            ("FA_ROWS_PARAMS_BYTES", BWD_ROWS_PARAMS.itemsize),
        )


@dataclass(frozen=True, kw_only=True)
class BwdRound(BackwardVariant):
    """A row of ``bwd_round``, for all dims."""

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
            ("FA_ROUND_PARAMS_BYTES", BWD_ROUND_PARAMS.itemsize),
        )


@dataclass(frozen=True, kw_only=True)
class BwdRedo(BackwardVariant):
    """A row of ``bwd_redo``, which runs anywhere."""

    @property
    def targets(self) -> tuple[str, ...]:
        """All that have its shared memory."""
        return tuple(t for t, limit in SHARED_LIMIT.items() if self.shared_bytes <= limit)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage)``, which the kernel checks."""
        pitch = self.tile_m + 4  # kPitch
        return 4 * (2 * self.tile_n * pitch + self.warps)

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            *super().defines,
            ("FA_DIM", self.dim),
            ("FA_THREADS", self.threads),
            ("FA_BACKWARD_PARAMS_BYTES", BACKWARD_PARAMS.itemsize),
        )


def _sm90() -> Iterator[BwdSm90]:
    # dim, tile_m, stages, o_stages, sections, why
    rows = (
        (64, 128, 2, 2, (12, 4), "two parts: exponentials of one beside products of the other"),
        (96, 64, 3, 2, (16, 16), "as for 128"),
        (128, 64, 3, 2, (16, 16), "dK and dV fill half of the registers; Q stays for another tile"),
    )
    for dim, tile_m, stages, o_stages, sections, why in rows:
        for dtype in DTYPE_NAMES:
            yield BwdSm90(
                source="attention/bwd_sm90", dtype=dtype, dim=dim, tile_m=tile_m, tile_n=128,
                warps=12, stages=stages, o_stages=o_stages, sections=sections, why=why,
            )  # fmt: skip


def _wide() -> Iterator[BackwardVariant]:
    why = "dK and dV of 64 keys are all registers that two warpgroups have for sums"
    for dim, v_stages in ((192, 2), (256, 1)):
        for dtype in DTYPE_NAMES:
            yield BwdKeysSm90(
                source="attention/bwd_keys_sm90", dtype=dtype, dim=dim, tile_m=64, tile_n=64,
                warps=12, stages=2, why=why,
            )  # fmt: skip
            yield BwdQueriesSm90(
                source="attention/bwd_queries_sm90", dtype=dtype, dim=dim, tile_m=128, tile_n=64,
                warps=12, stages=2, v_stages=v_stages,
                why="Q and dO of 128 queries leave room for three tiles of 64 keys at 256",
            )  # fmt: skip


def _around() -> Iterator[BackwardVariant]:
    for dtype in DTYPE_NAMES:
        yield BwdRows(
            source="attention/bwd_rows", dtype=dtype, dim=256, tile_m=1, tile_n=1,
            warps=ROWS_THREADS // 32, stages=1, why="reads dout and out once",
        )  # fmt: skip
        yield BwdRound(
            source="attention/bwd_round", dtype=dtype, dim=256, tile_m=64, tile_n=64,
            warps=ROUND_THREADS // 32, stages=1, why="a block for each piece",
        )  # fmt: skip
        yield BwdRedo(
            source="attention/bwd_redo", dtype=dtype, dim=256, tile_m=64, tile_n=64,
            warps=REDO_THREADS // 32, stages=1, why="4 x 4 pairs a thread; rarely any work",
        )  # fmt: skip


#: All rows.
BACKWARD: tuple[BackwardVariant, ...] = (*_sm90(), *_wide(), *_around())


def select_bwd(dtype: str, head_dim: int, v_dim: int) -> tuple[BackwardVariant, ...] | None:
    """Pick the kernels of a call that they take, in the order of their launches.

    Parameters
    ----------
    dtype : str
        Name of the dtype of q, k and v.
    head_dim, v_dim : int

    Returns
    -------
    tuple of BackwardVariant, or None
        None where no kernel serves the call: other dtypes, dims above 256.
    """
    wanted = max(head_dim, v_dim)
    fits = [row for row in BACKWARD if row.dtype == dtype and row.dim >= wanted]

    def pick(kind: type[BackwardVariant]) -> BackwardVariant | None:
        return min((row for row in fits if isinstance(row, kind)), key=lambda row: row.rank,
                   default=None)  # fmt: skip

    main = [pick(BwdSm90), pick(BwdRound)]
    if main[0] is None:
        main = [pick(BwdKeysSm90), pick(BwdQueriesSm90)]
    chain = [pick(BwdRows), *main, pick(BwdRedo)]
    found = tuple(row for row in chain if row is not None)
    return found if len(found) == len(chain) else None
