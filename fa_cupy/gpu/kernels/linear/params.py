"""The parameter struct of the causal products' kernels, and how a problem fills it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from fa_cupy.core.attention_problem import View
from fa_cupy.core.linear_problem import Product
from fa_cupy.gpu.kernels.attention.attention_params import MAX_BATCH_AXES, Part, merge_axes, parts

#: The arrays a launch points to, in the order of the struct.
POINTERS = ("q", "k", "v", "out", "initial", "state", "workspace")
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
#: How a call writes its pointers, `first_batch` and `aligned` at the head of the struct.
HEAD_FORMAT = "=7Qqi"
#: Does it: buffer, place of the struct in it, seven pointers, first batch entry, aligned.
pack_head: Callable[..., None] = struct.Struct(HEAD_FORMAT).pack_into


def fill(
    problem: Product,
    out: View,
    state: View | None,
    reverse: bool,
    split: tuple[int, int],
    blocks: int,
) -> tuple[np.ndarray[Any, Any], list[Part], tuple[int, ...], bool]:
    """Return the parameter struct of a problem, all but its head and `tiles`.

    Parameters
    ----------
    problem : Product
        With row strides that fit 32 bits.
    out, state : View
        Of the output, and of the last state where it is wanted, over ``problem.batch``.
    reverse : bool
    split : tuple of int
        The segments of a sequence, and the rows of each but the last.
    blocks : int
        The most blocks that a batch entry takes.

    Returns
    -------
    params : numpy.ndarray
        Of size 1.
    parts : list of Part
        The launches, with so many blocks for a batch entry.
    shifts : tuple of int
        Bytes from each of `POINTERS` to its first row in the order of the product.
    aligned : bool
        Whether every row of q, k, v and out starts at a multiple of 16 bytes if the arrays do.
    """
    assert problem.q is not None
    views = {"q": problem.q, "k": problem.k, "v": problem.v, "out": out}
    item = dict.fromkeys(views, problem.dtype.itemsize)
    for name, view in (("initial", problem.initial), ("state", state)):
        if view is not None:
            views[name], item[name] = view, problem.state_dtype.itemsize
    sizes, strides = merge_axes(problem.batch, views)
    outer = max(0, len(sizes) - MAX_BATCH_AXES)
    axes = len(sizes) - outer

    params = np.zeros(1, PRODUCT_PARAMS)
    p = params[0]
    shifts = dict.fromkeys(POINTERS, 0)
    for name, view in views.items():
        row, col = view.strides[-2:]
        if name in _ROWS and problem.k_len < 2:
            row = 0  # of no row or one, any number
        if name in _STATES:
            p[f"{name}_row"], p[f"{name}_col"] = row // item[name], col // item[name]
        else:
            p[f"{name}_row"] = (-row if reverse else row) // item[name]
            shifts[name] = row * (problem.k_len - 1) if reverse else 0
        p[f"{name}_batch"][:axes] = [s // item[name] for s in strides[name][outer:]]
    p["batch_size"] = 1
    p["batch_size"][:axes] = sizes[outer:]
    p["batch_axes"] = axes
    p["length"], p["qk_dim"], p["v_dim"] = problem.k_len, problem.qk_dim, problem.v_dim
    p["segments"], p["segment_rows"] = split
    steps = [step for name in _ROWS for step in (*strides[name], views[name].strides[-2])]
    launches = list(parts(POINTERS, sizes, outer, strides, blocks))
    return params, launches, tuple(shifts.values()), all(step % 16 == 0 for step in steps)
