"""Batch entries with key lengths and page tables: each one is a problem with its own keys.

No entry computes anything for keys that it does not have. Keys in pages are read where they are by
few queries, and otherwise copied tile by tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fa_cupy.core.attention_problem import Problem, View
from fa_cupy.cpu import blas
from fa_cupy.keys import offsets
from fa_cupy.keys.layout import KeyArrays, check_numbers
from fa_cupy.keys.sequences import band_of
from fa_cupy.tiled import batching

Array = npt.NDArray[Any]

# From so many pages on they are copied all at once, with the rows of the first and the last one
# that are not wanted.
_MANY_PAGES = 4
# Of so many queries at most, products read pages where they are: of more, each page would have a
# product with values of many rows of its own, which are summed then.
_MOST_QUERIES = 16
# Elements of products with the values of pages that are summed at a time.
_SUMMED = 1 << 18
_MOST_INT = (1 << 63) - 1


class PagedRows:
    """Keys or values (n, length, dim) of n heads of one batch entry that lie in pages.

    Parameters
    ----------
    pages : ndarray, shape (count, n, page_size, dim)
    numbers : ndarray of intp, shape (pages_per_sequence,)
    begin, end : int
        The rows, counted from the beginning of the first page.
    in_place : bool, optional
        Whether products may read them where they are, as `multiply` does.
    transposed : bool, optional
        Whether they are columns for `multiply`.
    """

    def __init__(
        self, pages: Array, numbers: Array, begin: int, end: int, in_place: bool = False,
        transposed: bool = False,
    ) -> None:  # fmt: skip
        self._pages, self._numbers = pages, numbers
        self._begin, self._end = begin, end
        self.in_place, self._transposed = in_place, transposed

    @classmethod
    def of(cls, rows: Array, source: PageSource, stride: int, in_place: bool = False) -> PagedRows:
        """Return those of the heads of `rows`, which is right in the first page only.

        Parameters
        ----------
        rows : ndarray, shape (n, length, dim)
        source : PageSource
        stride : int
            Bytes from a page to the next one.
        in_place : bool, optional
            Whether products may read them where they are, if they are aligned.
        """
        n, length, dim = rows.shape
        shape = (source.pages, n, source.size, dim)
        pages = np.lib.stride_tricks.as_strided(rows, shape, (stride, *rows.strides))
        return cls(pages, source.numbers, 0, length, in_place and rows.flags.aligned)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Heads, rows and dims."""
        _, n, _, dim = self._pages.shape
        return n, self._end - self._begin, dim

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of the pages."""
        return self._pages.dtype

    def __getitem__(self, index: tuple[slice, slice]) -> PagedRows:
        """Return some rows of all heads."""
        rows = index[1]
        begin, end = self._begin + rows.start, self._begin + rows.stop
        return PagedRows(self._pages, self._numbers, begin, end, self.in_place)

    def to_copy(self) -> PagedRows:
        """Return the same rows, which no product reads where they are."""
        return PagedRows(self._pages, self._numbers, self._begin, self._end)

    def swapaxes(self, first: int, second: int) -> PagedRows:
        """Return the rows as columns, for `multiply`."""
        return PagedRows(self._pages, self._numbers, self._begin, self._end, self.in_place, True)

    def multiply(
        self, a: Array, out: Array, add: bool, scratch: Callable[[str, tuple[int, ...]], Array]
    ) -> None:
        """Set `out` to ``a @ rows``, or to ``a @ columns``, or add that.

        Parameters
        ----------
        a, out : ndarray, shape (n, rows, cols)
            Elements of a row lie densely.
        add : bool
            Not with columns.
        scratch : callable
            ``scratch(name, shape)`` returns memory.
        """
        size = self._pages.shape[2]
        first, last = self._begin // size, -(-self._end // size)
        begins = np.arange(first, last) * size
        ends = np.minimum(begins + size, self._end)
        begins[:1] = self._begin
        if self._transposed:
            return self._multiply(a, begins, ends, out[None])
        step = max(1, _SUMMED // max(1, out.size))
        for i in range(0, len(begins), step):
            part = slice(i, i + step)
            sums = scratch("pages", (len(begins[part]), *out.shape))
            self._multiply(a, begins[part], ends[part], sums)
            if add:
                np.add(out, np.add.reduce(sums, axis=0), out=out)
            else:
                np.add.reduce(sums, axis=0, out=out)
            add = True

    def _multiply(self, a: Array, begins: Array, ends: Array, out: Array) -> None:
        """Multiply pieces of pages, whose rows are given by their ends, all at once.

        `out` (1, n, rows, cols) has the products with columns side by side, and (pieces, n, rows,
        dim) those with rows.
        """
        _, heads, size, dim = self._pages.shape
        count, itemsize = len(begins), self.dtype.itemsize
        of_page, of_head, of_row, _ = self._pages.strides
        columns = (begins - self._begin) * itemsize
        numbers, places = self._numbers[begins // size], begins % size
        at_a, at_rows = np.zeros(count, np.int64), numbers * of_page + places * of_row
        at_out = columns if self._transposed else np.arange(count) * out.strides[0]
        if not self._transposed:
            at_a = columns
        addresses = np.empty((3, count, heads), np.uint64)
        for row, x, at, step in zip(
            addresses, (a, self._pages, out), (at_a, at_rows, at_out),
            (a.strides[0], of_head, out.strides[1]), strict=True,
        ):  # fmt: skip
            np.add(at[:, None], np.arange(heads) * step, out=row, casting="unsafe")
            row += np.uint64(x.ctypes.data)
        sizes, steps = np.empty((2, 3, count), np.int32)
        sizes[:] = (a.shape[1],), (dim,), (dim,)
        sizes[1 if self._transposed else 2] = ends - begins
        steps[:] = [(stride // itemsize,) for stride in (a.strides[1], of_row, out.strides[2])]
        counts = np.full(count, heads, np.int32)
        groups = blas.Groups(counts, sizes, addresses.reshape(3, -1), steps)
        blas.multiply_groups(a.dtype, groups, self._transposed)

    def copied(self, empty: Callable[[tuple[int, ...]], Array]) -> Array:
        """Return a copy; ``empty(shape)`` makes the memory. Equal heads are copied once."""
        heads = 1 if self._pages.strides[1] == 0 else self._pages.shape[1]
        size = self._pages.shape[2]
        first, last = self._begin // size, -(-self._end // size)
        whole = self._whole(heads) if last - first >= _MANY_PAGES else None
        if whole is None:
            found = empty((heads, *self.shape[1:]))
            self._copy_to(found)
        else:
            found = self._taken(whole, empty, heads, first, last)
        return np.broadcast_to(found, self.shape)

    def _copy_to(self, out: Array) -> None:
        """Copy the rows page by page."""
        size, row = self._pages.shape[2], self._begin
        while row < self._end:
            page, begin = divmod(row, size)
            stop = min(self._end, (page + 1) * size)
            rows = self._pages[self._numbers[page], : len(out), begin : begin + stop - row]
            np.copyto(out[:, row - self._begin : stop - self._begin], rows)
            row = stop

    def _taken(
        self, whole: Array, empty: Callable[[tuple[int, ...]], Array], heads: int, first: int,
        last: int,
    ) -> Array:  # fmt: skip
        """Return the rows as a part of a copy of the pages first to last, all at once."""
        _, _, size, dim = self._pages.shape
        page, head = (stride // whole.strides[0] for stride in self._pages.strides[:2])
        places = self._numbers[first:last] * page + head * np.arange(heads)[:, None]
        out = empty((heads, last - first, size * dim))
        np.take(whole, places, axis=0, out=out, mode="clip")
        begin = self._begin - first * size
        rows = out.reshape(heads, (last - first) * size, dim)
        return rows[:, begin : begin + self._end - self._begin]

    def _whole(self, heads: int) -> Array | None:
        """Return the pages as rows of one array, each a page of one head, if they are that.

        `numpy.take` reads them without a step in Python for each page.
        """
        count, _, size, dim = self._pages.shape
        page, head = self._pages.strides[:2]
        nbytes = size * dim * self.dtype.itemsize
        if not count or not nbytes or page < 0 or head < 0 or page % nbytes or head % nbytes:
            return None
        one = self._pages[0, 0]
        rows = (count - 1) * (page // nbytes) + (heads - 1) * (head // nbytes) + 1
        strides = nbytes, self.dtype.itemsize
        whole = np.lib.stride_tricks.as_strided(one, (rows, size * dim), strides)
        return whole if one.flags.c_contiguous and whole.flags.aligned else None


class PageSource(NamedTuple):
    """Where the keys of one batch entry lie.

    Attributes
    ----------
    numbers : ndarray
        Of its pages.
    size, pages : int
        Rows of a page, and pages that there are.
    strides : tuple of int
        Bytes from a page to the next, of keys and of values.
    """

    numbers: Array
    size: int
    pages: int
    strides: tuple[int, int]

    def rows(self, k: Array, v: Array, in_place: bool) -> tuple[PagedRows, PagedRows]:
        """Return keys and values of stacked heads."""
        k_stride, v_stride = self.strides
        return (
            PagedRows.of(k, self, k_stride, in_place),
            PagedRows.of(v, self, v_stride, in_place),
        )


def reads_in_place(problem: Problem, dtype: np.dtype[Any]) -> bool:
    """Whether products of a problem with pages, in `dtype`, read them where they are."""
    if problem.pages is None or problem.dtype != dtype or problem.q_len > _MOST_QUERIES:
        return False
    rows = (problem.k, problem.head_dim), (problem.v, problem.v_dim)
    return blas.multiplies_groups(dtype) and all(
        dim > 0 and blas.reads_rows(view.strides, dim, dtype.itemsize) for view, dim in rows
    )


class Entry(NamedTuple):
    """One batch entry with all its heads, or all entries of a problem where lengths are equal.

    Attributes
    ----------
    arrays : list of ndarray or None
        q, k, v, bias, mask, out, lse (with an axis of size 1 behind) and sinks.
    length : int
        Of its keys.
    first : int
        The number b of the entry.
    source : PageSource or None
    """

    arrays: list[Any]
    length: int
    first: int
    source: PageSource | None


class Entries:
    """The entries of calls that differ in the numbers of lengths and pages alone.

    Parameters
    ----------
    problem : Problem
    out, lse : View
        Of the output and the LSE (with an axis of size 1 behind), over its batch axes.
    """

    def __init__(self, problem: Problem, out: View, lse: View) -> None:
        self._problem = problem
        self._axes = max(0, len(problem.out_shape) - 3)
        views = [
            problem.q, problem.k, problem.v, problem.bias, problem.mask, out, lse, problem.sinks,
        ]  # fmt: skip
        self._views = [None if view is None else SeenThrough(view) for view in views]

    def lengths(self, keys: KeyArrays) -> Array:
        """Return the length of each entry, over the axes of entries."""
        problem, shape = self._problem, self._problem.batch[: self._axes]
        if problem.k_lengths is None:
            return np.full(shape, problem.k_len)
        if keys.lengths.size == 1:
            return np.full(shape, keys.lengths.item())
        if keys.lengths.shape == shape:
            return np.asarray(keys.lengths)
        return _over(keys.lengths, problem.k_lengths, self._axes)

    def each(
        self, arrays: Sequence[Any], keys: KeyArrays, lengths: Array, wanted: Sequence[int]
    ) -> Iterator[Entry]:
        """Yield the wanted entries.

        Parameters
        ----------
        arrays : list of ndarray or None
            As those of an `Entry`, of all entries.
        keys : KeyArrays
        lengths : ndarray
            From `lengths`.
        wanted : sequence of int
            Numbers of entries.
        """
        pages, tables = self._problem.pages, None
        if pages is not None:
            tables = _over(keys.table, pages.table, self._axes, 1)
        seen = self._seen(arrays)
        places = [*np.ndindex(lengths.shape)]
        for number in wanted:
            place, source = places[number], None
            if pages is not None and tables is not None:
                strides, numbers = (pages.k_stride, pages.v_stride), tables[place].astype(np.intp)
                source = PageSource(numbers, pages.size, pages.count, strides)
            length = int(lengths[place])
            yield Entry(_cut([None if x is None else x[place] for x in seen], length), length,
                        number, source)  # fmt: skip

    def together(self, arrays: Sequence[Any], length: int) -> Entry:
        """Return all entries as one, which have the same length and no pages."""
        return Entry(_cut(self._seen(arrays), length), length, 0, None)

    def problem_of(self, entry: Entry, together: bool = False) -> tuple[Problem, View, View]:
        """Return an entry as a problem of its own, with the views of its output and its LSE.

        It has no `k_lengths`. Its `pages` say that there are pages, in the `source` of the entry.
        """
        axes = 0 if together else self._axes
        return _alone(self._problem, entry, axes)

    def _seen(self, arrays: Sequence[Any]) -> list[Any]:
        return [
            None if x is None or view is None else view(x)
            for x, view in zip(arrays, self._views, strict=True)
        ]


def _cut(arrays: list[Any], length: int) -> list[Any]:
    """Return the arrays of an entry without what is behind its end."""
    q, k, v, bias, mask, out, lse, sinks = arrays
    k, v = (x[..., :length, :] for x in (k, v))
    bias, mask = (None if x is None else x[..., :length] for x in (bias, mask))
    return [q, k, v, bias, mask if length else None, out, lse, sinks]


def _alone(problem: Problem, entry: Entry, axes: int) -> tuple[Problem, View, View]:
    views: list[Any] = [None if x is None else View(x.shape, x.strides) for x in entry.arrays]
    q, k, v, bias, mask, out, lse, sinks = views
    length = entry.length
    lower, upper = band_of(problem, problem.q_len, length)
    alone = replace(
        problem, batch=problem.batch[axes:], k_len=length, out_shape=problem.out_shape[axes:],
        q=q, k=k, v=v, bias=bias, mask=mask, sinks=sinks, lower=lower, upper=upper,
        k_lengths=None, band_from_end=False,
    )  # fmt: skip
    return alone, out, lse


class SeenThrough:
    """A view of arrays that all have the same shape and the same strides.

    Attributes
    ----------
    view : View
    """

    def __init__(self, view: View) -> None:
        self.view = view
        self._dense = math.prod(view.shape) if batching.is_dense(view) else 0

    def __call__(self, array: Array) -> Array:
        """Return an array seen through the view, without a copy."""
        shape, strides = self.view
        if array.shape == shape and array.strides == strides:
            return array
        if not array.size and 0 not in shape:  # no page at all, and so no key that is read
            return np.zeros(shape, array.dtype)
        # The same in a tenth of the time, where elements of both follow each other.
        if array.size == self._dense and array.flags.c_contiguous:
            return array.reshape(shape)
        return np.lib.stride_tricks.as_strided(array, shape, strides)


def _over(array: Array, view: View, axes: int, more: int = 0) -> Array:
    """Return an array over the first `axes` axes of a view, and its last `more` ones."""
    keep = [*range(axes), *range(len(view.shape) - more, len(view.shape))]
    shape, strides = (tuple(x[axis] for axis in keep) for x in view)
    return np.lib.stride_tricks.as_strided(array, shape, strides)


def key_arrays(k_lengths: Any, page_table: Any, q_offsets: Any, k_offsets: Any) -> KeyArrays | None:
    """Return the arguments of a call as arrays; None where they need more than a look."""
    if q_offsets is not None or k_offsets is not None:
        together = k_lengths is page_table is None and type(q_offsets) is np.ndarray
        if not together or not (k_offsets is None or type(k_offsets) is np.ndarray):
            return None
        return offsets.key_arrays(q_offsets, k_offsets)
    if type(k_lengths) is int and 0 <= k_lengths <= _MOST_INT:
        k_lengths = np.asarray(k_lengths, np.int64)
    if not all(x is None or type(x) is np.ndarray for x in (k_lengths, page_table)):
        return None
    return KeyArrays(k_lengths, page_table)


def check(problem: Problem, keys: KeyArrays, name: str = "attention") -> None:
    """Raise as `check_numbers` does, in less time where lengths are right and there is no table."""
    if problem.offsets is not None:
        offsets.check_numbers(name, (problem.q_len, problem.k_len), keys)
        return
    lengths = keys.lengths
    right = keys.table is None and lengths.min(initial=0) >= 0
    if not (right and lengths.max(initial=0) <= problem.k_len):
        check_numbers(name, problem, keys)
