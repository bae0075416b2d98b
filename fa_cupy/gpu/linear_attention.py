"""Causal products on CuPy arrays, and what is built on them: linear attention, states, readings."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import cupy
import numpy as np

from fa_cupy.core.linear_problem import Product, product_problem
from fa_cupy.gpu import workspace
from fa_cupy.gpu.arrays import require_whole_elements
from fa_cupy.gpu.causal_product import cached as cached
from fa_cupy.gpu.causal_product import compute, require_kernels
from fa_cupy.gpu.causal_product import product as product
from fa_cupy.gpu.causal_product_backward import backward as backward
from fa_cupy.gpu.cublas import linear_elementwise, tile_ops


def linear_attention(
    problem: Product, q: Any, k: Any, v: Any, out: Any, *, feature: str | None, eps: float
) -> Any:
    """Solve `problem`, and divide by the sums of the weights.

    Features and sums are float32 (float64), as sums of features in 16 bits would soon overflow. The
    weights are summed as one more column of values: of the values' own size, because a kernel may
    give a row of values one scale.
    """
    name = "linear_attention"
    require_whole_elements(name, q=q, k=k, v=v, out=out)
    if out is None:
        out = workspace.empty(problem.out_shape, problem.dtype, q)
    if out.size == 0:
        return out
    dtype, dim = problem.state_dtype, problem.v_dim
    require_kernels(name, dataclasses.replace(problem, dtype=dtype, v_dim=dim + 1))
    values = cupy.empty((*v.shape[:-1], dim + 1), dtype)
    tile_ops.load(values[..., :dim], v)
    unit = cupy.ones((), dtype)
    if dim and values.size:
        unit = linear_elementwise.unit(cupy.abs(values[..., :dim]).max())
    values[..., dim] = unit
    x, y = _featured(q, feature, dtype), _featured(k, feature, dtype)
    weighing = product_problem(name, x, y, values)
    sums = cupy.empty(weighing.out_shape, dtype)
    compute(weighing, x, y, values, None, sums, None, reverse=False)
    weighted = sums[..., :dim]
    linear_elementwise.normalise(sums[..., dim:], unit, eps, weighted)
    tile_ops.store(out, weighted)
    return out


def _featured(x: Any, feature: str | None, dtype: np.dtype[Any]) -> Any:
    """Return the features of `x` in `dtype`; `x` itself where that is what they are."""
    if feature is None:
        return tile_ops.widened(x, dtype)
    found = cupy.empty(x.shape, dtype)
    tile_ops.load(found, x)
    linear_elementwise.FEATURES[feature](found)
    return found


def states(problem: Product, k: Any, v: Any, initial: Any, ends: Any, *, reverse: bool) -> Any:
    """Return the states at `ends`, ascending; see `fa_cupy.cpu.linear_attention.states`."""
    from fa_cupy.gpu.cublas import linear_attention as cublas_linear_attention  # needs cuBLAS

    require_whole_elements("prefix_state", k=k, v=v, initial_state=initial)
    return cublas_linear_attention.states(problem, k, v, initial, ends, reverse=reverse)


def readings(
    problem: Product, q: Any, k: Any, v: Any, initial: Any, ends: Any, *, reverse: bool
) -> Any:
    """Return what row i of `q` reads from the state at ``ends[i]``, of shape problem.out_shape.

    Queries and keys become rows of one sequence, in which each query stands between the keys before
    its position and those after it, with a key and a value of zeros. The causal product of that
    sequence is what they read, in either direction.
    """
    name = "prefix_state"
    require_whole_elements(name, q=q, k=k, v=v, initial_state=initial)
    if math.prod(problem.out_shape) == 0:
        return workspace.empty(problem.out_shape, problem.dtype)
    workspace.refuse(name, "positions are copied from the host, which cannot be captured")
    order = np.argsort(ends, kind="stable")
    asked = np.empty(len(ends), np.int64)
    asked[order] = ends[order] + np.arange(len(ends))
    kept = np.ones(problem.k_len + len(ends), np.bool_)
    kept[asked] = False
    asks, keeps = cupy.asarray(asked), cupy.asarray(np.flatnonzero(kept))
    q, k, v = (_placed(x, at, len(kept)) for x, at in ((q, asks), (k, keeps), (v, keeps)))
    merged = product_problem(name, q, k, v, initial)
    out = cupy.empty(merged.out_shape, problem.dtype)
    compute(merged, q, k, v, initial, out, None, reverse=reverse)
    return _bits(out).take(asks, axis=-2).view(problem.dtype)


def _placed(x: Any, places: Any, length: int) -> Any:
    """Return zeros in `length` rows, of which those at `places` are the rows of `x`."""
    bits = _bits(x)
    found = cupy.zeros((*x.shape[:-2], length, x.shape[-1]), bits.dtype)
    if bits.size:
        found[..., places, :] = bits
    return found.view(x.dtype)


def _bits(x: Any) -> Any:
    """Return `x` as integers of its size: CuPy does not move bfloat16 around everywhere."""
    return x.view(np.dtype(f"u{x.dtype.itemsize}"))
