"""Causal products, linear attention and prefix states: checks and dispatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fa_cupy.core import arrays, attention_problem, checks, dispatch, linear_problem
from fa_cupy.core.arrays import Native
from fa_cupy.keys import layout, offsets
from fa_cupy.keys.layout import KeyArrays
from fa_cupy.keys.offsets import Offsets

_FEATURE_MAPS = ("elu1", "relu", "exp", "identity")

# By the type of q: what answers a repeated call without looking at it closely.
_CACHED: dict[type, Any] = {}
_CACHED_BACKWARD: dict[type, Any] = {}
_CACHED_NORMALISED: dict[type, Any] = {}


def causal_product(
    q: Any,
    k: Any,
    v: Any,
    *,
    initial_state: Any = None,
    return_state: bool = False,
    reverse: bool = False,
    algorithm: str = "auto",
    q_offsets: Any = None,
    out: Any = None,
) -> Any:
    """Causal product of queries, keys and values, in time proportional to their length.

    Computes ``numpy.tril(q @ k.mT) @ v`` over the last two axes, unscaled and unnormalised, without
    an array of size L x L; the axes before them are batch axes that broadcast as in `numpy.matmul`.

    Parameters
    ----------
    q : array, shape (..., L, E)
        Queries: an array of NumPy, CuPy or any library that supports DLPack (PyTorch, JAX, ...), of
        dtype float16, bfloat16 (`ml_dtypes.bfloat16`), float32 or float64. Any strides.
    k : array, shape (..., L, E)
        Keys, of the same library, device and dtype.
    v : array, shape (..., L, M)
        Values. With 4 axes or more in each of `q`, `k` and `v`, the keys and values may have fewer
        heads (axis -3) than the queries: numbers that divide that of the queries, and one of which
        divides the other.
    initial_state : array, shape (..., E, M), optional
        The sum before the first row: the state that a call for earlier rows returned, or any array
        of float32 (float64 for float64 input). Its batch axes broadcast with the others. Where `q`,
        `k` and `v` have heads (4 axes or more each), it has 1 head, or as many as one of them, or
        any number if all of them have 1.
    return_state : bool
        Whether to return the state after the last row too.
    reverse : bool
        Whether to go from the last row to the first: ``numpy.triu`` instead of ``numpy.tril``.
    algorithm : {"auto", "chunked", "recurrent", "low_occupancy"}
        The way of computing. ``"auto"`` and ``"chunked"`` support all arrays; the others are
        kernels for float32 on a GPU.
    q_offsets : array of int32 or int64, shape (n + 1,), optional
        Where n packed sequences begin, and where the last one ends; in the memory of the host (a
        NumPy array) or of the device of `q`. Rows ``q_offsets[s]`` to ``q_offsets[s + 1] - 1`` are
        sequence s, for which the product is computed by itself. Each sequence has a state: states
        have an axis of sequences before the last two, ``(..., n, E, M)``. Rows of no sequence have
        output 0.
    out : array, shape (..., L, M), optional
        Array for the output: of the library and the dtype of `q`, without overlap with an input.

    Returns
    -------
    out : array, shape (..., L, M)
        Of the library, the dtype and the memory layout of `q`.
    state : array, shape (..., E, M), or (..., n, E, M) with `q_offsets`
        Only with `return_state`: ``initial_state + k.mT @ v``, in float32, or float64 for float64
        input. It has the batch axes of `k`, `v` and `initial_state`.

    Raises
    ------
    TypeError, ValueError
        With a message that names the argument, its value and the value that is wanted, before
        anything is allocated.
    NotImplementedError
        For an `algorithm` that the GPU has no kernel for (on the CPU, and for other dtypes than
        float32, that is a ValueError), and for `q_offsets` on a GPU below compute capability 8.0.
        While a stream is captured into a CUDA graph, for `q_offsets` in the memory of the host and,
        without offsets, for `q` and `k` wider than 256 if they are not of float32. The capture can
        go on.

    See Also
    --------
    causal_product_backward : its gradients.
    linear_attention : the normalised form.
    prefix_state : the states at any positions, or their products with queries.

    Notes
    -----
    Row i of the output is ``q[i] @ S[i]``, where the state ``S[i]`` is the sum of the outer
    products of ``k[j]`` and ``v[j]`` up to row i [1]_. Within chunks of rows the product is masked
    scores times values; rows of earlier chunks contribute through the state. State and sums are
    float32 (float64 for float64 input). Results are bitwise repeatable.

    Of packed sequences (`q_offsets`), numbers on the host are checked. Those on a device are not
    read back: where one descends or is out of range, the output and the states of the sequences
    that it bounds are NaN, and their gradients 0. Nothing in one sequence, NaN included, affects
    another.

    On a GPU, tensor cores multiply float32 as pairs of float16 numbers, up to widths of 128. The
    error is small compared with the largest terms of a row and of a chunk of 64 rows, so columns or
    rows that are 1e-5 of their neighbours lose digits. ``algorithm="recurrent"`` and
    ``"low_occupancy"`` use plain float32.

    The state and the scores ``q[i] @ k[j]`` have to stay in the range of float32 (float64 for
    float64 input), even if the product with the third factor is in that range again. A state beyond
    the range is infinite, and its product with a 0 in `q` is NaN. Products that underflow count as
    0. Which row is the first to be affected depends on the chunks.

    Output (i, m) is not finite where a product ``q[i, e] * k[j, e] * v[j, m]`` that belongs to its
    sum has a factor that is not finite, or where a sum is out of range. Rows after i never affect
    it.

    References
    ----------
    .. [1] A. Katharopoulos, A. Vyas, N. Pappas and F. Fleuret, "Transformers are RNNs: fast
       autoregressive transformers with linear attention", ICML, 2020.

    Examples
    --------
    >>> import numpy as np
    >>> from fa_cupy import causal_product
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 1000, 32))
    >>> out = causal_product(q, k, v)
    >>> bool(np.allclose(out, np.tril(q @ k.swapaxes(-1, -2)) @ v))
    True

    In two parts, with the state between them:

    >>> first, state = causal_product(q[:, :300], k[:, :300], v[:, :300], return_state=True)
    >>> rest = causal_product(q[:, 300:], k[:, 300:], v[:, 300:], initial_state=state)
    >>> bool(np.allclose(np.concatenate([first, rest], axis=1), out))
    True

    Two sequences, of 300 and 700 rows, by themselves:

    >>> packed = causal_product(q, k, v, q_offsets=np.array([0, 300, 1000]))
    >>> bool(np.allclose(packed[:, :300], first))
    True
    """
    cached = _CACHED.get(type(q))
    if cached is not None and q_offsets is None:
        answer = cached(q, k, v, initial_state, return_state, reverse, algorithm, out)
        if answer is not None:
            return answer
    name = "causal_product"
    given = {"q": q, "k": k, "v": v, "initial_state": initial_state, "out": out}
    if q_offsets is None:
        native, keys = dispatch.to_native(name, **given), None
    else:
        native, keys = _with_offsets(name, q_offsets, None, given)
    *inputs, result = native.arrays
    problem = linear_problem.product_problem(
        name, *inputs, offsets=keys and _offsets(name, keys, inputs)
    )
    dispatch.check_out(name, result, problem, inputs, keys)
    reverse = checks.flag(name, "reverse", reverse)
    with_state = checks.flag(name, "return_state", return_state)
    algorithm = linear_problem.algorithm(name, algorithm, native.backend, problem.dtype)
    backend = dispatch.backend_of(native, "packed.products" if keys else "linear_attention")
    if inputs[0] is q and keys is None:  # an array of NumPy or CuPy itself
        _CACHED[type(q)] = backend.cached
    with native.context:
        result = dispatch.result_for(native, problem, inputs[0], result)
        result, state = backend.product(
            problem, *inputs, result, *([keys] if keys else []),
            reverse=reverse, return_state=with_state, algorithm=algorithm,
        )  # fmt: skip
        answer = native.give_back(result) if out is None else out
        return (answer, native.give_back(state)) if with_state else answer


def causal_product_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    initial_state: Any = None,
    reverse: bool = False,
    q_offsets: Any = None,
    dstate: Any = None,
) -> tuple[Any, ...]:
    """Gradients of `causal_product` with respect to its array arguments.

    Parameters
    ----------
    dout : array, shape (..., L, M)
        Gradient of the output, with its shape and dtype.
    q : array, shape (..., L, E)
    k : array, shape (..., L, E)
    v : array, shape (..., L, M)
    initial_state : array, shape (..., E, M), optional
        The arguments of the product.
    reverse : bool
    q_offsets : array of int32 or int64, shape (n + 1,), optional
        As in the product.
    dstate : array, shape (..., E, M), optional
        Gradient of the returned state, with its shape and dtype; zero by default. With `q_offsets`,
        the states have an axis of sequences: ``(..., n, E, M)``.

    Returns
    -------
    dq : array, shape (..., L, E)
    dk : array, shape (..., L, E)
    dv : array, shape (..., L, M)
        Each with the shape and dtype of the argument: summed over the batch axes along which the
        argument was broadcast, and over the query heads that share a key head.
    dinitial_state : array, shape (..., E, M)
        Only with `initial_state`, with its shape and dtype.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As for `causal_product`; while a stream is captured, also for `v` wider than 256 if it is
        not of float32.

    See Also
    --------
    causal_product : its notes apply here too.

    Notes
    -----
    The gradients are causal products too, those of `k` and `v` in the other direction::

        dq = causal_product(dout, v, k)
        dk = causal_product(v, dout, q, reverse=True)
        dv = causal_product(k, q, dout, reverse=True)

    The last state of the third one is the gradient of the initial state.

    Examples
    --------
    >>> import numpy as np
    >>> from fa_cupy import causal_product, causal_product_backward
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 100, 8))
    >>> dq, dk, dv = causal_product_backward(dout, q, k, v)

    The output is linear in each argument, so the product of argument and gradient has the same sum
    for all of them:

    >>> loss = np.sum(dout * causal_product(q, k, v))
    >>> [bool(np.isclose(np.sum(x * dx), loss)) for x, dx in ((q, dq), (k, dk), (v, dv))]
    [True, True, True]
    """
    cached = _CACHED_BACKWARD.get(type(q))
    if cached is not None and q_offsets is None:
        answer: tuple[Any, ...] | None = cached(dout, q, k, v, initial_state, reverse, dstate)
        if answer is not None:
            return answer
    name = "causal_product_backward"
    given = {"q": q, "k": k, "v": v, "initial_state": initial_state, "dout": dout, "dstate": dstate}
    if q_offsets is None:
        native, keys = dispatch.to_native(name, **given), None
    else:
        native, keys = _with_offsets(name, q_offsets, None, given)
    *inputs, grad, state_grad = native.arrays
    problem = linear_problem.product_problem(
        name, *inputs, offsets=keys and _offsets(name, keys, inputs)
    )
    checks.check_gradient(name, "dout", grad, problem.out_shape, problem.dtype)
    if state_grad is not None:
        shape, dtype = problem.state_shape, problem.state_dtype
        checks.check_gradient(name, "dstate", state_grad, shape, dtype)
    reverse = checks.flag(name, "reverse", reverse)
    backend = dispatch.backend_of(native, "packed.products" if keys else "linear_attention")
    if inputs[0] is q and keys is None:
        _CACHED_BACKWARD[type(q)] = dispatch.backend_of(native, "causal_product_backward").cached
    with native.context:
        grads = backend.backward(
            problem, grad, *inputs, state_grad, *([keys] if keys else []), reverse=reverse
        )
        return tuple(native.give_back(x) for x in grads if x is not None)


def linear_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    feature_map: str | Callable[[Any], Any] = "elu1",
    eps: float = 1e-6,
    is_causal: bool = True,
    initial_state: Any = None,
    return_state: bool = False,
    q_offsets: Any = None,
    k_offsets: Any = None,
    out: Any = None,
) -> Any:
    """Linear attention: a product of features and values, divided by the sums of its weights.

    With features ``x = f(q)`` and ``y = f(k)``, row i of the output is the mean of the rows
    ``v[j]``, up to i or all of them, weighted by ``x[i] @ y[j]``.

    Parameters
    ----------
    q : array, shape (..., Lq, E)
    k : array, shape (..., Lk, E)
    v : array, shape (..., Lk, M)
        As in `causal_product`; Lq and Lk may differ with ``is_causal=False``.
    feature_map : {"elu1", "relu", "exp", "identity"} or callable
        Function of `q` and `k`: ``elu(x) + 1``, ``max(x, 0)``, ``exp(x)`` or ``x``, in float32
        (float64 for float64 input). A callable is called with `q`, then with `k`, as they were
        given (NumPy arrays as read-only views), and returns new arrays of the same library and
        dtype. Their last axis may have another size, F, the same for both; the other axes stay. The
        callable must not keep arrays that it allocates while a stream is captured: they belong to
        the graph.
    eps : float
        Added to the sums of weights; at least 0. With 0, or a number that the dtype of the sums
        rounds to 0, the output is 0 / 0 = NaN where all weights are 0, and everywhere if E is 0.
    is_causal : bool
        Whether row i uses the keys up to i only. With False, all rows use all keys.
    initial_state : array, shape (..., F, M + 1), optional
        The state before the first key: what a call for earlier keys returned, or any array of
        float32 (float64 for float64 input), with batch axes and heads as in `causal_product`. F is
        the number of features, which is E except for a callable.
    return_state : bool
        Whether to return the state after the last key too.
    q_offsets : array of int32 or int64, shape (n + 1,), optional
        Where packed sequences begin, as in `causal_product`; rows use keys of their own sequence
        only. States are ``(..., n, F, M + 1)``.
    k_offsets : array of int32 or int64, shape (n + 1,), optional
        Where the keys of the sequences begin, with ``is_causal=False`` and `q_offsets`; by default
        where the queries do.
    out : array, shape (..., Lq, M), optional
        Array for the output: of the library and the dtype of `q`, without overlap with an input.

    Returns
    -------
    out : array, shape (..., Lq, M)
        Of the library, the dtype and the memory layout of `q`.
    state : array, shape (..., F, M + 1), or (..., n, F, M + 1) with `q_offsets`
        Only with `return_state`, in float32, or float64 for float64 input: the sum of the outer
        products of ``y[j]`` and ``v[j]`` in ``state[..., :-1]``, that of ``y[j]`` in
        ``state[..., -1]``. It has the batch axes of `k`, `v` and `initial_state`.

    Raises
    ------
    TypeError, ValueError
        As for `causal_product`, before a callable runs. Errors about the results of a callable, and
        then those about the shape of `initial_state`, come after it has run.
    NotImplementedError
        For `q_offsets` on a GPU below compute capability 8.0. While a stream is captured into a
        CUDA graph, for `q_offsets` or `k_offsets` in the memory of the host and, without offsets,
        for ``is_causal=False`` and for float64 with more than 256 features. The capture can go on,
        but a callable has already run.

    See Also
    --------
    linear_attention_backward : its gradients.
    attention : attention with softmax weights, in time proportional to L x L.

    Notes
    -----
    The sums of weights are a causal product with a further column of ones in the values, so one
    pass computes both [1]_. Where weights may be negative (``"identity"``), their sum may be near 0
    and the quotient very large.

    Of packed sequences (`q_offsets`), numbers on the host are checked. Those on a device are not
    read back: where one descends or is out of range, the output and the states of the sequences
    that it bounds are NaN, and their gradients 0.

    A sequence may be cut into parts: with the state passed on from each part to the next one, the
    outputs are those of the whole sequence. On a CPU, a part of one row takes about 10 to 20
    microseconds for one to eight heads with 64 columns in float32.

    Features have to stay in the range of their dtype, and weights and sums in that of the sums, as
    in `causal_product`: ``"exp"`` of 89 is infinite in float32, and infinity divided by infinity is
    NaN. The features of a callable have the dtype of `q`; float16 ends at 65,504.

    References
    ----------
    .. [1] A. Katharopoulos, A. Vyas, N. Pappas and F. Fleuret, "Transformers are RNNs: fast
       autoregressive transformers with linear attention", ICML, 2020.

    Examples
    --------
    >>> import numpy as np
    >>> from fa_cupy import linear_attention
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1000, 16))
    >>> out = linear_attention(q, k, v)
    >>> bool(np.allclose(out[0], v[0], atol=1e-5))  # the first row sees only itself
    True

    In two parts, with the state between them:

    >>> first, state = linear_attention(q[:300], k[:300], v[:300], return_state=True)
    >>> rest = linear_attention(q[300:], k[300:], v[300:], initial_state=state)
    >>> bool(np.allclose(np.concatenate([first, rest]), out))
    True

    A callable as feature map, here for quadratic features:

    >>> def pairs(x):
    ...     return (x[..., :, None] * x[..., None, :]).reshape(*x.shape[:-1], -1)
    >>> linear_attention(q, k, v, feature_map=pairs).shape
    (1000, 16)
    """
    cached = _CACHED_NORMALISED.get(type(q))
    if cached is not None and q_offsets is k_offsets is None:
        answer = cached(q, k, v, feature_map, eps, is_causal, initial_state, return_state, out)
        if answer is not None:
            return answer
    name = "linear_attention"
    feature = _feature(name, feature_map)
    number = checks.finite(name, "eps", eps, minimum=0.0)
    causal = checks.flag(name, "is_causal", is_causal)
    with_state = checks.flag(name, "return_state", return_state)
    _check_k_offsets(name, k_offsets, causal)
    given = {"q": q, "k": k, "v": v, "initial_state": initial_state, "out": out}
    native, keys = _with_offsets(name, q_offsets, k_offsets, given)
    *inputs, initial, result = native.arrays
    where = keys and _offsets(name, keys, inputs, causal)
    # Of features the dim is not known yet, which the state has.
    known = None if callable(feature_map) else initial
    problem = _problem(name, [*inputs, known], causal, where)
    dispatch.check_out(name, result, problem, [*inputs, initial], keys)
    like = inputs[0]
    backend = dispatch.backend_of(native, "packed.products" if keys else "linear_attention")
    if native.backend == "numpy" and like is q and keys is None:
        _CACHED_NORMALISED[type(q)] = backend.cached_normalised
    with native.context:
        if callable(feature_map):  # which may allocate what belongs to this call
            features = _features(name, (q, k), inputs[:2], feature_map)
            inputs[:2] = features.values()
            problem = _problem(name, [*inputs, initial], causal, where)
            if out is not None:
                attention_problem.check_out(
                    name, result, problem.out_shape, problem.dtype, features.items()
                )
        if result is None:
            result = dispatch.allocator(native)(problem.out_shape, problem.dtype, like)
        result, state = backend.linear_attention(
            problem, *inputs, initial, result, *([keys] if keys else []),
            feature=feature, eps=number, is_causal=causal, return_state=with_state,
        )  # fmt: skip
        answer = native.give_back(result) if out is None else out
        return (answer, native.give_back(state)) if with_state else answer


def linear_attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    feature_map: str | Callable[[Any], Any] = "elu1",
    feature_map_gradient: Callable[[Any, Any], Any] | None = None,
    eps: float = 1e-6,
    is_causal: bool = True,
    initial_state: Any = None,
    q_offsets: Any = None,
    k_offsets: Any = None,
    dstate: Any = None,
) -> tuple[Any, ...]:
    """Gradients of `linear_attention` with respect to its array arguments.

    Parameters
    ----------
    dout : array, shape (..., Lq, M)
        Gradient of the output, with its shape and dtype.
    q : array, shape (..., Lq, E)
    k : array, shape (..., Lk, E)
    v : array, shape (..., Lk, M)
    feature_map : {"elu1", "relu", "exp", "identity"} or callable
        The arguments of the attention.
    feature_map_gradient : callable, optional
        Needed if `feature_map` is a callable, and only then.
        Called as ``feature_map_gradient(q, dx)``, then with `k`: `dx` is the gradient of the
        features ``feature_map(q)``, with their shape and dtype. It returns the gradient of `q`, a
        new array with its shape and dtype.
    eps : float
    is_causal : bool
    initial_state : array, shape (..., F, M + 1), optional
    q_offsets : array of int32 or int64, shape (n + 1,), optional
    k_offsets : array of int32 or int64, shape (n + 1,), optional
        The arguments of the attention.
    dstate : array, shape (..., F, M + 1), optional
        Gradient of the returned state, with its shape and dtype; zero by default. With offsets, the
        states have an axis of sequences: ``(..., n, F, M + 1)``.

    Returns
    -------
    dq : array, shape (..., Lq, E)
    dk : array, shape (..., Lk, E)
    dv : array, shape (..., Lk, M)
        Each with the shape and dtype of the argument: summed over the batch axes along which the
        argument was broadcast, and over the query heads that share a key head.
    dinitial_state : array, shape (..., F, M + 1)
        Only with `initial_state`, with its shape and dtype.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As for `linear_attention`; while a stream is captured, also for float64 with `v` wider than
        255. A TypeError if only one of `feature_map` and `feature_map_gradient` is a callable.

    See Also
    --------
    linear_attention : its notes apply here too.

    Notes
    -----
    The sums of weights and the output are computed again. With those, the gradient is that of a
    causal product (`causal_product_backward`), whose values have a further column of ones.

    The derivative of ``"relu"`` at 0 is 0. Where a sum of weights and `eps` are both 0, gradients
    may be NaN, but a row of `dout` that is 0 contributes nothing to them.

    Examples
    --------
    >>> import numpy as np
    >>> from fa_cupy import linear_attention, linear_attention_backward
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 100, 8))
    >>> dq, dk, dv = linear_attention_backward(dout, q, k, v)

    The output is linear in the values:

    >>> loss = np.sum(dout * linear_attention(q, k, v))
    >>> bool(np.isclose(np.sum(v * dv), loss))
    True

    A callable needs its gradient:

    >>> dq, dk, dv = linear_attention_backward(
    ...     dout, q, k, v, feature_map=np.square, feature_map_gradient=lambda x, dy: 2 * x * dy
    ... )
    >>> dq.shape
    (100, 8)
    """
    name = "linear_attention_backward"
    feature = _feature(name, feature_map)
    _check_feature_gradient(name, feature_map, feature_map_gradient)
    number = checks.finite(name, "eps", eps, minimum=0.0)
    causal = checks.flag(name, "is_causal", is_causal)
    _check_k_offsets(name, k_offsets, causal)
    given = {"q": q, "k": k, "v": v, "initial_state": initial_state, "dout": dout, "dstate": dstate}
    native, keys = _with_offsets(name, q_offsets, k_offsets, given)
    *inputs, initial, grad, state_grad = native.arrays
    where = keys and _offsets(name, keys, inputs, causal)
    plain = inputs[:2]
    known = None if callable(feature_map) else initial
    problem = _problem(name, [*inputs, known], causal, where)
    checks.check_gradient(name, "dout", grad, problem.out_shape, problem.dtype)
    backend = dispatch.backend_of(native, "packed.products" if keys else "linear_attention")
    with native.context:
        if callable(feature_map):
            inputs[:2] = _features(name, (q, k), plain, feature_map).values()
            problem = _problem(name, [*inputs, initial], causal, where)
        if state_grad is not None:
            shape, dtype = problem.state_shape, problem.state_dtype
            checks.check_gradient(name, "dstate", state_grad, shape, dtype)
        found = backend.linear_attention_backward(
            problem, grad, *inputs, initial, state_grad, *([keys] if keys else []),
            feature=feature, eps=number, is_causal=causal,
        )  # fmt: skip
        dq, dk, *rest = (native.give_back(x) for x in found if x is not None)
        if feature_map_gradient is not None:
            pairs = zip("qk", (q, k), plain, (dq, dk), strict=True)
            dq, dk = (_through_features(name, feature_map_gradient, *pair) for pair in pairs)
        return (dq, dk, *rest)


def _problem(
    name: str, arrays: Sequence[Any], causal: bool, where: Offsets | None
) -> linear_problem.Product:
    return linear_problem.product_problem(
        name, *arrays, aligned=causal, normalised=True, offsets=where
    )


def _with_offsets(
    name: str, q_offsets: Any, k_offsets: Any, arrays: dict[str, Any]
) -> tuple[Native, KeyArrays | None]:
    """Return arrays as native ones, and the offsets where there are any."""
    given = {"q_offsets": q_offsets, "k_offsets": k_offsets}
    given = {arg: x for arg, x in given.items() if x is not None}
    if not given:
        return dispatch.to_native(name, **arrays), None
    offsets.refuse(name, [*given])
    on_device, host = layout.separated(name, arrays["q"], given)
    native = dispatch.to_native(name, **arrays, **on_device)
    some, more = native.arrays[: len(arrays)], native.arrays[len(arrays) :]
    found = host | dict(zip(on_device, more, strict=True))
    keys = offsets.key_arrays(found["q_offsets"], found.get("k_offsets"))
    return native._replace(arrays=some), keys


def _offsets(name: str, keys: KeyArrays, inputs: Sequence[Any], causal: bool = True) -> Offsets:
    """Return what a problem of q and k holds of offsets; check them, those on the host wholly."""
    # What is no array of rows, or of other lengths than it may be, is the problem's to refuse.
    q_len, k_len = (x.shape[-2] if x.ndim > 1 else 0 for x in inputs[:2])
    lengths = q_len, q_len if causal else k_len
    k_offsets = None if keys.k_offsets is keys.q_offsets else keys.k_offsets
    found = offsets.checked(name, ("q", "k"), lengths, keys.q_offsets, k_offsets)
    if min(x.ndim for x in inputs[:2]) > 1:
        offsets.check_numbers(name, lengths, keys)
    return found


def _check_k_offsets(name: str, k_offsets: Any, causal: bool) -> None:
    if causal and k_offsets is not None:
        raise ValueError(f"{name}: k_offsets is given with is_causal=True, want is_causal=False")


def _feature(name: str, feature_map: Any) -> str | None:
    """Return the name of a map that a backend computes; None where there is nothing to do."""
    known = isinstance(feature_map, str) and feature_map in _FEATURE_MAPS
    if not known and not callable(feature_map):
        raise ValueError(
            f"{name}: feature_map is {checks.show(feature_map)}, "
            f"want one of {', '.join(map(repr, _FEATURE_MAPS))} or a callable"
        )
    return feature_map if known and feature_map != "identity" else None


def _check_feature_gradient(name: str, feature_map: Any, gradient: Any) -> None:
    """Raise unless `gradient` is there for a callable, and only for one."""
    arg = f"{name}: feature_map_gradient is {checks.show(gradient)}"
    if callable(feature_map) and not callable(gradient):
        raise TypeError(f"{arg}, want a callable, for feature_map is one")
    if not callable(feature_map) and gradient is not None:
        raise TypeError(f"{arg}, want None for feature_map of {feature_map!r}")


def _through_features(
    name: str, gradient: Callable[[Any, Any], Any], arg: str, given: Any, array: Any, grad: Any
) -> Any:
    """Return the gradient of q or k, `given` by the caller, from that of its features."""
    found = gradient(_read_only(given), grad)
    label = f"feature_map_gradient({arg}, ...)"
    native = dispatch.to_native(name, **{arg: given, label: found}).arrays[1]
    checks.check_gradient(name, label, native, array.shape, array.dtype)
    return found


def _features(
    name: str,
    given: tuple[Any, Any],
    inputs: Sequence[Any],
    feature_map: Callable[[Any], Any],
) -> dict[str, Any]:
    """Return the features of q and k as native arrays, by the names that errors give them.

    `given` are q and k as the caller has them, `inputs` the same as native arrays.
    """
    q, k = given
    of_q, of_k = linear_problem.FEATURES
    found = {of_q: feature_map(_read_only(q)), of_k: feature_map(_read_only(k))}
    x, y = dispatch.to_native(name, q=q, **found).arrays[1:]
    linear_problem.check_features(name, inputs[0], inputs[1], x, y)
    # A buffer used twice holds the features of k only; views of q and k may meet in memory.
    if q is not k and arrays.overlap(x, y) and not arrays.overlap(x, inputs[0]):
        raise ValueError(f"{name}: {of_k} overlaps {of_q} in memory, want separate memory")
    return {of_q: x, of_k: y}


def _read_only(array: Any) -> Any:
    """Return a view that cannot be written to, where the library of `array` has such views."""
    if isinstance(array, np.ndarray):
        array = array.view()
        array.flags.writeable = False
    return array


def prefix_state(
    k: Any,
    v: Any,
    ends: Sequence[int] | Any = None,
    *,
    q: Any = None,
    initial_state: Any = None,
    reverse: bool = False,
) -> Any:
    """Return running sums of outer products, or their products with queries.

    The state at position p is ``initial_state + k[:p].mT @ v[:p]``, of shape (E, M), or with
    `reverse` ``initial_state + k[p:].mT @ v[p:]``.

    Parameters
    ----------
    k : array, shape (..., L, E)
        Keys, as in `causal_product`.
    v : array, shape (..., L, M)
        Values.
    ends : sequence of P ints from 0 to L, optional
        Positions, in any order; by default the state is that of the whole sequence.
    q : array, shape (..., P, E), optional
        Queries: row i is multiplied by the state at ``ends[i]`` (without `ends`, by that of the
        whole sequence). As in `causal_product`, `k` and `v` may have fewer heads. If `k` and `v`
        have different numbers of heads, neither of them 1, `q` is needed.
    initial_state : array, shape (..., E, M), optional
        The sum before the first row, of float32 (float64 for float64 input), with heads as in
        `causal_product`.
    reverse : bool
        Whether to sum from the last row to the first.

    Returns
    -------
    array
        Without `q`: the states, of shape (..., P, E, M), or (..., E, M) without `ends`; float32, or
        float64 for float64 input. With `q`: the rows ``q[i] @ state[i]``, of shape (..., P, M) and
        q's dtype, without an array of P states.

    Raises
    ------
    TypeError, ValueError
        As for `causal_product`.
    NotImplementedError
        While a stream is captured into a CUDA graph. The capture can go on.

    See Also
    --------
    causal_product : row i of the output uses the state at ``i + 1`` (``i`` with `reverse`).

    Examples
    --------
    >>> import numpy as np
    >>> from fa_cupy import prefix_state
    >>> rng = np.random.default_rng(0)
    >>> k, v = rng.standard_normal((2, 1000, 8))
    >>> states = prefix_state(k, v, range(100, 1001, 100))  # after every 100 rows
    >>> states.shape
    (10, 8, 8)
    >>> bool(np.allclose(states[2], k[:300].T @ v[:300]))
    True

    Queries at times between those of the keys:

    >>> times = np.sort(rng.random(1000))
    >>> q = rng.standard_normal((3, 8))
    >>> prefix_state(k, v, np.searchsorted(times, [0.7, 0.2, 0.5]), q=q).shape
    (3, 8)
    """
    name = "prefix_state"
    given = {"k": k, "v": v, "initial_state": initial_state}
    native = dispatch.to_native(name, **(given if q is None else {"q": q} | given))
    inputs = [None, *native.arrays] if q is None else native.arrays
    problem = linear_problem.product_problem(name, *inputs, aligned=False)
    reverse = checks.flag(name, "reverse", reverse)
    rows = 1 if q is None else problem.q_len
    if ends is None:
        found = np.full(rows, 0 if reverse else problem.k_len)
    else:
        found = linear_problem.positions(name, ends, problem.k_len)
    if q is not None and len(found) != rows:
        raise ValueError(f"{name}: ends has {len(found)} positions, q has {rows} rows")
    backend = dispatch.backend_of(native, "linear_attention")
    with native.context:
        if q is not None:
            result = backend.readings(problem, *inputs, found, reverse=reverse)
            return native.give_back(result)
        order = np.argsort(found, kind="stable")
        result = backend.states(problem, *inputs[1:], found[order], reverse=reverse)
        if ends is None:
            result = result[..., 0, :, :]
        elif (order[1:] < order[:-1]).any():
            result = result[..., np.argsort(order), :, :]
        return native.give_back(result)
