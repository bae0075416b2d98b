"""The host side of ``bwd_dbias_fp64``, which computes the gradient of a bias in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

from fa_cupy.gpu.kernels.attention.dbias.dbias_rows import DBIAS_ROWS_FIELDS, SCORES, DbiasRows
from fa_cupy.gpu.kernels.attention.full_precision.gradients.backward_fp64 import BackwardFp64
from fa_cupy.gpu.kernels.attention.full_precision.gradients.backward_rows import BWD_ROWS_FIELDS
from fa_cupy.gpu.kernels.attention.full_precision.products_fp64 import DTYPE

_PARAMS = np.dtype(BWD_ROWS_FIELDS + DBIAS_ROWS_FIELDS, align=True)


@dataclass(frozen=True, kw_only=True)
class BwdDbiasFp64(DbiasRows, BackwardFp64):
    """A row of ``bwd_dbias_fp64``. Each row has scores with a bias."""

    @property
    def struct(self) -> np.dtype[Any]:
        """What the kernel is passed: ``DbiasParams`` of its source."""
        return _PARAMS

    @property
    def hand_over(self) -> int:
        """One warp of a pair has the sums, and is handed the weights of the other one."""
        return 1


def _rows() -> Iterator[BwdDbiasFp64]:
    # dim, tile_m, tile_n, warps, wide, why.
    rows = (
        (32, 64, 64, 8, True, "a tile reads the fewest bytes a pair"),
        (64, 64, 64, 8, True, "as for 32"),
        (96, 64, 32, 8, True, "64 keys would not fit"),
        (128, 64, 32, 8, True, "as for 96"),
        (192, 32, 32, 4, True, "more queries would not fit"),
        (256, 32, 16, 4, True, "as for 192"),
        (32, 32, 32, 4, False, "fits the 99 KB of the smallest targets"),
        (64, 32, 32, 4, False, "as for 32"),
        (128, 32, 32, 4, False, "fits 163 KB"),
        (128, 16, 16, 2, False, "as for 32"),
    )
    scores = cycle(SCORES)
    for dim, tile_m, tile_n, warps, wide, why in rows:
        score = next(scores)
        for sparse in (False, True):
            yield BwdDbiasFp64(
                source="attention/bwd_dbias_fp64", dtype=DTYPE, dim=dim, tile_m=tile_m,
                tile_n=tile_n, warps=warps, stages=1, wide=wide, own_keys=False, sparse=sparse,
                score=score, why=why, hot_targets=("sm_90a",) if wide else (),
            )  # fmt: skip


VARIANTS = tuple(_rows())
