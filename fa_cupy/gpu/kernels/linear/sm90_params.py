"""The parameter struct of the causal products' kernels for SM90: tensor maps, states, jobs.

A launch computes up to three products of the same batch entries and length, its jobs. A tensor map
walks an array without a kernel's help, so these kernels take fewer layouts than those of
`fa_cupy.gpu.kernels.linear.params`; `takes` says which. Packed sequences are no axis of a map,
whose boxes begin at any row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fa_cupy.core.broadcasting import View
from fa_cupy.gpu.kernels.attention.attention_params import MAX_GRID, MAX_LENGTH, merge_axes
from fa_cupy.gpu.kernels.linear.params import Traits
from fa_cupy.gpu.kernels.tensor_maps import (
    DIM_STEP,
    MAP_AXES,
    MAP_BYTES,
    Geometry,
    maps_walk,
    padded,
)

#: The arrays that have a tensor map, in the order of the struct.
MAPPED = ("q", "k", "v", "out")
#: Products of one launch, at most.
MAX_JOBS = 3
CHUNK = 64  # rows; a box is 64 rows of 128 bytes, which are a swizzled row
_BOX_BYTES = 128
#: What dims are multiples of, by dtype. For float32, whose outputs no map stores, as many columns
#: as are 16 bytes, the step in which boxes are clipped.
DIM_STEPS = {"float16": DIM_STEP, "bfloat16": DIM_STEP, "float32": 4}
_STATES = ("initial", "state")

#: The same fields in the same order as ``struct ProductJob`` in
#: ``cuda_src/common/linear_sm90.cuh``, which checks the size when it is compiled.
PRODUCT_JOB = padded(
    [(f"{name}_map", np.uint64, (MAP_BYTES // 8,)) for name in MAPPED]
    + [(name, np.uint64) for name in (*_STATES, "workspace", "out")]
    + [(f"{name}_batch", np.int64, (MAP_AXES,)) for name in (*_STATES, "out")]
    + [(f"{name}_{axis}", np.int64) for name in _STATES for axis in ("row", "col")]
    + [("out_row", np.int64)]
    + [("size", np.int32, (MAP_AXES,))]
    + [(f"{name}_step", np.int32, (MAP_AXES,)) for name in ("q", "k", "v")]
    + [(name, np.int32) for name in ("qk_dim", "v_dim", "tiles", "reverse")],
    alignment=64,
)
_SIZES = ("jobs", "tiles", "chunks", "segments", "segment_chunks", "keep", "length")
#: ``struct ProductSm90Params`` there.
PRODUCT_SM90_PARAMS = padded(
    [("job", PRODUCT_JOB, (MAX_JOBS,))] + [(name, np.int32) for name in _SIZES], alignment=64
)
#: The same structs in builds for packed sequences.
PACKED_PRODUCT_JOB = padded(
    [(name, PRODUCT_JOB[name]) for name in PRODUCT_JOB.names or ()]
    + [(f"{name}_sequence", np.int64) for name in _STATES],
    alignment=64,
)
PACKED_PRODUCT_SM90_PARAMS = padded(
    [("job", PACKED_PRODUCT_JOB, (MAX_JOBS,))]
    + [(name, np.int32) for name in _SIZES]
    + [("spans", np.uint64), ("sequences", np.int32)],
    alignment=64,
)
#: The addresses of a job that follow its maps.
ADDRESSES = (*_STATES, "workspace", "out")


def takes(traits: Traits) -> bool:
    """Whether the kernels can compute a product, if all pointers to rows are multiples of 16.

    Traits of packed sequences are those that `without_sequences` returns; in `fill` too.
    """
    problem, sizes = traits.job.problem, traits.sizes
    dims, step = (problem.qk_dim, problem.v_dim), DIM_STEPS.get(problem.dtype.name)
    if step is None or problem.q_len != problem.k_len:
        return False
    if not 1 <= problem.k_len <= MAX_LENGTH or min(dims) < 1 or any(d % step for d in dims):
        return False
    # The grid has so many blocks, times a few for split sequences of few entries.
    blocks = math.prod(problem.batch) * -(-problem.v_dim // CHUNK) * MAX_JOBS
    if len(sizes) > MAP_AXES or not 1 <= blocks <= MAX_GRID // 2:
        return False
    mapped = {name: traits.views[name] for name in MAPPED}  # states are in any layout
    return maps_walk(mapped, traits.strides, problem.dtype.itemsize)


def without_sequences(traits: Traits) -> Traits:
    """Return traits without the axis of packed sequences, the last one of the batch."""
    views = {}
    for name, (shape, strides) in traits.views.items():
        views[name] = View((*shape[:-3], *shape[-2:]), (*strides[:-3], *strides[-2:]))
    return Traits(traits.job, views, *merge_axes(traits.job.problem.batch[:-1], views))


def fill(
    jobs: Sequence[Traits], tile_n: int, split: tuple[int, int]
) -> tuple[np.ndarray[Any, Any], list[dict[str, Geometry]], int]:
    """Return all of a launch that does not depend on pointers.

    Parameters
    ----------
    jobs : sequence of Traits
        Those that `takes` accepts, with as many batch entries and rows each; all of packed
        sequences, which are the same ones, or none.
    tile_n : int
        Value columns of a block.
    split : tuple of int
        The segments of a sequence, and the rows of each but the last.

    Returns
    -------
    params : numpy.ndarray
        Of size 1, but for its maps and pointers.
    maps : list of dict of Geometry
        Of each job, by name.
    blocks : int
        Of a launch, for each segment.
    """
    sequences = jobs[0].job.sequences
    filled = np.zeros(1, PRODUCT_SM90_PARAMS if sequences is None else PACKED_PRODUCT_SM90_PARAMS)
    params = filled[0]
    if sequences is not None:
        params["sequences"] = sequences.count
    problems = [traits.job.problem for traits in jobs]
    params["jobs"] = len(jobs)
    params["chunks"] = -(-problems[0].k_len // CHUNK)
    params["segments"] = split[0]
    params["segment_chunks"] = -(-split[1] // CHUNK)
    params["length"] = problems[0].k_len
    maps = []
    for traits, p in zip(jobs, params["job"], strict=False):
        maps.append(_fill_job(traits, p))
        p["tiles"] = -(-traits.job.problem.v_dim // tile_n)
    params["tiles"] = tiles = int(params["job"]["tiles"].max())
    params["keep"] = tiles * len(jobs) > 1
    entries = {math.prod(problem.batch) for problem in problems}
    lengths = {problem.k_len for problem in problems}
    assert len(entries) == len(lengths) == 1, "jobs of a launch have the same entries and rows"
    return filled, maps, entries.pop() * tiles * len(jobs)


def _fill_job(traits: Traits, p: Any) -> dict[str, Geometry]:
    """Fill a job of the struct but for maps, pointers and `tiles`; return how to make the maps."""
    job, views, sizes, steps = traits
    problem = job.problem
    missing = MAP_AXES - len(sizes)
    sizes = [1] * missing + sizes
    steps = {name: [0] * missing + steps[name] for name in views}
    p["size"] = sizes
    p["qk_dim"], p["v_dim"], p["reverse"] = problem.qk_dim, problem.v_dim, job.reverse
    for name in ("q", "k", "v"):
        p[f"{name}_step"] = [step != 0 for step in steps[name]]
    item = problem.state_dtype.itemsize
    for name in _STATES:
        if name in views:
            p[f"{name}_batch"] = [step // item for step in steps[name]]
            row, col = views[name].strides[-2:]
            p[f"{name}_row"], p[f"{name}_col"] = row // item, col // item
    if job.sequences is not None:
        for name, view in zip(_STATES, (problem.initial, job.state), strict=True):
            p[f"{name}_sequence"] = 0 if view is None else view.strides[-3] // item
    item = problem.dtype.itemsize
    p["out_batch"] = [step // item for step in steps["out"]]
    p["out_row"] = job.out.strides[-2] // item
    maps = {}
    for name in MAPPED:
        view = views[name]
        shape = [n if step else 1 for n, step in zip(sizes, steps[name], strict=True)]
        shape.append(view.shape[-2])
        strides = [*steps[name], view.strides[-2]]
        # Along an axis of one entry the stride is any number; the driver wants one that it knows.
        strides = [step if n > 1 else 16 for n, step in zip(shape, strides, strict=True)]
        box = (1, 1, 1, CHUNK, _BOX_BYTES // item)
        maps[name] = Geometry((*shape, view.shape[-1]), (*strides, item), box)
    return maps
