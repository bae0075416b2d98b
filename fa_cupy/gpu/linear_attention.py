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
from fa_cupy.tiled import linear_gradients

# Most products of one call of cuBLAS: what its kernels may count along an axis of their grid.
_MOST_STACKED = 65535


def linear_attention(
    problem: Product, q: Any, k: Any, v: Any, initial: Any, out: Any, *, feature: str | None,
    eps: float, is_causal: bool, return_state: bool,
) -> tuple[Any, Any]:  # fmt: skip
    """Solve `problem`, and divide by the sums of the weights."""
    return attention_by(
        Products(), problem, q, k, v, initial, out,
        feature=feature, eps=eps, is_causal=is_causal, return_state=return_state,
    )  # fmt: skip


def attention_by(
    products: Products, problem: Product, q: Any, k: Any, v: Any, initial: Any, out: Any, *,
    feature: str | None, eps: float, is_causal: bool, return_state: bool,
) -> tuple[Any, Any]:  # fmt: skip
    """Do what `linear_attention` does, by products that may be those of packed sequences.

    Features and sums are float32 (float64), as sums of features in 16 bits would soon overflow. The
    weights are summed as one more column of values: of the values' own size, because a kernel may
    give a row of values one scale.
    """
    name = "linear_attention"
    require_whole_elements(name, q=q, k=k, v=v, initial_state=initial, out=out)
    if out is None:
        out = workspace.empty(problem.out_shape, problem.dtype, q)
    if out.size == 0 and not return_state:
        return out, None
    dtype, dim = problem.state_dtype, problem.v_dim
    products.require(name, is_causal, dataclasses.replace(problem, dtype=dtype, v_dim=dim + 1))
    values, unit = _with_ones(v, dtype)
    x, y = _featured(q, feature, dtype), _featured(k, feature, dtype)
    first = None if initial is None else _rescaled(initial, unit)
    weighing = product_problem(
        name, x, y, values, first, aligned=is_causal, offsets=problem.offsets
    )
    if is_causal:
        state: Any = workspace.empty(weighing.state_shape, dtype) if return_state else None
        sums = products.product(weighing, x, y, values, first, state)
    else:
        state = products.total(weighing, y, values, first, True)
        sums = products.read(x, state, False)
    if out.size:
        weighted = sums[..., :dim]
        linear_elementwise.normalise(sums[..., dim:], unit, eps, weighted)
        tile_ops.store(out, weighted)
        products.finish((out, False))
    if not return_state:
        return out, None
    state[..., dim:] = state[..., dim:] / unit
    return out, state


def linear_attention_backward(
    problem: Product, dout: Any, q: Any, k: Any, v: Any, initial: Any, dstate: Any, *,
    feature: str | None, eps: float, is_causal: bool,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Return the gradients of linear attention by q, k, v and the initial state."""
    return gradients_by(
        Products(), problem, dout, q, k, v, initial, dstate,
        feature=feature, eps=eps, is_causal=is_causal,
    )  # fmt: skip


def gradients_by(
    products: Products, problem: Product, dout: Any, q: Any, k: Any, v: Any, initial: Any,
    dstate: Any, *, feature: str | None, eps: float, is_causal: bool,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Do what `linear_attention_backward` does; see `attention_by`."""
    name = "linear_attention_backward"
    require_whole_elements(name, dout=dout, q=q, k=k, v=v, initial_state=initial, dstate=dstate)
    dtype, dim = problem.state_dtype, problem.v_dim
    wide = dataclasses.replace(problem, dtype=dtype, v_dim=dim + 1)
    turned = dataclasses.replace(wide, qk_dim=wide.v_dim, v_dim=wide.qk_dim)
    products.require(name, is_causal, wide, turned)
    values, unit = _with_ones(v, dtype)
    x, y = _featured(q, feature, dtype), _featured(k, feature, dtype)
    first = None if initial is None else _rescaled(initial, unit)
    last = None if dstate is None else _rescaled(dstate, 1 / unit)
    given = linear_gradients.Given(x, y, values, first, eps, is_causal, unit, problem.offsets)
    grads = tile_ops.widened(dout, dtype)
    dx, dy, dvalues, dinitial = linear_gradients.gradients(products, given, grads, last)
    if feature is not None:
        linear_elementwise.GRADIENTS[feature](x, dx)
        linear_elementwise.GRADIENTS[feature](y, dy)
    dv = workspace.empty(v.shape, v.dtype, v)
    tile_ops.store(dv, dvalues[..., :dim])
    dinitial = None if initial is None else _rescaled(dinitial, unit)
    products.finish((dx, False), (dy, True), (dv, True), dinitial=dinitial)
    return tile_ops.narrowed(dx, q.dtype), tile_ops.narrowed(dy, k.dtype), dv, dinitial


def _with_ones(v: Any, dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """Return values with a further column, and the power of two that this is filled with."""
    dim = v.shape[-1]
    values = cupy.empty((*v.shape[:-1], dim + 1), dtype)
    tile_ops.load(values[..., :dim], v)
    unit = cupy.ones((), dtype)
    if dim and values.size:
        unit = linear_elementwise.unit(cupy.abs(values[..., :dim]).max())
    values[..., dim] = unit
    return values, unit


def _rescaled(state: Any, factor: Any) -> Any:
    """Return a copy of a state, whose last column is multiplied."""
    found = cupy.empty(state.shape, state.dtype)
    found[..., :-1] = state[..., :-1]
    found[..., -1:] = state[..., -1:] * factor
    return found


class Products:
    """`tiled.linear_gradients.Products` for CuPy, and more of which linear attention is made."""

    xp: Any = cupy

    def require(self, name: str, is_causal: bool, *problems: Product) -> None:
        """Raise for what cannot be captured, before anything is launched."""
        if is_causal:
            require_kernels(name, *problems)
        else:
            workspace.refuse_products(name, "is_causal=False")

    def product(
        self, problem: Product, x: Any, y: Any, values: Any, initial: Any, state: Any = None
    ) -> Any:
        """Return a product; the last state is written where it is wanted."""
        found = cupy.empty(problem.out_shape, problem.dtype)
        compute(problem, x, y, values, initial, found, state, reverse=False)
        return found

    def finish(self, *arrays: tuple[Any, bool], dinitial: Any = None) -> None:
        """Write what belongs to no product to results, each with whether it has rows of keys.

        `dinitial`, where gradients are finished, may be that of the initial state.
        """

    def backward(
        self, problem: Product, dsums: Any, x: Any, y: Any, values: Any, initial: Any, dstate: Any
    ) -> tuple[Any, Any, Any, Any]:
        """Return the gradients of a product."""
        # A call inside of the call: results of the inner one are temporaries of the outer one.
        with workspace.computing(cupy.cuda.runtime.getDevice()):
            return backward(problem, dsums, x, y, values, initial, dstate, reverse=False)

    def total(self, problem: Product, y: Any, values: Any, initial: Any, of_keys: bool) -> Any:
        """Return the state after all rows."""
        ends = np.array([problem.k_len])
        return states(problem, y, values, initial, ends, reverse=False)[..., 0, :, :]

    def read(self, rows: Any, state: Any, of_keys: bool) -> Any:
        """Return ``rows @ state``."""
        if state.ndim > 2 and rows.ndim > 2 and 1 < state.shape[-3] < rows.shape[-3]:
            state = cupy.repeat(state, rows.shape[-3] // state.shape[-3], axis=-3)
        batch = np.broadcast_shapes(rows.shape[:-2], state.shape[:-2])
        n = math.prod(batch)
        a, b = (
            cupy.broadcast_to(x, (*batch, *x.shape[-2:])).reshape(n, *x.shape[-2:])
            for x in (rows, state)
        )
        found = cupy.zeros((n, a.shape[1], b.shape[2]), rows.dtype)
        steps = tile_ops.Steps(rows.dtype, tf32=False)
        if found.size and a.shape[2]:
            for begin in range(0, n, _MOST_STACKED):
                some = slice(begin, begin + _MOST_STACKED)
                steps.matmul(steps.operand("a", a[some]), steps.operand("b", b[some]), found[some])
        return found.reshape(*batch, *found.shape[1:])


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
    """Return `length` rows: those of `x` at `places`, and zeros elsewhere."""
    bits = _bits(x)
    found = cupy.zeros((*x.shape[:-2], length, x.shape[-1]), bits.dtype)
    if bits.size:
        found[..., places, :] = bits
    return found.view(x.dtype)


def _bits(x: Any) -> Any:
    """Return `x` as integers of its size: CuPy does not move bfloat16 around everywhere."""
    return x.view(np.dtype(f"u{x.dtype.itemsize}"))
