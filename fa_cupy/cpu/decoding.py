"""Attention of single queries, as a decoder asks for them token by token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fa_cupy.core.attention_problem import Problem, View


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
