"""Exact attention: check, pick the backend by array kind, call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fa_cupy._bitmask import BitMask
from fa_cupy.core import arrays as core_arrays
from fa_cupy.core import attention_problem, checks, dispatch

_TORCH_ARGS = ("query", "key", "value", "attn_mask", "attn_mask")

# Array type -> a function that answers a call whose plan is known, or None. The GPU backend's
# entry appears with the first CuPy array, so that CuPy is never imported for NumPy input.
_CACHED: dict[type, Callable[..., Any]] = {}


def attention(
    q: Any,
    k: Any,
    v: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    causal_align: str | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    precision: str | None = None,
    return_lse: bool = False,
    out: Any = None,
) -> Any:
    """Scaled dot-product attention, exact, without an array of size Lq x Lk.

    Computes ``softmax(scale * q @ k.mT + bias) @ v`` over the last two axes; the axes before them
    are batch axes that broadcast as in `numpy.matmul`.

    Parameters
    ----------
    q : array, shape (..., Lq, D)
        Queries: a NumPy or CuPy array, or one of any library that speaks DLPack (PyTorch, JAX, ...)
        of dtype float16, bfloat16 (`ml_dtypes.bfloat16`), float32 or float64. Any strides.
    k : array, shape (..., Lk, D)
        Keys, of the same library, device and dtype.
    v : array, shape (..., Lk, Dv)
        Values. With 4 axes or more in each of `q`, `k` and `v`, the keys and values may have fewer
        heads (axis -3) than the queries when the count divides: grouped-query attention.
    bias : array, broadcastable to (..., Lq, Lk), optional
        Added to the scores; any of the four dtypes.
    mask : array of bool, broadcastable to (..., Lq, Lk), or BitMask, optional
        True where a query may attend to a key. Of a `BitMask`, batch axes broadcast and lengths
        are those of `q` and `k`. On a GPU its lists are sent there by the first call and kept with
        it; an array is packed by every call.
    scale : float, optional
        Any finite factor; ``D ** -0.5`` by default.
    is_causal : bool
        Whether a query sees only the keys up to its own position.
    causal_align : {"top_left", "bottom_right"}, optional
        Where query i stands among the keys: at i or at ``i + Lk - Lq``. Needed by `is_causal` and
        `window` where Lq != Lk.
    window : (left, right), optional
        How many keys before and after its own position a query sees; None leaves a side open.
        Mask, causality and window compose by AND.
    softcap : float
        If positive, scores are ``softcap * tanh(scale * q @ k.mT / softcap)`` before the bias.
    precision : {None, "tf32"}
        "tf32" allows TensorFloat-32 products of float32 arrays on a GPU, with about 3 decimal
        digits. It changes nothing elsewhere.
    return_lse : bool
        Whether to return the log-sum-exp of each row of scores too.
    out : array, shape (..., Lq, Dv), optional
        Where to write the output: of q's kind and dtype, overlapping no input.

    Returns
    -------
    out : array, shape (..., Lq, Dv)
        Of the kind and dtype of `q`, laid out in memory as `q` is.
    lse : array, shape (..., Lq)
        Only with `return_lse`: natural logarithm; float32, or float64 for float64 input.

    Raises
    ------
    TypeError, ValueError
        With a message that names the argument, what it got and what is wanted, before anything is
        allocated.
    NotImplementedError
        While a stream is captured into a CUDA graph: for float32 and float64, and dims above 256,
        after which the capture can go on; and for the first call with a `BitMask`, which takes
        memory from the driver, in a capture mode other than "relaxed".

    See Also
    --------
    merge_attention : combine results over disjoint sets of keys.

    Notes
    -----
    Scores are computed tile by tile with the online softmax of [1]_, as in [2]_ and [3]_, in
    float32 (float64 for float64 input). Results are bitwise repeatable; on a CPU without the wheel
    scipy-openblas32, only with the same number of threads in NumPy's BLAS.

    A query with nothing to attend to (all masked, or every score exactly -inf) gives output 0 and
    log-sum-exp -inf, and what a masked key or value holds, NaN included, never shows (where it is
    not finite, sums on the CPU may be taken in another order, which moves the last bits).

    References
    ----------
    .. [1] M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax",
       arXiv:1805.02867, 2018.
    .. [2] T. Dao, D. Y. Fu, S. Ermon, A. Rudra and C. Re, "FlashAttention: fast and
       memory-efficient exact attention with IO-awareness", NeurIPS, 2022.
    .. [3] T. Dao, "FlashAttention-2: faster attention with better parallelism and work
       partitioning", ICLR, 2024 (arXiv:2307.08691, 2023).

    Examples
    --------
    >>> import numpy as np
    >>> from fa_cupy import attention
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 100, 64), dtype=np.float32)
    >>> out, lse = attention(q, k, v, is_causal=True, return_lse=True)
    >>> out.shape, lse.shape
    ((2, 8, 100, 64), (2, 8, 100))

    The first query sees the first key only:

    >>> bool(np.allclose(out[:, :, 0], v[:, :, 0]))
    True

    Data of shape (batch, length, heads, dim) need no copy:

    >>> x = rng.standard_normal((2, 100, 8, 64), dtype=np.float32).swapaxes(-3, -2)
    >>> attention(x, k, v).strides == x.strides
    True
    """
    cached = _CACHED.get(type(q))
    if cached is not None:
        result = cached(
            q, k, v, bias, mask, scale, is_causal, causal_align, window, softcap, precision,
            return_lse, out,
        )  # fmt: skip
        if result is not None:
            return result
    return _solve(
        "attention",
        attention_problem.ARGS,
        (q, k, v, bias, mask),
        out,
        return_lse,
        scale=scale,
        is_causal=is_causal,
        causal_align=causal_align,
        window=window,
        softcap=softcap,
        precision=precision,
    )


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention with the names and the meaning of PyTorch's function.

    Parameters
    ----------
    query : array, shape (..., L, E)
    key : array, shape (..., S, E)
    value : array, shape (..., S, Ev)
    attn_mask : array, broadcastable to (..., L, S), or BitMask, optional
        Of bool, True where a query attends to a key; or of floats, added to the scores.
    dropout_p : float
        Must be 0.0.
    is_causal : bool
        Causality aligned to the top left: query i sees the keys up to i, whatever L and S are.
        Not together with `attn_mask`.
    scale : float, optional
        ``E ** -0.5`` by default.
    enable_gqa : bool
        Whether `key` and `value` may have fewer heads (axis -3) than `query`.

    Returns
    -------
    array, shape (..., L, Ev)

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `attention`; and for a `dropout_p` other than 0, for `attn_mask` together with
        `is_causal` and for grouped heads without `enable_gqa`.

    See Also
    --------
    attention : what this calls.

    References
    ----------
    .. [1] https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html

    Examples
    --------
    >>> import numpy as np
    >>> from fa_cupy import scaled_dot_product_attention
    >>> x = np.eye(3)
    >>> scaled_dot_product_attention(x, x, x, is_causal=True).round(2)
    array([[1.  , 0.  , 0.  ],
           [0.36, 0.64, 0.  ],
           [0.26, 0.26, 0.47]])
    """
    name = "scaled_dot_product_attention"
    if checks.finite(name, "dropout_p", dropout_p) != 0.0:
        raise ValueError(f"{name}: dropout_p is {dropout_p}, want 0.0 (there is no dropout)")
    if attn_mask is not None and checks.flag(name, "is_causal", is_causal):
        raise ValueError(f"{name}: is_causal is True and attn_mask is given, want one of them")
    is_mask = str(getattr(attn_mask, "dtype", "")).rpartition(".")[2] == "bool"
    bias, mask = (None, attn_mask) if is_mask else (attn_mask, None)
    return _solve(
        name,
        _TORCH_ARGS,
        (query, key, value, bias, mask),
        grouped=checks.flag(name, "enable_gqa", enable_gqa),
        scale=scale,
        is_causal=is_causal,
        causal_align="top_left",
        window=None,
        softcap=0.0,
        precision=None,
    )


def _solve(
    name: str,
    args: tuple[str, ...],
    arrays: tuple[Any, ...],
    out: Any = None,
    return_lse: Any = False,
    grouped: bool = True,
    **options: Any,
) -> Any:
    """Check a call, run it on the backend of its arrays and answer in their kind."""
    dispatch.require(name, **dict(zip(args[:3], arrays, strict=False)))
    bits = arrays[4] if isinstance(arrays[4], BitMask) else None
    # Bias and mask of scaled_dot_product_attention go by one name, and at most one is given.
    given = {arg: x for arg, x in zip(args, arrays, strict=True) if x is not None and x is not bits}
    native = core_arrays.to_native(name, **given, out=out)
    by_arg = dict(zip(given, native.arrays, strict=False))
    named = zip(args, arrays, strict=True)
    inputs = [x if x is None or x is bits else by_arg[arg] for arg, x in named]
    result = native.arrays[-1]
    problem = attention_problem.attention_problem(
        *inputs, out=result, name=name, args=args, grouped=grouped, **options
    )
    with_lse = checks.flag(name, "return_lse", return_lse)
    backend = dispatch.backend_of(native, "attention")
    if native.backend == "cupy" and inputs[0] is arrays[0]:
        _CACHED[type(arrays[0])] = backend.cached
    with native.context:
        result = dispatch.result_for(native, problem, inputs[0], result)
        result, lse = backend.attention(problem, *inputs, result, with_lse)
        answer = native.give_back(result) if out is None else out
        return (answer, native.give_back(lse)) if with_lse else answer
