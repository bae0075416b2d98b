"""Calls with key lengths and pages as calls without them, in NumPy."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fa_cupy import Score, attention
from fa_cupy._score import operands_of
from fa_cupy.core.arrays import empty_laid_out
from fa_cupy.core.attention_problem import attention_problem, gradient_problem
from fa_cupy.cpu import attention as cpu_attention
from fa_cupy.cpu import attention_backward as cpu_backward
from fa_cupy.keys.gathered import gathered, gathered_gradients, mark_bad
from fa_cupy.keys.layout import KeyArrays
from tests.api.test_gradients import plain_options
from tests.api.test_key_lengths import BANDS, describe
from tests.support import gradients
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


@given(case=cases_with_lengths())
def test_calls_with_lengths_agree_with_the_reference(case):
    describe(case)
    check_against_reference(case, *solve(*case.native(np), **case.options))


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


# Gradients


def empty(shape, dtype, like):
    return empty_laid_out(np, shape, like, dtype)


def solve_gradients(dout, dlse, q, k, v, bias=None, mask=None, *, sinks=None, **options):
    """The gradients that there are, by a call without lengths, and the inputs of that."""
    keys = KeyArrays(np.asarray(options.pop("k_lengths")))
    inputs = q, k, v, bias, mask
    options |= {"k_lengths": keys.lengths, "sinks": sinks}
    results = *solve(*inputs, **options), dout, dlse
    problem = gradient_problem(inputs, *results, "test", **options)
    given = gathered_gradients(np, problem, inputs, results, sinks, keys)
    assert given[0].k_lengths is None
    assert not given[0].band_from_end
    need = [name for name, x in zip(gradients.NAMES, (*inputs[:4], sinks), strict=True)
            if x is not None]  # fmt: skip
    return cpu_backward.backward(*given, tuple(need), empty, sinks), given[1]


@given(case=cases_with_lengths(finite=True), dlse=st.booleans())
def test_gradients_with_lengths_agree_with_the_reference(case, dlse):
    assume(plain_options(case))
    describe(case)
    options = {name: x for name, x in case.options.items() if name != "precision"}
    rng, (out, lse) = np.random.default_rng(7), solve(*case.native(np), **options)
    dout = normal(rng, out.shape, case.q.dtype)
    dlse = normal(rng, lse.shape, lse.dtype) if dlse else None
    found, _ = solve_gradients(dout, dlse, *case.native(np), **options)
    gradients.hold(case, found, dout, dlse, 0.0)


@pytest.mark.parametrize("options", BANDS, ids=str)
@pytest.mark.parametrize(**by_dtype())
def test_entries_out_of_range_have_no_part_in_gradients(dtype, options):
    """Neither do their results and the gradients of these, which are NaN."""
    rng = np.random.default_rng(0)
    shapes = (3, 4, 5, 8), (3, 2, 30, 8), (3, 2, 30, 4), (3, 4, 5, 4)
    q, k, v, dout = (normal(rng, shape, dtype) for shape in shapes)
    sinks, dlse = np.ones((4, 1)), rng.standard_normal((3, 4, 5)).astype(gradients.sum_dtype(dtype))
    dout[1], dlse[1] = 0, 0
    options = {**options, "sinks": sinks}
    want, _ = solve_gradients(dout, dlse, q, k, v, k_lengths=np.array([30, 0, 7]), **options)
    dout[1], dlse[1] = np.nan, np.nan
    for length in (-1, 31, 2**40, -(2**40)):
        lengths = np.array([30, length, 7])
        found, given = solve_gradients(dout, dlse, q, k, v, k_lengths=lengths, **options)
        assert given[4].any(axis=(1, 2, 3)).tolist() == [True, False, True]
        assert not any(found[name][1].any() for name in "qkv")
        for name, x in found.items():  # the other outputs may be rounded in another way
            x, y = x.astype(float), want[name].astype(float)
            np.testing.assert_allclose(x, y, rtol=16 * UNIT[dtype], atol=16 * UNIT[dtype])


@pytest.mark.parametrize("axes", [2, 3, 4])
def test_one_length_that_is_out_of_range_leaves_nothing(axes):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 4, 5, 8))[(0,) * (4 - axes)]
    for length in (-1, 6, 0):
        found, _ = solve_gradients(q, None, q, q, q, k_lengths=length)
        assert not any(x.any() for x in found.values())
    found, _ = solve_gradients(q, None, q, q, q, k_lengths=5)
    assert all(x.any() for x in found.values())


@pytest.mark.parametrize(
    ("shape", "of_keys", "ends"),
    [
        ((2,), (2, 1, 9, 4), [[3], [7]]),
        ((2,), (9, 4), 7),
        ((2,), (1, 1, 9, 4), [[7]]),
        ((2, 3), (1, 3, 1, 9, 4), [[[4], [5], [7]]]),
        ((2, 3), (3, 1, 9, 4), [[4], [5], [7]]),
        ((3,), (2, 3, 1, 9, 4), [[[3], [7], [0]]] * 2),
        ((), (2, 1, 9, 4), 7),
    ],
    ids=str,
)
def test_keys_that_no_entry_has_are_zeros(shape, of_keys, ends):
    """And those behind the end of one of the entries that share them are not."""
    lengths = {(2,): [3, 7], (2, 3): [[4, 5, 0], [1, 2, 7]], (3,): [3, 7, 0], (): 7}[shape]
    q, k = np.zeros((*(shape or (2,))[:1], 1, 2, 4)), np.full(of_keys, np.nan)
    if len(shape) == 2 or len(of_keys) > 4:
        q = np.zeros((2, 3, 1, 2, 4))
    dout = np.zeros(q.shape)
    _, (_, found, *_) = solve_gradients(dout, None, q, k, k, k_lengths=np.array(lengths))
    want = np.arange(9) < np.array(ends)[..., None]
    got = np.isnan(found).all(axis=-1)
    assert got.tolist() == np.broadcast_to(want, got.shape).tolist()
    assert (np.isnan(found).any(axis=-1) == got).all()
