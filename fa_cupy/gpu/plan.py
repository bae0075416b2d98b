"""Plans: all of a launch that follows from shapes, strides, dtypes, options and device."""

from __future__ import annotations

import atexit
import math
from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np
from cupy import ndarray
from cupy.cuda import alloc

from fa_cupy.core import arrays as core_arrays
from fa_cupy.core import attention_problem
from fa_cupy.gpu.driver.devices import target_of_device
from fa_cupy.gpu.kernels.attention.fwd_params import MAX_LENGTH, transforms
from fa_cupy.gpu.kernels.attention.fwd_sm80 import FwdSm80
from fa_cupy.gpu.kernels.attention.fwd_sm90 import FwdSm90
from fa_cupy.gpu.kernels.attention.fwd_sm90_params import COUNTER_BYTES, takes
from fa_cupy.gpu.kernels.attention.fwd_variants import Call, Variant, VariantSm90, select
from fa_cupy.gpu.masks.binding import CallMask

_MAX_PLANS = 4096

_plans: dict[Any, Plan] = {}
atexit.register(_plans.clear)  # kernels must go before CuPy's modules are taken apart


class Plan:
    """How one kind of call runs on one device.

    Parameters
    ----------
    problem : Problem
    out_strides : tuple of int
        Bytes, of the user's output.
    device : int
    """

    __slots__ = (
        "_counter_at", "_dtype", "_lse_bytes", "_lse_dtype", "_lse_shape", "_mask", "_out_bytes",
        "_out_shape", "_out_strides", "forward",
    )  # fmt: skip

    def __init__(
        self, problem: attention_problem.Problem, out_strides: tuple[int, ...], device: int
    ) -> None:
        # CuPy takes NumPy's own types faster than dtypes, and others slower.
        self._dtype = np.float16 if problem.dtype == np.float16 else problem.dtype
        self._out_shape = problem.out_shape
        # CuPy makes an array in C order faster when it is not told so.
        self._out_strides = None if out_strides == _c_strides(problem) else out_strides
        self._out_bytes = math.prod(problem.out_shape) * problem.dtype.itemsize
        self._lse_shape = problem.out_shape[:-1]
        self._lse_dtype = attention_problem.sum_dtype(problem.dtype)
        self._lse_bytes = self._lse_dtype.itemsize * math.prod(self._lse_shape)
        self._counter_at = 0
        self.forward: FwdSm80 | FwdSm90 | None = None
        self._mask: CallMask | None = None
        if self._lse_bytes:  # else there is no row to compute
            out = attention_problem.out_view(problem, problem.out_shape, out_strides)
            self.forward = _forward(problem, out, device)
            if problem.mask is not None:
                self._mask = CallMask(problem, device)
        if isinstance(self.forward, FwdSm90) and self.forward.counts:
            # The counter of the kernel's tiles lies behind the rows: one allocation less.
            self._counter_at = -(-self._lse_bytes // 16) * 16
            self._lse_bytes = self._counter_at + COUNTER_BYTES

    def __call__(
        self, q: Any, k: Any, v: Any, bias: Any, mask: Any, out: Any, lse: Any
    ) -> tuple[Any, Any | None]:
        """Run the call on the current stream of the plan's device, which must be current.

        Results are made by the current allocator, unless `out` and `lse` are arrays to write them
        to; `lse` may be a bool too, which says whether it is wanted.
        """
        if out is None:
            memory = alloc(self._out_bytes)
            out = ndarray(self._out_shape, self._dtype, memory, self._out_strides)
        else:
            memory = out.data
        lse_pointer, counter = 0, 0
        if lse is True:
            rows = alloc(self._lse_bytes)
            lse = ndarray(self._lse_shape, self._lse_dtype, rows)
            lse_pointer = rows.ptr
            counter = self._counter_at and lse_pointer + self._counter_at
        elif lse is False:
            lse = None
        else:
            lse_pointer = lse.data.ptr
        if self.forward is not None:
            pointers = (
                q.data.ptr,
                k.data.ptr,
                v.data.ptr,
                0 if bias is None else bias.data.ptr,
                memory.ptr,
                lse_pointer,
            )
            if self._mask is None:
                self.forward(pointers, counter)
            else:
                # What a launch reads is given back when the launch is queued.
                told, _owners = self._mask(mask)
                self.forward(pointers, counter, told)
        return out, lse


def _forward(
    problem: attention_problem.Problem, out: attention_problem.View, device: int
) -> FwdSm80 | FwdSm90:
    row, plain = variant_for(problem, device, out), variant_for(problem, device)
    assert row is not None
    assert plain is not None
    if isinstance(row, VariantSm90):
        return FwdSm90(problem, out, row, plain, device)
    return FwdSm80(problem, out, row, device)


def plan_for(problem: attention_problem.Problem, out_strides: tuple[int, ...], device: int) -> Plan:
    """Return the plan of a problem, made at most once."""
    key = (problem, out_strides, device)
    plan = _plans.get(key)
    if plan is None:
        remember(_plans, key, plan := Plan(problem, out_strides, device))
    return plan


def remember(table: dict[Any, Any], key: Any, plan: Any) -> None:
    """Add a plan to a table, which starts anew when it is full."""
    if len(table) >= _MAX_PLANS:
        table.clear()
    table[key] = plan


def variant_for(
    problem: attention_problem.Problem, device: int, out: attention_problem.View | None = None
) -> Variant | None:
    """Return the row that serves a problem on a device, None where cuBLAS products do.

    Parameters
    ----------
    problem : Problem
    device : int
    out : View, optional
        Of the output, over ``problem.batch``. Without it, the row is one for any layout and any
        pointers.
    """
    if max(problem.q_len, problem.k_len) > MAX_LENGTH:
        return None
    call = Call(
        transform=transforms(problem),
        mapped=out is not None and takes(problem, out),
        masked=problem.mask is not None,
    )
    target = target_of_device(device)
    return select(problem.dtype.name, problem.head_dim, problem.v_dim, target, call)


def require_whole_elements(where: str = "attention", /, **arrays: Any) -> None:
    """Raise for an array whose elements do not lie at multiples of their size.

    Neither these kernels nor CuPy's own can read one, not even to copy it.
    """
    for name, array in arrays.items():
        if array is None or array.size == 0:
            continue
        item = array.dtype.itemsize
        if array.data.ptr % item or any(step % item for step in array.strides):
            raise ValueError(
                f"{where}: {name} is at address {array.data.ptr:#x} with strides "
                f"{array.strides}, want multiples of its item size {item}"
            )


def kernel_takes(view: attention_problem.View, dtype: np.dtype[Any]) -> bool:
    """Whether a kernel can read q, k or v through `view`: dense rows."""
    item = dtype.itemsize
    return view.strides[-1] == item and abs(view.strides[-2] // item) < 2**31


def fits(out: Any, dtype: np.dtype[Any]) -> bool:
    """Whether a kernel can write to `out`."""
    return fits_strides(out.shape, out.strides, dtype)


def fits_strides(shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    """Whether a kernel can write to an array of these strides: dense rows."""
    dense = shape[-1] < 2 or strides[-1] == dtype.itemsize
    return dense and abs(strides[-2] // dtype.itemsize) < 2**31


def packed_copy(view: attention_problem.View, array: Any) -> tuple[Any, attention_problem.View]:
    """Copy what `view` sees of q, k or v, each broadcast row once, in a form that kernels take."""
    shape = [n if step else min(n, 1) for n, step in zip(view.shape, view.strides, strict=True)]
    shape[-1] = view.shape[-1]
    seen = attention_problem.View(tuple(shape), view.strides)
    copy = cupy.ascontiguousarray(attention_problem.view(cupy, array, seen))
    steps = [0 if n == 1 else step for n, step in zip(shape, copy.strides, strict=True)]
    steps[-1] = array.dtype.itemsize
    return copy, attention_problem.View(view.shape, tuple(steps))


def dense_strides(problem: attention_problem.Problem, q: Any) -> tuple[int, ...]:
    """Strides of a new output, laid out in memory as `q` is."""
    return _strides(problem, core_arrays.memory_order(problem.out_shape, q))


def _c_strides(problem: attention_problem.Problem) -> tuple[int, ...]:
    return _strides(problem, range(len(problem.out_shape)))


def _strides(problem: attention_problem.Problem, order: Sequence[int]) -> tuple[int, ...]:
    strides = [0] * len(problem.out_shape)
    step = problem.dtype.itemsize
    for axis in reversed(order):
        strides[axis] = step
        step *= max(1, problem.out_shape[axis])
    return tuple(strides)
