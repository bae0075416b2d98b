"""Graphs compute nothing while they are made, and need little memory when they run."""

import tracemalloc

import numpy as np
import pytest

dask = pytest.importorskip("dask")
zarr = pytest.importorskip("zarr")

import dask.array as da  # noqa: E402
from dask.blockwise import optimize_blockwise  # noqa: E402

from fa_cupy import attention, causal_product, linear_attention  # noqa: E402
from fa_cupy import dask as on_dask  # noqa: E402
from fa_cupy.dask.reading import is_read  # noqa: E402
from tests.support.every_run import only  # noqa: E402

FUNCTIONS = {
    "attention": (on_dask.attention, attention),
    "causal_product": (on_dask.causal_product, causal_product),
    "linear_attention": (on_dask.linear_attention, linear_attention),
    "linear_attention of all keys": (
        lambda *x: on_dask.linear_attention(*x, is_causal=False),
        lambda *x: linear_attention(*x, is_causal=False),
    ),
}


class Rows:
    """Rows of numbers that are made where they are asked for, and a list of what was."""

    ndim, dtype = 2, np.dtype(np.float32)

    def __init__(self, *shape):
        self.shape, self.asked = shape, []

    def __getitem__(self, index):
        rows, cols = index
        self.asked.append((rows.start, rows.stop))
        size = (rows.stop - rows.start, cols.stop - cols.start)
        return np.full(size, rows.start, self.dtype)


def test_more_than_memory():
    """52 GB: chunks are made for the rows that are wanted, when they are wanted."""
    stores = [Rows(2**24, 256) for _ in range(3)]
    q, k, v = (
        da.from_array(x, chunks=(4096, 256), meta=np.empty((0, 0), np.float32)) for x in stores
    )
    out = on_dask.attention(q, k, v, window=(4095, 0))
    assert out.shape == (2**24, 256)
    assert not any(x.asked for x in stores)
    found = out[10_000:10_003, :2].compute()
    np.testing.assert_array_equal(found, 8192)  # with scores so large, one key gets all
    assert stores[0].asked == [(8192, 12288)]
    assert sorted(stores[1].asked) == sorted(stores[2].asked) == [(4096, 8192), (8192, 12288)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_making_a_graph_computes_nothing(name):
    def never(block):
        raise AssertionError("computed")

    x = da.zeros((40, 4), chunks=(10, 2)).map_blocks(never, meta=np.empty((0, 0)))
    function, _ = FUNCTIONS[name]
    out = function(x, x, x)
    parts = on_dask.merge_attention([out, out], [out[:, 0], out[:, 0]])
    assert out.shape == parts[0].shape == (40, 4)
    with pytest.raises(AssertionError, match="computed"):
        out.compute(scheduler="sync")


@pytest.mark.parametrize("name", only(FUNCTIONS, "attention", "causal_product"))
def test_few_chunks_are_in_memory(name, tmp_path):
    """Of arrays of 38 MB on disk, in chunks of 0.26 MB, never more than some."""
    rows, chunk, dims = 100_000, 2_000, 32
    store = zarr.create_array(
        tmp_path / "x.zarr", shape=(3, rows, dims), chunks=(1, chunk, dims), dtype="f4"
    )
    store[...] = np.random.default_rng(0).standard_normal((3, rows, dims), dtype=np.float32)
    q, k, v = da.from_zarr(store)
    if name == "attention":
        q = q[:60].rechunk((20, 32))
    function, in_memory = FUNCTIONS[name]
    out = function(q, k, v)
    results = np.memmap(tmp_path / "out.dat", np.float32, mode="w+", shape=out.shape)
    tracemalloc.start()
    try:
        da.store(out, results, lock=False, scheduler="threads", num_workers=2)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 9e6, peak
    want = in_memory(*(np.asarray(x) for x in (q, k, v)))
    assert np.abs(results - want).max() <= 1e-4 * np.abs(want).max()


def made(function, argument):
    """Return an array in 4 chunks of 5 rows that a function makes, and a list of their starts."""
    calls = []

    def chunk(block_id=None, block_info=None):
        start = 5 * block_id[0] if block_id else block_info[None]["array-location"][0][0]
        calls.append(start)
        return function(start)

    named = {
        "block_id": lambda block_id=None: chunk(block_id=block_id),
        "block_info": lambda block_info=None: chunk(block_info=block_info),
    }
    x = da.map_blocks(named[argument], chunks=((5,) * 4, (8,)), meta=np.empty((0, 0)))
    return x, calls


@pytest.mark.parametrize("argument", ["block_id", "block_info"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_makes_each_chunk_once(name, argument):
    """Not once for each task that uses it: the function may be slow."""
    x, calls = made(lambda start: np.sin(np.arange(40.0) + start).reshape(5, 8), argument)
    on_dasks, in_memory = FUNCTIONS[name]
    out = on_dasks(x, x, x).compute(scheduler="threads")
    assert sorted(calls) == [0, 5, 10, 15]
    want = np.asarray(x)
    np.testing.assert_allclose(out, in_memory(want, want, want), atol=1e-12)


@pytest.mark.parametrize("argument", ["block_id", "block_info"])
def test_random_chunks_are_the_same_for_all_tasks(argument):
    """Equal queries in different chunks find the same keys and values."""
    rng = np.random.default_rng()
    k, _ = made(lambda _: rng.standard_normal((5, 8)), argument)
    v, _ = made(lambda _: rng.standard_normal((5, 8)), argument)
    q = da.ones((20, 8), chunks=5)
    for function in (on_dask.attention, FUNCTIONS["linear_attention of all keys"][0]):
        out = function(q, k, v).compute(scheduler="sync")
        np.testing.assert_allclose(out, np.broadcast_to(out[0], out.shape), atol=1e-12)
    q, k, v, out = dask.compute(q, k, v, on_dask.causal_product(q, k, v), scheduler="sync")
    np.testing.assert_allclose(out, causal_product(q, k, v), atol=1e-12)


@pytest.mark.parametrize("inline_array", [False, True])
@pytest.mark.parametrize("lock", [False, True])
def test_a_store_is_read_by_each_task(inline_array, lock):
    """So that no chunk waits in memory: 4 chunks of keys for each of 4 chunks of queries."""
    store = Rows(20, 8)
    meta = np.empty((0, 0), np.float32)
    x = da.from_array(store, chunks=(5, 8), lock=lock, inline_array=inline_array, meta=meta)
    assert is_read(x)
    q = da.ones((20, 8), chunks=5, dtype=np.float32)
    out = on_dask.attention(q, x, x).compute(scheduler="sync")
    np.testing.assert_allclose(out, 15, rtol=1e-5)
    assert len(store.asked) >= 16
    assert not is_read(x.map_blocks(np.sin))
    assert not is_read(x.map_blocks(lambda x, block_id=None: x, name="astype-1", meta=x._meta))


def test_what_counts_as_read(tmp_path):
    store = zarr.create_array(tmp_path / "x.zarr", shape=(20, 8), chunks=(5, 8), dtype="f4")
    x = da.from_zarr(store)
    mapped = np.memmap(tmp_path / "x.dat", np.float32, mode="w+", shape=(20, 8))
    for read in (x, x.rechunk((3, 8)), x.T, x[5:].astype(float)[:, None], x.swapaxes(0, 1)):
        assert is_read(read)
    computed = x + 1, x @ x.T, x.persist(), da.random.random((20, 8), chunks=5)
    in_memory = da.from_array(np.ones((20, 8)), chunks=5), da.from_array(mapped, chunks=5)
    chunks = (5,) * 4, (8,)
    made_up = (
        da.ones((20, 8), chunks=5),
        da.map_blocks(lambda block_id: np.ones((5, 8)), chunks=chunks, dtype=float),
        da.map_blocks(lambda block_info: np.ones((5, 8)), chunks=chunks, dtype=float),
        da.map_blocks(lambda: np.ones((5, 8)), chunks=chunks, dtype=float),
    )
    stored = da.store([x + 1, x + 2], [store, store], compute=False, return_stored=True)
    for other in (*computed, *in_memory, *made_up, *stored):
        assert not is_read(other)


@pytest.mark.parametrize("inline_array", [False, True])
def test_fused_layers_do_not_count_as_read(inline_array):
    """Dask's optimization makes one layer that reads and computes."""
    x = da.from_array(Rows(20, 8), (5, 8), inline_array=inline_array, meta=np.empty((0, 0), "f4"))
    y = x.map_blocks(np.sin)
    graph = optimize_blockwise(y.__dask_graph__(), keys=[(y.name, i, 0) for i in range(4)])
    assert x.name not in graph.layers
    assert not is_read(da.Array(graph, y.name, y.chunks, meta=y._meta))
