"""Masks on a device: the arrays that kernels read, packing on the fly, copies there and back."""

from __future__ import annotations

from typing import Any, NamedTuple

import cupy
import numpy as np
from cupy import ndarray
from cupy.cuda import alloc

from fa_cupy import layouts
from fa_cupy._bitmask import BitMask
from fa_cupy.core.attention_problem import View
from fa_cupy.gpu.driver import compile, interop
from fa_cupy.gpu.driver.launch import launch
from fa_cupy.gpu.masks import packing as params
from fa_cupy.gpu.masks.packing import Packing, packing
from fa_cupy.layouts import BLOCK
from fa_cupy.masks.blocks import WORDS, BlockLists, Grid

_FILE = "mask_pack.ptx"
_READ = 5  # lists that kernels read; the others, of sparse blocks, are empty and NumPy arrays

_ones = cupy.ReductionKernel(
    "uint32 word", "int64 count", "__popc(word)", "a + b", "count = a", "0", "fa_cupy_mask_ones"
)


class DeviceMask(NamedTuple):
    """What attention kernels read of a mask, as CuPy arrays.

    Row ``t = entry * ceil(q_len / 128) + q_tile`` lists the key tiles
    ``partial[partial_begin[t] : partial_end[t]]`` and ``full[full_begin[t] : full_end[t]]``, both
    ascending.

    Attributes
    ----------
    partial_begin, partial_end, full_begin, full_end : cupy.ndarray of int64, shape (rows,)
    partial, full : cupy.ndarray of int32
    words : cupy.ndarray of uint32
        512 a block, in fragment order.
    words_by_block : int
        If 0, the words of place i of `partial` are number i of `words`; else those of key tile c
        of row t are number ``t * words_by_block + c``.
    """

    partial_begin: Any
    partial_end: Any
    partial: Any
    words: Any
    full_begin: Any
    full_end: Any
    full: Any
    words_by_block: int

    @classmethod
    def of(cls, mask: BitMask, device: int) -> DeviceMask:
        """Return the arrays of a mask on a device, copied there when first asked for and kept.

        What copies waits for it, so that any stream may read the copy; it cannot be captured into
        a graph.
        """
        kept = mask._store.device_masks
        found: DeviceMask | None = kept.get(device)
        if found is None:
            lists = mask._store.on(device)
            ends = [begin[i:j] for begin in (lists.partial_begin, lists.full_begin)
                    for i, j in ((0, -1), (1, None))]  # fmt: skip
            found = kept[device] = cls(
                ends[0], ends[1], lists.partial, lists.words, ends[2], ends[3], lists.full, 0
            )
        return found


def pack(mask: Any, view: View) -> tuple[DeviceMask, Any]:
    """Pack a mask of bool on the current stream, without waiting for it.

    Parameters
    ----------
    mask : cupy.ndarray of bool
        On the current device.
    view : View
        Of it, (*batch, q_len, k_len). A batch axis of stride 0 is packed once, and so is a row of
        blocks that stands for all.

    Returns
    -------
    device_mask : DeviceMask
        With room for all blocks, whatever they hold, since the host does not wait for their number.
    entries : cupy.ndarray of int32
        The matrix of each batch entry, flat.
    """
    plan = packing(view, True)
    found, entries = launch_packing(mask, plan)
    if plan.shared:
        found = _repeated(found, plan, -(-view.shape[-2] // BLOCK))
    return found, entries


def launch_packing(mask: Any, plan: Packing) -> tuple[DeviceMask, Any]:
    """Pack a mask as `packing` has laid out; see `pack`."""
    blocks, rows = plan.blocks, plan.matrices * plan.q_tiles
    words, *ends, partial, full, entries, states = arrays_of(
        (blocks * params.WORDS, np.uint32),  # 2 kB each, so that what follows is aligned
        *[(rows, np.int64)] * 4,
        *[(blocks, np.int32)] * 2,
        (plan.entries, np.int32),
        (blocks, np.uint8),
    )
    pointer, device = mask.data.ptr, mask.data.device_id
    if blocks:
        struct = plan.pack.copy()
        struct["mask"], struct["words"], struct["states"] = pointer, words.data.ptr, states.data.ptr
        struct["wide"] = plan.aligned and pointer % 16 == 0
        kernel = compile.load_ptx(_FILE, "mask_pack", device)
        launch(kernel, blocks, params.PACK_THREADS, 0, struct)
    if plan.threads:
        struct = plan.lists.copy()
        arrays = (states, *ends[:2], partial, *ends[2:], full, entries)
        for name, array in zip(params.MASK_LISTS.names or (), arrays, strict=False):
            struct[name] = array.data.ptr
        kernel = compile.load_ptx(_FILE, "mask_lists", device)
        grid = -(-plan.threads // params.LISTS_THREADS)
        launch(kernel, grid, params.LISTS_THREADS, 0, struct)
    words = words.reshape(-1, *WORDS)
    by_tile = plan.k_tiles
    return DeviceMask(ends[0], ends[1], partial, words, ends[2], ends[3], full, by_tile), entries


def set_bits(words: Any, codes: Any, places: Any) -> None:
    """Set single bits of blocks.

    Parameters
    ----------
    words : cupy.ndarray of uint32, shape (n, 8, 32, 2)
    codes : cupy.ndarray of int64
        Row and column inside a block, ``128 * row + column``, in the lowest 14 bits.
    places : cupy.ndarray of int64
        The block of each bit, as an index of `words`.
    """
    struct = np.zeros(1, params.MASK_BITS)
    arrays = {"codes": codes, "places": places, "words": words}
    for name, array in arrays.items():
        struct[name] = array.data.ptr
    struct["count"] = count = len(codes)
    step = params.BITS_THREADS
    if count:
        kernel = compile.load_ptx(_FILE, "mask_bits", words.data.device_id)
        launch(kernel, -(-count // step), step, 0, struct)


def _repeated(found: DeviceMask, plan: Packing, q_tiles: int) -> DeviceMask:
    """Return a mask of one row of blocks a matrix as one whose rows of blocks all share it."""
    matrices, tiles = plan.matrices, plan.k_tiles
    place = cupy.arange(tiles)
    counts = (found.partial_end - found.partial_begin)[:, None]
    # What lies behind a list is not initialised.
    listed = cupy.where(place < counts, found.partial.reshape(matrices, tiles), 0)
    words = found.words[(listed + tiles * cupy.arange(matrices)[:, None]).reshape(-1)]
    ends = (found.partial_begin, found.partial_end, found.full_begin, found.full_end)
    a, b, c, d = (cupy.repeat(end, q_tiles) for end in ends)
    return DeviceMask(a, b, found.partial, words, c, d, found.full, 0)


def arrays_of(*wanted: tuple[int, Any]) -> list[Any]:
    """Return uninitialised arrays of (size, dtype) in one memory, each right behind the last."""
    starts = np.cumsum([0, *(n * np.dtype(dtype).itemsize for n, dtype in wanted)]).tolist()
    memory = alloc(starts[-1])
    return [
        ndarray((n,), dtype, memory + start)
        for (n, dtype), start in zip(wanted, starts[:-1], strict=True)
    ]


def to_host(lists: Any) -> BlockLists:
    """Return lists of CuPy arrays as NumPy arrays."""
    with interop.on_device(lists.words.data.device_id):
        return BlockLists(*(array.get() for array in lists[:_READ]))


def to_device(lists: BlockLists, device: int) -> BlockLists:
    """Return lists of NumPy arrays as CuPy arrays in one memory, for any stream to read.

    There are no sparse blocks among them: `fa_cupy.masks.blocks.expanded` made words of these.
    """
    assert not len(lists.entry_keys)
    with interop.on_device(device):
        stream = cupy.cuda.get_current_stream()
        names = "words", "partial_begin", "full_begin", "partial", "full"  # the widest first
        sources = [getattr(lists, name) for name in names]
        arrays = arrays_of(*((array.size, array.dtype) for array in sources))
        for array, source in zip(arrays, sources, strict=True):
            array.set(source.reshape(-1), stream)
        found = dict(zip(names, arrays, strict=True))
        stream.synchronize()
        return BlockLists(**found | {"words": found["words"].reshape(-1, *WORDS)})


def dense(grid: Grid, outline: BlockLists, entries: np.ndarray[Any, Any], device: int) -> Any:
    """Return a mask as a CuPy array of bool, shape (..., q_len, k_len).

    Parameters
    ----------
    grid : Grid
    outline : BlockLists
        With words on `device`, the rest on the CPU.
    entries : numpy.ndarray of int
    device : int
    """
    with interop.on_device(device):
        seen = cupy.empty((*entries.shape, *grid), np.bool_)
        for index in np.ndindex(entries.shape):
            blocks = outline.blocks(grid, int(entries[index]))
            tiles = cupy.zeros((grid.q_tiles * grid.k_tiles, BLOCK, BLOCK), np.bool_)
            if len(blocks.full):
                tiles[cupy.asarray(blocks.full)] = True
            if len(blocks.partial):
                tiles[cupy.asarray(blocks.partial)] = layouts.unpack(blocks.words)
            whole = tiles.reshape(grid.q_tiles, grid.k_tiles, BLOCK, BLOCK).swapaxes(1, 2)
            whole = whole.reshape(grid.q_tiles * BLOCK, grid.k_tiles * BLOCK)
            seen[index] = whole[: grid.q_len, : grid.k_len]
        return seen


def csr_on(matrix: Any, device: int) -> Any:
    """Return a SciPy CSR array as CuPy's matrix on a device."""
    from cupyx.scipy import sparse

    with interop.on_device(device):
        parts = [cupy.asarray(x) for x in (matrix.data, matrix.indices, matrix.indptr)]
        return sparse.csr_matrix(tuple(parts), shape=matrix.shape)


def count_ones(words: Any) -> int:
    """Return how many bits of a CuPy array of uint32 are set."""
    with interop.on_device(words.data.device_id):
        return int(_ones(words)) if words.size else 0
