"""The host side of ``bwd_dkdv_fp32``, which computes dK and dV in float32."""

from __future__ import annotations

from collections.abc import Iterator

from fa_cupy.gpu.kernels.attention.full_precision.gradients.backward_fp32 import DTYPE, BackwardFp32


def _rows() -> Iterator[BackwardFp32]:
    # dim, tile_m, tile_n, warps, part, at_once, stages, blocks, why.
    rows = (
        (32, 64, 128, 4, 32, 2, 2, 2, "as for 64"),
        (64, 32, 128, 4, 32, 2, 2, 2, "32 rows a warp, which share what it reads of queries"),
        (96, 64, 128, 8, 32, 4, 2, 1, "as for 128"),
        (128, 32, 128, 8, 32, 4, 2, 1, "16 rows a warp: the sums leave no registers for more"),
        (64, 32, 128, 4, 32, 2, 1, 2, "fits the 99 KB of the smallest targets"),
        (96, 32, 64, 4, 32, 4, 1, 1, "as for the small row of 64"),
        (128, 32, 128, 8, 32, 4, 1, 1, "fits 163 KB"),
        (128, 16, 64, 4, 16, 2, 1, 1, "as for the small row of 64"),
    )
    for dim, tile_m, tile_n, warps, part, at_once, stages, blocks, why in rows:
        for sparse in (False, True):
            keeps = stages == 2 and (dim == 32 or (dim == 96 and not sparse))
            yield BackwardFp32(
                source="attention/bwd_dkdv_fp32", dtype=DTYPE, dim=dim, tile_m=tile_m,
                tile_n=tile_n, warps=warps, stages=stages, why=why, warp_rows=tile_n // warps,
                part=part, at_once=at_once, blocks_at_once=blocks, own_keys=True, sparse=sparse,
                hot_targets=("sm_90a",) if keeps else (),  # others spill
            )  # fmt: skip


VARIANTS = tuple(_rows())
