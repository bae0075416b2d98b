"""Calls with offsets as calls without them, in NumPy: what backends without a kernel do."""

import itertools
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import BitMask, Score, reference
from fa_cupy._score import operands_of
from fa_cupy.core.arrays import empty_laid_out
from fa_cupy.core.attention_problem import attention_problem, gradient_problem
from fa_cupy.cpu import attention as cpu_attention
from fa_cupy.cpu import attention_backward as cpu_backward
from fa_cupy.keys import offsets as key_offsets
from fa_cupy.keys import sequences
from fa_cupy.keys.gathered import mark_bad_rows, unpacked, unpacked_gradients
from tests.api.test_key_lengths import describe
from tests.api.test_packed import BANDS, K_LEN, K_OFFSETS, Q_LEN, Q_OFFSETS
from tests.support import gradients
from tests.support.keyed_cases import packed_cases
from tests.support.strategies import UNIT, by_dtype, check_against_reference, normal


def empty(shape, dtype, like=None):
    return np.empty(shape, dtype) if like is None else empty_laid_out(np, shape, like, dtype)


def forward(arrays, *, sinks=None, score=None, by_parts=False, **options):
    """Output and log-sum-exp by a mask of all pairs, or sequence by sequence."""
    *qkv, bias, mask = arrays
    problem = attention_problem(*arrays, sinks=sinks, score=score, **options)
    keys = key_offsets.key_arrays(options["q_offsets"], options.get("k_offsets"))
    if by_parts:
        return sequences.attention(
            cpu_attention.attention, empty, problem, arrays, None, True, sinks, score, keys
        )
    alone, mask, bad = unpacked(np, problem, mask, keys)
    assert alone.offsets is None
    assert not alone.band_from_end
    out, lse = cpu_attention.attention(alone, *qkv, bias, mask, None, True, sinks, score)
    mark_bad_rows(np, bad, out, lse)
    return out, lse


def backward(arrays, results, need, *, sinks=None, by_parts=False, **options):
    """Gradients, by name."""
    problem = gradient_problem(arrays, *results, "test", sinks=sinks, **options)
    keys = key_offsets.key_arrays(options["q_offsets"], options.get("k_offsets"))

    def solve(alone, inputs, results, need, sinks, score):
        return cpu_backward.backward(alone(), (*inputs,), results, need, empty, sinks, score)

    if by_parts:
        backend = sequences.Backend(
            np, solve, empty, partial(np.copyto, casting="unsafe"),
            lambda work, parts: [work(part) for part in parts],
        )  # fmt: skip
        return sequences.backward(backend, problem, arrays, results, need, sinks, None, keys)
    given = unpacked_gradients(np, problem, arrays[4], results, sinks, keys)
    alone, mask, results = given
    return cpu_backward.backward(alone, (*arrays[:4], mask), results, need, empty, sinks)


@pytest.mark.parametrize("by_parts", [False, True])
@given(case=packed_cases())
def test_calls_agree_with_the_reference(by_parts, case):
    describe(case)
    found = forward(case.native(np), by_parts=by_parts, **case.options)
    check_against_reference(case, *found)


@pytest.mark.parametrize("by_parts", [False, True])
@given(case=packed_cases(finite=True), with_dlse=st.booleans())
def test_gradients_agree_with_the_reference(by_parts, case, with_dlse):
    describe(case)
    arrays = case.native(np)
    options = {name: x for name, x in case.options.items() if name != "precision"}
    out, lse = forward(arrays, **options)
    rng = np.random.default_rng(0)
    dout, dlse = normal(rng, out.shape, out.dtype), normal(rng, lse.shape, lse.dtype)
    dlse = dlse if with_dlse else None
    given = dict(zip(gradients.NAMES, (*arrays[:4], options.get("sinks")), strict=True))
    need = tuple(name for name, x in given.items() if x is not None)
    found = backward(arrays, (out, lse, dout, dlse), need, by_parts=by_parts, **options)
    gradients.hold(case, {name: found[name] for name in need}, dout, dlse, 0.0)


# Offsets that nobody has looked at


def normalised(numbers, length):
    """By the definition: a running maximum of what is in range."""
    return np.maximum.accumulate(np.clip(np.array(numbers, np.int64), 0, length))


def invalid(offsets, length):
    """Whether each sequence has an offset that is not as it should be."""
    wrong = np.asarray(offsets, np.int64) != normalised(offsets, length)
    return wrong[1:] | wrong[:-1]


@st.composite
def wild(draw, count, dtype):
    """Offsets of any numbers."""
    most = np.iinfo(dtype)
    some = st.integers(-3, 50) | st.sampled_from([most.min, most.max, 2**31 - 1, -1])
    return np.array(draw(st.lists(some, min_size=count + 1, max_size=count + 1)), dtype)


@given(data=st.data(), count=st.integers(0, 6), options=st.sampled_from(BANDS))
def test_sequences_with_invalid_offsets_are_nan_and_no_others(data, count, options):
    integers = st.sampled_from([np.int32, np.int64])
    q_offsets, k_offsets = (data.draw(wild(count, data.draw(integers))) for _ in range(2))
    rng = np.random.default_rng(0)
    q, k, v, sinks, dout = (
        rng.standard_normal(shape) for shape in ((2, 40, 8), (2, 30, 8), (2, 30, 4), (2, 1),
                                                 (2, 40, 4))
    )  # fmt: skip
    arrays = q, k, v, None, None
    options = {**options, "q_offsets": q_offsets, "k_offsets": k_offsets, "sinks": sinks}
    out, lse = forward(arrays, **options)
    need = ("q", "k", "v", "sinks")
    found = backward(arrays, (out, lse, dout, np.ones_like(lse)), need, **options)
    bad = invalid(q_offsets, 40) | invalid(k_offsets, 30)
    q_ends, k_ends = normalised(q_offsets, 40), normalised(k_offsets, 30)
    want = np.zeros_like(out), np.broadcast_to(sinks, lse.shape).copy()
    grads = [np.zeros_like(x) for x in (q, k, v, sinks)]
    outside = 40 - (q_ends[-1] - q_ends[0])
    grads[3] += outside  # dlse is 1 in each row
    band = {name: x for name, x in options.items() if "offsets" not in name and name != "sinks"}
    for s in range(count):
        rows, keys = (slice(*x[s : s + 2]) for x in (q_ends, k_ends))
        if bad[s]:
            for x in (want[0][:, rows], want[1][:, rows]):
                x[...] = np.nan
            continue
        parts = q[:, rows], k[:, keys], v[:, keys]
        of_part = {**band, "sinks": sinks}
        want[0][:, rows], want[1][:, rows] = reference.attention(*parts, **of_part)
        own = reference.attention_backward(
            dout[:, rows], *parts, dlse=np.ones((2, q_ends[s + 1] - q_ends[s])), **of_part
        )
        grads[0][:, rows], grads[3] = own[0], grads[3] + own[3]
        grads[1][:, keys] += own[1]
        grads[2][:, keys] += own[2]
    for x, y in zip((out, lse), want, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-12)
    for name, y in zip(need, grads, strict=True):
        np.testing.assert_allclose(found[name], y, atol=1e-12, err_msg=name)


@pytest.mark.parametrize(**by_dtype())
def test_bad_rows_are_nan_in_any_dtype(dtype):
    rng = np.random.default_rng(0)
    q, k, v = (normal(rng, (3, 20, 8), dtype) for _ in range(3))
    offsets = np.array([0, 7, 3, 20])
    out, lse = forward((q, k, v, None, None), q_offsets=offsets)
    want, _ = forward((q, k, v, None, None), q_offsets=np.array([0, 7, 7, 20]))
    np.testing.assert_array_equal(np.isnan(lse).all(axis=0), np.arange(20) >= 7)
    np.testing.assert_array_equal(np.isnan(out.astype(float)).all(axis=(0, 2)), np.arange(20) >= 7)
    error = np.abs(out[:, :7].astype(float) - want[:, :7].astype(float))
    assert error.max() <= 8 * UNIT[dtype]
    arrays = q, k, v, None, None
    sinks = normal(rng, (3, 1), dtype)
    out, lse = forward(arrays, sinks=sinks, q_offsets=offsets)
    found = backward(arrays, (out, lse, q, None), ("q", "sinks"), sinks=sinks, q_offsets=offsets)
    assert not found["q"][:, 7:].any()
    assert np.isfinite(found["sinks"].astype(float)).all()


def test_a_mask_of_bits_is_unpacked():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, 8)) for n in (Q_LEN, K_LEN, K_LEN))
    seen = rng.random((2, Q_LEN, K_LEN)) < 0.5
    options = {"q_offsets": Q_OFFSETS, "k_offsets": K_OFFSETS}
    want = reference.attention(q, k, v, None, seen, **options)
    problem = attention_problem(q, k, v, None, BitMask(seen), **options)
    keys = key_offsets.key_arrays(Q_OFFSETS, K_OFFSETS)
    alone, mask, _ = unpacked(np, problem, BitMask(seen), keys)
    found = cpu_attention.attention(alone, q, k, v, None, mask, None, True)
    for x, y in zip(found, want, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-12)


def test_scores_by_positions_need_offsets_on_the_host():
    for text, refused in (("s + i", True), ("s * j", True), ("s + h * b", False)):
        score = operands_of(Score(text), {})
        if not refused:
            sequences.refuse_positions("attention", score)
            continue
        with pytest.raises(NotImplementedError, match=r"^attention: score has i or j, and no ker"):
            sequences.refuse_positions("attention", score)
    sequences.refuse_positions("attention", None)


def test_parts_cover_every_query_once():
    for numbers in ([0], [5], [20], [3, 3, 9, 9], [0, 20], [0, 0, 20, 20]):
        offsets = np.array(numbers)
        found = sequences.parts(key_offsets.key_arrays(offsets, None), 20)
        rows = [row for part in found for row in range(20)[part.rows]]
        assert rows == [*range(20)]
        own = [(part.rows.start, part.rows.stop) for part in found if part.number >= 0]
        assert own == [x for x in itertools.pairwise(numbers) if x[0] < x[1]]
        assert all(part.keys == part.rows for part in found if part.number >= 0)
        assert not any(part.pairs for part in found if part.number < 0)


def test_long_lists_of_offsets():
    """Running maxima are made in doubling steps."""
    rng = np.random.default_rng(0)
    for count in (1, 2, 3, 64, 65, 1000):
        offsets = rng.integers(-5, 60, count)
        found, wrong = key_offsets._normalised(np, offsets, 50)
        np.testing.assert_array_equal(found, normalised(offsets, 50))
        np.testing.assert_array_equal(wrong, normalised(offsets, 50) != offsets)
