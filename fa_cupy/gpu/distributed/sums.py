"""Results of two sets of keys, and gradients, added up on CuPy arrays: one pass over each.

CuPy's elementwise kernels take bfloat16 as 16 bits, and convert it here.
"""

from __future__ import annotations

import functools
from typing import Any

import cupy
import numpy as np

from fa_cupy.core import attention_problem
from fa_cupy.gpu.cublas import tile_ops

_BFLOAT16 = """
__device__ __forceinline__ float fa_load(unsigned short bits) {
    return __uint_as_float((unsigned int)bits << 16);
}
__device__ __forceinline__ unsigned short fa_round(float value) {
    const unsigned int bits = __float_as_uint(value);
    if (value != value) return (unsigned short)(bits >> 16 | 0x40);
    return (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
"""

# The shares of two parts of the keys in their sum, and the log-sum-exp of both. A part without keys
# has a share below 0: one of exactly 0 may have been rounded, and its NaN count.
_shares = cupy.ElementwiseKernel(
    "T more",
    "T lse, T share, T other",
    """
    const T infinity = __longlong_as_double(0x7ff0000000000000LL);
    const bool is_empty = lse == -infinity;
    T top = (lse > more || lse != lse) ? lse : more;
    if (top == -infinity) top = 0;
    share = exp(lse - top);
    other = exp(more - top);
    const T total = share + other;
    lse = top + log(total);
    if (total != T(0)) {
        share /= total;
        other /= total;
    }
    if (is_empty) share = -1;
    if (more == -infinity) other = -1;
    """,
    "fa_cupy_merge_shares",
)


def merge(out: Any, lse: Any, more: Any, more_lse: Any) -> None:
    """Merge the attention of further keys into `out` and `lse`, in the dtype of `lse`.

    A part whose log-sum-exp is -inf has no weight, whatever its output holds.
    """
    share, other = cupy.empty(lse.shape, lse.dtype), cupy.empty(lse.shape, lse.dtype)
    _shares(more_lse, lse, share, other)
    kernel = _kernel("merge", out.dtype.name, more.dtype.name)
    kernel(share[..., None], other[..., None], _bits(more), _bits(out))


def add(total: Any, more: Any) -> None:
    """Add to `total`, in float32 (float64 for float64); it may have a dtype of 16 bits."""
    _kernel("add", total.dtype.name, more.dtype.name)(_bits(more), _bits(total))


def convert(x: Any, dtype: Any) -> Any:
    """Return `x` in a dtype: itself, or a copy."""
    if x.dtype == dtype:
        return x
    out = cupy.empty_like(_bits(x), np.uint16 if dtype == attention_problem.BFLOAT16 else dtype)
    tile_ops.copy(out.view(dtype), x)
    return out.view(dtype)


def _bits(x: Any) -> Any:
    return x.view(np.uint16) if x.dtype == attention_problem.BFLOAT16 else x


@functools.cache
def _kernel(what: str, dtype: str, more: str) -> Any:
    """Return the kernel that merges, or adds, arrays of these dtypes."""
    real = "double" if dtype == "float64" else "float"

    def kind(name: str) -> str:
        return "uint16" if name == "bfloat16" else name

    def load(name: str, variable: str) -> str:
        return f"fa_load({variable})" if name == "bfloat16" else f"({real}){variable}"

    if what == "merge":
        weights = f"{'float64' if real == 'double' else 'float32'} share, "
        weights += weights.replace("share", "other")
        body = (
            f"const {real} a = share < 0 ? 0 : share * {load(dtype, 'total')};"
            f"const {real} b = other < 0 ? 0 : other * {load(more, 'more')};"
            f"const {real} sum = a + b;"
        )
    else:
        weights = ""
        body = f"const {real} sum = {load(dtype, 'total')} + {load(more, 'more')};"
    body += "total = fa_round(sum);" if dtype == "bfloat16" else "total = sum;"
    return cupy.ElementwiseKernel(
        f"{weights}{kind(more)} more",
        f"{kind(dtype)} total",
        body,
        f"fa_cupy_{what}_{dtype}_{more}",
        preamble=_BFLOAT16,
    )
