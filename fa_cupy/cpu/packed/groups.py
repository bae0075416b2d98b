"""Short packed sequences of about the same lengths: they are copied to batch entries of one call.

A call takes some hundred microseconds in Python, whatever its size: more than the attention of a
few dozen queries to as many keys. Entries are as long as the longest sequence of a group; what is
behind the end of another one repeats its last row, and a mask hides it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fa_cupy.core.attention_problem import Problem, attention_problem
from fa_cupy.keys.sequences import Part

Array = npt.NDArray[Any]

# Sequences of so much work at most are grouped, if there are so many; and the most work of a group,
# so that there are several for threads.
_SHORT_FLOP = 8e6
_LEAST_SEQUENCES = 3
_GROUP_FLOP = 4e7
# Lengths up to the first number differ by nothing that matters; those of a group by a factor of
# 2 ** -0.5 at most.
_SAME_LENGTH = 16


class Group:
    """Sequences that are the entries of one call.

    Parameters
    ----------
    parts : sequence of Part

    Attributes
    ----------
    parts : sequence of Part
    lengths : tuple of int
        Queries and keys of an entry.
    equal : bool
        Whether all sequences have these.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        bounds = [(x.rows.start, x.rows.stop, x.keys.start, x.keys.stop) for x in parts]
        q, q_end, k, k_end = np.array(bounds).T
        self._counts = q_end - q, k_end - k
        self.lengths = int(self._counts[0].max()), int(self._counts[1].max())
        self._rows, self._keys = (
            np.minimum(begin[:, None] + np.arange(length), end[:, None] - 1)
            for begin, end, length in zip((q, k), (q_end, k_end), self.lengths, strict=True)
        )
        self._shown = [
            np.arange(n) < counts[:, None]
            for n, counts in zip(self.lengths, self._counts, strict=True)
        ]
        self.equal = all(bool(shown.all()) for shown in self._shown)
        #: Whether they follow each other, so that arrays need no copy.
        self.adjacent = self.equal and all(
            bool((x[1:] == y[:-1]).all()) for x, y in ((q, q_end), (k, k_end))
        )

    def rows(self, x: Array, axes: int) -> Array:
        """Return queries, or what has an axis for them before the last one, of each entry.

        `axes` are those of the output, which has one more of entries in front.
        """
        return _in_front(self._taken(x, self._rows), 3, axes)

    def keys(self, x: Array, axes: int) -> Array:
        """Return keys or values of each entry."""
        return _in_front(self._taken(x, self._keys), 3, axes)

    def _taken(self, x: Array, places: Array) -> Array:
        """Return rows of each entry, (..., n, rows, dim): a view, or a copy."""
        if not (self.adjacent and places.size):
            return np.take(x, places, axis=-2)
        count, rows = places.shape
        part = x[..., places[0, 0] : places[0, 0] + count * rows, :]
        step = part.strides[-2]
        return np.lib.stride_tricks.as_strided(
            part,
            (*x.shape[:-2], count, rows, x.shape[-1]),
            (*x.strides[:-2], rows * step, step, x.strides[-1]),
        )

    def numbers(self, x: Array | None, axes: int) -> Array | None:
        """Return of what broadcasts to (..., queries) that of each entry; without an axis less."""
        if x is None:
            return None
        if not x.ndim or x.shape[-1] == 1:
            return x
        return _in_front(np.take(x, self._rows, axis=-1), 2, axes - 1)

    def pairs(self, x: Array | None, axes: int) -> Array | None:
        """Return of what broadcasts to (..., queries, keys) that of each entry."""
        if x is None:
            return None
        x = x.reshape((1,) * (2 - x.ndim) + x.shape)
        rows = self._rows[:, :, None] if x.shape[-2] != 1 else np.zeros((1, 1, 1), np.intp)
        keys = self._keys[:, None, :] if x.shape[-1] != 1 else np.zeros((1, 1, 1), np.intp)
        return _in_front(x[..., rows, keys], 3, axes)

    def inputs(
        self, problem: Problem, axes: int, inputs: Sequence[Any], all_rows: bool
    ) -> tuple[Any, ...]:
        """Return q, k, v, bias and mask of the entries, given those of all sequences.

        With `all_rows` queries behind the end of an entry may see keys.
        """
        q, k, v, bias, mask = inputs
        seen, mask = self.seen(problem, axes, all_rows), self.pairs(mask, axes)
        if seen is not None:
            mask = seen if mask is None else mask & seen
        rows = self.rows(q, axes), self.keys(k, axes), self.keys(v, axes)
        return (*rows, self.pairs(bias, axes), mask if self.lengths[1] else None)

    def seen(self, problem: Problem, axes: int, all_rows: bool) -> Array | None:
        """Return which pairs are of a sequence, and in the band where it counts from the ends.

        None where that is all. With `all_rows` queries behind the end may see keys.
        """
        shifted = problem.band_from_end and not self.equal
        if self.equal or not self.lengths[1]:
            return None
        rows, keys = self._shown
        found = keys[:, None, :] if all_rows else rows[:, :, None] & keys[:, None, :]
        if shifted:
            shift = (self._counts[1] - self._counts[0])[:, None, None]
            off = np.arange(self.lengths[1]) - np.arange(self.lengths[0])[:, None] - shift
            off = off + (problem.k_len - problem.q_len)
            if problem.lower is not None:
                found = found & (off >= problem.lower)
            if problem.upper is not None:
                found = found & (off <= problem.upper)
        return _in_front(found, 3, axes)

    def problem(self, problem: Problem, arrays: Sequence[Any], sinks: Array | None) -> Problem:
        """Return the problem of the entries, given their arrays: q, k, v, bias and mask."""
        found = attention_problem(
            *arrays, scale=problem.scale, softcap=problem.softcap, sinks=sinks,
            precision=problem.precision,
        )  # fmt: skip
        lower, upper = problem.lower, problem.upper
        if problem.band_from_end:
            shift = 0
            if self.equal:
                of_all = problem.k_len - problem.q_len
                shift = self.lengths[1] - self.lengths[0] - of_all
            lower, upper = (
                None if x is None or not self.equal else x + shift for x in (lower, upper)
            )
        return replace(found, lower=lower, upper=upper)

    def scatter_rows(self, out: Array, entries: Array) -> None:
        """Write entries (n, ..., queries, dim) to where the queries of sequences are."""
        for part, entry in zip(self.parts, entries, strict=True):
            out[..., part.rows, :] = entry[..., : part.lengths[0], :]

    def scatter_keys(self, out: Array, entries: Array) -> None:
        """Write entries (n, ..., keys, dim) to where the keys of sequences are."""
        for part, entry in zip(self.parts, entries, strict=True):
            out[..., part.keys, :] = entry[..., : part.lengths[1], :]


def _in_front(x: Array, own: int, axes: int) -> Array:
    """Return `x` with the first of its last `own` axes in front of `axes` others."""
    x = np.moveaxis(x, -own, 0)
    return x.reshape(x.shape[:1] + (1,) * (axes + 1 - x.ndim) + x.shape[1:])


def grouped(parts: Iterable[Part], flop_per_pair: float) -> Iterator[Group | Part]:
    """Yield groups of short sequences, and the others one by one."""
    buckets: dict[tuple[int, int], list[Part]] = {}
    for part in parts:
        if part.pairs * flop_per_pair > _SHORT_FLOP:
            yield part
        else:
            steps = _step(part.lengths[0]), _step(part.lengths[1])
            buckets.setdefault(steps, []).append(part)
    for bucket in buckets.values():
        if len(bucket) < _LEAST_SEQUENCES:
            yield from bucket
            continue
        # Neighbours of about the same lengths: little is computed behind the ends of entries.
        bucket.sort(key=lambda part: part.lengths[::-1])
        work = max(part.pairs for part in bucket) * flop_per_pair
        count = math.ceil(len(bucket) / max(_LEAST_SEQUENCES, int(_GROUP_FLOP / max(work, 1))))
        bounds = [i * len(bucket) // count for i in range(count + 1)]
        for begin, end in itertools.pairwise(bounds):
            yield Group(bucket[begin:end])


def _step(length: int) -> int:
    """Return a number that lengths of one group share; of no keys, -1."""
    if not length:
        return -1
    return max(0, math.ceil(2 * math.log2(length / _SAME_LENGTH)))
