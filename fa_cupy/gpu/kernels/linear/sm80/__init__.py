"""Kernels of causal products for SM80 and later, in which threads copy rows to shared memory."""
