"""A mask as the kernels are told of it, from NumPy arrays."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from fa_cupy import BitMask
from fa_cupy.core import attention_problem
from fa_cupy.gpu.kernels.attention.attention_params import MaskPointers
from fa_cupy.gpu.kernels.attention.pairs.pair_rows import BY_QUERY_ARRAYS, PairCounts
from fa_cupy.gpu.kernels.mask.mask_table import TABLE_ARRAYS
from fa_cupy.gpu.masks import pair_lists
from fa_cupy.layouts import BLOCK
from fa_cupy.masks.blocks import WORDS, Grid

#: As kEmptyBlock and kFullBlock of ``cuda_src/common/block_table.cuh``.
HIDDEN, WHOLE = -1, -2


class Lists(NamedTuple):
    """What ``struct MaskLists`` points to; it lives as long as this does.

    Attributes
    ----------
    arrays : dict of numpy.ndarray
        By the names of `MaskPointers`.
    order : numpy.ndarray or None
        Of the rows of blocks of all batch entries, int32.
    words_by_block : int
    """

    arrays: dict[str, np.ndarray[Any, Any]]
    order: np.ndarray[Any, Any] | None
    words_by_block: int

    def pointers(self) -> MaskPointers:
        """Return the addresses."""
        order = 0 if self.order is None else self.order.ctypes.data
        at = {name: array.ctypes.data for name, array in self.arrays.items()}
        return MaskPointers(**at, order=order, words_by_block=self.words_by_block)


def lists_of(
    problem: attention_problem.Problem,
    mask: np.ndarray[Any, Any] | BitMask,
    order: np.ndarray[Any, Any] | None = None,
    by_tile: bool = False,
) -> Lists:
    """Return the lists of a mask.

    Parameters
    ----------
    problem : Problem
        Made with the mask.
    mask : numpy.ndarray of bool or BitMask
    order : numpy.ndarray of int32, optional
        In which the kernel takes rows of blocks, ``batch_entry * q_blocks + q_block``.
    by_tile : bool
        Whether lists and words lie as those of an array that is packed for the call: with room for
        each block, what is not used left as it was.
    """
    mask, entries = _bits(problem, mask)
    found = mask._store.with_words()  # as a device gets them
    begins = {"partial": found.partial_begin, "full": found.full_begin}
    arrays = {"partial": found.partial, "words": found.words, "full": found.full}
    for name, begin in begins.items():
        arrays |= {f"{name}_begin": begin[:-1], f"{name}_end": begin[1:]}
    grid = Grid(problem.q_len, problem.k_len)
    if by_tile:
        arrays = _with_room(arrays, grid.k_tiles)
    arrays["matrix_of_entry"] = entries.reshape(math.prod(problem.batch))
    # A kernel may rely on 16 bytes, and copies the words in that unit.
    arrays = {name: _aligned(array) for name, array in arrays.items()}
    return Lists(arrays, None if order is None else _aligned(order), by_tile * grid.k_tiles)


class Pairs(NamedTuple):
    """Lists of pairs, which live as long as this does.

    Attributes
    ----------
    arrays : tuple of numpy.ndarray
        In the order of `BY_QUERY_ARRAYS` and `BY_KEY_ARRAYS`.
    counts : PairCounts
    """

    arrays: tuple[np.ndarray[Any, Any], ...]
    counts: PairCounts

    def pointers(self, gradients: bool = False) -> tuple[int, ...]:
        """Return the addresses, of lists by keys too where gradients are computed."""
        used = self.arrays if gradients else self.arrays[: len(BY_QUERY_ARRAYS)]
        return tuple([x.ctypes.data for x in used])


def pairs_of(problem: attention_problem.Problem, mask: BitMask, piece_pairs: int) -> Pairs:
    """Return the lists of the pairs of a mask, whose rows of more than `piece_pairs` are cut."""
    found, entries = pair_lists.lists_of(mask, piece_pairs), _bits(problem, mask)[1]
    by_query, by_key = found.by_query, found.by_key
    flat = np.ascontiguousarray(entries.reshape(math.prod(problem.batch)))
    arrays = (*by_query[:3], flat, *by_key)
    return Pairs(tuple(map(_aligned, arrays)), found.counts)


class Tables(NamedTuple):
    """What ``struct MaskTable`` points to, of both tables; it lives as long as this does.

    Attributes
    ----------
    arrays : dict of numpy.ndarray
        By the names in `TABLE_ARRAYS`.
    """

    arrays: dict[str, np.ndarray[Any, Any]]

    def pointers(self) -> tuple[int, ...]:
        """Return the addresses in the order of `TABLE_ARRAYS`."""
        return tuple([self.arrays[name].ctypes.data for name in TABLE_ARRAYS])


def tables_of(problem: attention_problem.Problem, mask: np.ndarray[Any, Any] | BitMask) -> Tables:
    """Return both tables of a mask, from its states and from those of the transposed mask.

    Parameters
    ----------
    problem : Problem
        Made with the mask.
    mask : numpy.ndarray of bool or BitMask
    """
    mask, entries = _bits(problem, mask)
    matrices = (len(mask.lists.full_begin) - 1) // -(-problem.q_len // BLOCK)
    whole = BitMask._wrap(mask._grid, mask._store, np.arange(matrices))
    arrays = {
        "mask_matrix_of_entry": np.ascontiguousarray(entries.reshape(math.prod(problem.batch)))
    }
    # Words of both tables have the same places, which are not those of the transposed lists.
    (words, straight), (_, turned) = map(_placed, (whole, whole.T))
    back = np.empty(len(words), np.int64)
    back[straight[straight >= 0]] = turned.swapaxes(1, 2)[straight >= 0]
    number = np.concatenate([np.argsort(back), [WHOLE, HIDDEN]]).astype(np.int32)
    turned = number[turned]  # the last elements are those of -2 and -1
    for kind, places, of in (("by_query", straight, whole), ("by_key", turned, whole.T)):
        bits = np.packbits(places != HIDDEN, axis=-1, bitorder="little")
        room = -(-places.shape[-1] // 32) * 4 - bits.shape[-1]
        seen = np.pad(bits, ((0, 0), (0, 0), (0, room))).view(np.uint32)
        arrays |= {f"mask_{kind}_block_index": places, f"mask_{kind}_visible_bits": seen}
        arrays[f"mask_{kind}_words"] = (
            of._store.with_words().words[back] if kind == "by_key" else words
        )
    arrays["mask_by_key_prefix_counts"] = (turned != HIDDEN).cumsum(axis=1, dtype=np.int32)
    return Tables({name: _aligned(array) for name, array in arrays.items()})


def _placed(mask: BitMask) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the words of a mask, and of each block the place of its words or a state."""
    states = mask.block_states()
    partial = states == BitMask.PARTIAL
    places = np.where(states == BitMask.FULL, WHOLE, HIDDEN).astype(np.int32)
    places[partial] = np.arange(partial.sum())  # lists ascend
    return mask._store.with_words().words, places


def _bits(
    problem: attention_problem.Problem, mask: np.ndarray[Any, Any] | BitMask
) -> tuple[BitMask, np.ndarray[Any, Any]]:
    """Return a mask as a BitMask, and its matrix of each batch entry of a problem."""
    assert problem.mask is not None
    if isinstance(mask, BitMask):
        return mask, attention_problem.view(
            np, mask.entries, attention_problem.View(*(x[:-2] for x in problem.mask))
        )
    dense = attention_problem.view(np, mask, problem.mask)
    mask = BitMask.from_dense(np.ascontiguousarray(dense))
    return mask, mask.entries


def _with_room(
    arrays: dict[str, np.ndarray[Any, Any]], k_tiles: int
) -> dict[str, np.ndarray[Any, Any]]:
    rows = len(arrays["full_begin"])
    moved: dict[str, np.ndarray[Any, Any]] = {
        "words": np.full((rows * k_tiles, *WORDS), 0xEEEEEEEE, np.uint32)
    }
    for name in ("partial", "full"):
        first = np.arange(rows) * k_tiles
        begin, end = arrays[f"{name}_begin"], arrays[f"{name}_end"]
        row = np.repeat(np.arange(rows), end - begin)
        place = np.arange(len(row)) - begin[row]
        listed = np.full(rows * k_tiles, -1, np.int32)
        listed[first[row] + place] = arrays[name]
        moved |= {name: listed, f"{name}_begin": first, f"{name}_end": first + (end - begin)}
        if name == "partial":
            moved["words"][first[row] + arrays[name]] = arrays["words"]
    return moved


def _aligned(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a copy that begins at a multiple of 16 bytes, and has an address if it is empty."""
    raw = np.zeros(array.nbytes + 32, np.uint8)
    start = -raw.ctypes.data % 16
    copy = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
