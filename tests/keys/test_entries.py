"""Which batch entries with key lengths are computed together."""

import numpy as np
import pytest

from fa_cupy import Score
from fa_cupy._score import operands_of
from fa_cupy.core.attention_problem import attention_problem
from fa_cupy.keys import entries

SHORT, LONG = 1e3, 1e6  # operations of a pair of all entries


def divided(lengths, flop_per_pair, batch=None, q=None, score=None):
    """The parts of a call with 10 queries, 2 heads and room for 100 keys."""
    lengths = np.array(lengths)
    batch = lengths.shape if batch is None else batch
    x = np.zeros((*batch, 2, 100, 4))
    q = x[..., :10, :] if q is None else q
    score = score and operands_of(Score(score), {})
    problem = attention_problem(q, x, x, None, None, k_lengths=lengths, score=score)
    return entries.parts(problem, (q, x, x), score, lengths, flop_per_pair)


def seen(found):
    """The bounds along the last axis, the length and whether it is that of all entries."""
    return [((x.place[-1].start, x.place[-1].stop), x.length, x.lengths is None) for x in found]


def test_short_neighbours_are_together():
    assert seen(divided([3, 80, 0], SHORT)) == [((0, 3), 80, False)]
    # 10 * 100 * 1e5 / 400 operations an entry: 160 of them are one part.
    bounds = [(x.place[0].start, x.place[0].stop) for x in divided([100, 99] * 200, 400 * 250)]
    assert bounds == [(0, 160), (160, 320), (320, 400)]


def test_long_entries_are_alone_but_where_lengths_are_equal():
    found = divided([80, 80, 80, 3, 70, 70], 6 * LONG)
    assert seen(found) == [((0, 3), 80, True), ((3, 4), 3, True), ((4, 6), 70, True)]
    assert [x.pairs for x in found] == [400.0, 5.0, 1400 / 6]
    found = divided([80, 1, 1, 1, 80], 5 * LONG)
    assert seen(found) == [((0, 1), 80, True), ((1, 4), 1, True), ((4, 5), 80, True)]


def test_the_last_axis_before_the_heads_is_divided():
    found = divided([[3, 80], [80, 80]], 4 * LONG)
    assert seen(found) == [((0, 1), 3, True), ((1, 2), 80, True), ((0, 2), 80, True)]
    assert [x.place[0] for x in found] == [slice(0, 1), slice(0, 1), slice(1, 2)]


def test_what_is_not_finite_behind_an_end_is_left_out():
    """And what is finite is not copied."""
    lengths = np.array([3, 80])
    x = np.ones((2, 2, 100, 4))
    problem = attention_problem(x[..., :10, :], x, x, None, None, k_lengths=lengths)
    (part,) = entries.parts(problem, (x, x, x), None, lengths, SHORT)
    _, (_, k, v, _, mask) = part.taken(problem, (x, x, x, None, None))
    assert np.shares_memory(k, x)
    assert mask[:, 0, 0].tolist() == [[j < n for j in range(80)] for n in (3, 80)]
    for dtype, garbage in (("float16", np.inf), ("float64", np.nan)):
        given = x.astype(dtype)
        given[0, 0, 3] = garbage
        alone, (_, k, v, *_) = part.taken(problem, (x, x, given, None, None))
        assert np.shares_memory(k, x)
        assert v[0].any(axis=(0, 2)).tolist() == [j < 3 for j in range(80)]
        assert v[1].all()
        assert alone().k_len == 80


@pytest.mark.parametrize("lengths", [7, [7, 7], [[7], [7]], [0, 0]])
def test_entries_of_one_length_are_one_part(lengths):
    (found,) = divided(lengths, LONG, batch=(2, 2) if np.ndim(lengths) == 2 else (2,))
    assert all(x == slice(None) for x in found.place)
    assert found.lengths is None
    assert found.length == np.ravel(lengths)[0]


def test_no_entry_is_one_part_without_keys():
    (found,) = divided(np.zeros(0, int), LONG)
    assert (found.length, found.lengths) == (0, None)


@pytest.mark.parametrize("how", ["shared queries", "numbers of entries"])
def test_entries_that_depend_on_each_other_are_one_part(how):
    """As long as the longest of them."""
    more = {"q": np.zeros((2, 10, 4))} if how == "shared queries" else {"score": "s + b"}
    (found,) = divided([60, 3, 80], LONG, **more)
    assert all(x == slice(None) for x in found.place)
    assert found.length == 80
    assert found.lengths.tolist() == [60, 3, 80]
    assert len(divided([60, 3, 80], LONG, score="s + i")) == 3
