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


class Stacks:
    """Batch entries in stacks of one shape, as follows from how arrays are to be looked at.

    Parameters
    ----------
    views : sequence of View or None
        Of shape (*batch, rows, cols) with one `batch` in common; None for arrays that are None.
    largest : int
        Upper bound on the entries of a stack.
    axes : int, optional
        Where a view's batch axes end; all before its last two by default.
    """

    def __init__(self, views: Sequence[View | None], largest: int, axes: int = -2) -> None:
        present = [v for v in views if v is not None]
        self._batch = merged(present[0].shape[:axes], [v.strides[:axes] for v in present])
        self._largest = largest
        strides = iter(self._batch.strides)
        self._views = [
            None
            if view is None
            else View(
                (*self._batch.shape, *view.shape[axes:]), (*next(strides), *view.strides[axes:])
            )
            for view in views
        ]
        self._dense = [view is not None and _is_dense(view) for view in self._views]

    def of(self, xp: Any, arrays: Sequence[Any]) -> Iterator[list[Any]]:
        """Yield the arrays of each stack, as `stacks` does."""
        *outer, entries = self._batch.shape
        if math.prod(outer) * entries == 0:
            return
        seen = [
            None if view is None else _look(xp, array, view, dense)
            for array, view, dense in zip(arrays, self._views, self._dense, strict=True)
        ]
        for index in np.ndindex(*outer):
            for begin in range(0, entries, self._largest):
                part = (*index, slice(begin, begin + self._largest))
                yield [None if array is None else array[part] for array in seen]


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
    views, largest, axes
        As of `Stacks`.
    """
    yield from Stacks(views, largest, axes).of(xp, arrays)


def _look(xp: Any, array: Any, view: View, dense: bool) -> Any:
    """Return the array as `view` says; where that is all of it in order, in less time."""
    if dense and array.flags.c_contiguous and array.size == math.prod(view.shape):
        return array.reshape(view.shape)
    of = np if type(array) is np.ndarray else xp
    return of.lib.stride_tricks.as_strided(array, view.shape, view.strides)


def _is_dense(view: View) -> bool:
    """Whether elements follow each other without gaps, in C order."""
    step = 0
    for size, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if size > 1:
            if step not in (0, stride):
                return False
            step = stride * size
    return True
