"""Tensor maps: how the tensor memory accelerator of SM90 walks an array in global memory."""

from __future__ import annotations

import functools
import math

import numpy as np

# CUDA Driver API, cuTensorMapEncodeTiled: limits of what one map can describe.
_MAX_AXES = 5
_MAX_BOX = 256
_MAX_SIZE = 2**32
_ALIGNMENT = 16
_DTYPES = {"float16": ("FLOAT16", 2), "bfloat16": ("BFLOAT16", 2), "float32": ("FLOAT32", 4)}


class LayoutError(ValueError):
    """Tensor maps cannot walk an array like this."""


# Encoding takes 1.4 us, a hit a tenth of that; a training loop meets the same few pointers.
@functools.lru_cache(maxsize=1024)
def encode_tiled(
    pointer: int,
    dtype: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int = 128,
) -> np.void:
    """Describe an array that is copied to shared memory box by box.

    What a box covers beyond the array reads as zero and is not written.

    Parameters
    ----------
    pointer : int
        Device address of the first element, a multiple of 16.
    dtype : {"float16", "bfloat16", "float32"}
    shape : tuple of int
        Up to 5 axes, the contiguous one last.
    strides : tuple of int
        In bytes, as NumPy has them: the last is the item size, the others multiples of 16.
    box : tuple of int
        Elements along each axis; up to 256 of them, and along the last no more bytes than
        `swizzle`.
    swizzle : {0, 32, 64, 128}
        The 16-byte chunks of a row are permuted within this many bytes; 0 leaves them in order.

    Returns
    -------
    numpy.void
        The 128 bytes of a ``CUtensorMap``, to be a ``__grid_constant__`` parameter or the aligned
        field of one.

    Raises
    ------
    LayoutError
        If the hardware cannot walk the array like this.
    RuntimeError
        If the driver fails otherwise.
    """
    name, itemsize = _DTYPES[dtype]
    wrong = _refusal(pointer, itemsize, shape, strides, box, swizzle)
    if wrong:
        raise LayoutError(f"tensor map: {wrong}")
    from cuda.bindings import driver

    wide, narrow = driver.cuuint64_t, driver.cuuint32_t
    error, encoded = driver.cuTensorMapEncodeTiled(
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{name}"),
        len(shape),
        pointer,
        # The driver's first axis is the contiguous one, whose stride it knows.
        [wide(size) for size in reversed(shape)],
        [wide(stride) for stride in reversed(strides[:-1])],
        [narrow(size) for size in reversed(box)],
        [narrow(1)] * len(shape),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(
            driver.CUtensorMapSwizzle,
            f"CU_TENSOR_MAP_SWIZZLE_{f'{swizzle}B' if swizzle else 'NONE'}",
        ),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if error == driver.CUresult.CUDA_ERROR_INVALID_VALUE:
        raise LayoutError(f"tensor map: the driver refuses it ({error.name})")
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"tensor map: the driver fails ({error.name})")
    words = np.array([int(word) for word in encoded.opaque], np.uint64)
    return np.void(words.tobytes())


def _refusal(
    pointer: int,
    itemsize: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
) -> str | None:
    """Say what the hardware cannot do; the driver would only say "invalid value"."""
    if not 1 <= len(shape) == len(strides) == len(box) <= _MAX_AXES:
        return f"shape {shape}, strides {strides} and box {box}, want the same 1 to 5 axes"
    if pointer % _ALIGNMENT:
        return f"pointer is {pointer % _ALIGNMENT} past a multiple of 16, want a multiple of 16"
    if not all(0 < size <= _MAX_SIZE for size in shape):
        return f"shape is {shape}, want 1 to 2**32 along each axis"
    if strides[-1] != itemsize or any(stride % _ALIGNMENT for stride in strides[:-1]):
        return f"strides are {strides} bytes, want {itemsize} last and else multiples of 16"
    if not all(0 < size <= _MAX_BOX for size in box):
        return f"box is {box}, want 1 to 256 along each axis"
    row = box[-1] * itemsize
    if row % _ALIGNMENT or row > (swizzle or math.inf):
        return f"a row of the box is {row} bytes, want a multiple of 16, at most {swizzle or 'any'}"
    return None
