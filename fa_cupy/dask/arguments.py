"""Arguments of functions of Dask arrays: what they may be, and their metadata for the checks."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import dask.array as da
import numpy as np

LIBRARIES = ("numpy", "cupy")


def collected(name: str, **arrays: Any) -> dict[str, Any]:
    """Return array arguments as Dask arrays, by name, without those that are None.

    An array of NumPy or CuPy becomes one chunk.

    Parameters
    ----------
    name : str
        The public function that errors speak of.
    **arrays : array or None

    Raises
    ------
    TypeError
        For what is not an array, and for chunks of two libraries or of another one.
    ValueError
        For chunks of unknown sizes.
    """
    given = {arg: x for arg, x in arrays.items() if x is not None}
    for arg, x in given.items():
        _check(name, arg, x)
    lead = next(iter(given))
    for arg, x in given.items():
        if library_of(x) != library_of(given[lead]):
            raise TypeError(
                f"{name}: {arg} has chunks of {library_of(x)}, {lead} has chunks of "
                f"{library_of(given[lead])}, want arrays of one library"
            )
    return {arg: _as_dask(x) for arg, x in given.items()}


def stand_in(shape: Sequence[int], dtype: Any) -> Any:
    """Return an array of one number, seen as one of this shape: the checks read metadata only."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def stand_ins(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return stand-ins of Dask arrays, by argument."""
    return {arg: stand_in(x.shape, x.dtype) for arg, x in arrays.items()}


def library_of(x: Any) -> str:
    """Return the name of the library of an array, or of the chunks of a Dask array."""
    kind = type(x._meta if isinstance(x, da.Array) else x)
    # A class may be derived from the array of NumPy or CuPy elsewhere, as numpy.memmap is not.
    roots = [base.__module__.partition(".")[0] for base in kind.__mro__ if _is_array(base)]
    return roots[-1] if roots else kind.__module__.partition(".")[0]


def _is_array(kind: type) -> bool:
    """Return whether a class is the array class of NumPy or of CuPy."""
    modules = (sys.modules.get(library) for library in LIBRARIES)
    return any(kind is getattr(module, "ndarray", None) for module in modules)


def _check(name: str, arg: str, x: Any) -> None:
    """Raise unless `x` is a Dask array of known chunks, or an array of NumPy or CuPy."""
    wanted = "want a Dask array, or an array of NumPy or CuPy"
    if not isinstance(x, da.Array) and not any(map(_is_array, type(x).__mro__)):
        library = type(x).__module__.partition(".")[0]
        label = f"{library}.{type(x).__qualname__}" if library != "builtins" else type(x).__name__
        if label == "dask.Delayed":
            wanted = "want a Dask array (dask.array.from_delayed makes one)"
        raise TypeError(f"{name}: {arg} is a {label}, {wanted}")
    inner = x._meta if isinstance(x, da.Array) else x
    if not any(map(_is_array, type(inner).__mro__)):
        label = f"{type(inner).__module__.partition('.')[0]}.{type(inner).__qualname__}"
        raise TypeError(f"{name}: {arg} has chunks of {label}, want those of NumPy or CuPy")
    if isinstance(inner, np.ma.MaskedArray):
        raise TypeError(f"{name}: {arg} has masked arrays, want plain ones")
    for axis, sizes in enumerate(getattr(x, "chunks", ())):
        if any(math.isnan(size) for size in sizes):
            raise ValueError(
                f"{name}: {arg} has chunks of unknown size along axis {axis}, want known ones "
                f"({arg}.compute_chunk_sizes() finds them)"
            )


def _as_dask(x: Any) -> Any:
    """Return `x` as a Dask array: one chunk if it is an array in memory."""
    return x if isinstance(x, da.Array) else da.from_array(x, chunks=-1, asarray=False)
