"""Functions of single elements of arrays, of any of the four dtypes of attention.

CuPy's own elementwise kernels read and write one element in each thread. With 16 bits these reach
about a third of the bandwidth of the memory. Kernels here take four neighbours at once, where all
arrays have them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np

from fa_cupy.core.arrays import word_of

_MOST_LANES = 4
_WIDEST = 16  # bytes that a thread reads or writes at once (PTX ISA 9.7.9: ld, .v4 of 32 bits)

# CuPy's types of as many bytes as an element has, or some neighbours.
_WORDS = {2: "uint16", 4: "uint32", 8: "uint64", 16: "complex128"}
_C_TYPES = {
    "bfloat16": "fa_bfloat16", "float16": "float16", "float32": "float", "float64": "double",
}  # fmt: skip

# CuPy includes this by itself only where a parameter has the type.
_FLOAT16 = "#include <cupy/float16.cuh>"
_PREAMBLE = """
struct fa_bfloat16 {
    unsigned short bits;
    fa_bfloat16() = default;
    __device__ explicit fa_bfloat16(float x) {
        const unsigned int word = __float_as_uint(x);
        bits = x == x ? (word + 0x7fff + (word >> 16 & 1)) >> 16 : word >> 16 | 0x40;
    }
    __device__ operator float() const { return __uint_as_float((unsigned int)bits << 16); }
};
template <typename T, int kLanes> struct __align__(sizeof(T) * kLanes) fa_lanes { T x[kLanes]; };
"""


class Pointwise:
    """A function of elements, compiled on first use for each combination of dtypes.

    Parameters
    ----------
    name : str
        Of the kernels.
    body : str
        Statements in CUDA C++, in which each element is a variable of the type ``R``: float, or
        double if any array has float64. The last array is written to; if the statements do not
        read it, the compiler leaves out what would.
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
        words = [x.view(_WORDS[count * x.itemsize]) for x in arrays]
        kernel(*(x[..., None] for x in rows), *words)

    @functools.cache  # noqa: B019, as long as the module lives
    def _kernel(self, dtypes: tuple[str, ...], count: int) -> Any:
        """Return the kernel for dtypes of arrays and a number of neighbours."""
        real = "double" if "float64" in dtypes else "float"
        loads, reads, lanes = "", "", [f"fa_lanes<{_C_TYPES[x]}, {count}>" for x in dtypes]
        for name, kind in zip(self._arrays, lanes, strict=True):
            loads += f"{kind} {name}_lanes = *reinterpret_cast<const {kind}*>(&{name}_words);\n"
            reads += f"R {name} = R({name}_lanes.x[lane]);\n"
        last = self._arrays[-1]
        code = f"""
        typedef {real} R;
        {loads}
        #pragma unroll
        for (int lane = 0; lane < {count}; ++lane) {{
            {reads}
            {self._body}
            {last}_lanes.x[lane] = {_C_TYPES[dtypes[-1]]}({last});
        }}
        *reinterpret_cast<{lanes[-1]}*>(&{last}_words) = {last}_lanes;
        """
        params = [f"{'float64' if real == 'double' else 'float32'} {name}" for name in self._rows]
        for name, dtype in zip(self._arrays, dtypes, strict=True):
            size = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
            params.append(f"{_WORDS[count * size]} {name}_words")
        return cupy.ElementwiseKernel(
            ", ".join(params[:-1]), params[-1], code, "_".join((self._name, *dtypes)),
            preamble=(_FLOAT16 if "float16" in dtypes else "") + _PREAMBLE,
        )  # fmt: skip


def _lanes_of(x: Any) -> int:
    """Return how many neighbours of an array a thread can take at once."""
    return word_of(x, min(_MOST_LANES * x.itemsize, _WIDEST)) // int(x.itemsize)
