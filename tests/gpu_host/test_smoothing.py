"""Kernel regression and non-local means on arrays that behave as CuPy's do, without a GPU.

Attention itself is NumPy's there: what is tested is all around it.
"""

import contextlib

import numpy as np
import pytest

import fa_cupy
from fa_cupy import kernel_regression, kernel_regression_backward, non_local_means
from fa_cupy._score import Score
from fa_cupy.smoothing import estimate, gradients, patches
from tests.support import cupy_stand_in
from tests.support.cupy_stand_in import CAPTURE, bare, ndarray, owned


def of_numpy(function):
    """A function of NumPy arrays on those of the stand-in, those of a score included."""

    def call(*args, score, **options):
        if score is not None:
            score = Score(score.expression, **{a: bare(x) for a, x in score._arguments.items()})
        options = {name: bare(x) for name, x in options.items()}
        return tuple(map(owned, function(*map(bare, args), score=score, **options)))

    return call


def one_of(function):
    return lambda *args, **options: function(*args, **options)[0]


def strided(x, shape, strides):
    return ndarray._of(np.lib.stride_tricks.as_strided(bare(x), shape, strides))


@contextlib.contextmanager
def in_place_of_attention():
    """Have the functions run on the stand-in, with attention in NumPy."""
    with cupy_stand_in.on_a_device() as cupy, pytest.MonkeyPatch.context() as patch:
        for name in (
            "broadcast_to", "isinf", "median", "pad", "sort", "stack", "take_along_axis", "unique",
        ):  # fmt: skip
            patch.setattr(cupy, name, cupy_stand_in._function(name), raising=False)
        patch.setattr(cupy.lib.stride_tricks, "as_strided", strided)
        for name in ("__abs__", "__invert__"):
            method = getattr(np.ndarray, name)
            of = lambda self, method=method: owned(method(np.asarray(self._array)))  # noqa: E731
            patch.setattr(ndarray, name, of, raising=False)
        patch.setattr(ndarray, "__float__", lambda self: float(self._array), raising=False)
        patch.setattr(ndarray, "__pow__", lambda self, n: owned(self._array**n), raising=False)
        attention = of_numpy(fa_cupy.attention)
        backward = of_numpy(fa_cupy.attention_backward)
        patch.setattr(estimate, "attention", attention)
        patch.setattr(gradients, "attention_backward", backward)
        patch.setattr(patches, "attention", one_of(of_numpy(in_a_tuple)))
        yield cupy


def in_a_tuple(*args, **options):
    return (fa_cupy.attention(*args, **options),)


def check(function, *args, **options):
    """Hold results on the stand-in against those of NumPy."""
    want = function(*args, **options)
    with in_place_of_attention():

        def sent(x):
            return owned(x) if isinstance(x, np.ndarray) else x

        found = function(*map(sent, args), **{name: sent(x) for name, x in options.items()})
        found, want = (x if isinstance(x, tuple) else (x,) for x in (found, want))
        for x, y in zip(found, want, strict=True):
            assert isinstance(x, ndarray)
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            np.testing.assert_allclose(bare(x).astype(float), y.astype(float), rtol=1e-6, atol=1e-6)


RNG = np.random.default_rng(0)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("dims", [2, 9])
def test_regression(dtype, dims):
    x, X = (RNG.uniform(-1, 1, (n, dims)).astype(dtype) for n in (20, 40))
    x[3] = 30.0  # which is computed again
    y, mask = RNG.random((3, 40, 2)).astype(dtype), RNG.random((20, 40)) < 0.6
    width = RNG.uniform(0.3, 0.6, (3, dims)).astype(dtype)
    check(kernel_regression, x, X, y, 0.5, "matern32")
    check(kernel_regression, x, X, y, width, mask=mask)
    dout = RNG.random((3, 20, 2)).astype(dtype)
    check(kernel_regression_backward, dout, x, X, y, width, mask=mask)
    check(kernel_regression_backward, dout[0], x, X, y[0], 0.5)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("distance", [2, None])
def test_means(dtype, distance):
    image = RNG.random((37, 9, 3)).astype(dtype)
    check(non_local_means, image, 0.3, 3, distance, sigma=0.1)


@pytest.mark.parametrize("dims", [2, 9])
def test_infinite_coordinates(dims):
    x, X = (RNG.uniform(-1, 1, (n, dims)).astype(np.float32) for n in (20, 40))
    x[3, 0], X[5, 1] = np.inf, -np.inf
    y = RNG.random(40, np.float32)
    for kernel in ("gaussian", "laplace"):
        check(kernel_regression, x, X, y, 0.5, kernel)
        check(kernel_regression_backward, np.ones(20, np.float32), x, X, y, 0.5, kernel)


def test_infinite_pixels():
    image = RNG.random((20, 9, 3)).astype(np.float16)
    image[4, 5, 0] = np.inf
    check(non_local_means, image, 0.3, 3, 2)


def test_values_of_16_bits_run_in_a_kernel():
    """With their scores, whose coordinates are of float32."""
    with in_place_of_attention() as cupy, pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimate, "attention", fa_cupy.attention)
        x, y = owned(RNG.random((300, 2), np.float32)), owned(RNG.random(300).astype(np.float16))
        patch.setattr(cupy, "flatnonzero", lambda bad: owned(np.zeros(0, int)))
        CAPTURE.log.clear()
        found = kernel_regression(x, x, y, 0.1)
        assert (found.shape, found.dtype) == ((300,), np.float16)
        launches = [name for kind, name, _ in CAPTURE.log if kind == "launch"]
        assert launches in (["attention_fwd_sm80"], ["attention_fwd_sm90"])


def test_captures_are_refused_before_anything_is_launched():
    calls = [
        lambda x: kernel_regression(x, x, x, 0.1),
        lambda x: kernel_regression_backward(x, x, x, x, 0.1),
        lambda x: non_local_means(x, 0.1),
    ]
    with in_place_of_attention():
        x = owned(np.ones((4, 4), np.float32))
        for call in calls:
            with CAPTURE.record(), pytest.raises(NotImplementedError, match="cannot be captured"):
                call(x)
            assert not CAPTURE.log


@pytest.mark.parametrize("distance", [2, None])
def test_patches_of_16_bits_run_in_the_kernel_for_hopper(distance):
    with in_place_of_attention(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(patches, "attention", fa_cupy.attention)
        CAPTURE.log.clear()
        non_local_means(owned(RNG.random((40, 40, 3)).astype(np.float16)), 0.3, 5, distance)
        launches = {name for kind, name, _ in CAPTURE.log if "attention" in name}
        assert launches == {"attention_fwd_sm90"}
