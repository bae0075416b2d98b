"""Batch entries with key lengths and page tables: each one is a problem with its own keys.

No entry computes anything for keys that it does not have. Keys in pages are copied tile by tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fa_cupy.core.attention_problem import Problem, View
from fa_cupy.keys.layout import KeyArrays

Array = npt.NDArray[Any]

# From so many pages on they are copied all at once, with the rows of the first and the last one
# that are not wanted.
_MANY_PAGES = 4


class PagedRows:
    """Keys or values (n, length, dim) of n heads of one batch entry that lie in pages.

    Parameters
    ----------
    pages : ndarray, shape (count, n, page_size, dim)
    numbers : ndarray of intp, shape (pages_per_sequence,)
    begin, end : int
        The rows, counted from the beginning of the first page.
    """

    def __init__(self, pages: Array, numbers: Array, begin: int, end: int) -> None:
        self._pages, self._numbers = pages, numbers
        self._begin, self._end = begin, end

    @classmethod
    def of(cls, rows: Array, source: PageSource, stride: int) -> PagedRows:
        """Return those of the heads of `rows`, which is right in the first page only.

        Parameters
        ----------
        rows : ndarray, shape (n, length, dim)
        source : PageSource
        stride : int
            Bytes from a page to the next one.
        """
        n, length, dim = rows.shape
        shape = (source.pages, n, source.size, dim)
        pages = np.lib.stride_tricks.as_strided(rows, shape, (stride, *rows.strides))
        return cls(pages, source.numbers, 0, length)

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
        return PagedRows(self._pages, self._numbers, begin, end)

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

    def rows(self, k: Array, v: Array) -> tuple[PagedRows, PagedRows]:
        """Return keys and values of stacked heads."""
        k_stride, v_stride = self.strides
        return PagedRows.of(k, self, k_stride), PagedRows.of(v, self, v_stride)


class Entry(NamedTuple):
    """One batch entry, with all its heads, as a problem of its own.

    Attributes
    ----------
    problem : Problem
        Without `k_lengths`. Its `pages` say that there are pages, in `source`.
    arrays : list of ndarray or None
        q, k, v, bias, mask, out, lse (with an axis of size 1 behind) and sinks.
    views : list of View
        Of out and lse.
    first : int
        The number b of the entry.
    source : PageSource or None
    """

    problem: Problem
    arrays: list[Any]
    views: list[View]
    first: int
    source: PageSource | None


def entries(
    problem: Problem, arrays: Sequence[Any], views: list[View], keys: KeyArrays
) -> Iterator[Entry]:
    """Yield the entries of a problem; of equal lengths without pages, one that has all of them.

    Parameters
    ----------
    problem : Problem
    arrays : list of ndarray or None
        As those of an `Entry`.
    views : list of View
        Of out and lse, over the batch axes of the problem.
    keys : KeyArrays
    """
    axes = max(0, len(problem.out_shape) - 3)
    batch = problem.batch[:axes]
    lengths = np.full(batch, problem.k_len)
    if problem.k_lengths is not None:
        lengths = _over(keys.lengths, problem.k_lengths, axes)
    if problem.pages is None and lengths.size and (lengths == lengths.flat[0]).all():
        axes, batch, lengths = 0, (), np.asarray(lengths.flat[0])
    tables = None
    if problem.pages is not None:
        tables = _over(keys.table, problem.pages.table, axes, 1)
    given = (
        problem.q, problem.k, problem.v, problem.bias, problem.mask, *views, problem.sinks,
    )  # fmt: skip
    seen = [
        None if x is None or view is None else np.lib.stride_tricks.as_strided(x, *view)
        for x, view in zip(arrays, given, strict=True)
    ]
    for first, entry in enumerate(np.ndindex(batch)):
        parts = [None if x is None else x[entry] for x in seen]
        source = None
        if problem.pages is not None and tables is not None:
            pages = problem.pages
            strides = pages.k_stride, pages.v_stride
            numbers = tables[entry].astype(np.intp)
            source = PageSource(numbers, pages.size, pages.count, strides)
        yield _entry(problem, parts, axes, int(lengths[entry]), first, source)


def _entry(
    problem: Problem, parts: list[Any], axes: int, length: int, first: int,
    source: PageSource | None,
) -> Entry:  # fmt: skip
    q, k, v, bias, mask, out, lse, sinks = parts
    k, v = (x[..., :length, :] for x in (k, v))
    bias, mask = (None if x is None else x[..., :length] for x in (bias, mask))
    if length == 0:
        mask = None
    shift = length - problem.k_len if problem.band_from_end else 0
    lower, upper = (None if x is None else x + shift for x in (problem.lower, problem.upper))
    if lower is not None and lower <= 1 - problem.q_len:
        lower = None
    if upper is not None and upper >= length - 1:
        upper = None

    def view(x: Array) -> View:
        return View(x.shape, x.strides)

    alone = replace(
        problem, batch=problem.batch[axes:], k_len=length, out_shape=problem.out_shape[axes:],
        q=view(q), k=view(k), v=view(v), bias=None if bias is None else view(bias),
        mask=None if mask is None else view(mask), sinks=None if sinks is None else view(sinks),
        lower=lower, upper=upper, k_lengths=None, band_from_end=False,
    )  # fmt: skip
    parts = [q, k, v, bias, mask, out, lse, sinks]
    return Entry(alone, parts, [view(out), view(lse)], first, source)


def _over(array: Array, view: View, axes: int, more: int = 0) -> Array:
    """Return an array over the first `axes` axes of a view, and its last `more` ones."""
    keep = [*range(axes), *range(len(view.shape) - more, len(view.shape))]
    shape, strides = (tuple(x[axis] for axis in keep) for x in view)
    return np.lib.stride_tricks.as_strided(array, shape, strides)
