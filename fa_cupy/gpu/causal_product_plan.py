"""Plans of causal products: the kernels of one or of some, and how they are launched."""

from __future__ import annotations

import atexit
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from cupy.cuda import runtime

from fa_cupy.core.broadcasting import View
from fa_cupy.core.linear_problem import Product
from fa_cupy.gpu import workspace
from fa_cupy.gpu.arrays import fits, kernel_takes
from fa_cupy.gpu.driver import compile
from fa_cupy.gpu.driver.devices import multiprocessors, target_of_device
from fa_cupy.gpu.driver.launch import Arguments, Launch
from fa_cupy.gpu.kernels.linear.heuristics import Choice, choose
from fa_cupy.gpu.kernels.linear.params import fill, pack_head
from fa_cupy.gpu.kernels.linear.sm90 import ProductSm90, choice_for
from fa_cupy.gpu.kernels.linear.sm90_params import Job

MAX_PLANS = 4096

_UNKNOWN: Any = object()
_joint: dict[Any, ProductSm90 | None] = {}
atexit.register(_joint.clear)  # kernels must go before CuPy's modules are taken apart


@functools.lru_cache(maxsize=MAX_PLANS)
def _choose(
    dtype: str, entries: int, length: int, qk_dim: int, v_dim: int, algorithm: str, device: int
) -> Choice | None:
    target = target_of_device(device)
    if target is None:
        return None
    sms = multiprocessors(device)
    sizes = entries, length, qk_dim, v_dim
    return choose(dtype, *sizes, target, sms, algorithm, mapped=False)


def choice_of(problem: Product, algorithm: str, device: int) -> Choice | None:
    """Return the kernels that serve `problem` in any layout; None where cuBLAS products do."""
    sizes = math.prod(problem.batch), problem.k_len, problem.qk_dim, problem.v_dim
    return _choose(problem.dtype.name, *sizes, algorithm, device)


def require_kernels(name: str, *problems: Product, algorithm: str = "auto") -> None:
    """Raise for a product of a captured call that no kernel serves, before anything is launched."""
    call = workspace.current()
    if call is None or not call.captured:
        return
    device = runtime.getDevice()
    for problem in problems:
        some = math.prod((*problem.batch, problem.k_len, problem.qk_dim, problem.v_dim))
        if some and choice_of(problem, algorithm, device) is None:
            dims = f"dims {problem.qk_dim} and {problem.v_dim}"
            workspace.refuse_products(name, f"{problem.dtype} with {dims}")


class Plan:
    """How one kind of product runs on one device.

    Parameters
    ----------
    problem : Product
        With an output to compute or a state to return, of sizes other than 0; `choice_of` has
        kernels for it.
    out : View
        Of the output, over ``problem.batch``.
    state : View or None
        Of the last state, where it is wanted.
    reverse : bool
    algorithm : str
    device : int
    """

    __slots__ = ("_aligned", "_launches", "_params", "_pool", "_shifts", "_workspace")

    def __init__(
        self, problem: Product, out: View, state: View | None, reverse: bool, algorithm: str,
        device: int,
    ) -> None:  # fmt: skip
        dims = problem.qk_dim, problem.v_dim
        target, entries = target_of_device(device), math.prod(problem.batch)
        choice = choice_of(problem, algorithm, device)
        assert choice is not None
        launches = choice.launches(*dims)
        most = max(tiles * segments for _, tiles, segments in launches)
        params, parts, self._shifts, self._aligned = fill(
            problem, out, state, reverse, choice.split, most
        )
        self._workspace = 0
        if choice.segments > 1:
            self._workspace = 4 * entries * choice.segments * math.prod(dims)
        # One struct a kernel; those that no thread is using. A launch copies one before it returns.
        self._params = []
        for _, tiles, _ in launches:
            params["tiles"] = tiles
            self._params.append(params.copy())
        self._pool: list[list[Arguments]] = []
        self._launches: list[tuple[tuple[int, ...], int, list[Launch]]] = []
        kernels = [compile.load(row, str(target), device) for row, _, _ in launches]
        for offsets, first, blocks, _ in parts:
            self._launches.append((offsets, first, [
                Launch(kernel, blocks // most * tiles * segments, row.threads, row.shared_bytes)
                for kernel, (row, tiles, segments) in zip(kernels, launches, strict=True)
            ]))  # fmt: skip

    def __call__(self, pointers: tuple[int, ...]) -> None:
        """Launch with these addresses, those of `kernels.linear.params.POINTERS` but the last.

        Parameters
        ----------
        pointers : tuple of int
            0 where there is no array.
        """
        aligned = self._aligned and not any(p & 15 for p in pointers[:4])
        states = workspace.take(self._workspace) if self._workspace else None
        places = (*pointers, 0 if states is None else states.ptr)
        try:
            arguments = self._pool.pop()
        except IndexError:
            arguments = [Arguments(params) for params in self._params]
        for offsets, first, launches in self._launches:
            at = [p and p + s + o for p, s, o in zip(places, self._shifts, offsets, strict=True)]
            for own, launch in zip(arguments, launches, strict=True):
                pack_head(own.bytes, 0, *at, first, aligned)
                launch(own)
        self._pool.append(arguments)


def planned(
    problem: Product, out: View, state: View | None, reverse: bool, algorithm: str, device: int
) -> Plan | ProductSm90:
    """Make a plan: by kernels for SM90 where these are the best for it."""

    def other() -> Plan:
        return Plan(problem, out, state, reverse, algorithm, device)

    jobs = (Job(problem, out, state, reverse),)
    choice = choice_for(jobs, device, algorithm)
    return other() if choice is None else ProductSm90(jobs, choice, device, other)


class Term(NamedTuple):
    """A causal product and its arrays; `initial` and `state` may be None."""

    problem: Product
    q: Any
    k: Any
    v: Any
    initial: Any
    out: Any
    state: Any
    reverse: bool

    @property
    def pointers(self) -> tuple[int, ...]:
        """Where its arrays are, in the order of the kernels' structs."""
        arrays = self.q, self.k, self.v, self.out, self.initial, self.state
        return tuple(0 if x is None else x.data.ptr for x in arrays)


def plan_together(terms: tuple[Term, ...]) -> ProductSm90 | None:
    """Return the plan of products of the same entries and rows in one launch; None without one."""
    device = runtime.getDevice()
    jobs = tuple(
        Job(
            term.problem,
            over(term.problem, term.out),
            None if term.state is None else over(term.problem, term.state),
            term.reverse,
        )
        for term in terms
    )
    key = jobs, device
    plan: Any = _joint.get(key, _UNKNOWN)
    if plan is _UNKNOWN:
        if len(_joint) >= MAX_PLANS:
            _joint.clear()
        direct = all(
            term.out.size
            and fits(term.out, problem.dtype)
            and all(
                x is not None and kernel_takes(x, problem.dtype)
                for x in (problem.q, problem.k, problem.v)
            )
            for term in terms
            for problem in [term.problem]
        )
        choice = choice_for(jobs, device) if direct else None
        plan = None
        if choice is not None:
            plan = ProductSm90(jobs, choice, device, lambda: _apart(jobs, device))
        _joint[key] = plan
    found: ProductSm90 | None = plan
    return found


def _apart(jobs: tuple[Job, ...], device: int) -> Callable[..., None]:
    """Return what runs products one after the other, whatever their pointers."""
    plans = [Plan(*job, "auto", device) for job in jobs]

    def run(*pointers: tuple[int, ...]) -> None:
        for plan, places in zip(plans, pointers, strict=True):
            plan(places)

    return run


def over(problem: Product, array: Any) -> View:
    """Return the view over ``problem.batch`` of an output or a state."""
    view = problem.view(array.shape, array.strides)
    return View((*problem.batch, *view.shape[-2:]), view.strides)
