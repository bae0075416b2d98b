"""Exact attention and causal products for NumPy and CuPy arrays."""

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
from fa_cupy._linear_attention import (
    causal_product,
    causal_product_backward,
    linear_attention,
    prefix_state,
)
from fa_cupy._score import Score

__version__ = "0.1.0"

__all__ = [
    "BitMask",
    "Score",
    "__version__",
    "attention",
    "attention_backward",
    "causal_product",
    "causal_product_backward",
    "kernel_regression",
    "kernel_regression_backward",
    "linear_attention",
    "merge_attention",
    "non_local_means",
    "prefix_state",
    "scaled_dot_product_attention",
]
