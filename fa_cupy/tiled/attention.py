"""Attention tile by tile with an online softmax: the algorithm, written once over a namespace.

For each row of tiles (some queries of some batch entries) the keys are visited tile by tile. With
running maximum ``m``, sum ``l`` and accumulator ``acc`` of each query, one tile of scores ``s`` and
its values ``v`` change them to::

    m_new = max(m, max(s))
    p     = exp(s - m_new)
    l     = exp(m - m_new) * l + sum(p)
    acc   = exp(m - m_new) * acc + p @ v

and at the end the output is ``acc / l`` and the LSE ``m + log(l)`` [1]_. Any finite ``m`` gives the
same result up to rounding; the maximum only keeps the exponentials in range. Sinks are a last tile
of one score a query, which adds nothing to ``acc``. Memory is that of one
tile, whatever the lengths. A backend supplies the operations on tiles as a subclass of `Steps`.

A masked key has weight 0, and 0 * NaN is NaN: a non-finite value row spoils queries that must not
see it. Results that come out non-finite are therefore computed again by `attend_exactly`, which
leaves masked keys out of the product; finite data get there only where something overflows.

.. [1] T. Dao et al., "FlashAttention", https://arxiv.org/abs/2205.14135, Algorithm 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from fa_cupy.core.attention_problem import Problem
from fa_cupy.score.tiles import TileScore
from fa_cupy.tiled import softcap, tile_sizes
from fa_cupy.tiled.softmax import Rows as Rows
from fa_cupy.tiled.softmax import statistics

# Fewest queries that are worth a tile of their own at the diagonal.
_LEAST_HALF = 64

Array = Any  # numpy.ndarray or cupy.ndarray
Runs = list[tuple[int, int]]  # (begin, end) of keys, ascending


class SparseMask(Protocol):
    """A mask (n, q_len, k_len) that knows where it hides keys."""

    # Whether runs that are not next to each other share a tile, whose scores are then written with
    # rows that are not dense.
    joins: bool

    def __getitem__(self, tile: tuple[slice, slice, slice]) -> Any:
        """Return what `Steps` mask a tile by; None where nothing is hidden."""

    def runs(self, rows: tuple[int, int], keys: tuple[int, int]) -> Iterator[tuple[int, int]]:
        """Yield (begin, end) of keys that some of these rows see, ascending."""


@dataclass(frozen=True)
class Operands:
    """Arrays of n stacked batch entries; broadcast axes have stride 0."""

    q: Array  # (n, q_len, head_dim)
    k: Array  # (n, k_len, head_dim)
    v: Array  # (n, k_len, v_dim)
    bias: Array | None  # (n, q_len, k_len)
    mask: Array | SparseMask | None  # (n, q_len, k_len)
    out: Array  # (n, q_len, v_dim)
    lse: Array  # (n, q_len, 1)
    sinks: Array | None  # (n, q_len, 1)
    score: TileScore | None = field(default=None, kw_only=True)
    dropout: Dropout | None = field(default=None, kw_only=True)


class Dropout(Protocol):
    """Which weights of stacked batch entries are kept."""

    factor: float  # what those are multiplied by

    def kept(self, rows: tuple[int, int], runs: Runs) -> Array:
        """Return bools (n, rows, keys), of runs of keys side by side."""


class Steps(Protocol):
    """Operations on tiles that a backend supplies. Arrays named `out` are written in place."""

    xp: Any
    dtype: np.dtype[Any]  # of scores and accumulators: float32 or float64

    def scratch(self, name: str, shape: tuple[int, ...]) -> Array:
        """Return an uninitialised dense array that lives until `name` is asked for again."""

    def queries(self, q: Array, factor: float) -> Any:
        """Prepare one row of tiles: whatever `scores` wants to know of the queries."""

    def scores(self, queries: Any, first: int, k: Array, out: Array) -> None:
        """Set `out` to ``factor * q[:, first:] @ k.mT``; `k` as `operand` returned it.

        Right wherever ``factor * (q @ k.mT)`` is: it neither over- nor underflows before that does.
        """

    def operand(self, name: str, x: Array) -> Array:
        """Return `x` if `matmul` can read it where it is, otherwise a copy of compute dtype."""

    def matmul(self, a: Array, b: Array, out: Array, add: bool = False) -> None:
        """Set `out` to ``a @ b``, or add that to it. Weights `a` may be rounded in place."""

    def add_bias(self, scores: Array, bias: Array) -> None:
        """Add `bias`, of any float dtype."""

    def hidden(self, mask: Array) -> bool:
        """Whether all of `mask` is known to be False. May say no without looking."""

    def mask_scores(self, scores: Array, mask: Array) -> None:
        """Set scores to -inf, NaN ones too, where `mask` is False."""

    def band_scores(self, scores: Array, shift: int, lower: int | None, upper: int | None) -> None:
        """Set scores[:, i, j] to -inf unless lower <= j - i + shift <= upper."""

    def softmax(self, rows: Rows, scores: Array) -> None:
        """Turn scores into weights in place, and bring `rows` up to date but for the product."""

    def finish(self, rows: Rows, out: Array, lse: Array) -> bool:
        """Write output and LSE; return whether the output is finite as far as is known."""

    def load(self, out: Array, x: Array) -> None:
        """Copy `x`, of any float dtype, to `out`, of compute dtype."""

    def store(self, out: Array, value: Array) -> None:
        """Copy `value` to `out`, rounded to its dtype."""


def attend(
    steps: Steps,
    problem: Problem,
    x: Operands,
    row_begin: int,
    row_end: int,
    tile_n: int,
    more: Callable[[Rows], None] | None = None,
) -> bool:
    """Compute attention of the queries row_begin to row_end of all stacked entries.

    ``more(rows)`` is called after the last tile, and may add keys that no tile has.

    Returns
    -------
    bool
        Whether the output is finite as far as the backend knows yet. Where it is not,
        `attend_exactly` has to follow.
    """
    n, m = x.q.shape[0], row_end - row_begin
    q = queries_of(steps, problem, x, row_begin, row_end)
    rows = Rows(
        acc=steps.scratch("acc", (n, m, problem.v_dim)),
        top=steps.scratch("top", (n, m, 1)),
        total=steps.scratch("total", (n, m, 1)),
    )
    for first, runs in tiles(problem, row_begin, row_end, tile_n, x.mask):
        if first and not rows.started:
            start_empty(rows)
        weights = tile_of(steps, problem, x, q, (row_begin, row_end), first, runs)
        if weights is None:
            continue
        add, some = rows.started, rows.since(first)
        steps.softmax(some, weights)
        if x.dropout is not None:  # what is dropped is a part of the sums
            kept = x.dropout.kept((row_begin + first, row_end), runs)
            steps.xp.multiply(weights, kept, out=weights)
        for keys, part in parts_of(weights, runs):
            steps.matmul(part, steps.operand("v", x.v[:, slice(*keys)]), some.acc, add)
            add = True
        rows.started, rows.unshifted = some.started, some.unshifted
    if more is not None:
        more(rows)
    if not rows.started:
        start_empty(rows)
    if x.dropout is not None:
        steps.xp.multiply(rows.acc, steps.dtype.type(x.dropout.factor), out=rows.acc)
    sinks = sinks_of(steps, x, row_begin, row_end)
    if sinks is not None:
        steps.softmax(rows, sinks)
    return steps.finish(rows, x.out[:, row_begin:row_end], x.lse[:, row_begin:row_end])


def attend_exactly(
    steps: Steps, problem: Problem, x: Operands, row_begin: int, row_end: int, tile_n: int
) -> None:
    """Compute the output of `attend` again, leaving masked keys out of the product.

    Weights are ``exp(s - m) / l``, at most 1, so that the sum overflows only where that of the
    plain formula does; `m` and `l` come from a pass over the keys before. Non-finite elements of
    the values are taken out of the product; which queries they reach is counted in a product of
    its own, over the keys whose score is not -inf.
    """
    xp = steps.xp
    n, m = x.q.shape[0], row_end - row_begin
    q = queries_of(steps, problem, x, row_begin, row_end)

    def scored() -> Iterator[tuple[int, Runs, Array | None]]:
        for first, runs in tiles(problem, row_begin, row_end, tile_n, x.mask):
            rows = row_begin, row_end
            yield first, runs, tile_of(steps, problem, x, q, rows, first, runs)

    sinks = sinks_of(steps, x, row_begin, row_end)
    found = (((first, m), scores) for first, _, scores in scored())
    top, total = statistics(steps, n, m, itertools.chain(found, [((0, m), sinks)]))
    acc = xp.zeros((n, m, problem.v_dim), steps.dtype)
    if sinks is not None:  # one that is NaN spoils rows that see no key too
        acc += xp.where(xp.isnan(total), steps.dtype.type(np.nan), steps.dtype.type(0))
    for first, runs, scores in scored():
        if scores is None:
            continue
        weights = xp.exp(scores - top[:, first:]) / total[:, first:]
        some, reached = acc[:, first:], xp.empty((n, m - first, problem.v_dim), steps.dtype)
        attended = scores > -np.inf
        if x.dropout is not None:
            kept = x.dropout.kept((row_begin + first, row_end), runs)
            attended &= kept
            weights *= kept
        tile = zip(parts_of(weights, runs), parts_of(attended, runs), strict=True)
        for (keys, part), (_, seen) in tile:
            v = steps.operand("v", x.v[:, slice(*keys)])
            steps.matmul(part, xp.where(xp.isfinite(v), v, 0).astype(steps.dtype), some, add=True)
            for bad in (np.nan, np.inf, -np.inf):
                found_bad = xp.isnan(v) if np.isnan(bad) else v == bad
                steps.matmul(seen.astype(steps.dtype), found_bad.astype(steps.dtype), reached)
                some += xp.where(reached > 0, bad, 0).astype(steps.dtype)
    if x.dropout is not None:
        acc *= steps.dtype.type(x.dropout.factor)
    steps.store(x.out[:, row_begin:row_end], acc)


def sinks_of(steps: Steps, x: Operands, row_begin: int, row_end: int) -> Array | None:
    """Return the sinks of some queries as a tile of scores, which may be written to."""
    if x.sinks is None:
        return None
    scores = steps.scratch("sinks", (x.sinks.shape[0], row_end - row_begin, 1))
    steps.load(scores, x.sinks[:, row_begin:row_end])
    return scores


def tiles(
    problem: Problem, row_begin: int, row_end: int, tile_n: int, mask: Any = None
) -> Iterator[tuple[int, Runs]]:
    """Yield (first, [(key_begin, key_end), ...]) for the tiles of these queries.

    All queries but the `first` ones, which do not see any of these keys, take part: `first` is 0
    but for the last keys under a diagonal, which only the second half of the queries can see.
    Blocks of keys that a sparse mask hides from all of them are left out; a tile has several runs
    of keys only if the mask `joins` them.
    """
    begin, end = visible_keys(problem, row_begin, row_end)
    half = (row_end - row_begin) // 2
    corner = end
    if problem.upper is not None and half >= _LEAST_HALF:
        corner = min(end, max(begin, row_begin + half + problem.upper))
    runs = getattr(mask, "runs", None)
    joins = runs is not None and mask.joins
    for first, start, stop in ((0, begin, corner), (half, corner, end)):
        if start == stop:
            continue
        keys = start, stop
        found = runs((row_begin + first, row_end), keys) if runs else [keys]
        for tile in tile_sizes.joined_runs(found, tile_n) if joins else _apart(found, tile_n):
            yield first, tile


def _apart(runs: Iterable[tuple[int, int]], tile_n: int) -> Iterator[Runs]:
    for begin, end in runs:
        for key in range(begin, end, tile_n):
            yield [(key, min(key + tile_n, end))]


def tile_of(
    steps: Steps,
    problem: Problem,
    x: Operands,
    queries: Any,
    rows: tuple[int, int],
    first: int,
    runs: Runs,
) -> Array | None:
    """Return the scores of a tile, as `scores_of` does, those of its runs side by side."""
    if len(runs) == 1:
        return scores_of(steps, problem, x, queries, rows, first, runs[0])
    width = sum(end - begin for begin, end in runs)
    tile = steps.scratch("scores", (x.q.shape[0], rows[1] - rows[0] - first, width))
    for keys, part in parts_of(tile, runs):
        if scores_of(steps, problem, x, queries, rows, first, keys, out=part) is None:
            part.fill(-np.inf)
    return tile


def parts_of(tile: Array, runs: Runs) -> Iterator[tuple[tuple[int, int], Array]]:
    """Yield the runs of keys of a tile, and the columns that each has."""
    column = 0
    for begin, end in runs:
        yield (begin, end), tile[:, :, column : column + end - begin]
        column += end - begin


def visible_keys(problem: Problem, row_begin: int, row_end: int) -> tuple[int, int]:
    """Return (begin, end) of the keys that the band shows to some of these queries."""
    begin = 0 if problem.lower is None else max(0, row_begin + problem.lower)
    end = problem.k_len
    if problem.upper is not None:
        end = min(end, row_end + problem.upper)
    return begin, max(begin, end)


def queries_of(steps: Steps, problem: Problem, x: Operands, row_begin: int, row_end: int) -> Any:
    """Return some queries as `Steps.scores` wants them."""
    factor, _, _ = softcap.in_turn(problem, steps.dtype)
    return steps.queries(x.q[:, row_begin:row_end], factor)


def start_empty(rows: Rows) -> None:
    """Set `rows` to what they are before any key."""
    rows.acc.fill(0)
    rows.total.fill(0)
    rows.top.fill(-np.inf)
    rows.started = True


def scores_of(
    steps: Steps,
    problem: Problem,
    x: Operands,
    queries: Any,
    rows: tuple[int, int],
    first: int,
    keys: tuple[int, int],
    k: Array | None = None,
    slope: Array | None = None,
    partials: dict[str, Array] | None = None,
    out: Array | None = None,
) -> Array | None:
    """Return the scores of some keys, masked ones -inf; None where the mask hides all of them.

    They are written to `out`, if that is given. `k` are the keys as `Steps.operand` returned them,
    where that was asked before. Under a softcap or a score expression, the derivative of scores,
    scaled, is left in `slope`, and those by elements of its arrays in `partials`, whose keys name
    them.
    """
    row_begin, row_end = rows[0] + first, rows[1]
    key_begin, key_end = keys
    tile = (slice(None), slice(row_begin, row_end), slice(key_begin, key_end))
    mask = None if x.mask is None else x.mask[tile]
    if mask is not None and steps.hidden(mask):
        return None
    scores = out
    if scores is None:
        scores = steps.scratch("scores", (x.q.shape[0], row_end - row_begin, key_end - key_begin))
    if k is None:
        k = steps.operand("k", x.k[:, key_begin:key_end])
    steps.scores(queries, first, k, scores)
    if x.score is not None or problem.softcap:
        i = steps.xp.arange(row_begin, row_end)[:, None]
        j = steps.xp.arange(key_begin, key_end)
        transform(steps, problem, x.score, scores, (i, j), slope, partials)
    if x.bias is not None:
        steps.add_bias(scores, x.bias[tile])
    if mask is not None:
        steps.mask_scores(scores, mask)
    # The band cuts only columns below or above some of the rows' bounds.
    if problem.lower is not None and key_begin < row_end - 1 + problem.lower:
        below = scores[:, :, : row_end - 1 + problem.lower - key_begin]
        steps.band_scores(below, key_begin - row_begin, problem.lower, None)
    if problem.upper is not None and key_end - 1 > row_begin + problem.upper:
        skip = max(0, row_begin + problem.upper + 1 - key_begin)
        above = scores[:, :, skip:]
        steps.band_scores(above, key_begin + skip - row_begin, None, problem.upper)
    return scores


def transform(
    steps: Steps,
    problem: Problem,
    score: TileScore | None,
    scores: Array,
    places: tuple[Array, Array],
    slope: Array | None,
    partials: dict[str, Array] | None,
) -> None:
    """Apply softcap and score expression to scaled products in place, as `scores_of` says.

    `places` are the queries and keys of `scores` (n, rows, keys), which broadcast to its last axes.
    """
    xp = steps.xp
    if problem.softcap:
        _, cap, apart = softcap.in_turn(problem, steps.dtype)
        if apart:
            softcap.capped(xp, scores, cap, slope)
        else:
            xp.tanh(scores, out=scores)
            if slope is not None:
                xp.multiply(scores, scores, out=slope)
                xp.subtract(1, slope, out=slope)
            xp.multiply(scores, steps.dtype.type(cap), out=scores)
    if score is None:
        return
    wanted = [*(partials or ())]
    if slope is not None and not score.adds:
        wanted.append("s")
    found = score.apply(scores, *places, wanted)
    if slope is not None and "s" in found:
        by_s = found.pop("s")
        if problem.softcap:
            xp.multiply(slope, by_s, out=slope)
        else:
            slope[...] = by_s
    if partials is not None:
        partials.update(found)
