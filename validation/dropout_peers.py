"""Attention with dropout on a GPU, and its gradients: implementations and what checks them.

Each library has decisions of its own. Those of this package are known, and its results are held
against the definition with these weights left out. Of other libraries the results are random: how
far they are from those without dropout is held against what is to be expected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fa_cupy.dropout import decisions
from fa_cupy.dropout.arguments import Dropout
from validation import backward_peers, checks, peers
from validation.cases import Dense
from validation.checks import Check
from validation.peers import Call

Arrays = tuple[Any, ...]  # q, k, v, and of gradients dout
Prepare = Callable[[Dense, Arrays], Call]
# Bounds of a sum of squares over its expectation, and the fewest keys of a row in it: one key that
# is dropped or not would decide on the sum.
_LEAST, _MOST = 0.6, 1.6
_FEWEST = 64


class Drawn(NamedTuple):
    """A result of another library, which does not say which weights it dropped."""

    result: Any


class Plain(NamedTuple):
    """A result without dropout."""

    result: Any


def _wrapped(prepare: Prepare, kind: type[Drawn | Plain]) -> Prepare:
    """The implementation, with results of that kind; those without dropout get no such case."""

    def prepared(case: Dense, arrays: Arrays) -> Call:
        case = case if kind is Drawn else dataclasses.replace(case, dropout=0.0)
        call = prepare(case, arrays)
        return call._replace(native=lambda result: kind(call.native(result)))

    return prepared


def kept_of_head(case: Dense, place: tuple[int, int]) -> np.ndarray:
    """Which weights of one head this package keeps."""
    dropout = Dropout(case.dropout, peers.SEED)
    b, h = (np.full((1, 1, 1), i) for i in place)
    span = 0, case.length
    return np.asarray(decisions.kept(dropout, b, h, span, span)).reshape(case.length, case.length)


def _host(arrays: Arrays, place: tuple[int, int]) -> list[np.ndarray]:
    return [peers.to_host(x[place]).astype(np.float64) for x in arrays]


def _weights(
    case: Dense, q: np.ndarray, k: np.ndarray, rows: np.ndarray, kept: np.ndarray | None = None
) -> np.ndarray:
    """Rows of the weights of one head in float64; of those that are `kept`, or all."""
    scores = q[rows] @ k.T * case.head_dim**-0.5
    if case.causal:
        scores[np.arange(case.length) > rows[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights if kept is None else weights * kept[rows] / (1 - case.dropout)


def _deviation(found: np.ndarray, plain: np.ndarray, expected: float) -> float:
    """0 where squares of differences are about what is expected of them, else infinity."""
    share = float(np.sum((found - plain) ** 2)) / expected
    return 0.0 if _LEAST < share < _MOST else float("inf")


def forward_check(case: Dense, arrays: Arrays) -> Check:
    """As `checks.attention_check`, of results of all three kinds."""
    place, rows = (case.batch - 1, case.heads - 1), checks.sampled_rows(case.length)
    q, k, v = _host(arrays, place)
    kept = kept_of_head(case, place)
    own = checks.relative_error(
        case.dtype, [place], rows, (_weights(case, q, k, rows, kept) @ v)[None]
    )
    weights = _weights(case, q, k, rows)
    plain = weights @ v
    odds = case.dropout / (1 - case.dropout)
    many = rows >= _FEWEST if case.causal else np.ones(len(rows), bool)
    expected = odds * float(np.sum(weights[many] ** 2 @ (v**2).sum(-1)))

    def error(result: Any) -> float:
        if isinstance(result, Plain):
            return checks.relative_error(case.dtype, [place], rows, plain[None])(result.result)
        if not isinstance(result, Drawn):
            return own(result)
        if not checks.all_finite(case.dtype, result.result):
            return float("inf")
        found = peers.to_host(result.result[place]).astype(np.float64)[rows]
        return _deviation(found[many], plain[many], expected)

    return error


def gradients64(case: Dense, arrays: Arrays, place: tuple[int, int]) -> list[np.ndarray]:
    """Gradients of one head with this package's decisions, in float64: dq, dk and dv."""
    q, k, v, dout = _host(arrays, place)
    kept, scale = kept_of_head(case, place), case.head_dim**-0.5
    dq, dk, dv = (np.zeros_like(x) for x in (q, k, v))
    for start in range(0, case.length, 512):
        rows = np.arange(start, min(start + 512, case.length))
        weights = _weights(case, q, k, rows)
        factor = kept[rows] / (1 - case.dropout)
        dropped = weights * factor
        dv += dropped.T @ dout[rows]
        dp = dout[rows] @ v.T * factor
        ds = weights * (dp - (weights * dp).sum(-1, keepdims=True)) * scale
        dq[rows] = ds @ k
        dk += ds.T @ q[rows]
    return [dq, dk, dv]


def gradients_check(case: Dense, arrays: Arrays) -> Check:
    """As `checks.backward_check`; of random results, dv alone is held against anything."""
    place = case.batch - 1, case.heads - 1
    own = checks.gradients_error(case.dtype, place, gradients64(case, arrays, place))
    q, k, v, dout = _host(arrays, place)
    plain = checks.attention_gradients64(q, k, v, dout, case.causal)
    weights = _weights(case, q, k, np.arange(case.length))
    odds = case.dropout / (1 - case.dropout)
    expected = odds * float(np.sum((weights**2).T @ (dout**2).sum(-1)))

    def error(result: Any) -> float:
        if isinstance(result, Plain):
            return checks.gradients_error(case.dtype, place, plain)(result.result)
        if not isinstance(result, Drawn):
            return own(result)
        if not all(checks.all_finite(case.dtype, x) for x in result.result):
            return float("inf")
        dv = peers.to_host(result.result[2][place]).astype(np.float64)
        return _deviation(dv, plain[2], expected)

    return error


def _impls(own: Prepare, torch_sdpa: Callable[[str], Prepare]) -> dict[str, Prepare]:
    return {
        "fa_cupy": own,
        "fa_cupy_plain": _wrapped(own, Plain),
        "cudnn": _wrapped(torch_sdpa("CUDNN_ATTENTION"), Drawn),
        "flash2": _wrapped(torch_sdpa("FLASH_ATTENTION"), Drawn),
    }


forward = _impls(peers.fa_cupy, peers.torch_sdpa)
backward = _impls(backward_peers.fa_cupy, backward_peers.torch_sdpa)
