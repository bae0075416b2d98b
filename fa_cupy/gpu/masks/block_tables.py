"""Tables of masks on a device, for kernels of gradients: what they say of a block by its place.

`cuda_src/common/block_table.cuh` says what a table holds. Both tables, by blocks of queries and by
blocks of keys, are made on the device from the lists of a mask, and nothing waits for them. Those
of a `BitMask` are kept with its lists; those of an array of bool are made by every call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cupy
import numpy as np

from fa_cupy._bitmask import BitMask
from fa_cupy.core.attention_problem import Problem
from fa_cupy.gpu import workspace
from fa_cupy.gpu.driver.arguments import Arguments
from fa_cupy.gpu.driver.launch import capturing
from fa_cupy.gpu.kernels.attention.attention_params import MaskPointers
from fa_cupy.gpu.kernels.mask.block_tables import BLOCK_TABLES_PARAMS, SIDE, TABLES
from fa_cupy.gpu.kernels.mask.transpose_words import TRANSPOSE, TRANSPOSE_WORDS_PARAMS
from fa_cupy.gpu.masks.binding import CallMask, Made, apart, device_lists, malloc
from fa_cupy.gpu.masks.device_mask import DeviceMask, arrays_of
from fa_cupy.gpu.plan import Step
from fa_cupy.layouts import BLOCK
from fa_cupy.masks.blocks import Grid

_WORDS = BLOCK * BLOCK // 32  # of a block
_LINE = 32  # 32-bit words that arrays begin at multiples of: 128 bytes


class Tables(NamedTuple):
    """Both tables of a mask, as flat CuPy arrays.

    Attributes
    ----------
    by_query_block_index, by_key_block_index, by_key_prefix_counts : cupy.ndarray of int32
        Of all blocks.
    by_query_words, by_key_words : cupy.ndarray of uint32
    by_query_visible_bits, by_key_visible_bits : cupy.ndarray of uint32
        A bit for each block, rows of whole words.
    """

    by_query_block_index: Any
    by_query_words: Any
    by_query_visible_bits: Any
    by_key_block_index: Any
    by_key_words: Any
    by_key_visible_bits: Any
    by_key_prefix_counts: Any


class CallTables:
    """Says what launches of one kind of call get of a mask.

    Parameters
    ----------
    problem : Problem
        With a mask, and with a query and a key.
    device : int
    """

    __slots__ = ("_device", "_grid", "_lists")

    def __init__(self, problem: Problem, device: int) -> None:
        self._lists = CallMask(problem, device)
        self._grid = Grid(problem.q_len, problem.k_len)
        self._device = device

    def __call__(self, mask: Any) -> tuple[tuple[int, ...], Any]:
        """Return addresses, and what has to live until the launches are queued.

        Parameters
        ----------
        mask : BitMask or cupy.ndarray of bool
            Of the shape and strides that the problem says.

        Returns
        -------
        pointers : tuple of int
            In the order of `fa_cupy.gpu.kernels.mask.mask_table.TABLE_ARRAYS`.
        owners : object
        """
        told, owners = self._lists(mask)
        found: Any
        if not isinstance(mask, BitMask):
            found = kept = self._made(owners[0])
        elif (made := mask._store.device_tables.get(self._device)) is None:
            found, kept = self._of_bits(mask)
        else:
            made.wait()
            found, kept = made.found, made
        addresses = [array.data.ptr for array in found]  # in the order of `TABLE_ARRAYS`
        return (*addresses, told.matrix_of_entry), (owners, kept)

    def _of_bits(self, mask: BitMask) -> tuple[Tables, Any]:
        every, lists = mask._store.device_tables, device_lists(mask, self._device)
        if not mask._store.only_on(self._device):
            with apart() as stream:
                kept = Made(make(lists, self._grid, self._device))
                stream.synchronize()
        elif capturing():
            # The captured stream may be waiting for the lists, so that the graph makes its tables.
            found = self._made(lists)
            return found, found
        else:
            with cupy.cuda.using_allocator(malloc):
                kept = Made(make(lists, self._grid, self._device))
            kept.begin()
        kept = every.setdefault(self._device, kept)
        kept.wait()
        return kept.found, kept

    def _made(self, lists: DeviceMask) -> Tables:
        with workspace.temporaries():
            return make(lists, self._grid, self._device)


def make(lists: DeviceMask, grid: Grid, device: int) -> Tables:
    """Make both tables of a mask on the current stream, without waiting for it.

    Parameters
    ----------
    lists : DeviceMask
    grid : Grid
        The size of the mask's matrices, neither side 0.
    device : int
        The current one.
    """
    rows, columns = grid.q_tiles, grid.k_tiles
    matrices = len(lists.partial_begin) // rows
    blocks = matrices * rows * columns
    q_sides, k_sides = -(-rows // SIDE), -(-columns // SIDE)
    places = lists.words.size // _WORDS
    sizes = (blocks, blocks, blocks, matrices * rows * k_sides, matrices * columns * q_sides)
    kinds = (np.int32, np.int32, np.int32, np.uint32, np.uint32)
    padded = [-(-n // _LINE) * _LINE for n in (*sizes, places * _WORDS)]
    arrays = arrays_of(*zip(padded, (*kinds, np.uint32), strict=True))
    words = lists.words.reshape(-1)
    found = Tables(
        by_query_block_index=arrays[0], by_key_block_index=arrays[1],
        by_key_prefix_counts=arrays[2], by_query_visible_bits=arrays[3],
        by_key_visible_bits=arrays[4], by_query_words=words, by_key_words=arrays[5],
    )  # fmt: skip
    struct = np.zeros(1, BLOCK_TABLES_PARAMS)
    struct["lists"] = tuple(_pointers(lists))
    struct["by_query"], struct["by_key"] = (x.data.ptr for x in arrays[:2])
    struct["prefix_counts"] = found.by_key_prefix_counts.data.ptr
    struct["by_query_bits"], struct["by_key_bits"] = (x.data.ptr for x in arrays[3:5])
    struct["q_blocks"], struct["k_blocks"] = rows, columns
    _launch(Step(TABLES, matrices * q_sides * k_sides, struct, {}), device)
    if places:
        struct = np.zeros(1, TRANSPOSE_WORDS_PARAMS)
        struct["words"], struct["transposed"] = words.data.ptr, found.by_key_words.data.ptr
        struct["blocks"] = places
        if lists.words_by_block:  # there is room for the words of all blocks
            struct["block_index"] = found.by_query_block_index.data.ptr
        _launch(Step(TRANSPOSE, -(-places // TRANSPOSE.warps), struct, {}), device)
    return found


def _launch(step: Step, device: int) -> None:
    """Launch a step whose struct is complete."""
    (kernel,) = workspace.launcher(device).kernels([step])
    kernel(Arguments(step.params), None)


def _pointers(lists: DeviceMask) -> MaskPointers:
    arrays = {name: getattr(lists, name).data.ptr for name in lists._fields[:-1]}
    return MaskPointers(**arrays, matrix_of_entry=0, words_by_block=lists.words_by_block)
