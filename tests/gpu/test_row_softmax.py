"""One step of an online softmax on a tile, and the products that it stands between, on a GPU."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cupy")
import cupy as cp

from fa_cupy.gpu.cublas.row_softmax import row_softmax
from tests.support import cublas_on_numpy

SPECIAL = [np.nan, np.inf, -np.inf]
# Relative, in float32 and float64: exponents of up to -100 are rounded, and sums of thousands.
LIMITS = {"f": 4e-5, "d": 1e-13}


@pytest.mark.parametrize("code", LIMITS)
@given(
    shape=st.tuples(
        st.integers(1, 3), st.integers(1, 5), st.sampled_from([0, 1, 31, 33, 700, 5001])
    ),
    started=st.booleans(),
    special=st.lists(st.sampled_from(SPECIAL), max_size=3),
    hidden=st.booleans(),
    cut=st.integers(0, 2),
    seed=st.integers(0, 2**32),
)
def test_against_numpy(cupy, code, shape, started, special, hidden, cut, seed):
    rng = np.random.default_rng(seed)
    n, m, _ = shape
    scores = rng.standard_normal(shape) * 10
    for value in special:
        scores[rng.random(shape) < 1 / (1 + scores.size)] = value
    if hidden:
        scores[rng.random((n, m)) < 0.5] = -np.inf
    # The state is a part of that of more rows; what is not started has anything in memory.
    top = np.full((n, m + cut, 1), np.nan)
    total = np.full((n, m + cut, 1), np.nan)
    if started:
        top[...] = rng.choice([-np.inf, 0.0, 30.0], top.shape)
        total[...] = np.where(top == -np.inf, 0, rng.uniform(1, 9, top.shape))
    given_arrays = [x.astype(code) for x in (scores, top, total, np.zeros((n, m, 1)))]
    wanted = [x.astype("d") for x in given_arrays]
    found = [cp.asarray(x) for x in given_arrays]
    for call, (tile, tops, sums, decay) in (
        (cublas_on_numpy.row_softmax, wanted), (row_softmax, found)
    ):  # fmt: skip
        with np.errstate(all="ignore"):
            call(tile, tops[:, cut:], sums[:, cut:], decay, started)
    for name, got, want in zip(("weights", "top", "total", "decay"), found, wanted, strict=True):
        np.testing.assert_allclose(
            cp.asnumpy(got), want, rtol=LIMITS[code], atol=1e-30, err_msg=name
        )


def test_same_bits_each_time(cupy):
    scores = cp.random.default_rng(0).standard_normal((3, 1000, 4096), dtype=np.float32)
    results = []
    for _ in range(3):
        tile = scores.copy()
        state = [cp.zeros((3, 1000, 1), np.float32) for _ in range(3)]
        row_softmax(tile, *state, True)
        results.append(b"".join(x.tobytes() for x in (tile, *state)))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("override", ["1", "0"])
def test_products_have_float32_precision_whatever_the_environment_says(cupy, override, monkeypatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", override)
    program = """
import cupy as cp, numpy as np, fa_cupy
q, k, v = cp.random.default_rng(1).standard_normal((3, 2, 700, 320), dtype=np.float32)
out = fa_cupy.attention(q, k, v)
exact = fa_cupy.attention(*(cp.asnumpy(x).astype("d") for x in (q, k, v)))
print(float(np.linalg.norm(cp.asnumpy(out) - exact) / np.linalg.norm(exact)))
"""
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 1e-5
