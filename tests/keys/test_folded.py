"""Gradients with key lengths as those of packed sequences, in NumPy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_cupy.core.arrays import empty_laid_out
from fa_cupy.core.attention_problem import gradient_problem
from fa_cupy.cpu import attention_backward as cpu_backward
from fa_cupy.keys.folded import can_fold, folded, folded_problem, unfold
from fa_cupy.keys.gathered import unpacked_gradients
from fa_cupy.keys.layout import KeyArrays
from tests.api.test_key_lengths import BANDS
from tests.keys.test_gathered import solve
from tests.support import gradients
from tests.support.strategies import DTYPES, Case, lay, normal


def empty(shape, dtype, like):
    return empty_laid_out(np, shape, like, dtype)


def problem_of(inputs, results, **options):
    return gradient_problem(inputs, *results, "test", **options)


def solve_gradients(dout, dlse, q, k, v, *, sinks=None, k_lengths, **options):
    """The gradients by a call with offsets, whose numbers need not be in order."""
    keys, inputs = KeyArrays(np.asarray(k_lengths)), (q, k, v, None, None)
    options |= {"k_lengths": keys.lengths, "sinks": sinks}
    results = *solve(*inputs, **options), dout, dlse
    problem = problem_of(inputs, results, **options)
    assert can_fold(problem, inputs[:3], sinks)
    alone, laid = folded_problem(problem, inputs[:3], sinks)
    call = folded(np, problem, inputs, results, keys)
    for name, x in zip(laid, (*call.inputs[:3], call.results[0]), strict=True):
        assert (laid[name].shape, laid[name].dtype) == (x.shape, x.dtype)
        assert x.flags.c_contiguous
    assert all(np.isfinite(x.astype(float)).all() for x in call.inputs[1:3])
    need = ("q", "k", "v") if sinks is None else ("q", "k", "v", "sinks")
    alone, mask, clean = unpacked_gradients(np, alone, None, call.results, sinks, call.keys)
    parts = cpu_backward.backward(alone, (*call.inputs[:4], mask), clean, need, empty, sinks)
    found = {name: parts[name] for name in need[3:]}
    for name, of in zip("qkv", inputs, strict=False):
        found[name] = empty(of.shape, of.dtype, of)
        unfold(found[name], parts[name])
    return found


@given(
    entries=st.sampled_from([(1,), (3,), (2, 2)]),
    heads=st.sampled_from([(4, 2, 4), (1, 1, 1)]),
    lengths=st.tuples(st.integers(1, 20), st.integers(1, 25)),
    dtype=st.sampled_from(DTYPES),
    band=st.sampled_from(BANDS),
    layout=st.sampled_from(["dense", "blhd", "steps"]),
    more=st.tuples(st.booleans(), st.sampled_from([None, (), (1,), (4, 1)]), st.integers(0, 99)),
)
@settings(deadline=None)
def test_gradients_agree_with_the_reference(entries, heads, lengths, dtype, band, layout, more):
    with_dlse, of_sinks, seed = more
    rng, (q_len, k_len) = np.random.default_rng(seed), lengths
    sizes = zip(heads, (q_len, k_len, k_len), (8, 8, 5), strict=True)
    q, k, v = (normal(rng, (*entries, h, n, d), dtype) for h, n, d in sizes)
    options = {**band, "k_lengths": rng.integers(0, k_len + 1, entries)}
    if of_sinks is not None:
        options["sinks"] = normal(rng, of_sinks[-2:] if heads[0] > 1 else (), dtype)
    for x in (k, v):
        hidden = np.arange(k_len) >= options["k_lengths"][..., None]
        x[np.broadcast_to(hidden[..., None, :], x.shape[:-1])] = np.nan
    dout = normal(rng, (*q.shape[:-1], 5), dtype)
    dlse = normal(rng, q.shape[:-1], gradients.sum_dtype(dtype)) if with_dlse else None
    found = solve_gradients(dout, dlse, *(lay(np, x, layout) for x in (q, k, v)), **options)
    names = [name for name in gradients.NAMES if name in found]
    case = Case(q, k, v, options=options)
    gradients.hold(case, {name: found[name] for name in names}, dout, dlse, 0.0)


@pytest.mark.parametrize("options", BANDS, ids=str)
def test_entries_out_of_range_have_no_part(options):
    """Neither do their results and the gradients of these, which are NaN."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((4, 2, n, 8)) for n in (5, 30, 30, 5))
    sinks, dlse = np.ones((2, 1)), rng.standard_normal((4, 2, 5))
    dout[1], dlse[1] = 0, 0
    options = {**options, "sinks": sinks}
    want = solve_gradients(dout, dlse, q, k, v, k_lengths=np.array([30, 0, 7, 30]), **options)
    dout[1], dlse[1] = np.nan, np.nan
    for length in (-1, 31, 2**40, -(2**40)):
        lengths = np.array([30, length, 7, 30])
        found = solve_gradients(dout, dlse, q, k, v, k_lengths=lengths, **options)
        assert not any(found[name][1].any() for name in "qkv")
        for name, x in found.items():
            np.testing.assert_allclose(x, want[name], rtol=1e-12, atol=1e-13)


def test_what_cannot_be_folded():
    q, k = np.zeros((2, 4, 5, 8)), np.zeros((2, 2, 9, 8))
    results = q, np.zeros((2, 4, 5)), q, None
    lengths = np.array([3, 9])

    def check(q, k, want, bias=None, mask=None, sinks=None, lengths=lengths):
        problem = problem_of((q, k, k, bias, mask), results, sinks=sinks, k_lengths=lengths)
        assert can_fold(problem, (q, k, k), sinks) == want

    check(q, k, True)
    check(q, k, True, sinks=np.zeros((4, 1)))
    check(q, k, True, lengths=np.array(3))
    check(q[:1], k, False)
    check(q, np.zeros((4, 9, 8)), False)
    check(q, k[..., :0, :], False, lengths=np.array(0))
    check(q, k, False, bias=np.zeros(9))
    check(q, k, False, mask=np.ones((5, 9), bool))
    check(q, k, False, sinks=np.zeros((2, 4, 1)))
    check(q, k, False, sinks=np.zeros((4, 5)))
    three = np.zeros((4, 5, 8)), np.zeros((4, 9, 8))
    results = three[0], np.zeros((4, 5)), three[0], None
    check(*three, False, lengths=np.array(3))
