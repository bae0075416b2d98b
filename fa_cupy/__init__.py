"""Exact attention, kernel regression and causal products for NumPy and CuPy arrays."""

import importlib as _importlib
import importlib.util as _util
import typing as _typing

from fa_cupy import _version
from fa_cupy._attention import (
    attention,
    attention_backward,
    merge_attention,
    scaled_dot_product_attention,
)
from fa_cupy._bitmask import BitMask
from fa_cupy._kernel_regression import (
    kernel_regression,
    kernel_regression_backward,
    non_local_means,
)
from fa_cupy._kv_cache import KVCache
from fa_cupy._linear_attention import (
    causal_product,
    causal_product_backward,
    linear_attention,
    linear_attention_backward,
    prefix_state,
)
from fa_cupy._score import Score
from fa_cupy.dropout.mask import dropout_mask

__all__ = [
    "BitMask",
    "KVCache",
    "Score",
    "__version__",
    "attention",
    "attention_backward",
    "causal_product",
    "causal_product_backward",
    "dropout_mask",
    "kernel_regression",
    "kernel_regression_backward",
    "linear_attention",
    "linear_attention_backward",
    "merge_attention",
    "non_local_means",
    "prefix_state",
    "scaled_dot_product_attention",
]

# Imported when they are first asked for: what they need takes long to import, or is not installed.
_LATE = {
    "dask": "dask", "distributed": None, "jax": "jax", "layouts": None, "plot": None,
    "reference": None, "torch": "torch",
}  # fmt: skip

if _typing.TYPE_CHECKING:
    __version__: str
    from fa_cupy import dask as dask
    from fa_cupy import distributed as distributed
    from fa_cupy import jax as jax
    from fa_cupy import layouts as layouts
    from fa_cupy import plot as plot
    from fa_cupy import reference as reference
    from fa_cupy import torch as torch
else:

    def __getattr__(name):
        if name == "__version__":  # not before it is asked for: in a checkout, git is
            return _version.version()
        if name in _LATE:
            return _importlib.import_module(f"fa_cupy.{name}")
        raise AttributeError(f"module 'fa_cupy' has no attribute {name!r}")

    def __dir__():
        here = (name for name, needs in _LATE.items() if not needs or _util.find_spec(needs))
        return sorted({*globals(), *here, "__version__"})
