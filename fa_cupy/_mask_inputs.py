"""Checks of what the constructors of masks are given."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import numpy.typing as npt

from fa_cupy import _arrays, _options
from fa_cupy._blocks import EMPTY, FULL, WORDS

Array = npt.NDArray[Any]


def on_cpu(name: str, arg: str, array: Any) -> Array:
    """Return an argument of 2 axes or more as a NumPy array."""
    native = _arrays.to_native(name, **{arg: array})
    if native.backend != "numpy":
        raise TypeError(f"{name}: {arg} is on a CUDA device, want an array on the CPU")
    found: Array = native.arrays[0]
    if found.ndim < 2:
        raise ValueError(f"{name}: {arg} has shape {found.shape}, want at least 2 axes")
    return found


def length(name: str, arg: str, value: Any) -> int:
    """Return a number of queries, keys or batch entries."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: {arg} is {_options.show(value)}, want an int >= 0") from None
    if number < 0:
        raise ValueError(f"{name}: {arg} is {_options.show(value)}, want an int >= 0")
    return number


def canonical_csr(name: str, matrix: Any) -> Any:
    """Return a sparse matrix in CSR form, one stored element a place."""
    if not hasattr(matrix, "tocsr"):
        raise TypeError(f"{name}: matrix is {_options.show(matrix)}, want a scipy.sparse matrix")
    if len(matrix.shape) != 2:
        raise ValueError(f"{name}: matrix has shape {matrix.shape}, want 2 axes")
    csr = matrix.tocsr()
    csr.check_format(full_check=True)
    if not csr.has_canonical_format:
        csr = csr.copy() if csr is matrix else csr
        csr.sum_duplicates()
    return csr


def check_states(name: str, arg: str, states: Array, kinds: str = "biu") -> None:
    """Raise unless `states` is of an allowed kind of dtype and holds states of blocks."""
    if states.dtype.kind not in kinds:
        wanted = "bool or integers" if "b" in kinds else "integers"
        raise TypeError(f"{name}: {arg} has dtype {states.dtype}, want {wanted}")
    if states.size and not EMPTY <= int(states.min()) <= int(states.max()) <= FULL:
        raise ValueError(
            f"{name}: {arg} has {states.min()} to {states.max()}, want EMPTY (0), "
            "PARTIAL (1) or FULL (2)"
        )


def checked_words(name: str, words: Any, count: int) -> Array:
    """Return the words of `count` partial blocks; none are needed where there are none."""
    if words is None and count == 0:
        return np.empty((0, *WORDS), np.uint32)
    wanted = (count, *WORDS)
    if words is None:
        raise ValueError(f"{name}: words is None, want shape {wanted} for {count} partial blocks")
    found = on_cpu(name, "words", words)
    if found.dtype != np.uint32:
        raise TypeError(f"{name}: words has dtype {found.dtype}, want uint32")
    if found.shape != wanted:
        raise ValueError(
            f"{name}: words has shape {found.shape}, want {wanted} for {count} partial blocks"
        )
    return found


def fitted(name: str, function: str, found: Any, shape: tuple[int, ...]) -> Array:
    """Return what a function of the caller returned, broadcast to `shape`."""
    array: Array = np.asarray(found)
    try:
        return np.broadcast_to(array, shape)
    except ValueError:
        raise ValueError(
            f"{name}: {function} returns shape {array.shape}, want one that broadcasts to {shape}"
        ) from None
