"""Data of the calls: the same numbers on every machine, with every version of NumPy."""

from __future__ import annotations

import math
import zlib
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}


def some_dtypes(name: str) -> tuple[str, ...]:
    """Return a 16-bit dtype and another one for a case that not all dtypes have."""
    pairs = (("bfloat16", "float32"), ("float16", "float64"))
    return pairs[zlib.crc32(name.encode()) % 2]


def draw(seed: str, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return numbers of mean 0 and variance 1, uniform, from a hash of `seed` and their index.

    Only integers and exact steps are made before one product and one rounding, so that the result
    does not depend on a library's generator or mathematical functions.
    """
    index = np.arange(1, math.prod(shape) + 1, dtype=np.uint64)
    # splitmix64, which takes neighbouring numbers to independent ones
    z = (index + np.uint64(zlib.crc32(seed.encode()) << 24)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    unit = ((z ^ (z >> np.uint64(31))) >> np.uint64(40)).astype(np.float64) / 2**23 - 1
    return np.asarray((unit * 1.7320508).reshape(shape).astype(dtype))


def chance(seed: str, shape: tuple[int, ...], density: float) -> Array:
    """Return bools, of which a share `density` is True."""
    return np.asarray(draw(seed, shape, np.float64) / 1.7320508 < 2 * density - 1)


def whole(seed: str, shape: tuple[int, ...], low: int, high: int) -> Array:
    """Return integers from `low` to ``high - 1``."""
    unit = draw(seed, shape, np.float64) / 3.4641016 + 0.5
    return np.clip(np.floor(unit * (high - low)).astype(np.int64) + low, low, high - 1)


def blocks(seed: str, shape: tuple[int, ...]) -> Array:
    """Return bools whose blocks of 128 x 128 are empty, full or neither."""
    tiles = (*shape[:-2], *(-(-n // 128) for n in shape[-2:]))
    kind = whole(f"{seed} kinds", tiles, 0, 4).repeat(128, -2).repeat(128, -1)
    kind = kind[..., : shape[-2], : shape[-1]]
    return np.asarray((kind == 1) | ((kind > 1) & chance(seed, shape, 0.5)))
