"""What the backward kernels for SM90 take, and what of a problem all of their launches share."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from fa_cupy._check import Problem, View
from fa_cupy.gpu import params
from fa_cupy.gpu.params import ATTENTION_PARAMS, MAX_BATCH_AXES, MAX_GRID, MAX_LENGTH
from fa_cupy.gpu.params_sm90 import DIM_STEP, MAP_AXES, Geometry, maps_walk
from fa_cupy.gpu.structs_bwd import MAPPED

#: Rows of the workspace are padded to a multiple of it, the largest tile.
PADDED = 128
#: Columns of a box, and rows where it is a result's: 128 bytes are a swizzled row.
BOX = 64
_ALL = (*MAPPED, "out")


class Gradients(NamedTuple):
    """Views over ``problem.batch`` of what a backward call reads and writes besides q, k and v.

    Along axes that share keys and values `dk` and `dv` have stride 0: the kernel sums over them.
    """

    dout: View  # (*batch, q_len, v_dim)
    out: View
    dq: View  # (*batch, q_len, head_dim)
    dk: View  # (*batch, k_len, head_dim)
    dv: View  # (*batch, k_len, v_dim)


def _views(problem: Problem, views: Gradients) -> dict[str, View]:
    return {"q": problem.q, "k": problem.k, "v": problem.v, **views._asdict()}


def _shared(steps: dict[str, list[int]]) -> bool:
    """Whether the entries along the last axis share keys and values."""
    return not any(steps[name][-1] for name in ("k", "v", "dk", "dv"))


def takes(problem: Problem, views: Gradients) -> bool:
    """Whether the kernels can solve a problem, if all pointers are multiples of 16.

    Parameters
    ----------
    problem : Problem
        Of a dtype and of dims that the table has.
    views : Gradients
    """
    sizes = problem.q_len, problem.k_len, problem.head_dim, problem.v_dim
    if params.transforms(problem) or min(sizes) < 1:
        return False
    if any(dim % DIM_STEP for dim in sizes[2:]) or max(sizes[:2]) > MAX_LENGTH:
        return False
    every = _views(problem, views)
    axes, steps = params.collapse(problem.batch, every)
    # The most blocks: 8 rows each, or a piece of 64 rows and 64 columns of at most 256.
    rows = math.prod(axes) * (-(-problem.q_len // PADDED) * PADDED)
    if len(axes) > MAP_AXES or rows // 8 > MAX_GRID:
        return False
    if math.prod(axes) * -(-problem.k_len // 64) > MAX_GRID:
        return False
    inner = len(axes) - (bool(axes) and _shared(steps))
    # Sums over other axes are left to the caller, who gives dk and dv an entry for each.
    if any(0 in steps[name][:inner] for name in ("dk", "dv")) or 0 in steps["dq"]:
        return False
    return maps_walk(every, steps, problem.dtype.itemsize, outputs=())


class Axes:
    """The batch axes of a call, and what all its structs say of them."""

    def __init__(self, problem: Problem, views: Gradients) -> None:
        self.problem = problem
        self.views = _views(problem, views)
        axes, steps = params.collapse(problem.batch, self.views)
        missing = MAP_AXES - len(axes)
        self.size = [1] * missing + axes
        self.steps = {name: [0] * missing + steps[name] for name in _ALL}
        self.group = self.size[-1] if axes and _shared(steps) else 1
        self.entries = math.prod(self.size)
        self.padded = -(-problem.q_len // PADDED) * PADDED

    def common(self, q: str, out: str, v_dim: int, tile_m: int) -> np.ndarray[Any, Any]:
        """Return ``AttentionParams`` that walk the arrays `q` and `out` in their places."""
        problem, filled = self.problem, np.zeros(1, ATTENTION_PARAMS)
        p, item = filled[0], self.problem.dtype.itemsize
        p["aligned"], p["batch_axes"] = 1, MAP_AXES
        p["batch_size"] = self.size + [1] * (MAX_BATCH_AXES - MAP_AXES)
        for place, name in (("q", q), ("out", out)):
            p[f"{place}_row"] = self.views[name].strides[-2] // item
            p[f"{place}_batch"][:MAP_AXES] = [step // item for step in self.steps[name]]
        p["q_len"], p["k_len"] = problem.q_len, problem.k_len
        p["head_dim"], p["v_dim"] = problem.head_dim, v_dim
        p["q_tiles"] = -(-problem.q_len // tile_m)
        p["lower"], p["upper"] = params.band_limits(problem)
        p["exp2_scale"], p["scale"] = problem.scale * params.LOG2E, problem.scale
        return filled

    def geometry(self, name: str, rows: int) -> Geometry:
        """Return what the map of an array has to know; its boxes are of `rows` rows."""
        view, steps = self.views[name], self.steps[name]
        batch = (n if step else 1 for n, step in zip(self.size, steps, strict=True))
        shape = (*batch, *view.shape[-2:])
        # Along an axis of one entry the stride is any number; the driver wants one that it knows.
        strides = (*steps, view.strides[-2])
        walked = [s if n > 1 else 16 for n, s in zip(shape, strides, strict=False)]
        item = self.problem.dtype.itemsize
        return Geometry(shape, (*walked, item), (1, 1, 1, rows, BOX))
