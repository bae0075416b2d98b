"""The causal product chunk by chunk, for a stack of batch entries: written once over a namespace.

With state ``S`` (the sum of outer products of all rows before a chunk), rows ``a`` and ``b`` of the
chunk and rows ``x`` that read, a chunk computes::

    out = x @ S + (seen * (x @ a.mT)) @ b
    S   = S + a.mT @ b

where ``seen[i, j]`` is 1 if x[i] reads a[j] and b[j]. The whole product costs 2 (C + E) (E + M)
multiplications a row, about, for chunks of C rows, and memory for one chunk.

What a row does not read has weight 0, and 0 * NaN is NaN. Where an output is not finite, the scan
is done again with `exact`, which keeps what is not read out of the sums; other data pay nothing.

A backend supplies the operations on chunks as a subclass of `Steps`, and how long chunks are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

Array = Any  # numpy.ndarray or cupy.ndarray


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
    """

    chunk: int
    state_chunk: int
    most_rows: int
    least_chunk: int

    def rows(self, size: int, *operands: Operand) -> int:
        """Return how many rows make a chunk: `size`, or fewer where there are many copies."""
        copies = max(math.prod(x.array.shape[1:-2]) for x in operands)
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
        """Set `out` to ``a @ b``, or add that to it; each of them an operand or its transpose."""

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
        part = self.array[..., index, :]
        if part.ndim == 3 and self.feature is None and not self.ones:
            return steps.operand(name, part)
        cols = part.shape[-1]
        out = steps.scratch(name, (*part.shape[:-1], cols + self.ones))
        steps.load(out[..., :cols], part)
        if self.feature is not None:
            self.feature(out[..., :cols])
        if self.ones:
            out[..., cols:] = 1
        return out.reshape(part.shape[0], math.prod(part.shape[1:-1]), cols + self.ones)


class Read(NamedTuple):
    """Rows that read the states, and where to write what they find."""

    x: Operand
    out: Array  # (n, *copies, length, cols)
    flipped: bool = False  # whether `x` is multiplied with b, and a is what is summed
    finish: Callable[[Array], Array] | None = None  # from sums to what is written
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


@functools.lru_cache(maxsize=64)
def triangle(size: int, reverse: bool) -> np.ndarray[Any, Any]:
    """Return which of `size` rows each of them reads: 1 up to itself, or from itself on."""
    ones = np.ones((size, size), np.float32)
    return np.triu(ones) if reverse else np.tril(ones)


def chunks(begin: int, end: int, size: int, reverse: bool) -> Iterator[slice]:
    """Yield the chunks of some rows in the order of the scan; an empty one if there are none."""
    starts = range(begin, end, size) if begin < end else range(begin, begin + 1)
    for start in reversed(starts) if reverse else starts:
        yield slice(start, min(start + size, end))


def advance(steps: Steps, a: Array, b: Array, state: Array) -> None:
    """Add the outer products of rows to `state` (n, E, M)."""
    # Summed apart and then added: rounding errors do not grow with the state.
    steps.matmul(a.swapaxes(1, 2), b, state, add=True)


def total(
    steps: Steps, sizes: Sizes, a: Operand, b: Operand, begin: int, end: int, state: Array
) -> None:
    """Add the outer products of the rows from `begin` to `end` to `state` (n, E, M)."""
    for chunk in chunks(begin, end, sizes.rows(sizes.state_chunk, a, b), False):
        advance(steps, a.rows(steps, "a", chunk), b.rows(steps, "b", chunk), state)


def scan(
    steps: Steps,
    sizes: Sizes,
    a: Operand,
    b: Operand,
    reads: tuple[Read, ...],
    state: Array,
    span: tuple[int, int],
    reverse: bool,
    exact: bool,
) -> bool:
    """Compute what is read in the rows of `span`, and bring `state` (n, E, M) up to date.

    Returns
    -------
    bool
        Whether all of it is finite, as far as is known. Otherwise the same has to be done once more
        with `exact`.
    """
    size = sizes.rows(sizes.chunk, a, b, *(read.x for read in reads))
    length, finite = a.array.shape[-2], True
    for chunk in chunks(*span, size, reverse):
        a_rows, b_rows = a.rows(steps, "a", chunk), b.rows(steps, "b", chunk)
        for read in reads:
            keys, values, memory = a_rows, b_rows, state
            if read.flipped:
                keys, values, memory = b_rows, a_rows, state.swapaxes(1, 2)
            for index, seen in read.pieces(steps, sizes, chunk, length, reverse):
                x = read.x.rows(steps, "x", index)
                acc = _read(steps, x, keys, values, memory, seen, exact)
                found = acc if read.finish is None else read.finish(acc)
                finite = steps.finite(found) and finite
                target = read.out[..., index, :]
                steps.store(target, found.reshape(target.shape))
        advance(steps, a_rows, b_rows, state)
    return finite


def _read(
    steps: Steps, x: Array, keys: Array, values: Array, state: Array, seen: Array, exact: bool
) -> Array:
    """Return what rows `x` find in the state and in a chunk of which they read `seen`."""
    xp = steps.xp
    n, rows, dim = x.shape
    acc = steps.scratch("acc", (n, rows, values.shape[2]))
    if dim == 0:  # no product to sum, whatever the values hold
        acc.fill(0)
        return acc
    scores = steps.scratch("scores", (n, rows, keys.shape[1]))
    steps.matmul(x, keys.swapaxes(1, 2), scores)
    # `seen` is the same for all copies, of rows or of keys.
    own_rows, own_keys = seen.shape
    counts = rows // (own_rows or 1), keys.shape[1] // (own_keys or 1)
    copies = scores.reshape(n, counts[0], own_rows, counts[1], own_keys)
    if exact:
        zero = steps.dtype.type(0)
        copies[...] = xp.where(seen[:, None] > 0, copies, zero)
        bad = ~xp.isfinite(values)
        steps.matmul(scores, xp.where(bad, zero, values), acc)
        weights = xp.broadcast_to(seen[:, None], copies.shape[1:]).reshape(scores.shape[1:])
        acc[xp.matmul(weights, bad.astype(np.float32)) > 0] = np.nan
    else:
        xp.multiply(copies, seen[:, None], out=copies)
        steps.matmul(scores, values, acc)
    steps.matmul(x, state, acc, add=True)
    return acc
