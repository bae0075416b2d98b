"""What only the CPU path does: many small tiles, long sequences, memory."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from fa_cupy import attention, reference
from fa_cupy.cpu import one_tile
from fa_cupy.cpu.tile_ops import Steps
from fa_cupy.tiled import attention as tiled_attention
from fa_cupy.tiled import tile_sizes
from tests.support.blas import two_threads
from tests.support.strategies import (
    DTYPES,
    EXTREMES,
    Case,
    by_dtype,
    cases,
    check_against_reference,
    normal,
)

SINGLE, DOUBLE = DTYPES[2:]
# A fixture that stays the same for all examples is what these tests mean.
with_fixture = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
with_threads = pytest.fixture(autouse=True, scope="module")(two_threads)


def qkv(*shape, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [normal(rng, shape, dtype) for _ in range(3)]


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 16 by 16, so that short problems have many of them."""
    monkeypatch.setattr(tile_sizes, "tile_sizes", lambda *_, **__: tile_sizes.Tile(16, 16))
    monkeypatch.setattr(tiled_attention, "_LEAST_HALF", 4)
    monkeypatch.setattr(one_tile, "suits", lambda *_: False)


# Many tiles


@given(case=cases())
@with_fixture
def test_many_tiles_agree_with_the_reference(small_tiles, case):
    out, lse = attention(*case.native(np), return_lse=True, **case.options)
    check_against_reference(case, out, lse)


@pytest.mark.parametrize("offset", [0.0, 100.0, -100.0])
@pytest.mark.parametrize("rise", ["up", "down", "last", "random"])
@pytest.mark.parametrize(**by_dtype(SINGLE, DOUBLE))
def test_scores_that_grow_from_tile_to_tile(small_tiles, dtype, rise, offset):
    q, k, v = qkv(2, 80, 8, dtype=dtype)
    steps = {
        "up": np.linspace(-60, 60, 80),
        "down": np.linspace(60, -60, 80),
        "last": np.where(np.arange(80) == 79, 40, 0),
        "random": np.random.default_rng(1).normal(0, 40, 80),
    }
    bias = (steps[rise] + offset).astype(dtype)
    for options in ({}, {"is_causal": True}, {"window": (20, 5)}):
        out, lse = attention(q, k, v, bias, return_lse=True, **options)
        check_against_reference(Case(q, k, v, bias, options=options), out, lse)


def test_first_keys_masked_for_some_queries(small_tiles):
    q, k, v = qkv(64, 8)
    mask = np.ones((64, 64), bool)
    mask[5:20, :40] = False
    mask[30] = False
    out, lse = attention(q, k, v, None, mask, return_lse=True)
    check_against_reference(Case(q, k, v, None, mask), out, lse)
    assert not out[30].any()
    assert lse[30] == -np.inf


def test_tiles_that_no_query_sees_are_not_computed(monkeypatch, small_tiles):
    q, k, v = qkv(128, 8)
    mask = np.zeros((128, 128), bool)
    mask[:, 32:48] = True
    seen = []
    product = Steps.scores

    def scores(self, queries, first, k, out):
        seen.append(out.shape[-1])
        product(self, queries, first, k, out)

    monkeypatch.setattr(Steps, "scores", scores)
    attention(q, k, v, window=(16, 0))
    assert sum(seen) == 16 + 7 * 32  # keys in reach of each 16 queries
    seen.clear()
    attention(q, k, v, None, mask)
    assert seen == [16] * 8


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(**by_dtype())
def test_hidden_values_never_leak(small_tiles, dtype, bad):
    q, k, v = qkv(3, 64, 8, dtype=dtype)
    v[1, 40, 3] = bad
    k[2, 50] = bad
    out, lse = attention(q, k, v, is_causal=True, return_lse=True)
    check_against_reference(Case(q, k, v, options={"is_causal": True}), out, lse)
    assert np.isfinite(out[1, :40].astype(np.float32)).all()
    assert np.isfinite(out[2, :50].astype(np.float32)).all()


def test_finite_data_are_computed_once(monkeypatch):
    def never(*_):
        raise AssertionError("computed again")

    monkeypatch.setattr(tiled_attention, "attend_exactly", never)
    q, k, v = qkv(2, 300, 16)
    mask = np.random.default_rng(0).random((300, 300)) < 0.5
    attention(q, k, v, None, mask, is_causal=True)
    attention(q, k, v, np.full((300, 1), -np.inf, np.float32))


def test_values_near_the_largest_float():
    q, k, v = qkv(64, 8)
    v *= 1e38 / np.abs(v).max()
    want, _ = reference.attention(q, k, v)
    assert reference.relative_error(attention(q, k, v), want) < 1e-6


@pytest.mark.parametrize("options", EXTREMES, ids=str)
@pytest.mark.parametrize(**by_dtype())
def test_options_at_the_ends_of_the_arithmetic(small_tiles, dtype, options):
    q, k, v = qkv(2, 40, 8, dtype=dtype)
    out, lse = attention(q, k, v, return_lse=True, **options)
    check_against_reference(Case(q, k, v, options=options), out, lse)
    assert np.isfinite(out.astype(np.float64)).all()


@pytest.mark.parametrize(**by_dtype())
def test_a_softcap_bounds_infinite_products_of_any_scale(dtype):
    q, k, v = qkv(30, 8, dtype=dtype)
    q[3, 2] = np.inf
    options = {"scale": 5e-324, "softcap": 30.0}
    out, lse = attention(q, k, v, return_lse=True, **options)
    check_against_reference(Case(q, k, v, options=options), out, lse)
    assert np.isfinite(lse).all()


def test_finite_data_under_a_tiny_softcap_whose_terms_overflow():
    q = np.array([[1e9, -1e9, 1.0]], np.float32)
    k = np.array([[1e9, 1e9, 2.0], [1e9, 1e9, 1.0]], np.float32)
    v = np.array([[1.0], [3.0]], np.float32)
    assert attention(q, k, v, scale=1.0, softcap=1e-25)[0, 0] == 2


def test_a_scale_beyond_float32_is_the_largest_float32():
    q, k, v = qkv(5, 1)
    q[...] = k[...] = 0
    q[:, 0], k[3, 0] = 0.5, 0.5
    want = np.broadcast_to(v[3], v.shape)
    np.testing.assert_array_equal(attention(q, k, v, scale=1e300), want)
    np.testing.assert_array_equal(attention(q, -k, v, scale=-1e300), want)


def test_scores_beyond_a_softcap_that_is_cut_keep_their_order():
    q, k, v = qkv(20, 8)
    for options in ({"scale": 1e300, "softcap": 1e300}, {"scale": 1e38, "softcap": 1e39}):
        want, _ = reference.attention(q, k, v, **options)
        assert reference.relative_error(attention(q, k, v, **options), want) < 1e-6


def test_no_row_is_no_work():
    q = np.broadcast_to(np.zeros((1, 0, 8), np.float32), (2**40, 0, 8))
    out, lse = attention(q, q, q, return_lse=True)
    assert out.shape == q.shape
    assert lse.shape == q.shape[:-1]


# Accuracy at length


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "bound"), [(SINGLE, 2e-6), (DOUBLE, 1e-13)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_error_at_length_4096(dtype, bound, is_causal):
    q, k, v = qkv(4096, 64, dtype=dtype)
    want, want_lse = reference.attention(q, k, v, is_causal=is_causal)
    out, lse = attention(q, k, v, is_causal=is_causal, return_lse=True)
    assert reference.relative_error(out, want) < bound
    assert reference.relative_error(lse, want_lse) < bound


def test_floating_point_errors_are_nobodys_business():
    q, k, v = qkv(2, 40, 8)
    k[:, 20:] = np.inf
    with np.errstate(all="raise"):
        out = attention(q, k, v, np.full((40, 1), -np.inf, np.float32), is_causal=True)
    assert out.shape == v.shape


# Memory


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_memory_at_length_65536(dtype):
    # A narrow window keeps it short: every tile there is has the full width all the same.
    q, k, v = qkv(65536, 64, dtype=dtype)
    out = np.empty_like(q)
    tracemalloc.start()
    attention(q, k, v, window=(1500, 0), out=out)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100e6


def test_large_arrays_are_not_packed():
    q, k, v = qkv(32, 32, 32, 16, 16)
    q, k = (x.transpose(2, 1, 0, 3, 4) for x in (q, k))
    tracemalloc.start()
    try:
        out = attention(q, k, v)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < out.nbytes + 16e6


# Sizes


@pytest.mark.parametrize(**by_dtype())
@pytest.mark.parametrize("turned", ["q", "k", "v", "bias", "mask", "sinks", "out", "kv", "all"])
def test_batch_axes_in_any_order_are_packed(monkeypatch, dtype, turned):
    """Arrays of many small matrices, whose batch axes lie in another order than that of others."""
    rng, axes = np.random.default_rng(1), (2,) * 7
    parts, attend = [], tiled_attention.attend

    def counted(steps, problem, x, *more):
        parts.append(x.q.shape[0])
        return attend(steps, problem, x, *more)

    def lie(name, x):
        if turned in (name, "all") or (turned == "kv" and name in turned):
            order = [*reversed(range(7)), *range(7, x.ndim)]
            return np.ascontiguousarray(x.transpose(order)).transpose(order)
        return x

    monkeypatch.setattr(tiled_attention, "attend", counted)
    q, k, v = (lie(x, normal(rng, (*axes, 4 if x == "q" else 5, 3), dtype)) for x in "qkv")
    bias = lie("bias", normal(rng, (*axes, 4, 5), np.float32))
    mask = lie("mask", rng.random((*axes, 4, 5)) < 0.7)
    options = {"sinks": lie("sinks", normal(rng, (*axes, 4), dtype))}
    out = lie("out", np.full((*axes, 4, 3), np.nan).astype(dtype))
    for result in (None, out):
        found, lse = attention(q, k, v, bias, mask, return_lse=True, out=result, **options)
        check_against_reference(Case(q, k, v, bias, mask, options), found, lse)
        assert found.strides == (q if result is None else out).strides
    assert len(parts) <= 4


@pytest.mark.parametrize(
    ("lengths", "dims"),
    [((150, 700), (600, 600)), ((20, 40), (40, 2000)), ((20, 40), (2000, 40)),
     ((3, 5), (270_000, 3)), ((3, 5), (3, 300_000))],
)  # fmt: skip
@pytest.mark.parametrize(**by_dtype())
def test_wide_rows(dtype, lengths, dims):
    rng, (q_len, k_len) = np.random.default_rng(1), lengths
    shapes = (q_len, dims[0]), (k_len, dims[0]), (k_len, dims[1])
    q, k, v = (normal(rng, shape, dtype) for shape in shapes)
    for options in ({}, {"is_causal": True, "causal_align": "bottom_right"}):
        out, lse = attention(q, k, v, return_lse=True, **options)
        check_against_reference(Case(q, k, v, options=options), out, lse)


# Conversion


@pytest.mark.parametrize("layout", ["dense", "rows", "columns", "reversed", "unaligned"])
def test_float16_is_widened_to_the_last_bit(layout):
    """All of its numbers: subnormal ones, infinities and the payload of NaN among them."""
    x = np.arange(65536, dtype=np.uint16).view(np.float16).reshape(256, 256)
    if layout == "rows":
        x = x[::2]
    elif layout == "columns":
        x = x.T
    elif layout == "reversed":
        x = x[::-1, ::-1]
    elif layout == "unaligned":
        x = np.frombuffer(b"\0" + x.tobytes(), np.float16, offset=1).reshape(256, 256)
    finite = np.where(np.isfinite(x), x, 0)
    for numbers in (x, finite, finite[:0]):
        steps = Steps(np.dtype(np.float32))
        out = steps.scratch("poisoned", numbers.shape)
        out.fill(np.nan)
        steps.load(out, numbers)
        want = numbers.astype(np.float32)
        np.testing.assert_array_equal(out.view(np.uint32), want.view(np.uint32))
