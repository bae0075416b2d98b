"""The host side of ``dropout_mask``: which weights dropout keeps, as bools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fa_cupy.dropout.arguments import Dropout
from fa_cupy.dropout.decisions import GROUP
from fa_cupy.gpu.driver.targets import SHARED_LIMIT
from fa_cupy.gpu.kernels.attention.attention_params import DROPOUT_PARAMS, fill_decisions
from fa_cupy.gpu.kernels.variant import Variant
from fa_cupy.gpu.plan import Step

_LANES = 4  # that have the keys of a group
#: ``struct DropoutMaskParams`` of ``cuda_src/mask/dropout_mask.cu``.
DROPOUT_MASK_PARAMS = np.dtype(
    [(name, np.uint64) for name in ("kept", "b", "h")]
    + [(name, np.int64) for name in ("b_step", "h_step", "counters")]
    + [(name, np.int32) for name in ("first_row", "first_key", "rows", "keys", "groups", "unused")]
    + [("dropout", DROPOUT_PARAMS)],
    align=True,
)


@dataclass(frozen=True, kw_only=True)
class DropoutMask(Variant):
    """The variant of ``dropout_mask``, which serves rectangles of any size."""

    @property
    def targets(self) -> tuple[str, ...]:
        """All."""
        return tuple(SHARED_LIMIT)

    @property
    def shared_bytes(self) -> int:
        """None."""
        return 0

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            ("FA_THREADS", self.threads),
            ("FA_DROPOUT_MASK_PARAMS_BYTES", DROPOUT_MASK_PARAMS.itemsize),
            *self.key_defines,
        )


VARIANT = DropoutMask(
    source="mask/dropout_mask", dtype="uint32", dim=1, tile_m=1, tile_n=GROUP, warps=8, stages=1,
    why="a thread for each counter",
)  # fmt: skip


def step(
    dropout: Dropout, entries: int, rows: tuple[int, int], keys: tuple[int, int], places: Any
) -> Step:
    """Return the launch that writes decisions, of some entries, queries and keys.

    Its struct lacks the addresses of what is written and of the numbers of entries, and how far
    these are apart.

    Parameters
    ----------
    dropout : Dropout
    entries : int
        At least one, as the queries and the keys.
    rows, keys : tuple of int
        First and last + 1.
    places : int
        The address of the places of queries of packed sequences, or 0.
    """
    params = np.zeros(1, DROPOUT_MASK_PARAMS)
    p = params[0]
    p["first_row"], p["first_key"] = rows[0], keys[0]
    p["rows"], p["keys"] = rows[1] - rows[0], keys[1] - keys[0]
    p["groups"] = groups = -(-keys[1] // GROUP) - keys[0] // GROUP
    p["counters"] = counters = entries * int(p["rows"]) * groups * _LANES
    fill_decisions(p["dropout"], dropout)
    p["dropout"]["heads"], p["dropout"]["places"] = 1, places
    p["dropout"][dropout.field.removeprefix("dropout.")] = dropout.operand
    return Step(VARIANT.for_sequences(bool(places)), -(-counters // VARIANT.threads), params, {})
