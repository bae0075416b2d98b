"""Causal products on NumPy arrays, as scans over their rows."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from fa_cupy.core import arrays, linear_problem
from fa_cupy.core.plan_cache import lookup
from fa_cupy.cpu.causal_product_backward import backward, scan_of, state_side
from fa_cupy.cpu.products import feature_maps
from fa_cupy.cpu.products.executor import Machine
from fa_cupy.cpu.products.plans import key_of, normaliser, plan_of
from fa_cupy.tiled import chunked_scan, linear_gradients, segmented_scan
from fa_cupy.tiled.chunks import Operand, Steps
from fa_cupy.tiled.segmented_scan import Reader, Scan, Side

Array = npt.NDArray[Any]


def cached(
    q: Any, k: Any, v: Any, initial: Any, return_state: Any, reverse: Any, algorithm: Any, out: Any
) -> Any:
    """Answer a call of `fa_cupy.causal_product` that was checked once before; None otherwise."""
    plan = lookup(key_of("causal_product", q, k, v, initial))
    if plan is None or out is not None:
        return None
    if algorithm.__class__ is not str or algorithm not in linear_problem.ANY:
        return None
    if not return_state.__class__ is reverse.__class__ is bool:
        return None
    found = plan(q, k, v, initial, None, return_state, reverse)
    return found if return_state else found[0]


def cached_normalised(
    q: Any, k: Any, v: Any, feature_map: Any, eps: Any, is_causal: Any, initial: Any,
    return_state: Any, out: Any,
) -> Any:  # fmt: skip
    """Answer a call of `fa_cupy.linear_attention` that was checked once before; None otherwise."""
    if not (feature_map.__class__ is str and eps.__class__ in (float, int)) or out is not None:
        return None
    if not return_state.__class__ is is_causal.__class__ is bool:
        return None
    feature = None if feature_map == "identity" else feature_map
    plan = lookup(key_of("linear_attention", q, k, v, initial, feature, eps, is_causal))
    if plan is None:
        return None
    found = plan(q, k, v, initial, None, return_state, False, is_causal)
    return found if return_state else found[0]


def product(
    problem: linear_problem.Product,
    q: Array,
    k: Array,
    v: Array,
    initial: Array | None,
    out: Array | None,
    *,
    reverse: bool,
    return_state: bool,
    algorithm: str = "chunked",
) -> tuple[Array, Array | None]:
    """Solve `problem` for NumPy arrays.

    Parameters
    ----------
    problem : Product
        From `fa_cupy.core.linear_problem.product_problem`.
    q, k, v, initial : numpy.ndarray or None
        The arrays that `problem` was made from.
    out : numpy.ndarray or None
        Array for the output; None allocates one laid out in memory as `q` is.
    reverse, return_state : bool
    algorithm : str
        Checked already; there is one here.

    Returns
    -------
    out : numpy.ndarray
        Of shape ``problem.out_shape``.
    state : numpy.ndarray or None
        Of shape ``problem.state_shape``.
    """
    plan = plan_of(key_of("causal_product", q, k, v, initial), problem, q, k, v, initial)
    if plan is not None and plan.takes(out):
        found, last = plan(q, k, v, initial, out, return_state, reverse)
        return found, last if return_state else None
    if out is None:
        out = arrays.empty_laid_out(np, problem.out_shape, q, problem.dtype)
    state = np.empty(problem.state_shape, problem.state_dtype) if return_state else None
    machine = Machine(problem.state_dtype)
    segmented_scan.product(machine, problem, q, k, v, initial, out, state, reverse=reverse)
    return out, state


def linear_attention(
    problem: linear_problem.Product,
    q: Array,
    k: Array,
    v: Array,
    initial: Array | None,
    out: Array | None,
    *,
    feature: str | None,
    eps: float,
    is_causal: bool,
    return_state: bool,
) -> tuple[Array, Array | None]:
    """Solve `problem`, and divide by the sums of the weights; see `product`.

    `feature` names the feature map of q and k; None leaves them as they are.
    """
    key = key_of("linear_attention", q, k, v, initial, feature, eps, is_causal)
    plan = plan_of(key, problem, q, k, v, initial, feature=feature, eps=eps)
    if plan is not None and plan.takes(out):
        found, last = plan(q, k, v, initial, out, return_state, False, is_causal)
        return found, last if return_state else None
    if out is None:
        out = arrays.empty_laid_out(np, problem.out_shape, q, problem.dtype)

    wanted = return_state or not is_causal
    state = np.empty(problem.state_shape, problem.state_dtype) if wanted else None
    apply = None if feature is None else feature_maps.IN_PLACE[feature]
    reader = Reader(
        Side(q, problem.q, copies=True, feature=apply),
        Side(out, problem.view(out.shape, out.strides), copies=True),
        finish=normaliser(eps, problem.state_dtype),
    )
    keys, values = Side(k, problem.k, feature=apply), Side(v, problem.v, ones=True)
    machine = Machine(problem.state_dtype)
    readers = (reader,) if is_causal else ()
    scan = Scan(machine, problem, keys, values, readers, reverse=False)
    scan.run(state_side(initial, problem.initial), state)
    if state is not None and not is_causal:
        memory = state_side(state, problem.view(state.shape, state.strides))
        segmented_scan.read(machine, problem, reader, memory)
    return out, state if return_state else None


def linear_attention_backward(
    problem: linear_problem.Product,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    initial: Array | None,
    dstate: Array | None,
    *,
    feature: str | None,
    eps: float,
    is_causal: bool,
) -> tuple[Array, Array, Array, Array | None]:
    """Return the gradients of linear attention by q, k, v and the initial state."""
    return gradients(
        Products(), problem, dout, q, k, v, initial, dstate,
        feature=feature, eps=eps, is_causal=is_causal,
    )  # fmt: skip


def gradients(
    products: Products, problem: linear_problem.Product, dout: Array, q: Array,
    k: Array, v: Array, initial: Array | None, dstate: Array | None, *, feature: str | None,
    eps: float, is_causal: bool,
) -> tuple[Array, Array, Array, Array | None]:  # fmt: skip
    """Do what `linear_attention_backward` does, by products that may be those of sequences."""
    dtype = problem.state_dtype
    with np.errstate(all="ignore"):
        x, y = _featured(q, feature, dtype), _featured(k, feature, dtype)
        values = np.empty((*v.shape[:-1], v.shape[-1] + 1), dtype)
        np.copyto(values[..., :-1], v, casting="unsafe")
        values[..., -1] = 1
        grads = dout.astype(dtype, copy=False)
        given = linear_gradients.Given(
            x, y, values, initial, eps, is_causal, offsets=problem.offsets
        )
        dx, dy, dvalues, dinitial = linear_gradients.gradients(products, given, grads, dstate)
        if feature is not None:
            feature_maps.GRADIENTS[feature](x, dx)
            feature_maps.GRADIENTS[feature](y, dy)
            products.clear(dx, False)
            products.clear(dy, True)
        dv = arrays.empty_laid_out(np, v.shape, v, v.dtype)
        np.copyto(dv, dvalues[..., :-1], casting="unsafe")
        return dx.astype(q.dtype, copy=False), dy.astype(k.dtype, copy=False), dv, dinitial


class Products:
    """`tiled.linear_gradients.Products` for NumPy."""

    xp: Any = np

    def clear(self, grad: Array, of_keys: bool) -> None:
        """Do nothing: without offsets each row belongs to a sequence."""

    def product(
        self,
        problem: linear_problem.Product,
        x: Array,
        y: Array,
        values: Array,
        initial: Array | None,
    ) -> Array:
        """Return a causal product."""
        found, _ = product(problem, x, y, values, initial, None, reverse=False, return_state=False)
        return found

    def backward(
        self, problem: linear_problem.Product, dsums: Array, x: Array, y: Array, values: Array,
        initial: Array | None, dstate: Array | None,
    ) -> tuple[Array, Array, Array, Array | None]:  # fmt: skip
        """Return its gradients."""
        return backward(problem, dsums, x, y, values, initial, dstate, reverse=False)

    def total(
        self, problem: linear_problem.Product, y: Array, values: Array, initial: Array | None,
        of_keys: bool,
    ) -> Array:  # fmt: skip
        """Return the state after all rows."""
        state = np.empty(problem.state_shape, problem.state_dtype)
        scan = scan_of(problem, y, values, (), False)
        scan.run(state_side(initial, problem.initial), state)
        return state

    def read(self, rows: Array, state: Array, of_keys: bool) -> Array:
        """Return ``rows @ state``."""
        # No keys: what is read is the initial state.
        k, v = (np.empty((*state.shape[:-2], 0, n), rows.dtype) for n in state.shape[-2:])
        problem = linear_problem.product_problem("read", rows, k, v, state, aligned=False)
        out = np.empty(problem.out_shape, rows.dtype)
        reader = Reader(
            Side(rows, problem.q, copies=True),
            Side(out, problem.view(out.shape, out.strides), copies=True),
        )
        machine = Machine(problem.state_dtype)
        segmented_scan.read(machine, problem, reader, state_side(state, problem.initial))
        return out


def _featured(x: Array, feature: str | None, dtype: np.dtype[Any]) -> Array:
    """Return the features of `x` in `dtype`; `x` itself where that is what they are."""
    if feature is None:
        return x.astype(dtype, copy=False)
    found = x.astype(dtype)
    feature_maps.IN_PLACE[feature](found)
    return found


def states(
    problem: linear_problem.Product,
    k: Array,
    v: Array,
    initial: Array | None,
    ends: Array,
    *,
    reverse: bool,
) -> Array:
    """Return the states at `ends`, ascending, of shape (*state_batch, len(ends), E, M)."""
    shape = (*problem.state_shape[:-2], len(ends), *problem.state_shape[-2:])
    found = np.empty(shape, problem.state_dtype)
    # Each state is the one before it in the scan's order and what the rows between them add.
    bounds = [0, *ends.tolist(), problem.k_len]
    spans = [*itertools.pairwise(bounds)][slice(1, None) if reverse else slice(None, -1)]
    sides = [
        Side(k, problem.k),
        Side(v, problem.v),
        Side(found, problem.view(shape, found.strides, tail=3)),
        state_side(initial, problem.initial),
    ]
    machine = Machine(problem.state_dtype)
    stacks = [*segmented_scan.stacks_of(machine, problem, sides)]

    def work(steps: Steps, task: tuple[list[Array], int], exact: bool) -> bool:
        (a, b, out, _), index = task
        out[:, index] = 0
        span = spans[index]
        chunked_scan.total(steps, machine.sizes, Operand(a), Operand(b), *span, out[:, index])
        return True

    tasks = [(stack, index) for stack in stacks for index in range(len(ends))]
    machine.run(tasks, work, 2 * math.prod(problem.state_shape) * problem.k_len)
    order = range(len(ends))
    for _, _, out, before in stacks:
        for index in reversed(order) if reverse else order:
            if before is not None:
                with np.errstate(all="ignore"):
                    np.add(out[:, index], before, out=out[:, index])
            before = out[:, index]
    return found


def readings(
    problem: linear_problem.Product,
    q: Array,
    k: Array,
    v: Array,
    initial: Array | None,
    ends: Array,
    *,
    reverse: bool,
) -> Array:
    """Return what row i of `q` reads from the state at ``ends[i]``, of shape problem.out_shape."""
    order = np.argsort(ends, kind="stable")
    ascending = bool((np.diff(ends) >= 0).all())
    if not ascending:
        q = q[..., order, :]
        problem = linear_problem.product_problem("prefix_state", q, k, v, initial, aligned=False)
    out = arrays.empty_laid_out(np, problem.out_shape, q, problem.dtype)
    reader = Reader(
        Side(q, problem.q, copies=True, rows=False),
        Side(out, problem.view(out.shape, out.strides), copies=True, rows=False),
        ends=ends[order],
    )
    scan_of(problem, k, v, (reader,), reverse).run(state_side(initial, problem.initial))
    found: Array = out if ascending else out[..., np.argsort(order), :]
    return found
