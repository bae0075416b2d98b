"""The gradient of non-local means, in float64 whatever the dtype is.

What `fa_cupy.smoothing.patches` cuts out of the image is added up again in the places that it comes
from, in an order that is always the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fa_cupy._attention import attention, attention_backward
from fa_cupy.smoothing import patches
from fa_cupy.smoothing.patches import Means, Prepared, Squares
from fa_cupy.smoothing.regression import widened

_DOUBLE = np.dtype(np.float64)


def gradient(xp: Any, dout: Any, image: Any, means: Means) -> Any:
    """Return the gradient of the sum of ``dout * means`` with respect to the image.

    Parameters
    ----------
    xp : module
    dout, image : array, shape (H, W, C)
        With at least one element.
    means : Means

    Returns
    -------
    array of float64, shape (H, W, C)
    """
    height, width, _ = image.shape
    whole = patches.prepared(xp, widened(xp, image, _DOUBLE), means)
    squares = whole.squares
    below = squares.down * squares.height - height
    right = squares.across * squares.width - width
    dout = xp.pad(widened(xp, dout, _DOUBLE), ((0, below), (0, right), (0, 0)))
    mask = patches.near_pixels(xp, squares, means)
    dpixels, dvalues = xp.zeros_like(whole.pixels), xp.zeros_like(whole.values)
    for begin, some, part in whole.chunks():
        rows = dout[begin : begin + some.down * some.height]
        of_pixels, of_values = _of_squares(xp, rows, part, mask)
        dpixels[begin : begin + of_pixels.shape[0]] += of_pixels
        dvalues[begin : begin + of_values.shape[0]] += of_values
    radius, margin = means.patch_size // 2, squares.margin
    inside = dpixels[margin:, margin:][: height + 2 * radius, : width + 2 * radius]
    # The median that is subtracted has no gradient: distances do not depend on it.
    found = _reflected(_reflected(inside, height, radius).swapaxes(0, 1), width, radius)
    return dvalues[margin:, margin:][:height, :width] + found.swapaxes(0, 1) * whole.unit


def _of_squares(xp: Any, dout: Any, part: Prepared, mask: Any) -> tuple[Any, Any]:
    """Return gradients of the pixels and the values of some rows of squares."""
    squares = part.squares
    surroundings = patches.weighted_patches(xp, part.pixels, part.means)
    q, k, v, scale, score = patches.operands(xp, part, surroundings)
    options = {"mask": mask, "scale": scale, "score": score}
    out, lse = attention(q, k, v, return_lse=True, **options)
    dout = patches.parts(xp, dout, squares, squares.height, squares.width)
    need = ("q", "k", "v", "score.a", "score.c")
    dq, dk, dv, da, dc = attention_backward(dout, q, k, v, out, lse, need=need, **options)
    dpatches, dnorms = xp.zeros_like(surroundings), xp.zeros_like(part.outside)
    dvalues = xp.zeros_like(part.values)
    for total, of_query, of_key in ((dpatches, dq, dk), (dnorms, da, dc), (dvalues, None, dv)):
        _add_squares(xp, total, of_key, squares, squares.margin)
        if of_query is not None:
            _add_squares(xp, total[squares.margin :, squares.margin :], of_query, squares, 0)
    dpatches += scale * surroundings * dnorms[..., None]  # the scale is 2 / h**2
    return _of_patches(xp, dpatches, part), dvalues


def _add_squares(xp: Any, total: Any, found: Any, squares: Squares, margin: int) -> None:
    """Add what squares with a margin have to what they were taken from, in place."""
    down, across, height, width, _ = squares
    sides = height + 2 * margin, width + 2 * margin
    found = found.reshape(down, across, *sides, *total.shape[2:])
    strides = total.strides[0] * height, total.strides[1] * width, *total.strides
    # Parts of the squares that do not overlap.
    for top in range(0, sides[0], height):
        for left in range(0, sides[1], width):
            more = found[:, :, top : top + height, left : left + width]
            place = xp.lib.stride_tricks.as_strided(total[top:, left:], more.shape, strides)
            place += more


def _of_patches(xp: Any, dpatches: Any, part: Prepared) -> Any:
    """Return the gradient of pixels from that of `patches.weighted_patches`."""
    side, channels = part.means.patch_size, part.values.shape[-1]
    rows, cols = dpatches.shape[:2]
    dpatches = dpatches.reshape(rows, cols, channels, side, side)
    dpixels = xp.zeros_like(part.pixels)
    for (i, j), root in np.ndenumerate(patches.roots_of_weights(side, channels)):
        dpixels[i : i + rows, j : j + cols] += float(root) * dpatches[..., i, j]
    return dpixels


def _reflected(padded: Any, size: int, radius: int) -> Any:
    """Return the gradient of rows from that of them with reflected ones around them."""
    found = padded[radius : radius + size].copy()
    source = np.pad(np.arange(size), radius, mode="reflect")
    for row in [*range(radius), *range(radius + size, size + 2 * radius)]:
        found[int(source[row])] += padded[row]
    return found
