"""Linear attention in parts, over all keys, and its gradients."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import linear_attention, linear_attention_backward
from tests.support.gradients import differences
from tests.support.products import FEATURES, check_close, draw, expand_heads, state_dtype
from tests.support.strategies import DTYPES, LAYOUTS, UNIT, batches, by_dtype, lay, to_numpy

HALF, BFLOAT16, SINGLE, DOUBLE = DTYPES


def plain(q, k, v, state=None, *, feature_map="elu1", eps=1e-6, is_causal=True):
    """Output and last state in float64, from all weights."""
    q, k, v = (x.astype(float) for x in (q, k, v))
    x, y = FEATURES[feature_map](q), FEATURES[feature_map](k)
    values = np.concatenate([v, np.ones((*v.shape[:-1], 1))], axis=-1)
    batch = np.broadcast_shapes(
        *(a.shape[:-2] for a in (x, expand(y, x), expand(values, x))),
        *([] if state is None else [expand(state, x).shape[:-2]]),
    )
    wide = (*batch, 0, 0)
    x, y, values = (expand_heads(a, wide) for a in (x, y, values))
    first = np.zeros((x.shape[-1], values.shape[-1])) if state is None else state
    first = expand_heads(first.astype(float), wide)
    seen = np.tri(x.shape[-2]) if is_causal else 1
    sums = (seen * (x @ y.swapaxes(-1, -2))) @ values + x @ first
    out = sums[..., :-1] / (sums[..., -1:] + eps)
    return out, first + y.swapaxes(-1, -2) @ values


def expand(x, like):
    """With the heads of `like`, if there are such."""
    if min(x.ndim, like.ndim) < 4:
        return x
    heads = max(x.shape[-3], like.shape[-3])
    return expand_heads(x, (*x.shape[:-3], heads, *x.shape[-2:]))


def check_state(found, total, length, dtype):
    found = expand_heads(to_numpy(found), (*total.shape[:-2], 0, 0))
    limit = 64 * UNIT[state_dtype(dtype)] * (1 + length) * np.exp(4)
    np.testing.assert_allclose(found, total, rtol=0, atol=limit)


# States


@given(
    length=st.integers(0, 150),
    cut=st.floats(0, 1),
    dims=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    batch=batches(8),
    dtype=st.sampled_from(DTYPES),
    feature_map=st.sampled_from(["elu1", "relu", "exp"]),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 3),
)
def test_a_sequence_in_two_calls(xp, length, cut, dims, batch, dtype, feature_map, layouts):
    shapes = zip(batch[1], (dims[0], dims[0], dims[1]), strict=True)
    arrays = draw(*((*shape, length, dim) for shape, dim in shapes), dtype=dtype)
    options = {"feature_map": feature_map, "eps": 1e-3, "return_state": True}
    laid = [lay(xp, x, how) for x, how in zip(arrays, layouts, strict=True)]
    out, state = linear_attention(*laid, **options)
    middle = round(cut * length)
    first, between = linear_attention(*(x[..., :middle, :] for x in laid), **options)
    rest, last = linear_attention(
        *(x[..., middle:, :] for x in laid), initial_state=between, **options
    )
    assert state.dtype == between.dtype == state_dtype(dtype)
    assert state.shape == last.shape == (*state.shape[:-2], dims[0], dims[1] + 1)
    want, total = plain(*arrays, feature_map=feature_map, eps=1e-3)
    slack = 64 * UNIT[state_dtype(dtype)]
    parts = np.concatenate([to_numpy(first), to_numpy(rest)], axis=-2)
    for found in (to_numpy(out), parts):
        assert found.dtype == dtype
        check_close(found, want, 2 * UNIT[dtype] * np.abs(want) + 10 * slack + 2.0**-24)
    for found in (state, last):
        check_state(found, total, length, dtype)


@pytest.mark.parametrize("feature_map", sorted(FEATURES))
@pytest.mark.parametrize(**by_dtype())
@pytest.mark.parametrize("heads", [4, 2])
def test_a_stream_row_by_row(xp, dtype, feature_map, heads):
    """Calls of one row, of which the second and later ones were seen before."""
    shapes = (2, 4, 12, 8), (2, heads, 12, 8), (2, heads, 12, 5)
    arrays = [np.abs(x) for x in draw(*shapes, dtype=dtype)]
    q, k, v = map(xp.asarray, arrays)
    state, rows = None, []
    for i in range(12):
        row, state = linear_attention(
            *(x[..., i : i + 1, :] for x in (q, k, v)),
            initial_state=state, return_state=True, feature_map=feature_map,
        )  # fmt: skip
        assert row.dtype == dtype
        rows.append(to_numpy(row))
    want, total = plain(*arrays, feature_map=feature_map)
    found = np.concatenate(rows, axis=-2)
    np.testing.assert_allclose(found.astype(float), want, rtol=2 * UNIT[dtype] + 1e-5)
    np.testing.assert_allclose(expand_heads(to_numpy(state), (2, 4, 0, 0)), total, rtol=1e-5)


# All keys


@given(
    lengths=st.tuples(st.integers(0, 150), st.integers(0, 150)),
    dims=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    batch=batches(8),
    dtype=st.sampled_from(DTYPES),
    with_state=st.booleans(),
    layout=st.sampled_from(LAYOUTS),
)
def test_all_queries_see_all_keys(xp, lengths, dims, batch, dtype, with_state, layout):
    shapes = zip(
        batch[1], (lengths[0], lengths[1], lengths[1]), (*dims[:1] * 2, dims[1]), strict=True
    )
    arrays = draw(*((*shape, length, dim) for shape, length, dim in shapes), dtype=dtype)
    state = None
    if with_state:
        state = np.abs(draw((dims[0], dims[1] + 1), dtype=state_dtype(dtype), seed=1)[0])
    options = {"is_causal": False, "eps": 1e-2}
    out, last = linear_attention(
        *(lay(xp, x, layout) for x in arrays), return_state=True, **options,
        initial_state=None if state is None else xp.asarray(state),
    )  # fmt: skip
    want, total = plain(*arrays, state, **options)
    assert out.dtype == dtype
    slack = 64 * UNIT[state_dtype(dtype)]
    check_close(to_numpy(out), want, 2 * UNIT[dtype] * np.abs(want) + 10 * slack + 2.0**-24)
    check_state(last, total, lengths[1], dtype)


def test_a_long_sequence_of_all_keys(xp):
    """Long enough for segments, and for threads."""
    arrays = draw((3000, 16), (2500, 16), (2500, 8))
    out, state = linear_attention(*map(xp.asarray, arrays), is_causal=False, return_state=True)
    want, total = plain(*arrays, is_causal=False)
    np.testing.assert_allclose(to_numpy(out), want, atol=1e-5)
    np.testing.assert_allclose(to_numpy(state), total, rtol=1e-4, atol=1e-2)


# Gradients


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("feature_map", sorted(FEATURES))
@pytest.mark.parametrize(
    "shapes",
    [
        ((5, 3), (5, 3), (5, 2), None),
        ((5, 3), (5, 3), (5, 2), (3, 3)),
        ((2, 4, 3, 2), (2, 1, 3, 2), (2, 2, 3, 1), (1, 2, 2, 2)),
        ((2, 1, 3, 2), (3, 3, 2), (3, 1), (3, 2, 2)),
    ],
)
def test_finite_differences(shapes, feature_map, is_causal):
    arrays = draw(*shapes[:3], dtype=DOUBLE)
    if shapes[3]:
        arrays.append(np.abs(draw(shapes[3], dtype=DOUBLE, seed=1)[0]) + 1)
    if feature_map == "identity":
        arrays = [np.abs(x) + 0.5 for x in arrays]
    if not is_causal:
        arrays[0] = np.concatenate([arrays[0], arrays[0][..., :2, :] + 0.1], axis=-2)
    options = {"feature_map": feature_map, "is_causal": is_causal, "eps": 0.01}

    def forward():
        initial = arrays[3] if shapes[3] else None
        return linear_attention(*arrays[:3], initial_state=initial, return_state=True, **options)

    out, state = forward()
    dout, dstate = draw(out.shape, state.shape, dtype=DOUBLE, seed=2)

    def loss():
        out, state = forward()
        return np.sum(dout * out) + np.sum(dstate * state)

    initial = arrays[3] if shapes[3] else None
    got = linear_attention_backward(
        dout, *arrays[:3], initial_state=initial, dstate=dstate, **options
    )
    assert len(got) == len(arrays)
    for array, grad in zip(arrays, got, strict=True):
        assert grad.shape == array.shape
        np.testing.assert_allclose(grad, differences(loss, array), rtol=1e-5, atol=1e-7)


@given(
    lengths=st.tuples(st.integers(0, 100), st.integers(0, 100)),
    dims=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    batch=batches(8),
    dtype=st.sampled_from(DTYPES[:3]),
    feature_map=st.sampled_from(["elu1", "relu", "exp"]),
    is_causal=st.booleans(),
    with_state=st.booleans(),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 3),
)
def test_gradients_of_any_call_agree_with_those_in_float64(
    xp, lengths, dims, batch, dtype, feature_map, is_causal, with_state, layouts
):
    q_len, k_len = (lengths[0],) * 2 if is_causal else lengths
    sizes = (q_len, dims[0]), (k_len, dims[0]), (k_len, dims[1])
    arrays = draw(*((*a, *b) for a, b in zip(batch[1], sizes, strict=True)), dtype=dtype)
    options = {"feature_map": feature_map, "is_causal": is_causal, "eps": 0.1}
    states = {}
    if with_state:
        state = np.abs(draw((dims[0], dims[1] + 1), dtype=SINGLE, seed=1)[0])
        states = {"initial_state": xp.asarray(state)}
    laid = [lay(xp, x, how) for x, how in zip(arrays, layouts, strict=True)]
    out, last = linear_attention(*laid, return_state=True, **states, **options)
    dout = draw(out.shape, dtype=dtype, seed=2)[0]
    if with_state:
        states["dstate"] = xp.asarray(draw(last.shape, dtype=SINGLE, seed=3)[0])
    before = [to_numpy(x).tobytes() for x in laid]
    got = linear_attention_backward(xp.asarray(dout), *laid, **states, **options)
    assert before == [to_numpy(x).tobytes() for x in laid]
    wide = {name: to_numpy(x).astype(float) for name, x in states.items()}
    doubles = [x.astype(float) for x in (dout, *arrays)]
    want = linear_attention_backward(*doubles, **wide, **options)
    assert len(got) == len(want) == 3 + with_state
    for x, grad, exact in zip((*arrays, last), got, want, strict=False):
        assert grad.dtype == x.dtype
        assert grad.shape == exact.shape
        size = np.abs(exact).max(initial=0) + 1
        error = np.abs(to_numpy(grad).astype(float) - exact)
        assert (error <= 2 * UNIT[dtype] * np.abs(exact) + 1e-4 * size).all()


def test_gradients_of_a_long_sequence(xp):
    """Long enough for segments, and for threads; also through the state."""
    arrays = draw((2000, 16), (2000, 16), (2000, 8), dtype=DOUBLE)
    dout, dstate = draw((2000, 8), (16, 9), dtype=DOUBLE, seed=1)
    direction = draw(*(x.shape for x in arrays), dtype=DOUBLE, seed=2)
    for is_causal in (True, False):

        def loss(step, is_causal=is_causal):
            moved = (xp.asarray(x + step * d) for x, d in zip(arrays, direction, strict=True))
            out, state = linear_attention(*moved, return_state=True, is_causal=is_causal)
            return np.sum(dout * to_numpy(out)) + 1e-3 * np.sum(dstate * to_numpy(state))

        got = linear_attention_backward(
            *map(xp.asarray, (dout, *arrays)), dstate=xp.asarray(1e-3 * dstate), is_causal=is_causal
        )
        along = sum(np.sum(to_numpy(x) * d) for x, d in zip(got, direction, strict=True))
        np.testing.assert_allclose(along, (loss(1e-6) - loss(-1e-6)) / 2e-6, rtol=1e-5)


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_callable_and_its_gradient(xp, is_causal):
    def pairs(x):
        return (x[..., :, None] * x[..., None, :]).reshape(*x.shape[:-1], -1)

    def of_pairs(x, grad):
        square = grad.reshape(*x.shape, x.shape[-1])
        return ((square + square.swapaxes(-1, -2)) * x[..., None, :]).sum(axis=-1)

    arrays = draw((2, 6, 3), (6, 3), (6, 2), dtype=DOUBLE)
    initial, dstate = np.abs(draw((9, 3), (9, 3), dtype=DOUBLE, seed=4))
    dout = draw((2, 6, 2), dtype=DOUBLE, seed=1)[0]
    options = {"feature_map": pairs, "is_causal": is_causal}

    def loss():
        out, state = linear_attention(*arrays, initial_state=initial, return_state=True, **options)
        return np.sum(dout * out) + np.sum(dstate * state)

    got = linear_attention_backward(
        *map(xp.asarray, (dout, *arrays)), feature_map_gradient=of_pairs,
        initial_state=xp.asarray(initial), dstate=xp.asarray(dstate), **options,
    )  # fmt: skip
    for array, grad in zip((*arrays, initial), got, strict=True):
        np.testing.assert_allclose(to_numpy(grad), differences(loss, array), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("is_causal", [True, False])
def test_rows_whose_weights_are_all_zero(xp, is_causal):
    q, k, v, dout = draw(*[(6, 4)] * 4)
    q = np.abs(q)
    q[2] = -1  # features of 0
    options = {"feature_map": "relu", "eps": 0.0, "is_causal": is_causal}
    k[0] = np.abs(k[0])
    out = to_numpy(linear_attention(*map(xp.asarray, (q, k, v)), **options))
    assert np.isnan(out[2]).all()
    got = linear_attention_backward(*map(xp.asarray, (dout, q, k, v)), **options)
    assert all(np.isnan(to_numpy(x)).any() for x in got[1:])
    dout[2] = 0  # nothing depends on it
    got = linear_attention_backward(*map(xp.asarray, (dout, q, k, v)), **options)
    others = np.delete(np.arange(6), 2)
    if not is_causal:
        want = linear_attention_backward(dout[others], q[others], k, v, **options)
        for x, y in zip(got[1:], want[1:], strict=True):
            np.testing.assert_allclose(to_numpy(x), y, atol=1e-5)
    assert all(np.isfinite(to_numpy(x)).all() for x in got)
    assert (to_numpy(got[0])[2] == 0).all()


@pytest.mark.parametrize(**by_dtype())
def test_gradients_of_large_and_small_numbers(xp, dtype):
    """Values of 1e4 and weights of 1e-6 and 1e6: sums are float32, and nothing overflows."""
    q, k, v, dout = draw(*[(300, 8)] * 4, dtype=dtype)
    v = (v.astype(float) * 1e4).astype(dtype)
    for shift in (-7.0, 7.0):
        moved = [(x.astype(float) + shift).astype(dtype) for x in (q, k)]
        options = {"feature_map": "exp", "eps": 0.0}
        got = linear_attention_backward(*map(xp.asarray, (dout, *moved, v)), **options)
        doubles = [x.astype(float) for x in (dout, *moved, v)]
        want = linear_attention_backward(*doubles, **options)
        for x, y in zip(got, want, strict=True):
            assert np.isfinite(to_numpy(x).astype(float)).all()
            error = np.linalg.norm(to_numpy(x).astype(float) - y) / np.linalg.norm(y)
            assert error < UNIT[dtype] + 200 * UNIT[state_dtype(dtype)]


# Errors

X = np.zeros((5, 4), np.float32)
STATE = np.zeros((4, 5), np.float32)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            {"initial_state": STATE[:, :4]},
            ValueError,
            "initial_state has shape (4, 4), want (..., 4, 5), the dims of features and of v, plus",
        ),
        (
            {"initial_state": STATE, "feature_map": lambda x: x[..., :2]},
            ValueError,
            "initial_state has shape (4, 5), want (..., 2, 5), the dims of features and of v, plus",
        ),
        (
            {"initial_state": STATE.astype(float)},
            TypeError,
            "initial_state has dtype float64, want float32",
        ),
        ({"is_causal": "no"}, TypeError, "is_causal is 'no' (str), want a bool"),
        ({"k": X[:3], "v": X[:3]}, ValueError, "k has length 3, q has 5"),
        ({"k": X[:3], "is_causal": False}, ValueError, "v has length 5, k has 3"),
    ],
)
@pytest.mark.parametrize("backward", [False, True])
def test_errors(backward, arguments, error, text):
    arguments = {"q": X, "k": X, "v": X} | arguments
    name = "linear_attention"
    function = linear_attention
    if backward:
        name, function = "linear_attention_backward", linear_attention_backward
        arguments["dout"] = X
        if callable(arguments.get("feature_map")):
            arguments["feature_map_gradient"] = lambda x, grad: grad
    with pytest.raises(error) as caught:
        function(**arguments)
    assert str(caught.value).startswith(f"{name}: {text}")


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"dout": X[:3]}, ValueError, "dout has shape (3, 4), want (5, 4)"),
        ({"dout": None}, TypeError, "dout is None, want an array"),
        ({"dstate": STATE[:, :4]}, ValueError, "dstate has shape (4, 4), want (4, 5)"),
        ({"dstate": STATE.astype(float)}, TypeError, "dstate has dtype float64, want float32"),
        (
            {"feature_map": np.abs},
            TypeError,
            "feature_map_gradient is None (NoneType), want a callable",
        ),
        (
            {"feature_map_gradient": np.add},
            TypeError,
            "feature_map_gradient is <ufunc 'add'> (ufunc), want None for feature_map of 'elu1'",
        ),
        (
            {"feature_map": np.abs, "feature_map_gradient": lambda x, grad: None},
            TypeError,
            "feature_map_gradient(q, ...) is None, want an array",
        ),
        (
            {"feature_map": np.abs, "feature_map_gradient": lambda x, grad: grad[0]},
            ValueError,
            "feature_map_gradient(q, ...) has shape (4,), want (5, 4)",
        ),
        (
            {"feature_map": np.abs, "feature_map_gradient": lambda x, grad: grad.astype(float)},
            TypeError,
            "feature_map_gradient(q, ...) has dtype float64, want float32",
        ),
    ],
)
def test_errors_of_gradients(arguments, error, text):
    with pytest.raises(error) as caught:
        linear_attention_backward(**({"dout": X, "q": X, "k": X, "v": X} | arguments))
    assert str(caught.value).startswith(f"linear_attention_backward: {text}")
