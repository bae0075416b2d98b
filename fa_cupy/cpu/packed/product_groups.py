"""Short sequences that follow each other, as one chunk of rows.

A scan costs some 20 microseconds beyond its products. So sequences of few rows are multiplied
together, and what a row does not see of the others has weight 0, as later rows of its own have.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fa_cupy.tiled import chunked_scan, chunks
from fa_cupy.tiled.chunks import Operand, Read, Steps, finished

Array = npt.NDArray[Any]
# Rows of a group at most, and of a sequence that is put into one.
_MOST_ROWS = 64
_SHORT = 32


class Group(NamedTuple):
    """Sequences that are computed together; one that is long is alone.

    Attributes
    ----------
    numbers : range
        Of the sequences.
    rows : slice
        Those of all of them.
    """

    numbers: range
    rows: slice


def groups_of(rows: Sequence[slice], numbers: range) -> list[Group]:
    """Return groups of sequences, given the rows of all and the numbers of some."""
    found: list[Group] = []
    begin = numbers.start
    while begin < numbers.stop:
        first, end = rows[begin].start, begin + 1
        if rows[begin].stop - first <= _SHORT:
            while (
                end < numbers.stop
                and rows[end].stop - rows[end].start <= _SHORT
                and rows[end].stop - first <= _MOST_ROWS
            ):
                end += 1
        found.append(Group(range(begin, end), slice(first, rows[end - 1].stop)))
        begin = end
    return found


@functools.lru_cache(maxsize=256)
def _seen(lengths: tuple[int, ...], reverse: bool) -> Array:
    """Return which rows each one reads: 1 for those of its sequence up to itself, or from it on."""
    of_row = np.repeat(np.arange(len(lengths)), lengths)
    found = (of_row[:, None] == of_row).astype(np.float32)
    return np.triu(found) if reverse else np.tril(found)


def scan(
    steps: Steps, a: Operand, b: Operand, reads: tuple[Read, ...], lengths: tuple[int, ...],
    first: Array | None, last: Array | None, reverse: bool, exact: bool,
) -> bool:  # fmt: skip
    """Do what `chunked_scan.scan` does, for sequences of these lengths that are all rows.

    States are (n, sequences, E, M).
    """
    a_rows, b_rows = a.rows(steps, "a", slice(None)), b.rows(steps, "b", slice(None))
    seen, finite = _seen(lengths, reverse), True
    ends = np.cumsum(lengths).tolist()
    spans = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    copies = [chunks.copies_of([x]) for x in (a, b)]
    for read in reads:
        keys, values = (b_rows, a_rows) if read.flipped else (a_rows, b_rows)
        x = read.x.rows(steps, "x", slice(None))
        acc = chunked_scan.found_in(steps, x, keys, values, None, seen, exact)
        count = chunks.copies_of([read.x])
        for number, span in enumerate(spans if first is not None else ()):
            assert first is not None
            state = first[:, number].swapaxes(1, 2) if read.flipped else first[:, number]
            rows = _copies(x, count)[:, :, span]
            _copies(acc, count)[:, :, span] += rows @ state[:, None]
        found = finished(steps, read, acc)
        finite = steps.finite(found) and finite
        steps.store(read.out, found.reshape(read.out.shape))
    for number, span in enumerate(spans if last is not None else ()):
        assert last is not None
        keys, values = (
            _copies(x, count)[:, :, span].reshape(len(x), count * lengths[number], x.shape[2])
            for x, count in zip((a_rows, b_rows), copies, strict=True)
        )
        found = keys.swapaxes(1, 2) @ values
        last[:, number] = found if first is None else first[:, number] + found
    return finite


def _copies(rows: Array, count: int) -> Array:
    """Return rows (n, copies * size, cols) as (n, copies, size, cols)."""
    n, size, cols = rows.shape
    return rows.reshape(n, count, size // count, cols)
