"""Attention: each rule that holds on the CPU and the GPU alike, and a fuzz of all together."""

import threading
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from scipy import special

from fa_cupy import attention, reference
from tests.support.every_run import by_dtype_examples, only
from tests.support.strategies import (
    BFLOAT16,
    DTYPES,
    LAYOUTS,
    Case,
    by_dtype,
    cases,
    check_against_reference,
    lay,
    normal,
    to_numpy,
)

HALF, _, SINGLE, DOUBLE = DTYPES


def draw(*shapes, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [normal(rng, shape, dtype) for shape in shapes]


def solve(xp, case):
    """Run a case on `xp`; inputs must stay as they are and every element of `out` be written."""
    arrays = case.native(xp)
    before = [None if a is None else to_numpy(a).tobytes() for a in arrays]
    shape, _ = reference.attention(*case.arrays, **case.options)
    nothing = np.full(shape.shape, np.nan).astype(case.q.dtype)
    out = xp.asarray(nothing) if case.with_out else None
    result, lse = attention(*arrays, return_lse=True, out=out, **case.options)
    assert out is None or result is out
    assert isinstance(result, xp.ndarray)
    assert isinstance(lse, xp.ndarray)
    assert before == [None if a is None else to_numpy(a).tobytes() for a in arrays]
    return to_numpy(result), to_numpy(lse)


def check(xp, *arrays, **options):
    """Compare a call on `xp` with the reference; arrays are NumPy's."""
    case = Case(*arrays, *[None] * (5 - len(arrays)), options=options)
    out, lse = solve(xp, case)
    check_against_reference(case, out, lse)
    return out, lse


@pytest.mark.parametrize(**by_dtype())
@by_dtype_examples()
@given(data=st.data())
def test_any_call_agrees_with_the_reference(xp, dtype, data):
    case = data.draw(cases([dtype]))
    shapes = [a if a is None else (a.shape, a.dtype.name) for a in case.arrays]
    note(f"{shapes} {case.options} {case.layouts}")
    out, lse = solve(xp, case)
    check_against_reference(case, out, lse)


@given(case=cases(dtypes=DTYPES[:2]))
@settings(max_examples=20)
def test_a_repeated_call_gives_the_same_bits(xp, case):
    first, second = solve(xp, case), solve(xp, case)
    assert [x.tobytes() for x in first] == [x.tobytes() for x in second]


# Accuracy


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize(**by_dtype(HALF, BFLOAT16))
def test_error_is_that_of_the_plain_formula(xp, dtype, head_dim, is_causal):
    q, k, v = draw(*[(2, 512, head_dim)] * 3, dtype=dtype)
    want, _ = reference.attention(q, k, v, is_causal=is_causal)
    plain = reference.plain(q, k, v, dtype=dtype, is_causal=is_causal)
    got = attention(*map(xp.asarray, (q, k, v)), is_causal=is_causal)
    error = reference.relative_error(to_numpy(got), want)
    assert error <= 1.1 * reference.relative_error(plain, want)


@pytest.mark.parametrize(
    ("dtype", "limit"), only([(SINGLE, 2e-6), (DOUBLE, 1e-13)], (SINGLE, 2e-6)), ids=str
)
def test_error_of_long_sequences(xp, dtype, limit):
    q, k, v = draw((4096, 64), (4096, 64), (4096, 64), dtype=dtype)
    got, lse = attention(*map(xp.asarray, (q, k, v)), return_lse=True)
    want, want_lse = reference.attention(q, k, v)
    assert reference.relative_error(to_numpy(got), want) <= limit
    assert reference.relative_error(to_numpy(lse), want_lse) <= limit


@pytest.mark.parametrize(**by_dtype())
def test_large_scores_do_not_overflow(xp, dtype):
    q, k, v = draw((70, 32), (90, 32), (90, 8), dtype=dtype)
    check(xp, q * dtype.type(30), k * dtype.type(30), v, scale=1.0)


@pytest.mark.parametrize("order", ["rising", "falling", "peak"])
@pytest.mark.parametrize(**by_dtype())
def test_the_maximum_may_come_in_any_tile(xp, dtype, order):
    q, k, v = draw((70, 16), (3000, 16), (3000, 8), dtype=dtype)
    ramp = np.linspace(-60, 60, 3000, dtype=np.float32)
    bias = {"rising": ramp, "falling": ramp[::-1], "peak": 90 - np.abs(3 * ramp)}[order]
    check(xp, q, k, v, bias)


# Shapes


def test_two_axes_are_the_formula(xp):
    q, k, v = draw((5, 4), (7, 4), (7, 3), dtype=DOUBLE)
    want = special.softmax(0.5 * q @ k.T, axis=-1) @ v
    got = attention(*map(xp.asarray, (q, k, v)))
    np.testing.assert_allclose(to_numpy(got), want, rtol=1e-13)


@pytest.mark.parametrize(
    ("q", "k", "v", "bias", "mask"),
    [
        ((3, 1), (2,), (), (), ()),
        ((), (2, 1), (3,), (), ()),
        ((1,), (4,), (1,), (4,), (1,)),
        ((), (), (), (2, 3), (3,)),
        ((2, 1, 3), (1, 2, 1), (2, 2, 3), (3,), (2, 1, 1)),
        ((2, 4), (4,), (2, 1), (1, 4), ()),
    ],
)
def test_batch_axes_broadcast_as_in_matmul(xp, q, k, v, bias, mask):
    arrays = draw((*q, 9, 8), (*k, 11, 8), (*v, 11, 5), (*bias, 9, 11), (*mask, 9, 11))
    arrays[-1] = arrays[-1] > -1
    check(xp, *arrays)


@pytest.mark.parametrize(("q_heads", "k_heads", "v_heads"), [(8, 2, 2), (6, 3, 3), (8, 4, 2)])
@pytest.mark.parametrize("layout", ["dense", "blhd"])
def test_grouped_heads_are_repeated_heads(xp, q_heads, k_heads, v_heads, layout):
    q, k, v = draw((2, q_heads, 9, 16), (2, k_heads, 12, 16), (2, v_heads, 12, 16))
    bias, mask = draw((q_heads, 1, 12), (2, q_heads, 9, 12))
    mask = mask > -1
    got = attention(*(lay(xp, a, layout) for a in (q, k, v, bias, mask)))
    k, v = (np.repeat(a, q_heads // a.shape[1], axis=1) for a in (k, v))
    want, _ = reference.attention(q, k, v, bias, mask)
    np.testing.assert_allclose(to_numpy(got), want, rtol=1e-5, atol=1e-6)


def test_grouped_heads_with_one_head_of_one_side(xp):
    q, k, v = draw((2, 8, 9, 16), (2, 1, 12, 16), (2, 4, 12, 16))
    check(xp, q, k, v)


@pytest.mark.parametrize(
    "shapes",
    [
        ((0, 8), (5, 8), (5, 4)),
        ((3, 8), (0, 8), (0, 4)),
        ((3, 0), (5, 0), (5, 4)),
        ((3, 8), (5, 8), (5, 0)),
        ((0, 0), (0, 0), (0, 0)),
        ((0, 2, 3, 8), (0, 2, 5, 8), (0, 2, 5, 4)),
        ((2, 0, 3, 8), (5, 8), (5, 4)),
    ],
)
def test_axes_of_length_zero(xp, shapes):
    out, lse = check(xp, *draw(*shapes))
    if shapes[1][-2] == 0:
        assert (out == 0).all()
        assert (lse == -np.inf).all()


def test_no_head_dim_gives_the_mean_of_the_values(xp):
    v = draw((5, 4))[0]
    out, lse = check(xp, np.zeros((3, 0), np.float32), np.zeros((5, 0), np.float32), v)
    np.testing.assert_allclose(out, np.tile(v.mean(0), (3, 1)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, np.log(5), rtol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 257, 300])
def test_wide_and_narrow_heads(xp, size):
    check(xp, *draw((3, 20, size), (3, 30, size), (3, 30, 7), dtype=HALF))
    check(xp, *draw((3, 20, 7), (3, 30, 7), (3, 30, size), dtype=HALF))


# Memory


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(**by_dtype(HALF, SINGLE))
def test_strides_are_free(xp, dtype, layout):
    arrays = draw((2, 3, 33, 16), (2, 3, 40, 16), (2, 3, 40, 16), (2, 3, 33, 40), dtype=dtype)
    mask = arrays[-1] < 1
    case = Case(*arrays, mask, layouts=(layout,) * 5)
    check_against_reference(case, *solve(xp, case))


def test_repeated_memory_is_fine_for_inputs(xp):
    q, k, v = (xp.broadcast_to(xp.asarray(a), (3, 9, 8)) for a in draw((9, 8), (1, 8), (1, 9, 8)))
    want, _ = reference.attention(*map(to_numpy, (q, k, v)))
    np.testing.assert_allclose(to_numpy(attention(q, k, v)), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", ["dense", "blhd", "transposed"])
@pytest.mark.parametrize(**by_dtype(HALF, SINGLE))
def test_out_is_laid_out_as_q(xp, dtype, layout):
    q, k, v = draw((2, 3, 33, 16), (2, 3, 40, 16), (2, 3, 40, 16), dtype=dtype)
    q = lay(xp, q, layout)
    assert attention(q, xp.asarray(k), xp.asarray(v)).strides == q.strides


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(**by_dtype(HALF, SINGLE))
def test_out_may_have_any_strides(xp, dtype, layout):
    arrays = draw((2, 3, 33, 16), (2, 3, 40, 16), (2, 3, 40, 16), dtype=dtype)
    out = lay(xp, np.full((2, 3, 33, 16), np.nan, dtype), layout)
    q, k, v = map(xp.asarray, arrays)
    assert attention(q, k, v, out=out) is out
    assert to_numpy(out).tobytes() == to_numpy(attention(q, k, v)).tobytes()


def test_read_only_inputs():
    arrays = draw((9, 8), (9, 8), (9, 8))
    for a in arrays:
        a.flags.writeable = False
    want, _ = reference.attention(*arrays)
    np.testing.assert_allclose(attention(*arrays), want, rtol=1e-5, atol=1e-6)


def test_no_array_of_all_scores():
    q, k, v = draw((6000, 16), (6000, 16), (6000, 16))
    attention(q[:9], k[:9], v[:9])
    tracemalloc.start()
    try:
        attention(q, k, v)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 0.1 * 6000 * 6000 * 4


# Scores


def test_scale_may_be_anything_finite(xp):
    arrays = draw((9, 8), (11, 8), (11, 4))
    for scale in (0, -2, np.float16(0.25), np.int64(1), 1e-30):
        check(xp, *arrays, scale=scale)


def test_softcap_comes_before_the_bias(xp):
    q, k, v, bias = draw((9, 8), (11, 8), (11, 4), (9, 11), dtype=DOUBLE)
    scores = 2 * np.tanh(3 * q @ k.T / 2) + 5 * bias
    want = special.softmax(scores, axis=-1) @ v
    got = attention(*map(xp.asarray, (q, k, v, 5 * bias)), scale=3, softcap=2)
    np.testing.assert_allclose(to_numpy(got), want, rtol=1e-12)


@pytest.mark.parametrize("shape", [(), (1,), (11,), (9, 1), (1, 11), (3, 1, 11), (2, 1, 9, 11)])
@pytest.mark.parametrize(**by_dtype())
def test_bias_broadcasts_and_has_its_own_dtype(xp, dtype, shape):
    q, k, v = draw((3, 9, 8), (3, 11, 8), (3, 11, 4))
    check(xp, q, k, v, draw(shape, dtype=dtype, seed=1)[0])


@pytest.mark.parametrize("shape", [(), (1,), (11,), (9, 1), (1, 11), (3, 1, 11), (2, 1, 9, 11)])
def test_mask_broadcasts(xp, shape):
    q, k, v = draw((3, 9, 8), (3, 11, 8), (3, 11, 4))
    check(xp, q, k, v, None, np.random.default_rng(0).random(shape) < 0.5)


def test_lse_is_the_natural_logarithm(xp):
    q, k, v = draw((9, 8), (11, 8), (11, 4), dtype=DOUBLE)
    _, lse = attention(*map(xp.asarray, (q, k, v)), scale=1, return_lse=True)
    np.testing.assert_allclose(to_numpy(lse), np.log(np.exp(q @ k.T).sum(-1)), rtol=1e-13)


@pytest.mark.parametrize(**by_dtype())
def test_dtypes_of_results(xp, dtype):
    out, lse = attention(*map(xp.asarray, draw(*[(3, 4)] * 3, dtype=dtype)), return_lse=True)
    assert out.dtype == dtype
    assert lse.dtype == (DOUBLE if dtype == DOUBLE else SINGLE)


def test_one_result_without_return_lse(xp):
    assert isinstance(attention(*map(xp.asarray, draw(*[(3, 4)] * 3))), xp.ndarray)


def test_tf32_stays_near(xp):
    q, k, v = draw((100, 64), (100, 64), (100, 64))
    got = attention(*map(xp.asarray, (q, k, v)), precision="tf32")
    assert reference.relative_error(to_numpy(got), reference.attention(q, k, v)[0]) < 2e-3


# What a query sees


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize(("q_len", "k_len"), [(5, 5), (5, 9), (9, 5), (130, 200), (200, 130)])
def test_causal_alignments(xp, q_len, k_len, align):
    q, k, v = draw((q_len, 8), (k_len, 8), (k_len, 8))
    offset = k_len - q_len if align == "bottom_right" else 0
    mask = np.tril(np.ones((q_len, k_len), bool), offset)
    want, want_lse = reference.attention(q, k, v, None, mask)
    out, lse = check(xp, q, k, v, is_causal=True, causal_align=align)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize("window", [(0, 0), (3, 1), (None, 2), (2, None), (70, 70), (0, 10**30)])
@pytest.mark.parametrize(("q_len", "k_len"), [(9, 9), (150, 90), (90, 150)])
def test_windows(xp, q_len, k_len, window, align):
    q, k, v = draw((q_len, 8), (k_len, 8), (k_len, 8))
    offset = k_len - q_len if align == "bottom_right" else 0
    left, right = (q_len + k_len if side is None else min(side, 10**6) for side in window)
    ones = np.ones((q_len, k_len), bool)
    mask = np.tril(ones, offset + right) & np.triu(ones, offset - left)
    want, _ = reference.attention(q, k, v, None, mask)
    out, _ = check(xp, q, k, v, window=window, causal_align=align)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)


def test_mask_causality_and_window_compose(xp):
    q, k, v = draw((40, 8), (40, 8), (40, 8))
    mask = np.random.default_rng(0).random((40, 40)) < 0.5
    seen = mask & np.tril(np.ones((40, 40), bool)) & np.triu(np.ones((40, 40), bool), -7)
    want, _ = reference.attention(q, k, v, None, seen)
    out, _ = check(xp, q, k, v, None, mask, is_causal=True, window=(7, 3))
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)


HIDE = ["mask", "bias", "causal", "window", "keys"]


def hidden(how, q_len, k_len, keys):
    """Arguments that hide `keys`, the last ones, from all queries in one of several ways."""
    mask = np.ones((q_len, k_len), bool)
    mask[:, k_len - keys :] = False
    if how == "mask":
        return {"mask": mask}
    if how == "keys":
        return {"mask": mask[:1]}
    if how == "bias":
        return {"bias": np.where(mask, np.float32(0), np.float32(-np.inf))}
    assert q_len <= k_len - keys
    if how == "causal":
        return {"is_causal": True, "causal_align": "top_left"}
    return {"window": (None, 0), "causal_align": "top_left"}


@pytest.mark.parametrize("how", HIDE)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(**by_dtype())
def test_nothing_leaks_from_hidden_keys_and_values(xp, dtype, bad, how):
    q, k, v = draw((50, 16), (150, 16), (150, 16), dtype=dtype)
    options = hidden(how, 50, 150, 100)
    arrays = {arg: options.pop(arg, None) for arg in ("bias", "mask")}
    v[50:] = bad
    if how != "bias":  # NaN + -inf is NaN: a bias does not hide a key that is not finite
        k[50:] = bad
    out, lse = check(xp, q, k, v, *arrays.values(), **options)
    assert np.isfinite(out.astype(float)).all()
    assert np.isfinite(lse).all()


@pytest.mark.parametrize("how", ["mask", "bias", "causal", "window"])
@pytest.mark.parametrize(**by_dtype())
def test_a_row_with_nothing_to_attend_to(xp, dtype, how):
    q, k, v = draw((60, 16), (40, 16), (40, 16), dtype=dtype)
    bias, mask, options = None, None, {}
    if how == "mask":
        mask = np.ones((60, 40), bool)
        mask[:20] = False
    elif how == "bias":
        bias = np.zeros((60, 1), np.float32)
        bias[:20] = -np.inf
    elif how == "causal":
        options = {"is_causal": True, "causal_align": "bottom_right"}
    else:
        options = {"window": (None, 0), "causal_align": "bottom_right"}
    v[5] = np.nan
    out, lse = check(xp, q, k, v, bias, mask, **options)
    assert (out[:20] == 0).all()
    assert (lse[:20] == -np.inf).all()
    assert np.isfinite(lse[20:]).all()


def test_scores_of_minus_infinity_attend_to_nothing(xp):
    q, v = np.ones((3, 2), np.float32), np.full((4, 2), np.nan, np.float32)
    out, lse = attention(
        *map(xp.asarray, (q, np.full((4, 2), -np.inf, np.float32), v)), return_lse=True
    )
    assert (to_numpy(out) == 0).all()
    assert (to_numpy(lse) == -np.inf).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(**by_dtype())
def test_bad_scores_spoil_their_row_only(xp, dtype, bad):
    q, k, v = draw((50, 16), (90, 16), (90, 16), dtype=dtype)
    bias = np.zeros((50, 90), dtype)
    bias[7, 80] = bad
    out, lse = check(xp, q, k, v, bias)
    assert np.isnan(out[7].astype(float)).all()
    assert np.isnan(lse[7])
    assert np.isfinite(np.delete(out.astype(float), 7, axis=0)).all()


@pytest.mark.parametrize(**by_dtype())
def test_a_bad_value_that_is_seen_spoils_its_column_only(xp, dtype):
    q, k, v = draw((50, 16), (50, 16), (50, 16), dtype=dtype)
    v[30, 3] = np.nan
    out, lse = check(xp, q, k, v, is_causal=True)
    assert np.isnan(out[30:, 3].astype(float)).all()
    assert np.isfinite(np.delete(out.astype(float), 3, axis=1)).all()
    assert np.isfinite(out[:30].astype(float)).all()
    assert np.isfinite(lse).all()


# Threads


@pytest.mark.parametrize(**by_dtype(HALF, SINGLE))
def test_calls_from_several_threads(xp, dtype):
    arrays = [
        [xp.asarray(a) for a in draw(*[(2, 150, 32)] * 3, dtype=dtype, seed=s)] for s in range(4)
    ]
    want = [to_numpy(attention(*a, is_causal=True)).tobytes() for a in arrays]
    got = [[] for _ in arrays]

    def work(i):
        for _ in range(5):
            got[i].append(to_numpy(attention(*arrays[i], is_causal=True)).tobytes())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(arrays))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [[w] * 5 for w in want]
