"""Attention, causal products, regression and denoising that JAX differentiates and traces.

What is traced becomes a callback, which computes on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

import fa_cupy
from fa_cupy._attention import TORCH_ARGS
from fa_cupy._kernel_regression import non_local_means_backward
from fa_cupy._score import Score, arrays_of, operands_of, with_arrays
from fa_cupy.core import arrays as core_arrays
from fa_cupy.core import attention_problem, checks, dispatch, linear_problem
from fa_cupy.dropout.arguments import of_arguments
from fa_cupy.keys import offsets
from fa_cupy.keys.layout import PLACES
from fa_cupy.score.program import no_gradient
from fa_cupy.smoothing import regression
from fa_cupy.smoothing.patches import Means

Array = Any

#: Arrays by their names in `fa_cupy.attention`: those that say where keys are, and the seed.
_NAMED = (*PLACES, "seed")
_SDPA: dict[str, Any] = {"name": "scaled_dot_product_attention", "args": TORCH_ARGS}


class Fixed:
    """What is no array, compared by identity, so that it can be an option."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fixed) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def check_features(name: str, q: Array, k: Array, x: Array, y: Array) -> None:
    """Check features as `linear_problem.check_features`."""
    linear_problem.check_features(name, *map(stand_in, (q, k, x, y)))


def taken_apart(score: Score | None) -> tuple[Score | None, list[Array]]:
    """Return a score without its arrays, which may be traced, and these."""
    arrays = arrays_of("attention", score)
    if score is None:
        return None, []
    require_arrays("attention", optional=True, **arrays)
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


class Static(NamedTuple):
    """All arguments of attention that are no arrays."""

    bits: Fixed  # a BitMask or None
    score: Fixed  # a Score or None, see `taken_apart`
    precision: str | None
    enable_gqa: bool | None  # None in `attention`; a bool in `scaled_dot_product_attention`
    options: tuple[tuple[str, Any], ...]  # those that gradients take too
    dropout: float = 0.0
    seed: int | None = None  # where it is no array that is traced

    def seeded(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return arguments with those of dropout."""
        if self.dropout == 0.0:
            return given
        seed = {} if self.seed is None else {"seed": self.seed}
        return {**given, "dropout": self.dropout, **seed}


def dropped(name: str, dropout: Any, seed: Any, arg: str = "dropout") -> tuple[Any, Any, Any]:
    """Return the probability of dropout, and its seed as a number or as an array that is traced.

    One of these two is None, and both are where no weight is dropped.
    """
    if jax.dtypes.issubdtype(getattr(seed, "dtype", None), jax.dtypes.prng_key):
        raise TypeError(f"{name}: seed is a key of JAX, want an integer (jax.random.bits(key))")
    given, traced = seed, isinstance(seed, jax.core.Tracer)
    if traced:
        given = np.zeros(seed.shape, seed.dtype)  # of which only the shape and the dtype matter
    elif seed is not None and not checks.is_int(seed):
        require_arrays(name, seed=seed)
        given = np.asarray(seed)
    found = of_arguments(name, dropout, given, arg)
    if found is None:
        return 0.0, None, None
    return (found.p, None, seed) if traced else (found.p, found.seed, None)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(
    static: Static, q: Array, k: Array, v: Array, bias: Array, sinks: Array, mask: Array,
    *rest: Array,
) -> Any:  # fmt: skip
    """Return the output of attention and its log-sum-exp.

    The rest are the four arguments of `PLACES`, the seed of dropout and the arrays of a score.
    """
    options = {"precision": static.precision, **dict(static.options)}

    def function(q: Any, k: Any, v: Any, bias: Any, sinks: Any, mask: Any, *rest: Any) -> Any:
        mask = mask if static.bits.value is None else static.bits.value
        places, whole = _places(rest), _put_together(static.score.value, rest[len(_NAMED) :])
        return fa_cupy.attention(
            q, k, v, bias, mask, sinks=sinks, score=whole, return_lse=True,
            **static.seeded(places), **options,
        )  # fmt: skip

    def shapes(q: Any, k: Any, v: Any, bias: Any, sinks: Any, mask: Any, *rest: Any) -> Any:
        mask = mask if static.bits.value is None else static.bits.value
        places, whole = _places(rest), _put_together(static.score.value, rest[len(_NAMED) :])
        places.pop("seed", None)
        operands = operands_of(whole, arrays_of("attention", whole))
        if places.get("q_offsets") is not None:
            operands = None  # its positions are in sequences whose lengths are not known yet
        names = {} if static.enable_gqa is None else _SDPA | {"grouped": static.enable_gqa}
        offsets.refuse("attention", [*places])
        problem = attention_problem.attention_problem(
            q, k, v, bias, mask, sinks=sinks, score=operands, **places, **names, **options
        )
        lse = jax.ShapeDtypeStruct(
            problem.out_shape[:-1], attention_problem.sum_dtype(problem.dtype)
        )
        return jax.ShapeDtypeStruct(problem.out_shape, problem.dtype), lse

    arrays = q, k, v, bias, sinks, mask, *rest
    if static.enable_gqa is not None:
        shapes(*map(stand_in, arrays))  # whose errors have the names of that function
    return _call(function, shapes, *arrays)


def _places(arrays: Sequence[Any]) -> dict[str, Any]:
    """Return which of `_NAMED` are given, of arrays that begin with all."""
    return {arg: x for arg, x in zip(_NAMED, arrays, strict=False) if x is not None}


def _put_together(score: Score | None, arrays: Sequence[Any]) -> Score | None:
    """Return a score with arrays in place of those that `taken_apart` took."""
    if score is None:
        return None
    return with_arrays(score, dict(zip(arrays_of("attention", score), arrays, strict=True)))


def _attention_forward(static: Static, *arrays: Array) -> Any:
    out, lse = attention(static, *arrays)
    return (out, lse), (*arrays, out, lse)


def _attention_backward(static: Static, saved: tuple[Array, ...], grads: Any) -> Any:
    bits, score, options = static.bits, static.score, static.options
    of_score = arrays_of("attention", score.value)
    names = "q", "k", "v", "bias", "sinks", "mask", *_NAMED, *of_score
    arrays = dict(zip(names, saved, strict=False))
    if arrays["page_table"] is not None:
        raise NotImplementedError(
            "attention: page_table is given and a gradient is asked for, want keys and values that "
            "are not in pages (calls with pages have no gradient)"
        )
    without = _looked_up(score.value)
    need = [
        name
        for name, x in arrays.items()
        if x is not None and name not in without and jax.numpy.issubdtype(x.dtype, np.inexact)
    ]

    def function(q: Any, k: Any, v: Any, bias: Any, sinks: Any, mask: Any, *rest: Any) -> Any:
        *arrays, out, lse, dout, dlse = rest
        mask = mask if bits.value is None else bits.value
        return fa_cupy.attention_backward(
            dout, q, k, v, out, lse, bias, mask, sinks=sinks, dlse=dlse, need=need,
            score=_put_together(score.value, arrays[len(_NAMED) :]),
            **static.seeded(_places(arrays)), **dict(options),
        )  # fmt: skip

    shapes = tuple(_shape_of(arrays[name]) for name in need)
    found = dict(zip(need, _call(function, lambda *_: shapes, *saved, *grads), strict=True))
    # Not None, which would end the way back here: it is to reach the error.
    found |= {name: jax.numpy.full_like(arrays[name], np.nan) for name in without}
    return tuple(map(found.get, names))


attention.defvjp(_attention_forward, _attention_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def causal_product(
    static: tuple[bool, str], q: Array, k: Array, v: Array, initial: Array, q_offsets: Array
) -> Any:
    """Return the output of a causal product and its last state."""
    reverse, algorithm = static

    def function(q: Any, k: Any, v: Any, initial: Any, q_offsets: Any) -> Any:
        return fa_cupy.causal_product(
            q, k, v, initial_state=initial, return_state=True, reverse=reverse,
            algorithm=algorithm, q_offsets=q_offsets,
        )  # fmt: skip

    def shapes(*arrays: Any) -> Any:
        return _product_shapes(product("causal_product", *arrays))

    return _call(function, shapes, q, k, v, initial, q_offsets)


def product(
    name: str, q: Any, k: Any, v: Any, initial: Any, q_offsets: Any = None, k_offsets: Any = None,
    *, aligned: bool = True, normalised: bool = False,
) -> linear_problem.Product:  # fmt: skip
    """Return the problem of a product of arrays whose numbers are not known."""
    given = dict(zip(PLACES[2:], (q_offsets, k_offsets), strict=True))
    offsets.refuse(name, [arg for arg, x in given.items() if x is not None])
    found = None
    if q_offsets is not None and min(q.ndim, k.ndim) > 1:
        lengths = q.shape[-2], q.shape[-2] if aligned else k.shape[-2]
        found = offsets.checked(name, ("q", "k"), lengths, q_offsets, k_offsets)
    return linear_problem.product_problem(
        name, q, k, v, initial, aligned=aligned, normalised=normalised, offsets=found
    )


def _product_shapes(problem: linear_problem.Product) -> Any:
    state = jax.ShapeDtypeStruct(problem.state_shape, problem.state_dtype)
    return jax.ShapeDtypeStruct(problem.out_shape, problem.dtype), state


def _product_forward(static: tuple[bool, str], *arrays: Array) -> Any:
    return causal_product(static, *arrays), arrays


def _product_backward(static: tuple[bool, str], saved: tuple[Array, ...], grads: Any) -> Any:
    def function(
        q: Any, k: Any, v: Any, initial: Any, q_offsets: Any, dout: Any, dstate: Any
    ) -> Any:
        return fa_cupy.causal_product_backward(
            dout, q, k, v, initial_state=initial, reverse=static[0], q_offsets=q_offsets,
            dstate=dstate,
        )  # fmt: skip

    given = [x for x in saved[:4] if x is not None]
    found = _call(function, lambda *_: tuple(map(_shape_of, given)), *saved, *grads)
    return *found, *[None] * (5 - len(found))


causal_product.defvjp(_product_forward, _product_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def linear_attention(
    static: tuple[str, float, bool], q: Array, k: Array, v: Array, initial: Array,
    q_offsets: Array, k_offsets: Array,
) -> Any:  # fmt: skip
    """Return the output of linear attention of packed sequences and their states.

    Static are the feature map, eps and whether it is causal.
    """

    def function(q: Any, k: Any, v: Any, initial: Any, q_offsets: Any, k_offsets: Any) -> Any:
        return fa_cupy.linear_attention(
            q, k, v, feature_map=static[0], eps=static[1], is_causal=static[2],
            initial_state=initial, return_state=True, q_offsets=q_offsets, k_offsets=k_offsets,
        )  # fmt: skip

    def shapes(*arrays: Any) -> Any:
        problem = product("linear_attention", *arrays, aligned=static[2], normalised=True)
        return _product_shapes(problem)

    return _call(function, shapes, q, k, v, initial, q_offsets, k_offsets)


def _linear_forward(static: tuple[str, float, bool], *arrays: Array) -> Any:
    return linear_attention(static, *arrays), arrays


def _linear_backward(static: tuple[str, float, bool], saved: tuple[Array, ...], grads: Any) -> Any:
    def function(
        q: Any, k: Any, v: Any, initial: Any, q_offsets: Any, k_offsets: Any, dout: Any, dstate: Any
    ) -> Any:
        return fa_cupy.linear_attention_backward(
            dout, q, k, v, feature_map=static[0], eps=static[1], is_causal=static[2],
            initial_state=initial, q_offsets=q_offsets, k_offsets=k_offsets, dstate=dstate,
        )  # fmt: skip

    given = [x for x in saved[:4] if x is not None]
    found = _call(function, lambda *_: tuple(map(_shape_of, given)), *saved, *grads)
    return *found, *[None] * (6 - len(found))


linear_attention.defvjp(_linear_forward, _linear_backward)


class Regression(NamedTuple):
    """All arguments of kernel regression that are no arrays."""

    bits: Fixed  # a BitMask or None
    width: Any  # where there is no array of bandwidths
    kernel: str

    def arguments(self, x: Any, X: Any, y: Any, widths: Any, mask: Any) -> regression.Arguments:
        """Return the arguments of a call."""
        bits, width = self.bits.value, self.width
        return regression.Arguments(
            x, X, y, width if widths is None else widths, mask if bits is None else bits
        )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def kernel_regression(
    static: Regression, x: Array, X: Array, y: Array, widths: Array, mask: Array
) -> Array:
    """Return the estimate of a kernel regression."""

    def function(*arrays: Any) -> Any:
        x, X, y, bandwidth, mask = static.arguments(*arrays)
        return fa_cupy.kernel_regression(x, X, y, bandwidth, static.kernel, mask=mask)

    def shapes(*arrays: Any) -> Any:
        given = static.arguments(*arrays)
        batch = regression.checked_batch("kernel_regression", given, static.kernel)
        shape = (*batch, given.x.shape[-2], *(given.y.shape[-1:] if given.y.ndim > 1 else ()))
        return jax.ShapeDtypeStruct(shape, given.y.dtype)

    return _call(function, shapes, x, X, y, widths, mask)


def _regression_forward(static: Regression, *arrays: Array) -> Any:
    return kernel_regression(static, *arrays), arrays


def _regression_backward(static: Regression, saved: tuple[Array, ...], dout: Array) -> Any:
    def function(*arrays: Any) -> Any:
        x, X, y, bandwidth, mask = static.arguments(*arrays[:-1])
        found = fa_cupy.kernel_regression_backward(
            arrays[-1], x, X, y, bandwidth, static.kernel, mask=mask
        )
        return found if arrays[3] is not None else found[:3]

    given = [x for x in saved[:4] if x is not None]
    found = _call(function, lambda *_: tuple(map(_shape_of, given)), *saved, dout)
    return *found, *[None] * (5 - len(found))


kernel_regression.defvjp(_regression_forward, _regression_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def non_local_means(static: Means, image: Array) -> Array:
    """Return the denoised image."""

    def function(image: Any) -> Any:
        return fa_cupy.non_local_means(image, **static._asdict())

    return _call(function, _shape_of, image)


def _means_forward(static: Means, image: Array) -> Any:
    return non_local_means(static, image), image


def _means_backward(static: Means, image: Array, dout: Array) -> Any:
    def function(dout: Any, image: Any) -> Any:
        return non_local_means_backward(dout, image, **static._asdict())

    return (_call(function, lambda _, image: _shape_of(image), dout, image),)


non_local_means.defvjp(_means_forward, _means_backward)


def _call(function: Callable[..., Any], shapes: Callable[..., Any], *arrays: Array) -> Any:
    """Call `function`, or record a callback whose results have the shapes of ``shapes(*arrays)``.

    An array may be None.
    """
    if not any(isinstance(x, jax.core.Tracer) for x in arrays):
        return function(*(None if x is None else jax.numpy.asarray(x) for x in arrays))
    stand_ins = map(stand_in, arrays)

    def on_host(*given: Any) -> Any:
        rest = iter(given)
        return function(*(None if x is None else np.asarray(next(rest)) for x in arrays))

    present = [x for x in arrays if x is not None]
    return jax.pure_callback(on_host, shapes(*stand_ins), *present, vmap_method="sequential")


def require_arrays(name: str, *, optional: bool = False, **arrays: Any) -> None:
    """Raise for what is no array; None is one only where it may be left out.

    Also for an array of NumPy with integers that would be others as an array of JAX.
    """
    if not optional:
        dispatch.require(name, **arrays)
    for arg, x in arrays.items():
        if x is None or isinstance(x, jax.Array):  # as what is traced is
            continue
        native = core_arrays.to_native(name, writes=None, **{arg: x})
        (x,) = native.arrays
        if native.backend != "numpy" or x.dtype.kind not in "iu":
            continue
        dtype = jax.dtypes.canonicalize_dtype(x.dtype)
        if dtype != x.dtype and (x.astype(dtype) != x).any():
            raise ValueError(
                f"{name}: {arg} has integers that {dtype} does not hold, want smaller ones, or "
                "64-bit arrays of JAX (the option jax_enable_x64)"
            )


def stand_in(x: Any) -> Any:
    """Return an array of the shape and dtype of `x` in the memory of one element; None for None."""
    # What JAX makes of a number while it traces has a dtype and no shape.
    return None if x is None else np.broadcast_to(np.zeros((), x.dtype), np.shape(x))


def _shape_of(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
