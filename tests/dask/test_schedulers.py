"""Threads, processes and a cluster give the same bits as one thread."""

import numpy as np
import pytest

dask = pytest.importorskip("dask")
distributed = pytest.importorskip("distributed")
zarr = pytest.importorskip("zarr")

import dask.array as da  # noqa: E402

from fa_cupy import BitMask, attention  # noqa: E402
from fa_cupy import dask as on_dask  # noqa: E402
from tests.dask.test_products import squares  # noqa: E402


@pytest.fixture
def results(tmp_path):
    """Results of every function, of arrays in a store that processes open by themselves."""
    x = np.random.default_rng(0).standard_normal((3, 2, 300, 8), dtype=np.float32)
    zarr.save(str(tmp_path / "x.zarr"), x)
    q, k, v = da.from_zarr(str(tmp_path / "x.zarr")).rechunk((1, 1, 100, 8))
    mask = BitMask.from_dense(np.random.default_rng(1).random((300, 300)) < 0.5)
    sinks = da.zeros((2, 1), chunks=1)
    out, lse = on_dask.attention(
        q, k + 1, v, mask=mask, window=(100, 50), sinks=sinks, return_lse=True
    )
    made = [
        out,
        lse,
        *on_dask.attention(q, k, v, is_causal=True, return_lse=True),
        *on_dask.causal_product(q, k, v, return_state=True),
        on_dask.linear_attention(q, k, v, feature_map=squares),
        on_dask.linear_attention(q, k, v, feature_map=squares, is_causal=False),
        *on_dask.merge_attention([out, out], [lse, lse]),
    ]
    want = dask.compute(*made, scheduler="sync")
    np.testing.assert_allclose(want[2], attention(*x, is_causal=True), atol=1e-5)
    return made, [x.tobytes() for x in want]


def test_threads(results):
    made, want = results
    found = dask.compute(*made, scheduler="threads", num_workers=4)
    assert [x.tobytes() for x in found] == want


@pytest.mark.long
def test_processes(results):
    made, want = results
    found = dask.compute(*made, scheduler="processes", num_workers=2)
    assert [x.tobytes() for x in found] == want


def test_cluster(results):
    made, want = results
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs=50
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        found = client.gather(client.compute(made))
        assert [x.tobytes() for x in found] == want
        ran = client.run(lambda dask_worker: len(dask_worker.state.tasks) > 0)
        assert len(ran) == 2
