"""How a problem fills the parameter structs of the backward kernels for SM90.

A few launches make the gradients of one call. ``bwd_rows`` prepares what is known of each query.
Then ``bwd_sm90`` computes dK and dV and adds up dQ in float32, which ``bwd_round`` scales and
rounds; or, where dims are wide, ``bwd_keys_sm90`` computes dK and dV and ``bwd_queries_sm90`` dQ.
Last, ``bwd_redo`` computes the rows again whose sums were not finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from fa_cupy._check import Problem, View
from fa_cupy.gpu import params
from fa_cupy.gpu.params import ATTENTION_PARAMS, MAX_BATCH_AXES, MAX_GRID, MAX_LENGTH
from fa_cupy.gpu.params_sm90 import DIM_STEP, MAP_AXES, Geometry, maps_walk
from fa_cupy.gpu.structs_bwd import (
    BWD_REDO_PARAMS,
    BWD_ROUND_PARAMS,
    BWD_ROWS_PARAMS,
    BWD_SM90_PARAMS,
    MAPPED,
    REDONE,
    ROWS_THREADS,
    ROWS_UNROLL,
    WALKED,
)

_ALL = (*MAPPED, "out")
_BOX = 64  # columns of a box, and rows where it is a result's: 128 bytes are a swizzled row
_PIECES = 2  # of dQ of a tile, one a warpgroup; each has 64 columns of `piece_m` queries
_PADDED = 128  # rows of the workspace are padded to a multiple of it, the largest tile
_ALIGNMENT = 256  # of the parts of a workspace
_COUNTERS = 4  # words
_SPOILED = 64  # kSpoiledRows of cuda_src/common/spoiled.cuh


class Row(Protocol):
    """What is asked of a row of `fa_cupy.gpu.variants_bwd`."""

    @property
    def source(self) -> str: ...  # noqa: D102
    @property
    def dim(self) -> int: ...  # noqa: D102
    @property
    def tile_m(self) -> int: ...  # noqa: D102
    @property
    def tile_n(self) -> int: ...  # noqa: D102
    @property
    def sections(self) -> tuple[int, int]: ...  # noqa: D102
    @property
    def piece_m(self) -> int: ...  # noqa: D102


class Gradients(NamedTuple):
    """Views over ``problem.batch`` of what a backward call reads and writes besides q, k and v.

    Along axes that share keys and values `dk` and `dv` have stride 0: the kernel sums over them.
    """

    dout: View  # (*batch, q_len, v_dim)
    out: View
    dq: View  # (*batch, q_len, head_dim)
    dk: View  # (*batch, k_len, head_dim)
    dv: View  # (*batch, k_len, v_dim)


class Step(NamedTuple):
    """One launch: its struct, of shape (1,), and what `point` has to write there.

    Attributes
    ----------
    row : Row
        Of the table.
    params : numpy.ndarray
    maps : dict of Geometry
        By the name of the array.
    arrays : dict of str
        Which array a field points to; fields of ``common`` are named ``common.q``.
    places : dict of int
        Which byte of the workspace a field points to.
    blocks : int
        Of the launch; with `shares` the parts of the work, of which fewer blocks take one by one.
    shares : bool
    """

    row: Any
    params: np.ndarray[Any, Any]
    maps: dict[str, Geometry]
    arrays: dict[str, str]
    places: dict[str, int]
    blocks: int
    shares: bool

    def point(self, workspace: int, pointers: Mapping[str, int]) -> None:
        """Write addresses: of the workspace, and of arrays by name (``lse``, ``dlse`` too)."""
        for field, array in self.arrays.items():
            outer, _, inner = field.partition(".")
            target, name = (self.params[outer], inner) if inner else (self.params, outer)
            target[name] = pointers[array]
        for field, place in self.places.items():
            self.params[field] = workspace + place


class Filled(NamedTuple):
    """The launches of a call, and how many bytes they work in, from a multiple of 256 on."""

    steps: list[Step]
    workspace_bytes: int


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
    if problem.mask is not None or params.transforms(problem) or min(sizes) < 1:
        return False
    if any(dim % DIM_STEP for dim in sizes[2:]) or max(sizes[:2]) > MAX_LENGTH:
        return False
    every = _views(problem, views)
    axes, steps = params.collapse(problem.batch, every)
    # The most blocks: 8 rows each, or a piece of 64 rows and 64 columns of at most 256.
    rows = math.prod(axes) * (-(-problem.q_len // _PADDED) + 1) * _PADDED
    if len(axes) > MAP_AXES or rows // 8 > MAX_GRID:
        return False
    if math.prod(axes) * -(-problem.k_len // 64) > MAX_GRID:
        return False
    inner = len(axes) - (bool(axes) and _shared(steps))
    # Sums over other axes are left to the caller, who gives dk and dv an entry for each.
    if any(0 in steps[name][:inner] for name in ("dk", "dv")) or 0 in steps["dq"]:
        return False
    return maps_walk(every, steps, problem.dtype.itemsize, outputs=())


class _Axes:
    """The batch axes of a call, and what all its structs say of them."""

    def __init__(self, problem: Problem, views: Gradients, tiles: Iterable[int]) -> None:
        self.problem = problem
        self.views = _views(problem, views)
        axes, steps = params.collapse(problem.batch, self.views)
        missing = MAP_AXES - len(axes)
        self.size = [1] * missing + axes
        self.steps = {name: [0] * missing + steps[name] for name in _ALL}
        self.group = self.size[-1] if axes and _shared(steps) else 1
        self.entries = math.prod(self.size)
        # Whole tiles, whatever their size.
        self.padded = max(-(-problem.q_len // m) * m for m in {_PADDED, *tiles})

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
        return Geometry(shape, (*walked, item), (1, 1, 1, rows, _BOX))


def fill(problem: Problem, views: Gradients, rows: Sequence[Row]) -> Filled:
    """Return all of the launches that does not depend on pointers.

    Parameters
    ----------
    problem : Problem
        One that `takes` accepts.
    views : Gradients
    rows : sequence of Row
        The kernels to launch, in order: what `fa_cupy.gpu.variants_bwd.select_bwd` returns.
    """
    axes = _Axes(problem, views, [row.tile_m for row in rows])
    sizes = [axes.entries * axes.padded * 8, 0, 0, _COUNTERS * 4, 4 * (1 + sum(_spoiled(axes)))]
    for row in rows:
        if row.source.endswith("bwd_sm90"):
            tiles = axes.entries * -(-problem.q_len // row.tile_m)
            sizes[1:3] = [tiles * _PIECES * 64 * row.piece_m * 4, tiles * 4]
    ends = [0]
    for n in sizes:
        ends.append(ends[-1] + -(-n // _ALIGNMENT) * _ALIGNMENT)
    places = dict(zip(("rows", "sums", "turns", "counters", "spoiled"), ends, strict=False))
    steps = []
    for before, row in zip((rows[0], *rows), rows, strict=False):
        kind = row.source.rpartition("/")[2]
        if kind == "bwd_rows":
            steps.append(_rows_step(axes, row, places, ends[-1]))
        elif kind == "bwd_round":
            steps.append(_round_step(axes, row, before, places))
        elif kind == "bwd_redo":
            steps.append(_redo_step(axes, row, places))
        else:
            steps.append(_mapped_step(axes, row, kind, places))
    return Filled(steps, ends[-1])


def _spoiled(axes: _Axes) -> tuple[int, int]:
    """Return how many tiles there are that may be computed again: of queries, of keys."""
    queries = axes.entries * -(-axes.problem.q_len // _SPOILED)
    return queries, axes.entries // axes.group * -(-axes.problem.k_len // _SPOILED)


def _rows_step(axes: _Axes, row: Row, places: dict[str, int], end: int) -> Step:
    filled = np.zeros(1, BWD_ROWS_PARAMS)
    v_dim = axes.problem.v_dim
    filled["common"] = axes.common("dout", "out", v_dim, _PADDED)
    filled["words"] = (end - places["turns"]) // 4  # the turns and all behind them
    filled["entry_rows"] = axes.padded
    filled["lane_shift"] = shift = max(0, (-(-v_dim // 8) - 1).bit_length())
    filled["entry_blocks"] = blocks = -(-axes.padded // ((ROWS_THREADS >> shift) * ROWS_UNROLL))
    arrays = {"common.q": "dout", "common.out": "out", "common.lse": "lse", "dlse": "dlse"}
    used = {name: places[name] for name in ("rows", "turns")}
    return Step(row, filled, {}, arrays, used, axes.entries * blocks, False)


def _mapped_step(axes: _Axes, row: Row, kind: str, places: dict[str, int]) -> Step:
    problem = axes.problem
    filled = np.zeros(1, BWD_SM90_PARAMS)
    filled["common"] = axes.common("q", "dq", problem.v_dim, row.tile_m)
    filled["size"] = axes.size
    for name in WALKED:
        filled[f"{name}_step"] = [step != 0 for step in axes.steps[name]]
    keys = axes.entries // axes.group
    filled["group"], filled["entries"] = axes.group, keys
    filled["k_tiles"] = k_tiles = -(-problem.k_len // row.tile_n)
    section = row.sections[problem.lower is not None or problem.upper is not None]
    filled["section"] = -(-keys // max(1, round(keys / section)))
    filled["row_pairs"] = axes.padded // 2
    boxes = {"q": row.tile_m, "dout": row.tile_m, "k": row.tile_n, "v": row.tile_n}
    if kind == "bwd_queries_sm90":  # a box for each warpgroup
        boxes["q"] = boxes["dout"] = _BOX
        blocks = axes.entries * -(-problem.q_len // row.tile_m)
    else:
        blocks = keys * k_tiles
    maps = {name: axes.geometry(name, boxes.get(name, _BOX)) for name in MAPPED}
    return Step(row, filled, maps, {}, places, blocks, True)


def _round_step(axes: _Axes, row: Row, main: Row, places: dict[str, int]) -> Step:
    filled = np.zeros(1, BWD_ROUND_PARAMS)
    filled["common"] = axes.common("q", "dq", axes.problem.head_dim, main.tile_m)
    filled["tile_m"], filled["tile_n"] = main.tile_m, main.tile_n
    filled["blocks"] = -(-main.dim // 64)
    blocks = axes.entries * -(-axes.problem.q_len // main.tile_m) * _PIECES
    used = {name: places[name] for name in ("sums", "spoiled")}
    return Step(row, filled, {}, {"common.out": "dq"}, used, blocks, False)


def _redo_step(axes: _Axes, row: Row, places: dict[str, int]) -> Step:
    filled = np.zeros(1, BWD_REDO_PARAMS)
    filled["common"] = axes.common("q", "dq", axes.problem.v_dim, row.tile_m)
    item = axes.problem.dtype.itemsize
    for name in REDONE:
        array = filled[name]
        array["row"] = axes.views[name].strides[-2] // item
        array["batch"] = [step // item for step in axes.steps[name]]
    filled["size"], filled["group"] = axes.size, axes.group
    filled["entries"], filled["row_pairs"] = axes.entries // axes.group, axes.padded // 2
    queries, keys = _spoiled(axes)
    used = {name: places[name] for name in ("rows", "spoiled")}
    arrays = {f"{name}.start": name for name in REDONE}
    return Step(row, filled, {}, arrays, used, queries + 2 * keys, True)
