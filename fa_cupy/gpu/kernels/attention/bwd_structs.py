"""The parameter structs of the kernels of attention backward, field by field as in CUDA."""

from __future__ import annotations

import numpy as np

from fa_cupy.gpu.kernels.attention.fwd_params import ATTENTION_PARAMS
from fa_cupy.gpu.kernels.attention.fwd_sm90_params import MAP_AXES, MAP_BYTES, padded
from fa_cupy.gpu.kernels.mask.structs import MASK_TABLE

#: The arrays that have a tensor map, in the order of the struct.
MAPPED = ("q", "k", "v", "dout", "dk", "dv", "dq")
#: The arrays that are read tile by tile.
WALKED = ("q", "k", "v", "dout")
#: The arrays of `BACKWARD_PARAMS`, in the order of the struct.
REDONE = (*WALKED, "dq", "dk", "dv")

#: ``struct BwdSm90Params`` of ``cuda_src/common/backward_sm90.cuh``.
BWD_SM90_PARAMS = padded(
    [(f"{name}_map", np.uint64, (MAP_BYTES // 8,)) for name in MAPPED]
    + [("common", ATTENTION_PARAMS)]
    + [(name, np.uint64) for name in ("rows", "sums", "turns", "counters", "spoiled")]
    + [("mask", MASK_TABLE)]
    + [("size", np.int32, (MAP_AXES,))]
    + [(f"{name}_step", np.int32, (MAP_AXES,)) for name in WALKED]
    + [(name, np.int32) for name in ("group", "entries", "k_tiles", "section", "row_pairs")],
    alignment=64,
)
#: ``struct BwdRowsParams`` of ``cuda_src/attention/bwd_rows.cu``.
BWD_ROWS_PARAMS = np.dtype(
    [("common", ATTENTION_PARAMS)]
    + [(name, np.uint64) for name in ("dlse", "rows", "turns")]
    + [("words", np.int64)]
    + [(name, np.int32) for name in ("entry_rows", "lane_shift", "entry_blocks")],
    align=True,
)
#: ``struct BwdRoundParams`` of ``cuda_src/attention/bwd_round.cu``.
BWD_ROUND_PARAMS = np.dtype(
    [("common", ATTENTION_PARAMS), ("sums", np.uint64), ("spoiled", np.uint64)]
    + [("mask", MASK_TABLE)]
    + [(name, np.int32) for name in ("tile_m", "tile_n", "blocks")],
    align=True,
)
#: ``struct Array`` of ``cuda_src/common/backward_params.cuh``.
ARRAY = np.dtype([("start", np.uint64), ("row", np.int64), ("batch", np.int64, (MAP_AXES,))])
_PLAIN = (
    [("common", ATTENTION_PARAMS)]
    + [(name, ARRAY) for name in REDONE]
    + [("mask", MASK_TABLE)]
    + [(name, np.uint64) for name in ("rows", "spoiled")]
    + [("size", np.int32, (MAP_AXES,))]
    + [(name, np.int32) for name in ("group", "entries", "row_pairs")]
    + [("scale", np.float32)]
)
#: ``struct BackwardParams`` of ``cuda_src/common/backward_params.cuh``.
BACKWARD_PARAMS = np.dtype(_PLAIN, align=True)
#: ``struct RedoParams`` of ``cuda_src/attention/bwd_redo.cu``, which begins with the same.
REDO_PARAMS = np.dtype([*_PLAIN, ("far", np.uint64), ("shares", np.uint64)], align=True)
#: Threads of a block of ``bwd_round``, and of ``bwd_redo``.
ROUND_THREADS, REDO_THREADS = 128, 256
