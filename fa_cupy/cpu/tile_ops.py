"""The operations on tiles and on chunks, in NumPy."""

from __future__ import annotations

import functools
import math
from collections import deque
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from fa_cupy.cpu import blas
from fa_cupy.cpu.key_entries import PagedRows
from fa_cupy.tiled import attention, chunks, softcap

Array = npt.NDArray[Any]

# If the maxima of the first tile are within +-this, and until a score exceeds it, no maximum is
# subtracted: exp(score) is used as it is, or exp(score - first) in a row whose first maximum is
# below 0. The largest weight of each row is then from 1 to 1e14: sums are far from overflow, and
# the products of the largest weight with small values do not underflow.
_SMALL_SCORE = 16.0
# Up to so many rows, NumPy's own maximum of each is as fast as the place of it.
_FEW_ROWS = 64
# Elements of keys that are gathered at a time.
_GATHERED = 1 << 19
# Scratch memory that is kept between calls: of so many threads, so many bytes each.
_MOST_KEPT = 4
_KEPT_BYTES = 4 << 20
# Bits that a float16 number has in float32, without the copies of its sign; what is there when its
# exponent counts from that of float32; and the number that no finite one reaches.
_OF_FLOAT16 = np.array(0x8FFFFFFF, np.uint32).view(np.int32)
_EXPONENTS = np.float32(2.0**112)
_BEYOND_FLOAT16 = 2.0**16
# Numbers below these are subnormal, and have fewer digits.
_SMALLEST = {np.dtype(t): np.finfo(t).tiny for t in (np.float32, np.float64)}


class Queries(NamedTuple):
    """Some queries, and how scores are made from them."""

    q: Array
    factor: np.floating[Any]  # of products with q
    # Queries times the factor, where that takes digits away from the smallest of them: for scores
    # that are too large for products of q alone.
    scaled: Array | None = None


class _Fold(NamedTuple):
    """How a factor is shared between queries and their products."""

    now: np.floating[Any]  # what queries are multiplied by, 1 at most
    later: np.floating[Any]  # what products are
    whole: np.floating[Any]
    # NumPy 1 would multiply 16-bit queries in 16 bits, as it does with any scalar.
    wide: np.dtype[Any]


@functools.lru_cache(maxsize=64)
def _fold(factor: float, dtype: np.dtype[Any]) -> _Fold:
    """Return how queries and products of `dtype` share a factor."""
    now, later = softcap.split(factor) if abs(factor) < softcap.MOST else (1.0, factor)
    with np.errstate(all="ignore"):
        first, second, whole = (exact(x, dtype) for x in (now, later, factor))
    return _Fold(first, second, whole, np.result_type(dtype, first.dtype))


def exact(factor: float, dtype: np.dtype[Any]) -> np.floating[Any]:
    """Return `factor` for a product with an array, in float64 where float32 would round it.

    Products with float64 take five times as long.
    """
    exact: np.floating[Any] = dtype.type(factor)
    return exact if float(exact) == factor else np.float64(factor)


class Segments(NamedTuple):
    """Pairs of queries and keys, in parts of one query and equally many keys, some padded."""

    rows: Array  # (s,): the query of each
    keys: Array  # (s, length)
    places: Array | None  # (e,): of each pair; None where it is one after the other


class PackedMask(NamedTuple):
    """A tile of a mask, of one batch entry or of all that are stacked."""

    packed: Array  # (n, rows, bytes) uint8: eight keys each, the first one in the lowest bit
    skip: int  # bits of each row before the first key
    keys: int


class PackedMatrices(NamedTuple):
    """A tile of masks whose rows follow each other without a gap, of all that are stacked."""

    packed: Array  # (n, parts, bytes) uint8: eight keys each, the first one in the lowest bit
    height: int  # rows of each part; there is one part, or this is 1
    width: int  # keys of a row
    rows: slice  # of those of all parts
    keys: slice

    def tile(self, elements: Array) -> Array:
        """Return what the tile has of an array with an element for each bit."""
        n, parts = self.packed.shape[:2]
        of_part = elements.reshape(n, parts, -1)[:, :, : self.height * self.width]
        return of_part.reshape(n, parts * self.height, self.width)[:, self.rows, self.keys]


@functools.cache
def _limits(dtype: np.dtype[Any]) -> Array:
    """Return what scores of eight keys are limited to, for each value of a byte of a mask."""
    seen = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(seen, np.inf, -np.inf).astype(dtype)


class Steps:
    """The `Steps` of all of `fa_cupy.tiled`, for NumPy.

    One a thread: scratch memory is its own. `unused` and `keep` take it from call to call.
    """

    xp: Any = np
    _kept: ClassVar[dict[Any, deque[Steps]]] = {t: deque(maxlen=_MOST_KEPT) for t in _SMALLEST}

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self._scratch: dict[str, Array] = {}
        self._bytes = 0  # of scratch memory
        self._last: dict[str, Array] = {}  # as it was asked for the last time
        self._ones = np.ones(0, dtype)

    @classmethod
    def unused(cls, dtype: np.dtype[Any]) -> Steps:
        """Return one that no other thread has, with the scratch memory of an earlier call."""
        try:
            return cls._kept[dtype].pop()
        except IndexError:
            return cls(dtype)

    def keep(self) -> None:
        """Leave this to later calls, unless its scratch memory is large."""
        if self._bytes <= _KEPT_BYTES:
            self._kept[self.dtype].append(self)

    def scratch(self, name: str, shape: tuple[int, ...]) -> Array:
        last = self._last.get(name)
        if last is not None and last.shape == shape:
            return last
        size = math.prod(shape)
        buffer = self._scratch.get(name)
        if buffer is None or buffer.size < size:
            # Zeros: fmin takes a quiet NaN for -inf, but not a signaling NaN. Memory that another
            # program used may hold some, and no step writes one to scores.
            raw = np.zeros(size * self.dtype.itemsize + 63, np.uint8)
            offset = -raw.ctypes.data % 64  # whole cache lines for vector loads
            buffer = raw[offset : offset + size * self.dtype.itemsize].view(self.dtype)
            self._bytes += buffer.nbytes - (
                self._scratch[name].nbytes if name in self._scratch else 0
            )
            self._scratch[name] = buffer
        self._last[name] = found = buffer[:size].reshape(shape)
        return found

    def queries(self, q: Array, factor: float) -> Queries:
        fold = _fold(factor, self.dtype)
        scaled = self.scratch("q", q.shape)
        if q.dtype == np.float16:
            _widen(q, scaled)
            np.multiply(scaled, fold.now, out=scaled, dtype=fold.wide, casting="unsafe")
        else:
            np.multiply(q, fold.now, out=scaled, dtype=fold.wide, casting="unsafe")
        if factor == 0 or fold.whole == fold.later or not self._any_subnormal(scaled, q):
            return Queries(scaled, fold.later)
        plain = self.scratch("unscaled", q.shape)
        np.copyto(plain, q, casting="unsafe")
        return Queries(plain, fold.whole, scaled if fold.later == 1 else None)

    def _any_subnormal(self, scaled: Array, q: Array) -> bool:
        """Whether queries that are not 0 are subnormal when scaled, and so have lost digits."""
        magnitudes = self.scratch("magnitudes", q.shape)
        np.abs(scaled, out=magnitudes)
        if magnitudes.min(initial=np.inf) >= _SMALLEST[self.dtype]:
            return False
        return bool(((magnitudes < _SMALLEST[self.dtype]) & (q != 0)).any())

    def scores(self, queries: Queries, first: int, k: Array | PagedRows, out: Array) -> None:
        keys = k.swapaxes(1, 2)
        self.matmul(queries.q[:, first:], keys, out)
        if queries.factor != 1:
            np.multiply(out, queries.factor, out=out, casting="unsafe")
        if queries.scaled is not None and not np.isfinite(out).all():
            other = np.empty_like(out)
            self.matmul(queries.scaled[:, first:], keys, other)
            np.copyto(out, other, where=~np.isfinite(out) & np.isfinite(other))

    def pair_scores(
        self,
        queries: Queries,
        counts: Array,
        k: Array,
        keys: Array,
        out: Array,
        segments: Segments | None = None,
    ) -> None:
        """Set `out` (n, e) to scaled products of single queries and keys, as `scores` does.

        Query i has ``counts[i]`` of the `keys`; `k` is dense and of compute dtype. `segments` are
        the same pairs.
        """
        if segments is None:
            rows = np.repeat(np.arange(len(counts)), counts)
            segments = Segments(rows, keys[:, None], None)
        for i, scores in enumerate(out):
            self._pair_products(queries.q[i], k[i], segments, scores)
            if queries.factor != 1:
                np.multiply(scores, queries.factor, out=scores, casting="unsafe")
            if queries.scaled is not None and not np.isfinite(scores).all():
                other = np.empty_like(scores)
                self._pair_products(queries.scaled[i], k[i], segments, other)
                np.copyto(scores, other, where=~np.isfinite(scores) & np.isfinite(other))

    def _pair_products(self, q: Array, k: Array, segments: Segments, out: Array) -> None:
        (count, length), dim = segments.keys.shape, k.shape[1]
        found = out if segments.places is None else self.scratch("segments", (count * length,))
        step = max(1, _GATHERED // (length * max(1, dim)))
        for begin in range(0, count, step):
            part = slice(begin, begin + step)
            keys, rows = segments.keys[part], segments.rows[part]
            of_k = self.scratch("pair_k", (*keys.shape, dim))
            of_q = self.scratch("pair_q", (*rows.shape, dim))
            np.take(k, keys, axis=0, out=of_k, mode="clip")  # "raise" would buffer `out`
            np.take(q, rows, axis=0, out=of_q, mode="clip")
            products = found[begin * length : (begin + len(rows)) * length]
            if length == 1:
                np.einsum("ed,ed->e", of_q, of_k[:, 0], out=products)
            else:
                np.matmul(of_k, of_q[:, :, None], out=products.reshape(-1, length, 1))
        if segments.places is not None:
            np.take(found, segments.places, out=out, mode="clip")

    def operand(self, name: str, x: Array | PagedRows) -> Any:
        if isinstance(x, PagedRows):
            if x.in_place:
                return x
            x = x.copied(functools.partial(self._scratch_of, f"{name} pages", x.dtype))
        if x.dtype == self.dtype and x.flags.aligned and _readable_by_blas(x):
            return x
        out = self.scratch(name, x.shape)
        self.load(out, x)
        return out

    def matmul(self, a: Array, b: Array | PagedRows, out: Array, add: bool = False) -> None:
        if isinstance(b, PagedRows):
            return b.multiply(a, out, add, self.scratch)
        if a.shape[-2] * a.shape[-1] * out.shape[-1] > blas.SERIAL:
            stacks: Any = [(a, b, out)]
            if out.ndim > 3:  # a stack of one chunk each, or of the chunks of one
                single = out.shape[1] == 1
                stacks = [(a[:, 0], b[:, 0], out[:, 0])] if single else zip(a, b, out, strict=True)
            if all(blas.matmul(x, y, z, add) for x, y, z in stacks):
                return
        if add:
            product = self.scratch("product", out.shape)
            np.matmul(a, b, out=product)
            np.add(out, product, out=out)
        else:
            np.matmul(a, b, out=out)

    def _scratch_of(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Return scratch memory for an array of another dtype."""
        size = math.prod(shape)
        memory = self.scratch(name, (-(-size * dtype.itemsize // self.dtype.itemsize),))
        return memory.view(dtype)[:size].reshape(shape)

    def add_bias(self, scores: Array, bias: Array) -> None:
        if bias.dtype == np.float16:
            bias = _distinct(bias)
            self.load(wide := self.scratch("bias", bias.shape), bias)
            bias = wide
        elif bias.dtype.itemsize > scores.dtype.itemsize:
            bias = softcap.in_range(np, _distinct(bias), scores.dtype)
        np.add(scores, bias, out=scores, casting="unsafe")

    def hidden(self, mask: Array | PackedMask | PackedMatrices) -> bool:
        return not (_distinct(mask) if isinstance(mask, np.ndarray) else mask.packed).any()

    def mask_scores(self, scores: Array, mask: Array | PackedMask | PackedMatrices) -> None:
        if isinstance(mask, PackedMatrices):
            mask = mask._replace(packed=_distinct(mask.packed))
            limits = mask.tile(self._limits(mask.packed))
        elif isinstance(mask, PackedMask):
            limits = self._limits(mask.packed).reshape(*mask.packed.shape[:-1], -1)
            limits = limits[..., mask.skip : mask.skip + mask.keys]
        else:
            mask = _distinct(mask)
            if mask.all():
                return
            packed = np.packbits(mask.reshape(-1), bitorder="little")
            limits = self._limits(packed).reshape(-1)[: mask.size].reshape(mask.shape)
        np.fmin(scores, limits, out=scores)

    def _limits(self, packed: Array) -> Array:
        """Return +inf where a score may stay and -inf where not, for the bits of bytes.

        fmin takes the number out of (NaN, -inf), and is ten times as fast as a masked copy.
        """
        limits = self.scratch("limit", (*packed.shape, 8))
        # Eight limits are one element: with arithmetic on single ones it takes three times as long.
        np.take(_limits(self.dtype), packed, axis=0, out=limits, mode="clip")
        return limits

    def band_scores(self, scores: Array, shift: int, lower: int | None, upper: int | None) -> None:
        least = None if lower is None else lower - shift
        most = None if upper is None else upper - shift
        np.fmin(scores, band_limits(self.dtype, *scores.shape[1:], least, most), out=scores)

    def softmax(self, rows: attention.Rows, scores: Array) -> None:
        sums = self.scratch("sums", rows.total.shape)
        if rows.unshifted and scores.max() <= _SMALL_SCORE:
            self._exp(rows, scores)
            self.sum_rows(scores, sums)
            np.add(rows.total, sums, out=rows.total)
            return
        top = self.scratch("new_top", rows.top.shape)
        row_maxima(scores, top)
        if not rows.started and top.max() <= _SMALL_SCORE and (least := top.min()) >= -_SMALL_SCORE:
            rows.started = rows.unshifted = True
            rows.top.fill(0)
            if least < 0:  # else all weights of a row are below 1: small values lose digits
                np.minimum(top, 0, out=rows.top)
                below: Array = np.less(top[0] if len(top) == 1 else top.min(axis=0), 0)
                rows.lowered = len(below) - int(below[::-1].argmax())
            self._exp(rows, scores)
            self.sum_rows(scores, rows.total)
            return
        rows.unshifted = False
        if rows.started:
            np.maximum(top, rows.top, out=top)
        shift = np.where(top == -np.inf, 0, top)  # -inf - -inf would be NaN
        np.subtract(scores, shift, out=scores)
        np.exp(scores, out=scores)
        self.sum_rows(scores, sums)
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

    def finish(self, rows: attention.Rows, out: Array, lse: Array) -> bool:
        np.add(rows.top, np.log(rows.total), out=lse)
        np.copyto(rows.total, 1, where=rows.total == 0)
        found = out if out.dtype == self.dtype else rows.acc
        np.divide(rows.acc, rows.total, out=found)
        if found is not out:
            self.store(out, found)
        return self.finite(found)

    def store(self, out: Array, value: Array) -> None:
        np.copyto(out, value, casting="unsafe")

    def load(self, out: Array, x: Array) -> None:
        if x.dtype == np.float16 and out.dtype == np.float32:
            _widen(x, out)
        else:
            np.copyto(out, x, casting="unsafe")

    def weigh(self, scores: Array, top: Array, total: Array | None) -> None:
        np.subtract(scores, top, out=scores)
        np.exp(scores, out=scores)
        if total is not None and (total != 1).any():
            np.divide(scores, total, out=scores)

    def weigh_pairs(
        self, scores: Array, top: Array, total: Array | None, dscores: Array, base: Array
    ) -> None:
        self.weigh(scores, top, total)
        np.subtract(dscores, base, out=dscores)
        np.multiply(dscores, scores, out=dscores)

    def scale(self, x: Array, factor: float) -> None:
        np.multiply(x, exact(factor, self.dtype), out=x, casting="unsafe")

    def triangle(self, size: int, reverse: bool) -> Array:
        return chunks.triangle(size, reverse)

    def finite(self, x: Array) -> bool:
        squares = blas.sum_of_squares(x)
        if squares is not None and math.isfinite(squares):
            return True
        return bool(np.isfinite(x).all())

    def _exp(self, rows: attention.Rows, scores: Array) -> None:
        """Turn scores into weights in place; few rows have a top that is not 0, the first ones."""
        if rows.lowered:
            few = scores[:, : rows.lowered]
            np.subtract(few, rows.top[:, : rows.lowered], out=few)
        np.exp(scores, out=scores)

    def sum_rows(self, weights: Array, out: Array) -> None:
        """Set `out` (n, rows, 1) to row sums.

        As a product with ones: BLAS sums rows four times as fast as a reduction.
        """
        if self._ones.size < weights.shape[-1]:
            self._ones = np.ones(weights.shape[-1], self.dtype)
        ones, sums = self._ones[: weights.shape[-1]], out[..., 0]
        if not blas.sum_rows(weights, ones, sums):
            np.matmul(weights, ones, out=sums)


def _widen(x: Array, out: Array) -> None:
    """Copy float16 numbers to `out`, of float32, eight times as fast as NumPy does.

    Sign, exponent and mantissa go to their places in float32, and an exponent of float32 is larger
    by 112 for the same number. The exponent of infinity and NaN becomes one of large numbers so.
    """
    bits = out.view(np.int32)
    np.copyto(bits, x.view(np.int16))
    np.left_shift(bits, 13, out=bits)
    np.bitwise_and(bits, _OF_FLOAT16, out=bits)
    np.multiply(out, _EXPONENTS, out=out)
    if out.size and not -_BEYOND_FLOAT16 < out.min() <= out.max() < _BEYOND_FLOAT16:
        np.copyto(out, x)


@functools.lru_cache(maxsize=256)
def band_limits(
    dtype: np.dtype[Any], rows: int, cols: int, lower: int | None, upper: int | None
) -> Array:
    """Return +inf where lower <= j - i <= upper and -inf elsewhere, for a tile."""
    # It depends on j - i only: a window that slides over one ramp.
    ramp = np.full(rows + cols - 1, np.inf, dtype)  # ramp[j - i + rows - 1]
    if lower is not None:
        ramp[: max(0, lower + rows - 1)] = -np.inf
    if upper is not None:
        ramp[max(0, upper + rows) :] = -np.inf
    strides = (-dtype.itemsize, dtype.itemsize)
    return np.lib.stride_tricks.as_strided(ramp[rows - 1 :], (rows, cols), strides, writeable=False)


def row_maxima(x: Array, out: Array) -> None:
    """Set `out` (n, rows, 1) to the maxima of the rows of `x` (n, rows, cols), both of them dense.

    NumPy finds where a maximum is two to five times as fast as what it is; both stop at NaN. For
    few rows, the calls take longer than that saves.
    """
    if out.size <= _FEW_ROWS:
        np.maximum.reduce(x, axis=-1, keepdims=True, out=out)
        return
    places = x.argmax(axis=-1).reshape(-1)
    np.add(places, np.arange(0, x.size, x.shape[-1]), out=places)
    np.take(x.reshape(-1), places, out=out.reshape(-1), mode="clip")


def _readable_by_blas(x: Array) -> bool:
    """Whether matmul takes `x` (n, rows, cols) to BLAS, and not to a loop of its own."""
    row, col = x.strides[1:]
    return col == x.itemsize and row >= x.shape[2] * col and row % col == 0


def _distinct(mask: Array) -> Array:
    """Return `mask` with axes along which it is broadcast cut to length 1."""
    return mask[tuple(slice(1) if s == 0 else slice(None) for s in mask.strides)]
