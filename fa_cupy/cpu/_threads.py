"""Work spread over threads, with the BLAS library held to one thread in each of them.

The number of threads of most BLAS libraries belongs to the whole process, so calls that overlap
share one limit: the first sets it, the last puts back what it found. A library whose number
somebody else has changed in between is left as it is. OpenBLAS on OpenMP keeps a number for every
thread instead; there each thread sets its own.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import threadpoolctl

Task = TypeVar("Task")


class _Library(NamedTuple):
    """A loaded BLAS library."""

    get_threads: Callable[[], int | None]
    set_threads: Callable[[int], Any]
    by_thread: bool  # whether each thread has a number of its own


class _BlasLimit:
    """One thread for every BLAS library, while anyone holds it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._libraries: list[_Library] | None = None  # finding them takes milliseconds
        self._saved: list[tuple[_Library, int]] = []

    @contextmanager
    def hold(self) -> Iterator[int]:
        """Hold the limit, and give the number of threads that BLAS was allowed before it."""
        with self._lock:
            if self._libraries is None:
                self._libraries = _find_libraries()
            if self._holders == 0:
                self._saved = _limit_to_one(self._libraries, by_thread=False)
            self._holders += 1
            own = _limit_to_one(self._libraries, by_thread=True)
            allowed = max((n for _, n in self._saved + own), default=_cpu_count())
        try:
            yield allowed
        finally:
            _restore(own)
            with self._lock:
                self._holders -= 1
                if self._holders == 0:
                    self._let_go()

    def join(self) -> None:
        """Apply the limit to the calling thread, which somebody else's `hold` outlives."""
        _limit_to_one(self._libraries or [], by_thread=True)

    def forget(self) -> None:
        """Start afresh in a forked child, where the holders' threads do not exist."""
        self._lock = threading.Lock()
        self._holders = 0
        self._let_go()

    def _let_go(self) -> None:
        saved, self._saved = self._saved, []
        _restore(saved)


def _find_libraries() -> list[_Library]:
    found = threadpoolctl.ThreadpoolController().select(user_api="blas").lib_controllers
    return [
        _Library(
            lib.get_num_threads,
            _openblas_setter(lib) or lib.set_num_threads,
            by_thread=getattr(lib, "threading_layer", None) == "openmp",
        )
        for lib in found
    ]


def _openblas_setter(library: Any) -> Callable[[int], Any] | None:
    """Return the C function of OpenBLAS on POSIX threads; None for other libraries.

    threadpoolctl >= 3.8 lets only the first thread that asks, as a rule the main one, change the
    number, and ignores the others in silence. Counting holders makes that needless.
    """
    if library.internal_api != "openblas" or library.threading_layer == "openmp":
        return None
    for prefix, suffix in itertools.product(("", "scipy_"), ("", "64_", "_64")):
        name = f"{prefix}openblas_set_num_threads{suffix}"
        setter: Callable[[int], Any] | None = getattr(library.dynlib, name, None)
        if setter is not None:
            return setter
    return None


def _limit_to_one(libraries: list[_Library], *, by_thread: bool) -> list[tuple[_Library, int]]:
    """Set the libraries of one kind to one thread; return them with what they had."""
    chosen = [lib for lib in libraries if lib.by_thread == by_thread]
    saved = [(lib, lib.get_threads() or 1) for lib in chosen]
    for lib in chosen:
        lib.set_threads(1)
    return saved


def _restore(saved: list[tuple[_Library, int]]) -> None:
    for lib, threads in saved:
        if lib.get_threads() == 1:
            lib.set_threads(threads)


def _cpu_count() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


_limit = _BlasLimit()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_limit.forget)


def run(
    tasks: Sequence[Task], new_worker: Callable[[], Callable[[Task], None]], parallel: bool = True
) -> None:
    """Do `tasks` in order of the sequence, in as many threads as BLAS would have been allowed.

    Parameters
    ----------
    tasks : sequence
        Independent of each other. Each is done by one thread from begin to end, so that results
        do not depend on the number of threads.
    new_worker : callable
        Called once in every thread; returns what is then called with each task.
    parallel : bool, optional
        False to do everything in the calling thread.

    Raises
    ------
    BaseException
        The first exception that a task raised; tasks not begun by then are left out.
    """
    queue, queue_lock = iter(tasks), threading.Lock()
    errors: list[BaseException] = []

    def drain(in_thread: bool) -> None:
        try:
            if in_thread:
                _limit.join()
            worker = new_worker()
            while not errors:
                with queue_lock:
                    task = next(queue, None)
                if task is None:
                    return
                worker(task)
        except BaseException as error:  # handed to the caller below
            errors.append(error)

    with _limit.hold() as allowed:
        helpers: list[threading.Thread] = []
        try:
            for _ in range(min(allowed, len(tasks)) - 1 if parallel else 0):
                helper = threading.Thread(target=drain, args=(True,), name="fa_cupy")
                try:
                    helper.start()
                except RuntimeError:  # no more threads to be had: go on with those there are
                    break
                helpers.append(helper)
            drain(False)
        except BaseException as error:  # an interrupt between two statements above
            errors.append(error)
        finally:
            for helper in helpers:
                helper.join()
    if errors:
        raise errors[0]
