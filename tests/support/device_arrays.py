"""Arrays of any size, made on the device; what is held there, and what differs."""

import contextlib
import fcntl
import functools
import tempfile
from pathlib import Path
from typing import IO

import cupy as cp
import numpy as np
import pytest

from fa_cupy.gpu.driver.devices import current_target
from tests.support.strategies import BFLOAT16, DTYPES

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


@contextlib.contextmanager
def no_memory_held():
    """Neither before nor after; skips where no kernels run."""
    if current_target() is None:
        pytest.skip("the kernels do not run on this device")
    free_all()
    yield
    free_all()


class Counter:
    """An allocator that notes what it is asked for."""

    def __init__(self):
        self.sizes = []

    def __call__(self, size):
        self.sizes.append(size)
        return cp.get_default_memory_pool().malloc(size)


class Differing:
    """How many numbers of results differ from those of a first call, counted on the device."""

    def __init__(self, want):
        cp.cuda.Device().synchronize()
        self.want = [x.view(np.int16) for x in want]
        self.count = cp.zeros((), np.int64)

    def look(self, found):
        for x, want in zip(found, self.want, strict=True):
            self.count += (x.view(np.int16) != want).sum()


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


def bits(result):
    return [x.get().tobytes() for x in result]


def check_replays(call, want, warm_up=True):
    """Capture a call of gradients: replays give the same bits and leave memory of others alone."""
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        if warm_up:
            call()  # leaves memory to take
            stream.synchronize()
        stream.begin_capture()
        result = call()
        graph = stream.end_capture()
        # None of these gets memory that the graph writes to.
        others = [cp.full(2**20, 0x55, np.uint8) for _ in range(64)]
    for _ in range(3):
        for x in result:
            x.view(np.int16).fill(-1)
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert bits(result) == want
    assert all((x == 0x55).all() for x in others)
