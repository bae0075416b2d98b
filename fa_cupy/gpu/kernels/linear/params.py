"""One causal product as kernels take it, and the parameter struct of those that take one each."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from fa_cupy.core.broadcasting import View
from fa_cupy.core.linear_problem import Product
from fa_cupy.gpu.kernels.attention.attention_params import MAX_BATCH_AXES, Part, merge_axes, parts

#: The arrays of a product, in the order of the struct, and the memory of its states.
POINTERS = ("q", "k", "v", "out", "initial", "state", "workspace")
#: Rows of packed sequences that kernels can count.
MOST_PACKED_ROWS = 2**31 - 2**16
_ROWS = ("q", "k", "v", "out")
_STATES = ("initial", "state")

#: The same fields in the same order as ``struct ProductParams`` in
#: ``cuda_src/common/linear_params.cuh``, which checks the size when it is compiled.
PRODUCT_PARAMS = np.dtype(
    [(name, np.uint64) for name in POINTERS]
    + [("first_batch", np.int64), ("aligned", np.int32), ("batch_axes", np.int32)]
    + [(f"{name}_batch", np.int64, (MAX_BATCH_AXES,)) for name in _ROWS + _STATES]
    + [("batch_size", np.int64, (MAX_BATCH_AXES,))]
    + [(f"{name}_{axis}", np.int64) for name in _STATES for axis in ("row", "col")]
    + [("length", np.int64)]
    + [(f"{name}_row", np.int32) for name in _ROWS]
    + [(name, np.int32) for name in ("qk_dim", "v_dim", "tiles", "segments", "segment_rows")],
    align=True,
)
#: The same struct in builds for packed sequences.
PACKED_PRODUCT_PARAMS = np.dtype(
    [(name, PRODUCT_PARAMS[name]) for name in PRODUCT_PARAMS.names or ()]
    + [("spans", np.uint64)]
    + [(name, np.int32) for name in ("sequences", "reverse", "zero_invalid")],
    align=True,
)


class Sequences(NamedTuple):
    """The packed sequences of a job, which are the last batch axis of its problem.

    Attributes
    ----------
    count : int
    spans : str
        What a plan calls the array of their rows, which `sequence_spans` writes.
    zero_invalid : bool
        Whether rows of sequences whose offsets are out of range become 0; else NaN.
    """

    count: int  # type: ignore[assignment]  # a tuple has a method of that name
    spans: str
    zero_invalid: bool


class Job(NamedTuple):
    """One causal product, of sizes other than 0.

    Attributes
    ----------
    problem : Product
        With row strides that fit 32 bits.
    out : View
        Of the output, over ``problem.batch``.
    state : View or None
        Of the last state, where it is wanted.
    reverse : bool
    sequences : Sequences, optional
        Where its rows are those of packed sequences.
    """

    problem: Product
    out: View
    state: View | None
    reverse: bool
    sequences: Sequences | None = None


def packed_job(
    problem: Product, out: View, state: View | None, reverse: bool, spans: str, zero_invalid: bool
) -> Job:
    """Return a product of packed sequences, which become a batch axis.

    Parameters
    ----------
    problem : Product
        With offsets.
    out : View
        Of the output, over ``problem.batch``.
    state : View or None
        Of the last states, with the axis of sequences.
    reverse : bool
    spans : str
    zero_invalid : bool
        See `Sequences`.
    """
    assert problem.offsets is not None
    count = problem.offsets.sequences

    def of_rows(view: View) -> View:
        (*batch, rows, cols), (*steps, row, col) = view
        return View((*batch, count, rows, cols), (*steps, 0, row, col))

    assert problem.q is not None
    own = dataclasses.replace(
        problem, batch=(*problem.batch, count), shared=(*problem.shared, False),
        q=of_rows(problem.q), k=of_rows(problem.k), v=of_rows(problem.v), offsets=None,
    )  # fmt: skip
    return Job(own, of_rows(out), state, reverse, Sequences(count, spans, zero_invalid))


class Traits(NamedTuple):
    """What follows from a job for all kernels.

    Attributes
    ----------
    job : Job
    views : dict of View
        The arrays there are, by name; those whose rows are walked first.
    sizes : list of int
        The batch axes, merged where every array walks them as one.
    strides : dict of list of int
        Bytes along these axes, for each array.
    """

    job: Job
    views: dict[str, View]
    sizes: list[int]
    strides: dict[str, list[int]]


def traits_of(job: Job) -> Traits:
    """Derive the traits of a job."""
    problem = job.problem
    assert problem.q is not None
    views = {"q": problem.q, "k": problem.k, "v": problem.v, "out": job.out}
    states = {"initial": problem.initial, "state": job.state}
    views |= {name: view for name, view in states.items() if view is not None}
    return Traits(job, views, *merge_axes(problem.batch, views))


class Filled(NamedTuple):
    """A product as kernels take it that compute one a launch; see `fill`.

    Attributes
    ----------
    params : numpy.ndarray
        Of size 1; addresses, `first_batch`, `aligned` and `tiles` are missing.
    parts : list of Part
        The launches, with so many blocks for a batch entry.
    shifts : dict of int
        Bytes from the address of an array to its first row in the order of the product.
    aligned : bool
        Whether every row of q, k, v and out starts at a multiple of 16 bytes if the arrays do.
    """

    params: np.ndarray[Any, Any]
    parts: list[Part]
    shifts: dict[str, int]
    aligned: bool


def fill(traits: Traits, split: tuple[int, int], blocks: int) -> Filled:
    """Return the parameter struct of a product, and the launches that it takes.

    Parameters
    ----------
    traits : Traits
    split : tuple of int
        The segments of a sequence, and the rows of each but the last.
    blocks : int
        The most blocks that a batch entry takes.
    """
    (problem, _, _, reverse, sequences), views, sizes, strides = traits
    outer = max(0, len(sizes) - MAX_BATCH_AXES)
    axes = len(sizes) - outer

    params = np.zeros(1, PRODUCT_PARAMS if sequences is None else PACKED_PRODUCT_PARAMS)
    p = params[0]
    if sequences is not None:
        p["sequences"], p["zero_invalid"] = sequences.count, sequences.zero_invalid
        p["reverse"] = reverse
    shifts = {}
    for name, view in views.items():
        row, col = view.strides[-2:]
        if name in _ROWS and problem.k_len < 2:
            row = 0  # of no row or one, any number
        if name in _STATES:
            item = problem.state_dtype.itemsize
            p[f"{name}_row"], p[f"{name}_col"] = row // item, col // item
        else:
            item = problem.dtype.itemsize
            p[f"{name}_row"] = (-row if reverse else row) // item
            shifts[name] = row * (problem.k_len - 1) if reverse else 0
        p[f"{name}_batch"][:axes] = [step // item for step in strides[name][outer:]]
    p["batch_size"] = 1
    p["batch_size"][:axes] = sizes[outer:]
    p["batch_axes"] = axes
    p["length"], p["qk_dim"], p["v_dim"] = problem.k_len, problem.qk_dim, problem.v_dim
    p["segments"], p["segment_rows"] = split
    steps = [step for name in _ROWS for step in (*strides[name], views[name].strides[-2])]
    launches = list(parts(POINTERS, sizes, outer, strides, blocks))
    return Filled(params, launches, shifts, all(step % 16 == 0 for step in steps))
