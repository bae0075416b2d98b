"""How a problem fills the parameter structs of the backward kernels for SM80.

``bwd_preprocess`` prepares what is known of each query, ``bwd_dkdv_sm80`` computes dK and dV,
``bwd_dq_sm80`` dQ, and ``bwd_nonfinite`` the rows again whose sums were not finite, or whose
log-sum-exp is too large.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fa_cupy.core.attention_problem import Problem
from fa_cupy.gpu.kernels.attention import attention_params
from fa_cupy.gpu.kernels.attention.attention_params import MAX_GRID, MAX_LENGTH
from fa_cupy.gpu.kernels.attention.bwd_params import (
    PADDED,
    Axes,
    Filled,
    Gradients,
    Row,
    laid_out,
    nonfinite_step,
    plain_step,
    preprocess_step,
    shared,
    views_of,
)
from fa_cupy.gpu.kernels.tensor_maps import DIM_STEP, MAP_AXES

_LEAST_KEYS = 32  # of a block, in any row of the table


def takes(problem: Problem, views: Gradients) -> bool:
    """Whether the kernels can solve a problem, if all pointers but the bias' are multiples of 16.

    Parameters
    ----------
    problem : Problem
        Of a dtype and of dims that the table has.
    views : Gradients
    """
    sizes = problem.q_len, problem.k_len, problem.head_dim, problem.v_dim
    if min(sizes) < 1 or any(dim % DIM_STEP for dim in sizes[2:]) or max(sizes[:2]) > MAX_LENGTH:
        return False
    every = views_of(problem, views)
    axes, steps = attention_params.merge_axes(problem.batch, every)
    rows = math.prod(axes) * (-(-problem.q_len // PADDED) * PADDED)
    blocks = max(rows // 8, math.prod(axes) * -(-problem.k_len // _LEAST_KEYS))
    if len(axes) > MAP_AXES or blocks > MAX_GRID:
        return False
    inner = len(axes) - (bool(axes) and shared(steps))
    # Sums over other axes are left to the caller, who gives dk and dv an entry for each.
    if any(0 in steps[name][:inner] for name in ("dk", "dv")) or 0 in steps["dq"]:
        return False
    item = problem.dtype.itemsize
    return all(
        view.strides[-1] == item
        and view.strides[-2] // item < 2**31
        and all(step % 16 == 0 for step in (*steps[name], view.strides[-2]))
        for name, view in every.items()
        if name != "bias"
    )


def fill(problem: Problem, views: Gradients, rows: Sequence[Row]) -> Filled:
    """Return all of the launches that does not depend on pointers.

    Parameters
    ----------
    problem : Problem
        One that `takes` accepts.
    views : Gradients
    rows : sequence of Row
        The kernels to launch, in order: what `select_bwd_sm80` returns.
    """
    axes = Axes(problem, views)
    places, end = laid_out(axes)
    of_rows, keys, queries, redo = rows
    key_blocks = axes.entries // axes.group * -(-problem.k_len // keys.tile_n)
    query_blocks = axes.entries * -(-problem.q_len // queries.tile_m)
    steps = [
        preprocess_step(axes, of_rows, places, end, zeroed="nonfinite_flags"),
        plain_step(axes, keys, places, key_blocks, shares=False, turned=True),
        plain_step(axes, queries, places, query_blocks, shares=False, turned=False),
        nonfinite_step(axes, redo, places),
    ]
    return Filled(steps, end)
