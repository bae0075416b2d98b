"""Results of two sets of keys, and gradients, added up on NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np


def merge(out: Any, lse: Any, more: Any, more_lse: Any) -> None:
    """Merge the attention of further keys into `out` and `lse`, in the dtype of `lse`.

    A part whose log-sum-exp is -inf has no weight, whatever its output holds.
    """
    with np.errstate(all="ignore"):
        top = np.maximum(lse, more_lse)
        top = np.where(np.isneginf(top), lse.dtype.type(0), top)
        weight, other = np.exp(lse - top), np.exp(more_lse - top)
        total = weight + other
        share = np.where(total == 0, lse.dtype.type(1), total)
        sums = _weighed(out, lse, weight / share) + _weighed(more, more_lse, other / share)
        out[...] = sums.astype(out.dtype, copy=False)
        lse[...] = top + np.log(total)


def _weighed(out: Any, lse: Any, weight: Any) -> Any:
    found = weight[..., None] * out.astype(weight.dtype)
    return np.where(np.isneginf(lse)[..., None], weight.dtype.type(0), found)


def add(total: Any, more: Any) -> None:
    """Add to `total`, in float32 (float64 for float64); it may have a dtype of 16 bits."""
    real = np.float64 if total.dtype == np.float64 else np.float32
    with np.errstate(all="ignore"):
        total[...] = (total.astype(real) + more.astype(real)).astype(total.dtype, copy=False)


def convert(x: Any, dtype: Any) -> Any:
    """Return `x` in a dtype: itself, or a copy that lies in memory as `x` does."""
    with np.errstate(all="ignore"):
        return x.astype(dtype, copy=False)
