"""Attention over the visible pairs of sparse mask blocks, one by one.

A mask block with few visible pairs keeps them as entries of a CSR matrix (`fa_cupy.masks.entries`).
For the entries of some queries, keys are gathered and a score is computed for each entry. Maxima
and sums are those of the rows of the matrix, and the product with the values is that of a sparse
and a dense matrix. To the online softmax, the entries of a query are one more tile of keys: they
change the running maximum, sum and accumulator as any tile does (`fa_cupy.tiled.attention`).

What is not finite is left to the tiled algorithm, which reads sparse blocks as any other
(`fa_cupy.cpu.masks.tiles.MaskTiles`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fa_cupy._bitmask import BitMask
from fa_cupy.core.attention_problem import Problem
from fa_cupy.core.sparse_bias import SparseBias
from fa_cupy.cpu.blas import SERIAL_SUMS
from fa_cupy.cpu.tile_ops import Segments, Steps
from fa_cupy.layouts import BLOCK
from fa_cupy.tiled import attention as tiled_attention
from fa_cupy.tiled.attention_backward import norms_of
from fa_cupy.tiled.softmax import Rows

Array = npt.NDArray[Any]

# Entries that are computed together: gathered keys of 64 float32 take 2 MB. Fixed, so that results
# do not depend on the machine.
_CHUNK = 8192
# So many times that have their softmax together, where keys are gathered in parts anyway.
_TOGETHER = 8
# A query and so many gathered keys are one product of a matrix and a vector, which takes half of
# the time of single pairs, if no more than so many times the entries are computed.
_SEGMENT = 32
_MOST_PADDED = 1.25
# Matrices of one block and so many pairs at most are computed as tiles, many in one product: going
# over the entries of each takes longer.
_SMALL = BLOCK * BLOCK // 2


class Entries(NamedTuple):
    """Visible pairs of one matrix, those outside the band left out."""

    begin: Array  # (q_len + 1,)
    keys: Array  # (e,) int32, ascending in each row
    # (e,) each, if there is a sparse bias: where it has them, and what it adds to their scores.
    places: Array | None = None
    bias: Array | None = None

    @classmethod
    def of(cls, problem: Problem, mask: BitMask, matrix: int, bias: Any = None) -> Entries:
        """Return those of one matrix of a mask; `bias` may be a SparseBias."""
        begin, keys = mask._store.host().entries_of(mask._grid, matrix)
        if problem.lower is not None or problem.upper is not None:
            rows = np.repeat(np.arange(problem.q_len), np.diff(begin))
            lower = -np.inf if problem.lower is None else problem.lower
            upper = np.inf if problem.upper is None else problem.upper
            kept = (keys - rows >= lower) & (keys - rows <= upper)
            keys = keys[kept]
            begin = np.searchsorted(rows[kept], np.arange(problem.q_len + 1))
        # The products of SciPy take both index arrays in one dtype.
        begin = begin.astype(np.int32 if len(keys) < 2**31 else np.int64)
        if not isinstance(bias, SparseBias):
            return cls(begin, keys)
        places = bias.structure.places(np.repeat(np.arange(problem.q_len), np.diff(begin)), keys)
        return cls(begin, keys, places, bias.at(places))

    def chunks(self, row_begin: int, row_end: int, times: int = 1) -> Iterator[Chunk]:
        """Yield the entries of some rows, so many times `_CHUNK` at a time at most.

        A row with more comes in several chunks, which have no other row.
        """
        most = times * _CHUNK
        begin = row_begin
        while begin < row_end:
            last = np.searchsorted(self.begin, self.begin[begin] + most, side="right") - 1
            end = min(row_end, max(begin + 1, int(last)))
            firsts = self.begin[begin : end + 1]
            for first in range(int(firsts[0]), int(firsts[-1]), most):
                part = slice(first, min(first + most, int(firsts[-1])))
                ends = np.clip(firsts, part.start, part.stop) - first
                bias = None if self.bias is None else self.bias[part]
                yield Chunk(begin, end, ends.astype(firsts.dtype), self.keys[part], part, bias)
            begin = end


class Chunk(NamedTuple):
    """The entries of some rows of a matrix."""

    row_begin: int
    row_end: int
    begin: Array  # (rows + 1,), from 0
    keys: Array
    part: slice  # of all entries
    bias: Array | None  # (e,), from a sparse matrix

    @property
    def counts(self) -> Array:
        """Entries of each row."""
        return np.diff(self.begin)

    @property
    def rows(self) -> Array:
        """The row of each entry."""
        return np.repeat(np.arange(self.row_begin, self.row_end), self.counts)

    def segments(self, head_dim: int) -> Segments | None:
        """Return the entries in segments; None where that would not make products faster."""
        counts = self.counts
        pieces = -(-counts // _SEGMENT)
        total = int(pieces.sum())
        # Of many short rows nearly all would be padding, and NumPy spreads a large product over
        # threads of its own.
        if total * _SEGMENT > _MOST_PADDED * len(self.keys) or _SEGMENT * head_dim > SERIAL_SUMS:
            return None
        before = np.cumsum(pieces) - pieces
        row = np.repeat(np.arange(len(counts)), pieces)
        first = self.begin[:-1][row] + _SEGMENT * (np.arange(total) - before[row])
        places = np.minimum(first[:, None] + np.arange(_SEGMENT), len(self.keys) - 1)
        shift = _SEGMENT * before - self.begin[:-1]
        of_entry = np.arange(len(self.keys)) + np.repeat(shift, counts)
        return Segments(row, self.keys.take(places), of_entry)


def any_of(mask: BitMask) -> bool:
    """Return whether a mask has sparse blocks whose pairs are computed one by one."""
    grid = mask._grid
    small = grid.q_tiles * grid.k_tiles == 1 and grid.q_len * grid.k_len <= _SMALL
    return not small and bool(len(mask._store.host().entry_keys))


def differ(mask: BitMask) -> bool:
    """Return whether there are some, in several matrices: stacks must not mix them."""
    return any_of(mask) and len(np.unique(mask.entries)) > 1


def attend(
    steps: Steps,
    problem: Problem,
    x: tiled_attention.Operands,
    entries: Entries,
    rows: Rows,
    row_begin: int,
    row_end: int,
) -> None:
    """Add the entries of some queries of all stacked batch entries to their running state.

    Keys and values are dense arrays of the compute dtype.
    """
    if entries.begin[row_begin] == entries.begin[row_end]:
        return
    if not rows.started:
        tiled_attention.start_empty(rows)
    rows.unshifted = False
    for chunk in entries.chunks(row_begin, row_end, _TOGETHER):
        add(steps, problem, x, chunk, rows, row_begin)


def add(
    steps: Steps,
    problem: Problem,
    x: tiled_attention.Operands,
    chunk: Chunk,
    rows: Rows,
    row_begin: int,
) -> None:
    """Add some entries to the running state of rows, which begin with the query `row_begin`."""
    scores = scores_of(steps, problem, x, chunk, segments=chunk.segments(problem.head_dim))
    here = slice(chunk.row_begin - row_begin, chunk.row_end - row_begin)
    top, total, acc = rows.top[:, here, 0], rows.total[:, here, 0], rows.acc[:, here]
    new = np.maximum(top, by_row(np.maximum, scores, chunk, -np.inf))
    shift = np.where(new == -np.inf, 0, new).astype(steps.dtype)  # -inf - -inf would be NaN
    # Unlike `numpy.repeat`, this lets other threads run.
    np.subtract(scores, shift.take(chunk.rows - chunk.row_begin, axis=1), out=scores)
    np.exp(scores, out=scores)
    decay = np.exp(top - shift)
    np.multiply(total, decay, out=total)
    np.add(total, by_row(np.add, scores, chunk, 0), out=total)
    np.multiply(acc, decay[:, :, None], out=acc)
    matrix = None
    for weights, v, some in zip(scores, x.v, acc, strict=True):
        if matrix is None:
            matrix = csr(weights, chunk.begin, chunk.keys, len(v))
        matrix.data = weights  # making one of the same pattern takes longer than a small product
        np.add(some, matrix @ v, out=some)
    top[...] = new


def scores_of(
    steps: Steps,
    problem: Problem,
    x: tiled_attention.Operands,
    chunk: Chunk,
    slope: Array | None = None,
    partials: dict[str, Array] | None = None,
    segments: Segments | None = None,
) -> Array:
    """Return the scores (n, e) of entries; `slope` and `partials` as of the tiled `scores_of`.

    The result lives until the next call. With `segments`, scores are rounded in another way.
    """
    queries = tiled_attention.queries_of(steps, problem, x, chunk.row_begin, chunk.row_end)
    scores = steps.scratch("scores", (x.q.shape[0], len(chunk.keys)))
    steps.pair_scores(queries, chunk.counts, x.k, chunk.keys, scores, segments)
    if x.score is not None or problem.softcap:
        places = chunk.rows, chunk.keys.astype(np.int64)
        tile = scores[:, None], places, None if slope is None else slope[:, None]
        tiled_attention.transform(steps, problem, x.score, *tile, partials)
    if chunk.bias is not None:
        steps.add_bias(scores, chunk.bias)
    elif x.bias is not None:
        steps.add_bias(scores, x.bias[:, chunk.rows, chunk.keys])
    return scores


def padded(
    steps: Steps,
    problem: Problem,
    x: tiled_attention.Operands,
    entries: Entries,
    rows: tuple[int, int],
) -> Iterator[tuple[tuple[int, int], Array, Array]]:
    """Yield the scores of some queries as tiles, -inf behind the last of each row.

    With each come the first and the last of its queries, counted from ``rows[0]``, and the norms of
    its keys. Scores are those of `attend`, to the last bit.
    """
    for chunk in entries.chunks(*rows):
        scores = scores_of(steps, problem, x, chunk)
        place = np.arange(len(chunk.keys)) - np.repeat(chunk.begin[:-1], chunk.counts)
        shape = (len(scores), len(chunk.counts), chunk.counts.max())
        tile = np.full(shape, -np.inf, steps.dtype)
        norms = np.zeros(shape, steps.dtype)
        tile[:, chunk.rows - chunk.row_begin, place] = scores
        of_keys = norms_of(np, x.k[:, chunk.keys])[..., 0]
        norms[:, chunk.rows - chunk.row_begin, place] = of_keys
        yield (chunk.row_begin - rows[0], chunk.row_end - rows[0]), tile, norms


def by_row(operation: np.ufunc, values: Array, chunk: Chunk, empty: float) -> Array:
    """Return maxima or sums of the entries (n, e) of each row; `empty` for rows without any."""
    found = np.full((len(values), len(chunk.begin) - 1), empty, values.dtype)
    some = np.flatnonzero(chunk.begin[1:] != chunk.begin[:-1])
    found[:, some] = operation.reduceat(values, chunk.begin[some], axis=1)
    return found


def dense_of(x: Array, dtype: np.dtype[Any]) -> Array:
    """Return an array (n, length, dim) as gathers and products of entries read it.

    What batch entries share is there once.
    """
    shared = len(x) > 1 and x.strides[0] == 0
    return np.broadcast_to(np.require(x[:1] if shared else x, dtype, ["C", "A"]), x.shape)


def product(weights: Array, begin: Array, columns: Array, dense: Array) -> Array:
    """Return the product of a CSR matrix and a dense one."""
    found: Array = csr(weights, begin, columns, len(dense)) @ dense
    return found


def csr(weights: Array, begin: Array, columns: Array, width: int) -> Any:
    """Return a `scipy.sparse.csr_array`."""
    from scipy import sparse

    return sparse.csr_array((weights, columns, begin), shape=(len(begin) - 1, width))
