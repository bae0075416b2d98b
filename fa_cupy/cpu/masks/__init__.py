"""Attention under bit masks on the CPU: tiles of blocks, and the pairs of sparse blocks."""
