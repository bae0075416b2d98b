"""The plans of all functions, by what calls look like.

A key begins with the name of the function. A value is a plan, or what else a repeated call needs;
None stands for a call that has no plan, so that it is not looked for again.
"""

from __future__ import annotations

import atexit
from typing import Any

import numpy as np

#: The types of options that are equal where they mean the same.
NUMBERS = frozenset((type(None), float, int, np.float32, np.float64))
TEXTS = frozenset((type(None), str))
_MOST = 8192  # plans; the table starts anew when it is full

#: Reading it is one step to other threads.
plans: dict[Any, Any] = {}
atexit.register(plans.clear)  # kernels of a GPU must go before the modules of CuPy are taken apart

lookup = plans.get
#: What a lookup returns for a key that is not in the table, where None is a value.
UNKNOWN: Any = object()


def remember(key: Any, value: Any) -> Any:
    """Add a value to the table and return it."""
    if len(plans) >= _MOST:
        plans.clear()
    plans[key] = value
    return value


def window_key(window: Any) -> Any:
    """Return a window whose type says what it means; False for any other."""
    if window is None:
        return None
    if type(window) is tuple and all(side is None or type(side) is int for side in window):
        return window
    return False
