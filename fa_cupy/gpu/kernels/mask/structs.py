"""The structs of tables of masks, field by field as in CUDA, and how a problem fills them."""

from __future__ import annotations

from typing import Any

import numpy as np

from fa_cupy.core.attention_problem import Problem
from fa_cupy.gpu.kernels.attention.attention_params import MASK_LISTS
from fa_cupy.masks.blocks import Grid

#: ``struct MaskTable`` of ``cuda_src/common/block_table.cuh``; all 0 is no mask.
MASK_TABLE = np.dtype(
    [
        (name, np.uint64)
        for name in ("block_index", "words", "visible_bits", "prefix_counts", "matrix_of_entry")
    ]
    + [(name, np.int32) for name in ("rows", "cols")],
    align=True,
)
#: ``struct BlockTablesParams`` of ``cuda_src/mask/block_tables.cu``.
BLOCK_TABLES_PARAMS = np.dtype(
    [("lists", MASK_LISTS)]
    + [(name, np.uint64) for name in ("by_query", "by_key", "prefix_counts")]
    + [(f"{name}_bits", np.uint64) for name in ("by_query", "by_key")]
    + [(name, np.int32) for name in ("q_blocks", "k_blocks")],
    align=True,
)
#: ``struct TransposeWordsParams`` of ``cuda_src/mask/transpose_words.cu``.
TRANSPOSE_WORDS_PARAMS = np.dtype(
    [(name, np.uint64) for name in ("words", "transposed", "block_index")] + [("blocks", np.int64)]
)
# The arrays that a table points to, but for `matrix_of_entry`; only that by blocks of keys has
# `prefix_counts`.
_BY_QUERY = ("block_index", "words", "visible_bits")
_BY_KEY = (*_BY_QUERY, "prefix_counts")
#: The names of all arrays that tables point to.
TABLE_ARRAYS = (
    *(f"mask_by_query_{name}" for name in _BY_QUERY),
    *(f"mask_by_key_{name}" for name in _BY_KEY),
    "mask_matrix_of_entry",
)


def table_arrays(by_key: bool) -> dict[str, str]:
    """Return which of `TABLE_ARRAYS` each field of a `MASK_TABLE` points to.

    Parameters
    ----------
    by_key : bool
        Whether it is the table by blocks of keys.
    """
    kind, names = ("by_key", _BY_KEY) if by_key else ("by_query", _BY_QUERY)
    return {
        "matrix_of_entry": "mask_matrix_of_entry",
        **{name: f"mask_{kind}_{name}" for name in names},
    }


def table_of(problem: Problem, by_key: bool) -> np.ndarray[Any, Any]:
    """Return a `MASK_TABLE`, of shape (1,) and without addresses, of the mask of a problem."""
    filled = np.zeros(1, MASK_TABLE)
    grid = Grid(problem.q_len, problem.k_len)
    filled["rows"], filled["cols"] = grid.q_tiles, grid.k_tiles
    if by_key:
        filled["rows"], filled["cols"] = grid.k_tiles, grid.q_tiles
    return filled
