"""Kernels that make tables of masks."""
