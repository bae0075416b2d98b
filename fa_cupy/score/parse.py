"""From the text of an expression to its tree.

The text is read by Python's own parser and is never run: what it may say is what `_Reader` has a
method for. Names only select arguments, variables and functions; numbers become int and float.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

from fa_cupy.score import tree
from fa_cupy.score.tree import Node

#: Longest text, and deepest nesting, of an expression.
MOST_CHARACTERS = 1000
MOST_LEVELS = 60
#: Largest exponent that is multiplied out.
MOST_POWER = 64
_MOST_INT = 2**31 - 1
_MOST_AXES = 4

#: Arguments that functions of an expression take: how many, and None for any more.
FUNCTIONS: dict[str, tuple[int, int | None]] = {
    "where": (3, 3),
    "abs": (1, 1),
    "min": (2, None),
    "max": (2, None),
    **{name: (1, 1) for name in tree.FUNCTIONS if name != "sign"},
}
CONSTANTS = {"inf": math.inf, "pi": math.pi}
#: Names that no argument may have.
RESERVED = {*tree.VARIABLES, *FUNCTIONS, *CONSTANTS}

_BINARY: dict[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "subtract",
    ast.Mult: "multiply",
    ast.Div: "divide",
    ast.FloorDiv: "floor_divide",
    ast.Mod: "mod",
    ast.Pow: "power",
}
# Each comparison as one of the tree's, and whether its sides change places.
_COMPARISONS: dict[type[ast.cmpop], tuple[str, bool]] = {
    ast.Lt: ("less", False),
    ast.LtE: ("less_equal", False),
    ast.Gt: ("less", True),
    ast.GtE: ("less_equal", True),
    ast.Eq: ("equal", False),
    ast.NotEq: ("not_equal", False),
}
# What Python warns of, for it will be an error there: a number that ends where a keyword begins.
_NO_SPACE = re.compile(r"(?<!\w)\d[\w.]*?(and|else|for|i[fns]|not|or)")
_WANTED = (
    "numbers, names, + - * / // % **, comparisons, and, or, not, 'a if c else b', "
    "indices and calls of functions"
)


class Argument(NamedTuple):
    """An argument of the caller's, as far as a tree depends on it.

    Attributes
    ----------
    number : int or None
        Of an array.
    kind : str
        "int", "long" or "float".
    ndim : int
    value : int or None
        Of an integer, which becomes a literal.
    """

    number: int | None
    kind: str
    ndim: int
    value: int | None = None


def tidy(text: str) -> str:
    """Return an expression on one line, with single spaces; raise for what cannot be one."""
    if not isinstance(text, str):
        raise TypeError(f"Score: expression is a {type(text).__name__}, want a str")
    text = " ".join(text.split())
    if len(text) > MOST_CHARACTERS:
        raise ValueError(
            f"Score: expression has {len(text)} characters, want at most {MOST_CHARACTERS}"
        )
    if not text:
        raise ValueError("Score: expression is empty, want one such as 's - abs(i - j)'")
    return text


def parse(text: str, arguments: Mapping[str, Argument]) -> Node:
    """Return the tree of an expression, of kind "float".

    Parameters
    ----------
    text : str
        From `tidy`.
    arguments : mapping of str to Argument

    Raises
    ------
    ValueError
        That names the expression, the place and what is wanted there.
    """
    reader = _Reader(text, arguments)
    try:
        _refuse(text)
        parsed = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        why = getattr(error, "msg", None) or type(error).__name__
        raise ValueError(f"Score: {reader.quoted} cannot be parsed ({why})") from None
    root = reader.read(parsed)
    if root.kind == "bool":
        reader.fail(parsed, "is a condition, want a number (as of where(condition, s, -inf))")
    unused = [name for name in arguments if name not in reader.used]
    if unused:
        raise ValueError(f"Score: {reader.quoted} has no {unused[0]}, which is given")
    return tree.widened(root, "float")


def _refuse(text: str) -> None:
    """Raise a SyntaxError for a comment, and for what Python's parser would warn of."""
    for sign, what in (("#", "a comment"), ("\\", "a backslash")):
        if sign in text:
            raise SyntaxError(what)
    if found := _NO_SPACE.search(text):
        raise SyntaxError(f"no space between a number and {found[1]!r}")


class _Reader:
    """Turns nodes of `ast` into those of a tree."""

    def __init__(self, text: str, arguments: Mapping[str, Argument]) -> None:
        self.quoted = f'"{text if len(text) <= 200 else text[:197] + "..."}"'
        self.used: set[str] = set()
        self._text = text
        self._arguments = arguments
        self._level = 0
        self._readers: dict[type[ast.expr], Callable[[Any], Node]] = {
            ast.Constant: self._number,
            ast.Name: self._name,
            ast.BinOp: self._binary,
            ast.UnaryOp: self._unary,
            ast.BoolOp: self._connective,
            ast.Compare: self._compare,
            ast.IfExp: self._conditional,
            ast.Call: self._call,
            ast.Subscript: self._element,
        }

    def fail(self, node: ast.expr, why: str) -> NoReturn:
        """Raise a ValueError about a part of the expression."""
        shown = self._said(node)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        start = len(self._text.encode()[: node.col_offset].decode())
        raise ValueError(f"Score: {self.quoted}: {shown} at column {start + 1} {why}")

    def _said(self, node: ast.expr) -> str:
        return ast.get_source_segment(self._text, node) or ""

    def read(self, node: ast.expr) -> Node:
        """Return the tree of a part of the expression."""
        reader = self._readers.get(type(node))
        if reader is None:
            self.fail(node, f"is not part of an expression, want {_WANTED}")
        self._level += 1
        if self._level > MOST_LEVELS:
            self.fail(node, f"is nested deeper than {MOST_LEVELS} levels")
        found = reader(node)
        self._level -= 1
        return found

    def _numeric(self, node: ast.expr) -> Node:
        """Return a part that must be a number."""
        found = self.read(node)
        if found.kind == "bool":
            self.fail(node, "is a condition, want a number (as of where(condition, 1, 0))")
        return found

    def _integer(self, node: ast.expr, role: str) -> Node:
        found = self._numeric(node)
        if found.kind == "float":
            self.fail(node, f"is a float, want an integer {role}")
        return found

    def _condition(self, node: ast.expr) -> Node:
        found = self.read(node)
        if found.kind != "bool":
            self.fail(node, "is a number, want a comparison")
        return found

    def _number(self, node: ast.Constant) -> Node:
        value, text = node.value, self._said(node)
        if type(value) is int:
            if value > _MOST_INT:
                self.fail(node, f"is above {_MOST_INT}, want a float there")
            return tree.number(value, text)
        if type(value) is float:
            if not math.isfinite(value):
                self.fail(node, "is not finite, want inf by that name")
            return tree.number(value, text)
        self.fail(node, f"is a {type(value).__name__}, want an int or a float")

    def _name(self, node: ast.Name) -> Node:
        # Python's parser normalises names, as of full-width letters.
        name, argument = node.id, self._arguments.get(node.id)
        if name in tree.VARIABLES:
            return tree.variable(name)
        if name in CONSTANTS:
            return tree.number(CONSTANTS[name], name)
        if argument is None:
            if name in FUNCTIONS:
                self.fail(node, "is a function, want a call of it")
            wanted = ", ".join([*tree.VARIABLES, *self._arguments])
            self.fail(node, f"is no argument and no variable, want one of {wanted}")
        self.used.add(name)
        if argument.value is not None:
            return tree.number(argument.value, name)
        if argument.ndim:
            self.fail(node, f"is an array with {argument.ndim} axes, want an element of it")
        assert argument.number is not None
        return tree.load(argument.number, argument.kind, (), name)

    def _binary(self, node: ast.BinOp) -> Node:
        op = _BINARY.get(type(node.op))
        if op is None:
            self.fail(node, f"has an operator that is not part of an expression, want {_WANTED}")
        if op == "power":
            return self._power(node)
        sides = [self._numeric(side) for side in (node.left, node.right)]
        if op in ("floor_divide", "mod") and tree.widest(sides) == "float":
            sign = "//" if op == "floor_divide" else "%"
            self.fail(node, f"has {sign} of floats, want integers (floor(x / y) rounds down)")
        return tree.operation(op, *sides, text=self._said(node))

    def _power(self, node: ast.BinOp) -> Node:
        base, exponent = self._numeric(node.left), self._numeric(node.right)
        text, value = self._said(node), exponent.value
        if exponent.op != "number" or not isinstance(value, int):
            return tree.operation("float_power", base, exponent, text=text)
        if abs(value) > MOST_POWER:
            self.fail(node.right, f"is an exponent beyond {MOST_POWER}, want a float there")
        base = tree.widened(base, "float") if value < 0 else base
        return tree.operation("power", base, value=value, text=text)

    def _unary(self, node: ast.UnaryOp) -> Node:
        if isinstance(node.op, ast.Not):
            return tree.operation("not", self._condition(node.operand), text=self._said(node))
        if isinstance(node.op, ast.USub):
            of, text = self._numeric(node.operand), self._said(node)
            if of.op == "number" and isinstance(of.value, (int, float)):
                return tree.number(-of.value, text)
            return tree.operation("negative", of, text=text)
        if isinstance(node.op, ast.UAdd):
            return self._numeric(node.operand)
        self.fail(node, f"has an operator that is not part of an expression, want {_WANTED}")

    def _connective(self, node: ast.BoolOp) -> Node:
        op = "and" if isinstance(node.op, ast.And) else "or"
        return self._chain(op, [self._condition(x) for x in node.values], node)

    def _chain(self, op: str, values: list[Node], node: ast.expr) -> Node:
        found = values[0]
        for value in values[1:]:
            found = tree.operation(op, found, value, text=self._said(node))
        return found

    def _compare(self, node: ast.Compare) -> Node:
        sides = [self._numeric(side) for side in (node.left, *node.comparators)]
        found = []
        for op, left, right in zip(node.ops, sides, sides[1:], strict=False):
            known = _COMPARISONS.get(type(op))
            if known is None:
                self.fail(node, "has 'is' or 'in', want < <= > >= == or !=")
            name, swapped = known
            pair = (right, left) if swapped else (left, right)
            found.append(tree.operation(name, *pair, text=self._said(node)))
        return self._chain("and", found, node)

    def _conditional(self, node: ast.IfExp) -> Node:
        condition, *values = (
            self._condition(node.test), self._numeric(node.body), self._numeric(node.orelse),
        )  # fmt: skip
        return tree.operation("where", condition, *values, text=self._said(node))

    def _call(self, node: ast.Call) -> Node:
        name = node.func.id if isinstance(node.func, ast.Name) else None
        if name is None or name not in FUNCTIONS or name in self._arguments:
            self.fail(node.func, f"is no function, want one of {', '.join(FUNCTIONS)}")
        if node.keywords or any(isinstance(arg, ast.Starred) for arg in node.args):
            self.fail(node, "has a keyword or a *, want arguments by position")
        least, most = FUNCTIONS[name]
        if len(node.args) < least or (most is not None and len(node.args) > most):
            wanted = f"{least}" if most == least else f"{least} or more"
            self.fail(node, f"has {len(node.args)} arguments, want {wanted}")
        if name == "where":
            args = [self._condition(node.args[0]), *map(self._numeric, node.args[1:])]
            return tree.operation("where", *args, text=self._said(node))
        values = [self._numeric(arg) for arg in node.args]
        if name in ("min", "max"):
            return self._chain(name, values, node)
        return tree.operation(name, *values, text=self._said(node))

    def _element(self, node: ast.Subscript) -> Node:
        name = node.value.id if isinstance(node.value, ast.Name) else None
        argument = self._arguments.get(name or "")
        if name is None or argument is None:
            named = ", ".join(x for x, of in self._arguments.items() if of.ndim) or "no array here"
            self.fail(node.value, f"is no array, want one of the arguments: {named}")
        self.used.add(name)
        items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if argument.ndim != len(items) or not 1 <= len(items) <= _MOST_AXES:
            self.fail(node, f"has {len(items)} indices, {name} has {argument.ndim} axes")
        indices = [self._integer(item, "as an index") for item in items]
        assert argument.number is not None
        return tree.load(argument.number, argument.kind, indices, self._said(node))
