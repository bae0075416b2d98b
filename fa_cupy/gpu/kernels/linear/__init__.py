"""Kernels of causal products."""
