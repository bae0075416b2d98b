"""What tiles of attention and chunks of causal products have in common on CuPy arrays."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import cupy
import numpy as np

from fa_cupy.core import attention_problem
from fa_cupy.gpu import workspace
from fa_cupy.gpu.cublas import blas, elementwise


class Steps:
    """Scratch memory, a cuBLAS handle and copies from one dtype to another.

    Of one call, on the current device and stream.

    Parameters
    ----------
    dtype : numpy.dtype
        Of scratch memory: float32 or float64.
    tf32 : bool
        Whether products may use TF32.
    """

    xp: Any = cupy

    def __init__(self, dtype: np.dtype[Any], tf32: bool) -> None:
        self.dtype = dtype
        self._tf32 = tf32
        self._scratch: dict[str, Any] = {}

    @cached_property
    def _blas(self) -> int:
        return blas.handle(self._tf32)

    def scratch(self, name: str, shape: tuple[int, ...]) -> Any:
        size = math.prod(shape)
        buffer = self._scratch.get(name)
        if buffer is None or buffer.size < size:
            buffer = self._scratch[name] = cupy.empty(size, self.dtype)
        return buffer[:size].reshape(shape)

    def operand(self, name: str, x: Any) -> Any:
        if x.dtype == self.dtype and blas.readable(x):
            return x
        out = self.scratch(name, x.shape)
        load(out, x)
        return out

    def matmul(self, a: Any, b: Any, out: Any, add: bool = False) -> None:
        turned = not blas.readable(a), not blas.readable(b)
        a, b = (x.swapaxes(1, 2) if turn else x for x, turn in zip((a, b), turned, strict=True))
        blas.matmul(self._blas, a, b, out, a_transposed=turned[0], transposed=turned[1], add=add)

    def load(self, out: Any, x: Any) -> None:
        load(out, x)

    def store(self, out: Any, value: Any) -> None:
        store(out, value)


def load(out: Any, x: Any) -> None:
    """Copy `x`, of any of the four dtypes, to `out`, of float32 or float64."""
    if x.dtype == attention_problem.BFLOAT16:
        bits = x.view(np.uint16)
        if out.dtype == np.float32:
            elementwise.from_bfloat16(bits, out)
        else:
            cupy.copyto(out, elementwise.from_bfloat16(bits))
    else:
        cupy.copyto(out, x)


def store(out: Any, value: Any) -> None:
    """Copy `value`, of float32 or float64, to `out`, rounded to its dtype."""
    if out.dtype == attention_problem.BFLOAT16:
        elementwise.to_bfloat16(value.astype(np.float32, copy=False), out.view(np.uint16))
    else:
        cupy.copyto(out, value, casting="unsafe")


def copy(out: Any, x: Any) -> None:
    """Copy `x` to `out`, each of any of the four dtypes but not of two different 16-bit ones."""
    (load if out.dtype in (np.float32, np.float64) else store)(out, x)


def widened(x: Any, dtype: np.dtype[Any]) -> Any:
    """Return `x` in `dtype`, float32 or float64: itself, or a copy."""
    if x.dtype == dtype:
        return x
    out = cupy.empty(x.shape, dtype)
    load(out, x)
    return out


def narrowed(x: Any, dtype: np.dtype[Any]) -> Any:
    """Return `x`, of float32 or float64, in `dtype`: itself, or a copy, which is a result."""
    if x.dtype == dtype:
        return x
    out = workspace.empty(x.shape, dtype)
    store(out, x)
    return out
