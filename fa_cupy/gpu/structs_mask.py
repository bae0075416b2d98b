"""The structs of tables of masks, field by field as in CUDA."""

from __future__ import annotations

from typing import Any

import numpy as np

from fa_cupy._blocks import Grid
from fa_cupy._check import Problem
from fa_cupy.gpu.params import MASK_LISTS

#: ``struct MaskTable`` of ``cuda_src/common/mask_table.cuh``; all 0 is no mask.
MASK_TABLE = np.dtype(
    [(name, np.uint64) for name in ("places", "words", "seen", "counts", "entries")]
    + [(name, np.int32) for name in ("rows", "cols")],
    align=True,
)
#: The arrays that a table points to, but for `entries`; only a turned one has `counts`.
STRAIGHT, TURNED = ("places", "words", "seen"), ("places", "words", "seen", "counts")

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


def fields(turned: bool) -> dict[str, str]:
    """Return which address each field of a `MASK_TABLE` holds, by the names of
    `fa_cupy.gpu.mask_tables.Tables.pointers`.

    Parameters
    ----------
    turned : bool
        Whether it is the table by blocks of keys.
    """
    kind, names = ("turned", TURNED) if turned else ("straight", STRAIGHT)
    return {"entries": "mask_entries", **{name: f"mask_{kind}_{name}" for name in names}}


def table(problem: Problem, turned: bool) -> np.ndarray[Any, Any]:
    """Return a `MASK_TABLE` of shape (1,) of the mask of a problem, without addresses."""
    filled = np.zeros(1, MASK_TABLE)
    grid = Grid(problem.q_len, problem.k_len)
    sizes = (grid.k_tiles, grid.q_tiles) if turned else (grid.q_tiles, grid.k_tiles)
    filled["rows"], filled["cols"] = sizes
    return filled
