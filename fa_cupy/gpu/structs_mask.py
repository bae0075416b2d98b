"""The structs of tables of masks, field by field as in CUDA."""

from __future__ import annotations

import numpy as np

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
