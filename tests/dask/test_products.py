"""Causal products and linear attention of Dask arrays, over shapes, chunks and options."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

dask = pytest.importorskip("dask")

import dask.array as da  # noqa: E402

from fa_cupy import causal_product, linear_attention  # noqa: E402
from fa_cupy import dask as on_dask  # noqa: E402
from tests.dask.chunked import chunked, computed  # noqa: E402
from tests.support.every_run import examples  # noqa: E402
from tests.support.products import cases, check_product  # noqa: E402
from tests.support.strategies import DTYPES, by_dtype  # noqa: E402

rng = np.random.default_rng(0)


@examples(60)
@given(data=st.data(), case=cases())
def test_any_chunks(data, case):
    q, k, v, initial = (data.draw(chunked(x)) for x in case.arrays)
    out, state = on_dask.causal_product(
        q, k, v, initial_state=initial, return_state=True, reverse=case.reverse
    )
    check_product(case, *computed(out, state))


def squares(x):
    """A feature map with more features than dims."""
    return np.concatenate([x * x, x * x + x.dtype.type(1)], axis=-1)


@examples(40)
@given(data=st.data(), case=cases(dtypes=DTYPES[3:]))
def test_linear_attention_of_any_chunks(data, case):
    arrays = [np.nan_to_num(x, posinf=1, neginf=1) for x in case.arrays[:3]]
    causal = data.draw(st.booleans())
    options = {
        "is_causal": causal,
        "feature_map": data.draw(st.sampled_from(["elu1", "relu", "exp", squares])),
        "eps": data.draw(st.sampled_from([1e-6, 0.5])),
    }
    if not causal:
        arrays[0] = arrays[0][..., : data.draw(st.integers(0, arrays[0].shape[-2])), :]
    if case.initial is not None:
        features = arrays[1].shape[-1] * (1 + callable(options["feature_map"]))
        shape = (*case.initial.shape[:-2], features, arrays[2].shape[-1] + 1)
        options["initial_state"] = initial = np.abs(rng.standard_normal(shape))
    want = linear_attention(*arrays, return_state=True, **options)
    if case.initial is not None:
        options["initial_state"] = data.draw(chunked(initial))
    arrays = [data.draw(chunked(x)) for x in arrays]
    got = on_dask.linear_attention(*arrays, return_state=True, **options)
    for a, b in zip(computed(*got), want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9 * np.abs(b).max(initial=1))


@pytest.mark.parametrize(**by_dtype(*DTYPES[:3]))
@pytest.mark.parametrize("causal", [True, False])
def test_states_are_carried_in_float32(dtype, causal):
    """Many chunks cost no digit that one chunk does not cost."""
    q, k, v = (rng.standard_normal((300, 16)).astype(dtype) for _ in range(3))
    want = linear_attention(*(x.astype(float) for x in (q, k, v)), is_causal=causal)
    chunks = [da.from_array(x, chunks=(9, 16)) for x in (q, k, v)]
    (out,) = computed(on_dask.linear_attention(*chunks, is_causal=causal))
    one = linear_attention(q, k, v, is_causal=causal)
    error, usual = (np.abs(x.astype(float) - want).max() for x in (out, one))
    assert error <= 1.5 * usual + 1e-6


def test_a_chunk_depends_on_the_states_before_it_alone():
    x = da.zeros((60, 4), chunks=(10, 4)).map_blocks(lambda block: block)
    out = on_dask.causal_product(x, x, x)
    graph = out.dask.cull({out.__dask_keys__()[2][0]}).to_dict()
    chunks = {key[-1] for key in graph if key[0].startswith("causal_product-chunk")}
    assert chunks == {0, 1}
    backward = on_dask.causal_product(x, x, x, reverse=True)
    graph = backward.dask.cull({backward.__dask_keys__()[2][0]}).to_dict()
    chunks = {key[-1] for key in graph if key[0].startswith("causal_product-chunk")}
    assert chunks == {3, 4, 5}


def test_bits_are_those_of_the_last_run():
    q, k, v = rng.standard_normal((3, 2, 200, 8), dtype=np.float32)
    x, y, z = (da.from_array(a, chunks=(1, 23, 8)) for a in (q, k, v))
    for out in (on_dask.causal_product(x, y, z), on_dask.linear_attention(x, y, z)):
        bits = {out.compute(scheduler=how).tobytes() for how in ("sync", *["threads"] * 3)}
        assert len(bits) == 1
    np.testing.assert_allclose(
        on_dask.causal_product(x, y, z), causal_product(q, k, v), rtol=0, atol=1e-3
    )
