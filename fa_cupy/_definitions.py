"""The arithmetic of `fa_cupy.reference`: all scores at once, in float64 or in a low precision."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

Array = NDArray[Any]


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


class Scores(NamedTuple):
    """All scores of a call, and the arrays that they were made from."""

    q: Array
    k: Array  # heads repeated, as those of v
    v: Array
    scores: Array  # (..., q_len, k_len), -inf where a key is hidden
    slope: Array  # what a score changes by with q.k
    attended: NDArray[np.bool_]


def scores_of(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None,
    mask: Array | None,
    real: np.dtype[Any],
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    precision: str | None = None,  # nothing that a definition depends on
    **band: Any,
) -> Scores:
    q, k, v = (np.asarray(x).astype(real) for x in (q, k, v))
    if min(q.ndim, k.ndim, v.ndim) >= 4:
        k, v = (repeat_heads(x, q.shape[-3]) for x in (k, v))
    if scale is None:
        scale = q.shape[-1] ** -0.5 if q.shape[-1] else 1.0
    scores = real.type(scale) * (q @ np.swapaxes(k, -1, -2))
    slope = np.asarray(real.type(scale))
    if softcap:
        capped = scores / real.type(softcap)
        scores = real.type(softcap) * np.tanh(capped)
        slope = slope / np.cosh(capped) ** 2
    if bias is not None:
        scores = scores + np.asarray(bias).astype(real)
    seen = visible(q.shape[-2], k.shape[-2], **band)
    if mask is not None:
        seen = seen & (mask.to_dense() if hasattr(mask, "to_dense") else mask)
    scores = np.where(seen, scores, real.type(-np.inf))
    return Scores(q, k, v, scores, slope, scores != -np.inf)


def attend(x: Scores, weight_dtype: np.dtype[Any] | None) -> tuple[Array, Array, Array]:
    """Return output, LSE and weights, these rounded to `weight_dtype`."""
    lse = logsumexp(x.scores)
    rows = x.attended.any(axis=-1, keepdims=True)
    weights = np.where(x.attended, softmax(np.where(rows, x.scores, 0)), 0)
    if weight_dtype is not None:
        weights = weights.astype(weight_dtype).astype(x.scores.dtype)
    out = weigh(weights, x.attended, x.v)
    return out, np.broadcast_to(lse, out.shape[:-1]).copy(), weights


def gradients(
    x: Scores, dout: Array, dlse: Array | None, dtype: np.dtype[Any] | None
) -> tuple[Array, Array, Array, Array]:
    """Return the gradients of q, k, v and scores, for every batch entry of the output.

    `dtype` is that of the output, and of weights and gradients of scores in products.
    """
    real = x.scores.dtype

    def rounded(a: Array) -> Array:
        return a if dtype is None else a.astype(dtype).astype(real)

    out, _, weights = attend(x, dtype)
    dout = np.asarray(dout).astype(real)
    base = (dout * rounded(out)).sum(axis=-1, keepdims=True)
    if dlse is not None:
        base = base - np.asarray(dlse).astype(real)[..., None]
    whole = attend(x, None)[2]
    dscores = np.where(x.attended, whole * (dout @ np.swapaxes(x.v, -1, -2) - base), 0)
    dproducts = rounded(np.where(x.attended, dscores * x.slope, 0))
    back = np.swapaxes(x.attended, -1, -2)
    dq = reach(dproducts, x.attended, x.k)
    dk = reach(np.swapaxes(dproducts, -1, -2), back, x.q)
    dv = reach(np.swapaxes(weights, -1, -2), back, dout)
    return dq, dk, dv, dscores


def product(
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
        k, v = (repeat_heads(x, q.shape[-3]) for x in (k, v))
        state = repeat_heads(state, q.shape[-3]) if state.ndim > 2 else state
    seen = np.tril(np.ones((q.shape[-2], k.shape[-2]), np.bool_))
    seen = seen.T if reverse else seen
    with np.errstate(all="ignore"):
        scores = np.where(seen, q @ np.swapaxes(k, -1, -2), 0)
        if score_dtype is not None:
            scores = scores.astype(score_dtype).astype(real)
        # A sum over no dims has no factor that could be anything but finite.
        within = weigh(scores, seen, v if k.shape[-1] else np.zeros_like(v))
        out = within + q @ state
        last = state + np.swapaxes(k, -1, -2) @ v
    return out, np.broadcast_to(last, (*out.shape[:-2], *last.shape[-2:]))


def repeat_heads(x: Array, heads: int) -> Array:
    count = x.shape[-3]
    return np.repeat(x, heads // count, axis=-3) if 1 < count < heads else x


def softmax(scores: Array) -> Array:
    return special.softmax(scores, axis=-1) if scores.shape[-1] else scores


def logsumexp(scores: Array) -> Array:
    """Log-sum-exp of the last axis: -inf for nothing, NaN where softmax has NaN."""
    if scores.shape[-1] == 0:
        return np.full(scores.shape[:-1], -np.inf, scores.dtype)
    lse: Array = special.logsumexp(scores, axis=-1)
    return np.where(lse == np.inf, np.nan, lse)


def weigh(weights: Array, attended: Array, v: Array) -> Array:
    """Return ``weights @ v`` in which a key that is not attended to counts for nothing."""
    finite = np.isfinite(v)
    out: Array = weights @ np.where(finite, v, 0)
    if finite.all():
        return out
    hits = attended.astype(v.dtype)
    up, down, nan = (hits @ x.astype(v.dtype) > 0 for x in (v == np.inf, v == -np.inf, np.isnan(v)))
    out = np.where(up, np.inf, np.where(down, -np.inf, out))
    return np.where(nan | (up & down), np.nan, out)


def reach(weights: Array, attended: Array, x: Array) -> Array:
    """Return ``weights @ x``, NaN where a row of `x` that is attended to is not finite."""
    finite = np.isfinite(x)
    out: Array = weights @ np.where(finite, x, 0)
    return np.where(attended.astype(x.dtype) @ (~finite).astype(x.dtype) > 0, np.nan, out)


def summed(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the axes along which an array of `shape` was broadcast or its heads repeated."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape)))) if x.ndim > len(shape) else x
    for axis, size in enumerate(shape):
        if size == 1:
            x = x.sum(axis=axis, keepdims=True)
        elif size != x.shape[axis]:
            parts = x.reshape(*x.shape[:axis], size, x.shape[axis] // size, *x.shape[axis + 1 :])
            x = parts.sum(axis=axis + 1)
    return x
