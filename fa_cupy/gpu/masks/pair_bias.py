"""A sparse matrix of CuPy as bias: its elements in the order of the pairs that kernels read.

Where an element goes is found out on the CPU, where the lists of pairs are made, and kept: a matrix
whose indices are those of one before is recognised on its device. The elements stay there.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from typing import Any

import cupy
import numpy as np

from fa_cupy._bitmask import BitMask
from fa_cupy.core.sparse_bias import SparseBias, Structure
from fa_cupy.gpu import workspace
from fa_cupy.gpu.masks import pair_lists
from fa_cupy.gpu.masks.binding import apart
from fa_cupy.tiled.softcap import in_range

Array = Any  # cupy.ndarray
_SINGLE = np.dtype(np.float32)
_INDICES = {
    "coo": ("row", "col"),
    "csc": ("indices", "indptr"),
    "csr": ("indices", "indptr"),
}
# Structures of matrices with copies of their indices, those that were asked for last.
_KEPT: OrderedDict[Any, tuple[list[Array], Structure]] = OrderedDict()
_MOST = 8
_changing = threading.Lock()


def device_of(matrix: Any) -> int:
    """Return the CUDA device of a sparse matrix of CuPy."""
    return int(matrix.data.data.device_id)


def structure_of(name: str, arg: str, matrix: Any) -> Structure:
    """Return where a matrix has elements, known or found out on the CPU.

    Parameters
    ----------
    name, arg : str
        The public function and its argument that errors speak of.
    matrix : cupyx.scipy.sparse.spmatrix
    """
    if matrix.format not in _INDICES:
        raise TypeError(f"{name}: {arg} has format {matrix.format}, want csr, csc or coo")
    workspace.refuse(name, "the host reads the indices of a sparse bias")
    with cupy.cuda.Device(device_of(matrix)):
        indices = [getattr(matrix, part) for part in _INDICES[matrix.format]]
        sizes = tuple([len(x) for x in indices])
        kind = device_of(matrix), matrix.format, tuple(matrix.shape), matrix.data.size, sizes
        with _changing:
            candidates = [(key, kept) for key, kept in _KEPT.items() if key[:-1] == kind]
        for key, (own, structure) in candidates:
            if all(bool((x == y).all()) for x, y in zip(own, indices, strict=True)):
                with _changing:
                    if key in _KEPT:
                        _KEPT.move_to_end(key)
                return structure
        own = [x.copy() for x in indices]  # there when the next line has waited for the stream
        structure = Structure.of_numbers(name, arg, _numbered(name, arg, matrix, own))
        with _changing:
            _KEPT[(*kind, id(structure))] = own, structure
            while len(_KEPT) > _MOST:
                _KEPT.popitem(last=False)
    return structure


def _numbered(name: str, arg: str, matrix: Any, indices: list[Array]) -> Any:
    """Return a matrix of SciPy with the same indices, and numbers as elements."""
    from scipy import sparse

    numbers, found = np.arange(matrix.data.size), tuple([x.get() for x in indices])
    parts = (numbers, found) if matrix.format == "coo" else (numbers, *found)
    try:
        return getattr(sparse, f"{matrix.format}_matrix")(parts, shape=matrix.shape)
    except ValueError as error:
        raise ValueError(f"{name}: {arg} is not a valid sparse matrix: {error}") from error


class PairPlaces:
    """Where the pairs of a mask have their elements in the array of a bias.

    Parameters
    ----------
    structure : Structure
        Of a matrix of CuPy.
    mask : BitMask
    """

    def __init__(self, structure: Structure, mask: BitMask) -> None:
        found = pair_lists.lists_of(mask).by_query
        q_len = max(1, mask._grid.q_len)
        rows = np.repeat(np.arange(len(found.begin) - 1), np.diff(found.begin)) % q_len
        places, order = structure.places(rows, found.columns), structure.order
        assert order is not None
        there = np.flatnonzero(places >= 0)
        sources = order[places[there]]
        self.structure = structure
        self._pairs, self._elements = len(places), len(order)
        self._in_order = np.array_equal(sources, np.arange(max(self._pairs, self._elements)))
        # Of each matrix of the mask, which pairs have an element, and which one that is.
        begins = np.searchsorted(there, found.begin[::q_len])
        with apart() as stream:
            self._parts = [
                (cupy.asarray(there[begin:end]), cupy.asarray(sources[begin:end]))
                for begin, end in itertools.pairwise(begins.tolist())
                if end > begin
            ]
            stream.synchronize()

    @classmethod
    def of(cls, bias: SparseBias, mask: BitMask) -> PairPlaces:
        """Return those of a bias, which a mask keeps for the next call."""
        key = "bias", bias.device
        found: PairPlaces | None = mask._store.pairs.get(key)
        if found is None or found.structure is not bias.structure:
            found = mask._store.pairs[key] = cls(bias.structure, mask)
        return found

    def numbers(self, bias: SparseBias) -> Array:
        """Return the bias of each pair as float32, at least one."""
        data = bias.given.data
        if self._in_order and self._pairs:
            return in_range(cupy, data, _SINGLE).astype(np.float32)
        found = cupy.zeros(max(1, self._pairs), np.float32)
        for pairs, elements in self._parts:
            found[pairs] = in_range(cupy, data[elements], _SINGLE).astype(np.float32)
        return found

    def gradient(self, bias: SparseBias, sums: Array) -> Any:
        """Return the gradient of the bias as a matrix like it, given that of `numbers`.

        A pair of several matrices of the mask has a number in each of them. They are added in turn,
        so that results are repeatable.
        """
        total = cupy.zeros(bias.given.data.size, np.float32)
        for pairs, elements in self._parts:
            total[elements] = total[elements] + sums[pairs]
        return _like(bias, total)


def gradient_without_pairs(bias: SparseBias) -> Any:
    """Return the gradient of a bias that is added to no score."""
    return _like(bias, cupy.zeros(bias.given.data.size, np.float32))


def _like(bias: SparseBias, values: Array) -> Any:
    found = bias.given.copy()
    found.data = values.astype(bias.dtype)
    return found
