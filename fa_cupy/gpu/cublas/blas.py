"""Batched float32 and float64 products on cuBLAS, with a precision that nothing else decides.

`cupy.matmul` takes TF32 where the environment variable CUPY_TF32 says so, and uses one cuBLAS
handle, thus one workspace, for all streams of a thread, so that products running in two streams
are not bitwise repeatable (cuBLAS documentation, "Results reproducibility"). Here every thread,
device, stream and precision has a handle of its own, with the math mode set once.

No graph points to a handle's workspace, though handles come and go: CuPy refuses to call cuBLAS
while a stream is captured, and `fa_cupy.gpu.workspace.refuse_products` says so before that.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections import OrderedDict
from typing import Any

import cupy
import numpy as np

from fa_cupy.gpu.driver import remedies

_OP_N, _OP_T = 0, 1  # cublasOperation_t
# cublasMath_t. These variables of the environment override the default mode, not the pedantic one,
# whose products are slower. cuBLAS reads them once.
_DEFAULT_MATH, _PEDANTIC_MATH, _TF32_MATH = 0, 2, 3
_OVERRIDES = (
    "NVIDIA_TF32_OVERRIDE", "CUBLAS_EMULATE_SINGLE_PRECISION", "CUBLAS_EMULATE_DOUBLE_PRECISION",
    "CUBLAS_EMULATION_STRATEGY",
)  # fmt: skip
_IS_OVERRIDDEN = any(os.environ.get(name, "0") != "0" for name in _OVERRIDES)
# A handle's workspace is 32 MiB on Hopper; the handle used longest ago goes first.
_MOST_HANDLES = 4

_by_thread = threading.local()


class _Handle:
    def __init__(self, tf32: bool) -> None:
        cublas = _library()
        self._destroy = cublas.destroy  # still there when the interpreter takes modules apart
        self._device = cupy.cuda.Device()
        self.value = cublas.create()
        exact = _PEDANTIC_MATH if _IS_OVERRIDDEN else _DEFAULT_MATH
        cublas.setMathMode(self.value, _TF32_MATH if tf32 else exact)

    def __del__(self) -> None:
        if hasattr(self, "value"):
            with self._device:  # a thread may have moved on to another
                self._destroy(self.value)


@functools.cache
def _library() -> Any:
    try:
        from cupy_backends.cuda.libs import cublas
    except ImportError as error:
        reason = str(error).partition("\n")[0]  # CuPy goes on to list folders
        raise ImportError(
            "gradients of float32 with dims above 128 before Hopper, products of float64, dims "
            "above 256 and all other calls without a kernel need cuBLAS: "
            f"{remedies.command('cuBLAS')} ({reason})"
        ) from error
    return cublas


def handle(tf32: bool) -> int:
    """Return the cuBLAS handle of this thread for the current device and stream."""
    known = _by_thread.__dict__.setdefault("handles", OrderedDict())
    key = (cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream().ptr, tf32)
    if key in known:
        known.move_to_end(key)
    else:
        known[key] = _Handle(tf32)
        if len(known) > _MOST_HANDLES:
            known.popitem(last=False)
    return int(known[key].value)


def readable(x: Any) -> bool:
    """Whether `matmul` can read `x` (n, rows, cols), float32 or float64, where it is."""
    stack, row, col = x.strides
    size = x.itemsize
    return bool(
        (col == size or x.shape[2] == 1)
        and (x.shape[1] == 1 or (row >= x.shape[2] * size and row % size == 0))
        and row // size < 2**31
        and (x.shape[0] == 1 or (stack >= 0 and stack % size == 0))
    )


def matmul(
    blas: int, a: Any, b: Any, out: Any, *, transposed: bool = False, a_transposed: bool = False,
    factor: float = 1.0, add: bool = False,
) -> None:  # fmt: skip
    """Set `out` to ``factor * a @ b``, or add that to it.

    Parameters
    ----------
    blas : int
        From `handle`.
    a, b : cupy.ndarray
        (n, rows, depth), or (n, depth, rows) if `a_transposed`; and (n, depth, cols), or
        (n, cols, depth) if `transposed`. `readable`.
    out : cupy.ndarray
        (n, rows, cols), of the same dtype.
    transposed, a_transposed : bool, optional
        Whether `b` and `a` are to be transposed.
    factor : float, optional
        Multiplies the product.
    add : bool, optional
        Whether to keep what is in `out`.
    """
    n, rows, cols = out.shape
    depth = a.shape[1 if a_transposed else 2]
    if out.size == 0:
        return
    if depth == 0:
        if not add:
            out.fill(0)
        return
    single = out.dtype == np.float32
    cublas = _library()
    gemm = cublas.sgemmStridedBatched if single else cublas.dgemmStridedBatched
    scalar = ctypes.c_float if single else ctypes.c_double
    alpha, beta = scalar(factor), scalar(1.0 if add else 0.0)
    # cuBLAS counts columns first: what it takes for b.T @ a.T is a @ b.
    gemm(
        blas,
        _OP_T if transposed else _OP_N,
        _OP_T if a_transposed else _OP_N,
        cols,
        rows,
        depth,
        ctypes.addressof(alpha),
        b.data.ptr,
        _leading(b),
        _stack_stride(b),
        a.data.ptr,
        _leading(a),
        _stack_stride(a),
        ctypes.addressof(beta),
        out.data.ptr,
        _leading(out),
        _stack_stride(out),
        n,
    )


def _leading(x: Any) -> int:
    """Elements from one row to the next; of a single row, any number that cuBLAS accepts."""
    return int(x.shape[2] if x.shape[1] == 1 else x.strides[1] // x.itemsize)


def _stack_stride(x: Any) -> int:
    return 0 if x.shape[0] == 1 else int(x.strides[0] // x.itemsize)
