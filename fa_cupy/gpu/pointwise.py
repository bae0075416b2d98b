"""Functions of single elements of arrays, of any of the four dtypes of attention.

CuPy's own elementwise kernels read and write one element in each thread. With 16 bits these reach
about a third of the bandwidth of the memory. Kernels here take four neighbours at once, where all
arrays have them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np

from fa_cupy.core import attention_problem

_MOST_LANES = 4
_WIDEST = 16  # bytes that a thread reads or writes at once (PTX ISA 9.7.9: ld, .v4 of 32 bits)

# Types of elements in CuPy's kernels, and those of as many bytes as some neighbours.
_ELEMENTS = {"bfloat16": "uint16"}
_WORDS = {2: "uint16", 4: "uint32", 8: "uint64", 16: "complex128"}
_C_TYPES = {
    "bfloat16": "unsigned short", "float16": "float16", "float32": "float", "float64": "double",
}  # fmt: skip

_PREAMBLE = """
template <typename T, int kLanes> struct __align__(sizeof(T) * kLanes) fa_lanes { T x[kLanes]; };
template <typename R, typename T> __device__ __forceinline__ R fa_load(const T& x) { return R(x); }
template <typename R> __device__ __forceinline__ R fa_load(const unsigned short& bits) {
    return R(__uint_as_float((unsigned int)bits << 16));
}
template <typename T, typename R> __device__ __forceinline__ void fa_store(T& to, R value) {
    to = T(value);
}
template <typename R>
__device__ __forceinline__ void fa_store(unsigned short& to, R value) {
    const float rounded = float(value);
    const unsigned int bits = __float_as_uint(rounded);
    to = rounded == rounded ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : bits >> 16 | 0x40;
}
"""


class Pointwise:
    """A function of elements, compiled on first use for each combination of dtypes.

    Parameters
    ----------
    name : str
        Of the kernels.
    body : str
        Statements in CUDA C++, in which each element is a variable of the type ``R``: float, or
        double if any array has float64. The last array is written to.
    arrays : sequence of str
        The names of arrays with elements, all of the same shape.
    rows : sequence of str, optional
        Names of arrays of ``R`` with one number for each row of these.
    """

    def __init__(
        self, name: str, body: str, arrays: Sequence[str], rows: Sequence[str] = ()
    ) -> None:
        self._name, self._body, self._arrays, self._rows = name, body, arrays, rows

    def __call__(self, *given: Any) -> None:
        """Compute all elements of the last array; numbers of rows come first."""
        rows, arrays = given[: len(self._rows)], given[len(self._rows) :]
        count = min(map(_lanes_of, arrays))
        kernel = self._kernel(tuple(x.dtype.name for x in arrays), count)
        kernel(*(x[..., None] for x in rows), *(_words(x, count) for x in arrays))

    @functools.cache  # noqa: B019, as long as the module lives
    def _kernel(self, dtypes: tuple[str, ...], count: int) -> Any:
        """Return the kernel for dtypes of arrays and a number of neighbours."""
        real = "double" if "float64" in dtypes else "float"
        loads, reads = "", ""
        for name, dtype in zip(self._arrays, dtypes, strict=True):
            lanes = f"fa_lanes<{_C_TYPES[dtype]}, {count}>"
            loads += f"{lanes} {name}_lanes = *reinterpret_cast<const {lanes}*>(&{name}_words);\n"
            reads += f"R {name} = fa_load<R>({name}_lanes.x[lane]);\n"
        last = self._arrays[-1]
        code = f"""
        typedef {real} R;
        {loads}
        #pragma unroll
        for (int lane = 0; lane < {count}; ++lane) {{
            {reads}
            {self._body}
            fa_store({last}_lanes.x[lane], {last});
        }}
        *reinterpret_cast<{lanes}*>(&{last}_words) = {last}_lanes;
        """
        params = [f"{'float64' if real == 'double' else 'float32'} {name}" for name in self._rows]
        for name, dtype in zip(self._arrays, dtypes, strict=True):
            size = count * (2 if dtype == "bfloat16" else np.dtype(dtype).itemsize)
            kind = _WORDS[size] if count > 1 else _ELEMENTS.get(dtype, dtype)
            params.append(f"{kind} {name}_words")
        return cupy.ElementwiseKernel(
            ", ".join(params[:-1]), params[-1], code, "_".join((self._name, *dtypes)),
            preamble=_PREAMBLE,
        )  # fmt: skip


def _lanes_of(x: Any) -> int:
    """Return how many neighbours of an array a thread can take at once."""
    most = min(_MOST_LANES, _WIDEST // x.itemsize)
    if x.size == 0 or x.strides[-1] != x.itemsize:
        return 1
    steps = [step for step, n in zip(x.strides[:-1], x.shape[:-1], strict=True) if n > 1]
    size = math.gcd(most * x.itemsize, x.data.ptr, x.shape[-1] * x.itemsize, *steps)
    return size // int(x.itemsize)


def _words(x: Any, count: int) -> Any:
    """Return a view of an array in words of some neighbours."""
    if count > 1:
        return x.view(_WORDS[count * x.itemsize])
    return x.view(np.uint16) if x.dtype == attention_problem.BFLOAT16 else x
