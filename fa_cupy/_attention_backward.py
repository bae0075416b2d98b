"""Gradients of attention: check, pick the backend by array kind, call it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fa_cupy.core import attention_problem, checks, dispatch, linear_problem

_NEED = ("q", "k", "v", "bias")


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    causal_align: str | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    dlse: Any = None,
    need: Sequence[str] | None = None,
) -> tuple[Any, ...]:
    """Gradients of `attention` with respect to its arrays, without an array of size Lq x Lk.

    Parameters
    ----------
    dout : array, shape (..., Lq, Dv)
        Gradient of the output, of its shape and dtype.
    q : array, shape (..., Lq, D)
    k : array, shape (..., Lk, D)
    v : array, shape (..., Lk, Dv)
        The arguments of `attention`.
    out : array, shape (..., Lq, Dv)
    lse : array, shape (..., Lq)
        What it returned for them, with ``return_lse=True``. Where keys are a part of those that
        were attended to, `out` and `lse` are the merged ones, of all keys (see Notes).
    bias : array, broadcastable to (..., Lq, Lk), optional
    mask : array of bool, broadcastable to (..., Lq, Lk), or BitMask, optional
    scale : float, optional
    is_causal : bool
    causal_align : {"top_left", "bottom_right"}, optional
    window : (left, right), optional
    softcap : float
        The other arguments of that call.
    dlse : array, shape (..., Lq), optional
        Gradient of the log-sum-exp, of its shape and dtype; zero by default.
    need : sequence of {"q", "k", "v", "bias"}, optional
        Which gradients are wanted; by default those of `q`, `k`, `v` and, if it is given, `bias`.

    Returns
    -------
    tuple of arrays
        The gradients in the order of `need`, each of the shape and dtype of its argument and laid
        out in memory as that is: summed over the axes along which the argument was broadcast, and
        over the queries of a group of heads.

    Raises
    ------
    TypeError, ValueError
        With a message that names the argument, what it got and what is wanted, before anything is
        allocated.
    NotImplementedError
        While a stream is captured into a CUDA graph: for float32 and float64, for dims that are no
        multiples of 8 or above 256, for the gradient of a bias, and as `attention` for a `BitMask`.

    See Also
    --------
    attention : whose notes on types, shapes and hidden keys apply here too.

    Notes
    -----
    The weights are computed again tile by tile from the log-sum-exp [1]_; besides the results,
    memory is proportional to the lengths. Results are bitwise repeatable. There are no second
    derivatives.

    Where `lse` is large (beyond 1,024, in kernels 5,678), weights are made from maximum and sum of
    the scores instead, computed once more, so that they sum to 1. An `lse` of more keys than these
    is recognised by its difference from that maximum and sum, and used as it is given. Where the
    difference is within rounding (2**-20 of `lse` in float32, 2**-48 in float64, 2**-18 in
    kernels), as under a padding bias of -1e9, it cannot be: the weights of each part of the keys
    then sum to 1.

    A query with nothing to attend to has gradient 0 and adds nothing to any other, and what hidden
    keys and values hold, NaN included, never shows.

    References
    ----------
    .. [1] T. Dao, D. Y. Fu, S. Ermon, A. Rudra and C. Re, "FlashAttention: fast and
       memory-efficient exact attention with IO-awareness", NeurIPS, 2022.

    Examples
    --------
    >>> import numpy as np
    >>> from fa_cupy import attention, attention_backward
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 8, 100, 16))
    >>> out, lse = attention(q, k, v, return_lse=True)
    >>> dq, dk, dv = attention_backward(dout, q, k, v, out, lse)

    A small step changes ``sum(dout * out)`` as its gradient says:

    >>> step = 1e-6 * np.random.default_rng(1).standard_normal(q.shape)
    >>> change = np.sum(dout * (attention(q + step, k, v) - out))
    >>> bool(np.isclose(change, np.sum(dq * step), rtol=1e-4))
    True

    A bias for each head has a gradient summed over the queries and keys that it was added to:

    >>> bias = np.zeros((8, 1, 1))
    >>> (dbias,) = attention_backward(dout, q, k, v, out, lse, bias, need=["bias"])
    >>> dbias.shape
    (8, 1, 1)
    """
    name = "attention_backward"
    args, arrays = attention_problem.ARGS, (q, k, v, bias, mask)
    dispatch.require(name, dout=dout, q=q, k=k, v=v, out=out, lse=lse)
    results = {"out": out, "lse": lse, "dout": dout, "dlse": dlse}
    native, inputs, (out, lse, dout, dlse) = dispatch.with_bits(name, args, arrays, **results)
    problem = attention_problem.attention_problem(
        *inputs, scale=scale, is_causal=is_causal, causal_align=causal_align, window=window,
        softcap=softcap, name=name, args=args,
    )  # fmt: skip
    shape, dtype = problem.out_shape, problem.dtype
    for arg, array in (("out", out), ("dout", dout)):
        linear_problem.check_gradient(name, arg, array, shape, dtype)
    for arg, array in (("lse", lse), ("dlse", dlse)):
        if array is not None:
            linear_problem.check_gradient(
                name, arg, array, shape[:-1], attention_problem.sum_dtype(dtype)
            )
    wanted = _wanted(name, need, bias is not None)
    backend = dispatch.backend_of(native, "attention_backward")
    with native.context:
        found = backend.backward(
            problem, inputs, (out, lse, dout, dlse), wanted, dispatch.allocator(native)
        )
        return tuple(native.give_back(found[arg]) for arg in wanted)


def _wanted(name: str, need: Any, with_bias: bool) -> tuple[str, ...]:
    """Return the arguments whose gradients are wanted."""
    there = _NEED if with_bias else _NEED[:3]
    if need is None:
        return there
    wanted = ", ".join(map(repr, there[:-1])) + f" and {there[-1]!r}"
    if isinstance(need, str) or not isinstance(need, Sequence):
        raise TypeError(f"{name}: need is {checks.show(need)}, want a sequence of {wanted}")
    if len(need) == 0:
        raise ValueError(f"{name}: need is {checks.show(need)}, want at least one of {wanted}")
    for i, arg in enumerate(need):
        if not isinstance(arg, str) or arg not in _NEED:
            raise ValueError(f"{name}: need[{i}] is {checks.show(arg)}, want {wanted}")
        if arg not in there:
            raise ValueError(f"{name}: need has {arg!r}, and bias is None, want an array")
        if arg in need[:i]:
            raise ValueError(f"{name}: need has {arg!r} twice, want each once")
    return tuple(need)
