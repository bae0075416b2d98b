"""Kernel regression and its gradients against their definition in float64."""

import warnings

import numpy as np
import pytest
from scipy import sparse

from fa_cupy import BitMask, kernel_regression, kernel_regression_backward
from fa_cupy.smoothing.kernels import KERNELS
from tests.support.gradients import differences
from tests.support.strategies import DTYPES, UNIT, by_dtype, normal, to_numpy

HALF, BFLOAT16, SINGLE, DOUBLE = DTYPES
ROOT3 = np.sqrt(3.0)
LOGARITHMS = {
    "gaussian": lambda r: -r * r / 2,
    "laplace": lambda r: -r,
    "matern32": lambda r: np.log1p(ROOT3 * np.minimum(r, 1e300)) - ROOT3 * r,
    "epanechnikov": lambda r: np.log(np.maximum(0.0, 1.0 - r * r)),
}
by_kernel = pytest.mark.parametrize("kernel", KERNELS)


def definition(x, X, y, bandwidth, kernel="gaussian", mask=None):
    """The estimate in float64, by an array of all pairs."""
    x, X, y, bandwidth = (np.asarray(a).astype(DOUBLE) for a in (x, X, y, bandwidth))
    single = y.ndim == 1
    y = y[:, None] if single else y
    if bandwidth.ndim:
        bandwidth = bandwidth[..., None, None, :]
    with np.errstate(all="ignore"):
        r = np.sqrt(np.square((x[..., :, None, :] - X[..., None, :, :]) / bandwidth).sum(axis=-1))
        score = LOGARITHMS[kernel](r)
        if mask is not None:
            score = np.where(mask, score, -np.inf)
        weight = np.exp(score - score.max(axis=-1, keepdims=True, initial=-1e300))
        found = weight @ y / weight.sum(axis=-1, keepdims=True)
    return found[..., 0] if single else found


def samples(dims=2, m=40, n=90, columns=(), dtype=DOUBLE, offset=0.0, seed=0):
    rng = np.random.default_rng(seed)
    x, X = (rng.uniform(-1, 1, (rows, dims)) + offset for rows in (m, n))
    return x.astype(dtype), X.astype(dtype), rng.standard_normal((n, *columns)).astype(dtype)


def estimate(xp, x, X, y, bandwidth, *args, mask=None):
    """The estimate by the library, as an array of NumPy."""
    if np.ndim(bandwidth):
        bandwidth = xp.asarray(bandwidth)
    seen = mask if mask is None or isinstance(mask, BitMask) else xp.asarray(mask)
    found = kernel_regression(*map(xp.asarray, (x, X, y)), bandwidth, *args, mask=seen)
    assert isinstance(found, xp.ndarray)
    assert found.dtype == y.dtype
    return to_numpy(found)


def hold(got, want, tolerance):
    assert got.shape == want.shape
    np.testing.assert_array_equal(np.isnan(got.astype(DOUBLE)), np.isnan(want))
    np.testing.assert_allclose(got.astype(DOUBLE), want, rtol=0, atol=tolerance)


# Precision


@by_kernel
@pytest.mark.parametrize("dims", [1, 3, 8, 12])
@pytest.mark.parametrize("offset", [0.0, 100.0, 1e4])
def test_offsets_do_no_harm(xp, kernel, dims, offset):
    """In float32, where the rounding of coordinates is that of the arguments."""
    width = 0.1 if dims < 8 else 1.0
    x, X, y = samples(dims, 60, 500, dtype=SINGLE, offset=offset)
    hold(estimate(xp, x, X, y, width, kernel), definition(x, X, y, width, kernel), 1e-5)


@by_kernel
@pytest.mark.parametrize(**by_dtype())
def test_dtypes(xp, kernel, dtype):
    x, X, y = samples(2, columns=(3,), dtype=dtype)
    tolerance = {SINGLE: 2e-6, DOUBLE: 1e-13}.get(dtype, 8 * UNIT[dtype])
    hold(estimate(xp, x, X, y, 0.5, kernel), definition(x, X, y, 0.5, kernel), tolerance)


@pytest.mark.parametrize("of_y", DTYPES)
@pytest.mark.parametrize("of_X", DTYPES)
def test_coordinates_of_other_dtypes(xp, of_y, of_X):
    """Float64 coordinates are not rounded to the dtype of the values."""
    x, X, y = samples(1, offset=0.0)
    x, X, y = (x + 1e3 * (of_X == DOUBLE)).astype(of_X), X.astype(of_X), y.astype(of_y)
    X = (X.astype(DOUBLE) + 1e3 * (of_X == DOUBLE)).astype(of_X)
    hold(estimate(xp, x, X, y, 0.2), definition(x, X, y, 0.2), max(1e-5, 8 * UNIT[of_y]))


@by_kernel
@pytest.mark.parametrize(**by_dtype())
def test_points_far_from_all_samples(xp, kernel, dtype):
    """Their weights are computed in float64, those of one point or of all under a BitMask."""
    x, X, y = samples(2, 30, 200, dtype=dtype)
    x[7], x[9], x[11] = (4, 5), (30, -2), (6e4, 6e4)
    if dtype in (SINGLE, BFLOAT16):
        x[12] = 1e25
    want = definition(x, X, y, 0.1, kernel)
    hold(estimate(xp, x, X, y, 0.1, kernel), want, max(1e-5, 8 * UNIT[dtype]))
    mask = np.random.default_rng(1).random((30, 200)) < 0.5
    want = definition(x, X, y, 0.1, kernel, mask)
    for seen in (mask, BitMask.from_dense(mask)):
        hold(estimate(xp, x, X, y, 0.1, kernel, mask=seen), want, max(1e-5, 8 * UNIT[dtype]))


def test_near_the_edge_of_the_support(xp):
    """Of samples that all but vanish, the weights are as good as those of others."""
    X = np.array([[0.0], [2.000005]], SINGLE)
    x, y = np.array([[1.0]], SINGLE), np.array([0.0, 1.0], SINGLE)
    width = 1.00001
    got, want = (
        estimate(xp, x, X, y, width, "epanechnikov"),
        definition(x, X, y, width, "epanechnikov"),
    )
    assert want[0] > 0.1
    np.testing.assert_allclose(got, want, rtol=1e-5)


@by_kernel
@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE])
@pytest.mark.parametrize("width", [1e-170, np.array([1e-170])], ids=["number", "array"])
def test_samples_out_of_reach_do_not_matter(xp, kernel, dtype, width):
    """Where their distance is infinite in bandwidths, what counts is the sample at the point."""
    _, X, y = samples(2, dtype=dtype)
    np.testing.assert_array_equal(estimate(xp, X[:9], X, y, width, kernel), y[:9])
    dx, dX, dy, dwidth = solve(xp, np.ones(9, dtype), X[:9], X, y, width, kernel)
    np.testing.assert_array_equal(dy, np.arange(len(X)) < 9)
    for gradient in (dx, dX, dwidth):
        np.testing.assert_array_equal(gradient, 0.0)


def test_a_sparse_matrix_as_mask():
    x, X, y = samples(2, 6, 9)
    mask = np.random.default_rng(1).random((6, 9)) < 0.7
    graph = sparse.coo_array(mask)
    want = kernel_regression(x, X, y, 0.8, mask=mask)
    np.testing.assert_allclose(kernel_regression(x, X, y, 0.8, mask=graph), want)
    grads = (
        kernel_regression_backward(np.ones(6), x, X, y, 0.8, mask=seen) for seen in (graph, mask)
    )
    for got, wanted in zip(*grads, strict=True):
        np.testing.assert_allclose(got, wanted)


@by_kernel
@pytest.mark.parametrize("dims", [2, 9])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_a_mask_hides_may_be_anything(xp, kernel, dims, bad):
    x, X, y = samples(dims, 6, 9)
    hidden = np.isin(np.arange(9), [2, 5])
    mask, dout = np.broadcast_to(~hidden, (6, 9)), np.ones(6)
    want = estimate(xp, x, X[~hidden], y[~hidden], 3.0, kernel)
    dx, dX, dy, dwidth = solve(xp, dout, x, X[~hidden], y[~hidden], 3.0, kernel)
    X[hidden] = y[hidden] = bad
    hold(estimate(xp, x, X, y, 3.0, kernel, mask=mask), want, 1e-12)
    found = solve(xp, dout, x, X, y, 3.0, kernel, mask)
    for place in (1, 2):
        np.testing.assert_array_equal(found[place][hidden], 0.0)
        found[place] = found[place][~hidden]
    for got, wanted in zip(found, (dx, dX, dy, dwidth), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-12)


@by_kernel
@pytest.mark.parametrize("dims", [2, 9])
def test_a_sample_that_is_no_number_counts(xp, kernel, dims):
    x, X, y = samples(dims, 6, 9)
    X[4, 1] = np.nan
    assert np.isnan(estimate(xp, x, X, y, 3.0, kernel)).all()


INFINITE = [
    # places in x, in X and in y, and what is there
    ([], [(2, 1)], [], np.inf),
    ([], [(2, 1), (5, 0), (5, 1)], [2], -np.inf),
    ([], [(2, 0), (2, 1), (2, 2)], [2], np.inf),
    ([(1, 0)], [], [], np.inf),
    ([(1, 0)], [], [], np.nan),
    ([(1, 0), (3, 2)], [(2, 0), (4, 1)], [4], -np.inf),
    ([], [], [2], np.inf),
    ([], [(2, 1)], [2], np.nan),
]


@by_kernel
@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE])
@pytest.mark.parametrize("case", INFINITE, ids=str)
def test_samples_at_infinity_do_not_count(xp, kernel, dtype, case):
    """As in the definition without their values, also where zeros make many dims of three."""
    *places, number = case
    arrays = [a * dtype.type(0.3) for a in samples(3, 6, 9, dtype=dtype)]
    for array, at in zip(arrays, places, strict=True):
        for place in at:
            array[place] = number
    x, X, y = arrays
    want = definition(x, X, np.where(np.isinf(X).any(axis=1), 0.0, y), 1.0, kernel)
    few = estimate(xp, x, X, y, 1.0, kernel)
    hold(few, want, 1e-5 if dtype == SINGLE else 1e-12)
    many = [np.pad(a, ((0, 0), (0, 7))) for a in (x, X)]
    hold(estimate(xp, *many, y, 1.0, kernel), few.astype(DOUBLE), 1e-5)


@by_kernel
@pytest.mark.parametrize("far", [1e20, 1e160, -1.7e308])
@pytest.mark.filterwarnings("ignore:kernel_regression. in more than 8 dims:RuntimeWarning")
def test_a_sample_that_is_far_from_others_changes_none_of_them(xp, kernel, far):
    x, X, y = samples(9, 6, 9)
    X[4, 2] = far
    near = np.arange(9) != 4
    want = definition(x, X[near], y[near], 3.0, kernel)
    hold(estimate(xp, x, X, y, 3.0, kernel), want, 1e-10)


@by_kernel
@pytest.mark.parametrize("dims", [3, 9])
def test_infinite_coordinates_have_no_gradient(xp, kernel, dims):
    x, X, y = samples(dims, 6, 9)
    near, dout = np.arange(9) != 4, np.linspace(1, 2, 6)
    dout[2], x[2, 1] = np.nan, np.inf
    kept = np.arange(6) != 2
    want = solve(xp, dout[kept], x[kept], X[near], y[near], 3.0, kernel)
    X[4, :2] = -np.inf
    dx, dX, dy, dwidth = solve(xp, dout, x, X, y, 3.0, kernel)
    np.testing.assert_array_equal(dx[2], 0.0)
    np.testing.assert_array_equal(dX[4], 0.0)
    assert dy[4] == 0.0
    for got, wanted in zip((dx[kept], dX[near], dy[near], dwidth), want, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-12)


@by_kernel
@pytest.mark.parametrize("dims", [2, 9])
def test_sums_of_huge_coordinates(xp, kernel, dims):
    """Of samples whose mean float64 does not compute."""
    x, X, y = samples(dims)
    want = definition(x, X, y, dims, kernel)
    hold(estimate(xp, x * 1e307, X * 1e307, y, dims * 1e307, kernel), want, 1e-12)
    X[:, 0] += 8  # the sum is infinite
    x[:, 0] += 8
    hold(estimate(xp, x * 1e307, X * 1e307, y, dims * 1e307, kernel), want, 1e-12)


@by_kernel
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("scale", [1e-43, 3e38])
def test_bandwidths_at_the_ends_of_float32(xp, kernel, each, scale):
    """Their inverse, or differences as large, are infinite in float32."""
    if xp is not np and scale < 1:
        pytest.skip("CuPy takes subnormal numbers of float32 for 0")
    x, X, y = samples(2)
    x, X, y = (x * scale).astype(SINGLE), (X * scale).astype(SINGLE), y.astype(SINGLE)
    width = np.array([0.9, 1.1]) * scale if each else scale
    hold(estimate(xp, x, X, y, width, kernel), definition(x, X, y, width, kernel), 1e-5)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_units_do_not_matter(xp, scale):
    x, X, y = samples(3, dtype=SINGLE)
    x, X = x * SINGLE.type(scale), X * SINGLE.type(scale)
    hold(estimate(xp, x, X, y, 0.3 * scale), definition(x, X, y, 0.3 * scale), 1e-5)


@by_kernel
def test_products_that_are_too_coarse_are_known(kernel):
    """In many dims: float64 where float32 would not do, and a warning where that does not."""
    x, X, y = samples(10, 20, 300, dtype=SINGLE)
    X[:20] = x
    for width in (0.05, 1.0, 50.0):
        want = definition(x, X, y, width, kernel)
        hold(kernel_regression(x, X, y, width, kernel), want, 1e-5)
    x, X, y = (a.astype(DOUBLE) for a in (x, X, y))
    far = X.copy()
    far[-1] = 1e9
    with pytest.warns(RuntimeWarning, match=r"^kernel_regression: in more than 8 dims") as caught:
        kernel_regression(x, far, y, 0.3, kernel)
    assert caught[0].filename == __file__
    with pytest.warns(RuntimeWarning, match="kernel_regression_backward: in more") as caught:
        kernel_regression_backward(np.ones(20), x, far, y, 0.3, kernel)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel_regression(x[:, :8], far[:, :8], y, 0.3, kernel)


# Shapes

BROADCAST = [
    # x, X, y, bandwidth, mask
    ((7, 2), (9, 2), (9,), (), None),
    ((7, 2), (9, 2), (9,), (2,), (7, 9)),
    ((7, 1), (9, 1), (9, 3), (1,), (9,)),
    ((4, 7, 2), (9, 2), (9,), (4, 1), (7, 1)),
    ((7, 2), (4, 9, 2), (9, 1), (2,), (4, 7, 9)),
    ((7, 2), (9, 2), (4, 9, 1), (4, 2), None),
    ((3, 1, 7, 2), (4, 9, 2), (4, 9, 2), (3, 1, 2), (1, 4, 7, 9)),
    ((2, 3, 1, 7, 2), (4, 9, 2), (9,), (3, 1, 1), None),
    ((1, 4, 7, 2), (1, 1, 9, 2), (9,), (), None),
    ((4, 7, 9), (9, 9), (9, 2), (), None),
    ((7, 9), (2, 1, 9, 9), (4, 9, 2), (2, 1, 1), (4, 7, 9)),
    ((3, 1, 7, 9), (4, 9, 9), (9,), (4, 9), None),
    ((0, 2), (9, 2), (9,), (), None),
    ((7, 2), (0, 2), (0,), (), None),
    ((7, 9), (0, 9), (0, 2), (9,), None),
    ((0, 9), (9, 9), (9, 2), (1,), None),
    ((0, 4, 7, 2), (9, 2), (9, 1), (2,), None),
    ((7, 2), (9, 2), (9, 0), (2,), None),
]


def drawn(x, X, y, width, mask, seed=0):
    rng = np.random.default_rng(seed)
    arrays = [normal(rng, shape, DOUBLE) for shape in (x, X, y)]
    widths = rng.uniform(0.8, 1.6, width) if width else 1.2
    return *arrays, widths, None if mask is None else rng.random(mask) < 0.7


@pytest.mark.parametrize("shapes", BROADCAST, ids=str)
@pytest.mark.parametrize("kernel", ["gaussian", "matern32"])
def test_arrays_broadcast(xp, shapes, kernel):
    *arrays, mask = drawn(*shapes)
    want = definition(*arrays, kernel, mask)
    hold(estimate(xp, *arrays, kernel, mask=mask), want, 1e-12)


def test_strides_are_free(xp):
    x, X, y = samples(3, columns=(4,))
    want = definition(x, X, y, 0.7)
    views = [xp.asarray(np.asfortranarray(a[::-1]))[::-1] for a in (x, X, y)]
    hold(to_numpy(kernel_regression(*views, 0.7)), want, 1e-13)


def test_without_samples_the_estimate_is_nan(xp):
    x, X, y = samples(1, 30, 20, dtype=SINGLE)
    x[3], mask = 5.0, np.ones((30, 20), bool)
    mask[4] = False
    found = estimate(xp, x, X, y, 0.5, "epanechnikov", mask=mask)
    assert np.flatnonzero(np.isnan(found)).tolist() == [3, 4]
    found = estimate(xp, x, X, y, 0.5, mask=mask)
    assert np.flatnonzero(np.isnan(found)).tolist() == [4]


def test_results_repeat_and_do_not_depend_on_other_points(xp):
    x, X, y = samples(2, 200, 300, dtype=SINGLE)
    x[5] = 40.0
    first = estimate(xp, x, X, y, 0.1)
    assert first.tobytes() == estimate(xp, x, X, y, 0.1).tobytes()
    hold(estimate(xp, x[5:6], X, y, 0.1), first[5:6].astype(DOUBLE), 1e-6)


def test_arrays_of_other_libraries():
    strict = pytest.importorskip("array_api_strict")
    x, X, y = samples(2, columns=(3,))
    width = np.array([0.4, 0.7])
    found = kernel_regression(*map(strict.asarray, (x, X, y)), strict.asarray(width))
    assert isinstance(found, type(strict.asarray(x)))
    hold(np.asarray(found), definition(x, X, y, width), 1e-13)
    dout = np.ones((40, 3))
    found = kernel_regression_backward(*map(strict.asarray, (dout, x, X, y)), 0.5)
    assert all(isinstance(a, type(strict.asarray(x))) for a in found)


# Gradients


def solve(xp, dout, x, X, y, width, kernel, mask=None):
    """The gradients by the library, as arrays of NumPy."""
    widths = xp.asarray(width) if np.ndim(width) else width
    seen = mask if mask is None else xp.asarray(mask)
    arrays = map(xp.asarray, (dout, x, X, y))
    found = kernel_regression_backward(*arrays, widths, kernel, mask=seen)
    for array, of in zip(found, (x, X, y, np.asarray(width)), strict=True):
        assert isinstance(array, xp.ndarray)
        assert (array.shape, array.dtype) == (of.shape, of.dtype)
    return [to_numpy(array) for array in found]


def check_gradients(xp, x, X, y, width, kernel, mask):
    """Against central differences of the definition."""
    arrays = [np.asarray(a) for a in (x, X, y, width)]
    with np.errstate(all="ignore"):
        shape = definition(*arrays, kernel, mask).shape
    dout = np.random.default_rng(9).standard_normal(shape)

    def loss():
        return np.nansum(dout * definition(*arrays, kernel, mask))

    found = solve(xp, dout, x, X, y, width, kernel, mask)
    for array, got in zip(arrays, found, strict=True):
        want = differences(loss, array)
        np.testing.assert_allclose(
            got, want, rtol=1e-5, atol=1e-7 * max(1, np.abs(want).max(initial=0))
        )


@pytest.mark.parametrize(
    "shapes", [BROADCAST[k] for k in (1, 3, 6, 7, 9, 10, 12, 13, 14, 16)], ids=str
)
def test_gradients_of_what_broadcasts(xp, shapes):
    check_gradients(xp, *drawn(*shapes)[:4], "gaussian", drawn(*shapes)[4])


@by_kernel
@pytest.mark.parametrize("dims", [1, 2, 9])
@pytest.mark.parametrize("each", [False, True])
def test_gradients(xp, kernel, dims, each):
    x, X, y = samples(dims, 6, 12, (2,))
    width = 0.8 * dims**0.5 * (np.linspace(0.9, 1.2, dims) if each else 1.0)
    check_gradients(xp, x, X, y, width, kernel, None)


@by_kernel
@pytest.mark.parametrize("dims", [2, 10])
def test_gradients_where_points_are_samples(xp, kernel, dims):
    """All are finite; "laplace" has a kink there, and other kernels have slope 0."""
    _, X, y = samples(dims, 8, 8, (1,))
    dout = np.ones((8, 1))
    dx, dX, dy, dwidth = solve(xp, dout, X, X, y, 1.5, kernel)
    assert all(np.isfinite(a).all() for a in (dx, dX, dy, dwidth))
    if kernel != "laplace":
        moved = X.copy()

        def loss():
            return definition(moved, X, y, 1.5, kernel).sum()

        np.testing.assert_allclose(dx, differences(loss, moved), rtol=1e-4, atol=1e-6)


@by_kernel
@pytest.mark.parametrize(**by_dtype())
def test_gradients_of_other_dtypes(xp, kernel, dtype):
    """They are computed in float64, also with an offset, and rounded."""
    x, X, y = samples(2, 20, 50, (2,), dtype=dtype, offset=0.0 if dtype in DTYPES[:2] else 1e3)
    dout = np.random.default_rng(1).standard_normal((20, 2)).astype(dtype)
    got = solve(xp, dout, x, X, y, 0.6, kernel)
    want = solve(xp, *(a.astype(DOUBLE) for a in (dout, x, X, y)), 0.6, kernel)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a.astype(DOUBLE), b, rtol=2 * UNIT[dtype], atol=1e-7)
    again = solve(xp, dout, x, X, y, 0.6, kernel)
    assert [a.tobytes() for a in got] == [a.tobytes() for a in again]


def test_gradients_of_points_without_samples_are_zero(xp):
    x, X, y = samples(1, 6, 9)
    x[2] = 40.0
    dout = np.ones(6)
    dout[2] = np.nan
    dx, dX, dy, dwidth = solve(xp, dout, x, X, y, 0.8, "epanechnikov")
    assert dx[2] == 0.0
    assert all(np.isfinite(a).all() for a in (dx, dX, dy, dwidth))


# Errors

X1 = np.zeros((5, 2))
WRONG = [
    ({"x": None}, TypeError, r"x is None, want an array"),
    ({"x": [1.0]}, TypeError, r"x is a list, want an array"),
    ({"x": np.zeros((3, 2), int)}, TypeError, r"x has dtype int64, want float16, bfloat16"),
    ({"x": np.zeros(3)}, ValueError, r"x has shape \(3,\), want at least 2 axes .* x\[:, None\]"),
    ({"X": np.zeros((5, 3))}, ValueError, r"x has 2 dims, X has 3, want the same number"),
    ({"y": np.zeros(4)}, ValueError, r"y has length 4, X has 5 samples"),
    ({"y": np.zeros((5, 4, 2))}, ValueError, r"y has length 4, X has 5 samples \(only"),
    ({"y": np.zeros(())}, ValueError, r"y has shape \(\), want \(n,\) or"),
    ({"X": np.zeros((3, 5, 2)), "x": np.zeros((2, 4, 2))}, ValueError, r"X has batch shape \(3,\)"),
    ({"bandwidth": 0.0}, ValueError, r"bandwidth is 0.0 \(float\), want a number > 0"),
    ({"bandwidth": 1e-320}, ValueError, r"bandwidth is 1e-320 \(float\), .* \(at least 5.6e-309"),
    ({"bandwidth": -1}, ValueError, r"bandwidth is -1 \(int\), want a number > 0"),
    ({"bandwidth": np.nan}, ValueError, r"bandwidth is nan \(float\), want a finite number"),
    ({"bandwidth": "scott"}, TypeError, r"bandwidth is 'scott' \(str\), want a finite number"),
    ({"bandwidth": None}, TypeError, r"bandwidth is None \(NoneType\), want a finite number"),
    ({"bandwidth": np.ones(3)}, ValueError, r"bandwidth has shape \(3,\), want a last axis"),
    ({"bandwidth": np.array([1.0, 0])}, ValueError, r"bandwidth has elements that are not"),
    ({"bandwidth": np.array([1.0, 1e-320])}, ValueError, r"bandwidth has .* \(at least 5.6e-309"),
    ({"bandwidth": np.array([1.0, np.nan])}, ValueError, r"bandwidth has elements that are not"),
    ({"bandwidth": np.ones(2, int)}, TypeError, r"bandwidth has dtype int64, want float16"),
    ({"kernel": "box"}, ValueError, r"kernel is 'box' \(str\), want one of 'gaussian', 'laplace'"),
    ({"kernel": None}, ValueError, r"kernel is None \(NoneType\), want one of"),
    ({"mask": np.ones((4, 5))}, TypeError, r"mask has dtype float64, want bool"),
    ({"mask": np.ones((3, 5), bool)}, ValueError, r"mask has shape \(3, 5\), want one that"),
    ({"mask": BitMask.from_dense(np.ones((5, 5), bool))}, ValueError, r"mask has shape \(5, 5\)"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "error", "message"), WRONG)
def test_errors_name_the_argument(wrong, error, message):
    given = {"x": np.zeros((4, 2)), "X": X1, "y": np.zeros(5), "bandwidth": 1.0} | wrong
    with pytest.raises(error, match=f"^kernel_regression: {message}"):
        kernel_regression(**given)
    with pytest.raises(error, match=f"^kernel_regression_backward: {message}"):
        kernel_regression_backward(np.zeros(4), **given)


@pytest.mark.parametrize(
    ("dout", "error", "message"),
    [
        (None, TypeError, "dout is None"),
        (np.zeros((4, 1)), ValueError, r"dout has shape \(4, 1\), want \(4,\)"),
        (np.zeros(4, SINGLE), TypeError, "dout has dtype float32, want float64"),
    ],
)
def test_errors_of_the_gradient(dout, error, message):
    with pytest.raises(error, match=f"^kernel_regression_backward: {message}"):
        kernel_regression_backward(dout, np.zeros((4, 2)), X1, np.zeros(5), 1.0)
