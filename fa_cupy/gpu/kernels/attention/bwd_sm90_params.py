"""How a problem fills the parameter structs of the backward kernels for SM90.

A few launches make the gradients of one call. ``bwd_preprocess`` prepares what is known of each
query. Then ``bwd_sm90`` computes dK and dV and adds up dQ in float32, which ``bwd_convert_dq``
scales and rounds; or, where dims are wide, ``bwd_dkdv_sm90`` computes dK and dV and ``bwd_dq_sm90``
dQ. Last, ``bwd_nonfinite`` computes the rows again whose sums were not finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fa_cupy.core.attention_problem import Problem
from fa_cupy.gpu.kernels.attention import attention_params
from fa_cupy.gpu.kernels.attention.attention_params import MAX_GRID, MAX_LENGTH
from fa_cupy.gpu.kernels.attention.bwd_params import (
    BOX,
    BWD_CONVERT_DQ_PARAMS,
    BWD_SM90_PARAMS,
    MAPPED,
    PADDED,
    WALKED,
    Axes,
    Filled,
    Gradients,
    Row,
    Step,
    laid_out,
    mask_arrays,
    nonfinite_step,
    preprocess_step,
    shared,
    views_of,
)
from fa_cupy.gpu.kernels.tensor_maps import DIM_STEP, MAP_AXES, maps_walk


def takes(problem: Problem, views: Gradients) -> bool:
    """Whether the kernels can solve a problem, if all pointers are multiples of 16.

    Parameters
    ----------
    problem : Problem
        Of a dtype and of dims that the table has.
    views : Gradients
    """
    sizes = problem.q_len, problem.k_len, problem.head_dim, problem.v_dim
    if attention_params.transforms(problem) or min(sizes) < 1:
        return False
    if any(dim % DIM_STEP for dim in sizes[2:]) or max(sizes[:2]) > MAX_LENGTH:
        return False
    every = views_of(problem, views)
    axes, steps = attention_params.merge_axes(problem.batch, every)
    # The most blocks: 8 rows each, or a piece of 64 rows and 64 columns of at most 256.
    rows = math.prod(axes) * (-(-problem.q_len // PADDED) + 1) * PADDED
    if len(axes) > MAP_AXES or rows // 8 > MAX_GRID:
        return False
    if math.prod(axes) * -(-problem.k_len // 64) > MAX_GRID:
        return False
    inner = len(axes) - (bool(axes) and shared(steps))
    # Sums over other axes are left to the caller, who gives dk and dv an entry for each.
    if any(0 in steps[name][:inner] for name in ("dk", "dv")) or 0 in steps["dq"]:
        return False
    return maps_walk(every, steps, problem.dtype.itemsize, outputs=())


_PIECES = 2  # of dQ of a tile, one a warpgroup; each has 64 columns of `piece_m` queries
_COUNTERS = 4  # words


def fill(problem: Problem, views: Gradients, rows: Sequence[Row]) -> Filled:
    """Return all of the launches that does not depend on pointers.

    Parameters
    ----------
    problem : Problem
        One that `takes` accepts.
    views : Gradients
    rows : sequence of Row
        The kernels to launch, in order: what `select_bwd` returns.
    """
    axes, sums, turns = Axes(problem, views, [row.tile_m for row in rows]), 0, 0
    for row in rows:
        if row.source.endswith("bwd_sm90"):
            tiles = axes.entries * -(-problem.q_len // row.tile_m)
            sums, turns = tiles * _PIECES * 64 * row.piece_m * 4, tiles * 4
    places, end = laid_out(axes, dq_accum=sums, dq_semaphore=turns, tile_counters=_COUNTERS * 4)
    steps = []
    for before, row in zip((rows[0], *rows), rows, strict=False):
        kind = row.source.rpartition("/")[2]
        if kind == "bwd_preprocess":
            steps.append(preprocess_step(axes, row, places, end))
        elif kind == "bwd_convert_dq":
            steps.append(_round_step(axes, row, before, places))
        elif kind == "bwd_nonfinite":
            steps.append(nonfinite_step(axes, row, places))
        else:
            steps.append(_mapped_step(axes, row, kind, places))
    return Filled(steps, end)


def _mapped_step(axes: Axes, row: Row, kind: str, places: dict[str, int]) -> Step:
    problem = axes.problem
    filled = np.zeros(1, BWD_SM90_PARAMS)
    filled["common"] = axes.common("q", "dq", problem.v_dim, row.tile_m)
    filled["size"] = axes.size
    for name in WALKED:
        filled[f"{name}_step"] = [step != 0 for step in axes.steps[name]]
    keys = axes.entries // axes.group
    filled["group"], filled["entries"] = axes.group, keys
    filled["k_tiles"] = k_tiles = -(-problem.k_len // row.tile_n)
    l2_group = row.l2_groups[problem.lower is not None or problem.upper is not None]
    filled["entries_per_l2_group"] = -(-keys // max(1, round(keys / l2_group)))
    filled["row_pairs"] = axes.padded // 2
    boxes = {"q": row.tile_m, "dout": row.tile_m, "k": row.tile_n, "v": row.tile_n}
    if kind == "bwd_dq_sm90":  # a box for each warpgroup
        boxes["q"] = boxes["dout"] = BOX
        blocks = axes.entries * -(-problem.q_len // row.tile_m)
    else:
        blocks = keys * k_tiles
    arrays = mask_arrays(problem, filled, turned=kind != "bwd_dq_sm90")
    maps = {name: axes.geometry(name, boxes.get(name, BOX)) for name in MAPPED}
    # The other parts of the workspace are those of bwd_nonfinite.
    used = {
        name: places[name]
        for name in ("lse_delta", "dq_accum", "dq_semaphore", "tile_counters", "nonfinite_flags")
    }
    return Step(row, filled, maps, arrays, used, blocks, True)


def _round_step(axes: Axes, row: Row, main: Row, places: dict[str, int]) -> Step:
    filled = np.zeros(1, BWD_CONVERT_DQ_PARAMS)
    filled["common"] = axes.common("q", "dq", axes.problem.head_dim, main.tile_m)
    filled["tile_m"], filled["tile_n"] = main.tile_m, main.tile_n
    filled["blocks"] = -(-main.dim // 64)
    blocks = axes.entries * -(-axes.problem.q_len // main.tile_m) * _PIECES
    used = {name: places[name] for name in ("dq_accum", "nonfinite_flags")}
    arrays = {"common.out": "dq", **mask_arrays(axes.problem, filled, turned=True)}
    return Step(row, filled, {}, arrays, used, blocks, False)
