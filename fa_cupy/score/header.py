"""The part of a kernel that an expression is: a header that ``score_expression.cuh`` includes.

A kernel computes scores tile by tile, in the registers of a warp. What depends on b and h alone is
computed once a tile, what depends on i or j besides once for each row or column of it, and elements
of arrays that both choose are loaded before they are needed. The header has a struct and a function
for each of these, and one for what is left. Positions as floats are affine in i and j: those of the
first column of a row are computed, and the others follow by an addition.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from fa_cupy.score import cuda, tree
from fa_cupy.score.program import Program
from fa_cupy.score.tree import Node, Order

#: What include directives call the header.
NAME = "score_program.cuh"
#: ``enum ScoreKind`` of ``cuda_src/common/score_expression.cuh``: dtypes of arrays, in its order.
KINDS = (
    "float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "uint16", "int32",
    "uint32", "int64", "number",
)  # fmt: skip
_STEPS = ("entry", "query", "key", "pair")
_ARGUMENTS = {
    "entry": "int b, int h",
    "query": "const ScoreOfEntry& entry, int i",
    "key": "const ScoreOfEntry& entry, int j",
    "pair": "const ScoreOfEntry& entry, const ScoreOfQuery& query, const ScoreOfKey& key, int i, "
    "int j",
}


class Affine(NamedTuple):
    """An integer ``of_i * i + of_j * j + constant``."""

    of_i: int
    of_j: int
    constant: int


@functools.lru_cache(maxsize=256)
def header(program: Program, exact: bool, sloped: bool) -> str:
    """Return the header of a program.

    Parameters
    ----------
    program : Program
    exact : bool
        Whether float32 holds all positions, and what is affine in them.
    sloped : bool
        Whether the derivative by s is wanted.
    """
    kinds = ", ".join(str(KINDS.index(dtype)) for dtype in program.dtypes) or "0"
    sloped = sloped and not program.adds
    roots = [program.root, program.slope] if sloped else [program.root]
    names = ["found.score", "found.slope"][: len(roots)]
    parts = _Parts(tree.ordered(*(spread(root) if exact else root for root in roots)), exact)
    lines = [
        f"constexpr int kScoreKinds[] = {{{kinds}}};",
        f"constexpr bool kExpressionHasSlope = {str(sloped).lower()};",
        '#include "cuda_src/common/score_arrays.cuh"',
        *_whole(roots, names),
        *parts.text(names),
    ]
    return "\n".join(lines) + "\n"


def _whole(roots: Sequence[Node], names: Sequence[str]) -> Iterator[str]:
    """Yield the function of one pair by itself, in float or in double."""
    yield "template <typename Real>"
    yield "FA_DEVICE ScoreAndSlope<Real> score_of_one(const ScoreArguments<Real>& arrays, Real s,"
    yield "                                           int b, int h, int i, int j) {"
    yield "  const auto int_to_float = [](auto x) { return static_cast<Real>(x); };"
    yield "  ScoreAndSlope<Real> found = {Real(0), Real(1)};"
    yield cuda.body(roots, names, "Real").rstrip("\n")
    yield "  return found;"
    yield "}"


class _Parts:
    """The nodes of a program by what they depend on, and functions that compute them.

    Parameters
    ----------
    order : Order
    exact : bool
        As for `header`.
    """

    def __init__(self, order: Order, exact: bool) -> None:
        self._order = order
        self._reads: list[str] = []  # variables, by node
        for node, args, _ in order.steps:
            found = {x for arg in args for x in self._reads[arg]}
            found |= {str(node.value)} if node.op == "variable" else set()
            self._reads.append("".join(x for x in tree.VARIABLES if x in found))
        #: The nodes that each struct has a field for.
        self._fields: dict[str, list[int]] = {name: [] for name in (*_STEPS, "positions")}
        #: Floats that are affine in positions, by node.
        self._affine: dict[int, Affine] = {}
        for index, (node, _, _) in enumerate(order.steps):
            of = affine(node.args[0]) if exact and node.op == "to_float" else None
            if of is not None and (of.of_i, of.of_j) != (0, 0):
                self._affine[index] = of

    def _place(self, index: int) -> str:
        """Return where a node is computed: one of `_STEPS`, or "score"."""
        reads = self._reads[index]
        if "s" in reads:
            return "score"
        if "i" in reads and "j" in reads:
            return "pair" if self._order.steps[index].node.op == "load" else "score"
        return "query" if "i" in reads else "key" if "j" in reads else "entry"

    def _leaf(self, index: int, function: str) -> str:
        """Return the text of a node that a function is given; empty if it computes the node."""
        node = self._order.steps[index].node
        if node.op == "variable" and (node.value in ("s", "i", "j") or function == "entry"):
            return str(node.value)
        if node.op == "number":
            return ""
        of = self._affine.get(index)
        if function == "score" and of is not None:
            self._add("positions", index)
            return f"(positions.v{index} + static_cast<float>({of.of_i} * di + {of.of_j} * dj))"
        place = self._place(index)
        if place in ("score", function):
            return ""
        self._add(place, index)
        return f"{place}.v{index}"

    def _add(self, struct: str, index: int) -> None:
        if index not in self._fields[struct]:
            self._fields[struct].append(index)

    def _statements(self, function: str, outputs: Iterable[tuple[str, int]]) -> list[str]:
        """Return what computes nodes from what a function is given, and assigns them."""
        outputs, uses, leaves = list(outputs), dict[int, int](), dict[int, str]()
        todo = [index for _, index in outputs]
        while todo:
            index = todo.pop()
            uses[index] = uses.get(index, 0) + 1
            if uses[index] > 1:
                continue
            leaves[index] = self._leaf(index, function)
            if not leaves[index]:
                todo += self._order.steps[index].args
        texts, lines = dict[int, str](), []
        for index in sorted(uses):  # arguments come before what they are arguments of
            step, text = self._order.steps[index], leaves[index]
            if not text:
                text = cuda.text_of(step, [texts[arg] for arg in step.args], "float")
                if uses[index] > 1 and step.node.op not in ("number", "variable"):
                    lines.append(f"  const {cuda.type_of(step.node)} t{index} = {text};")
                    text = f"t{index}"
            texts[index] = text
        return lines + [f"  {name} = {texts[index]};" for name, index in outputs]

    def text(self, names: Sequence[str]) -> Iterator[str]:
        """Yield structs and functions.

        Parameters
        ----------
        names : sequence of str
            What the results are assigned to.
        """
        score = self._statements("score", zip(names, self._order.results, strict=True))
        bodies = {}
        for name in reversed(_STEPS):  # a function adds fields to the structs before its own
            own = [(f"{name}.v{index}", index) for index in self._fields[name]]
            bodies[name] = self._statements(name, own)
        for name in (*_STEPS, "positions"):
            yield from self._struct(name)
        for name in _STEPS:
            struct = f"ScoreOf{name.capitalize()}"
            yield f"FA_DEVICE {struct} score_of_{name}(const ScoreArguments<float>& arrays, "
            yield f"    {_ARGUMENTS[name]}) {{"
            yield "  const auto int_to_float = [](auto x) { return static_cast<float>(x); };"
            yield f"  {struct} {name};"
            yield from bodies[name]
            yield f"  return {name};"
            yield "}"
        yield from self._positions()
        yield "FA_DEVICE ScoreAndSlope<float> score_in_tile("
        yield "    const ScoreOfEntry& entry, const ScoreOfQuery& query, const ScoreOfKey& key,"
        yield "    const ScoreOfPair& pair, const ScoreOfPositions& positions, int di, int dj,"
        yield "    float s, int i, int j) {"
        yield "  const auto int_to_float = [](auto x) { return static_cast<float>(x); };"
        yield "  ScoreAndSlope<float> found = {0.0f, 1.0f};"
        yield from score
        yield "  return found;"
        yield "}"

    def _struct(self, name: str) -> Iterator[str]:
        fields = self._fields[name]
        yield f"struct ScoreOf{name.capitalize()} {{"
        yield f"  static constexpr int kFields = {len(fields)};"
        for index in fields:
            yield f"  {cuda.type_of(self._order.steps[index].node)} v{index};"
        yield "};"

    def _positions(self) -> Iterator[str]:
        """Yield the function of what is affine in positions, for the first column of a row."""
        yield "FA_DEVICE ScoreOfPositions score_of_positions(int i, int j) {"
        yield "  ScoreOfPositions positions;"
        for index in self._fields["positions"]:
            of = self._affine[index]
            sum_of = f"{of.of_i} * i + {of.of_j} * j + {of.constant}"
            yield f"  positions.v{index} = static_cast<float>({sum_of});"
        yield "  return positions;"
        yield "}"


def spread(root: Node) -> Node:
    """Return a tree in which integers become floats as early as they can.

    A conversion takes the time of many additions, unless what is converted is affine in positions.
    """
    found: dict[Node, Node] = {}
    for node in (step.node for step in tree.ordered(root).steps):
        args = tuple(found[arg] for arg in node.args)
        made = dataclasses.replace(node, args=args)
        found[node] = _spread_conversion(made) if node.op == "to_float" else made
    return found[root]


def _spread_conversion(node: Node) -> Node:
    """Return a conversion to float with what it converts turned inside out."""
    if node.op != "to_float":  # a literal
        return node
    of = node.args[0]
    if of.kind != "int" or affine(of) is not None:
        return node
    if of.op in ("abs", "min", "max", "negative", "add", "subtract"):
        args = [_spread_conversion(tree.widened(arg, "float")) for arg in of.args]
        return tree.operation(of.op, *args, text=node.text)
    return node


def affine(node: Node) -> Affine | None:
    """Return an integer of positions as a sum; None if it is none, or has factors but literals."""
    if node.op == "number":
        assert isinstance(node.value, int)
        return Affine(0, 0, node.value)
    if node.op == "variable":
        return {"i": Affine(1, 0, 0), "j": Affine(0, 1, 0)}.get(str(node.value))
    if node.kind != "int" or node.op not in ("add", "subtract", "negative", "multiply"):
        return None
    args = [affine(arg) for arg in node.args]
    if None in args:
        return None
    found = [arg for arg in args if arg is not None]
    if node.op == "negative":
        return Affine(*(-x for x in found[0]))
    left, right = found
    if node.op == "multiply":
        if left[:2] != (0, 0):
            left, right = right, left
        return Affine(*(left.constant * x for x in right)) if left[:2] == (0, 0) else None
    sign = 1 if node.op == "add" else -1
    return Affine(*(x + sign * y for x, y in zip(left, right, strict=True)))
