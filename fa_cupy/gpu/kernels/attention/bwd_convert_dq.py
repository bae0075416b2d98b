"""The host side of ``bwd_convert_dq``, which scales and rounds what ``bwd_sm90`` adds up of dQ."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fa_cupy.gpu.kernels.attention.attention_params import ATTENTION_PARAMS
from fa_cupy.gpu.kernels.attention.bwd_sm90 import PIECES, BwdSm90
from fa_cupy.gpu.kernels.backward import BackwardVariant, Launches, Traits
from fa_cupy.gpu.kernels.mask.mask_table import MASK_TABLE
from fa_cupy.gpu.kernels.score import ScoreMod
from fa_cupy.gpu.kernels.variant import DTYPE_NAMES
from fa_cupy.gpu.plan import Step

_THREADS = 128
#: ``struct BwdConvertDqParams`` of ``cuda_src/attention/bwd_convert_dq.cu``.
BWD_CONVERT_DQ_PARAMS = np.dtype(
    [("common", ATTENTION_PARAMS), ("dq_accum", np.uint64), ("nonfinite_flags", np.uint64)]
    + [("mask", MASK_TABLE)]
    + [(name, np.int32) for name in ("tile_m", "tile_n", "blocks")],
    align=True,
)


@dataclass(frozen=True, kw_only=True)
class BwdConvertDq(BackwardVariant):
    """A row of ``bwd_convert_dq``, for all dims.

    A piece has `tile_m` queries: those of the row of ``bwd_sm90`` that is launched before.
    """

    @property
    def targets(self) -> tuple[str, ...]:
        """That of ``bwd_sm90``."""
        return ("sm_90a",)

    def for_score(self, score: ScoreMod | None) -> BwdConvertDq:
        """Return the row: it computes no scores."""
        return self

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: a piece, rounded."""
        return 2 * self.tile_m * self.tile_n

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            *super().defines,
            ("FA_THREADS", self.threads),
            ("FA_TILE_M", self.tile_m),
            ("FA_CONVERT_DQ_PARAMS_BYTES", BWD_CONVERT_DQ_PARAMS.itemsize),
        )

    def step(self, traits: Traits, launches: Launches) -> Step:
        """Return the launch: a block for each piece."""
        (main,) = (variant for variant in launches.variants if isinstance(variant, BwdSm90))
        params, problem = np.zeros(1, BWD_CONVERT_DQ_PARAMS), traits.problem
        params["common"] = traits.common("q", "dq", problem.head_dim, main.tile_m)
        if problem.dropout is not None:  # the sums are those of dS divided by it
            params["common"]["scale"] *= problem.dropout.factor
        params["tile_m"], params["tile_n"] = main.tile_m, main.tile_n
        params["blocks"] = -(-main.dim // 64)
        addresses = {name: name for name in ("dq_accum", "nonfinite_flags")}
        addresses |= {"common.out": "dq", **traits.mask(params, by_key=True)}
        tiles = traits.entries * -(-problem.q_len // main.tile_m)
        return Step(self, PIECES * tiles, params, addresses)


VARIANTS = tuple(
    BwdConvertDq(
        source="attention/bwd_convert_dq", dtype=dtype, dim=256, tile_m=64, tile_n=64,
        warps=_THREADS // 32, stages=1, why="a block for each piece",
    )
    for dtype in DTYPE_NAMES
)  # fmt: skip


def row_after(main: BwdSm90) -> BwdConvertDq:
    """Return the row that takes the pieces of a row of ``bwd_sm90``."""
    (row,) = (row for row in VARIANTS if row.dtype == main.dtype)
    return replace(row, tile_m=main.dq_tile_m, packed=main.packed)
