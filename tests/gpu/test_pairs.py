"""Attention over single pairs on a GPU, and its gradients: against float64, and as graphs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from fa_cupy import BitMask, attention, attention_backward
from tests.support.gradients import hold, sum_dtype
from tests.support.pair_calls import graph
from tests.support.strategies import BFLOAT16, UNIT, Case, check_against_reference, lay, normal

pytest.importorskip("cupy")
import cupy as cp

from fa_cupy.gpu.masks import pair_lists

pytestmark = pytest.mark.usefixtures("fresh_kernels")
DTYPES = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32)]
of_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
BANDS = [
    {},
    {"is_causal": True, "causal_align": "bottom_right"},
    {"window": (150, 20), "causal_align": "top_left", "softcap": 3.0},
]


def mask_of(dense):
    """A mask whose pairs are computed one by one, whatever suits it."""
    mask = BitMask.from_dense(dense)
    for dtype in DTYPES:
        mask._kept["pairs", dtype] = pair_lists.lists_of(mask).counts
    return mask


def bits(results):
    return [x.tobytes() for x in map(cp.asnumpy, results)]


def arrays_of(dtype, heads, lengths, dims, seed=0):
    """q, k, v and dout as NumPy arrays."""
    rng, ((q_len, k_len), (dim, v_dim)) = np.random.default_rng(seed), (lengths, dims)
    shapes = (heads[0], q_len, dim), (heads[1], k_len, dim), (heads[1], k_len, v_dim)
    return [normal(rng, (2, *s), dtype) for s in (*shapes, (heads[0], q_len, v_dim))]


def run(arrays, mask, layouts=("dense",) * 4, dlse=None, **options):
    """Output, LSE and gradients on the device."""
    q, k, v, dout = (lay(cp, x, how) for x, how in zip(arrays, layouts, strict=True))
    out, lse = attention(q, k, v, mask=mask, return_lse=True, **options)
    found = attention_backward(
        dout, q, k, v, out, lse, mask=mask, dlse=None if dlse is None else cp.asarray(dlse),
        **options,
    )  # fmt: skip
    return out, lse, *found


def check(arrays, dense, mask=None, layouts=("dense",) * 4, **options):
    """Hold a call and its gradients against float64; return the results."""
    *qkv, dout = arrays
    dtype = dout.dtype
    dlse = normal(np.random.default_rng(9), dout.shape[:-1], sum_dtype(dtype))
    mask = mask_of(dense) if mask is None else mask
    case = Case(*qkv, None, dense, options)
    out, lse, *grads = found = run(arrays, mask, layouts, dlse, **options)
    check_against_reference(case, out.get(), lse.get())
    grads = dict(zip("qkv", (x.get() for x in grads), strict=True))
    hold(case, grads, dout, dlse, UNIT[dtype])
    assert not mask._store.device_masks
    assert not mask._store.device_tables
    return found


@of_dtypes
@pytest.mark.parametrize("dims", [(64, 64), (32, 17), (128, 100), (256, 256), (3, 5)], ids=str)
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_each_row(dtype, dims, band):
    dense = graph(np.random.default_rng(0), 700, 900, density=0.01)
    check(arrays_of(dtype, (4, 2), (700, 900), dims), dense, **band)


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    lengths=st.tuples(st.integers(1, 1500), st.integers(1, 1500)),
    dims=st.tuples(st.integers(1, 256), st.integers(1, 256)),
    heads=st.sampled_from([(1, 1), (3, 3), (4, 2)]),
    band=st.sampled_from(BANDS),
    density=st.sampled_from([0.0, 0.001, 0.02, 0.3]),
    layouts=st.tuples(*[st.sampled_from(["dense", "blhd", "steps", "rows", "offset"])] * 4),
    seed=st.integers(0, 2**32),
)
def test_any_call(dtype, lengths, dims, heads, band, density, layouts, seed):
    dense = graph(np.random.default_rng(seed), *lengths, density=density)
    check(arrays_of(dtype, heads, lengths, dims, seed), dense, layouts=layouts, **band)


@of_dtypes
def test_a_graph_with_hubs_is_repeatable(dtype):
    """20,000 nodes, two of which see all others and are seen by them: bit by bit, each time."""
    rng, nodes = np.random.default_rng(1), 20_000
    src, dst = rng.integers(0, nodes, (2, 150_000))
    every, hub = np.arange(nodes), np.full(nodes, 7)
    src, dst = np.concatenate([src, every, hub]), np.concatenate([dst, hub, every])
    mask = BitMask.from_edges(src, dst, nodes)
    assert pair_lists.chosen(mask, dtype).query_pieces == -(-mask.to_csr()[[7]].nnz // 256)
    arrays = arrays_of(dtype, (2, 2), (nodes, nodes), (64, 64))
    first = bits(run(arrays, mask))
    assert all(bits(run(arrays, mask)) == first for _ in range(3))
    out, lse, *_ = run(arrays, mask)
    matrix = mask.to_csr()
    for row in (7, 8, 19_999):
        keys = matrix.indices[matrix.indptr[row] : matrix.indptr[row + 1]]
        q, k, v = (x[:, :, at].astype(np.float64) for x, at in
                   zip(arrays, ([row], keys, keys), strict=False))  # fmt: skip
        scores = (q @ k.swapaxes(2, 3))[:, :, 0] / 8
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        total = weights.sum(-1, keepdims=True)
        want = ((weights / total)[:, :, None] @ v)[:, :, 0]
        np.testing.assert_allclose(out[:, :, row].get().astype(float), want,
                                   atol=4 * UNIT[dtype] + 1e-6)  # fmt: skip
        wanted_lse = np.log(total[..., 0]) + scores.max(-1)
        np.testing.assert_allclose(lse[:, :, row].get(), wanted_lse, atol=1e-5)


@of_dtypes
def test_a_matrix_of_cupy(dtype):
    """Its mask belongs to the device, and takes no words there."""
    from cupyx.scipy.sparse import csr_matrix

    matrix = sparse.random_array((3000, 2000), density=0.002, rng=2, format="csr", dtype=np.float32)
    mask = BitMask.from_csr(csr_matrix(sparse.csr_matrix(matrix)))
    assert mask._store.device == 0
    assert mask.nbytes < 8 * matrix.nnz + 8 * 3001 + 4096
    dense = matrix.toarray() != 0
    check(arrays_of(dtype, (2, 2), dense.shape, (64, 64)), dense, mask)


@of_dtypes
def test_rows_without_keys_and_what_is_hidden(dtype):
    dense = graph(np.random.default_rng(3), 300, 400, density=0.01)
    arrays = arrays_of(dtype, (2, 2), dense.shape, (64, 64))
    want = bits(run(arrays, mask_of(dense)))
    q, k, v, dout = arrays
    for x in (q, dout):
        x[..., ~dense.any(1), :] = np.nan
    for x in (k, v):
        x[..., ~dense.any(0), :] = np.inf
    found = run(arrays, mask_of(dense))
    assert bits(found) == want
    assert (found[0].get()[..., ~dense.any(1), :] == 0).all()
    assert np.isneginf(found[1].get()[..., ~dense.any(1)]).all()


@of_dtypes
def test_calls_that_leave_the_pairs_to_others(dtype):
    """Sinks and a bias: the gradients are computed by blocks, the output by pairs."""
    rng = np.random.default_rng(4)
    dense = graph(rng, 300, 400, density=0.01)
    q, k, v, dout = map(cp.asarray, arrays_of(dtype, (2, 2), dense.shape, (64, 64)))
    mask = mask_of(dense)
    for name, x in (
        ("sinks", normal(rng, (2, 1), dtype)),
        ("bias", normal(rng, (300, 400), dtype)),
    ):
        given = {name: cp.asarray(x)}
        out, lse = attention(q, k, v, mask=mask, return_lse=True, **given)
        options = {"sinks": x} if name == "sinks" else {}
        case = Case(*(a.get() for a in (q, k, v)), x if name == "bias" else None, dense, options)
        check_against_reference(case, out.get(), lse.get())
        grads = attention_backward(dout, q, k, v, out, lse, mask=mask, **given)
        found = dict(zip(("q", "k", "v", name), (g.get() for g in grads), strict=True))
        hold(case, found, dout.get(), None, UNIT[dtype])


@of_dtypes
@pytest.mark.parametrize("gradients", [False, True])
def test_captured_graphs(dtype, gradients):
    """Replayed with other numbers in the same arrays."""
    dense = graph(np.random.default_rng(5), 600, 700, density=0.01)
    mask = mask_of(dense)
    first, second = (arrays_of(dtype, (2, 2), dense.shape, (64, 64), seed) for seed in (1, 2))
    arrays = [cp.asarray(x) for x in first]

    def call():
        q, k, v, dout = arrays
        out, lse = attention(q, k, v, mask=mask, return_lse=True)
        if not gradients:
            return out, lse
        return out, lse, *attention_backward(dout, q, k, v, out, lse, mask=mask)

    want = bits(call())
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        call()
        stream.synchronize()
        stream.begin_capture()
        result = call()
        captured = stream.end_capture()
    for source in (second, first):
        for x, y in zip(arrays, source, strict=True):
            x[...] = cp.asarray(y)
        for x in result:
            x.fill(np.nan)
        cp.cuda.Device().synchronize()
        captured.launch(stream)
        stream.synchronize()
        assert bits(result) == bits(call())
    assert bits(result) == want


def test_streams_share_a_mask_from_its_first_call():
    dense = graph(np.random.default_rng(6), 600, 700, density=0.01)
    arrays = arrays_of(DTYPES[0], (2, 2), dense.shape, (64, 64))
    want = bits(run(arrays, mask_of(dense)))
    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(3)]
    mask, results = mask_of(dense), []
    for stream in streams:
        with stream:
            results.append(run(arrays, mask))
    cp.cuda.Device().synchronize()
    assert all(bits(x) == want for x in results)
