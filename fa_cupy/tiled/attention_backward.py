"""Gradients of attention tile by tile: the algorithm, written once over a namespace.

With scores ``s``, weights ``p = exp(s - lse)`` and the gradient ``do`` of the output ``o``, a tile
of queries and keys gives [1]_::

    dv += p.mT @ do
    ds  = p * (do @ v.mT - base)         where base = sum(do * o, -1) - dlse
    dq += scale * ds @ k
    dk += scale * ds.mT @ q

and `ds` itself is the gradient of the bias. A sink is the score of a key without a value, so that
``-exp(sink - lse) * base`` is what a query adds to its gradient. Under a softcap, ``ds`` is
multiplied by ``1 - tanh**2`` before the last two, and under a score expression by its derivative;
its product with the derivative by an element of an array, summed, is the gradient of that. With
dropout, `p` in the first of these and ``do @ v.mT`` in the second one are multiplied by what the
weights of pairs are, ``1 / (1 - dropout)`` or 0. Weights are made again from the queries, the keys
and the LSE, so that memory is that of a few tiles and of `base`, whatever the lengths. Where an LSE
or the scale is so large that rounding would spoil them (`least_far`), maximum and sum of its row's
weights are computed once more, by `keep_apart`, from the same tiles: weights then sum to 1. Other
rows of tiles are spared.

A column of tiles (some keys of some batch entries, all queries that see them) sums its dk and dv
and hands them over at its end; dq and the gradient of the bias are handed over tile by tile. Of a
gradient that is direct (`tiled.gradients.Operands.direct`), products are added where it lies.

A masked key has weight 0, and 0 * NaN is NaN. A tile that gives something that is not finite is
therefore computed again with `exact`, which leaves masked keys out of every sum, and a column whose
direct gradients are not finite is computed again without them. Finite data get there only where
something overflows.

.. [1] T. Dao et al., "FlashAttention", https://arxiv.org/abs/2205.14135, Algorithm 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from fa_cupy.core.attention_problem import Problem
from fa_cupy.tiled import attention, gradients
from fa_cupy.tiled.attention import Array
from fa_cupy.tiled.gradients import Operands, accumulate, reduced, target
from fa_cupy.tiled.softcap import split
from fa_cupy.tiled.softmax import (
    FAR,
    add_scores,
    closed,
    given_total,
    is_far,
    largest_scores,
    statistics,
    unseen_rows,
)

#: Gradients by name: arrays that terms are written to, and whether they are added to what is there.
Into = Mapping[str, tuple[Array, bool]]
#: add(name, rows, term): what a tile or, of k and v, a column adds to a gradient; None for nothing.
Add = Callable[[str, tuple[int, int], Array | None], None]


class Steps(attention.Steps, Protocol):
    """Operations on tiles that a backend supplies besides those of attention.

    `matmul` takes operands and their transposes here.
    """

    def weigh(self, scores: Array, top: Array, total: Array | None) -> None:
        """Set scores to ``exp(scores - top) / total``; None is 1."""

    def weigh_pairs(
        self, scores: Array, top: Array, total: Array | None, dscores: Array, base: Array
    ) -> None:
        """Set scores to weights, as `weigh`, and `dscores` to ``weights * (dscores - base)``."""

    def scale(self, x: Array, factor: float) -> None:
        """Multiply `x` by `factor`, which the dtype need not hold."""

    def finite(self, x: Array) -> bool:
        """Whether `x` is finite, as far as is known by now."""


def prepare(steps: Steps, x: Operands, row_begin: int, row_end: int) -> None:
    """Set ``x.base`` for some queries."""
    rows = slice(row_begin, row_end)
    terms = steps.scratch("of_q", x.out[:, rows].shape)
    steps.load(terms, x.out[:, rows])
    steps.xp.multiply(terms, steps.operand("dout", x.dout[:, rows]), out=terms)
    base = terms.sum(axis=-1, keepdims=True)
    x.base[:, rows] = base if x.dlse is None else base - x.dlse[:, rows]


def least_far(problem: Problem) -> float:
    """Return from which log-sum-exp on the rows of a problem are far.

    Under a large scale all of them are: where a product cancels, its score is small, but off by as
    much as a large one.
    """
    return 0.0 if _is_product(problem) and abs(problem.scale) >= FAR else FAR


def _is_product(problem: Problem) -> bool:
    """Whether scores are scaled products of queries and keys, and a bias."""
    return not problem.softcap and problem.score is None


def far_rows(
    steps: Steps, problem: Problem, x: Operands, tile_m: int
) -> tuple[Operands, list[tuple[int, int]]]:
    """Return (begin, end) of the tiles of queries some of which are far, for `keep_apart`.

    The operands come with memory for what that finds, if there are any.
    """
    xp, q_len, least = steps.xp, x.q.shape[1], least_far(problem)
    bounds = [(begin, min(begin + tile_m, q_len)) for begin in range(0, q_len, tile_m)]
    found = [rows for rows in bounds if bool(is_far(xp, x.lse[:, slice(*rows)], least).any())]
    if not found:
        return x, found
    top = finite_or_0(xp, x.lse).astype(steps.dtype)
    return replace(x, top=top, total=xp.ones_like(top)), found


def keep_apart(
    steps: Steps,
    problem: Problem,
    x: Operands,
    rows: tuple[int, int],
    columns: Iterable[tuple[int, int]],
    tile_m: int,
    more: Iterable[tuple[tuple[int, int], Array, Array]] = (),
) -> None:
    """Set ``x.top`` and ``x.total`` of far queries among some, as `row_statistics`."""
    part = slice(*rows)
    lse = x.lse[:, part]
    top, total, bound = row_statistics(steps, problem, x, rows, columns, tile_m, more)
    far = is_far(steps.xp, lse, least_far(problem))
    found = top, given_total(steps.xp, lse, top, total, bound)
    for kept, new in zip((x.top, x.total), found, strict=True):
        assert kept is not None
        kept[:, part] = steps.xp.where(far, new, kept[:, part])


def row_statistics(
    steps: Steps,
    problem: Problem,
    x: Operands,
    rows: tuple[int, int],
    columns: Iterable[tuple[int, int]],
    tile_m: int,
    more: Iterable[tuple[tuple[int, int], Array, Array]] = (),
) -> tuple[Array, Array, Array | None]:
    """Return maximum and sum of the weights of some queries, and a bound, given all their tiles.

    `more` is as in `row_scores`.

    The third array, of shape (n, m, 1), is the largest log-sum-exp of each query that there might
    be without rounding; None if scores are more than products. A score may be off by a part of the
    product of the norms of query and key, however small it is itself.
    """
    xp, n, m = steps.xp, x.q.shape[0], rows[1] - rows[0]
    scored = row_scores(steps, problem, x, rows, columns, tile_m, more)
    if not _is_product(problem):
        return *statistics(steps, n, m, (found[:2] for found in scored)), None
    q = steps.scratch("of_q", x.q[:, slice(*rows)].shape)
    steps.load(q, x.q[:, slice(*rows)])
    of_q, slope = norms_of(xp, q), abs(slope_of(problem, steps.dtype))
    own, largest = (unseen_rows(steps, n, m) for _ in range(2))
    for part, scores, of_keys in scored:
        if scores is not None:
            of_part = of_q[:, slice(*part)]
            add_scores(steps, largest, part, largest_scores(xp, scores, of_part, of_keys, slope))
            add_scores(steps, own, part, scores)
    top, total = closed(xp, largest)
    return *closed(xp, own), top + xp.log(total)


def row_scores(
    steps: Steps,
    problem: Problem,
    x: Operands,
    rows: tuple[int, int],
    columns: Iterable[tuple[int, int]],
    tile_m: int,
    more: Iterable[tuple[tuple[int, int], Array, Array]] = (),
) -> Iterator[tuple[tuple[int, int], Array | None, Array]]:
    """Yield the scores of some queries by all columns of tiles, and their sinks.

    Before them stand the first and the last of these queries, counted from ``rows[0]``, after them
    the norms of the keys; that of a sink is 0. Scores are None where all are hidden, or there are
    no sinks. They come from the same products as in `column`, so that they are rounded alike.
    `more` are the scores of keys that no tile has, in the same form.
    """
    xp = steps.xp
    for keys in columns:
        tiles = [*row_tiles(problem, keys, tile_m, x.columns, rows)]
        if not tiles:
            continue
        k = steps.operand("k", x.k[:, slice(*keys)])
        of_keys = norms_of(xp, k).swapaxes(-1, -2)
        for some in tiles:
            queries = attention.queries_of(steps, problem, x, *some)
            scores = attention.scores_of(steps, problem, x, queries, some, 0, keys, k)
            yield (some[0] - rows[0], some[1] - rows[0]), scores, of_keys
    yield from more
    of_sink = xp.zeros((1, 1, 1), steps.dtype)
    yield (0, rows[1] - rows[0]), attention.sinks_of(steps, x, *rows), of_sink


def norms_of(xp: Any, x: Array) -> Array:
    """Return the norms of rows, (n, m, 1), whose squares may be out of the range of floats."""
    if not x.shape[-1]:
        return xp.zeros((*x.shape[:-1], 1), x.dtype)
    largest = abs(x).max(axis=-1, keepdims=True)
    unit = xp.where((largest > 0) & xp.isfinite(largest), largest, x.dtype.type(1))
    return unit * xp.sqrt(((x / unit) ** 2).sum(axis=-1, keepdims=True))


def add_to_sinks(steps: Steps, x: Operands) -> None:
    """Add what all queries of some entries add to the gradient of the sinks, if it is wanted."""
    if x.dsinks is None:
        return
    xp, sinks = steps.xp, attention.sinks_of(steps, x, 0, x.q.shape[1])
    assert sinks is not None
    absent = sinks == -np.inf
    if x.top is None or x.total is None:
        top, total = finite_or_0(xp, x.lse).astype(steps.dtype), None
    else:
        top, total = x.top, x.total
    steps.weigh(sinks, top, total)
    term = xp.where(absent, steps.dtype.type(0), -sinks * x.base)
    accumulate(steps, x.dsinks, reduced(x.dsinks, term))


def column(
    steps: Steps,
    problem: Problem,
    x: Operands,
    keys: tuple[int, int],
    tile_m: int,
    add: Add,
    exact: bool = False,
) -> None:
    """Compute what the tiles of these keys add to the gradients of all stacked entries.

    Those that are not ``x.direct`` go to `add`. If `exact`, none is direct.
    """
    if not x.grads:  # sinks have no part in a tile
        return
    part = slice(*keys)
    k, v = steps.operand("k", x.k[:, part]), steps.operand("v", x.v[:, part])
    sums = {name: steps.scratch(f"sum_{name}", a.shape) for name, a in (("k", k), ("v", v))}
    sums = {name: sums[name] for name in sums if name in x.grads and name not in x.direct}
    for total in sums.values():
        total.fill(0)
    begun = False
    for rows in row_tiles(problem, keys, tile_m, x.columns):
        # Only one tile of a column has these queries.
        into = {name: (target(x, name, rows, keys), begun and name != "q") for name in x.direct}
        terms = _terms(steps, problem, x, rows, keys, k, v, exact, into)
        begun = begun or bool(terms)
        if x.direct:
            terms = {name: term for name, term in terms.items() if name not in x.direct}
        if not exact and not all(steps.finite(term) for term in terms.values()):
            terms = _terms(steps, problem, _chosen(x, direct=False), rows, keys, k, v, True)
        for name in x.grads:
            if name in sums:
                if name in terms:
                    steps.xp.add(sums[name], terms[name], out=sums[name])
            elif name not in x.direct:
                add(name, rows, terms.get(name))
    for name, total in sums.items():
        add(name, (0, 0), total)
    if x.direct:
        _finish_direct(steps, problem, x, keys, tile_m)


def _finish_direct(
    steps: Steps, problem: Problem, x: Operands, keys: tuple[int, int], tile_m: int
) -> None:
    """Scale what a column wrote to its direct gradients, and begin again unless it is finite."""
    found = {name: target(x, name, (0, x.q.shape[1]), keys) for name in x.direct}
    _, after = scale_orders(slope_of(problem, steps.dtype))[0]
    for name in found.keys() & {"q", "k"}:
        steps.scale(found[name], after)
    if not all(steps.finite(out) for out in found.values()):
        begin_again(steps, problem, x, keys, tile_m)


def begin_again(
    steps: Steps, problem: Problem, x: Operands, keys: tuple[int, int], tile_m: int
) -> None:
    """Compute the direct gradients of a column anew, and look at each tile of them."""
    for name in x.direct:
        target(x, name, (0, x.q.shape[1]), keys).fill(0)
    x = _chosen(x, direct=True)
    column(steps, problem, x, keys, tile_m, partial(gradients.add, steps, x, keys))


def _chosen(x: Operands, direct: bool) -> Operands:
    """Return operands with the direct gradients alone, or the others, none of them direct now."""
    grads = {name: grad for name, grad in x.grads.items() if (name in x.direct) == direct}
    return replace(x, grads=grads, direct=frozenset())


def row_tiles(
    problem: Problem,
    keys: tuple[int, int],
    tile_m: int,
    columns: Any = None,
    within: tuple[int, int] | None = None,
) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of queries that see some of these keys, none across a multiple of tile_m.

    `within` leaves those of one multiple to the next only.

    From the last to the first: columns that are computed side by side then come to a query at about
    the same time, whether or not the first queries see all of them.
    """
    begin = 0 if problem.upper is None else max(0, keys[0] - problem.upper)
    end = problem.q_len if problem.lower is None else min(problem.q_len, keys[1] - problem.lower)
    if within is not None:
        begin, end = max(begin, within[0]), min(end, within[1])
    if begin >= end:
        return
    runs = [(begin, end)] if columns is None else [*columns.runs(keys, (begin, end))]
    for first, last in reversed(runs):
        for start in reversed(range(first - first % tile_m, last, tile_m)):
            yield max(first, start), min(last, start + tile_m)


def _terms(
    steps: Steps,
    problem: Problem,
    x: Operands,
    rows: tuple[int, int],
    keys: tuple[int, int],
    k: Array,
    v: Array,
    exact: bool,
    into: Into = MappingProxyType({}),
) -> dict[str, Array]:
    """Return what one tile adds to the gradients; nothing where the mask hides all of it.

    What `into` names is written there in place, not yet scaled.
    """
    xp, part = steps.xp, slice(*rows)
    shape = (x.q.shape[0], rows[1] - rows[0], keys[1] - keys[0])
    sloped = problem.softcap or (x.score is not None and not x.score.adds)
    slope = steps.scratch("slope", shape) if sloped else None
    queries = attention.queries_of(steps, problem, x, *rows)
    partials: dict[str, Any] = dict.fromkeys(name for name in x.grads if name.startswith("element"))
    weights = attention.scores_of(steps, problem, x, queries, rows, 0, keys, k, slope, partials)
    if weights is None:
        return {}
    seen = weights != -np.inf if exact else None
    kept = None if x.dropout is None else x.dropout.kept(rows, [keys])
    if x.top is None:
        top = finite_or_0(xp, x.lse[:, part]).astype(steps.dtype)
    else:
        top = x.top[:, part]
    total = None if x.total is None else x.total[:, part]
    dout = steps.operand("dout", x.dout[:, part])
    terms = {}
    if not x.grads.keys() - {"v"}:
        steps.weigh(weights, top, total)
    else:
        dscores = steps.scratch("dscores", shape)
        steps.matmul(dout, v.swapaxes(1, 2), dscores)
        _drop(steps, x, kept, dscores)
        steps.weigh_pairs(weights, top, total, dscores, x.base[:, part])
        _hide(steps, seen, dscores)
        if "bias" in x.grads:
            terms["bias"] = reduced(x.grads["bias"][:, part, slice(*keys)], dscores)
        for name, partial in partials.items():
            term = dscores * partial
            _hide(steps, seen, term)
            terms[name] = reduced(target(x, name, rows, keys), term)
        if slope is not None:
            xp.multiply(slope, dscores, out=slope)
            _hide(steps, seen, slope)
            dscores = slope
        factor = slope_of(problem, steps.dtype)
        if "q" in x.grads:
            terms["q"] = _scaled(steps, "q", factor, dscores, k, seen, into)
        if "k" in x.grads:
            q = steps.operand("plain_q", x.q[:, part])
            terms["k"] = _scaled(steps, "k", factor, dscores, q, seen, into, turn=True)
    if "v" in x.grads:
        seen = seen if seen is None or kept is None else seen & kept
        _drop(steps, x, kept, weights)
        _hide(steps, seen, weights)
        terms["v"] = _product(steps, "v", _turned(weights), dout, _turned(seen), into)
    return terms


def scale_orders(factor: float) -> list[tuple[float, float]]:
    """Return two ways to share a factor: what is multiplied before a product, and what after."""
    rest, power = split(factor)
    if power == 1:
        return [(1.0, factor), (factor, 1.0)]
    # The power first: a product that underflows before a large factor has lost its digits.
    return [(power / 2, 2 * rest), (1.0, factor)]


def slope_of(problem: Problem, dtype: np.dtype[Any]) -> float:
    """Return what a score, below the cap, changes by with q.k: the scale that `dtype` can hold."""
    largest = float(np.finfo(dtype).max)
    return max(-largest, min(largest, problem.scale))


def _scaled(
    steps: Steps,
    name: str,
    factor: float,
    a: Array,
    b: Array,
    seen: Array | None,
    into: Into,
    turn: bool = False,
) -> Array:
    """Return ``factor * a @ b`` as `_product` does, with `a` and `seen` transposed for `turn`.

    What overflows where the factor comes last may not where it comes first, so that given `seen`
    both are tried. What is written `into` an array is multiplied by the last part of it later.
    """
    found = None
    for before, after in scale_orders(factor)[: 1 if seen is None else 2]:
        scaled = a
        if before != 1:
            scaled = steps.scratch("scaled", a.shape)
            scaled[...] = a
            steps.scale(scaled, before)
        sides = (_turned(scaled), _turned(seen)) if turn else (scaled, seen)
        term = _product(steps, name, sides[0], b, sides[1], into)
        if name not in into:
            steps.scale(term, after)
        if found is not None:
            return steps.xp.where(steps.xp.isfinite(found), found, term)
        found = term if seen is None else term.copy()
    return found


def finite_or_0(xp: Any, lse: Array) -> Array:
    """Return what is subtracted from scores: 0 for queries that see nothing."""
    return xp.where(lse == -np.inf, 0, lse)


def _product(steps: Steps, name: str, a: Array, b: Array, seen: Array | None, into: Into) -> Array:
    """Return ``a @ b``, given `seen` without what is not seen, and NaN where b is not finite."""
    if name in into:
        out, more = into[name]
        steps.matmul(a, b, out, more)
        return out
    out = steps.scratch(f"of_{name}", (a.shape[0], a.shape[1], b.shape[2]))
    if seen is None:
        steps.matmul(a, b, out)
        return out
    xp, dtype = steps.xp, steps.dtype
    finite = xp.isfinite(b)
    reached = xp.empty(out.shape, dtype)
    steps.matmul(seen.astype(dtype), (~finite).astype(dtype), reached)
    steps.matmul(a, xp.where(finite, b, 0).astype(dtype), out)
    out += xp.where(reached > 0, np.nan, 0).astype(dtype)
    return out


def _hide(steps: Steps, seen: Array | None, x: Array) -> None:
    if seen is not None:
        x[...] = steps.xp.where(seen, x, 0)


def _drop(steps: Steps, x: Operands, kept: Array | None, of_pairs: Array) -> None:
    """Multiply what pairs of a tile have by what their weights are multiplied by."""
    if x.dropout is not None:
        steps.scale(of_pairs, x.dropout.factor)
        _hide(steps, kept, of_pairs)


def _turned(x: Any) -> Any:
    return None if x is None else x.swapaxes(1, 2)
