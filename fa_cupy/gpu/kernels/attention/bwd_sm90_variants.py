"""The kernels of attention backward: one row a compiled variant, with the reason for its tile.

Pure data, as `fa_cupy.gpu.kernels.attention.fwd_variants`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from fa_cupy.gpu.kernels.attention.bwd_params import CONVERT_DQ_THREADS, NONFINITE_THREADS
from fa_cupy.gpu.kernels.attention.bwd_variant import (
    BackwardVariant as BackwardVariant,  # for those who read the table
)
from fa_cupy.gpu.kernels.attention.bwd_variant import BwdConvertDq
from fa_cupy.gpu.kernels.attention.bwd_variant import BwdDkdvSm90 as BwdDkdvSm90
from fa_cupy.gpu.kernels.attention.bwd_variant import BwdDqSm90 as BwdDqSm90
from fa_cupy.gpu.kernels.attention.bwd_variant import BwdNonfinite as BwdNonfinite
from fa_cupy.gpu.kernels.attention.bwd_variant import BwdPreprocess as BwdPreprocess
from fa_cupy.gpu.kernels.attention.bwd_variant import BwdSm90 as BwdSm90

DTYPE_NAMES = ("float16", "bfloat16")


def _sm90() -> Iterator[BwdSm90]:
    # dim, tile_m, stages, store_threads, defer_dq, l2_groups, why
    rows = (
        (64, 128, 2, 3, True, (16, 8), "K and V are read once for 128 queries, turns may be late"),
        (96, 64, 3, 3, False, (16, 16), "as for 128; late turns cost more with two stores"),
        (128, 64, 3, 2, False, (16, 16), "dK and dV fill half of the registers; Q stays longer"),
    )
    for dim, tile_m, stages, store_threads, defer_dq, l2_groups, why in rows:
        for dtype, sparse in product(DTYPE_NAMES, (False, True)):
            yield BwdSm90(
                source="attention/bwd_sm90", dtype=dtype, dim=dim, tile_m=tile_m, tile_n=128,
                warps=12, stages=stages, dout_stages=2, staging_stages=2,
                store_threads=3 if sparse else store_threads, defer_dq=defer_dq,
                l2_groups=l2_groups, why=why, sparse=sparse,
            )  # fmt: skip


def _wide() -> Iterator[BackwardVariant]:
    why = "dK and dV of 64 keys are all registers that two warpgroups have for sums"
    for dim, v_stages in ((192, 2), (256, 1)):
        for dtype, sparse in product(DTYPE_NAMES, (False, True)):
            yield BwdDkdvSm90(
                source="attention/bwd_dkdv_sm90", dtype=dtype, dim=dim, tile_m=64, tile_n=64,
                warps=12, stages=2, sum_first=2, why=why, sparse=sparse,
            )  # fmt: skip
            yield BwdDqSm90(
                source="attention/bwd_dq_sm90", dtype=dtype, dim=dim, tile_m=128, tile_n=64,
                warps=12, stages=2, v_stages=v_stages, sum_first=1, sparse=sparse,
                why="Q and dO of 128 queries leave room for three tiles of 64 keys at 256",
            )  # fmt: skip


def _around() -> Iterator[BackwardVariant]:
    for dtype in DTYPE_NAMES:
        yield BwdPreprocess(
            source="attention/bwd_preprocess", dtype=dtype, dim=256, tile_m=4, tile_n=1,
            warps=8, stages=1, why="reads dout and out once, enough rows at a time",
        )  # fmt: skip
        yield BwdConvertDq(
            source="attention/bwd_convert_dq", dtype=dtype, dim=256, tile_m=64, tile_n=64,
            warps=CONVERT_DQ_THREADS // 32, stages=1, why="a block for each piece",
        )  # fmt: skip
        yield BwdNonfinite(
            source="attention/bwd_nonfinite", dtype=dtype, dim=256, tile_m=64, tile_n=64,
            warps=NONFINITE_THREADS // 32, stages=1, why="4 x 4 pairs a thread; rarely any work",
        )  # fmt: skip


#: All rows.
BACKWARD: tuple[BackwardVariant, ...] = (*_sm90(), *_wide(), *_around())


def round_of(row: BwdSm90) -> BwdConvertDq:
    """Return the row of ``bwd_convert_dq`` that takes the pieces of a row."""
    rounds = (r for r in BACKWARD if isinstance(r, BwdConvertDq) and r.dtype == row.dtype)
    return replace(next(rounds), tile_m=row.piece_m)


def select_bwd(
    dtype: str, head_dim: int, v_dim: int, masked: bool = False
) -> tuple[BackwardVariant, ...] | None:
    """Pick the kernels of a call that they take, in the order of their launches.

    Parameters
    ----------
    dtype : str
        Name of the dtype of q, k and v.
    head_dim, v_dim : int
    masked : bool
        Whether there is a mask.

    Returns
    -------
    tuple of BackwardVariant, or None
        None where no kernel serves the call: other dtypes, dims above 256.
    """
    wanted = max(head_dim, v_dim)
    fits = [row for row in BACKWARD if row.dtype == dtype and row.dim >= wanted]

    def pick(kind: type[BackwardVariant], sparse: bool = False) -> BackwardVariant | None:
        found = (row for row in fits if isinstance(row, kind) and row.sparse == sparse)
        return min(found, key=lambda row: row.rank, default=None)

    main = [pick(BwdSm90, masked)]
    if isinstance(main[0], BwdSm90):
        main.append(round_of(main[0]))
    else:
        main = [pick(BwdDkdvSm90, masked), pick(BwdDqSm90, masked)]
    chain = [pick(BwdPreprocess), *main, pick(BwdNonfinite)]
    found = tuple(row for row in chain if row is not None)
    return found if len(found) == len(chain) else None
