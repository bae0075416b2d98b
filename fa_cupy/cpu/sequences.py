"""Packed sequences on the CPU: each one is a problem with its own queries and keys.

Nothing is computed for pairs of two sequences, and nothing is copied. What follows from the lengths
of a sequence is made once and kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fa_cupy._bitmask import BitMask
from fa_cupy.core.attention_problem import Problem, View, batch_view
from fa_cupy.cpu import thread_pool
from fa_cupy.cpu.key_entries import SeenThrough
from fa_cupy.cpu.masks import rows as mask_rows
from fa_cupy.keys.layout import KeyArrays
from fa_cupy.keys.sequences import Part, band_of, parts
from fa_cupy.score.program import Operands as ScoreOperands

Array = npt.NDArray[Any]

# How many pairs of lengths have plans that are kept, and the work below which sequences together
# run in the calling thread.
_MOST_PLANS = 1024
_PARALLEL_FLOP = 5e7


class SequenceTasks:
    """The tasks of one kind of call with offsets.

    Sequences that are large use all threads, one after the other. Each of the others is a task.

    Parameters
    ----------
    problem : Problem
    out_views : sequence of View
        Of the output and the LSE (with an axis of size 1 behind), over its batch axes.
    dtype : numpy.dtype
        Of sums.
    new_tasks : callable
        ``new_tasks(problem, [out, lse], dtype, mask)`` returns the tasks of one sequence, with the
        attributes `cost` and `parallel` and the method ``run(arrays, score)``.
    """

    def __init__(
        self,
        problem: Problem,
        out_views: Sequence[View],
        dtype: np.dtype[Any],
        new_tasks: Callable[..., Any],
    ) -> None:
        self._problem, self._dtype, self._new_tasks = problem, dtype, new_tasks
        views = [problem.q, problem.k, problem.v, problem.bias, None, *out_views, problem.sinks]
        self._views = [None if view is None else SeenThrough(view) for view in views]
        # By the lengths and how the mask lies: all else is the same.
        self._plans: dict[Any, Any] = {}

    def run(self, arrays: Sequence[Any], score: ScoreOperands | None, keys: KeyArrays) -> None:
        """Do all tasks: `arrays` are q, k, v, bias, mask, out, lse and sinks."""
        seen = [
            None if x is None or view is None else view(x)
            for x, view in zip(arrays, self._views, strict=True)
        ]
        tasks = []
        for part in parts(keys, self._problem.q_len):
            plan, own = self._prepared(part, seen, arrays[4])
            if plan.parallel:
                plan.run(own, score)
            else:
                tasks.append((plan, own))
        tasks.sort(key=lambda task: -task[0].cost)

        def work(task: tuple[Any, list[Any]]) -> None:
            plan, own = task
            plan.run(own, score)

        cost = sum(plan.cost for plan, _ in tasks)
        thread_pool.run(tasks, lambda: work, cost > _PARALLEL_FLOP)

    def _prepared(self, part: Part, seen: Sequence[Any], mask: Any) -> tuple[Any, list[Any]]:
        """Return the tasks of a sequence and its arrays."""
        rows, keys = part.rows, part.keys
        q, k, v, bias, _, out, lse, sinks = seen
        q, out, lse = (x[..., rows, :] for x in (q, out, lse))
        k, v = (x[..., keys, :] for x in (k, v))
        if bias is not None:
            bias = bias[..., rows, keys]
        if sinks is not None:
            sinks = sinks[..., rows, :]
        mask = part.mask(mask)
        if isinstance(mask, BitMask) and mask._grid.is_small:
            mask = mask_rows.of_small(mask)
        own = [q, k, v, bias, mask, out, lse, sinks]
        if isinstance(mask, BitMask):  # its plan depends on the blocks that it shows
            return self._plan(own), own
        key = (q.shape[-2], k.shape[-2], None if mask is None else (mask.shape, mask.strides))
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plan(own)
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan, own

    def _plan(self, own: Sequence[Any]) -> Any:
        problem, mask = self._problem, own[4]
        views: list[Any]
        views = [None if x is None else View(x.shape, x.strides) for x in (*own[:4], *own[5:])]
        q, k, v, bias, out, lse, sinks = views
        q_len, k_len = own[0].shape[-2], own[1].shape[-2]
        lower, upper = band_of(problem, q_len, k_len)
        alone = replace(
            problem, q_len=q_len, k_len=k_len, q=q, k=k, v=v, bias=bias, mask=None, sinks=sinks,
            out_shape=(*problem.out_shape[:-2], q_len, problem.v_dim), lower=lower, upper=upper,
            offsets=None, band_from_end=False,
        )  # fmt: skip
        bits = mask if isinstance(mask, BitMask) else None
        if mask is not None:
            of_mask = mask if bits is None else bits.entries[..., None, None]
            alone = replace(alone, mask=batch_view(alone, of_mask, q_len, k_len))
        return self._new_tasks(alone, [out, lse], self._dtype, bits)
