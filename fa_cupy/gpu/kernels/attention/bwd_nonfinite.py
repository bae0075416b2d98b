"""The host side of ``bwd_nonfinite``, which computes rows again whose sums were not finite."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fa_cupy.core.attention_problem import FLOAT_DTYPES
from fa_cupy.gpu.kernels.backward import (
    BACKWARD_FIELDS,
    BACKWARD_PARAMS,
    BackwardVariant,
    Launches,
    Traits,
    strided_params,
)
from fa_cupy.gpu.kernels.tensor_maps import MAP_AXES
from fa_cupy.gpu.kernels.variant import DTYPE_NAMES
from fa_cupy.gpu.plan import Step

_THREADS = 256
_TASK_COUNTERS = 2  # words, of struct NonfiniteParams
#: ``struct NonfiniteParams`` of ``cuda_src/attention/bwd_nonfinite.cu``.
NONFINITE_PARAMS = np.dtype(
    [*BACKWARD_FIELDS, ("row_statistics", np.uint64), ("task_counters", np.uint64)], align=True
)


@dataclass(frozen=True, kw_only=True)
class BwdNonfinite(BackwardVariant):
    """A row of ``bwd_nonfinite``, which runs anywhere."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage)``, which the kernel checks."""
        pitch = self.tile_m + 4  # kPitch
        return 4 * (2 * self.tile_n * pitch + self.warps + 1)

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            *super().defines,
            ("FA_DIM", self.dim),
            ("FA_THREADS", self.threads),
            ("FA_BACKWARD_PARAMS_BYTES", self.sized(BACKWARD_PARAMS)),
            ("FA_NONFINITE_PARAMS_BYTES", self.sized(NONFINITE_PARAMS)),
        )

    def step(self, traits: Traits, launches: Launches) -> Step:
        """Return the launch, whose blocks take tasks until none is left."""
        launches.scratch["row_statistics"] = 8 * traits.entries * launches.rows  # two numbers each
        launches.counters["task_counters"] = 4 * _TASK_COUNTERS
        params, addresses = strided_params(traits, launches, self.tile_m, False, NONFINITE_PARAMS)
        addresses["common.lse"] = "lse"
        problem, p = traits.problem, params["common"][0]
        if problem.sinks is not None and problem.sinks_dtype is not None:
            item = problem.sinks_dtype.itemsize
            p["sinks_row"] = problem.sinks.strides[-2] // item
            p["sinks_batch"][:MAP_AXES] = [step // item for step in traits.steps["sinks"]]
            p["sinks_kind"] = FLOAT_DTYPES.index(problem.sinks_dtype)
            addresses["common.sinks"] = "sinks"
        addresses |= {name: name for name in ("row_statistics", "task_counters")}
        queries, keys = traits.flags
        grid = launches.persistent(queries + 2 * keys)
        return Step(self, grid, params, addresses, persistent=True)


VARIANTS = tuple(
    BwdNonfinite(
        source="attention/bwd_nonfinite", dtype=dtype, dim=256, tile_m=64, tile_n=64,
        warps=_THREADS // 32, stages=1, why="4 x 4 pairs a thread; rarely any work",
    )
    for dtype in DTYPE_NAMES
)  # fmt: skip
