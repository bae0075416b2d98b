"""Gradients of attention on CuPy arrays."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any

import cupy
from cupy.cuda import alloc, get_current_stream, runtime

from fa_cupy.core import attention_problem
from fa_cupy.gpu import attention_backward_plan
from fa_cupy.gpu.arrays import require_whole_elements
from fa_cupy.gpu.attention import mask_key, options_key
from fa_cupy.gpu.plan import remember

_NAME = "attention_backward"

# Plans by the arguments of calls as they come; None for calls that need copies or have no kernel.
_calls: dict[Any, attention_backward_plan.Plan | None] = {}
atexit.register(_calls.clear)  # kernels must go before CuPy's modules are taken apart


def cached(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, bias: Any, mask: Any, scale: Any,
    is_causal: Any, causal_align: Any, window: Any, softcap: Any, dlse: Any, need: Any,
) -> tuple[Any, ...] | None:  # fmt: skip
    """Answer a call of `fa_cupy.attention_backward` whose plan is known or can be made.

    None otherwise. The key holds the arguments unchecked: only calls that were once checked are in
    the table, and only values of types that are equal where they mean the same make a key.
    """
    if bias is not None or need is not None:
        return None
    device = runtime.getDevice()
    options = options_key(scale, is_causal, causal_align, window, softcap)
    seen = None if mask is None else mask_key(mask, device)
    if options is None or seen is False:
        return None
    if runtime.streamIsCapturing(get_current_stream().ptr):
        return None  # an error would leave memory in the graph
    facts: list[Any] = [device, options, seen, dlse is None]
    addresses = 0  # the bits of all of them
    for x in (q, k, v, out, dout, lse) if dlse is None else (q, k, v, out, dout, lse, dlse):
        if type(x) is not cupy.ndarray or x.data.device_id != device:
            return None
        facts += (x.shape, x.strides, x.dtype)
        addresses |= x.data.ptr
    if addresses & 15:  # kernels could not read an array where it lies
        return None
    key = tuple(facts)
    plan = _calls.get(key)
    if plan is None and key not in _calls:
        inputs, results = (q, k, v, None, mask), (out, lse, dout, dlse)
        problem = attention_problem.gradient_problem(
            inputs, *results, _NAME, scale=scale, is_causal=is_causal, causal_align=causal_align,
            window=window, softcap=softcap,
        )  # fmt: skip
        arrays = attention_backward_plan.named(inputs, results)
        require_whole_elements(_NAME, **arrays)
        plan = attention_backward_plan.plan_for(problem, arrays, ("q", "k", "v"))
        if plan is not None and not plan.direct:
            plan = None
        remember(_calls, key, plan)
    if plan is None:
        return None
    dq, dk, dv = (
        cupy.ndarray(shape, dtype, alloc(size), strides)
        for shape, strides, dtype, size in plan.grads
    )
    pointers = {
        "q": q.data.ptr, "k": k.data.ptr, "v": v.data.ptr, "out": out.data.ptr,
        "lse": lse.data.ptr, "dout": dout.data.ptr, "dlse": 0 if dlse is None else dlse.data.ptr,
        "bias": 0, "dq": dq.data.ptr, "dk": dk.data.ptr, "dv": dv.data.ptr,
    }  # fmt: skip
    return (dq, dk, dv) if plan.launch(pointers, mask) else None


def backward(
    problem: attention_problem.Problem,
    inputs: tuple[Any, ...],
    results: tuple[Any, ...],
    need: tuple[str, ...],
    empty: Callable[..., Any],
) -> dict[str, Any]:
    """Return the gradients named by `need`; see `fa_cupy.gpu.cublas.attention_backward.backward`.

    Kernels compute them where there are some for the call, cuBLAS products elsewhere.
    """
    q, k, v, bias, _ = inputs
    out, lse, dout, dlse = results
    require_whole_elements(_NAME, q=q, k=k, v=v, bias=bias, out=out, lse=lse, dout=dout, dlse=dlse)
    found = attention_backward_plan.backward(problem, inputs, results, need, empty)
    if found is not None:
        return found
    from fa_cupy.gpu.cublas import attention_backward  # needs cuBLAS, which kernels do not

    return attention_backward.backward(problem, inputs, results, need, empty)
