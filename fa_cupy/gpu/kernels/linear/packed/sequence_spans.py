"""The row of ``sequence_spans``: the rows of each packed sequence, from its offsets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fa_cupy.core.linear_problem import Product
from fa_cupy.gpu.driver.targets import SHARED_LIMIT
from fa_cupy.gpu.kernels.linear.params import PACKED_PRODUCT_PARAMS
from fa_cupy.gpu.kernels.variant import Variant
from fa_cupy.gpu.plan import Step

#: What plans call the offsets.
OFFSETS = ("q_offsets", "k_offsets")
#: What they call the rows of sequences, in the order of the offsets; in their workspace.
SPANS = ("q_spans", "k_spans")
#: Bytes of the rows of a sequence.
SPAN_BYTES = 8
#: ``struct SequenceSpansParams`` of ``cuda_src/linear/sequence_spans.cu``.
SEQUENCE_SPANS_PARAMS = np.dtype(
    [(name, np.uint64) for name in (*OFFSETS, *SPANS)]
    + [(name, np.int64) for name in ("q_len", "k_len")]
    + [(name, np.int32) for name in ("sequences", "q_bytes", "k_bytes")],
    align=True,
)


@dataclass(frozen=True, kw_only=True)
class SequenceSpans(Variant):
    """The row of ``sequence_spans``, one block."""

    @property
    def targets(self) -> tuple[str, ...]:
        """All."""
        return tuple(SHARED_LIMIT)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: two numbers of each thread."""
        return 8 * self.threads

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            ("FA_THREADS", self.threads),
            ("FA_SHARED_BYTES", self.shared_bytes),
            ("FA_PARAMS_BYTES", PACKED_PRODUCT_PARAMS.itemsize),
            ("FA_PACKED", 1),
            ("FA_SPANS_PARAMS_BYTES", SEQUENCE_SPANS_PARAMS.itemsize),
        )


SEQUENCE_SPANS = SequenceSpans(
    source="linear/sequence_spans", dtype="int32", dim=1, tile_m=1, tile_n=1, warps=8, stages=1,
    why="one block, whose threads tell each other their largest offset",
)  # fmt: skip


def spans_step(problem: Product) -> Step:
    """Return the launch that finds the rows of all sequences."""
    assert problem.offsets is not None
    params = np.zeros(1, SEQUENCE_SPANS_PARAMS)
    p = params[0]
    p["q_len"], p["k_len"] = problem.q_len, problem.k_len
    p["sequences"] = problem.offsets.sequences
    p["q_bytes"] = problem.offsets.q_dtype.itemsize
    p["k_bytes"] = problem.offsets.k_dtype.itemsize
    names = (*OFFSETS, *SPANS)
    return Step(SEQUENCE_SPANS, 1, params, dict(zip(names, names, strict=True)))
