"""Where calls on a GPU take memory from, so that graphs that they are captured into own theirs.

A graph runs long after the call that it was captured from, and as often as it is launched. If the
call had worked in memory of CuPy's pool, which gives it to another call when this one returns,
every launch would write there. So there are two kinds of memory:

* Results belong to the caller: they come from the caller's allocator of CuPy, or from the library
  of the caller's arrays.
* Temporaries of a captured call belong to the graph: the driver makes a memory node of what is
  asked for, and another of what is given back, while the stream is captured.

Every public function computes inside of a `Call`, where all that is allocated is a temporary;
`empty` and `results` make results. Repeated calls on CuPy arrays do without: what they allocate are
results, and they ask `take` or `temporaries` for the rest. Where no stream is captured, all memory
comes from the allocator as it is.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import cupy
import numpy as np
from cupy.cuda import (
    MemoryPointer,
    UnownedMemory,
    alloc,
    get_allocator,
    get_current_stream,
    runtime,
    using_allocator,
)

from fa_cupy.core import arrays
from fa_cupy.gpu.driver import interop
from fa_cupy.gpu.driver.launch import DriverLauncher, capturing

_here = threading.local()  # `call`: the innermost `Call` of the thread
_NOTHING: AbstractContextManager[Any] = contextlib.nullcontext()


class _Node:
    """Memory of the graph that a stream is being captured into, until it is given back."""

    __slots__ = ("__weakref__", "pointer", "stream")

    def __init__(self, size: int, stream: int) -> None:
        self.stream = stream
        self.pointer = 0
        if size:
            self.pointer = runtime.mallocAsync(size, stream)

    def free(self) -> None:
        """Give it back, if that was not done."""
        pointer, self.pointer = self.pointer, 0
        if pointer:
            runtime.freeAsync(pointer, self.stream)

    def __del__(self) -> None:
        # A capture that an error has ended leaves no graph, and no memory of one.
        with contextlib.suppress(runtime.CUDARuntimeError):
            self.free()


class Call:
    """The computation of a public function, inside of which what is allocated is a temporary.

    Parameters
    ----------
    new : callable, optional
        ``new(shape, dtype, order)`` makes a result whose axes lie in `order`, outermost first,
        where the library of the caller's arrays has to do that.

    Attributes
    ----------
    captured : bool
        Whether the stream is being captured.
    """

    __slots__ = ("_allocator", "_nodes", "captured", "new")

    def __init__(self, new: Callable[..., Any] | None) -> None:
        self.new = new
        self.captured = capturing()
        self._allocator = get_allocator()  # the caller's
        self._nodes: weakref.WeakSet[_Node] = weakref.WeakSet()

    def allocate(self, size: int) -> MemoryPointer:
        """Give memory of the graph that is given back at the end at the latest."""
        node, memory = _of_graph(size)
        self._nodes.add(node)
        return memory

    def free(self) -> None:
        """Give back what an exception or a frame still holds: after the capture it is too late."""
        for node in list(self._nodes):
            node.free()

    def abandon(self) -> None:
        """Do as `free` after an error, which may have ended the capture."""
        for node in list(self._nodes):
            node.__del__()

    def results(self) -> AbstractContextManager[Any]:
        """Return a context in which memory is the caller's."""
        return using_allocator(self._allocator) if self.captured else _NOTHING


@contextlib.contextmanager
def _computing(
    place: AbstractContextManager[Any], new: Callable[..., Any] | None
) -> Iterator[Call]:
    # A generator that only the `with` statement holds: if a signal handler raises before the body
    # is reached, it goes, and so restores all that it has changed.
    with place:
        outer, call = current(), Call(new)
        try:
            _here.call = call
            with using_allocator(call.allocate) if call.captured else _NOTHING:
                try:
                    yield call
                except BaseException:
                    call.abandon()
                    raise
            call.free()
        finally:
            _here.call = outer


def current() -> Call | None:
    """Return the innermost `Call` of this thread."""
    return getattr(_here, "call", None)


def computing(
    device: int, stream: int | None = None, new: Callable[..., Any] | None = None
) -> AbstractContextManager[Call]:
    """Return the context of a `Call` on a device and, unless that is None, a stream (a handle)."""
    return _computing(interop.on_device(device, stream), new)


def of_graph(size: int) -> MemoryPointer:
    """Give memory of the graph that the current stream is captured into; an allocator of CuPy.

    It is given back when the last array in it goes, or when the `Call` ends.
    """
    call = current()
    return _of_graph(size)[1] if call is None or not call.captured else call.allocate(size)


def _of_graph(size: int) -> tuple[_Node, MemoryPointer]:
    node = _Node(size, get_current_stream().ptr)
    # The driver may not know yet which device such memory is on.
    memory = UnownedMemory(node.pointer, size, node, runtime.getDevice())
    return node, MemoryPointer(memory, 0)


def take(size: int) -> MemoryPointer:
    """Give memory for a temporary that lives until what uses it is queued on the current stream.

    The order of the stream protects what is given back before that has run.
    """
    if runtime.streamIsCapturing(get_current_stream().ptr):  # as `capturing`, without its call
        return of_graph(size)
    return alloc(size)


@functools.cache
def launcher(device: int) -> DriverLauncher:
    """Return what runs plans on a device, with temporaries as their workspaces."""
    return DriverLauncher(device, take)


def temporaries() -> AbstractContextManager[Any]:
    """Return a context in which arrays are temporaries: they live while objects refer to them."""
    return using_allocator(of_graph) if capturing() else _NOTHING


def results() -> AbstractContextManager[Any]:
    """Return a context in which CuPy's arrays are results, inside of a `Call` too."""
    call = current()
    return _NOTHING if call is None else call.results()


def empty(shape: Sequence[int], dtype: np.dtype[Any], like: Any = None) -> Any:
    """Return an uninitialised result, dense, that lies in memory as `like` does, or in C order."""
    call = current()
    if call is not None and call.new is not None:
        order = range(len(shape)) if like is None else arrays.memory_order(shape, like)
        return call.new(shape, dtype, order)
    with results():
        if like is None:
            return cupy.empty(shape, dtype)
        return arrays.empty_laid_out(cupy, shape, like, dtype)


def foreign() -> bool:
    """Whether results are made by another library than CuPy."""
    call = current()
    return call is not None and call.new is not None


def hand_over(native: Any) -> Any:
    """Return a result that may be a temporary in memory of the caller."""
    memory = native.data.mem
    if type(memory) is not UnownedMemory or not isinstance(memory._owner, _Node):
        return native
    kind = f"u{native.itemsize}"  # CuPy does not move bfloat16 around everywhere
    with results():
        return native.view(kind).copy("K").view(native.dtype)


def refuse(name: str, reason: str) -> None:
    """Raise, before anything is launched, if the current stream is being captured."""
    if capturing():
        raise NotImplementedError(
            f"{name}: cannot be captured into a graph: {reason}; want a call outside of the capture"
        )


def refuse_products(name: str, what: str) -> None:
    """Raise, before anything is launched, if products of cuBLAS would be captured.

    CuPy refuses to call cuBLAS while a stream is captured, and results are looked at on the host.
    """
    refuse(name, f"{what} has no kernel, and cuBLAS products cannot be captured")
