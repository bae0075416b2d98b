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
        (lambda: distributed.split(3, Rank(0, 2)), TypeError, "split: got 3 .int., want an array"),
        (lambda: distributed.split(np.ones(3), Rank(0, 2)), ValueError, "axis is -2 .int., want"),
        (lambda: distributed.split(np.ones((3, 1)), 2), TypeError, "comm is 2 .int., want a comm"),
        (
            lambda: distributed.split(np.ones((3, 1)), Rank(0, 2), order="striped"),
            ValueError,
            "order is 'striped' .str., want 'contiguous' or 'zigzag'",
        ),
        (lambda: distributed.join([]), ValueError, "parts has no arrays"),
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
