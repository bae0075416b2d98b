"""Packed sequences on the CPU."""
