"""What is made of a mask for a call on a GPU, and kept: on NumPy in place of CuPy."""

import importlib
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from fa_cupy import BitMask
from fa_cupy.core import attention_problem
from fa_cupy.masks.blocks import BlockLists
from tests.support import imports

MODULES = (
    "fa_cupy.gpu.driver.launch", "fa_cupy.gpu.masks.device_mask", "fa_cupy.gpu.driver.interop",
    "fa_cupy.gpu.workspace", "fa_cupy.gpu.masks.binding",
)  # fmt: skip


class Array(np.ndarray):
    """A device array."""

    device = SimpleNamespace(id=0)

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data, device_id=0)

    def get(self):
        return np.array(self)


def asarray(x):
    return x if isinstance(x, Array) else np.array(x).view(Array)


class DeviceMask(NamedTuple):
    """As that of `fa_cupy.gpu.masks.device_mask`."""

    partial_begin: Any
    partial_end: Any
    partial: Any
    words: Any
    full_begin: Any
    full_end: Any
    full: Any
    words_by_block: int


class CUDARuntimeError(RuntimeError):
    def __init__(self, status):
        super().__init__(status)
        self.status = status


class Machine:
    """A device: what was done on it, and whether the current stream is captured."""

    def __init__(self):
        self.stream, self.streams, self.allocator = 7, 100, "pool"
        self.capturing = self.relaxed = False
        self.log = []
        self.events = []

    @contextmanager
    def changed(self, **values):
        old = {name: getattr(self, name) for name in values}
        self.__dict__.update(values)
        yield
        self.__dict__.update(old)

    def cupy(self):
        machine = self

        class Stream:
            def __init__(self, non_blocking=False):
                assert non_blocking  # or it would wait for the default stream
                machine.streams += 1
                self.ptr = machine.streams

            def __enter__(self):
                self.context = machine.changed(stream=self.ptr, capturing=False)
                return self.context.__enter__()

            def __exit__(self, *error):
                return self.context.__exit__(*error)

            def synchronize(self):
                machine.log.append(("synchronize", self.ptr))

        class Event:
            def __init__(self, disable_timing):
                self.happened = False
                machine.events.append(self)

            @property
            def done(self):
                if machine.capturing and not machine.relaxed:
                    raise CUDARuntimeError(900)  # the modes global and thread_local
                return self.happened

            def record(self):
                self.stream = machine.stream

            def synchronize(self):
                machine.log.append("wait for event")
                self.happened = True

        cuda = SimpleNamespace(
            Stream=Stream, Event=Event, driver=SimpleNamespace(ctxGetCurrent=1, launchKernel=1),
            get_current_stream=lambda: SimpleNamespace(ptr=machine.stream),
            runtime=SimpleNamespace(
                streamIsCapturing=lambda ptr: machine.capturing, CUDARuntimeError=CUDARuntimeError
            ),
            using_allocator=lambda allocator: machine.changed(allocator=allocator),
            get_allocator=lambda: machine.allocator, alloc=None, MemoryPointer=None,
            UnownedMemory=None,
        )  # fmt: skip
        names = {name: getattr(np, name) for name in ("arange", "argsort", "divmod", "where")}
        names["searchsorted"] = np.searchsorted

        def empty(size, dtype):
            machine.log.append(("allocated", machine.stream, machine.allocator))
            return np.empty(size, dtype).view(Array)

        return {"ndarray": Array, "asarray": asarray, "empty": empty, "cuda": cuda, **names}

    def of(self, mask, device):
        assert device == 0
        self.log.append(("sent", self.stream, self.allocator))
        here = mask._store.only_on(device)
        lists = mask.lists if here else mask._store.with_words()
        partial_begin, partial, words, full_begin, full = map(asarray, lists[:5])
        ends = partial_begin[1:], full_begin[1:]
        return DeviceMask(partial_begin, ends[0], partial, words, full_begin, ends[1], full, 0)

    def pack(self, mask, view):
        self.log.append(("packed", self.stream, self.allocator))
        found = self.of(BitMask.from_dense(np.asarray(mask)), 0)._replace(words_by_block=5)
        self.log.pop()
        return found, asarray(np.zeros(np.prod(view.shape[:-2]), np.int32))


@pytest.fixture
def machine(monkeypatch):
    """A device without CuPy; the modules that use it are imported anew, and forgotten."""
    found = Machine()
    cupy, lists = ModuleType("cupy"), ModuleType(MODULES[1])
    cupy.__dict__.update(found.cupy())
    cuda = ModuleType("cupy.cuda")
    cuda.__dict__.update(vars(cupy.cuda))
    DeviceMask.of = staticmethod(found.of)
    lists.DeviceMask, lists.pack = DeviceMask, found.pack
    lists.to_host = lambda x: BlockLists(*(array.get() for array in x[:5]))
    for name, module in (("cupy", cupy), ("cupy.cuda", cuda)):
        monkeypatch.setitem(sys.modules, name, module)
    with imports.anew(MODULES):
        sys.modules[MODULES[1]] = lists
        module = importlib.import_module(MODULES[-1])
        found.of_graph = sys.modules["fa_cupy.gpu.workspace"].of_graph
        monkeypatch.setattr(module, "multiprocessors", lambda device: 4)
        found.CallMask, found.host_lists = module.CallMask, module.host_lists
        found.malloc, found.module, found.host = module.malloc, cupy, module
        monkeypatch.setattr(module, "any_mode", lambda: found.changed(relaxed=True))
        yield found


def dense(*batch, seed=0):
    return np.random.default_rng(seed).random((*batch, 300, 400)) < 0.5


def call_of(machine, mask, **options):
    x = np.empty((2, 3, 400, 8), np.float16)
    problem = attention_problem.attention_problem(x[:, :, :300], x, x, None, mask, **options)
    return machine.CallMask(problem, 0)


def at(pointer, like):
    """What lies at an address that a launch is told."""
    kind = np.ctypeslib.as_ctypes_type(like.dtype)
    return np.ctypeslib.as_array((kind * like.size).from_address(pointer)).reshape(like.shape)


def on_device(mask):
    """The same mask as one that was made on the device."""
    return BitMask._on_device(
        mask._grid, BlockLists(*map(asarray, mask._store.with_words()[:5])), mask.entries
    )


@pytest.mark.parametrize("capturing", [False, True])
def test_lists_are_sent_once_and_readable_on_any_stream(machine, capturing):
    mask = BitMask.from_dense(dense(3))
    call = call_of(machine, mask)
    with machine.changed(capturing=capturing):
        told, kept = call(mask)
    # Apart from the caller's stream and the pool, and waited for.
    (_, stream, allocator), *_ = sends = [x for x in machine.log if x[0] == "sent"]
    assert len(sends) == 1
    assert stream != 7
    assert callable(allocator)
    assert ("synchronize", stream) in machine.log
    assert machine.log[-1][0] == "synchronize"
    assert not machine.events
    for name in ("partial", "words", "full_begin", "partial_begin"):
        want = getattr(mask._store.with_words(), name)
        assert (at(getattr(told, name), want) == want).all()
    assert at(told.partial_end, mask._store.with_words().partial_begin[1:]).tolist() == [
        4,
        8,
        12,
        16,
        20,
        24,
        28,
        32,
        36,
    ]
    assert at(told.matrix_of_entry, np.zeros(6, np.int32)).tolist() == [0, 1, 2, 0, 1, 2]
    order = at(told.order, np.zeros(18, np.int32))
    assert sorted(order.tolist()) == list(range(18))
    assert told.words_by_block == 0
    machine.log.clear()
    assert call(mask) == (told, kept)
    assert call_of(machine, mask)(mask)[0] == told  # another plan of the same kind of call
    assert not machine.log


def test_calls_of_other_kinds_share_the_lists_only(machine):
    mask = BitMask.from_dense(dense(3))
    plain, _ = call_of(machine, mask)(mask)
    causal, _ = call_of(machine, mask, is_causal=True, causal_align="top_left")(mask)
    assert causal.words == plain.words
    assert causal.order != plain.order
    batched = mask[None, [2, 2, 0]]
    told, _ = call_of(machine, batched)(batched)
    assert at(told.matrix_of_entry, np.zeros(6, np.int32)).tolist() == [2, 2, 0] * 2


@pytest.mark.parametrize("stream", [7, 8])
def test_lists_on_the_device_are_sorted_there(machine, stream):
    mask = BitMask.from_dense(dense(3))
    want, _ = call_of(machine, mask)(mask)
    found = on_device(mask)
    machine.log.clear()
    call = call_of(machine, found)
    told, _ = call(found)
    # What the mask may drop goes back when no stream reads it any more.
    assert machine.log == [("sent", 7, "pool"), ("allocated", 7, machine.malloc)]
    assert (at(told.order, np.zeros(18, np.int32)) == at(want.order, np.zeros(18, np.int32))).all()
    (event,) = machine.events
    assert event.stream == 7
    with machine.changed(stream=stream):
        assert call(found)[0] == told
    # The stream that made it need not wait, any other must as long as it is not known to be there.
    assert machine.log[2:] == (["wait for event"] if stream == 8 else [])
    event.happened = True
    with machine.changed(stream=9):
        assert call(found)[0] == told
    assert call(found)[1].made is None


def test_the_stream_of_each_thread_is_another(machine):
    """cudaStreamPerThread has one name in all threads."""
    mask = on_device(BitMask.from_dense(dense(3)))
    call = call_of(machine, mask)
    with machine.changed(stream=2):
        call(mask)
        call(mask)
    assert machine.log[-1] == "wait for event"


@pytest.mark.parametrize("capturing", [False, True])
def test_a_mask_combined_on_the_cpu_is_sent_as_one_of_the_cpu(machine, capturing):
    """It belongs to the device, but nothing of it is there yet."""
    a, b = (BitMask.from_dense(dense(3, seed=seed)) for seed in range(2))
    mask = on_device(a) & b
    assert mask._store.device == 0
    plain = a & b
    want, _ = call_of(machine, plain)(plain)
    machine.log.clear()
    with machine.changed(capturing=capturing):
        told, _ = call_of(machine, mask)(mask)
    ((_, stream, allocator),) = [x for x in machine.log if x[0] == "sent"]
    assert stream != 7
    assert callable(allocator)
    assert not machine.events
    like = np.zeros(18, np.int32)
    assert (at(told.order, like) == at(want.order, like)).all()


@pytest.mark.parametrize("status", [2, 1, 900])
def test_memory_of_the_pool_makes_room(machine, status):
    freed = []

    def memory(size):
        if not freed:
            raise CUDARuntimeError(status)
        return size

    machine.module.cuda.Memory, machine.module.cuda.MemoryPointer = memory, lambda x, at: (x, at)
    pool = SimpleNamespace(free_all_blocks=lambda: freed.append(1))
    machine.module.get_default_memory_pool = lambda: pool
    if status == 2:  # cudaErrorMemoryAllocation
        assert machine.malloc(100) == (100, 0)
    elif status == 900:  # cudaErrorStreamCaptureUnsupported
        with pytest.raises(NotImplementedError, match=r"BitMask: .* want a call before the"):
            machine.malloc(100)
    else:
        with pytest.raises(CUDARuntimeError):
            machine.malloc(100)
    assert len(freed) == (status == 2)


def test_nothing_is_sorted_on_a_captured_stream(machine):
    mask = on_device(BitMask.from_dense(dense(3)))
    call = call_of(machine, mask)
    with machine.changed(capturing=True):
        told, kept = call(mask)
        assert machine.log[-1][0] == "synchronize"
        machine.log.clear()
        again, same = call(mask)
    assert not machine.log
    assert told.order == 0
    assert told.matrix_of_entry
    assert (again, same) == (told, kept)  # so that the graph's memory stays where it is
    assert not machine.events
    later, _ = call(mask)
    assert later.order
    with machine.changed(capturing=True):
        assert call(mask)[0] == later


@pytest.mark.parametrize("capturing", [False, True])
def test_an_array_is_packed_by_every_call(machine, capturing):
    mask = asarray(dense(3))
    call = call_of(machine, mask)
    with machine.changed(capturing=capturing):
        told, _owners = call(mask)
        call(mask)
    where = machine.of_graph if capturing else "pool"
    assert machine.log == [("packed", 7, where)] * 2
    assert (told.order, told.words_by_block) == (0, 5)


def test_lists_come_back_to_the_host_once(machine, monkeypatch):
    mask = on_device(BitMask.from_dense(dense(3)))
    fetched = []
    monkeypatch.setattr(Array, "get", lambda self: fetched.append(self) or np.array(self))
    lists = machine.host_lists(mask)
    assert [type(x) for x in lists] == [np.ndarray] * 7
    assert sum(x.nbytes for x in fetched) < mask.lists.words.nbytes
    count = len(fetched)
    assert machine.host_lists(mask) is lists
    assert len(fetched) == count
    partial, places, full = lists.row(4, 1, 3)
    assert partial.tolist() == [1, 2]
    assert places.tolist() == [17, 18]
    assert full.tolist() == []


@pytest.mark.parametrize("there", [False, True])
def test_a_kind_of_call_has_one_memory(machine, there):
    mask = BitMask.from_dense(dense(3))
    mask = on_device(mask) if there else mask
    told, kept = call_of(machine, mask)(mask)
    _, memory = kept.found
    assert memory.dtype == np.int32
    assert len(memory) == 6 + 18
    assert told.matrix_of_entry == memory.ctypes.data
    assert told.order == told.matrix_of_entry + 4 * 6


def bands(machine, mask, count, start=0):
    """Calls of as many kinds."""
    windows = [(start + i, 0) for i in range(count)]
    return [call_of(machine, mask, window=w, causal_align="top_left") for w in windows]


def kinds(machine, mask):
    return [x for x in mask._kept.values() if isinstance(x, machine.host.Kept)]


@pytest.mark.parametrize("there", [False, True])
def test_kinds_of_calls_that_pass_are_dropped(machine, monkeypatch, there):
    monkeypatch.setattr(machine.host, "_MOST_STAYING", 3)
    monkeypatch.setattr(machine.host, "_MOST_PASSING", 4)
    mask = BitMask.from_dense(dense(3))
    mask = on_device(mask) if there else mask
    calls = bands(machine, mask, 30)
    first = [call(mask) for call in calls[:3]]
    for call in calls:
        told, kept = call(mask)
        assert call(mask) == (told, kept)
        assert len(kinds(machine, mask)) <= 3 + 4
    machine.log.clear()
    assert [call(mask) for call in calls[:3]] == first  # these stay
    assert not [x for x in machine.log if x != "wait for event"]
    order = at(calls[5](mask)[0].order, np.zeros(18, np.int32))  # made again
    assert sorted(order.tolist()) == list(range(18))


@pytest.mark.parametrize("there", [False, True])
def test_what_graphs_point_to_stays(machine, monkeypatch, there):
    monkeypatch.setattr(machine.host, "_MOST_STAYING", 1)
    monkeypatch.setattr(machine.host, "_MOST_PASSING", 2)
    mask = BitMask.from_dense(dense(3))
    mask = on_device(mask) if there else mask
    calls = bands(machine, mask, 12)
    calls[0](mask)
    held = calls[1](mask)
    with machine.changed(capturing=True):
        assert calls[1](mask) == held  # made before, and in a graph now
        fresh = [call(mask) for call in calls[2:6]]  # nothing is dropped meanwhile
        assert [call(mask) for call in calls[2:6]] == fresh
    for call in bands(machine, mask, 12, start=50):
        call(mask)
    assert len(kinds(machine, mask)) <= 1 + 1 + 4 + 2
    with machine.changed(capturing=True):
        assert calls[1](mask) == held
        assert [call(mask) for call in calls[2:6]] == fresh


def test_what_is_dropped_while_a_graph_takes_it_is_kept(machine):
    """Between the look-up and the mark another thread may drop it, or make it anew."""
    mask = BitMask.from_dense(dense(3))
    call = call_of(machine, mask)
    _, kept = call(mask)
    kept.passing = True
    stay, key = machine.host.stay, call._key
    del mask._kept[key]
    assert stay(mask, key, kept) is kept
    assert mask._kept[key] is kept
    assert not kept.passing
    del mask._kept[key]
    _, other = call(mask)
    assert stay(mask, key, kept) is other
