"""Packed sequences on the CPU: each one is a problem with its own queries and keys.

Nothing is computed for pairs of two sequences, and only short ones are copied, to be entries of one
call. What follows from the lengths of a sequence is made once and kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from fa_cupy._bitmask import BitMask
from fa_cupy.core.attention_problem import Problem, View, batch_view
from fa_cupy.cpu import thread_pool
from fa_cupy.cpu.key_entries import SeenThrough
from fa_cupy.cpu.masks import rows as mask_rows
from fa_cupy.cpu.packed.groups import Group, grouped
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
    new_call : callable
        ``new_call(problem, q, strides)`` returns a `fa_cupy.cpu.attention.Call`, of a group of
        sequences.
    """

    def __init__(
        self,
        problem: Problem,
        out_views: Sequence[View],
        dtype: np.dtype[Any],
        new_tasks: Callable[..., Any],
        new_call: Callable[..., Any],
    ) -> None:
        self._problem, self._dtype = problem, dtype
        self._new_tasks, self._new_call = new_tasks, new_call
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
        tasks: list[tuple[float, Callable[[], Any]]] = []
        for part in self._divided(parts(keys, self._problem.q_len), arrays[4], score):
            if isinstance(part, Group):
                tasks.append((self._flop(part), partial(self._run_group, part, arrays)))
                continue
            plan, own = self._prepared(part, seen, arrays[4])
            if plan.parallel:
                plan.run(own, score)
            else:
                tasks.append((plan.cost, partial(plan.run, own, score)))
        tasks.sort(key=lambda task: -task[0])
        cost = sum(cost for cost, _ in tasks)
        thread_pool.run(tasks, lambda: _run_task, cost > _PARALLEL_FLOP)

    def _divided(
        self, found: list[Part], mask: Any, score: ScoreOperands | None
    ) -> Iterable[Group | Part]:
        """Return groups and single sequences."""
        numbered = score is not None or self._problem.dropout is not None
        if numbered or not (mask is None or isinstance(mask, np.ndarray)):
            return found
        per_pair = 2 * (self._problem.head_dim + self._problem.v_dim)
        return grouped(found, per_pair * math.prod(self._problem.batch))

    def _flop(self, group: Group) -> float:
        of_entry = math.prod((*self._problem.batch, *group.lengths))
        per_pair = 2 * (self._problem.head_dim + self._problem.v_dim)
        return float(len(group.parts) * of_entry * per_pair)

    def _run_group(self, group: Group, arrays: Sequence[Any]) -> None:
        q, k, v, bias, mask, out, lse, sinks = arrays
        axes = out.ndim
        inputs = group.inputs(self._problem, axes, (q, k, v, bias, mask), all_rows=True)
        sinks = group.numbers(sinks, axes)
        target = group.rows(out, axes) if group.adjacent else None
        key = tuple(None if x is None else (x.shape, x.strides) for x in (*inputs, sinks, target))
        call = self._plans.get(key)
        if call is None:
            given = group.problem(self._problem, inputs, sinks), inputs[0]
            call = self._new_call(*given, None if target is None else target.strides)
            self._keep(key, call)
        own, own_lse = call(*inputs, target, sinks)
        if target is None:
            group.scatter_rows(out, own)
        group.scatter_rows(lse[..., None], own_lse[..., None])

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
            return self._plan(own, part), own
        key: Any = (q.shape[-2], k.shape[-2], None if mask is None else (mask.shape, mask.strides))
        if self._problem.dropout is not None:
            key = (*key, part.number)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plan(own, part)
            self._keep(key, plan)
        return plan, own

    def _keep(self, key: Any, plan: Any) -> None:
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
        self._plans[key] = plan

    def _plan(self, own: Sequence[Any], part: Part) -> Any:
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
            dropout=problem.dropout and problem.dropout.of_sequence(part.number),
        )  # fmt: skip
        bits = mask if isinstance(mask, BitMask) else None
        if mask is not None:
            of_mask = mask if bits is None else bits.entries[..., None, None]
            alone = replace(alone, mask=batch_view(alone, of_mask, q_len, k_len))
        return self._new_tasks(alone, [out, lse], self._dtype, bits)


def _run_task(task: tuple[float, Callable[[], Any]]) -> None:
    task[1]()
