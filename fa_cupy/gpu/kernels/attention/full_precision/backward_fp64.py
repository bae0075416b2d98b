"""What the two kernels of attention backward in float64 share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fa_cupy.core.attention_problem import FLOAT_DTYPES
from fa_cupy.gpu.kernels.attention.attention_params import ATTENTION_PARAMS
from fa_cupy.gpu.kernels.attention.full_precision.products_fp64 import ProductsFp64
from fa_cupy.gpu.kernels.backward import ARRAY, BackwardVariant, Launches, Traits
from fa_cupy.gpu.kernels.mask.mask_table import MASK_TABLE
from fa_cupy.gpu.kernels.tensor_maps import MAP_AXES
from fa_cupy.gpu.plan import Step
from fa_cupy.tiled.attention_backward import slope_of
from fa_cupy.tiled.softcap import transform

_ARRAYS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
#: ``struct BwdFp64Params`` of ``cuda_src/common/backward_fp64.cuh``.
BWD_FP64_PARAMS = np.dtype(
    [("common", ATTENTION_PARAMS)]
    + [(name, ARRAY) for name in _ARRAYS]
    + [("mask", MASK_TABLE)]
    + [(name, np.uint64) for name in ("lse", "dlse", "rows")]
    + [(name, np.float64) for name in ("scale", "softcap", "factor")]
    + [("size", np.int32, (MAP_AXES,))]
    + [(name, np.int32) for name in ("group", "entry_rows", "aligned")],
    align=True,
)
_ROW_BYTES = 32  # QueryRow
_WORK_BYTES = 32  # WorkTile, padded
_ROWS_OF_PAIR = 16  # of two warps


@dataclass(frozen=True, kw_only=True)
class BackwardFp64(ProductsFp64, BackwardVariant):
    """A row of a kernel of gradients in float64, which takes any call with a mask, or any without.

    `stages` are tiles of the side that its blocks walk over.

    Attributes
    ----------
    column_warps : int
        Pairs of warps that share rows, each with a part of the columns.
    own_keys : bool
        Whether a block owns keys, else queries.
    """

    column_warps: int = 1
    own_keys: bool

    @property
    def own_rows(self) -> int:
        """Rows that a block owns."""
        return self.tile_n if self.own_keys else self.tile_m

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage)``, which the kernel checks."""
        other_rows = self.tile_m if self.own_keys else self.tile_n
        tiles = 8 * self.dim * 2 * (self.own_rows + self.stages * other_rows)
        handed_over = (1 if self.own_keys else 2) * 8 * _ROWS_OF_PAIR * other_rows
        rows = _ROW_BYTES * self.tile_m * (self.stages if self.own_keys else 1)
        return tiles + self.warps // 2 * handed_over + rows + _WORK_BYTES

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            *super().defines,
            ("FA_OWN_KEYS", int(self.own_keys)),
            ("FA_DIM", self.dim),
            ("FA_TILE_M", self.tile_m),
            ("FA_TILE_N", self.tile_n),
            ("FA_WARPS", self.warps),
            ("FA_STAGES", self.stages),
            ("FA_COLUMN_WARPS", self.column_warps),
            ("FA_WIDE_MMA", int(self.wide)),
            ("FA_SPARSE", int(self.sparse)),
            ("FA_BWD_FP64_BYTES", BWD_FP64_PARAMS.itemsize),
        )

    def step(self, traits: Traits, launches: Launches) -> Step:
        """Return the launch: a block for each tile of the rows that it owns."""
        problem, filled = traits.problem, np.zeros(1, BWD_FP64_PARAMS)
        params = filled[0]
        params["common"] = traits.common("q", "dq", problem.v_dim, self.tile_m)[0]
        steps: list[int] = []
        for name in _ARRAYS:
            own = [*traits.steps[name], traits.views[name].strides[-2]]
            *params[name]["batch"], params[name]["row"] = [step // 8 for step in own]
            steps += own
        params["size"], params["group"] = traits.size, traits.group
        params["entry_rows"], params["scale"] = launches.rows, slope_of(problem, problem.dtype)
        if problem.softcap:
            params["factor"], params["softcap"] = transform(problem, problem.dtype)
        addresses = {f"{name}.start": name for name in _ARRAYS}
        addresses |= {"lse": "lse", "dlse": "dlse", "rows": "query_rows"} | traits.operands
        addresses |= traits.mask(filled, self.own_keys)
        if problem.sinks is not None and problem.sinks_dtype is not None:
            item = problem.sinks_dtype.itemsize
            params["common"]["sinks_row"] = problem.sinks.strides[-2] // item
            of_sinks = [step // item for step in traits.steps["sinks"]]
            params["common"]["sinks_batch"][:MAP_AXES] = of_sinks
            params["common"]["sinks_kind"] = FLOAT_DTYPES.index(problem.sinks_dtype)
            addresses["common.sinks"] = "sinks"
        launches.scratch["query_rows"] = _ROW_BYTES * traits.entries * launches.rows
        length = problem.k_len if self.own_keys else problem.q_len
        entries = traits.entries // traits.group if self.own_keys else traits.entries
        aligned = _ARRAYS if all(step % 16 == 0 for step in steps) else ()
        grid = entries * -(-length // self.own_rows)
        return Step(self, grid, filled, addresses, aligned=aligned)
