"""The arguments `k_lengths` and `page_table` of attention: their checks, and what a problem holds.

Shapes and dtypes are checked of any array. Numbers are checked only where they are in the memory of
the host: an array on a device is never read back.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fa_cupy.core import broadcasting, checks
from fa_cupy.core.arrays import Laid
from fa_cupy.core.broadcasting import View

DTYPES = (np.dtype(np.int32), np.dtype(np.int64))
WANTED = "int32 or int64"
#: The arguments that say where keys are, in the order of `KeyArrays`.
PLACES = ("k_lengths", "page_table", "q_offsets", "k_offsets")
#: The number of keys of a page is a multiple of this.
PAGE_MULTIPLE = 16


class Pages(NamedTuple):
    """Keys and values in pages: key j of an entry is in page ``table[j // size]``.

    Attributes
    ----------
    size : int
        Keys of a page.
    count : int
        Pages that the arrays of keys and values have.
    k_stride, v_stride : int
        Bytes from a page to the next one in these arrays.
    table : View
        Of shape (*batch, pages_per_sequence), over the batch axes of the problem.
    dtype : numpy.dtype
        Of the table.
    """

    size: int
    count: int  # type: ignore[assignment]  # a tuple has a method of that name
    k_stride: int
    v_stride: int
    table: View
    dtype: np.dtype[Any]


class KeyArrays(NamedTuple):
    """The native arrays of a call that say where the keys are; those that are not given are None.

    Both offsets are given, or neither, and then nothing else is.
    """

    lengths: Any = None
    table: Any = None
    q_offsets: Any = None
    k_offsets: Any = None


class KeyLayout:
    """Key lengths and a page table, as their shapes, strides and dtypes tell.

    Parameters
    ----------
    name : str
        The public function that errors speak of.
    args : sequence of str
        Its names for q, k and v.
    arrays : sequence of array
        q, k and v.
    lengths, table : array or None
        Not both None.

    Attributes
    ----------
    k, v : array, or what has its shape, strides and dtype
        Of shape (..., heads, k_len, dim), also where they are in pages: as if all keys were in the
        first page.

    Raises
    ------
    TypeError, ValueError
    """

    def __init__(
        self, name: str, args: Sequence[str], arrays: Sequence[Any], lengths: Any, table: Any
    ) -> None:
        self._name = name
        self._lengths, self._table = lengths, table
        q, self.k, self.v = arrays
        for arg, array in (("k_lengths", lengths), ("page_table", table)):
            if array is not None and array.dtype not in DTYPES:
                raise TypeError(f"{name}: {arg} has dtype {array.dtype}, want {WANTED}")
        if table is not None:
            self._size, self._paged = _page_size(name, args, self.k, self.v, table), arrays[1:]
            self.k, self.v = (_as_rows(x, q.ndim, table.shape[-1]) for x in self._paged)

    @property
    def arg(self) -> str:
        """One of the arguments that are given."""
        return "page_table" if self._lengths is None else "k_lengths"

    def broadcast(self, batch: tuple[int, ...]) -> tuple[int, ...]:
        """Return the batch axes of scores, given those of all other arrays."""
        shapes = {}
        if self._lengths is not None:
            shapes["k_lengths"] = self._lengths.shape
        if self._table is not None:
            shapes["page_table"] = self._table.shape[:-1]
        entries = batch[:-1]
        for arg, shape in shapes.items():
            if shape and len(batch) < 2:
                raise ValueError(
                    f"{self._name}: {arg} has batch shape {shape}, want () for arrays of batch "
                    f"shape {batch}, which has no axes before the heads"
                )
            try:
                entries = np.broadcast_shapes(entries, shape)
            except ValueError:
                raise ValueError(
                    f"{self._name}: {arg} has batch shape {shape}, want one that broadcasts with "
                    f"{entries}, the batch axes before the heads"
                ) from None
        return (*entries, *batch[-1:])

    def fields(
        self, batch: tuple[int, ...], groups: tuple[int, ...], band_from_end: bool
    ) -> dict[str, Any]:
        """Return what a problem of these batch axes holds."""
        found: dict[str, Any] = {}
        if self._lengths is not None:
            lengths = self._lengths
            of_entries = _over_entries(batch, groups, lengths, lengths.shape, 1)
            found["k_lengths"] = View(of_entries.shape[:-1], of_entries.strides[:-1])
            found["k_lengths_dtype"] = lengths.dtype
            found["band_from_end"] = band_from_end
        if self._table is not None:
            k, v = self._paged
            *entries, per_sequence = self._table.shape
            view = _over_entries(batch, groups, self._table, entries, per_sequence)
            between = k.strides[0], v.strides[0]
            found["pages"] = Pages(self._size, k.shape[0], *between, view, self._table.dtype)
        return found


def _over_entries(
    batch: tuple[int, ...], groups: tuple[int, ...], array: Any, entries: Sequence[int], cols: int
) -> View:
    """Return the view (*batch, cols) of an array of shape (*entries, cols), or (*entries,)."""
    between = len(entries) and 1  # the heads, if there are axes before them
    strides = (*array.strides, *[array.dtype.itemsize] * (len(entries) + 1 - array.ndim))
    laid = Laid(
        (*entries, *[1] * between, 1, cols), (*strides[:-1], *[0] * between, 0, strides[-1]),
        array.dtype,
    )  # fmt: skip
    view = broadcasting.over(batch, groups, laid, 1, cols)
    return View(*((*x[:-2], x[-1]) for x in view))


def _page_size(name: str, args: Sequence[str], k: Any, v: Any, table: Any) -> int:
    """Return how many keys a page has, if keys and values are pages."""
    for arg, array, dim in zip(args[1:], (k, v), ("head_dim", "v_dim"), strict=False):
        if array.ndim != 4:
            raise ValueError(
                f"{name}: {arg} has shape {array.shape}, want (pages, heads, page_size, {dim}) "
                "with page_table"
            )
    if not table.ndim:
        raise ValueError(f"{name}: page_table has shape (), want (..., pages_per_sequence)")
    (k_pages, _, size, _), (v_pages, _, v_size, _) = k.shape, v.shape
    if size <= 0 or size % PAGE_MULTIPLE:
        raise ValueError(
            f"{name}: {args[1]} has page_size {size}, want a positive multiple of {PAGE_MULTIPLE}"
        )
    for what, got, want in (("pages", v_pages, k_pages), ("page_size", v_size, size)):
        if got != want:
            raise ValueError(f"{name}: {args[2]} has {what} {got}, {args[1]} has {want}")
    return int(size)


def _as_rows(pages: Any, axes: int, per_sequence: int) -> Laid:
    """Return the layout of pages as that of rows, valid in a page; of `axes` axes, 3 or 4."""
    _, heads, size, dim = pages.shape
    first = (1,) if axes >= 4 else ()  # heads are grouped in arrays of 4 axes only
    shape = (*first, heads, per_sequence * size, dim)
    return Laid(shape, (*[0] * len(first), *pages.strides[1:]), pages.dtype)


def separated(
    name: str, q: Any, places: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of the library of `q`, and those of the host as NumPy arrays.

    The first ones are still to be checked for their library and their device. `places` are the
    arguments that say where keys are, by name; those of offsets too.
    """
    given, host = {}, {}
    for arg, x in places.items():
        if arg == "k_lengths" and checks.is_int(x):
            if isinstance(x, bool) or abs(int(x)) > np.iinfo(np.int64).max:
                error = TypeError if isinstance(x, bool) else ValueError
                raise error(f"{name}: {arg} is {checks.show(x)}, want an int of 64 bits")
            host[arg] = np.asarray(int(x), np.int64)
        elif isinstance(x, (np.generic, float, list, tuple)):
            wanted = "an int or an array" if arg == "k_lengths" else "an array"
            raise TypeError(f"{name}: {arg} is {checks.show(x)}, want {wanted} of {WANTED}")
        elif type(x) is np.ndarray and not isinstance(q, np.ndarray):
            host[arg] = np.asarray(x, order="C")
        else:
            given[arg] = x
    return given, host


def check_numbers(name: str, problem: Any, keys: KeyArrays) -> None:
    """Raise a ValueError for lengths and numbers of pages on the host that are out of range.

    Entries of the table behind the last page that is needed may be any.
    """
    lengths, table = keys.lengths, keys.table
    on_host = isinstance(lengths, np.ndarray)
    if on_host:
        bad = (lengths < 0) | (lengths > problem.k_len)
        _raise_at(name, "k_lengths", lengths, bad, f"0 to {problem.k_len}, the number of keys")
    if not isinstance(table, np.ndarray) or not (lengths is None or on_host):
        return
    size, count = problem.pages.size, problem.pages.count
    needed = np.asarray(table.shape[-1]) if lengths is None else -(-lengths // size)
    bad = ((table < 0) | (table >= count)) & (np.arange(table.shape[-1]) < needed[..., None])
    wanted = f"0 to {count - 1}, of {count} pages" if count else "no page to be needed: there are 0"
    _raise_at(name, "page_table", table, bad, wanted)


def _raise_at(name: str, arg: str, array: Any, bad: Any, wanted: str) -> None:
    if bad.any():
        # The array may broadcast: its own axes are the last ones, and have size 1 along some.
        found = np.argwhere(bad)[0][bad.ndim - array.ndim :]
        at = tuple(int(i) if n > 1 else 0 for i, n in zip(found, array.shape, strict=True))
        where = f"[{', '.join(map(str, at))}]" if at else ""
        raise ValueError(f"{name}: {arg}{where} is {array[at]}, want {wanted}")


def on_device(backend: str, keys: KeyArrays) -> KeyArrays:
    """Return the arrays where the backend computes; its device must be the current one."""
    if backend == "numpy":
        return keys
    xp = sys.modules[backend]
    lengths, table, q = (_moved(xp, x) for x in keys[:3])
    same = keys.k_offsets is keys.q_offsets
    return KeyArrays(lengths, table, q, q if same else _moved(xp, keys.k_offsets))


def _moved(xp: Any, x: Any) -> Any:
    if not isinstance(x, np.ndarray):
        return x
    # A kernel writes one number, also while a stream is captured, when copies from the host fail.
    return xp.asarray(x) if x.ndim else xp.full((), x.item(), x.dtype)
