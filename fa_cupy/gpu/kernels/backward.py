"""What the kernels of attention backward share, whatever their architecture.

A few launches make the gradients of one call. ``bwd_preprocess`` prepares what is known of each
query, others compute gradients, and ``bwd_nonfinite`` computes the rows again whose sums were not
finite, or that have to do with a log-sum-exp too large for the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fa_cupy.core.attention_problem import Problem, View
from fa_cupy.dropout.arguments import Dropout
from fa_cupy.gpu.driver.targets import SHARED_LIMIT
from fa_cupy.gpu.kernels.attention import attention_params
from fa_cupy.gpu.kernels.attention.attention_params import (
    ATTENTION_PARAMS,
    MAX_BATCH_AXES,
    MAX_GRID,
    MAX_LENGTH,
    PARAMS_WITH_DROPOUT,
)
from fa_cupy.gpu.kernels.attention.row_intervals import supports
from fa_cupy.gpu.kernels.mask.mask_table import MASK_TABLE, table_arrays, table_of
from fa_cupy.gpu.kernels.score import (
    ScoreMod,
    fill_score,
    score_mod_of,
    score_pointers,
    takes_scale,
)
from fa_cupy.gpu.kernels.tensor_maps import (
    DIM_STEP,
    MAP_AXES,
    MAP_BYTES,
    Geometry,
    maps_walk,
    padded,
)
from fa_cupy.gpu.kernels.variant import DROPOUT_DEFINES, PARAMS, Variant
from fa_cupy.gpu.plan import Step
from fa_cupy.tiled.softcap import folds

#: Columns of a box of a tensor map, and rows where it is a result's: 128 bytes are a swizzled row.
BOX = 64
#: Rows of the workspace are padded to a multiple of it, the largest tile.
PADDED = 128
_LEAST_KEYS = 32  # of a block, in any row of ``bwd_dkdv_sm80``
_LEAST_ROWS = 8  # of a block of a kernel of float32 or float64
_ROWS_PER_FLAG = 64  # kRowsPerFlag of cuda_src/common/nonfinite_flags.cuh

#: ``struct Array`` of ``cuda_src/common/backward_params.cuh``.
ARRAY = np.dtype([("start", np.uint64), ("row", np.int64), ("batch", np.int64, (MAP_AXES,))])
_ARRAYS = ("q", "k", "v", "dout", "dq", "dk", "dv")
# Arrays that a call may have besides, and those that kernels read and write element by element.
_OPTIONS = ("bias", "sinks", "k_lengths")
_ANY_STRIDES = (*_OPTIONS, "dbias")
#: The fields of `BACKWARD_PARAMS`.
BACKWARD_FIELDS: list[Any] = (
    [("common", ATTENTION_PARAMS)]
    + [(name, ARRAY) for name in _ARRAYS]
    + [("mask", MASK_TABLE)]
    + [(name, np.uint64) for name in ("lse_delta", "nonfinite_flags")]
    + [("size", np.int32, (MAP_AXES,))]
    + [(name, np.int32) for name in ("group", "entries", "row_pairs")]
)
#: ``struct BackwardParams`` of ``cuda_src/common/backward_params.cuh``, of ``bwd_dkdv_sm80`` and
#: ``bwd_dq_sm80``.
BACKWARD_PARAMS = np.dtype(BACKWARD_FIELDS, align=True)


def with_dropout(params: np.dtype[Any]) -> np.dtype[Any]:
    """Return the struct of builds with dropout, given that of others."""
    of_common = {"common": PARAMS_WITH_DROPOUT}
    fields: list[Any] = [(name, of_common.get(name, params[name])) for name in params.names or ()]
    return padded(fields, 64 if fields[0][0] == "q_map" else params.alignment)


_NO_SEED: dict[str, str] = {}
# The arrays that have a tensor map, in the order of the struct, and those that are read.
_MAPPED = ("q", "k", "v", "dout", "dk", "dv", "dq")
_READ = ("q", "k", "v", "dout")
#: Warpgroups that compute, and stages of what they are to do: kGroups, kWorkStages.
GROUPS, WORK_STAGES = 2, 2
_NOTE_BYTES = 8  # MaskTileInfo
_CURSOR_BYTES, _CURSORS = 20, 4  # MaskCursor, kCursors
_TILE_COUNTERS = 4  # words
_MULTIPROCESSORS = 132  # of the largest device that has tensor maps and wgmma

#: ``struct BwdSm90Params`` of ``cuda_src/common/backward_sm90.cuh``.
BWD_SM90_PARAMS = padded(
    [(f"{name}_map", np.uint64, (MAP_BYTES // 8,)) for name in _MAPPED]
    + [("common", ATTENTION_PARAMS)]
    + [
        (name, np.uint64)
        for name in ("lse_delta", "dq_accum", "dq_semaphore", "tile_counters", "nonfinite_flags")
    ]
    + [("mask", MASK_TABLE)]
    + [("size", np.int32, (MAP_AXES,))]
    + [(f"{name}_step", np.int32, (MAP_AXES,)) for name in _READ]
    + [
        (name, np.int32)
        for name in ("group", "entries", "k_tiles", "entries_per_l2_group", "row_pairs")
    ],
    alignment=64,
)


@dataclass(frozen=True, kw_only=True)
class BackwardVariant(Variant):
    """One way to compile one kernel of attention backward."""

    @property
    def kernel(self) -> str:
        """The stem of the source, as ``bwd_sm90``."""
        return self.source.rpartition("/")[2]

    @property
    def targets(self) -> tuple[str, ...]:
        """All that have its shared memory."""
        size = self.shared_bytes
        return tuple(t for t, limit in SHARED_LIMIT.items() if size <= limit)

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            ("FA_BF16", int(self.dtype == "bfloat16")),
            ("FA_SHARED_BYTES", self.shared_bytes),
            ("FA_PARAMS_BYTES", PARAMS[self.dropout].itemsize),
            *self.key_defines,
            *DROPOUT_DEFINES[self.dropout],
            *self.score_defines,
        )

    def sized(self, params: np.dtype[Any]) -> int:
        """Return the bytes of a struct of parameters in this build."""
        return (with_dropout(params) if self.dropout else params).itemsize

    def step(self, traits: Traits, launches: Launches) -> Step:
        """Return the launch of the kernel, whose parts of the workspace are added to `launches`."""
        raise NotImplementedError

    def joining(self, step: Step) -> list[Step]:
        """Return what follows the launch of a gradient of a bias: what joins its parts, if any."""
        return []


@dataclass(frozen=True, kw_only=True)
class BackwardSm80(BackwardVariant):
    """A row of a kernel of mma.sync, which takes any call with a mask, or any without.

    Attributes
    ----------
    blocks : int
        Blocks that should fit on a multiprocessor.
    """

    blocks: int

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            *super().defines,
            ("FA_DIM", self.dim),
            ("FA_TILE_M", self.tile_m),
            ("FA_TILE_N", self.tile_n),
            ("FA_WARPS", self.warps),
            ("FA_STAGES", self.stages),
            ("FA_BLOCKS", self.blocks),
            ("FA_SPARSE", int(self.sparse)),
            ("FA_BACKWARD_PARAMS_BYTES", self.sized(BACKWARD_PARAMS)),
        )


@dataclass(frozen=True, kw_only=True)
class BackwardSm90(BackwardVariant):
    """A row of a kernel that runs where tensor maps and wgmma are.

    Attributes
    ----------
    l2_groups : tuple of int
        Entries of a group: without a band, under one, of packed sequences without one. The blocks
        of keys of a group's entries are given out in turn, and share the L2 cache. A block of keys
        may wait for those before it of its entry, so a group should have several entries; blocks of
        one entry read the same queries, so it should not have too many.
    rows_of_l2_group : int
        Most queries of a group of more than two entries without a mask; 0 for any number. Blocks
        of keys at work on a long entry spread over its queries in time. The fewer entries share
        them, the sooner the next block comes to what one has read and added to, while it is still
        in the cache.
    """

    rows_of_l2_group: ClassVar[int] = 0
    l2_groups: tuple[int, int, int] = (16, 16, 16)

    @property
    def targets(self) -> tuple[str, ...]:
        """The only target that has wgmma."""
        return ("sm_90a",)

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            *super().defines,
            ("FA_DIM", self.dim),
            ("FA_TILE_M", self.tile_m),
            ("FA_TILE_N", self.tile_n),
            ("FA_STAGES", self.stages),
            ("FA_SPARSE", int(self.sparse)),
            ("FA_SM90_PARAMS_BYTES", self.sized(BWD_SM90_PARAMS)),
        )

    @property
    def row_bytes(self) -> int:
        """Of a row of a tile in shared memory, in blocks of 64 columns."""
        return 128 * -(-self.dim // 64)

    @property
    def notes(self) -> int:
        """Bytes that describe the tiles in flight, under a mask, and where their producers are."""
        cursors = _CURSORS if self.sparse else 1
        return _NOTE_BYTES * (self.stages if self.sparse else 1) + _CURSOR_BYTES * cursors

    def end_of_offsets(self, end: int) -> int:
        """Return where shared memory ends, given where the offsets of the bias begin."""
        has_operands = self.score is not None and self.score.has_operands
        return -(-end // 8) * 8 + 8 * (self.stages if has_operands else 1)

    def mapped_step(
        self,
        traits: Traits,
        launches: Launches,
        blocks: int,
        boxes: dict[str, int],
        by_key: bool = True,
        dtype: np.dtype[Any] = BWD_SM90_PARAMS,
    ) -> Step:
        """Return a launch whose blocks take parts of the work until none is left.

        Parameters
        ----------
        traits : Traits
        launches : Launches
        blocks : int
            Parts of the work.
        boxes : dict of int
            Rows of the boxes of arrays, where these are not `BOX`.
        by_key : bool
            Whether the kernel reads a mask by blocks of keys.
        dtype : numpy.dtype
            Of a struct that begins as `BWD_SM90_PARAMS`.
        """
        problem, params, seed = traits.problem, np.zeros(1, dtype), _NO_SEED
        if problem.dropout is None:
            params["common"] = traits.common("q", "dq", problem.v_dim, self.tile_m)
        else:
            params, seed = struct_with_dropout(traits, dtype, self.tile_m, problem.dropout)
        params["size"] = traits.size
        for name in _READ:
            params[f"{name}_step"] = [step != 0 for step in traits.steps[name]]
        entries = traits.entries // traits.group  # of keys
        params["group"], params["entries"] = traits.group, entries
        params["k_tiles"] = -(-problem.k_len // self.tile_n)
        banded = (problem.lower, problem.upper) != (None, None)
        l2_group = self.l2_groups[1 if banded else 2 if problem.offsets is not None else 0]
        if self.rows_of_l2_group and not self.sparse and problem.offsets is None:
            fit = self.rows_of_l2_group // max(1, traits.group * problem.q_len)
            l2_group = min(l2_group, max(2, fit))
        params["entries_per_l2_group"] = -(-entries // max(1, round(entries / l2_group)))
        params["row_pairs"] = launches.rows // 2
        launches.counters["tile_counters"] = 4 * _TILE_COUNTERS  # which the kernels of a call share
        addresses = {name: name for name in ("lse_delta", "tile_counters", "nonfinite_flags")}
        addresses |= traits.mask(params, by_key)
        addresses |= traits.operands | seed
        maps: dict[str, Any] = {
            f"{name}_map": (name, traits.geometry(name, boxes.get(name, BOX))) for name in _MAPPED
        }
        grid = launches.persistent(blocks)
        return Step(self, grid, params, addresses, maps, persistent=True)


class Gradients(NamedTuple):
    """Views over ``problem.batch`` of what a backward call reads and writes besides q, k and v.

    Along axes that share keys and values `dk` and `dv` have stride 0: the kernel sums over them. So
    does `dbias` along all axes that the bias broadcasts over.
    """

    dout: View  # (*batch, q_len, v_dim)
    out: View
    dq: View  # (*batch, q_len, head_dim)
    dk: View  # (*batch, k_len, head_dim)
    dv: View  # (*batch, k_len, v_dim)
    dbias: View | None = None  # (*batch, q_len, k_len), of the bias' dtype, where it is wanted


class Wanted(NamedTuple):
    """What of a call decides which kernels take it.

    Attributes
    ----------
    dtype : str
        Name of the dtype of q, k and v.
    dim : int
        The larger one of head_dim and v_dim.
    masked : bool
        Whether there is a mask.
    mapped : bool
        Whether tensor maps can walk the arrays, if all pointers but the bias' are multiples of 16,
        and kernels take the scale.
    strided : bool
        As `mapped`, for kernels that compute addresses.
    score : ScoreMod or None
        What a score is besides a product times a positive scale.
    dbias : bool
        Whether the gradient of the bias is wanted.
    dbias_fills : bool
        Whether it has an element for each query and key, and enough tiles of them for a block on
        each multiprocessor.
    packed : bool
        Whether sequences are packed.
    dropout : bool
        Whether weights are dropped.
    lengths : bool
        Whether batch entries have numbers of keys of their own.
    """

    dtype: str
    dim: int
    masked: bool = False
    mapped: bool = True
    strided: bool = True
    score: ScoreMod | None = None
    dbias: bool = False
    dbias_fills: bool = False
    packed: bool = False
    dropout: bool = False
    lengths: bool = False


def padded_rows(rows: int) -> int:
    """Return how many rows there are with those that fill the last `PADDED` ones."""
    return -(-rows // PADDED) * PADDED


def takes_dims(dtype: str, *dims: int) -> bool:
    """Whether kernels read rows of so many elements: of 16-bit types, whole multiples of 16 bytes.

    Those of float32 and float64 read any.
    """
    return dtype in ("float32", "float64") or not any(dim % DIM_STEP for dim in dims)


class Traits:
    """What follows from a problem: the batch axes of a call, and what all its structs say of them.

    Parameters
    ----------
    problem : Problem
    views : Gradients

    Attributes
    ----------
    problem : Problem
    views : dict of View
        By the names of the arrays.
    size : list of int
        Batch axes that are left when neighbours are merged, after axes of size 1: three.
    steps : dict of list of int
        Bytes along each of them, by array.
    group : int
        How many entries next to each other share keys and values.
    entries : int
        Of the batch.
    flags : (int, int)
        How many tiles have a flag for values not finite: of queries, of keys.
    wanted : Wanted
    """

    def __init__(self, problem: Problem, views: Gradients) -> None:
        self.problem = problem
        found = {"q": problem.q, "k": problem.k, "v": problem.v, **views._asdict()}
        found |= {name: getattr(problem, name) for name in _OPTIONS}
        self.views: dict[str, View] = {name: x for name, x in found.items() if x is not None}
        axes, steps = attention_params.merge_axes(problem.batch, self.views)
        self.entries = math.prod(axes)
        of_keys = [name for name in ("k", "v", "dk", "dv", "k_lengths") if name in steps]
        sharing = bool(axes) and not any(steps[name][-1] for name in of_keys)
        self.group = axes[-1] if sharing and self.entries else 1
        missing = MAP_AXES - len(axes)
        self.size = [1] * missing + axes
        self.steps = {name: [0] * missing + steps[name] for name in self.views}
        self.flags = (
            self.entries * -(-problem.q_len // _ROWS_PER_FLAG),
            self.entries // self.group * -(-problem.k_len // _ROWS_PER_FLAG),
        )
        apart = len(axes) - sharing
        # Sums over other axes are left to the caller, who gives dk and dv an entry for each.
        summed = any(0 in steps[name][:apart] for name in ("dk", "dv")) or 0 in steps["dq"]
        sizes = problem.q_len, problem.k_len, problem.head_dim, problem.v_dim
        walked = (
            missing >= 0
            and not summed
            and min(*sizes, self.entries) > 0
            and max(sizes[:2]) <= MAX_LENGTH
        )
        served = walked and takes_dims(problem.dtype.name, *sizes[2:]) and takes_scale(problem)
        # Kernels of float32 add up dQ and dK before they multiply them by the scale: with an
        # extraordinary one the sums may leave float32 where the gradients do not.
        wide = problem.dtype == np.float32 and not folds(problem.scale)
        served = served and not wide and (problem.offsets is None or supports(problem))
        #: Whether kernels that compute addresses, one row at a time, can walk the arrays.
        self.gathers = walked and all(
            x.strides[-1] == problem.dtype.itemsize or x.shape[-1] == 1
            for name, x in self.views.items()
            if name not in _ANY_STRIDES
        )
        self.wanted = Wanted(
            dtype=problem.dtype.name,
            dim=max(sizes[2:]),
            masked=problem.mask is not None,
            mapped=served and self._maps_walk(),
            strided=served and self._addresses_walk(),
            score=score_mod_of(problem, sloped=True),
            dbias=views.dbias is not None,
            dbias_fills=views.dbias is not None and self._dbias_fills(views.dbias),
            packed=problem.offsets is not None,
            dropout=problem.dropout is not None,
            lengths=problem.k_lengths is not None,
        )
        #: For fields of a struct, what scores are made of besides products.
        self.operands = {} if problem.bias is None else {"common.bias": "bias"}
        if problem.score is not None:
            of_score = score_pointers(problem).items()
            self.operands |= {f"common.{field}": name for field, name in of_score}
        self._common = self._constants() if walked else None
        self._tables: list[tuple[np.ndarray[Any, Any], dict[str, str]]] = []
        if self.wanted.masked:
            self._tables = [(table_of(problem, side), table_arrays(side)) for side in (False, True)]

    def _dbias_fills(self, view: View) -> bool:
        """Whether the gradient of the bias is of pairs, with a tile for each multiprocessor."""
        kept = (n for n, step in zip(self.size, self.steps["dbias"], strict=True) if step)
        tiles = -(-self.problem.q_len // PADDED) * -(-self.problem.k_len // PADDED)
        outputs = math.prod(kept) * tiles
        return 0 not in view.strides[-2:] and _MULTIPROCESSORS <= outputs <= MAX_GRID

    def _maps_walk(self) -> bool:
        """Whether tensor maps can walk the arrays, and a launch has a block for each tile."""
        # The most blocks: 8 rows each, or a piece of 64 rows and 64 columns of at most 256.
        rows = self.entries * (-(-self.problem.q_len // PADDED) + 1) * PADDED
        blocks = max(rows // 8, self.entries * -(-self.problem.k_len // 64))
        item = self.problem.dtype.itemsize
        mapped = {name: view for name, view in self.views.items() if name not in _ANY_STRIDES}
        return blocks <= MAX_GRID and maps_walk(mapped, self.steps, item, outputs=())

    def _addresses_walk(self) -> bool:
        """As `_maps_walk` for kernels that compute addresses."""
        if self.problem.dtype.itemsize > 2:  # their rows begin at any element
            rows = padded_rows(self.problem.q_len) + padded_rows(self.problem.k_len)
            return self.gathers and self.entries * rows // _LEAST_ROWS <= MAX_GRID
        rows = self.entries * padded_rows(self.problem.q_len)
        blocks = max(rows // 8, self.entries * -(-self.problem.k_len // _LEAST_KEYS))
        item = self.problem.dtype.itemsize
        return blocks <= MAX_GRID and all(
            view.strides[-1] == item
            and view.strides[-2] // item < 2**31
            and all(step % 16 == 0 for step in (*self.steps[name], view.strides[-2]))
            for name, view in self.views.items()
            if name not in _ANY_STRIDES
        )

    def _constants(self) -> np.ndarray[Any, Any]:
        """Return ``AttentionParams`` with what all launches say of the problem."""
        problem, filled = self.problem, np.zeros(1, ATTENTION_PARAMS)
        p = filled[0]
        p["aligned"], p["batch_axes"] = 1, MAP_AXES
        p["batch_size"] = self.size + [1] * (MAX_BATCH_AXES - MAP_AXES)
        p["q_len"], p["k_len"] = problem.q_len, problem.k_len
        p["head_dim"] = problem.head_dim
        if problem.bias_dtype is not None:
            steps = [step // problem.bias_dtype.itemsize for step in self.steps["bias"]]
            p["bias_batch"][:MAP_AXES] = steps
        if problem.score is not None:  # entries take the place of offsets
            p["bias_batch"][:MAP_AXES] = [
                math.prod(self.size[axis + 1 :]) for axis in range(MAP_AXES)
            ]
        p["lower"], p["upper"] = attention_params.band_limits(problem)
        fill_score(p, problem, self.wanted.score)
        return filled

    def common(self, q: str, out: str, v_dim: int, tile_m: int) -> np.ndarray[Any, Any]:
        """Return ``AttentionParams`` that walk the arrays `q` and `out` in their places."""
        assert self._common is not None
        item, filled = self.problem.dtype.itemsize, self._common.copy()
        p = filled[0]
        for place, name in (("q", q), ("out", out)):
            p[f"{place}_row"] = self.views[name].strides[-2] // item
            p[f"{place}_batch"][:MAP_AXES] = [step // item for step in self.steps[name]]
        p["v_dim"], p["q_tiles"] = v_dim, -(-self.problem.q_len // tile_m)
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

    def mask(self, params: np.ndarray[Any, Any], by_key: bool) -> dict[str, str]:
        """Fill in the mask of a struct; return the arrays that fields of it point to.

        Parameters
        ----------
        params : numpy.ndarray
        by_key : bool
            Whether the table by blocks of keys is meant, not that by blocks of queries.
        """
        if not self.wanted.masked:
            return {}
        params["mask"], arrays = self._tables[by_key]
        return {f"mask.{field}": array for field, array in arrays.items()}


class Launches:
    """What the launches of a call have in common besides its traits.

    Parameters
    ----------
    traits : Traits
    variants : sequence of BackwardVariant
        In the order of their launches.
    multiprocessors : int

    Attributes
    ----------
    variants : tuple of BackwardVariant
    rows : int
        Of a batch entry, padded to whole tiles whatever their size.
    multiprocessors : int
    scratch, counters : dict of int
        Bytes of the parts of the workspace by name: of those that one kernel writes before others
        read them, and of those that are to be 0 when the gradients begin. They are complete when
        all steps but that of ``bwd_preprocess`` are made.
    """

    def __init__(
        self, traits: Traits, variants: Sequence[BackwardVariant], multiprocessors: int
    ) -> None:
        self.variants = tuple(variants)
        self.multiprocessors = multiprocessors
        tiles = (PADDED, *(variant.tile_m for variant in variants))
        self.rows = max(-(-traits.problem.q_len // m) * m for m in tiles)
        self.scratch: dict[str, int] = {}
        self.counters = {"nonfinite_flags": 4 * (1 + sum(traits.flags))}

    def persistent(self, blocks: int) -> int:
        """Return how many blocks take so many parts of the work, one by one.

        They take them in order, and wait for none that no block has taken.
        """
        return min(self.multiprocessors, blocks)


def struct_with_dropout(
    traits: Traits, dtype: np.dtype[Any], tile_m: int, dropout: Dropout
) -> tuple[np.ndarray[Any, Any], dict[str, str]]:
    """Return a struct with the arguments of all kernels, and the field that has the seed.

    Parameters
    ----------
    traits : Traits
    dtype : numpy.dtype
        Of the struct in builds without dropout.
    tile_m : int
        Of the kernel.
    dropout : Dropout
    """
    problem, params = traits.problem, np.zeros(1, with_dropout(dtype))
    common = traits.common("q", "dq", problem.v_dim, tile_m)
    for name in common.dtype.names or ():
        params["common"][name] = common[name]
    attention_params.fill_dropout(params["common"]["dropout"][0], problem, dropout)
    return params, {f"common.{dropout.field}": "seed"}


def strided_params(
    traits: Traits, launches: Launches, tile_m: int, by_key: bool,
    dtype: np.dtype[Any] = BACKWARD_PARAMS,
) -> tuple[np.ndarray[Any, Any], dict[str, str]]:  # fmt: skip
    """Return a struct that begins with `BACKWARD_FIELDS`, and what its fields point to.

    Parameters
    ----------
    traits : Traits
    launches : Launches
    tile_m : int
        Of the kernel.
    by_key : bool
        Whether it reads a mask by blocks of keys.
    dtype : numpy.dtype
        Of the struct.
    """
    problem, params, seed = traits.problem, np.zeros(1, dtype), _NO_SEED
    if problem.dropout is None:
        params["common"] = traits.common("q", "dq", problem.v_dim, tile_m)
    else:
        params, seed = struct_with_dropout(traits, dtype, tile_m, problem.dropout)
    for name in _ARRAYS:
        array = params[name]
        array["row"] = traits.views[name].strides[-2] // problem.dtype.itemsize
        array["batch"] = [step // problem.dtype.itemsize for step in traits.steps[name]]
    params["size"], params["group"] = traits.size, traits.group
    params["entries"], params["row_pairs"] = traits.entries // traits.group, launches.rows // 2
    addresses = {name: name for name in ("lse_delta", "nonfinite_flags")}
    addresses |= {f"{name}.start": name for name in _ARRAYS}
    addresses |= traits.mask(params, by_key)
    addresses |= traits.operands | seed
    return params, addresses
