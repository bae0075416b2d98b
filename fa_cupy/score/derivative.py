"""Derivatives of trees, by SymPy.

SymPy differentiates the smooth parts of a tree, and sees of them only what depends on the variable.
All else, literals included, is a symbol to it: it cannot rearrange numbers into others, whatever a
text may say, and no name of a caller reaches it. ``where``, ``min`` and ``max`` separate the parts,
which the chain rule puts together again: the derivative of a ``where`` is that of the value taken,
not a sum in which infinity times 0 would be NaN.

At a kink the derivative is the mean of those on both sides: 0 of ``abs`` at 0, and the mean of both
where the arguments of ``min`` and ``max`` are equal. That of ``floor`` is 0.
"""

from __future__ import annotations

import functools
from typing import Any

from fa_cupy.score import tree
from fa_cupy.score.tree import Node

_BRANCHES = ("where", "min", "max")


@functools.cache
def derivative(root: Node, by: Node) -> Node:
    """Return the derivative of a tree.

    Parameters
    ----------
    root : Node
        Of kind "float".
    by : Node
        The variable s, or an element of an array of floats.

    Raises
    ------
    ImportError
        Without SymPy.
    """
    return _Differentiation(_sympy(), by).of(root)


@functools.cache
def _sympy() -> Any:
    """Return SymPy, and this module's functions as its attributes."""
    try:
        import sympy
    except ImportError as error:
        raise ImportError(
            f"the gradients of a Score need SymPy ({error}): pip install 'fa_cupy[score]'"
        ) from None
    return _with_functions(sympy)


def _with_functions(sympy: Any) -> Any:
    """Return SymPy and the functions of trees, those that it lacks with derivatives of ours."""

    def function(name: str, *slopes: Any) -> Any:
        def fdiff(self: Any, argindex: int = 1) -> Any:
            return slopes[argindex - 1](*self.args)

        return type(name, (sympy.Function,), {"fdiff": fdiff})

    def nothing(x: Any) -> Any:
        return sympy.Integer(0)

    half = sympy.Rational(1, 2)

    # SymPy's own would raise the factors of a base one by one, and look for exponentials to unite,
    # for which nested ones take it hours.
    found: dict[str, Any] = {
        "power": function("power", lambda x, n: n * found["power"](x, n - 1) if n != 1 else n),
        "float_power": function(
            "float_power",
            lambda x, y: y * found["float_power"](x, y - 1),
            lambda x, y: found["power_by_exponent"](x, y),
        ),
        "power_by_exponent": function("power_by_exponent"),
        "exp": function("exp", lambda x: found["exp"](x)),
        "log": function("log", lambda x: 1 / x),
        "sqrt": function("sqrt", lambda x: half / found["sqrt"](x)),
        "tanh": function("tanh", lambda x: 1 - found["tanh"](x) ** 2),
        "sin": function("sin", lambda x: found["cos"](x)),
        "cos": function("cos", lambda x: -found["sin"](x)),
        "sigmoid": function("sigmoid", lambda x: found["sigmoid"](x) * found["sigmoid"](-x)),
        "abs": function("abs", lambda x: found["sign"](x)),
        "sign": function("sign", nothing),
        "floor": function("floor", nothing),
    }
    return sympy, found


class _Differentiation:
    """One derivative: what the symbols stand for, there and back."""

    def __init__(self, sympy: Any, by: Node) -> None:
        self._sympy, self._functions = sympy
        self._by = by
        self._symbols: dict[Node, Any] = {}
        self._nodes: dict[Any, Node] = {}
        self._back: dict[Any, Node] = {}

    def of(self, root: Node) -> Node:
        """Return the derivative of a tree."""
        order = tree.ordered(root)
        found: list[Any] = []  # what SymPy is to know of a node
        depends: list[bool] = []
        slopes: dict[Node, Node] = {self._by: tree.number(1.0)}  # and those of branches
        for node, args, _ in order.steps:
            given = [found[arg] for arg in args]
            some = node.kind == "float" and any(depends[arg] for arg in args)
            depends.append(some or node == self._by)
            if some and node.op in _BRANCHES:
                slopes[node] = _branch(node, *(self._slope(x, slopes) for x in given[-2:]))
            inside = some and node != self._by and node.op not in _BRANCHES
            found.append(self._expression(node, given) if inside else self._symbol(node))
        return self._slope(found[order.results[0]], slopes)

    def _slope(self, expression: Any, slopes: dict[Node, Node]) -> Node:
        """Return the derivative of a smooth part, by the chain rule over the branches in it."""
        found = None
        for node, slope in slopes.items():
            symbol = self._symbols.get(node)
            if symbol is None or symbol not in expression.free_symbols:
                continue
            term = _product_of(self._node(expression.diff(symbol)), slope)
            found = term if found is None else tree.operation("add", found, term)
        return tree.number(0.0) if found is None else found

    def _symbol(self, node: Node) -> Any:
        if node not in self._symbols:
            symbol = self._sympy.Symbol(f"x{len(self._symbols)}")
            self._symbols[node], self._nodes[symbol] = symbol, node
        return self._symbols[node]

    def _expression(self, node: Node, args: list[Any]) -> Any:
        """Return what SymPy is to know of a node."""
        match node.op:
            case "add":
                return args[0] + args[1]
            case "subtract":
                return args[0] - args[1]
            case "multiply":
                return args[0] * args[1]
            case "divide":
                return args[0] / args[1]
            case "negative":
                return -args[0]
            case "power":
                return self._functions["power"](args[0], self._sympy.Integer(node.value))
            case _:
                return self._functions[node.op](*args)

    def _node(self, expression: Any) -> Node:
        """Return the tree of what SymPy found."""
        if expression not in self._back:
            self._back[expression] = self._new_node(expression)
        return self._back[expression]

    def _new_node(self, expression: Any) -> Node:
        if expression.is_Symbol:
            return self._nodes[expression]
        if expression.is_Number:
            return tree.number(float(expression))
        if expression.is_Add:
            return self._sum(expression)
        if expression.is_Mul or expression.is_Pow:
            return self._product(expression)
        name, args = type(expression).__name__, expression.args
        if name == "power":
            return _raised_to(self._node(args[0]), int(args[1]))
        nodes = [self._node(arg) for arg in args]
        return (
            _power_by_exponent(*nodes)
            if name == "power_by_exponent"
            else tree.operation(name, *nodes)
        )

    def _sum(self, expression: Any) -> Node:
        """Return a sum with numbers first and, where it can be, what is negative subtracted."""
        plus: list[Any] = []
        minus: list[Any] = []
        for term in expression.as_ordered_terms():
            negative = term.could_extract_minus_sign()
            (minus if negative else plus).append(-term if negative else term)
        plus.sort(key=lambda term: not term.is_Number)
        found = self._node(plus[0]) if plus else tree.operation("negative", self._node(minus[0]))
        for term in plus[1:]:
            found = tree.operation("add", found, self._node(term))
        for term in minus if plus else minus[1:]:
            found = tree.operation("subtract", found, self._node(term))
        return found

    def _product(self, expression: Any) -> Node:
        """Return a product, divided by that of all negative powers."""
        over: list[Node] = []
        under: list[Node] = []
        sign = 1
        for factor in self._sympy.Mul.make_args(expression):
            if factor == -1:
                sign = -sign
                continue
            base, exponent = factor.as_base_exp()
            if exponent == 1:
                over.append(self._node(base))
                continue
            below = bool(exponent.is_Number and exponent < 0)
            (under if below else over).append(self._raised(base, -exponent if below else exponent))
        found = _multiplied(over)
        if under:
            found = tree.operation("divide", found, _multiplied(under))
        return found if sign > 0 else tree.operation("negative", found)

    def _raised(self, base: Any, exponent: Any) -> Node:
        if exponent.is_Integer:
            return _raised_to(self._node(base), int(exponent))
        raise AssertionError("only powers of ours have other exponents")


def _raised_to(base: Node, exponent: int) -> Node:
    return base if exponent == 1 else tree.operation("power", base, value=exponent)


def _power_by_exponent(base: Node, exponent: Node) -> Node:
    """Return the derivative of a power by its exponent: 0 of 0, and not 0 times log(0)."""
    zero = tree.number(0.0)
    is_zero = tree.operation("equal", base, zero)
    is_flat = tree.operation("and", is_zero, tree.operation("less_equal", zero, exponent))
    power = tree.operation("float_power", base, exponent)
    slope = tree.operation("multiply", tree.operation("log", base), power)
    return tree.operation("where", is_flat, zero, slope)


def _multiplied(factors: list[Node]) -> Node:
    found = factors[0] if factors else tree.number(1.0)
    for factor in factors[1:]:
        found = tree.operation("multiply", found, factor)
    return found


def _product_of(x: Node, y: Node) -> Node:
    """Return a product, without factors of 1."""
    one = tree.number(1.0)
    return _multiplied([factor for factor in (x, y) if factor != one])


def _branch(node: Node, x: Node, y: Node) -> Node:
    """Return the derivative of a branch, given those of its two values."""
    if x == y:
        return x
    if node.op == "where":
        return tree.operation("where", node.args[0], x, y)
    low, high = node.args if node.op == "min" else node.args[::-1]
    if x.op == y.op == "number":
        mean = tree.number((float(x.value or 0) + float(y.value or 0)) / 2)
    else:
        total = tree.operation("add", x, y)
        mean = tree.operation("multiply", tree.number(0.5), total)
    otherwise = tree.operation("where", tree.operation("less", high, low), y, mean)
    return tree.operation("where", tree.operation("less", low, high), x, otherwise)
