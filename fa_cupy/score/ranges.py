"""Ranges of the integers of an expression, and the check that indices stay inside of arrays.

With b < B, h < H, i < Lq and j < Lk, each integer of a tree has a least and a largest value, which
follow from those of its arguments. Conditions are not looked into: both values of a ``where`` count
for all pairs, so that a kernel may load both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fa_cupy.score import tree
from fa_cupy.score.tree import Node

_EXACT = 1 << 23  # half of what float32 holds
_BITS = {"int": 32, "long": 64}


class Range(NamedTuple):
    """Integers from `least` to `most`, both included."""

    least: int
    most: int


class Sizes(NamedTuple):
    """How many values the variables have."""

    b: int
    h: int
    i: int
    j: int


def check(
    name: str,
    root: Node,
    arguments: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[str],
    sizes: Sizes,
) -> None:
    """Raise a ValueError unless every pair has its elements of all arrays.

    Parameters
    ----------
    name : str
        The public function that errors speak of.
    root : Node
    arguments : sequence of str
        What the caller calls the arrays.
    shapes : sequence of tuple of int
    dtypes : sequence of str
    sizes : Sizes
        If one is 0, there is no pair and nothing to check.
    """
    if 0 in sizes:
        return
    for node, indices, _ in _ranges(name, root, dtypes, sizes):
        if node.op == "load":
            label = f"{name}: score has {_shown(node)}"
            _check_load(label, node, arguments, shapes, indices)


def exact_in_float32(root: Node, dtypes: Sequence[str], sizes: Sizes) -> bool:
    """Whether float32 holds all 32-bit integers of an expression, and those a tile past the end."""
    if 0 in sizes:
        return True
    found = _ranges("", root, dtypes, sizes)
    reach = [own for node, _, own in found if own is not None and node.kind == "int"]
    return all(least >= -_EXACT and most <= _EXACT for least, most in reach)


def _ranges(
    name: str, root: Node, dtypes: Sequence[str], sizes: Sizes
) -> Iterator[tuple[Node, list[Range], Range | None]]:
    """Yield nodes with the ranges of their integer arguments, and their own."""
    found: list[Range | None] = []
    for node, args, _ in tree.ordered(root).steps:
        own = [x for x in (found[arg] for arg in args) if x is not None]
        found.append(None)
        yield node, own, (last := _range(name, node, own, dtypes, sizes))
        found[-1] = last


def _check_load(
    label: str,
    node: Node,
    arguments: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    indices: list[Range],
) -> None:
    array = _array(node)
    axes = zip(node.args, shapes[array], indices, strict=True)
    for axis, (index, size, reach) in enumerate(axes):
        if reach.least < 0 or reach.most >= size:
            raise ValueError(
                f"{label}, where {_shown(index)} is from {reach.least} to {reach.most}, and "
                f"score.{arguments[array]} has {size} elements along axis {axis}, want an index "
                f"from 0 to {size - 1} for all b, h, i and j (min, max or % {size} can bound it)"
            )


def _range(
    name: str, node: Node, args: list[Range], dtypes: Sequence[str], sizes: Sizes
) -> Range | None:
    """Return the range of an integer, None of what is no integer."""
    if node.kind not in _BITS:
        return None
    if node.op == "number":
        value = node.value
        assert isinstance(value, int)
        return Range(value, value)
    if node.op == "variable":
        return Range(0, getattr(sizes, str(node.value)) - 1)
    if node.op == "load":
        bounds = np.iinfo(dtypes[_array(node)])
        return Range(int(bounds.min), int(bounds.max))
    if node.op in ("floor_divide", "mod") and args[1].least < 1:
        raise ValueError(
            f"{name}: score has {_shown(node)}, where {_shown(node.args[1])} is from "
            f"{args[1].least} to {args[1].most}, want a divisor of at least 1 (max(n, 1) is one)"
        )
    if node.op == "power":
        found = _power(args[0], int(node.value or 0))
    else:
        found = _RULES[node.op](args)
    half = 1 << _BITS[node.kind] - 1
    if -half <= found.least and found.most < half:
        return found
    if node.kind == "int":
        raise ValueError(
            f"{name}: score has {_shown(node)}, which is from {found.least} to {found.most}, want "
            "what 32 bits hold (a float factor, as in 1.0 * i * j, makes floats)"
        )
    return Range(-half, half - 1)  # it may wrap around


def _corners(of: Callable[[int, int], int]) -> Callable[[list[Range]], Range]:
    """Return the rule of a function that is monotonic in each argument, either way."""

    def rule(args: list[Range]) -> Range:
        values = [of(x, y) for x in args[0] for y in args[1]]
        return Range(min(values), max(values))

    return rule


def _mod(args: list[Range]) -> Range:
    value, divisor = args
    if value.least >= 0 and value.most < divisor.least:
        return value
    most = divisor.most - 1
    return Range(0, min(most, value.most) if value.least >= 0 else most)


def _abs(args: list[Range]) -> Range:
    least, most = args[0]
    inside = 0 if least <= 0 <= most else min(abs(least), abs(most))
    return Range(inside, max(abs(least), abs(most)))


def _power(base: Range, exponent: int) -> Range:
    ends = [base.least**exponent, base.most**exponent]
    if exponent % 2 == 0 and base.least <= 0 <= base.most:
        ends.append(0**exponent)
    return Range(min(ends), max(ends))


_RULES: dict[str, Callable[[list[Range]], Range]] = {
    "to_long": lambda args: args[0],
    "add": lambda args: Range(args[0].least + args[1].least, args[0].most + args[1].most),
    "subtract": lambda args: Range(args[0].least - args[1].most, args[0].most - args[1].least),
    "multiply": _corners(lambda x, y: x * y),
    "floor_divide": _corners(lambda x, y: x // y),
    "mod": _mod,
    "negative": lambda args: Range(-args[0].most, -args[0].least),
    "abs": _abs,
    "min": lambda args: Range(min(x.least for x in args), min(x.most for x in args)),
    "max": lambda args: Range(max(x.least for x in args), max(x.most for x in args)),
    # The condition has no range.
    "where": lambda args: Range(min(x.least for x in args), max(x.most for x in args)),
}


def _array(node: Node) -> int:
    assert isinstance(node.value, int)
    return node.value


def _shown(node: Node) -> str:
    return node.text if len(node.text) <= 60 else node.text[:57] + "..."
