"""CuPy arrays of calls: which ones kernels read where they lie, copies of others, and keys."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import cupy
import numpy as np

from fa_cupy._bitmask import BitMask
from fa_cupy.core import arrays as core_arrays
from fa_cupy.core import attention_problem
from fa_cupy.gpu.masks.pair_lists import chosen
from fa_cupy.score.program import Operands

_NUMPY_TYPES = tuple(map(np.dtype, (np.float16, np.float32, np.float64)))


def require_whole_elements(where: str = "attention", /, **arrays: Any) -> None:
    """Raise for an array whose elements do not lie at multiples of their size.

    Neither these kernels nor CuPy's own can read one, not even to copy it.
    """
    for name, array in arrays.items():
        if array is None or array.size == 0:
            continue
        item = array.dtype.itemsize
        if array.data.ptr % item or any(step % item for step in array.strides):
            raise ValueError(
                f"{where}: {name} is at address {array.data.ptr:#x} with strides "
                f"{array.strides}, want multiples of its item size {item}"
            )


def kernel_takes(view: attention_problem.View, dtype: np.dtype[Any]) -> bool:
    """Whether a kernel can read q, k or v through `view`: dense rows."""
    item = dtype.itemsize
    return view.strides[-1] == item and abs(view.strides[-2] // item) < 2**31


def fits(out: Any, dtype: np.dtype[Any]) -> bool:
    """Whether a kernel can write to `out`."""
    return fits_strides(out.shape, out.strides, dtype)


def fits_strides(shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    """Whether a kernel can write to an array of these strides: dense rows."""
    dense = shape[-1] < 2 or strides[-1] == dtype.itemsize
    return dense and abs(strides[-2] // dtype.itemsize) < 2**31


def packed(view: attention_problem.View, item: int) -> attention_problem.View:
    """Return the view of a copy of what `view` sees of q, k or v, in a form that kernels take.

    Each broadcast row is copied once. An element has `item` bytes.
    """
    steps, step = [0] * len(view.shape), item
    for axis in reversed(range(len(view.shape))):
        size = view.shape[axis]
        if axis == len(view.shape) - 1 or (view.strides[axis] and size != 1):
            steps[axis] = step
            step *= max(1, size)
    return attention_problem.View(view.shape, tuple(steps))


def packed_copy(view: attention_problem.View, array: Any) -> tuple[Any, attention_problem.View]:
    """Copy what `view` sees of q, k or v, each broadcast row once, in a form that kernels take."""
    shape = [n if step else min(n, 1) for n, step in zip(view.shape, view.strides, strict=True)]
    shape[-1] = view.shape[-1]
    seen = attention_problem.View(tuple(shape), view.strides)
    copy = cupy.ascontiguousarray(attention_problem.view(cupy, array, seen))
    steps = [0 if n == 1 else step for n, step in zip(shape, copy.strides, strict=True)]
    steps[-1] = array.dtype.itemsize
    return copy, attention_problem.View(view.shape, tuple(steps))


def array_key(x: Any, device: int) -> Any:
    """Return what a plan depends on in an array; False if it is none of the device."""
    if x is None:
        return None
    if type(x) is cupy.ndarray and x.data.device_id == device:
        return x.shape, x.strides, x.dtype
    return False


def bias_key(x: Any, device: int) -> Any:
    """As `array_key` for a bias, which plans know the alignment of."""
    if x is None:
        return None
    if type(x) is cupy.ndarray and x.data.device_id == device:
        return x.shape, x.strides, x.dtype, x.data.ptr % 16 == 0
    return False


def mask_key(x: Any, device: int, dtype: Any) -> Any:
    """Return what a plan for arrays of `dtype` depends on in a mask; False if it is elsewhere."""
    if type(x) is BitMask:
        key = "pairs", dtype  # no function is called for a mask that is known
        counts = x._kept[key] if key in x._kept else chosen(x, dtype)
        return x._grid, x.entries.shape, x.entries.strides, counts
    return array_key(x, device)


class Allocation(NamedTuple):
    """A new array of a repeated call, in the form that ``cupy.ndarray`` takes fastest.

    CuPy takes NumPy's own types faster than dtypes, and an array in C order faster without strides.
    """

    nbytes: int
    shape: tuple[int, ...]
    dtype: Any
    strides: tuple[int, ...] | None


def allocation(
    shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: np.dtype[Any]
) -> Allocation:
    """Return how to make a dense array, which lies in C order if `strides` is None."""
    in_order = core_arrays.dense_strides(shape, dtype.itemsize, range(len(shape)))
    return Allocation(
        math.prod(shape) * dtype.itemsize,
        shape,
        dtype.type if dtype in _NUMPY_TYPES else dtype,
        None if strides == in_order else strides,
    )


def addresses_of(score: Operands) -> tuple[int, ...]:
    """Return the addresses of the arrays of an expression, in the order of its numbers."""
    return tuple(x.data.ptr for x in score.values if not isinstance(x, float))


class PackedCall(NamedTuple):
    """The offsets of a call that may have a plan, or the lengths of one.

    Attributes
    ----------
    key : tuple
        Of the plan.
    arrays : tuple of cupy.ndarray
        Offsets of queries and of keys, in C order; or lengths.
    """

    key: tuple[Any, ...] = ()
    arrays: tuple[Any, ...] = ()

    @classmethod
    def of(
        cls, where: str, device: int, q_offsets: Any, k_offsets: Any, *others: Any
    ) -> PackedCall | None:
        """Return it; None where the call needs more than a look.

        Parameters
        ----------
        where : str
            The public function that errors speak of.
        device : int
        q_offsets, k_offsets : object
            Not both None.
        *others : object
            Arguments that do not go with these.
        """
        arrays = (q_offsets, q_offsets if k_offsets is None else k_offsets)
        for x in arrays:
            if type(x) is not cupy.ndarray or x.data.device_id != device or x.ndim != 1:
                return None
            if not x.flags.c_contiguous:
                return None
        if any(x is not None for x in others):
            return None
        require_whole_elements(where, q_offsets=arrays[0], k_offsets=arrays[1])
        shapes = [(x.size, x.dtype) for x in arrays]
        return cls(("offsets", k_offsets is None, *shapes), arrays)

    @classmethod
    def of_gradients(
        cls, where: str, device: int, q_offsets: Any, k_offsets: Any, k_lengths: Any
    ) -> PackedCall | None:
        """Return that of a call with offsets or lengths; None where it needs more than a look."""
        if not (q_offsets is k_offsets is None):
            return cls.of(where, device, q_offsets, k_offsets, k_lengths)
        if type(k_lengths) is not cupy.ndarray or k_lengths.data.device_id != device:
            return None
        require_whole_elements(where, k_lengths=k_lengths)
        return cls(("lengths", k_lengths.shape, k_lengths.strides, k_lengths.dtype), (k_lengths,))


#: Of a call without offsets and lengths.
NOT_PACKED = PackedCall()
