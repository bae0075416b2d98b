"""Attention on CuPy arrays: choose a kernel, lay the call out once, launch it often.

Plans are cached on the arguments as they come, so that a repeated call costs a lookup, its
allocations and a launch.
"""

from __future__ import annotations

import atexit
import dataclasses
import math
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from fa_cupy._bitmask import BitMask
from fa_cupy.core import attention_problem
from fa_cupy.gpu import workspace
from fa_cupy.gpu.plan import (
    Plan,
    dense_strides,
    fits,
    fits_strides,
    kernel_takes,
    packed_copy,
    plan_for,
    remember,
    require_whole_elements,
    variant_for,
)

# By the arguments of a call as they come.
_calls: dict[Any, Plan] = {}
_NUMBERS = frozenset((type(None), float, int, np.float32, np.float64))
_TEXTS = frozenset((type(None), str))
atexit.register(_calls.clear)  # as the plans themselves


def cached(
    q: Any, k: Any, v: Any, bias: Any, mask: Any, scale: Any, is_causal: Any, causal_align: Any,
    window: Any, softcap: Any, precision: Any, return_lse: Any, out: Any,
) -> Any:  # fmt: skip
    """Answer a call of `fa_cupy.attention` whose plan is known or can be made; None otherwise.

    The key holds the arguments unchecked: only calls that were once checked are in the table, and
    only values of types that are equal where they mean the same make a key.
    """
    if out is not None or not (type(q) is type(k) is type(v) is cupy.ndarray):
        return None
    device = q.data.device_id
    if k.data.device_id != device or v.data.device_id != device or runtime.getDevice() != device:
        return None
    if not (
        scale.__class__ in _NUMBERS
        and softcap.__class__ in _NUMBERS
        and is_causal.__class__ is return_lse.__class__ is bool
        and causal_align.__class__ in _TEXTS
        and precision.__class__ in _TEXTS
    ):
        return None
    key: Any = (
        device, q.shape, q.strides, q.dtype, k.shape, k.strides, k.dtype, v.shape, v.strides,
        v.dtype, scale, is_causal, causal_align, softcap, precision,
    )  # fmt: skip
    if bias is not None or mask is not None or window is not None:
        extra = _array_key(bias, device), mask_key(mask, device), _window_key(window)
        if any(part is False for part in extra):
            return None
        key = (key, extra)
    plan = _calls.get(key)
    if plan is None:
        problem = attention_problem.attention_problem(
            q, k, v, bias, mask, scale=scale, is_causal=is_causal, causal_align=causal_align,
            window=window, softcap=softcap, precision=precision,
        )  # fmt: skip
        if not _direct(problem, q, None):
            return None
        require_whole_elements(q=q, k=k, v=v, bias=bias)
        remember(_calls, key, plan := plan_for(problem, dense_strides(problem, q), device))
    elif (q.data.ptr | k.data.ptr | v.data.ptr) & 1 or bias is not None:
        require_whole_elements(q=q, k=k, v=v, bias=bias)
    result = plan(q, k, v, bias, mask, None, return_lse)
    return result if return_lse else result[0]


def attention(
    problem: attention_problem.Problem,
    q: Any,
    k: Any,
    v: Any,
    bias: Any,
    mask: Any,
    out: Any,
    return_lse: bool,
) -> tuple[Any, Any | None]:
    """Solve `problem` on the current device and stream.

    Parameters
    ----------
    problem : Problem
        From `fa_cupy.core.attention_problem.attention_problem`.
    q, k, v, bias, mask : cupy.ndarray or None
        The arrays that `problem` was made from; `mask` may be a BitMask.
    out : cupy.ndarray or None
        Array for the output; None allocates one laid out in memory as `q` is.
    return_lse : bool

    Returns
    -------
    out : cupy.ndarray
        Of shape ``problem.out_shape``.
    lse : cupy.ndarray or None
    """
    device = runtime.getDevice()
    require_whole_elements(q=q, k=k, v=v, bias=bias, out=out)
    if math.prod(problem.out_shape[:-1]) and variant_for(problem, device) is None:
        from fa_cupy.gpu.cublas import (
            attention as cublas_attention,  # needs cuBLAS, which the kernels do not
        )

        return cublas_attention.attention(problem, q, k, v, bias, mask, out, return_lse)
    if not _direct(problem, q, out):
        return _by_copies(problem, q, k, v, bias, mask, out, return_lse)
    strides = dense_strides(problem, q) if out is None else out.strides
    lse = lse_for(problem, return_lse)
    with workspace.results():
        return plan_for(problem, strides, device)(q, k, v, bias, mask, out, lse)


def lse_for(problem: attention_problem.Problem, wanted: bool) -> Any:
    """Return an array for the LSE where another library makes it, `wanted` where a plan does."""
    if not (wanted and workspace.foreign()):
        return wanted
    return workspace.empty(problem.out_shape[:-1], attention_problem.sum_dtype(problem.dtype))


def _by_copies(
    problem: attention_problem.Problem,
    q: Any,
    k: Any,
    v: Any,
    bias: Any,
    mask: Any,
    out: Any,
    lse: bool,
) -> tuple[Any, Any | None]:
    """Solve a problem of which a kernel cannot take some array as it is."""
    if out is None:
        out = workspace.empty(problem.out_shape, problem.dtype, q)
    target = out if fits(out, problem.dtype) else cupy.empty(problem.out_shape, problem.dtype)
    views = {"q": problem.q, "k": problem.k, "v": problem.v}
    arrays = {"q": q, "k": k, "v": v}
    for name, view in views.items():
        if not kernel_takes(view, problem.dtype):
            arrays[name], views[name] = packed_copy(view, arrays[name])
    changed: dict[str, Any] = dict(views)
    problem = dataclasses.replace(problem, **changed)
    plan = plan_for(problem, target.strides, runtime.getDevice())
    rows = lse_for(problem, lse)
    with workspace.results():
        _, rows = plan(arrays["q"], arrays["k"], arrays["v"], bias, mask, target, rows)
    if target is not out:
        out[...] = target
    return out, rows


def _array_key(x: Any, device: int) -> Any:
    """Return what a plan depends on in an array; False if it is none of the device."""
    if x is None:
        return None
    if type(x) is cupy.ndarray and x.data.device_id == device:
        return x.shape, x.strides, x.dtype
    return False


def options_key(scale: Any, is_causal: Any, causal_align: Any, window: Any, softcap: Any) -> Any:
    """Return what a plan depends on in options; None if a type does not say what it means."""
    if not (
        scale.__class__ in _NUMBERS
        and softcap.__class__ in _NUMBERS
        and is_causal.__class__ is bool
        and causal_align.__class__ in _TEXTS
    ):
        return None
    if window is not None and _window_key(window) is False:
        return None
    return scale, is_causal, causal_align, window, softcap


def mask_key(x: Any, device: int) -> Any:
    """Return what a plan depends on in a mask; False if it is an array of elsewhere."""
    if type(x) is BitMask:
        return x._grid, x.entries.shape, x.entries.strides
    return _array_key(x, device)


def _window_key(window: Any) -> Any:
    """Return a window whose type says what it means; False for any other."""
    if window is None:
        return None
    if type(window) is tuple and all(side is None or type(side) is int for side in window):
        return window
    return False


def _direct(problem: attention_problem.Problem, q: Any, out: Any) -> bool:
    """Whether a kernel serves `problem` and takes all arrays as they are."""
    if math.prod(problem.out_shape[:-1]) == 0:
        return True
    if variant_for(problem, runtime.getDevice()) is None:
        return False
    strides = dense_strides(problem, q) if out is None else out.strides
    dense = fits_strides(problem.out_shape, strides, problem.dtype)
    return dense and all(kernel_takes(x, problem.dtype) for x in (problem.q, problem.k, problem.v))
