"""Causal products of packed sequences on NumPy arrays."""
