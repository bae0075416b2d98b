"""Kernels as expressions: scores are the logarithms of the weights of a regression."""

from __future__ import annotations

from typing import Any, NamedTuple

from fa_cupy._score import Score
from fa_cupy.score.program import flat_batch

#: The logarithm of a kernel, of the squared distance {r2} in bandwidths. The root is taken of no
#: less than 1e-30, so that its derivative is finite where a point is a sample. A distance of NaN
#: fails all comparisons, and its score is NaN.
KERNELS = {
    "gaussian": "-0.5*({r2})",
    "laplace": "-sqrt(max({r2},1e-30))",
    "matern32": "-inf if {r2}==inf else log(1+sqrt(max(3*({r2}),1e-30)))-sqrt(max(3*({r2}),1e-30))",
    "epanechnikov": "-inf if {r2}>=1 else log(1-({r2}))",
}
#: Coordinates of as many dims are subtracted for each pair.
MOST_DIMS = 8


class Argument(NamedTuple):
    """An array of a score: over all entries, or with two axes for the batch entry and the head.

    Attributes
    ----------
    array : array
    axes : int
        Those that come after the axes of entries.
    """

    array: Any
    axes: int

    def at(self, name: str, *index: str | int) -> str:
        """Return an element of it as text, by its indices after those of the entry."""
        entry = ("b", "h") if self.array.ndim > self.axes else ()
        return f"{name}[{','.join(map(str, (*entry, *index)))}]"


def argument(xp: Any, array: Any, batch: tuple[int, ...], axes: int) -> Argument:
    """Return an array as an argument of a score over `batch`; its last axes stay as they are."""
    split = array.ndim - axes
    lead, tail = array.shape[:split], array.shape[split:]
    if all(size == 1 for size in lead):
        return Argument(array.reshape(tail), axes)
    whole = xp.broadcast_to(array, (*batch, *tail))
    return Argument(whole.reshape(*flat_batch(batch), *tail), axes)


def by_differences(
    xp: Any, kernel: str, batch: tuple[int, ...], x: Any, X: Any, inverse_width: Any
) -> Score:
    """Return the score of points and samples, by the differences of their coordinates.

    Parameters
    ----------
    xp : module
    kernel : str
    batch : tuple of int
        Of the attention that the score is for.
    x : array, shape (..., m, d)
    X : array, shape (..., n, d)
    inverse_width : float, or array of shape (..., 1) or (..., d)
    """
    at_x, at_X = argument(xp, x, batch, 2), argument(xp, X, batch, 2)
    arguments: dict[str, Any] = {"x": at_x.array, "X": at_X.array}
    factors = ["w"] * x.shape[-1]
    if isinstance(inverse_width, float):
        arguments["w"] = inverse_width
    else:
        at_w = argument(xp, inverse_width, batch, 1)
        arguments["w"] = at_w.array
        most = inverse_width.shape[-1] - 1
        factors = [at_w.at("w", min(k, most)) for k in range(x.shape[-1])]
    # In bandwidths before they are squared: squares of tiny or huge units are 0 or infinite.
    r2 = "+".join(
        f"(({at_x.at('x', 'i', k)}-{at_X.at('X', 'j', k)})*{factor})**2"
        for k, factor in enumerate(factors)
    )
    return Score(KERNELS[kernel].format(r2=r2), **arguments)


def by_single_dims(
    xp: Any, kernel: str, batch: tuple[int, ...], x: Any, X: Any, inverse_width: Any
) -> Score:
    """Return the score of `by_differences` of one array a dim, so that each has a gradient.

    The arrays are x0, x1, ... and X0, X1, ..., and w0, w1, ... of the inverse bandwidth, which has
    axes of all entries or one of entries `b`.
    """
    arguments: dict[str, Any] = {}
    widths = inverse_width.shape[-1]
    for k in range(widths):
        at_w = argument(xp, inverse_width[..., k], batch, 0)
        # Without an axis of its own an array would have no index, and no gradient.
        count = flat_batch(batch)[0]
        w = at_w.array if at_w.array.ndim else xp.broadcast_to(at_w.array, (count,))
        arguments[f"w{k}"] = xp.ascontiguousarray(w)
    entry = "b,h" if arguments["w0"].ndim == 2 else "b"
    terms = []
    for k in range(x.shape[-1]):
        at_x, at_X = argument(xp, x[..., k], batch, 1), argument(xp, X[..., k], batch, 1)
        arguments |= {f"x{k}": at_x.array, f"X{k}": at_X.array}
        difference = f"{at_x.at(f'x{k}', 'i')}-{at_X.at(f'X{k}', 'j')}"
        terms.append(f"(({difference})*w{min(k, widths - 1)}[{entry}])**2")
    return Score(KERNELS[kernel].format(r2="+".join(terms)), **arguments)


def by_products(kernel: str, a: Argument, c: Argument) -> Score:
    """Return the score where `s` is the product of a point and a sample, in bandwidths.

    Parameters
    ----------
    kernel : str
    a, c : Argument
        The squared norms of the points and of the samples.
    """
    r2 = f"max({a.at('a', 'i')}+{c.at('c', 'j')}-2*s,0)"
    return Score(KERNELS[kernel].format(r2=r2), a=a.array, c=c.array)
