"""Exact attention for NumPy and CuPy arrays."""

from fa_cupy._attention import attention, scaled_dot_product_attention
from fa_cupy._merge import merge_attention

__version__ = "0.1.0"

__all__ = ["__version__", "attention", "merge_attention", "scaled_dot_product_attention"]
