"""Packed sequences in causal products and linear attention, against one call for each."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import (
    causal_product,
    causal_product_backward,
    linear_attention,
    linear_attention_backward,
)
from tests.support.products import draw, state_dtype
from tests.support.strategies import DTYPES, LAYOUTS, UNIT, lay, to_numpy

HALF, BFLOAT16, SINGLE, DOUBLE = DTYPES
# Batch axes of q, k and v.
BATCHES = [
    ((), (), ()),
    ((3,), (3,), (3,)),
    ((2, 4), (2, 2), (2, 2)),
    ((2, 4), (2, 2), (2, 1)),
    ((2, 1), (3,), (1,)),
]


def device(xp, *arrays):
    return [None if x is None else xp.asarray(x) for x in arrays]


@st.composite
def offsets(draw, most=5):
    """Offsets, with empty sequences and rows before and behind; and the length of the axis."""
    lengths = draw(st.lists(st.sampled_from([0, 1, 2, 7, 20, 33, 64, 65, 150]), max_size=most))
    before, behind = draw(st.sampled_from([0, 3])), draw(st.sampled_from([0, 5]))
    bounds = before + np.concatenate([[0], np.cumsum(lengths, dtype=int)])
    return bounds.astype(draw(st.sampled_from([np.int32, np.int64]))), int(bounds[-1]) + behind


def own(x, rows):
    return x[..., rows, :].astype(np.float64)


def spans(bounds):
    return [slice(int(a), int(b)) for a, b in itertools.pairwise(bounds)]


def limit(dtype, of):
    """How far a result may be from that of float64, whose numbers are `of`.

    Kernels round the products of queries and keys to 16 bits: what cancels in a sum leaves errors
    of the size of its neighbours.
    """
    beside = max(1, np.abs(of).max(initial=0)) * (UNIT[dtype] > 1e-5)
    return (
        8 * UNIT[dtype] * np.abs(of)
        + 8 * UNIT[dtype] * beside
        + 300 * UNIT[state_dtype(dtype)] * (1 + np.abs(of).max(initial=0))
        + (dtype == HALF) * 2.0**-24
    )


def close(got, want, dtype):
    got = to_numpy(got).astype(np.float64)
    assert got.shape == want.shape
    assert (np.abs(got - want) <= limit(dtype, want)).all(), np.abs(got - want).max()


def put(wide, rows, found):
    wide[..., rows, :] += found


@given(
    packing=offsets(), batch=st.sampled_from(BATCHES), dtype=st.sampled_from(DTYPES),
    reverse=st.booleans(), with_initial=st.booleans(), with_dstate=st.booleans(),
    layout=st.sampled_from(LAYOUTS), seed=st.integers(0, 1000), on_host=st.booleans(),
)  # fmt: skip
def test_products_are_those_of_each_sequence(
    xp, packing, batch, dtype, reverse, with_initial, with_dstate, layout, seed, on_host
):
    bounds, length = packing
    n = len(bounds) - 1
    shapes = [(*b, length, d) for b, d in zip(batch, (6, 6, 5), strict=True)]
    q, k, v = draw(*shapes, dtype=dtype, seed=seed)
    states = np.broadcast_shapes(batch[1], batch[2])
    initial = (
        draw((*states, n, 6, 5), dtype=state_dtype(dtype), seed=1)[0] if with_initial else None
    )
    where = bounds if on_host else xp.asarray(bounds)
    arrays = [lay(xp, x, layout) for x in (q, k, v)]
    options = {"initial_state": None if initial is None else xp.asarray(initial)}
    options |= {"reverse": reverse, "q_offsets": where}
    out, last = causal_product(*arrays, return_state=True, **options)
    only = causal_product(*arrays, **options)
    np.testing.assert_array_equal(to_numpy(only).astype(float), to_numpy(out).astype(float))
    assert last.shape == (*states, n, 6, 5)
    dout = draw(out.shape, dtype=dtype, seed=2)[0]
    dstate = draw(last.shape, dtype=state_dtype(dtype), seed=3)[0] if with_dstate else None
    grads = causal_product_backward(
        xp.asarray(dout), *arrays, dstate=None if dstate is None else xp.asarray(dstate), **options
    )
    assert len(grads) == 3 + with_initial

    want, want_last = np.zeros(out.shape), np.zeros(last.shape)
    found = [np.zeros(x.shape) for x in (q, k, v, *([initial] if with_initial else []))]
    for s, rows in enumerate(spans(bounds)):
        parts = [own(x, rows) for x in (q, k, v)]
        first, dlast = (
            None if x is None else x[..., s, :, :].astype(float) for x in (initial, dstate)
        )
        result, state = causal_product(
            *parts, initial_state=first, return_state=True, reverse=reverse
        )
        put(want, rows, result)
        want_last[..., s, :, :] = state
        more = causal_product_backward(
            own(dout, rows), *parts, initial_state=first, dstate=dlast, reverse=reverse
        )
        for grad, part in zip(found, more[:3], strict=False):
            put(grad, rows, part)
        if with_initial:
            found[3][..., s, :, :] = more[3]
    close(out, want, dtype)
    close(last, want_last, state_dtype(dtype))
    for grad, x in zip(grads, found, strict=True):
        close(grad, x, dtype)


@given(
    packing=offsets(), lengths=st.data(), batch=st.sampled_from(BATCHES),
    dtype=st.sampled_from([SINGLE, DOUBLE]), is_causal=st.booleans(),
    feature_map=st.sampled_from(["elu1", "relu", np.square]), with_initial=st.booleans(),
    on_host=st.booleans(),
)  # fmt: skip
def test_linear_attention_is_that_of_each_sequence(
    xp, packing, lengths, batch, dtype, is_causal, feature_map, with_initial, on_host
):
    q_bounds, q_len = packing
    k_bounds, k_len, k_offsets = q_bounds, q_len, None
    n = len(q_bounds) - 1
    if not is_causal and lengths.draw(st.booleans()):
        own_lengths = lengths.draw(st.lists(st.integers(0, 40), min_size=n, max_size=n))
        k_bounds = np.concatenate([[0], np.cumsum(own_lengths, dtype=np.int64)]) + 2
        k_len = int(k_bounds[-1]) + 1
        k_offsets = k_bounds if on_host else xp.asarray(k_bounds)
    shapes = [(*b, m, d) for b, m, d in zip(batch, (q_len, k_len, k_len), (6, 6, 5), strict=True)]
    q, k, v = draw(*shapes, dtype=dtype)
    states = np.broadcast_shapes(batch[1], batch[2])
    initial = np.abs(draw((*states, n, 6, 6), dtype=dtype, seed=1)[0]) if with_initial else None
    options = {"eps": 0.5, "is_causal": is_causal, "feature_map": feature_map}
    packed = options | {
        "q_offsets": q_bounds if on_host else xp.asarray(q_bounds), "k_offsets": k_offsets,
        "initial_state": None if initial is None else xp.asarray(initial),
    }  # fmt: skip
    out, last = linear_attention(*device(xp, q, k, v), return_state=True, **packed)
    dout, dstate = (draw(x.shape, dtype=dtype, seed=2)[0] for x in (out, last))
    slope = (
        {} if isinstance(feature_map, str) else {"feature_map_gradient": lambda x, dy: 2 * x * dy}
    )
    grads = linear_attention_backward(
        *device(xp, dout, q, k, v), dstate=xp.asarray(dstate), **packed, **slope
    )
    want, want_last = np.zeros(out.shape), np.zeros(last.shape)
    found = [np.zeros(x.shape) for x in (q, k, v, *([initial] if with_initial else []))]
    for s, (asking, rows) in enumerate(zip(spans(q_bounds), spans(k_bounds), strict=True)):
        parts = own(q, asking), own(k, rows), own(v, rows)
        first = initial[..., s, :, :].astype(float) if with_initial else None
        result, state = linear_attention(*parts, initial_state=first, return_state=True, **options)
        put(want, asking, result)
        want_last[..., s, :, :] = state
        more = linear_attention_backward(
            own(dout, asking), *parts, initial_state=first,
            dstate=dstate[..., s, :, :].astype(float), **options, **slope,
        )  # fmt: skip
        for grad, part, of in zip(found, more[:3], (asking, rows, rows), strict=False):
            put(grad, of, part)
        if with_initial:
            found[3][..., s, :, :] = more[3]
    close(out, want, dtype)
    close(last, want_last, dtype)
    for grad, x in zip(grads, found, strict=True):
        close(grad, x, dtype)


def test_keys_and_values_of_different_heads(xp):
    """Gradients of keys whose heads several heads of values share are the sums of theirs."""
    q, k, v, dout = draw((2, 4, 10, 3), (2, 2, 8, 3), (2, 4, 8, 2), (2, 4, 10, 2), dtype=DOUBLE)
    options = {"is_causal": False, "q_offsets": np.array([0, 5, 10])}
    options["k_offsets"] = np.array([1, 4, 8])
    dq, dk, dv = linear_attention_backward(*device(xp, dout, q, k, v), **options)
    repeated = device(xp, dout, q, k.repeat(2, axis=1), v)
    want_dq, want_dk, want_dv = linear_attention_backward(*repeated, **options)
    close(dq, to_numpy(want_dq), DOUBLE)
    close(dk, to_numpy(want_dk).reshape(2, 2, 2, 8, 3).sum(2), DOUBLE)
    close(dv, to_numpy(want_dv), DOUBLE)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_in_its_sequence(xp, dtype, reverse, bad):
    bounds = np.array([5, 8, 8, 20, 45, 130, 140])
    q, k, v, dout = draw(*[(2, 150, 8)] * 4, dtype=dtype)
    initial, dstate = draw((2, 6, 8, 8), (2, 6, 8, 8), dtype=state_dtype(dtype))
    spoiled = [(6, 1), (25, 2), (147, 0), (2, 0)]  # of k, v, q and all of them
    for x, (row, col) in zip((k, v, q), spoiled, strict=False):
        x[..., row, col] = bad
    for x in (q, k, v, dout):
        x[..., 2, 0] = bad
    initial[:, 3, 0, 0] = bad
    given = device(xp, q, k, v)
    options = {"reverse": reverse, "q_offsets": xp.asarray(bounds)}
    options["initial_state"] = xp.asarray(initial)
    out, state = causal_product(*given, return_state=True, **options)
    grads = causal_product_backward(xp.asarray(dout), *given, dstate=xp.asarray(dstate), **options)
    clean = np.ones(150, bool)
    for s in (0, 3):
        clean[bounds[s] : bounds[s + 1]] = False
    for x in (out, *grads[:3]):
        assert np.isfinite(to_numpy(x).astype(float)[:, clean]).all()
    for x in (state, grads[3]):
        assert np.isfinite(to_numpy(x)[:, [1, 2, 4, 5]]).all()
    assert not np.isfinite(to_numpy(out).astype(float)[:, ~clean]).all()
    for is_causal in (True, False):
        how = {"q_offsets": options["q_offsets"], "is_causal": is_causal}
        out = linear_attention(*given, **how)
        grads = linear_attention_backward(xp.asarray(dout), *given, **how)
        clean[20:45] = clean[5:8] = False
        for x in (out, *grads):
            assert np.isfinite(to_numpy(x).astype(float)[:, clean]).all()


@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("is_causal", [True, False])
def test_rows_of_no_sequence_are_0(xp, is_causal, eps):
    q, k, v, dout = device(xp, *draw(*[(2, 30, 4)] * 4))
    how = {"q_offsets": xp.asarray(np.array([4, 20, 25])), "eps": eps, "is_causal": is_causal}
    results = [
        causal_product(q, k, v, q_offsets=how["q_offsets"]),
        *causal_product_backward(dout, q, k, v, q_offsets=how["q_offsets"]),
        linear_attention(q, k, v, **how),
        *linear_attention_backward(dout, q, k, v, **how),
    ]
    for x in map(to_numpy, results):
        assert not x[:, :4].any()
        assert not x[:, 25:].any()
        assert x[:, 6:20].all()


def test_parts_of_sequences_with_their_states(xp):
    """Packed states go into the next call: a step of each sequence, as where text is generated."""
    x = draw(*[(4, 60, 8)] * 3, dtype=DOUBLE)
    q, k, v = device(xp, *x)
    bounds = np.array([0, 20, 45, 60])
    want = linear_attention(q, k, v, q_offsets=xp.asarray(bounds))
    firsts = [np.arange(a, b - 1) for a, b in itertools.pairwise(bounds)]
    begin, end = np.concatenate(firsts), bounds[1:] - 1
    before = xp.asarray(np.cumsum([0, *map(len, firsts)]))
    parts = [xp.asarray(a[:, begin]) for a in x]
    _, state = linear_attention(*parts, q_offsets=before, return_state=True)
    parts = [xp.asarray(a[:, end]) for a in x]
    got = linear_attention(*parts, q_offsets=xp.asarray(np.arange(4)), initial_state=state)
    np.testing.assert_allclose(to_numpy(got), to_numpy(want)[:, end], rtol=1e-9)


def test_one_sequence_is_the_call_without_offsets(xp):
    q, k, v = device(xp, *draw(*[(2, 300, 8)] * 3, dtype=DOUBLE))
    out = xp.zeros((2, 300, 8))
    got, state = causal_product(q, k, v, q_offsets=np.array([0, 300]), out=out, return_state=True)
    assert got is out
    want, last = causal_product(q, k, v, return_state=True)
    np.testing.assert_allclose(to_numpy(got), to_numpy(want), atol=1e-10)
    np.testing.assert_allclose(to_numpy(state)[:, 0], to_numpy(last), atol=1e-10)


def test_one_long_sequence_of_few_entries(xp):
    q, k, v = draw(*[(1, 9000, 8)] * 3, dtype=DOUBLE)
    bounds = np.array([3, 8, 8500])
    got = causal_product(*device(xp, q, k, v), q_offsets=bounds)
    want = np.zeros((1, 9000, 8))
    for rows in spans(bounds):
        want[:, rows] = causal_product(*(x[:, rows] for x in (q, k, v)))
    np.testing.assert_allclose(to_numpy(got), want, atol=1e-8)


@pytest.mark.parametrize("entries", [1, 3, 8])
@pytest.mark.parametrize("count", [1, 40, 300])
def test_results_do_not_depend_on_other_sequences_of_that_length(xp, entries, count):
    """All of a long call, with work for threads, is what each sequence has by itself."""
    length = 100
    q, k, v = draw(*[(entries, count * length, 64)] * 3)
    bounds = np.arange(0, count * length + 1, length)
    got = to_numpy(causal_product(*device(xp, q, k, v), q_offsets=bounds))
    for s in {0, count // 2, count - 1}:
        rows = slice(s * length, (s + 1) * length)
        want = causal_product(*(x[:, rows].astype(float) for x in (q, k, v)))
        np.testing.assert_allclose(got[:, rows], want, rtol=1e-4, atol=2e-2)


X = np.zeros((9, 4), np.float32)
OFFSETS = np.array([0, 4, 9])


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"q_offsets": [0, 9]}, TypeError, r"q_offsets is \[0, 9\] \(list\), want an array of"),
        ({"q_offsets": OFFSETS.astype(float)}, TypeError, "q_offsets has dtype float64, want int"),
        ({"q_offsets": OFFSETS[:0]}, ValueError, r"q_offsets has shape \(0,\), want \(sequences"),
        ({"q_offsets": OFFSETS[None]}, ValueError, r"q_offsets has shape \(1, 3\), want"),
        ({"q_offsets": np.array([0, 10])}, ValueError, r"q_offsets\[1\] is 10, want 0 to 9"),
        ({"q_offsets": np.array([-1, 9])}, ValueError, r"q_offsets\[0\] is -1, want 0 to 9"),
        ({"q_offsets": np.array([0, 5, 4])}, ValueError, r"q_offsets\[2\] is 4, want 5 or more"),
        (
            {"q_offsets": OFFSETS, "initial_state": np.zeros((4, 4), np.float32)}, ValueError,
            r"initial_state has shape \(4, 4\), want \(\.\.\., 2, 4, 4\), the number of sequences",
        ),
        (
            {"q_offsets": OFFSETS, "initial_state": np.zeros((3, 4, 4), np.float32)}, ValueError,
            r"initial_state has shape \(3, 4, 4\), want \(\.\.\., 2, 4, 4\)",
        ),
    ],
)  # fmt: skip
def test_errors_name_the_argument(options, error, text):
    with pytest.raises(error, match=f"^causal_product: {text}"):
        causal_product(X, X, X, **options)
    with pytest.raises(error, match=f"^causal_product_backward: {text}"):
        causal_product_backward(X, X, X, X, **options)
    if "initial_state" not in options:
        with pytest.raises(error, match=f"^linear_attention: {text}"):
            linear_attention(X, X, X, **options)
        with pytest.raises(error, match=f"^linear_attention_backward: {text}"):
            linear_attention_backward(X, X, X, X, **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"k_offsets": OFFSETS}, "k_offsets is given and q_offsets is None, want both"),
        (
            {"q_offsets": OFFSETS, "k_offsets": OFFSETS, "is_causal": True},
            "k_offsets is given with is_causal=True, want is_causal=False",
        ),
        (
            {"q_offsets": OFFSETS, "k_offsets": OFFSETS[:2]},
            "k_offsets has 2 numbers, q_offsets has 3, want one more than sequences in both",
        ),
        ({"q_offsets": OFFSETS, "k_offsets": OFFSETS + 1}, r"k_offsets\[2\] is 10, want 0 to 9"),
    ],
)
def test_errors_of_two_offsets(options, text):
    options = {"is_causal": False} | options
    with pytest.raises(ValueError, match=f"^linear_attention: {text}"):
        linear_attention(X, X, X, **options)
    with pytest.raises(ValueError, match=f"^linear_attention_backward: {text}"):
        linear_attention_backward(X, X, X, X, **options)


def test_other_lengths_of_keys_need_their_offsets():
    with pytest.raises(ValueError, match=r"k has length 9, q has 5, want k_offsets with q_offsets"):
        linear_attention(X[:5], X, X, q_offsets=np.array([0, 5]), is_causal=False)


@pytest.mark.parametrize("function", [causal_product, linear_attention])
def test_out_may_not_overlap_the_offsets(function):
    memory = np.zeros(100)
    out, offsets = memory[:20].reshape(1, 5, 4), memory[10:12].view(np.int64)
    q = np.ones((1, 5, 4))
    with pytest.raises(ValueError, match="out overlaps q_offsets in memory, want separate"):
        function(q, q, q, out=out, q_offsets=offsets)
    assert not memory.any()


def test_out_may_not_overlap_the_offsets_of_keys():
    memory = np.zeros(100)
    out, offsets = memory[:20].reshape(1, 5, 4), memory[10:12].view(np.int64)
    q = np.ones((1, 5, 4))
    both = {"q_offsets": np.zeros(2, int), "k_offsets": offsets}
    with pytest.raises(ValueError, match="out overlaps k_offsets in memory, want separate"):
        linear_attention(q, q, q, out=out, is_causal=False, **both)


def test_dstate_is_of_each_sequence():
    with pytest.raises(ValueError, match=r"dstate has shape \(4, 4\), want \(2, 4, 4\)"):
        causal_product_backward(X, X, X, X, q_offsets=OFFSETS, dstate=np.zeros((4, 4), np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_offsets_on_the_device_that_are_out_of_range(cupy, dtype):
    q, k, v, dout = device(cupy, *draw(*[(2, 90, 8)] * 4, dtype=dtype))
    where = cupy.asarray(np.array([3, 10, 7, 80, 99, 85]))
    calls = [
        (causal_product, causal_product_backward, {}),
        (linear_attention, linear_attention_backward, {}),
        (linear_attention, linear_attention_backward, {"is_causal": False}),
    ]
    for forward, backward, options in calls:
        out = to_numpy(forward(q, k, v, q_offsets=where, **options)).astype(float)
        grads = backward(dout, q, k, v, q_offsets=where, **options)
        assert np.isfinite(out[:, :10]).all()
        assert np.isnan(out[:, 10:]).all()
        for grad in grads:
            found = to_numpy(grad).astype(float)
            assert found[:, 3:10].any()
            assert not found[:, 10:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [True, False])
def test_calls_are_captured_with_offsets_that_change(cupy, is_causal):
    q, k, v = device(cupy, *draw(*[(2, 90, 8)] * 3))
    where = cupy.asarray(np.array([0, 40, 90]))
    out = cupy.empty_like(q)
    call = {"is_causal": is_causal, "q_offsets": where}
    linear_attention(q, k, v, out=out, **call)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        linear_attention(q, k, v, out=out, **call)
        graph = stream.end_capture()
        where[1] = 17
        graph.launch()
        stream.synchronize()
    want = linear_attention(q, k, v, q_offsets=np.array([0, 17, 90]), is_causal=is_causal)
    np.testing.assert_allclose(to_numpy(out), to_numpy(want), rtol=1e-4, atol=1e-5)
