"""As much of CuPy as the masks use, on NumPy, launching hand-written PTX in the interpreter.

Its arrays refuse NumPy arrays as operands, as CuPy's do, and answer to no more than is written
here. Of NumPy's functions they know those that `fa_cupy.layouts` calls. `on_a_device` adds a
device for whole calls of public functions: what is not Python of this project is replaced there.
"""

import contextlib
import ctypes
import operator
import sys
import threading
import weakref
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from tests.support import imports
from tests.support.ptx_interpreter import Memory
from tests.support.ptx_interpreter import Module as Interpreted

MEMORY = Memory()
_local = threading.local()  # `allocator`, where that is not `pool`
_FUNCTIONS = {np.unpackbits}
_NAMES = (
    "abs", "arange", "clip", "concatenate", "cumsum", "diff", "divmod", "empty", "exp",
    "flatnonzero", "full", "isfinite", "isneginf", "log", "maximum", "minimum", "nonzero", "ones",
    "repeat", "searchsorted", "sort", "where", "zeros", "zeros_like",
)  # fmt: skip


class Capture:
    """Whether the current stream is captured, and what was asked for while it was.

    Attributes
    ----------
    going_on : bool
    log : list
        What came from the pool, and nodes of the graph, in order: ("pool", bytes, address),
        ("malloc", bytes, address), ("free", address), and what else a test adds.
    nodes : dict
        Memory of the graph by address, which stays when it is given back.
    """

    def __init__(self):
        self.going_on, self.log, self.nodes = False, [], {}

    def malloc(self, size, stream):
        assert self.going_on
        memory = malloc(size)
        self.nodes[memory.ptr] = memory
        self.log.append(("malloc", size, memory.ptr))
        return memory.ptr

    def free(self, pointer, stream):
        assert self.going_on
        assert pointer in self.nodes
        assert ("free", pointer) not in self.log
        self.log.append(("free", pointer))

    @property
    def held(self):
        """Nodes that were not given back, by address."""
        given = {event[1] for event in self.log if event[0] == "free"}
        return self.nodes.keys() - given

    @contextlib.contextmanager
    def record(self):
        self.__init__()
        self.going_on = True
        try:
            yield self
        finally:
            self.going_on = False


CAPTURE = Capture()


def bare(x):
    if isinstance(x, (tuple, list)):
        return type(x)(map(bare, x))
    return x._array if isinstance(x, ndarray) else x


def strict(x):
    """What an operation takes: no NumPy array that has axes."""
    if isinstance(x, np.ndarray) and x.ndim:
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    return bare(x)


def owned(array):
    """A device array of its own memory, on which kernels may be launched."""
    array = np.array(array, order="C")
    if not CAPTURE.going_on:
        MEMORY.add(array, array.ctypes.data)
        return ndarray._of(array)
    found = ndarray(array.shape, array.dtype, alloc(array.nbytes))
    found._array[...] = array
    return found


class MemoryPointer:
    def __init__(self, mem, offset=0):
        self.mem, self.offset = mem, offset
        self.ptr, self.device_id = mem.array.ctypes.data + offset, 0

    def __add__(self, offset):
        return MemoryPointer(self.mem, self.offset + offset)


class ndarray:
    __array_priority__ = 100

    def __init__(self, shape, dtype=float, memptr=None, strides=None):
        self._mem = memptr.mem
        self._array = np.ndarray(shape, dtype, self._mem.array, memptr.offset, strides)

    @classmethod
    def _of(cls, array, mem=None):
        self = object.__new__(cls)
        self._array, self._mem = np.asarray(array), mem
        return self

    def __getattr__(self, name):
        if name in ("shape", "strides", "dtype", "ndim", "size", "nbytes", "itemsize", "flags"):
            return getattr(self._array, name)
        if name in ("reshape", "astype", "copy", "view", "ravel", "swapaxes", "transpose", "any",
                    "all", "min", "max", "sum"):  # fmt: skip
            method = getattr(self._array, name)

            def call(*args, **options):
                result = method(*args, **options)
                if np.shares_memory(result, self._array):
                    return ndarray._of(result, self._mem)
                return owned(result)

            return call
        if name == "T":
            return ndarray._of(self._array.T, self._mem)
        raise AttributeError(name)

    @property
    def data(self):
        pointer = self._array.__array_interface__["data"][0]
        return SimpleNamespace(ptr=pointer, device_id=0, mem=self._mem)

    def get(self):
        return self._array.copy()

    def set(self, array, stream):
        assert (array.shape, array.dtype) == (self.shape, self.dtype)
        self._array[...] = array

    def fill(self, value):
        self._array.fill(value)

    def __neg__(self):
        return owned(-self._array)

    def __len__(self):
        return len(self._array)

    def __int__(self):
        return int(self._array)

    def __bool__(self):
        return bool(self._array)

    def __getitem__(self, key):
        found = self._array[strict_key(key)]
        if np.shares_memory(found, self._array):
            return ndarray._of(found, self._mem)
        return owned(found)

    def __setitem__(self, key, value):
        self._array[strict_key(key)] = strict(value)

    def __dlpack__(self, *args, **options):
        raise BufferError("there is no device")

    def __array__(self, *args, **options):
        raise TypeError("Implicit conversion to a NumPy array is not allowed")

    def __array_function__(self, function, types, args, options):
        assert function in _FUNCTIONS, f"no {function} of NumPy on arrays of CuPy"
        return owned(function(*map(bare, args), **options))

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        assert method == "__call__"
        assert not options
        return owned(ufunc(*map(strict, inputs)))


def strict_key(key):
    return tuple(map(strict, key)) if isinstance(key, tuple) else strict(key)


def _binary(name, swapped=False):
    op = getattr(operator, name)

    def method(self, other):
        a, b = strict(self), strict(other)
        return owned(op(b, a) if swapped else op(a, b))

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and_", "or_", "lshift", "rshift"):
    _bare = _name.rstrip("_")
    setattr(ndarray, f"__{_bare}__", _binary(_name))
    setattr(ndarray, f"__r{_bare}__", _binary(_name, swapped=True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(ndarray, f"__{_name}__", _binary(_name))


def _function(name):
    def call(*args, **options):
        result = getattr(np, name)(*map(strict_list, args), **options)
        return tuple(map(owned, result)) if isinstance(result, tuple) else owned(result)

    return call


def strict_list(x):
    return [strict(part) for part in x] if isinstance(x, (list, tuple)) else strict(x)


def elementwise(*text, **options):
    """A kernel of CuPy: the sums of masks, or one whose launches are logged."""
    name = text[-1]
    if name == "fa_cupy_mask_sums":
        return sums

    def run(*args):
        CAPTURE.log.append(("launch", name, 0))
        return owned(np.ones((), np.float32)) if name == "fa_cupy_unit" else None

    return run


def sums(begin, end, data):
    """What the kernel of `fa_cupy.gpu.masks.build` does."""
    pairs = zip(begin._array, end._array, strict=True)
    return owned([bool(sum(data._array[i:j].tolist())) for i, j in pairs])


def as_strided(x, shape, strides):
    return ndarray._of(np.lib.stride_tricks.as_strided(bare(x), shape, strides), x._mem)


def empty_like(x):
    order = sorted(range(x.ndim), key=lambda axis: -abs(x.strides[axis]))
    found = ndarray([x.shape[axis] for axis in order], x.dtype, alloc(x.nbytes))
    return found.transpose([order.index(axis) for axis in range(x.ndim)])


def copyto(out, x, casting="same_kind"):
    with np.errstate(all="ignore"):
        np.copyto(bare(out), strict(x), casting=casting)


class Module:
    interprets = True  # otherwise launches are logged and compute nothing
    interpreted = None

    def load(self, image):
        if self.interprets:
            assert image.endswith(b"\0")
            self.interpreted = Interpreted(image.rstrip(b"\0").decode())

    def get_function(self, entry):
        return SimpleNamespace(ptr=(self.interpreted, entry))


def launch_kernel(function, grid, gy, gz, block, by, bz, shared, stream, arguments, extra):
    module, entry = function
    assert grid > 0
    if module is None:
        CAPTURE.log.append(("launch", entry, grid))
        return
    size = module.entries[entry].param_bytes
    struct = ctypes.c_void_p.from_address(arguments).value
    module.launch(entry, grid, block, (ctypes.c_uint8 * size).from_address(struct), MEMORY)


def get_allocator():
    return getattr(_local, "allocator", pool)


@contextlib.contextmanager
def using_allocator(allocator):
    before = get_allocator()
    _local.allocator = allocator
    try:
        yield
    finally:
        _local.allocator = before


def alloc(size):
    return get_allocator()(size)


class Owner:
    """Memory of the pool, which gets it back when no array is in it."""

    def __init__(self, array):
        self.array = array
        weakref.finalize(self, _free.setdefault(len(array), []).append, array)


_free = {}  # memory that the pool got back, by its bytes


def pool(size):
    """The default allocator. As CuPy's, it reuses memory: repeated calls get the same addresses."""
    free = _free.get(size + 512)
    if free:
        memory = free.pop()
        memory[...] = 0xAB
        found = MemoryPointer(Owner(memory), -memory.ctypes.data % 512)
    else:
        found = malloc(size)
        found.mem = Owner(found.mem.array)
    if CAPTURE.going_on:
        CAPTURE.log.append(("pool", size, found.ptr))
    return found


def malloc(size):
    memory = np.full(size + 512, 0xAB, np.uint8)
    MEMORY.add(memory, memory.ctypes.data)
    place = -memory.ctypes.data % 512  # CuPy's begin at multiples of 512
    return MemoryPointer(SimpleNamespace(array=memory), place)


class UnownedMemory:
    """What a MemoryPointer is made of, over memory that something else keeps."""

    def __init__(self, pointer, size, owner, device):
        if pointer:
            self.array = np.frombuffer((ctypes.c_uint8 * size).from_address(pointer), np.uint8)
        else:
            self.array = np.empty(0, np.uint8)
        self._owner = owner


class Stream(contextlib.nullcontext):
    ptr = 0

    def __init__(self, non_blocking=False):
        super().__init__(self)

    def synchronize(self):
        pass


class Event:
    done = True

    def __init__(self, disable_timing):
        pass

    def record(self):
        pass


class Memory:
    def __init__(self, size):
        found = malloc(size)
        self.array = found.mem.array[found.offset :]


#: Properties of the device.
H200 = {"major": 9, "minor": 0, "sharedMemPerBlockOptin": 232448, "multiProcessorCount": 132}


class CUDADriverError(Exception):
    pass


class CUDARuntimeError(Exception):
    pass


def make():
    """Return the modules by name."""
    cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    for name in _NAMES:
        setattr(cupy, name, _function(name))
    cupy.argsort = lambda x, kind="stable": owned(np.argsort(bare(x), kind=kind))
    cupy.ndarray, cupy.cuda, cupy.bool_ = ndarray, cuda, np.bool_
    cupy.asarray = lambda x: x if isinstance(x, ndarray) else owned(x)
    cupy.ascontiguousarray = lambda x: owned(bare(x))
    cupy.copyto, cupy.empty_like = copyto, empty_like
    cupy.lib = SimpleNamespace(stride_tricks=SimpleNamespace(as_strided=as_strided))
    cupy.ReductionKernel = lambda *text: (
        lambda words: int(np.unpackbits(words._array.reshape(-1).view(np.uint8)).sum())
    )
    cupy.ElementwiseKernel = elementwise
    cuda.alloc, cuda.get_current_stream = alloc, Stream
    cuda.MemoryPointer, cuda.UnownedMemory = MemoryPointer, UnownedMemory
    cuda.Stream, cuda.Event, cuda.Memory = Stream, Event, Memory
    cuda.using_allocator, cuda.get_allocator = using_allocator, get_allocator
    cuda.Device = lambda device: contextlib.nullcontext()
    cuda.function = SimpleNamespace(Module=Module)
    cuda.driver = SimpleNamespace(
        ctxGetCurrent=lambda: 1, launchKernel=launch_kernel, CUDADriverError=CUDADriverError,
        funcGetAttribute=lambda attribute, function: 0, funcSetAttribute=lambda *arguments: None,
    )  # fmt: skip
    cuda.runtime = SimpleNamespace(
        getDevice=lambda: 0, streamIsCapturing=lambda stream: CAPTURE.going_on,
        getDeviceProperties=lambda device: H200, cudaDevAttrMultiProcessorCount=16,
        deviceGetAttribute=lambda attribute, device: {16: H200["multiProcessorCount"]}[attribute],
        mallocAsync=CAPTURE.malloc, freeAsync=CAPTURE.free, CUDARuntimeError=CUDARuntimeError,
    )  # fmt: skip
    return {"cupy": cupy, "cupy.cuda": cuda}


@contextlib.contextmanager
def in_place_of_cupy():
    """Have ``fa_cupy.gpu`` import the stand-in, and forget it afterwards."""
    from fa_cupy.core import plan_cache
    from fa_cupy.gpu.driver import compile

    plans = plan_cache.plans.copy()
    plan_cache.plans.clear()
    kept = {name: sys.modules[name] for name in sys.modules if name.startswith("cupy")}
    loaded, compile._loaded = compile._loaded, {}
    CAPTURE.__init__()
    modules = make()
    try:
        with imports.anew(set(imports.loaded()) - {compile.__name__}):
            for name in kept:
                del sys.modules[name]
            sys.modules.update(modules)
            yield modules["cupy"]
    finally:
        for name in [name for name in sys.modules if name.startswith("cupy")]:
            del sys.modules[name]
        sys.modules.update(kept)
        compile._loaded = loaded
        plan_cache.plans.clear()
        plan_cache.plans.update(plans)


def encoded_map(*arguments):
    """Answer in place of ``cuTensorMapEncodeTiled``, which needs a driver."""
    from cuda.bindings.driver import CUresult

    return CUresult.CUDA_SUCCESS, SimpleNamespace(opaque=range(16))


@contextlib.contextmanager
def on_a_device(**properties):
    """Have public functions run on the stand-in, down to a driver that only logs the launches.

    Kernels count as compiled. The device is an H200, but for `properties`.
    """
    from cuda.bindings import driver

    from fa_cupy import _attention, _linear_attention
    from fa_cupy.gpu.driver import compile

    compiled = compile.Compiled(b"", "", 0.0, cached=True)
    _free.clear()
    with in_place_of_cupy() as cupy, pytest.MonkeyPatch.context() as patch:
        for name, value in properties.items():
            patch.setitem(H200, name, value)
        # By the type of arrays, which other tests share.
        patch.setattr(_attention, "_CACHED", {})
        patch.setattr(_attention, "_CACHED_BACKWARD", {})
        patch.setattr(_linear_attention, "_CACHED", {})
        patch.setattr(_linear_attention, "_CACHED_BACKWARD", {})
        patch.setattr(Module, "interprets", False)
        patch.setattr(compile, "compile_variant", lambda variant, target: compiled)
        patch.setattr(driver, "cuTensorMapEncodeTiled", encoded_map)
        yield cupy
