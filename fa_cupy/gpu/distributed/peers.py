"""Copies from GPU to GPU in one process, each rank of which is a thread.

The receiver copies, by a stream of its own, after an event of the sender: copies run while both
compute, and no host waits for a GPU.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import cupy
from cupy.cuda import Event, Stream, get_current_stream, runtime

_here = threading.local()
# Arrays that a rank sends before it waits until others have copied the first of them.
_MOST_UNREAD = 8


def count() -> int:
    """Return the number of GPUs; 0 where there is no driver."""
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError:
        return 0


def use(device: int) -> None:
    """Make a device, and a new stream, the current ones of this thread, from now on."""
    cupy.cuda.Device(device).use()
    _here.stream = Stream(non_blocking=True)
    _here.stream.use()


def queued(devices: Sequence[int]) -> list[Any]:
    """Return events after what the current streams of this thread have queued on some devices."""
    found = []
    for device in dict.fromkeys(devices):
        with cupy.cuda.Device(device):
            found.append(record(get_current_stream()))
    return found


def wait_for(events: Sequence[Any]) -> None:
    """Let the current stream wait for events of any device."""
    for event in events:
        get_current_stream().wait_event(event)


def synchronize() -> None:
    """Wait until all that this thread has queued has run."""
    get_current_stream().synchronize()
    _stream().synchronize()


def start(
    comm: Any,
    hub: Any,
    sends: Sequence[tuple[int, Any]],
    receives: Sequence[tuple[int, Any]],
    place: str,
) -> PeerCopies:
    """Start to send arrays, and to receive others, for a rank that is a thread."""
    release(comm, _MOST_UNREAD)
    ready = record(get_current_stream())
    for other, array in sends:
        hub.sent[comm.rank][other].put((array, ready))
    copies = _stream()
    copies.wait_event(ready)  # what is written to may still be read by what was queued before
    done = None
    for source, array in receives:
        found, event = comm.take(hub.sent, source, place)
        copies.wait_event(event)
        _copy(array, found, copies)
    if receives:
        done = record(copies)
    for source in dict.fromkeys(source for source, _ in receives):
        hub.answers[comm.rank][source].put(done)
    readers = dict.fromkeys(other for other, _ in sends)
    return PeerCopies(comm, hub, [array for _, array in sends], readers, done, place)


class PeerCopies:
    """Arrays on their way between this rank and others; see `Transfer`."""

    def __init__(
        self, comm: Any, hub: Any, arrays: list[Any], readers: Any, done: Any, place: str
    ) -> None:
        self._comm, self._hub, self._place = comm, hub, place
        self._arrays = arrays  # alive until others have copied them
        self._readers, self._done = readers, done

    def wait(self) -> None:
        """Let the current stream wait for what arrives, and for the copies of what was sent."""
        stream = get_current_stream()
        release(self._comm)  # answers come in the order of transfers
        for other in self._readers:
            stream.wait_event(self._comm.take(self._hub.answers, other, self._place))
        if self._done is not None:
            stream.wait_event(self._done)
        self._arrays = []

    def arrive(self) -> None:
        """Let the current stream wait for what arrives; what was sent is kept until it was read."""
        stream = get_current_stream()
        if self._done is not None:
            stream.wait_event(self._done)
        if self._readers:
            unread = _Unread(self._hub, self._arrays, [*self._readers], stream, self._place)
            self._comm.unread.append(unread)
        self._arrays = []


class _Unread(NamedTuple):
    """Arrays that others copy while this rank goes on.

    Attributes
    ----------
    hub : object
    arrays : list of cupy.ndarray
    readers : list of int
        The ranks that have not answered yet.
    stream : cupy.cuda.Stream
        The one that may use the memory next.
    place : str
    """

    hub: Any
    arrays: list[Any]
    readers: list[int]
    stream: Any
    place: str


def release(comm: Any, most: int = 0) -> None:
    """Let go of arrays that were read; wait for answers while there are more than `most`."""
    unread = comm.unread
    while unread:
        hub, _, readers, stream, place = unread[0]
        while readers:
            if len(unread) <= most and not comm.has(hub.answers, readers[0]):
                return
            stream.wait_event(comm.take(hub.answers, readers.pop(0), place))
        unread.popleft()


def record(stream: Any) -> Any:
    """Return an event after what is queued on a stream now."""
    event = Event(disable_timing=True)
    event.record(stream)
    return event


def _stream() -> Any:
    """Return the stream for copies of this thread and its device."""
    device = runtime.getDevice()
    streams = getattr(_here, "streams", None)
    if streams is None:
        streams = _here.streams = {}
    if device not in streams:
        streams[device] = Stream(non_blocking=True)
        for other in range(count()):
            if other != device and runtime.deviceCanAccessPeer(device, other):
                with contextlib.suppress(runtime.CUDARuntimeError):  # it was there before
                    runtime.deviceEnablePeerAccess(other)
    return streams[device]


def _copy(out: Any, x: Any, stream: Any) -> None:
    if out.nbytes != x.nbytes:
        raise ValueError(f"got an array of {x.nbytes} bytes, want {out.nbytes}")
    if out.nbytes:
        runtime.memcpyPeerAsync(
            out.data.ptr, out.data.device_id, x.data.ptr, x.data.device_id, out.nbytes, stream.ptr
        )
