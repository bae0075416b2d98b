"""The host side of ``row_intervals``: which keys each row of packed sequences sees."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fa_cupy.core.attention_problem import Problem
from fa_cupy.gpu.driver.targets import SHARED_LIMIT
from fa_cupy.gpu.kernels.attention.attention_params import band_limits
from fa_cupy.gpu.kernels.variant import Variant
from fa_cupy.gpu.plan import Step

#: Rows behind the last one that have an interval too: ``kIntervalPadding`` of
#: ``cuda_src/common/row_intervals.cuh``.
PADDING = 256
#: Bytes of a ``struct Interval`` there.
INTERVAL_BYTES = 8
#: What the kernel writes: fields of its struct, and names of parts of a workspace.
OUTPUTS = ("keys_of_row", "rows_of_key")
#: ``struct RowIntervalsParams`` of ``cuda_src/attention/row_intervals.cu``.
ROW_INTERVALS_PARAMS = np.dtype(
    [(name, np.uint64) for name in ("q_offsets", "k_offsets", *OUTPUTS)]
    + [(name, np.int32) for name in ("sequences", "q_len", "k_len", "lower", "upper")]
    + [(name, np.int32) for name in ("band_from_end", "q_bytes", "k_bytes")],
    align=True,
)


@dataclass(frozen=True, kw_only=True)
class RowIntervals(Variant):
    """The variant of ``row_intervals``, which serves sequences of any lengths."""

    @property
    def targets(self) -> tuple[str, ...]:
        """All."""
        return tuple(SHARED_LIMIT)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: a number for each warp."""
        return 4 * self.warps

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            *super().defines,
            ("FA_THREADS", self.threads),
            ("FA_ROW_INTERVALS_PARAMS_BYTES", ROW_INTERVALS_PARAMS.itemsize),
        )


VARIANT = RowIntervals(
    source="attention/row_intervals", dtype="int32", dim=1, tile_m=256, tile_n=1, warps=8,
    stages=1, why="a thread for each row and each key",
)  # fmt: skip


def sizes(problem: Problem) -> dict[str, int]:
    """Return the bytes of what the kernel writes, by name."""
    lengths = problem.q_len, problem.k_len
    return {
        name: INTERVAL_BYTES * (length + PADDING)
        for name, length in zip(OUTPUTS, lengths, strict=True)
    }


def step(problem: Problem) -> Step:
    """Return the launch for a problem with packed sequences."""
    offsets = problem.offsets
    assert offsets is not None
    params = np.zeros(1, ROW_INTERVALS_PARAMS)
    p = params[0]
    p["sequences"], p["q_len"], p["k_len"] = offsets.sequences, problem.q_len, problem.k_len
    p["lower"], p["upper"] = band_limits(problem)
    p["band_from_end"] = problem.band_from_end
    p["q_bytes"], p["k_bytes"] = offsets.q_dtype.itemsize, offsets.k_dtype.itemsize
    rows = problem.q_len + problem.k_len + 2 * PADDING
    names = ("q_offsets", "k_offsets", *OUTPUTS)
    return Step(VARIANT, -(-rows // VARIANT.threads), params, {name: name for name in names})
