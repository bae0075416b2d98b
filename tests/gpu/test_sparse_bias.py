"""Sparse matrices of CuPy as bias on a GPU, against float64."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse as scipy_sparse

from fa_cupy import BitMask, attention, attention_backward, reference
from tests.api.test_sparse_bias import pattern_of, random_bias
from tests.support import gradients
from tests.support.strategies import DTYPES, UNIT, Case, check_against_reference, normal

HALF, BFLOAT16, SINGLE, DOUBLE = DTYPES


def on_device(cupy, matrix):
    from cupyx.scipy import sparse

    parts = [cupy.asarray(matrix.data)]
    if matrix.format == "coo":
        indices = cupy.asarray(matrix.row), cupy.asarray(matrix.col)
        return sparse.coo_matrix((parts[0], indices), shape=matrix.shape)
    kind = getattr(sparse, f"{matrix.format}_matrix")
    parts += [cupy.asarray(matrix.indices), cupy.asarray(matrix.indptr)]
    return kind(tuple(parts), shape=matrix.shape)


@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.tuples(st.integers(1, 400), st.integers(1, 400)),
    dims=st.sampled_from([(8, 8), (64, 64), (7, 20), (128, 64), (256, 256)]),
    heads=st.sampled_from([(), (1, 1), (3, 3), (6, 2)]),
    dtype=st.sampled_from(DTYPES[:3]),
    bias_dtype=st.sampled_from([SINGLE, DOUBLE]),
    form=st.sampled_from(["csr", "csc", "coo"]),
    share=st.sampled_from([0.0, 0.003, 0.05, 0.6]),
    masked=st.sampled_from([None, None, "host", "device", "matrix"]),
    causal=st.booleans(),
)
@settings(max_examples=150)
def test_results_and_gradients(
    cupy, seed, lengths, dims, heads, dtype, bias_dtype, form, share, masked, causal
):
    rng = np.random.default_rng(seed)
    (q_len, k_len), (dim, v_dim) = lengths, dims
    q_batch, k_batch = [(2, n) for n in heads] or [(), ()]
    q, k, v = (
        normal(rng, (*batch, *shape), dtype)
        for batch, shape in (
            (q_batch, (q_len, dim)), (k_batch, (k_len, dim)), (k_batch, (k_len, v_dim)),
        )
    )  # fmt: skip
    host = random_bias(rng, lengths, share, bias_dtype, form)
    stored = pattern_of(host)
    seen = rng.random(lengths) < 0.3 if masked else stored
    options = {"is_causal": causal, "causal_align": "bottom_right"}
    case = Case(q, k, v, host.toarray().astype(np.float32), seen, options)
    bias, mask = on_device(cupy, host), None
    if masked == "matrix":
        mask = on_device(cupy, scipy_sparse.csr_array(seen.astype(np.float32)))
    elif masked:
        mask = BitMask(seen if masked == "host" else cupy.asarray(seen))
    arrays = [*map(cupy.asarray, (q, k, v))]
    out, lse = attention(*arrays, bias, mask, return_lse=True, **options)
    check_against_reference(case, out.get(), lse.get())

    dout = normal(rng, out.shape, dtype)
    found = attention_backward(
        cupy.asarray(dout), *arrays, out, lse, bias, mask, **options
    )  # fmt: skip
    dbias = found[3]
    assert (type(dbias), dbias.dtype) == (type(bias), bias.dtype)
    want = reference.attention_backward(dout, *case.arrays, **options)[3]
    dense = np.where(stored, dbias.toarray().get(), want)
    by_name = dict(zip("qkv", (x.get() for x in found[:3]), strict=True))
    gradients.hold(case, by_name | {"bias": dense}, dout, None, UNIT[dtype])
    again = attention_backward(cupy.asarray(dout), *arrays, out, lse, bias, mask, **options)
    assert again[3].data.get().tobytes() == dbias.data.get().tobytes()


@pytest.mark.parametrize("form", ["csr", "csc", "coo"])
def test_a_step_along_the_gradient(cupy, form):
    """Its data lie as those of the bias; indices changed in place are noticed."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (cupy.asarray(normal(rng, (2, 200, 64), SINGLE)) for _ in range(4))
    bias = on_device(cupy, random_bias(rng, (200, 200), 0.05, SINGLE, form))
    for _ in range(2):
        out, lse = attention(q, k, v, bias, return_lse=True)
        (dbias,) = attention_backward(dout, q, k, v, out, lse, bias, need=["bias"])
        before = float((out * dout).sum())
        bias.data += 1e-2 * dbias.data
        after = float((attention(q, k, v, bias) * dout).sum())
        gain = 1e-2 * float((dbias.data**2).sum())
        assert after - before == pytest.approx(gain, rel=0.2)
        name = "col" if form == "coo" else "indices"
        indices = getattr(bias, name)
        indices[...] = 199 - indices


def test_a_graph_of_many_nodes(cupy):
    """No array of all pairs: 10**10 of them."""
    rng = np.random.default_rng(1)
    nodes, edges = 100_000, 1_000_000
    parts = rng.standard_normal(edges), tuple(rng.integers(0, nodes, (2, edges)))
    host = scipy_sparse.coo_array(parts, shape=(nodes, nodes)).tocsr().astype(np.float32)
    q, k, v = (cupy.asarray(normal(rng, (nodes, 64), SINGLE)) for _ in range(3))
    bias = on_device(cupy, host)
    mine = attention(q, k, v, bias, return_lse=True)
    theirs = attention(q.get(), k.get(), v.get(), host, return_lse=True)
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(a.get(), b, rtol=1e-4, atol=1e-4)
    *_, dbias = attention_backward(mine[0], q, k, v, *mine, bias)
    *_, want = attention_backward(theirs[0], q.get(), k.get(), v.get(), *theirs, host)
    np.testing.assert_allclose(dbias.data.get(), want.data, rtol=1e-3, atol=1e-4)
