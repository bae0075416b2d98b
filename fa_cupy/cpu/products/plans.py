"""Plans of causal products: what follows from the shapes of a call is derived once.

Checks, views of arrays and tasks take longer than a product of few rows. So a call of a kind that
was seen before goes straight to its plan, which sees every array as a stack of batch entries by one
`reshape`. A product of one row has a plan of its own, `fa_cupy.cpu.products.single_step.Step`.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from fa_cupy.core import arrays, linear_problem
from fa_cupy.core.plan_cache import UNKNOWN, lookup, remember
from fa_cupy.cpu.products import feature_maps, single_step
from fa_cupy.cpu.products.executor import Machine
from fa_cupy.tiled import chunked_scan, segmented_scan
from fa_cupy.tiled.chunks import Operand, Read, Steps

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
# Bytes of an array that may be copied, where it is not a stack as it lies in memory.
_MOST_COPIED = 1 << 20


def key_of(name: str, q: Any, k: Any, v: Any, initial: Any, *options: Any) -> Any:
    """Return what a call looks like; None if it is none of NumPy arrays."""
    if not (type(k) is type(v) is type(q) is np.ndarray):
        return None
    facts = q.shape, q.strides, q.dtype, k.shape, k.strides, k.dtype, v.shape, v.strides, v.dtype
    if initial is None:
        return name, facts, options
    if type(initial) is not np.ndarray:
        return None
    return name, facts, initial.shape, initial.dtype, options


def plan_of(
    key: Any, problem: linear_problem.Product, q: Array, k: Array, v: Array,
    initial: Array | None, *, feature: str | None = None, eps: float | None = None,
    gradients: bool = False,
) -> Any:  # fmt: skip
    """Return the plan of a call, made now unless it is known; None for a call without a plan.

    Parameters
    ----------
    key : object
        From `key_of`.
    problem : Product
    q, k, v, initial : numpy.ndarray or None for the last
        The arrays that it was made from.
    feature : str or None
        Name of a feature map.
    eps : float or None
        Added to the sum of weights that the output is divided by; None for no division.
    gradients : bool
        Whether gradients are wanted, and no product.
    """
    plan = UNKNOWN if key is None else lookup(key, UNKNOWN)
    if plan is not UNKNOWN:
        return plan
    plan = None
    if is_plain(problem, q, k, v, initial):
        if problem.q_len == problem.k_len == 1 and not gradients:
            plan = single_step.step_for(problem, q, k, v, feature, eps)
        elif _has_one_segment(problem, k) and all(map(is_stack_or_small, (q, k, v))):
            plan = Gradients(problem, q, k, v)
            if not gradients:
                plan = Scan(problem, q, k, v, feature, eps)
    return plan if key is None else remember(key, plan)


def is_plain(
    problem: linear_problem.Product, q: Array, k: Array, v: Array, initial: Array | None
) -> bool:
    """Whether queries of one state follow each other: there is one of each, or a group of heads."""
    batch, own = problem.out_shape[:-2], k.shape[:-2]
    if v.shape[:-2] != own or q.shape[:-2] != batch:
        return False
    tail = 2 if problem.offsets is None else 3
    if initial is not None and initial.shape[:-tail] != own:
        return False
    if len(own) != len(batch) or own[:-1] != batch[:-1]:
        return False
    return 0 not in (*batch, problem.q_len, problem.k_len, problem.qk_dim, problem.v_dim)


def _has_one_segment(problem: linear_problem.Product, k: Array) -> bool:
    return Machine.segments(problem.k_len, math.prod(k.shape[:-2])) == 1


def is_stack_or_small(x: Array) -> bool:
    """Whether an array is a stack of batch entries as it lies in memory, or little to copy."""
    return x.nbytes <= _MOST_COPIED or _is_stack(x)


def _is_stack(x: Array) -> bool:
    """Whether one stride steps through all batch axes."""
    axes = [(n, s) for n, s in zip(x.shape[:-2], x.strides[:-2], strict=True) if n != 1]
    return all(outer[1] == n * stride for outer, (n, stride) in itertools.pairwise(axes))


class _Results:
    """New arrays of one shape, laid out in memory as another array is."""

    def __init__(self, shape: Shape, like: Array, dtype: np.dtype[Any], stack: Shape) -> None:
        order = arrays.memory_order(shape, like)
        self._memory, self._dtype = [shape[axis] for axis in order], dtype
        plain = order == [*range(len(order))]
        self._axes = None if plain else [order.index(axis) for axis in range(len(order))]
        self._stack = stack

    def new(self) -> Array:
        """Return uninitialised memory."""
        found = np.empty(self._memory, self._dtype)
        return found if self._axes is None else found.transpose(self._axes)

    def places(self, out: Array) -> Array:
        """Return `out` as a stack, or a stack in other memory."""
        if out.flags.c_contiguous or _is_stack(out):
            return out.reshape(self._stack)
        return np.empty(self._stack, self._dtype)

    @staticmethod
    def finish(out: Array, places: Array) -> Array:
        """Return `out`, with what is in other memory."""
        if not (out.flags.c_contiguous or _is_stack(out)):
            np.copyto(out, places.reshape(out.shape))
        return out


class _Plan:
    """How the arrays of a call are seen as stacks (n, ...), and how these are cut into tasks."""

    products = 1  # so many are as much work

    def __init__(self, problem: linear_problem.Product, q: Array, k: Array, v: Array) -> None:
        n = math.prod(k.shape[:-2])
        copies = math.prod(q.shape[:-2]) // n
        lead = (n, copies) if copies > 1 else (n,)
        self.q, self.k, self.v = (*lead, *q.shape[-2:]), (n, *k.shape[-2:]), (n, *v.shape[-2:])
        self.out = (*lead, *problem.out_shape[-2:])
        self.state = (n, *problem.state_shape[k.ndim - 2 :])  # of packed sequences, one each
        self.state_shape, self.dtype = problem.state_shape, problem.state_dtype
        self.machine = Machine(self.dtype, self.products)
        largest = self.machine.largest(problem, n)
        self.tasks = [slice(i, i + largest) for i in range(0, n, largest)]
        self.flop = segmented_scan.flop(problem)

    def states(self, array: Array | None) -> Array | None:
        """Return states as a stack."""
        return None if array is None else array.reshape(self.state)


class Scan(_Plan):
    """A causal product, or linear attention; see `plan_of`."""

    def __init__(
        self, problem: linear_problem.Product, q: Array, k: Array, v: Array, feature: str | None,
        eps: float | None,
    ) -> None:  # fmt: skip
        super().__init__(problem, q, k, v)
        self._results = _Results(problem.out_shape, q, problem.dtype, self.out)
        self._feature = None if feature is None else feature_maps.IN_PLACE[feature]
        self._finish = None if eps is None else normaliser(eps, self.dtype)

    def __call__(
        self, q: Array, k: Array, v: Array, initial: Array | None, out: Array | None,
        return_state: bool, reverse: bool = False, is_causal: bool = True,
    ) -> tuple[Array, Array | None]:  # fmt: skip
        """Return the output, which is `out` where that is given, and the state if it is wanted."""
        x, a, b = q.reshape(self.q), k.reshape(self.k), v.reshape(self.v)
        first, ones, sizes = self.states(initial), self._finish is not None, self.machine.sizes
        wanted = return_state or not is_causal
        state = np.empty(self.state_shape, self.dtype) if wanted else None
        last = self.states(state)
        if out is None:
            out = self._results.new()
        places = self._results.places(out)

        def work(steps: Steps, part: slice, exact: bool) -> bool:
            keys, values = Operand(a[part], self._feature), Operand(b[part], None, ones)
            read = Read(Operand(x[part], self._feature), places[part], finish=self._finish)
            before, after = _part(first, part), _part(last, part)
            reads = (read,) if is_causal else ()
            finite = chunked_scan.scan(
                steps, sizes, keys, values, reads, before, after, reverse, exact
            )
            if after is not None and not is_causal:
                chunked_scan.read(steps, sizes, read, after)
            return finite

        self.machine.run(self.tasks, work, self.flop)
        return self._results.finish(out, places), state if return_state else None

    @staticmethod
    def takes(out: Array | None) -> bool:
        """Whether the output can be written there without much memory."""
        return out is None or is_stack_or_small(out)


class Gradients(_Plan):
    """The gradients of a causal product; see `plan_of`."""

    products = 3

    def __init__(self, problem: linear_problem.Product, q: Array, k: Array, v: Array) -> None:
        super().__init__(problem, q, k, v)
        pairs = (q, self.q), (k, self.k), (v, self.v)
        self._results = [_Results(x.shape, x, x.dtype, stack) for x, stack in pairs]

    def __call__(
        self, dout: Array, q: Array, k: Array, v: Array, initial: Array | None,
        dstate: Array | None, reverse: bool,
    ) -> tuple[Array, Array, Array, Array | None]:  # fmt: skip
        """Return the gradients by q, k, v and the initial state."""
        x, a, b, grads = (
            array.reshape(stack)
            for array, stack in ((q, self.q), (k, self.k), (v, self.v), (dout, self.out))
        )
        first, dlast = self.states(initial), self.states(dstate)
        dinitial = None if initial is None else np.empty(self.state_shape, self.dtype)
        dfirst = self.states(dinitial)
        found = [results.new() for results in self._results]
        dx, da, db = places = [r.places(y) for r, y in zip(self._results, found, strict=True)]

        def work(steps: Steps, part: slice, _: bool) -> bool:
            queries, dsums = Operand(x[part]), Operand(grads[part])
            keys, values = Operand(a[part]), Operand(b[part])
            of_queries = (Read(dsums, dx[part], flipped=True),)
            of_others = Read(values, da[part], flipped=True), Read(keys, db[part])
            before, after = _part(dlast, part), _part(dfirst, part)
            scan = functools.partial(chunked_scan.scan, steps, self.machine.sizes)
            for once in (
                functools.partial(
                    scan, keys, values, of_queries, _part(first, part), None, reverse
                ),
                functools.partial(scan, queries, dsums, of_others, before, after, not reverse),
            ):
                if not once(False):
                    once(True)
            return True

        self.machine.run(self.tasks, work, self.flop)
        triples = zip(self._results, found, places, strict=True)
        dq, dk, dv = (results.finish(y, place) for results, y, place in triples)
        return dq, dk, dv, dinitial


def _part(stack: Array | None, part: slice) -> Array | None:
    return None if stack is None else stack[part]


def normaliser(eps: float, dtype: np.dtype[Any]) -> Any:
    """Return what divides sums by those of the weights, their last column."""
    # As an array: ufuncs take it in half the time of a number.
    with np.errstate(all="ignore"):
        least = np.array(eps, dtype)

    def normalised(sums: Array, out: Array) -> None:
        weights = np.add(sums[..., -1:], least)
        # In place, where rows are dense: division between other rows takes twice as long.
        np.copyto(out, sums[..., :-1])
        np.divide(out, weights, out=out)

    return normalised
