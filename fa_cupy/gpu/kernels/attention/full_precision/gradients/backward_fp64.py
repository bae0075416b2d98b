"""What the two kernels of attention backward in float64 share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fa_cupy.gpu.kernels.attention.full_precision.gradients.backward_rows import (
    BWD_ROWS_FIELDS,
    BackwardRows,
)
from fa_cupy.gpu.kernels.attention.full_precision.products_fp64 import ProductsFp64
from fa_cupy.gpu.kernels.backward import Launches, Traits
from fa_cupy.gpu.plan import Step

#: ``BwdFp64Params`` of ``cuda_src/common/backward_fp64.cuh``.
BWD_FP64_PARAMS = np.dtype(BWD_ROWS_FIELDS, align=True)
_ROW_BYTES = 32  # QueryRow
_ROWS_OF_PAIR = 16  # of two warps


@dataclass(frozen=True, kw_only=True)
class BackwardFp64(ProductsFp64, BackwardRows):
    """A row of a kernel of gradients in float64.

    Attributes
    ----------
    column_warps : int
        Pairs of warps that share rows, each with a part of the columns.
    """

    column_warps: int = 1

    @property
    def struct(self) -> np.dtype[Any]:
        """What the kernel is passed: a struct that begins as `BWD_FP64_PARAMS`."""
        return BWD_FP64_PARAMS

    @property
    def hand_over(self) -> int:
        """How many of the two warps of a pair hand over what they have."""
        return 1 if self.own_keys else 2

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage)``, which the kernel checks."""
        tiles = 8 * self.dim * 2 * (self.own_rows + self.stages * self.other_rows)
        handed_over = self.hand_over * 8 * _ROWS_OF_PAIR * self.other_rows
        rows = _ROW_BYTES * self.tile_m * (self.stages if self.own_keys else 1)
        work = -(-self.work_bytes // 16) * 16
        return tiles + self.warps // 2 * handed_over + rows + work

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            *super().defines,
            ("FA_COLUMN_WARPS", self.column_warps),
            ("FA_WIDE_MMA", int(self.wide)),
            ("FA_HAND_OVER", self.hand_over),
            ("FA_BWD_FP64_BYTES", BWD_FP64_PARAMS.itemsize),
        )

    def step(self, traits: Traits, launches: Launches) -> Step:
        """Return the launch: a block for each tile of the rows that it owns."""
        launches.scratch["query_rows"] = _ROW_BYTES * traits.entries * launches.rows
        filled = np.zeros(1, self.struct)
        return self.launch(traits, launches, filled, {}, self.blocks(traits))
