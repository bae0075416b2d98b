"""Arrays of other libraries: in by DLPack without a copy, and results back in their kind.

bfloat16 crosses as a 16-bit integer, because NumPy's DLPack has no such type.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from fa_cupy.core import backends, checks

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
#: What libraries raise for an array that DLPack cannot carry (sparse, quantised, traced, ...).
NO_EXCHANGE = (BufferError, TypeError, RuntimeError, ValueError, AttributeError)


class Torch:
    """Exchange with PyTorch. On a GPU results are allocated by torch, on torch's stream."""

    def __init__(self, name: str, example: Any, on_gpu: bool, writes: str | None) -> None:
        import torch

        self._torch = torch
        self._device = example.device
        self._stream = torch.cuda.current_stream(example.device).cuda_stream if on_gpu else None
        self._on_gpu = on_gpu
        self._name = name
        self._carriers = {
            torch.bfloat16: (torch.int16, _BFLOAT16),
            torch.bool: (torch.uint8, np.dtype(np.bool_)),
        }
        self._dtypes = {
            np.dtype(np.float16): torch.float16,
            _BFLOAT16: torch.bfloat16,
            np.dtype(np.float32): torch.float32,
            np.dtype(np.float64): torch.float64,
        }
        self._writes = writes
        self._allocated: dict[int, tuple[Any, Any]] = {}
        self._written: Any = None

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Return the context of the computation: `device`, and `out` known as written after it."""
        with self._computing():
            yield
        if self._written is not None and not self._written.is_inference():
            # What a backward pass has saved of it is not what it holds any more.
            self._torch.autograd.graph.increment_version(self._written)

    def device(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context with torch's current device and stream as CuPy's."""
        if not self._on_gpu:
            return contextlib.nullcontext()
        made: contextlib.AbstractContextManager[Any]
        made = backends.gpu("driver.interop").on_device(self._device.index, self._stream)
        return made

    def _computing(self) -> contextlib.AbstractContextManager[Any]:
        if not self._on_gpu:
            return contextlib.nullcontext()
        made: contextlib.AbstractContextManager[Any]
        made = backends.gpu("workspace").computing(self._device.index, self._stream, self.new)
        return made

    def load(self, arg: str, tensor: Any) -> Any:
        """Return a native array over the memory of `tensor`."""
        if tensor.requires_grad and self._torch.is_grad_enabled():
            raise checks.requires_gradient(self._name, arg)
        if arg == self._writes:
            self._written = tensor
        return self._native(tensor.detach())

    def _native(self, tensor: Any) -> Any:
        carrier, dtype = self._carriers.get(tensor.dtype, (None, None))
        native = self._share(tensor if carrier is None else tensor.view(carrier))
        return native if dtype is None else native.view(dtype)

    def new(self, shape: Sequence[int], dtype: np.dtype[Any], order: Sequence[int]) -> Any:
        """Return a native array in memory of torch's own, whose axes lie in the given order."""
        memory = self._torch.empty(
            [shape[axis] for axis in order], dtype=self._dtypes[dtype], device=self._device
        )
        tensor = memory.permute([order.index(axis) for axis in range(len(order))])
        native = self._native(tensor)
        self._allocated[id(native)] = (native, tensor)
        return native

    def give_back(self, native: Any) -> Any:
        """Return a result as a tensor."""
        if id(native) in self._allocated:
            return self._allocated[id(native)][1]
        if self._on_gpu:
            copy = self.new(native.shape, native.dtype, range(native.ndim))
            copy[...] = native
            return self._allocated[id(copy)][1]
        if native.dtype == _BFLOAT16:
            return self._torch.from_numpy(native.view(np.int16)).view(self._torch.bfloat16)
        return self._torch.from_numpy(native)

    def _share(self, tensor: Any) -> Any:
        if not self._on_gpu:
            return tensor.numpy()
        return backends.gpu("driver.interop").from_dlpack(tensor)


class Generic:
    """Exchange with any other library that speaks DLPack."""

    new = None

    def __init__(self, name: str, example: Any, on_gpu: bool, writes: str | None) -> None:
        library = type(example).__module__.partition(".")[0]
        if hasattr(example, "__array_namespace__"):
            self._namespace = example.__array_namespace__()
        else:
            self._namespace = sys.modules[library]
        if not hasattr(self._namespace, "from_dlpack"):
            raise TypeError(f"{name}: {library} has no from_dlpack, which the result needs")
        self._device = example.__dlpack_device__()[1]
        self._on_gpu = on_gpu

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of the computation."""
        if not self._on_gpu:
            return contextlib.nullcontext()
        made: contextlib.AbstractContextManager[Any]
        made = backends.gpu("workspace").computing(self._device)
        return made

    def device(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context with the arrays' device as CuPy's current one."""
        if not self._on_gpu:
            return contextlib.nullcontext()
        made: contextlib.AbstractContextManager[Any]
        made = backends.gpu("driver.interop").on_device(self._device)
        return made

    def load(self, arg: str, array: Any) -> Any:
        """Return a native array over the memory of `array`."""
        if self._on_gpu:
            return backends.gpu("driver.interop").from_dlpack(array)
        try:
            return np.from_dlpack(array)
        except NO_EXCHANGE:
            if not hasattr(array, "__array__"):
                raise
            return np.asarray(array)  # JAX shows its bfloat16 this way, in place

    def give_back(self, native: Any) -> Any:
        """Return a result as an array of the library."""
        if self._on_gpu:
            native = backends.gpu("workspace").hand_over(native)
        if native.dtype == _BFLOAT16:
            bits = self._namespace.from_dlpack(native.view(np.uint16))
            return bits.view(self._namespace.bfloat16)
        return self._namespace.from_dlpack(native)


def open_exchange(
    name: str, library: str, arrays: dict[str, Any], on_gpu: bool, writes: str | None
) -> tuple[list[Any], Torch | Generic]:
    """Return `arrays` (of one library, on one device) as native arrays, and their exchange."""
    example = next(x for x in arrays.values() if x is not None)
    kind: Callable[..., Torch | Generic] = Torch if library == "torch" else Generic
    exchange = kind(name, example, on_gpu, writes)
    native: list[Any] = []
    with exchange.device():
        for arg, array in arrays.items():
            try:
                native.append(None if array is None else exchange.load(arg, array))
            except NO_EXCHANGE as error:
                if isinstance(error, TypeError) and str(error).startswith(f"{name}: "):
                    raise
                raise TypeError(
                    f"{name}: {arg} cannot be shared by DLPack ({type(error).__name__}: {error})"
                ) from error
    return native, exchange
