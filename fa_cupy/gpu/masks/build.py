"""Bit masks from arrays on a device: everything that takes time happens there."""

from __future__ import annotations

import math
from typing import Any

import cupy
import numpy as np

from fa_cupy.core.attention_problem import View
from fa_cupy.gpu import workspace
from fa_cupy.gpu.masks import device_mask
from fa_cupy.gpu.masks.packing import packing
from fa_cupy.gpu.masks.pair_lists import may_be_sparse
from fa_cupy.layouts import BLOCK
from fa_cupy.masks import blocks as masks_blocks
from fa_cupy.masks import entries
from fa_cupy.masks.blocks import FULL, PARTIAL, WORDS, BlockLists, Blocks, Grid

Made = tuple[BlockLists, np.ndarray[Any, Any]]  # the lists, and the entries on the CPU

_BITS = 14  # of a code that say where in its block a bit is
_CHUNK = 1 << 14  # blocks whose words are looked at together: 32 MB

# Stored elements of one place count by their sum, in the order in which they are stored.
_sums = cupy.ElementwiseKernel(
    "int64 begin, int64 end, raw T data",
    "bool some",
    """
    T sum = T(0);
    for (long long i = begin; i < end; ++i) sum += data[i];
    some = sum != T(0);
    """,
    "fa_cupy_mask_sums",
)


def from_dense(grid: Grid, mask: Any) -> Made:
    """Pack an array of bool, shape (..., q_len, k_len)."""
    _refuse()
    plan = packing(View(mask.shape, mask.strides), False)
    found, _ = device_mask.launch_packing(mask, plan)
    lists = []
    for begin, end, tiles in (
        (found.partial_begin, found.partial_end, found.partial),
        (found.full_begin, found.full_end, found.full),
    ):
        counts = end - begin
        begins = cupy.zeros(len(counts) + 1, np.int64)
        begins[1:] = cupy.cumsum(counts)
        listed = cupy.arange(plan.k_tiles) < counts[:, None]
        lists += [begins, tiles.reshape(listed.shape)[listed], listed]
    begins, tiles, listed = lists[:3]
    if len(tiles) == plan.blocks:  # all of them, where they are
        words = found.words
    else:
        row = cupy.nonzero(listed)[0]
        words = found.words[row * plan.k_tiles + tiles]
    entries = np.arange(plan.matrices).reshape(plan.own)
    made = BlockLists(begins, tiles, words, lists[3], lists[4])
    return made, np.broadcast_to(entries, mask.shape[:-2])


def from_indices(grid: Grid, indices: Any) -> Made:
    """Let each query see the keys of its row; a negative number is none."""
    _refuse()
    batch = indices.shape[:-2]
    once = tuple(slice(1 if step == 0 else None) for step in indices.strides[: len(batch)])
    keys = indices[once]
    own = keys.shape[:-2]
    matrices = math.prod(own)
    keys = keys.reshape(matrices, *indices.shape[-2:]).astype(np.int64)
    rows = cupy.arange(grid.q_len)[:, None]
    codes = _codes(grid, cupy.arange(matrices)[:, None, None], rows, keys)
    codes = codes[keys >= 0] if indices.dtype.kind == "i" else codes.reshape(-1)
    made = _of_codes(grid, matrices, cupy.sort(codes))
    return made, np.broadcast_to(np.arange(matrices).reshape(own), batch)


def from_csr(grid: Grid, matrices: list[Any]) -> BlockLists | list[Blocks]:
    """Let queries see keys as sparse matrices of CuPy, in CSR form and checked, have elements.

    Where blocks have few of them, as in a graph, no words are made: the elements come to the CPU,
    and what is returned are the blocks of each matrix there.
    """
    parts, values = [], []
    for i, csr in enumerate(matrices):
        stored = cupy.arange(len(csr.indices))
        rows = cupy.searchsorted(csr.indptr.astype(np.int64), stored, side="right") - 1
        parts.append(_codes(grid, i, rows, csr.indices.astype(np.int64)))
        values.append(csr.data)
    codes = cupy.concatenate(parts)
    data = cupy.concatenate(values)
    order = cupy.argsort(codes)  # stable: elements of one place stay in their order
    codes, data = codes[order], data[order]
    first = _first(codes)
    begin = cupy.flatnonzero(first)
    if len(begin) == len(codes):
        seen = data != 0
    else:
        end = cupy.concatenate([begin[1:], cupy.full(1, len(codes), np.int64)])
        seen = _sums(begin, end, data)
    codes = codes[begin[seen]]
    if may_be_sparse(len(codes), int(_first(codes >> _BITS).sum())):
        return _on_host(grid, len(matrices), codes.get())
    return _of_codes(grid, len(matrices), codes)


def _on_host(grid: Grid, matrices: int, codes: Any) -> list[Blocks]:
    """Return the blocks of matrices with single bits, from codes on the CPU."""
    matrix, block = np.divmod(codes >> _BITS, grid.q_tiles * grid.k_tiles)
    q_tile, k_tile = np.divmod(block, grid.k_tiles)
    inside = codes & ((1 << _BITS) - 1)
    rows, keys = BLOCK * q_tile + inside // BLOCK, BLOCK * k_tile + inside % BLOCK
    pairs = entries.encoded(rows, keys)
    ends = np.searchsorted(matrix, np.arange(matrices + 1))
    return [
        masks_blocks.of_entries(grid, np.sort(pairs[ends[i] : ends[i + 1]]))
        for i in range(matrices)
    ]


def from_blocks(grid: Grid, states: Any, words: Any) -> Made:
    """Show and hide whole blocks; `states` is of bool or checked, `words` as many as partial."""
    _refuse()
    batch = states.shape[:-2]
    states = states.reshape(-1)
    whole = states.dtype == np.bool_
    full = cupy.flatnonzero(states if whole else states == FULL)
    partial = full[:0] if whole else cupy.flatnonzero(states == PARTIAL)
    matrices = math.prod(batch)
    own = cupy.empty((0, *WORDS), np.uint32) if words is None else words.copy()
    made = _of_blocks(grid, matrices, partial, own, full)
    return made, np.arange(matrices).reshape(batch)


def to_host(arrays: list[Any]) -> tuple[list[Any], int]:
    """Return arrays on the CPU, and their device; all but the first may be None."""
    _refuse()
    return [None if x is None else x.get() for x in arrays], int(arrays[0].data.device_id)


def check_sparse(matrix: Any) -> None:
    """Raise a ValueError unless all that a sparse matrix of CuPy points to is there."""
    _refuse()
    form, count, begins = matrix.format, len(matrix.data), None
    if form == "dia":
        wrong, indices = count != len(matrix.offsets), []
    elif form == "coo":
        wrong = not count == len(matrix.row) == len(matrix.col)
        indices = [(matrix.row, matrix.shape[0]), (matrix.col, matrix.shape[1])]
    else:
        rows, cols = matrix.shape if form == "csr" else matrix.shape[::-1]
        begins, indices = matrix.indptr, [(matrix.indices, cols)]
        wrong = len(begins) != rows + 1 or count != len(matrix.indices)
    if wrong:
        raise ValueError("the lengths of its arrays do not match its shape")
    outside = cupy.zeros((), np.bool_)
    if begins is not None:
        outside |= (begins[0] != 0) | (begins[-1] != count) | (cupy.diff(begins) < 0).any()
    for numbers, length in indices:
        if len(numbers):
            outside |= (numbers.min() < 0) | (numbers.max() >= length)
    if bool(outside):
        raise ValueError("its indices do not match its shape")


def _refuse() -> None:
    workspace.refuse("BitMask", "the host reads the number of blocks")


def _codes(grid: Grid, matrix: Any, row: Any, col: Any) -> Any:
    """Return the codes of bits: numbers of blocks, and in `_BITS` bits the place inside."""
    block = (matrix * grid.q_tiles + row // BLOCK) * grid.k_tiles + col // BLOCK
    return block << _BITS | row % BLOCK * BLOCK | col % BLOCK


def _of_codes(grid: Grid, matrices: int, codes: Any) -> BlockLists:
    """Return the lists of masks with single bits; `codes` are ascending, and may be repeated."""
    blocks = codes >> _BITS
    first = _first(blocks)
    listed = blocks[first]
    words = cupy.zeros((len(listed), *WORDS), np.uint32)
    device_mask.set_bits(words, codes, cupy.cumsum(first, dtype=np.int64) - 1)
    return _of_blocks(grid, matrices, listed, words, listed[:0])


def _first(ascending: Any) -> Any:
    """Return which elements are not the same as the one before."""
    first = cupy.ones(len(ascending), np.bool_)
    first[1:] = ascending[1:] != ascending[:-1]
    return first


def _of_blocks(grid: Grid, matrices: int, keys: Any, words: Any, full: Any) -> BlockLists:
    """Return the lists of blocks by what their words hold, which may be overwritten.

    Parameters
    ----------
    grid : Grid
    matrices : int
    keys, full : cupy.ndarray of int64
        Numbers of blocks over all matrices, ascending: those with words, and full ones.
    words : cupy.ndarray of uint32, shape (len(keys), 8, 32, 2)
    """
    whole = cupy.asarray(masks_blocks.inside_words(grid))
    states = cupy.zeros(len(keys), np.int8)
    for begin in range(0, len(keys), _CHUNK):
        part = slice(begin, begin + _CHUNK)
        q_tile, k_tile = keys[part] // grid.k_tiles % grid.q_tiles, keys[part] % grid.k_tiles
        inside = whole[(q_tile == grid.q_tiles - 1) * 2 + (k_tile == grid.k_tiles - 1)]
        words[part] &= inside
        some = (words[part] != 0).any(axis=(1, 2, 3))
        states[part] = some.astype(np.int8) + (words[part] == inside).all(axis=(1, 2, 3))
    kept = states == PARTIAL
    full = cupy.sort(cupy.concatenate([full, keys[states == FULL]]))
    if not bool(kept.all()):
        keys, words = keys[kept], words[kept]
    lists = []
    rows = cupy.arange(matrices * grid.q_tiles + 1) * grid.k_tiles
    for numbers in (keys, full):
        begin = cupy.searchsorted(numbers, rows).astype(np.int64)
        lists += [begin, (numbers % max(1, grid.k_tiles)).astype(np.int32)]
    return BlockLists(lists[0], lists[1], words, lists[2], lists[3])
