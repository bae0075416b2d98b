"""Functions with gradients for JAX, which JAX can also trace.

Importing this module imports jax; no other module of fa_cupy does. Calls on concrete arrays run on
the device of the arrays. Under `jax.jit` and other transformations the arrays are traced, without
numbers in them, and a callback is recorded, which computes on the CPU. Errors that are found only
when it runs, such as offsets out of range, are then errors of JAX (`JaxRuntimeError`) that contain
the message of the function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

try:
    import jax
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    message = "fa_cupy.jax needs JAX, which is not installed: pip install jax"
    raise ModuleNotFoundError(message, name="jax") from error

import numpy as np

import fa_cupy
from fa_cupy._attention import TORCH_ARGS, check_attn_mask
from fa_cupy._bitmask import bits_of_sparse
from fa_cupy._kernel_regression import checked_means
from fa_cupy._score import Score
from fa_cupy.core import attention_problem, checks, compositions, dispatch, linear_problem
from fa_cupy.jax import callbacks
from fa_cupy.jax.callbacks import Fixed, require_arrays, stand_in

__all__ = [
    "attention",
    "causal_product",
    "kernel_regression",
    "linear_attention",
    "merge_attention",
    "non_local_means",
    "prefix_state",
    "scaled_dot_product_attention",
]

Array = Any


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
    precision: str | None = None,
    score: Score | None = None,
    return_lse: bool = False,
    k_lengths: Array | int | None = None,
    page_table: Array = None,
    q_offsets: Array = None,
    k_offsets: Array = None,
    dropout: float = 0.0,
    seed: Array | int | None = None,
) -> Any:
    """Attention of JAX arrays, with gradients of `q`, `k`, `v`, `bias`, `sinks` and of a score.

    Parameters
    ----------
    q, k, v, bias, mask, scale, is_causal, causal_align, window, softcap, sinks, precision
        As in `fa_cupy.attention`. All arguments but the arrays are static under `jax.jit`. `bias`
        cannot be a sparse matrix here.
    score : Score, optional
        As in `fa_cupy.attention`. Its arrays may be traced: make it inside of the function that is
        transformed, from that function's arguments. Gradients flow to the arrays of floats for
        which `fa_cupy.attention_backward` computes them; for other arrays they are a ValueError.
    return_lse : bool
        Whether to return the log-sum-exp too. Gradients flow through it as well.
    k_lengths, page_table : jax.Array, optional
        As in `fa_cupy.attention`; `k_lengths` may also be an int. There are no gradients with a
        `page_table`.
    q_offsets, k_offsets : jax.Array, optional
        As in `fa_cupy.attention`; they may be traced. `mask` cannot be a list here.
    dropout : float
        As in `fa_cupy.attention`.
    seed : int or jax.Array of one integer, optional
        As in `fa_cupy.attention`. It may be traced: one that grows in each step of a training is
        compiled once.

    Returns
    -------
    out : jax.Array, shape (..., Lq, Dv)
    lse : jax.Array, shape (..., Lq)
        Only with `return_lse`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As for `fa_cupy.attention`; in the gradients, as for `fa_cupy.attention_backward`. A
        NotImplementedError also for gradients with a `page_table`.

    See Also
    --------
    fa_cupy.attention_backward : computes the gradients; there are no second derivatives.

    Examples
    --------
    >>> import jax
    >>> from fa_cupy.jax import attention
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 8, 100, 16))
    >>> dq = jax.grad(lambda q: attention(q, k, v, is_causal=True).sum())(q)

    Sequences of 30, 50 and 20 tokens, end to end:

    >>> offsets = jax.numpy.asarray([0, 30, 80, 100])
    >>> dq = jax.grad(lambda q: attention(q, k, v, is_causal=True, q_offsets=offsets).sum())(q)

    Slopes that are learned:

    >>> from fa_cupy import Score
    >>> def loss(slopes):
    ...     score = Score("s - slopes[h] * abs(i - j)", slopes=slopes)
    ...     return attention(q, k, v, score=score).sum()
    >>> jax.grad(loss)(jax.numpy.ones(8)).shape
    (8,)

    A tenth of the weights left out, those of `fa_cupy.dropout_mask` for the same seed:

    >>> dq = jax.grad(lambda q: attention(q, k, v, dropout=0.1, seed=2024).sum())(q)
    """
    dispatch.refuse_sparse_bias("attention", bias, "jax.numpy.asarray(bias.toarray())")
    mask = bits_of_sparse("attention", "mask", mask)
    bits = mask if isinstance(mask, fa_cupy.BitMask) else None
    mask = None if bits is not None else mask
    require_arrays("attention", q=q, k=k, v=v)
    require_arrays("attention", optional=True, bias=bias, mask=mask, sinks=sinks)
    if checks.is_int(k_lengths):
        wanted = "an int >= 0 and below 2**31"
        k_lengths = np.asarray(
            checks.whole("attention", "k_lengths", k_lengths, wanted, range(2**31))
        )
    places: dict[str, Any] = {"k_lengths": k_lengths, "page_table": page_table}
    places |= {"q_offsets": q_offsets, "k_offsets": k_offsets}
    require_arrays("attention", optional=True, **places)
    with_lse = checks.flag("attention", "return_lse", return_lse)
    window = tuple(window) if isinstance(window, list) else window
    options = {
        "scale": scale, "is_causal": is_causal, "causal_align": causal_align, "window": window,
        "softcap": softcap,
    }  # fmt: skip
    attention_problem.check_options("attention", precision=precision, **options)
    score, of_score = callbacks.taken_apart(score)
    share, number, seed = callbacks.dropped("attention", dropout, seed)
    static = callbacks.Static(
        Fixed(bits), Fixed(score), precision, None, tuple(options.items()), share, number
    )
    rest = *places.values(), seed, *of_score
    out, lse = callbacks.attention(static, q, k, v, bias, sinks, mask, *rest)
    return (out, lse) if with_lse else out


def causal_product(
    q: Array,
    k: Array,
    v: Array,
    *,
    initial_state: Array = None,
    return_state: bool = False,
    reverse: bool = False,
    algorithm: str = "auto",
    q_offsets: Array = None,
) -> Any:
    """Causal product of JAX arrays, with gradients of `q`, `k`, `v` and `initial_state`.

    Parameters
    ----------
    q, k, v, initial_state, return_state, reverse, algorithm
        As in `fa_cupy.causal_product`. All arguments but the arrays are static under `jax.jit`.
    q_offsets : jax.Array, optional
        As in `fa_cupy.causal_product`; it may be traced.

    Returns
    -------
    out : jax.Array, shape (..., L, M)
    state : jax.Array, shape (..., E, M), or (..., sequences, E, M) with offsets
        Only with `return_state`; gradients flow through it as well.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As for `fa_cupy.causal_product`.

    See Also
    --------
    fa_cupy.causal_product_backward : computes the gradients; there are no second derivatives.

    Examples
    --------
    >>> import jax
    >>> from fa_cupy.jax import causal_product
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 8, 100, 16))
    >>> dq = jax.grad(lambda q: causal_product(q, k, v).sum())(q)
    """
    name = "causal_product"
    require_arrays(name, q=q, k=k, v=v)
    require_arrays(name, optional=True, initial_state=initial_state, q_offsets=q_offsets)
    reverse = checks.flag(name, "reverse", reverse)
    with_state = checks.flag(name, "return_state", return_state)
    if not isinstance(algorithm, str):
        linear_problem.algorithm(name, algorithm, "numpy", None)  # raises the error
    static = reverse, algorithm
    out, state = callbacks.causal_product(static, q, k, v, initial_state, q_offsets)
    return (out, state) if with_state else out


def kernel_regression(
    x: Array,
    X: Array,
    y: Array,
    bandwidth: Array,
    kernel: str = "gaussian",
    *,
    mask: Any = None,
) -> Array:
    """Kernel regression of JAX arrays, with gradients of `x`, `X`, `y` and `bandwidth`.

    Parameters
    ----------
    x, X, y, bandwidth, kernel, mask
        As in `fa_cupy.kernel_regression`. A bandwidth that is an array, without axes or with those
        of an array there, has a gradient. `kernel` and a bandwidth that is a number are static
        under `jax.jit`.

    Returns
    -------
    jax.Array, shape (..., m) for `y` of one axis, else (..., m, c)
        Where no sample has a weight, NaN, and its gradients are 0.

    Raises
    ------
    TypeError, ValueError
        As for `fa_cupy.kernel_regression`.

    Warns
    -----
    RuntimeWarning
        As for `fa_cupy.kernel_regression`.

    See Also
    --------
    fa_cupy.kernel_regression_backward : computes the gradients; there are no second derivatives.

    Examples
    --------
    >>> import jax
    >>> from fa_cupy.jax import kernel_regression
    >>> X, y = jax.random.uniform(jax.random.key(0), (300, 2)), jax.numpy.ones(300)
    >>> others = ~jax.numpy.eye(300, dtype=bool)
    >>> def loss(h):
    ...     return ((kernel_regression(X, X, y, h, mask=others) - y) ** 2).mean()
    >>> jax.grad(loss)(0.2).shape
    ()
    """
    name = "kernel_regression"
    mask = bits_of_sparse(name, "mask", mask)
    bits = mask if isinstance(mask, fa_cupy.BitMask) else None
    mask = None if bits is not None else mask
    is_array = isinstance(bandwidth, jax.Array) or getattr(bandwidth, "shape", ()) != ()
    widths: Array = bandwidth if is_array else None
    require_arrays(name, x=x, X=X, y=y)
    require_arrays(name, optional=True, bandwidth=widths, mask=mask)
    width = None if is_array else checks.finite(name, "bandwidth", bandwidth)
    if is_array and widths.ndim == 0:
        widths = widths.reshape(1)
    static = callbacks.Regression(Fixed(bits), width, kernel)
    return callbacks.kernel_regression(static, x, X, y, widths, mask)


def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    feature_map: str | Callable[[Any], Any] = "elu1",
    eps: float = 1e-6,
    is_causal: bool = True,
    initial_state: Any = None,
    return_state: bool = False,
    q_offsets: Array = None,
    k_offsets: Array = None,
) -> Any:
    """Linear attention of JAX arrays, with gradients of `q`, `k`, `v` and `initial_state`.

    Parameters
    ----------
    q, k, v, feature_map, eps, is_causal, initial_state, return_state
        As in `fa_cupy.linear_attention`. Gradients flow through a callable too, if it is made of
        JAX's operations; it is called with `q` and with `k`. `eps` and flags are static under
        `jax.jit`.
    q_offsets, k_offsets : jax.Array, optional
        As in `fa_cupy.linear_attention`; they may be traced.

    Returns
    -------
    out : jax.Array, shape (..., Lq, M)
    state : jax.Array, shape (..., F, M + 1), or (..., sequences, F, M + 1) with offsets
        Only with `return_state`; gradients flow through it as well.

    Raises
    ------
    TypeError, ValueError
        As for `fa_cupy.linear_attention`.

    Notes
    -----
    JAX computes the features in float32 (float64 for float64 arrays), and `causal_product` the
    sums. With offsets, `fa_cupy.linear_attention` computes everything except the features of a
    callable.

    Examples
    --------
    >>> import jax
    >>> from fa_cupy.jax import linear_attention
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 8, 100, 16))
    >>> dq = jax.grad(lambda q: linear_attention(q, k, v, feature_map=jax.nn.softplus).sum())(q)
    """
    name = "linear_attention"
    require_arrays(name, q=q, k=k, v=v)
    offsets = {"q_offsets": q_offsets, "k_offsets": k_offsets}
    require_arrays(name, optional=True, initial_state=initial_state, **offsets)
    q, k, v = map(jax.numpy.asarray, (q, k, v))
    initial_state = None if initial_state is None else jax.numpy.asarray(initial_state)
    x, y = compositions.mapped(_LIBRARY, name, feature_map, q, k)
    number = checks.finite(name, "eps", eps, minimum=0.0)
    causal = checks.flag(name, "is_causal", is_causal)
    with_state = checks.flag(name, "return_state", return_state)
    where = [*map(stand_in, offsets.values())]
    if causal and k_offsets is not None:
        raise ValueError(f"{name}: k_offsets is given with is_causal=True, want is_causal=False")
    for arrays in ((q, k, v, None), (x, y, v, initial_state)):
        given = map(stand_in, arrays)
        problem = callbacks.product(name, *given, *where, aligned=causal, normalised=True)
    real = problem.state_dtype
    if q_offsets is not None:
        wide = real if callable(feature_map) else q.dtype
        static = "identity" if callable(feature_map) else feature_map, number, causal
        inputs = (z.astype(wide) for z in (x, y, v))
        out, state = callbacks.linear_attention(static, *inputs, initial_state, *offsets.values())
        return (out.astype(q.dtype), state) if with_state else out.astype(q.dtype)
    x, y = (compositions.features(_LIBRARY, feature_map, z.astype(real)) for z in (x, y))
    out, state = compositions.linear_attention(
        _LIBRARY, x, y, v.astype(real), number, initial_state, is_causal=causal,
        return_state=with_state,
    )  # fmt: skip
    out = out.astype(q.dtype)
    return (out, state) if with_state else out


def merge_attention(outs: Sequence[Array] | Array, lses: Sequence[Array] | Array) -> Any:
    """Combine attention results over disjoint sets of keys, with gradients of all parts.

    Parameters
    ----------
    outs, lses : sequence of jax.Array, or one jax.Array of them, stacked
        As in `fa_cupy.merge_attention`.

    Returns
    -------
    out : jax.Array, shape (..., Lq, Dv)
    lse : jax.Array, shape (..., Lq)
        As from `fa_cupy.merge_attention`. Where all parts are empty, gradients are 0.

    Raises
    ------
    TypeError, ValueError
        As for `fa_cupy.merge_attention`.

    Notes
    -----
    Made of JAX's operations: it runs on the device under `jax.jit` too, and has second derivatives.

    Examples
    --------
    >>> import jax
    >>> from fa_cupy.jax import attention, merge_attention
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 100, 16))
    >>> def loss(q):
    ...     parts = [attention(q, k[s], v[s], return_lse=True) for s in (slice(30), slice(30, 100))]
    ...     return merge_attention(*zip(*parts))[0].sum()
    >>> dq = jax.grad(loss)(q)
    """
    name = "merge_attention"
    named = attention_problem.named_parts(name, outs, lses)
    require_arrays(name, **named)
    parts = [*map(jax.numpy.asarray, named.values())]
    outs, lses = parts[: len(parts) // 2], parts[len(parts) // 2 :]
    attention_problem.matching_parts(name, *([*map(stand_in, x)] for x in (outs, lses)))
    real = attention_problem.sum_dtype(outs[0].dtype)
    out, lse = compositions.merge(_LIBRARY, *([x.astype(real) for x in xs] for xs in (outs, lses)))
    return out.astype(outs[0].dtype), lse


def non_local_means(
    image: Array,
    h: float,
    patch_size: int = 7,
    patch_distance: int | None = 11,
    *,
    sigma: float = 0.0,
) -> Array:
    """Denoise an image by means of the pixels whose surroundings are alike, with its gradient.

    Parameters
    ----------
    image, h, patch_size, patch_distance, sigma
        As in `fa_cupy.non_local_means`. All arguments but the image are static under `jax.jit`.

    Returns
    -------
    jax.Array
        Of the shape and dtype of the image.

    Raises
    ------
    TypeError, ValueError
        As for `fa_cupy.non_local_means`.

    Notes
    -----
    The gradient takes into account that both the averaged pixels and their weights depend on the
    image. It is computed in float64. There are no second derivatives.

    Examples
    --------
    >>> import jax
    >>> from fa_cupy.jax import non_local_means
    >>> image = jax.random.uniform(jax.random.key(0), (20, 30))
    >>> def loss(image):
    ...     return (non_local_means(image, 0.5, patch_size=3, patch_distance=4) ** 2).sum()
    >>> jax.grad(loss)(image).shape
    (20, 30)
    """
    name = "non_local_means"
    require_arrays(name, image=image)
    means = checked_means(name, h, patch_size, patch_distance, sigma)
    return callbacks.non_local_means(means, image)


def prefix_state(
    k: Array,
    v: Array,
    ends: Sequence[int] | Any = None,
    *,
    q: Array = None,
    initial_state: Array = None,
    reverse: bool = False,
) -> Array:
    """Return running sums of outer products, or their products with queries, with gradients.

    Parameters
    ----------
    k, v, ends, q, initial_state, reverse
        As in `fa_cupy.prefix_state`. `ends` and `reverse` are static under `jax.jit`.

    Returns
    -------
    jax.Array
        As from `fa_cupy.prefix_state`.

    Raises
    ------
    TypeError, ValueError
        As for `fa_cupy.prefix_state`.

    Notes
    -----
    Without `q`, JAX computes the sums, by one product between each two neighbouring positions; they
    stay on the device under `jax.jit` too, and have second derivatives. With `q`, the result is
    that of `causal_product` for a sequence in which queries and keys stand in the order of
    positions.

    Examples
    --------
    >>> import jax
    >>> from fa_cupy.jax import prefix_state
    >>> k, v = jax.random.normal(jax.random.key(0), (2, 1000, 8))
    >>> dk = jax.grad(lambda k: prefix_state(k, v, range(100, 1001, 100)).sum())(k)
    """
    name = "prefix_state"
    require_arrays(name, k=k, v=v)
    require_arrays(name, optional=True, q=q, initial_state=initial_state)
    given = [None if x is None else jax.numpy.asarray(x) for x in (q, k, v, initial_state)]
    problem = linear_problem.product_problem(name, *map(stand_in, given), aligned=False)
    q, k, v, initial_state = given
    reverse = checks.flag(name, "reverse", reverse)
    if ends is None:
        found = [0 if reverse else problem.k_len] * (1 if q is None else problem.q_len)
    else:
        found = linear_problem.positions(name, ends, problem.k_len).tolist()
    if q is not None:
        if len(found) != problem.q_len:
            raise ValueError(f"{name}: ends has {len(found)} positions, q has {problem.q_len} rows")
        return compositions.readings(_LIBRARY, q, k, v, initial_state, found, reverse=reverse)
    k, v = (x.astype(problem.state_dtype) for x in (k, v))
    states = compositions.states(k, v, initial_state, found, jax.numpy.stack, reverse=reverse)
    return states[..., 0, :, :] if ends is None else states


def scaled_dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    seed: Array | int | None = None,
) -> Array:
    """Attention with the names and the meaning of PyTorch's function, with gradients.

    Parameters
    ----------
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        As in `fa_cupy.scaled_dot_product_attention`. All arguments but the arrays are static under
        `jax.jit`; an `attn_mask` of floats has a gradient too.
    seed : int or jax.Array of one integer, optional
        As in `attention`; PyTorch's function has no such argument.

    Returns
    -------
    jax.Array, shape (..., L, Ev)

    Raises
    ------
    TypeError, ValueError
        As for `fa_cupy.scaled_dot_product_attention`.

    Examples
    --------
    >>> import jax
    >>> from fa_cupy.jax import scaled_dot_product_attention
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 8, 100, 16))
    >>> dq = jax.grad(lambda q: scaled_dot_product_attention(q, k, v, is_causal=True).sum())(q)
    """
    name = "scaled_dot_product_attention"
    check_attn_mask(name, attn_mask)
    attn_mask = bits_of_sparse(name, "attn_mask", attn_mask)
    bits = attn_mask if isinstance(attn_mask, fa_cupy.BitMask) else None
    given = None if bits is not None else attn_mask
    require_arrays(name, **dict(zip(TORCH_ARGS, (query, key, value), strict=False)))
    require_arrays(name, optional=True, attn_mask=given)
    share, number, seed = callbacks.dropped(name, dropout_p, seed, "dropout_p")
    attention_problem.torch_options(name, attn_mask, is_causal)
    grouped = checks.flag(name, "enable_gqa", enable_gqa)
    options = {"scale": scale, "is_causal": is_causal, "causal_align": "top_left"}
    attention_problem.check_options(name, **options)
    is_mask = given is not None and given.dtype == bool
    bias, mask = (None, given) if is_mask else (given, None)
    static = callbacks.Static(
        Fixed(bits), Fixed(None), None, grouped, tuple(options.items()), share, number
    )
    return callbacks.attention(static, query, key, value, bias, None, mask, *[None] * 4, seed)[0]


def _zeros(x: Array, rows: int) -> Array:
    return jax.numpy.zeros((*x.shape[:-2], rows, x.shape[-1]), x.dtype)


def _product(q: Array, k: Array, v: Array, initial: Array, reverse: bool) -> Array:
    return callbacks.causal_product((reverse, "auto"), q, k, v, initial, None)[0]


_LIBRARY = compositions.Library(
    jax.numpy, jax.lax.stop_gradient, _zeros, _product, require_arrays, callbacks.check_features
)
