"""CUDA C++ of a tree: the body of a function, as a pure function of the tree.

The body uses what ``cuda_src/common/score_functions.cuh`` defines, and of what is around it

- ``s``, of type `real`, and the ints ``b``, ``h``, ``i`` and ``j``;
- ``load<number>(arrays, index...)``, an element of an array or, without indices, a number of the
  caller's: `real` of floats, ``int`` of integers of up to 16 bits, ``long long`` of others;
- ``int_to_float(integer)``, which is `real`: where an expression of integers meets a float. Its
  argument is mostly affine in i and j, so that a kernel may keep what does not change.

There is no name and no text of a caller in it. Every value that is used twice is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fa_cupy.score import tree
from fa_cupy.score.tree import Node, Step

_TYPES = {"bool": "bool", "int": "int", "long": "long long"}
_SIGNS = {
    "add": "+",
    "subtract": "-",
    "multiply": "*",
    "less": "<",
    "less_equal": "<=",
    "equal": "==",
    "not_equal": "!=",
    "and": "&&",
    "or": "||",
}
# Arithmetic of 64 bits may wrap around, which is undefined for signed integers.
_WRAPPING = {
    "add": "wrapping_add",
    "subtract": "wrapping_subtract",
    "multiply": "wrapping_multiply",
    "negative": "wrapping_negative",
    "abs": "wrapping_abs",
}
_CALLS = {
    "to_float": "int_to_float",
    "divide": "divide_of",
    "floor_divide": "floor_divide",
    "mod": "floor_mod",
    "abs": "abs_of",
    "min": "min_of",
    "max": "max_of",
    "float_power": "power_of",
    "sign": "sign_of",
    **{f"{name}": f"{name}_of" for name in tree.FUNCTIONS if name != "sign"},
}


def body(roots: Sequence[Node], results: Sequence[str], real: str = "float") -> str:
    """Return statements that compute trees.

    Parameters
    ----------
    roots : sequence of Node
        Of kind "float", as the score and its derivative.
    results : sequence of str
        What the values are assigned to, as "score" or "return".
    real : {"float", "double", "Real"}
        "Real" is a template's parameter; its literals are made from those of double.

    Examples
    --------
    >>> from fa_cupy.score import cuda, parse
    >>> root = parse.parse("s - x[h] * abs(i - j)", {"x": parse.Argument(0, "float", 1)})
    >>> print(cuda.body([root], ["return"]), end="")
    return (s - (load<0>(arrays, h) * int_to_float(abs_of((i - j)))));
    """
    order = tree.ordered(*roots)
    texts: list[str] = []
    lines: list[str] = []
    for place, step in enumerate(order.steps):
        text = text_of(step, [texts[arg] for arg in step.args], real)
        if step.uses > 1 and step.node.op not in ("number", "variable"):
            lines.append(f"const {type_of(step.node, real)} t{place} = {text};")
            text = f"t{place}"
        texts.append(text)
    for name, place in zip(results, order.results, strict=True):
        lines.append(f"{name}{' ' if name == 'return' else ' = '}{texts[place]};")
    return "".join(f"{line}\n" for line in lines)


def type_of(node: Node, real: str = "float") -> str:
    """Return the type of a node's value."""
    return _TYPES.get(node.kind, real)


def text_of(step: Step, args: list[str], real: str) -> str:
    """Return the expression of one step, in parentheses where it needs them.

    Parameters
    ----------
    step : Step
    args : list of str
        The expressions of its arguments.
    real : str
        As for `body`.
    """
    node, op = step.node, step.node.op
    wraps = node.kind == "long" and op in _WRAPPING
    match op:
        case "number":
            return _number(node, real)
        case "variable":
            return str(node.value)
        case "load":
            return f"load<{node.value}>({', '.join(['arrays', *args])})"
        case "to_long":
            return f"static_cast<long long>({args[0]})"
        case "where":
            return f"({args[0]} ? {args[1]} : {args[2]})"
        case "power":
            name = "wrapping_power" if node.kind == "long" else "int_power"
            return f"{name}<{node.value}>({args[0]})"
        case "not":
            return f"(!{args[0]})"
        case "negative" if not wraps:
            return f"(-{args[0]})"
    if wraps:
        return f"{_WRAPPING[op]}({', '.join(args)})"
    if op in _SIGNS:
        return f"({args[0]} {_SIGNS[op]} {args[1]})"
    return f"{_CALLS[op]}({', '.join(args)})"


def _number(node: Node, real: str) -> str:
    value = node.value
    if isinstance(value, int):
        return f"({value})" if value < 0 else f"{value}"
    assert isinstance(value, float)
    with np.errstate(over="ignore"):
        rounded = np.float32(value) if real == "float" else np.float64(value)
    # The fewest digits that are read back as the same number.
    text = f"{rounded!s}{'f' if real == 'float' else ''}"
    if np.isnan(rounded):
        text = "(FA_INFINITY - FA_INFINITY)"
    if np.isinf(rounded):
        text = "-FA_INFINITY" if value < 0 else "FA_INFINITY"
    if real == "Real":
        return f"Real({text})"
    return f"({text})" if text.startswith("-") else text
