"""Attention under masks by the kernel for SM90, its own source run on the CPU."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import BitMask, reference
from fa_cupy.gpu.kernels.forward import VARIANTS
from tests.support.every_run import drawn, examples, only, some
from tests.support.kernel_attention import BANDS, DTYPES, blocks_of, check, draw, shuffled
from tests.support.planted import plant
from validation import emulator
from validation.emulator import calls

pytestmark = pytest.mark.emulator

SOURCE = "attention/fwd_sm90"
ROWS = [row for row in VARIANTS if row.sparse and row.source == SOURCE]
BY_DIM = {row.dim: row for row in ROWS}
BY_TILE = {128: BY_DIM[128], 64: BY_DIM[256]}  # keys of a tile: a whole block, and half of one
by_dim = pytest.mark.parametrize(
    "row", only(BY_DIM.values(), BY_DIM[64], BY_DIM[256]), ids=lambda row: row.name
)
by_tile = pytest.mark.parametrize("row", BY_TILE.values(), ids=lambda row: row.name)


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("row", some(ROWS, lambda row: row.sparse), ids=lambda row: row.name)
def test_every_row(row, options):
    rng, dtype = np.random.default_rng(row.dim), DTYPES[row.dtype]
    q, k, v = (draw(2, n, row.dim, dtype=dtype, seed=i) for i, n in enumerate((300, 450, 450)))
    check(row, q, k, v, blocks_of(rng, 2, 300, 450, density=0.5), seed=1, **options)
    mask, order = blocks_of(rng, 300, 450, density=0.1), shuffled(rng, (2,), 300)
    check(row, q, k, v, mask, seed=2, by_tile=True, order=order, **BANDS[1], **options)
    q, k, v = q[..., : row.dim - 8], k[..., : row.dim - 8], v[..., : row.dim - 16]
    check(row, q[:1], k[:1], v[:1], mask, seed=3, **BANDS[2], **options)


@examples(25)
@given(
    dim=drawn(sorted(BY_DIM), 64),
    lengths=st.tuples(st.integers(1, 400), st.integers(1, 700)),
    heads=st.sampled_from([(1, 1), (3, 3), (4, 2), (8, 1)]),
    entries=st.sampled_from([1, 2, None]),
    density=st.sampled_from([0.004, 0.05, 0.5, 0.95]),
    band=st.sampled_from(BANDS),
    biased=st.booleans(),
    by_tile=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_call_with_any_schedule(
    dim, lengths, heads, entries, density, band, biased, by_tile, seed
):
    row, rng = BY_DIM[dim], np.random.default_rng(seed)
    (q_len, k_len), (q_heads, kv_heads) = lengths, heads
    narrow, dtype = dim - 8 * int(rng.integers(0, 3)), DTYPES[row.dtype]
    q = draw(2, q_heads, q_len, narrow, dtype=dtype, seed=seed)
    k, v = (draw(2, kv_heads, k_len, narrow, dtype=dtype, seed=seed + i) for i in (1, 2))
    bias = draw(q_heads, 1, k_len, dtype=np.float32, seed=seed + 3) if biased else None
    # Some matrices, of which batch entries share those of `chosen`; or one for each.
    masks = blocks_of(rng, entries or 2 * q_heads, q_len, k_len, density=density)
    chosen = np.arange(2 * q_heads).reshape(2, q_heads) % len(masks)
    order = shuffled(rng, (2, q_heads), q_len) if rng.random() < 0.5 else None
    check(row, q, k, v, masks[chosen], bias, BitMask.from_dense(masks)[chosen], seed % 1000,
          order, by_tile, **band)  # fmt: skip


@by_dim
@pytest.mark.parametrize(
    ("band", "by_tile"),
    only([(BANDS[0], True), (BANDS[1], False)], (BANDS[1], False)),
    ids=str,
)
def test_hidden_keys_never_show_and_rows_without_keys_are_zero(row, band, by_tile):
    rng, dtype = np.random.default_rng(0), DTYPES[row.dtype]
    q, k, v = (draw(n, row.dim, dtype=dtype, seed=n) for n in (300, 400, 400))
    mask = blocks_of(rng, 300, 400, density=0.5)
    mask[:, [3, 130, 300]] = False
    mask[[0, 17, 299]] = False
    mask[128:256] = False  # a row of blocks that lists nothing
    k[3], v[3], v[130], k[300] = np.nan, np.nan, np.inf, -np.inf
    out, lse = check(row, q, k, v, mask, seed=5, by_tile=by_tile, **band)
    assert not out[[0, 17, 130, 299]].any()
    assert np.isneginf(lse[[0, 17, 130, 299]]).all()
    # What is seen shows: the row's result is not finite where the reference's is not.
    mask[20, 5], v[5] = True, np.inf
    out, _ = calls.attention(row, q, k, v, None, BitMask.from_dense(mask))
    assert np.isinf(out[20].astype(np.float32)).all()


@by_dim
def test_blocks_that_are_not_listed_are_not_read(row):
    """0 * NaN would be NaN and send a row the slow way, whose last bits differ."""
    dtype = DTYPES[row.dtype]
    q, k, v = (draw(n, row.dim, dtype=dtype, seed=n) for n in (256, 512, 512))
    states = np.kron([[2, 0, 1, 0], [0, 0, 0, 1]], np.ones((128, 128), int))
    random = np.random.default_rng(0).random((256, 512)) < 0.5
    mask = BitMask.from_dense((states == 2) | ((states == 1) & random))
    want = calls.attention(row, q, k, v, None, mask)
    k[128:256] = v[128:256] = np.nan
    got = calls.attention(row, q, k, v, None, mask)
    assert [x.tobytes() for x in got] == [x.tobytes() for x in want]


@pytest.mark.long
@by_tile
def test_neither_schedule_nor_order_nor_place_of_the_lists_shows(row):
    rng, dtype = np.random.default_rng(0), DTYPES[row.dtype]
    q, k, v = (draw(2, n, row.dim, dtype=dtype, seed=n) for n in (300, 500, 500))
    mask = blocks_of(rng, 2, 300, 500)
    found = set()
    for seed in range(12):
        order = shuffled(rng, (2,), 300) if seed % 2 else None
        result = calls.attention(row, q, k, v, None, mask, seed, order=order,
                                    by_tile=seed % 4 > 1, **BANDS[seed // 6])  # fmt: skip
        found.add((seed // 6, *(x.tobytes() for x in result)))
    assert len(found) == 2


@by_tile
@pytest.mark.parametrize("density", only((0.002, 0.03, 0.5), 0.03))
def test_scores_that_pass_every_reference(row, density):
    """Trust is lost at any tile, and rows have no reference until late."""
    rng, dtype = np.random.default_rng(1), DTYPES[row.dtype]
    q, k, v = (draw(2, n, row.dim, dtype=dtype, seed=n, scale=3) for n in (130, 900, 900))
    mask = rng.random((130, 900)) < density
    mask[:, 256:384] |= (rng.random(130) < 0.5)[:, None]
    mask[:50, :600] = False
    for seed, steep in enumerate((np.linspace(0.01, 2, 900), np.linspace(2, 0.01, 900))):
        k_steep = (k.astype(np.float32) * steep[:, None]).astype(dtype)
        check(row, q, k_steep, v, mask, seed=seed, by_tile=bool(seed))


@pytest.mark.parametrize("band", only(BANDS, BANDS[1], BANDS[2]), ids=str)
def test_an_all_true_mask_is_no_mask(band):
    """The same tiles in the same order as without a mask, where the tile is the same."""
    row = BY_DIM[128]
    plain = next(
        r for r in VARIANTS
        if r.source == SOURCE and not r.sparse
        and (r.dim, r.dtype) == (128, row.dtype)
    )  # fmt: skip
    q, k, v = (draw(n, 128, dtype=DTYPES[row.dtype], seed=n) for n in (200, 330, 330))
    want = calls.attention(plain, q, k, v, **band)
    got = calls.attention(row, q, k, v, None, np.ones((200, 330), bool), **band)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x.astype(np.float32), y.astype(np.float32), rtol=0, atol=2e-2)


def test_a_lost_row_does_not_spread():
    row, rng = BY_DIM[64], np.random.default_rng(0)
    q, k, v = (draw(n, 64, dtype=DTYPES[row.dtype], seed=n) for n in (100, 400, 400))
    mask = rng.random((100, 400)) < 0.3
    want, _ = calls.attention(row, q, k, v, None, mask)
    q[17] = np.nan
    got, lse = calls.attention(row, q, k, v, None, mask)
    others = np.arange(100) != 17
    assert got[others].tobytes() == want[others].tobytes()
    assert np.isnan(got[17].astype(np.float32)).all()
    assert np.isnan(lse[17])


# What stands in the kernel or its header, what is put there instead; keys of a tile of the row.
BUGS = {
    "the wrong half of a block's words": (
        64, ("first_bit = tile % kTilesPerBlock * (32 / kTilesPerBlock)", "first_bit = 0"),
    ),
    "words of other rows": (128, ("block[tid_x_again() - 128]", "block[tid_x_again() % 128]")),
    "words of the wrong place of K": (
        128, ("extract_words(shared.words[stage], tile",
              "extract_words(shared.words[1 - stage], tile"),
    ),
    "words are given back before all lanes have read them": (
        128, ("init(shared.k_empty[i], kSparse ? 128 * kGroups : 4 * kGroups);",
              "init(shared.k_empty[i], 4 * kGroups);"),
    ),
    "words are not counted at the barrier": (
        128, ("load_k(tile, words != nullptr ? 4 * kBlockWords : 0)", "load_k(tile, 0)"),
    ),
    "words are read before they have landed": (
        128, ("arrive_expect_tx(barrier, kKTileBytes + extra_bytes)",
              "arrive_expect_tx(barrier, kKTileBytes)"),
        ("cvta_to_shared(&shared.k_full[stage])", "cvta_to_shared(&shared.v_full[stage])"),
    ),
    "words are lost where scores are computed again": (
        64, ("mask.listed = reload_mask_words(p, work, own.tile, mask.visible_bits);",
             "mask.visible_bits[0][0] = mask.visible_bits[0][1] = 0xffffffffu;"),
    ),
    "scores are computed again for another tile": (
        128, ("mask.key_tile = reload_tile_number(p, work, own.tile);",
              "mask.key_tile = own.tile;"),
    ),
    "a tile's number is overwritten early": (
        128, ("wait(shared.k_empty[stage], k_pipe.parity() ^ 1);", ""),
    ),
    "values of the next tile": (128, ("load_v(previous_tile)", "load_v(tile)")),
    "a list ends a block early": (128, ("is_end ? band_blocks.end : band_blocks.begin",
                                        "is_end ? band_blocks.end - 1 : band_blocks.begin")),
    "a list begins a block late": (128, ("is_end ? band_blocks.end : band_blocks.begin",
                                         "is_end ? band_blocks.end : band_blocks.begin + 1")),
    "what a band hides of a listed block shows": (64, ("if (hides) {", "if (false) {")),
    "rows of blocks of another entry": (
        128, ("row_of_blocks(p.mask, entry, q_begin", "row_of_blocks(p.mask, 0, q_begin"),
    ),
    "a row that lists nothing reads a block": (
        128, ("return mask_blocks(p.k_len);", "return 0;"),
    ),
    "the place in a list is not written for all": (
        128, ("work.partial = begin + first;", "if (first > 0) work.partial = begin + first;"),
    ),
}  # fmt: skip


def check_seeds(row, source, q, k, v, mask):
    for seed in range(24):
        band = BANDS[seed % 4]
        got, lse = calls.attention(row, q, k, v, None, mask, seed, source, **band)
        want, want_lse = reference.attention(q, k, v, None, mask, **band)
        np.testing.assert_allclose(got.astype(np.float64), want, rtol=0, atol=0.05)
        np.testing.assert_allclose(lse, want_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("bug", some(BUGS, lambda bug: BUGS[bug][0]))
def test_a_planted_bug_is_found(bug, tmp_path):
    tile, *changes = BUGS[bug]
    rng, row = np.random.default_rng(1), BY_TILE[tile]
    source = plant(tmp_path, row.source, *changes)
    q, k, v = (draw(2, n, row.dim, dtype=DTYPES[row.dtype], seed=n) for n in (300, 600, 600))
    steep = np.linspace(0.01, 12, 600)[:, None]  # past what is trusted, later and later
    k = (k.astype(np.float32) * steep).astype(k.dtype)
    mask = np.stack([blocks_of(rng, 300, 600, density=0.5) for _ in range(2)])
    mask[1, 128:256] = False
    with pytest.raises((emulator.EmulationError, AssertionError)):
        check_seeds(row, source, q, k, v, mask)
