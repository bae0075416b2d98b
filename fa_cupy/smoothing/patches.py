"""Non-local means: attention whose queries and keys are patches, and whose values are pixels.

With `patch_distance`, each pixel looks at those around it. The image is divided into squares, each
an entry of a batch: its pixels are the queries, the keys are those of a larger square, and one mask
says for all entries which keys are near enough. Without it, the image is one such square.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from fa_cupy._attention import attention
from fa_cupy._score import Score
from fa_cupy.core.attention_problem import sum_dtype
from fa_cupy.smoothing.regression import narrowed, widened

#: Pixels of a side of the squares that share their keys.
SQUARE = 16
#: Bytes of patches, once for each square that they are keys of, in one call of attention.
_CHUNK = 64 << 20

_TOLERANCE = 1e-2  # of weights of results in float32, relatively
_UNIT = 2.0**-24
_DIM_STEP = 8  # that of `fa_cupy.gpu.kernels.attention.fwd_sm90`


class Means(NamedTuple):
    """The parameters of non-local means; see `fa_cupy.non_local_means`."""

    h: float
    patch_size: int
    patch_distance: int | None
    sigma: float


class Squares(NamedTuple):
    """How an image is divided: `down` x `across` squares of `height` x `width` queries.

    The keys of a square are its pixels and `margin` more on each side.
    """

    down: int
    across: int
    height: int
    width: int
    margin: int


class Prepared(NamedTuple):
    """An image as squares are taken of it, with edges around it.

    Attributes
    ----------
    squares : Squares
    means : Means
        With `h` and `sigma` in the unit of `pixels`.
    work : dtype
        That of products.
    pixels : array, shape (H + edges + 2 radius, W + edges + 2 radius, C)
        Around zero, in a unit near h; 0 where the image is infinite.
    values : array, shape (H + edges, W + edges, C)
        The image itself; 0 where it is infinite.
    outside : array, shape (H + edges, W + edges)
        0 inside of the image, infinite at the edges and where a patch has an infinite pixel.
    unit : float
        What a pixel has been multiplied by.
    """

    squares: Squares
    means: Means
    work: np.dtype[Any]
    pixels: Any
    values: Any
    outside: Any
    unit: float

    def chunks(self) -> Iterator[tuple[int, Squares, Prepared]]:
        """Yield rows of squares that one call of attention takes, and where their pixels begin."""
        squares, side = self.squares, self.means.patch_size
        keys = (squares.height + 2 * squares.margin) * (squares.width + 2 * squares.margin)
        channels, item = self.values.shape[-1], sum_dtype(self.work).itemsize
        step = max(1, _CHUNK // (squares.across * keys * channels * side**2 * item))
        for row in range(0, squares.down, step):
            some = squares._replace(down=min(step, squares.down - row))
            begin = row * squares.height
            end = begin + some.down * squares.height + 2 * squares.margin
            yield (
                begin,
                some,
                self._replace(
                    squares=some,
                    pixels=self.pixels[begin : end + 2 * (side // 2)],
                    values=self.values[begin:end],
                    outside=self.outside[begin:end],
                ),
            )


def non_local_means(xp: Any, image: Any, means: Means) -> Any:
    """Return the denoised image.

    Parameters
    ----------
    xp : module
    image : array, shape (H, W, C)
        With at least one element.
    means : Means
    """
    height, width, channels = image.shape
    whole = prepared(xp, image, means)
    squares, mask = whole.squares, near_pixels(xp, whole.squares, means)
    outside = whole.outside[squares.margin :, squares.margin :][:height, :width]
    found = xp.empty((squares.down * squares.height, width, channels), image.dtype)
    kind = f"u{image.dtype.itemsize}"  # CuPy does not move bfloat16 around everywhere
    for begin, some, part in whole.chunks():
        rows = some.down * some.height
        out = narrowed(xp, _attend(xp, part, mask), image.dtype).view(kind)
        out = out.reshape(some.down, some.across, some.height, some.width, channels)
        out = out.transpose(0, 2, 1, 3, 4).reshape(rows, -1, channels)
        found.view(kind)[begin : begin + rows] = out[:, :width]
    found, lost = found[:height], xp.isinf(outside)
    if bool(lost.any()):  # not even a pixel itself has a weight
        nan = np.asarray(np.nan, image.dtype).view(kind)[()]
        found.view(kind)[...] = xp.where(lost[..., None], nan, found.view(kind))
    return found


def prepared(xp: Any, image: Any, means: Means) -> Prepared:
    """Return an image of shape (H, W, C) as squares are taken of it."""
    height, width, _ = image.shape
    squares = _squares(height, width, means)
    real = sum_dtype(image.dtype)
    values = widened(xp, image, real)
    finite = xp.isfinite(values)
    pixels, largest = _around_zero(xp, values, finite)
    outside = xp.zeros((height, width), real)
    if not bool(finite.all()):
        infinite = xp.isinf(values)
        # A difference of infinite pixels is not a number, and 0 times one is not either.
        pixels, values = (xp.where(infinite, real.type(0), x) for x in (pixels, values))
        hidden = _have_one(xp, infinite.any(axis=-1), means.patch_size)
        outside = xp.where(hidden, real.type(np.inf), outside)
    work = _precise_enough(image, largest, means)
    pixels, means, unit = _in_units_of_h(xp, pixels, largest, work, means)
    radius = means.patch_size // 2
    pixels = xp.pad(pixels, ((radius, radius), (radius, radius), (0, 0)), mode="reflect")
    below = squares.down * squares.height - height
    right = squares.across * squares.width - width
    edges = tuple((squares.margin, squares.margin + more) for more in (below, right))
    pixels, values = (xp.pad(x, (*edges, (0, 0))) for x in (pixels, values))
    outside = xp.pad(outside, edges, constant_values=np.inf)
    return Prepared(squares, means, work, pixels, values, outside, unit)


def _around_zero(xp: Any, values: Any, finite: Any) -> tuple[Any, float]:
    """Return pixels less a median, and the largest of those that are finite.

    Distances do not change, but numbers around zero are rounded finer. Each number counts once in
    the median, so that it is among the data even if most pixels have a fill value, however large.
    """
    pixels = values - _median(xp, values, finite)
    largest = _largest(xp, pixels, finite)
    if math.isinf(largest):  # a difference that the dtype does not hold
        pixels, largest = values, _largest(xp, values, finite)
    return pixels, largest


def _median(xp: Any, values: Any, finite: Any) -> Any:
    """Return the median of the finite numbers of each channel; 0 for a channel without any."""
    channels = [xp.unique(values[..., c][finite[..., c]]) for c in range(values.shape[-1])]
    found = [xp.median(x) if x.size else xp.zeros((), values.dtype) for x in channels]
    return xp.stack(found).astype(values.dtype)


def _largest(xp: Any, pixels: Any, finite: Any) -> float:
    return float(abs(xp.where(finite, pixels, pixels.dtype.type(0))).max())


def _have_one(xp: Any, marked: Any, side: int) -> Any:
    """Return which pixels of an image have marked ones in their patches."""
    for axis in range(2):
        pads = [(side // 2, side // 2) if i == axis else (0, 0) for i in range(2)]
        padded = xp.pad(marked, pads, mode="reflect")
        strides = (*padded.strides, padded.strides[axis])
        windows = xp.lib.stride_tricks.as_strided(padded, (*marked.shape, side), strides)
        marked = windows.any(axis=-1)
    return marked


def _squares(height: int, width: int, means: Means) -> Squares:
    if means.patch_distance is None:
        return Squares(1, 1, height, width, 0)
    # Nothing is further away than the image is large.
    margin = min(means.patch_distance, max(height, width) - 1)
    sides = min(SQUARE, height), min(SQUARE, width)
    return Squares(-(-height // sides[0]), -(-width // sides[1]), *sides, margin)


def near_pixels(xp: Any, squares: Squares, means: Means) -> Any:
    """Return which keys of a square lie around which queries; None for all."""
    if means.patch_distance is None:
        return None

    def near(side: int) -> Any:
        query = xp.arange(side)[:, None] + squares.margin
        return abs(query - xp.arange(side + 2 * squares.margin)) <= squares.margin

    down, across = near(squares.height), near(squares.width)
    both = down[:, None, :, None] & across[None, :, None, :]
    return both.reshape(squares.height * squares.width, -1)


def weighted_patches(xp: Any, pixels: Any, means: Means) -> Any:
    """Return weighted patches, whose squared distances are means over patch and channels.

    Parameters
    ----------
    pixels : array, shape (H + 2 radius, W + 2 radius, C)

    Returns
    -------
    array, shape (H, W, C * patch_size**2)
    """
    side = means.patch_size
    rows, cols, channels = pixels.shape
    shape = (rows - side + 1, cols - side + 1, channels, side, side)
    windows = xp.lib.stride_tricks.as_strided(pixels, shape, (*pixels.strides, *pixels.strides[:2]))
    roots = roots_of_weights(side, channels).astype(pixels.dtype)
    return (windows * xp.asarray(roots)).reshape(*shape[:2], -1)


def roots_of_weights(side: int, channels: int) -> np.ndarray[Any, Any]:
    """Return roots of the weights of a patch's pixels, which fall off as those of scikit-image."""
    offset = np.arange(side) - side // 2
    spread = max(side - 1, 1) / 4
    weights = np.exp(-np.add.outer(offset**2, offset**2) / (2 * spread**2))
    roots: np.ndarray[Any, Any] = np.sqrt(weights / (weights.sum() * channels))
    return roots


def _precise_enough(image: Any, largest: float, means: Means) -> np.dtype[Any]:
    """Return the dtype of products: the image's, or float64 where float32 is not good enough.

    No patch has a larger norm than the largest pixel. See `estimate.rounding_of_products`.
    """
    terms = image.shape[-1] * means.patch_size**2
    ratio = 2 * largest / means.h
    off = (4 + 2 * terms**0.5) * _UNIT * ratio * ratio  # infinite where ** raises an error
    dtype: np.dtype[Any] = image.dtype
    return dtype if off <= _TOLERANCE else np.dtype(np.float64)


def _in_units_of_h(
    xp: Any, pixels: Any, largest: float, work: np.dtype[Any], means: Means
) -> tuple[Any, Means, float]:
    """Return pixels, h and sigma in a unit that is near h, a power of two, so that none is rounded.

    Otherwise squares of tiny or huge pixels are 0 or infinite. For the same reason h is raised to
    what is still far below all distances that are resolved.
    """
    real = sum_dtype(work)
    single = real == np.float32
    h = max(means.h, largest * 2.0**-500, 2.0**-160 if single else 0.0)
    most = 100 if single else 1000  # of which the dtype has the power
    unit = max(-most, min(most, math.frexp(h)[1]))
    pixels = widened(xp, pixels, real) * real.type(2.0**-unit)
    # In float64, as the numbers are: a sigma that is infinite in this unit is far beyond any h.
    h, sigma = (x * 2.0**-unit for x in (h, means.sigma))
    return pixels, means._replace(h=h, sigma=sigma), 2.0**-unit


class Operands(NamedTuple):
    """What attention computes the means of some squares from; arrays over (squares, pixels)."""

    q: Any
    k: Any
    v: Any
    scale: float
    score: Score


def _attend(xp: Any, part: Prepared, mask: Any) -> Any:
    """Return means for some rows of squares, of shape (squares, pixels of a square, C)."""
    patches = weighted_patches(xp, part.pixels, part.means)
    q, k, v, scale, score = operands(xp, part, patches)
    found = attention(q, k, v, mask=mask, scale=scale, score=score)
    return found[..., : part.values.shape[-1]]


def operands(xp: Any, part: Prepared, patches: Any) -> Operands:
    """Return what attention takes for some rows of squares, of their weighted patches."""
    squares, work, means = part.squares, part.work, part.means
    real = sum_dtype(work)
    patches, values = (widened(xp, x, real) for x in (patches, part.values))
    if work.itemsize == 2:
        patches, values = (_in_steps(xp, x) for x in (patches, values))
    # Of what is multiplied, so that the distance of a patch to itself is 0.
    patches = widened(xp, narrowed(xp, patches, work), real)
    factor = 1.0 / means.h / means.h
    norms = (patches * patches).sum(axis=-1) * factor + part.outside.astype(real)
    margin = squares.margin

    def queries(x: Any) -> Any:
        return parts(xp, x[margin:, margin:], squares, squares.height, squares.width)

    def keys(x: Any) -> Any:
        sides = squares.height + 2 * margin, squares.width + 2 * margin
        return parts(xp, x, squares, *sides)

    q, k, v = (narrowed(xp, x, work) for x in (queries(patches), keys(patches), keys(values)))
    a, c = queries(norms), keys(norms)
    # Equal patches with noise differ by twice its variance, which counts as no distance.
    noise = min(2.0 * (means.sigma / means.h) * (means.sigma / means.h), _most(real))
    return Operands(q, k, v, 2.0 * factor, Score("min(s-a[h,i]-c[h,j],0)", a=a - noise, c=c))


def _most(real: np.dtype[Any]) -> float:
    """Return a finite number that is more than the squared distances that the dtype resolves."""
    return float(np.finfo(real).max) / 4


def parts(xp: Any, x: Any, squares: Squares, height: int, width: int) -> Any:
    """Return an array of pixels by squares, which may overlap, as entries of a batch."""
    down, across = x.strides[0] * squares.height, x.strides[1] * squares.width
    shape = (squares.down, squares.across, height, width, *x.shape[2:])
    parts = xp.lib.stride_tricks.as_strided(x, shape, (down, across, *x.strides))
    return parts.reshape(squares.down * squares.across, height * width, *x.shape[2:])


def _in_steps(xp: Any, x: Any) -> Any:
    """Return dims with as many zeros after them as the kernels for Hopper take."""
    return xp.pad(x, ((0, 0), (0, 0), (0, -x.shape[-1] % _DIM_STEP)))
