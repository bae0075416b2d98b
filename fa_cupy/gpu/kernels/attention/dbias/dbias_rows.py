"""What the kernels for the gradient of a bias in float32 and float64 share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fa_cupy.gpu.kernels.attention.dbias.bwd_dbias_sm80 import DBIAS_STRIDES, fill_splits
from fa_cupy.gpu.kernels.attention.full_precision.gradients.backward_rows import BackwardRows
from fa_cupy.gpu.kernels.backward import Launches, Traits
from fa_cupy.gpu.kernels.score import ScoreMod
from fa_cupy.gpu.plan import Step

#: The fields of ``struct DbiasRowsParams`` of ``cuda_src/common/dbias_rows.cuh``, after others.
DBIAS_ROWS_FIELDS: list[Any] = (
    [(name, np.uint64) for name in ("dbias", "partial_sums")]
    + DBIAS_STRIDES
    + [(name, np.int32) for name in ("sums_queries", "sums_keys", "splits", "joined")]
)
#: Scores of the builds in the table, which are examples: calls get builds for their own.
SCORES = (
    ScoreMod(bias_axes="pair", bias_dtype="float32"),
    ScoreMod(bias_axes="key", bias_dtype="float16"),
    ScoreMod(softcap=True, bias_axes="query", bias_dtype="float32"),
    ScoreMod(softcap=True, bias_axes="pair", bias_dtype="bfloat16"),
)
_WORK_BYTES = 80  # DbiasWork


@dataclass(frozen=True, kw_only=True)
class DbiasRows(BackwardRows):
    """A row of a kernel for the gradient of a bias, of a class of other gradients besides."""

    @property
    def tile_bytes(self) -> int:
        """Shared memory that the other gradients have too."""
        return super().shared_bytes

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ``sizeof(DbiasStorage)``, which the kernel checks."""
        return -(-self.tile_bytes // 16) * 16 + _WORK_BYTES

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            *(x for x in super().defines if x[0] != "FA_SHARED_BYTES"),
            ("FA_SHARED_BYTES", self.tile_bytes),
            ("FA_DBIAS_SHARED_BYTES", self.shared_bytes),
            ("FA_DBIAS_PARAMS_BYTES", self.struct.itemsize),
        )

    @property
    def struct(self) -> np.dtype[Any]:
        """What the kernel is passed."""
        raise NotImplementedError

    def step(self, traits: Traits, launches: Launches) -> Step:
        """Return the launch: a block for each tile of the gradient, or for each split of one."""
        of_rows = super().step(traits, launches)
        outputs, splits, numbers = fill_splits(of_rows.params[0], traits, launches, self)
        addresses = {**of_rows.addresses, "dbias": "dbias"}
        if splits > 1:
            item = traits.problem.dtype.itemsize
            launches.scratch["partial_sums"] = item * outputs * splits * numbers * self.threads
            addresses["partial_sums"] = "partial_sums"
        return of_rows._replace(grid=outputs * splits, addresses=addresses)

    def joining(self, step: Step) -> list[Step]:
        """Return the launch that adds up what blocks have found that share a tile, if any do."""
        params, splits = step.params.copy(), int(step.params[0]["splits"])
        params["splits"], params["joined"] = 1, splits
        return [step._replace(grid=step.grid // splits, params=params)] if splits > 1 else []
