"""Causal products of packed sequences on CuPy arrays."""
