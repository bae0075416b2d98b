"""Checks of what the constructors of masks are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fa_cupy.core import arrays as core_arrays
from fa_cupy.core import backends, broadcasting, checks
from fa_cupy.masks.blocks import EMPTY, FULL, LONGEST, WORDS, Grid

Array = npt.NDArray[Any]

# The arrays of a sparse matrix by its format, where turning it into CSR follows indices without a
# look at them; other formats look for themselves.
_PARTS = {
    **dict.fromkeys(("bsr", "csc", "csr"), ("data", "indices", "indptr")),
    "coo": ("data", "row", "col"),
    "dia": ("data", "offsets"),
}


def native(name: str, axes: int = 2, **arrays: Any) -> core_arrays.Native:
    """Return arguments of `axes` axes or more, of one library and device, as NumPy or CuPy arrays.

    All but the first may be None.
    """
    lead = next(iter(arrays))
    if arrays[lead] is None:
        raise TypeError(f"{name}: {lead} is None, want an array")
    found = core_arrays.to_native(name, **arrays)
    for arg, array in zip(arrays, found.arrays, strict=True):
        if array is None:
            continue
        if array.ndim < axes:
            raise ValueError(f"{name}: {arg} has shape {array.shape}, want {_at_least(axes)}")
        broadcasting.check_batch_axes(name, arg, array.ndim - axes)
    return found


def integers(name: str, **arrays: Any) -> tuple[list[Any], int | None]:
    """Return arrays of integers with 1 axis or more on the CPU, and the device that they were on.

    All but the first may be None.
    """
    found = native(name, axes=1, **arrays)
    for arg, array in zip(arrays, found.arrays, strict=True):
        if array is not None and array.dtype.kind not in "iu":
            raise TypeError(f"{name}: {arg} has dtype {array.dtype}, want integers")
    return _on_host(found)


def bools(name: str, arg: str, array: Any, shape: Sequence[int]) -> tuple[Array, int | None]:
    """Return an array of bool on the CPU, its last axes broadcast to `shape`, and its device."""
    if isinstance(array, (bool, np.bool_)):
        array = np.asarray(array)
    found = core_arrays.to_native(name, **{arg: array})
    array = found.arrays[0]
    if array.dtype != np.bool_:
        raise TypeError(f"{name}: {arg} has dtype {array.dtype}, want bool (cast it: {arg} != 0)")
    broadcasting.check_batch_axes(name, arg, array.ndim - 2)
    ends = array.shape[-2:]
    if any(n not in (1, want) for n, want in zip(ends[::-1], shape[::-1], strict=False)):
        raise ValueError(
            f"{name}: {arg} has shape {array.shape}, want one that broadcasts to "
            f"(..., {shape[0]}, {shape[1]})"
        )
    (array,), device = _on_host(found)
    return np.broadcast_to(array, (*array.shape[:-2], *shape)), device


def _on_host(found: core_arrays.Native) -> tuple[list[Any], int | None]:
    """Return native arrays on the CPU, and the device that they were on."""
    if found.backend == "numpy":
        return found.arrays, None
    with found.context:
        arrays, device = backends.gpu("masks.build").to_host(found.arrays)
        return arrays, device


def length(name: str, arg: str, value: Any) -> int:
    """Return a number of queries, keys or batch entries."""
    return checks.whole(name, arg, value, "an int >= 0 and below 2**31", range(LONGEST))


def grid(name: str, arg: str, shape: Sequence[int]) -> Grid:
    """Return the size of a mask's matrices, which have the last axes of an argument's `shape`."""
    if max(shape[-2:]) >= LONGEST:
        raise ValueError(f"{name}: {arg} has shape {tuple(shape)}, want axes shorter than 2**31")
    return Grid(*shape[-2:])


def lengths(name: str, shape: Any, axes: int = 2) -> list[int]:
    """Return the shape of a mask, or of another array of at least so many axes."""
    known = isinstance(shape, Sequence) or (isinstance(shape, np.ndarray) and shape.ndim == 1)
    if not known or isinstance(shape, (str, bytes, bytearray, memoryview)):
        raise TypeError(f"{name}: shape is {checks.show(shape)}, want a sequence of ints")
    found = [length(name, f"shape[{i}]", n) for i, n in enumerate(shape)]
    if len(found) < axes:
        raise ValueError(f"{name}: shape is {tuple(found)}, want {_at_least(axes)}")
    return found


def sizes(name: str, shape: Any) -> list[int]:
    """Return the shape of an array of 1 axis or more, which may be given as an int."""
    if isinstance(shape, (int, np.integer)):
        return [length(name, "shape", shape)]
    return lengths(name, shape, axes=1)


def reach(name: str, shape: Sequence[int], window: Any) -> list[tuple[int, int]]:
    """Return how many positions before and after are visible along each axis of `shape`.

    Parameters
    ----------
    name : str
    shape : sequence of int
    window : object
        See `fa_cupy.BitMask.from_window`.
    """
    wanted = "None, an int >= 0 or a pair of these"
    sides: list[Any] = [window] * len(shape)
    if isinstance(window, (tuple, list)):
        pair = len(window) == 2 and not any(isinstance(x, (tuple, list)) for x in window)
        sides = [window] if len(shape) == 1 and pair else list(window)
        if len(sides) != len(shape):
            text = f"{name}: window is {checks.show(window)}, want one element for each of"
            raise ValueError(f"{text} {len(shape)} axes")
    found = []
    for axis, (side, n) in enumerate(zip(sides, shape, strict=True)):
        pair = isinstance(side, (tuple, list))
        if pair and len(side) != 2:
            raise ValueError(f"{name}: window[{axis}] is {checks.show(side)}, want {wanted}")
        most = max(0, n - 1)
        before, after = (
            most if x is None else min(most, checks.whole(name, f"window[{axis}]", x, wanted))
            for x in (side if pair else (side, side))
        )
        found.append((before, after))
    return found


def nodes(name: str, n: Any) -> Grid:
    """Return the size of a mask of a graph with `n` nodes, or (queries, keys)."""
    if isinstance(n, (tuple, list)):
        if len(n) != 2:
            raise ValueError(f"{name}: n is {checks.show(n)}, want an int or a pair of ints")
        return Grid(*(length(name, f"n[{i}]", x) for i, x in enumerate(n)))
    return Grid(*[length(name, "n", n)] * 2)


def check_callable(name: str, arg: str, value: Any, wanted: str) -> None:
    """Raise unless `value` can be called."""
    if not callable(value):
        raise TypeError(f"{name}: {arg} is {checks.show(value)}, want {wanted}")


def of_one_device(name: str, matrices: dict[str, Any]) -> core_arrays.Native:
    """Return the data of sparse matrices, which are all of one library and device."""
    return core_arrays.to_native(name, **{arg: matrix.data for arg, matrix in matrices.items()})


def as_csr(name: str, arg: str, matrix: Any) -> Any:
    """Return a sparse matrix in CSR form, with one stored element a place if it is SciPy's."""
    if not checks.is_sparse(matrix) or isinstance(matrix, type):
        raise TypeError(f"{name}: {arg} is {checks.show(matrix)}, want a scipy.sparse matrix")
    if len(matrix.shape) != 2:
        raise ValueError(f"{name}: {arg} has shape {matrix.shape}, want 2 axes")
    grid(name, arg, matrix.shape)  # before SciPy makes room for that many rows
    parts = _PARTS.get(getattr(matrix, "format", ""), ())
    found = None
    if parts and all(hasattr(matrix, part) for part in parts):  # other libraries have formats too
        found = _checked_parts(name, {f"{arg}.{part}": getattr(matrix, part) for part in parts})
    try:
        if found is None:
            csr = matrix.tocsr()
        elif found.backend == "numpy":
            csr = _sound(matrix, *found.arrays).tocsr()
        else:  # elements of one place are summed on their device
            with found.context:
                backends.gpu("masks.build").check_sparse(matrix)
                return matrix.tocsr()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {arg} is not a valid sparse matrix: {error}") from error
    if found is None:
        if csr is matrix:
            raise TypeError(
                f"{name}: {arg}.tocsr() is not a CSR matrix, want a scipy.sparse matrix"
            )
        return as_csr(name, arg, csr)
    if not csr.has_canonical_format:
        csr = csr.copy() if matrix.format == "csr" else csr  # what it shares stays as it is
        csr.sum_duplicates()
    return csr


def _checked_parts(name: str, parts: dict[str, Any]) -> core_arrays.Native:
    """Return the arrays of a sparse matrix, those of indices being integers."""
    for part, array in parts.items():
        if array is None:
            raise TypeError(f"{name}: {part} is None, want an array")
    found = core_arrays.to_native(name, **parts)
    for part, array in list(zip(parts, found.arrays, strict=True))[1:]:
        if array.dtype.kind not in "iu":
            raise TypeError(f"{name}: {part} has dtype {array.dtype}, want integers")
    return found


def _sound(matrix: Any, data: Array, *indices: Array) -> Any:
    """Return a matrix of SciPy's, or raise a ValueError where it points to what is not there.

    It shares its arrays with the one that is given, which SciPy's checks cut and cast in place.
    """
    from scipy import sparse

    kind = getattr(sparse, f"{matrix.format}_array")
    parts = (data, indices) if matrix.format == "coo" else (data, *indices)
    own = kind(parts, shape=matrix.shape)
    if hasattr(own, "check_format"):  # of others the constructor does that
        own.check_format(full_check=True)
    elif matrix.format == "dia" and not np.array_equal(own.offsets, indices[0]):
        raise ValueError("offsets exceed int32")
    return own


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
    wanted = f"want one that broadcasts to {shape}"
    if isinstance(found, np.ma.MaskedArray):
        raise TypeError(f"{name}: {function} returns a masked array, want a plain array")
    try:
        array: Array = np.asarray(found)
    except ValueError:  # lists of several lengths
        raise ValueError(
            f"{name}: {function} returns {checks.show(found)}, which is not an array, {wanted}"
        ) from None
    try:
        return np.broadcast_to(array, shape)
    except ValueError:
        raise ValueError(f"{name}: {function} returns shape {array.shape}, {wanted}") from None


def _at_least(axes: int) -> str:
    return f"at least {axes} {'axis' if axes == 1 else 'axes'}"
