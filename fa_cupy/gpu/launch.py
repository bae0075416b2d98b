"""The only launch: a kernel, its grid and its shared memory, made ready once and called often."""

from __future__ import annotations

from typing import Any

import numpy as np

# CUfunction_attribute, CUDA Driver API, section "Data types used by CUDA driver".
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8


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

    __slots__ = ("_block", "_grid", "_kernel", "_shared_bytes")

    def __init__(self, kernel: Any, grid: int, block: int, shared_bytes: int) -> None:
        from cupy.cuda import driver, runtime

        self._kernel = kernel
        self._grid = (grid, 1, 1)
        self._block = (block, 1, 1)
        self._shared_bytes = shared_bytes
        if not driver.ctxGetCurrent():
            runtime.free(0)  # a thread gets the context with its first call of the runtime
        # The attribute belongs to the kernel on one device, and stays. It never shrinks, because
        # other launches of the kernel may need more.
        if driver.funcGetAttribute(_MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel.ptr) < shared_bytes:
            driver.funcSetAttribute(kernel.ptr, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)

    def __call__(self, params: np.void | np.ndarray[Any, Any]) -> None:
        """Queue the kernel on CuPy's current stream.

        Parameters
        ----------
        params : numpy.void, or numpy.ndarray of size 1
            The kernel's parameter struct; a scalar costs half the time of an array. Its bytes are
            copied before the call returns; another thread must not write to it until then.
        """
        self._kernel(self._grid, self._block, (params,), self._shared_bytes)


def launch(
    kernel: Any, grid: int, block: int, shared_bytes: int, params: np.void | np.ndarray[Any, Any]
) -> None:
    """Launch a kernel once; see `Launch`."""
    Launch(kernel, grid, block, shared_bytes)(params)
