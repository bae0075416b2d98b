"""Visible pairs of mask blocks that are nearly empty, kept one by one instead of as words.

A partial block takes 512 words, 2 kB, however few of its bits are 1. A block with fewer than
`LEAST_BITS` bits is *sparse*: its bits are entries of a CSR matrix, with 4 bytes for each key. Here
the entries of a matrix are one array of codes, ``row << 31 | key``, ascending: sets of pairs are
then sorted arrays of integers.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from fa_cupy import layouts
from fa_cupy.layouts import BLOCK, WORD_BITS

Array = npt.NDArray[Any]

#: Fewest bits of a partial block that is kept as words: 512 words take as much memory as 512
#: entries of 4 bytes. The CPU computes so many entries in a quarter of the time of a tile, and
#: twice as many in about the same (validation/NOTES.md, "Entries of sparse mask blocks").
LEAST_BITS = 512

_SHIFT = 31  # lengths are below 2**31
_MASK = (1 << _SHIFT) - 1
_BLOCK_BITS = 7  # BLOCK is 2**7
_MOST_SPAN = 4  # blocks from the first to the last, for each pair, up to which a table is made
_CHUNK = 1024  # blocks at a time: 2 MB of words
_WORDS = BLOCK * BLOCK // WORD_BITS  # of a block
NONE = np.empty(0, np.int64)
NONE.flags.writeable = False


def encoded(rows: Array, keys: Array) -> Array:
    """Return the codes of pairs."""
    codes: Array = rows.astype(np.int64) << _SHIFT | keys
    return codes


def united(*codes: Array) -> Array:
    """Return all pairs of several arrays, ascending and each once."""
    found = np.sort(np.concatenate(codes))  # np.unique counts by hashing, which takes longer
    first = np.ones(len(found), np.bool_)
    np.not_equal(found[1:], found[:-1], out=first[1:])
    return found if first.all() else found[first]


def decoded(codes: Array) -> tuple[Array, Array]:
    """Return rows (int64) and keys (int32)."""
    return codes >> _SHIFT, (codes & _MASK).astype(np.int32)


def tiles_of(codes: Array, k_tiles: int) -> Array:
    """Return the number of the block of each pair, ``q_tile * k_tiles + k_tile``."""
    tiles: Array = codes >> (_SHIFT + _BLOCK_BITS)
    tiles *= k_tiles
    tiles += (codes & _MASK) >> _BLOCK_BITS
    return tiles


def counted(codes: Array, k_tiles: int) -> tuple[Array, Array, Array]:
    """Return the numbers of the blocks of some pairs, where each pair's is, and their pairs.

    Blocks are ascending and each is there once; the last array counts their pairs.
    """
    tiles = tiles_of(codes, k_tiles)
    if not len(tiles):
        return tiles, tiles, tiles
    first = tiles.min()
    span = int(tiles.max() - first) + 1
    if span > _MOST_SPAN * len(tiles):
        return np.unique(tiles, return_inverse=True, return_counts=True)
    tiles -= first  # a table of all blocks from the first to the last: no sorting
    counts = np.bincount(tiles, minlength=span)
    present = counts > 0
    blocks = np.flatnonzero(present)
    return blocks + first, (np.cumsum(present) - 1)[tiles], counts[blocks]


def listed(codes: Array, k_tiles: int) -> Array:
    """Return the numbers of the blocks of some pairs, ascending and each once."""
    return counted(codes, k_tiles)[0]


def areas(lengths: tuple[int, int], k_tiles: int, blocks: Array) -> Array:
    """Return how many pairs of blocks are inside a matrix of these lengths."""
    tiles = np.divmod(blocks, max(1, k_tiles))
    rows, cols = (np.minimum(BLOCK, n - BLOCK * t) for n, t in zip(lengths, tiles, strict=True))
    sizes: Array = rows * cols
    return sizes


def in_sparse_blocks(lengths: tuple[int, int], k_tiles: int, codes: Array) -> Array:
    """Return which pairs belong to blocks that are sparse, given all pairs."""
    blocks, place, counts = counted(codes, k_tiles)
    sparse: Array = counts < np.minimum(LEAST_BITS, areas(lengths, k_tiles, blocks))
    return np.ones(len(codes), np.bool_) if sparse.all() else sparse[place]


def is_among(values: Array, ascending: Array) -> Array:
    """Return which values are elements of a sorted array."""
    if not len(ascending):
        return np.zeros(len(values), np.bool_)
    place = np.searchsorted(ascending, values)
    found: Array = ascending[np.minimum(place, len(ascending) - 1)] == values
    return found


def to_words(codes: Array, k_tiles: int) -> tuple[Array, Array]:
    """Return the numbers of the blocks of some pairs, ascending, and their words."""
    blocks, place, _ = counted(codes, k_tiles)
    words = np.zeros((len(blocks), *layouts.ORDERS["fragment"]), np.uint32)
    set_bits(words, place, codes)
    return blocks, words


def set_bits(words: Array, places: Array, codes: Array) -> None:
    """Set the bits of pairs, whose blocks have the words at `places`."""
    word, bit = _address(codes)
    word += places * (BLOCK * BLOCK // layouts.WORD_BITS)
    np.bitwise_or.at(words.reshape(-1), word, np.uint32(1) << bit.astype(np.uint32))


def bits_set(words: Array, places: Array, codes: Array) -> Array:
    """Return whether the bits of pairs are set, whose blocks have the words at `places`."""
    word, bit = _address(codes)
    word += places * (BLOCK * BLOCK // layouts.WORD_BITS)
    found: Array = words.reshape(-1)[word] >> bit.astype(np.uint32) & 1
    return found.astype(np.bool_)


def of_words(blocks: Array, words: Array, k_tiles: int) -> Array:
    """Return the pairs of blocks, ascending."""
    parts = [NONE]
    for begin in range(0, len(blocks), _CHUNK):
        flat = words[begin : begin + _CHUNK].reshape(-1)
        some = np.flatnonzero(flat)  # a few words of each block
        bits = np.unpackbits(flat[some].astype("<u4").view(np.uint8), bitorder="little")
        at = np.flatnonzero(bits)
        block, word = np.divmod(some[at // WORD_BITS], _WORDS)
        row, col = np.divmod(_elements()[WORD_BITS * word + at % WORD_BITS], BLOCK)
        q_tile, k_tile = np.divmod(blocks[begin + block], k_tiles)
        parts.append(encoded(BLOCK * q_tile + row, BLOCK * k_tile + col))
    return np.sort(np.concatenate(parts))


@functools.cache
def _elements() -> Array:
    """Return which element of a block, ``row * BLOCK + col``, each bit of its words is."""
    row, col = np.divmod(np.arange(BLOCK * BLOCK), BLOCK)
    word, bit = layouts.fragment_address(row, col)
    found = np.empty(BLOCK * BLOCK, np.int64)
    found[WORD_BITS * word + bit] = np.arange(BLOCK * BLOCK)
    return found


def transposed(codes: Array) -> Array:
    """Return the pairs with rows and keys swapped."""
    return np.sort((codes & _MASK) << _SHIFT | codes >> _SHIFT)


def _address(codes: Array) -> tuple[Array, Array]:
    row, col = (codes >> _SHIFT) % BLOCK, codes % BLOCK
    word, bit = layouts.fragment_address(row, col)
    return word, bit
