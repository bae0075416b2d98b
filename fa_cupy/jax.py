"""Attention and causal products with gradients for JAX, which JAX can also trace.

Importing this module imports jax; no other module of fa_cupy does. Calls on arrays with data run on
the device of the arrays. Under `jax.jit` and other transformations the arrays have no data yet, and
a callback is recorded, which computes on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

import fa_cupy
from fa_cupy.core import arrays as core_arrays
from fa_cupy.core import attention_problem, checks, dispatch, linear_problem

Array = Any
Options = tuple[tuple[str, Any], ...]


def attention(
    q: Array,
    k: Array,
    v: Array,
    bias: Array = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    causal_align: str | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    sinks: Array = None,
    return_lse: bool = False,
) -> Any:
    """Attention of JAX arrays, with gradients of `q`, `k`, `v`, `bias` and `sinks`.

    Parameters
    ----------
    q, k, v, bias, mask, scale, is_causal, causal_align, window, softcap, sinks
        As in `fa_cupy.attention`. All arguments but the arrays are static under `jax.jit`.
    return_lse : bool
        Whether to return the log-sum-exp too. Gradients flow through it as well.

    Returns
    -------
    out : jax.Array, shape (..., Lq, Dv)
    lse : jax.Array, shape (..., Lq)
        Only with `return_lse`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As for `fa_cupy.attention`.

    See Also
    --------
    fa_cupy.attention_backward : computes the gradients; there are no second derivatives.

    Examples
    --------
    >>> import jax
    >>> from fa_cupy.jax import attention
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 8, 100, 16))
    >>> dq = jax.grad(lambda q: attention(q, k, v, is_causal=True).sum())(q)
    """
    bits = mask if isinstance(mask, fa_cupy.BitMask) else None
    mask = None if bits is not None else mask
    _require_arrays("attention", q, k, v, bias=bias, mask=mask, sinks=sinks)
    with_lse = checks.flag("attention", "return_lse", return_lse)
    options = {
        "scale": scale,
        "is_causal": is_causal,
        "causal_align": causal_align,
        "window": tuple(window) if isinstance(window, list) else window,
        "softcap": softcap,
    }
    out, lse = _attention((_Bits(bits), *options.items()), q, k, v, bias, sinks, mask)
    return (out, lse) if with_lse else out


def causal_product(
    q: Array,
    k: Array,
    v: Array,
    *,
    initial_state: Array = None,
    return_state: bool = False,
    reverse: bool = False,
) -> Any:
    """Causal product of JAX arrays, with gradients of `q`, `k`, `v` and `initial_state`.

    Parameters
    ----------
    q, k, v, initial_state, return_state, reverse
        As in `fa_cupy.causal_product`. All arguments but the arrays are static under `jax.jit`.

    Returns
    -------
    out : jax.Array, shape (..., L, M)
    state : jax.Array, shape (..., E, M)
        Only with `return_state`; gradients flow through it as well.

    Raises
    ------
    TypeError, ValueError
        As for `fa_cupy.causal_product`.

    Examples
    --------
    >>> import jax
    >>> from fa_cupy.jax import causal_product
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 8, 100, 16))
    >>> dq = jax.grad(lambda q: causal_product(q, k, v).sum())(q)
    """
    name = "causal_product"
    _require_arrays(name, q, k, v, initial_state=initial_state)
    reverse = checks.flag(name, "reverse", reverse)
    with_state = checks.flag(name, "return_state", return_state)
    out, state = _causal_product(reverse, q, k, v, initial_state)
    return (out, state) if with_state else out


class _Bits:
    """A mask that is no array, compared by identity, so that it can be an option."""

    def __init__(self, mask: Any) -> None:
        self.mask = mask

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bits) and self.mask is other.mask

    def __hash__(self) -> int:
        return id(self.mask)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    static: tuple[Any, ...], q: Array, k: Array, v: Array, bias: Array, sinks: Array, mask: Array
) -> Any:
    bits, *pairs = static
    options = dict(pairs)

    def function(q: Any, k: Any, v: Any, bias: Any, sinks: Any, mask: Any) -> Any:
        mask = mask if bits.mask is None else bits.mask
        return fa_cupy.attention(q, k, v, bias, mask, sinks=sinks, return_lse=True, **options)

    def shapes(q: Any, k: Any, v: Any, bias: Any, sinks: Any, mask: Any) -> Any:
        mask = mask if bits.mask is None else bits.mask
        problem = attention_problem.attention_problem(q, k, v, bias, mask, sinks=sinks, **options)
        lse = jax.ShapeDtypeStruct(
            problem.out_shape[:-1], attention_problem.sum_dtype(problem.dtype)
        )
        return jax.ShapeDtypeStruct(problem.out_shape, problem.dtype), lse

    return _call(function, shapes, q, k, v, bias, sinks, mask)


def _attention_forward(static: tuple[Any, ...], *arrays: Array) -> Any:
    out, lse = _attention(static, *arrays)
    return (out, lse), (*arrays, out, lse)


def _attention_backward(static: tuple[Any, ...], saved: tuple[Array, ...], grads: Any) -> Any:
    bits, *pairs = static

    def function(q: Any, k: Any, v: Any, bias: Any, sinks: Any, mask: Any, *results: Any) -> Any:
        out, lse, dout, dlse = results
        mask = mask if bits.mask is None else bits.mask
        return fa_cupy.attention_backward(
            dout, q, k, v, out, lse, bias, mask, sinks=sinks, dlse=dlse, **dict(pairs)
        )

    given = [x for x in saved[:5] if x is not None]
    found = iter(_call(function, lambda *_: tuple(map(_shape_of, given)), *saved, *grads))
    return *[None if x is None else next(found) for x in saved[:5]], None  # of the mask


_attention.defvjp(_attention_forward, _attention_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _causal_product(reverse: bool, q: Array, k: Array, v: Array, initial: Array) -> Any:
    def function(q: Any, k: Any, v: Any, initial: Any) -> Any:
        return fa_cupy.causal_product(
            q, k, v, initial_state=initial, return_state=True, reverse=reverse
        )

    def shapes(*arrays: Any) -> Any:
        problem = linear_problem.product_problem("causal_product", *arrays)
        state = jax.ShapeDtypeStruct(problem.state_shape, problem.state_dtype)
        return jax.ShapeDtypeStruct(problem.out_shape, problem.dtype), state

    return _call(function, shapes, q, k, v, initial)


def _product_forward(reverse: bool, *arrays: Array) -> Any:
    return _causal_product(reverse, *arrays), arrays


def _product_backward(reverse: bool, saved: tuple[Array, ...], grads: Any) -> Any:
    def function(q: Any, k: Any, v: Any, initial: Any, dout: Any, dstate: Any) -> Any:
        return fa_cupy.causal_product_backward(
            dout, q, k, v, initial_state=initial, reverse=reverse, dstate=dstate
        )

    given = [x for x in saved if x is not None]
    found = _call(function, lambda *_: tuple(map(_shape_of, given)), *saved, *grads)
    return *found, *[None] * (4 - len(found))


_causal_product.defvjp(_product_forward, _product_backward)


def _call(function: Callable[..., Any], shapes: Callable[..., Any], *arrays: Array) -> Any:
    """Call `function`, or record a callback whose results have the shapes of ``shapes(*arrays)``.

    An array may be None.
    """
    if not any(isinstance(x, jax.core.Tracer) for x in arrays):
        return function(*(None if x is None else jax.numpy.asarray(x) for x in arrays))
    stand_ins = [None if x is None else _stand_in(x) for x in arrays]

    def on_host(*given: Any) -> Any:
        rest = iter(given)
        return function(*(None if x is None else np.asarray(next(rest)) for x in arrays))

    present = [x for x in arrays if x is not None]
    return jax.pure_callback(on_host, shapes(*stand_ins), *present, vmap_method="sequential")


def _require_arrays(name: str, q: Any, k: Any, v: Any, **more: Any) -> None:
    """Raise for what is no array; only those of `more` may be None."""
    named = {"q": q, "k": k, "v": v}
    dispatch.require(name, **named)
    for arg, x in (named | more).items():
        if x is not None and not isinstance(x, jax.Array):  # as what is traced is
            core_arrays.to_native(name, writes=None, **{arg: x})


def _stand_in(x: Any) -> Any:
    """Return an array of the shape and dtype of `x` in the memory of one element."""
    return np.broadcast_to(np.zeros((), x.dtype), x.shape)


def _shape_of(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
