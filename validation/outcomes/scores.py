"""Calls of attention and its gradients with score expressions, and errors of expressions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import fa_cupy
from fa_cupy import Score
from validation.outcomes.data import DTYPES, chance, draw, some_dtypes
from validation.outcomes.record import GPU_TOLERANCE, Call

_SHAPE = (2, 3, 70, 16)
_SLOPES = draw("slopes", (3,), np.float64)
_TABLE = draw("table", (3, 140), np.float32)
_PREFIX = np.array([5, 30], np.int32)

# Name: a score, arrays whose gradients are wanted, and the arguments besides q, k and v.
_CASES: dict[str, tuple[Score, tuple[str, ...], dict[str, Any]]] = {
    "of slopes": (
        Score("s - slopes[h] * abs(i - j)", slopes=_SLOPES),
        ("score.slopes",),
        {"is_causal": True},
    ),
    "of a table": (Score("s + table[h, i - j + 70]", table=_TABLE), (), {}),
    "of minus infinity": (
        Score("s if j < prefix[b] or j <= i else -inf", prefix=_PREFIX),
        (),
        {"mask": chance("mask", (70, 70), 0.6)},
    ),
    "with softcap, bias and sinks": (
        Score("s + c * tanh(x[h] * s) * cos(i - j)", c=0.5, x=_SLOPES),
        ("score.x", "sinks", "bias"),
        {
            "softcap": 2.0,
            "bias": draw("bias", (70, 70), np.float32),
            "sinks": draw("sinks", (3, 1), np.float32),
        },
    ),
}
_ERRORS: dict[str, tuple[str, dict[str, Any]]] = {
    "unknown name": ("s + x", {}),
    "unused argument": ("s", {"x": 1.0}),
    "float index": ("s + x[s]", {"x": _SLOPES}),
    "axes": ("s + x[h, i]", {"x": _SLOPES}),
    "bool": ("i < j", {}),
    "argument text": ("s + x", {"x": "1"}),
    "argument nan": ("s + x", {"x": float("nan")}),
}


def _solved(name: str, dtype: str) -> Callable[[Any], Any]:
    def run(xp: Any) -> Any:
        score, need, options = _CASES[name]
        q, k, v, dout = (draw(arg, _SHAPE, DTYPES[dtype]) for arg in ("q", "k", "v", "dout"))
        out, lse = fa_cupy.attention(q, k, v, score=score, return_lse=True, **options)
        found = fa_cupy.attention_backward(
            dout, q, k, v, out, lse, score=score, need=("q", "k", "v", *need), **options
        )
        return out, lse, found

    return run


def calls() -> Iterator[Call]:
    """Yield one call for each score and dtype, and one for each wrong expression."""
    for name in _CASES:
        for dtype in some_dtypes(name):
            # a gradient in another dtype is as accurate as what it is computed in
            slack = GPU_TOLERANCE[dtype]
            yield Call(f"Score {name} {dtype}", _solved(name, dtype), cpu=True, slack=slack)
    for name, (text, arguments) in _ERRORS.items():
        yield Call(
            f"error Score {name}",
            lambda xp, text=text, arguments=arguments: Score(text, **arguments),
            fails=True,
            cpu=True,
        )
    wrong = Score("s + x[j]", x=_SLOPES)
    q = draw("q", _SHAPE, np.float32)
    yield Call(
        "error Score index out of range",
        lambda xp: fa_cupy.attention(q, q, q, score=wrong),
        fails=True,
        cpu=True,
    )
