"""Causal products on CuPy arrays: plans, cached on what a call looks like, and their launches."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import cupy
import numpy as np
from cupy.cuda import alloc, runtime

from fa_cupy.core.arrays import dense_strides
from fa_cupy.core.broadcasting import View
from fa_cupy.core.linear_problem import Product
from fa_cupy.core.plan_cache import UNKNOWN, lookup, remember
from fa_cupy.gpu import workspace
from fa_cupy.gpu.arrays import (
    Allocation,
    allocation,
    fits,
    kernel_takes,
    packed,
    packed_copy,
    require_whole_elements,
)
from fa_cupy.gpu.kernels import products
from fa_cupy.gpu.kernels.linear.params import Job
from fa_cupy.gpu.plan import Plan

_NAME = "causal_product"
_ANY = ("auto", "chunked")  # what takes every array; others are kernels


class _Call(NamedTuple):
    """What a call whose arrays need no copies allocates, and its plan."""

    plan: Plan
    out: Allocation
    state: tuple[int, ...] | None
    state_dtype: Any
    low_bits: int  # of an address: none of an element of the call has one of them


def cached(
    q: Any, k: Any, v: Any, initial: Any, return_state: Any, reverse: Any, algorithm: Any, out: Any
) -> Any:
    """Answer a call of `fa_cupy.causal_product` that was checked once before; None otherwise."""
    if out is not None or not (type(q) is type(k) is type(v) is cupy.ndarray):
        return None
    if initial is not None and type(initial) is not cupy.ndarray:
        return None
    if not (return_state.__class__ is reverse.__class__ is bool and algorithm.__class__ is str):
        return None
    call = lookup(_key(q, k, v, initial, return_state, reverse, algorithm))
    places = [0 if x is None else x.data.ptr for x in (q, k, v, initial)]
    if call is None or any(place & call.low_bits for place in places):
        return None
    nbytes, shape, dtype, strides = call.out
    memory = alloc(nbytes)
    result = cupy.ndarray(shape, dtype, memory, strides)
    state = None if call.state is None else cupy.empty(call.state, call.state_dtype)
    call.plan.run((*places[:3], memory.ptr, places[3], 0 if state is None else state.data.ptr))
    return (result, state) if return_state else result


def _key(q: Any, k: Any, v: Any, initial: Any, *options: Any) -> Any:
    arrays = (q, k, v) if initial is None else (q, k, v, initial)
    facts = tuple((x.data.device_id, x.shape, x.strides, x.dtype) for x in arrays)
    return _NAME, runtime.getDevice(), facts, options


def product(
    problem: Product,
    q: Any,
    k: Any,
    v: Any,
    initial: Any,
    out: Any,
    *,
    reverse: bool,
    return_state: bool,
    algorithm: str = "auto",
) -> tuple[Any, Any]:
    """Solve `problem` on the current device and stream; as `fa_cupy.cpu.linear_attention` does."""
    require_whole_elements(_NAME, q=q, k=k, v=v, initial_state=initial, out=out)
    require_kernels(_NAME, problem, algorithm=algorithm)
    own = out is None
    if own:
        out = workspace.empty(problem.out_shape, problem.dtype, q)
    state = workspace.empty(problem.state_shape, problem.state_dtype) if return_state else None
    plan = compute(problem, q, k, v, initial, out, state, reverse=reverse, algorithm=algorithm)
    if own and plan is not None:
        shape = None if state is None else state.shape
        key = _key(q, k, v, initial, return_state, reverse, algorithm)
        kind, low_bits = (np.float64, 7) if problem.dtype.itemsize == 8 else (np.float32, 3)
        place = allocation(out.shape, out.strides, out.dtype)
        remember(key, _Call(plan, place, shape, kind, low_bits))
    return out, state


def require_kernels(name: str, *problems: Product, algorithm: str = "auto") -> None:
    """Raise for a product of a captured call that no kernel serves, before anything is launched."""
    call = workspace.current()
    if call is None or not call.captured:
        return
    for problem in problems:
        some = math.prod((*problem.batch, problem.k_len, problem.qk_dim, problem.v_dim))
        if some and not _served(problem, algorithm):
            if algorithm not in _ANY:
                raise _unserved(problem, algorithm)
            dims = f"dims {problem.qk_dim} and {problem.v_dim}"
            workspace.refuse_products(name, f"{problem.dtype} with {dims}")


def _served(problem: Product, algorithm: str) -> bool:
    """Whether kernels compute a product in any layout."""
    launcher = workspace.launcher(runtime.getDevice())
    return products.choice_of([problem], launcher, algorithm, mapped=False) is not None


def _unserved(problem: Product, algorithm: str) -> NotImplementedError:
    return NotImplementedError(
        f"causal_product: algorithm is {algorithm!r}, which has no kernel for {problem.k_len} "
        "rows on this device, want 'auto' or 'chunked'"
    )


def compute(
    problem: Product, q: Any, k: Any, v: Any, initial: Any, out: Any, state: Any, *, reverse: bool,
    algorithm: str = "auto",
) -> Plan | None:  # fmt: skip
    """Write the output, and the state where it is not None; return the plan that does it at once.

    None where the arrays need copies, or no kernel.
    """
    if problem.qk_dim == 0 or not (out.size or (state is not None and state.size)):
        if algorithm not in _ANY and not _served(problem, algorithm):
            raise _unserved(problem, algorithm)
        if out.size:
            out[...] = cupy.zeros((), problem.dtype)  # no product to sum, whatever the values hold
        return None
    given = problem, q, k, v, initial, out, state
    if not out.size:  # queries of no row or no batch entry: the keys stand in for them
        problem, q = without_queries(problem), k
    item, shape = problem.dtype.itemsize, problem.out_shape
    direct = bool(out.size) and fits(out, problem.dtype)
    target = out if direct else View(shape, dense_strides(shape, item, range(len(shape))))
    arrays = {"q": q, "k": k, "v": v}
    views: dict[str, Any] = {"q": problem.q, "k": problem.k, "v": problem.v}
    copied = [name for name, view in views.items() if not kernel_takes(view, problem.dtype)]
    copied = copied if problem.k_len else []
    if copied:
        changed: dict[str, Any] = {name: packed(views[name], item) for name in copied}
        problem = dataclasses.replace(problem, **changed)
    plan = plan_for((job_of(problem, target, state, reverse),), algorithm)
    if plan is None and algorithm not in _ANY:
        raise _unserved(problem, algorithm)
    if plan is None:
        from fa_cupy.gpu.cublas import (
            linear_attention as cublas_linear_attention,  # needs cuBLAS, which the kernels do not
        )

        cublas_linear_attention.product(*given, reverse=reverse)
        return None
    for name in copied:
        arrays[name], _ = packed_copy(views[name], arrays[name])
    result = out if direct else cupy.empty(shape, problem.dtype)
    places = (*arrays.values(), result, initial, state)
    plan.run(tuple([0 if x is None else x.data.ptr for x in places]))
    if not direct and out.size:
        out[...] = result
    return plan if direct and not copied else None


def without_queries(problem: Product) -> Product:
    """Return the product of keys with themselves, for the state that they leave."""
    batch = tuple(n or 1 for n in problem.batch)
    wide = {
        name: View((*batch, *view.shape[len(batch) :]), view.strides)
        for name, view in (
            ("q", problem.k), ("k", problem.k), ("v", problem.v), ("initial", problem.initial)
        )
        if view is not None
    }  # fmt: skip
    shape = tuple(n or 1 for n in problem.out_shape[:-2])
    changed: dict[str, Any] = {"batch": batch, **wide}
    changed["out_shape"] = (*shape, problem.k_len, problem.v_dim)
    return dataclasses.replace(problem, **changed)


def job_of(problem: Product, out: Any, state: Any, reverse: bool) -> Job:
    """Return a product with the views of its output and of its state, which may be None."""
    last = None if state is None else _over(problem, state)
    return Job(problem, _over(problem, out), last, reverse)


def _over(problem: Product, array: Any) -> View:
    """Return the view over ``problem.batch`` of an output or a state."""
    view = problem.view(array.shape, array.strides)
    return View((*problem.batch, *view.shape[-2:]), view.strides)


def plan_for(jobs: tuple[Job, ...], algorithm: str = "auto") -> Plan | None:
    """Return the one plan of some products, made at most once; None where none is."""
    device = runtime.getDevice()
    key = _NAME, device, jobs, algorithm
    plan = lookup(key, UNKNOWN)
    if plan is UNKNOWN:
        plan = remember(key, products.make_plan(jobs, workspace.launcher(device), algorithm))
    found: Plan | None = plan
    return found
