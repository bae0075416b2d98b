"""Gradients with key lengths as those of packed sequences, for any array namespace.

Batch entries lie end to end, and behind the keys of each is a sequence of those that it does not
have, without queries. For backends whose kernels read offsets, and would need a mask of all pairs
for a band that counts from the ends. Nothing waits for a device, and only functions that NumPy and
CuPy have are used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fa_cupy.core.arrays import Laid
from fa_cupy.core.attention_problem import Problem, attention_problem
from fa_cupy.keys.gathered import as_integers, zeros_behind
from fa_cupy.keys.layout import KeyArrays
from fa_cupy.keys.offsets import Offsets
from fa_cupy.keys.sequences import shifted_band

Array = Any  # numpy.ndarray or cupy.ndarray


class Folded(NamedTuple):
    """What takes the place of the arrays of a problem, all dense.

    Attributes
    ----------
    inputs, results : tuple of array or None
        q, k, v, bias and mask; output and log-sum-exp, and the gradients of both.
    keys : KeyArrays
        The offsets.
    """

    inputs: tuple[Any, ...]
    results: tuple[Any, ...]
    keys: KeyArrays


def can_fold(problem: Problem, qkv: Sequence[Array], sinks: Array | None) -> bool:
    """Whether a problem with `k_lengths` is one of packed sequences, which read nothing of pairs.

    Entries share no queries, keys or values, and each head has one sink.
    """
    shape = problem.out_shape[:-3]
    if not shape or not math.prod(problem.out_shape) or not problem.k_len:
        return False
    of_pairs = problem.bias is not None or problem.mask is not None or problem.score is not None
    of_heads = sinks is None or (sinks.ndim <= 2 and sinks.shape[-1:] in ((), (1,)))
    return of_heads and not of_pairs and all(x.shape[:-3] == shape for x in qkv)


def folded_problem(
    problem: Problem, qkv: Sequence[Array], sinks: Array | None
) -> tuple[Problem, dict[str, Laid]]:
    """Return an equal problem with offsets, and how its q, k, v and output lie.

    It has 4 axes, the first of them of size 1. No array is made.
    """
    count = math.prod(problem.out_shape[:-3])
    q, k, v = (Laid.dense((1, x.shape[-3], count * x.shape[-2], x.shape[-1]), x.dtype) for x in qkv)
    alone = attention_problem(
        q, k, v, None, None, scale=problem.scale, softcap=problem.softcap, sinks=sinks,
        precision=problem.precision,
    )  # fmt: skip
    # Bounds that count from the end are those of one sequence of all queries and keys.
    lower, upper = shifted_band(problem, alone.q_len, alone.k_len)
    number = np.dtype(np.int64)
    alone = replace(
        alone, lower=lower, upper=upper, band_from_end=problem.band_from_end,
        offsets=Offsets(2 * count, number, number),
    )  # fmt: skip
    return alone, {"q": q, "k": k, "v": v, "out": Laid.dense(alone.out_shape, alone.dtype)}


def folded(
    xp: Any,
    problem: Problem,
    inputs: Sequence[Array | None],
    results: Sequence[Array | None],
    keys: KeyArrays,
) -> Folded:
    """Return the arrays of `folded_problem`; sinks are the same.

    Parameters
    ----------
    xp : module
        `numpy` or `cupy`.
    problem : Problem
        One that `can_fold`.
    inputs : sequence of array or None
        q, k, v, bias and mask; the last two are None.
    results : sequence of array or None
        Output and log-sum-exp, and the gradients of both.
    keys : KeyArrays
        The lengths, of `xp`. An entry whose length is out of range is a sequence whose offsets are.
    """
    q, k, v, *_ = inputs
    out, lse, dout, dlse = results
    lengths = xp.clip(keys.lengths, 0, problem.k_len)
    k, v = (zeros_behind(xp, x, lengths) for x in (k, v))
    arrays = *(_folded(xp, x, 3) for x in (q, k, v)), None, None
    rows = tuple(_folded(xp, x, own) for x, own in ((out, 3), (lse, 2), (dout, 3), (dlse, 2)))
    offsets = _offsets(xp, problem, keys.lengths)
    return Folded(arrays, rows, KeyArrays(q_offsets=offsets[0], k_offsets=offsets[1]))


def unfold(x: Array, found: Array) -> None:
    """Write a gradient of the folded q, k or v to that of the call, (..., heads, length, dim)."""
    *entries, heads, length, dim = x.shape
    axes = len(entries)
    parts = as_integers(found).reshape(heads, *entries, length, dim)
    as_integers(x)[...] = parts.transpose(*range(1, axes + 1), 0, axes + 1, axes + 2)


def _folded(xp: Any, x: Array | None, own: int) -> Array | None:
    """Return (1, heads, entries * length, ...) of an array whose last `own` axes are of entries."""
    if x is None:
        return None
    axes = x.ndim - own
    heads, length, *dims = x.shape[axes:]
    turned = as_integers(x).transpose(axes, *range(axes), *range(axes + 1, x.ndim))
    return (
        xp.ascontiguousarray(turned)
        .reshape(1, heads, math.prod(x.shape[:axes]) * length, *dims)
        .view(x.dtype)
    )


def _offsets(xp: Any, problem: Problem, lengths: Array) -> tuple[Array, Array]:
    """Return where sequences begin: of each entry one with its keys, and one without queries."""
    shape = problem.out_shape[:-3]
    count = math.prod(shape)
    lengths = (lengths + xp.zeros(shape, np.int64)).reshape(count)
    first = xp.arange(count + 1)
    q, k = xp.zeros(2 * count + 1, np.int64), xp.zeros(2 * count + 1, np.int64)
    q[::2], k[::2] = first * problem.q_len, first * problem.k_len
    q[1::2] = q[2::2]
    is_valid = (lengths >= 0) & (lengths <= problem.k_len)
    k[1::2] = xp.where(is_valid, k[:-1:2] + lengths, -1)
    return q, k
