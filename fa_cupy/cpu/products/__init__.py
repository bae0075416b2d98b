"""Causal products on NumPy arrays: plans, and what they run on."""
