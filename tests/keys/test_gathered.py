"""Calls with key lengths and pages as calls without them, in NumPy."""

import numpy as np
import pytest
from hypothesis import given

from fa_cupy import Score, attention
from fa_cupy._score import operands_of
from fa_cupy.core.attention_problem import attention_problem
from fa_cupy.cpu import attention as cpu_attention
from fa_cupy.keys.gathered import gathered, mark_bad
from fa_cupy.keys.layout import KeyArrays
from tests.api.test_key_lengths import BANDS, describe
from tests.support.every_run import widest
from tests.support.keyed_cases import cases_with_lengths, paged_cases
from tests.support.strategies import UNIT, by_dtype, check_against_reference, normal


def solve(q, k, v, bias=None, mask=None, *, sinks=None, score=None, **options):
    """Output and log-sum-exp, by a call without lengths and pages."""
    lengths, table = (options.get(name) for name in ("k_lengths", "page_table"))
    keys = KeyArrays(None if lengths is None else np.asarray(lengths), table)
    options |= {"k_lengths": keys.lengths, "sinks": sinks}
    problem = attention_problem(q, k, v, bias, mask, score=score, **options)
    found = gathered(np, problem, k, v, mask, keys)
    assert found.problem.k_lengths is None
    assert found.problem.pages is None
    assert not found.problem.band_from_end
    arrays = q, found.k, found.v, bias, found.mask, None
    more = {} if score is None else {"score": score}
    out, lse = cpu_attention.attention(found.problem, *arrays, True, sinks, **more)
    mark_bad(np, found.bad, out, lse)
    return out, lse


@widest()
@given(case=cases_with_lengths())
def test_calls_with_lengths_agree_with_the_reference(case):
    describe(case)
    check_against_reference(case, *solve(*case.native(np), **case.options))


@widest()
@given(case=paged_cases())
def test_calls_with_pages_agree_with_the_reference(case):
    describe(case)
    check_against_reference(case, *solve(*case.native(np), **case.options))


def some_pages(dtype, q_len=5):
    rng = np.random.default_rng(0)
    shapes = (3, 4, q_len, 8), (7, 2, 16, 8), (7, 2, 16, 4)
    return [normal(rng, shape, dtype) for shape in shapes], rng.integers(0, 7, (3, 5))


@pytest.mark.parametrize("options", BANDS, ids=str)
def test_the_same_as_the_cpu_path(options):
    (q, k, v), table = some_pages(np.float64)
    score = Score("s + 0.3 * b - 0.01 * (h + 1) * abs(i - j)")
    options = {**options, "page_table": table, "k_lengths": np.array([0, 37, 80])}
    want = attention(q, k, v, score=score, return_lse=True, **options)
    found = solve(q, k, v, score=operands_of(score, {}), **options)
    for x, y in zip(found, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(**by_dtype())
def test_entries_out_of_range_are_nan_and_no_others(dtype):
    (q, k, v), table = some_pages(dtype)
    lengths = np.array([80, 33, 80])
    want = solve(q, k, v, page_table=table, k_lengths=lengths)

    def check(bad, table=table, lengths=lengths):
        found = solve(q, k, v, page_table=table, k_lengths=lengths)
        for x, y in zip(found, want, strict=True):
            x, y = x.astype(float), y.astype(float)
            assert np.isnan(x[bad]).all()
            good = np.delete(x, bad, 0), np.delete(y, bad, 0)
            np.testing.assert_allclose(*good, rtol=0, atol=8 * UNIT[dtype])

    check([])
    for value in (-1, 81, 2**40, -(2**40)):
        check([1], lengths=np.array([80, value, 80]))
    check([0, 2], lengths=np.array([-1, 33, 81]))
    for number in (-1, 7, 2**40, -(2**40)):
        behind, needed = table.copy(), table.copy()
        behind[1, 3], needed[1, 2] = number, number
        check([], table=behind)
        check([1], table=needed)
    table = table.copy()
    table[2, 4] = -1
    out, lse = solve(q, k, v, page_table=table)
    assert np.isnan(out.astype(float)).all(axis=(1, 2, 3)).tolist() == [False, False, True]
    assert np.isnan(lse).all(axis=(1, 2)).tolist() == [False, False, True]


@pytest.mark.parametrize("axes", [2, 3, 4])
def test_one_length_that_is_out_of_range_makes_all_nan(axes):
    (q, k, v), _ = some_pages(np.float32)
    q, k, v = (x[0][(0,) * (3 - axes)] if axes < 4 else x[:3] for x in (q, k[:, :1], v[:, :1]))
    for length, nan in ((-1, True), (17, True), (16, False), (0, False)):
        found = solve(q, k, v, k_lengths=length)
        assert {bool(x) for y in found for x in np.isnan(y).ravel()} == {nan}


def test_there_are_no_pages():
    (q, k, v), table = some_pages(np.float32)
    out, lse = solve(q, k[:0], v[:0], page_table=table, k_lengths=np.array([0, 1, 0]))
    assert np.isnan(out).all(axis=(1, 2, 3)).tolist() == [False, True, False]
    assert np.isneginf(lse[::2]).all()
    out, lse = solve(q, k, v, page_table=table[:, :0])
    assert not out.any()
    assert np.isneginf(lse).all()


def test_a_band_that_does_not_count_from_the_ends_stays():
    """And a mask has no axis of queries then."""
    (q, k, v), table = some_pages(np.float32)
    lengths = np.array([3, 37, 80])
    for align, shape in (("top_left", (3, 1, 1, 80)), ("bottom_right", (3, 1, 5, 80))):
        options = {"is_causal": True, "causal_align": align, "page_table": table}
        problem = attention_problem(q, k, v, None, None, k_lengths=lengths, **options)
        found = gathered(np, problem, k, v, None, KeyArrays(lengths, table))
        assert found.mask.shape == shape
        assert (found.problem.upper == problem.upper) == (align == "top_left")
        assert found.k.flags.c_contiguous
        assert found.k.shape == (3, 2, 80, 8)
