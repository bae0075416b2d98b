"""Attention of few queries: the keys are shared out over blocks (``fwd_splitkv``).

Their lengths and pages lie in device memory.
"""
