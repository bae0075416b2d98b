"""Batch entries in stacks of equal stride, so that one batched operation serves many of them."""

from __future__ import annotations

import itertools
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


class Layout:
    """How stacks of batch entries lie in some arrays: once for all arrays with the same views.

    Parameters
    ----------
    views : sequence of View or None
        Of shape (*batch, rows, cols) with one `batch` in common; None for an array that is None.
    largest : int
        Upper bound on the number of batch entries in a stack.
    axes : int, optional
        Where a view's batch axes end; all before its last two by default.
    """

    def __init__(self, views: Sequence[View | None], largest: int, axes: int = -2) -> None:
        present = [v for v in views if v is not None]
        shape = present[0].shape[:axes]
        batch = merged(shape, [v.strides[:axes] for v in present])
        strides = iter(batch.strides)
        self._views = [
            None
            if view is None
            else View((*batch.shape, *view.shape[axes:]), (*next(strides), *view.strides[axes:]))
            for view in views
        ]
        # Elements of those views that follow each other in memory, else 0.
        self._dense = [
            math.prod(view.shape) if view is not None and is_dense(view) else 0
            for view in self._views
        ]
        self._shape, self._largest = batch.shape, largest
        #: The number of stacks.
        self.count = 0
        if math.prod(shape):
            self.count = math.prod(batch.shape[:-1]) * -(-batch.shape[-1] // largest)

    def seen(self, xp: Any, arrays: Sequence[Any]) -> list[Any]:
        """Return the arrays with these batch axes, without a copy.

        `xp` is the namespace of all that are no NumPy arrays.
        """
        return [
            None if view is None else _through(xp, array, view, dense)
            for array, view, dense in zip(arrays, self._views, self._dense, strict=True)
        ]

    def stacks(self, xp: Any, arrays: Sequence[Any]) -> Iterator[list[Any]]:
        """Yield, for each stack, the arrays as (n, rows, cols)."""
        if not self.count:
            return
        seen = self.seen(xp, arrays)
        if self.count == 1 and len(self._shape) == 1:
            yield seen
            return
        for index in np.ndindex(self._shape[:-1]):
            for begin in range(0, self._shape[-1], self._largest):
                part = (*index, slice(begin, begin + self._largest))
                yield [None if array is None else array[part] for array in seen]


def is_dense(view: View) -> bool:
    """Whether elements that follow each other in C order do so in memory, at some distance."""
    axes = [(n, stride) for n, stride in zip(*view, strict=True) if n != 1]
    return all(stride == n * inner for (_, stride), (n, inner) in itertools.pairwise(axes)) and (
        not axes or axes[-1][1] > 0
    )


def _through(xp: Any, array: Any, view: View, dense: int) -> Any:
    """Return `array` seen through a view, `dense` of whose elements follow each other."""
    if type(array) is not np.ndarray:
        return xp.lib.stride_tricks.as_strided(array, *view)
    # The same in a tenth of the time, where elements of the array follow each other alike.
    if dense and array.size == dense and array.flags.c_contiguous:
        return array.reshape(view.shape)
    return np.lib.stride_tricks.as_strided(array, *view)


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
        As for `Layout`.
    """
    return Layout(views, largest, axes).stacks(xp, arrays)
