"""Which pairs of queries and keys a rank computes at each hop, as pieces that are one call each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fa_cupy.distributed.order import Segment

Band = tuple[int | None, int | None]
FAR = 2**62  # longer than any sequence


class Piece(NamedTuple):
    """Some rows of a rank's queries with some rows of the keys of a rank.

    Attributes
    ----------
    queries, keys : tuple of int
        Begin and end, in the rows of the part.
    shift : int or None
        Where the first query of the piece stands among its keys; None where all pairs are visible.
    sinks : bool
        Whether the sinks of these queries belong to the piece.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    shift: int | None = None
    sinks: bool = False


def own_pieces(
    queries: Sequence[Segment], keys: Sequence[Segment], band: Band, apart: bool = False
) -> list[Piece]:
    """Return the pieces of a rank's queries with its own keys.

    Those with `Piece.sinks` come first, and each query is in one of them. With `apart` no piece has
    keys of two segments.
    """
    rows, columns = (sum(segment.rows for segment in part) for part in (queries, keys))
    if band == (None, None):
        ends = [0]
        for segment in keys if apart else [Segment(0, columns)]:
            ends.append(ends[-1] + segment.rows)
        spans = list(itertools.pairwise(ends))
        return [Piece((0, rows), span, sinks=i == 0) for i, span in enumerate(spans)]
    # Segments ascend: where only the order counts, they are one sequence.
    if (band == (None, 0) and not apart) or len(queries) == 1:
        return [Piece((0, rows), (0, columns), 0, sinks=True)]
    found = [
        piece._replace(sinks=q == k)
        for a, q in _placed(queries)
        for b, k in _placed(keys)
        for piece in _between(a, q, b, k, band)
    ]
    return sorted(found, key=lambda piece: not piece.sinks)


def pieces(
    queries: Sequence[Segment], keys: Sequence[Segment], band: Band, apart: bool = False
) -> list[Piece]:
    """Return the pieces of a rank's queries with the keys of another rank.

    Key j is visible to query i if ``i + lower <= j <= i + upper``, of positions in the whole
    sequence; None means no bound. Pieces whose pairs are all visible are joined, but with `apart`
    not over two segments of keys.
    """
    found: list[Piece] = []
    for a, q in _placed(queries):
        for b, k in _placed(keys):
            for piece in _between(a, q, b, k, band):
                last = found[-1] if found else piece
                adjacent = last.queries == piece.queries and last.keys[1] == piece.keys[0]
                if adjacent and last.shift is piece.shift is None and not apart:
                    piece = found.pop()._replace(keys=(last.keys[0], piece.keys[1]))
                found.append(piece)
    joined: list[Piece] = []
    for piece in found:
        last = joined[-1] if joined else piece
        adjacent = last.keys == piece.keys and last.queries[1] == piece.queries[0]
        if adjacent and last.shift is piece.shift is None:
            piece = joined.pop()._replace(queries=(last.queries[0], piece.queries[1]))
        joined.append(piece)
    return joined


def span(found: Sequence[Piece]) -> tuple[int, int] | None:
    """Return the keys that some pieces need, begin and end; None for no piece."""
    if not found:
        return None
    return min(piece.keys[0] for piece in found), max(piece.keys[1] for piece in found)


def pairs(found: Sequence[Piece], band: Band) -> int:
    """Return the number of visible pairs of some pieces."""
    return sum(_visible(piece, band) for piece in found)


def _visible(piece: Piece, band: Band) -> int:
    (q0, q1), (k0, k1) = piece.queries, piece.keys
    if piece.shift is None:
        return (q1 - q0) * (k1 - k0)
    lower, upper = band

    def below(bound: int) -> int:
        """Count pairs with ``j <= i + bound``, of rows and columns from 0 on."""
        rows, columns = q1 - q0, k1 - k0
        first = min(rows, max(0, -bound))  # the first row that has any
        last = min(rows, max(first, columns - bound))  # the first row that has all
        some = last - first
        return some * (bound + 1) + (first + last - 1) * some // 2 + (rows - last) * columns

    most = (q1 - q0) * (k1 - k0) if upper is None else below(piece.shift + upper)
    return most - (0 if lower is None else below(piece.shift + lower - 1))


def _placed(parts: Sequence[Segment]) -> Iterator[tuple[int, Segment]]:
    """Yield segments with their first row in the part of the rank; empty ones are left out."""
    begin = 0
    for segment in parts:
        if segment.rows:
            yield begin, segment
        begin += segment.rows


def _between(a: int, q: Segment, b: int, k: Segment, band: Band) -> Iterator[Piece]:
    """Yield the piece of two segments, which begin at the rows `a` and `b` of their parts.

    It has the queries that see a key, and the keys that are seen.
    """
    shift = q.start - k.start
    lower, upper = (None if bound is None else bound + shift for bound in band)
    q0, q1, k0, k1 = 0, q.rows, 0, k.rows
    if lower is not None:
        k0, q1 = max(0, lower), min(q1, k1 - lower)
    if upper is not None:
        k1, q0 = min(k1, q.rows + upper), max(0, -upper)
    if q0 >= q1 or k0 >= k1:
        return
    # Rows that were left out may have been those that see the outermost keys.
    if lower is not None:
        k0 = max(k0, q0 + lower)
    if upper is not None:
        k1 = min(k1, q1 + upper)
    if k0 >= k1:
        return
    bounded = (lower is not None and q1 - 1 + lower > k0) or (
        upper is not None and q0 + upper < k1 - 1
    )
    place = (a + q0, a + q1), (b + k0, b + k1)
    yield Piece(*place, shift + q0 - k0 if bounded else None)
