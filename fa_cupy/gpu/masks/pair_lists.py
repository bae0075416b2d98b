"""The visible pairs of a mask, row by row, as the kernels read them that take pairs one by one.

Such a kernel reads a key and a value for each pair. The others compute whole blocks of 128 queries
and 128 keys, and unfold sparse blocks to words. Which of them a mask is for follows from how many
pairs its blocks have. Nothing here imports CuPy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fa_cupy._bitmask import BitMask
from fa_cupy.gpu.kernels.attention.pairs.pair_rows import PIECE_PAIRS, PairCounts
from fa_cupy.layouts import BLOCK
from fa_cupy.masks import blocks, entries
from fa_cupy.masks.blocks import BlockLists, Blocks, Grid

Array = npt.NDArray[Any]

#: Pairs up to which an average block is computed pair by pair, by the dtype of keys and values.
#:
#: In 16 bits and with a head_dim of 64, the forward product of a block takes 4 * 128 * 128 * 64
#: operations, 10.5 ns at 400 TFLOP/s. A pair takes 256 bytes, 73 ps at 3.5 TB/s from the L2 cache:
#: 143 pairs take as long. Gradients are 2.5 times as many operations and twice as many bytes: 179
#: pairs. Both grow with the dims. In float32 products of cuBLAS compute blocks, 105 ns each at 40
#: TFLOP/s, and their scores are read and written besides; a pair takes 512 bytes: 717 pairs, of
#: which half a block's words are left as a margin. Measured in 16 bits: with 445 pairs a block one
#: by one take 3.3 times as long as blocks, with 6 an eighth (validation/NOTES.md, "Pairs of sparse
#: masks on the GPU").
MOST_PAIRS = {"float16": 128, "bfloat16": 128, "float32": 512}
#: Fewer pairs than this are in a list: places are int32.
MOST = 2**31
_NO_PIECE = 2**32 - 1
_LARGEST = max(MOST_PAIRS.values())


class PairList(NamedTuple):
    """The pairs of all matrices of a mask, by queries or by keys; ``struct PairRows``.

    Attributes
    ----------
    begin : ndarray of int64, shape (matrices * rows + 1,)
        Where the pairs of each row begin.
    columns : ndarray of int32, shape (pairs,)
        Ascending in each row.
    pieces : ndarray of uint32, shape (matrices * most_pieces, 2)
        Row and number of the pieces of long rows; what a matrix has less is ``2**32 - 1``.
    places : ndarray of int32, shape (pairs,), or (0,) by queries
        The place of each pair in the list by queries.
    """

    begin: Array
    columns: Array
    pieces: Array
    places: Array = np.empty(0, np.int32)


class PairLists(NamedTuple):
    """Both lists, and how many pairs and pieces they have."""

    by_query: PairList
    by_key: PairList
    counts: PairCounts


def chosen(mask: BitMask, dtype: np.dtype[Any]) -> PairCounts | None:
    """Return the counts of a mask that is computed pair by pair; None for one by blocks.

    Parameters
    ----------
    mask : BitMask
        One that is on a device alone has words already, and is computed by blocks. What is found is
        kept with its lists.
    dtype : numpy.dtype
        Of keys and values.
    """
    key = "pairs", dtype
    try:
        found: PairCounts | None = mask._kept[key]
    except KeyError:
        found = mask._kept[key] = _chosen(mask, dtype.name)
    return found


def is_sparse(pairs: int, listed: int, dtype: str) -> bool:
    """Whether so many pairs in so many blocks are computed one by one."""
    return pairs < min(MOST, MOST_PAIRS[dtype] * listed)


def may_be_sparse(pairs: int, listed: int) -> bool:
    """Whether they are so in some dtype."""
    return pairs < min(MOST, _LARGEST * listed)


def _chosen(mask: BitMask, dtype: str) -> PairCounts | None:
    store = mask._store
    if store.on_device_only or dtype not in MOST_PAIRS or not len(store.host().entry_keys):
        return None  # it has no sparse block
    pairs, listed = _sizes(mask)
    return lists_of(mask).counts if is_sparse(pairs, listed, dtype) else None


def _sizes(mask: BitMask) -> tuple[int, int]:
    """Return how many pairs and blocks that are not empty the matrices of a mask have.

    Where they are too many in any case, pairs of blocks with words are not counted.
    """
    found: tuple[int, int] | None = mask._store.pairs.get("sizes")
    if found is None:
        grid, lists = mask._grid, mask._store.host()
        matrices = [lists.blocks(grid, i) for i in range(_matrices(grid, lists))]
        ends = grid.q_tiles + grid.k_tiles  # blocks there may have words for fewer pairs
        pairs = listed = 0
        for x in matrices:
            listed += len(x.partial) + len(x.full) + len(entries.listed(x.entries, grid.k_tiles))
            pairs += len(x.entries) + entries.LEAST_BITS * max(0, len(x.partial) - ends)
        if may_be_sparse(pairs, listed):
            pairs = sum(blocks.bit_count(grid, x) for x in matrices)
        found = mask._store.pairs["sizes"] = pairs, listed
    return found


def pairs_of(mask: BitMask) -> int:
    """Return how many pairs the matrices of a mask have; no list of them is made."""
    found: int | None = mask._store.pairs.get("count")
    if found is None:
        grid, lists = mask._grid, mask._store.host()
        matrices = [lists.blocks(grid, i) for i in range(_matrices(grid, lists))]
        found = sum(blocks.bit_count(grid, x) for x in matrices)
        mask._store.pairs["count"] = found
    return found


def lists_of(mask: BitMask, piece_pairs: int = PIECE_PAIRS) -> PairLists:
    """Return the lists of a mask, which are made when they are first asked for and kept.

    Parameters
    ----------
    mask : BitMask
    piece_pairs : int, optional
        Pairs of a piece; rows with more are long.
    """
    key = "lists", piece_pairs
    found: PairLists | None = mask._store.pairs.get(key)
    if found is None:
        made = _make(mask._grid, mask._store.host(), piece_pairs)
        found = mask._store.pairs.setdefault(key, made)
    return found


def _make(grid: Grid, lists: BlockLists, piece_pairs: int) -> PairLists:
    from scipy import sparse

    begins: tuple[list[Array], list[Array]] = ([], [])
    columns: tuple[list[Array], list[Array]] = ([], [])
    places, base = [np.empty(0, np.int32)], 0
    for number in range(_matrices(grid, lists)):
        rows, keys = entries.decoded(_codes(grid, lists.blocks(grid, number)))
        own = np.arange(base, base + len(keys), dtype=np.int64)
        begin = np.zeros(grid.q_len + 1, np.int64)
        np.cumsum(np.bincount(rows, minlength=grid.q_len), out=begin[1:])
        turned = sparse.csr_array((own, keys, begin), shape=grid).tocsc()
        for side, ends, others in ((0, begin, keys), (1, turned.indptr, turned.indices)):
            begins[side].append(base + ends[:-1].astype(np.int64))
            columns[side].append(others.astype(np.int32, copy=False))
        places.append(turned.data.astype(np.int32))
        base += len(keys)
    sides = []
    for side, rows_of in enumerate(grid):
        begin = np.concatenate([*begins[side], np.full(1, base, np.int64)])
        pieces = _pieces(begin, rows_of, piece_pairs)
        found = np.concatenate([np.empty(0, np.int32), *columns[side]])
        sides.append(PairList(begin, found, pieces.reshape(-1, 2)))
    most = [len(x.pieces) // _matrices(grid, lists) for x in sides]
    by_key = sides[1]._replace(places=np.concatenate(places))
    return PairLists(sides[0], by_key, PairCounts(base, most[0], most[1], piece_pairs))


def _codes(grid: Grid, matrix: Blocks) -> Array:
    """Return all pairs of a matrix, ascending."""
    parts = [matrix.entries]
    if len(matrix.partial):
        parts.append(entries.of_words(matrix.partial, matrix.words, grid.k_tiles))
    for block in matrix.full.tolist():
        q_tile, k_tile = divmod(block, grid.k_tiles)
        rows, keys = (
            np.arange(BLOCK * t, min(BLOCK * (t + 1), n))
            for t, n in zip((q_tile, k_tile), grid, strict=True)
        )
        parts.append(entries.encoded(rows[:, None], keys).reshape(-1))
    return np.sort(np.concatenate(parts)) if len(parts) > 1 else matrix.entries


def _pieces(begin: Array, rows: int, piece_pairs: int) -> Array:
    """Return the pieces of long rows, shape (matrices, most, 2)."""
    lengths = np.diff(begin).reshape(-1, rows)
    counts = np.where(lengths > piece_pairs, -(-lengths // piece_pairs), 0)
    of_matrix = counts.sum(axis=1)
    found = np.full((len(counts), int(of_matrix.max(initial=0)), 2), _NO_PIECE, np.uint32)
    for matrix, total in enumerate(of_matrix.tolist()):
        long = np.flatnonzero(counts[matrix])
        repeats = counts[matrix, long]
        first = np.repeat(np.cumsum(repeats) - repeats, repeats)
        found[matrix, :total, 0] = np.repeat(long, repeats)
        found[matrix, :total, 1] = np.arange(total) - first
    return found


def _matrices(grid: Grid, lists: BlockLists) -> int:
    return (len(lists.full_begin) - 1) // max(1, grid.q_tiles)
