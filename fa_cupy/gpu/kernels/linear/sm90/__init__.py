"""Kernels of causal products for SM90, which tensor maps feed."""
