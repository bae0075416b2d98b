"""Records of results: exact digests, and summaries that hold on every machine.

A record is a list with one entry for each array or value of a result. What is exact everywhere
(integers, bools, masks, texts, errors) is kept as a text or as a digest. Of floats the dtype,
shape, strides and numbers of NaN and infinities are kept, and five numbers: the largest absolute
value, and in units of it the sum under fixed weights of both signs over the square root of the
number of elements, the root mean square, the minimum and the maximum. The first of these moves with
any element, and by no more than the elements do where their errors are independent.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fa_cupy import BitMask
from validation.outcomes.data import draw

Array = npt.NDArray[Any]

_LONGEST_TEXT = 400  # longer texts are kept as digests
# How far summaries may differ, in units of the largest absolute value. Other vector widths and
# orders of sums move the last bits; the kernels of a GPU round scores and weights to the dtype.
TOLERANCE = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 2e-5, "float64": 1e-10}
GPU_TOLERANCE = {"float16": 1e-2, "bfloat16": 6e-2, "float32": 5e-4, "float64": 1e-10}
_DIGITS = {"float16": 5, "bfloat16": 4, "float32": 7, "float64": 11}


class Call(NamedTuple):
    """One call: a name that stays, and a function of the array namespace.

    `fails` says whether an error is the wanted result, `cpu` whether it is for NumPy only,
    `slack` how far its floats may differ everywhere, in units of the largest, and `dense` that its
    results may lie in memory in any order.
    """

    name: str
    run: Callable[[Any], Any]
    fails: bool = False
    cpu: bool = False
    slack: float = 0.0
    dense: bool = False


class Outcome(NamedTuple):
    """What a call gave: a record, and a digest of all its bits."""

    record: list[Any]
    digest: str
    failed: bool


def outcome(call: Call, xp: Any) -> Outcome:
    """Run a call on arrays of the namespace `xp`."""
    try:
        result, failed = call.run(xp), False
    except Exception as error:  # the error is the result
        result, failed = f"{type(error).__name__}: {error}", True
    record, bits = [], hashlib.sha256()
    for part in _parts(result):
        entry, data = _entry(part)
        record.append(entry)
        bits.update(repr(entry).encode() + data)
    return Outcome(record, bits.hexdigest()[:16], failed)


def difference(
    stored: list[Any],
    found: list[Any],
    tolerance: dict[str, float],
    slack: float = 0.0,
    strides: bool = True,
) -> str:
    """Return how a record differs from a stored one; "" where it does not.

    Floats may differ by the tolerance of their dtype, or `slack` where that is more. `strides` says
    whether those of floats are compared.
    """
    if len(stored) != len(found):
        return f"{len(found)} parts, stored are {len(stored)}"
    for i, (old, new) in enumerate(zip(stored, found, strict=True)):
        is_float = isinstance(old, list) and isinstance(new, list)
        fits = _close(old, new, max(tolerance[old[0]], slack), strides) if is_float else old == new
        if not fits:
            return f"part {i} is {new}, stored is {old}"
    return ""


def _close(old: list[Any], new: list[Any], allowed: float, strides: bool) -> bool:
    kinds = [(entry[:2], entry[3], entry[2] if strides else None) for entry in (old, new)]
    if kinds[0] != kinds[1]:
        return False
    (top, *units), (new_top, *new_units) = old[4], new[4]
    if abs(new_top - top) > allowed * top:
        return False
    return all(abs(a - b) <= allowed for a, b in zip(units, new_units, strict=True))


def _parts(result: Any) -> Iterator[Any]:
    if isinstance(result, (tuple, list)):
        for part in result:
            yield from _parts(part)
    elif isinstance(result, BitMask):
        here = result.get()
        yield f"BitMask {result.shape}"
        yield here.entries
        yield from here._store.with_words()[:5]
    elif hasattr(result, "tocsr"):
        here = result.get() if hasattr(result, "get") else result
        yield f"csr {result.shape} {result.dtype}"
        yield from (here.indptr, here.indices, here.data)
    else:
        yield result


def _entry(part: Any) -> tuple[Any, bytes]:
    """Return the entry of a record, and what it does not hold of all bits."""
    if not hasattr(part, "strides"):
        text = part if isinstance(part, str) else f"{type(part).__name__} {part!r}"
        if len(text) > _LONGEST_TEXT:
            text = f"text {hashlib.sha256(text.encode()).hexdigest()[:16]}"
        return text, b""
    array = part.get() if hasattr(part, "get") else np.asarray(part)
    name, shape = array.dtype.name, list(array.shape)
    strides = _strides(array.size, part.shape, part.strides)
    data = np.ascontiguousarray(array).tobytes()
    if name in TOLERANCE:
        return [name, shape, strides, *_summary(array)], data
    digest = hashlib.sha256(data).hexdigest()[:16]
    return f"{name} {tuple(shape)} {tuple(strides)} {digest}", b""


def _strides(size: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Return strides, 0 for an axis on which no step is made."""
    return [s if n > 1 and size else 0 for n, s in zip(shape, strides, strict=True)]


def _summary(array: Array) -> tuple[list[int], list[float]]:
    x = array.astype(np.float64).ravel()
    odd = [int(count.sum()) for count in (np.isnan(x), np.isposinf(x), np.isneginf(x))]
    x = np.where(np.isfinite(x), x, 0.0)
    top = float(np.abs(x).max(initial=0.0))
    digits = _DIGITS[array.dtype.name]
    if top == 0:
        return odd, [0.0] * 5
    units = x / top
    weights = draw("weights", units.shape, np.float64)
    numbers = [
        math.fsum(units * weights) / math.sqrt(len(x)),
        math.sqrt(math.fsum(units * units) / len(x)),
        float(units.min()),
        float(units.max()),
    ]
    return odd, [float(f"{top:.{digits}g}"), *(round(number, digits) for number in numbers)]
