"""Scale and softcap as the arithmetic can take them."""

from __future__ import annotations

import functools
import math
import sys
from typing import Any

import numpy as np

from fa_cupy.core.attention_problem import Problem

# The largest softcap, in parts of the largest number.
_CAP_MARGIN = 2.0**-24
#: Queries take no part of a factor from here on; products are multiplied by it when they are done.
MOST = 1e4


def in_range(xp: Any, bias: Any, dtype: np.dtype[Any]) -> Any:
    """Return a bias in which numbers beyond the largest of `dtype` are that.

    They stay finite so: an infinite score hides a key, or makes the row NaN.
    """
    largest = float(np.finfo(dtype).max)
    return xp.where(xp.isfinite(bias), xp.clip(bias, -largest, largest), bias)


def folds(factor: float) -> bool:
    """Whether `factor` can be taken into a float32 product, neither under- nor overflowing there.

    Otherwise finished scores have to be multiplied by it, in float64: they may become infinite
    then, but terms of a sum that were infinite already could make it NaN.
    """
    return factor == 0 or 1e-8 < abs(factor) < MOST


def split(factor: float) -> tuple[float, float]:
    """Return (now, later) with product `factor`: what queries are multiplied by, and products then.

    `now` is at most 1 in size, 2 for factors of 2**1023 and more: queries times more than 1 could
    overflow where q.k does not.
    `later` is a power of two, so that multiplying by it rounds nothing.
    """
    if abs(factor) <= 1:
        return factor, 1.0
    now, exponent = math.frexp(factor)
    if exponent == sys.float_info.max_exp:  # 2**1024 is no number
        now, exponent = 2.0 * now, exponent - 1
    return now, math.ldexp(1.0, exponent)


def transform(problem: Problem, dtype: np.dtype[Any]) -> tuple[float, float]:
    """Return (factor, cap): a score is ``factor * q.k``, or ``cap * tanh(factor * q.k)``.

    Both are finite in `dtype` (the factor in float64 at least), and the factor of a scale other
    than 0 is not 0, so that neither 0 * inf nor inf * 0 makes a NaN of finite data.

    A scale that `dtype` cannot hold counts as the largest number that it can. A softcap beyond
    2**-24 of that number counts as so much, for then ``factor * q.k`` is not subnormal, and keeps
    its digits, where the score is an ordinary number. tanh changes only scores that are near the
    cap itself. If the scale is so large too, they keep their order: all shrink as the cap does.
    """
    return _transform(problem.scale, problem.softcap, dtype)


def _transform(scale: float, softcap: float, dtype: np.dtype[Any]) -> tuple[float, float]:
    largest = float(np.finfo(dtype).max)
    if not softcap:
        return max(-largest, min(largest, scale)), 0.0
    cap, size = min(softcap, largest * _CAP_MARGIN), abs(scale)
    factor = min(size / cap, max(size / softcap, _CAP_MARGIN))
    bound = np.finfo(np.float64)
    factor = max(float(bound.smallest_subnormal), min(float(bound.max), factor))
    return math.copysign(factor, scale) if size else 0.0, cap


def in_turn(problem: Problem, dtype: np.dtype[Any]) -> tuple[float, float, bool]:
    """Return (factor, cap, apart): those of `transform`, or of ``cap * tanh(factor * q.k / cap)``.

    If `apart`, the second form is meant, which `capped` computes. It is needed where scale divided
    by softcap is too small for float64, and where `transform` would reduce the softcap although the
    scale is an ordinary number.
    """
    return _in_turn(problem.scale, problem.softcap, dtype)


@functools.lru_cache(maxsize=256)
def _in_turn(scale: float, softcap: float, dtype: np.dtype[Any]) -> tuple[float, float, bool]:
    factor, cap = _transform(scale, softcap, dtype)
    if not cap:
        return factor, cap, False
    largest = float(np.finfo(dtype).max)
    given, scale = scale, abs(scale)
    vanishes = 0 < scale < softcap * float(np.finfo(np.float64).tiny)
    if vanishes or (cap < softcap <= largest and scale < MOST):
        return given, min(softcap, largest), True
    return factor, cap, False


def capped(xp: Any, scores: Any, cap: float, slope: Any | None) -> None:
    """Set `scores` to ``cap * tanh(scores / cap)`` where their quotient may be subnormal.

    The derivative is left in `slope`.
    """
    small = xp.abs(scores) < cap * float(np.finfo(scores.dtype).eps) ** 0.5
    quotient = xp.tanh(scores / scores.dtype.type(cap))
    if slope is not None:
        slope[...] = 1 - quotient * quotient
    scores[...] = xp.where(small, scores, scores.dtype.type(cap) * quotient)
