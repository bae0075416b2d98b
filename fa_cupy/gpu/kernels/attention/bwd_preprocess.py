"""The host side of ``bwd_preprocess``, which prepares what the other kernels know of each query."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fa_cupy.gpu.driver.targets import SHARED_LIMIT
from fa_cupy.gpu.kernels.attention.attention_params import ATTENTION_PARAMS
from fa_cupy.gpu.kernels.backward import PADDED, BackwardVariant, Launches, Traits
from fa_cupy.gpu.kernels.score import ScoreMod
from fa_cupy.gpu.kernels.variant import DTYPE_NAMES
from fa_cupy.gpu.plan import Step, workspace_of

#: ``struct BwdPreprocessParams`` of ``cuda_src/attention/bwd_preprocess.cu``.
BWD_PREPROCESS_PARAMS = np.dtype(
    [("common", ATTENTION_PARAMS)]
    + [(name, np.uint64) for name in ("dlse", "lse_delta", "counters")]
    + [("counter_words", np.int64)]
    + [(name, np.int32) for name in ("entry_rows", "lane_shift", "entry_blocks")],
    align=True,
)


@dataclass(frozen=True, kw_only=True)
class BwdPreprocess(BackwardVariant):
    """A row of ``bwd_preprocess``, for all dims, which runs anywhere.

    A thread reads `tile_m` queries.
    """

    @property
    def targets(self) -> tuple[str, ...]:
        """All."""
        return tuple(SHARED_LIMIT)

    def for_score(self, score: ScoreMod | None) -> BwdPreprocess:
        """Return the row: it computes no scores."""
        return self

    def for_dropout(self, dropout: bool) -> BwdPreprocess:
        """Return the row: delta is made of the output, whatever was dropped."""
        return self

    @property
    def shared_bytes(self) -> int:
        """None."""
        return 0

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            *super().defines,
            ("FA_THREADS", self.threads),
            ("FA_UNROLL", self.tile_m),
            ("FA_PREPROCESS_PARAMS_BYTES", BWD_PREPROCESS_PARAMS.itemsize),
        )

    def step(self, traits: Traits, launches: Launches) -> Step:
        """Return the launch, which also sets to 0 all counters of the other launches."""
        launches.scratch["lse_delta"] = 8 * traits.entries * launches.rows  # two numbers a query
        params, v_dim = np.zeros(1, BWD_PREPROCESS_PARAMS), traits.problem.v_dim
        params["common"] = traits.common("dout", "out", v_dim, PADDED)
        params["counter_words"] = workspace_of(launches.counters).nbytes // 4
        params["entry_rows"] = launches.rows
        params["lane_shift"] = shift = max(0, (-(-v_dim // 8) - 1).bit_length())
        params["entry_blocks"] = blocks = -(
            -launches.rows // ((self.threads >> shift) * self.tile_m)
        )
        addresses = {
            "common.q": "dout", "common.out": "out", "common.lse": "lse", "dlse": "dlse",
            "lse_delta": "lse_delta", "counters": next(iter(launches.counters)),
        }  # fmt: skip
        return Step(self, traits.entries * blocks, params, addresses)


VARIANTS = tuple(
    BwdPreprocess(
        source="attention/bwd_preprocess", dtype=dtype, dim=256, tile_m=4, tile_n=1, warps=8,
        stages=1, why="reads dout and out once, enough rows at a time",
    )
    for dtype in DTYPE_NAMES
)  # fmt: skip
