"""Dask arrays with chunks of CuPy."""

import numpy as np
import pytest

dask = pytest.importorskip("dask")

import dask.array as da  # noqa: E402

import fa_cupy  # noqa: E402
from fa_cupy import dask as on_dask  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_chunks_stay_on_the_device(cupy, dtype):
    x = np.random.default_rng(0).standard_normal((3, 4, 200, 32)).astype(dtype)
    q, k, v = (da.from_array(cupy.asarray(part), chunks=(2, 70, 32), asarray=False) for part in x)
    pairs = (
        (on_dask.attention(q, k, v, is_causal=True), fa_cupy.attention(*x, is_causal=True)),
        (on_dask.attention(q, k[:, :9], v[:, :9], sinks=cupy.zeros((4, 1))),
         fa_cupy.attention(x[0], *x[1:, :, :9], sinks=np.zeros((4, 1)))),
        (on_dask.causal_product(q, k, v), fa_cupy.causal_product(*x)),
        (on_dask.linear_attention(q, k, v, is_causal=False),
         fa_cupy.linear_attention(*x, is_causal=False)),
    )  # fmt: skip
    for out, want in pairs:
        assert isinstance(out._meta, cupy.ndarray)
        found = out.compute()
        assert isinstance(found, cupy.ndarray)
        limit = 4e-3 if dtype == np.float16 else 1e-5
        error = np.abs(found.get().astype(float) - want).max()
        assert error <= limit * np.abs(want).astype(float).max()
    with pytest.raises(TypeError, match="k has chunks of numpy, q has chunks of cupy"):
        on_dask.attention(q, x[1], v)
