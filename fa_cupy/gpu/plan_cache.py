"""The plans of all functions, by what calls look like.

A key begins with the name of the function. A value is a plan, or what else a repeated call needs;
None stands for a call that has no plan, so that it is not looked for again.
"""

from __future__ import annotations

import atexit
from typing import Any

import cupy
import numpy as np

from fa_cupy._bitmask import BitMask

#: The types of options that are equal where they mean the same.
NUMBERS = frozenset((type(None), float, int, np.float32, np.float64))
TEXTS = frozenset((type(None), str))
_MOST = 8192  # plans; the table starts anew when it is full

#: Reading it is one step to other threads.
plans: dict[Any, Any] = {}
atexit.register(plans.clear)  # kernels must go before CuPy's modules are taken apart

lookup = plans.get


def remember(key: Any, value: Any) -> Any:
    """Add a value to the table and return it."""
    if len(plans) >= _MOST:
        plans.clear()
    plans[key] = value
    return value


def options_key(scale: Any, is_causal: Any, causal_align: Any, window: Any, softcap: Any) -> Any:
    """Return what a plan depends on in options; None if a type does not say what it means."""
    if not (
        scale.__class__ in NUMBERS
        and softcap.__class__ in NUMBERS
        and is_causal.__class__ is bool
        and causal_align.__class__ in TEXTS
    ):
        return None
    if window is not None and window_key(window) is False:
        return None
    return scale, is_causal, causal_align, window, softcap


def mask_key(x: Any, device: int) -> Any:
    """Return what a plan depends on in a mask; False if it is an array of elsewhere."""
    if type(x) is BitMask:
        return x._grid, x.entries.shape, x.entries.strides
    return array_key(x, device)


def array_key(x: Any, device: int) -> Any:
    """Return what a plan depends on in an array; False if it is none of the device."""
    if x is None:
        return None
    if type(x) is cupy.ndarray and x.data.device_id == device:
        return x.shape, x.strides, x.dtype
    return False


def window_key(window: Any) -> Any:
    """Return a window whose type says what it means; False for any other."""
    if window is None:
        return None
    if type(window) is tuple and all(side is None or type(side) is int for side in window):
        return window
    return False
