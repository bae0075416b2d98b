"""Attention and causal products with gradients for JAX, which JAX can also trace.

Importing this module imports jax; no other module of fa_cupy does. Calls on arrays with data run on
the device of the arrays. Under `jax.jit` and other transformations the arrays have no data yet, and
a callback is recorded, which computes on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

try:
    import jax
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    message = "fa_cupy.jax needs JAX, which is not installed: pip install jax"
    raise ModuleNotFoundError(message, name="jax") from error

import fa_cupy
from fa_cupy._score import Score, arrays_of, operands_of, with_arrays
from fa_cupy.core import arrays as core_arrays
from fa_cupy.core import attention_problem, checks, dispatch, linear_problem
from fa_cupy.score.program import no_gradient

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
    score: Score | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of JAX arrays, with gradients of `q`, `k`, `v`, `bias`, `sinks` and of a score.

    Parameters
    ----------
    q, k, v, bias, mask, scale, is_causal, causal_align, window, softcap, sinks
        As in `fa_cupy.attention`. All arguments but the arrays are static under `jax.jit`.
    score : Score, optional
        As in `fa_cupy.attention`. Its arrays may be traced: make it inside of the function that is
        transformed, of that function's arguments. Gradients flow to those of its arrays of floats
        that `fa_cupy.attention_backward` can compute them for, others are a ValueError.
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

    Slopes that are learned:

    >>> from fa_cupy import Score
    >>> def loss(slopes):
    ...     score = Score("s - slopes[h] * abs(i - j)", slopes=slopes)
    ...     return attention(q, k, v, score=score).sum()
    >>> jax.grad(loss)(jax.numpy.ones(8)).shape
    (8,)
    """
    mask = fa_cupy.BitMask.from_csr(mask) if hasattr(mask, "tocsr") else mask
    bits = mask if isinstance(mask, fa_cupy.BitMask) else None
    mask = None if bits is not None else mask
    _require_arrays("attention", q=q, k=k, v=v, bias=bias, mask=mask, sinks=sinks)
    with_lse = checks.flag("attention", "return_lse", return_lse)
    options = {
        "scale": scale,
        "is_causal": is_causal,
        "causal_align": causal_align,
        "window": tuple(window) if isinstance(window, list) else window,
        "softcap": softcap,
    }
    score, of_score = _taken_apart(score)
    static = (_Fixed(bits), _Fixed(score), *options.items())
    out, lse = _attention(static, q, k, v, bias, sinks, mask, *of_score)
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
    _require_arrays(name, q=q, k=k, v=v, initial_state=initial_state)
    reverse = checks.flag(name, "reverse", reverse)
    with_state = checks.flag(name, "return_state", return_state)
    out, state = _causal_product(reverse, q, k, v, initial_state)
    return (out, state) if with_state else out


class _Fixed:
    """What is no array, compared by identity, so that it can be an option."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Fixed) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _taken_apart(score: Score | None) -> tuple[Score | None, list[Array]]:
    """Return a score without its arrays, which may be traced, and these."""
    arrays = arrays_of("attention", score)
    if score is None:
        return None, []
    _require_arrays("attention", **arrays)
    if not all(isinstance(x, jax.Array) for x in arrays.values()):
        # As JAX's arrays they may have another dtype.
        named = {name.removeprefix("score."): jax.numpy.asarray(x) for name, x in arrays.items()}
        score = Score(score.expression, **{**score._arguments, **named})
        arrays = arrays_of("attention", score)
    for name, element in _looked_up(score).items():
        why = no_gradient("attention_backward", name, element)
        arrays[name] = _without_gradient(why, arrays[name])
    return with_arrays(score, dict.fromkeys(arrays)), [*arrays.values()]


def _looked_up(score: Score | None) -> dict[str, str]:
    """Return the arrays of floats of a score that have no gradient, each with an element of it."""
    operands = operands_of(score, {})
    if operands is None:
        return {}
    found = {name: operands.looked_up(name) for name in arrays_of("attention", score)}
    return {name: element for name, element in found.items() if element is not None}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _without_gradient(why: str, x: Array) -> Array:
    """Return an array whose gradient is an error, where it is asked for."""
    return x


def _without_gradient_forward(why: str, x: Array) -> tuple[Array, None]:
    return x, None


def _without_gradient_backward(why: str, saved: None, grad: Array) -> Any:
    raise ValueError(why)


_without_gradient.defvjp(_without_gradient_forward, _without_gradient_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    static: tuple[Any, ...], q: Array, k: Array, v: Array, bias: Array, sinks: Array, mask: Array,
    *of_score: Array,
) -> Any:  # fmt: skip
    bits, score, *pairs = static
    options = dict(pairs)

    def function(q: Any, k: Any, v: Any, bias: Any, sinks: Any, mask: Any, *of_score: Any) -> Any:
        mask = mask if bits.value is None else bits.value
        whole = _put_together(score.value, of_score)
        return fa_cupy.attention(
            q, k, v, bias, mask, sinks=sinks, score=whole, return_lse=True, **options
        )

    def shapes(q: Any, k: Any, v: Any, bias: Any, sinks: Any, mask: Any, *of_score: Any) -> Any:
        mask = mask if bits.value is None else bits.value
        whole = _put_together(score.value, of_score)
        operands = operands_of(whole, arrays_of("attention", whole))
        problem = attention_problem.attention_problem(
            q, k, v, bias, mask, sinks=sinks, score=operands, **options
        )
        lse = jax.ShapeDtypeStruct(
            problem.out_shape[:-1], attention_problem.sum_dtype(problem.dtype)
        )
        return jax.ShapeDtypeStruct(problem.out_shape, problem.dtype), lse

    return _call(function, shapes, q, k, v, bias, sinks, mask, *of_score)


def _put_together(score: Score | None, arrays: Sequence[Any]) -> Score | None:
    """Return a score with arrays in place of those that `_taken_apart` took."""
    if score is None:
        return None
    return with_arrays(score, dict(zip(arrays_of("attention", score), arrays, strict=True)))


def _attention_forward(static: tuple[Any, ...], *arrays: Array) -> Any:
    out, lse = _attention(static, *arrays)
    return (out, lse), (*arrays, out, lse)


def _attention_backward(static: tuple[Any, ...], saved: tuple[Array, ...], grads: Any) -> Any:
    bits, score, *pairs = static
    of_score = arrays_of("attention", score.value)
    names = "q", "k", "v", "bias", "sinks", "mask", *of_score
    arrays = dict(zip(names, saved, strict=False))
    without = _looked_up(score.value)
    need = [
        name
        for name, x in arrays.items()
        if x is not None and name not in without and jax.numpy.issubdtype(x.dtype, np.inexact)
    ]

    def function(q: Any, k: Any, v: Any, bias: Any, sinks: Any, mask: Any, *rest: Any) -> Any:
        *of_score, out, lse, dout, dlse = rest
        mask = mask if bits.value is None else bits.value
        return fa_cupy.attention_backward(
            dout, q, k, v, out, lse, bias, mask, sinks=sinks, dlse=dlse, need=need,
            score=_put_together(score.value, of_score), **dict(pairs),
        )  # fmt: skip

    shapes = tuple(_shape_of(arrays[name]) for name in need)
    found = dict(zip(need, _call(function, lambda *_: shapes, *saved, *grads), strict=True))
    # Not None, which would end the way back here: it is to reach the error.
    found |= {name: jax.numpy.full_like(arrays[name], np.nan) for name in without}
    return tuple(map(found.get, names))


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


def _require_arrays(name: str, **arrays: Any) -> None:
    """Raise for what is no array; only `q`, `k` and `v` must not be None."""
    dispatch.require(name, **{arg: x for arg, x in arrays.items() if arg in ("q", "k", "v")})
    for arg, x in arrays.items():
        if x is not None and not isinstance(x, jax.Array):  # as what is traced is
            core_arrays.to_native(name, writes=None, **{arg: x})


def _stand_in(x: Any) -> Any:
    """Return an array of the shape and dtype of `x` in the memory of one element."""
    return np.broadcast_to(np.zeros((), x.dtype), x.shape)


def _shape_of(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
