"""The host side of ``bwd_dbias_fp32``, which computes the gradient of a bias in float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

from fa_cupy.gpu.kernels.attention.dbias.dbias_rows import DBIAS_ROWS_FIELDS, SCORES, DbiasRows
from fa_cupy.gpu.kernels.attention.full_precision.gradients.backward_fp32 import (
    BWD_FP32_FIELDS,
    DTYPE,
    BackwardFp32,
)

_PARAMS = np.dtype(BWD_FP32_FIELDS + DBIAS_ROWS_FIELDS, align=True)


@dataclass(frozen=True, kw_only=True)
class BwdDbiasFp32(DbiasRows, BackwardFp32):
    """A row of ``bwd_dbias_fp32``. Each row has scores with a bias."""

    @property
    def struct(self) -> np.dtype[Any]:
        """What the kernel is passed: ``DbiasParams`` of its source."""
        return _PARAMS


def _rows() -> Iterator[BwdDbiasFp32]:
    # dim, tile_m, tile_n, at_once, blocks, why.
    rows = (
        (32, 64, 64, 2, 3, "as for 64"),
        (64, 64, 64, 2, 3, "blocks that load while others multiply"),
        (96, 64, 32, 4, 2, "as for 128"),
        (128, 64, 32, 4, 2, "as for 64; fits the 99 KB of the smallest targets"),
    )
    scores = cycle(SCORES)
    for dim, tile_m, tile_n, at_once, blocks, why in rows:
        score = next(scores)
        for sparse in (False, True):
            yield BwdDbiasFp32(
                source="attention/bwd_dbias_fp32", dtype=DTYPE, dim=dim, tile_m=tile_m,
                tile_n=tile_n, warps=4, stages=1, why=why, warp_rows=16, part=32, at_once=at_once,
                blocks_at_once=blocks, own_keys=False, sparse=sparse, score=score,
                hot_targets=(),
            )  # fmt: skip


VARIANTS = tuple(_rows())
