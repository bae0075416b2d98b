"""Gradients of causal products on CuPy arrays: three causal products, and sums of them.

With the direction of the product, or the opposite one::

    dq = product(dout, v, k)            from the initial state, transposed
    dk = product(v, dout, q)            backwards, from the gradient of the last state, transposed
    dv = product(k, q, dout)            backwards, from the gradient of the last state

and the last state of the third is the gradient of the initial state. Each of them is computed for
every batch entry and then summed over those along which its argument was broadcast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import cupy
import numpy as np
from cupy.cuda import alloc, runtime

from fa_cupy.core import attention_problem, broadcasting
from fa_cupy.core.broadcasting import View
from fa_cupy.core.linear_problem import Product, product_problem
from fa_cupy.core.plan_cache import lookup, remember
from fa_cupy.gpu import workspace
from fa_cupy.gpu.arrays import Allocation, allocation, fits, kernel_takes, require_whole_elements
from fa_cupy.gpu.causal_product import compute, job_of, plan_for, require_kernels
from fa_cupy.gpu.cublas import tile_ops
from fa_cupy.gpu.plan import Plan

_NAME = "causal_product_backward"


class _Call(NamedTuple):
    """A call whose gradients are the outputs of one plan, and what it allocates."""

    plan: Plan
    results: tuple[Allocation, ...]
    low_bits: int  # of an address: none of an element of the call has one of them


def cached(
    dout: Any, q: Any, k: Any, v: Any, initial: Any, reverse: Any, dstate: Any
) -> tuple[Any, ...] | None:
    """Answer a call of `causal_product_backward` that was checked once before; None otherwise."""
    arrays = [dout, q, k, v, *(x for x in (initial, dstate) if x is not None)]
    if reverse.__class__ is not bool or any(type(x) is not cupy.ndarray for x in arrays):
        return None
    call = lookup(_key(dout, q, k, v, initial, dstate, reverse))
    if call is None or any(x.data.ptr & call.low_bits for x in arrays):
        return None
    found = tuple(
        cupy.ndarray(shape, dtype, alloc(nbytes), strides)
        for nbytes, shape, dtype, strides in call.results
    )
    of_q, of_k, of_v, of_initial = (*(x.data.ptr for x in found), 0)[:4]
    dout, q, k, v = (x.data.ptr for x in (dout, q, k, v))
    first, last = (0 if x is None else x.data.ptr for x in (initial, dstate))
    call.plan.run((
        dout, v, k, of_q, first, 0,
        v, dout, q, of_k, last, 0,
        k, q, dout, of_v, last, of_initial,
    ))  # fmt: skip
    return found


def _key(dout: Any, q: Any, k: Any, v: Any, initial: Any, dstate: Any, reverse: bool) -> Any:
    facts = tuple(
        x if x is None else (x.data.device_id, x.shape, x.strides, x.dtype)
        for x in (dout, q, k, v, initial, dstate)
    )
    return _NAME, runtime.getDevice(), facts, reverse


class Term(NamedTuple):
    """A causal product and its arrays; `initial` and `state` may be None."""

    problem: Product
    q: Any
    k: Any
    v: Any
    out: Any
    initial: Any
    state: Any
    reverse: bool


def backward(
    problem: Product, dout: Any, q: Any, k: Any, v: Any, initial: Any, dstate: Any, *,
    reverse: bool, compute_terms: Callable[[tuple[Term, ...]], Plan | None] | None = None,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Return the gradients of a causal product with respect to q, k, v and the initial state.

    `compute_terms` does what `run` does, where that is not what computes the products.
    """
    if compute_terms is None:
        compute_terms = run
        turned = dataclasses.replace(problem, qk_dim=problem.v_dim, v_dim=problem.qk_dim)
        require_kernels(_NAME, problem, turned)
    require_whole_elements(_NAME, dout=dout, q=q, k=k, v=v, initial_state=initial, dstate=dstate)
    nobody = any(n == 0 and alone for n, alone in zip(problem.batch, problem.shared, strict=True))
    if nobody and dstate is not None:
        # No query reads the states, whose own gradient remains: what queries of zeros leave of it.
        dq = workspace.empty(q.shape, q.dtype)
        q = cupy.zeros((*(n or 1 for n in q.shape[:-2]), *q.shape[-2:]), q.dtype)
        problem = product_problem(_NAME, q, k, v, initial, offsets=problem.offsets)
        dout = cupy.zeros(problem.out_shape, problem.dtype)
        terms = describe(problem, dout, q, k, v, initial, dstate, reverse=reverse, with_q=False)
        arrays = dout, q, k, v, initial, dstate
        return dq, *_gradients(compute_terms, problem, terms, arrays, reverse)[1:]
    terms = describe(problem, dout, q, k, v, initial, dstate, reverse=reverse)
    arrays = dout, q, k, v, initial, dstate
    return _gradients(compute_terms, problem, terms, arrays, reverse)


def _gradients(
    compute_terms: Callable[[tuple[Term, ...]], Plan | None], problem: Product,
    terms: tuple[Term, Term, Term], arrays: tuple[Any, ...], reverse: bool,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Compute `terms`, which belong to dout, q, k, v and two states, and sum what they give."""
    dout, q, k, v, initial, dstate = arrays
    plan = compute_terms(terms)
    dtype = problem.state_dtype
    dq, dk, dv = (summed_to(term.out, x, dtype) for term, x in zip(terms, (q, k, v), strict=True))
    dinitial = None if initial is None else summed_to(terms[2].state, initial, dtype)
    found = [term.out for term in terms] + ([] if initial is None else [terms[2].state])
    plain = all(x is y for x, y in zip(found, (dq, dk, dv, dinitial), strict=False))
    if plan is not None and plain and terms[2].initial is dstate:
        low_bits = 7 if problem.dtype.itemsize == 8 else 3
        results = tuple(allocation(x.shape, x.strides, x.dtype) for x in found)
        remember(_key(dout, q, k, v, initial, dstate, reverse), _Call(plan, results, low_bits))
    return dq, dk, dv, dinitial


def describe(
    problem: Product, dout: Any, q: Any, k: Any, v: Any, initial: Any, dstate: Any, *,
    reverse: bool, with_q: bool = True,
) -> tuple[Term, Term, Term]:  # fmt: skip
    """Return the products that give the gradients of q, k and v, with the arrays they write.

    That of q is a temporary unless `with_q`.
    """
    assert problem.q is not None
    batch, dims = problem.out_shape[:-2], (problem.qk_dim, problem.v_dim)
    wide, narrow = (*batch, problem.k_len, dims[0]), (*batch, problem.k_len, dims[1])
    grads = broadcasting.over(batch, problem.groups, dout, *dout.shape[-2:])
    first, seen = by_entry(problem, dstate)

    of_q = dataclasses.replace(
        problem, q=grads, k=problem.v, v=problem.k, initial=_transposed(problem.initial),
        qk_dim=dims[1], v_dim=dims[0], out_shape=wide,
        state_shape=(*problem.state_shape[:-2], *dims[::-1]),
    )  # fmt: skip
    # What queries share a state no more: each of them has a sum of its own.
    alone = (False,) * len(problem.batch)
    states = batch if problem.offsets is None else (*batch, problem.offsets.sequences)
    of_k = dataclasses.replace(
        problem, q=problem.v, k=grads, v=problem.q, initial=_transposed(seen), shared=alone,
        qk_dim=dims[1], v_dim=dims[0], out_shape=wide, state_shape=(*states, *dims[::-1]),
    )  # fmt: skip
    of_v = dataclasses.replace(
        problem, q=problem.k, k=problem.q, v=grads, initial=seen, shared=alone,
        out_shape=narrow, state_shape=(*states, *dims),
    )  # fmt: skip
    last = None if initial is None else _memory(of_v.state_shape, initial)
    back = not reverse
    of_queries = _memory(wide, q, q) if with_q else cupy.empty(wide, q.dtype)
    return (
        Term(of_q, dout, v, k, of_queries, initial, None, reverse),
        Term(of_k, v, dout, q, _memory(wide, k, k), first, None, back),
        Term(of_v, k, q, dout, _memory(narrow, v, v), first, last, back),
    )


def run(terms: tuple[Term, ...]) -> Plan | None:
    """Compute all products: where kernels can by one plan, which is returned.

    In one launch blocks of the same sequence run at the same time, and share what they read.
    """
    plan = None
    if all(map(direct, terms)):
        jobs = [job_of(term.problem, term.out, term.state, term.reverse) for term in terms]
        plan = plan_for(tuple(jobs))
    if plan is not None:
        arrays = [x for term in terms for x in term[1:7]]
        plan.run(tuple([0 if x is None else x.data.ptr for x in arrays]))
        return plan
    for problem, q, k, v, out, initial, state, reverse in terms:
        compute(problem, q, k, v, initial, out, state, reverse=reverse)
    return None


def direct(term: Term) -> bool:
    """Whether kernels can read and write the arrays of a product where they lie."""
    problem = term.problem
    views = problem.q, problem.k, problem.v
    readable = all(x is not None and kernel_takes(x, problem.dtype) for x in views)
    return bool(term.out.size) and readable and fits(term.out, problem.dtype)


def by_entry(problem: Product, dstate: Any) -> tuple[Any, View | None]:
    """Return the gradient of the last state so that its sum over entries counts it once."""
    if dstate is None:
        return None, None
    view = problem.state_view(dstate)
    if not any(n > 1 and shared for n, shared in zip(problem.batch, problem.shared, strict=True)):
        return dstate, view
    wide = cupy.zeros(view.shape, dstate.dtype)
    once = tuple(0 if shared else slice(None) for shared in problem.shared)
    wide[once] = attention_problem.view(cupy, dstate, view)[once]
    return wide, View(wide.shape, wide.strides)


def _transposed(view: View | None) -> View | None:
    if view is None:
        return None
    shape, strides = ((*x[:-2], x[-1], x[-2]) for x in view)
    return View(shape, strides)


def _memory(shape: tuple[int, ...], of: Any, like: Any = None) -> Any:
    """Return memory for the gradient of `of`: a result where `of` is not broadcast."""
    if of.shape == shape:
        return workspace.empty(shape, of.dtype, like)
    return cupy.empty(shape, of.dtype)


def summed_to(found: Any, of: Any, dtype: np.dtype[Any]) -> Any:
    """Sum what was found for every entry, in `dtype`, to the gradient of `of`."""
    if found.shape == of.shape:
        return found
    total = broadcasting.summed(tile_ops.widened(found, dtype), of.shape)
    return tile_ops.narrowed(total, of.dtype)
