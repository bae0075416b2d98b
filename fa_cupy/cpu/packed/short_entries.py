"""Batch entries with few keys each: several of them share every step of the algorithm.

A step takes some microseconds in Python, whatever its size, which is more than the attention of one
query to a hundred keys. Scores of entries of one group are the rows of one array, as wide as the
longest of them, and what is behind the end of an entry is -inf. Products read no keys and no values
there: the library multiplies matrices of several sizes, anywhere in memory, in one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fa_cupy.core.attention_problem import Problem, View
from fa_cupy.cpu import blas
from fa_cupy.cpu.key_entries import SeenThrough
from fa_cupy.cpu.tile_ops import Steps
from fa_cupy.tiled import attention, softcap

Array = npt.NDArray[Any]

# Most elements of an array of a group, which stays in the cache.
_GROUP_ELEMENTS = 1 << 18
# Products of so few entries are made one by one, and those of single rows with entries of more
# elements on average: a vector times a matrix takes half the time of a product of matrices.
_FEW_ENTRIES = 4
_VECTOR_ELEMENTS = 1 << 16
# The number of rows whose products take as long as reading their keys from memory.
_READING_ROWS = 8


class Group(NamedTuple):
    """Entries that are next to each other, and how long they take."""

    begin: int
    end: int
    cost: float


class Arrays(NamedTuple):
    """Arrays as `ShortEntries` sees them: of all entries, or of those of a group.

    Keys and values are (entries, heads, k_len, dim), the others (entries, heads, group, rows,
    cols): the heads of a group share keys.
    """

    q: Array
    k: Array
    v: Array
    bias: Array | None
    mask: Array | None
    out: Array
    lse: Array
    sinks: Array | None


@dataclass(frozen=True)
class ShortEntries:
    """The attention of entries with few keys.

    Attributes
    ----------
    problem : Problem
    dtype : numpy.dtype
        Of sums.
    views : list of SeenThrough or None
        Of the arrays.
    """

    problem: Problem
    dtype: np.dtype[Any]
    views: list[SeenThrough | None]

    @classmethod
    def of(
        cls, problem: Problem, dtype: np.dtype[Any], out: View, lse: View
    ) -> ShortEntries | None:
        """Return it for a problem with key lengths; None where entries are taken one by one.

        Parameters
        ----------
        problem : Problem
        dtype : numpy.dtype
            Of sums.
        out, lse : View
            Of the output (*batch, q_len, v_dim) and of the LSE (*batch, q_len, 1).
        """
        axes = max(0, len(problem.out_shape) - 3)
        heads = len(problem.batch) - axes
        shares = problem.k.strides[-3:-2] == problem.v.strides[-3:-2] == (0,)
        if problem.score is not None or problem.pages is not None or axes > 1:
            return None
        if problem.dropout is not None:
            return None
        if heads != 1 + (shares and heads == 2) or not (problem.head_dim and problem.v_dim):
            return None
        if not blas.multiplies_groups(dtype):
            return None
        given = (
            problem.q, problem.k, problem.v, problem.bias, problem.mask, out, lse, problem.sinks,
        )  # fmt: skip
        # Axes of size 1 stand for those that there are not.
        before = (None,) if axes == 0 else (slice(None),)
        if heads == 1:
            before = (*before, None, slice(None)) if shares else (*before, slice(None), None)
        keys = {1, 2}
        views = [_with_axes(x, before, i in keys) for i, x in enumerate(given)]
        return cls(problem, dtype, [None if x is None else SeenThrough(x) for x in views])

    def seen(self, arrays: Sequence[Any]) -> Arrays:
        """Return the arrays of a call: q, k, v, bias, mask, out, lse and sinks."""
        found: list[Any] = [
            None if view is None else view(array)
            for array, view in zip(arrays, self.views, strict=True)
        ]
        return Arrays(*found)

    def groups(self, lengths: Sequence[int], most: float) -> Iterator[Group | int]:
        """Yield groups of entries, and the numbers of entries that are not short.

        Parameters
        ----------
        lengths : sequence of int
            Of all entries.
        most : float
            The largest cost of a group.
        """
        assert self.views[0] is not None
        _, heads, group, rows, dim = self.views[0].view.shape
        # Keys are read once for the rows of a group.
        reading = max(1.0, _READING_ROWS / (group * rows))
        flop_per_score = 2 * (dim + self.problem.v_dim) * reading
        rows *= heads * group
        copied = 0 if self.problem.dtype == self.dtype else heads * max(dim, self.problem.v_dim)
        least = max(dim, self.problem.v_dim)
        begin, width, cost = 0, 0, 0.0
        for i, length in enumerate(lengths):
            own = rows * length * flop_per_score
            wide = max(width, length)
            count = i + 1 - begin
            elements = count * max(rows * max(wide, least), copied * wide)
            full = elements > _GROUP_ELEMENTS or cost + own > most
            if full and i > begin:
                yield Group(begin, i, cost)
            if full:
                begin, width, cost, wide = i, 0, 0.0, length
                if max(rows * max(length, least), copied * length) > _GROUP_ELEMENTS or own > most:
                    yield i
                    begin = i + 1
                    continue
            width, cost = wide, cost + own
        if begin < len(lengths):
            yield Group(begin, len(lengths), cost)

    def attend(self, steps: Steps, arrays: Arrays, group: Group, lengths: Array) -> bool:
        """Compute the entries of a group.

        Parameters
        ----------
        steps : Steps
        arrays : Arrays
            Of all entries.
        group : Group
        lengths : ndarray of int64
            Of all entries.

        Returns
        -------
        bool
            Whether the output is right: finite, of queries that lose no digits.
        """
        problem, part = self.problem, slice(group.begin, group.end)
        some: list[Any] = [None if a is None else a[part] for a in arrays]
        x = Arrays(*some)
        lengths = lengths[part]
        n, heads, per, m, _ = x.q.shape
        stacked, rows, width = n * heads, per * m, int(lengths.max())
        factor, _, _ = softcap.in_turn(problem, steps.dtype)
        queries = steps.queries(x.q, factor)
        if queries.scaled is not None:
            return False
        state = attention.Rows(
            acc=steps.scratch("acc", (stacked, rows, problem.v_dim)),
            top=steps.scratch("top", (stacked, rows, 1)),
            total=steps.scratch("total", (stacked, rows, 1)),
        )
        if width:
            scores = steps.scratch("scores", (stacked, rows, width))
            products = _Products(steps, lengths, heads, rows)
            products.multiply(queries.q.reshape(stacked, rows, -1), x.k, scores, transposed=True)
            self._finish_scores(steps, x, queries.factor, lengths, scores)
            steps.softmax(state, scores)
            products.multiply(scores, x.v, state.acc, transposed=False)
            if not lengths.all():
                state.acc.reshape(n, -1)[lengths == 0] = 0
        else:
            attention.start_empty(state)
        if x.sinks is not None:
            sinks = steps.scratch("sinks", (stacked, rows, 1))
            steps.load(sinks.reshape(n, heads, per, m, 1), x.sinks)
            steps.softmax(state, sinks)
        shown = (a.reshape(n, heads, per, m, -1) for a in (state.acc, state.top, state.total))
        return steps.finish(attention.Rows(*shown), x.out, x.lse)

    def _finish_scores(
        self, steps: Steps, x: Arrays, factor: np.floating[Any], lengths: Array, scores: Array
    ) -> None:
        """Turn products into scores; those of keys that are not there or not seen are -inf."""
        problem, width = self.problem, scores.shape[-1]
        n, heads, per, m, _ = x.q.shape
        if factor != 1:
            np.multiply(scores, factor, out=scores, casting="unsafe")
        if problem.softcap:
            places = np.arange(len(scores)), np.arange(width)  # for expressions only
            attention.transform(steps, problem, None, scores, places, None, None)
        shown = scores.reshape(n, heads, per, m, width)
        if x.bias is not None:
            steps.add_bias(shown, x.bias[..., :width])
        if x.mask is not None:
            steps.mask_scores(shown, x.mask[..., :width])
        limits = self._limits(lengths, m, width)
        if limits is not None:
            np.fmin(shown, limits, out=shown)

    def _limits(self, lengths: Array, m: int, width: int) -> Array | None:
        """Return +inf where a query sees a key and -inf elsewhere; None where all see all."""
        problem = self.problem
        shift: Any = 0
        if problem.band_from_end:
            shift = (lengths - problem.k_len)[:, None, None]
        keys = np.arange(width)
        ends = lengths[:, None, None]
        begins = None
        if problem.upper is not None:
            ends = np.minimum(ends, np.arange(m)[:, None] + (problem.upper + 1 + shift))
        if problem.lower is not None:
            begins = np.arange(m)[:, None] + (problem.lower + shift)
        if ends.min() >= width and (begins is None or begins.max() <= 0):
            return None
        seen = keys < ends
        if begins is not None:
            seen = seen & (keys >= begins)
        infinity = self.dtype.type(np.inf)
        limits: Array = np.where(seen, infinity, -infinity)
        return limits[:, None, None]


class _Products:
    """Products with keys or values of the entries of a group, those that each of them has."""

    def __init__(self, steps: Steps, lengths: Array, heads: int, rows: int) -> None:
        self._steps, self._heads, self._rows = steps, heads, rows
        self._some = np.flatnonzero(lengths)
        self._lengths, self._width = lengths[self._some], int(lengths.max())

    def multiply(self, a: Array, keys: Array, out: Array, transposed: bool) -> None:
        """Set `out` to products of `a` with keys, transposed, or with values.

        Parameters
        ----------
        a, out : ndarray, shape (entries * heads, rows, cols)
            Dense; columns of one of them are keys.
        keys : ndarray, shape (entries, heads, k_len, dim)
        transposed : bool
        """
        keys = self._readable(keys)
        _, heads, _, dim = keys.shape
        count = len(self._some)
        elements = int(self._lengths.sum()) * heads * dim
        if count <= _FEW_ENTRIES or (self._rows == 1 and elements > _VECTOR_ELEMENTS * count):
            self._one_by_one(a, keys, out, transposed)
        else:
            self._at_once(a, keys, out, transposed)

    def _one_by_one(self, a: Array, keys: Array, out: Array, transposed: bool) -> None:
        heads = self._heads
        for entry, length in zip(self._some.tolist(), self._lengths.tolist(), strict=True):
            of_entry = slice(entry * heads, (entry + 1) * heads)
            x, y, b = a[of_entry], out[of_entry], keys[entry, :, :length]
            if self._rows == 1 and b.shape[1] * b.shape[2] > blas.SERIAL_SUMS:
                self._vectors(x, b, y, transposed)
            elif transposed:
                self._steps.matmul(x, b.swapaxes(1, 2), y[:, :, :length])
            else:
                self._steps.matmul(x[:, :, :length], b, y)

    def _vectors(self, a: Array, keys: Array, out: Array, transposed: bool) -> None:
        """Multiply vectors, by parts that NumPy's library does not spread over threads.

        NumPy has one call for many products, while the library has none for vectors.
        """
        heads, length, dim = keys.shape
        size = max(1, blas.SERIAL_SUMS // dim)
        count = length // size
        whole = count * size
        first, rest = keys[:, :whole].reshape(heads, count, size, dim), keys[:, whole:]
        if transposed:
            parts = out[:, 0, :whole].reshape(heads, count, 1, size)
            np.matmul(a[:, None], first.swapaxes(2, 3), out=parts)
            np.matmul(a, rest.swapaxes(1, 2), out=out[:, :, whole:length])
            return
        sums = self._steps.scratch("parts", (heads, count, 1, dim))
        np.matmul(a[:, 0, :whole].reshape(heads, count, 1, size), first, out=sums)
        np.matmul(a[:, :, whole:length], rest, out=out)
        np.add(out, np.add.reduce(sums, axis=1), out=out)

    def _at_once(self, a: Array, keys: Array, out: Array, transposed: bool) -> None:
        dim, size = keys.shape[3], a.itemsize
        count, heads = len(self._some), np.arange(self._heads)
        sizes = np.empty((3, count), np.int32)
        sizes[:] = (self._rows,), (dim,), (dim,)
        sizes[1 if transposed else 2] = self._lengths
        steps = np.empty((3, count), np.int32)
        steps[:] = (a.shape[2],), (keys.strides[2] // size,), (out.shape[2],)
        at = np.empty((3, count, self._heads), np.uint64)
        for row, x in zip(at, (a, keys, out), strict=True):
            of_head = x.strides[1] if x is keys else x.strides[0]
            of_entry = x.strides[0] if x is keys else of_head * self._heads
            np.add((self._some * of_entry)[:, None], heads * of_head, out=row, casting="unsafe")
            row += np.uint64(x.ctypes.data)
        counts = np.full(count, self._heads, np.int32)
        groups = blas.Groups(counts, sizes, at.reshape(3, -1), steps)
        blas.multiply_groups(a.dtype, groups, transposed)

    def _readable(self, keys: Array) -> Array:
        """Return keys that the library can read: `keys`, or a copy of the first ones."""
        steps = self._steps
        direct = keys.dtype == steps.dtype and keys.flags.aligned
        if direct and blas.reads_rows(keys.strides, keys.shape[3], keys.itemsize):
            return keys
        keys = keys[:, :, : self._width]
        found = steps.scratch("k", keys.shape)
        steps.load(found, keys)
        return found


def _with_axes(view: View | None, before: tuple[Any, ...], is_keys: bool) -> View | None:
    """Return a view with axes of entries, heads and, but for keys, heads of a group."""
    if view is None:
        return None
    old = [*zip(*view, strict=True)]
    axes, taken = [], 0
    for place in before:
        axes.append((1, 0) if place is None else old[taken])
        taken += place is not None
    axes += old[taken:]
    if is_keys:
        del axes[2]  # they are the same there
    shape, strides = zip(*axes, strict=True)
    return View(shape, strides)
