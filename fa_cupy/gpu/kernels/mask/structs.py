"""The structs of tables of masks, field by field as in CUDA, and how a problem fills them."""

from __future__ import annotations

from typing import Any

import numpy as np

from fa_cupy.core.attention_problem import Problem
from fa_cupy.gpu.kernels.attention.fwd_params import MASK_LISTS
from fa_cupy.masks.blocks import Grid

#: ``struct MaskTable`` of ``cuda_src/common/mask_table.cuh``; all 0 is no mask.
MASK_TABLE = np.dtype(
    [(name, np.uint64) for name in ("places", "words", "seen", "counts", "entries")]
    + [(name, np.int32) for name in ("rows", "cols")],
    align=True,
)
#: ``struct MaskTablesParams`` of ``cuda_src/mask/tables.cu``.
MASK_TABLES_PARAMS = np.dtype(
    [("lists", MASK_LISTS)]
    + [(name, np.uint64) for name in ("straight", "turned", "counts")]
    + [(f"{name}_seen", np.uint64) for name in ("straight", "turned")]
    + [(name, np.int32) for name in ("q_blocks", "k_blocks")],
    align=True,
)
#: ``struct MaskTurnParams`` of ``cuda_src/mask/turn.cu``.
MASK_TURN_PARAMS = np.dtype(
    [(name, np.uint64) for name in ("words", "turned", "places")] + [("blocks", np.int64)]
)
# The arrays that a table points to, but for `entries`; only a turned one has `counts`.
_STRAIGHT, _TURNED = ("places", "words", "seen"), ("places", "words", "seen", "counts")


def table_arrays(turned: bool) -> dict[str, str]:
    """Return which array each field of a `MASK_TABLE` points to.

    Parameters
    ----------
    turned : bool
        Whether it is the table by blocks of keys.
    """
    kind, names = ("turned", _TURNED) if turned else ("straight", _STRAIGHT)
    return {"entries": "mask_entries", **{name: f"mask_{kind}_{name}" for name in names}}


def table_of(problem: Problem, turned: bool) -> np.ndarray[Any, Any]:
    """Return a `MASK_TABLE`, of shape (1,) and without addresses, of the mask of a problem."""
    filled = np.zeros(1, MASK_TABLE)
    grid = Grid(problem.q_len, problem.k_len)
    filled["rows"], filled["cols"] = grid.q_tiles, grid.k_tiles
    if turned:
        filled["rows"], filled["cols"] = grid.k_tiles, grid.q_tiles
    return filled
