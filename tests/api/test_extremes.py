"""Finite data at the ends of the range, and log-sum-exps that one number cannot hold."""

import numpy as np
import pytest

from fa_cupy import (
    BitMask,
    Score,
    attention,
    attention_backward,
    merge_attention,
    reference,
)
from fa_cupy.tiled import attention as tiled_attention
from fa_cupy.tiled import attention_backward as tiled_attention_backward
from fa_cupy.tiled import tile_sizes
from tests.support.full_precision_gradients import long_and_short_keys
from tests.support.strategies import BFLOAT16, DTYPES, by_dtype, normal, to_numpy

HALF, _, SINGLE, DOUBLE = DTYPES
# Of an output and of a gradient, relative to the largest of it.
CLOSE = {HALF: 2e-3, BFLOAT16: 2e-2, SINGLE: 2e-5, DOUBLE: 1e-13}


def near(found, want, dtype, flushed=0.0):
    """Hold an array against another; what is below `flushed` may be 0."""
    found, want = (to_numpy(x).astype(np.longdouble) for x in (found, want))
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(want))
    finite = np.isfinite(want)
    error = np.abs(found[finite] - want[finite]).max(initial=0)
    least = 0 if dtype == DOUBLE else 2.0**-126
    assert error <= CLOSE[dtype] * np.abs(want[finite]).max(initial=least) + flushed, error


def solve(xp, dout, *arrays, mask=None, dlse=None, **options):
    """Output, LSE and gradients of q, k, v and, if given, the bias; as NumPy arrays."""
    given = [xp.asarray(x) for x in arrays]
    bias = given[3] if len(given) > 3 else None
    where = mask if mask is None or isinstance(mask, BitMask) else xp.asarray(mask)
    out, lse = attention(*given[:3], bias, where, return_lse=True, **options)
    dlse = None if dlse is None else xp.asarray(dlse)
    dout = xp.asarray(dout)
    grads = attention_backward(dout, *given[:3], out, lse, bias, where, dlse=dlse, **options)
    return [to_numpy(x) for x in (out, lse, *grads)]


def check(xp, dout, *arrays, mask=None, dlse=None, **options):
    """Hold output and gradients against float64."""
    dtype = arrays[0].dtype
    found = solve(xp, dout, *arrays, mask=mask, dlse=dlse, **options)
    more = [*arrays[3:], *[None] * (4 - len(arrays)), mask]
    want = reference.attention(*arrays[:3], *more, **options)
    grads = reference.attention_backward(dout, *arrays[:3], *more, dlse=dlse, **options)
    for x, of in zip(found, (*want, *grads), strict=True):
        near(x, of, dtype)
    return found


@pytest.fixture(params=["whole", "small"])
def tile_size(request, monkeypatch):
    """Tiles as they are, and of 16 by 32 on the CPU, so that short problems have many of them."""
    if request.param == "small":
        monkeypatch.setattr(tile_sizes, "tile_sizes", lambda *_, **__: tile_sizes.Tile(16, 32))
        monkeypatch.setattr(tiled_attention, "_LEAST_HALF", 4)


# Values and scores at the ends of the range


@pytest.mark.parametrize(("dtype", "size"), [(SINGLE, 1e-37), (DOUBLE, 1e-307)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_small_values_under_scores_below_0(xp, tile_size, dtype, size, is_causal):
    rng = np.random.default_rng(0)
    q, k, v = (normal(rng, (2, 90, 8), dtype) for _ in range(3))
    bias = np.full((90, 90), -12, dtype)
    bias[40:60] = 0
    v *= dtype.type(size)
    out = attention(*map(xp.asarray, (q, k, v, bias)), is_causal=is_causal)
    # CuPy compiles its elementwise kernels with -ftz=true: subnormal float32 results are 0.
    flushed = 2.0**-126 if xp is not np and dtype == SINGLE else 0.0
    near(out, reference.attention(q, k, v, bias, is_causal=is_causal)[0], dtype, 1.1 * flushed)


@pytest.mark.parametrize(
    ("q", "k", "options"),
    [
        (3e38, 0.0, {"scale": 2.0}),
        (3e38, 1e-38, {"scale": -2.0}),
        (1e36, 1e-36, {"softcap": 1e-3}),
        (1e36, 0.0, {"softcap": 1e-3}),
        (1e34, 1e-34, {"scale": 9e3}),
    ],
)
def test_a_scale_does_not_overflow_queries(xp, q, k, options):
    q = np.array([[q, 1.0], [-q, 0.5]], np.float32)
    k = np.array([[k, 0.25], [k / 2, -0.5], [0, 0]], np.float32)
    v = np.array([[1.0], [2.0], [4.0]], np.float32)
    found = solve(xp, np.ones((2, 1), np.float32), q, k, v, **options)
    for x, want in zip(found, reference.attention(q, k, v, **options), strict=False):
        near(x, want, SINGLE)
    assert all(np.isfinite(x).all() for x in found)


def test_a_scale_does_not_overflow_terms_that_cancel(xp):
    q, k = np.array([[1e34, 1e34]], np.float32), np.array([[300, -300], [0, 0]], np.float32)
    v = np.array([[1.0], [3.0]], np.float32)
    out = attention(*map(xp.asarray, (q, k, v)), scale=1e3)
    assert to_numpy(out).tolist() == [[2.0]]


@pytest.mark.parametrize(
    ("dtype", "small", "large"),
    [(SINGLE, 1.5e-38, 3e38), (BFLOAT16, 1.5e-38, 3e38), (DOUBLE, 3e-308, 1e308)],
    ids=str,
)
def test_a_scale_takes_no_digits_from_small_queries(dtype, small, large):
    q, k = np.full((1, 64), small, dtype), np.full((1, 64), large, dtype)
    v = np.ones((1, 1), dtype)
    _, lse = attention(q, k, v, scale=1.0, softcap=1e6, return_lse=True)  # multiplied by 1e-6
    wide = np.longdouble
    want = wide(1e6) * np.tanh(64 * q[0, 0].astype(wide) * k[0, 0].astype(wide) / wide(1e6))
    assert abs(lse[0] - want) <= (1e-13 if dtype == DOUBLE else 1e-6) * want


def test_small_queries_do_not_spoil_large_ones():
    """Products of the first query overflow unless it is scaled before; the second has digits."""
    q = np.array([[1e20, 0.0], [0.0, 1.5e-38]], np.float32)
    k = np.array([[1e20, 3e38], [0.5e20, 0.0]], np.float32)
    v = np.array([[1.0], [3.0]], np.float32)
    out, lse = attention(q, k, v, scale=1e-3, return_lse=True)
    want, want_lse = reference.attention(q, k, v, scale=1e-3)
    near(out, want, SINGLE)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6)


@pytest.mark.parametrize(("scale", "k", "dout"), [(1e-20, 1e-10, 1e22), (1e30, 1e-35, 1e-10)])
def test_gradients_are_scaled_where_they_are_in_range(xp, scale, k, dout):
    """What is summed before it is scaled overflows first, then underflows."""
    q = np.array([[1e18], [2e18]], np.float32) if scale < 1 else np.full((2, 1), 1e-30, np.float32)
    k = np.array([[k], [2 * k], [-k]], np.float32)
    v = np.array([[1.0], [2.0], [4.0]], np.float32)
    check(xp, np.full((2, 1), dout, np.float32), q, k, v, scale=scale)


def test_a_large_softcap_keeps_the_order_of_scores(xp):
    q, k = np.array([[2.7e34], [-2.7e34]], np.float32), np.array([[0.65], [0.85]], np.float32)
    v = np.array([[1.0], [2.0]], np.float32)
    out = attention(*map(xp.asarray, (q, k, v)), softcap=3e36)
    assert to_numpy(out).tolist() == [[2.0], [1.0]]


def test_a_scale_that_vanishes_beside_its_softcap(xp):
    q, k = np.array([[3e209]]), np.array([[0.6], [-0.4]])
    v = np.array([[1.0], [3.0]])
    check(xp, np.ones((1, 1)), q, k, v, scale=5.7e-246, softcap=2.7e175)


def test_large_values_next_to_a_hidden_nan_under_far_scores(xp):
    """Weights that are not normalised yet would overflow the sum."""
    q, k = np.zeros((1, 4), np.float32), np.zeros((65, 4), np.float32)
    bias = np.full((1, 65), -1e9, np.float32)
    v = np.full((65, 2), 1.5e38, np.float32)
    v[64] = np.nan
    mask = np.arange(65) < 64
    out = attention(*map(xp.asarray, (q, k, v, bias, mask)))
    np.testing.assert_allclose(to_numpy(out), v[:1], rtol=1e-6)


# Far rows


def far_case(dtype, size, n=2, q_len=70, k_len=100, dim=8, seed=0):
    """Every third query has scores of `size`, equal or a few apart; exact in the dtype."""
    rng = np.random.default_rng(seed)
    q, k, v, dout = (
        normal(rng, shape, dtype)
        for shape in ((n, q_len, dim), (n, k_len, dim), (n, k_len, dim), (n, q_len, dim))
    )
    bias = np.zeros((q_len, k_len), np.float64 if dtype == DOUBLE else np.float32)
    q[:, ::3] = 0
    bias[::3] = size
    if abs(size) < 2**20:
        bias[::3] += rng.integers(-3, 4, (len(bias[::3]), k_len))
    return dout, q, k, v, bias


FARS = [(SINGLE, s) for s in (-1e9, 2.0**17, -1e30, 2000.0)]
FARS += [(DOUBLE, s) for s in (-1e18, 1e300)]


@pytest.mark.parametrize(("dtype", "size"), FARS, ids=str)
@pytest.mark.parametrize("how", ["full", "causal", "window", "mask", "bits", "softcap", "dlse"])
def test_weights_of_far_rows_sum_to_1(xp, tile_size, dtype, size, how):
    dout, *arrays = far_case(dtype, size)
    options = {}
    seen = np.random.default_rng(1).random((70, 100)) < 0.7
    if how in ("causal", "window"):
        options = {"is_causal": True, "causal_align": "bottom_right"}
        if how == "window":
            options["window"] = (25, None)
    elif how in ("mask", "bits"):
        seen[5:8] = False
        options["mask"] = seen if how == "mask" else BitMask.from_dense(seen)
    elif how == "softcap":
        options["softcap"] = 2.0
    elif how == "dlse":
        options["dlse"] = normal(np.random.default_rng(2), (2, 70), dtype)
    check(xp, dout, *arrays, **options)


@pytest.mark.parametrize(**by_dtype(HALF, BFLOAT16))
def test_far_rows_of_16_bits(tile_size, dtype):
    check(np, *far_case(dtype, -1e9))


@pytest.mark.parametrize(**by_dtype(SINGLE, DOUBLE))
def test_far_rows_of_grouped_heads(xp, dtype):
    dout, q, k, v, bias = far_case(dtype, -1e9, n=8)
    q, dout = (x.reshape(2, 4, *x.shape[1:]) for x in (q, dout))
    k, v = (x.reshape(4, 2, *x.shape[1:])[:2] for x in (k, v))
    check(xp, dout, q, k, v, bias)


def test_far_rows_from_products(xp):
    for size in (1e4, 1e5, 1e6, 1e7, 1e8):
        q, k = np.full((1, 1), size, np.float32), np.ones((2, 1), np.float32)
        v, dout = np.array([[1.0], [3.0]], np.float32), np.ones((1, 1), np.float32)
        _, _, dq, dk, dv = solve(xp, dout, q, k, v, scale=1.0)
        assert dv.tolist() == [[0.5], [0.5]]
        assert dk.tolist() == [[-size / 2], [size / 2]]
        assert dq.tolist() == [[0.0]]


def test_rows_that_are_not_finite_are_as_before(xp, tile_size):
    dout, q, k, v, bias = far_case(SINGLE, -1e9)
    bias[0] = -np.inf
    bias[3, 50] = np.inf
    bias[6, 20] = np.nan
    found = solve(xp, dout, q, k, v, bias)
    want = reference.attention_backward(dout, q, k, v, bias)
    for x, of in zip(found[2:], want, strict=True):
        np.testing.assert_array_equal(np.isfinite(x), np.isfinite(of))
    near(found[5], want[3], SINGLE)


def test_a_nan_that_is_hidden_beside_far_rows(xp, tile_size):
    dout, q, k, v, bias = far_case(SINGLE, -1e9)
    v[:, 90:] = np.nan
    k[1, 95] = np.inf
    check(xp, dout, q, k, v, bias, mask=np.arange(100) < 90)


def weights_of_one_key(scale, dtype, bad, parts, **options):
    """What keys get of a `dv` of ones where query i sees key i and, in `parts`, one more key."""
    rng = np.random.default_rng(0)
    n, dim = 200, 64
    q, k = (normal(rng, (n, dim), dtype) for _ in range(2))
    v, dout = np.ones((n, 1), dtype), np.ones((n, 1), dtype)
    near_by = np.eye(n, dtype=bool)
    masks = [BitMask(np.roll(near_by, shift, axis=1)) for shift in range(parts)]
    found = [attention(q, k, v, mask=m, scale=scale, return_lse=True, **options) for m in masks]
    out, lse = merge_attention(*zip(*found, strict=True))
    if bad:
        dout[7] = bad  # of a row whose output is finite
    given = {"scale": scale, "need": ["v"], **options}
    grads = [attention_backward(dout, q, k, v, out, lse, mask=m, **given)[0] for m in masks]
    return np.concatenate([np.delete(dv, [7, 8]) for dv in grads])


@pytest.mark.parametrize(**by_dtype(SINGLE, DOUBLE))
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("scale", [1.0, 1e3, 1e5, 1e7])
def test_a_row_that_is_not_finite_beside_far_rows_of_few_pairs(dtype, parts, scale):
    """Pairs are computed again by tiles, which round their scores otherwise."""
    want = weights_of_one_key(scale, dtype, 0.0, parts)
    if parts == 1:
        assert want.tolist() == [1.0] * len(want)
    for bad in (np.nan, np.inf):
        found = weights_of_one_key(scale, dtype, bad, parts)
        np.testing.assert_allclose(found, want, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.parametrize("expression", ["(4*s)**8", "exp(4*s)", "s**5"])
def test_a_row_that_is_not_finite_beside_steep_scores_of_few_pairs(expression):
    steep = Score(f"{expression} if i != 7 else log(-1.0 - s * s)")
    found = weights_of_one_key(0.125, SINGLE, 0.0, 1, score=steep)
    assert found.tolist() == [1.0] * len(found)


@pytest.mark.parametrize("scale", [2e3, 1e4, 1e5, 1e7])
@pytest.mark.parametrize("as_mask", [lambda mask: mask, BitMask])
@pytest.mark.parametrize(("n", "dim"), [(200, 64), (1000, 64), (1000, 300)])
def test_the_weight_of_a_single_key_is_one(xp, n, dim, as_mask, scale):
    """Whoever has made the log-sum-exp adds up a product that cancels otherwise than tiles do."""
    rng = np.random.default_rng(0)
    q, k = (normal(rng, (n, dim), SINGLE) for _ in range(2))
    ones, mask = np.ones((n, 1), SINGLE), np.eye(n, dtype=bool)
    exact = reference.attention(q, k, ones, mask=mask, scale=scale)[1].astype(SINGLE)
    # Kernels, which take scales below 1e4, leave rows of a small one as they are.
    certain = np.abs(exact) >= (0 if xp is np else 64)
    q, k, ones, mask, exact = map(xp.asarray, (q, k, ones, mask, exact))
    mask = as_mask(mask)
    out, lse = attention(q, k, ones, mask=mask, scale=scale, return_lse=True)
    for x in (lse, exact):
        (dv,) = attention_backward(ones, q, k, ones, out, x, mask=mask, scale=scale, need=["v"])
        weights = to_numpy(dv)[certain, 0]
        assert weights.tolist() == [1.0] * len(weights)


@pytest.mark.parametrize("scale", [1e5, 1e7])
def test_two_keys_of_merged_results_share_a_weight_of_one(xp, scale):
    """Their log-sum-exp is one of more keys than each part has."""
    rng, n = np.random.default_rng(0), 500
    q, k = (xp.asarray(normal(rng, (n, 64), SINGLE)) for _ in range(2))
    ones, own = xp.ones((n, 1), SINGLE), np.eye(n, dtype=bool)
    calls = [{"mask": xp.asarray(np.roll(own, i, 1)), "scale": scale} for i in range(2)]
    found = [attention(q, k, ones, return_lse=True, **call) for call in calls]
    results = merge_attention(*zip(*found, strict=True))
    parts = [
        attention_backward(ones, q, k, ones, *results, need=["v"], **call)[0] for call in calls
    ]
    first, second = (np.roll(to_numpy(dv)[:, 0], -i) for i, dv in enumerate(parts))
    assert (first + second).tolist() == [1.0] * n
    assert 0.4 < first.mean() < 0.6


@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE])
@pytest.mark.parametrize("size", [0.0, 1e3, 1e6, 1e12])
@pytest.mark.parametrize("how", ["mask", "causal"])
def test_a_large_key_that_is_hidden_beside_merged_results(xp, tile_size, how, size, dtype):
    """What a query does not see says nothing of how its scores are rounded."""
    n = 40
    q, k = xp.full((n, 8), 20, dtype), xp.full((n, 8), 10, dtype)
    k[-1] = size
    options = {"mask": xp.arange(n) < n - 1} if how == "mask" else {"is_causal": True}
    ones = xp.ones((n, 1), dtype)
    dout = ones * (xp.arange(n) < n - 1)[:, None]  # not of the one that sees it, if causal
    _, lse = attention(q, k, ones, scale=1.0, return_lse=True, **options)
    more = lse + lse.dtype.type(np.log(2))  # as many keys elsewhere have the same weights
    (dv,) = attention_backward(
        dout.astype(dtype), q, k, ones, ones / 2, more, scale=1.0, need=["v"], **options
    )  # fmt: skip
    np.testing.assert_allclose(to_numpy(dv).sum(), (n - 1) / 2, rtol=1e-3)


@pytest.mark.parametrize(
    ("dtype", "q", "k", "bias", "scale"),
    [
        (DOUBLE, [1e-204] * 2, [[1e200] * 2] * 4, 0, 2048.0),
        (DOUBLE, [1e160] * 2, [[1e-164] * 2] * 4, 0, 2048.0),
        (DOUBLE, [1e170] * 2, [[1e-100] * 2] * 4, 0, 1e-67),
        (SINGLE, [1e20] * 2, [[1e20] * 2] * 4, 0, 1e-37),
        # Keys that are long, and have no weight.
        (SINGLE, [0, 8], [[0, 1], [1e6, 0], [0, 1], [0, 1]], [5000, 0, 5000, 5000], 1.0),
        (SINGLE, [0, 2**-7], [[0, 1], [1e9, 0], [0, 1], [1e9, 1]], [0, -1e9, 0, -1e9], 1024.0),
    ],
)
def test_shares_of_merged_halves(dtype, q, k, bias, scale):
    q, k, v = np.array([q], dtype), np.array(k, dtype), np.eye(4, dtype=dtype)
    dout, bias = np.ones((1, 4), dtype), np.broadcast_to(np.array(bias, dtype), (1, 4))
    options = {"return_lse": True, "scale": scale}
    halves = slice(2), slice(2, 4)
    found = [attention(q, k[x], v[x], bias[:, x], **options) for x in halves]
    out, lse = merge_attention(*zip(*found, strict=True))
    del options["return_lse"]
    shares = [
        attention_backward(
            dout, q, k[x], v[x], out, lse, bias[:, x], need=["v"], **options
        )[0][:, 0]
        for x in halves
    ]  # fmt: skip
    np.testing.assert_allclose(np.concatenate(shares), out[0], rtol=1e-3, atol=1e-30)


def test_weights_of_long_keys_whose_products_cancel(xp, tile_size):
    """A log-sum-exp of exact scores is not taken for one of more keys."""
    for q, k in long_and_short_keys():
        v = np.ones((len(k), 1), SINGLE)
        out, lse = (x.astype(SINGLE) for x in reference.attention(q, k, v, scale=1.0))
        given = map(xp.asarray, (np.ones((1, 1), SINGLE), q, k, v, out, lse))
        (dv,) = attention_backward(*given, scale=1.0, need=["v"])
        np.testing.assert_allclose(to_numpy(dv).sum(), 1.0, rtol=1e-6)


def test_rounding_counts_for_all_of_many_tiles(tile_size):
    """A log-sum-exp that rounding explains is not taken for one of more keys."""
    n = 8192
    q, k = np.array([[1000, 1000]], SINGLE), np.tile(np.array([4000, -3000], SINGLE), (n, 1))
    ones = np.ones((n, 1), SINGLE)
    rounding = 2.0**-21 * np.linalg.norm(q) * np.linalg.norm(k[0])
    lse = np.array([1e6 + np.log(n) + 0.9 * rounding], SINGLE)
    (dv,) = attention_backward(ones[:1], q, k, ones, ones[:1], lse, scale=1.0, need=["v"])
    np.testing.assert_allclose(dv.sum(), 1.0, rtol=1e-5)


def test_tiles_of_ordinary_rows_take_no_second_pass(monkeypatch):
    monkeypatch.setattr(tile_sizes, "tile_sizes", lambda *_, **__: tile_sizes.Tile(16, 16))
    apart, calls = tiled_attention_backward.keep_apart, []

    def counted(steps, problem, x, rows, *more):
        calls.append(rows)
        apart(steps, problem, x, rows, *more)

    monkeypatch.setattr(tiled_attention_backward, "keep_apart", counted)
    dout, q, k, v, bias = far_case(SINGLE, 0.0)
    ordinary = solve(np, dout, q, k, v, bias)
    assert not calls
    bias[33] = -1e9
    found = solve(np, dout, q, k, v, bias)
    assert set(calls) == {(32, 48)}
    others = (np.arange(70) < 32) | (np.arange(70) >= 48)
    assert found[2][:, others].tobytes() == ordinary[2][:, others].tobytes()


def test_the_number_of_threads_does_not_show_in_far_rows():
    import threadpoolctl

    case = far_case(SINGLE, -1e9, n=5, q_len=300, k_len=700, dim=32)
    results = []
    for threads in (1, 2, 3):
        with threadpoolctl.threadpool_limits(threads, user_api="blas"):
            results.append(b"".join(x.tobytes() for x in solve(np, *case)))
    assert len(set(results)) == 1


@pytest.mark.parametrize("offset", [1100.0, 1e4, -1e5])
@pytest.mark.parametrize(**by_dtype(SINGLE, DOUBLE))
def test_gradients_over_parts_of_the_keys_from_a_merged_log_sum_exp(xp, dtype, offset):
    """A call that has some of the keys gets the log-sum-exp of all: weights are of all."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (xp.asarray(normal(rng, (70, 16), dtype)) for _ in range(4))
    bias = xp.full((70, 1), offset, dtype)
    parts = [slice(0, 25), slice(25, 70)]
    results = [attention(q, k[s], v[s], bias, return_lse=True) for s in parts]
    out, lse = merge_attention(*map(list, zip(*results, strict=True)))
    grads = [attention_backward(dout, q, k[s], v[s], out, lse, bias) for s in parts]
    found = [grads[0][0] + grads[1][0], *(xp.concatenate(x) for x in zip(*grads, strict=True))][:4]
    plain = attention(q, k, v, return_lse=True)
    want = attention_backward(dout, q, k, v, *plain)
    limit = 4 * abs(offset) * np.finfo(dtype).eps  # of an LSE that is rounded
    for x, y in zip((found[0], found[2], found[3]), want, strict=True):
        x, y = (to_numpy(a).astype(np.float64) for a in (x, y))
        assert np.abs(x - y).max() <= (limit + CLOSE[dtype]) * np.abs(y).max()


@pytest.mark.parametrize("far", [np.finfo(np.float64).min, np.finfo(np.float64).max])
@pytest.mark.parametrize("lengths", [(1, 1), (3, 5), (200, 300)])
def test_a_bias_that_float32_cannot_hold_stays_finite(xp, lengths, far):
    """All keys have it, so that all weights are equal; as -inf it would hide them."""
    rng = np.random.default_rng(0)
    shapes = ((lengths[0], 8), (lengths[1], 8), (lengths[1], 8))
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    bias = np.full(lengths, far)
    given = [*map(xp.asarray, (q, k, v, bias))]
    out, lse = attention(*given, return_lse=True)
    found = attention_backward(given[0], *given[:3], out, lse, given[3])
    wanted = reference.attention(q, k, v, bias)[0], *reference.attention_backward(q, q, k, v, bias)
    for x, want in zip((out, *found), wanted, strict=False):
        x = x if xp is np else x.get()
        np.testing.assert_allclose(x, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("far", [np.finfo(np.float64).min, -1e300, 1e300])
@pytest.mark.parametrize("keys", [{"q_offsets": [0, 2, 6]}, {"k_lengths": [4, 3]}], ids=str)
def test_a_shared_bias_that_float32_cannot_hold(xp, keys, far):
    """Its gradient sums what sequences add, or entries: it is read in float32 for that."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((2, 2, 6, 8)).astype(np.float32) for _ in range(4)]
    bias = rng.standard_normal((1, 6))
    bias[:, 1::3] = far
    keys = {name: np.array(x, np.int32) for name, x in keys.items()}
    q, k, v, dout, on_xp = map(xp.asarray, (*arrays, bias))
    given = {name: xp.asarray(x) for name, x in keys.items()}
    out, lse = attention(q, k, v, on_xp, return_lse=True, **given)
    found = attention_backward(dout, q, k, v, out, lse, on_xp, **given)
    *inputs, dout = arrays
    wanted = reference.attention_backward(dout, *inputs, bias, **keys)
    for x, want in zip(found, wanted, strict=False):
        np.testing.assert_allclose(to_numpy(x), want, rtol=1e-5, atol=1e-5)


def test_gradients_of_the_largest_scale():
    x = np.random.default_rng(0).standard_normal((2, 4)) * 1e-3
    out, lse = attention(x, x, x, return_lse=True, scale=1e308)
    found = attention_backward(x, x, x, x, out, lse, scale=1e308)
    wanted = reference.attention_backward(x, x, x, x, scale=1e308)
    for gradient, want in zip(found, wanted, strict=False):
        np.testing.assert_allclose(gradient, want, rtol=1e-12)
