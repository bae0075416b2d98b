"""Shapes and strides: grouped heads, broadcasting of batch axes, views over them, sums back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

# Results have 32 axes at most, as many as NumPy broadcasts; its arrays may have 64.
MOST_BATCH_AXES = 30


class View(NamedTuple):
    """How an array is to be looked at: `shape`, and `strides` in bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


def head_groups(
    name: str, args: Sequence[str], q: Any, k: Any, v: Any, grouped: bool
) -> tuple[int, ...]:
    """Factors that split the head axis of `q` for grouped queries, outermost first; or ().

    One head count of `k` and `v` below that of `q` gives (kv_heads, group). Two different ones
    (4 and 2 under 8) give three factors.
    """
    if min(q.ndim, k.ndim, v.ndim) < 4:
        return ()
    q_arg, k_arg, v_arg = args[:3]
    heads = q.shape[-3]
    fewer = {arg: a.shape[-3] for arg, a in ((k_arg, k), (v_arg, v)) if 1 < a.shape[-3] < heads}
    for arg, count in fewer.items():
        wanted = "a divisor of it" if grouped else "as many (or enable_gqa=True)"
        if not grouped or heads % count:
            raise ValueError(f"{name}: {arg} has {count} heads, {q_arg} has {heads}, want {wanted}")
    counts = sorted(set(fewer.values()))
    if len(counts) == 2 and counts[1] % counts[0]:
        raise ValueError(
            f"{name}: {v_arg} has {fewer[v_arg]} heads, {k_arg} has {fewer[k_arg]}, "
            "want one to divide the other"
        )
    bounds = [1, *counts, heads]
    return tuple(b // a for a, b in itertools.pairwise(bounds)) if counts else ()


def check_batch_axes(name: str, arg: str, count: int, most: int = MOST_BATCH_AXES) -> None:
    """Raise ValueError for an argument with more batch axes than there may be."""
    if count > most:
        raise ValueError(f"{name}: {arg} has {count} batch axes, want at most {most}")


def broadcast_batch(
    name: str, groups: tuple[int, ...], arrays: list[tuple[str, Any]], fewer: int = 2
) -> tuple[int, ...]:
    """Broadcast the axes before the last two, as `numpy.matmul` does.

    `arrays` begins with q; the next ones, `fewer` of them, may have fewer heads.
    """
    batch: tuple[int, ...] = ()
    seen: list[str] = []
    for arg, array in arrays:
        shape = array.shape[:-2]
        heads = math.prod(groups)
        if groups and 0 < len(seen) <= fewer and shape and 1 < shape[-1] <= heads:
            shape = (*shape[:-1], heads)
        if len(shape) > MOST_BATCH_AXES:
            check_batch_axes(name, arg, len(shape))
        axes = max(len(batch), len(shape))
        old = (1,) * (axes - len(batch)) + batch
        new = (1,) * (axes - len(shape)) + shape
        if any(a != b and a != 1 and b != 1 for a, b in zip(old, new, strict=True)):
            raise ValueError(
                f"{name}: {arg} has batch shape {array.shape[:-2]}, which does not broadcast with "
                f"{batch} of {', '.join(seen)}"
            )
        batch = tuple(b if a == 1 else a for a, b in zip(old, new, strict=True))
        seen.append(arg)
    return batch


def check_score_axes(name: str, arg: str, shape: tuple[int, ...], scores: tuple[int, ...]) -> None:
    """Raise unless the last two axes of `shape` broadcast to those of `scores`."""
    tail = shape[-2:]
    if any(n not in (1, want) for n, want in zip(tail[::-1], scores[::-1], strict=False)):
        raise ValueError(f"{name}: {arg} has shape {shape}, want one that broadcasts to {scores}")


def split_heads(batch: tuple[int, ...], groups: tuple[int, ...]) -> tuple[int, ...]:
    """Return batch axes with the head axis split into its factors."""
    return batch[:-1] + groups if groups else batch


def over(batch: tuple[int, ...], groups: tuple[int, ...], array: Any, rows: int, cols: int) -> View:
    """Return the view of `array` over the axes of `batch`, heads split, of `rows` and `cols`."""
    strides = view_strides(array, len(batch), cols, groups)
    return View((*split_heads(batch, groups), rows, cols), strides)


def view_strides(array: Any, axes: int, cols: int, groups: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of `array` over the batch axes (heads split), its rows and its `cols` columns."""
    shape, strides = array.shape, array.strides
    missing = max(0, 2 - len(shape))
    tail = [0 if n == 1 else s for n, s in zip(shape[-2:], strides[-2:], strict=True)]
    if shape and shape[-1] == cols == 1:
        tail[-1] = array.dtype.itemsize  # one column is contiguous, whatever its stride says
    batch = batch_strides(shape[:-2], strides[:-2], axes, groups)
    return (*batch, *[0] * missing, *tail)


def batch_strides(
    shape: Sequence[int], strides: Sequence[int], axes: int, groups: tuple[int, ...]
) -> list[int]:
    """Strides over `axes` batch axes, the last of them split by `groups`; broadcast ones are 0."""
    result = [0] * (axes - len(shape))
    result += [0 if n == 1 else s for n, s in zip(shape, strides, strict=True)]
    if groups:
        heads, stride = (shape[-1], strides[-1]) if shape else (1, 0)
        covered = [math.prod(groups[: i + 1]) for i in range(len(groups))]
        # `heads` is the product of some leading factors; the others repeat its heads.
        result[-1:] = [stride * (heads // n) if n <= heads else 0 for n in covered]
    return result


def batch_extents(shape: Sequence[int], axes: int, groups: tuple[int, ...]) -> list[int]:
    """Sizes over `axes` batch axes, the last of them split by `groups`; broadcast ones are 1."""
    result = [1] * (axes - len(shape)) + list(shape)
    if groups:
        covered = [math.prod(groups[: i + 1]) for i in range(len(groups))]
        result[-1:] = [n if c <= result[-1] else 1 for n, c in zip(groups, covered, strict=True)]
    return result


def summed(x: Any, shape: Sequence[int]) -> Any:
    """Sum `x` over the batch axes along which an array of `shape` was broadcast or repeated."""
    if x.ndim > len(shape):
        x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    for axis, size in enumerate(shape[:-2]):
        if size != x.shape[axis]:  # 1, or the number of key heads for groups of query heads
            split = (*x.shape[:axis], size, x.shape[axis] // (size or 1), *x.shape[axis + 1 :])
            x = x.reshape(split).sum(axis=axis + 1)
    return x
