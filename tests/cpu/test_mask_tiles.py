"""How masks are cut into tiles on the CPU, what the tiles show, and thin blocks against float64."""

import itertools
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from fa_cupy import BitMask, Score, attention, layouts
from fa_cupy.cpu import tile_ops
from fa_cupy.cpu.masks import entries, rows, single, thin
from fa_cupy.cpu.masks.tiles import MaskTiles
from fa_cupy.cpu.tile_ops import Steps
from fa_cupy.masks import entries as mask_entries
from fa_cupy.masks import export
from fa_cupy.masks.blocks import Grid, of_small
from fa_cupy.tiled import tile_sizes
from fa_cupy.tiled.tile_sizes import Tile
from tests.support import blas
from tests.support.blas import two_threads
from tests.support.strategies import DTYPES, Case, by_dtype, cases, check_against_reference, normal

with_threads = pytest.fixture(autouse=True, scope="module")(two_threads)
B = layouts.BLOCK


def draw(*shapes, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [normal(rng, shape, dtype) for shape in shapes]


def mixed(q_len, k_len, seed=0):
    """Blocks of all kinds: empty, sparse, thin, others with words, full."""
    rng = np.random.default_rng(seed)
    share = rng.choice([0, 0.01, 0.05, 0.5, 1], (-(-q_len // B), -(-k_len // B)))
    return rng.random((q_len, k_len)) < np.kron(share, np.ones((B, B)))[:q_len, :k_len]


@given(st.integers(0, 5), st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_rows_of_blocks_as_bytes(count, slabs, seed):
    bits = np.random.default_rng(seed).random((count, B, B)) < 0.5
    found = layouts.row_bytes(layouts.pack(bits)[:, :slabs])
    wanted = np.packbits(bits[:, : slabs * layouts.SLAB], axis=-1, bitorder="little")
    np.testing.assert_array_equal(found, wanted)


@given(st.lists(st.integers(1, 900), max_size=12), st.integers(1, 700))
def test_runs_of_a_tile(ends, tile_n):
    """All keys, in order, and every tile but the last is full."""
    ends = np.cumsum(ends)
    runs = [*zip(ends[:-1:2], ends[1::2], strict=False)]
    found = list(tile_sizes.joined_runs(runs, tile_n))
    widths = [sum(end - begin for begin, end in tile) for tile in found]
    assert all(width == tile_n for width in widths[:-1])
    assert all(0 < width <= tile_n for width in widths)
    assert all(begin < end for tile in found for begin, end in tile)
    keys = [np.arange(*run) for tile in found for run in tile]
    wanted = [np.arange(*run) for run in runs]
    np.testing.assert_array_equal(np.concatenate([[], *keys]), np.concatenate([[], *wanted]))


@given(st.data(), st.integers(0, 3))
@settings(max_examples=40)
def test_a_tile_shows_what_is_read(data, seed):
    dense = np.stack([mixed(300, 500, seed), mixed(300, 500, seed + 1)])
    of = data.draw(st.sampled_from([[0], [1, 1, 1], [0, 1, 0]]))
    read = {kind: data.draw(st.booleans()) for kind in ("words", "sparse", "thin")}
    tiles = MaskTiles(BitMask(dense), np.array(of), **read)
    row_begin, row_end, key_begin, key_end = (
        x for n in (300, 500) for x in sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2)))
    )
    if row_begin == row_end or key_begin == key_end:
        return
    shape = (len(of), row_end - row_begin, key_end - key_begin)
    scores = np.zeros(shape, np.float32)
    packed = tiles[:, row_begin:row_end, key_begin:key_end]
    if packed is not None:
        Steps(np.dtype(np.float32)).mask_scores(scores, packed)
    wanted = np.array([_read(dense[i], **read) for i in of])
    wanted = wanted[:, row_begin:row_end, key_begin:key_end]
    np.testing.assert_array_equal(scores == 0, wanted)
    runs = list(tiles.runs((row_begin, row_end), (key_begin, key_end)))
    inside = np.zeros(key_end - key_begin, bool)
    for begin, end in runs:
        inside[begin - key_begin : end - key_begin] = True
    assert not wanted[:, :, ~inside].any()


def _read(dense, words, sparse, thin):
    """Clear what is in blocks of kinds that are not read."""
    out = np.zeros_like(dense)
    for row in range(0, dense.shape[0], B):
        for col in range(0, dense.shape[1], B):
            block = dense[row : row + B, col : col + B]
            bits = block.sum()
            if bits == block.size:
                read = words
            elif bits < mask_entries.LEAST_BITS:
                read = sparse
            else:
                read = words and (thin or bits >= 1024)
            if read:
                out[row : row + B, col : col + B] = block
    return out


@pytest.mark.parametrize("bits", [(5, 5, 7), (1, 1, 1), (4, 130, 3), (6, 1, 300)])
@pytest.mark.parametrize("share", [0, 0.5, 0.99, 1])
def test_lists_of_small_masks(bits, share):
    seen = np.random.default_rng(0).random(bits) < share
    seen[0] = True
    mask = BitMask(seen)
    lists = of_small(seen)
    assert lists.full_begin[-1] == len(lists.full) == seen.all(axis=(1, 2)).sum()
    assert len(lists.entry_keys) == seen[~seen.all(axis=(1, 2))].sum()
    last = len(seen) - 1
    within = [0, *range(last - 1, 0, -1), last][
        : last + 1
    ]  # not ascending, but as long as if it were
    for numbers in ([0], [*range(last + 1)], [last, 0, 0], [*range(1, last + 1)], within, []):
        found = export.of_small(mask._grid, lists, np.array(numbers, np.int32))
        np.testing.assert_array_equal(found, seen[numbers])


@given(st.integers(1, 3000), st.integers(0, 2**32 - 1), st.sampled_from([64, 128, 256, 384, 512]))
def test_rows_of_tiles_cover_all_queries_once(q_len, seed, height):
    rng = np.random.default_rng(seed)
    mask = BitMask(np.stack([mixed(q_len, 300, seed % 7), np.zeros((q_len, 300), bool)]))
    mask = mask[rng.integers(0, 2, 3)]
    found = rows.bounds(mask, height)
    assert found[0][0] == 0
    assert found[-1][1] == q_len
    assert all(a[1] == b[0] for a, b in itertools.pairwise(found))
    assert all(begin % min(height, B) == 0 for begin, _ in found)
    assert all(end - begin <= max(height, rows._MOST_SPARSE) for begin, end in found)


def heights(dense, most=512):
    return {end - begin for begin, end in rows.bounds(BitMask(dense), most)}


def test_tiles_are_as_high_as_the_pattern_allows():
    rng = np.random.default_rng(0)
    ones = np.ones((B, B), bool)
    assert heights(rng.random((2048, 2048)) < 0.5) == {512}
    assert heights(np.kron(rng.random((16, 16)) < 0.3, ones)) == {128}
    assert heights(np.kron(rng.random((4, 16)).repeat(4, axis=0) < 0.3, ones)) == {512}
    assert heights(rng.random((2048, 2048)) < 0.05) == {256}  # thin
    assert heights(rng.random((2048, 2048)) < 0.001) == {1024}  # sparse
    assert heights(rng.random((2048, 2048)) < 0.5, most=256) == {256}


def test_stacks_are_of_one_matrix():
    mask = BitMask(np.stack([mixed(300, 300, 0), mixed(300, 300, 1)]))
    numbers = np.array([0, 0, 1, 1, 1, 0])[:, None, None]
    other = np.arange(6)
    found = list(rows.of_one_matrix(mask, [[None, other, None, None, numbers]]))
    assert [list(x[1]) for x in found] == [[0, 1], [2, 3, 4], [5]]
    assert all(x[0] is None for x in found)
    tile = Tile(512, 1024)
    assert rows.width(mask, tile, 1, 512) == 1024
    assert rows.width(mask, tile, 4, 128) == 1024
    assert rows.width(mask, tile, 4, 512) == 256
    assert rows.width(mask, tile, 4, 1024) == 128


def test_scattered_blocks_are_one_tile(monkeypatch):
    """With one softmax, and products of their own, in which nothing is in vain."""
    widths, products = [], []
    softmax, scores = Steps.softmax, Steps.scores

    def noted_softmax(self, rows, scores):
        widths.append(scores.shape)
        softmax(self, rows, scores)

    def noted_scores(self, queries, first, k, out):
        products.append(out.shape)
        scores(self, queries, first, k, out)

    monkeypatch.setattr(Steps, "softmax", noted_softmax)
    monkeypatch.setattr(Steps, "scores", noted_scores)
    board = np.arange(24) % 3 == np.arange(16)[:, None] % 3
    q, k, v = draw((16 * B, 8), (24 * B, 8), (24 * B, 8))
    dense = np.kron(board, np.ones((B, B), bool))
    out, lse = attention(q, k, v, mask=BitMask(dense), return_lse=True)
    check_against_reference(Case(q, k, v, None, dense), out, lse)
    assert set(products) == {(1, B, B)}
    assert len(products) == board.sum()
    assert widths == [(1, B, 8 * B)] * 16


def test_half_of_a_block_hides_a_run():
    """Beside runs that are seen, in tiles that are half as high as a block."""
    dense = np.zeros((256, 5 * B), bool)
    dense[:, :B] = dense[:, 4 * B :] = dense[:64, 2 * B : 3 * B] = True
    q, k, v = draw((256, 8), (5 * B, 8), (5 * B, 8))
    attention(q[::-1], 30 * k, v)  # leaves other scores in memory that is used again
    out, lse = attention(q, k, v, mask=BitMask(dense), return_lse=True)
    check_against_reference(Case(q, k, v, None, dense), out, lse)


@given(case=cases(), seed=st.integers(0, 2**32 - 1), segment=st.sampled_from([1, 4, 32]))
@settings(max_examples=60)
def test_thin_blocks_agree_with_the_reference(case, seed, segment):
    """All blocks with words are, and all partial ones have them; few keys are looked at a time."""
    lengths = case.q.shape[-2], case.k.shape[-2]
    rng = np.random.default_rng(seed)
    if case.mask is None:
        case.mask = rng.random(lengths) < rng.choice([0.03, 0.3, 0.9])
    case.mask = np.broadcast_to(case.mask, (*case.mask.shape[:-2], *lengths)).copy()
    with (
        mock.patch.object(mask_entries, "LEAST_BITS", 1),
        mock.patch.object(thin, "LEAST_BITS", 1 << 30),
        mock.patch.object(thin, "_BITS", 4 * B * B),
        mock.patch.object(entries, "_SEGMENT", segment),
        mock.patch.object(entries, "_MOST_PADDED", 100),
        mock.patch.object(thin, "any_of", return_value=True),
        mock.patch.object(rows, "_is_single", return_value=False),
        mock.patch.object(Grid, "is_small", False),
        mock.patch.object(single, "bits_of", return_value=None),
    ):
        mask = BitMask.from_dense(case.mask)
        out, lse = attention(*case.native(np)[:4], mask, return_lse=True, **case.options)
    check_against_reference(case, out, lse)


OPTIONS = [
    {},
    {"is_causal": True, "causal_align": "top_left"},
    {"window": (150, 40), "causal_align": "top_left"},
    {"softcap": 3.0, "is_causal": True, "causal_align": "bottom_right"},
    {"scale": 300.0},
]


@pytest.mark.parametrize(**by_dtype())
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_blocks_of_all_kinds_in_one_row(options, dtype):
    dense = mixed(700, 900, 2)
    q, k, v = draw((2, 3, 700, 20), (2, 1, 900, 20), (2, 1, 900, 12), dtype=dtype)
    bias = draw((3, 1, 900), dtype=dtype, seed=1)[0]
    case = Case(q, k, v, bias, dense, options)
    results = []
    for threads in (1, 2, 5):
        with blas.threads(threads):
            results.append(attention(q, k, v, bias, BitMask(dense), return_lse=True, **options))
    check_against_reference(case, *results[0])
    assert len({b"".join(x.tobytes() for x in found) for found in results}) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_under_thin_blocks(bad):
    dense = np.random.default_rng(0).random((300, 400)) < 0.05
    assert thin.any_of(BitMask(dense))
    q, k, v = draw((300, 8), (400, 8), (400, 8))
    k[11, 3] = v[200, 5] = bad
    out, lse = attention(q, k, v, mask=BitMask(dense), return_lse=True)
    check_against_reference(Case(q, k, v, None, dense), out, lse)
    assert 0 < np.isfinite(out).sum() < out.size


@pytest.mark.parametrize("in_segments", [False, True])
@pytest.mark.parametrize(("factor", "scale"), [(1, 0.3), (1, 3.0), (1e20, 1e-30)])
def test_scores_of_pairs(in_segments, factor, scale):
    """Large ones are computed again from scaled queries, where the least of these are subnormal."""
    rng = np.random.default_rng(0)
    q, k = draw((2, 9, 8), (2, 300, 8))
    q, k = (np.float32(factor) * x for x in (q, k))
    q[:, :, 0] = 1e-10
    counts = np.array([0, 1, 31, 32, 33, 200, 0, 64, 65])
    begin = np.concatenate([[0], np.cumsum(counts)])
    keys = rng.integers(0, 300, begin[-1]).astype(np.int32)
    with mock.patch.object(entries, "_MOST_PADDED", 2):
        segments = entries.Chunk(0, 9, begin, keys, slice(None), None).segments(8)
    assert segments.keys.shape == (1 + 1 + 1 + 2 + 7 + 2 + 3, 32)
    steps = Steps(np.dtype(np.float32))
    found = np.full((2, begin[-1]), np.nan, np.float32)
    with np.errstate(all="ignore"), mock.patch.object(tile_ops, "_GATHERED", 5 * 32 * 8):
        queries = steps.queries(q, scale)
        assert (queries.scaled is not None) == (scale < 1e-9)
        steps.pair_scores(queries, counts, k, keys, found, segments if in_segments else None)
    rows = np.repeat(np.arange(9), counts)
    want = scale * (q[:, rows].astype(float) * k[:, keys].astype(float)).sum(-1)
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize(("counts", "head_dim"), [([3] * 90, 8), ([320], 512)])
def test_what_is_not_computed_in_segments(counts, head_dim):
    """Short rows, and products that NumPy would spread over threads of its own."""
    begin = np.concatenate([[0], np.cumsum(counts)])
    keys = np.zeros(begin[-1], np.int32)
    assert entries.Chunk(0, len(counts), begin, keys, slice(None), None).segments(head_dim) is None


@pytest.mark.parametrize("dtype", [DTYPES[0], DTYPES[3]], ids=str)
def test_scores_and_sparse_biases_of_thin_blocks(dtype):
    dense = np.random.default_rng(0).random((300, 400)) < 0.05
    dense[:, 128:200] = True
    q, k, v = draw((2, 300, 8), (2, 400, 8), (2, 400, 8), dtype=dtype)
    slopes = np.array([0.1, 0.2], np.float32)
    score = Score("s - slopes[h] * abs(i - j)", slopes=slopes)
    found, want = (attention(q, k, v, mask=x, score=score) for x in (BitMask(dense), dense))
    np.testing.assert_allclose(*(x.astype(float) for x in (found, want)), rtol=1e-2, atol=1e-3)
    kept = np.random.default_rng(1).random((300, 400)) < 0.3
    bias = np.where(kept, draw((300, 400), seed=2)[0], 0).astype(np.float32)
    found = attention(q, k, v, sparse.csr_array(bias), BitMask(dense))
    want = attention(q, k, v, bias, dense)
    np.testing.assert_allclose(*(x.astype(float) for x in (found, want)), rtol=1e-2, atol=1e-3)
