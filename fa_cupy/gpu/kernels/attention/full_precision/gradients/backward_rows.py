"""What the kernels of attention backward in float32 and float64 share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fa_cupy.core.attention_problem import FLOAT_DTYPES
from fa_cupy.gpu.kernels.attention.attention_params import ATTENTION_PARAMS
from fa_cupy.gpu.kernels.attention.full_precision import key_lengths
from fa_cupy.gpu.kernels.attention.full_precision.key_lengths import BAND_BYTES
from fa_cupy.gpu.kernels.backward import ARRAY, BackwardVariant, Launches, Traits
from fa_cupy.gpu.kernels.mask.mask_table import MASK_TABLE
from fa_cupy.gpu.kernels.tensor_maps import MAP_AXES
from fa_cupy.gpu.plan import Step
from fa_cupy.tiled.attention_backward import slope_of
from fa_cupy.tiled.softcap import transform

_ARRAYS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
#: The fields of ``struct BwdRowsParams`` of ``cuda_src/common/backward_rows.cuh``.
BWD_ROWS_FIELDS: list[Any] = (
    [("common", ATTENTION_PARAMS)]
    + [(name, ARRAY) for name in _ARRAYS]
    + [("mask", MASK_TABLE)]
    + [(name, np.uint64) for name in ("lse", "dlse", "rows")]
    + [(name, np.float64) for name in ("scale", "softcap", "factor")]
    + [("size", np.int32, (MAP_AXES,))]
    + [(name, np.int32) for name in ("group", "entry_rows", "aligned")]
)
_WORK_BYTES = 28  # WorkTile


@dataclass(frozen=True, kw_only=True)
class BackwardRows(BackwardVariant):
    """A row of a kernel whose blocks own rows, for any call with a mask, or any without.

    `stages` are tiles of the side that its blocks walk over.

    Attributes
    ----------
    own_keys : bool
        Whether a block owns keys, else queries.
    """

    own_keys: bool

    @property
    def work_bytes(self) -> int:
        """Of a ``WorkTile`` in shared memory."""
        return _WORK_BYTES + (BAND_BYTES if self.lengths else 0)

    @property
    def own_rows(self) -> int:
        """Rows that a block owns."""
        return self.tile_n if self.own_keys else self.tile_m

    @property
    def other_rows(self) -> int:
        """Rows of a tile of the other side."""
        return self.tile_m if self.own_keys else self.tile_n

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
            ("FA_SPARSE", int(self.sparse)),
        )

    def blocks(self, traits: Traits) -> int:
        """Return how many there are: one for each tile of the rows that they own."""
        problem = traits.problem
        length = problem.k_len if self.own_keys else problem.q_len
        entries = traits.entries // traits.group if self.own_keys else traits.entries
        return entries * -(-length // self.own_rows)

    def launch(
        self, traits: Traits, launches: Launches, filled: np.ndarray[Any, Any],
        addresses: dict[str, str], blocks: int,
    ) -> Step:  # fmt: skip
        """Return the launch of a kernel whose struct begins with `BWD_ROWS_FIELDS`.

        Parameters
        ----------
        traits : Traits
        launches : Launches
        filled : numpy.ndarray
            The struct, with what follows those fields.
        addresses : dict of str
            The arrays that it points to besides.
        blocks : int
        """
        problem, params = traits.problem, filled[0]
        item = problem.dtype.itemsize
        params["common"] = traits.common("q", "dq", problem.v_dim, self.tile_m)[0]
        steps: list[int] = []
        for name in _ARRAYS:
            own = [*traits.steps[name], traits.views[name].strides[-2]]
            *params[name]["batch"], params[name]["row"] = [step // item for step in own]
            steps += own
        params["size"], params["group"] = traits.size, traits.group
        params["entry_rows"], params["scale"] = launches.rows, slope_of(problem, problem.dtype)
        if problem.softcap:
            params["factor"], params["softcap"] = transform(problem, problem.dtype)
        addresses = addresses | {f"{name}.start": name for name in _ARRAYS}
        addresses |= {"lse": "lse", "dlse": "dlse", "rows": "query_rows"} | traits.operands
        addresses |= traits.mask(filled, self.own_keys)
        if problem.sinks is not None and problem.sinks_dtype is not None:
            item = problem.sinks_dtype.itemsize
            params["common"]["sinks_row"] = problem.sinks.strides[-2] // item
            of_sinks = [step // item for step in traits.steps["sinks"]]
            params["common"]["sinks_batch"][:MAP_AXES] = of_sinks
            params["common"]["sinks_kind"] = FLOAT_DTYPES.index(problem.sinks_dtype)
            addresses["common.sinks"] = "sinks"
        aligned = _ARRAYS if all(step % 16 == 0 for step in steps) else ()
        step = Step(self, blocks, filled, addresses, aligned=aligned)
        if not self.lengths:
            return step
        lengths = key_lengths.filled(problem, traits.steps[key_lengths.ARRAY])
        return key_lengths.with_lengths([step], lengths, "common.")[0]
