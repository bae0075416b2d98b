"""Plain definitions in float64 on SciPy, which everything else is compared with.

They take NumPy arrays, build all Lq x Lk scores, and share no code with the library's own paths.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

Array = NDArray[Any]


def attention(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    **options: Any,
) -> tuple[Array, Array]:
    """Attention and its log-sum-exp in float64.

    Parameters
    ----------
    q, k, v, bias, mask : numpy.ndarray
        As in `fa_cupy.attention`; a `fa_cupy.BitMask` is unpacked to all its Lq x Lk elements.
    **options
        `scale`, `is_causal`, `causal_align`, `window` and `softcap`, as there.

    Returns
    -------
    out : numpy.ndarray of float64, shape (..., Lq, Dv)
    lse : numpy.ndarray of float64, shape (..., Lq)

    Examples
    --------
    >>> import numpy as np
    >>> from fa_cupy import reference
    >>> out, lse = reference.attention(np.zeros((1, 2)), np.ones((4, 2)), np.arange(4.0)[:, None])
    >>> out.item(), round(lse.item(), 4)
    (1.5, 1.3863)
    """
    return _attend(q, k, v, bias, mask, np.dtype(np.float64), None, **options)


def plain(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    dtype: Any,
    **options: Any,
) -> Array:
    """Attention computed plainly in low precision, whose error others are measured against.

    Scores and softmax are in float32 (float64 for a `dtype` of float64), the weights are rounded
    to `dtype` before their product with `v`, which accumulates in float32, and so is the output.

    Parameters
    ----------
    q, k, v, bias, mask : numpy.ndarray
        As in `fa_cupy.attention`.
    dtype : numpy.dtype
        float16, bfloat16, float32 or float64.
    **options
        As in `attention`.

    Returns
    -------
    numpy.ndarray of `dtype`, shape (..., Lq, Dv)
    """
    dtype = np.dtype(dtype)
    real = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    return _attend(q, k, v, bias, mask, real, dtype, **options)[0].astype(dtype)


def causal_product(
    q: Array,
    k: Array,
    v: Array,
    initial_state: Array | None = None,
    *,
    reverse: bool = False,
) -> tuple[Array, Array]:
    """Causal product and its last state in float64.

    Parameters
    ----------
    q, k, v, initial_state, reverse
        As in `fa_cupy.causal_product`, the first four being NumPy arrays.

    Returns
    -------
    out : numpy.ndarray of float64, shape (..., L, M)
    state : numpy.ndarray of float64, shape (..., E, M)
        With the batch axes of `out`.

    Examples
    --------
    >>> import numpy as np
    >>> from fa_cupy import reference
    >>> x = np.array([[1.0], [2.0], [3.0]])
    >>> out, state = reference.causal_product(x, x, x)
    >>> out.ravel().tolist(), state.item()
    ([1.0, 10.0, 42.0], 14.0)
    """
    return _product(q, k, v, initial_state, np.dtype(np.float64), reverse)


def plain_product(q: Array, k: Array, v: Array, *, dtype: Any, reverse: bool = False) -> Array:
    """Causal product computed plainly in low precision, whose error others are measured against.

    Scores are sums in float32 (float64 for a `dtype` of float64), rounded to `dtype` before their
    product with `v`, which is summed in float32 and rounded to `dtype`.

    Parameters
    ----------
    q, k, v : numpy.ndarray
    dtype : numpy.dtype
        float16, bfloat16, float32 or float64.
    reverse : bool

    Returns
    -------
    numpy.ndarray of `dtype`, shape (..., L, M)
    """
    dtype = np.dtype(dtype)
    real = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    return _product(q, k, v, None, real, reverse, dtype)[0].astype(dtype)


def relative_error(x: Array, ref: Array) -> float:
    """Return the Frobenius norm of ``x - ref`` over that of `ref`; 0.0 where both are 0.

    It is infinite where `x` is finite and `ref` is not or the other way round; elements that are
    finite in neither do not count.

    Examples
    --------
    >>> import numpy as np
    >>> from fa_cupy import reference
    >>> reference.relative_error(np.array([1.0, np.nan]), np.array([2.0, np.nan]))
    0.5
    """
    x, ref = np.asarray(x, np.float64), np.asarray(ref, np.float64)
    finite = np.isfinite(ref)
    if x.shape != ref.shape or not np.array_equal(np.isfinite(x), finite):
        return np.inf
    error, norm = np.linalg.norm(x[finite] - ref[finite]), np.linalg.norm(ref[finite])
    if norm == 0:
        return 0.0 if error == 0 else np.inf
    return float(error / norm)


def visible(
    q_len: int,
    k_len: int,
    *,
    is_causal: bool = False,
    causal_align: str | None = None,
    window: tuple[int | None, int | None] | None = None,
) -> NDArray[np.bool_]:
    """Return which keys causality and window leave to which queries, shape (q_len, k_len).

    Examples
    --------
    >>> from fa_cupy import reference
    >>> reference.visible(2, 3, is_causal=True, causal_align="bottom_right").astype(int)
    array([[1, 1, 0],
           [1, 1, 1]])
    """
    i, j = np.indices((q_len, k_len))
    if causal_align == "bottom_right":
        i = i + (k_len - q_len)
    left, right = window or (None, None)
    seen = np.ones((q_len, k_len), np.bool_)
    if is_causal:
        seen &= j <= i
    if left is not None:
        seen &= i - j <= left
    if right is not None:
        seen &= j - i <= right
    return seen


def _attend(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None,
    mask: Array | None,
    real: np.dtype[Any],
    weight_dtype: np.dtype[Any] | None,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    precision: str | None = None,  # nothing that a definition depends on
    **band: Any,
) -> tuple[Array, Array]:
    q, k, v = (np.asarray(x).astype(real) for x in (q, k, v))
    if min(q.ndim, k.ndim, v.ndim) >= 4:
        k, v = (_repeat_heads(x, q.shape[-3]) for x in (k, v))
    if scale is None:
        scale = q.shape[-1] ** -0.5 if q.shape[-1] else 1.0
    with np.errstate(all="ignore"):
        scores = real.type(scale) * (q @ np.swapaxes(k, -1, -2))
        if softcap:
            scores = real.type(softcap) * np.tanh(scores / real.type(softcap))
        if bias is not None:
            scores = scores + np.asarray(bias).astype(real)
        seen = visible(q.shape[-2], k.shape[-2], **band)
        if mask is not None:
            seen = seen & (mask.to_dense() if hasattr(mask, "to_dense") else mask)
        scores = np.where(seen, scores, real.type(-np.inf))
        lse = _logsumexp(scores)
        attended = scores != -np.inf
        rows = attended.any(axis=-1, keepdims=True)
        weights = np.where(rows, _softmax(np.where(rows, scores, 0)), 0)
        if weight_dtype is not None:
            weights = weights.astype(weight_dtype)
        out = _weigh(weights.astype(real), attended, v)
        return out, np.broadcast_to(lse, out.shape[:-1]).copy()


def _product(
    q: Array,
    k: Array,
    v: Array,
    initial: Array | None,
    real: np.dtype[Any],
    reverse: bool,
    score_dtype: np.dtype[Any] | None = None,
) -> tuple[Array, Array]:
    q, k, v = (np.asarray(x).astype(real) for x in (q, k, v))
    state = np.zeros((k.shape[-1], v.shape[-1]), real) if initial is None else np.asarray(initial)
    if min(q.ndim, k.ndim, v.ndim) >= 4:
        k, v = (_repeat_heads(x, q.shape[-3]) for x in (k, v))
        state = _repeat_heads(state, q.shape[-3]) if state.ndim > 2 else state
    seen = np.tril(np.ones((q.shape[-2], k.shape[-2]), np.bool_))
    seen = seen.T if reverse else seen
    with np.errstate(all="ignore"):
        scores = np.where(seen, q @ np.swapaxes(k, -1, -2), 0)
        if score_dtype is not None:
            scores = scores.astype(score_dtype).astype(real)
        # A sum over no dims has no factor that could be anything but finite.
        within = _weigh(scores, seen, v if k.shape[-1] else np.zeros_like(v))
        out = within + q @ state
        last = state + np.swapaxes(k, -1, -2) @ v
    return out, np.broadcast_to(last, (*out.shape[:-2], *last.shape[-2:]))


def _repeat_heads(x: Array, heads: int) -> Array:
    count = x.shape[-3]
    return np.repeat(x, heads // count, axis=-3) if 1 < count < heads else x


def _softmax(scores: Array) -> Array:
    return special.softmax(scores, axis=-1) if scores.shape[-1] else scores


def _logsumexp(scores: Array) -> Array:
    """Log-sum-exp of the last axis: -inf for nothing, NaN where softmax has NaN."""
    if scores.shape[-1] == 0:
        return np.full(scores.shape[:-1], -np.inf, scores.dtype)
    lse: Array = special.logsumexp(scores, axis=-1)
    return np.where(lse == np.inf, np.nan, lse)


def _weigh(weights: Array, attended: Array, v: Array) -> Array:
    """Return ``weights @ v`` in which a key that is not attended to counts for nothing."""
    finite = np.isfinite(v)
    out: Array = weights @ np.where(finite, v, 0)
    if finite.all():
        return out
    hits = attended.astype(v.dtype)
    up, down, nan = (hits @ x.astype(v.dtype) > 0 for x in (v == np.inf, v == -np.inf, np.isnan(v)))
    out = np.where(up, np.inf, np.where(down, -np.inf, out))
    return np.where(nan | (up & down), np.nan, out)
