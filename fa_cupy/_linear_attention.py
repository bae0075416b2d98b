"""Causal products: check, pick the backend by array kind, call it."""

from __future__ import annotations

from typing import Any

from fa_cupy.core import checks, dispatch, linear_problem

# By the type of q: what answers a repeated call without looking at it closely.
_CACHED: dict[type, Any] = {}
_CACHED_BACKWARD: dict[type, Any] = {}


def causal_product(
    q: Any,
    k: Any,
    v: Any,
    *,
    initial_state: Any = None,
    return_state: bool = False,
    reverse: bool = False,
    algorithm: str = "auto",
    out: Any = None,
) -> Any:
    """Causal product of queries, keys and values, in time proportional to their length.

    Computes ``numpy.tril(q @ k.mT) @ v`` over the last two axes, unscaled and unnormalised, without
    an array of size L x L; the axes before them are batch axes that broadcast as in `numpy.matmul`.

    Parameters
    ----------
    q : array, shape (..., L, E)
        Queries: a NumPy or CuPy array, or one of any library that speaks DLPack (PyTorch, JAX,
        ...), of dtype float16, bfloat16 (`ml_dtypes.bfloat16`), float32 or float64. Any strides.
    k : array, shape (..., L, E)
        Keys, of the same library, device and dtype.
    v : array, shape (..., L, M)
        Values. With 4 axes or more in each of `q`, `k` and `v`, the keys and values may have fewer
        heads (axis -3) than the queries when the count divides.
    initial_state : array, shape (..., E, M), optional
        What was summed before the first row: the state that an earlier piece returned, or any
        array of float32 (float64 for float64 input). Its batch axes broadcast with theirs. Where
        these have heads (4 axes or more each), it has 1, or as many as `q`, `k` or `v`; any number
        where all of them have 1.
    return_state : bool
        Whether to return the state after the last row too.
    reverse : bool
        Whether to go from the last row to the first: ``numpy.triu`` for ``numpy.tril``.
    algorithm : {"auto", "chunked", "recurrent", "low_occupancy"}
        How it is computed. ``"auto"`` and ``"chunked"`` take everything; the others are kernels
        for float32 on a GPU.
    out : array, shape (..., L, M), optional
        Where to write the output: of q's kind and dtype, overlapping no input.

    Returns
    -------
    out : array, shape (..., L, M)
        Of the kind and dtype of `q`, laid out in memory as `q` is.
    state : array, shape (..., E, M)
        Only with `return_state`: ``initial_state + k.mT @ v``, in float32, or float64 for float64
        input. Its batch axes are those of `k`, `v` and `initial_state`.

    Raises
    ------
    TypeError, ValueError
        With a message that names the argument, what it got and what is wanted, before anything is
        allocated.
    NotImplementedError
        For a kernel named by `algorithm` that the device cannot run; and while a stream is captured
        into a CUDA graph, for float64 and for 16-bit `q` and `k` wider than 256. The capture can
        go on.

    See Also
    --------
    causal_product_backward : its gradients.
    linear_attention : the normalised form.
    prefix_state : the states, or what queries at any positions read from them.

    Notes
    -----
    Row i of the output is ``q[i] @ S[i]``, where the state ``S[i]`` is the sum of the outer
    products of ``k[j]`` and ``v[j]`` up to row i [1]_. Within chunks of rows the product is masked
    scores times values, between chunks it goes through the state. State and sums are float32
    (float64 for float64 input). Results are bitwise repeatable.

    On a GPU, float32 is multiplied by tensor cores as pairs of float16 numbers where that serves:
    accurate beside the largest terms of a row and of a chunk of 64 rows, so that columns or rows
    that are 1e-5 of their neighbours lose digits. ``algorithm="recurrent"`` and ``"low_occupancy"``
    are plain float32.

    The state and the scores ``q[i] @ k[j]`` have to stay in the range of float32 (float64 for
    float64 input) themselves, also where the third factor would scale them down again. A state that
    exceeds it is infinite, and NaN times a 0 in `q`; products that underflow are lost. From which
    row on depends on the chunks.

    Output (i, m) is not finite where a product ``q[i, e] * k[j, e] * v[j, m]`` that belongs to its
    sum has a factor that is not finite, or where a sum is out of range. What rows after i hold
    never shows in it.

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

    In two pieces, through the state:

    >>> first, state = causal_product(q[:, :300], k[:, :300], v[:, :300], return_state=True)
    >>> rest = causal_product(q[:, 300:], k[:, 300:], v[:, 300:], initial_state=state)
    >>> bool(np.allclose(np.concatenate([first, rest], axis=1), out))
    True
    """
    cached = _CACHED.get(type(q))
    if cached is not None:
        answer = cached(q, k, v, initial_state, return_state, reverse, algorithm, out)
        if answer is not None:
            return answer
    name = "causal_product"
    native = dispatch.to_native(name, q=q, k=k, v=v, initial_state=initial_state, out=out)
    *inputs, result = native.arrays
    problem = linear_problem.product_problem(name, *inputs)
    dispatch.check_out(name, result, problem, inputs)
    reverse = checks.flag(name, "reverse", reverse)
    with_state = checks.flag(name, "return_state", return_state)
    algorithm = linear_problem.algorithm(name, algorithm, native.backend, problem.dtype)
    backend = dispatch.backend_of(native, "product")
    if native.backend == "cupy" and inputs[0] is q:
        _CACHED[type(q)] = backend.cached
    with native.context:
        result = dispatch.result_for(native, problem, inputs[0], result)
        result, state = backend.product(
            problem, *inputs, result,
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
    dstate: Any = None,
) -> tuple[Any, ...]:
    """Gradients of `causal_product` with respect to its array arguments.

    Parameters
    ----------
    dout : array, shape (..., L, M)
        Gradient of the output, of its shape and dtype.
    q : array, shape (..., L, E)
    k : array, shape (..., L, E)
    v : array, shape (..., L, M)
    initial_state : array, shape (..., E, M), optional
        The arguments of the product.
    reverse : bool
        That of the product.
    dstate : array, shape (..., E, M), optional
        Gradient of the returned state, of its shape and dtype; zero by default.

    Returns
    -------
    dq : array, shape (..., L, E)
    dk : array, shape (..., L, E)
    dv : array, shape (..., L, M)
        Each of the shape and dtype of the argument: summed over the batch axes along which that
        was broadcast, and over the queries of a group of heads.
    dinitial_state : array, shape (..., E, M)
        Only with `initial_state`, of its shape and dtype.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `causal_product`; in a capture for 16-bit `v` wider than 256 too.

    See Also
    --------
    causal_product : whose notes apply here too.

    Notes
    -----
    The gradients are causal products themselves, those of `k` and `v` in the other direction::

        dq = causal_product(dout, v, k)
        dk = causal_product(v, dout, q, reverse=True)
        dv = causal_product(k, q, dout, reverse=True)

    The last state of the third is the gradient of the initial state.

    Examples
    --------
    >>> import numpy as np
    >>> from fa_cupy import causal_product, causal_product_backward
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 100, 8))
    >>> dq, dk, dv = causal_product_backward(dout, q, k, v)

    The output is linear in each argument, so that its gradient times the argument is the same
    number for all of them:

    >>> loss = np.sum(dout * causal_product(q, k, v))
    >>> [bool(np.isclose(np.sum(x * dx), loss)) for x, dx in ((q, dq), (k, dk), (v, dv))]
    [True, True, True]
    """
    cached = _CACHED_BACKWARD.get(type(q))
    if cached is not None:
        answer: tuple[Any, ...] | None = cached(dout, q, k, v, initial_state, reverse, dstate)
        if answer is not None:
            return answer
    name = "causal_product_backward"
    native = dispatch.to_native(
        name, q=q, k=k, v=v, initial_state=initial_state, dout=dout, dstate=dstate
    )
    *inputs, grad, state_grad = native.arrays
    problem = linear_problem.product_problem(name, *inputs)
    linear_problem.check_gradient(name, "dout", grad, problem.out_shape, problem.dtype)
    if state_grad is not None:
        shape, dtype = problem.state_shape, problem.state_dtype
        linear_problem.check_gradient(name, "dstate", state_grad, shape, dtype)
    reverse = checks.flag(name, "reverse", reverse)
    backend = dispatch.backend_of(native, "product")
    if native.backend == "cupy" and inputs[0] is q:
        _CACHED_BACKWARD[type(q)] = dispatch.backend_of(native, "product_backward").cached
    with native.context:
        grads = backend.backward(problem, grad, *inputs, state_grad, reverse=reverse)
        return tuple(native.give_back(x) for x in grads if x is not None)
