"""Checks of options: scalars, flags and the band of visible keys."""

from __future__ import annotations

import math
import operator
import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

_ALIGNMENTS = ("top_left", "bottom_right")
_FLOATS = {float, np.float16, np.float32, np.float64}
_TOO_LARGE = 2**1024 - 2**970  # the first int that float() refuses
# What a broken __repr__ raises; not all errors, for a handler of signals may raise its own there.
_FAULTS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError)

# The functions of `fa_cupy.torch`.
_RECORDED = (
    "attention",
    "causal_product",
    "kernel_regression",
    "linear_attention",
    "merge_attention",
    "non_local_means",
    "prefix_state",
    "scaled_dot_product_attention",
)


class Shift(int):
    """Where query 0 stands among the keys, in place of an alignment.

    For parts of a longer sequence (`fa_cupy.distributed`).
    """


def flag(name: str, arg: str, value: Any) -> bool:
    """Return `value`, a bool, a NumPy bool or one of the integers 0 and 1, as a bool."""
    if isinstance(value, (bool, np.bool_)) or (is_int(value) and value in (0, 1)):
        return bool(value)
    raise TypeError(f"{name}: {arg} is {show(value)}, want a bool")


def is_sparse(x: Any) -> bool:
    """Return whether an argument is a sparse matrix, of any library."""
    return hasattr(x, "tocsr")


def is_int(value: Any) -> bool:
    """Return whether `value` is an int, a bool or a NumPy integer.

    A timedelta64 is none, though NumPy counts its class among those of integers.
    """
    return isinstance(value, (int, np.integer)) and not isinstance(value, np.timedelta64)


def sequence(name: str, arg: str, value: Any, wanted: str) -> Sequence[Any]:
    """Return `value`, which has to be a sequence, or an array with axes; a string is none."""
    other = isinstance(value, (str, bytes, bytearray, memoryview))
    if not other and (getattr(value, "ndim", False) or isinstance(value, Sequence)):
        found: Sequence[Any] = value
        return found
    raise TypeError(f"{name}: {arg} is {show(value)}, want {wanted}")


def requires_gradient(name: str, arg: str) -> TypeError:
    """Return the error for a tensor whose gradient functions of `fa_cupy.torch` record."""
    recording = f"fa_cupy.torch.{name}" if name in _RECORDED else "a function of fa_cupy.torch"
    return TypeError(
        f"{name}: {arg} requires a gradient, which is not recorded here, "
        f"want {arg}.detach(), or {recording}, which records it"
    )


def finite(
    name: str, arg: str, value: Any, minimum: float = -math.inf, *, recorded: bool = False
) -> float:
    """Return `value`, a finite real number of any type that is at least `minimum`, as a float.

    `recorded` says whether functions of `fa_cupy.torch` record the gradient of this argument.
    """
    wanted = "a finite number" + (f" >= {minimum:g}" if minimum > -math.inf else "")
    torch = sys.modules.get("torch")
    if torch and getattr(value, "requires_grad", False) and torch.is_grad_enabled():
        if recorded:
            raise requires_gradient(name, arg)
        raise TypeError(
            f"{name}: {arg} requires a gradient, which is not recorded here, want {arg}.detach()"
        )
    number = _as_float(value) if _is_real_scalar(value) else None
    if number is None:
        raise TypeError(f"{name}: {arg} is {show(value)}, want {wanted}")
    if not math.isfinite(number) or number < minimum:
        raise ValueError(f"{name}: {arg} is {show(value)}, want {wanted}")
    return number


def band(
    name: str,
    is_causal: Any,
    causal_align: Any,
    window: Any,
    q_len: int,
    k_len: int,
    layout: str | None = None,
) -> tuple[int | None, int | None]:
    """Fold causality and window into the bounds of ``j - i``; a bound that never binds is None.

    `layout` is an argument that says where the keys end, if there is one: an alignment is needed.
    """
    causal = flag(name, "is_causal", is_causal)
    known = isinstance(causal_align, Shift) or (
        isinstance(causal_align, str) and causal_align in _ALIGNMENTS
    )
    if causal_align is not None and not known:
        raise ValueError(
            f"{name}: causal_align is {show(causal_align)}, want 'top_left' or 'bottom_right'"
        )
    left, right = _window(name, window)
    if not causal and left is None and right is None:
        return None, None
    if causal_align is None and (q_len != k_len or layout):
        lengths = layout or f"{q_len} queries and {k_len} keys"
        raise ValueError(
            f"{name}: {'is_causal' if causal else 'window'} with {lengths} "
            "needs causal_align='top_left' (query i stands at key i) or 'bottom_right' "
            "(the last query stands at the last key)"
        )
    offset = k_len - q_len if causal_align == "bottom_right" else 0
    if isinstance(causal_align, Shift):
        offset = int(causal_align)
    lower = None if left is None else offset - left
    upper = None if right is None else offset + right
    if causal:
        upper = offset  # right >= 0, so that causality is the tighter bound
    if lower is not None and lower <= 1 - q_len:
        lower = None
    if upper is not None and upper >= k_len - 1:
        upper = None
    return lower, upper


def whole(
    name: str,
    arg: str,
    value: Any,
    wanted: str = "an int >= 0",
    allowed: range | None = None,
) -> int:
    """Return a whole number of at least 0, among those that are allowed; a bool is none."""
    text = f"{name}: {arg} is {show(value)}, want {wanted}"
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(text) from None
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(text)
    if number < 0 or (allowed is not None and number not in allowed):
        raise ValueError(text)
    return number


def array_of(name: str, arg: str, array: Any, dtype: str) -> None:
    """Raise a TypeError unless `array` is one, of NumPy or like that, of a dtype."""
    if not hasattr(array, "ravel") or isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name}: {arg} is a {type(array).__name__}, want an array of {dtype}")
    if array.dtype != dtype:
        raise TypeError(f"{name}: {arg} has dtype {array.dtype}, want {dtype}")


def _window(name: str, window: Any) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"{name}: window is {show(window)}, want a pair (left, right)")
    sides: list[int | None] = []
    for i, side in enumerate(window):
        reach = None if side is None else whole(name, f"window[{i}]", side, "None or an int >= 0")
        sides.append(reach)
    return sides[0], sides[1]


def precision(name: str, value: Any, dtype: np.dtype[Any]) -> str | None:
    """Return `value` where it has a meaning: "tf32" for float32, else None."""
    if value is not None and not (isinstance(value, str) and value == "tf32"):
        raise ValueError(f"{name}: precision is {show(value)}, want None or 'tf32'")
    return "tf32" if value is not None and dtype == np.float32 else None


def _is_real_scalar(value: Any) -> bool:
    """Whether `value` can be one real number, as far as its type, axes and dtype say.

    float() alone would also take a str, a bool, an array of one element, and of some libraries'
    complex numbers the real part.
    """
    kind = type(value)
    if issubclass(kind, (str, bytes, bytearray, bool)):
        return False
    if not (hasattr(kind, "__float__") or hasattr(kind, "__index__")):
        return False
    if getattr(value, "ndim", 0) or getattr(value, "is_meta", False):  # torch, without data
        return False
    dtype = getattr(value, "dtype", None)
    return dtype is None or bool(re.match(r"(\w+\.)?(b?float|u?int)", str(dtype)))


def _as_float(value: Any) -> float | None:
    """Return what may be a number as a float, None where its conversion says that it is none.

    Caught is only what conversions raise. Any other error comes from elsewhere, as that of a signal
    handler on a time-out. The usual types have conversions that raise nothing.
    """
    if type(value) in _FLOATS:
        return float(value)
    if type(value) is int:
        return float(value) if abs(value) < _TOO_LARGE else math.inf
    try:
        return float(value)
    except OverflowError:  # as of a Fraction
        return math.inf
    except ValueError:  # a signalling NaN
        return math.nan
    except TypeError:
        return None


def show(value: Any) -> str:
    """Return a value as error messages show it: shortened, with the name of its type."""
    try:
        text = " ".join(repr(value).split())  # an array has lines of its own
    except _FAULTS:  # an int of more digits than Python writes, or a class whose methods fail
        text = "something that cannot be printed"
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def check_gradient(
    name: str, arg: str, array: Any, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> None:
    """Raise unless `array` can be the gradient of a result of `shape` and `dtype`."""
    if array.shape != shape:
        raise ValueError(f"{name}: {arg} has shape {array.shape}, want {shape}")
    if array.dtype != dtype:
        raise TypeError(f"{name}: {arg} has dtype {array.dtype}, want {dtype}")
