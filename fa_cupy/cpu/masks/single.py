"""Masks whose matrices are single blocks: all bits of a matrix one after the other.

A mask of many such matrices is read like an array, which takes an eighth of an array of bool, and
what a call turns such an array into first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fa_cupy._bitmask import BitMask
from fa_cupy.core import attention_problem
from fa_cupy.core.attention_problem import Problem
from fa_cupy.cpu.tile_ops import PackedMatrices
from fa_cupy.masks import export

Array = npt.NDArray[Any]

_KEY = "bits of single blocks"
# Elements that are made bits at a time; and bytes that may always be kept with a mask.
_ELEMENTS, _LEAST_BYTES = 1 << 20, 1 << 16


def bits_of(mask: BitMask) -> Array | None:
    """Return the bits of a mask of single blocks; None for others, and where they are many.

    They are made at the first use, and kept with the mask.

    Returns
    -------
    ndarray of uint8, shape (..., 1, bytes)
        Broadcasts to the batch; of each matrix its rows, and bits of 0 up to a whole byte.
    """
    if not mask._grid.is_single:
        return None
    found: Array | None = mask._kept.get(_KEY)
    if found is None:
        found = _made(mask)
        if found is not None:
            mask._kept[_KEY] = found
    return found


def as_array(mask: Any) -> Any:
    """Return a `BitMask` with such bits as an array of bool of its shape, and all else as it is."""
    bits = bits_of(mask) if type(mask) is BitMask else None
    if bits is None:
        return mask
    q_len, k_len = mask._grid
    seen = np.unpackbits(bits[..., 0, :], axis=-1, count=q_len * k_len, bitorder="little")
    return np.broadcast_to(seen.view(np.bool_).reshape(*seen.shape[:-1], q_len, k_len), mask.shape)


def _made(mask: BitMask) -> Array | None:
    grid, lists = mask._grid, mask._store.host()
    numbers = mask.entries
    for axis in range(numbers.ndim):
        first = numbers[(*(slice(None),) * axis, slice(1))]
        if (numbers == first).all():
            numbers = first
    elements = grid.q_len * grid.k_len
    bits = (numbers.size, -(-elements // 8))
    # Many entries may have the same few matrices.
    if bits[0] * bits[1] > max(mask.nbytes, _LEAST_BYTES):
        return None
    found, flat = np.empty(bits, np.uint8), numbers.reshape(-1)
    step = max(1, _ELEMENTS // elements)
    for begin in range(0, len(flat), step):
        part = slice(begin, begin + step)
        seen = export.of_single(grid, lists, flat[part])
        if elements % 8:
            found[part] = np.packbits(seen.reshape(len(seen), -1), axis=1, bitorder="little")
        else:
            found[part].reshape(-1)[:] = np.packbits(seen, bitorder="little")
    found.flags.writeable = False
    return found.reshape(*numbers.shape, 1, bits[1])


def with_bits(problem: Problem, bits: Array) -> Problem:
    """Return a problem with a view of bits from `bits_of` as that of its mask."""
    return replace(problem, mask=attention_problem.batch_view(problem, bits, 1, bits.shape[-1]))


def with_array(problem: Problem, seen: Array) -> Problem:
    """Return a problem with a view of an array from `as_array` as that of its mask."""
    view = attention_problem.batch_view(problem, seen, problem.q_len, problem.k_len)
    return replace(problem, mask=view)


@dataclass(frozen=True)
class MatrixMask:
    """The mask of stacked batch entries, as `tiled.attention.Operands` have it.

    Attributes
    ----------
    bits : ndarray of uint8, shape (n, parts, bytes)
        Of parts of `height` rows each; there is one part, or `height` is 1.
    height, k_len : int
    """

    bits: Array
    height: int
    k_len: int

    def __getitem__(self, tile: Any) -> PackedMatrices:
        _, rows, keys = tile
        if self.height == 1:
            return PackedMatrices(self.bits[:, rows], 1, self.k_len, slice(None), keys)
        return PackedMatrices(self.bits, self.height, self.k_len, rows, keys)
