"""The offsets of causal products: which arrays they are, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fa_cupy.core import checks
from fa_cupy.keys.layout import KeyArrays
from fa_cupy.keys.offsets import Offsets

_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))
_WANTED = "a 1-D array of int32 or int64"


def separated(
    name: str, q: Any, q_offsets: Any, k_offsets: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the offsets of the library of `q`, and those of the host as NumPy arrays."""
    given, host = {}, {}
    if q_offsets is None and k_offsets is not None:
        raise ValueError(f"{name}: k_offsets is given without q_offsets, want both")
    for arg, x in (("q_offsets", q_offsets), ("k_offsets", k_offsets)):
        if x is None:
            continue
        if isinstance(x, (int, float, np.generic, list, tuple)):
            raise TypeError(f"{name}: {arg} is {checks.show(x)}, want {_WANTED}")
        if type(x) is np.ndarray and not isinstance(q, np.ndarray):
            host[arg] = x
        else:
            given[arg] = x
    return given, host


def checked(name: str, arrays: Mapping[str, Any], lengths: tuple[int, int]) -> KeyArrays:
    """Return native offsets by argument, those of the host checked; `lengths` are of q and k."""
    q_offsets = arrays["q_offsets"]
    k_offsets = arrays.get("k_offsets")
    if k_offsets is None and lengths[0] != lengths[1]:
        raise ValueError(
            f"{name}: q has length {lengths[0]}, k has {lengths[1]}, want k_offsets with q_offsets"
        )
    for arg, x in arrays.items():
        if x.ndim != 1 or not len(x):
            raise ValueError(f"{name}: {arg} has shape {x.shape}, want (sequences + 1,)")
        if x.dtype not in _DTYPES:
            raise TypeError(f"{name}: {arg} has dtype {x.dtype}, want int32 or int64")
        if isinstance(x, np.ndarray):
            length = lengths[arg == "k_offsets"]
            bad = np.diff(x, prepend=0) < 0
            bad |= x > length
            if bad.any():
                at = int(bad.argmax())
                least = max(0, int(x[at - 1])) if at else 0
                raise ValueError(f"{name}: {arg}[{at}] is {x[at]}, want {least} to {length}")
    if k_offsets is not None and len(k_offsets) != len(q_offsets):
        raise ValueError(
            f"{name}: k_offsets has {len(k_offsets) - 1} sequences, q_offsets has "
            f"{len(q_offsets) - 1}, want as many"
        )
    return KeyArrays(
        q_offsets=q_offsets, k_offsets=q_offsets if k_offsets is None else k_offsets
    )


def offsets_of(arrays: KeyArrays) -> Offsets:
    """Return what a problem holds of offsets."""
    q, k = arrays.q_offsets, arrays.k_offsets
    return Offsets(len(q) - 1, q.dtype, k.dtype)
