"""Kernel regression and non-local means in the kernels of attention, in the emulator."""

import numpy as np
import pytest

from fa_cupy import Score
from fa_cupy.gpu.kernels import forward
from fa_cupy.gpu.kernels.score import MAX_COMPILE_COST, MAX_SCORE_ARRAYS, ScoreMod
from fa_cupy.smoothing import kernels
from tests.support.every_run import only
from tests.support.kernel_attention import check

HALF = np.float16


def row_for(score, head_dim, v_dim, masked=False):
    call = forward.Call(ScoreMod(program=score.program), mapped=False, masked=masked)
    return forward.select("float16", head_dim, v_dim, "sm_80", call)


@pytest.mark.parametrize("kernel", kernels.KERNELS)
@pytest.mark.parametrize("dims", [1, kernels.MOST_DIMS])
def test_kernels_take_the_scores(kernel, dims):
    """With a bandwidth for each dim and entry; otherwise values of 16 bits would not run there."""
    x, X = np.zeros((2, 3, 5, dims)), np.zeros((7, dims))
    score = kernels.by_differences(np, kernel, (2, 3), x, X, np.ones((2, 1, dims)))
    assert score.program.compile_cost <= MAX_COMPILE_COST
    assert len(score.operands) <= MAX_SCORE_ARRAYS


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("kernel", "dims"),
    only([(k, d) for k in kernels.KERNELS for d in (1, 3)], ("epanechnikov", 3)),
)
def test_regression(kernel, dims):
    """Queries and keys have no elements."""
    rng = np.random.default_rng(0)
    x, X = (rng.uniform(-1, 1, (n, dims)).astype(np.float32) + 100 for n in (70, 150))
    score = kernels.by_differences(np, kernel, (1, 2), x, X, rng.uniform(1, 2, (2, dims)))
    q, k, y = np.empty((1, 2, 70, 0), HALF), np.empty((1, 2, 150, 0), HALF), rng.random((150, 3))
    y = np.broadcast_to(y.astype(HALF), (1, 2, 150, 3))
    check(row_for(score, 0, 3), q, k, y, score=score, scale=1.0)


@pytest.mark.emulator
def test_means_of_patches():
    """Norms that are infinite hide what lies outside of an image."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 2, 64, 27)).astype(HALF)
    v = rng.random((1, 2, 64, 3)).astype(HALF)
    a, c = (np.square(x[0].astype(np.float32)).sum(axis=-1) for x in (q, k))
    c[1, 40:] = np.inf
    score = Score("min(s-a[h,i]-c[h,j],0)", a=a, c=c)
    mask = rng.random((64, 64)) < 0.5
    check(row_for(score, 27, 3, masked=True), q, k, v, mask=mask, score=score, scale=2.0)
