"""How a problem fills the parameter structs of the backward kernels for SM90.

A few launches make the gradients of one call. ``bwd_rows`` prepares what is known of each query.
Then ``bwd_sm90`` computes dK and dV and adds up dQ in float32, which ``bwd_round`` scales and
rounds; or, where dims are wide, ``bwd_keys_sm90`` computes dK and dV and ``bwd_queries_sm90`` dQ.
Last, ``bwd_redo`` computes the rows again whose sums were not finite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from fa_cupy._check import Problem
from fa_cupy.gpu.params_bwd_sm90 import BOX, PADDED, Axes, Gradients
from fa_cupy.gpu.params_sm90 import Geometry
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
from fa_cupy.gpu.structs_mask import table_arrays, table_of

_PIECE = 64 * 64  # kPieceFloats of cuda_src/common/gradient_sums.cuh
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
    axes = Axes(problem, views)
    sizes = [axes.entries * axes.padded * 8, 0, 0, _COUNTERS * 4, 4 * (1 + sum(_spoiled(axes)))]
    for row in rows:
        if row.source.endswith("bwd_sm90"):
            tiles = axes.entries * -(-problem.q_len // row.tile_m)
            sizes[1:3] = [tiles * _pieces(row) * _PIECE * 4, tiles * 4]
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


def _pieces(row: Row) -> int:
    """Return in how many pieces dQ of a tile is added up."""
    return row.tile_m // 64 * -(-row.dim // 64)


def _spoiled(axes: Axes) -> tuple[int, int]:
    """Return how many tiles there are that may be computed again: of queries, of keys."""
    queries = axes.entries * -(-axes.problem.q_len // _SPOILED)
    return queries, axes.entries // axes.group * -(-axes.problem.k_len // _SPOILED)


def _mask(problem: Problem, filled: np.ndarray[Any, Any], turned: bool) -> dict[str, str]:
    """Fill in the mask of a struct; return which arrays it points to."""
    if problem.mask is None:
        return {}
    filled["mask"] = table_of(problem, turned)
    return {f"mask.{field}": array for field, array in table_arrays(turned).items()}


def _rows_step(axes: Axes, row: Row, places: dict[str, int], end: int) -> Step:
    filled = np.zeros(1, BWD_ROWS_PARAMS)
    v_dim = axes.problem.v_dim
    filled["common"] = axes.common("dout", "out", v_dim, PADDED)
    filled["words"] = (end - places["turns"]) // 4  # the turns and all behind them
    filled["entry_rows"] = axes.padded
    filled["lane_shift"] = shift = max(0, (-(-v_dim // 8) - 1).bit_length())
    filled["entry_blocks"] = blocks = -(-axes.padded // ((ROWS_THREADS >> shift) * ROWS_UNROLL))
    arrays = {"common.q": "dout", "common.out": "out", "common.lse": "lse", "dlse": "dlse"}
    used = {name: places[name] for name in ("rows", "turns")}
    return Step(row, filled, {}, arrays, used, axes.entries * blocks, False)


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
    section = row.sections[problem.lower is not None or problem.upper is not None]
    filled["section"] = -(-keys // max(1, round(keys / section)))
    filled["row_pairs"] = axes.padded // 2
    boxes = {"q": row.tile_m, "dout": row.tile_m, "k": row.tile_n, "v": row.tile_n}
    if kind == "bwd_queries_sm90":  # a box for each warpgroup
        boxes["q"] = boxes["dout"] = BOX
        blocks = axes.entries * -(-problem.q_len // row.tile_m)
    else:
        blocks = keys * k_tiles
    arrays = _mask(problem, filled, turned=kind != "bwd_queries_sm90")
    maps = {name: axes.geometry(name, boxes.get(name, BOX)) for name in MAPPED}
    return Step(row, filled, maps, arrays, places, blocks, True)


def _round_step(axes: Axes, row: Row, main: Row, places: dict[str, int]) -> Step:
    filled = np.zeros(1, BWD_ROUND_PARAMS)
    filled["common"] = axes.common("q", "dq", axes.problem.head_dim, main.tile_m)
    filled["tile_m"], filled["tile_n"] = main.tile_m, main.tile_n
    filled["blocks"] = -(-main.dim // 64)
    blocks = axes.entries * -(-axes.problem.q_len // main.tile_m) * _pieces(main)
    used = {name: places[name] for name in ("sums", "spoiled")}
    arrays = {"common.out": "dq", **_mask(axes.problem, filled, turned=True)}
    return Step(row, filled, {}, arrays, used, blocks, False)


def _redo_step(axes: Axes, row: Row, places: dict[str, int]) -> Step:
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
