"""A call with key lengths, pages or offsets as an equal call without, for any array namespace.

For backends that have no kernel for such a call: pages are copied to where rows follow each other,
and a mask hides the keys behind the ends, or those of other sequences. Nothing waits for a device,
and only functions that NumPy and CuPy have are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fa_cupy._bitmask import BitMask
from fa_cupy.core import arrays as core_arrays
from fa_cupy.core.attention_problem import BFLOAT16, Problem, View, batch_view
from fa_cupy.keys import offsets
from fa_cupy.keys.layout import KeyArrays, Pages

Array = Any  # numpy.ndarray or cupy.ndarray


class Gathered(NamedTuple):
    """What takes the place of a problem and its arrays.

    Attributes
    ----------
    problem : Problem
        Without `pages`, and without `k_lengths` where the mask hides what is behind them.
    k, v : array
        In C order where they were in pages, otherwise as given.
    mask : array of bool or None
    bad : array of bool or None
        Which batch entries have a length, or need a page, that is out of range; of a shape that
        broadcasts to the batch axes before the heads. None where there can be none.
    """

    problem: Problem
    k: Array
    v: Array
    mask: Array | None
    bad: Array | None


def without_places(problem: Problem) -> Problem:
    """Return what is known of an equal problem without key lengths, pages and offsets.

    That is all but the elements of its mask, which hides keys. No array is made.
    """
    shape = *problem.batch, problem.q_len, problem.k_len
    return replace(
        problem, lower=None, upper=None, k_lengths=None, k_lengths_dtype=None, pages=None,
        offsets=None, band_from_end=False,
        mask=View(shape, (0,) * len(shape)) if problem.k_len else None,
    )  # fmt: skip


def gathered(
    xp: Any,
    problem: Problem,
    k: Array,
    v: Array,
    mask: Array | None,
    keys: KeyArrays,
    hides: bool = True,
) -> Gathered:
    """Return an equal call whose batch entries all have `k_len` keys.

    Parameters
    ----------
    xp : module
        `numpy` or `cupy`.
    problem : Problem
        With `k_lengths`, `pages` or both.
    k, v, mask : array
        The arrays that `problem` was made from, `mask` may be None.
    keys : KeyArrays
        The lengths and the table, of `xp`.
    hides : bool, optional
        Whether the mask hides what is behind lengths. If not, these stay.

    Returns
    -------
    Gathered
        After the call, `mark_bad` has to follow.
    """
    pages, bad = problem.pages, _bad(xp, problem, keys)
    alone = replace(problem, pages=None)
    if pages is not None:
        k, v = (_rows(xp, x, pages, keys.table) for x in (k, v))
    if hides and keys.lengths is not None and problem.k_len:
        seen = _visible(xp, problem, keys.lengths)
        mask = seen if mask is None else mask & seen
        if problem.band_from_end:
            alone = replace(alone, lower=None, upper=None)
    if hides or keys.lengths is None:
        alone = replace(alone, k_lengths=None, k_lengths_dtype=None, band_from_end=False)
    alone = replace(
        alone,
        k=batch_view(alone, k, problem.k_len, problem.head_dim),
        v=batch_view(alone, v, problem.k_len, problem.v_dim),
        mask=None
        if mask is None or problem.k_len == 0
        else batch_view(alone, mask, problem.q_len, problem.k_len),
    )
    return Gathered(alone, k, v, None if problem.k_len == 0 else mask, bad)


def unpacked(
    xp: Any, problem: Problem, mask: Any, keys: KeyArrays
) -> tuple[Problem, Array | None, Array]:
    """Return an equal call without offsets: its problem, its mask, and which queries are bad.

    Parameters
    ----------
    xp : module
        `numpy` or `cupy`.
    problem : Problem
        With `offsets`.
    mask : array, BitMask or None
    keys : KeyArrays
        The offsets, of `xp`.

    Returns
    -------
    Problem, array of bool or None, array of bool
        After the call, `mark_bad_rows` has to follow for the last one.
    """
    first, last, bad = offsets.intervals(xp, problem, keys)
    dropout = problem.dropout and problem.dropout.at(offsets.places(xp, problem, keys))
    alone = replace(
        problem, lower=None, upper=None, offsets=None, band_from_end=False, mask=None,
        dropout=dropout,
    )  # fmt: skip
    if not problem.k_len:
        return alone, None, bad
    j = xp.arange(problem.k_len)
    seen = (j >= first[:, None]) & (j <= last[:, None])
    if mask is not None:
        seen = seen & xp.asarray(mask.to_dense() if isinstance(mask, BitMask) else mask)
    return replace(alone, mask=batch_view(alone, seen, *seen.shape[-2:])), seen, bad


def unpacked_gradients(
    xp: Any,
    problem: Problem,
    mask: Any,
    results: Sequence[Array | None],
    sinks: Array | None,
    keys: KeyArrays,
) -> tuple[Problem, Array | None, tuple[Array | None, ...]]:
    """Return an equal call without offsets, as `unpacked` does, and the results that it takes.

    `results` are output and log-sum-exp, and the gradients of both. Bad queries have those of
    queries without keys, to which nothing adds.
    """
    alone, seen, bad = unpacked(xp, problem, mask, keys)
    return alone, seen, _without_rows(xp, bad, results, sinks)


def _without_rows(
    xp: Any, bad: Array, results: Sequence[Array | None], sinks: Array | None
) -> tuple[Array | None, ...]:
    """Return copies of results and their gradients, as if queries that are `bad` saw no key.

    `bad` broadcasts to the log-sum-exp. Nothing adds to the gradients of these queries.
    """
    out, lse, dout, dlse = (
        None if x is None else as_integers(x).copy().view(x.dtype) for x in results
    )
    for x in (out, dout):
        assert x is not None
        _write(xp, x, bad[..., None], 0.0)
    if dlse is not None:
        _write(xp, dlse, bad, 0.0)
    assert lse is not None
    nothing = lse.dtype.type(-np.inf) if sinks is None else _widened(sinks, lse.dtype)
    return out, xp.where(bad, nothing, lse), dout, dlse


def gathered_gradients(
    xp: Any,
    problem: Problem,
    inputs: Sequence[Array | None],
    results: Sequence[Array | None],
    sinks: Array | None,
    keys: KeyArrays,
    checked: bool = False,
) -> tuple[Problem, tuple[Array | None, ...], tuple[Array | None, ...]]:
    """Return an equal call without key lengths: its problem, its inputs and the results it takes.

    Parameters
    ----------
    xp : module
        `numpy` or `cupy`.
    problem : Problem
        With `k_lengths`.
    inputs : sequence of array or None
        q, k, v, bias and mask.
    results : sequence of array or None
        Output and log-sum-exp, and the gradients of both.
    sinks : array or None
    keys : KeyArrays
        The lengths, of `xp`.
    checked : bool
        Whether all of them are known to be in range. An entry whose length is not gets the results
        of one without keys, to which nothing adds.
    """
    q, k, v, bias, mask = inputs
    lengths, bad = keys.lengths, _bad(xp, problem, keys)
    if not checked:
        assert bad is not None
        lengths = xp.where(bad, lengths.dtype.type(0), lengths)
        rows = bad[..., None, None] if bad.ndim else bad
        results = _without_rows(xp, rows, results, sinks)
    # Weights of 0 times what is not finite would be NaN, and kernels would compute all again.
    k, v = (zeros_behind(xp, x, lengths) for x in (k, v))
    alone = gathered(xp, problem, k, v, mask, KeyArrays(lengths))
    return alone.problem, (q, alone.k, alone.v, bias, alone.mask), (*results,)


def zeros_behind(xp: Any, x: Array, lengths: Array) -> Array:
    """Return keys or values (..., heads, k_len, dim), laid out alike: 0 where no entry has them."""
    if not lengths.size or not x.size:
        return x
    own = x.shape[:-3]
    if lengths.ndim > len(own):
        lengths = lengths.max(axis=tuple(range(lengths.ndim - len(own))))
    shared = tuple(
        axis
        for axis, (n, of_x) in enumerate(
            zip(lengths.shape, own[len(own) - lengths.ndim :], strict=True)
        )
        if n > of_x == 1
    )
    if shared:
        lengths = lengths.max(axis=shared, keepdims=True)
    ends = lengths[..., None, None, None] if lengths.ndim else lengths
    bits = as_integers(x)
    found = core_arrays.empty_laid_out(xp, x.shape, x, x.dtype)
    shown = xp.arange(x.shape[-2])[:, None] < ends
    as_integers(found)[...] = xp.where(shown, bits, bits.dtype.type(0))
    return found


def mark_bad_rows(xp: Any, bad: Array, out: Array, lse: Array | None) -> None:
    """Write NaN to the rows of results, the last axis of `lse`, that are `bad`."""
    for x, where in ((out, bad[:, None]), (lse, bad)):
        if x is not None:
            _write(xp, x, where, np.nan)


def mark_bad(xp: Any, bad: Array | None, *results: Array | None) -> None:
    """Write NaN to the batch entries of results that are `bad`.

    Parameters
    ----------
    xp : module
    bad : array of bool or None
        From `gathered`.
    *results : array or None
        Output, of shape (..., heads, q_len, v_dim), and log-sum-exp, without the last axis; with
        fewer axes where there are no heads.
    """
    if bad is None:
        return
    for i, x in enumerate(results):
        if x is not None:
            _write(xp, x, bad[(..., *[None] * (3 - i))] if bad.ndim else bad, np.nan)


def _write(xp: Any, x: Array, where: Array, number: float) -> None:
    numbers = as_integers(x)
    bits = np.full(1, number).astype(x.dtype).view(numbers.dtype)[0]
    numbers[...] = xp.where(where, bits, numbers)


def _widened(x: Array, dtype: np.dtype[Any]) -> Array:
    """Return `x` in `dtype`; CuPy does not convert bfloat16, the upper half of a float32."""
    if x.dtype != BFLOAT16:
        return x.astype(dtype)
    bits = x.view(np.uint16).astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32).astype(dtype)


def _rows(xp: Any, x: Array, pages: Pages, table: Array) -> Array:
    """Return keys or values (..., heads, k_len, dim) of the pages of each entry."""
    _, heads, size, dim = x.shape
    *entries, per_sequence = table.shape
    shape = (*entries, heads, per_sequence * size, dim)
    if pages.count == 0 or 0 in shape:
        return xp.zeros(shape, x.dtype)
    numbers = xp.clip(table, 0, pages.count - 1)[..., None, :]
    found = as_integers(x)[numbers, xp.arange(heads)[:, None]]
    return xp.ascontiguousarray(found).reshape(shape).view(x.dtype)


def as_integers(x: Array) -> Array:
    """Return `x` as integers of its size: CuPy does not move bfloat16 around everywhere."""
    return x.view(f"u{x.dtype.itemsize}")


def _visible(xp: Any, problem: Problem, lengths: Array) -> Array:
    """Return which keys an entry has, and the band shows where it counts from their end.

    Of shape (..., 1, 1, k_len), with a band (..., 1, q_len, k_len).
    """
    j = xp.arange(problem.k_len)
    ends = lengths[..., None, None, None] if lengths.ndim else lengths
    seen = (j < ends) if lengths.ndim else (j < ends)[None]
    if not problem.band_from_end:
        return seen
    # Only what is compared has an element for each pair, of one byte.
    stands = xp.arange(problem.q_len)[:, None] + (ends - problem.k_len)
    if problem.lower is not None:
        seen = seen & (j >= stands + problem.lower)
    if problem.upper is not None:
        seen = seen & (j <= stands + problem.upper)
    return seen


def _bad(xp: Any, problem: Problem, keys: KeyArrays) -> Array | None:
    """Return the entries whose length, or the number of a page that they need, is out of range."""
    bad, needed = None, None
    lengths, table = keys.lengths, keys.table
    if lengths is not None:
        bad = (lengths < 0) | (lengths > problem.k_len)
    if problem.pages is not None and table.shape[-1]:
        size, count = problem.pages.size, problem.pages.count
        wrong = (table < 0) | (table >= count)
        if lengths is not None:
            needed = -(-xp.clip(lengths, 0, problem.k_len) // size)
            wrong = wrong & (xp.arange(table.shape[-1]) < needed[..., None])
        wrong = wrong.any(axis=-1)
        bad = wrong if bad is None else bad | wrong
    return bad
