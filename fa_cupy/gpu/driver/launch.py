"""Launches through the driver: a kernel, its grid and its shared memory, prepared once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from cupy.cuda import driver, get_current_stream, runtime

from fa_cupy.gpu.driver import compile
from fa_cupy.gpu.driver.arguments import Arguments
from fa_cupy.gpu.driver.devices import multiprocessors, target_of_device
from fa_cupy.gpu.driver.tensor_map import LayoutError, encode_tiled

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

    def __call__(self, arguments: Arguments, stream: int | None = None) -> int:
        """Queue the kernel and return the stream.

        This is CuPy's own call of the driver without its parsing of arguments: 2.8 us for 3.5.

        Parameters
        ----------
        arguments : Arguments
            Copied before the call returns; another thread must not write to it until then.
        stream : int, optional
            What a launch in this thread has returned; by default CuPy's current stream.
        """
        if stream is None:
            stream = int(get_current_stream().ptr)
            if not _context():  # as bind_context, without its call
                runtime.free(0)
        _launch_kernel(
            self._function, self._grid, 1, 1, self._block, 1, 1, self._shared_bytes, stream,
            arguments.address, 0,
        )  # fmt: skip
        return stream


def launch(
    kernel: Any, grid: int, block: int, shared_bytes: int, params: np.ndarray[Any, Any]
) -> None:
    """Launch a kernel once; see `Launch`. `params` is a struct array of size 1."""
    Launch(kernel, grid, block, shared_bytes)(Arguments(params))


class DriverLauncher:
    """Loads and launches the kernels of plans on a device, through CuPy.

    Parameters
    ----------
    device : int
        The current one.
    take : callable
        Gives temporary memory of so many bytes.

    Attributes
    ----------
    target : str or None
        The target that kernels are compiled for; None if no kernel can run.
    multiprocessors : int
    workspace : callable
        `take`.
    """

    def __init__(self, device: int, take: Callable[[int], Any]) -> None:
        self._device = device
        self.target = target_of_device(device)
        self.multiprocessors = multiprocessors(device)
        self.workspace = take

    def kernels(self, steps: Sequence[Any]) -> list[Launch]:
        """Return the launch of each step, all but its arguments."""
        variants = [step.variant for step in steps]
        kernels = compile.load_all(variants, str(self.target), self._device)
        return [
            Launch(kernel, step.grid, step.variant.threads, step.variant.shared_bytes)
            for kernel, step in zip(kernels, steps, strict=True)
        ]

    @staticmethod
    def tensor_map(pointer: int, dtype: str, *geometry: Any) -> bytes | None:
        """Return a tensor map; None where the hardware cannot walk the array."""
        bind_context()
        try:
            return encode_tiled(pointer, dtype, *geometry).tobytes()
        except LayoutError:
            return None
