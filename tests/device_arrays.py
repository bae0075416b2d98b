"""Arrays of any size, made on the device."""

import fcntl
import functools
import tempfile
from pathlib import Path
from typing import IO

import cupy as cp
import numpy as np
import pytest

from tests.strategies import BFLOAT16, DTYPES

_turn: list[IO[str]] = []


def needs(gigabytes):
    """Wait for other processes' tests of this kind; skip where there is less memory then."""
    file = (Path(tempfile.gettempdir()) / "fa_cupy-large-arrays.lock").open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    _turn.append(file)
    if cp.cuda.runtime.memGetInfo()[0] < gigabytes * 2**30:
        pytest.skip(f"needs {gigabytes} GB of device memory")


def free_all():
    """Give back all memory, and the turn of `needs`."""
    cp.cuda.Device().synchronize()
    cp.get_default_memory_pool().free_all_blocks()
    while _turn:
        _turn.pop().close()


@functools.cache
def _uniform():
    # splitmix64 of the index, so that no two parts of an array are alike.
    return cp.ElementwiseKernel(
        "uint64 seed",
        "T x",
        """
        unsigned long long z = ((unsigned long long)i + (seed << 40) + 1) * 0x9E3779B97F4A7C15ull;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        x = T(((float)((z ^ (z >> 31)) >> 40) / 8388608.0f - 1.0f) * 1.7320508f);
        """,
        "uniform",
    )


def uniform(shape, seed, dtype=DTYPES[0]):
    """A CuPy array of any size of numbers with mean 0 and variance 1."""
    if dtype == BFLOAT16:  # the upper half of a float32; not every CuPy converts
        words = uniform(shape, seed, np.float32).view(np.uint32) >> 16
        return words.astype(np.uint16).view(BFLOAT16)
    out = cp.empty(shape, dtype)
    _uniform()(np.uint64(seed), out)
    return out
