"""Chunks of rows: how long they are, what goes into their products, and what a backend supplies."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

Array = Any  # numpy.ndarray or cupy.ndarray


class Blocks(NamedTuple):
    """How chunks are computed together.

    Wide rows have long chunks: products with the states cost more, those of scores no less.

    Attributes
    ----------
    chunk : int
        Rows of a chunk, up to twice as many of wide rows.
    single : int
        So many rows are one chunk, which has no state before it, up to four times as many of wide
        rows.
    size : int
        Bytes of scratch memory of a block, about.
    """

    chunk: int
    single: int
    size: int

    def rows(self, length: int, qk_dim: int, v_dim: int) -> int:
        """Return how many of `length` rows make a chunk."""
        mean = 2 * qk_dim * v_dim // (qk_dim + v_dim)
        if length <= max(self.single, min(4 * self.single, mean)):
            return length
        return max(self.chunk, min(2 * self.chunk, mean // 4))


class Sizes(NamedTuple):
    """How long chunks are, in rows.

    Attributes
    ----------
    chunk, state_chunk : int
        A chunk, and one whose outputs are not wanted.
    most_rows : int
        So many read at once where batch entries share a state: beyond, chunks get shorter, ...
    least_chunk : int
        ... down to this.
    blocks : Blocks or None
        None where chunks come one after the other, which is how exact scans go anyway.
    """

    chunk: int
    state_chunk: int
    most_rows: int
    least_chunk: int
    blocks: Blocks | None = None

    def rows(self, size: int, *operands: Operand) -> int:
        """Return how many rows make a chunk: `size`, or fewer where there are many copies."""
        copies = copies_of(operands)
        while size > self.least_chunk and size * copies > self.most_rows:
            size //= 2
        return size


class Steps(Protocol):
    """Operations on chunks that a backend supplies. Arrays named `out` are written in place."""

    xp: Any
    dtype: np.dtype[Any]  # of sums: float32 or float64

    def scratch(self, name: str, shape: tuple[int, ...]) -> Array:
        """Return an uninitialised dense array that lives until `name` is asked for again."""

    def operand(self, name: str, x: Array) -> Array:
        """Return `x` if `matmul` can read it where it is, otherwise a copy of compute dtype."""

    def load(self, out: Array, x: Array) -> None:
        """Copy `x`, of the dtype of the inputs, to `out`, of compute dtype."""

    def triangle(self, size: int, reverse: bool) -> Array:
        """Return what `triangle` does, on the device."""

    def matmul(self, a: Array, b: Array, out: Array, add: bool = False) -> None:
        """Set `out` to ``a @ b``, or add that to it; each of them an operand or its transpose.

        All are (n, rows, cols), or (n, chunks, rows, cols) where there are blocks.
        """

    def finite(self, x: Array) -> bool:
        """Whether `x` is finite, as far as is known by now."""

    def store(self, out: Array, value: Array) -> None:
        """Copy `value` to `out`, rounded to its dtype."""


class Operand(NamedTuple):
    """Rows that go into a product."""

    array: Array  # (n, *copies, length, cols), `copies` being the axes that share a state
    feature: Callable[[Array], None] | None = None  # applied in place to rows in compute dtype
    ones: bool = False  # whether a column of ones follows the others

    def rows(self, steps: Steps, name: str, index: slice) -> Array:
        """Return the rows of `index` as (n, copies * rows, cols) in the compute dtype."""
        return self.chunks(steps, name, index, 1)[:, 0]

    def chunks(self, steps: Steps, name: str, index: slice, count: int) -> Array:
        """Return the rows of `index` as (n, count, copies * rows, cols) in the compute dtype."""
        part = self.array[..., index, :]
        n, *copies, length, cols = part.shape
        size = length // count
        if not copies and self.feature is None and not self.ones:
            return steps.operand(name, part).reshape(n, count, size, cols)
        out = steps.scratch(name, (n, count, *copies, size, cols + self.ones))
        steps.load(out[..., :cols], chunks_first(part, count))
        if self.feature is not None:
            self.feature(out[..., :cols])
        if self.ones:
            out[..., cols:] = 1
        return out.reshape(n, count, math.prod(copies) * size, cols + self.ones)


def chunks_first(rows: Array, count: int) -> Array:
    """Return (n, *copies, count * size, cols) seen as (n, count, *copies, size, cols)."""
    n, *copies, length, cols = rows.shape
    split = rows.reshape(n, *copies, count, length // count, cols)
    axes = len(copies)
    return split.transpose(0, axes + 1, *range(1, axes + 1), axes + 2, axes + 3) if axes else split


def copies_of(operands: Iterable[Operand]) -> int:
    """Return how many copies share a state, at most."""
    most: int = max([math.prod(x.array.shape[1:-2]) for x in operands])
    return most


class Read(NamedTuple):
    """Rows that read the states, and where to write what they find."""

    x: Operand
    out: Array  # (n, *copies, length, cols)
    flipped: bool = False  # whether `x` is multiplied with b, and a is what is summed
    # From sums to what is written, to an array of compute dtype.
    finish: Callable[[Array, Array], None] | None = None
    # On the host, ascending: row i reads the keys before ends[i]; None: up to its own.
    ends: np.ndarray[Any, Any] | None = None

    def pieces(
        self, steps: Steps, sizes: Sizes, chunk: slice, last: int, reverse: bool
    ) -> Iterator[tuple[slice, Array]]:
        """Yield rows that read some of a chunk of a sequence that ends at `last`, and `seen`."""
        if self.ends is None:
            yield chunk, steps.triangle(chunk.stop - chunk.start, reverse)
            return
        # Rows that read nothing of the sequence belong to the chunk where the scan starts.
        side: Any = "left" if reverse else "right"
        begin, end = np.searchsorted(self.ends, (chunk.start, chunk.stop), side)
        if reverse and chunk.stop == last:
            end = len(self.ends)
        elif not reverse and chunk.start == 0:
            begin = 0
        keys = np.arange(chunk.start, chunk.stop)
        for first in range(begin, end, sizes.chunk):
            rows = slice(first, min(first + sizes.chunk, end))
            before = keys < self.ends[rows, None]
            yield rows, steps.xp.asarray((before != reverse).astype(np.float32))


def finished(steps: Steps, read: Read, sums: Array) -> Array:
    """Return what is written of some sums."""
    if read.finish is None:
        return sums
    found = steps.scratch("found", (*sums.shape[:-1], read.out.shape[-1]))
    read.finish(sums, found)
    return found


@functools.lru_cache(maxsize=64)
def triangle(size: int, reverse: bool) -> np.ndarray[Any, Any]:
    """Return which of `size` rows each of them reads: 1 up to itself, or from itself on."""
    ones = np.ones((size, size), np.float32)
    return np.triu(ones) if reverse else np.tril(ones)


def chunks(begin: int, end: int, size: int, reverse: bool) -> Iterator[slice]:
    """Yield the chunks of some rows in the order of the scan; for no rows one empty chunk."""
    starts = range(begin, end, size) if begin < end else range(begin, begin + 1)
    for start in reversed(starts) if reverse else starts:
        yield slice(start, min(start + size, end))
