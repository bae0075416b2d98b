"""Array kinds: what comes in, what the backends compute with, and the way back.

NumPy and CuPy arrays are native. Arrays of other libraries are looked at in place through DLPack
and results are handed back in the caller's kind.
"""

from __future__ import annotations

import contextlib
import math
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fa_cupy.core import backends, dlpack

_CPU, _CUDA = 1, 2
# Pinned and managed memory go to the side that reads them at full speed (dlpack.h, DLDeviceType).
_DEVICES = {1: _CPU, 3: _CPU, 2: _CUDA, 13: _CUDA}
_MAX_WORK: Any = 100_000  # candidate solutions that numpy.shares_memory may look at
_IMMUTABLE = ("jax", "jaxlib")


class Native(NamedTuple):
    """Arguments as native arrays, and what is needed to answer in the caller's kind."""

    arrays: list[Any]  # numpy.ndarray or cupy.ndarray, in the order given; None stays None
    backend: str  # "numpy" or "cupy"
    give_back: Callable[[Any], Any]  # a native result in the caller's kind
    context: contextlib.AbstractContextManager[Any]  # the caller's device and stream
    # new(shape, dtype, axis order) allocates a result where the caller's library must do that;
    # None where it is the backend's to allocate.
    new: Callable[[Sequence[int], np.dtype[Any], Sequence[int]], Any] | None = None


def to_native(name: str, *, writes: str | None = "out", **arrays: Any) -> Native:
    """Return array arguments as NumPy or CuPy arrays, without copying their data.

    Parameters
    ----------
    name : str
        The public function that errors speak of.
    writes : str or None, optional
        The argument that will be written to.
    **arrays : array or None
        Arguments by name, at least one of them an array.

    Returns
    -------
    Native

    Raises
    ------
    TypeError
        For what is not an array, for masked arrays, for arrays of two libraries, for torch tensors
        that require a gradient and for arrays that DLPack cannot carry.
    ValueError
        For arrays on two devices.
    """
    given = {arg: x for arg, x in arrays.items() if x is not None}
    places = {arg: _place(name, arg, x) for arg, x in given.items()}
    lead = next(iter(given))
    library, kind, device = places[lead]
    for arg, x in given.items():
        if places[arg][0] != library:
            raise TypeError(
                f"{name}: {arg} is a {_label(x)}, {lead} is a {_label(given[lead])}, "
                "want arrays of one library"
            )
        if places[arg] != places[lead]:
            raise ValueError(
                f"{name}: {arg} is on {_device_label(places[arg])}, "
                f"{lead} is on {_device_label(places[lead])}, want one device"
            )
    if library == "numpy":
        plain = [None if x is None else np.asarray(x) for x in arrays.values()]
        return Native(plain, "numpy", _same, contextlib.nullcontext())
    if library == "cupy":
        workspace = backends.gpu("workspace")
        context = workspace.computing(device)
        return Native(list(arrays.values()), "cupy", workspace.hand_over, context)
    if library in _IMMUTABLE and writes in given:
        raise TypeError(
            f"{name}: {writes} is a {_label(given[writes])}, which cannot be written to"
        )

    on_gpu = kind == _CUDA
    if on_gpu:
        _require_device(f"{name}: {lead} is on CUDA device {device}", device)
    native, exchange = dlpack.open_exchange(name, library, arrays, on_gpu, writes)
    backend = "cupy" if on_gpu else "numpy"
    new = exchange.new if on_gpu else None
    return Native(native, backend, exchange.give_back, exchange.context(), new)


def empty_like_layout(xp: Any, problem: Any, q: Any, dtype: np.dtype[Any]) -> Any:
    """Return an uninitialised dense array for the output of `problem`, laid out as `q` is.

    Parameters
    ----------
    xp : module
        `numpy` or `cupy`.
    problem : Problem
        The array gets the shape ``problem.out_shape``.
    q : array
        The user's queries; see `memory_order`.
    dtype : numpy.dtype
    """
    return empty_laid_out(xp, problem.out_shape, q, dtype)


def empty_laid_out(xp: Any, shape: Sequence[int], like: Any, dtype: np.dtype[Any]) -> Any:
    """Return an uninitialised dense array of `shape`, laid out as `like` is; see `memory_order`."""
    order = memory_order(shape, like)
    memory = xp.empty([shape[axis] for axis in order], dtype)
    return memory.transpose([order.index(axis) for axis in range(len(order))])


def word_of(x: Any, most: int) -> int:
    """Return the bytes, `most` or a part of it, of the words that rows of a CuPy array consist of.

    That is one element where elements do not follow each other, and for an array of none.
    """
    if x.ndim == 0 or x.size == 0 or x.strides[-1] != x.itemsize:
        return int(x.itemsize)
    steps = [step for step, n in zip(x.strides[:-1], x.shape[:-1], strict=True) if n > 1]
    return math.gcd(most, x.data.ptr, x.shape[-1] * x.itemsize, *steps)


def memory_order(shape: Sequence[int], like: Any) -> list[int]:
    """Return the axes of a result of `shape`, outermost first, in the order of `like`'s strides.

    The last axes of both correspond. Axes that `like` lacks or repeats become the outermost. Of an
    axis of size 1 the stride is any number: where it is none that a kernel could take, the axis
    comes after its neighbour, as in C order.
    """
    missing = len(shape) - like.ndim
    most = like.dtype.itemsize * 2**31
    strides: dict[int, tuple[float, bool]] = {}
    for axis, size in enumerate(shape):
        stride = abs(like.strides[axis - missing]) if axis >= missing else 0
        # The last axis is no batch axis: a single column is not one that is repeated.
        single = axis >= missing and (size == 1 or axis == len(shape) - 1)
        if single and like.shape[axis - missing] == 1:
            if 0 < stride < most:
                strides[axis] = stride, False
        else:
            repeated = stride == 0 or like.shape[axis - missing] == 1
            strides[axis] = np.inf if repeated else stride, True
    # Of two axes of one stride the single one is the inner. Stable: others stay in C order.
    order = sorted(strides, key=strides.__getitem__, reverse=True)
    for axis in range(len(shape)):
        if axis not in strides:
            order.insert(order.index(axis - 1) + 1 if axis else 0, axis)
    return order


def dense_strides(shape: Sequence[int], itemsize: int, order: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense array whose axes lie in `order`, outermost first."""
    strides, step = [0] * len(shape), itemsize
    for axis in reversed(order):
        strides[axis] = step
        step *= max(1, shape[axis])
    return tuple(strides)


class Laid(NamedTuple):
    """How an array lies in memory, in place of the array."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def dense(
        cls, shape: tuple[int, ...], dtype: np.dtype[Any], order: Sequence[int] | None = None
    ) -> Laid:
        """Return one whose axes lie in `order`, outermost first; C order by default."""
        order = range(len(shape)) if order is None else order
        return cls(shape, dense_strides(shape, dtype.itemsize, order), dtype)

    @property
    def ndim(self) -> int:
        """Axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Of a dense array."""
        return math.prod(self.shape) * self.dtype.itemsize


def overlap(a: Any, b: Any) -> bool:
    """Return whether two native arrays share an element (or may, where that is hard to tell)."""
    if a.size == 0 or b.size == 0:
        return False
    try:
        return np.shares_memory(_twin(a), _twin(b), max_work=_MAX_WORK)
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(array: Any) -> bool:
    """Return whether two elements of `array` may lie at one address.

    An array passes when every axis steps over all that the axes with smaller strides span, which
    is so for every view that slicing and transposing give.
    """
    if array.size == 0:
        return False
    span = array.dtype.itemsize
    for stride, n in sorted((abs(s), n) for n, s in zip(array.shape, array.strides, strict=True)):
        if n > 1:
            if stride < span:
                return True
            span += stride * (n - 1)
    return False


def _twin(array: Any) -> np.ndarray[Any, Any]:
    """Return a NumPy array with the addresses of `array`, which may be device memory: never read.

    This lets NumPy solve the overlap problem for CuPy arrays too; CuPy's own solution lists all
    addresses on the device.
    """
    if isinstance(array, np.ndarray):
        return array
    return np.asarray(_Addresses(array))


class _Addresses:
    def __init__(self, array: Any) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"|V{array.dtype.itemsize}",
            "data": (array.data.ptr, True),
        }


def _place(name: str, arg: str, x: Any) -> tuple[str, int, int]:
    """Return (library, DLPack device type, device number) of an array argument."""
    if isinstance(x, np.ndarray):
        if any(base.__name__ == "MaskedArray" for base in type(x).__mro__):
            raise TypeError(
                f"{name}: {arg} is a masked array, want a plain array (as of {arg}.filled(0))"
            )
        return "numpy", _CPU, 0
    # Whoever made a CuPy array has imported CuPy; of a broken one there is no `ndarray`.
    cupy = getattr(sys.modules.get("cupy"), "__dict__", {})
    if isinstance(x, cupy.get("ndarray", ())):
        return "cupy", _CUDA, x.data.device_id
    if not hasattr(x, "__dlpack__") or not hasattr(x, "__dlpack_device__"):
        raise TypeError(f"{name}: {arg} is a {_label(x)}, want an array")
    try:
        place = x.__dlpack_device__()
    except dlpack.NO_EXCHANGE as error:
        raise TypeError(f"{name}: {arg} is a {_label(x)} without data, want an array") from error
    try:
        kind, number = map(operator.index, place)
    except (TypeError, ValueError):
        raise TypeError(
            f"{name}: {arg} is a {_label(x)} on DLPack device {place!r}, want a pair of ints"
        ) from None
    if kind not in _DEVICES:
        raise TypeError(f"{name}: {arg} is on a device of DLPack type {kind}, want the CPU or CUDA")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return "torch", _DEVICES[kind], number  # a subclass too, wherever that is defined
    return type(x).__module__.partition(".")[0], _DEVICES[kind], number


def _require_device(where: str, device: int) -> None:
    """Raise an error that begins with `where` unless CuPy is here and sees that device."""
    cupy, why = backends.gpu("driver.devices").import_cupy()
    if cupy is None:
        raise ImportError(
            f"{where}, which needs CuPy: {backends.gpu('driver.remedies').command('CuPy')} ({why})"
        )
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise RuntimeError(f"{where}, which needs an NVIDIA driver ({error})") from error
    if device >= count:
        raise RuntimeError(f"{where}, want one of the {count} devices that CuPy finds")


def _label(x: Any) -> str:
    library = type(x).__module__.partition(".")[0]
    return type(x).__qualname__ if library == "builtins" else f"{library}.{type(x).__qualname__}"


def _device_label(place: tuple[str, int, int]) -> str:
    return "the CPU" if place[1] == _CPU else f"CUDA device {place[2]}"


def _same(native: Any) -> Any:
    return native
