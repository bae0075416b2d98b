"""What the kernels of attention backward that tensor maps feed share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fa_cupy.gpu.kernels.attention.attention_params import ATTENTION_PARAMS
from fa_cupy.gpu.kernels.backward import BOX, BackwardVariant, Launches, Traits
from fa_cupy.gpu.kernels.mask.structs import MASK_TABLE
from fa_cupy.gpu.kernels.tensor_maps import MAP_AXES, MAP_BYTES, padded
from fa_cupy.gpu.plan import Step

# The arrays that have a tensor map, in the order of the struct, and those that are read.
_MAPPED = ("q", "k", "v", "dout", "dk", "dv", "dq")
_READ = ("q", "k", "v", "dout")
#: Warpgroups that compute, and stages of what they are to do: kGroups, kWorkStages.
GROUPS, WORK_STAGES = 2, 2
_NOTE_BYTES = 8  # MaskTileInfo
_CURSOR_BYTES, _CURSORS = 20, 4  # MaskCursor, kCursors
_COUNTERS = 4  # words of ``tile_counters``

# Parts of the workspace that a struct points to, where a call has them.
_PARTS = ("lse_delta", "dq_accum", "dq_semaphore", "tile_counters", "nonfinite_flags")

#: ``struct BwdSm90Params`` of ``cuda_src/common/backward_sm90.cuh``.
BWD_SM90_PARAMS = padded(
    [(f"{name}_map", np.uint64, (MAP_BYTES // 8,)) for name in _MAPPED]
    + [("common", ATTENTION_PARAMS)]
    + [(name, np.uint64) for name in _PARTS]
    + [("mask", MASK_TABLE)]
    + [("size", np.int32, (MAP_AXES,))]
    + [(f"{name}_step", np.int32, (MAP_AXES,)) for name in _READ]
    + [
        (name, np.int32)
        for name in ("group", "entries", "k_tiles", "entries_per_l2_group", "row_pairs")
    ],
    alignment=64,
)


@dataclass(frozen=True, kw_only=True)
class BackwardSm90(BackwardVariant):
    """A row of a kernel that runs where tensor maps and wgmma are.

    Attributes
    ----------
    l2_groups : tuple of int
        Entries of a group, without a band and under one. The blocks of keys of a group's entries
        are given out in turn, and share the L2 cache. A block of keys may wait for those before it
        of its entry, so a group should have several entries; blocks of one entry read the same
        queries, so it should not have too many.
    """

    l2_groups: tuple[int, int] = (16, 16)

    @property
    def targets(self) -> tuple[str, ...]:
        """The only target that has wgmma."""
        return ("sm_90a",)

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            *super().defines,
            ("FA_DIM", self.dim),
            ("FA_TILE_M", self.tile_m),
            ("FA_TILE_N", self.tile_n),
            ("FA_STAGES", self.stages),
            ("FA_SPARSE", int(self.sparse)),
            ("FA_SM90_PARAMS_BYTES", BWD_SM90_PARAMS.itemsize),
        )

    @property
    def row_bytes(self) -> int:
        """Of a row of a tile in shared memory, in blocks of 64 columns."""
        return 128 * -(-self.dim // 64)

    @property
    def notes(self) -> int:
        """Bytes of what is told of the tiles in flight, under a mask, and of where feeders are."""
        cursors = _CURSORS if self.sparse else 1
        return _NOTE_BYTES * (self.stages if self.sparse else 1) + _CURSOR_BYTES * cursors

    def counters(self, traits: Traits) -> dict[str, int]:
        """Return the counters of tiles, which the kernels of a call share."""
        return {"tile_counters": 4 * _COUNTERS}

    def mapped_step(
        self,
        traits: Traits,
        launches: Launches,
        blocks: int,
        boxes: dict[str, int],
        by_key: bool = True,
    ) -> Step:
        """Return a launch whose blocks take parts of the work until none is left.

        Parameters
        ----------
        traits : Traits
        launches : Launches
        blocks : int
            Parts of the work.
        boxes : dict of int
            Rows of the boxes of arrays, where these are not `BOX`.
        by_key : bool
            Whether the kernel reads a mask by blocks of keys.
        """
        problem, params = traits.problem, np.zeros(1, BWD_SM90_PARAMS)
        params["common"] = traits.common("q", "dq", problem.v_dim, self.tile_m)
        params["size"] = traits.size
        for name in _READ:
            params[f"{name}_step"] = [step != 0 for step in traits.steps[name]]
        entries = traits.entries // traits.group  # of keys
        params["group"], params["entries"] = traits.group, entries
        params["k_tiles"] = -(-problem.k_len // self.tile_n)
        l2_group = self.l2_groups[problem.lower is not None or problem.upper is not None]
        params["entries_per_l2_group"] = -(-entries // max(1, round(entries / l2_group)))
        params["row_pairs"] = launches.rows // 2
        addresses = {name: name for name in _PARTS if name in launches.parts}
        addresses |= traits.mask(params, by_key)
        maps: dict[str, Any] = {
            f"{name}_map": (name, traits.geometry(name, boxes.get(name, BOX))) for name in _MAPPED
        }
        grid = launches.persistent(blocks)
        return Step(self, grid, params, addresses, maps, persistent=True)
