"""Sums of what several threads compute, in an order that does not depend on the threads."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]


class InOrder:
    """Sums whose terms are added in the order of the tasks that they come from.

    A term that comes too early is kept in a copy. No thread waits for another one: the thread that
    brings the term that is due also adds those that follow it. Where tasks are begun in their
    order, few terms are kept.

    Parameters
    ----------
    add : callable
        ``add(target, term)`` adds one.
    """

    def __init__(self, add: Callable[[Array, Array], None]) -> None:
        self._add = add
        self._sums: defaultdict[Hashable, _Sum] = defaultdict(_Sum)

    def expect(self, name: Hashable, task: int) -> None:
        """Note one term of the sum `name`; in the order of tasks, before the first `add`."""
        self._sums[name].due.append(task)

    def add(self, name: Hashable, task: int, target: Array, term: Array | None) -> None:
        """Add `term`, whose memory is the caller's again afterwards; None for nothing."""
        terms = self._sums[name]
        with terms.lock:
            if terms.due[0] != task:
                copy = None if term is None else term.copy()
                terms.waiting[task].append((target, copy))
                return
            self._apply(terms, target, term)
            while terms.due and (early := terms.waiting.get(terms.due[0])):
                self._apply(terms, *early.popleft())

    def _apply(self, terms: _Sum, target: Array, term: Array | None) -> None:
        terms.due.popleft()
        if term is not None:
            self._add(target, term)


class _Sum:
    """The tasks whose terms are still to come, and terms that came too early."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.due: deque[int] = deque()
        self.waiting: defaultdict[int, deque[tuple[Array, Array | None]]] = defaultdict(deque)
