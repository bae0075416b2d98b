"""Attention over sparse blocks on the CPU: entries and tiles together against float64."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import sparse

from fa_cupy import BitMask, Score, attention, attention_backward
from fa_cupy.cpu.masks import entries as cpu_entries
from fa_cupy.cpu.masks import rows as mask_rows
from fa_cupy.cpu.masks.tiles import MaskTiles
from fa_cupy.cpu.tile_ops import Steps
from fa_cupy.masks import entries
from tests.api.test_gradients import plain_options
from tests.api.test_masks import peak_of
from tests.masks.test_entries import mixed_masks
from tests.support import blas, gradients
from tests.support.blas import two_threads
from tests.support.strategies import DTYPES, Case, by_dtype, cases, check_against_reference, normal

with_threads = pytest.fixture(autouse=True, scope="module")(two_threads)


def draw(*shapes, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [normal(rng, shape, dtype) for shape in shapes]


def with_mask(case, seed):
    """Give a case a mask of its lengths, and return that as a BitMask."""
    lengths = case.q.shape[-2], case.k.shape[-2]
    rng = np.random.default_rng(seed)
    if case.mask is None:
        case.mask = rng.random(lengths) < rng.choice([0.003, 0.03, 0.5])
    case.mask = np.broadcast_to(case.mask, (*case.mask.shape[:-2], *lengths)).copy()
    return BitMask.from_dense(case.mask)


@given(case=cases(), seed=st.integers(0, 2**32 - 1), least=st.sampled_from([0, 20, 200, 20_000]))
def test_any_call_agrees_with_the_reference(case, seed, least):
    """Whichever blocks are sparse: none, some, all; a few entries at a time."""
    with (
        mock.patch.object(entries, "LEAST_BITS", least),
        mock.patch.object(cpu_entries, "_CHUNK", 50),
        mock.patch.object(cpu_entries, "_SMALL", 0),
    ):
        mask = with_mask(case, seed)
        arrays = case.native(np)[:4]
        out, lse = attention(*arrays, mask, return_lse=True, **case.options)
    check_against_reference(case, out, lse)


@given(
    case=cases(),
    seed=st.integers(0, 2**32 - 1),
    least=st.sampled_from([20, 20_000]),
    dlse=st.booleans(),
)
@settings(max_examples=25)
def test_gradients_of_any_call_agree_with_the_reference(case, seed, least, dlse):
    assume(plain_options(case))
    with (
        mock.patch.object(entries, "LEAST_BITS", least),
        mock.patch.object(cpu_entries, "_CHUNK", 50),
        mock.patch.object(cpu_entries, "_SMALL", 0),
    ):
        mask = with_mask(case, seed)
        gradients.check(np, case, dlse, mask=mask)


@given(st.data())
@settings(max_examples=8)
def test_blocks_just_below_and_above_the_limit(data):
    lengths = data.draw(st.integers(100, 400)), data.draw(st.integers(100, 500))
    heads = data.draw(st.sampled_from([(), (2,), (3, 2)]))
    masks = [data.draw(mixed_masks(lengths=lengths)) for _ in range(heads[-1] if heads else 1)]
    dense = np.stack(masks) if heads else masks[0]
    if data.draw(st.booleans()):
        dense = masks[0]
    q, k, v = draw(*((*heads, n, 16) for n in (*lengths, lengths[1])))
    if bad := data.draw(st.sampled_from([None, np.nan, np.inf])):
        v[..., 17, :] = k[..., 5, 0] = bad
    case = Case(q, k, v, None, dense)
    if data.draw(st.booleans()):
        case.options = {"is_causal": True, "causal_align": "bottom_right", "window": (150, None)}
    mask = BitMask.from_dense(dense)
    out, lse = attention(q, k, v, mask=mask, return_lse=True, **case.options)
    check_against_reference(case, out, lse)
    if bad is None:
        gradients.check(np, case, True, mask=mask)
    with blas.threads(1):
        again = attention(q, k, v, mask=mask, **case.options)
    assert again.tobytes() == out.tobytes()


def graph(nodes, share=0.004, seed=3):
    """A mask without a dense block, and with rows in which nothing is visible."""
    dense = np.random.default_rng(seed).random((nodes, nodes)) < share
    dense[::7] = False
    mask = BitMask.from_dense(dense)
    assert len(mask.lists.entry_keys) == dense.sum()
    return mask, dense


def test_memory_where_one_query_sees_many_keys():
    """A hub: no array has a row for each of its edges."""
    nodes = 60_000
    ends = np.concatenate([np.arange(nodes), np.full(nodes, 7)]).reshape(2, nodes)
    hub = sparse.csr_array((np.ones(2 * nodes), (ends.ravel(), ends[::-1].ravel())))
    mask = BitMask.from_csr(hub)
    q, k, v = draw(*[(nodes, 32)] * 3)
    (out, lse), peak = peak_of(lambda: attention(q, k, v, mask=mask, return_lse=True))
    assert peak < 3 * out.nbytes  # 7.7 MB; the keys of all edges of the hub have as much
    seen = np.exp(q[7].astype(float) @ k.T.astype(float) / 32**0.5)
    np.testing.assert_allclose(out[7], seen @ v / seen.sum(), rtol=1e-4, atol=1e-5)
    dq, _, dv = attention_backward(out, q, k, v, out, lse, mask=mask)
    weights = np.exp(q.astype(float) @ k[7].astype(float) / 32**0.5 - lse)
    np.testing.assert_allclose(dv[7], weights @ out, rtol=1e-3, atol=1e-4)
    dscores = seen / seen.sum() * (v @ out[7] - out[7] @ out[7])
    np.testing.assert_allclose(dq[7], dscores @ k / 32**0.5, rtol=1e-3, atol=1e-5)


def test_memory_where_many_queries_share_keys():
    """No copy of the keys for each of those that are computed together."""
    mask = BitMask.from_dense(np.random.default_rng(0).random((1, 10_000)) < 0.01)
    q, k = draw((200, 1, 16), (1, 10_000, 16))
    (out, lse), peak = peak_of(lambda: attention(q, k, k, mask=mask, return_lse=True))
    assert peak < 4 * k.nbytes
    inputs = out, q, k, k, out, lse
    _, peak = peak_of(lambda: attention_backward(*inputs, mask=mask))
    assert peak < 12 * k.nbytes


def test_no_tile_is_computed(monkeypatch):
    mask, dense = graph(900)
    q, k, v, dout = draw(*[(2, 900, 8)] * 4)
    want = attention(q, k, v, mask=dense, return_lse=True)
    of_dense = attention_backward(dout, q, k, v, *want, mask=dense)

    def scores(*_):
        raise AssertionError("a tile of scores")

    monkeypatch.setattr(Steps, "scores", scores)
    found = attention(q, k, v, mask=mask, return_lse=True)
    of_entries = attention_backward(dout, q, k, v, *want, mask=mask)
    for mine, theirs in zip((*found, *of_entries), (*want, *of_dense), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    assert (found[0][:, ::7] == 0).all()
    assert (found[1][:, ::7] == -np.inf).all()


@pytest.mark.parametrize(**by_dtype())
def test_the_number_of_threads_does_not_show(dtype):
    mask, _ = graph(900)
    q, k, v, dout = draw((4, 900, 64), (2, 900, 64), (2, 900, 64), (4, 900, 64), dtype=dtype)
    bias = draw((4, 1, 900), seed=1)[0]
    results = []
    q, k, v, dout = (x[None] for x in (q, k, v, dout))
    for threads in (1, 2, 3, 8):
        with blas.threads(threads):
            with mock.patch.object(mask_rows, "_MOST_SPARSE", 256):
                out, lse = attention(q, k, v, bias, mask, return_lse=True)
            found = attention_backward(dout, q, k, v, out, lse, bias, mask)
            results.append(b"".join(x.tobytes() for x in (out, lse, *found)))
    assert len(set(results)) == 1


BIASES = [(), (1, 1), (1, 300), (300, 1), (300, 300), (2, 1, 1), (2, 300, 300), (3, 2, 1, 300)]


@pytest.mark.parametrize("dtype", [DTYPES[0], DTYPES[3]], ids=str)
@pytest.mark.parametrize("shape", BIASES, ids=str)
def test_gradients_of_biases_and_sinks(shape, dtype):
    """Summed over whatever the bias is broadcast along, beside blocks with words."""
    _, dense = graph(300)
    dense[150:200, 10:90] = True
    q, k, v = draw(*[(3, 2, 300, 8)] * 3, dtype=dtype)
    bias, sinks = draw(shape, (2, 1), dtype=dtype, seed=1)
    case = Case(q, k, v, bias, dense, {"sinks": sinks, "is_causal": True})
    gradients.check(np, case, True, mask=BitMask.from_dense(dense))


@pytest.mark.parametrize("shape", [(), (60, 60), (1, 60), (60, 1), (64, 1, 60), (64, 60, 60)])
def test_many_small_entries_of_the_batch(shape, monkeypatch):
    """They are computed several at a time, and share keys, a bias and a mask."""
    monkeypatch.setattr(cpu_entries, "_SMALL", 0)
    dense = graph(60, share=0.1)[1]
    q, k, v, bias = draw((64, 60, 4), (1, 60, 4), (64, 60, 4), shape)
    case = Case(q, k, v, bias, dense)
    mask = BitMask.from_dense(dense)
    check_against_reference(case, *attention(q, k, v, bias, mask, return_lse=True))
    gradients.check(np, case, True, mask=mask)
    case.mask = dense ^ (np.random.default_rng(0).random((64, 1, 60)) < 0.1)  # one for each
    mask = BitMask.from_dense(case.mask)
    check_against_reference(case, *attention(q, k, v, bias, mask, return_lse=True))
    gradients.check(np, case, True, mask=mask)


def test_small_matrices_are_tiles(monkeypatch):
    """Going over the entries of each of many would take several times as long."""
    dense = np.random.default_rng(0).random((7, 20, 30)) < 0.3
    q, k, v = draw((7, 20, 8), (7, 30, 8), (7, 30, 8))

    def pairs(*_):
        raise AssertionError("scores of entries")

    monkeypatch.setattr(Steps, "pair_scores", pairs)
    for several in (dense, dense[5]):
        mask = BitMask.from_dense(several)
        assert len(mask.lists.entry_keys)
        case = Case(q, k, v, None, several)
        check_against_reference(case, *attention(q, k, v, mask=mask, return_lse=True))
        gradients.check(np, case, True, mask=mask)


@pytest.mark.parametrize("size", [1.0, 4.0])
def test_sinks_after_both_forms(size):
    """Entries raise the maximum that tiles found, by little or by much."""
    dense = np.random.default_rng(0).random((256, 384)) < 0.5
    dense[:, 128:256] = False
    dense[:, 256:] = np.random.default_rng(1).random((256, 128)) < 0.02
    q, k, v, sinks = draw((256, 8), (384, 8), (384, 8), (256,))
    k[256:] *= size
    k[:128] /= 4
    case = Case(q, k, v, None, dense, {"sinks": sinks})
    mask = BitMask.from_dense(dense)
    assert len(mask.lists.words) == 2
    assert len(mask.lists.entry_keys)
    check_against_reference(case, *attention(q, k, v, mask=mask, sinks=sinks, return_lse=True))
    gradients.check(np, case, mask=mask)


def test_scores_by_an_expression():
    mask, dense = graph(300)
    slopes, table = draw((2,), (2, 300, 300), dtype=np.float64)
    score = Score("s * (1 + sin(t[h, i, j])) - m[h] * abs(i - j)", t=table, m=slopes)
    q, k, v, dout = draw(*[(2, 300, 8)] * 4, dtype=np.float64)
    need = ["q", "k", "v", "score.t", "score.m"]
    found = []
    for given_mask in (mask, dense):
        options = {"mask": given_mask, "score": score, "softcap": 3.0}
        out, lse = attention(q, k, v, return_lse=True, **options)
        found.append((out, *attention_backward(dout, q, k, v, out, lse, need=need, **options)))
    for mine, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_reaches_those_who_see_it(bad):
    mask, dense = graph(300)
    q, k, v, dout = draw(*[(300, 8)] * 4)
    k[11, 3] = v[200, 5] = dout[30, 1] = bad
    case = Case(q, k, v, None, dense)
    out, lse = attention(q, k, v, mask=mask, return_lse=True)
    check_against_reference(case, out, lse)
    want = attention_backward(dout, q, k, v, out, lse, mask=dense)
    found = attention_backward(dout, q, k, v, out, lse, mask=mask)
    for mine, theirs in zip(found, want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    assert not np.isfinite(found[0]).all()
    assert np.isfinite(found[0]).any()


@pytest.mark.parametrize("factor", [30.0, 1e4, 1e18])
def test_large_scores(factor):
    """Beyond float32's log-sum-exp, and beyond float32."""
    mask, dense = graph(300)
    q, k, v, dout = draw(*[(300, 8)] * 4)
    q, k = factor * q, factor * k
    found = []
    for given_mask in (mask, dense):
        out, lse = attention(q, k, v, mask=given_mask, return_lse=True)
        found.append((out, *attention_backward(dout, q, k, v, out, lse, mask=given_mask)))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-2, atol=1e-2)
    for mine, theirs in zip(*found, strict=True):
        np.testing.assert_array_equal(np.isfinite(mine), np.isfinite(theirs))
        # A weight of 1 has gradient 0, and what is left of it is multiplied by keys that large.
        np.testing.assert_allclose(mine, theirs, rtol=1e-2, atol=1e-2 + 1e-5 * factor)


@pytest.mark.parametrize("scale", [1e3, 1e5, 1e7])
def test_weights_of_other_queries_than_that_of_a_nan(scale):
    """Tiles compute sparse blocks then, where scores of equal keys differ from those of pairs."""
    rng, n = np.random.default_rng(0), 256
    mask = np.concatenate([rng.random((n, 128)) < share for share in (0.01, 0.6)], axis=1)
    options = {"mask": BitMask.from_dense(mask), "scale": scale}
    q, key = draw((n, 24), (1, 24))
    k, v, dout = np.repeat(key, n, axis=0), np.zeros((n, n), q.dtype), np.eye(n, dtype=q.dtype)
    dout[0, 0] = np.nan
    out, lse = attention(q, k, v, return_lse=True, **options)
    (dv,) = attention_backward(dout, q, k, v, out, lse, need=["v"], **options)
    np.testing.assert_allclose(dv.sum(axis=0)[1:], 1, rtol=5e-5)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_columns_that_some_rows_see(sparse, width):
    """Those with a visible pair in a block that is read: of words alone, or of all."""
    rng = np.random.default_rng(0)
    dense = np.zeros((2, 500, 900), bool)
    dense[0, 130:140, 300:310] = True  # sparse blocks
    dense[1, 200:300, 640:800] = rng.random((100, 160)) < 0.7
    dense[1, 384:, :128] = True
    tiles = MaskTiles(BitMask(dense), np.arange(2), sparse=sparse)
    read = dense.copy()
    if not sparse:
        read[0] = False
    columns = [(begin, min(begin + width, 900)) for begin in range(0, 900, width)]
    for rows in ((0, 128), (128, 256), (256, 384), (384, 500), (0, 500)):
        blocks = [(128 * (begin // 128), -(-end // 128) * 128) for begin, end in columns]
        seen = [read[:, slice(*rows), begin:end].any() for begin, end in blocks]
        assert tiles.columns(rows, columns) == [x for x, s in zip(columns, seen, strict=True) if s]
