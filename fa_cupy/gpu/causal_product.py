"""Causal products on CuPy arrays: plans, cached on what a call looks like, and their launches."""

from __future__ import annotations

import atexit
import dataclasses
import math
from typing import Any, NamedTuple

import cupy
import numpy as np
from cupy.cuda import alloc, runtime

from fa_cupy.core.broadcasting import View
from fa_cupy.core.linear_problem import Product
from fa_cupy.gpu import workspace
from fa_cupy.gpu.causal_product_plan import (
    MAX_PLANS,
    Plan,
    choice_of,
    over,
    planned,
    require_kernels,
)
from fa_cupy.gpu.kernels.linear.sm90 import ProductSm90
from fa_cupy.gpu.plan import fits, kernel_takes, packed_copy, require_whole_elements

_plans: dict[Any, Plan | ProductSm90] = {}
_calls: dict[Any, _Call] = {}  # by the arguments of a call as they come
for _table in (_plans, _calls):
    atexit.register(_table.clear)  # kernels must go before CuPy's modules are taken apart


class _Call(NamedTuple):
    """What a call whose arrays need no copies allocates, and its plan."""

    plan: Plan | ProductSm90
    out: tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides
    state: tuple[int, ...] | None


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
    call = _calls.get(_key(q, k, v, initial, return_state, reverse, algorithm))
    places = [0 if x is None else x.data.ptr for x in (q, k, v, initial)]
    if call is None or any(place & 3 for place in places):
        return None
    shape, strides = call.out
    memory = alloc(math.prod(shape) * q.dtype.itemsize)
    result = cupy.ndarray(shape, q.dtype, memory, strides)
    state = None if call.state is None else cupy.empty(call.state, np.float32)
    call.plan((*places[:3], result.data.ptr, places[3], 0 if state is None else state.data.ptr))
    return (result, state) if return_state else result


def _key(q: Any, k: Any, v: Any, initial: Any, *options: Any) -> Any:
    arrays = (q, k, v) if initial is None else (q, k, v, initial)
    facts = tuple((x.data.device_id, x.shape, x.strides, x.dtype) for x in arrays)
    return runtime.getDevice(), facts, options


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
    require_whole_elements("causal_product", q=q, k=k, v=v, initial_state=initial, out=out)
    named = algorithm not in ("auto", "chunked")
    if named and choice_of(problem, algorithm, runtime.getDevice()) is None:
        raise NotImplementedError(
            f"causal_product: algorithm is {algorithm!r}, which has no kernel for {problem.k_len} "
            "rows on this device, want 'auto' or 'chunked'"
        )
    require_kernels("causal_product", problem, algorithm=algorithm)
    own = out is None
    if own:
        out = workspace.empty(problem.out_shape, problem.dtype, q)
    state = workspace.empty(problem.state_shape, problem.state_dtype) if return_state else None
    plan = compute(problem, q, k, v, initial, out, state, reverse=reverse, algorithm=algorithm)
    if own and plan is not None:
        if len(_calls) >= MAX_PLANS:
            _calls.clear()
        shape = None if state is None else state.shape
        key = _key(q, k, v, initial, return_state, reverse, algorithm)
        _calls[key] = _Call(plan, (out.shape, out.strides), shape)
    return out, state


def compute(
    problem: Product, q: Any, k: Any, v: Any, initial: Any, out: Any, state: Any, *, reverse: bool,
    algorithm: str = "auto",
) -> Plan | ProductSm90 | None:  # fmt: skip
    """Write the output, and the state where it is not None; return the plan that does it at once.

    None where the arrays need copies, or no kernel.
    """
    if problem.qk_dim == 0:
        out[...] = cupy.zeros((), problem.dtype)  # no product to sum, whatever the values hold
    elif (out.size or (state is not None and state.size)) and choice_of(
        problem, algorithm, runtime.getDevice()
    ) is None:
        from fa_cupy.gpu.cublas import (
            linear_attention as cublas_linear_attention,  # needs cuBLAS, which the kernels do not
        )

        cublas_linear_attention.product(problem, q, k, v, initial, out, state, reverse=reverse)
    elif out.size:
        direct = fits(out, problem.dtype)
        target = out if direct else cupy.empty(problem.out_shape, problem.dtype)
        plan = _run(problem, q, k, v, initial, target, state, reverse, algorithm)
        if direct:
            return plan
        out[...] = target
    elif state is not None and state.size:
        # Queries of no row or no batch entry: the keys stand in for them.
        batch = tuple(n or 1 for n in problem.batch)
        wide = {name: View((*batch, *x.shape[-2:]), x.strides) for name, x in (
            ("q", problem.k), ("k", problem.k), ("v", problem.v), ("initial", problem.initial)
        ) if x is not None}  # fmt: skip
        changed: dict[str, Any] = {"batch": batch, **wide}
        problem = dataclasses.replace(problem, **changed)
        shape = [n or 1 for n in problem.out_shape[:-2]] + [problem.k_len, problem.v_dim]
        target = cupy.empty(shape, problem.dtype)
        _run(problem, k, k, v, initial, target, state, reverse, algorithm)
    return None


def _run(
    problem: Product, q: Any, k: Any, v: Any, initial: Any, out: Any, state: Any, reverse: bool,
    algorithm: str,
) -> Plan | ProductSm90 | None:  # fmt: skip
    """Run a plan, with copies of what a kernel cannot read as it is; return it if none was made."""
    views: dict[str, Any] = {"q": problem.q, "k": problem.k, "v": problem.v}
    arrays = {"q": q, "k": k, "v": v}
    for name, view in views.items():
        if problem.k_len and not kernel_takes(view, problem.dtype):
            arrays[name], views[name] = packed_copy(view, arrays[name])
    problem = dataclasses.replace(problem, **views)
    device = runtime.getDevice()
    key = problem, out.strides, state is not None, reverse, algorithm, device
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
        whole = over(problem, out)
        last = None if state is None else over(problem, state)
        plan = _plans[key] = planned(problem, whole, last, reverse, algorithm, device)
    places = (*arrays.values(), out, initial, state)
    plan(tuple(0 if x is None else x.data.ptr for x in places))
    return plan if arrays["q"] is q and arrays["k"] is k and arrays["v"] is v else None
