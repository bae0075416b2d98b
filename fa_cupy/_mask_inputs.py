"""Checks of what the constructors of masks are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fa_cupy import _arrays, _options
from fa_cupy._blocks import EMPTY, FULL, WORDS

Array = npt.NDArray[Any]


def native(name: str, **arrays: Any) -> _arrays.Native:
    """Return arguments of 2 axes or more, of one library and device, as NumPy or CuPy arrays.

    All but the first may be None.
    """
    lead = next(iter(arrays))
    if arrays[lead] is None:
        raise TypeError(f"{name}: {lead} is None, want an array")
    found = _arrays.to_native(name, **arrays)
    for arg, array in zip(arrays, found.arrays, strict=True):
        if array is not None and array.ndim < 2:
            raise ValueError(f"{name}: {arg} has shape {array.shape}, want at least 2 axes")
    return found


def length(name: str, arg: str, value: Any) -> int:
    """Return a number of queries, keys or batch entries."""
    return _options.whole(name, arg, value)


def lengths(name: str, shape: Any) -> list[int]:
    """Return the shape of a mask."""
    if not isinstance(shape, Sequence) or isinstance(shape, str):
        raise TypeError(f"{name}: shape is {_options.show(shape)}, want a sequence of ints")
    found = [length(name, f"shape[{i}]", n) for i, n in enumerate(shape)]
    if len(found) < 2:
        raise ValueError(f"{name}: shape is {tuple(found)}, want at least 2 axes")
    return found


def check_callable(name: str, arg: str, value: Any, wanted: str) -> None:
    """Raise unless `value` can be called."""
    if not callable(value):
        raise TypeError(f"{name}: {arg} is {_options.show(value)}, want {wanted}")


def of_one_device(name: str, matrices: list[Any]) -> _arrays.Native:
    """Return the data of sparse matrices, which are all of one library and device."""
    data = {f"matrix[{i}]": matrix.data for i, matrix in enumerate(matrices)}
    return _arrays.to_native(name, **data)


def as_csr(name: str, matrix: Any) -> Any:
    """Return a sparse matrix in CSR form, with one stored element a place if it is SciPy's."""
    if not hasattr(matrix, "tocsr"):
        raise TypeError(f"{name}: matrix is {_options.show(matrix)}, want a scipy.sparse matrix")
    if len(matrix.shape) != 2:
        raise ValueError(f"{name}: matrix has shape {matrix.shape}, want 2 axes")
    csr = matrix.tocsr()
    if not isinstance(csr.data, np.ndarray):  # CuPy's, whose elements are summed on their device
        return csr
    try:
        csr.check_format(full_check=True)
    except ValueError as error:
        raise ValueError(f"{name}: matrix is not a valid sparse matrix: {error}") from error
    if not csr.has_canonical_format:
        csr = csr.copy() if csr is matrix else csr
        csr.sum_duplicates()
    return csr


def check_states(name: str, arg: str, states: Any, kinds: str = "biu") -> None:
    """Raise unless `states` is of an allowed kind of dtype and holds states of blocks."""
    if states.dtype.kind not in kinds:
        wanted = "bool or integers" if "b" in kinds else "integers"
        raise TypeError(f"{name}: {arg} has dtype {states.dtype}, want {wanted}")
    low, high = (int(states.min()), int(states.max())) if states.size else (EMPTY, EMPTY)
    if not EMPTY <= low <= high <= FULL:
        raise ValueError(
            f"{name}: {arg} has {low} to {high}, want EMPTY (0), PARTIAL (1) or FULL (2)"
        )


def check_words(name: str, words: Any, count: int) -> None:
    """Raise unless `words` are those of `count` partial blocks; where there are none, so may be."""
    wanted = (count, *WORDS)
    if words is None:
        if count:
            text = f"want shape {wanted} for {count} partial blocks"
            raise ValueError(f"{name}: words is None, {text}")
        return
    if words.dtype != np.uint32:
        raise TypeError(f"{name}: words has dtype {words.dtype}, want uint32")
    if words.shape != wanted:
        raise ValueError(
            f"{name}: words has shape {words.shape}, want {wanted} for {count} partial blocks"
        )


def fitted(name: str, function: str, found: Any, shape: tuple[int, ...]) -> Array:
    """Return what a function of the caller returned, broadcast to `shape`."""
    array: Array = np.asarray(found)
    try:
        return np.broadcast_to(array, shape)
    except ValueError:
        raise ValueError(
            f"{name}: {function} returns shape {array.shape}, want one that broadcasts to {shape}"
        ) from None
