"""Kernels for the gradient of a bias."""
