"""Attention of Dask arrays against float64, over shapes, chunks and options."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

dask = pytest.importorskip("dask")

import dask.array as da  # noqa: E402

from fa_cupy import BitMask, attention  # noqa: E402
from fa_cupy import dask as on_dask  # noqa: E402
from fa_cupy.dask import tasks  # noqa: E402
from tests.dask.chunked import chunked, chunks, computed  # noqa: E402
from tests.support.every_run import examples  # noqa: E402
from tests.support.strategies import DTYPES, UNIT, by_dtype, cases, check_against_reference  # noqa: E402

rng = np.random.default_rng(0)


@examples(60)
@given(data=st.data(), case=cases(max_batch=6))
def test_any_chunks(data, case):
    arrays = [data.draw(chunked(x)) for x in case.arrays]
    if data.draw(st.booleans()) and case.mask is not None:
        scores = np.broadcast_shapes(case.mask.shape, (case.q.shape[-2], case.k.shape[-2]))
        arrays[4] = BitMask.from_dense(np.broadcast_to(case.mask, scores))
    options = dict(case.options)
    if options.get("sinks") is not None:
        options["sinks"] = data.draw(chunked(options["sinks"]))
    out, lse = on_dask.attention(*arrays, return_lse=True, **options)
    check_against_reference(case, *computed(out, lse))


@pytest.mark.parametrize(**by_dtype())
def test_output_is_rounded_once(dtype):
    """Many chunks of keys cost no digit that one chunk does not cost."""
    q, k, v = (rng.standard_normal((n, 16)).astype(dtype) for n in (9, 99, 99))
    parts = [da.from_array(x, chunks=(9, 16)) for x in (q, k, v)]
    out, lse = computed(*on_dask.attention(*parts, return_lse=True))
    want, want_lse = attention(*(x.astype(float) for x in (q, k, v)), return_lse=True)
    noise = 1e-14 if dtype == np.float64 else 1e-6
    assert (np.abs(out.astype(float) - want) <= 1.01 * UNIT[dtype] * np.abs(want) + noise).all()
    assert np.abs(lse - want_lse).max() <= (1e-13 if dtype == np.float64 else 2e-6)


def test_every_band_of_a_tile_is_a_window():
    sizes, bounds = range(1, 6), [None, *range(-6, 7)]
    for rows, keys, lower, upper in itertools.product(sizes, sizes, bounds, bounds):
        if None not in (lower, upper) and lower > upper:
            continue
        i, j = np.ogrid[:rows, :keys]
        want = np.ones((rows, keys), bool)
        want &= True if lower is None else j - i >= lower
        want &= True if upper is None else j - i <= upper
        found = tasks.visible(rows, keys, lower, upper)
        assert (found is None) == (not want.any())
        if found is not None:
            left, right = found.window or (None, None)
            assert (left or 0) >= 0 <= (right or 0)  # as windows of `attention` must be
            got = np.zeros_like(want)
            part = got[found.rows, found.keys]
            i, j = np.ogrid[: part.shape[0], : part.shape[1]]
            part[...] = True if left is None else j >= i - left
            part &= True if right is None else j <= i + right
            np.testing.assert_array_equal(got, want)


def tiles_of(out, name="attention-tile"):
    """Places of the tiles that a graph computes."""
    return sorted(key[-2:] for key in dict(out.dask) if key[0].startswith(name))


def test_hidden_tiles_are_never_made():
    x = da.zeros((60, 4), chunks=(10, 4))
    causal = on_dask.attention(x, x, x, is_causal=True)
    assert tiles_of(causal) == [(i, j) for i in range(6) for j in range(i + 1)]
    window = on_dask.attention(x, x, x, window=(10, 0))
    assert tiles_of(window) == [(i, j) for i in range(6) for j in (i - 1, i) if j >= 0]
    ends = on_dask.attention(x[:20], x, x, is_causal=True, causal_align="bottom_right")
    assert tiles_of(ends) == [(0, j) for j in range(5)] + [(1, j) for j in range(6)]
    mask = BitMask.from_blocks(np.eye(2, dtype=bool), 256, 256)
    y = da.zeros((256, 4), chunks=(64, 4))
    half = on_dask.attention(y, y, y, mask=mask)
    assert tiles_of(half) == [(i, j) for i in range(4) for j in range(4) if i // 2 == j // 2]


def test_merges_are_a_tree():
    x = da.zeros((100, 4), chunks=(1, 4))
    out = on_dask.attention(x[:1], x, x)
    graph = out.dask.to_dict()
    depth = {}

    def height(key):
        if key not in depth:
            needs = dask.core.get_dependencies(graph, key)
            depth[key] = 1 + max(map(height, needs), default=0)
        return depth[key]

    assert len(tiles_of(out)) == 100
    assert height(out.__dask_keys__()[0][0]) < 12


def test_heads_share_keys_however_they_are_chunked():
    q, k, v = (rng.standard_normal((2, heads, 11, 4)) for heads in (12, 6, 2))
    want = attention(q, k, v)
    for of_q, of_k, of_v in (((5, 7), 1, 2), (1, (2, 4), 1), ((3, 9), (6,), (2,))):
        arrays = [
            da.from_array(x, chunks=(1, heads, 5, 4))
            for x, heads in ((q, of_q), (k, of_k), (v, of_v))
        ]
        out = on_dask.attention(*arrays)
        np.testing.assert_allclose(computed(out)[0], want, atol=1e-13)
    assert out.chunks[1] == (2, 1, 1, 2, 6)  # head 3 is one of a pair, and both of a group of 6


def test_sinks_that_float32_cannot_hold():
    """They are rounded without a word, whatever the caller has NumPy do about that."""
    q, k, v = (da.from_array(x, chunks=3) for x in np.ones((3, 1, 5, 4), np.float32))
    with np.errstate(all="raise"):
        for sink in (1e-300, -1e300):
            out = on_dask.attention(q, k, v, sinks=np.full((1, 1), sink))
            want = attention(*np.ones((3, 1, 5, 4), np.float32), sinks=np.full((1, 1), sink))
            np.testing.assert_allclose(out.compute(scheduler="synchronous"), want, rtol=1e-6)


@pytest.mark.parametrize(**by_dtype(*DTYPES[2:]))
def test_sinks_count_once_and_alone(dtype):
    q, k, v = (rng.standard_normal((2, n, 4)).astype(dtype) for n in (9, 6, 6))
    sinks = rng.standard_normal((2, 1))
    options = {"is_causal": True, "causal_align": "bottom_right", "return_lse": True}
    want = attention(q, k, v, sinks=sinks, **options)  # the first queries see no key
    x, y, z = (da.from_array(a, chunks=(1, 2, 4)) for a in (q, k, v))
    got = on_dask.attention(x, y, z, sinks=da.from_array(sinks, chunks=1), **options)
    for a, b in zip(computed(*got), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 if dtype == np.float32 else 1e-13)


@examples(20)
@given(data=st.data())
def test_bits_are_those_of_the_last_run(data):
    q, k, v = rng.standard_normal((3, 40, 8), dtype=np.float32)
    rows, keys = data.draw(chunks(40)), data.draw(chunks(40))
    x, y, z = (
        da.from_array(a, chunks=(sizes, 8)) for a, sizes in ((q, rows), (k, keys), (v, keys))
    )
    out = on_dask.attention(x, y, z, is_causal=True)
    bits = {out.compute(scheduler=how).tobytes() for how in ("synchronous", *["threads"] * 3)}
    assert len(bits) == 1
