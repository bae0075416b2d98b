"""The softmax of rows of tiles: running maximum and sum, and rows whose log-sum-exp is no use.

A log-sum-exp of 1e9 is a multiple of 64 in float32: the logarithm of the sum is lost in it, and
weights ``exp(s - lse)`` may be anything. With maximum ``m`` and sum ``l`` of the same scores,
weights ``exp(s - m) / l`` sum to 1 wherever the scores are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any  # numpy.ndarray or cupy.ndarray

#: From this log-sum-exp on, rows are far. Below, its rounding changes weights by 2**-14 at most in
#: float32 and by 2**-43 in float64, which is what the rounding of scores of that size does.
FAR = 2.0**10

#: By how much of itself a log-sum-exp may exceed the largest one that a call's own scores allow, by
#: dtype, before it is one of more keys, as where results over parts of the keys were merged.
_SAME = {np.dtype(np.float32): 2.0**-20, np.dtype(np.float64): 2.0**-48}

#: By how much a score may be off where products cancel, in parts of the product of the norms of
#: query and key: others add up the same terms in another order, and tensor cores cut their sums.
#: Up to 256 dims, random numbers differed by 2**-22.2 at most, vectors made to cancel by 2**-21.
_LOST = {np.dtype(np.float32): 2.0**-21, np.dtype(np.float64): 2.0**-50}


@dataclass
class Rows:
    """Running state of the queries of one row of tiles, all in the compute dtype."""

    acc: Array  # (n, m, v_dim)
    top: Array  # (n, m, 1): what is subtracted from scores, -inf before any
    total: Array  # (n, m, 1): sum of the weights
    started: bool = False
    # Scores are known to be small: top stays as it is, 0 but for the `lowered` first queries.
    unshifted: bool = False
    lowered: int = 0

    def since(self, first: int) -> Rows:
        """Return the queries from `first` on, as views."""
        if first == 0:
            return self
        arrays = (self.acc[:, first:], self.top[:, first:], self.total[:, first:])
        return Rows(*arrays, self.started, self.unshifted, max(0, self.lowered - first))


def is_far(xp: Any, lse: Array, least: float = FAR) -> Array:
    """Return whether weights made from this log-sum-exp would be off; not if it is not finite."""
    return xp.isfinite(lse) & (xp.abs(lse) >= least)


def largest_scores(xp: Any, scores: Array, q_norms: Array, k_norms: Array, slope: float) -> Array:
    """Return the largest scores that there might be without rounding, in a new array.

    They are scaled products of queries and keys, with these norms, which broadcast against them,
    and perhaps a bias. Those of hidden pairs stay -inf.
    """
    dtype = scores.dtype.type
    small, large = xp.minimum(q_norms, k_norms), xp.maximum(q_norms, k_norms)
    # In an order in which nothing leaves the range of floats unless the product does.
    first, last = (large, small) if slope < 1 else (small, large)
    rounding = first * dtype(slope) * last * dtype(_LOST[scores.dtype])
    return xp.where(scores == -np.inf, scores, scores + rounding)


def given_total(xp: Any, lse: Array, top: Array, total: Array, bound: Array | None = None) -> Array:
    """Return what weights ``exp(s - top)`` are divided by, given the log-sum-exp of a caller.

    That is `total`, unless the log-sum-exp is one of more keys than `top` and `total` come from,
    which makes it larger. `bound` is as `attention_backward.row_statistics` returns it.
    """
    dtype, most = top.dtype.type, top + xp.log(total) if bound is None else bound
    of_more = lse - most > dtype(_SAME[top.dtype]) * xp.abs(lse)
    return xp.where(of_more, xp.exp(xp.where(of_more, lse - top, dtype(0))), total)


def own_share(
    xp: Any, lse: Array, top: Array, total: Array, bound: Array | None, least: float
) -> Array:
    """Return the sum of the weights of the keys that `top` and `total` come from.

    The log-sum-exp comes from a caller. If it is of these keys alone, the sum is 1 up to rounding;
    where results over parts of the keys were merged, it is less. Rows are far from `least` on.
    """
    of_far = total / given_total(xp, lse, top, total, bound)
    return xp.where(is_far(xp, lse, least), of_far, total * xp.exp(top - lse))


def unseen_rows(steps: Any, n: int, m: int) -> Rows:
    """Return the state of m queries of n batch entries before any key, for `add_scores`."""
    xp, dtype = steps.xp, steps.dtype
    top, total = xp.full((n, m, 1), -np.inf, dtype), xp.zeros((n, m, 1), dtype)
    return Rows(xp.empty((n, m, 0), dtype), top, total, started=True)


def add_scores(steps: Any, rows: Rows, part: tuple[int, int], scores: Array) -> None:
    """Bring some of the queries up to date; the scores become weights."""
    some = slice(*part)
    of_part = Rows(rows.acc[:, some], rows.top[:, some], rows.total[:, some], started=True)
    steps.softmax(of_part, scores)


def closed(xp: Any, rows: Rows) -> tuple[Array, Array]:
    """Return maximum and sum of the weights: 0 and 1 where nothing is seen."""
    one = rows.top.dtype.type(1)
    top = xp.where(rows.top == -np.inf, 0 * one, rows.top)
    return top, xp.where(rows.total == 0, one, rows.total)


def statistics(
    steps: Any, n: int, m: int, scored: Iterable[tuple[tuple[int, int], Array | None]]
) -> tuple[Array, Array]:
    """Return maximum and sum of the weights of m queries of n batch entries, (n, m, 1) each.

    Parameters
    ----------
    steps : _tiled.Steps
    n, m : int
    scored : iterable
        ``((begin, end), scores)`` for each tile: which of the queries, and their scores, which are
        overwritten; None where all are hidden.

    Returns
    -------
    top, total : array
        0 and 1 where nothing is seen.
    """
    rows = unseen_rows(steps, n, m)
    for part, scores in scored:
        if scores is not None:
            add_scores(steps, rows, part, scores)
    return closed(steps.xp, rows)
