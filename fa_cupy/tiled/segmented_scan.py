"""Scans over whole arrays: sequences cut into segments, stacks of them handed to a backend.

A sequence is cut into segments where there are few batch entries. These are scanned side by side,
as if they were entries of their own: first the sums over all segments, then the states between
them, then each segment from its own state. How many there are depends on the shapes alone, so that
results do not depend on threads or on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from fa_cupy.core import attention_problem, linear_problem
from fa_cupy.tiled import batching, chunked_scan
from fa_cupy.tiled.chunks import Operand, Read, Sizes, Steps

Array = Any  # numpy.ndarray or cupy.ndarray
View = attention_problem.View
# Does a task with these operations, exactly or not; returns whether results are finite.
Work = Callable[[Steps, Any, bool], bool]


class Machine(Protocol):
    """What works on stacks of segments: a backend.

    Attributes
    ----------
    xp : module
        Namespace of its arrays.
    sizes : Sizes
    """

    xp: Any
    sizes: Sizes

    def segments(self, length: int, entries: int) -> int:
        """Return into how many segments sequences are cut if there are so many states."""

    def largest(self, problem: linear_problem.Product, entries: int) -> int:
        """Return how many of so many entries make a stack at most."""

    def run(self, tasks: list[Any], work: Work, flop: float) -> None:
        """Do all tasks, those whose results are not finite once more, exactly."""

    def accumulate(
        self, sums: Array, first: Array | None, last: Array | None, reverse: bool
    ) -> None:
        """Turn sums over segments (n, segments, E, M) into states before them, and `last`."""


class Side(NamedTuple):
    """An array of a problem, how it is to be looked at, and how its rows are prepared."""

    array: Any  # an array, or None together with its view
    view: View | None
    copies: bool = False  # whether it has the axes along which states are shared
    rows: bool = True  # whether its last axes are the rows of the sequence and their dims
    feature: Callable[[Array], None] | None = None
    ones: bool = False


NOTHING = Side(None, None, rows=False)


class Reader(NamedTuple):
    """As `Read`, of whole arrays."""

    x: Side
    out: Side
    flipped: bool = False
    finish: Callable[[Array, Array], None] | None = None
    ends: np.ndarray[Any, Any] | None = None


class Part(NamedTuple):
    """Rows of all sequences, as segments of equal length."""

    begin: int
    rows: int
    segments: int


class Scan(NamedTuple):
    """A scan over all batch entries of a problem."""

    machine: Machine
    problem: linear_problem.Product
    a: Side
    b: Side
    readers: tuple[Reader, ...]
    reverse: bool

    def run(self, initial: Side, final: Array | None = None) -> None:
        """Do it, from an initial state; the last state is written to `final`."""
        if final is None and all(reader.out.array.size == 0 for reader in self.readers):
            return  # however many batch entries there are
        problem = self.problem
        last = NOTHING
        if final is not None:
            last = Side(final, problem.view(final.shape, final.strides), rows=False)
        length = problem.k_len
        count = self.machine.segments(length, self.entries)
        if any(reader.ends is not None for reader in self.readers):
            count = 1  # rows that read are elsewhere than those that are read
        if count == 1:
            self._scan(Part(0, length, 1), initial, last)
            return
        # What does not fill segments of equal length is scanned for itself.
        rows = length // count
        main, rest = Part(0, rows, count), Part(count * rows, length - count * rows, 1)
        states, edge = self.states(count), self.states(1)
        self.sum(main, states)
        if self.reverse:
            self._scan(rest, initial, edge)
            self._accumulate(states, edge, last)
        else:
            self._accumulate(states, initial, edge)
            self._scan(rest, edge, last)
        if self.readers:
            self._scan(main, states, NOTHING)

    @property
    def entries(self) -> int:
        """How many states there are."""
        return math.prod(_own(self.problem, self.problem.batch))

    def states(self, count: int) -> Side:
        """Return zero states for the segments of all entries, (*batch, count, E, M)."""
        problem = self.problem
        own = zip(problem.batch, problem.shared, strict=True)
        batch = tuple(1 if shared else n for n, shared in own)
        cols = problem.v_dim + self.b.ones
        array = self.machine.xp.zeros((*batch, count, problem.qk_dim, cols), problem.state_dtype)
        return self.over(array)

    def over(self, states: Array) -> Side:
        """Return states as `states` makes them, or some of their segments, as a side."""
        view = View((*self.problem.batch, *states.shape[-3:]), states.strides)
        return Side(states, view, rows=False)

    def sum(self, part: Part, states: Side) -> None:
        """Add the outer products of each segment to its state."""

        def work(steps: Steps, task: list[Array], exact: bool) -> bool:
            a, b = _operand(self.a, task[0]), _operand(self.b, task[1])
            chunked_scan.total(steps, self.machine.sizes, a, b, 0, part.rows, task[2])
            return True

        tasks = [*self._stacks([self.a, self.b, states], part)]
        self.machine.run(tasks, work, flop(self.problem))

    def _accumulate(self, states: Side, initial: Side, final: Side) -> None:
        """Turn sums over segments into states before them, in the order of the scan."""
        for sums, *ends in self._stacks([states, initial, final]):
            # A state may come as one of one segment.
            first, last = (x if x is None or x.ndim == 3 else x[:, 0] for x in ends)
            self.machine.accumulate(sums, first, last, self.reverse)

    def _scan(self, part: Part, initial: Side, final: Side) -> None:
        """Scan the segments of `part`, each from its own state."""
        sides = [self.a, self.b, initial, final]
        sides += [side for reader in self.readers for side in (reader.x, reader.out)]

        def work(steps: Steps, task: list[Array], exact: bool) -> bool:
            first, last, *xs = task[2:]
            a, b = _operand(self.a, task[0]), _operand(self.b, task[1])
            reads = tuple(
                Read(_operand(r.x, x), out, r.flipped, r.finish, r.ends)
                for r, x, out in zip(self.readers, xs[::2], xs[1::2], strict=True)
            )
            sizes, reverse = self.machine.sizes, self.reverse
            return chunked_scan.scan(steps, sizes, a, b, reads, first, last, reverse, exact)

        self.machine.run([*self._stacks(sides, part)], work, flop(self.problem))

    def _stacks(self, sides: Sequence[Side], part: Part | None = None) -> Iterator[list[Any]]:
        return stacks_of(self.machine, self.problem, sides, part)


def flop(problem: linear_problem.Product) -> float:
    """Return how many operations a scan takes at least."""
    rows = math.prod(problem.batch) * max(problem.q_len, problem.k_len)
    return 4.0 * rows * problem.qk_dim * problem.v_dim


def product(
    machine: Machine,
    problem: linear_problem.Product,
    q: Array,
    k: Array,
    v: Array,
    initial: Array | None,
    out: Array,
    state: Array | None,
    *,
    reverse: bool,
) -> None:
    """Solve `problem`: write the output, and the state where that is not None."""
    places = problem.view(out.shape, out.strides)
    reader = Reader(Side(q, problem.q, copies=True), Side(out, places, copies=True))
    keys, values = Side(k, problem.k), Side(v, problem.v)
    scan = Scan(machine, problem, keys, values, (reader,), reverse)
    scan.run(Side(initial, problem.initial, rows=False), state)


def read(machine: Machine, problem: linear_problem.Product, reader: Reader, state: Side) -> None:
    """Let all rows read one state, ``x @ state``, whatever keys the problem has."""
    if reader.out.array.size == 0:
        return
    length = problem.q_len
    entries = math.prod(_own(problem, problem.batch))
    count = machine.segments(length, entries)
    rows = length // count
    sides = [reader.x, reader.out, state]

    def work(steps: Steps, task: list[Any], exact: bool) -> bool:
        x, out, memory = task
        read = Read(_operand(reader.x, x), out, finish=reader.finish)
        chunked_scan.read(steps, machine.sizes, read, memory)
        return True  # nothing is hidden from a row

    tasks = []
    for part in (Part(0, rows, count), Part(count * rows, length - count * rows, 1)):
        if part.rows:
            tasks += [*stacks_of(machine, problem, sides, part)]
    machine.run(tasks, work, 2.0 * math.prod((*problem.batch, length, *state.array.shape[-2:])))


def _operand(side: Side, part: Array) -> Operand:
    return Operand(part, side.feature, side.ones)


def _own(problem: linear_problem.Product, of_axes: Sequence[int]) -> list[int]:
    """Return what belongs to the batch axes along which states differ."""
    return [n for n, shared in zip(of_axes, problem.shared, strict=False) if not shared]


def stacks_of(
    machine: Machine,
    problem: linear_problem.Product,
    sides: Sequence[Side],
    part: Part | None = None,
) -> Iterator[list[Any]]:
    """Yield the arrays of stacks of states, (n, ...), shared axes as (n, *copies, ...).

    With `part` its segments are entries of the stacks: rows are cut to them, and of arrays with an
    axis of segments every entry gets its own.
    """
    axes = len(problem.batch)
    own = _own(problem, range(axes))
    copies = [a for a, shared in enumerate(problem.shared) if shared and problem.batch[a] != 1]

    def split(side: Side) -> View | None:
        if side.view is None:
            return None
        shape, strides = ([*x[axes:]] for x in side.view)
        segment = 0
        if part is not None and len(shape) == 3:
            segment = strides.pop(0)
            shape.pop(0)
        elif part is not None and side.rows:
            segment, shape[0] = part.rows * strides[0], part.rows
        order = own + [-1] + copies * side.copies
        batch = (*side.view.shape[:axes], 1 if part is None else part.segments)
        steps = (*side.view.strides[:axes], segment)
        return View((*[batch[a] for a in order], *shape), (*[steps[a] for a in order], *strides))

    def cut(side: Side) -> Any:
        return side.array[..., part.begin :, :] if part is not None and side.rows else side.array

    entries = math.prod(problem.batch[a] for a in own) * (1 if part is None else part.segments)
    arrays, views = [cut(side) for side in sides], [split(side) for side in sides]
    largest = machine.largest(problem, entries)
    yield from batching.stacks(machine.xp, arrays, views, largest, len(own) + 1)
