"""What the backward kernels for SM90 take."""

from __future__ import annotations

import math

from fa_cupy.core.attention_problem import Problem
from fa_cupy.gpu.kernels.attention import fwd_params
from fa_cupy.gpu.kernels.attention.bwd_params import PADDED, Gradients, shared, views_of
from fa_cupy.gpu.kernels.attention.fwd_params import MAX_GRID, MAX_LENGTH
from fa_cupy.gpu.kernels.attention.fwd_sm90_params import DIM_STEP, MAP_AXES, maps_walk


def takes(problem: Problem, views: Gradients) -> bool:
    """Whether the kernels can solve a problem, if all pointers are multiples of 16.

    Parameters
    ----------
    problem : Problem
        Of a dtype and of dims that the table has.
    views : Gradients
    """
    sizes = problem.q_len, problem.k_len, problem.head_dim, problem.v_dim
    if fwd_params.transforms(problem) or min(sizes) < 1:
        return False
    if any(dim % DIM_STEP for dim in sizes[2:]) or max(sizes[:2]) > MAX_LENGTH:
        return False
    every = views_of(problem, views)
    axes, steps = fwd_params.collapse(problem.batch, every)
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
