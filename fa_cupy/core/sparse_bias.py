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
from fa_cupy.core import attention_problem, backends, checks
from fa_cupy.masks import checks as mask_checks
from fa_cupy.masks import entries

Array = npt.NDArray[Any]

# Formats with an array of all stored elements, whose order a gradient can have.
_ORDERED = ("bsr", "coo", "csc", "csr")


class Structure:
    """Where a sparse matrix has elements: as in CSR format, sorted and without duplicates.

    Attributes
    ----------
    shape : tuple of int
    begin : ndarray, shape (rows + 1,)
        Where the elements of each row begin.
    keys : ndarray
        The column of each element.
    order : ndarray or None
        Where each is in the array of the matrix; None if that has another form.
    """

    def __init__(
        self, shape: tuple[int, ...], begin: Array, keys: Array, order: Array | None
    ) -> None:
        self.shape, self.begin, self.keys, self.order = shape, begin, keys, order

    @classmethod
    def of_numbers(cls, name: str, arg: str, numbered: Any) -> Structure:
        """Return that of a matrix whose elements are 0, 1, 2 and so on.

        Raises
        ------
        TypeError, ValueError
            If it is no valid matrix, or has several elements of one pair.
        """
        csr = mask_checks.as_csr(name, arg, numbered)
        if csr.nnz != numbered.nnz:
            raise ValueError(
                f"{name}: {arg} stores several elements of one pair, want one "
                f"(call {arg}.sum_duplicates())"
            )
        return cls(numbered.shape, csr.indptr, csr.indices[: csr.nnz], csr.data[: csr.nnz])

    @functools.cached_property
    def _codes(self) -> Array:
        rows = np.repeat(np.arange(self.shape[0]), np.diff(self.begin))
        return entries.encoded(rows, self.keys)

    @functools.cached_property
    def pattern(self) -> BitMask:
        """The mask that shows the pairs with an element."""
        from scipy import sparse

        parts = np.ones(len(self.keys), np.bool_), self.keys, self.begin
        return BitMask.from_csr(sparse.csr_array(parts, shape=self.shape))

    def places(self, rows: Array, keys: Array) -> Array:
        """Return which of all elements pairs have, -1 for none."""
        stored, codes = self._codes, entries.encoded(rows, keys)
        if np.array_equal(stored, codes):
            return np.arange(len(codes))
        if not len(stored):
            return np.full(len(codes), -1)
        found = np.minimum(np.searchsorted(stored, codes), len(stored) - 1)
        found[stored[found] != codes] = -1
        return found

    def tile(self, tile: tuple[slice, slice, slice]) -> Tile:
        """Return the elements of some queries and keys."""
        rows, keys = tile[1:]
        queries = np.arange(rows.start, rows.stop)
        ends = (np.full(len(queries), key) for key in (keys.start, keys.stop))
        first, last = (np.searchsorted(self._codes, entries.encoded(queries, x)) for x in ends)
        counts = last - first
        row = np.repeat(np.arange(len(queries)), counts)
        places = np.arange(len(row)) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        return Tile(places, row, self.keys[places] - keys.start)


class Tile(NamedTuple):
    """Elements of some queries and keys."""

    places: Array  # among all elements
    row: Array
    col: Array


class SparseBias:
    """A sparse matrix that is given as a bias.

    Parameters
    ----------
    name, arg : str
        The public function and its argument that errors speak of.
    matrix : sparse array or matrix
        Of SciPy, in any format, or of CuPy.

    Attributes
    ----------
    shape : tuple of int
    dtype : numpy.dtype
    given : sparse array or matrix
        The matrix.
    device : int or None
        The CUDA device of a matrix of CuPy.
    structure : Structure
    values : ndarray
        The elements of a matrix of SciPy, in the order of rows and keys. Those of CuPy are looked
        at on their device only.

    Raises
    ------
    TypeError, ValueError
        If it is no valid sparse matrix with 2 axes, or of no float dtype.
    NotImplementedError
        If it is on a GPU whose stream is captured.
    """

    device: int | None = None
    values: Array

    def __init__(self, name: str, arg: str, matrix: Any) -> None:
        self.given = matrix
        if isinstance(matrix, type) or not hasattr(matrix, "dtype"):
            raise TypeError(f"{name}: {arg} is {checks.show(matrix)}, want a scipy.sparse matrix")
        self.shape = tuple(matrix.shape)
        self.dtype = attention_problem.float_dtype(name, arg, matrix)
        if type(matrix).__module__.startswith("cupyx."):
            pair_bias = backends.gpu("masks.pair_bias")
            self.device = pair_bias.device_of(matrix)
            self.structure = pair_bias.structure_of(name, arg, matrix)
        else:
            self.structure, self.values = _stored(name, arg, matrix)

    def check(self, name: str, q: Array, k: Array, out: Array | None = None) -> None:
        """Raise unless this can be the bias of queries and keys, with the output in `out`."""
        lengths = (*q.shape[-2:-1], *k.shape[-2:-1])
        if len(lengths) == 2 and self.shape != lengths:
            raise ValueError(f"{name}: bias has shape {self.shape}, want {lengths}")
        own = getattr(self.given, "data", None)
        if out is not None and hasattr(own, "strides") and core_arrays.overlap(out, own):
            raise ValueError(f"{name}: out overlaps bias in memory, want separate memory")

    def at(self, places: Array) -> Array:
        """Return the bias of pairs, given their places among all elements."""
        if not len(self.values):
            return np.zeros(len(places), self.dtype)
        return np.where(places < 0, self.dtype.type(0), self.values[places])

    def __getitem__(self, tile: tuple[slice, slice, slice]) -> Array:
        """Return the bias of some queries and keys, for all batch entries: (1, rows, keys)."""
        places, row, col = self.structure.tile(tile)
        shape = (1, *(part.stop - part.start for part in tile[1:]))
        found = np.zeros(shape, self.dtype)
        found[0, row, col] = self.values[places]
        return found

    def like(self, values: Array) -> Any:
        """Return a sparse matrix of the type and format of the bias with other elements.

        They are in the order of `values`. Where the bias has an array of its elements, and each
        pair once, the result has its in the same order.
        """
        from scipy import sparse

        where = self.structure
        if where.order is not None:
            found = _numbered(self.given).copy()  # which SciPy can do with numbers
            data = np.zeros(self.given.data.size, values.dtype)
            data[where.order] = values
            found.data = data.reshape(self.given.data.shape)
            return found
        kind = sparse.csr_matrix if sparse.isspmatrix(self.given) else sparse.csr_array
        indices = where.keys.copy(), where.begin.copy()
        form = self.given.format if sparse.issparse(self.given) else "csr"
        if form not in _ORDERED:
            return kind((values, *indices), shape=self.shape).asformat(form)
        # SciPy cannot convert 16-bit floats, so it converts numbers of elements. 0 fills the gaps.
        numbers = np.arange(1, 1 + len(values))
        found = kind((numbers, *indices), shape=self.shape).asformat(form)
        found.data = np.concatenate([np.zeros(1, values.dtype), values])[found.data]
        return found


def _stored(name: str, arg: str, matrix: Any) -> tuple[Structure, Array]:
    """Return where a matrix of SciPy has elements, and these, those of one pair summed.

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
        where = Structure(matrix.shape, begin, keys, order if ordered else None)
        return where, data.reshape(-1)[order]
    where = Structure(matrix.shape, begin, keys, None)
    every = numbered.tocoo()
    weights = data.reshape(-1)[every.data].astype(np.float64)
    values = np.bincount(where.places(every.row, every.col), weights, minlength=csr.nnz)
    return where, values.astype(data.dtype)


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
        return TileSums(self._total, self._bias.structure.tile(tile))

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
