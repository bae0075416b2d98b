"""Work spread over threads that live as long as a call, whatever interrupts it.

Python runs the handlers of signals in the main thread, between any two calls, and what one raises
goes up from there. The caller of `run` must not go on while helpers work on its arrays, so a run
ends with one call in C that no handler can interrupt. Nothing here has a finalizer in Python: what
a handler raises in one is lost.
"""

from __future__ import annotations

import _thread
import ctypes
import functools
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import threadpoolctl

from fa_cupy.cpu import blas

Task = TypeVar("Task")

# The locks that Python's own are made of: waiting for those of `threading` runs handlers, which may
# raise. Through `ctypes.pythonapi` itself, a thread that waits would let no other run Python.
_python = ctypes.CDLL("Python", handle=ctypes.pythonapi._handle)
_allocate_lock = _python.PyThread_allocate_lock
_allocate_lock.restype = ctypes.c_void_p
_acquire_lock = _python.PyThread_acquire_lock
_acquire_lock.argtypes = [ctypes.c_void_p, ctypes.c_int]
_release_lock = _python.PyThread_release_lock
_release_lock.argtypes = [ctypes.c_void_p]
_release_lock.restype = None
_NO_WAIT, _WAIT = 0, 1

_unused_locks: deque[int] = deque()  # kept for later runs


class _Helpers(Generic[Task]):
    """Threads that do tasks together with the one that starts them.

    Attributes
    ----------
    errors : list of BaseException
        What helpers raised and the caller has not handled yet.
    """

    def __init__(
        self, tasks: Sequence[Task], new_worker: Callable[[], Callable[[Task], None]], count: int
    ) -> None:
        self.errors: list[BaseException] = []
        self._left = deque(tasks)  # not begun yet
        self._new_worker = new_worker
        # One a helper, held while it works. A helper that comes to run late finds no task.
        self._locks = [_new_lock() for _ in range(count)]

    def start(self) -> None:
        """Start as many as there can be."""
        _at_work.add(self)
        for lock in self._locks:
            try:
                # One call in C: the thread is there or it is not.
                _thread.start_new_thread(self._help, (lock,))
            except RuntimeError:  # no more threads to be had: go on with those there are
                return

    def work(self) -> None:
        """Do what is left, one task after the other."""
        worker = self._new_worker()
        while True:
            try:
                task = self._left.popleft()
            except IndexError:
                return
            worker(task)

    def end(self) -> Iterator[None]:
        """Return an iterator, in C, of what is to be done at the end: waiting, above all."""
        steps = [functools.partial(self._left.clear)]
        steps += [functools.partial(_acquire_lock, lock, _WAIT) for lock in self._locks]
        steps += [functools.partial(_release_lock, lock) for lock in self._locks]
        steps += [functools.partial(_unused_locks.extend, self._locks)]
        steps += [functools.partial(_at_work.discard, self)]
        return map(functools.partial.__call__, steps)

    def forget(self) -> None:
        """Wait for none of them: they are not in this process, and what they had begun is lost."""
        self._left.clear()
        self.errors.append(RuntimeError("fa_cupy: this process was forked in the middle of a call"))
        for lock in self._locks:
            _acquire_lock(lock, _NO_WAIT)  # one that is free must not be released twice
            _release_lock(lock)

    def _help(self, lock: int) -> None:
        if not _acquire_lock(lock, _NO_WAIT):
            return
        try:
            self.work()
        except BaseException as error:  # handed to the caller
            self._left.clear()
            self.errors.append(error)
        finally:
            _release_lock(lock)


_at_work: set[_Helpers[Any]] = set()


def _new_lock() -> int:
    try:
        return _unused_locks.pop()
    except IndexError:
        lock: int | None = _allocate_lock()
    if not lock:
        raise MemoryError("no memory for a lock")
    return lock


def _after_fork() -> None:
    """Start afresh in a child, where the threads that held locks do not exist."""
    global _unused_locks
    _unused_locks = deque()  # those that were kept may be held by a helper that came late
    for helpers in [*_at_work]:
        helpers.forget()
    _at_work.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def run(
    tasks: Sequence[Task], new_worker: Callable[[], Callable[[Task], None]], parallel: bool = True
) -> None:
    """Do `tasks` in order of the sequence, in as many threads as BLAS is allowed.

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
        What a task raised, or the handler of a signal; tasks not begun by then are left out, and
        those that were begun have ended.
    """
    count = min(allowed(), len(tasks)) - 1 if parallel else 0
    if count < 1:
        worker = new_worker()
        for task in tasks:
            worker(task)
        return
    helpers = _Helpers(tasks, new_worker, count)
    end = helpers.end()
    try:
        helpers.start()
        helpers.work()
    finally:
        tuple(end)  # one call in C, and nothing before it in which a handler could run
    if helpers.errors:
        raise helpers.errors.pop(0)


def allowed() -> int:
    """Return how many threads BLAS may have, of the processors that this thread may run on."""
    if blas.LIBRARY is None:
        # NumPy's library has threads of its own for every product, which would wait for each other.
        return 1
    most = max((library.get_num_threads() or 1 for library in _libraries()), default=processors())
    return min(most, processors())


def processors() -> int:
    """Return how many processors this thread may run on, or how many there are."""
    affinity = getattr(os, "sched_getaffinity", None)  # which Linux has
    return len(affinity(0)) if affinity else os.cpu_count() or 1


@functools.cache
def _libraries() -> list[Any]:
    """Return the BLAS libraries of others; finding them takes milliseconds."""
    own = None if blas.LIBRARY is None else os.path.realpath(blas.LIBRARY.path)
    found = threadpoolctl.ThreadpoolController().select(user_api="blas").lib_controllers
    return [library for library in found if os.path.realpath(library.filepath) != own]
