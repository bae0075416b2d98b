"""Attention of few queries to many keys, as a decoder asks for it token by token.

Reading keys and values is what takes the time: heads that share keys are made rows of one product,
and where there are fewer batch entries than tasks, the keys are split over tasks. Each part of the
keys has an output, a maximum and a sum of weights of its own, and these are combined in the order
of the keys.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fa_cupy.core.attention_problem import Problem, View
from fa_cupy.cpu.tile_ops import Steps
from fa_cupy.tiled import attention
from fa_cupy.tiled.softmax import Rows

Array = npt.NDArray[Any]

# Keys are split for so many queries at most, and into parts of so many keys at least.
_MOST_QUERIES = 64
_LEAST_KEYS = 2048


def heads_as_queries(problem: Problem, out: View, lse: View) -> tuple[Problem, View, View]:
    """Return a problem whose queries are the heads that share keys, if each has one query.

    They are then rows of one product, and the keys are read once for all of them.

    Parameters
    ----------
    problem : Problem
    out, lse : View
        Of the output (*batch, q_len, v_dim) and of the LSE (*batch, q_len, 1).
    """
    if problem.q_len != 1 or not problem.batch or problem.score is not None:
        return problem, out, lse
    if problem.dropout is not None:  # it is one of queries
        return problem, out, lse
    if problem.lower is not None or problem.upper is not None:
        return problem, out, lse
    axis = len(problem.batch) - 1
    if problem.batch[axis] == 1 or problem.k.strides[axis] or problem.v.strides[axis]:
        return problem, out, lse

    def rows(view: View | None) -> Any:
        """Return a view whose last batch axis takes the place of the axis of queries."""
        if view is None:
            return None
        return View(*((*x[: axis + 1], *x[axis + 2 :]) for x in view))

    def once(view: View) -> View:
        return View(*((*x[:axis], *x[axis + 1 :]) for x in view))

    turned = replace(
        problem, batch=problem.batch[:-1], q_len=problem.batch[-1], q=rows(problem.q),
        k=once(problem.k), v=once(problem.v), bias=rows(problem.bias), mask=rows(problem.mask),
        sinks=rows(problem.sinks),
    )  # fmt: skip
    return turned, rows(out), rows(lse)


def key_bounds(problem: Problem, tasks: int, wanted: int) -> list[tuple[int, int]]:
    """Return (begin, end) of the keys of each task, if there are so many with all keys each."""
    count = 1
    if problem.q_len <= _MOST_QUERIES and problem.score is None and problem.dropout is None:
        count = max(1, min(wanted // tasks, problem.k_len // _LEAST_KEYS))
    ends = [problem.k_len * i // count for i in range(count + 1)]
    return [*itertools.pairwise(ends)]


class Part:
    """Attention of all queries of stacked batch entries to a part of the keys.

    Parameters
    ----------
    problem : Problem
    x : Operands
        With all keys.
    dtype : numpy.dtype
        Of sums.
    begin, end : int
        The keys.
    """

    def __init__(
        self, problem: Problem, x: attention.Operands, dtype: np.dtype[Any], begin: int, end: int
    ) -> None:
        lower, upper = (
            None if bound is None else bound - begin for bound in (problem.lower, problem.upper)
        )
        self._problem = replace(problem, k_len=end - begin, lower=lower, upper=upper)
        keys = (slice(None), slice(None), slice(begin, end))
        self.out = np.empty(x.out.shape, dtype)
        self.top, self.total = np.empty((2, *x.lse.shape), dtype)
        self._x = replace(
            x, k=x.k[:, begin:end], v=x.v[:, begin:end], sinks=None, out=self.out,
            bias=None if x.bias is None else x.bias[keys],
            mask=None if x.mask is None else x.mask[keys], lse=np.empty_like(self.top),
        )  # fmt: skip
        self.finite = False

    def attend(self, steps: Steps, tile_n: int) -> None:
        """Compute this part."""
        rows = 0, self._problem.q_len
        self.finite = attention.attend(steps, self._problem, self._x, *rows, tile_n, self._note)

    def _note(self, rows: Rows) -> None:
        if not rows.started:
            attention.start_empty(rows)
        np.copyto(self.top, rows.top)
        np.copyto(self.total, rows.total)


def combine(
    steps: Steps, problem: Problem, x: attention.Operands, parts: Sequence[Part], tile_n: int
) -> None:
    """Write output and LSE of all keys, given what the parts of the keys have."""
    tops, totals = [part.top for part in parts], [part.total for part in parts]
    sinks = attention.sinks_of(steps, x, 0, problem.q_len)
    if sinks is not None:
        tops.append(sinks)
        totals.append(np.ones_like(sinks))
    top = functools.reduce(np.maximum, tops)
    shift = np.where(top == -np.inf, 0, top)  # -inf - -inf would be NaN
    weights = [total * np.exp(one - shift) for one, total in zip(tops, totals, strict=True)]
    total = functools.reduce(np.add, weights)
    np.add(top, np.log(total), out=x.lse)
    np.copyto(total, 1, where=total == 0)
    found = np.zeros_like(parts[0].out)
    for part, weight in zip(parts, weights, strict=False):
        np.add(found, part.out * (weight / total), out=found)
    steps.store(x.out, found)
    if not (all(part.finite for part in parts) and steps.finite(found)):
        attention.attend_exactly(steps, problem, x, 0, problem.q_len, tile_n)
