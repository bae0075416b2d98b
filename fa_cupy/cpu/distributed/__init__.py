"""Sums of what ranks have found, on NumPy arrays."""
