"""The only launch: a kernel, its grid and its shared memory, made ready once and called often."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from cupy.cuda import driver, get_current_stream, runtime

# CUfunction_attribute, CUDA Driver API, section "Data types used by CUDA driver".
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_context = driver.ctxGetCurrent
_launch_kernel = driver.launchKernel


def bind_context() -> None:
    """Give this thread the context of its device, which it gets with its first runtime call."""
    if not _context():
        runtime.free(0)


def capturing() -> bool:
    """Whether what is queued on CuPy's current stream becomes a part of a graph.

    That may run long after memory from the pool that it works in was given to someone else.
    """
    return bool(runtime.streamIsCapturing(get_current_stream().ptr))


@contextmanager
def any_mode() -> Iterator[None]:
    """Let this thread ask the driver for what the mode of a capture may forbid.

    The modes ``global`` and ``thread_local`` do not even let it ask whether an event has happened,
    because what it waits for might be part of the capture, which ends with an error then.
    """
    from cuda.bindings import driver as bindings

    relaxed = bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    _, before = bindings.cuThreadExchangeStreamCaptureMode(relaxed)
    try:
        yield
    finally:
        bindings.cuThreadExchangeStreamCaptureMode(before)


class Arguments:
    """A kernel's parameter struct, where a launch finds it.

    Parameters
    ----------
    values : numpy.ndarray, of size 1
        The struct; copied.

    Attributes
    ----------
    values : numpy.ndarray
        The struct that launches pass.
    bytes : numpy.ndarray
        The same memory, for ``struct.pack_into``.
    address : int
        Of the array of one pointer that ``cuLaunchKernel`` takes.
    """

    __slots__ = ("_pointers", "address", "bytes", "values")

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.values = values.copy()
        self.bytes = self.values.reshape(-1).view(np.uint8)
        self._pointers = np.array([self.values.ctypes.data], np.uint64)
        self.address = self._pointers.ctypes.data


class Launch:
    """A kernel with all of a launch but its parameters.

    Parameters
    ----------
    kernel : cupy.cuda.Function
        Of the current device.
    grid : int
        Blocks, along x: the only axis of a grid that is not limited to 65535.
    block : int
        Threads of a block.
    shared_bytes : int
        Dynamic shared memory of a block.
    """

    __slots__ = ("_block", "_function", "_grid", "_kernel", "_shared_bytes")

    def __init__(self, kernel: Any, grid: int, block: int, shared_bytes: int) -> None:
        self._kernel = kernel  # whose module the function lives in
        self._function = kernel.ptr
        self._grid = grid
        self._block = block
        self._shared_bytes = shared_bytes
        bind_context()
        # The attribute belongs to the kernel on one device, and stays. It never shrinks, because
        # other launches of the kernel may need more.
        if driver.funcGetAttribute(_MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel.ptr) < shared_bytes:
            driver.funcSetAttribute(kernel.ptr, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)

    def __call__(self, arguments: Arguments, stream: int | None = None) -> None:
        """Queue the kernel.

        This is CuPy's own call of the driver without its parsing of arguments: 2.8 us for 3.5.

        Parameters
        ----------
        arguments : Arguments
            Copied before the call returns; another thread must not write to it until then.
        stream : int, optional
            By default CuPy's current stream.
        """
        if stream is None:
            stream = get_current_stream().ptr
        if not _context():  # as bind_context, without its call
            runtime.free(0)
        _launch_kernel(
            self._function, self._grid, 1, 1, self._block, 1, 1, self._shared_bytes, stream,
            arguments.address, 0,
        )  # fmt: skip


def launch(
    kernel: Any, grid: int, block: int, shared_bytes: int, params: np.ndarray[Any, Any]
) -> None:
    """Launch a kernel once; see `Launch`. `params` is a struct array of size 1."""
    Launch(kernel, grid, block, shared_bytes)(Arguments(params))
