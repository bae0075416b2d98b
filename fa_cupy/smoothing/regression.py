"""Argument checks of kernel regression, and the problem that they leave."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np

from fa_cupy._bitmask import BitMask, bits_of_sparse
from fa_cupy.core import arrays as core_arrays
from fa_cupy.core import attention_problem, backends, broadcasting, checks, dispatch
from fa_cupy.smoothing.kernels import KERNELS

#: The smallest bandwidth: the inverse of a smaller one is infinite.
_LEAST_BANDWIDTH = 5.6e-309
#: Other bandwidths take float64: differences as large, or the inverse, may not fit in float32.
_SINGLE_BANDWIDTHS = 1e-35, 1e35


class Regression(NamedTuple):
    """A regression as a call has it, with coordinates in the dtype that distances are computed in.

    Attributes
    ----------
    name : str
        The public function that errors speak of.
    xp : module
        Namespace of the arrays.
    x : array, shape (..., m, d)
    X : array, shape (..., n, d)
        Of float32 or float64.
    y : array, shape (..., n, c)
        Of the dtype of the result.
    inverse_width : float, or array of float64 of shape (..., 1) or (..., d)
        1 / bandwidth.
    mask : array of bool, BitMask or None
    kernel : str
        One of `KERNELS`.
    batch : tuple of int
        All axes of the result before the last two.
    """

    name: str
    xp: Any
    x: Any
    X: Any
    y: Any
    inverse_width: Any
    mask: Any
    kernel: str
    batch: tuple[int, ...]

    @property
    def result_shape(self) -> tuple[int, ...]:
        """Of the estimate, with an axis of columns."""
        return (*self.batch, self.x.shape[-2], self.y.shape[-1])

    def at_rows(self, rows: Any) -> Regression:
        """Return the regression at some of the points, given by their numbers; of no BitMask."""
        mask = self.mask
        if mask is not None and mask.ndim > 1 and mask.shape[-2] > 1:
            mask = mask[..., rows, :]
        return self._replace(x=self.x[..., rows, :], mask=mask)

    def in_float64(self) -> Regression:
        """Return the regression with coordinates in float64."""
        double = np.dtype(np.float64)
        x, X = (widened(self.xp, array, double) for array in (self.x, self.X))
        return self._replace(x=x, X=X)


class Arguments(NamedTuple):
    """The arguments of a call as native arrays, by name; the mask may be a BitMask or None."""

    x: Any
    X: Any
    y: Any
    bandwidth: Any  # an array or a float
    mask: Any


def to_native(
    name: str, x: Any, X: Any, y: Any, bandwidth: Any, mask: Any, **more: Any
) -> tuple[core_arrays.Native, Arguments, list[Any]]:
    """Return arguments as native arrays, and more arrays apart from them."""
    dispatch.require(name, x=x, X=X, y=y, **more)
    widths = bandwidth if getattr(bandwidth, "shape", ()) else None
    mask = bits_of_sparse(name, "mask", mask)
    bits = mask if isinstance(mask, BitMask) else None
    native = core_arrays.to_native(
        name,
        writes=None,
        x=x,
        X=X,
        y=y,
        bandwidth=widths,
        mask=mask if bits is None else None,
        **more,
    )
    if widths is None:
        width = checks.finite(name, "bandwidth", bandwidth, recorded=True)
        if width < _LEAST_BANDWIDTH:
            raise ValueError(
                f"{name}: bandwidth is {checks.show(bandwidth)}, want a number > 0 (at least "
                f"{_LEAST_BANDWIDTH})"
            )
    x, X, y, widths, mask, *others = native.arrays
    if widths is None:
        widths = width
    return native, Arguments(x, X, y, widths, mask if bits is None else bits), others


def regression(name: str, backend: str, given: Arguments, kernel: str) -> Regression:
    """Check the arguments of a call against each other.

    Parameters
    ----------
    name : str
        The public function that errors speak of.
    backend : str
        "numpy" or "cupy".
    given : Arguments
    kernel : str

    Raises
    ------
    TypeError, ValueError
        With a message that names the argument, what it got and what is wanted.
    """
    batch = checked_batch(name, given, kernel)
    y = given.y[:, None] if given.y.ndim == 1 else given.y
    xp = sys.modules[backend]
    double = np.dtype(np.float64)
    width = given.bandwidth
    if not isinstance(width, float):
        width = widened(xp, width, double)
        if not _all(xp.isfinite(width) & (width >= _LEAST_BANDWIDTH)):
            raise ValueError(
                f"{name}: bandwidth has elements that are not finite, not above 0 or too small to "
                f"divide by, want finite numbers > 0 (at least {_LEAST_BANDWIDTH})"
            )
    least, most = _SINGLE_BANDWIDTHS
    exact = any(array.dtype == double for array in given[:3])
    single = not exact and _all((width >= least) & (width <= most))
    real = np.dtype(np.float32) if single else double
    x, X = (widened(xp, array, real) for array in given[:2])
    return Regression(name, xp, x, X, y, 1.0 / width, given.mask, kernel, batch)


def _all(found: Any) -> bool:
    return found if isinstance(found, bool) else bool(found.all())


def checked_batch(name: str, given: Arguments, kernel: str) -> tuple[int, ...]:
    """Check what can be checked without data, and return the axes before the last two."""
    if not isinstance(kernel, str) or kernel not in KERNELS:
        wanted = ", ".join(map(repr, KERNELS))
        raise ValueError(f"{name}: kernel is {checks.show(kernel)}, want one of {wanted}")
    for arg, array in zip(("x", "X", "y"), given, strict=False):
        attention_problem.float_dtype(name, arg, array)
    _check_axes(name, given)
    return _batch(name, given, given.y[:, None] if given.y.ndim == 1 else given.y)


def _check_axes(name: str, given: Arguments) -> None:
    x, X, y, width, mask = given
    for arg, array in (("x", x), ("X", X)):
        if array.ndim < 2:
            raise ValueError(
                f"{name}: {arg} has shape {array.shape}, want at least 2 axes (..., points, dims), "
                f"as {arg}[:, None] of points on a line"
            )
    if y.ndim < 1:
        raise ValueError(f"{name}: y has shape (), want (n,) or (..., n, columns)")
    if x.shape[-1] != X.shape[-1] or x.shape[-1] == 0:
        raise ValueError(
            f"{name}: x has {x.shape[-1]} dims, X has {X.shape[-1]}, "
            "want the same number, at least 1"
        )
    rows = y.shape[0] if y.ndim == 1 else y.shape[-2]
    if rows != X.shape[-2]:
        hint = "" if y.ndim == 1 else " (only with one axis is y of shape (n,))"
        raise ValueError(f"{name}: y has length {rows}, X has {X.shape[-2]} samples{hint}")
    if not isinstance(width, float):
        attention_problem.float_dtype(name, "bandwidth", width)
        if width.shape[-1] not in (1, x.shape[-1]):
            raise ValueError(
                f"{name}: bandwidth has shape {width.shape}, want a last axis of size 1 or "
                f"{x.shape[-1]}, the dims of x"
            )
    if mask is not None and not isinstance(mask, BitMask) and mask.dtype != np.bool_:
        raise TypeError(f"{name}: mask has dtype {mask.dtype}, want bool (cast it: mask != 0)")


def _batch(name: str, given: Arguments, y: Any) -> tuple[int, ...]:
    """Return the axes before the last two of all arrays, broadcast."""
    x, X, _, width, mask = given
    named = [("x", x), ("X", X), ("y", y)]
    if not isinstance(width, float):
        named.append(("bandwidth", width[..., None, :]))
    if mask is not None:
        named.append(("mask", mask))
    batch = broadcasting.broadcast_batch(name, (), named)
    pairs = (x.shape[-2], X.shape[-2])
    if isinstance(mask, BitMask) and tuple(mask.shape[-2:]) != pairs:
        raise ValueError(f"{name}: mask has shape {mask.shape}, want the lengths {pairs}")
    if mask is not None:
        broadcasting.check_score_axes(name, "mask", tuple(mask.shape), (*batch, *pairs))
    return batch


def widened(xp: Any, array: Any, dtype: np.dtype[Any]) -> Any:
    """Return `array` in `dtype`, float32 or float64: itself, or a copy."""
    if xp is np:
        return array.astype(dtype, copy=False)
    return backends.gpu("cublas.tile_ops").widened(array, dtype)


def narrowed(xp: Any, array: Any, dtype: np.dtype[Any]) -> Any:
    """Return `array`, of float32 or float64, in `dtype`: itself, or a copy."""
    if xp is np:
        with np.errstate(all="ignore"):
            return array.astype(dtype, copy=False)
    return backends.gpu("cublas.tile_ops").narrowed(array, dtype)
