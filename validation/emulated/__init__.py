"""Calls of whole functions by kernels in `validation.emulator`: what the host does, in NumPy."""

from validation.emulated.products import causal_product as causal_product
from validation.emulated.products import causal_products as causal_products
