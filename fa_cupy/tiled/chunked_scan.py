"""The causal product chunk by chunk, for a stack of batch entries: written once over a namespace.

With state ``S`` (the sum of outer products of all rows before a chunk), rows ``a`` and ``b`` of the
chunk and rows ``x`` that read, a chunk computes::

    out = x @ S + (seen * (x @ a.mT)) @ b
    S   = S + a.mT @ b

where ``seen[i, j]`` is 1 if x[i] reads a[j] and b[j]. The whole product costs 2 (C + E) (E + M)
multiplications a row, about, for chunks of C rows, and memory for one chunk.

What a row does not read has weight 0, and 0 * NaN is NaN. Where an output is not finite, the scan
is done again with `exact`, which keeps what is not read out of the sums; other data pay nothing.

Chunks come one after the other, or in blocks of many, where each call costs more than it computes.
Then the sums of all chunks of a block are one batched product, as are their scores, what they make
of them, and what they read from the states; only the states themselves are added up in turn.

A backend supplies the operations on chunks as a subclass of `Steps`, and how long chunks are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

Array = Any  # numpy.ndarray or cupy.ndarray


class Blocks(NamedTuple):
    """How chunks are computed together.

    Attributes
    ----------
    chunk : int
        Rows of a chunk.
    single : int
        So many rows at most are one chunk, which has no state before it.
    size : int
        Bytes of scratch memory of a block, about.
    """

    chunk: int
    single: int
    size: int


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
        copies = _copies(operands)
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
        steps.load(out[..., :cols], _chunks_first(part, count))
        if self.feature is not None:
            self.feature(out[..., :cols])
        if self.ones:
            out[..., cols:] = 1
        return out.reshape(n, count, math.prod(copies) * size, cols + self.ones)


def _chunks_first(rows: Array, count: int) -> Array:
    """Return (n, *copies, count * size, cols) seen as (n, count, *copies, size, cols)."""
    n, *copies, length, cols = rows.shape
    split = rows.reshape(n, *copies, count, length // count, cols)
    axes = len(copies)
    return split.transpose(0, axes + 1, *range(1, axes + 1), axes + 2, axes + 3) if axes else split


def _copies(operands: Iterable[Operand]) -> int:
    most: int = max(math.prod(x.array.shape[1:-2]) for x in operands)
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
    first: Array | None,
    last: Array | None,
    reverse: bool,
    exact: bool,
) -> bool:
    """Compute what is read in all rows, from the state `first` (n, E, M) on; None for 0.

    The state after the scan is written to `last`, where that is not None.

    Returns
    -------
    bool
        Whether all of it is finite, as far as is known. Otherwise the same has to be done once more
        with `exact`.
    """
    plain = all(read.ends is None and read.x.array.size for read in reads)
    if sizes.blocks is not None and not exact and plain and a.array.size and b.array.size:
        return _scan_blocks(steps, sizes, sizes.blocks, a, b, reads, first, last, reverse)
    size = sizes.rows(sizes.chunk, a, b, *(read.x for read in reads))
    state = _state(steps, a, b, first)
    length, finite = a.array.shape[-2], True
    for chunk in chunks(0, length, size, reverse):
        a_rows, b_rows = a.rows(steps, "a", chunk), b.rows(steps, "b", chunk)
        for read in reads:
            keys, values, memory = a_rows, b_rows, state
            if read.flipped:
                keys, values, memory = b_rows, a_rows, state.swapaxes(1, 2)
            for index, seen in read.pieces(steps, sizes, chunk, length, reverse):
                x = read.x.rows(steps, "x", index)
                acc = _read(steps, x, keys, values, memory, seen, exact)
                found = _finished(steps, read, acc)
                finite = steps.finite(found) and finite
                target = read.out[..., index, :]
                steps.store(target, found.reshape(target.shape))
        advance(steps, a_rows, b_rows, state)
    if last is not None:
        last[...] = state
    return finite


def read(steps: Steps, sizes: Sizes, rows: Read, state: Array) -> None:
    """Let all rows read one state (n, E, M)."""
    memory = steps.operand("state", state)
    size = sizes.rows(sizes.chunk if sizes.blocks is None else sizes.state_chunk, rows.x)
    for chunk in chunks(0, rows.x.array.shape[-2], size, False):
        x = rows.x.rows(steps, "x", chunk)
        acc = steps.scratch("acc", (*x.shape[:2], memory.shape[2]))
        steps.matmul(x, memory, acc)
        found = _finished(steps, rows, acc)
        target = rows.out[..., chunk, :]
        steps.store(target, found.reshape(target.shape))


def _finished(steps: Steps, read: Read, sums: Array) -> Array:
    """Return what is written of some sums."""
    if read.finish is None:
        return sums
    found = steps.scratch("found", (*sums.shape[:-1], read.out.shape[-1]))
    read.finish(sums, found)
    return found


def _state(steps: Steps, a: Operand, b: Operand, first: Array | None) -> Array:
    """Return a copy of the state `first`."""
    state = steps.scratch("state", (len(a.array), a.array.shape[-1], b.array.shape[-1] + b.ones))
    state[...] = 0 if first is None else first
    return state


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


def _scan_blocks(
    steps: Steps,
    sizes: Sizes,
    blocks: Blocks,
    a: Operand,
    b: Operand,
    reads: tuple[Read, ...],
    first: Array | None,
    last: Array | None,
    reverse: bool,
) -> bool:
    """Do what `scan` does, many chunks at once."""
    n, length = len(a.array), a.array.shape[-2]
    if not reads:
        if last is not None:
            state = _state(steps, a, b, first)
            total(steps, sizes, a, b, 0, length, state)
            last[...] = state
        return True
    operands = a, b, *(read.x for read in reads)
    size = sizes.rows(blocks.single, *operands)
    if length > size:
        size = sizes.rows(blocks.chunk, *operands)
    size = min(size, length)
    dims = a.array.shape[-1], b.array.shape[-1] + b.ones
    numbers = math.prod(dims) + _copies(operands) * size * (size + 2 * sum(dims))
    whole = length // size
    # Blocks of about the same size.
    count = math.ceil(whole * numbers * steps.dtype.itemsize * n / blocks.size)
    rows = math.ceil(whole / min(count, whole)) * size
    parts = [*chunks(0, whole * size, rows, False)]
    # What does not fill a chunk is a block for itself, at the end of the sequence.
    if whole * size < length:
        parts.append(slice(whole * size, length))
    finite, state = True, first
    for index, part in enumerate(reversed(parts) if reverse else parts):
        count = max(1, (part.stop - part.start) // size)
        target = last
        if index + 1 < len(parts):
            target = steps.scratch("state", (n, *dims))
        finite = _scan_block(steps, a, b, reads, (part, count), state, target, reverse) and finite
        state = target
    return finite


def _scan_block(
    steps: Steps,
    a: Operand,
    b: Operand,
    reads: tuple[Read, ...],
    block: tuple[slice, int],
    first: Array | None,
    last: Array | None,
    reverse: bool,
) -> bool:
    """Do what `scan` does, for the rows of a block, which are so many chunks."""
    index, count = block
    a_rows, b_rows = a.chunks(steps, "a", index, count), b.chunks(steps, "b", index, count)
    before = _states(steps, a_rows, b_rows, first, last, reverse)
    # A chunk that has nothing before it reads no state.
    reading = slice(None)
    if first is None:
        reading = slice(0, count - 1) if reverse else slice(1, count)
    seen, finite = steps.triangle((index.stop - index.start) // count, reverse), True
    for read in reads:
        keys, values, states = a_rows, b_rows, before
        if read.flipped:
            keys, values, states = b_rows, a_rows, before.swapaxes(2, 3)
        x = read.x.chunks(steps, "x", index, count)
        rows = read.out[..., index, :]
        in_place = _is_dense(steps, rows)
        target = _chunks_first(rows, count)
        sums = target
        if read.finish is not None or not in_place:
            sums = steps.scratch("acc", (*x.shape[:3], values.shape[3]))
        scores = _scores(steps, x, keys, seen)
        steps.matmul(scores, values, sums)
        if first is not None or count > 1:
            steps.matmul(x[:, reading], states[:, reading], sums[:, reading], add=True)
        found = sums
        if read.finish is not None and in_place:
            read.finish(sums, found := target)
        elif read.finish is not None:
            found = _finished(steps, read, sums)
        finite = steps.finite(found) and finite
        if not in_place:
            steps.store(target, found.reshape(target.shape))
    return finite


def _is_dense(steps: Steps, rows: Array) -> bool:
    """Whether products can be written to `rows` as they are, with the bits of those elsewhere."""
    if rows.ndim > 3 or rows.dtype != steps.dtype:
        return False
    step = rows.dtype.itemsize
    dense = rows.strides[1:] == (rows.shape[2] * step, step)
    return dense and steps.operand("acc", rows) is rows


def _scores(steps: Steps, x: Array, keys: Array, seen: Array) -> Array:
    """Return the products of rows and keys of each chunk, 0 where `seen` is."""
    scores = steps.scratch("scores", (*x.shape[:3], keys.shape[2]))
    steps.matmul(x, keys.swapaxes(2, 3), scores)
    size = len(seen)
    copies = scores.reshape(-1, x.shape[2] // size, size, keys.shape[2] // size, size)
    steps.xp.multiply(copies, seen[:, None], out=copies)
    return scores


def _states(
    steps: Steps, a: Array, b: Array, first: Array | None, last: Array | None, reverse: bool
) -> Array:
    """Return the states before the chunks (n, count, rows, cols) of a block, (n, count, E, M).

    The one after them is written to `last`. Where `first` is None, the state before all of them is
    left out.
    """
    n, count = a.shape[:2]
    states = steps.scratch("states", (n, count + 1, a.shape[3], b.shape[3]))
    before, after = states[:, :-1], states[:, 1:]
    order, summed = range(count), slice(0, count - (last is None))
    if reverse:
        before, after = after, before
        order, summed = order[::-1], slice(last is None, count)
    # Summed apart and then added: rounding errors do not grow with the state.
    steps.matmul(a[:, summed].swapaxes(2, 3), b[:, summed], after[:, summed])
    if first is not None:
        before[:, order[0]] = first
    for chunk in order[first is None : count - (last is None)]:
        steps.xp.add(after[:, chunk], before[:, chunk], out=after[:, chunk])
    if last is not None:
        last[...] = after[:, order[-1]]
    return before
