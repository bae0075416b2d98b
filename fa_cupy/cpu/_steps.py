"""The operations on tiles and on chunks, in NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from fa_cupy import _scan, _tiled
from fa_cupy.cpu import _blas

Array = npt.NDArray[Any]

# While all scores stay within +-this, exp(score) is used as it is, with no maximum subtracted:
# weights are then within 1e-7 and 1e7 of 1, far from the ends of float32.
_SMALL_SCORE = 16.0


class Steps:
    """All for NumPy: `_tiled.Steps`, `_tiled_backward.Steps`, `_scan.Steps`.

    One a thread: scratch memory is its own.
    """

    xp: Any = np

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self._scratch: dict[str, Array] = {}
        self._ones = np.ones(0, dtype)

    def scratch(self, name: str, shape: tuple[int, ...]) -> Array:
        size = math.prod(shape)
        buffer = self._scratch.get(name)
        if buffer is None or buffer.size < size:
            raw = np.empty(size * self.dtype.itemsize + 63, np.uint8)
            offset = -raw.ctypes.data % 64  # whole cache lines for vector loads
            buffer = raw[offset : offset + size * self.dtype.itemsize].view(self.dtype)
            self._scratch[name] = buffer
        return buffer[:size].reshape(shape)

    def queries(self, q: Array, factor: float) -> tuple[Array, float]:
        now, later = (factor, 1.0) if _tiled.folds(factor) else (1.0, factor)
        out = self.scratch("q", q.shape)
        # In float64, so that the factor itself is not rounded.
        np.multiply(q, np.float64(now), out=out, casting="unsafe")
        return out, later

    def scores(self, queries: tuple[Array, float], first: int, k: Array, out: Array) -> None:
        q, factor = queries
        self.matmul(q[:, first:], k.swapaxes(1, 2), out)
        if factor != 1:
            np.multiply(out, np.float64(factor), out=out, casting="unsafe")

    def operand(self, name: str, x: Array) -> Array:
        if x.dtype == self.dtype and x.flags.aligned and _readable_by_blas(x):
            return x
        out = self.scratch(name, x.shape)
        np.copyto(out, x, casting="unsafe")
        return out

    def matmul(self, a: Array, b: Array, out: Array, add: bool = False) -> None:
        large = a.shape[1] * a.shape[2] * out.shape[2] > _blas.SERIAL
        if large and _blas.matmul(a, b, out, add):
            return
        if add:
            product = self.scratch("product", out.shape)
            np.matmul(a, b, out=product)
            np.add(out, product, out=out)
        else:
            np.matmul(a, b, out=out)

    def add_bias(self, scores: Array, bias: Array) -> None:
        np.add(scores, bias, out=scores, casting="unsafe")

    def hidden(self, mask: Array) -> bool:
        return not _distinct(mask).any()

    def mask_scores(self, scores: Array, mask: Array) -> None:
        mask = _distinct(mask)
        if mask.all():
            return
        # +inf where a score may stay and -inf where not: fmin takes the number out of (NaN, -inf),
        # and arithmetic is ten times as fast as a masked copy.
        limit = self.scratch("limit", mask.shape)
        np.subtract(mask, 0.5, out=limit, casting="unsafe")
        np.multiply(limit, np.inf, out=limit)
        np.fmin(scores, limit, out=scores)

    def band_scores(self, scores: Array, shift: int, lower: int | None, upper: int | None) -> None:
        _, m, n = scores.shape
        # limit[i, j] depends on j - i only: a window that slides over one ramp.
        ramp = np.full(m + n - 1, np.inf, self.dtype)  # ramp[j - i + m - 1]
        if lower is not None:
            ramp[: max(0, lower - shift + m - 1)] = -np.inf
        if upper is not None:
            ramp[max(0, upper - shift + m) :] = -np.inf
        step = self.dtype.itemsize
        limit = np.lib.stride_tricks.as_strided(ramp[m - 1 :], (m, n), (-step, step))
        np.fmin(scores, limit, out=scores)

    def softmax(self, rows: _tiled.Rows, scores: Array) -> None:
        sums = self.scratch("sums", rows.total.shape)
        if rows.unshifted and scores.max() <= _SMALL_SCORE:
            np.exp(scores, out=scores)
            self._sum(scores, sums)
            np.add(rows.total, sums, out=rows.total)
            return
        top = self.scratch("new_top", rows.top.shape)
        np.maximum.reduce(scores, axis=-1, keepdims=True, out=top)
        if not rows.started and np.abs(top).max() <= _SMALL_SCORE:
            rows.started = rows.unshifted = True
            rows.top.fill(0)
            np.exp(scores, out=scores)
            self._sum(scores, rows.total)
            return
        rows.unshifted = False
        if rows.started:
            np.maximum(top, rows.top, out=top)
        shift = np.where(top == -np.inf, 0, top)  # -inf - -inf would be NaN
        np.subtract(scores, shift, out=scores)
        np.exp(scores, out=scores)
        self._sum(scores, sums)
        if not rows.started:
            np.copyto(rows.total, sums)
        else:
            if (top > rows.top).any():
                decay = np.exp(rows.top - shift)
                np.multiply(rows.total, decay, out=rows.total)
                np.multiply(rows.acc, decay, out=rows.acc)
            np.add(rows.total, sums, out=rows.total)
        np.copyto(rows.top, top)
        rows.started = True

    def finish(self, rows: _tiled.Rows, out: Array, lse: Array) -> bool:
        np.add(rows.top, np.log(rows.total), out=lse)
        np.copyto(rows.total, 1, where=rows.total == 0)
        np.divide(rows.acc, rows.total, out=rows.acc)
        self.store(out, rows.acc)
        return bool(np.isfinite(rows.acc).all())

    def store(self, out: Array, value: Array) -> None:
        np.copyto(out, value, casting="unsafe")

    def load(self, out: Array, x: Array) -> None:
        np.copyto(out, x, casting="unsafe")

    def weigh(self, scores: Array, lse: Array) -> None:
        np.subtract(scores, lse, out=scores)
        np.exp(scores, out=scores)

    def scale(self, x: Array, factor: float) -> None:
        np.multiply(x, np.float64(factor), out=x, casting="unsafe")

    def triangle(self, size: int, reverse: bool) -> Array:
        return _scan.triangle(size, reverse)

    def finite(self, x: Array) -> bool:
        return bool(np.isfinite(x).all())

    def _sum(self, weights: Array, out: Array) -> None:
        """Row sums, as a product with ones: BLAS sums rows four times as fast as a reduction."""
        if self._ones.size < weights.shape[-1]:
            self._ones = np.ones(weights.shape[-1], self.dtype)
        ones, sums = self._ones[: weights.shape[-1]], out[..., 0]
        if not _blas.sum_rows(weights, ones, sums):
            np.matmul(weights, ones, out=sums)


def _readable_by_blas(x: Array) -> bool:
    """Whether matmul takes `x` (n, rows, cols) to BLAS, and not to a loop of its own."""
    row, col = x.strides[1:]
    return col == x.itemsize and row >= x.shape[2] * col and row % col == 0


def _distinct(mask: Array) -> Array:
    """Return `mask` with axes along which it is broadcast cut to length 1."""
    return mask[tuple(slice(1) if s == 0 else slice(None) for s in mask.strides)]
