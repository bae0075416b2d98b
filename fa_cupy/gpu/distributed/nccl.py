"""NCCL's sends and receives, on a stream of their own, and a thread that ends what never ends."""

from __future__ import annotations

import pickle
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import cupy
from cupy.cuda import Stream, get_current_stream

from fa_cupy.distributed.communicator import Communicator, RankError
from fa_cupy.gpu.distributed.peers import record

_PAUSE = 0.05  # seconds between two looks at what is on its way


class Channel:
    """The NCCL communicator of a rank.

    Parameters
    ----------
    host : Communicator
        For the number that the ranks meet by.
    device : int or None
        The GPU of this rank; None: the current one.
    """

    def __init__(self, host: Communicator, device: int | None) -> None:
        from cupy.cuda import nccl

        if not nccl.available:
            raise ImportError("NcclCommunicator: CuPy finds no NCCL (pip install nvidia-nccl-cu13)")
        if device is not None:
            cupy.cuda.Device(device).use()
        self._nccl = nccl
        own = nccl.get_unique_id() if host.rank == 0 else None
        meeting = pickle.loads(host.gather(pickle.dumps(own), "NcclCommunicator")[0])
        self._comm: Any = nccl.NcclCommunicator(host.size, meeting, host.rank)
        self._stream = Stream(non_blocking=True)
        self._timeout = host.timeout
        self._failed = ""
        self._running: deque[_Running] = deque()
        watch = threading.Thread(target=_watch, args=(weakref.ref(self),), daemon=True)
        watch.start()

    def start(
        self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]], place: str
    ) -> NcclCopies:
        """Queue sends and receives after what the current stream has."""
        self.check(place)
        self._stream.wait_event(record(get_current_stream()))
        kind, stream = self._nccl.NCCL_UINT8, self._stream.ptr
        running = _Running(time.monotonic() + self._timeout, place)
        self._running.append(running)
        try:
            self._nccl.groupStart()
            try:
                for post, pairs in ((self._comm.send, sends), (self._comm.recv, receives)):
                    for other, array in pairs:
                        if array.nbytes:
                            post(array.data.ptr, array.nbytes, kind, other, stream)
            finally:
                self._nccl.groupEnd()  # which waits for ranks that it meets for the first time
        except Exception:
            self.check(place)  # this thread says more of the reason
            raise
        running.done = record(self._stream)
        return NcclCopies(running.done, (sends, receives))

    def check(self, place: str) -> None:
        """Raise if the communicator was aborted."""
        if self._failed:
            raise RankError(f"{place}: the communicator is not usable, because {self._failed}")

    def abort(self, why: str) -> None:
        """End what is on its way, and refuse what follows."""
        if not self._failed:
            self._failed = why
            self._comm.abort()

    def look(self) -> None:
        """Abort where NCCL reports an error, or where something has taken too long."""
        while self._running and self._running[0].done is not None and self._running[0].done.done:
            self._running.popleft()
        if not self._running or self._failed:
            return
        first = self._running[0]
        if time.monotonic() > first.deadline:
            self.abort(f"a transfer of {first.place} was not done after {self._timeout:g} s")
        elif first.done is not None:
            try:
                self._comm.check_async_error()
            except Exception as error:
                self.abort(f"NCCL has reported {error} in {first.place}")


class _Running:
    """A transfer that may not have ended; `done` is its event, once it is queued."""

    def __init__(self, deadline: float, place: str) -> None:
        self.deadline, self.place = deadline, place
        self.done: Any = None


def _watch(channel: weakref.ref[Channel]) -> None:
    """Look at what is on its way until the channel is gone."""
    while (found := channel()) is not None:
        found.look()
        del found
        time.sleep(_PAUSE)


class NcclCopies:
    """Arrays on their way; see `Transfer`."""

    def __init__(self, done: Any, arrays: Any) -> None:
        self._done, self._arrays = done, arrays

    def wait(self) -> None:
        """Let the current stream wait."""
        get_current_stream().wait_event(self._done)
        self._arrays = ()

    arrive = wait
