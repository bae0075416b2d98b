"""What fills the parameter structs of backward kernels, whatever their architecture.

A few launches make the gradients of one call. ``bwd_preprocess`` prepares what is known of each
query, others compute gradients, and ``bwd_nonfinite`` computes the rows again whose sums were not
finite, or that have to do with a log-sum-exp too large for the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from fa_cupy.core.attention_problem import FLOAT_DTYPES, Problem, View
from fa_cupy.gpu.kernels.attention import attention_params
from fa_cupy.gpu.kernels.attention.attention_params import ATTENTION_PARAMS, MAX_BATCH_AXES
from fa_cupy.gpu.kernels.mask.structs import MASK_TABLE, table_arrays, table_of
from fa_cupy.gpu.kernels.tensor_maps import MAP_AXES, MAP_BYTES, Geometry, padded
from fa_cupy.tiled.softcap import transform

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
    + [
        (name, np.uint64)
        for name in ("lse_delta", "dq_accum", "dq_semaphore", "tile_counters", "nonfinite_flags")
    ]
    + [("mask", MASK_TABLE)]
    + [("size", np.int32, (MAP_AXES,))]
    + [(f"{name}_step", np.int32, (MAP_AXES,)) for name in WALKED]
    + [
        (name, np.int32)
        for name in ("group", "entries", "k_tiles", "entries_per_l2_group", "row_pairs")
    ],
    alignment=64,
)
#: ``struct BwdPreprocessParams`` of ``cuda_src/attention/bwd_preprocess.cu``.
BWD_PREPROCESS_PARAMS = np.dtype(
    [("common", ATTENTION_PARAMS)]
    + [(name, np.uint64) for name in ("dlse", "lse_delta", "counters")]
    + [("counter_words", np.int64)]
    + [(name, np.int32) for name in ("entry_rows", "lane_shift", "entry_blocks")],
    align=True,
)
#: ``struct BwdConvertDqParams`` of ``cuda_src/attention/bwd_convert_dq.cu``.
BWD_CONVERT_DQ_PARAMS = np.dtype(
    [("common", ATTENTION_PARAMS), ("dq_accum", np.uint64), ("nonfinite_flags", np.uint64)]
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
    + [(name, np.uint64) for name in ("lse_delta", "nonfinite_flags")]
    + [("size", np.int32, (MAP_AXES,))]
    + [(name, np.int32) for name in ("group", "entries", "row_pairs")]
    + [("scale", np.float32)]
)
#: ``struct BackwardParams`` of ``cuda_src/common/backward_params.cuh``.
BACKWARD_PARAMS = np.dtype(_PLAIN, align=True)
#: ``struct NonfiniteParams`` of ``cuda_src/attention/bwd_nonfinite.cu``, which begins with those
#: fields.
NONFINITE_PARAMS = np.dtype(
    [*_PLAIN, ("row_statistics", np.uint64), ("task_counters", np.uint64)], align=True
)
#: Threads of a block of ``bwd_convert_dq``, and of ``bwd_nonfinite``.
CONVERT_DQ_THREADS, NONFINITE_THREADS = 128, 256


BOX = 64  # columns of a box, and rows where it is a result's: 128 bytes are a swizzled row
PADDED = 128  # rows of the workspace are padded to a multiple of it, the largest tile
_ALIGNMENT = 256  # of the parts of a workspace
_ROWS_PER_FLAG = 64  # kRowsPerFlag of cuda_src/common/nonfinite_flags.cuh
_TASK_COUNTERS = 2  # words, of struct NonfiniteParams in cuda_src/attention/bwd_nonfinite.cu


class Row(Protocol):
    """What is asked of a row of `fa_cupy.gpu.kernels.attention.bwd_sm90_variants`."""

    @property
    def source(self) -> str: ...  # noqa: D102
    @property
    def dim(self) -> int: ...  # noqa: D102
    @property
    def tile_m(self) -> int: ...  # noqa: D102
    @property
    def tile_n(self) -> int: ...  # noqa: D102
    @property
    def threads(self) -> int: ...  # noqa: D102
    @property
    def l2_groups(self) -> tuple[int, int]: ...  # noqa: D102
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


def views_of(problem: Problem, views: Gradients) -> dict[str, View]:
    """Return all views by the names of the arrays."""
    found = {"q": problem.q, "k": problem.k, "v": problem.v, **views._asdict()}
    return found if problem.bias is None else {**found, "bias": problem.bias}


def shared(steps: dict[str, list[int]]) -> bool:
    """Whether the entries along the last axis share keys and values."""
    return not any(steps[name][-1] for name in ("k", "v", "dk", "dv"))


class Axes:
    """The batch axes of a call, and what all its structs say of them."""

    def __init__(self, problem: Problem, views: Gradients, tiles: Iterable[int] = ()) -> None:
        self.problem = problem
        self.views = views_of(problem, views)
        axes, steps = attention_params.merge_axes(problem.batch, self.views)
        missing = MAP_AXES - len(axes)
        self.size = [1] * missing + axes
        self.steps = {name: [0] * missing + steps[name] for name in self.views}
        self.group = self.size[-1] if axes and shared(steps) else 1
        self.entries = math.prod(self.size)
        # Whole tiles, whatever their size.
        self.padded = max(-(-problem.q_len // m) * m for m in (PADDED, *tiles))

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
        p["lower"], p["upper"] = attention_params.band_limits(problem)
        transformed = attention_params.transforms(problem)
        p["has_score_mod"] = transformed
        p["exp2_scale"] = 1.0 if transformed else problem.scale * attention_params.LOG2E
        factor, cap = transform(problem, np.dtype(np.float32))
        p["scale"], p["softcap"] = (
            attention_params.in_float32(factor),
            attention_params.in_float32(cap),
        )
        return filled

    def bias(self, p: np.void) -> None:
        """Fill in of ``AttentionParams`` how to walk the bias of the problem, if it has one."""
        view, dtype = self.problem.bias, self.problem.bias_dtype
        if view is None or dtype is None:
            return
        p["bias_row"], p["bias_col"] = (step // dtype.itemsize for step in view.strides[-2:])
        p["bias_batch"][:MAP_AXES] = [step // dtype.itemsize for step in self.steps["bias"]]
        p["bias_kind"] = FLOAT_DTYPES.index(dtype)

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


def nonfinite_flags(axes: Axes) -> tuple[int, int]:
    """Return how many tiles have a flag that they hold values not finite: of queries, of keys."""
    queries = axes.entries * -(-axes.problem.q_len // _ROWS_PER_FLAG)
    return queries, axes.entries // axes.group * -(-axes.problem.k_len // _ROWS_PER_FLAG)


def preprocess_step(
    axes: Axes, row: Row, places: dict[str, int], end: int, zeroed: str = "dq_semaphore"
) -> Step:
    """Return the step of ``bwd_preprocess``, which sets the workspace to 0 from `zeroed` on."""
    filled = np.zeros(1, BWD_PREPROCESS_PARAMS)
    v_dim = axes.problem.v_dim
    filled["common"] = axes.common("dout", "out", v_dim, PADDED)
    filled["counter_words"] = (end - places[zeroed]) // 4  # and all behind them
    filled["entry_rows"] = axes.padded
    filled["lane_shift"] = shift = max(0, (-(-v_dim // 8) - 1).bit_length())
    filled["entry_blocks"] = blocks = -(-axes.padded // ((row.threads >> shift) * row.tile_m))
    arrays = {"common.q": "dout", "common.out": "out", "common.lse": "lse", "dlse": "dlse"}
    used = {"lse_delta": places["lse_delta"], "counters": places[zeroed]}
    return Step(row, filled, {}, arrays, used, axes.entries * blocks, False)


def mask_arrays(problem: Problem, filled: np.ndarray[Any, Any], turned: bool) -> dict[str, str]:
    """Fill in the mask of a struct; return which arrays it points to."""
    if problem.mask is None:
        return {}
    filled["mask"] = table_of(problem, turned)
    return {f"mask.{field}": array for field, array in table_arrays(turned).items()}


def plain_step(
    axes: Axes, row: Row, places: dict[str, int], blocks: int, shares: bool, turned: bool,
    struct: np.dtype[Any] = BACKWARD_PARAMS,
) -> Step:  # fmt: skip
    """Return the step of a kernel that takes `BACKWARD_PARAMS`, or more.

    Parameters
    ----------
    axes : Axes
    row : Row
    places : dict of int
        Of the parts of the workspace.
    blocks, shares : int, bool
        As in `Step`.
    turned : bool
        Whether it reads a mask by blocks of keys.
    struct : numpy.dtype
        What it takes, which begins with the fields of `BACKWARD_PARAMS`.
    """
    problem, filled = axes.problem, np.zeros(1, struct)
    filled["common"] = axes.common("q", "dq", problem.v_dim, row.tile_m)
    axes.bias(filled["common"][0])
    for name in REDONE:
        array = filled[name]
        array["row"] = axes.views[name].strides[-2] // problem.dtype.itemsize
        array["batch"] = [step // problem.dtype.itemsize for step in axes.steps[name]]
    filled["size"], filled["group"] = axes.size, axes.group
    filled["entries"], filled["row_pairs"] = axes.entries // axes.group, axes.padded // 2
    filled["scale"] = attention_params.in_float32(problem.scale)
    used = {name: places[name] for name in ("lse_delta", "nonfinite_flags")}
    arrays = {f"{name}.start": name for name in REDONE}
    if problem.bias is not None:
        arrays["common.bias"] = "bias"
    arrays |= mask_arrays(problem, filled, turned)
    return Step(row, filled, {}, arrays, used, blocks, shares)


def nonfinite_step(axes: Axes, row: Row, places: dict[str, int]) -> Step:
    """Return the step of ``bwd_nonfinite``."""
    queries, keys = nonfinite_flags(axes)
    tasks = queries + 2 * keys
    step = plain_step(axes, row, places, tasks, shares=True, turned=False, struct=NONFINITE_PARAMS)
    step.arrays["common.lse"] = "lse"
    step.places.update({name: places[name] for name in ("row_statistics", "task_counters")})
    return step


def laid_out(axes: Axes, **sizes: int) -> tuple[dict[str, int], int]:
    """Return where the parts of a workspace begin, and its bytes.

    Parameters
    ----------
    axes : Axes
    **sizes : int
        Bytes of what lies between ``row_statistics`` and ``nonfinite_flags``. All calls have these
        two, ``lse_delta`` and ``task_counters``.
    """
    of_rows = axes.entries * axes.padded * 8
    every = {"lse_delta": of_rows, "row_statistics": of_rows, **sizes}
    every["nonfinite_flags"] = 4 * (1 + sum(nonfinite_flags(axes)))
    every["task_counters"] = 4 * _TASK_COUNTERS
    places, end = {}, 0
    for name, size in every.items():
        places[name] = end
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return places, end
