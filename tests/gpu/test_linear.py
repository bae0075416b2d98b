"""What is built on causal products, of CuPy arrays: the rules of `tests/api`."""

import numpy as np
import pytest

from fa_cupy import causal_product, linear_attention, prefix_state, reference
from tests.support.products import FEATURES, draw, plain_attention, plain_states, state_dtype
from tests.support.strategies import DTYPES, LAYOUTS, UNIT, by_dtype, lay, to_numpy

HALF, BFLOAT16, SINGLE, DOUBLE = DTYPES


# States


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("length", "ends"),
    [
        (0, [0, 0]),
        (1, [1, 0, 1]),
        (200, []),
        (200, [200]),
        (200, [13, 150, 13, 0, 200, 77]),
        (300, range(50, 301, 50)),
        (900, [*range(0, 901, 300), 450, 899]),
    ],
)
@pytest.mark.parametrize("batch", [((), ()), ((2, 1), (3,)), ((2, 3), (2, 3))])
@pytest.mark.parametrize(**by_dtype())
def test_states_and_what_reads_them(cupy, dtype, batch, length, ends, reverse):
    k, v = draw((*batch[0], length, 5), (*batch[1], length, 4), dtype=dtype)
    initial = draw((5, 4), dtype=state_dtype(dtype), seed=1)[0] if reverse else None
    keys, values = map(cupy.asarray, (k, v))
    options = {"reverse": reverse}
    if reverse:
        options["initial_state"] = cupy.asarray(initial)
    states = prefix_state(keys, values, ends, **options)
    wide = np.broadcast_shapes(*batch)
    assert states.shape == (*wide, len(ends), 5, 4)
    assert states.dtype == state_dtype(dtype)
    want = plain_states(k, v, ends, initial, reverse)
    largest = None if initial is None else np.abs(initial)
    sizes = plain_states(np.abs(k), np.abs(v), ends, largest, reverse)
    unit = 16 * UNIT[state_dtype(dtype)]
    for i, (state, size) in enumerate(zip(want, sizes, strict=True)):
        error = np.abs(to_numpy(states)[..., i, :, :] - state)
        assert (error <= unit * size).all()

    q = draw((*wide, len(ends), 5), dtype=dtype, seed=2)[0]
    out = prefix_state(keys, values, ends, q=cupy.asarray(q), **options)
    assert out.shape == (*wide, len(ends), 4)
    assert out.dtype == dtype
    q, out = q.astype(float), to_numpy(out).astype(float)
    of_terms = 2.5 * UNIT[dtype] if dtype.itemsize == 2 else unit
    for i, (state, size) in enumerate(zip(want, sizes, strict=True)):
        read, terms = (
            (x[..., i : i + 1, :] @ y)[..., 0, :] for x, y in ((q, state), (np.abs(q), size))
        )
        error = np.abs(out[..., i, :] - read)
        assert (error <= 2 * UNIT[dtype] * np.abs(read) + of_terms * terms + 2.0**-24).all()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("batch", [(), (100,)])
@pytest.mark.parametrize(**by_dtype())
def test_all_of_a_sequence_is_the_default(cupy, dtype, batch, reverse):
    k, v, q = draw((*batch, 3001, 16), (*batch, 3001, 20), (*batch, 7, 16), dtype=dtype)
    total = k.swapaxes(-1, -2).astype(float) @ v.astype(float)
    got = prefix_state(*map(cupy.asarray, (k, v)), reverse=reverse)
    assert got.shape == total.shape
    assert reference.relative_error(to_numpy(got), total) <= 40 * UNIT[state_dtype(dtype)]
    got = prefix_state(*map(cupy.asarray, (k, v)), q=cupy.asarray(q), reverse=reverse)
    error = reference.relative_error(to_numpy(got), q.astype(float) @ total)
    assert error <= max(UNIT[dtype], 40 * UNIT[state_dtype(dtype)])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(**by_dtype())
def test_a_causal_product_reads_after_each_row(cupy, dtype, reverse):
    shapes = (2, 8, 90, 4), (2, 2, 90, 4), (2, 4, 90, 6)
    q, k, v = map(cupy.asarray, draw(*shapes, dtype=dtype))
    ends = np.arange(90) + (not reverse)
    got = to_numpy(prefix_state(k, v, ends, q=q, reverse=reverse))
    want = to_numpy(causal_product(q, k, v, reverse=reverse))
    limit = 8 * max(UNIT[dtype], UNIT[state_dtype(dtype)])
    assert reference.relative_error(got.astype(float), want.astype(float)) <= limit


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(**by_dtype(BFLOAT16, DOUBLE))
def test_states_of_any_strides(cupy, dtype, layout):
    arrays = draw((2, 3, 70, 8), (2, 3, 70, 5), (2, 3, 4, 8), dtype=dtype)
    k, v, q = (lay(cupy, x, layout) for x in arrays)
    plain = [*map(cupy.asarray, arrays)]
    ends = [70, 3, 3, 41]
    for mine, theirs in (
        (prefix_state(k, v, ends), prefix_state(*plain[:2], ends)),
        (prefix_state(k, v, ends, q=q), prefix_state(*plain[:2], ends, q=plain[2])),
    ):
        assert to_numpy(mine).tobytes() == to_numpy(theirs).tobytes()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(**by_dtype())
def test_rows_beyond_a_position_do_not_show(cupy, dtype, reverse):
    k, v, q = draw((200, 4), (200, 4), (3, 4), dtype=dtype)
    k[100], v[101, 2] = np.nan, np.inf
    k, v, q = map(cupy.asarray, (k, v, q))
    ends = [50, 101, 150]
    out = to_numpy(prefix_state(k, v, ends, q=q, reverse=reverse)).astype(float)
    states = to_numpy(prefix_state(k, v, ends, reverse=reverse))
    columns = np.arange(4) == 2
    want = np.array([~columns & False, columns | True, columns | True])
    if reverse:
        want = np.array([columns | True, columns, columns & False])
    np.testing.assert_array_equal(~np.isfinite(out), want)
    np.testing.assert_array_equal(~np.isfinite(states).all(axis=-2), want)


# Linear attention


@pytest.mark.parametrize("feature_map", sorted(FEATURES))
@pytest.mark.parametrize(**by_dtype())
def test_linear_attention_is_a_weighted_mean(cupy, dtype, feature_map):
    arrays = draw((2, 8, 300, 16), (2, 2, 300, 16), (2, 2, 300, 5), dtype=dtype)
    if feature_map == "identity":  # weights that are positive of themselves
        arrays = [np.abs(x) for x in arrays]
    got = linear_attention(*map(cupy.asarray, arrays), feature_map=feature_map, eps=1e-3)
    want = plain_attention(*arrays, FEATURES[feature_map], eps=1e-3)
    assert got.dtype == dtype
    assert reference.relative_error(to_numpy(got), want) < max(
        UNIT[dtype], 16 * UNIT[state_dtype(dtype)]
    )


@pytest.mark.parametrize(**by_dtype())
def test_sums_of_weights_exceed_float16(cupy, dtype):
    q, k = draw(*[(2000, 64)] * 2, dtype=dtype)
    q += np.ones((), dtype)
    ones = cupy.asarray(np.ones((2000, 70), dtype))
    got = to_numpy(linear_attention(*map(cupy.asarray, (q, k)), ones, feature_map="exp"))
    np.testing.assert_allclose(got.astype(float), 1, rtol=max(UNIT[dtype], 1e-5))


@pytest.mark.parametrize(**by_dtype())
def test_a_callable_gets_the_arrays_as_they_are_given(cupy, dtype):
    seen = []

    def positive(x):
        seen.append(x)
        return cupy.where(x > 0, x, -x) if dtype != BFLOAT16 else x

    arrays = [np.abs(x) for x in draw((2, 90, 4), (90, 4), (90, 5), dtype=dtype)]
    q, k, v = map(cupy.asarray, arrays)
    got = linear_attention(q, k, v, feature_map=positive)
    assert [x is y for x, y in zip(seen, (q, k), strict=True)] == [True, True]
    want = plain_attention(*arrays, np.abs)
    limit = max(UNIT[dtype], 16 * UNIT[state_dtype(dtype)])
    assert reference.relative_error(to_numpy(got), want) < limit


@pytest.mark.parametrize(**by_dtype(SINGLE, DOUBLE))
def test_eps_bounds_the_quotient(cupy, dtype):
    zero, v = cupy.zeros((5, 3), dtype), cupy.asarray(np.ones((5, 2), dtype))
    assert (to_numpy(linear_attention(zero, zero, v, feature_map="relu")) == 0).all()
    assert np.isnan(to_numpy(linear_attention(zero, zero, v, feature_map="relu", eps=0))).all()
    none = cupy.zeros((5, 0), dtype)
    assert (to_numpy(linear_attention(none, none, v)) == 0).all()
    none = cupy.zeros((0, 3), dtype)
    assert linear_attention(none, none, none).shape == (0, 3)


@pytest.mark.parametrize(**by_dtype())
def test_features_of_what_is_not_finite(cupy, dtype):
    q, k, v = draw((150, 6), (150, 6), (150, 6), dtype=dtype)
    k[70], v[100, 2] = np.nan, np.inf
    k[20], q[30] = -np.inf, -np.inf  # features of 0

    def computed():
        return to_numpy(linear_attention(*map(cupy.asarray, (q, k, v)))).astype(float)

    out = computed()
    assert np.isfinite(out[:70]).all()
    assert np.isnan(out[70:]).all()
    k[70] = 0
    out = computed()
    assert np.isfinite(np.delete(out, 2, axis=1)).all()
    np.testing.assert_array_equal(np.isfinite(out[:, 2]), np.arange(150) < 100)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(**by_dtype())
def test_linear_attention_of_any_strides(cupy, dtype, layout):
    arrays = draw(*[(2, 3, 70, 8)] * 3, dtype=dtype)
    want = to_numpy(linear_attention(*map(cupy.asarray, arrays)))
    laid = [lay(cupy, x, layout) for x in arrays]
    out = lay(cupy, np.full(want.shape, np.nan).astype(dtype), layout)
    assert linear_attention(*laid, out=out) is out
    assert to_numpy(out).tobytes() == want.tobytes()
    want = linear_attention(*laid, feature_map="identity")
    got = linear_attention(*laid, feature_map=lambda x: x.copy(order="C"))
    assert got.strides == want.strides
    assert to_numpy(got).tobytes() == to_numpy(want).tobytes()
    with pytest.raises(ValueError, match="out overlaps q in memory"):
        linear_attention(*laid, feature_map=lambda x: x.copy(), out=laid[0])


@pytest.mark.parametrize(**by_dtype())
def test_repeated_calls_give_the_same_bits(cupy, dtype):
    q, k, v = map(cupy.asarray, draw(*[(2, 700, 40)] * 3, dtype=dtype))
    for call in (
        lambda: linear_attention(q, k, v),
        lambda: prefix_state(k, v, [10, 300, 650]),
        lambda: prefix_state(k, v, [650, 3], q=q[:, :2]),
    ):
        first, second = (to_numpy(call()).tobytes() for _ in range(2))
        assert first == second
