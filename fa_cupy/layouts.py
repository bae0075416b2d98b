"""Layouts of tensor-core accumulators, and of the mask bits that belong to them.

The result of a tensor-core product is in the registers of many threads. Both instructions that the
kernels use, ``wgmma`` with 64 rows and ``mma`` with 16, have the same layout [1]_: a warp owns 16
rows, and register ``4*v + 2*i + j`` of its thread ``lane`` is the element ::

    row     16*warp + lane//4 + 8*i       i = 0, 1
    column  8*v + 2*(lane % 4) + j        j = 0, 1

So a thread has two neighbouring columns of every 8, in two rows with a distance of 8.

A block of a mask is 128 x 128 bits in 512 words of 32 bits, in one of two orders:

``row_major``
    ``words[row, word]``: bit b of word w is column ``32*w + b``, the order of most tools.
``fragment``
    ``words[slab, lane, i]``: the row is ``16*slab + lane//4 + 8*i``, and bit b is column
    ``8*(b >> 1) + 2*(lane % 4) + (b & 1)``. The thread ``lane`` of the warp that owns the slab of
    16 rows has this element in its register ``v = b >> 1, j = b & 1``. So a thread reads one word
    for each row and 128 columns, and uses every bit of it. In row-major order it would read four
    words and use a quarter of their bits.

In fragment order **the two rows of a lane are next to each other in memory**, and then come the
lanes: ``lane % 4``, which selects the word of a row, runs faster than ``lane // 4``, which selects
the row. The two words of a lane are one 8-byte load, and the 32 loads of a warp are 256 contiguous
bytes. In device memory these are the fewest possible sectors, and in shared memory each half warp
uses every bank once. With the four words of a row first, the same bytes would take two loads of 4
bytes. A slab fits a tile of any height: with ``m64nN``, slab ``4*k + warp`` belongs to a warp of
the k-th 64 rows, with ``m16n8`` any slab to any warp. A tile of 64 columns uses one 16-bit half of
each word (the low half is columns 0 to 63), a tile of 256 columns the words of two neighbouring
blocks; see `Accumulator.mask_bit`.

`pack` and `unpack` work for NumPy and CuPy arrays.

.. [1] PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16" and "Matrix Fragments for
   mma.m16n8k16".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fa_cupy.core import checks

__all__ = ["BLOCK", "ORDERS", "SLAB", "Accumulator", "fragment_address", "mma", "pack",
           "row_major_address", "unpack", "wgmma"]  # fmt: skip

BLOCK = 128  # rows and columns of a block
SLAB = 16  # rows that a warp owns
WORD_BITS = 32
# Shapes of a block's words.
ORDERS = {
    "row_major": (BLOCK, BLOCK // WORD_BITS),  # row, word
    "fragment": (BLOCK // SLAB, 32, 2),  # slab, lane, row of the lane
}
# The two bits j of one v stay neighbours in either order, so pairs of bools move, as one uint16.
# Axes of a block's pairs, rows being (slab, i, lane//4), columns (v, lane % 4), and where they go.
_PAIRS = (BLOCK // SLAB, 2, 8, BLOCK // 8, 4)
_TO_FRAGMENT = (0, 2, 4, 1, 3)
_TO_BLOCK = (0, 3, 1, 4, 2)
# Shifts, and what is kept after each, that take pairs of bits apart: eight from 16 bits to 64.
_SPREADING = tuple(
    (np.uint64(shift), np.uint64(kept))
    for shift, kept in ((24, 0xFF000000FF), (12, 0xF000F000F000F), (6, 0x303030303030303))
)


class Accumulator(NamedTuple):
    """The result of one tensor-core product, or of several next to each other.

    Parameters
    ----------
    rows : int
        A multiple of 16; there is one warp for every 16.
    cols : int
        A multiple of 8.

    Examples
    --------
    >>> from fa_cupy import layouts
    >>> tile = layouts.wgmma(128)
    >>> tile.threads, tile.registers
    (128, 64)
    >>> row, col = tile.element(37, 6)  # warp 1, lane 5, v = 1, i = 1, j = 0
    >>> int(row), int(col)
    (25, 10)
    >>> [int(x) for x in tile.holder(25, 10)]
    [37, 6]
    """

    rows: int
    cols: int

    @property
    def threads(self) -> int:
        """Number of threads that share it."""
        return 2 * self.rows

    @property
    def registers(self) -> int:
        """Number of elements of a thread."""
        return self.cols // 2

    def element(self, thread: Any, register: Any) -> tuple[Any, Any]:
        """Return the row and the column of a thread's register.

        Parameters
        ----------
        thread : int or array of int
            From 0 to ``threads - 1``; there is no check.
        register : int or array of int
            From 0 to ``registers - 1``. Arrays broadcast.

        Returns
        -------
        row, column : int or array of int64

        Raises
        ------
        TypeError
            For indices that are no integers.
        """
        thread, register = _indices("element", thread=thread, register=register)
        warp, lane = np.divmod(thread, 32)
        v, i, j = register // 4, register // 2 % 2, register % 2
        return SLAB * warp + lane // 4 + 8 * i, 8 * v + 2 * (lane % 4) + j

    def holder(self, row: Any, col: Any) -> tuple[Any, Any]:
        """Return the thread and the register of an element: the inverse of `element`.

        Parameters
        ----------
        row : int or array of int
            From 0 to ``rows - 1``; there is no check.
        col : int or array of int
            From 0 to ``cols - 1``. Arrays broadcast.

        Returns
        -------
        thread, register : int or array of int64

        Raises
        ------
        TypeError
            For indices that are no integers.
        """
        row, col = _indices("holder", row=row, col=col)
        warp, below = np.divmod(row, SLAB)
        v, across = np.divmod(col, 8)
        thread = 32 * warp + 4 * (below % 8) + across // 2
        return thread, 4 * v + 2 * (below // 8) + across % 2

    def mask_bit(self, register: Any, first_col: int = 0) -> tuple[Any, Any, Any]:
        """Return the position of the mask bit of `register` in words of fragment order.

        Parameters
        ----------
        register : int or array of int
        first_col : int, optional
            First column of the tile in the mask, a multiple of 8.

        Returns
        -------
        block : int or array of int64
            Index of the block of 128 columns.
        i : int or array of int64
            Index of the word among the lane's two words in that block.
        bit : int or array of int64
            Index of the bit in that word.

        Raises
        ------
        TypeError
            For registers that are no integers.

        Examples
        --------
        The second half of a block, for a tile of 64 columns, is in bits 16 to 31:

        >>> from fa_cupy import layouts
        >>> block, i, bit = layouts.wgmma(64).mask_bit(range(32), first_col=64)
        >>> bool((block == 0).all()), int(bit.min()), int(bit.max())
        (True, 16, 31)
        """
        (register,) = _indices("mask_bit", register=register)
        block, v = np.divmod(first_col // 8 + register // 4, BLOCK // 8)
        return block, register // 2 % 2, 2 * v + register % 2


def wgmma(n: int) -> Accumulator:
    """Return the accumulator of ``wgmma.mma_async.m64nN``, of one warpgroup.

    Parameters
    ----------
    n : int
        Columns: a multiple of 8, from 8 to 256.

    Returns
    -------
    Accumulator
        Of 64 rows and `n` columns.

    Raises
    ------
    TypeError, ValueError
        For any other `n`.
    """
    wanted = "a multiple of 8 from 8 to 256"
    return Accumulator(64, checks.whole("wgmma", "n", n, wanted, range(8, 257, 8)))


def mma(n: int = 8) -> Accumulator:
    """Return the accumulators of ``mma.m16n8`` next to each other, of one warp.

    Parameters
    ----------
    n : int, optional
        Columns of all products together, a multiple of 8. The four registers of a product follow
        those of the one before.

    Returns
    -------
    Accumulator
        Of 16 rows and `n` columns.

    Raises
    ------
    TypeError, ValueError
        For any other `n`.
    """
    wanted = "a multiple of 8 from 8 on"
    return Accumulator(SLAB, checks.whole("mma", "n", n, wanted, range(8, 2**31, 8)))


def fragment_address(row: Any, col: Any) -> tuple[Any, Any]:
    """Return where the bit of an element of a block is in fragment order.

    Parameters
    ----------
    row, col : int or array of int
        From 0 to 127; there is no check. Arrays broadcast.

    Returns
    -------
    word : int or array of int64
        Index among the 512 words of the block, in C order.
    bit : int or array of int64
        Index of the bit in that word; 0 is the lowest.

    Raises
    ------
    TypeError
        For indices that are no integers.

    Examples
    --------
    >>> from fa_cupy import layouts
    >>> [int(x) for x in layouts.fragment_address(9, 10)]  # slab 0, lane 5, its second row
    [11, 2]
    """
    row, col = _indices("fragment_address", row=row, col=col)
    lane, register = mma(BLOCK).holder(row % SLAB, col)
    _, i, bit = mma(BLOCK).mask_bit(register)
    return 64 * (row // SLAB) + 2 * lane + i, bit


def row_major_address(row: Any, col: Any) -> tuple[Any, Any]:
    """Return where the bit of an element of a block is in row-major order.

    Parameters
    ----------
    row, col : int or array of int

    Returns
    -------
    word, bit : int or array of int64
        As for `fragment_address`.

    Raises
    ------
    TypeError
        As for `fragment_address`.

    Examples
    --------
    >>> from fa_cupy import layouts
    >>> layouts.row_major_address(9, 40)
    (37, 8)
    """
    row, col = _indices("row_major_address", row=row, col=col)
    return row * (BLOCK // WORD_BITS) + col // WORD_BITS, col % WORD_BITS


def pack(bits: Any, order: str = "fragment") -> Any:
    """Pack blocks of bool into words.

    Parameters
    ----------
    bits : array of bool, shape (..., 128, 128)
    order : {"fragment", "row_major"}

    Returns
    -------
    array of uint32, shape (..., 8, 32, 2) or (..., 128, 4)

    Raises
    ------
    TypeError, ValueError
        For another dtype, shape or order.

    Examples
    --------
    >>> import numpy as np
    >>> from fa_cupy import layouts
    >>> bits = np.zeros((128, 128), bool)
    >>> bits[9, 10] = True
    >>> words = layouts.pack(bits)
    >>> words.shape, int(words[0, 5, 1])
    ((8, 32, 2), 4)
    """
    shape = _shape("pack", order)
    checks.array_of("pack", "bits", bits, "bool")
    if bits.shape[-2:] != (BLOCK, BLOCK):
        raise ValueError(f"pack: bits has shape {bits.shape}, want (..., {BLOCK}, {BLOCK})")
    batch = bits.shape[:-2]
    if order == "fragment":
        bits = _moved(bits, _PAIRS, _TO_FRAGMENT)
    # Flat, since CuPy packs along no axis; a word is whole bytes.
    packed = np.packbits(bits.ravel(), bitorder="little")
    return packed.view("<u4").astype(np.uint32, copy=False).reshape(*batch, *shape)


def unpack(words: Any, order: str = "fragment") -> Any:
    """Unpack words into blocks of bool: the inverse of `pack`.

    Parameters
    ----------
    words : array of uint32, shape (..., 8, 32, 2) or (..., 128, 4)
    order : {"fragment", "row_major"}
        Of the words.

    Returns
    -------
    array of bool, shape (..., 128, 128)

    Raises
    ------
    TypeError, ValueError
        For another dtype, shape or order.

    Examples
    --------
    From one order to the other:

    >>> import numpy as np
    >>> from fa_cupy import layouts
    >>> words = np.zeros((128, 4), np.uint32)
    >>> words[9, 0] = 1 << 10
    >>> int(layouts.pack(layouts.unpack(words, "row_major"))[0, 5, 1])
    4
    """
    shape = _shape("unpack", order)
    checks.array_of("unpack", "words", words, "uint32")
    batch = words.shape[: max(0, words.ndim - len(shape))]
    if words.shape != (*batch, *shape):
        wanted = ", ".join(map(str, shape))
        raise ValueError(f"unpack: words has shape {words.shape}, want (..., {wanted})")
    flat = words.ravel().astype("<u4", copy=False).view(np.uint8)
    bits = np.unpackbits(flat, bitorder="little").view(np.bool_)
    if order == "fragment":
        bits = _moved(bits, [_PAIRS[axis] for axis in _TO_FRAGMENT], _TO_BLOCK)
    return bits.reshape(*batch, BLOCK, BLOCK)


def row_bytes(words: Any) -> Any:
    """Return rows of blocks, eight columns a byte, the first one in the lowest bit.

    Parameters
    ----------
    words : ndarray of uint32, shape (n, slabs, 32, 2)
        In fragment order; of whole blocks, or the first slabs of each.

    Returns
    -------
    ndarray of uint8, shape (n, 16 * slabs, 16)
    """
    # Four words hold a row, and bits 2*v and 2*v + 1 of word c are bits 2*c and 2*c + 1 of byte v.
    # All at once: the pairs of bits of half a word are spread over the bytes of 64 bits.
    count, slabs = words.shape[:2]
    lanes = words.reshape(count, slabs, SLAB // 2, 4, 2)
    halves = lanes.transpose(3, 0, 1, 4, 2).astype("<u4", order="C").view("<u2")
    spread = halves.reshape(4, -1).astype("<u8")
    moved = np.empty_like(spread)
    for shift, kept in _SPREADING:
        np.left_shift(spread, shift, out=moved)
        np.bitwise_or(spread, moved, out=spread)
        np.bitwise_and(spread, kept, out=spread)
    rows = spread[3]
    for word in (2, 1, 0):
        np.left_shift(rows, np.uint64(2), out=rows)
        np.bitwise_or(rows, spread[word], out=rows)
    return rows.view(np.uint8).reshape(count, slabs * SLAB, BLOCK // 8)


def _indices(name: str, **given: Any) -> list[Any]:
    """Return indices by argument: ints as they are, and arrays with dtype int64.

    Sums of int64 do not overflow where those of a narrower dtype would.

    Raises
    ------
    TypeError
        For what is neither.
    """
    found = []
    for arg, index in given.items():
        if not isinstance(index, int):
            array = index if hasattr(index, "astype") else np.asarray(index)
            is_empty = not array.size and not hasattr(index, "dtype")  # as [] is, of float64
            if array.dtype.kind not in "iu" and not is_empty:
                raise TypeError(f"{name}: {arg} has dtype {array.dtype}, want integers")
            index = array.astype(np.int64, copy=False)
        found.append(index)
    return found


def _shape(name: str, order: str) -> tuple[int, ...]:
    shape = ORDERS.get(order) if isinstance(order, str) else None
    if shape is None:
        raise ValueError(f"{name}: order is {order!r}, want 'fragment' or 'row_major'")
    return shape


def _moved(bits: Any, split: Sequence[int], axes: Sequence[int]) -> Any:
    """Return `bits` as flat bools, the pairs of each block (of shape `split`) in another order."""
    pairs = bits.ravel().view(np.uint16).reshape(-1, *split)
    moved = pairs.transpose(0, *(1 + axis for axis in axes))
    return moved.ravel().view(np.bool_)
