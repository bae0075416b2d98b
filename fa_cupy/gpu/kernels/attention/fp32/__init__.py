"""Attention of float32, on tensor cores for float16."""
