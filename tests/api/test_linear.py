"""What is built on causal products: states at positions, readings of them, linear attention."""

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import causal_product, linear_attention, prefix_state, reference
from tests.support.products import FEATURES, draw, plain_attention, plain_states, state_dtype
from tests.support.strategies import DTYPES, LAYOUTS, UNIT, by_dtype, lay, to_numpy

HALF, BFLOAT16, SINGLE, DOUBLE = DTYPES


@pytest.fixture(scope="module")
def xp():
    """The array namespaces that are served."""
    return np


# States


@given(
    length=st.integers(0, 200),
    chosen=st.lists(st.floats(0, 1), max_size=8),
    batch=st.sampled_from([((), ()), ((3,), (3,)), ((2, 1), (3,)), ((2, 3), (2, 3))]),
    dtype=st.sampled_from(DTYPES),
    reverse=st.booleans(),
    with_initial=st.booleans(),
)
def test_states_and_what_reads_them(xp, length, chosen, batch, dtype, reverse, with_initial):
    ends = [round(x * length) for x in chosen]
    k, v = draw((*batch[0], length, 5), (*batch[1], length, 4), dtype=dtype)
    initial = draw((5, 4), dtype=state_dtype(dtype), seed=1)[0] if with_initial else None
    options = {"initial_state": initial, "reverse": reverse}
    states = to_numpy(prefix_state(xp.asarray(k), xp.asarray(v), ends, **options))
    want = plain_states(k, v, ends, initial, reverse)
    wide = np.broadcast_shapes(*batch)
    assert states.shape == (*wide, len(ends), 5, 4)
    assert states.dtype == state_dtype(dtype)
    limit = 64 * UNIT[state_dtype(dtype)] * (1 + length)
    for i, state in enumerate(want):
        np.testing.assert_allclose(states[..., i, :, :], state, rtol=0, atol=limit)

    q = draw((*wide, len(ends), 5), dtype=dtype, seed=2)[0]
    out = to_numpy(prefix_state(xp.asarray(k), xp.asarray(v), ends, q=xp.asarray(q), **options))
    assert out.shape == (*wide, len(ends), 4)
    assert out.dtype == dtype
    for i, state in enumerate(want):
        read = (q[..., i : i + 1, :].astype(float) @ state)[..., 0, :]
        error = np.abs(out[..., i, :].astype(float) - read)
        assert (error <= 2 * UNIT[dtype] * np.abs(read) + 20 * limit + 2.0**-24).all()


@pytest.mark.parametrize("reverse", [False, True])
def test_all_of_a_sequence_is_the_default(xp, reverse):
    k, v, q = draw((3, 50, 4), (3, 50, 6), (3, 7, 4), dtype=DOUBLE)
    total = k.swapaxes(-1, -2) @ v
    got = prefix_state(xp.asarray(k), xp.asarray(v), reverse=reverse)
    np.testing.assert_allclose(to_numpy(got), total, atol=1e-12)
    got = prefix_state(*map(xp.asarray, (k, v)), q=xp.asarray(q), reverse=reverse)
    np.testing.assert_allclose(to_numpy(got), q @ total, atol=1e-12)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_causal_product_reads_after_each_row(xp, reverse):
    q, k, v = map(xp.asarray, draw((2, 8, 90, 4), (2, 2, 90, 4), (2, 4, 90, 6)))
    ends = np.arange(90) + (not reverse)
    got = prefix_state(k, v, ends, q=q, reverse=reverse)
    want = causal_product(q, k, v, reverse=reverse)
    np.testing.assert_allclose(to_numpy(got), to_numpy(want), atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_states_of_any_strides(xp, layout):
    k, v, q = draw((2, 3, 70, 8), (2, 3, 70, 5), (2, 3, 4, 8), dtype=DOUBLE)
    laid = [lay(xp, x, layout) for x in (k, v, q)]
    ends = [70, 3, 3, 41]
    want = np.stack(plain_states(k, v, ends), axis=-3)
    np.testing.assert_allclose(to_numpy(prefix_state(*laid[:2], ends)), want, atol=1e-11)
    got = prefix_state(*laid[:2], ends, q=laid[2])
    np.testing.assert_allclose(to_numpy(got), (q[..., None, :] @ want)[..., 0, :], atol=1e-11)


@pytest.mark.parametrize("reverse", [False, True])
def test_rows_beyond_a_position_do_not_show(xp, reverse):
    k, v, q = draw((200, 4), (200, 4), (3, 4))
    k[100], v[101, 2] = np.nan, np.inf
    out = to_numpy(prefix_state(*map(xp.asarray, (k, v)), [50, 101, 150], q=q, reverse=reverse))
    states = to_numpy(prefix_state(*map(xp.asarray, (k, v)), [50, 101, 150], reverse=reverse))
    columns = np.arange(4) == 2
    want = np.array([~columns & False, columns | True, columns | True])
    if reverse:
        want = np.array([columns | True, columns, columns & False])
    np.testing.assert_array_equal(~np.isfinite(out), want)
    np.testing.assert_array_equal(~np.isfinite(states).all(axis=-2), want)


def test_positions_of_another_library(xp):
    other = pytest.importorskip("array_api_strict")
    x = xp.ones((5, 3))
    got = prefix_state(x, x, other.asarray([1, 4]))
    np.testing.assert_array_equal(got, prefix_state(x, x, [1, 4]))
    assert prefix_state(x, x, other.asarray([], dtype=other.int32)).shape == (0, 3, 3)
    with pytest.raises(TypeError, match=r"^prefix_state: ends is .*, want a sequence of ints"):
        prefix_state(x, x, other.asarray([], dtype=other.float32))


@pytest.mark.parametrize("none", [[], (), range(0), np.array([], np.uint8), np.array([], ">i8")])
def test_no_position_is_no_state(xp, none):
    assert prefix_state(xp.zeros((9, 4)), xp.zeros((9, 4)), none).shape == (0, 4, 4)


K = np.zeros((9, 4), np.float32)
HEADS = np.zeros((1, 4, 9, 4), np.float32)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            {"ends": 3},
            TypeError,
            "ends is 3 (int), want a sequence of ints from 0 to 9, the length",
        ),
        (
            {"ends": [*range(6), 1.5]},
            TypeError,
            "ends[6] is 1.5 (float), want an int from 0 to 9, the length of k",
        ),
        ({"ends": {3}}, TypeError, "ends is {3} (set), want a sequence of ints"),
        ({"ends": {3: 4}}, TypeError, "ends is {3: 4} (dict), want a sequence of ints"),
        ({"ends": b"\1\2"}, TypeError, r"ends is b'\x01\x02' (bytes), want a sequence of ints"),
        ({"ends": bytearray(b"\1")}, TypeError, r"ends is bytearray(b'\x01') (bytearray), want"),
        ({"ends": memoryview(b"\1")}, TypeError, "ends is <memory at "),
        ({"ends": "12"}, TypeError, "ends is '12' (str), want a sequence of ints"),
        ({"ends": itertools.count()}, TypeError, "ends is count(0) (count), want a sequence of"),
        ({"ends": (x for x in [1])}, TypeError, "ends is <generator object"),
        ({"ends": np.array(3)}, TypeError, "ends is array(3) (ndarray), want a sequence of ints"),
        ({"ends": np.zeros(0)}, TypeError, "ends is array([], dtype=float64) (ndarray), want"),
        ({"ends": np.zeros(0, bool)}, TypeError, "ends is array([], dtype=bool) (ndarray), want"),
        ({"ends": np.zeros(0, object)}, TypeError, "ends is array([], dtype=object) (ndarray)"),
        ({"ends": np.zeros(0, "m8")}, TypeError, "ends is array([], dtype=timedelta64) (ndarray)"),
        ({"ends": np.zeros((0, 3), int)}, TypeError, "ends is array([], shape=(0, 3), dtype=int"),
        ({"ends": [np.timedelta64(1, "s")]}, TypeError, "ends[0] is np.timedelta64(1,'s') (timede"),
        ({"ends": [1, True]}, TypeError, "ends[1] is True (bool), want an int from 0 to 9"),
        ({"ends": [3, 10]}, ValueError, "ends[1] is 10 (int), want an int from 0 to 9"),
        ({"ends": [-1, 1.5]}, ValueError, "ends[0] is -1 (int), want an int from 0 to 9"),
        ({"ends": [1], "q": K}, ValueError, "ends has 1 positions, q has 9 rows"),
        ({"q": K[:, :3]}, ValueError, "k has dim 4, q has 3"),
        ({"v": K[:5]}, ValueError, "v has length 5, k has 9"),
        ({"v": None}, TypeError, "v is None, want an array"),
        ({"k": K.astype(int)}, TypeError, "k has dtype int64, want float16"),
        ({"initial_state": K}, ValueError, "initial_state has shape (9, 4), want (..., 4, 4)"),
        ({"reverse": None}, TypeError, "reverse is None (NoneType), want a bool"),
        (
            {"k": HEADS, "v": HEADS[:, :2]},
            ValueError,
            "v has batch shape (1, 2), which does not broadcast with (1, 4) of k",
        ),
        (
            {"k": HEADS, "v": HEADS, "initial_state": np.zeros((3, 4, 4), np.float32)},
            ValueError,
            "initial_state has 3 heads, want 1 or 4",
        ),
    ],
)
def test_errors_of_states(arguments, error, text):
    with pytest.raises(error) as caught:
        prefix_state(**({"k": K, "v": K} | arguments))
    assert str(caught.value).startswith(f"prefix_state: {text}")


# Linear attention


@pytest.mark.parametrize("feature_map", [f for f in FEATURES if f != "identity"])
@pytest.mark.parametrize(**by_dtype())
def test_linear_attention_is_a_weighted_mean(xp, dtype, feature_map):
    arrays = draw((2, 8, 300, 16), (2, 2, 300, 16), (2, 2, 300, 5), dtype=dtype)
    got = linear_attention(*map(xp.asarray, arrays), feature_map=feature_map, eps=1e-3)
    want = plain_attention(*arrays, FEATURES[feature_map], eps=1e-3)
    assert got.dtype == dtype
    assert reference.relative_error(to_numpy(got), want) < max(
        UNIT[dtype], 16 * UNIT[state_dtype(dtype)]
    )


def test_identity_is_no_feature_map(xp):
    q, k, v = (np.abs(x) for x in draw((300, 16), (300, 16), (300, 5), dtype=DOUBLE))
    got = linear_attention(*map(xp.asarray, (q, k, v)), feature_map="identity")
    np.testing.assert_allclose(to_numpy(got), plain_attention(q, k, v, FEATURES["identity"]))


def test_a_mean_of_ones_is_one(xp):
    q, k, _ = draw(*[(3000, 8)] * 3)
    got = linear_attention(xp.asarray(q), xp.asarray(k), xp.ones((3000, 2), np.float32))
    np.testing.assert_allclose(to_numpy(got), 1, rtol=1e-5)


def test_a_callable_gets_views_of_the_arrays(xp):
    seen = []

    def square(x):
        seen.append(x)
        return xp.concatenate([x, x], axis=-1) ** 2

    q, k, v = map(xp.asarray, draw((2, 90, 4), (90, 4), (90, 5), dtype=DOUBLE))
    got = linear_attention(q, k, v, feature_map=square)
    for x, y in zip(seen, (q, k), strict=True):
        assert (x.shape, x.strides, x.ctypes.data) == (y.shape, y.strides, y.ctypes.data)
    want = plain_attention(
        *map(to_numpy, (q, k, v)), lambda x: np.concatenate([x, x], axis=-1) ** 2
    )
    np.testing.assert_allclose(to_numpy(got), want, rtol=1e-10)


def test_eps_bounds_the_quotient(xp):
    zero = xp.zeros((5, 3))
    v = xp.ones((5, 2))
    assert (to_numpy(linear_attention(zero, zero, v, feature_map="relu")) == 0).all()
    assert np.isnan(to_numpy(linear_attention(zero, zero, v, feature_map="relu", eps=0))).all()
    few = zero.astype(np.float32), zero.astype(np.float32), v.astype(np.float32)
    assert np.isnan(to_numpy(linear_attention(*few, feature_map="relu", eps=1e-46))).all()
    none = xp.zeros((5, 0))
    assert (to_numpy(linear_attention(none, none, v)) == 0).all()
    assert np.isnan(to_numpy(linear_attention(none, none, v, eps=0))).all()


@pytest.mark.parametrize(**by_dtype())
def test_features_of_what_is_not_finite(xp, dtype):
    q, k, v = draw((150, 6), (150, 6), (150, 6), dtype=dtype)
    k[70], v[100, 2] = np.nan, np.inf
    k[20], q[30] = -np.inf, -np.inf  # features of 0
    out = to_numpy(linear_attention(*map(xp.asarray, (q, k, v)))).astype(float)
    assert np.isfinite(out[:70]).all()
    assert np.isnan(out[70:]).all()
    k[70] = 0
    out = to_numpy(linear_attention(*map(xp.asarray, (q, k, v)))).astype(float)
    assert np.isfinite(np.delete(out, 2, axis=1)).all()
    np.testing.assert_array_equal(np.isfinite(out[:, 2]), np.arange(150) < 100)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(**by_dtype(HALF, SINGLE))
def test_linear_attention_of_any_strides(xp, dtype, layout):
    arrays = draw(*[(2, 3, 70, 8)] * 3, dtype=dtype)
    want = to_numpy(linear_attention(*map(xp.asarray, arrays)))
    laid = [lay(xp, x, layout) for x in arrays]
    out = lay(xp, np.full(want.shape, np.nan, dtype), layout)
    assert linear_attention(*laid, out=out) is out
    assert to_numpy(out).tobytes() == want.tobytes()


X = np.zeros((5, 4), np.float32)
BUFFER = np.ones((5, 4), np.float32)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            {"feature_map": "softmax"},
            ValueError,
            "feature_map is 'softmax' (str), want one of 'elu1', 'relu', 'exp', 'identity' or a c",
        ),
        ({"feature_map": None}, ValueError, "feature_map is None (NoneType), want one of"),
        ({"feature_map": lambda x: None}, TypeError, "feature_map(q) is None, want an array"),
        ({"feature_map": np.ndarray.tolist}, TypeError, "feature_map(q) is a list, want an array"),
        ({"feature_map": np.sum}, TypeError, "feature_map(q) is a numpy.float32, want an array"),
        (
            {"feature_map": lambda x: x.astype(float)},
            TypeError,
            "feature_map(q) has dtype float64, q has float32",
        ),
        (
            {"feature_map": lambda x: x > 0},
            TypeError,
            "feature_map(q) has dtype bool, want float16",
        ),
        (
            {"feature_map": lambda x: x.astype(">f4")},
            TypeError,
            "feature_map(q) has dtype >f4, want native byte order (float32)",
        ),
        (
            {"feature_map": lambda x: x[0]},
            ValueError,
            "feature_map(q) has shape (4,), q has (5, 4), want the same axes but the last",
        ),
        (
            {"feature_map": lambda x: x[None]},
            ValueError,
            "feature_map(q) has shape (1, 5, 4), q has (5, 4), want the same axes but the last",
        ),
        (
            {"feature_map": lambda x: x if x[0, 0] else x[1:], "q": X + 1},
            ValueError,
            "feature_map(k) has shape (4, 4), k has (5, 4), want the same axes but the last",
        ),
        (
            {"feature_map": lambda x: x if x[0, 0] else x[:, 1:], "q": X + 1},
            ValueError,
            "feature_map(k) has dim 3, feature_map(q) has 4",
        ),
        (
            {"feature_map": lambda x: BUFFER, "k": X + 1},
            ValueError,
            "feature_map(k) overlaps feature_map(q) in memory, want separate memory",
        ),
        (
            {"feature_map": lambda x: BUFFER, "out": BUFFER},
            ValueError,
            "out overlaps feature_map(q) in memory, want separate memory",
        ),
        (
            {"feature_map": lambda x: np.abs(x, out=x)},
            ValueError,
            "output array is read-only",
        ),
        ({"eps": -1.0}, ValueError, "eps is -1.0 (float), want a finite number >= 0"),
        ({"eps": "0"}, TypeError, "eps is '0' (str), want a finite number >= 0"),
        ({"k": X[:3]}, ValueError, "v has length 5, k has 3"),
        ({"out": X[:3]}, ValueError, "out has shape (3, 4), want (5, 4)"),
        ({"out": X}, ValueError, "out overlaps q in memory"),
    ],
)
def test_errors_of_linear_attention(arguments, error, text):
    with pytest.raises(error) as caught:
        linear_attention(**({"q": X, "k": X, "v": X} | arguments))
    assert str(caught.value).removeprefix("linear_attention: ").startswith(text)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"q": None}, TypeError, "q is None, want an array"),
        ({"k": [1.0]}, TypeError, "k is a list, want an array"),
        ({"q": X.astype(int)}, TypeError, "q has dtype int64, want float16"),
        ({"k": X.astype(">f4")}, TypeError, "k has dtype >f4, want native byte order (float32)"),
        ({"v": X.astype(float)}, TypeError, "v has dtype float64, q has float32"),
        ({"k": X[:, :3]}, ValueError, "k has dim 3, q has 4"),
        ({"k": X[:3]}, ValueError, "v has length 5, k has 3"),
        ({"eps": -1.0}, ValueError, "eps is -1.0 (float), want a finite number >= 0"),
        ({"out": X[:3].copy()}, ValueError, "out has shape (3, 4), want (5, 4)"),
        ({"k": X.copy(), "v": X.copy(), "out": X}, ValueError, "out overlaps q in memory"),
        ({"q": X.copy(), "v": X.copy(), "out": X}, ValueError, "out overlaps k in memory"),
    ],
)
def test_arguments_are_checked_before_a_callable_runs(arguments, error, text):
    ran = []
    with pytest.raises(error) as caught:
        linear_attention(**({"q": X, "k": X, "v": X} | arguments), feature_map=ran.append)
    assert str(caught.value).startswith(f"linear_attention: {text}")
    assert not ran


@pytest.mark.parametrize("layout", LAYOUTS)
def test_out_is_laid_out_as_q_whatever_a_callable_returns(xp, layout):
    q, k, v = (lay(xp, x, layout) for x in draw(*[(2, 3, 70, 8)] * 3))
    want = linear_attention(q, k, v, feature_map="exp")
    got = linear_attention(q, k, v, feature_map=lambda x: np.exp(x).copy(order="C"))
    assert got.strides == want.strides
    np.testing.assert_allclose(to_numpy(got), to_numpy(want), rtol=1e-5)


def test_features_may_be_views_of_one_array(xp):
    x, v = map(xp.asarray, draw((71, 8), (70, 4), dtype=DOUBLE))
    both = np.abs(x)
    for q, k in ((both[1:], both[:-1]), (both[1:], both[1:])):
        want = linear_attention(q, k, v, feature_map="identity")
        got = linear_attention(q, k, v, feature_map=lambda x: x)
        np.testing.assert_array_equal(to_numpy(got), to_numpy(want))
    buffer = xp.empty_like(k)
    got = linear_attention(k, k, v, feature_map=lambda x: np.exp(x, out=buffer))
    np.testing.assert_allclose(got, linear_attention(k, k, v, feature_map="exp"), rtol=1e-10)
    with pytest.raises(ValueError, match=r"feature_map\(k\) overlaps feature_map\(q\) in memory"):
        linear_attention(both[1:], both[:-1], v, feature_map=lambda x: np.exp(x, out=buffer))


def test_other_libraries_arrays():
    strict = pytest.importorskip("array_api_strict")
    q, k, v = map(strict.asarray, draw(*[(2, 70, 8)] * 3))
    for result in (linear_attention(q, k, v), prefix_state(k, v, [3, 2]), prefix_state(k, v, q=q)):
        assert type(result) is type(q)


# Memory


def peak_of(call):
    call()  # what is imported and kept is none of it
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_no_array_of_all_scores_or_states():
    q, k, v = draw(*[(1 << 15, 32)] * 3)
    out = np.empty_like(v)
    assert peak_of(lambda: causal_product(q, k, v, out=out)) < 4e6
    assert peak_of(lambda: linear_attention(q, k, v, out=out)) < 4e6
    assert peak_of(lambda: prefix_state(k, v, range(1 << 15), q=q)) < 4e6 + out.nbytes


@pytest.mark.parametrize("shared", ["q", "kv"])
def test_what_is_broadcast_is_never_materialised(shared):
    q, k, v = draw(*[(1000, 32)] * 3)
    many = np.broadcast_to(q if shared == "q" else k, (64, 1000, 32))
    k, q = (many, q) if shared == "kv" else (k, many)
    out = np.empty((64, 1000, 32), np.float32)
    assert peak_of(lambda: causal_product(q, k, v, out=out)) < 0.8 * out.nbytes


def test_many_short_sequences_need_no_state_each():
    q, k, v = draw(*[(20000, 4, 32)] * 3)
    out = np.empty_like(v)
    assert peak_of(lambda: causal_product(q, k, v, out=out)) < 0.5 * 20000 * 32 * 32 * 4
