"""Batch entries with key lengths: parts that are problems of their own, without further keys.

The lengths are in the memory of the host. Where they differ, so are all arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fa_cupy.core.attention_problem import Problem, View, batch_view
from fa_cupy.keys.gathered import gathered, zeros_behind
from fa_cupy.keys.layout import KeyArrays
from fa_cupy.keys.sequences import band_of
from fa_cupy.score import tree
from fa_cupy.score.program import Operands

Array = Any  # numpy.ndarray or cupy.ndarray

# Neighbours of so much work at most, each and together, are one part, with as many keys as the
# longest of them has: a call takes some hundred microseconds in Python, whatever its size.
_SHORT_FLOP, _GROUP_FLOP = 8e6, 4e7


class Entries(NamedTuple):
    """Some batch entries, and as many keys as the longest of them has.

    Attributes
    ----------
    place : tuple of slice
        Along the batch axes before the heads.
    length : int
    lengths : ndarray or None
        Those of all entries, over these axes; None where all have `length`.
    pairs : float
        Of a query and a key, for a batch entry of the call on average.
    """

    place: tuple[slice, ...]
    length: int
    lengths: Array | None
    pairs: float

    def of_rows(self, x: Array | None) -> Array | None:
        """Return the part of an array (..., heads, queries, dim)."""
        return None if x is None else x[self._of(x, 3)]

    def of_keys(self, x: Array) -> Array:
        """Return the part of an array (..., heads, keys, dim)."""
        return x[self._of(x, 3)][..., : self.length, :]

    def of_scores(self, x: Array | None) -> Array | None:
        """Return the part of an array that broadcasts to (..., heads, queries, keys)."""
        if x is None or not x.ndim:
            return x
        own = x[self._of(x, 3)]
        return own if x.shape[-1] == 1 else own[..., : self.length]  # 1 is for any number of keys

    def of_numbers(self, x: Array | None) -> Array | None:
        """Return the part of an array that broadcasts to (..., heads, queries)."""
        return x if x is None or not x.ndim else x[self._of(x, 2)]

    def mask(self, mask: Any) -> Any:
        """Return the part of a mask."""
        return self.of_scores(mask) if self.length else None

    def alone(self, problem: Problem, mask: Any) -> Problem:
        """Return the problem of the entries, whose arrays are parts; `mask` is from `mask`.

        It has `k_lengths` where these differ.
        """
        axes = len(self.place)
        sizes = [len(range(n)[at]) for n, at in zip(problem.batch[:axes], self.place, strict=True)]
        # A bound that never binds in the longest entry never does in another one.
        lower, upper = band_of(problem, problem.q_len, self.length)

        def cut(view: View | None, *last: int) -> Any:
            return view and View((*sizes, *view.shape[axes:-2], *last), view.strides)

        found = replace(
            problem, batch=(*sizes, *problem.batch[axes:]), k_len=self.length, lower=lower,
            upper=upper, out_shape=(*sizes, *problem.out_shape[axes:]),
            q=cut(problem.q, problem.q_len, problem.head_dim),
            k=cut(problem.k, self.length, problem.head_dim),
            v=cut(problem.v, self.length, problem.v_dim),
            bias=cut(problem.bias, problem.q_len, self.length),
            sinks=cut(problem.sinks, problem.q_len, 1), mask=None,
        )  # fmt: skip
        if mask is not None:
            seen = batch_view(found, mask, problem.q_len, self.length)
            found = replace(found, mask=seen)
        if self.lengths is None:
            found = replace(found, k_lengths=None, k_lengths_dtype=None, band_from_end=False)
        return found

    def taken(
        self, problem: Problem, inputs: Sequence[Any]
    ) -> tuple[Callable[[], Problem], Sequence[Any]]:
        """Return what makes the problem of the entries, and their q, k, v, bias and mask.

        None of them has key lengths any more: where these differ, the mask hides what is behind.
        """
        q, k, v, bias, mask = inputs
        shown = self.mask(mask)
        arrays = self.of_rows(q), self.of_keys(k), self.of_keys(v), self.of_scores(bias), shown
        if self.lengths is None:
            return partial(self.alone, problem, shown), arrays
        # Zeros take the place of what is not finite: all would be computed again with these.
        k, v = (x if _is_finite(x) else zeros_behind(np, x, self.lengths) for x in arrays[1:3])
        found = gathered(np, self.alone(problem, shown), k, v, shown, KeyArrays(self.lengths))
        return (lambda: found.problem), (arrays[0], found.k, found.v, arrays[3], found.mask)

    def _of(self, x: Array, own: int) -> tuple[slice, ...]:
        """Return what takes the part of an array whose last `own` axes are none of entries."""
        shape = x.shape[:-own]
        places = self.place[len(self.place) - len(shape) :]
        return tuple(slice(None) if n == 1 else at for n, at in zip(shape, places, strict=True))


def _is_finite(x: Array) -> bool:
    """Whether all elements are finite, as far as their sum shows."""
    with np.errstate(all="ignore"):
        return bool(np.isfinite(x.sum(dtype=np.promote_types(x.dtype, np.float32))))


def entry_axes(problem: Problem) -> int:
    """Return how many batch axes there are before the heads."""
    return max(0, len(problem.out_shape) - 3)


def together(problem: Problem, lengths: Array) -> Entries | None:
    """Return all entries as a part without `lengths`; None where these differ."""
    length = int(lengths.flat[0]) if lengths.size else 0
    if (lengths != length).any():
        return None
    everywhere = (slice(None),) * entry_axes(problem)
    return Entries(everywhere, length, None, float(problem.q_len * length))


def own_gradients(problem: Problem, bias: Array | None, sinks: Array | None) -> set[str]:
    """Return the arguments of which each element belongs to one entry, of those of a part."""
    shape = problem.out_shape[: entry_axes(problem)]
    found = {"q", "k", "v"}
    found |= {"bias"} if bias is not None and bias.shape[:-3] == shape else set()
    return found | ({"sinks"} if sinks is not None and sinks.shape[:-2] == shape else set())


def parts(
    problem: Problem,
    qkv: Sequence[Array],
    score: Operands | None,
    lengths: Array,
    flop_per_pair: float,
) -> list[Entries]:
    """Return parts of a call, in order.

    Parameters
    ----------
    problem : Problem
        With `k_lengths`.
    qkv : sequence of array
        q, k and v. Where entries share one of these, all of them are one part.
    score : Operands or None
        All entries are one part for an expression that knows their numbers, as with dropout.
    lengths : ndarray
    flop_per_pair : float
        Of all batch entries, for each query and key.
    """
    found = together(problem, lengths)
    if found is not None:
        return [found]
    shape = problem.out_shape[: entry_axes(problem)]
    lengths, entries = np.broadcast_to(lengths, shape), math.prod(shape)
    numbered = score is not None and "b" in tree.variables_of(score.program.root)
    numbered = numbered or problem.dropout is not None
    if numbered or not entries or any(x.shape[:-3] != shape for x in qkv):
        length = int(lengths.max(initial=0))
        everywhere = (slice(None),) * len(shape)
        return [Entries(everywhere, length, lengths, float(problem.q_len * length))]
    divided = []
    for place in np.ndindex(shape[:-1]):
        before = tuple(slice(i, i + 1) for i in place)
        row = lengths[place].tolist()
        for begin, end in _runs(row, problem.q_len * flop_per_pair / entries):
            at = (*before, slice(begin, end))
            length = max(row[begin:end])
            pairs = problem.q_len * length * (end - begin) / entries
            equal = min(row[begin:end]) == length
            divided.append(Entries(at, length, None if equal else lengths[at], pairs))
    return divided


def _runs(lengths: list[int], flop_per_key: float) -> list[tuple[int, int]]:
    """Return the bounds of neighbours that are one part: of equal lengths, or of little work."""
    found, begin, least, most = [], 0, lengths[0], lengths[0]
    for i, length in enumerate(lengths):
        least, most = min(least, length), max(most, length)
        work = most * flop_per_key
        if least < most and (work > _SHORT_FLOP or work * (i + 1 - begin) > _GROUP_FLOP):
            found.append((begin, i))
            begin = i
            least = most = length
    return [*found, (begin, len(lengths))]
