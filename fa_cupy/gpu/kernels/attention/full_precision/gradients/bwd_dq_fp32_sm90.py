"""The host side of ``bwd_dq_fp32_sm90``, which computes dQ in float32 by ``wgmma``."""

from __future__ import annotations

from collections.abc import Iterator

from fa_cupy.gpu.kernels.attention.full_precision.gradients.backward_fp32 import (
    DTYPE,
    BackwardFp32Sm90,
)


def _rows() -> Iterator[BackwardFp32Sm90]:
    # dim, queries of a block, keys of a tile, stages, why.
    rows = (
        (64, 128, 128, 1, "as many keys as there are registers for: queries are read less often"),
        (128, 128, 64, 1, "as for 64; shared memory is full"),
        (256, 64, 32, 2, "two warpgroups share queries; shared memory is full"),
    )
    for dim, own, other, stages, why in rows:
        for sparse in (False, True):
            yield BackwardFp32Sm90(  # two warpgroups compute, with 64 rows each
                source="attention/bwd_dq_fp32_sm90", dtype=DTYPE, dim=dim, tile_m=own, tile_n=other,
                warps=12, stages=stages, part=other, why=why, own_keys=False, sparse=sparse,
                row_groups=128 // own,
            )  # fmt: skip


VARIANTS = tuple(_rows())
