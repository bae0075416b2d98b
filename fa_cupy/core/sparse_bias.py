"""A bias of single pairs: the stored elements of a sparse matrix (q_len, k_len).

They are kept in the order of rows and keys, each pair once. Pairs without a stored element have a
bias of 0. No array has an element for each pair of a query and a key.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fa_cupy._bitmask import BitMask
from fa_cupy.core import arrays as core_arrays
from fa_cupy.core import attention_problem, checks
from fa_cupy.masks import checks as mask_checks
from fa_cupy.masks import entries

Array = npt.NDArray[Any]

# Formats with an array of all stored elements, whose order a gradient can have.
_ORDERED = ("bsr", "coo", "csc", "csr")


def is_sparse(x: Any) -> bool:
    """Return whether an argument is a sparse matrix, of any library."""
    return hasattr(x, "tocsr")


class SparseBias:
    """A sparse matrix that is given as a bias.

    Parameters
    ----------
    name, arg : str
        The public function and its argument that errors speak of.
    matrix : sparse array or matrix
        Of SciPy, in any format.

    Attributes
    ----------
    shape : tuple of int
    dtype : numpy.dtype

    Raises
    ------
    TypeError, ValueError
        If it is no valid sparse matrix with 2 axes, or of no float dtype.
    NotImplementedError
        If it is on a GPU.
    """

    def __init__(self, name: str, arg: str, matrix: Any) -> None:
        self._given = matrix
        if type(matrix).__module__.startswith("cupyx."):
            raise NotImplementedError(
                f"{name}: {arg} is a sparse matrix of CuPy, want an array (sparse biases are "
                "there on the CPU only)"
            )
        if isinstance(matrix, type) or not hasattr(matrix, "dtype"):
            raise TypeError(f"{name}: {arg} is {checks.show(matrix)}, want a scipy.sparse matrix")
        self.shape = tuple(matrix.shape)
        self.dtype = attention_problem.float_dtype(name, arg, matrix)
        self._stored = _stored(name, arg, matrix)

    @functools.cached_property
    def _codes(self) -> Array:
        rows = np.repeat(np.arange(self.shape[0]), np.diff(self._stored.begin))
        return entries.encoded(rows, self._stored.keys)

    @property
    def values(self) -> Array:
        """The stored elements, in the order of rows and keys."""
        return self._stored.values

    def check(self, name: str, q: Array, k: Array, out: Array | None = None) -> None:
        """Raise unless this can be the bias of queries and keys, with the output in `out`."""
        lengths = (*q.shape[-2:-1], *k.shape[-2:-1])
        if len(lengths) == 2 and self.shape != lengths:
            raise ValueError(f"{name}: bias has shape {self.shape}, want {lengths}")
        own = getattr(self._given, "data", None)
        if out is not None and isinstance(own, np.ndarray) and core_arrays.overlap(out, own):
            raise ValueError(f"{name}: out overlaps bias in memory, want separate memory")

    def pattern(self) -> BitMask:
        """Return the mask that shows the pairs with a stored element."""
        from scipy import sparse

        begin, keys, values, _ = self._stored
        ones = np.ones(len(values), np.bool_)
        return BitMask.from_csr(sparse.csr_array((ones, keys, begin), shape=self.shape))

    def places(self, rows: Array, keys: Array) -> Array:
        """Return which of `values` pairs have, -1 for none."""
        stored, codes = self._codes, entries.encoded(rows, keys)
        if np.array_equal(stored, codes):
            return np.arange(len(codes))
        if not len(stored):
            return np.full(len(codes), -1)
        found = np.minimum(np.searchsorted(stored, codes), len(stored) - 1)
        found[stored[found] != codes] = -1
        return found

    def at(self, places: Array) -> Array:
        """Return the bias of pairs, given their `places`."""
        if not len(self.values):
            return np.zeros(len(places), self.dtype)
        return np.where(places < 0, self.dtype.type(0), self.values[places])

    def tile(self, tile: tuple[slice, slice, slice]) -> Tile:
        """Return the stored elements of some queries and keys."""
        rows, keys = tile[1:]
        queries = np.arange(rows.start, rows.stop)
        ends = (np.full(len(queries), key) for key in (keys.start, keys.stop))
        first, last = (np.searchsorted(self._codes, entries.encoded(queries, x)) for x in ends)
        counts = last - first
        row = np.repeat(np.arange(len(queries)), counts)
        places = np.arange(len(row)) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        return Tile(places, row, self._stored.keys[places] - keys.start)

    def __getitem__(self, tile: tuple[slice, slice, slice]) -> Array:
        """Return the bias of some queries and keys, for all batch entries: (1, rows, keys)."""
        places, row, col = self.tile(tile)
        shape = (1, *(part.stop - part.start for part in tile[1:]))
        found = np.zeros(shape, self.dtype)
        found[0, row, col] = self.values[places]
        return found

    def like(self, values: Array) -> Any:
        """Return a sparse matrix of the type and format of the bias with other stored elements.

        They are in the order of `values`. Where the bias has an array of its elements, and each
        pair once, the result has its in the same order.
        """
        from scipy import sparse

        begin, keys, _, order = self._stored
        if order is not None:
            found = _numbered(self._given).copy()  # which SciPy can do with numbers
            data = np.zeros(self._given.data.size, values.dtype)
            data[order] = values
            found.data = data.reshape(self._given.data.shape)
            return found
        kind = sparse.csr_matrix if sparse.isspmatrix(self._given) else sparse.csr_array
        made = kind((values, keys.copy(), begin.copy()), shape=self.shape)
        return made.asformat(self._given.format) if sparse.issparse(self._given) else made


class Tile(NamedTuple):
    """Stored elements of some queries and keys."""

    places: Array  # in `SparseBias.values`
    row: Array
    col: Array


class _Stored(NamedTuple):
    """The elements of a sparse matrix as of one in CSR format, sorted and without duplicates."""

    begin: Array
    keys: Array
    values: Array
    order: Array | None  # where each is in the array of the matrix; None if that has another form


def _stored(name: str, arg: str, matrix: Any) -> _Stored:
    """Return the elements of a matrix of SciPy, those of one pair summed.

    SciPy sorts their numbers in place of them: it cannot compute with 16-bit floats.
    """
    ordered = getattr(matrix, "format", None) in _ORDERED and hasattr(matrix, "data")
    if not ordered:
        matrix = mask_checks.as_csr(name, arg, matrix)
    data = np.asarray(matrix.data)
    numbered = _numbered(matrix)
    csr = mask_checks.as_csr(name, arg, numbered)
    begin, keys, order = csr.indptr, csr.indices[: csr.nnz], csr.data[: csr.nnz]
    if numbered.nnz == csr.nnz:
        values = data.reshape(-1)[order]
        return _Stored(begin, keys, values, order if ordered else None)
    every = numbered.tocoo()
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(begin))
    place = np.searchsorted(entries.encoded(rows, keys), entries.encoded(every.row, every.col))
    weights = data.reshape(-1)[every.data].astype(np.float64)
    values = np.bincount(place, weights, minlength=csr.nnz)
    return _Stored(begin, keys, values.astype(data.dtype), None)


def _numbered(matrix: Any) -> Any:
    """Return a matrix with the same indices and numbers as its stored elements."""
    found = copy.copy(matrix)
    found.data = np.arange(matrix.data.size).reshape(matrix.data.shape)
    return found


class Sums:
    """The gradient of a sparse bias while it is summed: a `tiled.gradients.Gradient`."""

    #: There is no array to be looked at for each batch entry.
    sums: Any = None
    view: Any = None

    def __init__(self, bias: SparseBias) -> None:
        self._bias = bias
        self._total = np.zeros(len(bias.values))

    def __getitem__(self, tile: tuple[slice, slice, slice]) -> TileSums:
        return TileSums(self._total, self._bias.tile(tile))

    def add(self, places: Array, terms: Array) -> None:
        """Add terms (n, e) of pairs, each of which is there once, that have these places."""
        some = places >= 0
        self._total[places[some]] += terms[:, some].sum(axis=0, dtype=np.float64)

    def finished(self, steps: Any) -> Any:
        """Return the gradient as a sparse matrix like the bias."""
        return self._bias.like(self._total.astype(self._bias.dtype))


class TileSums(NamedTuple):
    """The part of `Sums` that a tile of scores adds to."""

    total: Array
    tile: Tile

    def of(self, term: Array) -> Array:
        """Return what (n, rows, keys) adds to each stored element, summed over batch entries."""
        if term.ndim == 1:
            return term
        found: Array = term[:, self.tile.row, self.tile.col].sum(axis=0, dtype=np.float64)
        return found

    def add(self, term: Array) -> None:
        """Add what `of` returned."""
        self.total[self.tile.places] += term
