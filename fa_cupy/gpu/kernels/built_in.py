"""Expressions that say what a softcap and a bias say, for which kernels have code of their own."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

from fa_cupy.core.attention_problem import Problem
from fa_cupy.core.broadcasting import View
from fa_cupy.score.program import Operands, flat_batch
from fa_cupy.score.tree import Node

_BIASES = ("float16", "bfloat16", "float32")


class Form(NamedTuple):
    """A score ``s``, or ``softcap * tanh(s / softcap)``, plus an element of an array.

    Attributes
    ----------
    softcap : float or None
    array : int or None
        The number of the array.
    axes : str
        The variables that are its indices, as "hij".
    """

    softcap: float | None
    array: int | None
    axes: str


def with_built_in(problem: Problem, score: Operands) -> tuple[Problem, Any] | None:
    """Return a problem without its expression, and its bias; None if no softcap and bias say it.

    Parameters
    ----------
    problem : Problem
    score : Operands
        The expression of the problem.
    """
    if problem.softcap or problem.bias is not None:
        return None
    form = form_of(score)
    if form is None:
        return None
    softcap = form.softcap or 0.0
    if form.array is None:
        return dataclasses.replace(problem, score=None, softcap=softcap), None
    if problem.offsets is not None and {"i", "j"} & {*form.axes}:
        return None  # those of an expression are positions in each sequence
    bias = score.values[form.array]
    view = _bias_view(problem, bias, form.axes)
    changed = dataclasses.replace(
        problem, score=None, softcap=softcap, bias=view, bias_dtype=bias.dtype
    )
    return changed, bias


def form_of(score: Operands) -> Form | None:
    """Return what an expression says if it is a `Form`, else None."""
    root, array, axes = score.program.root, None, ""
    if root.op == "add":
        found = _element(score, root.args[1]), _element(score, root.args[0])
        for element, rest in zip(found, root.args, strict=True):
            if element is not None:
                (array, axes), root = element, rest
                break
    if root.op == "variable" and root.value == "s":
        return Form(None, array, axes)
    softcap = _softcap(score, root)
    return None if softcap is None else Form(softcap, array, axes)


def _element(score: Operands, node: Node) -> tuple[int, str] | None:
    """Return the array and the indices of an element that a bias could be."""
    if node.op != "load" or not node.args or any(arg.op != "variable" for arg in node.args):
        return None
    assert isinstance(node.value, int)
    axes = "".join(str(arg.value) for arg in node.args)
    if len(set(axes)) < len(axes) or score.program.dtypes[node.value] not in _BIASES:
        return None
    return node.value, axes


def _softcap(score: Operands, node: Node) -> float | None:
    """Return c of ``c * tanh(s / c)``."""
    if node.op != "multiply":
        return None
    for factor, rest in (node.args, node.args[::-1]):
        cap = _number(score, factor)
        if cap is None or rest.op != "tanh" or rest.args[0].op != "divide":
            continue
        s, divisor = rest.args[0].args
        if s.op == "variable" and s.value == "s" and _number(score, divisor) == cap:
            return abs(cap)
    return None


def _number(score: Operands, node: Node) -> float | None:
    """Return a number of the text or of the caller, other than 0."""
    value: Any = node.value
    if node.op == "load" and not node.args and isinstance(score.values[value], float):
        value = score.values[value]
    elif node.op != "number":
        return None
    return float(value) if value and math.isfinite(value) else None


def _bias_view(problem: Problem, bias: Any, axes: str) -> View:
    """Return the view of an array, over the axes of a bias."""
    step = dict.fromkeys("bhij", 0) | dict(zip(axes, bias.strides, strict=True))
    heads = flat_batch(problem.out_shape[:-2])[1]
    strides, entries = [], int(np.prod(problem.batch, dtype=np.int64))
    for size in problem.batch:  # whose entries are numbered in C order, b * heads + h
        entries //= max(1, size)
        within = entries < heads
        strides.append(step["h"] * entries if within else step["b"] * (entries // max(1, heads)))
    shape = (*problem.batch, problem.q_len, problem.k_len)
    return View(shape, (*strides, step["i"], step["j"]))
