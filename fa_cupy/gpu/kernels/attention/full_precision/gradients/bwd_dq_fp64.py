"""The host side of ``bwd_dq_fp64``, which computes dQ in float64."""

from __future__ import annotations

from collections.abc import Iterator

from fa_cupy.gpu.kernels.attention.full_precision.gradients.backward_fp64 import BackwardFp64
from fa_cupy.gpu.kernels.attention.full_precision.products_fp64 import DTYPE


def _rows() -> Iterator[BackwardFp64]:
    # dim, tile_m, tile_n, warps, stages, wide, why.
    rows = (
        (32, 64, 32, 8, 2, True, "two warps for each tensor core"),
        (64, 64, 32, 8, 2, True, "as for 32"),
        (96, 64, 32, 8, 2, True, "as for 32; shared memory is full"),
        (128, 64, 16, 8, 2, True, "as for 96"),
        (192, 32, 16, 4, 2, True, "Q and dO of more queries would not fit"),
        (256, 32, 16, 4, 1, True, "as for 192; two tiles would not fit"),
        (32, 32, 32, 4, 2, False, "fits the 99 KB of the smallest targets"),
        (64, 32, 32, 4, 1, False, "as for 32"),
        (128, 32, 32, 4, 1, False, "fits 163 KB"),
        (128, 16, 16, 2, 1, False, "as for 32"),
    )
    for dim, tile_m, tile_n, warps, stages, wide, why in rows:
        for sparse in (False, True):
            yield BackwardFp64(
                source="attention/bwd_dq_fp64", dtype=DTYPE, dim=dim, tile_m=tile_m,
                tile_n=tile_n, warps=warps, stages=stages, why=why,
                wide=wide, own_keys=False, sparse=sparse,
                hot_targets=("sm_90a",) if wide else (),
            )  # fmt: skip


VARIANTS = tuple(_rows())
