"""Blocks of one or more mask matrices: states, words, and the arithmetic on them.

A matrix of q_len x k_len bits is cut into blocks of 128 x 128. A block is *empty* if no bit of its
part inside the matrix is True, *full* if all of them are, and else *partial*. Blocks at the right
and lower ends of the matrix stick out of it; the bits out there are 0 and count for nothing, so the
last block of a causal row of blocks is as full as any other: readers of a full block know the
lengths.

Blocks that are not empty are listed, each list in ascending order, and partial ones bring their 512
words, in the fragment order of `fa_cupy.layouts`. Partial blocks with few bits are *sparse*: they
are not listed, their bits are kept one by one (`fa_cupy.masks.entries`). Every function here
returns tight blocks: none listed that is empty, none partial that is full or sparse, so that equal
matrices have equal lists.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fa_cupy import layouts
from fa_cupy.core import backends
from fa_cupy.layouts import BLOCK
from fa_cupy.masks import entries

Array = npt.NDArray[Any]

EMPTY, PARTIAL, FULL = 0, 1, 2
# In place of where the words of a block are: it is full or not listed. `elementwise.mask_blocks` of
# `fa_cupy.gpu.cublas` has the same numbers.
WHOLE, NOTHING = -1, -2
WORDS = layouts.ORDERS["fragment"]
CHUNK = 64  # blocks unpacked at a time: 1 MB of bools
LONGEST = 2**31  # lengths are below, so that key numbers, and those of tiles, are int32


class Grid(NamedTuple):
    """The size of a matrix, in bits and in blocks."""

    q_len: int
    k_len: int

    @property
    def q_tiles(self) -> int:
        """Rows of blocks."""
        return -(-self.q_len // BLOCK)

    @property
    def k_tiles(self) -> int:
        """Columns of blocks."""
        return -(-self.k_len // BLOCK)

    @property
    def is_small(self) -> bool:
        """Whether a matrix is a single block that is full, sparse or empty, whatever its bits."""
        one_block = max(self) <= BLOCK
        return one_block and 0 < self.q_len * self.k_len < entries.LEAST_BITS

    @property
    def is_single(self) -> bool:
        """Whether a matrix is a single block."""
        return self.q_tiles * self.k_tiles == 1

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """Yield (q_tile, begin, end) of each row of blocks, `end` within the matrix."""
        for q_tile in range(self.q_tiles):
            yield q_tile, BLOCK * q_tile, min(BLOCK * (q_tile + 1), self.q_len)

    def inside(self, keys: Array) -> Array:
        """Return words of blocks in which just the bits inside the matrix are set."""
        q_tile, k_tile = np.divmod(keys, max(1, self.k_tiles))
        kind = (q_tile == self.q_tiles - 1) * 2 + (k_tile == self.k_tiles - 1)
        words: Array = inside_words(self)[kind]
        return words


class Blocks(NamedTuple):
    """The blocks of one matrix; a block's key is ``q_tile * k_tiles + k_tile``."""

    partial: Array  # (p,) int64, ascending
    words: Array  # (p, 8, 32, 2) uint32
    full: Array  # (f,) int64, ascending
    entries: Array = entries.NONE  # (e,) int64: codes of the pairs of sparse blocks, ascending

    def find(self, keys: Array) -> tuple[Array, Array]:
        """Return the state of each block of `keys`, and where those with words are listed.

        Sparse blocks count as empty.
        """
        state = np.zeros(len(keys), np.int8)
        place = np.searchsorted(self.partial, keys)
        for listed, value in ((self.partial, PARTIAL), (self.full, FULL)):
            if len(listed):
                near = np.minimum(np.searchsorted(listed, keys), len(listed) - 1)
                state[listed[near] == keys] = value
        return state, place


class BlockLists(NamedTuple):
    """The blocks of all matrices of a mask, by rows of blocks.

    Row ``t = matrix * q_tiles + q_tile`` lists the key tiles
    ``partial[partial_begin[t] : partial_begin[t + 1]]``, whose words are those of the same places,
    and ``full[full_begin[t] : full_begin[t + 1]]``. In sparse blocks, query i of a matrix, row
    ``r = matrix * q_len + i``, sees ``entry_keys[entry_begin[r] : entry_begin[r + 1]]``. Without
    sparse blocks, as in all lists that kernels read, both arrays are empty.
    """

    partial_begin: Array  # (matrices * q_tiles + 1,) int64
    partial: Array  # (p,) int32
    words: Array  # (p, 8, 32, 2) uint32, in fragment order
    full_begin: Array  # (matrices * q_tiles + 1,) int64
    full: Array  # (f,) int32
    entry_begin: Array = np.empty(0, np.int64)  # (matrices * q_len + 1,) int64, or (0,)
    entry_keys: Array = np.empty(0, np.int32)  # (e,) int32, ascending in each row

    def blocks(self, grid: Grid, matrix: int) -> Blocks:
        """Return the blocks of one matrix; their words are a view."""
        rows = slice(matrix * grid.q_tiles, (matrix + 1) * grid.q_tiles + 1)
        keys = []
        for begin, tiles in ((self.partial_begin, self.partial), (self.full_begin, self.full)):
            ends = begin[rows]
            first = np.repeat(np.arange(grid.q_tiles) * grid.k_tiles, np.diff(ends))
            keys.append(first + tiles[ends[0] : ends[-1]])
        ends = self.partial_begin[rows]
        begin, found = self.entries_of(grid, matrix)
        codes = entries.encoded(np.repeat(np.arange(grid.q_len), np.diff(begin)), found)
        return Blocks(keys[0], self.words[ends[0] : ends[-1]], keys[1], codes)

    def entries_of(self, grid: Grid, matrix: int) -> tuple[Array, Array]:
        """Return (q_len + 1,) beginnings and the keys of the sparse blocks of one matrix."""
        if not len(self.entry_keys):
            return np.zeros(grid.q_len + 1, np.int64), self.entry_keys
        begin = self.entry_begin[matrix * grid.q_len : (matrix + 1) * grid.q_len + 1]
        return begin - begin[0], self.entry_keys[begin[0] : begin[-1]]

    def tiles(self, t: int) -> tuple[Array, Array]:
        """Return the key tiles of a row that have words, and those that are full."""
        partial = slice(*self.partial_begin[t : t + 2])
        return self.partial[partial], self.full[slice(*self.full_begin[t : t + 2])]

    def listed(self, t: Array, full: bool) -> tuple[Array, Array, Array]:
        """Return the full blocks of rows `t`, or those with words, in the order of rows.

        Of each, which element of `t` it belongs to, its place in the lists, and its key tile.
        """
        starts = self.full_begin if full else self.partial_begin
        counts = starts[t + 1] - starts[t]
        row = np.repeat(np.arange(len(t)), counts)
        place = np.arange(len(row)) + np.repeat(starts[t] + counts - counts.cumsum(), counts)
        return row, place, (self.full if full else self.partial)[place]

    def places(self, t: Array, begin: int, end: int) -> Array:
        """Return where blocks have their words, `WHOLE` for full ones and `NOTHING` for others.

        Parameters
        ----------
        t : ndarray of int, shape (rows,)
            Rows of blocks.
        begin, end : int
            Key tiles to look among.

        Returns
        -------
        ndarray of int32, shape (rows, end - begin)
        """
        table = np.full((len(t), end - begin), NOTHING, np.int32)
        for full in (False, True):
            row, place, tiles = self.listed(t, full)
            column = tiles - begin
            here = (column >= 0) & (column < end - begin)
            table[row[here], column[here]] = WHOLE if full else place[here]
        return table

    def row(self, t: int, begin: int, end: int) -> tuple[Array, Array, Array]:
        """Return partial key tiles from `begin` to `end` in a row, their words, and full tiles."""
        p, f = (
            first[t] + np.searchsorted(tiles[first[t] : first[t + 1]], (begin, end))
            for first, tiles in (
                (self.partial_begin, self.partial),
                (self.full_begin, self.full),
            )
        )
        return self.partial[slice(*p)], self.words[slice(*p)], self.full[slice(*f)]


class Builder:
    """Collects the blocks of one matrix, row of blocks by row of blocks."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._parts = [_none()]

    def add(self, q_tile: int, k_tiles: Array, words: Array) -> None:
        """Add blocks of one row; their `words`, whatever they hold, may be overwritten."""
        keys = q_tile * self.grid.k_tiles + k_tiles
        self._parts.append(tightened(self.grid, keys, words))

    def add_full(self, q_tile: int, k_tiles: Array) -> None:
        """Add full blocks of one row."""
        keys = q_tile * self.grid.k_tiles + k_tiles
        self._parts.append(_none()._replace(full=keys.astype(np.int64)))

    def add_entries(self, codes: Array) -> None:
        """Add all visible pairs of some blocks, ascending."""
        self._parts.append(of_entries(self.grid, codes))

    def finish(self) -> Blocks:
        """Return all of them; the builder is empty then."""
        parts, self._parts = self._parts, [_none()]
        partial, words, full, codes = (np.concatenate(part) for part in zip(*parts, strict=True))
        return Blocks(partial, words, np.sort(full), np.sort(codes))


def chunks(count: int) -> Iterator[slice]:
    """Yield slices of `CHUNK` that cover `count` blocks."""
    for begin in range(0, count, CHUNK):
        yield slice(begin, min(begin + CHUNK, count))


def tightened(grid: Grid, keys: Array, words: Array, full: Array | None = None) -> Blocks:
    """Return blocks by what their words hold, bits outside the matrix cleared in place.

    Parameters
    ----------
    grid : Grid
    keys : ndarray, shape (p,)
        Ascending.
    words : ndarray of uint32, shape (p, 8, 32, 2)
    full : ndarray, optional
        Keys of further blocks that are full, ascending.
    """
    state = np.empty(len(keys), np.int8)
    sparse = np.zeros(len(keys), np.bool_)
    for part in chunks(len(keys)):
        inside = grid.inside(keys[part])
        words[part] &= inside
        some = words[part].any(axis=(1, 2, 3))
        state[part] = some.astype(np.int8) + (words[part] == inside).all(axis=(1, 2, 3))
        sparse[part] = (state[part] == PARTIAL) & (_ones(words[part]) < entries.LEAST_BITS)
    whole = keys[state == FULL].astype(np.int64, copy=False)
    if full is not None:
        whole = np.sort(np.concatenate([full, whole]))
    codes = entries.of_words(keys[sparse], words[sparse], grid.k_tiles)
    kept = (state == PARTIAL) & ~sparse
    if not kept.all():
        keys, words = keys[kept], words[kept]
    return Blocks(keys.astype(np.int64, copy=False), words, whole, codes)


def of_entries(grid: Grid, codes: Array) -> Blocks:
    """Return the blocks of a matrix given all of its pairs, ascending."""
    sparse = entries.in_sparse_blocks(grid, grid.k_tiles, codes)
    if sparse.all():
        return _none()._replace(entries=codes)
    found = tightened(grid, *entries.to_words(codes[~sparse], grid.k_tiles))
    return found._replace(entries=codes[sparse])


def with_words(grid: Grid, blocks: Blocks) -> Blocks:
    """Return the blocks with words for sparse ones too."""
    if not len(blocks.entries):
        return blocks
    more, words = entries.to_words(blocks.entries, grid.k_tiles)
    keys = np.concatenate([blocks.partial, more])
    order = np.argsort(keys)
    words = np.concatenate([blocks.words, words])[order]
    return Blocks(keys[order], words, blocks.full)


def without_words(grid: Grid, blocks: Blocks) -> Blocks:
    """Return blocks as `with_words` does, but without words."""
    more = entries.listed(blocks.entries, grid.k_tiles)
    return Blocks(np.union1d(blocks.partial, more), blocks.words[:0], blocks.full)


def are_tight(grid: Grid, blocks: Blocks, sparse_apart: bool = True) -> bool:
    """Return whether all blocks are what they are listed as, without bits outside the matrix.

    Without `sparse_apart`, blocks with words may have any number of bits.
    """
    least = entries.LEAST_BITS if sparse_apart else 1
    for part in chunks(len(blocks.partial)):
        inside, found = grid.inside(blocks.partial[part]), blocks.words[part]
        full = (found == inside).all(axis=(1, 2, 3))
        if (found & ~inside).any() or full.any() or (_ones(found) < least).any():
            return False
    sparse = entries.in_sparse_blocks(grid, grid.k_tiles, blocks.entries)
    of = entries.listed(blocks.entries, grid.k_tiles)
    return bool(np.all(sparse)) and not any(
        len(np.intersect1d(a, b, assume_unique=True))
        for a, b in ((blocks.partial, blocks.full), (blocks.partial, of), (blocks.full, of))
    )


def inverted(grid: Grid, blocks: Blocks) -> Blocks:
    """Return the blocks of the matrix with every bit changed."""
    blocks = with_words(grid, blocks)
    listed = np.zeros(grid.q_tiles * grid.k_tiles, np.bool_)
    listed[blocks.partial] = listed[blocks.full] = True
    words = blocks.words.copy()
    for part in chunks(len(words)):
        words[part] ^= grid.inside(blocks.partial[part])
    return tightened(grid, blocks.partial, words, np.flatnonzero(~listed))


def transposed(grid: Grid, blocks: Blocks) -> Blocks:
    """Return the blocks of the transposed matrix, the bits of each transposed too."""

    def turned(keys: Array) -> Array:
        q_tile, k_tile = np.divmod(keys, max(1, grid.k_tiles))
        return k_tile * grid.q_tiles + q_tile

    keys = turned(blocks.partial)
    order = np.argsort(keys)
    words = np.empty_like(blocks.words)
    for part in chunks(len(words)):
        bits = layouts.unpack(blocks.words[order[part]])
        words[part] = layouts.pack(bits.swapaxes(1, 2))
    codes = entries.transposed(blocks.entries)
    return Blocks(keys[order], words, np.sort(turned(blocks.full)), codes)


def combined(grid: Grid, a: Blocks, b: Blocks, op: Callable[..., Array]) -> Blocks:
    """Return the blocks of ``op(a, b)``, `op` being `numpy.bitwise_and` or `numpy.bitwise_or`."""
    keys = functools.reduce(np.union1d, (a.partial, a.full, b.partial, b.full))
    (a_state, a_place), (b_state, b_place) = a.find(keys), b.find(keys)
    # A full block is the neutral one of `and`, an empty one that of `or`; the other decides alone.
    both = op is np.bitwise_and
    state = np.minimum(a_state, b_state) if both else np.maximum(a_state, b_state)
    mixed = np.flatnonzero(state == PARTIAL)
    words = np.full((len(mixed), *WORDS), 0xFFFFFFFF if both else 0, np.uint32)
    for part in chunks(len(mixed)):
        at = mixed[part]
        for blocks, states, place in ((a, a_state, a_place), (b, b_state, b_place)):
            has_words = states[at] == PARTIAL
            theirs = blocks.words[place[at[has_words]]]
            words[part][has_words] = op(words[part][has_words], theirs)
    given = a.entries, b.entries
    if both:
        found = tightened(grid, keys[mixed], words, keys[state == FULL])
        shared = [x[_seen(grid, y, x)] for x, y in ((given[0], b), (given[1], a))]
        return found._replace(entries=entries.united(found.entries, *shared))
    codes = entries.united(*given)
    at, place = Blocks(keys[mixed], words, keys[state == FULL]).find(
        entries.tiles_of(codes, grid.k_tiles)
    )
    entries.set_bits(words, place[at == PARTIAL], codes[at == PARTIAL])
    dense = tightened(grid, keys[mixed], words, keys[state == FULL])
    apart = of_entries(grid, codes[at == EMPTY])
    order = np.argsort(np.concatenate([dense.partial, apart.partial]))
    return Blocks(
        np.concatenate([dense.partial, apart.partial])[order],
        np.concatenate([dense.words, apart.words])[order] if len(apart.words) else dense.words,
        np.union1d(dense.full, apart.full),
        entries.united(dense.entries, apart.entries),
    )


def _seen(grid: Grid, blocks: Blocks, codes: Array) -> Array:
    """Return which pairs are bits of blocks."""
    state, place = blocks.find(entries.tiles_of(codes, grid.k_tiles))
    seen: Array = state == FULL
    some = state == PARTIAL
    seen[some] = entries.bits_set(blocks.words, place[some], codes[some])
    seen |= entries.is_among(codes, blocks.entries)
    return seen


def bit_count(grid: Grid, blocks: Blocks) -> int:
    """Return how many bits of the matrix are set."""
    whole = int(entries.areas(grid, grid.k_tiles, blocks.full).sum())
    return whole + _bits(blocks.words) + len(blocks.entries)


def joined(grid: Grid, matrices: Sequence[Blocks]) -> BlockLists:
    """Return the lists of several matrices of one size, read-only and in one memory each."""
    lists: list[Array] = []
    for keys in ([m.partial for m in matrices], [m.full for m in matrices]):
        begin = np.zeros(len(matrices) * grid.q_tiles + 1, np.int64)
        for i, of_matrix in enumerate(keys):
            row = slice(1 + i * grid.q_tiles, 1 + (i + 1) * grid.q_tiles)
            q_tile = of_matrix // max(1, grid.k_tiles)
            begin[row] = np.bincount(q_tile, minlength=grid.q_tiles)
        tiles = [(of_matrix % max(1, grid.k_tiles)).astype(np.int32) for of_matrix in keys]
        lists += [np.cumsum(begin), np.concatenate([np.empty(0, np.int32), *tiles])]
    # The words of a single matrix, by far the most memory, stay where they are.
    words = [m.words for m in matrices]
    whole = words[0] if len(words) == 1 else np.concatenate([_none().words, *words])
    result = BlockLists(lists[0], lists[1], whole, lists[2], lists[3], *_rows(grid, matrices))
    for array in result:
        array.flags.writeable = False
    return result


def of_small(seen: Array) -> BlockLists:
    """Return the lists of many small matrices of bool (`Grid.is_small`), (n, q_len, k_len)."""
    count, q_len, k_len = seen.shape
    at = np.flatnonzero(seen)
    rows = at // k_len
    counts = np.bincount(rows, minlength=count * q_len)
    begin = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    bits = np.diff(begin[::q_len])
    full = bits == q_len * k_len
    keys = (at - k_len * rows).astype(np.int32)
    if full.any():
        keys = keys[~np.repeat(full, bits)]
        counts[np.repeat(full, q_len)] = 0
        begin = np.concatenate([begin[:1], np.cumsum(counts)])
    rest = (begin, keys) if len(keys) else (np.empty(0, np.int64), keys)
    begin = np.zeros(count + 1, np.int64)
    full_begin = np.concatenate([begin[:1], np.cumsum(full)])
    nothing = _none()
    tiles = np.zeros(np.count_nonzero(full), np.int32)
    return BlockLists(
        begin, nothing.partial.astype(np.int32), nothing.words, full_begin, tiles, *rest
    )


def canonical(grid: Grid, lists: BlockLists) -> BlockLists:
    """Return lists whose sparse blocks are kept as entries, also those that have words."""
    parts = chunks(len(lists.words))
    if all((_ones(lists.words[part]) >= entries.LEAST_BITS).all() for part in parts):
        return lists
    found = [lists.blocks(grid, i) for i in range(_matrices(grid, lists))]
    return joined(grid, [tightened(grid, x.partial, x.words.copy(), x.full) for x in found])


def expanded(grid: Grid, lists: BlockLists) -> BlockLists:
    """Return lists with words for sparse blocks too, as kernels read them."""
    matrices = range(_matrices(grid, lists))
    return joined(grid, [with_words(grid, lists.blocks(grid, i)) for i in matrices])


def outlined(grid: Grid, lists: BlockLists) -> BlockLists:
    """Return lists as `expanded` does, but without words."""
    matrices = range(_matrices(grid, lists))
    return joined(grid, [without_words(grid, lists.blocks(grid, i)) for i in matrices])


def _matrices(grid: Grid, lists: BlockLists) -> int:
    return (len(lists.full_begin) - 1) // max(1, grid.q_tiles)


def _rows(grid: Grid, matrices: Sequence[Blocks]) -> tuple[Array, Array]:
    """Return the entries of matrices by rows."""
    if not any(len(m.entries) for m in matrices):
        return np.empty(0, np.int64), np.empty(0, np.int32)
    counts, keys = [np.zeros(1, np.int64)], []
    for m in matrices:
        rows, of_matrix = entries.decoded(m.entries)
        counts.append(np.bincount(rows, minlength=grid.q_len))
        keys.append(of_matrix)
    return np.cumsum(np.concatenate(counts)), np.concatenate(keys)


def _bits(words: Any) -> int:
    if not isinstance(words, np.ndarray):
        return int(backends.gpu("masks.device_mask").count_ones(words))
    return sum(int(_ones(words[part]).sum()) for part in chunks(len(words)))


def bits_of_each(words: Array) -> Array:
    """Return how many bits are set of each block, as int32."""
    counts = np.empty(len(words), np.int32)
    for part in chunks(len(words)):
        counts[part] = _ones(words[part])
    return counts


def _ones(words: Array) -> Array:
    """Return how many bits are set of each block of a few."""
    if hasattr(np, "bitwise_count"):  # NumPy 2
        wide = words.reshape(len(words), -1).view(np.uint64)
        ones: Array = np.bitwise_count(wide).sum(axis=1, dtype=np.int64)
        return ones
    table = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1, dtype="u1")
    flat = words.reshape(-1).view(np.uint8).reshape(len(words), 4 * math.prod(WORDS))
    ones = table[flat].sum(axis=1, dtype=np.int64)
    return ones


@functools.lru_cache(maxsize=64)
def inside_words(grid: Grid) -> Array:
    """Return the words of blocks inside, at the right end, at the lower end and at both."""
    rows, cols = ((n - 1) % BLOCK + 1 if n else 0 for n in grid)
    bits = np.zeros((2, 2, BLOCK, BLOCK), np.bool_)
    for low in range(2):
        for right in range(2):
            bits[low, right, : rows if low else BLOCK, : cols if right else BLOCK] = True
    words: Array = layouts.pack(bits).reshape(4, *WORDS)
    return words


def _none() -> Blocks:
    empty = np.empty(0, np.int64)
    return Blocks(empty, np.empty((0, *WORDS), np.uint32), empty)
