"""Gradients of kernel regression, in float64 whatever the dtypes are."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from fa_cupy._attention import attention_backward
from fa_cupy.core import broadcasting
from fa_cupy.smoothing import estimate, kernels
from fa_cupy.smoothing.estimate import Operands
from fa_cupy.smoothing.regression import Regression, widened

_DOUBLE = np.dtype(np.float64)


class Gradients(NamedTuple):
    """Gradients of float64, in the shapes of the arguments; `y` with an axis of columns."""

    x: Any
    X: Any
    y: Any
    bandwidth: Any


def gradients(p: Regression, dout: Any) -> Gradients:
    """Return the gradients of the sum of ``dout * estimate``.

    Parameters
    ----------
    p : Regression
    dout : array, shape ``p.result_shape``
    """
    p, dout = p.in_float64(), widened(p.xp, dout, _DOUBLE)
    number = isinstance(p.inverse_width, float)
    if number:
        p = p._replace(inverse_width=p.xp.full((1,), p.inverse_width, _DOUBLE))
    few = p.x.shape[-1] <= kernels.MOST_DIMS
    dx, dX, dy, dinverse = (_of_differences if few else _of_products)(p, dout)
    dwidth = -dinverse * p.inverse_width * p.inverse_width  # whose square may be infinite
    return Gradients(dx, dX, dy, dwidth.reshape(()) if number else dwidth)


def _backward(p: Regression, operands: Operands, dout: Any, *need: str) -> dict[str, Any]:
    """Return gradients of attention by name, always with that of its values, as "v"."""
    out, lse = estimate.attend(p, operands, _DOUBLE)
    y, names = widened(p.xp, p.y, _DOUBLE), ("v", *need)
    q, k, score, _ = operands
    found = attention_backward(
        dout, q, k, y, out, lse, mask=p.mask, scale=1.0, score=score, need=names
    )
    return dict(zip(names, found, strict=True))


def _of_differences(p: Regression, dout: Any) -> tuple[Any, Any, Any, Any]:
    """Return gradients of x, X, y and the inverse bandwidth."""
    xp, dims, widths = p.xp, p.x.shape[-1], p.inverse_width.shape[-1]
    score = kernels.by_single_dims(xp, p.kernel, p.batch, p.x, p.X, p.inverse_width)
    counts = {"x": dims, "X": dims, "w": widths}
    need = [f"score.{name}{k}" for name, count in counts.items() for k in range(count)]
    found = _backward(p, Operands(*estimate.empty_rows(p, _DOUBLE), score), dout, *need)
    dx, dX, dw = (
        xp.stack([found[f"score.{name}{k}"] for k in range(count)], axis=-1)
        for name, count in counts.items()
    )
    if dw.ndim == 2:  # of entries b without heads, which share one bandwidth
        dw = dw.sum(axis=0)
    dw = _summed(p, dw, (*p.inverse_width.shape[:-1], 1, widths))
    dx, dX = _summed(p, dx, p.x.shape), _summed(p, dX, p.X.shape)
    return dx, dX, found["v"], dw.reshape(p.inverse_width.shape)


def _of_products(p: Regression, dout: Any) -> tuple[Any, Any, Any, Any]:
    """Return gradients of x, X, y and the inverse bandwidth."""
    products = estimate.centred(p)
    estimate.warn_of_rounding(p, products, stacklevel=5)
    operands = estimate.of_products(p, products, _DOUBLE)
    found = _backward(p, operands, dout, "q", "k", "score.a", "score.c")
    width = p.inverse_width
    given: list[Any] = []
    dw = p.xp.zeros((*width.shape[:-1], 1, p.x.shape[-1]), _DOUBLE)
    # The median that is subtracted has no gradient: distances do not depend on it.
    for name, norm, scaled, plain, like in (
        ("q", "a", products.q, products.x, p.x),
        ("k", "c", products.k, products.X, p.X),
    ):
        of_norm = _summed(p, found[f"score.{norm}"][..., None], (*scaled.shape[:-1], 1))
        hidden = (of_norm == 0.0) & ~p.xp.isfinite(scaled)  # by a mask, and 0 times them is NaN
        scaled, plain = (p.xp.where(hidden, 0.0, array) for array in (scaled, plain))
        total = _summed(p, found[name], scaled.shape) + 2.0 * scaled * of_norm
        given.append(broadcasting.summed(total * width[..., None, :], like.shape))
        dw = dw + broadcasting.summed((total * plain).sum(axis=-2, keepdims=True), dw.shape)
    if width.shape[-1] == 1:
        dw = dw.sum(axis=-1, keepdims=True)
    dx, dX = given
    return dx, dX, found["v"], dw.reshape(width.shape)


def _summed(p: Regression, gradient: Any, shape: tuple[int, ...]) -> Any:
    """Sum a gradient over the batch axes along which an array of `shape` was repeated.

    The gradient has axes of no entries, of entries b and h, or of the batch, and two more.
    """
    tail = (shape[-2], gradient.shape[-1])
    if math.prod(gradient.shape) == math.prod(shape):
        return gradient.reshape(shape)
    return broadcasting.summed(gradient.reshape(*p.batch, *tail), shape)
