"""The causal product chunk by chunk, for a stack of batch entries.

With state ``S`` (the sum of outer products of all rows before a chunk), rows ``a`` and ``b`` of the
chunk and rows ``x`` that read, a chunk computes::

    out = x @ S + (seen * (x @ a.mT)) @ b
    S   = S + a.mT @ b

where ``seen[i, j]`` is 1 if x[i] reads a[j] and b[j]. The whole product costs 2 (C + E) (E + M)
multiplications a row, about, for chunks of C rows, and memory for one chunk.

What a row does not read has weight 0, and 0 * NaN is NaN. Where an output is not finite, the scan
is done again with `exact`, which keeps what is not read out of the sums; finite data never pay.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fa_cupy.cpu._steps import Steps

Array = npt.NDArray[Any]

# Rows of a chunk, and of one where nobody reads. Longer chunks compute more scores in vain, shorter
# ones make products in which BLAS is slow; 64 measured best at dims of 64 and 128.
CHUNK = 64
_STATE_CHUNK = 256
# Most rows that read at once where batch entries share a state: beyond, chunks get shorter.
_MOST_ROWS = 1024
_LEAST_CHUNK = 16


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
        np.copyto(out[..., :cols], part, casting="unsafe")
        if self.feature is not None:
            self.feature(out[..., :cols])
        out[..., cols:] = 1
        return out.reshape(part.shape[0], math.prod(part.shape[1:-1]), cols + self.ones)


class Read(NamedTuple):
    """Rows that read the states, and where to write what they find."""

    x: Operand
    out: Array  # (n, *copies, length, cols)
    flipped: bool = False  # whether `x` is multiplied with b, and a is what is summed
    finish: Callable[[Array], Array] | None = None  # from sums to what is written
    ends: Array | None = None  # ascending: row i reads the keys before ends[i]; None: up to its own

    def pieces(self, chunk: slice, last: int, reverse: bool) -> Iterator[tuple[slice, Array]]:
        """Yield rows that read some of a chunk of a sequence that ends at `last`, and `seen`."""
        size = chunk.stop - chunk.start
        if self.ends is None:
            yield chunk, _triangle(size, reverse)
            return
        # Rows that read nothing of the sequence belong to the chunk where the scan starts.
        side: Any = "left" if reverse else "right"
        begin, end = np.searchsorted(self.ends, (chunk.start, chunk.stop), side)
        if reverse and chunk.stop == last:
            end = len(self.ends)
        elif not reverse and chunk.start == 0:
            begin = 0
        keys = np.arange(chunk.start, chunk.stop)
        for first in range(begin, end, CHUNK):
            rows = slice(first, min(first + CHUNK, end))
            before = keys < self.ends[rows, None]
            yield rows, (before != reverse).astype(np.float32)


@functools.lru_cache(maxsize=64)
def _triangle(size: int, reverse: bool) -> Array:
    ones = np.ones((size, size), np.float32)
    return np.triu(ones) if reverse else np.tril(ones)


def chunks(begin: int, end: int, size: int, reverse: bool) -> Iterator[slice]:
    """Yield the chunks of some rows in the order of the scan; an empty one if there are none."""
    starts = range(begin, end, size) if begin < end else range(begin, begin + 1)
    for start in reversed(starts) if reverse else starts:
        yield slice(start, min(start + size, end))


def chunk_rows(size: int, *operands: Operand) -> int:
    """Return how many rows make a chunk: `size`, or fewer where there are many copies of them."""
    copies = max(math.prod(x.array.shape[1:-2]) for x in operands)
    while size > _LEAST_CHUNK and size * copies > _MOST_ROWS:
        size //= 2
    return size


def advance(steps: Steps, a: Array, b: Array, state: Array) -> None:
    """Add the outer products of rows to `state` (n, E, M)."""
    update = steps.scratch("update", state.shape)
    # Summed apart and then added: rounding errors do not grow with the state.
    np.matmul(a.swapaxes(1, 2), b, out=update)
    np.add(state, update, out=state)


def total(steps: Steps, a: Operand, b: Operand, begin: int, end: int, state: Array) -> None:
    """Add the outer products of the rows from `begin` to `end` to `state` (n, E, M)."""
    for chunk in chunks(begin, end, chunk_rows(_STATE_CHUNK, a, b), False):
        advance(steps, a.rows(steps, "a", chunk), b.rows(steps, "b", chunk), state)


def scan(
    steps: Steps,
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
        Whether all of it is finite. Otherwise the same has to be done once more with `exact`.
    """
    size = chunk_rows(CHUNK, a, b, *(read.x for read in reads))
    length, finite = a.array.shape[-2], True
    for chunk in chunks(*span, size, reverse):
        a_rows, b_rows = a.rows(steps, "a", chunk), b.rows(steps, "b", chunk)
        for read in reads:
            keys, values, memory = a_rows, b_rows, state
            if read.flipped:
                keys, values, memory = b_rows, a_rows, state.swapaxes(1, 2)
            for index, seen in read.pieces(chunk, length, reverse):
                x = read.x.rows(steps, "x", index)
                acc = _read(steps, x, keys, values, memory, seen, exact)
                found = acc if read.finish is None else read.finish(acc)
                finite = finite and bool(np.isfinite(found).all())
                target = read.out[..., index, :]
                steps.store(target, found.reshape(target.shape))
        advance(steps, a_rows, b_rows, state)
    return finite


def _read(
    steps: Steps, x: Array, keys: Array, values: Array, state: Array, seen: Array, exact: bool
) -> Array:
    """Return what rows `x` find in the state and in a chunk of which they read `seen`."""
    n, rows, dim = x.shape
    acc = steps.scratch("acc", (n, rows, values.shape[2]))
    if dim == 0:  # no product to sum, whatever the values hold
        acc.fill(0)
        return acc
    scores = steps.scratch("scores", (n, rows, keys.shape[1]))
    np.matmul(x, keys.swapaxes(1, 2), out=scores)
    # `seen` is the same for all copies, of rows or of keys.
    own_rows, own_keys = seen.shape
    counts = rows // (own_rows or 1), keys.shape[1] // (own_keys or 1)
    copies = scores.reshape(n, counts[0], own_rows, counts[1], own_keys)
    if exact:
        np.copyto(copies, 0, where=seen[:, None] == 0)
        bad = ~np.isfinite(values)
        np.matmul(scores, np.where(bad, 0, values), out=acc)
        weights = np.broadcast_to(seen[:, None], copies.shape[1:]).reshape(scores.shape[1:])
        acc[weights @ bad.astype(np.float32) > 0] = np.nan
    else:
        np.multiply(copies, seen[:, None], out=copies)
        np.matmul(scores, values, out=acc)
    steps.matmul(x, state, acc, add=True)
    return acc
