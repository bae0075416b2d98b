"""The causal product chunk by chunk, for a stack of batch entries: written once over a namespace.

With state ``S`` (the sum of outer products of all rows before a chunk), rows ``a`` and ``b`` of the
chunk and rows ``x`` that read, a chunk computes::

    out = x @ S + (seen * (x @ a.mT)) @ b
    S   = S + a.mT @ b

where ``seen[i, j]`` is 1 if x[i] reads a[j] and b[j]. The whole product costs 2 (C + E) (E + M)
multiplications a row, about, for chunks of C rows, and memory for one chunk.

What a row does not read has weight 0, and 0 * NaN is NaN. Where an output is not finite, the scan
is done again with `exact`, which keeps what is not read out of the sums; other data pay nothing.

Chunks come one after the other, or in blocks of many (`fa_cupy.tiled.chunk_blocks`) where a backend
wants that, and no row reads elsewhere than at its own place.

A backend supplies the operations on chunks as a subclass of `Steps`, and how long chunks are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fa_cupy.tiled import chunk_blocks
from fa_cupy.tiled.chunks import Operand, Read, Sizes, Steps, chunks, finished

Array = Any  # numpy.ndarray or cupy.ndarray


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
        return chunk_blocks.scan(steps, sizes, a, b, reads, first, last, reverse)
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
                acc = found_in(steps, x, keys, values, memory, seen, exact)
                found = finished(steps, read, acc)
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
    if sizes.blocks is not None and rows.x.array.size:
        chunk_blocks.read(steps, sizes, rows, memory)
        return
    size = sizes.rows(sizes.chunk, rows.x)
    for chunk in chunks(0, rows.x.array.shape[-2], size, False):
        x = rows.x.rows(steps, "x", chunk)
        acc = steps.scratch("acc", (*x.shape[:2], memory.shape[2]))
        steps.matmul(x, memory, acc)
        found = finished(steps, rows, acc)
        target = rows.out[..., chunk, :]
        steps.store(target, found.reshape(target.shape))


def _state(steps: Steps, a: Operand, b: Operand, first: Array | None) -> Array:
    """Return a copy of the state `first`."""
    state = steps.scratch("state", (len(a.array), a.array.shape[-1], b.array.shape[-1] + b.ones))
    state[...] = 0 if first is None else first
    return state


def found_in(
    steps: Steps, x: Array, keys: Array, values: Array, state: Array | None, seen: Array,
    exact: bool,
) -> Array:  # fmt: skip
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
    if state is not None:
        steps.matmul(x, state, acc, add=True)
    return acc
