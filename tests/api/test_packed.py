"""Packed sequences: rules that hold on the CPU and the GPU alike, and a fuzz of them."""

import itertools
import re

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import BitMask, Score, attention, attention_backward, reference
from tests.api.test_key_lengths import describe, draw, solve
from tests.support import gradients
from tests.support.every_run import by_dtype_examples
from tests.support.keyed_cases import native_options, packed_cases
from tests.support.strategies import (
    DTYPES,
    Case,
    by_dtype,
    check_against_reference,
    to_numpy,
)

HALF, BFLOAT16, SINGLE, DOUBLE = DTYPES
# Rows before and behind, a sequence without queries, one without keys, one without both.
Q_OFFSETS = np.array([4, 10, 10, 77, 77, 90, 150], np.int32)
K_OFFSETS = np.array([0, 70, 81, 81, 81, 130, 131])
Q_LEN, K_LEN = 152, 140
BANDS = (
    {},
    {"is_causal": True, "causal_align": "bottom_right"},
    {"is_causal": True, "causal_align": "top_left"},
    {"window": (20, 3), "causal_align": "bottom_right"},
    {"window": (None, 3), "causal_align": "top_left"},
)


def spans(q_offsets, k_offsets):
    """The queries and the keys of each sequence, as slices."""
    both = zip(itertools.pairwise(q_offsets), itertools.pairwise(k_offsets), strict=True)
    return [(slice(*map(int, q)), slice(*map(int, k))) for q, k in both]


def of_none(q_offsets, q_len):
    """Which queries belong to no sequence."""
    rows = np.arange(q_len)
    return (rows < q_offsets[0]) | (rows >= q_offsets[-1])


# The definition


@pytest.mark.parametrize(**by_dtype())
@by_dtype_examples()
@given(data=st.data())
def test_any_call_agrees_with_the_reference(xp, dtype, data):
    case = data.draw(packed_cases([dtype]))
    describe(case)
    shape = reference.attention(*case.arrays, **case.options)[0].shape
    out = xp.asarray(np.full(shape, np.nan).astype(case.q.dtype)) if case.with_out else None
    options = native_options(xp, case.options)
    found, lse = attention(*case.native(xp), return_lse=True, out=out, **options)
    assert out is None or found is out
    check_against_reference(case, to_numpy(found), to_numpy(lse))


@pytest.mark.parametrize(**by_dtype())
@by_dtype_examples()
@given(data=st.data(), dlse=st.booleans())
def test_gradients_of_any_call_agree_with_the_reference(xp, dtype, data, dlse):
    case = data.draw(packed_cases([dtype], finite=True))
    describe(case)
    gradients.check(xp, case, dlse)


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("options", BANDS, ids=str)
@pytest.mark.parametrize(**by_dtype())
def test_sequences_are_problems_of_their_own(xp, dtype, options, on_host):
    q, k, v, bias, sinks = draw(
        (2, 8, Q_LEN, 32), (2, 4, K_LEN, 32), (2, 2, K_LEN, 24), (2, 1, Q_LEN, K_LEN), (8, 1),
        dtype=dtype,
    )  # fmt: skip
    offsets = {"q_offsets": Q_OFFSETS, "k_offsets": K_OFFSETS}
    arrays = [xp.asarray(x) for x in (q, k, v, bias)]
    given = offsets if on_host else native_options(xp, offsets)
    out, lse = map(
        to_numpy,
        attention(*arrays, sinks=xp.asarray(sinks), return_lse=True, **given, **options),
    )
    for rows, keys in spans(**offsets):
        if rows.start < rows.stop:
            parts = q[..., rows, :], k[..., keys, :], v[..., keys, :], bias[..., rows, keys]
            case = Case(*parts, options={**options, "sinks": sinks})
            check_against_reference(case, out[..., rows, :], lse[..., rows])
    outside = of_none(Q_OFFSETS, Q_LEN)
    assert not out[..., outside, :].any()
    want = np.broadcast_to(sinks.astype(lse.dtype), lse.shape)
    np.testing.assert_allclose(lse[..., outside], want[..., outside], rtol=1e-6)  # by way of log2


def test_the_keys_have_the_offsets_of_the_queries(xp):
    q, k, v = draw((3, 100, 16), (3, 100, 16), (3, 100, 8))
    offsets = np.array([0, 0, 31, 64, 99])
    for options in ({}, {"is_causal": True}, {"window": (5, 2)}):
        found = solve(xp, q, k, v, q_offsets=offsets, **options)
        for align in ("top_left", "bottom_right"):
            both = {"q_offsets": offsets, "k_offsets": offsets, "causal_align": align}
            for x, y in zip(found, solve(xp, q, k, v, **both, **options), strict=True):
                np.testing.assert_allclose(x, y, atol=1e-6)


def test_there_may_be_no_sequence(xp):
    q, k, v = draw((2, 9, 8), (2, 7, 8), (2, 7, 8))
    for at in (0, 3):
        offsets = {"q_offsets": np.array([at]), "k_offsets": np.array([7])}
        out, lse = solve(xp, q, k, v, **offsets)
        assert not out.any()
        assert np.isneginf(lse).all()
    out, _ = solve(xp, q[:, :0], k[:, :0], v[:, :0], q_offsets=np.array([0, 0]))
    assert out.shape == (2, 0, 8)
    out, lse = solve(xp, q, k[:, :0], v[:, :0], q_offsets=np.array([0, 9]),
                     k_offsets=np.array([0, 0]))  # fmt: skip
    assert not out.any()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize(**by_dtype())
@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e4])
def test_other_sequences_never_show(xp, dtype, garbage):
    shapes = (2, 4, Q_LEN, 16), (2, 2, K_LEN, 16), (2, 2, K_LEN, 16), (1, Q_LEN, K_LEN)
    q, k, v, bias = draw(*shapes, dtype=dtype)
    options = {"q_offsets": Q_OFFSETS, "k_offsets": K_OFFSETS}
    before = solve(xp, q, k, v, bias, **options)
    rows, keys = spans(Q_OFFSETS, K_OFFSETS)[0]
    own = np.zeros((Q_LEN, K_LEN), bool)
    own[rows, keys] = True
    q[..., : rows.start, :] = q[..., rows.stop :, :] = garbage
    for x in (k, v):
        x[..., : keys.start, :] = x[..., keys.stop :, :] = garbage
    bias[..., ~own] = garbage
    after = solve(xp, q, k, v, bias, **options)
    # Rows beside numbers that are not finite may be summed in another order.
    unit = float(ml_dtypes.finfo(dtype).eps)
    tolerance = {"rtol": 0} if xp is np else {"rtol": 8 * unit, "atol": 4 * unit}
    np.testing.assert_allclose(before[0][..., rows, :], after[0][..., rows, :], **tolerance)
    exact = {"rtol": 0} if xp is np else {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(before[1][..., rows], after[1][..., rows], **exact)
    assert np.isfinite(after[0][..., rows, :].astype(float)).all()


def test_every_element_of_out_is_written(xp):
    q, k, v = draw((4, Q_LEN, 16), (4, K_LEN, 16), (4, K_LEN, 16))
    options = native_options(xp, {"q_offsets": Q_OFFSETS, "k_offsets": K_OFFSETS})
    q, k, v = map(xp.asarray, (q, k, v))
    want = attention(q, k, v, **options)
    for layout in ("C", "F"):
        out = xp.full(want.shape, np.nan, np.float32, order=layout)
        assert attention(q, k, v, out=out, **options) is out
        assert bool((out == want).all())


def test_offsets_may_change_between_calls(xp):
    """Plans depend on shapes and dtypes alone."""
    q, k, v, dout = draw((3, 60, 16), (3, 60, 16), (3, 60, 16), (3, 60, 16))
    arrays = [xp.asarray(x) for x in (q, k, v)]
    rng = np.random.default_rng(0)
    for _ in range(4):
        offsets = np.sort(rng.integers(0, 61, 5))
        options = {"q_offsets": offsets, "is_causal": True}
        native = native_options(xp, options)
        out, lse = attention(*arrays, return_lse=True, **native)
        check_against_reference(Case(q, k, v, options=options), *map(to_numpy, (out, lse)))
        found = attention_backward(xp.asarray(dout), *arrays, out, lse, **native)
        want = reference.attention_backward(dout, q, k, v, **options)
        for x, y in zip(found, want, strict=True):
            np.testing.assert_allclose(to_numpy(x), y, atol=1e-4)


def test_strided_offsets_and_broadcast_arrays(xp):
    q, k = draw((2, 3, 40, 8), (40, 8))
    wide = np.repeat(np.array([0, 11, 40]), 2)
    given = xp.asarray(wide)[::2]
    out = to_numpy(attention(xp.asarray(q), xp.asarray(k), xp.asarray(k), q_offsets=given))
    want = reference.attention(q, k, k, q_offsets=wide[::2])[0]
    np.testing.assert_allclose(out, want, atol=1e-5)


# Masks and scores


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("options", BANDS, ids=str)
def test_masks_of_bits(xp, options, small):
    """Over the packed axes, and one for each sequence."""
    q_offsets, k_offsets, q_len, k_len = Q_OFFSETS, K_OFFSETS, Q_LEN, K_LEN
    if not small:  # more than a block each, of other edges than blocks have
        q_offsets, k_offsets = np.array([3, 140, 300, 460]), np.array([0, 200, 210, 400])
        q_len, k_len = 470, 400
    q, k, v, dout = draw((2, q_len, 16), (2, k_len, 16), (2, k_len, 16), (2, q_len, 16))
    mask = np.random.default_rng(1).random((2, q_len, k_len)) < 0.4
    options = {**options, "q_offsets": q_offsets, "k_offsets": k_offsets}
    want = reference.attention(q, k, v, None, mask, **options)
    dwant = reference.attention_backward(dout, q, k, v, None, mask, **options)
    bits = BitMask(mask)
    own = [bits[..., rows, keys] for rows, keys in spans(q_offsets, k_offsets)]
    arrays = [xp.asarray(x) for x in (q, k, v)]
    for shown in (xp.asarray(mask), bits, own, tuple(own)):
        out, lse = attention(*arrays, mask=shown, return_lse=True, **options)
        np.testing.assert_allclose(to_numpy(out), want[0], atol=1e-5)
        np.testing.assert_allclose(to_numpy(lse), want[1], atol=1e-5)
        found = attention_backward(xp.asarray(dout), *arrays, out, lse, mask=shown, **options)
        for x, y in zip(found, dwant, strict=True):
            np.testing.assert_allclose(to_numpy(x), y, atol=1e-4)


@pytest.mark.parametrize("options", BANDS, ids=str)
@pytest.mark.parametrize(
    "text", ["s + 0.3 * b - 0.01 * (h + 1) * abs(i - j)", "s * slopes[h] + w[i, j]"]
)
def test_scores_know_the_positions_in_the_sequence(xp, text, options):
    """Arrays need be no longer than the longest sequence."""
    shapes = (2, 4, Q_LEN, 16), (2, 2, K_LEN, 16), (2, 2, K_LEN, 16), (2, 4, Q_LEN, 16)
    q, k, v, dout = draw(*shapes)
    arrays = {"w": draw((67, 70))[0], "slopes": draw((4,))[0]} if "w" in text else {}
    native = {name: xp.asarray(x) for name, x in arrays.items()}
    options = {**options, "q_offsets": Q_OFFSETS, "k_offsets": K_OFFSETS}
    out, lse = attention(*map(xp.asarray, (q, k, v)), score=Score(text, **native), return_lse=True,
                         **options)  # fmt: skip
    want = reference.attention(q, k, v, score=Score(text, **arrays), **options)
    np.testing.assert_allclose(to_numpy(out), want[0], atol=1e-5)
    np.testing.assert_allclose(to_numpy(lse), want[1], atol=1e-4)
    need = ["q", "k", "v", *(f"score.{name}" for name in arrays)]
    found = attention_backward(
        xp.asarray(dout), *map(xp.asarray, (q, k, v)), out, lse, need=need,
        score=Score(text, **native), **options,
    )  # fmt: skip
    dwant = reference.attention_backward(dout, q, k, v, score=Score(text, **arrays), **options)
    for x, y in zip(found, dwant, strict=True):
        np.testing.assert_allclose(to_numpy(x), y, atol=1e-3)


def test_an_index_beyond_the_longest_sequence_is_refused():
    q = np.zeros((1, 20, 8))
    table = np.zeros(9)
    assert attention(q, q, q, score=Score("s + t[i]", t=table), q_offsets=np.array([0, 9, 18])).size
    with pytest.raises(ValueError, match="i"):
        attention(q, q, q, score=Score("s + t[i]", t=table), q_offsets=np.array([0, 10, 18]))


@pytest.mark.parametrize("shape", [(), (1,), (K_LEN,), (Q_LEN, 1), (2, 1, K_LEN), (2, 1, 1)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16])
def test_gradients_of_what_sequences_share_are_summed(xp, shape, dtype):
    """And have the precision of sums before they are rounded once."""
    q, k, v, dout = draw((2, Q_LEN, 16), (2, K_LEN, 16), (2, K_LEN, 16), (2, Q_LEN, 16))
    bias, sinks = draw(shape, (2, 1), dtype=dtype)
    options = {"q_offsets": Q_OFFSETS, "k_offsets": K_OFFSETS}
    want = reference.attention_backward(dout, q, k, v, bias, sinks=sinks, **options)
    arrays = [xp.asarray(x) for x in (q, k, v)]
    bias, sinks = map(xp.asarray, (bias, sinks))
    out, lse = attention(*arrays, bias, sinks=sinks, return_lse=True, **options)
    runs = [
        attention_backward(
            xp.asarray(dout), *arrays, out, lse, bias, sinks=sinks, need=("bias", "sinks"),
            **options,
        )
        for _ in range(2)
    ]  # fmt: skip
    rtol = 2.0**-8 if dtype == BFLOAT16 else 2.0**-10
    for x, again, y in zip(*runs, want[3:], strict=True):
        assert to_numpy(x).tobytes() == to_numpy(again).tobytes()
        np.testing.assert_allclose(to_numpy(x).astype(float), y, rtol=rtol, atol=1e-4)


# Errors


def refusals():
    q, k = (2, 50, 8), (2, 40, 8)
    good = np.array([0, 20, 40])
    return {
        "q_offsets[0] is -1, want 0 to 50, the number of queries": (
            q, k, {"q_offsets": np.array([-1, 3, 4]), "k_offsets": good}),
        "q_offsets[2] is 51, want 0 to 50, the number of queries": (
            q, k, {"q_offsets": np.array([0, 3, 51]), "k_offsets": good}),
        "k_offsets[1] is 41, want 0 to 40, the number of keys": (
            q, k, {"q_offsets": good, "k_offsets": np.array([0, 41, 4])}),
        "q_offsets[2] is 19, want 20 or more, as q_offsets ascend": (
            q, k, {"q_offsets": np.array([0, 20, 19], np.int32), "k_offsets": good}),
        "k_offsets has 2 numbers, q_offsets has 3, want one more than sequences in both": (
            q, k, {"q_offsets": good, "k_offsets": good[:2]}),
        "q_offsets has shape (), want (sequences + 1,)": (k, k, {"q_offsets": np.array(3)}),
        "q_offsets has shape (0,), want (sequences + 1,)": (k, k, {"q_offsets": good[:0]}),
        "k_offsets has shape (1, 3), want (sequences + 1,)": (
            k, k, {"q_offsets": good, "k_offsets": good[None]}),
        "k has length 40, q has 50, want k_offsets with q_offsets, or equal lengths": (
            q, k, {"q_offsets": good}),
        "k_offsets is given and q_offsets is None, want both": (q, k, {"k_offsets": good}),
        "q_offsets and k_lengths are given, want one of them": (
            k, k, {"q_offsets": good, "k_lengths": 3}),
        "q_offsets and page_table are given, want one of them": (
            k, k, {"q_offsets": good, "page_table": good[None]}),
        "is_causal with k_offsets needs causal_align='top_left'": (
            k, k, {"q_offsets": good, "k_offsets": good, "is_causal": True}),
        "window with k_offsets needs causal_align='top_left'": (
            q, k, {"q_offsets": good, "k_offsets": good, "window": (1, 1)}),
        "mask has 1 masks, want 2, one a sequence": (
            k, k, {"q_offsets": good, "mask": [BitMask(np.ones((20, 20), bool))]}),
        "mask[1] has lengths (20, 19), want (20, 20), those of its sequence": (
            k, k, {"q_offsets": good, "mask": [
                BitMask(np.ones((20, 20), bool)), BitMask(np.ones((20, 19), bool))]}),
        "mask[0] has batch shape (3,), want one that broadcasts to (2,)": (
            k, k, {"q_offsets": good, "mask": [BitMask(np.ones((3, 20, 20), bool))] * 2}),
    }  # fmt: skip


@pytest.mark.parametrize("message", refusals())
def test_values_and_shapes_are_checked(message):
    q, k, options = refusals()[message]
    q, k = np.zeros(q, np.float32), np.zeros(k, np.float32)
    with pytest.raises(ValueError, match=f"^attention: {re.escape(message)}"):
        attention(q, k, k, **options)
    if {"k_lengths", "page_table"} & options.keys():
        return
    lse = np.zeros(q.shape[:-1], np.float32)
    with pytest.raises(ValueError, match=f"^attention_backward: {re.escape(message)}"):
        attention_backward(q, q, k, k, q, lse, **options)


def test_numbers_are_checked_where_the_plan_is_known():
    q = np.zeros((2, 40, 8), np.float32)
    lse = np.zeros((2, 40), np.float32)
    for offsets in (np.array([0, 4, 40]), np.array([0, 4, 41]), np.array([0, 40, 4])):
        if offsets[-1] == 40:
            attention(q, q, q, q_offsets=offsets)
            attention_backward(q, q, q, q, q, lse, q_offsets=offsets)
            continue
        with pytest.raises(ValueError, match=r"^attention: q_offsets\[2\] is"):
            attention(q, q, q, q_offsets=offsets)
        with pytest.raises(ValueError, match=r"^attention_backward: q_offsets\[2\] is"):
            attention_backward(q, q, q, q, q, lse, q_offsets=offsets)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"q_offsets": [0, 4]}, "q_offsets is [0, 4] (list), want an array of int32 or int64"),
        ({"q_offsets": 3}, "q_offsets is a int, want an array"),
        ({"q_offsets": "x"}, "q_offsets is a str, want an array"),
        ({"q_offsets": np.ones(2)}, "q_offsets has dtype float64, want int32 or int64"),
        ({"q_offsets": np.ones(2, np.uint64)}, "q_offsets has dtype uint64, want int32 or int64"),
        ({"q_offsets": np.ones(2, ">i4")}, "q_offsets has dtype >i4, want int32 or int64"),
        ({"q_offsets": np.ma.ones(2, int)}, "q_offsets is a masked array"),
        (
            {"q_offsets": np.array([0, 4]), "k_offsets": np.ones(2)},
            "k_offsets has dtype float64, want int32 or int64",
        ),
        (
            {"q_offsets": np.array([0, 4]), "mask": [np.ones((4, 4), bool)]},
            "mask[0] is array",
        ),
        ({"mask": [BitMask(np.ones((4, 4), bool))]}, "mask is a list, want an array"),
    ],
    ids=str,
)
def test_types_are_checked(options, message):
    q = np.zeros((2, 4, 32, 8), np.float32)
    with pytest.raises(TypeError, match=f"^attention: {re.escape(message)}"):
        attention(q, q, q, **options)


def test_sparse_biases_are_refused():
    sparse = pytest.importorskip("scipy.sparse")
    q = np.zeros((1, 32, 8), np.float32)
    bias = sparse.csr_array(np.ones((32, 32)))
    with pytest.raises(ValueError, match="bias is a sparse matrix, want an array with q_offsets"):
        attention(q, q, q, bias, q_offsets=np.array([0, 32]))


def test_sparse_masks_are_packed():
    sparse = pytest.importorskip("scipy.sparse")
    (q,) = draw((2, 32, 8))
    seen = np.random.default_rng(0).random((32, 32)) < 0.5
    offsets = np.array([0, 9, 32])
    want = attention(q, q, q, mask=seen, q_offsets=offsets)
    np.testing.assert_allclose(
        attention(q, q, q, mask=sparse.csr_array(seen), q_offsets=offsets), want, atol=1e-6
    )
    own = [sparse.csr_array(seen[a:b, a:b]) for a, b in itertools.pairwise(offsets)]
    np.testing.assert_allclose(attention(q, q, q, mask=own, q_offsets=offsets), want, atol=1e-6)


def test_out_may_not_overlap_the_offsets():
    memory = np.zeros(100)
    out, offsets = memory[:20].reshape(1, 5, 4), memory[10:12].view(np.int64)
    q = np.ones((1, 5, 4))
    for arg in ("q_offsets", "k_offsets"):
        both = {"q_offsets": np.zeros(2, int), "k_offsets": np.zeros(2, int), arg: offsets}
        with pytest.raises(ValueError, match=f"out overlaps {arg} in memory"):
            attention(q, q, q, out=out, **both)
    assert not memory.any()


def test_arrays_of_other_libraries():
    torch = pytest.importorskip("torch")
    q, k, v = draw((2, 20, 8), (2, 20, 8), (2, 20, 8))
    offsets = np.array([0, 7, 20], np.int32)
    want = attention(q, k, v, q_offsets=offsets)
    arrays = [torch.from_numpy(x) for x in (q, k, v)]
    for there in (offsets, torch.from_numpy(offsets)):
        found = attention(*arrays, q_offsets=there)
        assert type(found) is torch.Tensor
        np.testing.assert_array_equal(found.numpy(), want)
    with pytest.raises(ValueError, match=r"q_offsets\[2\] is 21, want 0 to 20"):
        attention(*arrays, q_offsets=torch.tensor([0, 7, 21]))
    with pytest.raises(TypeError, match=r"q_offsets is a torch\.Tensor, q is a numpy\.ndarray"):
        attention(q, k, v, q_offsets=torch.tensor([0, 7, 20]))
