"""CuPy's side of array exchange: the caller's device and stream, and import by DLPack."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import cupy


class _Stream:
    """A stream handle that speaks the CUDA stream protocol."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._handle)


@contextlib.contextmanager
def on_device(device: int, stream: int | None = None) -> Iterator[None]:
    """Make `device` CuPy's current one, and there `stream` (a handle; None: leave it)."""
    with cupy.cuda.Device(device):
        if stream is None:
            yield
            return
        try:
            current = cupy.cuda.Stream.from_external(_Stream(stream))
        except AttributeError:  # CuPy < 14
            current = cupy.cuda.ExternalStream(stream, device)
        with current:
            yield


def from_dlpack(array: Any) -> Any:
    """Return a CuPy array over the memory of `array`."""
    return cupy.from_dlpack(array)
