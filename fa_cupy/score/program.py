"""What is computed from an expression, and what follows from it and from shapes alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from fa_cupy.score import derivative, ranges, tree
from fa_cupy.score.tree import Node, Order

#: dtypes that arrays of a score have, and the kinds of their elements.
KINDS = {
    "float16": "float",
    "bfloat16": "float",
    "float32": "float",
    "float64": "float",
    "int8": "int",
    "int16": "int",
    "uint8": "int",
    "uint16": "int",
    "int32": "long",
    "uint32": "long",
    "int64": "long",
}


class Element(NamedTuple):
    """An element that an expression loads, for the gradient of its array.

    Attributes
    ----------
    node : Node
    array : int
    axes : str or None
        The variables that are its indices, as "hi" of ``x[h, i]``; None where an index is
        anything else.
    """

    node: Node
    array: int
    axes: str | None


@dataclass(frozen=True)
class Program:
    """An expression without the caller's names and arrays: what kernels are compiled from.

    Programs are equal where their trees and the dtypes of their arrays are.

    Attributes
    ----------
    root : Node
        The score.
    dtypes : tuple of str
        Of the arrays, by number; "number" for one number of the caller's, which becomes a float.
    """

    root: Node
    dtypes: tuple[str, ...]

    @functools.cached_property
    def slope(self) -> Node:
        """The derivative of the score by s."""
        return derivative.derivative(self.root, tree.variable("s"))

    @functools.cached_property
    def elements(self) -> list[Element]:
        """The different elements of arrays of floats, and of numbers, that the score loads."""
        found = []
        for node in tree.loads_of(self.root):
            if node.kind == "float" and isinstance(node.value, int):
                plain = all(index.op == "variable" for index in node.args)
                axes = "".join(str(index.value) for index in node.args) if plain else None
                found.append(Element(node, node.value, axes))
        return found

    @functools.cached_property
    def adds(self) -> bool:
        """Whether the score is s and what does not depend on s."""
        return self.slope == tree.number(1.0)

    @functools.cached_property
    def compile_cost(self) -> int:
        """About how many seconds it takes to compile: by functions, which a thread has 64 times."""
        ops = [step.node.op for step in tree.ordered(self.root).steps]
        functions = sum(op in tree.FUNCTIONS or op == "divide" for op in ops)
        return functions + 4 * ops.count("float_power") + len(ops) // 16

    def steps(self, slopes: tuple[str, ...] = ()) -> Order:
        """Return the steps of the score and of its derivatives.

        Parameters
        ----------
        slopes : tuple of str
            "s", or "element 2" for that of `elements`.
        """
        return _steps(self, slopes)

    def operands(self) -> tuple[str, ...]:
        """Return, for each array, the variables that its indices depend on, as "hi"."""
        found: list[set[str]] = [set() for _ in self.dtypes]
        for node in tree.loads_of(self.root):
            assert isinstance(node.value, int)
            found[node.value] |= set(tree.variables_of(*node.args)) if node.args else set()
        return tuple("".join(x for x in tree.VARIABLES if x in names) for names in found)


@functools.lru_cache(maxsize=256)
def _steps(program: Program, slopes: tuple[str, ...]) -> Order:
    roots = [program.root]
    for name in slopes:
        if name == "s":
            roots.append(program.slope)
        else:
            element = program.elements[int(name.removeprefix("element "))]
            roots.append(derivative.derivative(program.root, element.node))
    return tree.ordered(*roots)


class Layout(NamedTuple):
    """How one array lies in memory; of a number, without axes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    number: str = ""  # from float.hex, for 0.0 and -0.0 are equal, and not the same number


@dataclass(frozen=True)
class BoundScore:
    """A program with the layouts of its arrays: the part of a `Problem`, which holds no data."""

    program: Program
    layouts: tuple[Layout, ...]
    heads: int  # how many values h has
    exact: bool  # whether float32 holds the integers that become floats


@dataclass(frozen=True)
class Operands:
    """A score as a call has it.

    Attributes
    ----------
    program : Program
    names : tuple of str
        The caller's, for messages.
    values : tuple of array or float
        Native arrays, and numbers.
    """

    program: Program
    names: tuple[str, ...]
    values: tuple[Any, ...] = field(compare=False)

    def named(self) -> list[tuple[str, Any]]:
        """Return the arrays, with the names that errors have for them."""
        named = zip(self.names, self.values, strict=True)
        return [(f"score.{name}", x) for name, x in named if not isinstance(x, float)]

    def bound(self, name: str, out_shape: Sequence[int], k_len: int) -> BoundScore:
        """Return what a problem holds; raise a ValueError if an index can leave its array.

        Parameters
        ----------
        name : str
            The public function that errors speak of.
        out_shape : sequence of int
            (..., q_len, v_dim) of the output.
        k_len : int
        """
        layouts = tuple(
            Layout((), (), x.hex()) if isinstance(x, float) else Layout(x.shape, x.strides)
            for x in self.values
        )
        shapes = [layout.shape for layout in layouts]
        batch, q_len = tuple(out_shape[:-2]), out_shape[-2]
        sizes = ranges.Sizes(*flat_batch(batch), q_len, k_len)
        ranges.check(name, self.program.root, self.names, shapes, self.program.dtypes, sizes)
        exact = ranges.exact_in_float32(self.program.root, self.program.dtypes, sizes)
        return BoundScore(self.program, layouts, sizes.h, exact)

    def require_gradients(self, name: str, need: Sequence[str]) -> None:
        """Raise for an array that has no gradient.

        Parameters
        ----------
        name : str
            The public function that errors speak of.
        need : sequence of str
            The names of arguments, those of the score's arrays as "score.x".
        """
        for arg in need:
            if not arg.startswith("score."):
                continue
            array = self.names.index(arg.removeprefix("score."))
            if kind_of(self.program.dtypes[array]) != "float":
                raise ValueError(
                    f"{name}: need has {arg!r}, which is an array of integers, want one of floats"
                )
            element = self.looked_up(arg)
            if element is not None:
                raise ValueError(no_gradient(name, arg, element))

    def looked_up(self, arg: str) -> str | None:
        """Return an element that is read of an array of floats, given as "score.x".

        One whose indices are others than b, h, i and j, so that it has no gradient; None where
        there is none.
        """
        array = self.names.index(arg.removeprefix("score."))
        for element in self.program.elements:
            if element.array == array and element.axes is None:
                return element.node.text
        return None


def no_gradient(name: str, arg: str, element: str) -> str:
    """Return the message about an array, given as "score.x", whose element is looked up."""
    return (
        f"{name}: need has {arg!r}, and score has {element}, want no index but b, h, i or j for a "
        "gradient"
    )


def flat_batch(batch: Sequence[int]) -> tuple[int, int]:
    """Return how many values b and h have, given the batch axes of an output."""
    heads = batch[-1] if batch else 1
    return int(np.prod(batch[:-1], dtype=np.int64)), int(heads)


def entries(xp: Any, batch: Sequence[int]) -> tuple[Any, ...]:
    """Return b and h over the batch axes of an output and two more, as arrays that broadcast."""
    count, heads = flat_batch(batch)
    of_b = (*batch[:-1], *[1] * min(1, len(batch)), 1, 1)
    of_h = (*[heads] * min(1, len(batch)), 1, 1)
    return tuple(
        xp.arange(n, dtype=np.int64).reshape(shape) for n, shape in ((count, of_b), (heads, of_h))
    )  # fmt: skip


def itemsize(dtype: str) -> int:
    """Return the bytes of an element of an array."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def kind_of(dtype: str) -> str:
    """Return the kind of elements of an array, or of a number."""
    return KINDS.get(dtype, "float")
