"""Masks of 128 x 128 blocks on the host."""
