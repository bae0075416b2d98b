"""Which rows each rank has, and which pairs of queries and keys it computes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import distributed
from fa_cupy.distributed import calls, order, pieces
from fa_cupy.distributed.order import Segment
from tests.support.every_run import examples


class Rank(distributed.Communicator):
    """A communicator that says which rank this is, and no more."""

    timeout = 1.0

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def gather(self, record, place):
        raise NotImplementedError

    def start(self, sends, receives, place):
        raise NotImplementedError

    def fail(self, error):
        raise NotImplementedError


@given(
    st.integers(1, 5), st.integers(0, 30), st.sampled_from(order.ORDERS), st.sampled_from([0, 1])
)
def test_parts_join_to_the_whole_and_stand_at_their_positions(size, length, kind, axis):
    shape = (length, 3) if axis == 0 else (3, length)
    x = np.arange(3 * length).reshape(shape)
    ranks = [Rank(rank, size) for rank in range(size)]
    parts = [distributed.split(x, rank, order=kind, axis=axis) for rank in ranks]
    for rank, part in zip(ranks, parts, strict=True):
        at = distributed.positions(length, rank, order=kind)
        np.testing.assert_array_equal(part, np.take(x, at, axis))
    np.testing.assert_array_equal(distributed.join(parts, order=kind, axis=axis), x)
    sizes = [part.shape[axis] for part in parts]
    assert max(sizes) - min(sizes) <= (2 if kind == "zigzag" else 1)


def test_contiguous_parts_are_views():
    x = np.zeros((8, 2))
    assert np.shares_memory(distributed.split(x, Rank(1, 2)), x)
    assert np.shares_memory(distributed.split(x, Rank(1, 2), order="zigzag"), x)
    assert not np.shares_memory(distributed.split(x, Rank(0, 2), order="zigzag"), x)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: distributed.split(3, Rank(0, 2)), TypeError, "split: x is 3 .int., want an array"),
        (lambda: distributed.split([[1], [2]], Rank(0, 2)), TypeError, r"split: x is \[\[1\], "),
        (
            lambda: distributed.split(np.ma.ones((3, 1)), Rank(0, 2)),
            TypeError,
            "split: x is .* .MaskedArray., want an array of NumPy or CuPy",
        ),
        (lambda: distributed.split(np.ones(()), Rank(0, 2), axis=0), ValueError, "x has no axes"),
        (
            lambda: distributed.split(np.ones((3, 1)), Rank(0, 2), axis=1.0),
            TypeError,
            "split: axis is 1.0 .float., want one of 2 axes",
        ),
        (lambda: distributed.split(np.ones(3), Rank(0, 2)), ValueError, "axis is -2 .int., want"),
        (lambda: distributed.split(np.ones((3, 1)), 2), TypeError, "comm is 2 .int., want a comm"),
        (
            lambda: distributed.split(np.ones((3, 1)), Rank(0, 2), order="striped"),
            ValueError,
            "order is 'striped' .str., want 'contiguous' or 'zigzag'",
        ),
        (
            lambda: distributed.split(np.ones((3, 1)), Rank(2, 2)),
            ValueError,
            "split: comm has rank 2 and size 2, want 0 <= rank < size",
        ),
        (
            lambda: distributed.positions(3, Rank("a", 2)),
            TypeError,
            "positions: comm has rank 'a' .str. and size 2 .int., want ints",
        ),
        (lambda: distributed.positions(2.5, Rank(0, 2)), TypeError, "positions: length is 2.5"),
        (
            lambda: distributed.positions(10**30, Rank(0, 2)),
            ValueError,
            "positions: length is 10* .int., want an int >= 0 and below 2",
        ),
        (lambda: distributed.join([]), ValueError, "parts has no arrays"),
        (lambda: distributed.join(3), TypeError, "join: parts is 3 .int., want a sequence of arr"),
        (lambda: distributed.join(np.ones(())), TypeError, "parts is array.1.. .ndarray., want a"),
        (lambda: distributed.join("ab"), TypeError, "join: parts is 'ab' .str., want a sequence"),
        (
            lambda: distributed.join([np.ones((1, 2)), 3]),
            TypeError,
            r"join: parts\[1\] is 3 .int., want an array of NumPy or CuPy",
        ),
        (
            lambda: distributed.join([np.ones((1, 2)), np.ones((1, 3))]),
            ValueError,
            r"join: parts\[1\] has shape \(1, 3\), parts\[0\] has \(1, 2\), want",
        ),
        (
            lambda: distributed.join([np.ones((1, 2)), np.ones((4, 1, 2))]),
            ValueError,
            r"join: parts\[1\] has shape \(4, 1, 2\), parts\[0\] has \(1, 2\)",
        ),
        (
            lambda: distributed.join([np.ones((1, 2)), np.ones((1, 2), np.float32)]),
            TypeError,
            r"join: parts\[1\] has dtype float32, parts\[0\] has float64",
        ),
        (
            lambda: distributed.join([np.ones((1, 2)), np.ones((3, 2))], order="zigzag"),
            ValueError,
            r"parts has the lengths \[1, 3\] on the ranks, want \[2, 2\] in zigzag order",
        ),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_an_axis_may_be_an_integer_of_numpy_and_parts_one_array():
    x = np.arange(12).reshape(4, 3)
    parts = [distributed.split(x, Rank(rank, 2), axis=np.int64(0)) for rank in range(2)]
    np.testing.assert_array_equal(distributed.join(np.stack(parts), axis=np.int64(-2)), x)


def visible(places, band):
    """The visible pairs, as an array over positions."""
    n = sum(part.rows for parts in places for part in parts)
    i, j = np.indices((n, n))
    lower, upper = band
    return (lower is None or j >= i + lower) & (upper is None or j <= i + upper) & (i == i)


@examples(200)
@given(
    st.integers(1, 4), st.integers(0, 40), st.sampled_from(order.ORDERS), st.booleans(),
    st.sampled_from([(None, None), (None, 0), (0, 0), (-3, 0), (-7, 5), (None, 4), (-30, None)]),
)  # fmt: skip
def test_pieces_have_each_visible_pair_once(size, length, kind, apart, band):
    parts = tuple(order.segments(length, size, kind))
    at = [np.concatenate([np.arange(s, s + n) for s, n in own]).astype(int) for own in parts]
    counted = np.zeros((length, length), int)
    for rank in range(size):
        places = calls.Places(parts, parts, band, apart)
        first = calls.own_pieces(places, rank)
        sunk = np.concatenate([[], *[np.arange(*x.queries) for x in first if x.sinks]])
        assert sorted(sunk) == list(range(len(at[rank])))  # each query has its sinks once
        found = [(rank, piece) for piece in first]
        for hop in calls.hops(places, rank):
            found += [((rank - hop.distance) % size, piece) for piece in hop.pieces]
            assert hop.received == pieces.span(hop.pieces)
            back = calls.hops(places, (rank - hop.distance) % size)[hop.distance - 1]
            assert back.sent == hop.received  # what one rank sends is what the other expects
        for source, piece in found:
            rows, columns = at[rank][slice(*piece.queries)], at[source][slice(*piece.keys)]
            i, j = np.arange(len(rows))[:, None], np.arange(len(columns))
            seen = np.ones((len(rows), len(columns)), bool)
            if piece.shift is not None:
                lower, upper = band
                seen &= lower is None or j >= i + piece.shift + lower
                seen &= upper is None or j <= i + piece.shift + upper
            assert seen.sum() == pieces.pairs([piece], band)
            if apart and len(columns):
                assert (np.diff(columns) == 1).all()
            np.add.at(counted, np.ix_(rows, columns), seen.astype(int))
    np.testing.assert_array_equal(counted, visible(parts, band).astype(int))


def test_a_causal_hop_in_zigzag_order_is_one_piece():
    """All queries with the first half of the keys, or the last half of the queries with all."""
    parts = tuple(order.segments(80, 4, "zigzag"))
    places = calls.Places(parts, parts, (None, 0), False)
    assert calls.own_pieces(places, 1) == (pieces.Piece((0, 20), (0, 20), 0, sinks=True),)
    by_source = {(1 - hop.distance) % 4: hop.pieces for hop in calls.hops(places, 1)}
    assert by_source[0] == (pieces.Piece((0, 20), (0, 10)),)
    assert by_source[2] == by_source[3] == (pieces.Piece((10, 20), (0, 20)),)


def test_a_window_needs_keys_of_neighbours_only():
    parts = tuple(order.segments(400, 8, "contiguous"))
    places = calls.Places(parts, parts, (-10, 0), False)
    found = [(hop.distance, hop.received) for hop in calls.hops(places, 3) if hop.received]
    assert found == [(1, (40, 50))]


def test_lengths_of_contiguous_parts_are_free():
    assert order.segments_of("f", "q", [3, 0, 5], "contiguous") == [
        (Segment(0, 3),), (Segment(3, 0),), (Segment(3, 5),)
    ]  # fmt: skip
