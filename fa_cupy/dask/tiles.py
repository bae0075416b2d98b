"""How the axes of a result are cut into tiles, and which chunks of the arguments a tile reads.

The axes have labels: batch axes are numbered from the last one, which is -1, and the axes of
queries and keys are "q" and "k". An axis without a label (None), such as head_dim, has one chunk.
A tile is one number for each label: that of an interval between two edges.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Label = Any  # an int, a str or None
Tile = Mapping[Label, int]


@dataclass(frozen=True)
class Chunks:
    """The chunks of one array, and the chunk that a tile reads.

    Attributes
    ----------
    sizes : tuple of tuple of int
        As in `dask.array.Array.chunks`.
    labels : tuple of Label
    index : tuple of tuple of int
        For each axis, the chunk of each interval of its label; ``(0,)`` without a label.
    """

    sizes: tuple[tuple[int, ...], ...]
    labels: tuple[Label, ...]
    index: tuple[tuple[int, ...], ...]

    def at(self, tile: Tile) -> tuple[int, ...]:
        """Return the indices of the chunk that a tile reads."""
        pairs = zip(self.labels, self.index, strict=True)
        return tuple(index[0 if label is None else tile[label]] for label, index in pairs)

    def tiles(self) -> Iterator[tuple[tuple[int, ...], dict[Label, int]]]:
        """Yield the indices of each chunk, and the first tile that reads it."""
        for chunk in itertools.product(*(range(len(sizes)) for sizes in self.sizes)):
            found = zip(self.labels, self.index, chunk, strict=True)
            yield chunk, {label: index.index(number) for label, index, number in found}


class Edges:
    """Where the axes of a result are cut: wherever the chunks of an argument end.

    So no argument is gathered into larger chunks. Where several query heads share a key head, the
    edges are such that a tile has all heads of some groups, or heads of one group only.

    Parameters
    ----------
    sizes : mapping from Label to int
        The sizes of the axes.
    arrays : sequence of pairs
        Dask arrays, each with the labels of its axes.
    """

    def __init__(
        self, sizes: Mapping[Label, int], arrays: Sequence[tuple[Any, Sequence[Label]]]
    ) -> None:
        found: dict[Label, set[int]] = {label: {0, size} for label, size in sizes.items()}
        ratios: dict[Label, set[int]] = {label: set() for label in sizes}
        for x, labels in arrays:
            for size, chunks, label in zip(x.shape, x.chunks, labels, strict=True):
                if label is not None and size > 1:
                    ratios[label].add(ratio := sizes[label] // size)
                    found[label].update(ratio * end for end in itertools.accumulate(chunks))
        for label, cuts in found.items():
            for ratio in sorted(ratios[label]):
                inside = [cut // ratio * ratio for cut in cuts if cut % ratio]
                cuts.update(inside, (cut + ratio for cut in inside))
        self._cuts = {
            label: tuple(sorted(cuts)) if sizes[label] else (0, 0) for label, cuts in found.items()
        }

    def count(self, label: Label) -> int:
        """Return the number of intervals of an axis."""
        return len(self._cuts[label]) - 1

    def bounds(self, label: Label, number: int) -> tuple[int, int]:
        """Return where an interval begins and ends."""
        return self._cuts[label][number], self._cuts[label][number + 1]

    def between(self, label: Label, begin: int, end: int) -> range:
        """Return the intervals that have a part of what lies from `begin` to `end`."""
        if begin >= end:
            return range(0)
        cuts = self._cuts[label]
        return range(bisect_right(cuts, begin) - 1, bisect_left(cuts, end))

    def shape(self, tile: Tile, labels: Sequence[Label]) -> tuple[int, ...]:
        """Return the sizes of a tile along axes with these labels."""
        found = (self.bounds(label, tile[label]) for label in labels)
        return tuple(end - begin for begin, end in found)

    def tiles(self, labels: Sequence[Label]) -> Iterator[dict[Label, int]]:
        """Yield all tiles over axes with these labels, the last one first to change."""
        for numbers in itertools.product(*(range(self.count(label)) for label in labels)):
            yield dict(zip(labels, numbers, strict=True))

    def chunks(self, shape: Sequence[int], labels: Sequence[Label]) -> Chunks:
        """Return the chunks of an array, given its shape and the labels of its axes."""
        sizes, index = [], []
        for size, label in zip(shape, labels, strict=True):
            cuts = (0, size) if label is None else self._cuts[label]
            whole = cuts[-1]
            if size == whole:
                own, ratio = cuts, 1
            elif size == 1:  # one row for all tiles
                own, ratio = (0, 1), max(1, whole)
            else:
                ratio = whole // size
                own = tuple(cut // ratio for cut in cuts if cut % ratio == 0)
            sizes.append(tuple(b - a for a, b in itertools.pairwise(own)))
            last = len(own) - 2
            index.append(tuple(min(last, bisect_right(own, a // ratio) - 1) for a in cuts[:-1]))
        return Chunks(tuple(sizes), tuple(labels), tuple(index))


def batch_labels(ndim: int) -> tuple[int, ...]:
    """Return the labels of batch axes, given their number."""
    return tuple(range(-ndim, 0))


def labels_of(ndim: int, *last: Label) -> tuple[Label, ...]:
    """Return the labels of an array with batch axes and these last ones, or the last of both."""
    labels = (*batch_labels(max(0, ndim - len(last))), *last)
    return labels[len(labels) - ndim :]


@dataclass(frozen=True)
class Cut:
    """A Dask array whose chunks are those that tiles read."""

    array: Any
    chunks: Chunks

    @classmethod
    def of(cls, array: Any, labels: Sequence[Label], edges: Edges) -> Cut:
        """Return `array` with its chunks cut at the edges."""
        chunks = edges.chunks(array.shape, labels)
        return cls(array.rechunk(chunks.sizes), chunks)

    def key(self, tile: Tile) -> tuple[Any, ...]:
        """Return the key of the chunk that a tile reads."""
        return (self.array.name, *self.chunks.at(tile))
