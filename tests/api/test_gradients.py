"""Gradients of attention: rules that hold on the CPU and the GPU alike, and a fuzz of them."""

import numpy as np
import pytest
from hypothesis import assume, given, note, settings
from hypothesis import strategies as st

from fa_cupy import BitMask, attention, attention_backward, reference
from tests.api.test_attention import HIDE, hidden
from tests.support.every_run import by_dtype_examples, only
from tests.support.gradients import check, differences, solve
from tests.support.strategies import (
    DTYPES,
    LAYOUTS,
    UNIT,
    Case,
    by_dtype,
    cases,
    lay,
    normal,
    to_numpy,
)

HALF, BFLOAT16, SINGLE, DOUBLE = DTYPES


def draw(*shapes, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [normal(rng, shape, dtype) for shape in shapes]


def plain_options(case):
    """Whether options are such that gradients are numbers of a common size."""
    scale, cap = case.options.get("scale", 1), case.options.get("softcap", 0)
    return (scale == 0 or 1e-3 < abs(scale) < 10) and (cap == 0 or 0.2 < cap < 1000)


# The definition


@pytest.mark.parametrize(
    ("options", "shapes"),
    [
        ({}, ((5, 4), (7, 4), (7, 3), (5, 7))),
        ({"is_causal": True, "causal_align": "bottom_right"}, ((5, 4), (7, 4), (7, 3), (7,))),
        ({"window": (2, 1), "scale": -0.7}, ((6, 4), (6, 4), (6, 3), (6, 1))),
        ({"softcap": 1.5, "scale": 0.8}, ((2, 3, 4), (3, 5, 4)[1:], (2, 5, 3), ())),
        ({"is_causal": True}, ((2, 4, 3, 2), (2, 2, 3, 2), (1, 2, 3, 2), (4, 1, 3))),
    ],
)
@pytest.mark.parametrize("function", ["reference", "library"])
def test_finite_differences(function, options, shapes):
    """Both the definition and the library, in float64, against central differences."""
    arrays = draw(*shapes, dtype=DOUBLE)
    mask = np.random.default_rng(1).random((shapes[0][-2], shapes[1][-2])) < 0.8
    mask[1] = False

    def forward():
        return reference.attention(*arrays, mask, **options)

    out, lse = forward()
    dout, dlse = draw(out.shape, lse.shape, dtype=DOUBLE, seed=2)
    if function == "reference":
        got = reference.attention_backward(dout, *arrays, mask, dlse=dlse, **options)
    else:
        got = attention_backward(dout, *arrays[:3], out, lse, arrays[3], mask, dlse=dlse, **options)

    def loss():
        out, lse = forward()
        return np.sum(dout * out) + np.sum((dlse * lse)[np.isfinite(lse)])

    for array, grad in zip(arrays, got, strict=True):
        want = differences(loss, array)
        np.testing.assert_allclose(grad, want, rtol=1e-6, atol=1e-8)


# Fuzz


@pytest.mark.parametrize(**by_dtype())
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "mask"])
@by_dtype_examples(kinds=4)
@given(data=st.data(), dlse=st.booleans())
def test_any_call_agrees_with_the_reference(xp, dtype, biased, masked, data, dlse):
    case = data.draw(cases([dtype], biased=biased, masked=masked))
    assume(plain_options(case))
    shapes = [a if a is None else (a.shape, a.dtype.name) for a in case.arrays]
    note(f"{shapes} {case.options} {case.layouts}")
    check(xp, case, dlse)


@given(case=cases(dtypes=DTYPES[:2]))
@settings(max_examples=20)
def test_a_repeated_call_gives_the_same_bits(xp, case):
    first, second = solve(xp, case, dlse=True)[1], solve(xp, case, dlse=True)[1]
    assert [x.tobytes() for x in first.values()] == [x.tobytes() for x in second.values()]


def backward(xp, arrays, dout=None, need=None, dlse=None, **options):
    """Gradients of arrays of NumPy, computed on `xp`."""
    arrays = [None if a is None else xp.asarray(a) for a in (*arrays, None, None)[:5]]
    out, lse = attention(*arrays, return_lse=True, **options)
    if dout is None:
        dout = draw(out.shape, dtype=arrays[0].dtype, seed=9)[0]
    dlse = None if dlse is None else xp.asarray(dlse)
    return attention_backward(
        xp.asarray(dout), *arrays[:3], out, lse, *arrays[3:], dlse=dlse, need=need, **options
    )


# Accuracy


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize(**by_dtype(HALF, BFLOAT16))
def test_error_is_that_of_the_plain_formula(xp, dtype, head_dim, is_causal):
    arrays = draw(*[(2, 512, head_dim)] * 3, dtype=dtype)
    dout = draw(arrays[0].shape, dtype=dtype, seed=1)[0]
    want = reference.attention_backward(dout, *arrays, is_causal=is_causal)
    plain = reference.attention_backward(dout, *arrays, is_causal=is_causal, dtype=dtype)
    got = backward(xp, arrays, dout, is_causal=is_causal)
    for mine, theirs, exact in zip(got, plain, want, strict=True):
        error = reference.relative_error(to_numpy(mine), exact)
        assert error <= 1.2 * reference.relative_error(theirs, exact)


@pytest.mark.parametrize(
    ("dtype", "limit"), only([(SINGLE, 4e-6), (DOUBLE, 1e-13)], (SINGLE, 4e-6)), ids=str
)
def test_error_of_long_sequences(xp, dtype, limit):
    arrays = draw((2500, 64), (3000, 64), (3000, 64), (3000,), dtype=dtype)
    dout, dlse = draw((2500, 64), (2500,), dtype=dtype, seed=1)
    want = reference.attention_backward(dout, *arrays, dlse=dlse)
    got = backward(xp, arrays, dout, dlse=dlse)
    for mine, exact in zip(got, want, strict=True):
        assert reference.relative_error(to_numpy(mine), exact) <= limit


# What is asked for


@pytest.mark.parametrize(
    "need", [("q",), ("k",), ("v",), ("bias",), ["v", "q"], ("bias", "v"), ("k", "q", "bias")]
)
@pytest.mark.parametrize(**by_dtype(HALF, SINGLE))
def test_need_chooses_and_orders(xp, dtype, need):
    case = Case(*draw((2, 30, 8), (2, 40, 8), (40, 5), (30, 1), dtype=dtype))
    everything = solve(xp, case)[1]
    found = solve(xp, case, need=need)[1]
    assert list(found) == list(need)
    for name, x in found.items():
        assert x.tobytes() == everything[name].tobytes()


def test_the_gradient_of_the_lse_alone_is_the_weights(xp):
    q, k, v = draw((9, 8), (11, 8), (11, 4), dtype=DOUBLE)
    bias = np.zeros((9, 11))
    (weights,) = backward(xp, (q, k, v, bias), np.zeros((9, 4)), ("bias",), np.ones(9))
    scores = q @ k.T / 8**0.5
    want = np.exp(scores - scores.max(-1, keepdims=True))
    np.testing.assert_allclose(
        to_numpy(weights), want / want.sum(-1, keepdims=True), rtol=1e-12, atol=0
    )


# Sums over what was broadcast


@pytest.mark.parametrize("shape", [(), (1,), (11,), (9, 1), (1, 11), (3, 1, 11), (2, 1, 9, 11)])
@pytest.mark.parametrize(**by_dtype())
def test_a_bias_of_any_shape_and_dtype(xp, dtype, shape):
    q, k, v = draw((3, 9, 8), (3, 11, 8), (3, 11, 4))
    check(xp, Case(q, k, v, draw(shape, dtype=dtype, seed=1)[0]))


@pytest.mark.parametrize(
    ("q", "k", "v", "bias"),
    [
        ((3, 1), (2,), (), ()),
        ((), (2, 1), (3,), ()),
        ((1,), (4,), (1,), (4,)),
        ((), (), (), (2, 3)),
        ((2, 1, 3), (1, 2, 1), (2, 2, 3), (3,)),
        ((2, 8), (2, 2), (2, 4), (8,)),
        ((2, 8), (2, 1), (1, 4), (1,)),
    ],
)
def test_batch_axes_that_were_broadcast_are_summed(xp, q, k, v, bias):
    arrays = draw((*q, 9, 8), (*k, 11, 8), (*v, 11, 5), (*bias, 9, 11), dtype=DOUBLE)
    check(xp, Case(*arrays), dlse=True)


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
    check(xp, Case(*draw(*shapes)))


# Memory


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(**by_dtype(HALF, SINGLE))
def test_strides_are_free(xp, dtype, layout):
    arrays = draw((2, 3, 33, 16), (2, 3, 40, 16), (2, 3, 40, 16), (2, 3, 33, 40), dtype=dtype)
    check(xp, Case(*arrays, arrays[-1] < 1, layouts=(layout,) * 5))


@pytest.mark.parametrize("layout", ["dense", "blhd", "transposed"])
@pytest.mark.parametrize(**by_dtype(HALF, SINGLE))
def test_gradients_are_laid_out_as_their_arguments(xp, dtype, layout):
    arrays = draw((2, 3, 33, 16), (2, 3, 40, 16), (2, 3, 40, 16), dtype=dtype)
    arrays = [lay(xp, a, layout) for a in arrays]
    out, lse = attention(*arrays, return_lse=True)
    for x, grad in zip(arrays, attention_backward(out, *arrays, out, lse), strict=True):
        assert grad.strides == x.strides


def test_gradients_of_results_may_have_any_strides(xp):
    q, k, v = draw((2, 30, 8), (2, 40, 8), (2, 40, 8))
    one = np.float32([[[2.0]]])
    dout, dlse = np.broadcast_to(one, (2, 30, 8)), np.broadcast_to(one[0, 0], (2, 30))
    want = backward(xp, (q, k, v), dout.copy(), dlse=dlse.copy())
    arrays = list(map(xp.asarray, (q, k, v)))
    out, lse = attention(*arrays, return_lse=True)
    narrow = [
        xp.broadcast_to(xp.asarray(one), (2, 30, 8)),
        xp.broadcast_to(xp.asarray(one[0, 0]), (2, 30)),
    ]
    got = attention_backward(narrow[0], *arrays, out, lse, dlse=narrow[1])
    for mine, theirs in zip(got, want, strict=True):
        assert to_numpy(mine).tobytes() == to_numpy(theirs).tobytes()


# What a query sees


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
    found = check(xp, Case(q, k, v, *arrays.values(), options=options), dlse=True)
    for x in found.values():
        assert np.isfinite(x.astype(float)).all()
    assert not found["k"][50:].any()
    assert not found["v"][50:].any()


@pytest.mark.parametrize("how", ["mask", "bias", "causal", "window"])
@pytest.mark.parametrize(**by_dtype())
def test_a_row_with_nothing_to_attend_to(xp, dtype, how):
    """Its gradient is 0, and nothing that it holds, nor the gradient of its output, shows."""
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
    dout, dlse = draw((60, 16), (60,), dtype=dtype, seed=1)
    dlse = dlse.astype(DOUBLE if dtype == DOUBLE else SINGLE)
    arrays = q, k, v, bias, mask
    want = backward(xp, arrays, dout, dlse=dlse, **options)
    assert not to_numpy(want[0])[:20].any()
    if how != "bias":
        q[:20] = np.nan
    dout[:20], dlse[:20] = np.nan, np.inf
    # On a GPU weights are rounded, and not where rows are computed again for what they hide.
    slack = 1e-5 if xp is np else 1e-5 + 2 * UNIT[dtype]
    for mine, theirs in zip(backward(xp, arrays, dout, dlse=dlse, **options), want, strict=True):
        np.testing.assert_allclose(
            to_numpy(mine).astype(float), to_numpy(theirs).astype(float), rtol=1e-2, atol=slack
        )


@pytest.mark.parametrize("which", ["q", "k"])
@pytest.mark.parametrize(**by_dtype())
def test_bad_scores_spoil_what_belongs_to_them_only(xp, dtype, which):
    q, k, v = draw((50, 16), (50, 16), (50, 16), dtype=dtype)
    (q if which == "q" else k)[20] = np.nan
    found = check(xp, Case(q, k, v, options={"is_causal": True}))
    finite = {name: np.isfinite(x.astype(float)).all(axis=1) for name, x in found.items()}
    rows = np.arange(50)
    np.testing.assert_array_equal(finite["q"], rows != 20 if which == "q" else rows < 20)
    np.testing.assert_array_equal(finite["v"], rows > 20 if which == "q" else rows < 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(**by_dtype())
def test_a_bad_gradient_of_one_row_spoils_what_it_sees_only(xp, dtype, bad):
    q, k, v = draw((50, 16), (50, 16), (50, 16), dtype=dtype)
    dout = draw((50, 16), dtype=dtype, seed=1)[0]
    dout[20, 3] = bad
    dq, dk, dv = (to_numpy(x).astype(float) for x in backward(xp, (q, k, v), dout, is_causal=True))
    assert not np.isfinite(dq[20]).any()
    assert np.isfinite(np.delete(dq, 20, axis=0)).all()
    assert not np.isfinite(dk[:21]).any()
    assert np.isfinite(dk[21:]).all()
    assert not np.isfinite(dv[:21, 3]).any()
    assert np.isfinite(np.delete(dv, 3, axis=1)).all()
    assert np.isfinite(dv[21:]).all()


def test_hidden_values_whose_products_overflow_do_not_show(xp):
    """0 * inf is NaN: hidden weights times a product of finite numbers beyond float32."""
    q, k, v = draw((30, 8), (30, 8), (30, 8))
    dout = np.full((30, 8), 100, np.float32)
    want = backward(xp, (q, k, v), dout, is_causal=True)
    v[20:] = 1e38
    got = backward(xp, (q, k, v), dout, is_causal=True)
    np.testing.assert_allclose(to_numpy(got[0])[:20], to_numpy(want[0])[:20], rtol=1e-5, atol=1e-4)


# Errors

X = np.zeros((2, 4, 5, 8), np.float32)
LSE = np.zeros((2, 4, 5), np.float32)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"dout": None}, TypeError, "dout is None, want an array"),
        ({"lse": None}, TypeError, "lse is None, want an array"),
        ({"q": None}, TypeError, "q is None, want an array"),
        ({"k": X[..., :4]}, ValueError, "k has head_dim 4, q has 8"),
        ({"dout": X[0]}, ValueError, "dout has shape (4, 5, 8), want (2, 4, 5, 8)"),
        ({"dout": X.astype(float)}, TypeError, "dout has dtype float64, want float32"),
        ({"out": X[..., :4]}, ValueError, "out has shape (2, 4, 5, 4), want (2, 4, 5, 8)"),
        ({"out": X.astype(np.float16)}, TypeError, "out has dtype float16, want float32"),
        ({"lse": LSE[0]}, ValueError, "lse has shape (4, 5), want (2, 4, 5)"),
        ({"lse": LSE.astype(float)}, TypeError, "lse has dtype float64, want float32"),
        ({"dlse": LSE[..., None]}, ValueError, "dlse has shape (2, 4, 5, 1), want (2, 4, 5)"),
        ({"dlse": LSE.astype(np.float16)}, TypeError, "dlse has dtype float16, want float32"),
        ({"dlse": 1.0}, TypeError, "dlse is a float, want an array"),
        ({"mask": X}, TypeError, "mask has dtype float32, want bool (cast it: mask != 0)"),
        ({"is_causal": 2}, TypeError, "is_causal is 2 (int), want a bool"),
        ({"softcap": -1}, ValueError, "softcap is -1 (int), want a finite number >= 0"),
        ({"need": "q"}, TypeError, "need is 'q' (str), want a sequence of 'q', 'k' and 'v'"),
        ({"need": 3}, TypeError, "need is 3 (int), want a sequence of 'q', 'k' and 'v'"),
        ({"need": ["dq"]}, ValueError, "need[0] is 'dq' (str), want 'q', 'k' and 'v'"),
        ({"need": ["q", 1]}, ValueError, "need[1] is 1 (int), want 'q', 'k' and 'v'"),
        ({"need": ["bias"]}, ValueError, "need has 'bias', and bias is None, want an array"),
        ({"need": ["q", "q"]}, ValueError, "need has 'q' twice, want each once"),
        ({"need": []}, ValueError, "need is [] (list), want at least one of 'q', 'k' and 'v'"),
    ],
)
def test_errors(arguments, error, text):
    given_arrays = {"dout": X, "q": X, "k": X, "v": X, "out": X, "lse": LSE}
    with pytest.raises(error) as caught:
        attention_backward(**(given_arrays | arguments))
    assert str(caught.value).startswith(f"attention_backward: {text}")


# Bit masks


@pytest.mark.parametrize(
    ("batch", "there", "options"),
    [
        ((), False, {}),
        ((4,), True, {"is_causal": True, "causal_align": "bottom_right"}),
        ((2, 1), False, {"window": (150, 20), "causal_align": "top_left", "softcap": 4.0}),
    ],
    ids=["one", "heads", "batch"],
)
@pytest.mark.parametrize(**by_dtype(*DTYPES))
def test_bit_masks_are_the_dense_ones(xp, dtype, batch, there, options):
    rng = np.random.default_rng(3)
    states = rng.choice(3, (*batch, 2, 5), p=[0.5, 0.3, 0.2]).repeat(128, -2).repeat(128, -1)
    states = states[..., :200, :600]
    dense = (states == 1) | (states == 2) & (rng.random(states.shape) < 0.5)
    dense[..., 7, :] = dense[..., 550] = False
    shapes = (2, 4, 200, 24), (2, 2, 600, 24), (2, 2, 600, 16), (4, 1, 600)
    case = Case(*draw(*shapes, dtype=dtype), dense, options)
    case.v[..., 550, :] = np.nan
    mask = BitMask.from_dense(xp.asarray(dense) if there else dense)
    found = check(xp, case, dlse=True, mask=mask)
    again = solve(xp, case, dlse=True, mask=mask)[1]
    assert [x.tobytes() for x in found.values()] == [x.tobytes() for x in again.values()]


@given(case=cases(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=50)
def test_any_bit_mask_agrees_with_the_reference(xp, case, seed):
    assume(plain_options(case))
    lengths = case.q.shape[-2], case.k.shape[-2]
    if case.mask is None:
        case.mask = np.random.default_rng(seed).random((1, *lengths)) < 0.5
    shape = (*case.mask.shape[:-2], *lengths)
    check(xp, case, mask=BitMask.from_dense(np.broadcast_to(case.mask, shape)))


# Other libraries


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x).to(torch.bfloat16) for x in draw(*[(2, 70, 8)] * 3))
    out, lse = attention(q, k, v, return_lse=True)
    version = out._version
    grads = attention_backward(out, q, k, v, out, lse)
    assert {g.dtype for g in grads} == {torch.bfloat16}
    assert out._version == version  # nothing was written to


def test_array_api_arrays():
    strict = pytest.importorskip("array_api_strict")
    q, k, v = draw(*[(2, 70, 8)] * 3)
    arrays = list(map(strict.asarray, (q, k, v)))
    out, lse = attention(*arrays, return_lse=True)
    grads = attention_backward(out, *arrays, out, lse)
    assert {type(g) for g in grads} == {type(arrays[0])}
    plain = attention_backward(*map(np.asarray, (out, q, k, v, out, lse)))
    for mine, theirs in zip(grads, plain, strict=True):
        assert np.asarray(mine).tobytes() == theirs.tobytes()
