"""Sinks: rules that hold on the CPU and the GPU alike, and a fuzz of them."""

import numpy as np
import pytest
from hypothesis import assume, given, note
from hypothesis import strategies as st

from fa_cupy import BitMask, attention, attention_backward, merge_attention, reference
from tests.api.test_gradients import plain_options
from tests.support import gradients
from tests.support.every_run import by_dtype_examples, examples
from tests.support.strategies import (
    DTYPES,
    UNIT,
    broadcastable,
    by_dtype,
    cases,
    check_against_reference,
    normal,
    to_numpy,
)

HALF, BFLOAT16, SINGLE, DOUBLE = DTYPES
LARGEST = np.finfo(np.float32).max


def draw(*shapes, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [normal(rng, shape, dtype) for shape in shapes]


def on(xp, *arrays):
    return [None if x is None else xp.asarray(x) for x in arrays]


def solve(xp, q, k, v, sinks, **options):
    """Output and log-sum-exp as NumPy arrays."""
    q, k, v, sinks = on(xp, q, k, v, sinks)
    return [to_numpy(x) for x in attention(q, k, v, sinks=sinks, return_lse=True, **options)]


# The definition


@st.composite
def cases_with_sinks(draw, dtypes=DTYPES):
    case = draw(cases(dtypes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = reference.attention(*case.arrays, **case.options)[1].shape
    sinks = np.asarray(3 * normal(rng, draw(broadcastable(shape)), DOUBLE))
    for value in (-np.inf, 30.0, -1e4):
        sinks[rng.random(sinks.shape) < draw(st.sampled_from([0.0, 0.1]))] = value
    case.options["sinks"] = np.asarray(sinks).astype(draw(st.sampled_from(DTYPES)))
    return case


@pytest.mark.parametrize(**by_dtype())
@by_dtype_examples()
@given(data=st.data())
def test_any_call_agrees_with_the_reference(xp, dtype, data):
    case = data.draw(cases_with_sinks([dtype]))
    sinks = case.options["sinks"]
    note(f"{[x.shape for x in case.arrays if x is not None]} {sinks.dtype} {sinks.shape}")
    options = {**case.options, "sinks": xp.asarray(sinks)}
    out, lse = attention(*case.native(xp), return_lse=True, **options)
    check_against_reference(case, to_numpy(out), to_numpy(lse))


@pytest.mark.parametrize(**by_dtype())
@by_dtype_examples()
@given(data=st.data(), dlse=st.booleans())
def test_gradients_of_any_call_agree_with_the_reference(xp, dtype, data, dlse):
    case = data.draw(cases_with_sinks([dtype]))
    assume(plain_options(case))
    sinks = case.options["sinks"]
    note(f"{[x.shape for x in case.arrays if x is not None]} {sinks.dtype} {sinks.shape}")
    gradients.check(xp, case, dlse)


@pytest.mark.parametrize(**by_dtype())
def test_a_sink_is_a_key_without_a_value(xp, dtype):
    """Its score is the bias of a key that is 0."""
    q, k, v, dout = draw((2, 4, 70, 16), (2, 2, 90, 16), (2, 2, 90, 24), (2, 4, 70, 24),
                         dtype=dtype)  # fmt: skip
    sinks = (3 * draw((4, 70), seed=1)[0]).astype(dtype)
    more_k, more_v = (np.concatenate([x, np.zeros_like(x[..., :1, :])], axis=-2) for x in (k, v))
    bias = np.zeros((4, 70, 91), dtype)
    bias[..., -1] = sinks
    out, lse = solve(xp, q, k, v, sinks)
    want, want_lse = (
        to_numpy(x) for x in attention(*on(xp, q, more_k, more_v, bias), return_lse=True)
    )
    near = {"rtol": 0, "atol": 8 * UNIT[dtype]}
    np.testing.assert_allclose(out.astype(float), want.astype(float), **near)
    np.testing.assert_allclose(
        lse, want_lse, rtol=0, atol=32 * UNIT[DOUBLE if dtype == DOUBLE else SINGLE]
    )
    found = attention_backward(*on(xp, dout, q, k, v, out, lse), sinks=xp.asarray(sinks))
    of_key = attention_backward(*on(xp, dout, q, more_k, more_v, want, want_lse, bias))
    for x, y, of in zip(found, of_key, (q, k, v, sinks), strict=True):
        x, y = to_numpy(x).astype(float), to_numpy(y).astype(float)
        y = y[..., -1] if y.shape[-1] == 91 else y[..., : of.shape[-2], :]
        np.testing.assert_allclose(x, y, rtol=0, atol=32 * UNIT[dtype] * np.abs(y).max())


@pytest.mark.parametrize("shape", [(1,), (3, 1), (2, 1, 1), (5,), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "causal_align": "bottom_right"}])
def test_finite_differences(shape, options):
    """Both the definition and the library, in float64, against central differences."""
    q, k, v, sinks = draw((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 2), shape, dtype=DOUBLE)
    dout, dlse = draw((2, 3, 5, 2), (2, 3, 5), dtype=DOUBLE, seed=1)
    mask = np.random.default_rng(2).random((5, 7)) < 0.8
    mask[1] = False
    out, lse = attention(q, k, v, mask=mask, sinks=sinks, return_lse=True, **options)
    given = {"mask": mask, "dlse": dlse, "sinks": sinks, **options}
    found = reference.attention_backward(dout, q, k, v, **given)
    by_library = attention_backward(dout, q, k, v, out, lse, **given)

    def loss():
        out, lse = reference.attention(q, k, v, None, mask, sinks=sinks, **options)
        return np.sum(dout * out) + np.sum(dlse * lse)

    for array, *grads in zip((q, k, v, sinks), found, by_library, strict=True):
        want = gradients.differences(loss, array)
        for grad in grads:
            np.testing.assert_allclose(grad, want, rtol=1e-6, atol=1e-8)


# Shapes


@pytest.mark.parametrize(**by_dtype(HALF, DOUBLE))
@pytest.mark.parametrize(
    "shape", [(), (1,), (4, 1), (2, 1, 1), (70,), (4, 70), (2, 4, 70)], ids=str
)
def test_any_shape_that_broadcasts(xp, shape, dtype):
    q, k, v, dout = draw(
        (2, 4, 70, 16), (2, 2, 50, 16), (2, 2, 50, 16), (2, 4, 70, 16), dtype=dtype
    )
    sinks = draw(shape, seed=1)[0]
    whole = np.broadcast_to(sinks, (2, 4, 70)).copy()
    out, lse = solve(xp, q, k, v, sinks)
    want = solve(xp, q, k, v, whole)
    assert [x.tobytes() for x in (out, lse)] == [x.tobytes() for x in want]
    given = on(xp, dout, q, k, v, out, lse)
    *same, found = attention_backward(*given, sinks=xp.asarray(sinks))
    *other, terms = attention_backward(*given, sinks=xp.asarray(whole))
    assert found.shape == shape
    assert [to_numpy(x).tobytes() for x in same] == [to_numpy(x).tobytes() for x in other]
    terms = to_numpy(terms).astype(float)
    axes = tuple(a for a, n in enumerate((1,) * (3 - len(shape)) + shape) if n == 1)
    want = terms.sum(axis=axes).reshape(shape)
    np.testing.assert_allclose(to_numpy(found), want, rtol=1e-5, atol=1e-5)


def test_batch_axes_of_sinks_are_batch_axes(xp):
    q, k, v, sinks = draw((5, 8), (7, 8), (7, 8), (3, 1))
    out, lse = solve(xp, q, k, v, sinks)
    assert (out.shape, lse.shape) == ((3, 5, 8), (3, 5))
    for i in range(3):
        np.testing.assert_allclose(out[i], solve(xp, q, k, v, sinks[i])[0], rtol=1e-6)


def test_strides_are_free(xp):
    q, k, v, dout = draw((2, 4, 70, 16), (2, 4, 50, 16), (2, 4, 50, 16), (2, 4, 70, 16), dtype=HALF)
    (wide,) = on(xp, draw((70, 4, 2, 3), seed=1)[0])
    sinks = wide[::-1, :, :, 1].T
    dense = xp.asarray(to_numpy(sinks))
    given = on(xp, q, k, v)
    found, want = (attention(*given, sinks=x, return_lse=True) for x in (sinks, dense))
    assert [to_numpy(x).tobytes() for x in found] == [to_numpy(x).tobytes() for x in want]
    found, want = (
        attention_backward(xp.asarray(dout), *given, *found, sinks=x) for x in (sinks, dense)
    )
    assert [to_numpy(x).tobytes() for x in found] == [to_numpy(x).tobytes() for x in want]


# Numbers at the ends


@pytest.mark.parametrize(**by_dtype())
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "causal_align": "bottom_right"}])
def test_a_sink_of_minus_infinity_is_none(xp, dtype, options):
    keys = 600  # a CPU computes a call of fewer keys without sinks by the formula, in other bits
    q, k, v, dout = draw((4, 70, 64), (4, keys, 64), (4, keys, 64), (4, 70, 64), dtype=dtype)
    sinks = np.full((4, 1), -np.inf, dtype)
    want = attention(*on(xp, q, k, v), return_lse=True, **options)
    found = solve(xp, q, k, v, sinks, **options)
    assert [x.tobytes() for x in found] == [to_numpy(x).tobytes() for x in want]
    given = *on(xp, dout, q, k, v), *want
    *same, dsinks = attention_backward(*given, sinks=xp.asarray(sinks), **options)
    other = attention_backward(*given, **options)
    assert [to_numpy(x).tobytes() for x in same] == [to_numpy(x).tobytes() for x in other]
    assert not to_numpy(dsinks).any()


def test_the_gradient_of_no_sink_is_0_whatever_its_row_holds(xp):
    q, k, v, dout = draw(*[(70, 64)] * 4, dtype=HALF)
    v[3, 0] = np.inf
    sinks = np.where(np.arange(70) < 40, -np.inf, 0)
    out, lse = solve(xp, q, k, v, sinks)
    (dsinks,) = attention_backward(
        *on(xp, dout, q, k, v, out, lse), sinks=xp.asarray(sinks), need=["sinks"]
    )
    assert not to_numpy(dsinks)[:40].any()
    assert not np.isfinite(to_numpy(dsinks)[40:]).any()


@pytest.mark.parametrize(**by_dtype())
@pytest.mark.parametrize("sink", [150.0, 1e4, 1e9, 1e30, LARGEST])
def test_a_sink_far_above_all_scores_takes_all_weight(xp, dtype, sink):
    q, k, v, dout = draw((3, 70, 64), (3, 50, 64), (3, 50, 64), (3, 70, 64), dtype=dtype)
    sinks = np.full((3, 1), sink)
    out, lse = solve(xp, q, k, v, sinks)
    assert np.abs(out.astype(float)).max() < 1e-40
    np.testing.assert_allclose(lse, sink, rtol=1e-6)
    (dlse,) = draw(lse.shape, dtype=lse.dtype, seed=1)
    found = attention_backward(
        *on(xp, dout, q, k, v, out, lse), sinks=xp.asarray(sinks), dlse=xp.asarray(dlse)
    )
    dq, dk, dv, dsinks = (to_numpy(x).astype(float) for x in found)
    assert max(np.abs(x).max() for x in (dq, dk, dv)) < 1e-38
    np.testing.assert_allclose(dsinks[:, 0], dlse.sum(axis=-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(**by_dtype())
@pytest.mark.parametrize("sink", [-200.0, -1e9, -LARGEST])
def test_a_sink_far_below_all_scores_changes_nothing(xp, dtype, sink):
    q, k, v = draw((3, 70, 64), (3, 600, 64), (3, 600, 64), dtype=dtype)
    want = attention(*on(xp, q, k, v), return_lse=True)
    found = solve(xp, q, k, v, np.full((3, 1), sink))
    assert [x.tobytes() for x in found] == [to_numpy(x).tobytes() for x in want]


@pytest.mark.parametrize(**by_dtype())
@pytest.mark.parametrize("sink", [np.nan, np.inf])
@pytest.mark.parametrize("keys", [0, 50])
def test_a_sink_that_is_no_number_makes_its_row_nan(xp, dtype, sink, keys):
    q, k, v, dout = draw((3, 70, 64), (3, keys, 64), (3, keys, 64), (3, 70, 64), dtype=dtype)
    mask = np.ones((70, keys), np.bool_)
    mask[7:9] = False  # the first of these rows has such a sink, the second has not
    sinks = np.zeros(70)
    sinks[[0, 7]] = sink
    given = on(xp, q, k, v, None, mask)
    out, lse = (to_numpy(x) for x in attention(*given, sinks=xp.asarray(sinks), return_lse=True))
    spoiled = np.isin(np.arange(70), [0, 7])
    assert (np.isnan(out.astype(float)).all(axis=(0, 2)) == spoiled).all()
    assert (np.isnan(lse).all(axis=0) == spoiled).all()
    assert np.isfinite(out[:, ~spoiled].astype(float)).all()
    assert not out[:, 8].any()
    found = attention_backward(
        *on(xp, dout, q, k, v, out, lse), mask=given[4], sinks=xp.asarray(sinks)
    )
    dq, dsinks = (to_numpy(found[i]).astype(float) for i in (0, 3))
    assert (np.isnan(dsinks) == spoiled).all()
    assert np.isfinite(dq[:, ~spoiled]).all()
    assert np.isnan(dq[:, 0]).all() or keys == 0


@pytest.mark.parametrize(**by_dtype())
@pytest.mark.parametrize("how", ["no keys", "mask", "bits", "band", "bias"])
def test_rows_without_keys_are_their_sinks(xp, dtype, how):
    keys = 0 if how == "no keys" else 50
    q, k, v, dout = draw((3, 70, 64), (3, keys, 64), (3, keys, 64), (3, 70, 64), dtype=dtype)
    dense = np.zeros((70, keys), np.bool_)
    options = {
        "no keys": {},
        "mask": {"mask": xp.asarray(dense)},
        "bits": {"mask": BitMask.from_dense(dense)},
        "band": {"window": (0, 0), "causal_align": "bottom_right"},
        "bias": {"bias": xp.asarray(np.full((70, 1), -np.inf, dtype))},
    }[how]
    rows = slice(0, 20 if how == "band" else 70)
    sinks = np.linspace(-50, 50, 70)
    sinks[3] = -np.inf
    out, lse = solve(xp, q, k, v, sinks, **options)
    assert not out[:, rows].any()
    np.testing.assert_allclose(lse[:, rows], np.broadcast_to(sinks, (3, 70))[:, rows], rtol=1e-6)
    (dlse,) = draw(lse.shape, dtype=lse.dtype, seed=1)
    given = on(xp, dout, q, k, v, out, lse)
    found = attention_backward(*given, sinks=xp.asarray(sinks), dlse=xp.asarray(dlse), **options)
    want = dlse.sum(axis=0)
    want[3] = 0
    assert not to_numpy(found[0])[:, rows].any()
    np.testing.assert_allclose(to_numpy(found[-1])[rows], want[rows], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(**by_dtype())
@pytest.mark.parametrize("power", [0, 10, 13, 20, 26])
def test_a_key_with_the_score_of_the_sink_has_half_the_weight(xp, dtype, power):
    """Beyond 1,024 (5,678 in kernels) a log-sum-exp is too coarse for weights."""
    q, k, v, dout = (np.zeros((1, n, 64), dtype) for n in (5, 2, 2, 5))
    q[..., 0], k[..., 0] = 2.0 ** (power // 2), 2.0 ** (power - power // 2)
    v[...], dout[...] = 3, 1
    sinks = np.full((1, 1), 2.0**power, SINGLE)
    options = {"scale": 1.0, "mask": xp.asarray(np.array([True, False]))}
    out, lse = solve(xp, q, k, v, sinks, **options)
    np.testing.assert_allclose(out.astype(float), 1.5, rtol=2.0**-8)
    given = on(xp, dout, q, k, v, out, lse)
    found = attention_backward(*given, sinks=xp.asarray(sinks), **options)
    dv, dsinks = (to_numpy(x).astype(float) for x in found[2:])
    np.testing.assert_allclose(dv[:, 0], 2.5, rtol=2.0**-8)
    # -weight * sum(dout * out), of five queries
    np.testing.assert_allclose(dsinks, -5 * 0.5 * 1.5 * 64, rtol=2.0**-8)


# Gradients


def test_a_query_without_keys_has_gradient_0_whatever_reaches_its_output(xp):
    q, k, v, dout = draw(*[(70, 64)] * 4, dtype=HALF)
    dout[7] = np.nan
    mask = np.ones((70, 70), np.bool_)
    mask[7] = False
    sinks = np.zeros((70,), SINGLE)
    given = on(xp, q, k, v, None, mask)
    out, lse = attention(*given, sinks=xp.asarray(sinks), return_lse=True)
    found = attention_backward(
        xp.asarray(dout), *given[:3], out, lse, None, given[4], sinks=xp.asarray(sinks)
    )
    want = reference.attention_backward(dout, q, k, v, None, mask, sinks=sinks)
    for x, y in zip(map(to_numpy, found), want, strict=True):
        assert reference.relative_error(x, y) < 2e-3
    assert not to_numpy(found[0])[7].any()


@pytest.mark.parametrize(
    ("need", "bias"),
    [
        (None, False), (None, True), (["sinks"], False), (["sinks", "v"], False),
        (["q", "sinks", "bias"], True), (["k"], False),
    ],
)  # fmt: skip
def test_gradients_that_are_needed(xp, need, bias):
    q, k, v, dout = on(xp, *draw(*[(2, 70, 64)] * 4, dtype=HALF))
    sinks, more = on(xp, *draw((2, 1), (70, 70), seed=1))
    more = more if bias else None
    out, lse = attention(q, k, v, more, sinks=sinks, return_lse=True)
    found = attention_backward(dout, q, k, v, out, lse, more, sinks=sinks, need=need)
    given = {"q": q, "k": k, "v": v, "bias": more, "sinks": sinks}
    names = need or [name for name, x in given.items() if x is not None]
    assert len(found) == len(names)
    for name, x in zip(names, found, strict=True):
        assert (x.shape, x.dtype) == (given[name].shape, given[name].dtype), name
    numbers = [to_numpy(x) for x in (dout, q, k, v)]
    bias = None if more is None else to_numpy(more)
    want = reference.attention_backward(*numbers, bias, sinks=to_numpy(sinks))
    want = dict(zip([name for name, x in given.items() if x is not None], want, strict=True))
    for name, x in zip(names, found, strict=True):
        error = reference.relative_error(to_numpy(x), want[name])
        assert error < 2e-3, (name, error)


@examples(10)
@given(case=cases_with_sinks(dtypes=DTYPES[:2]))
def test_a_repeated_call_gives_the_same_bits(xp, case):
    first, second = (gradients.solve(xp, case, dlse=True)[1] for _ in range(2))
    assert [x.tobytes() for x in first.values()] == [x.tobytes() for x in second.values()]


def test_sinks_count_once_where_parts_are_merged(xp):
    q, k, v, dout = on(xp, *draw(*[(3, 70, 32)] * 4))
    (sinks,) = on(xp, 2 * draw((3, 1), seed=1)[0])
    first, last = slice(0, 30), slice(30, 70)
    parts = [
        attention(q, k[:, first], v[:, first], sinks=sinks, return_lse=True),
        attention(q, k[:, last], v[:, last], return_lse=True),
    ]
    out, lse = merge_attention(*zip(*parts, strict=True))
    want, want_lse = attention(q, k, v, sinks=sinks, return_lse=True)
    np.testing.assert_allclose(to_numpy(out), to_numpy(want), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(to_numpy(lse), to_numpy(want_lse), rtol=1e-6)
    whole = attention_backward(dout, q, k, v, want, want_lse, sinks=sinks)
    found = attention_backward(dout, q, k[:, first], v[:, first], out, lse, sinks=sinks)
    rest = attention_backward(dout, q, k[:, last], v[:, last], out, lse)
    np.testing.assert_allclose(*(to_numpy(x) for x in (found[3], whole[3])), rtol=1e-4)
    np.testing.assert_allclose(
        to_numpy(found[0] + rest[0]), to_numpy(whole[0]), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(to_numpy(rest[1]), to_numpy(whole[1])[:, last], rtol=1e-4, atol=1e-5)


# Errors

X = np.zeros((2, 4, 5, 8), np.float32)
LSE = np.zeros((2, 4, 5), np.float32)
WRONG = [
    (2.0, TypeError, "sinks is a float, want an array"),
    ([0.0], TypeError, "sinks is a list, want an array"),
    (np.zeros((4, 1), np.int64), TypeError,
     "sinks has dtype int64, want float16, bfloat16, float32 or float64"),
    (np.zeros((4, 1), ">f4"), TypeError,
     "sinks has dtype >f4, want native byte order (float32)"),
    (np.zeros(4, np.float32), ValueError,
     "sinks has shape (4,), want one that broadcasts to (2, 4, 5), as (heads, 1) does"),
    (np.zeros((3, 1), np.float32), ValueError,
     "sinks has batch shape (3,), which does not broadcast with (2, 4) of q, k, v"),
]  # fmt: skip


@pytest.mark.parametrize(("sinks", "error", "text"), WRONG, ids=lambda x: str(x)[:30])
def test_errors(sinks, error, text):
    with pytest.raises(error) as caught:
        attention(X, X, X, sinks=sinks)
    assert str(caught.value) == f"attention: {text}"
    with pytest.raises(error) as caught:
        attention_backward(X, X, X, X, X, LSE, sinks=sinks)
    assert str(caught.value) == f"attention_backward: {text}"


def test_more_errors():
    sinks = np.zeros((4, 1), np.float32)
    with pytest.raises(
        ValueError, match=r"^attention_backward: need has 'sinks', and sinks is None"
    ):
        attention_backward(X, X, X, X, X, LSE, need=["sinks"])
    with pytest.raises(ValueError, match=r"want 'q', 'k', 'v' and 'sinks'$"):
        attention_backward(X, X, X, X, X, LSE, sinks=sinks, need=["sink"])
    memory = np.zeros(X.size + 4, np.float32)
    out, within = memory[: X.size].reshape(X.shape), memory[-5:-1, None]
    with pytest.raises(ValueError, match=r"^attention: out overlaps sinks in memory"):
        attention(X, X, X, sinks=within, out=out)
    with pytest.raises(
        ValueError, match=r"^attention_backward: lse has shape \(2, 4, 5\), want \(3"
    ):
        attention_backward(
            *[np.zeros((3, 2, 4, 5, 8), np.float32) if i in (0, 4) else X for i in range(5)],
            LSE, sinks=np.zeros((3, 1, 1, 1), np.float32),
        )  # fmt: skip
