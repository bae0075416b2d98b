"""The host side of ``bwd_dkdv_fp64``, which computes dK and dV in float64."""

from __future__ import annotations

from collections.abc import Iterator

from fa_cupy.gpu.kernels.attention.full_precision.gradients.backward_fp64 import BackwardFp64
from fa_cupy.gpu.kernels.attention.full_precision.products_fp64 import DTYPE


def _rows() -> Iterator[BackwardFp64]:
    # dim, tile_m, tile_n, warps, column_warps, stages, wide, why.  A tile of queries divides that
    # of the row of ``bwd_dq_fp64`` that is launched before, which writes what is known of them.
    rows = (
        (32, 32, 64, 8, 1, 2, True, "two warps for each tensor core"),
        (64, 32, 64, 8, 1, 2, True, "as for 32"),
        (96, 32, 64, 8, 1, 2, True, "as for 32"),
        (128, 16, 64, 8, 1, 2, True, "as for 32; shared memory is full"),
        (192, 16, 32, 8, 2, 2, True, "two pairs share rows: sums would not fit in registers"),
        (256, 16, 32, 8, 2, 1, True, "as for 192; two tiles would not fit"),
        (32, 32, 32, 4, 1, 2, False, "fits the 99 KB of the smallest targets"),
        (64, 32, 32, 4, 1, 1, False, "as for 32"),
        (128, 32, 32, 4, 1, 1, False, "fits 163 KB"),
        (128, 16, 16, 2, 1, 1, False, "as for 32"),
    )
    for dim, tile_m, tile_n, warps, column_warps, stages, wide, why in rows:
        for sparse in (False, True):
            yield BackwardFp64(
                source="attention/bwd_dkdv_fp64", dtype=DTYPE, dim=dim, tile_m=tile_m,
                tile_n=tile_n, warps=warps, stages=stages, why=why, column_warps=column_warps,
                wide=wide, own_keys=True, sparse=sparse,
                hot_targets=("sm_90a",) if wide else (),
            )  # fmt: skip


VARIANTS = tuple(_rows())
