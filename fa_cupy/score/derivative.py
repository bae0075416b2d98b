"""Derivatives of trees, by the chain rule.

Each node that depends on the variable gets a derivative, once, from the derivatives of its
arguments. The values of the tree are used again where they can be: that of ``exp(x)`` is
``exp(x)`` itself times that of ``x``. So the derivative of a tree has at most a few nodes for each
of its own.

The derivative of a ``where`` is that of the value taken, not a sum in which infinity times 0 would
be NaN. At a kink the derivative is the mean of those on both sides: 0 of ``abs`` at 0, and the mean
of both where the arguments of ``min`` and ``max`` are equal. That of ``floor`` is 0.
"""

from __future__ import annotations

import functools

from fa_cupy.score import tree
from fa_cupy.score.tree import Node, number, operation

_ZERO, _ONE, _MINUS_ONE = number(0.0), number(1.0), number(-1.0)


@functools.lru_cache(maxsize=1024)
def derivative(root: Node, by: Node) -> Node:
    """Return the derivative of a tree.

    Parameters
    ----------
    root : Node
        Of kind "float".
    by : Node
        The variable s, or an element of an array of floats.
    """
    found: list[Node] = []
    order = tree.ordered(root)
    for node, args, _ in order.steps:
        slopes = [found[arg] for arg in args]
        if node == by:
            found.append(_ONE)
        elif node.kind != "float" or all(slope == _ZERO for slope in slopes):
            found.append(_ZERO)
        else:
            found.append(_of_operation(node, slopes))
    return found[order.results[0]]


def _of_operation(node: Node, slopes: list[Node]) -> Node:
    """Return the derivative of a node, given those of its arguments, some of which are not 0."""
    match node.op:
        case "add":
            return _sum(*slopes)
        case "subtract":
            return _sum(slopes[0], _negative(slopes[1]))
        case "negative":
            return _negative(slopes[0])
        case "multiply":
            x, y = node.args
            return _sum(_product(slopes[0], y), _product(x, slopes[1]))
        case "divide":
            change = _product(node, slopes[1])
            return _quotient(_sum(slopes[0], _negative(change)), node.args[1])
        case "float_power":
            by_base, by_exponent = _of_float_power(node)
            return _sum(_product(by_base, slopes[0]), _product(by_exponent, slopes[1]))
        case "where":
            return _either(node.args[0], slopes[1], slopes[2])
        case "min" | "max":
            return _of_extremum(node, *slopes)
        case "log":
            return _quotient(slopes[0], node.args[0])
        case "sqrt":
            return _quotient(_product(number(0.5), slopes[0]), node)
        case _:
            return _product(_of_function(node), slopes[0])


def _of_function(node: Node) -> Node:
    """Return the derivative of a function of one argument by that argument."""
    x = node.args[0]
    match node.op:
        case "power":
            exponent = node.value
            assert isinstance(exponent, int)
            return _product(number(float(exponent)), _raised(x, exponent - 1))
        case "exp":
            return node
        case "tanh":
            return operation("subtract", _ONE, operation("power", node, value=2))
        case "sin":
            return operation("cos", x)
        case "cos":
            return _negative(operation("sin", x))
        case "sigmoid":
            return operation("multiply", node, operation("sigmoid", operation("negative", x)))
        case "abs":
            return operation("sign", x)
        case "sign" | "floor":
            return _ZERO
    raise AssertionError(f"there is no derivative of {node.op}")


def _of_float_power(node: Node) -> tuple[Node, Node]:
    """Return the derivatives of a power by its base and its exponent."""
    base, exponent = node.args
    lower = operation("float_power", base, operation("subtract", exponent, _ONE))
    by_base = operation("multiply", exponent, lower)
    if exponent.op != "number" or not exponent.value:
        # 0 where the exponent is 0, and not 0 times the infinite power -1 of 0.
        by_base = operation("where", operation("equal", exponent, _ZERO), _ZERO, by_base)
    # By the exponent: 0 of 0, and not 0 times log(0).
    is_zero = operation("equal", base, _ZERO)
    is_flat = operation("and", is_zero, operation("less_equal", _ZERO, exponent))
    slope = operation("multiply", operation("log", base), node)
    return by_base, operation("where", is_flat, _ZERO, slope)


def _of_extremum(node: Node, dx: Node, dy: Node) -> Node:
    """Return the derivative of the smaller or the larger of two values."""
    low, high = node.args if node.op == "min" else node.args[::-1]
    if dx.op == dy.op == "number":
        mean = number((float(dx.value or 0) + float(dy.value or 0)) / 2)
    else:
        mean = operation("multiply", number(0.5), _sum(dx, dy))
    otherwise = _either(operation("less", high, low), dy, mean)
    return _either(operation("less", low, high), dx, otherwise)


def _either(condition: Node, x: Node, y: Node) -> Node:
    return x if x == y else operation("where", condition, x, y)


def _raised(base: Node, exponent: int) -> Node:
    if exponent in (0, 1):
        return base if exponent else _ONE
    return operation("power", base, value=exponent)


def _sum(x: Node, y: Node) -> Node:
    """Return a sum without 0, and what is negative subtracted."""
    if x == _ZERO:
        return y
    if y == _ZERO:
        return x
    if y.op == "negative":
        return operation("subtract", x, y.args[0])
    if x.op == "negative":
        return operation("subtract", y, x.args[0])
    return operation("add", x, y)


def _negative(x: Node) -> Node:
    if x == _ZERO:
        return _ZERO
    if x.op == "number":
        return number(-float(x.value or 0))
    return x.args[0] if x.op == "negative" else operation("negative", x)


def _product(x: Node, y: Node) -> Node:
    """Return a product without 0 and 1, with its sign last, and as a quotient where it can be."""
    if x == _ZERO or y == _ZERO:
        return _ZERO
    if x == _ONE:
        return y
    if y == _ONE:
        return x
    for factor, other in ((x, y), (y, x)):
        if factor == _MINUS_ONE:
            return _negative(other)
        if factor.op == "negative":
            return _negative(_product(factor.args[0], other))
        if factor.op == "divide" and factor.args[1] == other:  # as of c * tanh(s / c)
            return factor.args[0]
        if factor.op == "divide" and factor.args[0] == _ONE:
            return operation("divide", other, factor.args[1])
    return operation("multiply", x, y)


def _quotient(x: Node, y: Node) -> Node:
    """Return a quotient whose sign comes last."""
    if x.op == "negative":
        return _negative(_quotient(x.args[0], y))
    return _ZERO if x == _ZERO else operation("divide", x, y)
