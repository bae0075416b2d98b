"""Causal products in two halves: the states of all rows, then outputs from a state before them.

A product of few batch entries splits its rows into segments, and sums the state of each in a first
pass over keys and values (`fa_cupy.gpu.kernels.products`). What ranks need of each other follows
from these sums, so that no pass is made for it: the plan of the product is cut in two between them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import cupy
import numpy as np
from cupy.cuda import runtime

from fa_cupy.core import arrays, attention_problem
from fa_cupy.core.linear_problem import Product
from fa_cupy.core.plan_cache import UNKNOWN, lookup, remember
from fa_cupy.gpu import workspace
from fa_cupy.gpu.arrays import fits_strides, kernel_takes
from fa_cupy.gpu.causal_product import job_of
from fa_cupy.gpu.causal_product_backward import by_entry, describe, direct, summed_to
from fa_cupy.gpu.kernels import products
from fa_cupy.gpu.kernels.linear import params, sm90_params
from fa_cupy.gpu.kernels.linear.choice import Choice
from fa_cupy.gpu.kernels.linear.params import Job, Traits
from fa_cupy.gpu.kernels.linear.variant import ProductSm90Variant
from fa_cupy.gpu.plan import Launcher, Plan, Step, workspace_of

_UNROLLED = "#pragma unroll 8"

# Sums of segments lie in the places 1 to `segments` of as many and one more for each batch entry.
# Where `turned` is set, they are of a state with rows and columns exchanged.
_SOURCE = """
    const long long elements = rows * cols, entry = i / elements, e = i % elements;
    const long long other = e % cols * rows + e / cols;
    const T* from = &sums[entry * (segments + 1) * elements + (turned ? other : e)];
"""

_total = cupy.ElementwiseKernel(
    "raw T sums, int64 rows, int64 cols, int32 segments, bool turned",
    "T total",
    f"""
    {_SOURCE}
    T sum = 0;
    {_UNROLLED}
    for (int s = 1; s <= segments; ++s) sum += from[s * elements];
    total = sum;
    """,
    "fa_cupy_total_state",
)

# The state before each segment, from the state before all of them.
_prefixes = cupy.ElementwiseKernel(
    "raw T before, bool has_before, bool before_turned, raw T sums, int64 rows, int64 cols, "
    "int32 segments, bool turned",
    "raw T prefixes",
    f"""
    {_SOURCE}
    T* to = &prefixes[entry * segments * elements + e];
    T sum = has_before ? before[entry * elements + (before_turned ? other : e)] : T(0);
    {_UNROLLED}
    for (int s = 0; s < segments; ++s) {{
        to[s * elements] = sum;
        sum += from[(s + 1) * elements];
    }}
    """,
    "fa_cupy_states_before",
)


class _Summed(NamedTuple):
    """Whose sums of segments a product reads.

    Attributes
    ----------
    job : int
        The product that they are made for.
    turned : bool
        Whether its states have rows and columns exchanged.
    before_turned : bool
        Whether the state before all rows has.
    """

    job: int
    turned: bool
    before_turned: bool


_FORWARD = (_Summed(0, False, False),)
# The gradients of q, k and v: k and v read the same state, the one of q and dout.
_BACKWARD = (_Summed(0, False, True), _Summed(2, True, True), _Summed(2, False, False))


class _Halves(NamedTuple):
    """The two plans of some products, and the sizes of what lies between them.

    Attributes
    ----------
    states, outputs : Plan
    sources : tuple of _Summed
        Of each product.
    segments : int
    shapes : tuple
        Of each product, (batch entries, rows of a state, columns).
    dtype : numpy.dtype
        Of states.
    """

    states: Plan
    outputs: Plan
    sources: tuple[_Summed, ...]
    segments: int
    shapes: tuple[tuple[int, int, int], ...]
    dtype: np.dtype[Any]

    @property
    def summed(self) -> list[int]:
        """The products whose segments are summed."""
        return sorted({source.job for source in self.sources})


def _halves(jobs: tuple[Job, ...], sources: tuple[_Summed, ...]) -> _Halves | None:
    """Return the plans of products whose rows are split into segments; None for others."""
    device = runtime.getDevice()
    key = "distributed products", device, jobs
    found = lookup(key, UNKNOWN)
    if found is UNKNOWN:
        found = remember(key, _made(jobs, sources, workspace.launcher(device)))
    halves: _Halves | None = found
    return halves


def _made(
    jobs: tuple[Job, ...], sources: tuple[_Summed, ...], launcher: Launcher
) -> _Halves | None:
    traits = [params.traits_of(job) for job in jobs]
    mapped = all(map(sm90_params.takes, traits))
    if len(jobs) > 1 and not mapped:
        return None
    problems = [job.problem for job in jobs]
    choice = products.choice_of(problems, launcher, "auto", mapped, halved=True)
    if choice is None or choice.states is None:
        return None
    count, dtype = choice.segments, problems[0].state_dtype
    shapes = tuple((math.prod(x.batch), x.qk_dim, x.v_dim) for x in problems)
    summed = sorted({source.job for source in sources})
    # With one segment more, which has no rows, the states of all rows are summed.
    more = choice._replace(segments=count + 1)
    states = _plan(more, [traits[i] for i in summed], choice.states, launcher)
    outputs = _plan(choice, traits, choice.row, launcher)
    return _Halves(states, outputs, sources, count, shapes, dtype)


def _plan(choice: Choice, traits: Sequence[Traits], row: Any, launcher: Launcher) -> Plan:
    """Return the plan of the launches of one row of some products."""
    sizes = {}
    for i, own in enumerate(traits):
        problem = own.job.problem
        state = math.prod((*problem.batch, problem.qk_dim, problem.v_dim))
        sizes[f"{i}.workspace"] = problem.state_dtype.itemsize * choice.segments * state
    names = [f"{i}.{name}" for i in range(len(traits)) for name in products.ARRAYS]
    return Plan(_steps(choice, traits, row), names, launcher, workspace_of(sizes))


def _steps(choice: Choice, traits: Sequence[Traits], row: Any) -> list[Step]:
    """Return the launches of one row of some products."""
    if isinstance(choice.row, ProductSm90Variant):
        return [step for step in products.steps_sm90(choice, traits) if step.variant is row]
    problem = traits[0].job.problem
    launches = [x for x in choice.launches(problem.qk_dim, problem.v_dim) if x[0] is row]
    return list(products.steps_alone(choice, launches, traits[0], 0, "0.workspace"))


class _Split:
    """Some products whose first half has run.

    Parameters
    ----------
    halves : _Halves
    places : sequence of tuple of int
        Of each product, the addresses of q, k, v and its output.
    """

    def __init__(self, halves: _Halves, places: Sequence[Sequence[int]]) -> None:
        self._halves, self._places = halves, places
        summed, count = halves.summed, halves.segments + 1
        sizes = [count * math.prod(halves.shapes[job]) for job in summed]
        parts = self._run(halves.states, [places[job] for job in summed], sizes)
        self._sums = dict(zip(summed, parts, strict=True))

    def total(self, job: int, turned: bool = False) -> Any:
        """Return the state of all rows, (batch entries, rows, columns), or (.., columns, rows)."""
        halves = self._halves
        entries, rows, cols = halves.shapes[job]
        if turned:
            rows, cols = cols, rows
        found = cupy.empty((entries, rows, cols), halves.dtype)
        if found.size:
            _total(self._sums[job], rows, cols, halves.segments, turned, found)
        return found

    def finish(self, before: Sequence[Any]) -> None:
        """Run the second half, from the states before all rows, dense, or None for zeros."""
        halves = self._halves
        sizes = [halves.segments * math.prod(shape) for shape in halves.shapes]
        self._run(halves.outputs, self._places, sizes, before)

    def _run(
        self, plan: Plan, places: Sequence[Sequence[int]], sizes: Sequence[int], before: Any = None
    ) -> list[Any]:
        """Run a half, from the states before all rows for the second; return its workspaces."""
        halves, item = self._halves, self._halves.dtype.itemsize
        memory = cupy.empty(plan.workspace_bytes // item, halves.dtype)
        at = [place // item for place in plan.places]
        parts = [memory[x : x + size] for x, size in zip(at, sizes, strict=True)]
        if before is not None:
            for own, first, shape, to in zip(
                halves.sources, before, halves.shapes, parts, strict=True
            ):
                sums = self._sums[own.job]
                _prefixes(
                    sums if first is None else first, first is not None, own.before_turned, sums,
                    *shape[1:], halves.segments, own.turned, to, size=math.prod(shape),
                )  # fmt: skip
        pointers = [x for place in places for x in (*place, 0, 0)]
        if not plan.run(tuple(pointers), memory.data.ptr):
            raise AssertionError("addresses are multiples of 16, which all maps can have")
        return parts


class Forward:
    """A causal product whose own states are known; see `forward`."""

    xp: Any = cupy

    def __init__(self, problem: Product, split: _Split, out: Any) -> None:
        self._problem, self._split, self._out = problem, split, out

    def state(self) -> Any:
        """Return the state of all rows, of shape ``problem.state_shape``."""
        return _once(self._problem, self._split.total(0))

    def finish(self, before: Any) -> Any:
        """Return the output, from the state before all rows or None."""
        self._split.finish([_each(self._problem, before)])
        return self._out


def forward(
    problem: Product, q: Any, k: Any, v: Any, reverse: bool, record: bytes
) -> Forward | None:
    """Sum the states of a product's rows; None where its plan has no pass for that.

    `record` is what the rank tells others of this call, and of later ones that look like it.
    """
    views = problem.q, problem.k, problem.v
    if not all(x is not None and kernel_takes(x, problem.dtype) for x in views):
        return None
    if 0 in (*problem.out_shape, problem.qk_dim):
        return None

    order = arrays.memory_order(problem.out_shape, q)
    like = arrays.Laid.dense(problem.out_shape, problem.dtype, order)
    if not fits_strides(problem.out_shape, like.strides, problem.dtype):
        return None
    halves = _halves((job_of(problem, like, None, reverse),), _FORWARD)
    if halves is None or not _aligned(q, k, v):
        return None
    both = halves

    def begin(q: Any, k: Any, v: Any) -> Forward:
        out = workspace.empty(problem.out_shape, problem.dtype, q)
        places = [x.data.ptr for x in (q, k, v, out)]
        return Forward(problem, _Split(both, [places]), out)

    remember(_key("causal_product", (q, k, v), reverse), (begin, record))
    return begin(q, k, v)


class Backward:
    """Gradients of a causal product whose own states are known; see `backward`."""

    xp: Any = cupy

    def __init__(self, problem: Product, split: _Split, terms: Any, arrays: Any) -> None:
        self._problem, self._split, self._terms, self._arrays = problem, split, terms, arrays

    def states(self) -> tuple[Any, Any]:
        """Return the state of all rows and its gradient, of shape ``problem.state_shape``."""
        problem = self._problem
        state = _once(problem, self._split.total(0, turned=True))
        after = self._split.total(2)
        axes = [i for i, shared in enumerate(problem.shared) if shared and problem.batch[i] > 1]
        if axes:
            after = after.reshape(*problem.batch, problem.qk_dim, problem.v_dim)
            after = after.sum(axis=tuple(axes))
        return state, after.reshape(problem.state_shape)

    def finish(self, before: Any, after: Any) -> tuple[Any, Any, Any]:
        """Return dq, dk and dv, from the state before all rows and the gradient of that after."""
        problem = self._problem
        first = _each(problem, before)
        if after is not None:
            array, view = by_entry(problem, after)
            assert view is not None
            after = attention_problem.view(cupy, array, view)
            after = cupy.ascontiguousarray(after).reshape(-1, problem.qk_dim, problem.v_dim)
        self._split.finish([first, after, after])
        dq, dk, dv = (
            summed_to(term.out, x, problem.state_dtype)
            for term, x in zip(self._terms, self._arrays, strict=True)
        )
        return dq, dk, dv


def backward(
    problem: Product, dout: Any, q: Any, k: Any, v: Any, reverse: bool, record: bytes
) -> Backward | None:
    """Sum the states that the gradients of a product need; None where no plan has that pass.

    `record` is as in `forward`.
    """
    if 0 in (*problem.out_shape, problem.qk_dim, problem.k_len):
        return None
    terms = describe(problem, dout, q, k, v, None, None, reverse=reverse)
    if not all(map(direct, terms)) or not _aligned(dout, q, k, v):
        return None
    halves = _halves(tuple(job_of(x.problem, x.out, None, x.reverse) for x in terms), _BACKWARD)
    if halves is None:
        return None
    both = halves

    def run(terms: Any, q: Any, k: Any, v: Any) -> Backward:
        places = [[x.data.ptr for x in (term.q, term.k, term.v, term.out)] for term in terms]
        return Backward(problem, _Split(both, places), terms, (q, k, v))

    def begin(dout: Any, q: Any, k: Any, v: Any) -> Backward:
        terms = describe(problem, dout, q, k, v, None, None, reverse=reverse)
        return run(terms, q, k, v)

    remember(_key("causal_product_backward", (dout, q, k, v), reverse), (begin, record))
    return run(terms, q, k, v)


def repeated(name: str, given: Sequence[Any], reverse: bool) -> Any:
    """Return what begins a call that looks like one before; None for others.

    It returns what `forward` or `backward` do, and the record of the call.
    """
    known = lookup(_key(name, given, reverse))
    if known is None or not _aligned(*given):
        return None
    begin, record = known

    def again() -> tuple[Any, bytes]:
        workspace.refuse(name, "ranks compare their arguments on the host")
        return begin(*given), record

    return again


def _key(name: str, given: Sequence[Any], reverse: bool) -> Any:
    facts = tuple([(x.data.device_id, x.shape, x.strides, x.dtype) for x in given])
    return f"distributed {name}", runtime.getDevice(), facts, reverse


def _aligned(*given: Any) -> bool:
    """Whether tensor maps can be made for these arrays."""
    return not any(x.data.ptr % 16 for x in given)


def _once(problem: Product, found: Any) -> Any:
    """Return states of batch entries, the same along shared axes, in the shape of the user's."""
    found = found.reshape(*problem.batch, *found.shape[-2:])
    index = tuple(0 if shared else slice(None) for shared in problem.shared)
    return cupy.ascontiguousarray(found[index]).reshape(problem.state_shape)


def _each(problem: Product, state: Any) -> Any:
    """Return a state of the user's shape for each batch entry, dense."""
    if state is None:
        return None
    if not any(problem.shared):
        return state.reshape(-1, *state.shape[-2:])
    view = attention_problem.view(cupy, state, problem.state_view(state))
    return cupy.ascontiguousarray(view).reshape(-1, *view.shape[-2:])
