"""The typed tree of a score expression, and its nodes in the order of evaluation.

A node is of kind "bool", "int" (32 bits), "long" (64 bits) or "float" (the dtype of sums). Kinds
widen in this order, by nodes "to_long" and "to_float". What depends on positions and literals alone
is of kind "int", and `fa_cupy.score.ranges` refuses what 32 bits do not hold. Elements of arrays of
32 or 64 bits are of kind "long", whose arithmetic wraps around.

Names of the caller are not part of a tree: its arrays are numbered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

#: What a score may depend on, besides arrays, and their kinds.
VARIABLES = {"s": "float", "b": "int", "h": "int", "i": "int", "j": "int"}
#: Kinds of numbers, the narrowest first.
NUMBERS = ("int", "long", "float")
#: Functions of floats.
FUNCTIONS = ("exp", "log", "sqrt", "tanh", "sin", "cos", "sigmoid", "floor", "sign")
COMPARISONS = ("less", "less_equal", "equal", "not_equal")


@dataclass(frozen=True, eq=False)
class Node:
    """One operation.

    Attributes
    ----------
    op : str
        "number", "variable", "load", "to_long", "to_float", "add", "subtract", "multiply",
        "divide", "floor_divide", "mod", "negative", "power" (`value` is the exponent),
        "float_power", "abs", "min", "max", "where", "and", "or", "not", or one of `FUNCTIONS` and
        `COMPARISONS`.
    kind : str
    args : tuple of Node
    value : int, float or str
        Of a number, the name of a variable, the number of an array, the exponent of a "power".
    text : str
        What the expression says here, for messages; nodes that differ in nothing else are equal.
    """

    op: str
    kind: str
    args: tuple[Node, ...] = ()
    value: int | float | str | None = None
    text: str = field(default="", repr=False)
    _key: tuple[Any, ...] = field(init=False, repr=False)
    _hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # 1 and 1.0 are equal, as 0.0 and -0.0 are, and not the same number.
        key = self.op, self.kind, repr(self.value), self.args
        object.__setattr__(self, "_key", key)
        object.__setattr__(self, "_hash", hash(key))  # once: a tree is hashed in a step

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Node):
            return False
        return self._hash == other._hash and self._key == other._key


def number(value: int | float, text: str = "") -> Node:
    """Return a literal, of kind "int" or "float" as `value` is."""
    return Node("number", "float" if isinstance(value, float) else "int", (), value, text)


def variable(name: str) -> Node:
    """Return one of `VARIABLES`."""
    return Node("variable", VARIABLES[name], (), name, name)


def widened(node: Node, kind: str) -> Node:
    """Return a number as one of a kind that is as wide or wider."""
    if node.kind == kind:
        return node
    if node.op == "number" and kind == "float" and node.value is not None:
        return number(float(node.value), node.text)
    return Node(f"to_{kind}", kind, (node,), text=node.text)


def widest(nodes: Iterable[Node]) -> str:
    """Return the kind that holds all numbers of some."""
    return max((node.kind for node in nodes), key=NUMBERS.index)


def operation(op: str, *args: Node, value: Any = None, text: str = "") -> Node:
    """Return a node over arguments of kinds that `op` takes, widened as it needs them."""
    if op in ("and", "or", "not"):
        return Node(op, "bool", args, value, text)
    if op == "where":
        kind = widest(args[1:])
        return Node(op, kind, (args[0], *(widened(x, kind) for x in args[1:])), value, text)
    kind = widest(args)
    if op in FUNCTIONS or op in ("divide", "float_power"):
        kind = "float"
    args = tuple(widened(x, kind) for x in args)
    return Node(op, "bool" if op in COMPARISONS else kind, args, value, text)


def load(array: int, kind: str, indices: Sequence[Node], text: str = "") -> Node:
    """Return an element of an array."""
    return Node("load", kind, tuple(indices), array, text)


class Step(NamedTuple):
    """One node of an `Order`, whose arguments are given by their places in it."""

    node: Node
    args: tuple[int, ...]
    uses: int  # by other steps and as a result


class Order(NamedTuple):
    """Different nodes of some trees, each after its arguments, and the places of the results."""

    steps: list[Step]
    results: tuple[int, ...]


def ordered(*roots: Node) -> Order:
    """Return the nodes of trees, equal ones once."""
    places: dict[Node, int] = {}
    for node in (node for root in roots for node in _upwards(root)):
        places.setdefault(node, len(places))
    uses = [0] * len(places)
    for node in places:
        for arg in node.args:
            uses[places[arg]] += 1
    for root in roots:
        uses[places[root]] += 1
    steps = [
        Step(node, tuple(places[arg] for arg in node.args), uses[place])
        for node, place in places.items()
    ]
    return Order(steps, tuple(places[root] for root in roots))


def _upwards(root: Node) -> Iterator[Node]:
    """Yield the nodes of a tree, each at least once and first after its arguments."""
    seen: set[Node] = set()
    todo = [(root, False)]
    while todo:
        node, ready = todo.pop()
        if ready:
            yield node
        elif node not in seen:
            seen.add(node)
            todo.append((node, True))
            todo += [(arg, False) for arg in reversed(node.args)]


def variables_of(*roots: Node) -> str:
    """Return the variables that trees depend on, as letters in the order "sbhij"."""
    found = {step.node.value for step in ordered(*roots).steps if step.node.op == "variable"}
    return "".join(name for name in VARIABLES if name in found)


def loads_of(root: Node) -> list[Node]:
    """Return the different elements that a tree loads, in the order of evaluation."""
    return [step.node for step in ordered(root).steps if step.node.op == "load"]
