"""A sparse matrix of CuPy as bias: its elements in the order of the pairs that kernels read.

Where an element goes is found out on the CPU, where the lists of pairs are made. The elements stay
on their device.
"""

from __future__ import annotations

import itertools
from typing import Any

import cupy
import numpy as np
import numpy.typing as npt

from fa_cupy._bitmask import BitMask
from fa_cupy.core.sparse_bias import SparseBias
from fa_cupy.gpu import workspace
from fa_cupy.gpu.masks import pair_lists

Array = Any  # cupy.ndarray
_INDICES = {
    "coo": ("row", "col"),
    "csc": ("indices", "indptr"),
    "csr": ("indices", "indptr"),
}


def numbered(name: str, arg: str, matrix: Any) -> tuple[int, Any]:
    """Return the device of a matrix, and one of SciPy with its indices and numbers as elements.

    Parameters
    ----------
    name, arg : str
        The public function and its argument that errors speak of.
    matrix : cupyx.scipy.sparse.spmatrix
    """
    from scipy import sparse

    if matrix.format not in _INDICES:
        raise TypeError(f"{name}: {arg} has format {matrix.format}, want csr, csc or coo")
    workspace.refuse(name, "the host reads the indices of a sparse bias")
    device = int(matrix.data.data.device_id)
    with cupy.cuda.Device(device):
        indices = tuple(getattr(matrix, part).get() for part in _INDICES[matrix.format])
    numbers = np.arange(matrix.data.size)
    parts = (numbers, indices) if matrix.format == "coo" else (numbers, *indices)
    try:
        return device, getattr(sparse, f"{matrix.format}_matrix")(parts, shape=matrix.shape)
    except ValueError as error:
        raise ValueError(f"{name}: {arg} is not a valid sparse matrix: {error}") from error


class PairPlaces:
    """Where the pairs of a mask have their elements in the array of a bias.

    Parameters
    ----------
    bias : SparseBias
        Of a matrix of CuPy.
    mask : BitMask
    """

    def __init__(self, bias: SparseBias, mask: BitMask) -> None:
        found = pair_lists.lists_of(mask).by_query
        q_len = mask._grid.q_len
        rows = np.repeat(np.arange(len(found.begin) - 1), np.diff(found.begin)) % max(1, q_len)
        places = bias.places(rows, found.columns)
        assert bias.order is not None
        order = bias.order if len(bias.order) else np.zeros(1, np.int64)
        #: Of each pair in the order of the list, -1 for none.
        self.sources: npt.NDArray[np.int64] = np.where(places < 0, -1, order[places])
        #: Where the pairs of each matrix begin.
        self.begins = found.begin[:: max(1, q_len)]
        self._bias = bias

    def numbers(self) -> Array:
        """Return the bias of each pair as float32, at least one."""
        data = self._bias.given.data
        if not len(self.sources) or not data.size:
            return cupy.zeros(max(1, len(self.sources)), np.float32)
        if np.array_equal(self.sources, np.arange(data.size)):
            return data.astype(np.float32)
        values = data[cupy.asarray(np.maximum(self.sources, 0))].astype(np.float32)
        hidden = self.sources < 0
        return cupy.where(cupy.asarray(hidden), np.float32(0), values) if hidden.any() else values

    def gradient(self, sums: Array) -> Any:
        """Return the gradient of the bias as a matrix like it, given that of `numbers`.

        A pair of several matrices of the mask has a number in each of them. They are added in turn,
        so that results are repeatable.
        """
        data = self._bias.given.data
        total = cupy.zeros(data.size, np.float32)
        for begin, end in itertools.pairwise(self.begins.tolist()):
            sources = self.sources[begin:end]
            there = np.flatnonzero(sources >= 0)
            if len(there):
                at = cupy.asarray(sources[there])
                total[at] = total[at] + sums[cupy.asarray(begin + there)]
        return _like(self._bias, total)


def gradient_without_pairs(bias: SparseBias) -> Any:
    """Return the gradient of a bias that is added to no score."""
    return _like(bias, cupy.zeros(bias.given.data.size, np.float32))


def _like(bias: SparseBias, values: Array) -> Any:
    found = bias.given.copy()
    found.data = values.astype(bias.dtype)
    return found
