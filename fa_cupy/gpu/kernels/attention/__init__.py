"""Kernels of attention and its gradients."""
