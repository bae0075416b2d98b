"""Kernel regression, its gradients, and non-local means."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from fa_cupy.core import arrays as core_arrays
from fa_cupy.core import attention_problem, backends, checks, dispatch
from fa_cupy.core.arrays import Native
from fa_cupy.smoothing import estimate, gradients, patch_gradients, patches
from fa_cupy.smoothing import regression as problems


def kernel_regression(
    x: Any,
    X: Any,
    y: Any,
    bandwidth: Any,
    kernel: str = "gaussian",
    *,
    mask: Any = None,
) -> Any:
    """Nadaraya-Watson estimate of a function from samples of it.

    The value at a point is the mean of all samples, weighted by a kernel of their distances [1]_:
    ``sum(K(r[j]) * y[j]) / sum(K(r[j]))``, where ``r[j] = norm((x - X[j]) / bandwidth)``. It is
    computed by `attention`, without an array of size m x n.

    Parameters
    ----------
    x : array, shape (..., m, d)
        Points to estimate at: an array of NumPy, CuPy or any library that supports DLPack, of dtype
        float16, bfloat16, float32 or float64. Points on a line are ``x[:, None]``.
    X : array, shape (..., n, d)
        Where the samples are; of the same library and device. The dtypes of `x`, `X`, `y` and
        `bandwidth` may differ.
    y : array, shape (n,) or (..., n, c)
        The samples: c numbers each, or one each where `y` has one axis. As for
        `numpy.linalg.solve`, an array with two axes or more is always (..., n, c): pass
        ``y[..., None]`` for one number each in a batch.
    bandwidth : number > 0, or array of floats of shape (..., d) or (..., 1)
        The unit of distances: finite numbers of at least 5.6e-309. The last axis of an array is
        that of the dims, so that each dim may have its own; the axes before it are batch axes.
    kernel : {"gaussian", "laplace", "matern32", "epanechnikov"}
        The weight of a sample at distance r, in bandwidths: ``exp(-r**2 / 2)``, ``exp(-r)``,
        ``(1 + sqrt(3) * r) * exp(-sqrt(3) * r)`` or ``max(0, 1 - r**2)``.
    mask : array of bool, broadcastable to (..., m, n), BitMask or sparse matrix, optional
        True where a sample counts at a point. ``~np.eye(n, dtype=bool)`` leaves each sample out of
        the estimate at its own place.

    Returns
    -------
    array, shape (..., m) for `y` of one axis, else (..., m, c)
        Of y's library and dtype. Axes before those shown broadcast over all arguments, as in
        `numpy.matmul`. Where no sample has a weight (all masked, out of the reach of
        "epanechnikov", beyond 1e150 bandwidths, or ``n == 0``), the estimate is 0 / 0, and the
        result NaN. A sample that is infinitely far away has no weight, and its values do not count;
        nor do those of a sample whose distance overflows in float32, where that is the dtype.
        The result is NaN at points with coordinates that are infinite or NaN, and at all points
        where a sample with a coordinate NaN is not masked.

    Raises
    ------
    TypeError, ValueError
        With a message that names the argument, its value and the value that is wanted, before
        anything is computed.
    NotImplementedError
        While a stream is captured into a CUDA graph.

    Warns
    -----
    RuntimeWarning
        In more than 8 dims, where distances cannot be computed well enough (see Notes).

    See Also
    --------
    kernel_regression_backward : gradients.
    attention : with a `Score` of your own, any other kernel.

    Notes
    -----
    Distances in up to 8 dims come from differences of coordinates, in float32, or in float64 if
    `x`, `X` or `y` is of float64 or a bandwidth is below 1e-35 or above 1e35. A large offset that
    all coordinates share costs no accuracy. Points many bandwidths away from all samples have
    weights that float32 does not resolve: the log-sum-exp shows which points these are, and they
    are computed again in float64. Weights have a relative error below 1e-5 (for results in 16 bits,
    that of 16 bits). On a GPU, float32 coordinates that are subnormal (below 1.2e-38) count as 0.

    Distances in more dims come from products of coordinates around the median of `X`: in float32
    where a bound of the rounding allows it, otherwise in float64, with a warning where that is not
    accurate enough either.

    Values of 16 bits are averaged in float32 as by `attention`, and on a GPU with weights of 16
    bits. On a GPU the call waits for the device, because the host reads these bounds.

    References
    ----------
    .. [1] E. A. Nadaraya, "On estimating regression", Theory of Probability and Its Applications 9,
       1964; G. S. Watson, "Smooth regression analysis", Sankhya A 26, 1964.

    Examples
    --------
    >>> import numpy as np
    >>> from fa_cupy import kernel_regression
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(0, 6, (500, 1))
    >>> y = np.sin(X[:, 0]) + 0.1 * rng.standard_normal(500)
    >>> x = np.linspace(1, 5, 9)[:, None]
    >>> estimate = kernel_regression(x, X, y, 0.2)
    >>> estimate.shape
    (9,)
    >>> bool(abs(estimate - np.sin(x[:, 0])).max() < 0.1)
    True

    Each dim may have its own bandwidth, and `y` several columns:

    >>> X, y = rng.uniform(0, 6, (500, 2)), rng.standard_normal((500, 3))
    >>> kernel_regression(X[:4], X, y, np.array([0.2, 0.5]), "matern32").shape
    (4, 3)
    """
    name = "kernel_regression"
    native, given, _ = problems.to_native(name, x, X, y, bandwidth, mask)
    _refuse_capture(name, native)
    with native.context, np.errstate(all="ignore"):
        problem = problems.regression(name, native.backend, given, kernel)
        found = estimate.estimate(problem)
        return native.give_back(found[..., 0] if given.y.ndim == 1 else found)


def kernel_regression_backward(
    dout: Any,
    x: Any,
    X: Any,
    y: Any,
    bandwidth: Any,
    kernel: str = "gaussian",
    *,
    mask: Any = None,
) -> tuple[Any, Any, Any, Any]:
    """Gradients of `kernel_regression` with respect to its arrays and its bandwidth.

    Parameters
    ----------
    dout : array, shape (..., m) or (..., m, c)
        Gradient of the estimate, with its shape and dtype.
    x : array, shape (..., m, d)
    X : array, shape (..., n, d)
    y : array, shape (n,) or (..., n, c)
    bandwidth : number > 0, or array of shape (..., d) or (..., 1)
    kernel : {"gaussian", "laplace", "matern32", "epanechnikov"}
    mask : array of bool, broadcastable to (..., m, n), BitMask or sparse matrix, optional
        The arguments of `kernel_regression`.

    Returns
    -------
    dx, dX, dy, dbandwidth : array
        Each with the shape and the dtype of its argument, summed over the axes along which it was
        broadcast; for a bandwidth that is a number, an array of float64 of shape ().

    Raises
    ------
    TypeError, ValueError
        With a message that names the argument, its value and the value that is wanted, before
        anything is computed.
    NotImplementedError
        While a stream is captured into a CUDA graph.

    Warns
    -----
    RuntimeWarning
        As for `kernel_regression`.

    See Also
    --------
    kernel_regression : the estimate.

    Notes
    -----
    Everything is computed in float64, for all dtypes, by `attention` and `attention_backward`, and
    is bitwise repeatable. The kernel "laplace" has a kink where a point is a sample: that pair
    contributes 0 to the gradients of their coordinates. A point without samples (where the
    estimate is NaN) contributes nothing.

    Examples
    --------
    The bandwidth that predicts each sample best from the others, by a descent along the logarithm
    of the bandwidth:

    >>> import numpy as np
    >>> from fa_cupy import kernel_regression, kernel_regression_backward
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(0, 6, (300, 1))
    >>> y = np.sin(X[:, 0]) + 0.1 * rng.standard_normal(300)
    >>> others = ~np.eye(300, dtype=bool)
    >>> h = 2.0
    >>> for _ in range(60):
    ...     error = kernel_regression(X, X, y, h, mask=others) - y
    ...     *_, slope = kernel_regression_backward(2 * error / 300, X, X, y, h, mask=others)
    ...     h *= np.exp(-np.clip(5 * h * slope, -0.1, 0.1))
    >>> bool(0.05 < h < 0.3)
    True
    """
    name = "kernel_regression_backward"
    native, given, (dout,) = problems.to_native(name, x, X, y, bandwidth, mask, dout=dout)
    _refuse_capture(name, native)
    with native.context, np.errstate(all="ignore"):
        problem = problems.regression(name, native.backend, given, kernel)
        shape, columns = problem.result_shape, given.y.ndim > 1
        checks.check_gradient(name, "dout", dout, shape if columns else shape[:-1], given.y.dtype)
        found = gradients.gradients(problem, dout.reshape(shape))
        results = found.x, found.X, found.y.reshape(given.y.shape), found.bandwidth
        dtypes = [array.dtype for array in given[:3]]
        dtypes.append(getattr(given.bandwidth, "dtype", np.dtype(np.float64)))
        x_X_y_bandwidth = (
            native.give_back(problems.narrowed(problem.xp, array, dtype))
            for array, dtype in zip(results, dtypes, strict=True)
        )
        dx, dX, dy, dbandwidth = x_X_y_bandwidth
        return dx, dX, dy, dbandwidth


def non_local_means(
    image: Any,
    h: float,
    patch_size: int = 7,
    patch_distance: int | None = 11,
    *,
    sigma: float = 0.0,
) -> Any:
    """Denoise an image by means of the pixels whose surroundings are alike.

    Each pixel becomes a weighted mean of pixels, with weights ``exp(-max(0, d2 - 2 * sigma**2) /
    h**2)``, where d2 is the mean squared difference of the patches around both, weighted as in the
    Notes [1]_. This is attention: patches are queries and keys, pixels are values.

    Parameters
    ----------
    image : array, shape (H, W) or (H, W, C)
        Of NumPy, CuPy or any library that supports DLPack, of dtype float16, bfloat16, float32 or
        float64; C channels, whose differences are averaged.
    h : float > 0
        How much patches may differ, in the unit of the image. 0.6 to 0.8 times the standard
        deviation of the noise is usual.
    patch_size : int
        Pixels of a side of the patches, an odd number below 65536.
    patch_distance : int >= 0 or None
        The largest distance between a pixel and those that are averaged for it, in pixels along
        each axis; None for no limit.
    sigma : float >= 0
        Standard deviation of the noise. If it is given, patches that differ by noise alone count as
        equal.

    Returns
    -------
    array
        Of the shape, the library and the dtype of the image. A pixel without data is best given as
        infinite. Pixels with an infinite pixel in their patch become NaN, and do not count for
        others, which are infinitely different. A NaN in a patch makes all pixels NaN that this
        patch is compared with.

    Raises
    ------
    TypeError, ValueError
        With a message that names the argument, its value and the value that is wanted, before
        anything is computed.
    NotImplementedError
        While a stream is captured into a CUDA graph.

    Notes
    -----
    Parameters mean what they do in scikit-image's ``denoise_nl_means(..., fast_mode=False)``: the
    weights of a patch's pixels fall off from its centre as a Gaussian whose standard deviation is
    ``(patch_size - 1) / 4`` pixels, and the image is reflected at its edges. Small weights, which
    scikit-image neglects, count.

    Without `patch_distance`, the time is proportional to the square of the number of pixels.
    Patches of images of 16 bits are rounded to 16 bits. Those of float32 are multiplied in float32
    where a bound of the rounding says that weights are good to 1 %, otherwise in float64.

    References
    ----------
    .. [1] A. Buades, B. Coll and J.-M. Morel, "A non-local algorithm for image denoising", CVPR,
       2005.

    Examples
    --------
    >>> import numpy as np
    >>> from fa_cupy import non_local_means
    >>> stripes = np.tile(np.repeat([0.0, 1.0], 8), (48, 3))
    >>> noisy = stripes + 0.1 * np.random.default_rng(0).standard_normal(stripes.shape)
    >>> denoised = non_local_means(noisy, h=0.08, patch_size=5, sigma=0.1)
    >>> bool(np.std(denoised - stripes) < 0.03)
    True
    """
    name = "non_local_means"
    native, (pixels,), means = _means(name, h, patch_size, patch_distance, sigma, image=image)
    with native.context, np.errstate(all="ignore"):
        if pixels.size == 0:
            return native.give_back(pixels.copy())
        xp = sys.modules[native.backend]
        layers = pixels[..., None] if pixels.ndim == 2 else pixels
        found = patches.non_local_means(xp, layers, means)
        return native.give_back(found.reshape(pixels.shape))


def non_local_means_backward(
    dout: Any,
    image: Any,
    h: float,
    patch_size: int = 7,
    patch_distance: int | None = 11,
    *,
    sigma: float = 0.0,
) -> Any:
    """Return the gradient of `non_local_means` with respect to the image, for other libraries.

    It is computed in float64. Like `dout`, it has the shape, library and dtype of the image.
    """
    name = "non_local_means_backward"
    native, (pixels, dout), means = _means(
        name, h, patch_size, patch_distance, sigma, image=image, dout=dout
    )
    with native.context, np.errstate(all="ignore"):
        checks.check_gradient(name, "dout", dout, pixels.shape, pixels.dtype)
        if pixels.size == 0:
            return native.give_back(pixels.copy())
        xp = sys.modules[native.backend]
        layers, douts = (x[..., None] if x.ndim == 2 else x for x in (pixels, dout))
        found = patch_gradients.gradient(xp, douts, layers, means).reshape(pixels.shape)
        return native.give_back(problems.narrowed(xp, found, pixels.dtype))


def _means(
    name: str, h: Any, patch_size: Any, patch_distance: Any, sigma: Any, **arrays: Any
) -> tuple[Native, list[Any], patches.Means]:
    """Check the arguments of non-local means; the first array is the image."""
    dispatch.require(name, **arrays)
    native = core_arrays.to_native(name, writes=None, **arrays)
    pixels = native.arrays[0]
    attention_problem.float_dtype(name, "image", pixels)
    if pixels.ndim not in (2, 3):
        raise ValueError(f"{name}: image has shape {pixels.shape}, want (H, W) or (H, W, C)")
    means = checked_means(name, h, patch_size, patch_distance, sigma)
    _refuse_capture(name, native)
    return native, [*native.arrays], means


def checked_means(
    name: str, h: Any, patch_size: Any, patch_distance: Any, sigma: Any
) -> patches.Means:
    """Check the options of non-local means."""
    width = checks.finite(name, "h", h)
    if width <= 0:
        raise ValueError(f"{name}: h is {checks.show(h)}, want a number > 0")
    wanted = f"an odd int below {2**16}"
    size = checks.whole(name, "patch_size", patch_size, wanted, range(1, 2**16, 2))
    if patch_distance is not None:
        patch_distance = checks.whole(name, "patch_distance", patch_distance, "None or an int >= 0")
    noise = checks.finite(name, "sigma", sigma, minimum=0.0)
    return patches.Means(width, size, patch_distance, noise)


def _refuse_capture(name: str, native: Native) -> None:
    """Raise if a stream of CuPy is captured: results are looked at on the host."""
    if native.backend == "cupy":
        backends.gpu("workspace").refuse(name, "results are looked at on the host")
