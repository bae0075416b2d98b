"""Scores of any size in the forward kernels, on a GPU."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import attention
from tests.support import large_scores
from tests.support.large_scores import LARGEST, TRANSFORMS
from tests.support.strategies import BFLOAT16, Case, by_dtype

pytest.importorskip("cupy")
import cupy as cp

from fa_cupy.gpu.driver.devices import current_target

HALF = np.dtype(np.float16)
# Tensor cores truncate their sums where plain arithmetic rounds them.
TIMES = 16
# Rows that are not multiples of 16 bytes go to the kernel for SM80.
DIMS = [(64, 64), (96, 96), (128, 128), (192, 192), (256, 256)]
DIMS += [(30, 31), (61, 64), (125, 122), (187, 180), (251, 256)]
by_dims = pytest.mark.parametrize("dims", DIMS, ids=str)
by_16_bits = pytest.mark.parametrize(**by_dtype(HALF, BFLOAT16))


@pytest.fixture(autouse=True)
def kernels_run(cupy):
    """Only where there are kernels."""
    if current_target() is None:
        pytest.skip("the kernels do not run on this device")


def run(call):
    *arrays, options = call
    native = Case(*arrays, options=options).native(cp)
    out, lse = attention(*native, return_lse=True, **options)
    return cp.asnumpy(out), cp.asnumpy(lse)


@by_16_bits
@by_dims
@given(
    how=st.sampled_from((None, None, *TRANSFORMS)),
    masked=st.booleans(),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2)]),
    lengths=st.tuples(st.integers(1, 300), st.integers(3, 500)),
    seed=st.integers(0, 2**32),
)
def test_whole_scores(dims, dtype, how, masked, heads, lengths, seed):
    call = large_scores.whole_scores(seed, dtype, dims, how, masked, *lengths, heads)
    large_scores.hold(call, *run(call))


@by_16_bits
@by_dims
@pytest.mark.parametrize("size", [3e3, 1e5, 3e6, 1e8, 1e9])
def test_random_scores_are_as_good_as_plain_ones(dims, dtype, size):
    call = large_scores.random_scores(1, dtype, dims, size, 300, 700)
    large_scores.hold_as_plain(call, run(call)[0], TIMES)


@by_16_bits
@by_dims
@pytest.mark.parametrize("size", [5000, 25000, 60000])
def test_one_key(dims, dtype, size):
    for call in large_scores.one_key(dtype, dims, size):
        large_scores.hold(call, *run(call))


@by_16_bits
@by_dims
def test_far_keys_before_near_ones(dims, dtype):
    call = large_scores.rising_scores(dtype, dims)
    large_scores.hold(call, *run(call))


@by_16_bits
@by_dims
def test_rows_that_are_not_finite_beside_large_scores(dims, dtype):
    """A weight made of another sum of the same products would be off by whole powers of two."""
    call = large_scores.spoiled_scores(dtype, dims, 1e8)
    large_scores.hold_as_plain(call, run(call)[0], TIMES)
    near = large_scores.spoiled_scores(dtype, dims, 10)
    large_scores.hold(near, *run(near))


@by_dims
@pytest.mark.parametrize("size", [3e18, 1e20, 1e30])
def test_products_beyond_float32(dims, size):
    for call in large_scores.beyond_float32(dims, size):
        large_scores.hold(call, *run(call))


@by_16_bits
@by_dims
@pytest.mark.parametrize("size", [-1e4, -65504, -1e8, -1e9, -1e12, -LARGEST, LARGEST, 1e9])
def test_the_same_bias_for_every_key(dims, dtype, size):
    """Scores that are equal beside it get equal weights, as plain arithmetic gives them."""
    for call in large_scores.same_bias(dtype, dims, size):
        out, lse = run(call)
        large_scores.hold_as_plain(call, out, TIMES)
        np.testing.assert_allclose(lse, call.bias[:, 0], rtol=1e-6, atol=6)
