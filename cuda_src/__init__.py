"""CUDA C++ kernels, shipped as data."""
