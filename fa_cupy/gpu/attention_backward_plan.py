"""Plans of gradients of attention by kernels, and the memory that a call works in.

A call has one workspace. It holds what the kernels hand to each other, dense copies of arrays that
they cannot read as they lie, and gradients that nobody asked for or that are to lie in memory in
another way than the kernels write them.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cupy
import numpy as np
from cupy.cuda import runtime

from fa_cupy.core import arrays as core_arrays
from fa_cupy.core import attention_problem
from fa_cupy.core.attention_problem import Problem, View
from fa_cupy.gpu import workspace
from fa_cupy.gpu.driver.devices import target_of_device
from fa_cupy.gpu.kernels.attention import bwd_sm80_params, bwd_sm90_params
from fa_cupy.gpu.kernels.attention.bwd_launch import Launches
from fa_cupy.gpu.kernels.attention.bwd_params import Filled, Gradients
from fa_cupy.gpu.kernels.attention.bwd_sm80_variants import select_bwd_sm80
from fa_cupy.gpu.kernels.attention.bwd_sm90_variants import select_bwd
from fa_cupy.gpu.kernels.tensor_maps import DIM_STEP
from fa_cupy.gpu.masks.block_tables import CallTables
from fa_cupy.gpu.plan import remember

_ALIGNMENT = 256  # of what lies in a workspace
_ROWS = ("lse", "dlse")  # which kernels read as dense arrays
_GRADIENTS = ("dq", "dk", "dv")

_plans: dict[Any, Plan | None] = {}
atexit.register(_plans.clear)  # kernels must go before CuPy's modules are taken apart


class Laid(NamedTuple):
    """How an array lies in memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def ndim(self) -> int:
        """Axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Of a dense array."""
        return math.prod(self.shape) * self.dtype.itemsize


class Plan:
    """How one kind of call runs on one device.

    Parameters
    ----------
    problem : Problem
        Of the arrays as the kernels read them.
    filled : Filled
        The launches.
    inside : dict of Laid
        What lies in the workspace besides what the kernels hand to each other.
    grads : dict of Laid
        The gradients that the kernels write, by name.
    device : int

    Attributes
    ----------
    direct : bool
        Whether all arrays are read and written where they lie.
    grads : list of tuple
        Shape, strides, dtype and bytes of dq, dk and dv.
    """

    __slots__ = ("_inside", "_tables", "bytes", "direct", "grads", "run")

    def __init__(
        self,
        problem: Problem,
        filled: Filled,
        inside: dict[str, Laid],
        grads: dict[str, Laid],
        device: int,
    ) -> None:
        self.direct = not inside
        self.grads = [(*grads[name], grads[name].nbytes) for name in _GRADIENTS]
        self.run = Launches(filled, problem.dtype.name, device)
        self._tables = None if problem.mask is None else CallTables(problem, device)
        self._inside: dict[str, tuple[Laid, int]] = {}
        self.bytes = _padded(self.run.workspace_bytes)
        for name, laid in inside.items():
            self._inside[name] = laid, self.bytes
            self.bytes += _padded(laid.nbytes)

    def __call__(self, arrays: dict[str, Any], mask: Any = None) -> bool:
        """Run the call on the current stream of the plan's device, which must be current.

        Parameters
        ----------
        arrays : dict of cupy.ndarray or None
            What is read, and the gradients that are wanted; False as for `Launches`.
        mask : BitMask or cupy.ndarray of bool, optional
            The mask, if the problem has one.
        """
        pointers = {name: 0 if x is None else x.data.ptr for name, x in arrays.items()}
        if self.direct:
            return self.launch(pointers, mask)
        # What a launch reads is given back when the launch is queued.
        told, _owners = ({}, None) if self._tables is None else self._tables(mask)
        pointers |= told
        memory = workspace.take(self.bytes)
        copies = {}
        for name, (laid, place) in self._inside.items():
            pointers[name] = memory.ptr + place
            if name in arrays:
                at = memory + place
                copies[name] = cupy.ndarray(laid.shape, laid.dtype, at, laid.strides)
                if name not in _GRADIENTS:
                    _bits(copies[name])[...] = _bits(arrays[name])
        ran = self.run(pointers, memory.ptr)
        for name in _GRADIENTS:
            if ran and name in copies:
                _bits(arrays[name])[...] = _bits(copies[name])
        return ran

    def launch(self, pointers: dict[str, int], mask: Any = None) -> bool:
        """Run a direct call on arrays at these addresses; False as for `Launches`."""
        # What a launch reads is given back when the launch is queued.
        told, _owners = ({}, None) if self._tables is None else self._tables(mask)
        memory = workspace.take(self.bytes)
        return self.run(pointers | told, memory.ptr)


def backward(
    problem: Problem,
    inputs: tuple[Any, ...],
    results: tuple[Any, ...],
    need: tuple[str, ...],
    empty: Callable[..., Any],
) -> dict[str, Any] | None:
    """Return the gradients named by `need`; None where the kernels do not take the call.

    The parameters are those of `fa_cupy.gpu.cublas.attention_backward.backward`. All gradients are
    computed, whichever are asked for, but for that of the bias, which the kernels do not.
    """
    bias, mask = inputs[3:]
    arrays = named(inputs, results)
    plan = plan_for(problem, arrays, need)
    if plan is None:
        return None
    found = {name: empty(arrays[name].shape, problem.dtype, arrays[name]) for name in need}
    arrays |= {f"d{name}": x for name, x in found.items()} | {"bias": bias}
    return found if plan(arrays, mask) else None


def named(inputs: Sequence[Any], results: Sequence[Any]) -> dict[str, Any]:
    """Return the arrays that gradients are made from, but bias and mask, by name."""
    found = dict(zip(("q", "k", "v"), inputs, strict=False))
    return found | dict(zip(("out", "lse", "dout", "dlse"), results, strict=True))


def plan_for(problem: Problem, arrays: dict[str, Any], need: Sequence[str]) -> Plan | None:
    """Return the plan of a call, made at most once; None where the kernels do not take the call.

    `arrays` are named as by `named`.
    """
    device = runtime.getDevice()
    if "bias" in need or not _serves(problem, device):
        return None
    laid = {name: Laid(x.shape, x.strides, x.dtype) for name, x in arrays.items() if x is not None}
    copied = tuple(name for name in laid if not _readable(name, laid[name], arrays[name].data.ptr))
    key = problem, (*laid.values(),), copied, frozenset(need), device
    try:
        return _plans[key]
    except KeyError:
        remember(_plans, key, plan := _plan(problem, laid, copied, need, device))
        return plan


def _serves(problem: Problem, device: int) -> bool:
    """Whether there are kernels for the dtype, the dims and the options, whatever the layout."""
    if not math.prod(problem.batch) or problem.head_dim % DIM_STEP or problem.v_dim % DIM_STEP:
        return False
    target = target_of_device(device)
    return _has_rows(problem.dtype.name, problem.head_dim, problem.v_dim, target)


@functools.cache
def _has_rows(dtype: str, head_dim: int, v_dim: int, target: str | None) -> bool:
    return select_bwd_sm80(dtype, head_dim, v_dim, target) is not None  # they take any options


def _filled(problem: Problem, views: Gradients, device: int) -> Filled | None:
    """Return the launches of a call, None where no kernels take it."""
    call, masked = (problem.dtype.name, problem.head_dim, problem.v_dim), problem.mask is not None
    target = target_of_device(device)
    rows = select_bwd(*call, masked) if target == "sm_90a" else None
    if rows is not None and bwd_sm90_params.takes(problem, views):
        return bwd_sm90_params.fill(problem, views, rows)
    rows = select_bwd_sm80(*call, target, masked)
    if rows is not None and bwd_sm80_params.takes(problem, views):
        return bwd_sm80_params.fill(problem, views, rows)
    return None


def _readable(name: str, laid: Laid, pointer: int) -> bool:
    """Whether kernels read an array as it lies; others are copied."""
    steps = [(n, step) for n, step in zip(laid.shape, laid.strides, strict=True) if n > 1]
    if name in _ROWS:
        dense = _laid_out(laid.shape, None, laid.dtype).strides
        return steps == [(n, step) for n, step in zip(laid.shape, dense, strict=True) if n > 1]
    if pointer & 15 or (laid.shape[-1] > 1 and steps.pop()[1] != laid.dtype.itemsize):
        return False
    # Kernels count the steps of rows in int32, in elements.
    if laid.shape[-2] > 1 and not 0 < steps[-1][1] < 2**31 * laid.dtype.itemsize:
        return False
    return all(step >= 0 and step % 16 == 0 for _, step in steps)


def _plan(
    problem: Problem, laid: dict[str, Laid], copied: Sequence[str], need: Sequence[str], device: int
) -> Plan | None:
    """Return the plan of a call, None where the kernels do not take it."""
    inside = {name: _laid_out(laid[name].shape, None, laid[name].dtype) for name in copied}
    for name in ("q", "k", "v"):
        x = laid[name]
        grad = _laid_out(x.shape, core_arrays.memory_order(x.shape, x), x.dtype)
        if name not in need or not _readable("", grad, 0):
            grad = inside[f"d{name}"] = _laid_out(x.shape, None, x.dtype)
        laid[f"d{name}"] = grad
    laid |= {name: inside[name] for name in copied}

    def view(name: str) -> View:
        rows = problem.k_len if name in ("k", "v", "dk", "dv") else problem.q_len
        cols = problem.head_dim if name in ("q", "k", "dq", "dk") else problem.v_dim
        return attention_problem.batch_view(problem, laid[name], rows, cols)

    views = Gradients(*(view(name) for name in Gradients._fields))
    problem = dataclasses.replace(problem, q=view("q"), k=view("k"), v=view("v"))
    filled = _filled(problem, views, device)
    if filled is None:
        return None
    grads = {name: laid[name] for name in _GRADIENTS}
    return Plan(problem, filled, inside, grads, device)


def _laid_out(shape: tuple[int, ...], order: Sequence[int] | None, dtype: np.dtype[Any]) -> Laid:
    """Return a dense array whose axes lie in `order`, outermost first; C order by default."""
    strides, step = [0] * len(shape), dtype.itemsize
    for axis in reversed(range(len(shape)) if order is None else order):
        strides[axis] = step
        step *= max(1, shape[axis])
    return Laid(shape, tuple(strides), dtype)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _bits(x: Any) -> Any:
    """Return `x` as integers of its size: CuPy does not move bfloat16 around everywhere."""
    return x.view(np.dtype(f"u{x.dtype.itemsize}"))
