"""Batch entries in stacks of equal stride, so that one batched operation serves many of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from fa_cupy.core.attention_problem import View


class Batch(NamedTuple):
    """Batch axes that no view can tell from the original ones: `shape`, and strides per view."""

    shape: tuple[int, ...]
    strides: list[tuple[int, ...]]


def merged(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> Batch:
    """Merge neighbouring batch axes wherever every view can step through both with one stride.

    The longest of the remaining axes comes last.

    Parameters
    ----------
    shape : sequence of int
        Batch axes.
    strides : sequence of sequences of int
        For each view, its strides along those axes.
    """
    sizes = [1]
    steps: list[list[int]] = [[0] for _ in strides]
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        news = [s[axis] for s in strides]
        if sizes[-1] == 1 or all(
            old[-1] == new * size for old, new in zip(steps, news, strict=True)
        ):
            sizes[-1] *= size
            for old, new in zip(steps, news, strict=True):
                old[-1] = new
        else:
            sizes.append(size)
            for old, new in zip(steps, news, strict=True):
                old.append(new)
    longest = max(range(len(sizes)), key=sizes.__getitem__)
    order = [a for a in range(len(sizes)) if a != longest] + [longest]
    return Batch(tuple(sizes[a] for a in order), [tuple(old[a] for a in order) for old in steps])


def stacks(
    xp: Any,
    arrays: Sequence[Any],
    views: Sequence[View | None],
    largest: int,
    axes: int = -2,
) -> Iterator[list[Any]]:
    """Yield, for each stack of at most `largest` batch entries, the arrays as (n, rows, cols).

    Parameters
    ----------
    xp : module
        Namespace of the arrays, of all that are no NumPy arrays.
    arrays : sequence of arrays or None
        What the views look at.
    views : sequence of View or None
        Of shape (*batch, rows, cols) with one `batch` in common; None where the array is None.
    largest : int
        Upper bound on n.
    axes : int, optional
        Where a view's batch axes end; all before its last two by default.
    """
    present = [v for v in views if v is not None]
    shape = present[0].shape[:axes]
    if math.prod(shape) == 0:
        return
    batch = merged(shape, [v.strides[:axes] for v in present])
    strides = iter(batch.strides)
    seen = [
        None
        if view is None
        else (np if type(array) is np.ndarray else xp).lib.stride_tricks.as_strided(
            array, (*batch.shape, *view.shape[axes:]), (*next(strides), *view.strides[axes:])
        )
        for array, view in zip(arrays, views, strict=True)
    ]
    for index in np.ndindex(batch.shape[:-1]):
        for begin in range(0, batch.shape[-1], largest):
            part = (*index, slice(begin, begin + largest))
            yield [None if array is None else array[part] for array in seen]
