"""Gradients of attention on NumPy arrays: the tiled algorithm, spread over threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fa_cupy._bitmask import BitMask
from fa_cupy.core import arrays as core_arrays
from fa_cupy.core import attention_problem
from fa_cupy.core.plan_cache import NUMBERS, TEXTS, lookup, remember, window_key
from fa_cupy.core.sparse_bias import SparseBias, Sums
from fa_cupy.cpu import blas, key_entries, thread_pool
from fa_cupy.cpu.masks import entries, entries_backward, single
from fa_cupy.cpu.masks.tiles import MaskTiles
from fa_cupy.cpu.ordered_sum import InOrder
from fa_cupy.cpu.packed.groups import Group, grouped
from fa_cupy.cpu.tile_ops import Steps
from fa_cupy.dropout.decisions import TileDropout
from fa_cupy.keys import entries as key_parts
from fa_cupy.keys import sequences
from fa_cupy.keys.layout import KeyArrays
from fa_cupy.keys.sequences import Part
from fa_cupy.layouts import BLOCK
from fa_cupy.score.program import Operands as ScoreOperands
from fa_cupy.score.tiles import TileScore
from fa_cupy.tiled import attention_backward, batching, gradients, tile_sizes
from fa_cupy.tiled.gradients import Gradient, Operands
from fa_cupy.tiled.softcap import folds
from fa_cupy.tiled.softmax import own_share, statistics

Array = npt.NDArray[Any]
View = attention_problem.View

_NAME = "attention_backward"
_INPUTS = ("q", "k", "v")
# A task has so much work at least, more than starting a thread and the calls of NumPy for a tile
# take, until there are so many tasks. What is too little for two tasks runs in the calling thread.
_TASK_FLOP = 8e7
_LEAST_TASKS = 16
_LEAST_N = 64
# How many pairs of lengths of sequences have plans that are kept.
_MOST_PLANS = 1024
# Most keys of a tile: more would compute more scores above the diagonal in vain.
_MOST_N = 512


class Plan(NamedTuple):
    """What follows from shapes, strides, dtypes and options, and not from data."""

    problem: attention_problem.Problem
    need: tuple[str, ...]
    dtype: np.dtype[Any]  # of sums
    forms: dict[str, gradients.Form]
    tile: tile_sizes.Tile
    columns: list[tuple[int, int]]  # of tiles: (begin, end) of keys
    stacks: batching.Layout | None  # of the arrays; None where there is nothing to compute
    direct: frozenset[str]  # gradients that products are written to where they lie
    written: bool  # whether that leaves none of their elements out
    alone: bool  # whether the task of a column prepares its queries, which no other task reads
    plain: _Plain | None  # what computes stacks of one tile, if all do without the rest


def cached(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, bias: Any, mask: Any, scale: Any,
    is_causal: Any, causal_align: Any, window: Any, softcap: Any, sinks: Any, dlse: Any, need: Any,
    k_lengths: Any, q_offsets: Any, k_offsets: Any,
) -> tuple[Any, ...] | None:  # fmt: skip
    """Answer a call of `fa_cupy.attention_backward` on NumPy arrays; None where it needs more.

    As on a GPU, the key holds the arguments unchecked: only calls that were once checked are in the
    table, and only values of types that are equal where they mean the same make a key.
    """
    if not (need is None or (need.__class__ is tuple and need == _INPUTS)):
        return None
    if not (
        scale.__class__ in NUMBERS
        and softcap.__class__ in NUMBERS
        and is_causal.__class__ is bool
        and causal_align.__class__ in TEXTS
    ):
        return None
    facts = [_NAME, "numpy", scale, is_causal, causal_align, softcap, need is None]
    for x in (q, k, v, out, lse, dout):
        if type(x) is not np.ndarray:
            return None
        facts += (x.shape, x.strides, x.dtype)
    given_mask = mask
    if k_lengths is q_offsets is k_offsets is None:
        mask = single.as_array(mask)
    if not (bias is mask is window is sinks is dlse is None):
        if (side := window_key(window)) is False:
            return None
        facts.append(side)
        for x in (bias, mask, sinks, dlse):
            if not (x is None or type(x) is np.ndarray):
                return None
            facts.append(None if x is None else (x.shape, x.strides, x.dtype))
    keys = None
    if not (k_lengths is q_offsets is k_offsets is None):
        keys = key_entries.key_arrays(k_lengths, None, q_offsets, k_offsets)
        if keys is None:
            return None
        k_lengths = keys.lengths
        facts += ["keys", k_offsets is None]
        facts += [None if x is None else (x.shape, x.dtype) for x in keys]
    key = tuple(facts)
    plan, inputs, results = lookup(key), (q, k, v, bias, mask), (out, lse, dout, dlse)
    if plan is None:
        problem = attention_problem.gradient_problem(
            (*inputs[:4], given_mask), *results, _NAME, scale=scale, is_causal=is_causal,
            causal_align=causal_align, window=window, softcap=softcap, sinks=sinks,
            k_lengths=k_lengths, q_offsets=q_offsets, k_offsets=k_offsets,
        )  # fmt: skip
        if mask is not given_mask:
            problem = single.with_array(problem, mask)
        given = {"bias": bias, "sinks": sinks} if need is None else {}
        wanted = (*_INPUTS, *(name for name, x in given.items() if x is not None))
        if keys is not None:
            plan = remember(key, _PlanOfParts(problem, wanted))
        else:
            plan = remember(key, _planned(problem, inputs, results, wanted, sinks, None))
    if keys is not None:
        key_entries.check(plan.problem, keys, _NAME)
        found = plan.run(inputs, results, _empty, sinks, None, keys)
    else:
        found = _run(plan, inputs, results, np.empty, sinks)
    return tuple([found[name] for name in plan.need])


def backward(
    problem: attention_problem.Problem,
    inputs: tuple[Any, ...],
    results: tuple[Any, ...],
    need: tuple[str, ...],
    empty: Callable[..., Any],
    sinks: Array | None = None,
    score: ScoreOperands | None = None,
    keys: KeyArrays | None = None,
) -> dict[str, Array]:
    """Return the gradients named by `need`, for NumPy arrays.

    Parameters
    ----------
    problem : Problem
        From `fa_cupy.core.attention_problem.attention_problem`.
    inputs : tuple of numpy.ndarray or None
        q, k, v, bias and mask, which `problem` was made from; the bias may be a SparseBias, the
        mask a BitMask, or with offsets a tuple of one for each sequence.
    results : tuple of numpy.ndarray or None
        Output and LSE, and the gradients of both; that of the LSE may be None.
    need : tuple of str
        Of "q", "k", "v", "bias", "sinks" and, as "score.x", the arrays of a score.
    empty : callable
        ``empty(shape, dtype, like)`` returns memory for a result.
    sinks : numpy.ndarray or None
    score : Operands or None
        The score expression, if `problem` has one.
    keys : KeyArrays or None
        The key lengths or the offsets, if `problem` has them.
    """
    if keys is not None:
        return _PlanOfParts(problem, need).run(inputs, results, empty, sinks, score, keys)
    *others, bias, mask = inputs
    if isinstance(mask, BitMask) and problem.mask is not None and not isinstance(bias, SparseBias):
        seen = single.as_array(mask)
        if seen is not mask:
            inputs = (*others, bias, seen)
            problem = single.with_array(problem, seen)
    plan = _planned(problem, inputs, results, need, sinks, score)
    return _run(plan, inputs, results, empty, sinks, score)


def _planned(
    problem: attention_problem.Problem,
    inputs: tuple[Any, ...],
    results: tuple[Any, ...],
    need: tuple[str, ...],
    sinks: Array | None,
    score: ScoreOperands | None,
) -> Plan:
    """Return the plan of a call. Of its arrays only metadata are read, but for those of masks."""
    dtype = attention_problem.sum_dtype(problem.dtype)
    forms = gradients.forms(problem, inputs, need, dtype, sinks, score)
    bits = inputs[4] if isinstance(inputs[4], BitMask) else None
    tile = _tile(problem, dtype, bits is not None)
    columns = [
        (begin, min(begin + tile.tile_n, problem.k_len))
        for begin in range(0, problem.k_len, tile.tile_n)
    ]
    stacks = None
    if problem.q_len and (problem.k_len or "sinks" in need):
        seen: list[View | None] = [form.view for form in forms.values()]
        seen += [None] * (isinstance(inputs[3], SparseBias) and "bias" in need)
        entries = gradients.batch_entries(np, problem, inputs[4] if columns else None, score)
        views = gradients.views(problem, inputs, results, seen, dtype, entries)
        stacks = batching.Layout(views, _stacked(problem, tile, dtype, bits))
    names: list[str] = [name for name in ("q", "k", "v") if name in forms]
    direct = frozenset(
        name
        for name in names
        if forms[name].takes_products() and (name != "q" or len(columns) == 1)
    )
    band = problem.lower is not None or problem.upper is not None
    written = stacks is not None and len(columns) > 0 and inputs[4] is None and not band
    alone = len(columns) == 1 and bits is None and "sinks" not in need
    plain = None
    dense = stacks is not None and bits is None and inputs[3] is None
    if names and dense and _is_plain(problem, tile, len(columns)):
        plain = _Plain(problem, names, direct)
    return Plan(problem, need, dtype, forms, tile, columns, stacks, direct, written, alone, plain)


class _PlanOfParts:
    """Gradients of calls with key lengths or offsets that differ in the numbers of these alone.

    Attributes
    ----------
    problem : Problem
    need : tuple of str
    """

    def __init__(self, problem: attention_problem.Problem, need: tuple[str, ...]) -> None:
        self.problem, self.need = problem, need
        # By the lengths and how the mask lies, or by the problem: all else is the same.
        self._plans: dict[Any, Plan] = {}

    def run(
        self,
        inputs: tuple[Any, ...],
        results: tuple[Any, ...],
        empty: Callable[..., Any],
        sinks: Array | None,
        score: ScoreOperands | None,
        keys: KeyArrays,
    ) -> dict[str, Array]:
        """Return the gradients."""
        copy = partial(np.copyto, casting="unsafe")
        if keys.lengths is not None:
            backend = sequences.Backend(np, self._solve_entries, empty, copy, self._each)
            of_pair = math.prod(self.problem.batch) * _flop_of_score(self.problem)
            found = key_parts.parts(self.problem, inputs[:3], score, keys.lengths, of_pair)
            if len(found) == 1 and found[0].length == self.problem.k_len:
                alone, given = found[0].taken(self.problem, inputs)
                return self._solve_entries(alone, given, results, self.need, sinks, score)
            own = key_parts.own_gradients(self.problem, inputs[3], sinks)
            return sequences.by_parts(
                backend, self.problem, inputs, results, self.need, sinks, score, found, own
            )
        plain = score is None and self.problem.dropout is None
        plain = plain and (inputs[4] is None or isinstance(inputs[4], np.ndarray))
        # What entries of a group share would be summed over queries that are no sequence's.
        together = plain and not {"bias", "sinks"} & {*self.need}
        group = partial(self._groups, inputs, results, sinks) if together else None
        backend = sequences.Backend(np, self._solve, empty, copy, self._each, group)
        return sequences.backward(
            backend, self.problem, inputs, results, self.need, sinks, score, keys
        )

    def _groups(
        self,
        inputs: tuple[Any, ...],
        results: tuple[Any, ...],
        sinks: Array | None,
        parts: list[Part],
        found: dict[str, Array],
    ) -> list[Part]:
        """Compute short sequences as entries of calls; return the others."""
        per_pair = math.prod(self.problem.batch) * _flop_of_score(self.problem)
        divided = [*grouped(parts, per_pair)]
        tasks = [x for x in divided if isinstance(x, Group)]
        tasks.sort(key=lambda group: -len(group.parts) * math.prod(group.lengths))
        work = partial(self._add_group, inputs, results, sinks, found)
        flop = sum(len(x.parts) * math.prod(x.lengths) for x in tasks) * per_pair
        thread_pool.run(tasks, lambda: work, flop > _TASK_FLOP)
        return [x for x in divided if isinstance(x, Part)]

    def _add_group(
        self,
        inputs: tuple[Any, ...],
        results: tuple[Any, ...],
        sinks: Array | None,
        found: dict[str, Array],
        group: Group,
    ) -> None:
        axes = len(self.problem.out_shape)
        out, lse, dout, dlse = results
        given = group.inputs(self.problem, axes, inputs, all_rows=False)
        of_sinks = group.numbers(sinks, axes)
        of_rows = (
            group.rows(out, axes), group.numbers(lse, axes), group.rows(dout, axes),
            group.numbers(dlse, axes),
        )  # fmt: skip
        arrays = (*given, of_sinks, *of_rows)
        key = tuple([None if x is None else (x.shape, x.strides) for x in arrays])
        plan = self._plan_of(
            key,
            lambda: _planned(
                group.problem(self.problem, given, of_sinks), given, of_rows, self.need, of_sinks,
                None,
            ),
        )  # fmt: skip
        grads = _run(plan, given, of_rows, _empty, of_sinks)
        for name, x in grads.items():
            scatter = group.scatter_rows if name == "q" else group.scatter_keys
            scatter(found[name], x.reshape(x.shape[:1] + x.shape[axes + 1 - found[name].ndim :]))

    def _plan_of(self, key: Any, make: Callable[[], Plan]) -> Plan:
        """Return a plan that was kept, or make it and keep it."""
        plan = self._plans.get(key)
        if plan is None:
            plan = make()
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan

    def _solve(
        self,
        problem: Callable[[], attention_problem.Problem],
        inputs: Sequence[Any],
        results: Sequence[Any],
        need: tuple[str, ...],
        sinks: Array | None,
        score: ScoreOperands | None,
    ) -> dict[str, Array]:
        given, mask = (*inputs,), inputs[4]
        # The plan of a BitMask depends on the blocks that it shows, dropout on the sequence.
        if isinstance(mask, BitMask) or self.problem.dropout is not None:
            plan = _planned(problem(), given, (*results,), need, sinks, score)
        else:
            laid = None if mask is None else (mask.shape, mask.strides)
            key = inputs[0].shape[-2], inputs[1].shape[-2], laid
            plan = self._plan_of(
                key, lambda: _planned(problem(), given, (*results,), need, sinks, score)
            )
        return _run(plan, given, (*results,), _empty, sinks, score)

    def _solve_entries(
        self,
        problem: Callable[[], attention_problem.Problem],
        inputs: Sequence[Any],
        results: Sequence[Any],
        need: tuple[str, ...],
        sinks: Array | None,
        score: ScoreOperands | None,
    ) -> dict[str, Array]:
        alone, given = problem(), ((*inputs,), (*results,))
        plan = self._plan_of(alone, lambda: _planned(alone, *given, need, sinks, score))
        return _run(plan, *given, _empty, sinks, score)

    def _each(
        self, work: Callable[[Any], dict[str, Array]], parts: list[Any]
    ) -> list[dict[str, Array]]:
        """Compute large parts one after the other, each in all threads, others side by side."""
        found: dict[int, dict[str, Array]] = {}
        small, total = [], 0.0
        of_score = math.prod(self.problem.batch) * _flop_of_score(self.problem)
        for i, part in enumerate(parts):
            flop = part.pairs * of_score
            if flop > _TASK_FLOP:
                found[i] = work(part)
            else:
                small.append((flop, i))
                total += flop
        small.sort(key=lambda task: -task[0])

        def do(task: tuple[float, int]) -> None:
            found[task[1]] = work(parts[task[1]])

        thread_pool.run(small, lambda: do, total > _TASK_FLOP)
        return [found[i] for i in range(len(parts))]


def _empty(shape: Sequence[int], dtype: Any, like: Array) -> Any:
    return core_arrays.empty_laid_out(np, shape, like, dtype)


class _Task(NamedTuple):
    """Some keys of one stack of batch entries."""

    number: int
    x: Operands
    keys: tuple[int, int]


def _run(
    plan: Plan,
    inputs: tuple[Any, ...],
    results: tuple[Any, ...],
    empty: Callable[..., Any],
    sinks: Array | None = None,
    score: ScoreOperands | None = None,
) -> dict[str, Array]:
    """Return the gradients that a plan is made for."""
    grads: dict[str, Gradient | Sums] = {
        name: Gradient(np, form, form.empty(np)) for name, form in plan.forms.items()
    }
    if "bias" in plan.need and isinstance(inputs[3], SparseBias):
        grads["bias"] = Sums(inputs[3])
    inputs = inputs if plan.columns else (*inputs[:4], None)  # no key is hidden
    bits = inputs[4] if isinstance(inputs[4], BitMask) else None
    of_entries = gradients.batch_entries(np, plan.problem, bits, score)
    arrays = gradients.arrays(np, inputs, results, grads, plan.dtype, sinks, of_entries)
    stacks = [] if plan.stacks is None else [*plan.stacks.stacks(np, arrays)]
    near = bool(stacks) and _all_near(results[1], attention_backward.least_far(plan.problem))
    with np.errstate(all="ignore"):
        if plan.plain is not None and near:
            _add_plain(plan, plan.plain, stacks, grads)
        main = Steps.unused(plan.dtype)
        if plan.plain is None or not near:
            for name, grad in grads.items():
                if isinstance(grad, Gradient) and not (plan.written and name in plan.direct):
                    grad.clear()
            found = _operands(plan, stacks, inputs, grads, score, near)
            _add_all(plan, found, main, _Entries(plan.problem, bits, inputs[3]))
        answer = gradients.finished(main, plan.need, grads, empty, score)
    main.keep()
    return answer


def _all_near(lse: Array, least: float) -> bool:
    """Whether no row is far, or sees nothing, or is NaN."""
    squares = blas.sum_of_squares(lse)
    if squares is not None and squares < least * least:
        return True
    return bool(lse.min() > -least and lse.max() < least)


def _is_plain(problem: attention_problem.Problem, tile: tile_sizes.Tile, columns: int) -> bool:
    """Whether a stack is one tile of scores that have only a scale, and shares nothing."""
    if not blas.multiplies_stacks(attention_problem.sum_dtype(problem.dtype)):
        return False
    if columns != 1 or problem.q_len > tile.tile_m or not problem.head_dim * problem.v_dim:
        return False
    if problem.score is not None or problem.softcap or problem.dropout is not None:
        return False
    # A product times a larger scale may have lost digits, and one times 0 is never computed.
    if not (abs(problem.scale) <= 1 and folds(problem.scale) and problem.scale):
        return False
    shared = [
        n > 1 and step == 0
        for x in (problem.q, problem.k, problem.v)
        for n, step in zip(x.shape[:-2], x.strides[:-2], strict=True)
    ]
    return not any(shared)


class _Plain:
    """Gradients of stacks that are one tile each, by the formulas of `tiled.attention_backward`.

    Each step is one operation on the whole stack. The scale is a factor of products, and what is
    subtracted from a product is where it is added to.

    Parameters
    ----------
    problem : Problem
        That `_is_plain`.
    names : sequence of str
        Of the gradients.
    direct : frozenset of str
        Those that products can be written to.
    """

    def __init__(
        self, problem: attention_problem.Problem, names: list[str], direct: frozenset[str]
    ) -> None:
        self._problem, self._names, self._direct = problem, names, direct
        self._products: dict[Any, dict[str, Any]] = {}

    def add(self, steps: Steps, stack: list[Any]) -> bool:
        """Write the gradients of one stack; return whether they are finite, and so right."""
        problem = self._problem
        q, k, v, _, mask, out, dout, lse, dlse, _, _, *grads = stack
        operands = zip(("q", "k", "v", "dout"), (q, k, v, dout), strict=True)
        q, k, v, dout = (steps.operand(name, x) for name, x in operands)
        shape = (*q.shape[:2], k.shape[1])
        weights, dscores = steps.scratch("scores", shape), steps.scratch("dscores", shape)
        places = {
            name: grad if name in self._direct else steps.scratch(f"of_{name}", grad.shape)
            for name, grad in zip(self._names, grads, strict=False)  # those of sinks come last
        }
        key = (len(q), q.strides, k.strides, v.strides, dout.strides)
        products = self._products.get(key)
        if products is None:
            products = self._made(q, k, v, dout, weights, dscores, places)
            self._products[key] = products
        if not products:  # of batch entries that are too far from each other
            return False
        shift = steps.scratch("shift", lse.shape)
        np.copyto(weights, np.negative(lse, out=shift))
        products["scores"](q, k, weights)
        if problem.lower is not None or problem.upper is not None:
            steps.band_scores(weights, 0, problem.lower, problem.upper)
        if mask is not None:
            steps.mask_scores(weights, mask)
        np.exp(weights, out=weights)
        if "v" in places:
            products["v"](weights, dout, places["v"])
        if "q" in places or "k" in places:
            self._start(steps, out, dout, dlse, dscores)
            products["dscores"](dout, v, dscores)
            np.multiply(dscores, weights, out=dscores)
            if "q" in places:
                products["q"](dscores, k, places["q"])
            if "k" in places:
                products["k"](dscores, q, places["k"])
        for name, grad in zip(self._names, grads, strict=False):
            if name not in self._direct:
                np.copyto(grad, places[name])
        return all(steps.finite(place) for place in places.values())

    @staticmethod
    def _start(steps: Steps, out: Array, dout: Array, dlse: Array | None, dscores: Array) -> None:
        """Set gradients of scores to what is subtracted from the product: -sum(dout * out)."""
        terms, base = steps.scratch("terms", out.shape), steps.scratch("base", (*out.shape[:2], 1))
        np.multiply(steps.operand("out", out), dout, out=terms)
        steps.sum_rows(terms, base)
        if dlse is not None:
            np.subtract(base, dlse, out=base)
        np.copyto(dscores, np.negative(base, out=base))

    def _made(
        self, q: Array, k: Array, v: Array, dout: Array, weights: Array, dscores: Array,
        places: dict[str, Array],
    ) -> dict[str, Any]:  # fmt: skip
        """Return calls for products of such arrays, which transpose some; none if one cannot be."""
        scale, one = self._problem.scale, 1.0
        wanted = {
            "scores": (q, k.swapaxes(1, 2), weights, scale, True),
            "dscores": (dout, v.swapaxes(1, 2), dscores, one, True),
            "q": (dscores, k, places.get("q"), scale, False),
            "k": (dscores.swapaxes(1, 2), q, places.get("k"), scale, False),
            "v": (weights.swapaxes(1, 2), dout, places.get("v"), one, False),
        }
        found = {
            name: blas.scaled_products(a, b, out, factor, add)
            for name, (a, b, out, factor, add) in wanted.items()
            if out is not None
        }
        return {} if None in found.values() else found


def _add_plain(plan: Plan, plain: _Plain, stacks: list[list[Any]], grads: dict[str, Any]) -> None:
    """Compute the gradients of stacks that are one tile each."""
    problem, (keys,), tile_m, names = plan.problem, plan.columns, plan.tile.tile_m, [*grads]

    def work(stack: list[Any]) -> None:
        steps = Steps.unused(plan.dtype)
        with np.errstate(all="ignore"):
            if not plain.add(steps, stack):
                direct = frozenset(names) - {"sinks"}
                x = gradients.operands(stack, names, near=True, direct=direct)
                _prepare(steps, x, tile_m)
                attention_backward.begin_again(steps, problem, x, keys, tile_m)
        steps.keep()

    flop = sum(len(stack[0]) for stack in stacks) * _flop_of_entry(problem)
    thread_pool.run(stacks, lambda: work, len(stacks) > 1 and flop > _TASK_FLOP)
    if "sinks" in names:
        grads["sinks"].clear()
        steps = Steps.unused(plan.dtype)
        for stack in stacks:
            x = gradients.operands(stack, names, near=True)
            _prepare(steps, x, tile_m)
            attention_backward.add_to_sinks(steps, x)
        steps.keep()


def _add_all(plan: Plan, stacks: list[Operands], main: Steps, pairs: _Entries) -> None:
    """Add everything to the gradients of all stacks."""
    stacks = _prepared(plan, stacks, main, pairs)
    _add_columns(plan, stacks, main)
    left = []
    for x in stacks:
        attention_backward.add_to_sinks(main, x)
        found = pairs.of(x)
        if found is not None:
            turned = partial(pairs.turned, x)
            if not entries_backward.add(main, plan.problem, x, found, turned):
                left.append(_of_sparse_blocks(plan, x, found, main))
    if left:
        _add_columns(plan, left, main)


class _Entries:
    """The entries of sparse blocks, by matrix, made when they are first asked for."""

    def __init__(self, problem: attention_problem.Problem, mask: Any, bias: Any) -> None:
        self._problem, self._bias = problem, bias
        in_pairs = isinstance(mask, BitMask) and _in_pairs(problem, mask)
        self._mask = mask if in_pairs else None
        self._found: dict[int, entries.Entries] = {}
        self._turned: dict[int, entries_backward.Turned] = {}

    def of(self, x: Operands) -> entries.Entries | None:
        """Return those of a stack of batch entries; None without any."""
        if self._mask is None or not isinstance(x.mask, MaskTiles):
            return None
        matrix = x.mask.matrix
        if matrix not in self._found:
            parts = self._problem, self._mask, matrix, self._bias
            self._found[matrix] = entries.Entries.of(*parts)
        return self._found[matrix]

    def turned(self, x: Operands) -> entries_backward.Turned:
        """Return those of a stack in the order of keys."""
        assert isinstance(x.mask, MaskTiles)
        matrix, found = x.mask.matrix, self.of(x)
        assert found is not None
        if matrix not in self._turned:
            self._turned[matrix] = entries_backward.Turned.of(found, self._problem.k_len)
        return self._turned[matrix]


def _in_pairs(problem: attention_problem.Problem, mask: BitMask) -> bool:
    """Whether sparse blocks of a mask are computed pair by pair; dropout is one of tiles."""
    return problem.dropout is None and entries.any_of(mask)


def _of_sparse_blocks(plan: Plan, x: Operands, found: entries.Entries, steps: Steps) -> Operands:
    """Return operands whose tiles have the sparse blocks of the mask alone.

    Tiles round scores otherwise than pairs do, which the log-sum-exp comes from. So the weights
    that tiles give to the sparse blocks of a query are scaled to what those of the pairs sum to.
    """
    problem, tile_m, q_len = plan.problem, plan.tile.tile_m, x.q.shape[1]
    least = attention_backward.least_far(problem)
    of_blocks = _with_sparse_blocks(x)
    dense = replace(x, k=entries.dense_of(x.k, steps.dtype))
    top = attention_backward.finite_or_0(np, x.lse).astype(steps.dtype)
    total = np.ones_like(top)

    def new_worker() -> Callable[[int], None]:
        own = Steps(steps.dtype)

        def work(begin: int) -> None:
            rows = begin, min(begin + tile_m, q_len)
            part, size = slice(*rows), (len(x.q), rows[1] - begin)
            pairs = partial(entries.padded, own, problem, dense, found, rows)
            columns, of_sparse = (_columns_of(plan, given, rows) for given in (x, of_blocks))
            with np.errstate(all="ignore"):
                of_all = attention_backward.row_statistics(
                    own, problem, x, rows, columns, tile_m, pairs()
                )
                tiles = attention_backward.row_scores(
                    own, problem, of_blocks, rows, of_sparse, tile_m
                )
                of_pairs, of_tiles = (
                    statistics(own, *size, (scored[:2] for scored in some))
                    for some in (pairs(), tiles)
                )
                share = own_share(np, x.lse[:, part], *of_all, least)
                share *= of_pairs[1] / of_all[1] * np.exp(of_pairs[0] - of_all[0])
                share = np.minimum(share, 1)  # it may be anything where no pair is seen
                seen = np.isfinite(x.lse[:, part])
                top[:, part] = np.where(seen, of_tiles[0], top[:, part])
                total[:, part] = np.where(seen, of_tiles[1] / share, total[:, part])

        return work

    parallel = 2 * len(x.q) * q_len * problem.k_len * problem.head_dim > _TASK_FLOP
    thread_pool.run([*range(0, q_len, tile_m)], new_worker, parallel)
    return replace(of_blocks, top=top, total=total)


def _with_sparse_blocks(x: Operands) -> Operands:
    """Return operands whose tiles have the sparse blocks alone; sinks are with the other blocks."""
    assert isinstance(x.mask, MaskTiles)
    assert isinstance(x.columns, MaskTiles)
    mask, columns = (of.only(words=False, sparse=True) for of in (x.mask, x.columns))
    return replace(x, mask=mask, columns=columns, direct=frozenset(), sinks=None)


def _columns_of(plan: Plan, x: Operands, rows: tuple[int, int]) -> Any:
    """Return the columns of tiles that queries see: nearly all tiles of a graph are empty."""
    return x.mask.columns(rows, plan.columns) if isinstance(x.mask, MaskTiles) else plan.columns


def _add_columns(plan: Plan, stacks: list[Operands], main: Steps) -> None:
    """Add what all tiles add."""
    problem, tile = plan.problem, plan.tile
    sums = InOrder(partial(gradients.accumulate, main))
    tasks: list[_Task] = []
    scores = 0
    for x in stacks:
        in_order = x.grads.keys() - x.direct
        of_tiles, of_columns = in_order - {"k", "v"}, in_order & {"k", "v"}
        for keys in plan.columns:
            task = _Task(len(tasks), x, keys)
            tiles = [*attention_backward.row_tiles(problem, keys, tile.tile_m, x.columns)]
            for rows in tiles:
                scores += x.q.shape[0] * (rows[1] - rows[0]) * (keys[1] - keys[0])
                for name in of_tiles:
                    sums.expect(_place(task, name, rows, tile), task.number)
            if tiles:
                for name in of_columns:
                    sums.expect(_place(task, name, (0, 0), tile), task.number)
                tasks.append(task)

    flop = scores * (6 * problem.head_dim + 4 * problem.v_dim)
    parallel = len(tasks) > 1 and flop > _TASK_FLOP

    def new_worker() -> Callable[[_Task], None]:
        steps = Steps(main.dtype) if parallel else main

        def work(task: _Task) -> None:
            def add(name: str, rows: tuple[int, int], term: Array | None) -> None:
                target = gradients.target(task.x, name, rows, task.keys)
                if term is not None:
                    term = gradients.reduced(target, term)
                sums.add(_place(task, name, rows, tile), task.number, target, term)

            with np.errstate(all="ignore"):
                if plan.alone:
                    _prepare(steps, task.x, tile.tile_m)
                attention_backward.column(steps, problem, task.x, task.keys, tile.tile_m, add)

        return work

    thread_pool.run(tasks, new_worker, parallel)


def _prepare(steps: Steps, x: Operands, tile_m: int) -> None:
    for begin in range(0, x.q.shape[1], tile_m):
        attention_backward.prepare(steps, x, begin, min(begin + tile_m, x.q.shape[1]))


def _prepared(plan: Plan, stacks: list[Operands], steps: Steps, pairs: _Entries) -> list[Operands]:
    """Return the stacks with what is known of a query before the first column of tiles.

    If `plan.alone`, that is only what is known of far rows.
    """
    problem, tile_m = plan.problem, plan.tile.tile_m
    ready, tasks, scores = [], [], 0
    for x in stacks:
        if not plan.alone:
            _prepare(steps, x, tile_m)
        far: list[tuple[int, int]] = []
        if x.top is None:
            x, far = attention_backward.far_rows(steps, problem, x, tile_m)
        ready.append(x)
        tasks += [(x, rows, pairs.of(x)) for rows in far]
        scores += sum(x.q.shape[0] * (end - begin) * problem.k_len for begin, end in far)

    def new_worker() -> Callable[[Any], None]:
        own = Steps(steps.dtype)

        def work(task: tuple[Operands, tuple[int, int], entries.Entries | None]) -> None:
            x, rows, found = task
            more: Any = ()
            if found is not None:
                dense = replace(x, k=entries.dense_of(x.k, own.dtype))
                more = entries.padded(own, problem, dense, found, rows)
            seen = _columns_of(plan, x, rows)
            with np.errstate(all="ignore"):
                attention_backward.keep_apart(own, problem, x, rows, seen, tile_m, more)

        return work

    if tasks:
        parallel = 2 * scores * problem.head_dim > _TASK_FLOP
        thread_pool.run(tasks, new_worker, parallel)
    return ready


def _place(task: _Task, name: str, rows: tuple[int, int], tile: tile_sizes.Tile) -> tuple[Any, ...]:
    """Name the part of a gradient that a term is added to: parts are equal or disjoint."""
    grad = task.x.grads[name]
    if isinstance(grad, Sums):
        return name, id(grad), rows[0] // tile.tile_m, task.keys[0]
    all_pairs = name not in ("q", "k", "v")  # the gradient has an axis for rows, and one for keys
    row = rows[0] // tile.tile_m if not all_pairs or grad.strides[1] else 0
    key = task.keys[0] if name != "q" and (not all_pairs or grad.strides[2]) else 0
    return name, grad.ctypes.data, row, key


def _tile(
    problem: attention_problem.Problem, dtype: np.dtype[Any], sparse: bool
) -> tile_sizes.Tile:
    most, entries = _MOST_N, math.prod(problem.batch)
    if problem.lower is not None and problem.upper is not None:
        # A tile's keys are together seen by tile_n queries more than each of them is.
        most = min(most, max(_LEAST_N, problem.upper - problem.lower))
    wanted = _LEAST_TASKS if sparse else _tasks(problem)
    while most > _LEAST_N and entries * math.ceil(problem.k_len / most) < wanted:
        most //= 2
    # Keys and queries have changed places: a column of tiles reads all queries.
    tile_n, tile_m = tile_sizes.tile_sizes(
        problem.head_dim + problem.v_dim,
        problem.head_dim + problem.v_dim,
        dtype.itemsize,
        tile_sizes.CPU_CACHE_BYTES,
        problem.k_len,
        problem.q_len,
        score_itemsize=2 * dtype.itemsize,  # weights and gradients of scores
        max_m=most,
    )
    if sparse:  # edges on those of blocks
        return tile_sizes.Tile(
            max(1, tile_m // BLOCK) * BLOCK, BLOCK if tile_n > _LEAST_N else _LEAST_N
        )
    columns = math.ceil(problem.k_len / tile_n) or 1
    return tile_sizes.Tile(tile_m, math.ceil(problem.k_len / columns / 16) * 16 or 16)


def _tasks(problem: attention_problem.Problem) -> int:
    """Return how many tasks the work is worth, as if all keys were seen."""
    flop = math.prod(problem.batch) * _flop_of_entry(problem)
    return max(1, min(_LEAST_TASKS, int(flop / _TASK_FLOP)))


def _flop_of_entry(problem: attention_problem.Problem) -> int:
    return problem.q_len * problem.k_len * _flop_of_score(problem)


def _flop_of_score(problem: attention_problem.Problem) -> int:
    return 6 * problem.head_dim + 4 * problem.v_dim


def _stacked(
    problem: attention_problem.Problem,
    tile: tile_sizes.Tile,
    dtype: np.dtype[Any],
    bits: BitMask | None,
) -> int:
    """Return how many batch entries are stacked at most."""
    if bits is not None and entries.differ(bits):
        return 1
    whole = tile_sizes.footprint(
        tile.tile_n, tile.tile_m, problem.head_dim, problem.v_dim, 2 * dtype.itemsize
    )
    wanted = _tasks(problem) if bits is None else _LEAST_TASKS
    return max(1, min(tile_sizes.CPU_CACHE_BYTES // whole, math.prod(problem.batch) // wanted))


def _operands(
    plan: Plan,
    stacks: list[list[Any]],
    inputs: tuple[Any, ...],
    grads: dict[str, Gradient | Sums],
    score: ScoreOperands | None,
    near: bool,
) -> list[Operands]:
    """Return the stacks of batch entries."""
    bits = inputs[4] if isinstance(inputs[4], BitMask) else None
    of = None if score is None else partial(_tile_score, score, plan.dtype)
    dropout = plan.problem.dropout
    dropped = None if dropout is None else partial(TileDropout, dropout)
    one_by_one = bits is not None and _in_pairs(plan.problem, bits)
    of_mask = partial(MaskTiles, sparse=not one_by_one)
    found = []
    for stack in stacks:
        sparse = gradients.sparse(bits, stack, of_mask)
        x = gradients.operands(
            stack, [*grads], *sparse, score=of, dropout=dropped, near=near, direct=plan.direct
        )
        if isinstance(inputs[3], SparseBias):
            x = replace(x, bias=inputs[3])
            if "bias" in grads:
                x.grads["bias"] = grads["bias"]
        found.append(x)
    return found


def _tile_score(score: ScoreOperands, dtype: np.dtype[Any], b: Array, h: Array) -> TileScore:
    return TileScore(np, score, b, h, dtype)
