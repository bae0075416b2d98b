"""The kernels of attention backward for SM80 and later, one row a compiled variant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from fa_cupy.gpu.driver.targets import SHARED_LIMIT
from fa_cupy.gpu.kernels.attention.bwd_params import BACKWARD_PARAMS
from fa_cupy.gpu.kernels.attention.bwd_sm90_variants import (
    BACKWARD,
    DTYPE_NAMES,
    BackwardVariant,
    BwdNonfinite,
    BwdPreprocess,
)

_KEY_WORK_BYTES = 64  # Work in bwd_dkdv_sm80.cu


@dataclass(frozen=True, kw_only=True)
class BackwardSm80(BackwardVariant):
    """A row of a kernel of mma.sync, which takes any call with a mask, or any without.

    Attributes
    ----------
    blocks : int
        Blocks that should fit on a multiprocessor.
    """

    blocks: int

    @property
    def targets(self) -> tuple[str, ...]:
        """All that have its shared memory."""
        return tuple(t for t, limit in SHARED_LIMIT.items() if self.shared_bytes <= limit)

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            *super().defines,
            ("FA_DIM", self.dim),
            ("FA_TILE_M", self.tile_m),
            ("FA_TILE_N", self.tile_n),
            ("FA_WARPS", self.warps),
            ("FA_STAGES", self.stages),
            ("FA_BLOCKS", self.blocks),
            ("FA_SPARSE", int(self.sparse)),
            ("FA_BACKWARD_PARAMS_BYTES", BACKWARD_PARAMS.itemsize),
        )


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
        return tiles + weights + 2 * 8 * self.tile_m + _KEY_WORK_BYTES

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        groups = ("FA_SCORE_GROUPS", self.score_groups), ("FA_SUM_GROUPS", self.sum_groups)
        return (*super().defines, *groups)


@dataclass(frozen=True, kw_only=True)
class BwdDqSm80(BackwardSm80):
    """A row of ``bwd_dq_sm80``; `stages` are tiles of V in flight."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage)``, which the kernel checks."""
        return 2 * self.dim * (2 * self.tile_m + (2 + self.stages) * self.tile_n)


def _keys() -> Iterator[BwdDkdvSm80]:
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


def _queries() -> Iterator[BwdDqSm80]:
    # dim, tile_m, tile_n, stages, why
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


#: All rows of kernels of mma.sync.
BACKWARD_SM80: tuple[BackwardSm80, ...] = (*_keys(), *_queries())


def select_bwd_sm80(
    dtype: str, head_dim: int, v_dim: int, target: str | None, masked: bool = False
) -> tuple[BackwardVariant, ...] | None:
    """Pick the kernels of a call that they take, in the order of their launches.

    Parameters
    ----------
    dtype : str
        Name of the dtype of q, k and v.
    head_dim, v_dim : int
    target : str or None
        That of the device, as `fa_cupy.gpu.driver.targets.target_of` chooses it.
    masked : bool
        Whether there is a mask.

    Returns
    -------
    tuple of BackwardVariant, or None
        None where no kernel serves the call: other dtypes, dims above 256, old devices.
    """
    wanted = max(head_dim, v_dim)
    fits = [
        row
        for row in (*BACKWARD, *BACKWARD_SM80)
        if row.dtype == dtype and row.dim >= wanted and target in row.targets
    ]

    def pick(kind: type[BackwardVariant], sparse: bool) -> BackwardVariant | None:
        found = (row for row in fits if isinstance(row, kind) and row.sparse == sparse)
        return min(found, key=lambda row: row.rank, default=None)

    chain = [
        pick(BwdPreprocess, False), pick(BwdDkdvSm80, masked), pick(BwdDqSm80, masked),
        pick(BwdNonfinite, False),
    ]  # fmt: skip
    found = tuple(row for row in chain if row is not None)
    return found if len(found) == len(chain) else None
