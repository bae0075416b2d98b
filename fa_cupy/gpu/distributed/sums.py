"""Results of two sets of keys, and gradients, added up on CuPy arrays: one pass over each."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from fa_cupy.gpu.pointwise import Pointwise

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

_merge = Pointwise(
    "fa_cupy_merge",
    """
    const R a = share < 0 ? 0 : share * total, b = other < 0 ? 0 : other * more;
    total = a + b;
    """,
    ("more", "total"),
    rows=("share", "other"),
)
_add = Pointwise("fa_cupy_add", "total += more;", ("more", "total"))
_convert = Pointwise("fa_cupy_convert", "out = x;", ("x", "out"))


def merge(out: Any, lse: Any, more: Any, more_lse: Any) -> None:
    """Merge the attention of further keys into `out` and `lse`, in the dtype of `lse`.

    A part whose log-sum-exp is -inf has no weight, whatever its output holds.
    """
    share, other = cupy.empty(lse.shape, lse.dtype), cupy.empty(lse.shape, lse.dtype)
    _shares(more_lse, lse, share, other)
    _merge(share, other, more, out)


def add(total: Any, more: Any) -> None:
    """Add to `total`, in float32 (float64 for float64); it may have a dtype of 16 bits."""
    _add(more, total)


def convert(x: Any, dtype: Any) -> Any:
    """Return `x` in a dtype: itself, or a copy that lies in memory as `x` does."""
    if x.dtype == dtype:
        return x
    like, bits = x.view(f"u{x.itemsize}"), f"u{np.dtype(dtype).itemsize}"  # not bfloat16
    out = cupy.empty_like(like, bits).view(dtype)
    _convert(x, out)
    return out
