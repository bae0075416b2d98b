"""Scans over whole arrays: sequences cut into segments, stacks of them spread over threads.

A sequence is cut into segments where there are few batch entries. These are scanned side by side,
as if they were entries of their own: first the sums over all segments, then the states between
them, then each segment from its own state. How many there are depends on the shapes alone, so that
results do not depend on the threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fa_cupy import _arrays, _check, _product, _stacks, _tiles
from fa_cupy.cpu import _scan, _threads
from fa_cupy.cpu._scan import Operand, Read
from fa_cupy.cpu._steps import Steps

Array = npt.NDArray[Any]
View = _check.View

# Work below this runs in the calling thread: starting a thread costs about 0.1 ms.
PARALLEL_FLOP = 2e7
# Stacks are so small that there are this many, and sequences are cut into segments, of so many rows
# at least, until the stacks are of four. A stack of one leaves threads waiting for the interpreter.
_LEAST_TASKS = 8
_LEAST_STACKED = 4
_LEAST_SEGMENT = 512


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
    finish: Callable[[Array], Array] | None = None
    ends: Array | None = None


class _Part(NamedTuple):
    """Rows of all sequences, as segments of equal length."""

    begin: int
    rows: int
    segments: int


def segments(length: int, entries: int) -> int:
    """Return into how many segments sequences are cut if there are so many states."""
    wanted = math.ceil(_LEAST_TASKS * _LEAST_STACKED / max(1, entries))
    # Every segment beyond the first costs a second sum of outer products.
    enough = 1 if entries >= 2 * _LEAST_TASKS else wanted
    return min(enough, max(1, length // _LEAST_SEGMENT))


class Scan(NamedTuple):
    """A scan over all batch entries of a problem."""

    problem: _product.Product
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
        count = segments(length, math.prod(_own(problem, problem.batch)))
        if any(reader.ends is not None for reader in self.readers):
            count = 1  # rows that read are elsewhere than those that are read
        if count == 1:
            self._scan(_Part(0, length, 1), initial, last)
            return
        # What does not fill segments of equal length is scanned for itself.
        rows = length // count
        main, rest = _Part(0, rows, count), _Part(count * rows, length - count * rows, 1)
        states, edge = self._states(count), self._states(1)
        self._sum(main, states)
        if self.reverse:
            self._scan(rest, initial, edge)
            self._accumulate(states, edge, last)
            self._scan(main, states, NOTHING)
        else:
            self._accumulate(states, initial, edge)
            self._scan(main, states, NOTHING)
            self._scan(rest, edge, last)

    def _states(self, count: int) -> Side:
        """Return zero states for the segments of all entries, (*batch, count, E, M)."""
        problem = self.problem
        own = zip(problem.batch, problem.shared, strict=True)
        batch = tuple(1 if shared else n for n, shared in own)
        cols = problem.v_dim + self.b.ones
        array = np.zeros((*batch, count, problem.qk_dim, cols), problem.state_dtype)
        view = View((*problem.batch, *array.shape[-3:]), array.strides)
        return Side(array, view, rows=False)

    def _sum(self, part: _Part, states: Side) -> None:
        """Add the outer products of each segment to its state."""
        tasks = [*stacks_of(self.problem, [self.a, self.b, states], part)]

        def new_worker() -> Callable[[list[Array]], None]:
            steps = Steps(self.problem.state_dtype)

            def add(task: list[Array]) -> None:
                a, b = _operand(self.a, task[0]), _operand(self.b, task[1])
                with np.errstate(all="ignore"):
                    _scan.total(steps, a, b, 0, part.rows, task[2])

            return add

        _threads.run(tasks, new_worker, self._flop() > PARALLEL_FLOP)

    def _accumulate(self, states: Side, initial: Side, final: Side) -> None:
        """Turn sums over segments into states before them, in the order of the scan."""
        for sums, first, last in stacks_of(self.problem, [states, initial, final]):
            state = np.zeros_like(sums[:, 0]) if first is None else first.reshape(sums[:, 0].shape)
            order = range(sums.shape[1])
            for index in reversed(order) if self.reverse else order:
                with np.errstate(all="ignore"):
                    following = state + sums[:, index]
                sums[:, index], state = state, following
            if last is not None:
                last[...] = state.reshape(last.shape)

    def _scan(self, part: _Part, initial: Side, final: Side) -> None:
        """Scan the segments of `part`, each from its own state."""
        sides = [self.a, self.b, initial, final]
        sides += [side for reader in self.readers for side in (reader.x, reader.out)]
        tasks = [*stacks_of(self.problem, sides, part)]

        def new_worker() -> Callable[[list[Array]], None]:
            steps = Steps(self.problem.state_dtype)

            def scan(task: list[Array]) -> None:
                first, last, *xs = task[2:]
                a, b = _operand(self.a, task[0]), _operand(self.b, task[1])
                reads = tuple(
                    Read(_operand(r.x, x), out, r.flipped, r.finish, r.ends)
                    for r, x, out in zip(self.readers, xs[::2], xs[1::2], strict=True)
                )
                shape = (len(task[0]), task[0].shape[-1], task[1].shape[-1] + self.b.ones)
                state = steps.scratch("state", shape)
                for exact in (False, True):
                    np.copyto(state, 0 if first is None else first)
                    span = (0, part.rows)
                    with np.errstate(all="ignore"):
                        if _scan.scan(steps, a, b, reads, state, span, self.reverse, exact):
                            break
                if last is not None:
                    np.copyto(last, state)

            return scan

        _threads.run(tasks, new_worker, self._flop() > PARALLEL_FLOP)

    def _flop(self) -> float:
        problem = self.problem
        rows = math.prod(problem.batch) * max(problem.q_len, problem.k_len)
        return 4.0 * rows * problem.qk_dim * problem.v_dim


class Gradient:
    """The gradient of an array, with the batch axes of a level of the problem until it is done."""

    def __init__(self, of: Array, shape: Sequence[int], problem: _product.Product, copies: bool):
        whole = of.shape == tuple(shape)
        self._of = of
        self._found = (
            _arrays.empty_laid_out(np, of.shape, of, of.dtype)
            if whole
            else np.empty(shape, problem.state_dtype)
        )
        self.side = Side(self._found, problem.view(shape, self._found.strides), copies)

    def finished(self) -> Array:
        """Return the gradient in the shape and dtype of the array."""
        if self._found.shape == self._of.shape:
            return self._found
        with np.errstate(all="ignore"):
            return summed(self._found, self._of.shape).astype(self._of.dtype)


def summed(x: Array, shape: Sequence[int]) -> Array:
    """Sum `x` over what was broadcast or repeated, so that it has `shape`."""
    with np.errstate(all="ignore"):
        x = x.sum(axis=tuple(range(x.ndim - len(shape))))
        for axis, size in enumerate(shape[:-2]):
            if size != x.shape[axis]:  # 1, or the number of key heads for groups of query heads
                split = (*x.shape[:axis], size, x.shape[axis] // (size or 1), *x.shape[axis + 1 :])
                x = x.reshape(split).sum(axis=axis + 1)
    return x


def _operand(side: Side, part: Array) -> Operand:
    return Operand(part, side.feature, side.ones)


def _own(problem: _product.Product, of_axes: Sequence[int]) -> list[int]:
    """Return what belongs to the batch axes along which states differ."""
    return [n for n, shared in zip(of_axes, problem.shared, strict=False) if not shared]


def stacks_of(
    problem: _product.Product, sides: Sequence[Side], part: _Part | None = None
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

    cols = problem.qk_dim + problem.v_dim
    entry = (_scan.CHUNK * (2 * cols + _scan.CHUNK) + 2 * problem.qk_dim * problem.v_dim) * 4
    entries = math.prod(problem.batch[a] for a in own) * (1 if part is None else part.segments)
    largest = max(1, min(_tiles.CPU_CACHE_BYTES // entry, entries // _LEAST_TASKS))
    arrays, views = [cut(side) for side in sides], [split(side) for side in sides]
    yield from _stacks.stacks(np, arrays, views, largest, len(own) + 1)
