"""The estimate of a kernel regression, and the precision that it takes.

Distances of points in up to `MOST_DIMS` dims are made of differences, which are as good where the
coordinates are large. In more dims they are made of products, ``|q|**2 + |k|**2 - 2 q.k`` for
coordinates around the median of the samples, and what cancels there decides the dtype.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import numpy as np

from fa_cupy._attention import attention
from fa_cupy._bitmask import BitMask
from fa_cupy._score import Score
from fa_cupy.core.attention_problem import BFLOAT16
from fa_cupy.smoothing import kernels
from fa_cupy.smoothing.regression import Regression, narrowed, widened

_SINGLE, _DOUBLE = np.dtype(np.float32), np.dtype(np.float64)
#: How far weights may be off, relatively, by the dtype of the result.
_TOLERANCE = {_SINGLE: 1e-5, _DOUBLE: 1e-5, np.dtype(np.float16): 2.0**-12, BFLOAT16: 2.0**-9}
_SAMPLES = 1000  # whose median is near that of all
_UNIT = {_SINGLE: 2.0**-24, _DOUBLE: 2.0**-53}


class Operands(NamedTuple):
    """What attention computes a regression from: queries, keys, and a score or a bias."""

    q: Any
    k: Any
    score: Score | None
    bias: Any = None


class Products(NamedTuple):
    """Coordinates in bandwidths around the median of the samples, of float64.

    Attributes
    ----------
    q : array, shape (..., m, d)
    k : array, shape (..., n, d)
    x, X : array
        The same, in the unit of the coordinates.
    """

    q: Any
    k: Any
    x: Any
    X: Any


def estimate(p: Regression) -> Any:
    """Return the estimate, of shape ``p.result_shape`` and y's dtype."""
    xp, exact = p.xp, p.x.dtype == _DOUBLE
    if p.x.shape[-1] <= kernels.MOST_DIMS:
        work = _DOUBLE if exact else p.y.dtype  # scores are of float32 for values of 16 bits
        out, lse = attend(p, _differences(p, work), work)
        out = narrowed(xp, out, p.y.dtype)
        empty = xp.isneginf(lse)
        if not exact:
            _improve(p, out, lse, empty)
    else:
        products = centred(p)
        work = _precise_enough(p, products, exact)
        plain = p.kernel == "gaussian"
        made = with_bias(p, products, work) if plain else of_products(p, products, work)
        out, lse = attend(p, made, work)
        out, empty = narrowed(xp, out, p.y.dtype), xp.isneginf(lse)
    # By their bits, which CuPy moves of bfloat16 too.
    kind = np.dtype(f"u{out.dtype.itemsize}")
    nan = np.asarray(np.nan, out.dtype).view(kind)[()]
    bits = out.view(kind)
    bits[...] = xp.where(empty[..., None], nan, bits)
    return out


def attend(p: Regression, operands: Operands, work: np.dtype[Any]) -> tuple[Any, Any]:
    """Return output and log-sum-exp of attention, with values in `work`."""
    y = p.y if p.y.dtype == work else widened(p.xp, p.y, work)
    q, k, score, bias = operands
    out, lse = attention(q, k, y, bias, p.mask, scale=1.0, score=score, return_lse=True)
    return out, lse


def empty_rows(p: Regression, work: np.dtype[Any]) -> tuple[Any, Any]:
    """Return queries and keys without elements, for scores that need none."""
    shapes = (*p.batch, p.x.shape[-2], 0), (p.X.shape[-2], 0)
    q, k = (p.xp.empty(shape, work) for shape in shapes)
    return q, k


def _differences(p: Regression, work: np.dtype[Any]) -> Operands:
    score = kernels.by_differences(p.xp, p.kernel, p.batch, p.x, p.X, p.inverse_width)
    return Operands(*empty_rows(p, work), score)


def _improve(p: Regression, out: Any, lse: Any, empty: Any) -> None:
    """Compute again in float64 what float32 does not compute well, in place.

    The rounding of a score is relative to it. All scores of a point that is many bandwidths away
    from its nearest sample are large: the log-sum-exp, within log(n) of the largest, shows that.
    """
    xp, points, samples = p.xp, p.x.shape[-2], p.X.shape[-2]
    if lse.size == 0 or samples == 0:
        return
    roundings = (5 + p.x.shape[-1]) * _UNIT[_SINGLE]
    tolerance = _TOLERANCE[p.y.dtype]
    # Not a number is where float32 overflows.
    if p.kernel == "epanechnikov":
        # The roundings are those of 1 - r**2, and the log-sum-exp has the sum of them.
        bad = ~(lse >= math.log(roundings / tolerance)) & ~empty
    else:
        bad = ~(lse >= math.log(samples) - tolerance / roundings)
    found = xp.flatnonzero(bad.reshape(-1, points).any(axis=0))
    if found.size == 0:
        return
    rows = slice(None) if isinstance(p.mask, BitMask) else found
    part = p.in_float64() if isinstance(p.mask, BitMask) else p.at_rows(rows).in_float64()
    better, sums = attend(part, _differences(part, _DOUBLE), _DOUBLE)
    better, kind = narrowed(xp, better, out.dtype), f"u{out.dtype.itemsize}"
    bad, bits = bad[..., rows], out.view(kind)
    bits[..., rows, :] = xp.where(bad[..., None], better.view(kind), bits[..., rows, :])
    empty[..., rows] = xp.where(bad, xp.isneginf(sums), empty[..., rows])


def centred(p: Regression) -> Products:
    """Return coordinates in bandwidths, around the median of the samples of each entry."""
    p = p.in_float64()
    centre = _median(p.xp, p.X)
    factor = p.inverse_width
    if not isinstance(factor, float):
        factor = factor[..., None, :]
    x, X = p.x - centre, p.X - centre
    return Products(x * factor, X * factor, x, X)


def _median(xp: Any, X: Any) -> Any:
    """Return the median of each finite coordinate over samples, some if there are many.

    Any centre gives the same distances. A few samples that are far away do not move this one.
    """
    some = X[..., :: max(1, X.shape[-2] // _SAMPLES), :]
    if not some.shape[-2]:
        return xp.zeros((*X.shape[:-2], 1, X.shape[-1]))
    finite = xp.isfinite(some)
    middle = xp.maximum(0, finite.sum(axis=-2, keepdims=True) - 1) // 2
    in_order = xp.sort(xp.where(finite, some, np.inf), axis=-2)
    centre = xp.take_along_axis(in_order, middle, axis=-2)
    return xp.where(xp.isfinite(centre), centre, 0.0)


def _precise_enough(p: Regression, products: Products, exact: bool) -> np.dtype[Any]:
    """Return float32 where products in it are good enough, else float64; warn if that is not."""
    tolerance = _TOLERANCE[p.y.dtype]
    if not exact and rounding_of_products(p, products, _SINGLE) <= tolerance:
        return _SINGLE
    warn_of_rounding(p, products, stacklevel=5)
    return _DOUBLE


def rounding_of_products(p: Regression, products: Products, dtype: np.dtype[Any]) -> float:
    """Return how far weights may be off, relatively, if products are computed in `dtype`.

    A product of d terms is off by about sqrt(d) roundings of the product of the norms [1]_.

    References
    ----------
    .. [1] N. J. Higham and T. Mary, "A new approach to probabilistic rounding error analysis", SIAM
       Journal on Scientific Computing 41, 2019.
    """
    reach = _reach(p.xp, products)
    off = (4 + 2 * math.sqrt(p.x.shape[-1])) * _UNIT[dtype] * reach**2
    # A root is taken of 0 where a point is a sample.
    return math.sqrt(off) if p.kernel == "laplace" else off


def warn_of_rounding(p: Regression, products: Products, stacklevel: int) -> None:
    """Warn where products in float64 are not good enough for the dtype of the result."""
    off, reach = rounding_of_products(p, products, _DOUBLE), _reach(p.xp, products)
    if off > _TOLERANCE[p.y.dtype]:
        warnings.warn(
            f"{p.name}: in more than {kernels.MOST_DIMS} dims, distances are made of products, and "
            f"points and samples are up to {reach:.1e} bandwidths apart: weights may be "
            f"off by {off:.1e}, relatively",
            RuntimeWarning,
            stacklevel=stacklevel,
        )


def _reach(xp: Any, products: Products) -> float:
    """Return a bound of the distances of finite points and samples, in bandwidths."""
    found = [xp.where(xp.isfinite(x).all(axis=-1), _norms(x), 0.0) for x in products[:2] if x.size]
    return sum(math.sqrt(norms.max()) for norms in found)


def of_products(p: Regression, products: Products, work: np.dtype[Any]) -> Operands:
    """Return the operands of attention for products in `work`, float32 or float64."""
    q, k, a, c = _with_norms(p, products, work)
    score = kernels.by_products(p.kernel, *(kernels.argument(p.xp, x, p.batch, 1) for x in (a, c)))
    return Operands(_over_batch(p, q), k if k.ndim == 2 else _over_batch(p, k), score)


def with_bias(p: Regression, products: Products, work: np.dtype[Any]) -> Operands:
    """Return the operands for Gaussian weights: what depends on the point alone cancels."""
    q, k, a, c = _with_norms(p, products, work)
    q = _with_rows(p.xp, q, p.xp.isinf(a), np.nan)  # a point that is far from all samples
    bias = -0.5 * c[..., None, :]
    return Operands(_over_batch(p, q), k if k.ndim == 2 else _over_batch(p, k), None, bias)


def _with_norms(p: Regression, products: Products, work: np.dtype[Any]) -> tuple[Any, ...]:
    """Return what is multiplied, of points and of samples, and the squared norms of both.

    The norms are those of the rounded numbers, so that a distance of 0 is 0. Where one is infinite,
    the products are 0: otherwise an infinite one less an infinite norm were not a number.
    """
    both = [narrowed(p.xp, x, work) for x in products[:2]]
    norms = [_norms(x) for x in both]
    q, k = (_with_rows(p.xp, x, p.xp.isinf(n), 0.0) for x, n in zip(both, norms, strict=True))
    return q, k, *norms


def _with_rows(xp: Any, x: Any, rows: Any, number: float) -> Any:
    """Return `x` with `number` in all columns of the rows that are marked; `x` if none is."""
    return xp.where(rows[..., None], x.dtype.type(number), x) if bool(rows.any()) else x


def _norms(x: Any) -> Any:
    return (x * x).sum(axis=-1)


def _over_batch(p: Regression, x: Any) -> Any:
    return p.xp.broadcast_to(x, (*p.batch, *x.shape[-2:]))
