"""Kernel regression and non-local means, written as attention."""
