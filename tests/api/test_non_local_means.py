"""Non-local means against their definition, pixel by pixel."""

import numpy as np
import pytest

from fa_cupy import non_local_means
from fa_cupy._kernel_regression import non_local_means_backward
from fa_cupy.smoothing import patches
from tests.support.strategies import DTYPES, UNIT, by_dtype, lay, to_numpy

HALF, BFLOAT16, SINGLE, DOUBLE = DTYPES


@np.errstate(invalid="ignore")
def definition(image, h, patch_size, patch_distance, sigma=0.0):
    """As scikit-image computes it, in float64, but for the weights that it neglects.

    What is infinitely different does not count, whatever its value is.
    """
    image = image.astype(DOUBLE)
    image = image[..., None] if image.ndim == 2 else image
    height, width, channels = image.shape
    radius = patch_size // 2
    padded = np.pad(image, ((radius, radius), (radius, radius), (0, 0)), mode="reflect")
    offset = np.arange(-radius, radius + 1)
    weights = np.ones((1, 1))
    if radius:
        weights = np.exp(-np.add.outer(offset**2, offset**2) / (2 * ((patch_size - 1) / 4) ** 2))
    weights = weights[..., None] / (weights.sum() * channels)
    reach = max(height, width) if patch_distance is None else patch_distance
    found = np.empty_like(image)
    for y, x in np.ndindex(height, width):
        patch = padded[y : y + patch_size, x : x + patch_size]
        rows = range(max(0, y - reach), min(height, y + reach + 1))
        cols = range(max(0, x - reach), min(width, x + reach + 1))
        distances, others = [], []
        for i in rows:
            for j in cols:
                other = padded[i : i + patch_size, j : j + patch_size]
                distances.append((weights * (((patch - other) / h) ** 2)).sum())
                others.append(image[i, j])
        weight = np.exp(-np.maximum(0.0, np.array(distances) - 2 * (sigma / h) ** 2))[:, None]
        others = np.where(weight == 0, 0.0, others)
        found[y, x] = (weight * others).sum(axis=0) / weight.sum()
    return found


def denoised(xp, image, *args, **options):
    found = non_local_means(xp.asarray(image), *args, **options)
    assert isinstance(found, xp.ndarray)
    assert (found.shape, found.dtype) == (image.shape, image.dtype)
    return to_numpy(found).astype(DOUBLE)


CASES = [
    # shape, patch_size, patch_distance, sigma
    ((9, 11), 3, 2, 0.0),
    ((9, 11), 3, None, 0.1),
    ((8, 34, 3), 5, 3, 0.1),
    ((34, 5, 2), 1, 40, 0.2),
    ((1, 12, 1), 5, 2, 0.0),
    ((3, 2), 7, 1, 0.0),
    ((6, 6), 3, 0, 0.0),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(**by_dtype(HALF, SINGLE, DOUBLE))
def test_means(xp, case, dtype):
    shape, size, distance, sigma = case
    image = np.random.default_rng(0).random(shape).astype(dtype)
    want = definition(image, 0.3, size, distance, sigma).reshape(shape)
    got = denoised(xp, image, 0.3, size, distance, sigma=sigma)
    tolerance = {HALF: 3e-3, SINGLE: 3e-6, DOUBLE: 1e-13}[dtype]
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("offset", [0.0, 1e3])
@pytest.mark.parametrize("h", [0.3, 1e-3])
def test_offsets_and_small_bandwidths_do_no_harm(xp, offset, h):
    """In float32: what is subtracted is the mean, and what float32 rounds away is float64's."""
    rng = np.random.default_rng(0)
    image = (rng.integers(0, 2, (12, 12)) + h * rng.random((12, 12)) + offset).astype(SINGLE)
    got, want = denoised(xp, image, h, 3, 4), definition(image, h, 3, 4)[..., 0]
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-2 * h + UNIT[SINGLE] * offset)


@pytest.mark.parametrize(**by_dtype(BFLOAT16, SINGLE, DOUBLE))
@pytest.mark.parametrize("power", [-80, 100])
def test_units_do_not_matter(xp, dtype, power):
    """Of images whose squares the dtype does not hold, as in watts, too."""
    image = np.random.default_rng(0).random((18, 20)).astype(dtype)
    want = denoised(xp, image, 0.3, 3, 4, sigma=0.1)
    unit = 2.0**power
    got = denoised(xp, image * dtype.type(unit), 0.3 * unit, 3, 4, sigma=0.1 * unit)
    np.testing.assert_array_equal(got, want * unit)


@pytest.mark.parametrize(**by_dtype())
@pytest.mark.parametrize(("h", "sigma"), [(1e200, 0.0), (0.1, 1e200), (1e-150, 1e300)])
def test_all_pixels_count_alike(xp, dtype, h, sigma):
    image = np.random.default_rng(0).random((6, 7)).astype(dtype)
    want = np.broadcast_to(image.astype(DOUBLE).mean(), image.shape)
    got = denoised(xp, image, h, 3, None, sigma=sigma)
    np.testing.assert_allclose(got, want, rtol=4 * UNIT[dtype])


def test_half_precision_holds_all_differences(xp):
    """Its largest numbers differ by twice as much."""
    image = np.full((12, 12), -65504.0, HALF)
    image[3, 4] = 65504.0
    got = denoised(xp, image, 1e4, 3, 2)  # a GPU may round the weighted sum down
    np.testing.assert_allclose(got, image.astype(DOUBLE), rtol=2 * UNIT[HALF])


@pytest.mark.parametrize(**by_dtype())
@pytest.mark.parametrize("h", [5e-324, 1e-160, 1e-50])
@pytest.mark.parametrize("sigma", [0.0, 0.3])
def test_tiny_bandwidths(xp, dtype, h, sigma):
    """Patches count that are equal, or that differ by noise."""
    image = np.random.default_rng(0).integers(0, 4, (9, 11)).astype(dtype)
    flat = np.full((5, 6), 0.1, dtype)
    got, want = denoised(xp, flat, h, 3, 2), flat.astype(DOUBLE)
    np.testing.assert_allclose(got, want, rtol=8 * UNIT[dtype])
    got = denoised(xp, image, h, 3, 2, sigma=sigma)
    want = definition(image, 1e-4, 3, 2, sigma)[..., 0]
    np.testing.assert_allclose(got, want, rtol=0, atol=16 * UNIT[dtype])


@pytest.mark.parametrize("scale", [1e-310, 1e160, 1e306])
@pytest.mark.parametrize("h", [1e-200, 1e-3, 0.3, 1e200])
def test_images_of_any_scale(xp, scale, h):
    """Where squares of pixels overflow, or their sum, or vanish."""
    image = np.random.default_rng(0).random((8, 9)) + 1
    image[4:] = image[:4]
    width = min(max(h * scale, 5e-324), 1e308)
    want = definition(image, max(width / scale, 1e-9), 3, 4)[..., 0]
    got = denoised(xp, image * scale, width, 3, 4) / scale
    np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize(**by_dtype())
@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize("bad", [(np.inf,), (np.inf, -np.inf), (np.inf, np.nan)], ids=str)
@pytest.mark.parametrize("shape", [(9, 24), (8, 14, 2)], ids=str)
def test_infinite_pixels_do_not_count(xp, dtype, size, bad, shape):
    """They are infinitely different from others, but their own patches are not numbers."""
    image = np.random.default_rng(0).random(shape).astype(dtype)
    for k, number in enumerate(bad):
        image[(3 + k, 2 * k, 0)[: len(shape)]] = number
    want = definition(image, 0.3, size, 2, 0.1).reshape(shape)
    assert not np.isnan(want).all()
    got = denoised(xp, image, 0.3, size, 2, sigma=0.1)
    tolerance = {SINGLE: 3e-6, DOUBLE: 1e-13}.get(dtype, 8 * UNIT[dtype])
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(("dtype", "far"), [(SINGLE, 1e9), (SINGLE, -3.4e38), (DOUBLE, -3.4e38)])
def test_a_pixel_that_is_far_from_others_changes_none_of_them(xp, dtype, far, size):
    image = np.random.default_rng(0).random((9, 14)).astype(dtype)
    image[2, 3] = far
    want = definition(image, 0.3, size, 2).reshape(image.shape)
    got = denoised(xp, image, 0.3, size, 2)
    np.testing.assert_allclose(got, want, rtol=3e-6 if dtype == SINGLE else 1e-12)


@pytest.mark.parametrize("fill", [-9999.0, 1e20])
def test_a_fill_value_in_most_pixels_changes_none_of_the_others(xp, fill):
    """Far from it, where no patch has one."""
    image = np.random.default_rng(0).random((12, 30))
    image[:, :20] = fill
    want = denoised(xp, image[:, 20:], 0.3, 3, 2)
    got = denoised(xp, image, 0.3, 3, 2)
    np.testing.assert_allclose(got[:, 24:], want[:, 4:], rtol=1e-12)


@pytest.mark.parametrize(**by_dtype())
def test_any_layout(xp, dtype):
    image = np.random.default_rng(0).random((10, 12, 3)).astype(dtype)
    want = denoised(xp, image, 0.3, 3, 2)
    for layout in ("transposed", "steps", "reversed"):
        got = to_numpy(non_local_means(lay(xp, image, layout), 0.3, 3, 2))
        np.testing.assert_allclose(got.astype(DOUBLE), want, rtol=0, atol=8 * UNIT[dtype])


def test_a_pixel_that_is_no_number_stays_near(xp):
    image = np.random.default_rng(0).random((40, 40))
    image[3, 4] = np.nan
    found = denoised(xp, image, 0.3, 3, 2)
    lost = np.zeros((40, 40), bool)
    lost[:7, :8] = True  # two pixels that patches reach, and two that the search does
    assert np.isnan(found[3, 4])
    assert not np.isnan(found[~lost]).any()


@pytest.mark.parametrize("shape", [(0, 5), (5, 0, 3), (5, 5, 0)])
def test_empty_images(xp, shape):
    assert denoised(xp, np.zeros(shape, SINGLE), 0.1).shape == shape


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"image": None}, TypeError, "image is None, want an array"),
        ({"image": np.zeros((4, 4), np.uint8)}, TypeError, "image has dtype uint8, want float16"),
        ({"image": np.zeros(4)}, ValueError, r"image has shape \(4,\), want \(H, W\) or \(H, W, C"),
        ({"image": np.zeros((1, 2, 3, 4))}, ValueError, r"image has shape \(1, 2, 3, 4\)"),
        ({"h": 0}, ValueError, r"h is 0 \(int\), want a number > 0"),
        ({"h": -0.1}, ValueError, r"h is -0.1 \(float\), want a number > 0"),
        ({"h": "a"}, TypeError, r"h is 'a' \(str\), want a finite number"),
        ({"patch_size": 4}, ValueError, r"patch_size is 4 \(int\), want an odd int"),
        ({"patch_size": 3.0}, TypeError, r"patch_size is 3.0 \(float\), want an odd int"),
        ({"patch_distance": -1}, ValueError, r"patch_distance is -1 \(int\), want None or an int"),
        ({"sigma": -0.1}, ValueError, r"sigma is -0.1 \(float\), want a finite number >= 0"),
    ],
)
def test_errors_name_the_argument(wrong, error, message):
    with pytest.raises(error, match=f"^non_local_means: {message}"):
        non_local_means(**({"image": np.zeros((4, 4)), "h": 0.1} | wrong))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("chunk", [patches._CHUNK, 1])
def test_gradient(xp, monkeypatch, case, chunk):
    """Along a random direction, by a difference quotient; one row of squares a call too."""
    monkeypatch.setattr(patches, "_CHUNK", chunk)
    shape, *args, sigma = case
    image, dout, way = np.random.default_rng(1).standard_normal((3, *shape))
    step = 1e-5
    up, down = (denoised(xp, image + x * way, 0.8, *args, sigma=sigma) for x in (step, -step))
    given = xp.asarray(dout), xp.asarray(image), 0.8, *args
    gradient = non_local_means_backward(*given, sigma=sigma)
    assert (gradient.shape, gradient.dtype) == (shape, DOUBLE)
    got = (to_numpy(gradient) * way).sum()
    np.testing.assert_allclose(got, ((up - down) * dout).sum() / (2 * step), rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("size", [1, 3])
def test_infinite_pixels_have_no_gradient(xp, size):
    """Nor has what becomes NaN."""
    image, dout, way = np.random.default_rng(1).standard_normal((3, 9, 20))
    image[4, 5] = np.inf
    lost = np.isnan(denoised(xp, image, 0.8, size, 2))
    assert lost.sum() == size**2
    dout[lost] = np.nan
    given = xp.asarray(dout), xp.asarray(image), 0.8, size, 2
    gradient = to_numpy(non_local_means_backward(*given))
    assert gradient[4, 5] == 0.0
    step = 1e-5
    up, down = (definition(image + x * way, 0.8, size, 2)[..., 0] for x in (step, -step))
    want = np.nansum((up - down) * dout) / (2 * step)
    np.testing.assert_allclose((gradient * way).sum(), want, rtol=2e-4, atol=1e-6)


def test_gradient_of_other_dtypes(xp):
    """Computed in float64, rounded once."""
    image, dout = np.random.default_rng(1).standard_normal((2, 20, 9))
    for dtype in (HALF, BFLOAT16, SINGLE):
        given = dout.astype(dtype), image.astype(dtype)
        want = non_local_means_backward(*(x.astype(DOUBLE) for x in given), 0.8, 3, 4)
        got = non_local_means_backward(*map(xp.asarray, given), 0.8, 3, 4)
        assert got.dtype == dtype
        gap = abs(to_numpy(got).astype(DOUBLE) - want)
        assert (gap <= UNIT[dtype] * abs(want) + 1e-7).all()


def test_gradient_wants_the_images_shape():
    with pytest.raises(ValueError, match=r"^non_local_means_backward: dout has shape \(3, 4\), w"):
        non_local_means_backward(np.ones((3, 4)), np.ones((4, 3)), 1.0)
