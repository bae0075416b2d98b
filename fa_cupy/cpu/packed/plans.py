"""Plans of causal products of packed sequences: stacks of batch entries, and sequences of them.

As `fa_cupy.cpu.products.plans`, but that every sequence is a scan of its own, over rows of the
stacks that are looked at where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fa_cupy.core import linear_problem
from fa_cupy.core.plan_cache import UNKNOWN, lookup, remember
from fa_cupy.cpu.packed import product_groups
from fa_cupy.cpu.packed.product_groups import Group
from fa_cupy.cpu.products import plans
from fa_cupy.cpu.products.plans import key_of
from fa_cupy.tiled import chunked_scan
from fa_cupy.tiled.chunks import Operand, Read, Sizes, Steps
from fa_cupy.tiled.segmented_scan import Work

Array = npt.NDArray[Any]
# Tasks that there are where there is work for several threads: sequences differ in length.
_TASKS = 16


class Rows(NamedTuple):
    """Which rows of packed sequences each of them has.

    Attributes
    ----------
    q, k : list of slice
        Of queries, and of keys; the same list where these are packed alike.
    """

    q: list[slice]
    k: list[slice]

    def lengths(self, numbers: range) -> tuple[int, ...]:
        """Return how many keys some sequences have."""
        return tuple([own.stop - own.start for own in self.k[numbers.start : numbers.stop]])


def rows_of(q_offsets: Array, k_offsets: Array) -> Rows:
    """Return the rows that belong to each sequence."""
    q = _slices(q_offsets)
    return Rows(q, q if k_offsets is q_offsets else _slices(k_offsets))


def _slices(offsets: Array) -> list[slice]:
    bounds = offsets.tolist()
    return [*map(slice, bounds, bounds[1:])]


def clear_others(array: Array, rows: Sequence[slice], values: Any = 0) -> None:
    """Write to the rows (..., rows, cols) of an array that belong to no sequence."""
    first, last = (rows[0].start, rows[-1].stop) if rows else (array.shape[-2], array.shape[-2])
    if first:
        array[..., :first, :] = values
    if last < array.shape[-2]:
        array[..., last:, :] = values


def plan_of(
    name: str, problem: linear_problem.Product, q: Array, k: Array, v: Array,
    initial: Array | None, *options: Any, feature: str | None = None, eps: float | None = None,
    gradients: bool = False,
) -> Any:  # fmt: skip
    """Return the plan of a call, made now unless it is known; None for a call without a plan."""
    assert problem.offsets is not None
    facts = problem.offsets.sequences, feature, eps, gradients, options
    key = key_of(f"packed {name}", q, k, v, initial, facts)
    plan = UNKNOWN if key is None else lookup(key, UNKNOWN)
    if plan is UNKNOWN:
        plan = None
        if plans.is_plain(problem, q, k, v, initial) and all(
            map(plans.is_stack_or_small, (q, k, v))
        ):
            plan = (
                Gradients(problem, q, k, v) if gradients else Scan(problem, q, k, v, feature, eps)
            )
        if key is not None:
            remember(key, plan)
    return plan


class _Groups:
    """How a call is cut into tasks: some batch entries, and sequences that follow each other."""

    def __init__(
        self, stacks: plans.Scan | plans.Gradients, problem: linear_problem.Product
    ) -> None:
        self._machine, self._flop = stacks.machine, stacks.flop
        entries, most = stacks.k[0], stacks.machine.fitting(problem)
        self._parts = [slice(i, i + most) for i in range(0, entries, most)]

    def tasks(self, rows: Sequence[slice], together: bool) -> list[tuple[slice, list[Group]]]:
        """Return batch entries with groups of the sequences that have these rows.

        Each sequence is a group of its own unless some are to be computed `together`.
        """
        count = -(-_TASKS // len(self._parts)) if self._machine.parallel(self._flop) else 1
        ends = np.array([own.stop for own in rows]) - rows[0].start
        # Where the rows of the next group begin, in sequences: some groups may have none.
        cuts = np.searchsorted(ends, ends[-1] * np.arange(1, count) / count).tolist()
        ranges = [x for x in map(range, [0, *cuts], [*cuts, len(rows)]) if x]
        if together:
            split = [product_groups.groups_of(rows, numbers) for numbers in ranges]
        else:
            split = [[Group(range(i, i + 1), rows[i]) for i in numbers] for numbers in ranges]
        return [(part, some) for some in split for part in self._parts]


class Scan(plans.Scan):
    """A causal product, or linear attention; see `plan_of`."""

    def __init__(
        self, problem: linear_problem.Product, q: Array, k: Array, v: Array, feature: str | None,
        eps: float | None,
    ) -> None:  # fmt: skip
        super().__init__(problem, q, k, v, feature, eps)
        self._groups = _Groups(self, problem)

    def sequences(
        self, q: Array, k: Array, v: Array, initial: Array | None, out: Array | None, rows: Rows,
        return_state: bool, reverse: bool = False, is_causal: bool = True,
    ) -> tuple[Array, Array | None]:  # fmt: skip
        """Return the output, which is `out` where that is given, and states if they are wanted."""
        x, a, b = q.reshape(self.q), k.reshape(self.k), v.reshape(self.v)
        first, ones, sizes = self.states(initial), self._finish is not None, self.machine.sizes
        state = np.empty(self.state_shape, self.dtype) if return_state else None
        last = self.states(state)
        if out is None:
            out = self._results.new()
        places = self._results.places(out)
        clear_others(places, rows.q)

        def causal(steps: Steps, part: slice, group: Group, exact: bool) -> bool:
            own, numbers = group.rows, group.numbers
            keys, values = Operand(a[part, own], self._feature), Operand(b[part, own], None, ones)
            queries = Operand(x[part, ..., own, :], self._feature)
            reads = (Read(queries, places[part, ..., own, :], finish=self._finish),)
            before, after = (_states(states, part, numbers) for states in (first, last))
            return scan(
                steps, sizes, keys, values, reads, rows.lengths(numbers), before, after,
                reverse, exact,
            )  # fmt: skip

        def total(steps: Steps, part: slice, group: Group, exact: bool) -> bool:
            (number,) = group.numbers
            own, asking = rows.k[number], rows.q[number]
            keys, values = Operand(a[part, own], self._feature), Operand(b[part, own], None, ones)
            queries = Operand(x[part, ..., asking, :], self._feature)
            before, after = (None if y is None else y[part, number] for y in (first, last))
            if after is None:
                after = np.empty((len(keys.array), *self.state[2:]), self.dtype)
            chunked_scan.scan(steps, sizes, keys, values, (), before, after, reverse, exact)
            read = Read(queries, places[part, ..., asking, :], finish=self._finish)
            chunked_scan.read(steps, sizes, read, after)
            return True

        if rows.q:
            work = _each(causal if is_causal else total)
            self.machine.run(self._groups.tasks(rows.q, is_causal), work, self.flop)
        return self._results.finish(out, places), state


class Gradients(plans.Gradients):
    """The gradients of a causal product; see `plan_of`."""

    def __init__(self, problem: linear_problem.Product, q: Array, k: Array, v: Array) -> None:
        super().__init__(problem, q, k, v)
        self._groups = _Groups(self, problem)

    def sequences(
        self, dout: Array, q: Array, k: Array, v: Array, initial: Array | None,
        dstate: Array | None, rows: Rows, reverse: bool,
    ) -> tuple[Array, Array, Array, Array | None]:  # fmt: skip
        """Return the gradients by q, k, v and the initial states."""
        sizes = self.machine.sizes
        inputs = tuple(
            array.reshape(stack)
            for array, stack in ((dout, self.out), (q, self.q), (k, self.k), (v, self.v))
        )
        dinitial = None if initial is None else np.empty(self.state_shape, self.dtype)
        states = self.states(initial), self.states(dstate), self.states(dinitial)
        found = [results.new() for results in self._results]
        places = [r.places(y) for r, y in zip(self._results, found, strict=True)]
        for place in places:
            clear_others(place, rows.q)

        def work(steps: Steps, part: slice, group: Group, exact: bool) -> bool:
            dsums, queries, keys, values, dx, da, db = (
                array[part, ..., group.rows, :] for array in (*inputs, *places)
            )
            first, dlast, dfirst = (_states(x, part, group.numbers) for x in states)
            lengths = rows.lengths(group.numbers)
            x, sums, y, z = map(Operand, (queries, dsums, keys, values))
            of_queries = Read(sums, dx, flipped=True)
            of_others = Read(z, da, flipped=True), Read(y, db)
            one = scan(steps, sizes, y, z, (of_queries,), lengths, first, None, reverse, exact)
            two = scan(steps, sizes, x, sums, of_others, lengths, dlast, dfirst, not reverse, exact)
            return one and two

        if rows.q:
            self.machine.run(self._groups.tasks(rows.q, True), _each(work), self.flop)
        triples = zip(self._results, found, places, strict=True)
        dq, dk, dv = (results.finish(y, place) for results, y, place in triples)
        return dq, dk, dv, dinitial


def scan(
    steps: Steps, sizes: Sizes, a: Operand, b: Operand, reads: tuple[Read, ...],
    lengths: tuple[int, ...], first: Array | None, last: Array | None, reverse: bool, exact: bool,
) -> bool:  # fmt: skip
    """Scan a group of sequences of these lengths; states are (n, sequences, E, M)."""
    if len(lengths) > 1:
        return product_groups.scan(steps, a, b, reads, lengths, first, last, reverse, exact)
    before, after = (None if x is None else x[:, 0] for x in (first, last))
    return chunked_scan.scan(steps, sizes, a, b, reads, before, after, reverse, exact)


def _states(states: Array | None, part: slice, numbers: range) -> Array | None:
    return None if states is None else states[part, numbers.start : numbers.stop]


def _each(scanned: Callable[[Steps, slice, Group, bool], bool]) -> Work:
    """Return what does all groups of a task, those that are not finite once more, exactly."""

    def work(steps: Steps, task: tuple[slice, list[Group]], _: bool) -> bool:
        part, groups = task
        for group in groups:
            if not scanned(steps, part, group, False):
                scanned(steps, part, group, True)
        return True

    return work
