"""Ranks that are threads of one process, on its GPUs or on the CPU."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import queue
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from fa_cupy.core import backends, checks
from fa_cupy.distributed.communicator import Communicator, RankError, compare, overdue
from fa_cupy.distributed.order import library

_NAME = "local"
_MOST = 1024  # ranks; each has a queue for every other rank


class _Stopped(NamedTuple):
    """What a rank leaves for those that wait for it."""

    rank: int
    why: str


class _Announced(NamedTuple):
    """The record of a call of a rank that does not wait for others."""

    record: bytes


class _Hub:
    """Queues between the ranks of one run: for records and arrays, and for answers to these."""

    def __init__(self, size: int, on_gpus: bool) -> None:
        self.turn = threading.Lock() if on_gpus else None
        # Arrays that ranks which have failed have sent: others may copy them while they run.
        self.kept: list[Any] = []

        def queues() -> list[list[queue.SimpleQueue[Any]]]:
            return [[queue.SimpleQueue() for _ in range(size)] for _ in range(size)]

        self.sent, self.answers = queues(), queues()

    def stop(self, rank: int, why: str) -> None:
        """Let all ranks know that one sends nothing more."""
        for row in (self.sent[rank], self.answers[rank]):
            for box in row:
                box.put(_Stopped(rank, why))


class ThreadCommunicator(Communicator):
    """The communicator of a rank that is a thread; `local` makes them.

    NumPy arrays are copied and passed through queues. CuPy arrays are copied from one GPU to the
    other on a CUDA stream of their own.
    """

    def __init__(self, hub: _Hub, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self._hub = hub
        self._others = [other for other in range(size) if other != rank]
        self._failed = ""
        self._has_turn = False
        # Of each rank: records of this one that were not yet compared with what comes from there.
        self._owed: list[deque[tuple[bytes, str]]] = [deque() for _ in range(size)]
        # Arrays that others may still copy; see `peers.PeerCopies.arrive`.
        self.unread: deque[Any] = deque()

    def gather(self, record: bytes, place: str) -> list[bytes]:
        """Return the records of all ranks."""
        self._usable(place)
        for other in self._others:
            self._hub.sent[self.rank][other].put(record)
        found = {other: self.take(self._hub.sent, other, place) for other in self._others}
        self.others_go_on = any(isinstance(x, _Announced) for x in found.values())
        found = {other: self._record(x, other, place) for other, x in found.items()}
        return [found.get(rank, record) for rank in range(self.size)]

    def announce(self, record: bytes, place: str) -> None:
        """Tell all ranks of a call; `take` compares it with theirs."""
        self._usable(place)
        for other in self._others:
            self._hub.sent[self.rank][other].put(_Announced(record))
            self._owed[other].append((record, place))
            self._compare_owed(other, waits=False)

    def finish(self) -> None:
        """Wait until the calls of all ranks were compared, and others have read all they need."""
        if self._failed:  # and the function has dealt with it
            self._hub.kept.extend(self.unread)
            return
        for source in self._others:
            self._compare_owed(source)
        if self.unread:
            backends.gpu("distributed.peers").release(self)

    def start(
        self,
        sends: Sequence[tuple[int, Any]],
        receives: Sequence[tuple[int, Any]],
        place: str,
    ) -> Any:
        """Start to send and to receive arrays."""
        self._usable(place)
        some = [array for _, array in (*sends, *receives)]
        if some and library(some[0]) == "cupy":
            peers = backends.gpu("distributed.peers")
            return peers.start(self, self._hub, sends, receives, place)
        for other, array in sends:
            self._hub.sent[self.rank][other].put(array.copy())
        return _Copies(self, receives, place)

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks."""
        self._failed = self._failed or f"rank {self.rank} has raised {_described(error)}"
        self._hub.stop(self.rank, f"has raised {_described(error)}")

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Return a context in which other ranks wait for this one, if they have GPUs."""
        if self._hub.turn is None or self._has_turn:
            yield
            return
        self._hub.turn.acquire()
        self._has_turn = True
        try:
            yield
        finally:
            self._has_turn = False
            self._hub.turn.release()

    def end(self) -> None:
        """Tell ranks that still wait that this one has ended."""
        self._hub.stop(self.rank, "has ended")

    def take(self, boxes: list[list[queue.SimpleQueue[Any]]], source: int, place: str) -> Any:
        """Return what a rank has put down for this one next."""
        if boxes is self._hub.sent:
            self._compare_owed(source)
        return self._next(boxes, source, place)

    def has(self, boxes: list[list[queue.SimpleQueue[Any]]], source: int) -> bool:
        """Whether `take` need not wait."""
        return not boxes[source][self.rank].empty()

    def _compare_owed(self, source: int, waits: bool = True) -> None:
        """Compare calls of this rank with those of another one, those that are there or all."""
        owed, sent = self._owed[source], self._hub.sent
        while owed and (waits or self.has(sent, source)):
            mine, place = owed.popleft()
            theirs = self._record(self._next(sent, source, place), source, place)
            if theirs == mine:
                continue
            try:
                compare(place, self.rank, dict(sorted({self.rank: mine, source: theirs}.items())))
            except Exception as error:
                self.fail(error)  # what comes next is not what it is taken for
                raise

    def _record(self, item: Any, source: int, place: str) -> bytes:
        """Return the record of another rank's call."""
        if isinstance(item, _Announced):
            return item.record
        if isinstance(item, bytes):
            return item
        error = RankError(f"{place}: rank {source} is in another call than rank {self.rank}")
        self.fail(error)
        raise error

    def _next(self, boxes: list[list[queue.SimpleQueue[Any]]], source: int, place: str) -> Any:
        box = boxes[source][self.rank]
        try:
            item = box.get_nowait() if self._has_turn else box.get(timeout=self.timeout)
        except queue.Empty:
            item = self._waited(box, source, place)
        if isinstance(item, _Stopped):
            box.put(item)  # for whatever waits later
            self._failed = f"rank {item.rank} {item.why}"
            raise RankError(f"{place}: {self._failed}, while rank {self.rank} waited for it")
        return item

    def _waited(self, box: queue.SimpleQueue[Any], source: int, place: str) -> Any:
        """Return the next item of a box that was empty; meanwhile, others have their turn."""
        if self._has_turn and self._hub.turn is not None:
            self._hub.turn.release()
            try:
                return box.get(timeout=self.timeout)
            except queue.Empty:
                pass
            finally:
                self._hub.turn.acquire()
        # What comes late would be taken for the next thing that is waited for.
        self._failed = f"rank {self.rank} has waited in vain in {place}"
        self._hub.stop(self.rank, "has waited for another rank in vain")
        raise overdue(place, self.rank, self.timeout, source) from None

    def _usable(self, place: str) -> None:
        if self._failed:
            raise RankError(f"{place}: the communicator is not usable, because {self._failed}")


class _Copies:
    """NumPy arrays on their way to this rank."""

    def __init__(
        self, comm: ThreadCommunicator, receives: Sequence[tuple[int, Any]], place: str
    ) -> None:
        self._comm, self._receives, self._place = comm, receives, place

    def wait(self) -> None:
        for source, array in self._receives:
            found = self._comm.take(self._comm._hub.sent, source, self._place)
            np.copyto(array, found)

    arrive = wait


class Local:
    """Ranks that are threads of this process; `local` makes them.

    Attributes
    ----------
    size : int
        The number of ranks.
    devices : tuple of int
        The GPU of each rank; empty where they compute on the CPU.
    """

    def __init__(self, size: int, devices: tuple[int, ...], timeout: float) -> None:
        self.size, self.devices, self._timeout = size, devices, timeout
        self._jobs: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(size)]
        self._closed = False
        self._calling = threading.Lock()
        self._workers: set[int | None] = set()
        for rank in range(size):
            device = devices[rank] if devices else None
            worker = threading.Thread(
                target=_work, args=(rank, device, self._jobs[rank]), daemon=True,
                name=f"fa_cupy rank {rank}",
            )  # fmt: skip
            try:
                worker.start()
            except RuntimeError as error:
                self.close()
                raise RuntimeError(
                    f"{_NAME}: size is {size}, and no more than {rank} threads can be started"
                ) from error
            self._workers.add(worker.ident)

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(comm, *args)`` on all ranks, and return the results by rank.

        If a rank raises an error, that error is raised here; if several do, the first one by rank
        that is not a `RankError`. On GPUs, ranks begin after the work that the caller has queued on
        its current streams, and the call returns after all work that the ranks have queued. Calls
        by several threads run one after the other.

        Raises
        ------
        RuntimeError
            If the ranks are closed, or if a rank itself makes the call.
        TypeError
            If `function` is not callable.
        """
        if threading.get_ident() in self._workers:
            raise RuntimeError(f"{_NAME}: a rank has called all ranks, want calls from outside")
        if not callable(function):
            raise TypeError(f"{_NAME}: function is {checks.show(function)}, want a callable")
        with self._calling:
            return self._call(function, args)

    def _call(self, function: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
        if self._closed:
            raise RuntimeError(f"{_NAME}: the ranks are closed, want local(...) again")
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        hub = _Hub(self.size, bool(self.devices))
        ready = backends.gpu("distributed.peers").queued(self.devices) if self.devices else ()
        for rank, jobs in enumerate(self._jobs):
            comm = ThreadCommunicator(hub, rank, self.size, self._timeout)
            jobs.put((function, comm, args, ready, done))
        found: dict[int, tuple[Any, BaseException | None]] = {}
        try:
            while len(found) < self.size:
                rank, result, error = done.get()
                found[rank] = result, error
        except BaseException:  # of a signal, as Ctrl-C: ranks that wait shall end
            for rank in range(self.size):
                hub.stop(rank, "was interrupted")
            raise
        errors = [error for _, (_, error) in sorted(found.items()) if error is not None]
        if errors:
            raise next((e for e in errors if not isinstance(e, RankError)), errors[0])
        return [found[rank][0] for rank in range(self.size)]

    run = __call__

    def close(self) -> None:
        """End the threads."""
        if not self._closed:
            self._closed = True
            for jobs in self._jobs:
                jobs.put(None)

    def __enter__(self) -> Local:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def local(
    size: int | None = None, *, devices: Sequence[int] | None = None, timeout: float = 60.0
) -> Local:
    """Return ranks that are threads of this process, each with a GPU or all on the CPU.

    Parameters
    ----------
    size : int, optional
        The number of ranks, at most 1024; by default that of `devices`.
    devices : sequence of int, optional
        The GPU of each rank. By default rank r has GPU r if CuPy finds `size` GPUs or more, and
        otherwise all ranks compute on the CPU, as they do with ``devices=[]``. Ranks may share a
        GPU.
    timeout : float, optional
        Seconds after which a rank that waits for another one raises a `TimeoutError`.

    Returns
    -------
    Local
        Call it with a function, which is called with a communicator on each rank:
        ``ranks(function, *args)`` returns the list of results. It is a context manager that ends
        the threads. On a GPU, each rank has its device and a stream of its own as the current ones.

    Raises
    ------
    TypeError, ValueError
        With a message that names the argument.
    RuntimeError
        If the system cannot start so many threads.

    See Also
    --------
    MpiCommunicator, NcclCommunicator : ranks that are processes.

    Notes
    -----
    The threads share Python's interpreter, and NumPy arrays are copied between them: on the CPU,
    ranks are for trying out programs, or for testing them.

    Examples
    --------
    >>> import numpy as np
    >>> from fa_cupy import attention, distributed
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 1000, 64))
    >>> def part(comm):
    ...     own = [distributed.split(x, comm) for x in (q, k, v)]
    ...     return distributed.attention(*own, comm=comm)
    >>> with distributed.local(2) as ranks:
    ...     out = distributed.join(ranks(part))
    >>> bool(np.allclose(out, attention(q, k, v)))
    True
    """
    if devices is not None:
        devices = _device_numbers(devices)
    if size is None and not devices:
        raise ValueError(f"{_NAME}: neither size nor devices is given, want one of them")
    wanted = f"an int from 1 to {_MOST}"
    count = len(devices or ()) if size is None else size
    count = checks.whole(_NAME, "size", count, wanted, range(1, _MOST + 1))
    if devices and len(devices) != count:
        raise ValueError(f"{_NAME}: devices has {len(devices)} numbers, size is {count}")
    timeout = checks.finite(_NAME, "timeout", timeout, minimum=0.0)
    timeout = min(timeout, threading.TIMEOUT_MAX)  # 292 years
    if devices is None:
        devices = tuple(range(count)) if _gpus() >= count else ()
    elif devices and max(devices) >= _gpus():
        raise ValueError(f"{_NAME}: devices has {max(devices)}, CuPy finds {_gpus()} GPUs")
    return Local(count, devices, timeout)


def _device_numbers(devices: Any) -> tuple[int, ...]:
    given = checks.sequence(_NAME, "devices", devices, "a sequence of device numbers")
    some = list(itertools.islice(given, _MOST + 1))
    if len(some) > _MOST:
        raise ValueError(f"{_NAME}: devices has more than {_MOST} numbers, want one a rank")
    return tuple(
        checks.whole(_NAME, f"devices[{i}]", x, "a device number") for i, x in enumerate(some)
    )


def _gpus() -> int:
    """Return the number of GPUs that CuPy finds; 0 without CuPy."""
    if importlib.util.find_spec("cupy") is None:
        return 0
    return int(backends.gpu("distributed.peers").count())


def _work(rank: int, device: int | None, jobs: Any) -> None:
    """Run the functions of a rank, one after the other."""
    if device is not None:
        backends.gpu("distributed.peers").use(device)
    while (job := jobs.get()) is not None:
        function, comm, args, ready, done = job
        result, error = None, None
        try:
            if ready:
                backends.gpu("distributed.peers").wait_for(ready)
            result = function(comm, *args)
            comm.finish()
        except BaseException as e:
            error = e
            comm.fail(e)
        else:
            comm.end()
        if device is not None and error is None:
            try:
                backends.gpu("distributed.peers").synchronize()
            except Exception as e:
                error = e
        done.put((rank, result, error))
        del (
            job,
            function,
            comm,
            args,
            ready,
            done,
            result,
            error,
        )  # arrays are the caller's from here on


def _described(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(type(error), error)).strip()
