"""How far a result is from float64 arithmetic on the host, on a part that is quick to compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from validation import peers
from validation.cases import CausalProduct, Dense
from validation.peers import Qkv

Check = Callable[[Any], float]
#: Scores and their derivatives, of scaled products of some queries with the first keys and the
#: numbers of these queries.
Score = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, Any]]

_EXPONENT = {"fp16": 0x7C00, "bf16": 0x7F80}


def _host(array: Any) -> np.ndarray:
    return peers.to_host(array).astype(np.float64)


def all_finite(dtype: str, array: Any) -> bool:
    """Whether no element is infinite or NaN."""
    if dtype not in _EXPONENT:
        return bool((abs(array) < np.inf).all())
    mask = _EXPONENT[dtype]
    return not bool(((array.view("u2") & mask) == mask).any())


def attention_check(case: Dense, qkv: Qkv) -> Check:
    """Relative Frobenius error on sampled rows of the first and the last head.

    inf where any element of the whole result is not finite.
    """
    rows = sampled_rows(case.length)
    places = [(0, 0), (case.batch - 1, case.heads - 1)]

    def reference(place: tuple[int, int]) -> np.ndarray:
        batch, head = place
        kv_place = batch, head * case.key_heads // case.heads
        q, k, v = (_host(x[at]) for x, at in zip(qkv, (place, kv_place, kv_place), strict=True))
        return attention64(q, k, v, rows, case.causal, case.window)

    return relative_error(case.dtype, places, rows, np.stack([reference(at) for at in places]))


def attention64(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, rows: np.ndarray, causal: bool, window: int = 0
) -> np.ndarray:
    """Rows of one head's attention in float64, of as many queries as keys."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scores = q[rows] @ k.T * q.shape[-1] ** -0.5
    if causal:
        scores[np.arange(len(k)) > rows[:, None]] = -np.inf
    if window:
        scores[np.arange(len(k)) <= rows[:, None] - window] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(p @ v / p.sum(-1, keepdims=True))


def backward_check(case: Dense, arrays: tuple[Any, ...]) -> Check:
    """Relative Frobenius error of the last head's gradients, the largest of the three.

    inf where any element of the whole result is not finite.
    """
    place = case.batch - 1, case.heads - 1
    wanted = attention_gradients64(*(_host(x[place]) for x in arrays), causal=case.causal)
    return gradients_error(case.dtype, place, wanted)


def gradients_error(dtype: str, place: tuple[int, int], wanted: list[np.ndarray]) -> Check:
    """Relative Frobenius error of gradients at a place (batch, head), the largest of them."""

    def error(result: Any) -> float:
        if not all(all_finite(dtype, x) for x in result):
            return float("inf")
        pairs = zip((_host(x[place]) for x in result), wanted, strict=True)
        return float(max(np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in pairs))

    return error


def attention_gradients64(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dout: np.ndarray,
    causal: bool,
    chunk: int = 512,
    seen: Callable[[np.ndarray], np.ndarray] | None = None,
    score: Score | None = None,
) -> list[np.ndarray]:
    """Gradients of one head's attention in float64, some queries at a time: dq, dk and dv.

    `seen` gives rows of a mask, `score` scores other than scaled products.
    """
    q, k, v, dout = (x.astype(np.float64) for x in (q, k, v, dout))
    scale = q.shape[-1] ** -0.5
    dq, dk, dv = (np.zeros_like(x) for x in (q, k, v))
    for start in range(0, len(q), chunk):
        rows = slice(start, min(start + chunk, len(q)))
        keys = slice(0, rows.stop if causal else len(k))
        p, slope = q[rows] @ k[keys].T * scale, 1.0
        if score is not None:
            p, slope = score(p, np.arange(start, rows.stop))
        if causal:
            p[np.arange(keys.stop) > np.arange(start, rows.stop)[:, None]] = -np.inf
        if seen is not None:
            p[~seen(np.arange(start, rows.stop))[:, keys]] = -np.inf
        p = np.exp(p - p.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        dv[keys] += p.T @ dout[rows]
        dp = dout[rows] @ v[keys].T
        ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * slope * scale
        dq[rows] = ds @ k[keys]
        dk[keys] += ds.T @ q[rows]
    return [dq, dk, dv]


def sampled_rows(length: int) -> np.ndarray:
    """Rows that stand for all: the first, the last and some between."""
    rng = np.random.default_rng(length)
    edge = np.arange(min(64, length))
    drawn = rng.integers(0, length, 128)
    return np.unique(np.concatenate([edge, drawn, length - 1 - edge]))


def relative_error(
    dtype: str, places: Sequence[tuple[int, ...]], rows: np.ndarray, wanted: np.ndarray
) -> Check:
    """Relative Frobenius error of these rows at these places (batch, head) of a result.

    inf where any element of the whole result is not finite.
    """

    def error(out: Any) -> float:
        if not all_finite(dtype, out):
            return float("inf")
        got = np.stack([_host(out[place])[rows] for place in places])
        return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))

    return error


def product64(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, reverse: bool = False, chunk: int = 256
) -> np.ndarray:
    """Causal product in float64, in chunks: for sequences whose scores would not fit in memory."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    state = np.zeros((*k.shape[:-2], k.shape[-1], v.shape[-1]))
    out = np.empty_like(v)
    mask = np.triu if reverse else np.tril
    starts = range(0, k.shape[-2], chunk)
    for start in reversed(starts) if reverse else starts:
        rows = (..., slice(start, start + chunk), slice(None))
        scores = mask(q[rows] @ k[rows].swapaxes(-1, -2))
        out[rows] = q[rows] @ state + scores @ v[rows]
        state += k[rows].swapaxes(-1, -2) @ v[rows]
    return out


def gradients64(dout: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> list[np.ndarray]:
    """Gradients of the causal product in float64: those of q, k and v."""
    return [
        product64(dout, v, k),
        product64(v, dout, q, reverse=True),
        product64(k, q, dout, reverse=True),
    ]


def product_check(case: CausalProduct, arrays: tuple[Any, ...]) -> Check:
    """Relative Frobenius error of the last head, the largest of an output or three gradients.

    inf where any element of the whole result is not finite.
    """
    place = case.batch - 1, case.heads - 1
    *dout, q, k, v = (_host(x[place]) for x in arrays)
    wanted = gradients64(dout[0], q, k, v) if dout else [product64(q, k, v)]

    def error(result: Any) -> float:
        found = result if case.backward else (result,)
        if not all(all_finite(case.dtype, x) for x in found):
            return float("inf")
        pairs = zip((_host(x[place]) for x in found), wanted, strict=True)
        return float(max(np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in pairs))

    return error
