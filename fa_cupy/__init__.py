"""Exact attention and causal products for NumPy and CuPy arrays."""

from fa_cupy._attention import attention, scaled_dot_product_attention
from fa_cupy._attention_backward import attention_backward
from fa_cupy._bitmask import BitMask
from fa_cupy._linear_attention import causal_product, causal_product_backward
from fa_cupy._merge import merge_attention
from fa_cupy._normalised import linear_attention
from fa_cupy._prefix import prefix_state

__version__ = "0.1.0"

__all__ = [
    "BitMask",
    "__version__",
    "attention",
    "attention_backward",
    "causal_product",
    "causal_product_backward",
    "linear_attention",
    "merge_attention",
    "prefix_state",
    "scaled_dot_product_attention",
]
