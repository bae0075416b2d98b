"""Dropout of attention weights: random numbers by counters, and the decisions made of them."""
