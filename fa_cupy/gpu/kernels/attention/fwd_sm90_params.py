"""The parameter struct of ``fwd_sm90``: tensor maps, packed heads and the schedule of tiles.

A tensor map walks an array without its help, so the kernel takes fewer layouts than `fwd_sm80`;
`takes` says which.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np

from fa_cupy.core.attention_problem import Problem, View
from fa_cupy.gpu.kernels.attention import fwd_params
from fa_cupy.gpu.kernels.attention.fwd_params import ATTENTION_PARAMS, MAX_BATCH_AXES, MAX_LENGTH

#: The arrays that have a tensor map, in the order of the struct, and their place in a head.
MAPPED = ("q", "k", "v", "out")
MAP_BYTES = 128
#: Batch axes of a tensor map: of its five, two are rows and columns.
MAP_AXES = 3
_MAX_PACKED = 64  # heads in a box of 64 rows
#: Dims are multiples of it. Boxes are clipped in steps of 16 bytes: a store of 33 columns writes 40
#: (seen on an H200).
DIM_STEP = 8
_BOX = 64  # rows and columns of a box of Q or of the output: 128 bytes are a swizzled row
_MAX_STEP = 2**40  # bytes, CUDA Driver API, cuTensorMapEncodeTiled
_L2_BYTES = 32 << 20  # what keys and values can count on of an H200's 50 MiB
# Entries of a section. Causal, 512 to 4,096 tokens, head_dim 64 to 256: fewer than 16 have too few
# tiles of each length (hd256 at 2,048 tokens: 629 TFLOP/s with 8, 662 with 16), more than 32 first
# load much and then compute much (hd128 at 512: 388 with 32, 376 with 64).
_SECTION = (16, 32)

#: ``struct TileScheduler`` of ``cuda_src/common/tile_scheduler.cuh``.
TILE_SCHEDULER = np.dtype(
    [("counter", np.uint64), ("mark", np.uint64)]
    + [(name, np.int32) for name in ("tiles", "entries", "entries_per_l2_group")],
    align=True,
)
#: Writes its beginning: buffer, place of the struct in it, counter and mark.
pack_counter: Callable[..., None] = struct.Struct("=QQ").pack_into
COUNTER_BYTES = 16


def padded(fields: list[Any], alignment: int) -> np.dtype[Any]:
    """Return a struct whose size is a multiple of `alignment`, as that of an ``alignas`` one."""
    plain = np.dtype(fields, align=True)
    names = plain.names or ()
    return np.dtype(
        {
            "names": names,
            "formats": [plain[name] for name in names],
            "offsets": [plain.fields[name][1] for name in names] if plain.fields else [],
            "itemsize": -(-plain.itemsize // alignment) * alignment,
        },
        align=True,
    )


#: The same fields in the same order as ``struct FwdSm90Params`` in
#: ``cuda_src/attention/fwd_sm90.cuh``, which checks the size when it is compiled.
FWD_SM90_PARAMS = padded(
    [(f"{name}_map", np.uint64, (MAP_BYTES // 8,)) for name in MAPPED]
    + [("common", ATTENTION_PARAMS), ("scheduler", TILE_SCHEDULER), ("size", np.int32, (MAP_AXES,))]
    + [(f"{name}_step", np.int32, (MAP_AXES,)) for name in ("q", "k", "v")]
    + [("row_shift", np.int32)],
    alignment=64,
)


class Geometry(NamedTuple):
    """What `fa_cupy.gpu.driver.tensor_map.encode_tiled` wants to know besides pointer and dtype."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


class Part(NamedTuple):
    """One launch: its first batch entry, and what its schedule says."""

    first_batch: int
    tiles: int
    entries: int
    entries_per_l2_group: int

    def write(self, params: np.ndarray[Any, Any]) -> None:
        """Write it to a struct of `FWD_SM90_PARAMS`; every part is of aligned rows."""
        params["common"]["first_batch"], params["common"]["aligned"] = self.first_batch, 1
        for name in ("tiles", "entries", "entries_per_l2_group"):
            params["scheduler"][name] = getattr(self, name)


class Filled(NamedTuple):
    """A problem as the kernel takes it; see `fill`."""

    params: np.ndarray[Any, Any]
    maps: dict[str, Geometry]
    parts: list[Part]


def takes(problem: Problem, out: View) -> bool:
    """Whether the kernel can solve a problem, if all pointers are multiples of 16.

    Parameters
    ----------
    problem : Problem
        Of a dtype and of dims that the variant table has.
    out : View
        Of the output, over ``problem.batch``.
    """
    sizes = problem.q_len, problem.k_len, problem.head_dim, problem.v_dim
    if min(sizes) < 1:
        return False
    if any(dim % DIM_STEP for dim in sizes[2:]):
        return False
    views = _views(problem, out)
    axes, steps = fwd_params.collapse(problem.batch, views)
    if len(axes) > MAP_AXES or math.prod(axes) > MAX_LENGTH:
        return False
    if problem.bias is not None:  # it has no map, only a place among the axes of the slow path
        every, _ = fwd_params.collapse(problem.batch, {**views, "bias": problem.bias})
        if len(every) > MAX_BATCH_AXES:
            return False
    return maps_walk(views, steps, problem.dtype.itemsize)


def maps_walk(
    views: dict[str, View],
    steps: dict[str, list[int]],
    item: int,
    outputs: Collection[str] = ("out",),
) -> bool:
    """Whether tensor maps can walk arrays whose pointers are multiples of 16.

    Parameters
    ----------
    views : dict of View
        Of the arrays, by name.
    steps : dict of list of int
        Bytes along their batch axes, 0 where an array broadcasts.
    item : int
        Bytes of an element.
    outputs : collection of str
        Those that may not broadcast.
    """
    for name in views:
        (rows, cols), (row, col) = views[name].shape[-2:], views[name].strides[-2:]
        if (rows > 1 and not _walks(row)) or (cols > 1 and col != item):
            return False
        if not all(_walks(step) or (step == 0 and name not in outputs) for step in steps[name]):
            return False
    return True


def _walks(step: int) -> bool:
    return 0 < step < _MAX_STEP and step % 16 == 0


def _views(problem: Problem, out: View) -> dict[str, View]:
    return {"q": problem.q, "k": problem.k, "v": problem.v, "out": out}


def packed_heads(problem: Problem, out: View, tile_m: int) -> int:
    """Return how many heads share tiles of queries, row by row; 1 where none do.

    Heads that read the same keys and values are rows of one matrix to them. They are packed where
    that makes fewer tiles of `tile_m` rows: when each head alone would leave tiles unfilled. Under
    a mask they are not: its rows of blocks are tiles.
    """
    if problem.mask is not None:
        return 1
    axes, steps = fwd_params.collapse(problem.batch, _views(problem, out))
    if not axes or steps["k"][-1] or steps["v"][-1] or not steps["q"][-1]:
        return 1
    heads, rows = axes[-1], problem.q_len * axes[-1]
    if fwd_params.transforms(problem) or heads > _MAX_PACKED or heads & (heads - 1):
        return 1
    fewer = -(-rows // tile_m) < heads * -(-problem.q_len // tile_m)
    return heads if fewer and rows <= MAX_LENGTH else 1


def fill(problem: Problem, out: View, tile_m: int, tile_n: int) -> Filled:
    """Return all of a launch that does not depend on pointers.

    Parameters
    ----------
    problem : Problem
        One that `takes` accepts.
    out : View
        Of the output, over ``problem.batch``.
    tile_m, tile_n : int
        Query rows of a tile, keys of one.

    Returns
    -------
    Filled
        The parameter struct, of shape (1,), but for its maps, the head of `common` and the
        schedule; the geometry of the maps by name; the launches: one, unless there are more tiles
        than one can count.
    """
    views = _views(problem, out)
    axes, steps = fwd_params.collapse(problem.batch, views)
    heads = packed_heads(problem, out, tile_m)
    apart = {name: steps[name][-1] if heads > 1 else 0 for name in MAPPED}
    if heads > 1:  # their axis is none of the batch any more
        axes = [*axes[:-1], 1]
        steps = {name: [*steps[name][:-1], 0] for name in MAPPED}
    missing = MAP_AXES - len(axes)
    size = [1] * missing + axes
    steps = {name: [0] * missing + steps[name] for name in MAPPED}

    filled = np.zeros(1, FWD_SM90_PARAMS)
    p = filled[0]
    p["common"] = fwd_params.fill(problem, out, tile_m)[0][0]
    q_tiles = -(-problem.q_len * heads // tile_m)
    p["common"]["q_tiles"] = q_tiles
    p["size"] = size
    for name in ("q", "k", "v"):
        p[f"{name}_step"] = [step != 0 for step in steps[name]]
    p["row_shift"] = heads.bit_length() - 1

    maps = {}
    for name, view in views.items():
        rows, cols = view.shape[-2:]
        shape = [n if step else 1 for n, step in zip(size, steps[name], strict=True)]
        strides = [*steps[name], view.strides[-2]]
        box = [1, 1, 1, tile_n if name in "kv" else _BOX]
        if heads > 1 and name not in "kv":
            shape = [*shape[:-1], rows, heads]
            strides = [*strides[:2], view.strides[-2], apart[name]]
            box = [1, 1, _BOX // heads, heads]
        else:
            shape.append(rows)
        # Along an axis of one entry the stride is any number; the driver wants one that it knows.
        strides = [step if n > 1 else 16 for n, step in zip(shape, strides, strict=True)]
        item = problem.dtype.itemsize
        maps[name] = Geometry((*shape, cols), (*strides, item), (*box, _BOX))

    entries = math.prod(size)
    most = max(1, fwd_params.MAX_GRID // q_tiles)
    together = section(problem, size, steps)
    parts = []
    for first in range(0, entries, most):
        here = min(most, entries - first)
        parts.append(Part(first, here * q_tiles, here, min(together, here)))
    return Filled(filled, maps, parts)


def section(problem: Problem, size: list[int], steps: dict[str, list[int]]) -> int:
    """Return how many batch entries take turns at giving the next tile of queries.

    Without a band all tiles take as long: entry by entry, so that one entry's keys and values are
    in the L2 cache when its tiles read them. Under a band the last tiles may take longest and
    should not start last: those of some entries come first together, about as many as have their
    keys and values in the cache at once. Sections are about equal: a small one at the end would
    start long tiles late.

    Parameters
    ----------
    problem : Problem
    size : list of int
        Batch axes, in the order in which entries are numbered.
    steps : dict of list of int
        Bytes along each of them, for k and v at least; 0 where an array broadcasts.
    """
    if problem.lower is None and problem.upper is None:
        return 1
    least, most = _SECTION
    wanted = min(most, max(least, cached_entries(problem, size, steps)))
    entries = math.prod(size)
    return -(-entries // max(1, round(entries / wanted)))


def cached_entries(problem: Problem, size: list[int], steps: dict[str, list[int]]) -> int:
    """Return how many batch entries have their keys and values in the L2 cache at once.

    The parameters are those of `section`.
    """
    sharing = 1  # entries next to each other that read the same keys and values
    for n, k_step, v_step in reversed(list(zip(size, steps["k"], steps["v"], strict=True))):
        if n > 1 and (k_step or v_step):
            break
        sharing *= n
    one = problem.k_len * (problem.head_dim + problem.v_dim) * problem.dtype.itemsize
    return _L2_BYTES // max(1, one) * sharing
