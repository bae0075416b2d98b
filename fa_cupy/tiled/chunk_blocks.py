"""Chunks of `fa_cupy.tiled.chunked_scan`, many at once: where a call costs more than a chunk.

The sums of all chunks of a block are one batched product, as are their scores, what they make of
their values, and what rows read from the states. Only the states are added up one after the other.
How long blocks are does not show in the results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from fa_cupy.tiled.chunks import (
    Operand,
    Read,
    Sizes,
    Steps,
    chunks,
    chunks_first,
    copies_of,
    finished,
)

Array = Any  # numpy.ndarray or cupy.ndarray
Block = tuple[slice, int]  # rows, and how many chunks they are


def _blocks(
    steps: Steps, sizes: Sizes, operands: Sequence[Operand], size: int, numbers: int
) -> list[Block]:
    """Return the blocks of chunks of `size` rows that take so many numbers of scratch memory."""
    n, length = len(operands[0].array), operands[0].array.shape[-2]
    size = min(size, length)
    whole = length // size
    most = 1 if sizes.blocks is None else sizes.blocks.size
    count = math.ceil(whole * numbers * steps.dtype.itemsize * n / most)
    # Blocks of about the same size.
    many = math.ceil(whole / min(count, whole))
    found = [(x, (x.stop - x.start) // size) for x in chunks(0, whole * size, many * size, False)]
    # What does not fill a chunk is a block for itself, at the end of the sequence.
    rest = slice(whole * size, length)
    return found if rest.start == length else [*found, (rest, 1)]


def scan(
    steps: Steps,
    sizes: Sizes,
    a: Operand,
    b: Operand,
    reads: tuple[Read, ...],
    first: Array | None,
    last: Array | None,
    reverse: bool,
) -> bool:
    """Do what `chunked_scan.scan` does; no array is empty, no row reads up to another place."""
    if not reads and last is None:
        return True
    operands = a, b, *(read.x for read in reads)
    dims = a.array.shape[-1], b.array.shape[-1] + b.ones
    size, of_scores = sizes.rows(sizes.state_chunk, *operands), 0
    if reads and sizes.blocks is not None:
        size = sizes.rows(sizes.blocks.rows(a.array.shape[-2], *dims), *operands)
        of_scores = size
    numbers = math.prod(dims) + copies_of(operands) * size * (of_scores + 3 * sum(dims))
    blocks = _blocks(steps, sizes, operands, size, numbers)
    finite, state = True, first
    for index, block in enumerate(reversed(blocks) if reverse else blocks):
        target = last
        if index + 1 < len(blocks):
            target = steps.scratch("state", (len(a.array), *dims))
        finite = _scan_block(steps, a, b, reads, block, state, target, reverse) and finite
        state = target
    return finite


def read(steps: Steps, sizes: Sizes, rows: Read, state: Array) -> None:
    """Do what `chunked_scan.read` does, for arrays that are not empty."""
    n, dim, cols = state.shape
    size = sizes.rows(sizes.chunk if sizes.blocks is None else sizes.blocks.chunk, rows.x)
    numbers = copies_of([rows.x]) * size * (dim + 2 * cols)
    for block in _blocks(steps, sizes, [rows.x], size, numbers):
        x = rows.x.chunks(steps, "x", *block)
        states = steps.xp.broadcast_to(state[:, None], (n, block[1], dim, cols))
        place = _place(steps, rows, block, (*x.shape[:3], cols))
        steps.matmul(x, states, place.sums)
        _write(steps, rows, place)


def _scan_block(
    steps: Steps,
    a: Operand,
    b: Operand,
    reads: tuple[Read, ...],
    block: Block,
    first: Array | None,
    last: Array | None,
    reverse: bool,
) -> bool:
    """Do what `scan` does, for the rows of a block, which are so many chunks."""
    index, count = block
    a_rows, b_rows = a.chunks(steps, "a", index, count), b.chunks(steps, "b", index, count)
    before = None
    if first is not None or last is not None or count > 1:
        before = _states(steps, a_rows, b_rows, first, last, reverse)
    # A chunk that has nothing before it reads no state.
    reading = slice(None)
    if first is None:
        reading = slice(0, count - 1) if reverse else slice(1, count)
    seen, finite = steps.triangle((index.stop - index.start) // count, reverse), True
    for read in reads:
        keys, values = (b_rows, a_rows) if read.flipped else (a_rows, b_rows)
        x = read.x.chunks(steps, "x", index, count)
        scores = _scores(steps, x, keys, seen)

        place = _place(steps, read, block, (*x.shape[:3], values.shape[3]))
        steps.matmul(scores, values, place.sums)
        if before is not None and (first is not None or count > 1):
            states = before[:, reading]
            states = states.swapaxes(2, 3) if read.flipped else states
            steps.matmul(x[:, reading], states, place.sums[:, reading], add=True)
        finite = _write(steps, read, place) and finite
    return finite


class _Place(NamedTuple):
    """Where the sums of some rows go, and what is made of them, (n, chunks, rows, cols)."""

    sums: Array
    target: Array
    in_place: bool  # whether `target` takes numbers of compute dtype


def _place(steps: Steps, read: Read, block: Block, shape: tuple[int, ...]) -> _Place:
    index, count = block
    rows = read.out[..., index, :]
    target, in_place = chunks_first(rows, count), _is_dense(steps, rows)
    own = in_place and read.finish is None
    return _Place(target if own else steps.scratch("acc", shape), target, in_place)


def _write(steps: Steps, read: Read, place: _Place) -> bool:
    """Write what is made of sums; return whether it is finite."""
    sums, target, in_place = place
    if not in_place:
        found = finished(steps, read, sums)
        steps.store(target, found.reshape(target.shape))
        return steps.finite(found)
    if read.finish is not None:
        read.finish(sums, target)
    return steps.finite(target)


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
