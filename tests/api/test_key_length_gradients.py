"""Gradients with key lengths: rules that hold on the CPU and the GPU alike, and a fuzz of them."""

import re
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fa_cupy import BitMask, Score, attention, attention_backward, reference
from fa_cupy.keys import entries
from tests.api.test_gradients import plain_options
from tests.api.test_key_lengths import BANDS, LENGTHS, describe, draw
from tests.conftest import cupy_or_skip
from tests.support import gradients
from tests.support.every_run import by_dtype_examples
from tests.support.keyed_cases import cases_with_lengths, native_options
from tests.support.strategies import DTYPES, UNIT, Case, by_dtype, lay, to_numpy

HALF, BFLOAT16, SINGLE, DOUBLE = DTYPES
NAMES = ("q", "k", "v", "bias", "sinks")


@pytest.fixture(
    scope="module", params=["together", "alone", pytest.param("cupy", marks=pytest.mark.gpu)]
)
def xp(request):
    """The array namespace; with NumPy, short entries are computed together or one by one."""
    if request.param == "cupy":
        yield cupy_or_skip()
        return
    most = {"together": entries._SHORT_FLOP, "alone": 0.0}[request.param]
    with mock.patch.object(entries, "_SHORT_FLOP", most):
        yield np


def backward(xp, dout, *arrays, dlse=None, need=None, score=None, laid_out=False, **options):
    """Gradients of NumPy arrays: q, k, v, perhaps bias and mask.

    `laid_out` says that gradients lie in memory as the arrays do, whose axes -3 and -2 are swapped.
    """
    if laid_out:
        arrays = [lay(xp, x, "blhd") for x in arrays]
    arrays = [None if x is None else xp.asarray(x) for x in arrays]
    dout, dlse = (None if x is None else xp.asarray(x) for x in (dout, dlse))
    options = {"score": score, **native_options(xp, options)}
    out, lse = attention(*arrays, return_lse=True, **options)
    found = attention_backward(
        dout, *arrays[:3], out, lse, *arrays[3:], dlse=dlse, need=need, **options
    )
    if laid_out:
        assert [x.strides for x in found] == [x.strides for x in arrays[:3]]
    return [to_numpy(x) for x in found]


def spoil(lengths, garbage, *arrays):
    """Write something behind the ends of keys (batch, heads, k_len, dim), or of pairs."""
    for b, n in enumerate(lengths):
        for x in arrays:
            x[b, :, n:] = garbage


def check_empty(lengths, *grads):
    for b, n in enumerate(lengths):
        for x in grads:
            assert not x[b, :, n:].any()


def check_close(x, y):
    """Hold results of the same arithmetic, perhaps in another order."""
    room = 64 * UNIT[x.dtype]
    size = max(1, np.abs(y.astype(float)).max(initial=0))
    np.testing.assert_allclose(x.astype(float), y.astype(float), rtol=room, atol=room * size)


# The definition


@pytest.mark.parametrize(**by_dtype())
@by_dtype_examples()
@given(data=st.data(), dlse=st.booleans())
def test_any_call_agrees_with_the_reference(xp, dtype, data, dlse):
    case = data.draw(cases_with_lengths([dtype], finite=True))
    assume(plain_options(case))
    describe(case)
    gradients.check(xp, case, dlse)


@pytest.mark.parametrize("options", BANDS, ids=str)
@pytest.mark.parametrize("q_len", [1, 70])
@pytest.mark.parametrize(**by_dtype())
def test_entries_are_problems_of_their_own(xp, dtype, q_len, options):
    """With keys, values and bias cut off at the ends, one entry at a time."""
    shapes = (4, 8, q_len, 32), (4, 4, 130, 32), (4, 2, 130, 24), (4, 1, q_len, 130)
    q, k, v, bias, dout = draw(*shapes, (4, 8, q_len, 24), dtype=dtype)
    sinks, dlse = draw((4, 8, 1), (4, 8, q_len), dtype=gradients.sum_dtype(dtype), seed=1)
    spoil(LENGTHS, np.nan, k, v)
    spoil(LENGTHS, np.nan, bias.swapaxes(2, 3))
    given = {**options, "sinks": sinks, "k_lengths": LENGTHS}
    found = backward(xp, dout, q, k, v, bias, dlse=dlse, **given)
    check_empty(LENGTHS, found[1], found[2], found[3].swapaxes(2, 3))
    for b, n in enumerate(LENGTHS):
        own = slice(b, b + 1)
        parts = q[own], k[own, :, :n], v[own, :, :n], bias[own, ..., :n]
        case = Case(*parts, options={**options, "sinks": sinks[own]})
        grads = [found[0], found[1][:, :, :n], found[2][:, :, :n], found[3][..., :n], found[4]]
        named = dict(zip(NAMES, (x[own] for x in grads), strict=True))
        rounded = UNIT[dtype] if xp is not np else 0.0
        gradients.hold(case, named, dout[own], dlse[own], rounded)


# What is not there


@pytest.mark.parametrize("options", BANDS[:2], ids=str)
@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e4])
@pytest.mark.parametrize(**by_dtype())
def test_what_lies_behind_the_end_never_shows(xp, dtype, garbage, options):
    shapes = (4, 6, 9, 16), (4, 3, 130, 16), (4, 3, 130, 16), (4, 1, 9, 130), (4, 6, 9, 16)
    q, k, v, bias, dout = draw(*shapes, dtype=dtype)
    options = {**options, "k_lengths": LENGTHS}
    before = backward(xp, dout, q, k, v, bias, **options)
    spoil(LENGTHS, garbage, k, v)
    spoil(LENGTHS, garbage, bias.swapaxes(2, 3))
    after = backward(xp, dout, q, k, v, bias, **options)
    check_empty(LENGTHS, after[1], after[2], after[3].swapaxes(2, 3))
    for x, y in zip(before, after, strict=True):
        if xp is np:
            assert x.tobytes() == y.tobytes()
        check_close(x, y)


@pytest.mark.parametrize("lengths", [0, np.array(0), np.array([0, 0]), np.array([0, 5])], ids=repr)
def test_entries_without_keys_have_the_gradient_of_their_sink_alone(xp, lengths):
    q, k, v, dout = draw((2, 4, 6, 8), (2, 2, 5, 8), (2, 2, 5, 3), (2, 4, 6, 3))
    sinks, dlse = draw((2, 4, 1), (2, 4, 6), seed=1)
    *qkv, dsinks = backward(xp, dout, q, k, v, dlse=dlse, sinks=sinks, k_lengths=lengths)
    assert not any(x[0].any() for x in qkv)
    np.testing.assert_allclose(dsinks[0], dlse[0].sum(-1, keepdims=True), rtol=1e-5)
    qkv = backward(xp, dout, q, k, v, dlse=dlse, k_lengths=lengths)
    assert not any(x[0].any() for x in qkv)


def test_there_may_be_no_entry_and_no_key(xp):
    for batch, k_len in ((0, 5), (2, 0)):
        q, k = draw((batch, 4, 6, 8), (batch, 2, k_len, 8))
        lengths = np.zeros(batch, int)
        for x, like in zip(backward(xp, q, q, k, k, k_lengths=lengths), (q, k, k), strict=True):
            assert x.shape == like.shape
            assert not x.any()


# Batch axes


@pytest.mark.parametrize("lengths", [5, np.array(5), np.full(3, 5), np.full((2, 3), 5)], ids=repr)
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_one_length_for_all(xp, lengths, dtype):
    """The gradients are those of the slices, and 0 behind them."""
    q, k, v, dout = draw(*[(2, 3, 2, 9, 8)] * 4, dtype=dtype)
    band = {"is_causal": True, "causal_align": "bottom_right"}
    found = backward(xp, dout, q, k, v, k_lengths=lengths, laid_out=True, **band)
    want = backward(xp, dout, q, k[..., :5, :], v[..., :5, :], **band)
    for x, y in zip(found, want, strict=True):
        assert not x[..., y.shape[-2] :, :].any()
        np.testing.assert_allclose(x[..., : y.shape[-2], :].astype(float), y.astype(float),
                                   atol=8 * UNIT[dtype])  # fmt: skip


@pytest.mark.parametrize("shape", [(3,), (1,), (2, 1), (1, 3), (2, 3)], ids=str)
@pytest.mark.parametrize("options", BANDS[:2], ids=str)
@pytest.mark.parametrize(**by_dtype(HALF, SINGLE))
def test_gradients_of_what_entries_share_are_summed(xp, shape, options, dtype):
    """Where one of them ends, another one may go on."""
    arrays = draw((2, 1, 4, 7, 8), (1, 3, 2, 9, 8), (1, 3, 2, 9, 4), (2, 1, 1, 1, 9), dtype=dtype)
    lengths = np.random.default_rng(1).integers(0, 10, shape)
    # A length may be that of several entries which do not share keys.
    options = {**options, "k_lengths": lengths, "sinks": draw((3, 1, 1), dtype=dtype)[0]}
    case = Case(*arrays, options=options)
    found = gradients.check(xp, case, dlse=True)
    assert found["k"].shape == (1, 3, 2, 9, 8)


@pytest.mark.parametrize("shape", [(), (1,), (130,), (9, 1), (8, 1, 130), (4, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [SINGLE, HALF, BFLOAT16], ids=str)
def test_gradients_of_biases_and_sinks_are_summed(xp, shape, dtype):
    """And have the precision of sums before they are rounded once."""
    q, k, v, dout = draw(*[(4, 8, n, 16) for n in (9, 130, 130, 9)])
    bias, sinks = draw(shape, (8, 1), dtype=dtype)
    options = {"sinks": sinks, "k_lengths": LENGTHS}
    want = reference.attention_backward(dout, q, k, v, bias, **options)
    runs = [backward(xp, dout, q, k, v, bias, need=("bias", "sinks"), **options) for _ in range(2)]
    rtol = 2.0**-8 if dtype == BFLOAT16 else 2.0**-10
    for x, again, y in zip(*runs, want[3:], strict=True):
        assert x.tobytes() == again.tobytes()
        np.testing.assert_allclose(x.astype(float), y, rtol=rtol, atol=1e-4)


def test_lengths_may_change_between_calls(xp):
    """Plans depend on shapes and dtypes alone."""
    q, k, v, dout = draw(*[(5, 3, n, 16) for n in (20, 60, 60, 20)])
    rng = np.random.default_rng(0)
    for _ in range(4):
        options = {"k_lengths": rng.integers(0, 61, 5), **BANDS[1]}
        found = backward(xp, dout, q, k, v, laid_out=True, **options)
        want = reference.attention_backward(dout, q, k, v, **options)
        for x, y in zip(found, want, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-4)


# Masks and scores


@pytest.mark.parametrize("options", BANDS, ids=str)
@pytest.mark.parametrize("shape", [(4, 1, 9, 130), (9, 130), (4, 8, 1, 130), (9, 1)], ids=str)
def test_masks(xp, options, shape):
    q, k, v, dout = draw(*[(4, 8, n, 16) for n in (9, 130, 130, 9)])
    mask = np.random.default_rng(1).random(shape) < 0.4
    options = {**options, "k_lengths": LENGTHS}
    found = backward(xp, dout, q, k, v, None, mask, **options)
    want = reference.attention_backward(dout, q, k, v, None, mask, **options)
    for x, y in zip(found, want, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4)


@pytest.mark.parametrize("options", BANDS, ids=str)
@pytest.mark.parametrize(
    "text", ["s + 0.3 * b - 0.01 * (h + 1) * abs(i - j)", "s * slopes[h] + w[i, j]", "s + c[b]"]
)
def test_scores_know_the_entry_the_head_and_the_positions(xp, text, options):
    q, k, v, dout = draw((4, 8, 9, 16), (4, 2, 130, 16), (4, 2, 130, 16), (4, 8, 9, 16))
    arrays = dict(zip(("w", "slopes", "c"), draw((9, 130), (8,), (4,)), strict=True))
    arrays = {name: x for name, x in arrays.items() if f"{name}[" in text}
    native = {name: xp.asarray(x) for name, x in arrays.items()}
    options = {**options, "k_lengths": LENGTHS}
    need = ["q", "k", "v", *(f"score.{name}" for name in arrays)]
    found = backward(xp, dout, q, k, v, need=need, score=Score(text, **native), **options)
    want = reference.attention_backward(dout, q, k, v, score=Score(text, **arrays), **options)
    for x, y in zip(found, want, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-3)


# Lengths that are out of range on a device, where the host does not read them


@pytest.mark.gpu
@pytest.mark.parametrize("options", BANDS[:3], ids=str)
@pytest.mark.parametrize(**by_dtype())
def test_entries_out_of_range_have_no_part(cupy, dtype, options):
    q, k, v, dout = draw(*[(4, 8, n, 64) for n in (70, 130, 130, 70)], dtype=dtype)
    sinks = draw((8, 1), seed=1)[0]
    wrong = LENGTHS.copy()
    wrong[1] = 0
    options = {**options, "sinks": sinks}
    dlse = np.zeros((4, 8, 70), gradients.sum_dtype(dtype))
    want = backward(cupy, dout, q, k, v, dlse=dlse, **options, k_lengths=wrong)
    for length in (-1, 131, 2**40, -(2**40)):
        wrong[1] = length
        found = backward(cupy, dout, q, k, v, dlse=dlse, **options, k_lengths=wrong)
        assert not any(x[1].any() for x in found[:3])
        for x, y in zip(found, want, strict=True):
            check_close(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("options", BANDS, ids=str)
@pytest.mark.parametrize("lengths", [LENGTHS, np.full(4, 77), 77, 130, 0], ids=repr)
@pytest.mark.parametrize(**by_dtype())
def test_lengths_on_the_host(cupy, dtype, options, lengths):
    q, k, v, dout = draw(*[(4, 8, n, 64) for n in (70, 130, 130, 70)], dtype=dtype)
    spoil(np.broadcast_to(lengths, 4), np.nan, k, v)
    arrays = [cupy.asarray(x) for x in (q, k, v)]
    out, lse = attention(*arrays, return_lse=True, k_lengths=lengths, **options)
    given = cupy.asarray(dout), *arrays, out, lse
    there = cupy.asarray(lengths)
    want = attention_backward(*given, k_lengths=there, **options)
    for x, y in zip(attention_backward(*given, k_lengths=lengths, **options), want, strict=True):
        check_close(to_numpy(x), to_numpy(y))


# Errors


def refusals():
    q, k = (2, 4, 5, 8), (2, 4, 32, 8)
    return {
        "k_lengths is -1, want 0 to 32": (q, k, {"k_lengths": -1}),
        "k_lengths[1] is 40, want 0 to 32": (q, k, {"k_lengths": np.array([1, 40])}),
        "k_lengths[0] is -3, want 0 to 32": (q, k, {"k_lengths": np.array([-3, 4], np.int32)}),
        "k_lengths has batch shape (3,), want one that broadcasts with (2,)": (
            q, k, {"k_lengths": np.ones(3, int)}),
        "is_causal with k_lengths needs causal_align='top_left'": (
            q, (2, 4, 5, 8), {"k_lengths": 5, "is_causal": True}),
        "q_offsets and k_lengths are given, want one of them": (
            q, k, {"k_lengths": 5, "q_offsets": np.array([0, 5])}),
        "mask is a BitMask or a sparse matrix, want an array of bool with k_lengths": (
            q, k, {"k_lengths": 5, "mask": BitMask(np.ones((5, 32), bool))}),
        "out has shape (2, 4, 5, 8), want (3, 2, 4, 5, 8)": (
            q, k, {"k_lengths": np.ones((3, 1), int)}),
    }  # fmt: skip


@pytest.mark.parametrize("message", refusals())
def test_values_and_shapes_are_checked(message):
    q, k, options = refusals()[message]
    q, k = np.zeros(q, np.float32), np.zeros(k, np.float32)
    with pytest.raises(ValueError, match=f"^attention_backward: {re.escape(message)}"):
        attention_backward(q, q, k, k, q, np.zeros(q.shape[:-1], np.float32), **options)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (True, "k_lengths is True (bool), want an int"),
        (3.0, "k_lengths is 3.0 (float), want an int or an array of int32 or int64"),
        (np.ones(2), "k_lengths has dtype float64, want int32 or int64"),
        (np.ones(2, np.uint8), "k_lengths has dtype uint8, want int32 or int64"),
    ],
)
def test_types_are_checked(lengths, message):
    q, k = np.zeros((2, 4, 5, 8), np.float32), np.zeros((2, 4, 32, 8), np.float32)
    lse = np.zeros(q.shape[:-1], np.float32)
    with pytest.raises(TypeError, match=f"^attention_backward: .*{re.escape(message)}"):
        attention_backward(q, q, k, k, q, lse, k_lengths=lengths)


def test_numbers_are_checked_where_the_plan_is_known():
    q, k = np.zeros((2, 4, 5, 8), np.float32), np.zeros((2, 4, 32, 8), np.float32)
    lse = np.zeros(q.shape[:-1], np.float32)
    for length in (32, 33, 0):
        lengths = np.array([3, length])
        if length <= 32:
            attention_backward(q, q, k, k, q, lse, k_lengths=lengths)
            continue
        with pytest.raises(ValueError, match=r"^attention_backward: k_lengths\[1\] is 33, want 0"):
            attention_backward(q, q, k, k, q, lse, k_lengths=lengths)


@pytest.mark.parametrize(
    ("batch", "of_keys"),
    [((0, 3), (1, 1)), ((0, 3), (0, 3)), ((3, 0), (3, 0)), ((3, 0), (1, 1)), ((0,), (0,))],
)
def test_no_batch_entries(batch, of_keys):
    """A batch without entries has gradients of the right shapes, which are zeros."""
    q, k = np.zeros((*batch, 2, 2, 4), np.float32), np.ones((*of_keys, 2, 3, 4), np.float32)
    lengths = np.broadcast_to(np.arange(batch[-1]), batch)
    out, lse = attention(q, k, k, k_lengths=lengths, return_lse=True)
    found = attention_backward(q, q, k, k, out, lse, k_lengths=lengths)
    assert [x.shape for x in found] == [q.shape, k.shape, k.shape]
    assert not any(x.any() for x in found)


@pytest.mark.parametrize("shape", [(), (1,), (3, 1), (2, 1, 3, 1)])
@pytest.mark.parametrize(("k_len", "lengths"), [(0, 0), (1, [0, 1]), (5, [0, 0]), (5, [0, 3])])
def test_a_bias_of_any_number_of_keys_has_a_gradient_of_its_shape(shape, k_len, lengths):
    q, k = np.ones((2, 1, 3, 4), np.float32), np.ones((2, 1, k_len, 4), np.float32)
    given = {"bias": np.full(shape, 0.5, np.float32), "k_lengths": np.array(lengths)}
    out, lse = attention(q, k, k, return_lse=True, **given)
    *_, found = attention_backward(q, q, k, k, out, lse, **given)
    assert found.shape == shape
    assert not np.abs(found).max() > 1e-6  # it adds the same to all scores of a query
