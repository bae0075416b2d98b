"""merge_attention: parts over disjoint keys give attention over all of them."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_cupy import attention, merge_attention, reference
from tests.support.strategies import DTYPES, UNIT, by_dtype, normal, to_numpy

DOUBLE = DTYPES[3]


def parts_of(xp, q, k, v, bounds, **options):
    """Outputs and log-sum-exps over the keys between each two bounds."""
    q, k, v = map(xp.asarray, (q, k, v))
    mask = options.pop("mask", None)
    results = []
    for a, b in itertools.pairwise(bounds):
        part = None if mask is None else xp.asarray(mask[..., a:b])
        results.append(
            attention(q, k[..., a:b, :], v[..., a:b, :], mask=part, return_lse=True, **options)
        )
    return [out for out, _ in results], [lse for _, lse in results]


@settings(max_examples=50)
@given(
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    density=st.sampled_from([0.0, 0.1, 0.9]),
)
def test_parts_give_the_whole(xp, dtype, seed, lengths, density):
    rng = np.random.default_rng(seed)
    bounds = [0, *np.cumsum(lengths).tolist()]
    q, k, v = (normal(rng, (2, n, 8), dtype) for n in (5, bounds[-1], bounds[-1]))
    mask = rng.random((5, bounds[-1])) < density
    outs, lses = parts_of(xp, q, k, v, bounds, mask=mask)
    out, lse = merge_attention(outs, lses)
    want, want_lse = reference.attention(q, k, v, None, mask)
    assert out.dtype == dtype
    assert lse.dtype == (DOUBLE if dtype == DOUBLE else np.float32)
    largest = np.abs(v).astype(float).max(initial=1)
    limit = max(4 * UNIT[dtype], 64 * UNIT[DTYPES[3 if dtype == DOUBLE else 2]]) * largest
    np.testing.assert_allclose(to_numpy(out).astype(float), want, rtol=0, atol=limit)
    np.testing.assert_allclose(to_numpy(lse), want_lse, rtol=0, atol=limit)


@pytest.mark.parametrize(**by_dtype())
def test_parts_may_be_stacked(xp, dtype):
    rng = np.random.default_rng(0)
    q, k, v = (normal(rng, (3, 9, 8), dtype) for _ in range(3))
    outs, lses = parts_of(xp, q, k, v, [0, 4, 9])
    want = merge_attention(outs, lses)
    got = merge_attention(xp.stack(outs), xp.stack(lses))
    assert [to_numpy(x).tobytes() for x in got] == [to_numpy(x).tobytes() for x in want]


def test_one_part_is_itself(xp):
    rng = np.random.default_rng(0)
    out, lse = xp.asarray(rng.standard_normal((9, 4))), xp.asarray(rng.standard_normal(9))
    merged, merged_lse = merge_attention([out], (lse,))
    np.testing.assert_array_equal(to_numpy(merged), to_numpy(out))
    np.testing.assert_array_equal(to_numpy(merged_lse), to_numpy(lse))
    assert merged is not out


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_empty_parts_count_for_nothing(xp, bad):
    rng = np.random.default_rng(0)
    full, lse = rng.standard_normal((9, 4)), rng.standard_normal(9)
    lse[3] = -np.inf
    full[3] = bad
    empty = np.full_like(full, bad), np.full_like(lse, -np.inf)
    for order in (1, -1):
        outs = [xp.asarray(x) for x in (full, empty[0])[::order]]
        lses = [xp.asarray(x) for x in (lse, empty[1])[::order]]
        out, merged = map(to_numpy, merge_attention(outs, lses))
        assert (out[3] == 0).all()
        np.testing.assert_array_equal(np.delete(out, 3, 0), np.delete(full, 3, 0))
        np.testing.assert_array_equal(merged, lse)


def test_nan_that_was_attended_to_stays(xp):
    outs = [xp.asarray([[1.0], [np.nan]]), xp.asarray([[3.0], [3.0]])]
    lses = [xp.asarray([np.nan, 0.0]), xp.asarray([0.0, 0.0])]
    out, lse = map(to_numpy, merge_attention(outs, lses))
    assert np.isnan(out).all()
    assert np.isnan(lse[0])
    assert np.isfinite(lse[1])


def test_weights_do_not_overflow(xp):
    outs = [xp.asarray([[1.0]], np.float32), xp.asarray([[3.0]], np.float32)]
    for big in (5000.0, -5000.0):
        lses = [xp.asarray([big], np.float32), xp.asarray([big], np.float32)]
        out, lse = map(to_numpy, merge_attention(outs, lses))
        assert out.item() == 2
        np.testing.assert_allclose(lse, big + np.log(2), rtol=1e-6)


def test_inputs_stay_as_they_are(xp):
    outs, lses = [xp.ones((3, 2)), xp.zeros((3, 2))], [xp.zeros(3), xp.ones(3)]
    before = [to_numpy(x).tobytes() for x in outs + lses]
    merge_attention(outs, lses)
    assert before == [to_numpy(x).tobytes() for x in outs + lses]


OUT, LSE = np.zeros((3, 2), np.float32), np.zeros(3, np.float32)


@pytest.mark.parametrize(
    ("outs", "lses", "error", "text"),
    [
        ([], [], ValueError, "lses has 0 parts, outs has 0, want the same number, at least 1"),
        ([OUT], [LSE, LSE], ValueError, "lses has 2 parts, outs has 1, want the same number"),
        (OUT[:0], LSE[:0], ValueError, "lses has 0 parts, outs has 0"),
        ([OUT], LSE[0], TypeError, "(float32), want a sequence of arrays"),
        (memoryview(OUT), [LSE], TypeError, "(memoryview), want a sequence of arrays"),
        (bytearray(3), [LSE] * 3, TypeError, "(bytearray), want a sequence of arrays"),
        ([OUT], "lse", TypeError, "lses is 'lse' (str), want a sequence of arrays"),
        (3, [LSE], TypeError, "outs is 3 (int), want a sequence of arrays"),
        ([OUT, None], [LSE, LSE], TypeError, "outs has a part that is None, want arrays"),
        ([OUT, 1.0], [LSE, LSE], TypeError, "outs[1] is a float, want an array"),
        ([OUT, OUT[:2]], [LSE, LSE], ValueError, "outs[1] has shape (2, 2), outs[0] has (3, 2)"),
        ([OUT, OUT], [LSE, LSE[:2]], ValueError, "lses[1] has shape (2,), want (3,)"),
        ([LSE], [LSE], ValueError, "outs[0] has shape (3,), want at least 2 axes"),
        (
            [OUT, OUT.astype(float)],
            [LSE, LSE],
            TypeError,
            "outs[1] has dtype float64, outs[0] has float32",
        ),
        ([OUT], [LSE.astype(int)], TypeError, "lses[0] has dtype int64, want float16"),
    ],
)
def test_errors(outs, lses, error, text):
    with pytest.raises(error, match=r"^merge_attention: ") as caught:
        merge_attention(outs, lses)
    assert text in str(caught.value)


@pytest.mark.parametrize(**by_dtype())
def test_large_values_do_not_overflow(xp, dtype):
    largest = float(ml_dtypes.finfo(dtype).max)
    values = np.array([[0.9], [-0.9], [0.4]]) * largest
    outs = [xp.asarray(values.astype(dtype))] * 5
    lses = [xp.asarray(np.full(3, lse, np.float32)) for lse in (0.0, 1.0, -2.0, 1.5, 1.5)]
    out, _ = merge_attention(outs, lses)
    np.testing.assert_allclose(to_numpy(out).astype(float), values, rtol=8 * UNIT[dtype])
