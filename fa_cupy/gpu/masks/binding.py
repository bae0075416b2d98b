"""Masks as launches get them: the addresses of their lists, and the order of the work.

The lists of a `BitMask` are sent to a device once and kept with the mask, and so is what follows
from them and the shape of a call: the mask's matrix of each batch entry, and an order of work. Of
kinds of calls, the first ones stay with the mask; later ones are dropped when there are too many,
except those that a graph points to. An array of bool is packed by every call.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import cupy
import numpy as np

from fa_cupy._bitmask import BitMask
from fa_cupy.core.attention_problem import Problem, View
from fa_cupy.gpu.driver.devices import multiprocessors
from fa_cupy.gpu.driver.launch import any_mode, capturing
from fa_cupy.gpu.kernels.attention.attention_params import MaskPointers
from fa_cupy.gpu.masks.device_mask import DeviceMask, pack
from fa_cupy.gpu.masks.tile_order import section, work_order
from fa_cupy.gpu.workspace import temporaries
from fa_cupy.masks.blocks import BlockLists

Array = Any  # numpy.ndarray or cupy.ndarray
# CUDA Runtime API, section "Data types used by CUDA Runtime".
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_NOT_WHILE_CAPTURED = 900  # cudaErrorStreamCaptureUnsupported
_STREAM_OF_THREAD = 2  # cudaStreamPerThread: another stream in each thread
# Kinds of calls that a mask keeps: those that stay, which need no look at whether a graph is being
# made of them, and those that come and go.
_MOST_STAYING, _MOST_PASSING = 64, 64
_changing = threading.Lock()  # of what may go


class Made:
    """Arrays that a mask keeps on a device, which may still be being written.

    Attributes
    ----------
    found : Any
        The arrays.
    stream : int
        Where they are being written, if that may not be done.
    made : cupy.cuda.Event or None
        When they are; None once that is known.
    """

    __slots__ = ("found", "made", "stream")

    def __init__(self, found: Any) -> None:
        self.found = found
        self.stream = 0
        self.made: Any = None

    def begin(self) -> None:
        """Note that the current stream writes the arrays, by the work that it has so far."""
        self.stream = cupy.cuda.get_current_stream().ptr
        self.made = cupy.cuda.Event(disable_timing=True)
        self.made.record()

    def wait(self) -> None:
        """Return when the current stream can read the arrays."""
        made = self.made
        if made is None:  # by now: another thread knows
            return
        with any_mode() if capturing() else nullcontext():
            if not made.done:
                here = cupy.cuda.get_current_stream().ptr
                if here == self.stream != _STREAM_OF_THREAD and not capturing():
                    return
                # A graph cannot wait for what is no part of it, and may be launched on any stream.
                made.synchronize()
        self.made = None


class Kept(Made):
    """What a mask is to one kind of call on one device; the mask keeps it.

    Attributes
    ----------
    pointers : tuple of int
        What launches get: `MaskPointers`, or the addresses of lists of pairs.
    passing : bool
        Whether the mask may drop it.
    """

    __slots__ = ("passing", "pointers")

    def __init__(self, found: Any, pointers: Any) -> None:
        super().__init__(found)
        self.pointers = pointers
        self.passing = False

    @classmethod
    def of_lists(cls, lists: DeviceMask, memory: Array, entries: int) -> Kept:
        """Return what launches get of lists; `memory` has the entries, and the order after them."""
        order = memory[entries:]
        return cls((lists, memory), _pointers(lists, memory, order if len(order) else None))


class CallMask:
    """Says what launches of one kind of call get of a mask.

    Parameters
    ----------
    problem : Problem
        With a mask, and with a query and a key.
    device : int
    """

    __slots__ = ("_device", "_key", "_problem", "_section", "_view")

    def __init__(self, problem: Problem, device: int) -> None:
        assert problem.mask is not None
        self._section = section(problem, multiprocessors(device))
        self._problem = problem
        self._view = problem.mask
        self._device = device
        batch = *problem.batch, *self._view.strides[:-2]
        self._key = device, problem.lower, problem.upper, self._section, *batch

    def __call__(self, mask: Any) -> tuple[MaskPointers, Any]:
        """Return what to tell of a mask, and what has to live until the launch is queued.

        Parameters
        ----------
        mask : BitMask or cupy.ndarray of bool
            Of the shape and strides that the problem says. An array is packed on the current
            stream.
        """
        if not isinstance(mask, BitMask):
            return self._packed(mask)
        kept = mask._kept.get(self._key) or self._prepared(mask)
        if kept.passing and capturing():
            kept = stay(mask, self._key, kept)
        if kept.made is not None:
            kept.wait()
        return kept.pointers, kept

    def _packed(self, mask: Any) -> tuple[MaskPointers, Any]:
        with temporaries():
            lists, entries = pack(mask, self._view)
        return _pointers(lists, entries, None), (lists, entries)

    def _prepared(self, mask: BitMask) -> Kept:
        lists = device_lists(mask, self._device)
        entries = matrices(mask, self._view)
        if not mask._store.only_on(self._device):
            order = work_order(np, self._problem, host_lists(mask), entries, self._section)
            return _keep(mask, self._key, lists, entries, order)
        if capturing():
            # Lists that the captured stream may be waiting for are not sorted now; the next call
            # that is not captured will do it.
            key = *self._key, "captured"
            return mask._kept.get(key) or _keep(mask, key, lists, entries, None)
        sent = cupy.asarray(entries)
        order = work_order(cupy, self._problem, mask.lists, sent, self._section)
        size = len(entries) + (0 if order is None else len(order))
        with cupy.cuda.using_allocator(malloc):
            memory = cupy.empty(size, np.int32)
        memory[: len(entries)] = sent
        if order is not None:
            memory[len(entries) :] = order
        kept = Kept.of_lists(lists, memory, len(entries))
        kept.begin()
        return remember(mask, self._key, kept)


def matrices(mask: BitMask, view: View) -> np.ndarray[Any, Any]:
    """Return the number of the mask's matrix of each batch entry of a call, int32.

    Parameters
    ----------
    mask : BitMask
    view : View
        Of its entries, over the batch of the call.
    """
    steps = np.lib.stride_tricks.as_strided(mask.entries, view.shape[:-2], view.strides[:-2])
    return np.ascontiguousarray(steps, np.int32).reshape(-1)


def device_lists(mask: BitMask, device: int) -> DeviceMask:
    """Return the lists of a mask on the current device.

    Parameters
    ----------
    mask : BitMask
        It keeps them. If they had to be sent, any stream can read them.
    device : int
        The current one.
    """
    kept: DeviceMask | None = mask._kept.get(("lists", device))
    if kept is None:
        if mask._store.only_on(device):
            kept = DeviceMask.of(mask, device)
        else:
            with apart() as stream:
                kept = DeviceMask.of(mask, device)
                stream.synchronize()
        kept = mask._kept.setdefault(("lists", device), kept)
    return kept


def host_lists(mask: BitMask) -> BlockLists:
    """Return the lists of a mask as NumPy arrays, but for the words: those count places instead.

    Parameters
    ----------
    mask : BitMask
        It keeps them, so that lists on a device are waited for once.
    """
    kept: BlockLists | None = mask._kept.get("host")
    if kept is None:
        lists = mask._store.device_outline()
        kept = mask._kept["host"] = lists._replace(words=np.arange(len(lists.partial)))
    return kept


def _keep(mask: BitMask, key: Any, lists: DeviceMask, entries: Array, order: Array | None) -> Kept:
    """Send what the host knows, and let the mask keep it."""
    both = entries if order is None else np.concatenate([entries, order])
    with apart() as stream:
        kept = Kept.of_lists(lists, cupy.asarray(both), len(entries))
        stream.synchronize()
    return remember(mask, key, kept)


def remember(mask: BitMask, key: Any, kept: Kept) -> Kept:
    """Let the mask keep what was made for a kind of call; return what is kept."""
    dropped: list[Kept] = []  # whose memory is freed, which waits for the device, behind the lock
    with _changing:
        known = [(k, x) for k, x in list(mask._kept.items()) if isinstance(x, Kept)]
        passing = [k for k, x in known if x.passing]
        if not capturing():  # what that makes stays, and memory is not freed meanwhile
            kept.passing = len(known) >= _MOST_STAYING
            if len(passing) >= _MOST_PASSING:
                dropped += [mask._kept.pop(k) for k in passing]
        # Of two threads that come here at once, both take what the first one made.
        stored: Kept = mask._kept.setdefault(key, kept)
    return stored


def stay(mask: BitMask, key: Any, kept: Kept) -> Kept:
    """Let the mask keep for good what a graph is going to point to; return what is kept."""
    with _changing:
        stored: Kept = mask._kept.setdefault(key, kept)  # it may have been dropped just now
        stored.passing = False
    return stored


def _pointers(lists: DeviceMask, entries: Any, order: Any) -> MaskPointers:
    return MaskPointers(
        lists.partial_begin.data.ptr,
        lists.partial_end.data.ptr,
        lists.partial.data.ptr,
        lists.words.data.ptr,
        lists.full_begin.data.ptr,
        lists.full_end.data.ptr,
        lists.full.data.ptr,
        entries.data.ptr,
        0 if order is None else order.data.ptr,
        lists.words_by_block,
    )


@contextmanager
def apart() -> Iterator[Any]:
    """Work on a stream and in memory that no other call has to do with.

    What is made here may be read on any stream when this one was waited for, also if the current
    stream is being captured. Its memory is not the pool's, where a stream gets back what was freed
    while others may read it: freeing this waits for the device.
    """
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, cupy.cuda.using_allocator(malloc):
        yield stream


def malloc(size: int) -> Any:
    """Give memory that is not the pool's, for arrays that any stream may read."""
    try:
        memory = cupy.cuda.Memory(size)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        if error.status == _NOT_WHILE_CAPTURED:
            raise NotImplementedError(
                "BitMask: the first call with a mask takes memory from the driver, which the mode "
                "of this capture does not allow; want a call before the capture, or mode 'relaxed'"
            ) from error
        if error.status != _OUT_OF_MEMORY:
            raise
        cupy.get_default_memory_pool().free_all_blocks()
        memory = cupy.cuda.Memory(size)
    return cupy.cuda.MemoryPointer(memory, 0)
