"""The host side of ``bwd_dkdv_fp32_sm90``, which computes dK and dV in float32 by ``wgmma``."""

from __future__ import annotations

from collections.abc import Iterator

from fa_cupy.gpu.kernels.attention.full_precision.gradients.backward_fp32 import (
    DTYPE,
    BackwardFp32Sm90,
)


def _rows() -> Iterator[BackwardFp32Sm90]:
    # dim, keys of a block, queries of a tile, stages, why.
    rows = (
        (64, 128, 64, 3, "as many queries as there are registers for: keys are read less often"),
        (128, 128, 64, 1, "as for 64: faster than 32 queries, which do not spill"),
        (256, 64, 32, 1, "two warpgroups share keys: one has sums of dV, the other one of dK"),
    )
    for dim, own, other, stages, why in rows:
        for sparse in (False, True):
            yield BackwardFp32Sm90(  # two warpgroups compute, with 64 rows each
                source="attention/bwd_dkdv_fp32_sm90", dtype=DTYPE, dim=dim, tile_m=other,
                tile_n=own, warps=12, stages=stages, part=other, why=why, own_keys=True,
                sparse=sparse, row_groups=128 // own,
                hot_targets=("sm_90a",) if dim == 64 else (),  # 128 spills
            )  # fmt: skip


VARIANTS = tuple(_rows())
