"""Attention under masks by the kernel for SM80, its own source run on the CPU."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import BitMask
from fa_cupy.gpu.kernels.attention import attention_params
from fa_cupy.gpu.kernels.forward import VARIANTS
from tests.support.every_run import drawn, examples, only, some
from tests.support.kernel_attention import BANDS, DTYPES, blocks_of, check, draw, shuffled
from tests.support.planted import plant
from validation import emulator
from validation.emulator import calls

pytestmark = pytest.mark.emulator

ROWS = [row for row in VARIANTS if row.sparse and row.source == "attention/fwd_sm80"]
BY_DIM = {row.dim: row for row in ROWS}
KINDS = [BY_DIM[dim] for dim in (32, 64, 128, 256)]  # of 96 and 192 the tiles are those of the next
of_kinds = pytest.mark.parametrize("row", only(KINDS, BY_DIM[128]), ids=lambda row: row.name)


@pytest.mark.parametrize("row", some(ROWS, lambda row: row.dtype), ids=lambda row: row.name)
def test_every_row(row):
    rng, dtype = np.random.default_rng(row.dim + 1), DTYPES[row.dtype]  # blocks of all kinds
    q, k, v = (draw(2, n, row.dim, dtype=dtype, seed=i) for i, n in enumerate((200, 330, 330)))
    check(row, q, k, v, blocks_of(rng, 2, 200, 330, density=0.5), seed=1)
    mask = blocks_of(rng, 200, 330, density=0.1)
    check(row, q, k, v, mask, seed=2, by_tile=True, order=shuffled(rng, (2,), 200), **BANDS[1])
    q, k, v = q[..., : row.dim - 3], k[..., : row.dim - 3], v[..., : row.dim - 5]  # not aligned
    check(row, q[:1], k[:1], v[:1], mask, seed=3, softcap=3.0, **BANDS[2])


@pytest.mark.parametrize(("axes", "q_len", "blocks"), [(7, 20, None), (2, 130, 3)])
def test_calls_of_several_launches(axes, q_len, blocks, monkeypatch):
    """More batch axes than a launch walks, and more blocks than a grid has."""
    if blocks:
        monkeypatch.setattr(attention_params, "MAX_GRID", blocks)
    row, rng = BY_DIM[32], np.random.default_rng(axes)
    turned = (*range(axes)[::-1], axes, axes + 1)  # so that axes do not merge
    q, k, v = (
        draw(*[2] * axes, n, 32, dtype=DTYPES[row.dtype], seed=n).transpose(turned)
        for n in (q_len, 30, 30)
    )
    mask = rng.random((*[2] * axes, q_len, 30)) < 0.3
    check(row, q, k, v, mask, order=shuffled(rng, (2,) * axes, q_len))


@examples(25)
@given(
    row=drawn(BY_DIM.values(), BY_DIM[128]),
    lengths=st.tuples(st.integers(1, 400), st.integers(1, 600)),
    heads=st.sampled_from([(1, 1), (3, 3), (4, 2)]),
    shared=st.booleans(),
    band=st.sampled_from(BANDS),
    biased=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_call_with_any_schedule(row, lengths, heads, shared, band, biased, seed):
    rng, dtype = np.random.default_rng(seed), DTYPES[row.dtype]
    (q_len, k_len), (q_heads, kv_heads) = lengths, heads
    q = draw(2, q_heads, q_len, row.dim, dtype=dtype, seed=seed)
    k, v = (draw(2, kv_heads, k_len, row.dim, dtype=dtype, seed=seed + i) for i in (1, 2))
    bias = draw(q_heads, 1, k_len, dtype=np.float32, seed=seed + 3) if biased else None
    # A mask for each head, of which batch entries share those of `chosen`.
    masks = blocks_of(rng, 1 if shared else q_heads, q_len, k_len)
    chosen = rng.integers(0, len(masks), (2, q_heads))
    order = shuffled(rng, (2, q_heads), q_len) if rng.random() < 0.5 else None
    check(row, q, k, v, masks[chosen], bias, BitMask.from_dense(masks)[chosen], seed % 1000,
          order, bool(rng.random() < 0.5), **band)  # fmt: skip


@of_kinds
@pytest.mark.parametrize(("band", "by_tile"), [(BANDS[0], True), (BANDS[1], False)], ids=str)
def test_hidden_keys_never_show_and_rows_without_keys_are_zero(row, band, by_tile):
    rng, dtype = np.random.default_rng(0), DTYPES[row.dtype]
    q, k, v = (draw(n, row.dim, dtype=dtype, seed=n) for n in (300, 400, 400))
    mask = blocks_of(rng, 300, 400, density=0.5)
    mask[:, [3, 130, 300]] = False
    mask[[256, 270, 299]] = False
    mask[:128, :2], mask[:128, 384:] = True, True  # partial and full blocks, both on the slow way
    mask[128:256] = False  # a row of blocks that lists nothing
    k[3], v[3], v[130], k[300] = np.nan, np.nan, np.inf, -np.inf
    out, lse = check(row, q, k, v, mask, seed=5, by_tile=by_tile, **band)
    assert not out[[256, 270, 130, 299]].any()
    assert np.isneginf(lse[[256, 270, 130, 299]]).all()
    # What is seen shows: the row's result is not finite where the reference's is not.
    mask[20, 5], v[5] = True, np.inf
    out, _ = calls.attention(row, q, k, v, None, BitMask.from_dense(mask))
    assert np.isinf(out[20].astype(np.float32)).all()


@examples(15)
@given(
    row=st.sampled_from([BY_DIM[32], BY_DIM[96]]),
    width=st.integers(0, 9000),
    left=st.booleans(),
    kinds=st.sampled_from([(0, 1, 2), (1,), (1, 2), (2,)]),
    seed=st.integers(0, 2**32),
)
def test_a_band_cuts_its_piece_out_of_long_lists(row, width, left, kinds, seed):
    """Of more blocks than a warp looks at in one go."""
    rng, k_len = np.random.default_rng(seed), 9000
    q, k, v = (draw(n, row.dim, dtype=DTYPES[row.dtype], seed=n) for n in (5, k_len, k_len))
    blocks = rng.choice(kinds, 71).repeat(128)[:k_len]
    mask = (blocks == 2) | ((blocks == 1) & (rng.random((5, k_len)) < 0.5))
    band = {"window": (width, 0), "causal_align": "bottom_right"}
    if left:
        band = {"window": (0, width), "causal_align": "top_left"}
    check(row, q, k, v, mask, seed=seed % 100, by_tile=bool(seed % 2), **band)


@of_kinds
def test_blocks_that_are_not_listed_are_not_read(row):
    """0 * NaN would be NaN and send a row the slow way, whose last bits differ."""
    dtype = DTYPES[row.dtype]
    q, k, v = (draw(n, row.dim, dtype=dtype, seed=n) for n in (256, 512, 512))
    states = np.array([[2, 0, 1, 0], [0, 0, 0, 1]])
    random = np.random.default_rng(0).random((256, 512)) < 0.5
    mask = np.kron(states, np.ones((128, 128), int))
    mask = BitMask.from_dense((mask == 2) | ((mask == 1) & random))
    want = calls.attention(row, q, k, v, None, mask)
    k[128:256] = v[128:256] = np.nan
    got = calls.attention(row, q, k, v, None, mask)
    assert [x.tobytes() for x in got] == [x.tobytes() for x in want]


@of_kinds
def test_neither_schedule_nor_order_nor_place_of_the_lists_shows(row):
    rng, dtype = np.random.default_rng(0), DTYPES[row.dtype]
    q, k, v = (draw(n, row.dim, dtype=dtype, seed=n) for n in (200, 300, 300))
    mask = blocks_of(rng, 200, 300, density=0.5)
    found = set()
    for seed in range(5):
        order = shuffled(rng, (), 200) if seed % 2 else None
        result = calls.attention(row, q, k, v, None, mask, seed, order=order,
                                    by_tile=seed > 2, **BANDS[1])  # fmt: skip
        found.add(tuple(x.tobytes() for x in result))
    assert len(found) == 1


@pytest.mark.long
def test_an_all_true_mask_is_no_mask():
    """The same tiles in the same order as without a mask, where the tile is the same."""
    plain = {row.dim: row for row in VARIANTS if not row.sparse and row.source == ROWS[0].source}
    row = BY_DIM[128]
    q, k, v = (draw(n, 128, dtype=DTYPES[row.dtype], seed=n) for n in (200, 330, 330))
    for band in BANDS:
        want = calls.attention(plain[128], q, k, v, **band)
        got = calls.attention(row, q, k, v, None, np.ones((200, 330), bool), **band)
        assert [x.tobytes() for x in got] == [x.tobytes() for x in want]


# What stands in the kernel, what is put there instead; on which row.
BUGS = {
    "the wrong half of a block's words": (128, (">> at.in_block * (kTileN / 4)", ">> 0")),
    "words of the next block come before this one's are used": (
        64,
        ("load_words(params, shared, tiles, tile + 1);\n      cp_async_commit_group();",
         "cp_async_commit_group();"),
        ("if constexpr (kSparse) load_block_index(params, shared, tiles, tile + 2);",
         "if constexpr (kSparse) load_words(params, shared, tiles, tile + 1), "
         "load_block_index(params, shared, tiles, tile + 2);"),
    ),
    "words are not waited for": (
        128, ("load_words(params, shared, tiles, tile + 1);\n      cp_async_commit_group();",
              "load_words(params, shared, tiles, tile + 1);"),
    ),
    "the number of a block comes a tile late": (
        32, ("load_block_index(params, shared, tiles, tile + 2);",
             "load_block_index(params, shared, tiles, tile + 1);"),
    ),
    "words of other rows": (256, ("(work.q_begin % kMaskBlock + warp", "(warp")),
    "words of the first tile only": (192, ("in_block == 0 || after_full == 0", "after_full == 0")),
    "the second half of a block is taken to have its words": (
        128, ("in_block == 0 || after_full == 0", "in_block == 0"),
    ),
    "a band ends a list a tile early": (128, ("last ? tiles.end : tiles.begin",
                                              "last ? tiles.end - 1 : tiles.begin")),
    "a band begins a list a tile late": (128, ("last ? tiles.end : tiles.begin",
                                               "last ? tiles.end : tiles.begin + 1")),
    "full blocks at the edge are not masked": (
        128, ("if (key < band.full_begin || key >= band.full_end)", "if (false)"),
    ),
    "rows of blocks of another entry": (
        96, ("row_of_blocks(params.mask, shared.work.batch,", "row_of_blocks(params.mask, 0,"),
    ),
}  # fmt: skip


ALWAYS = "the wrong half of a block's words", "a band ends a list a tile early"


@pytest.mark.parametrize("bug", only(BUGS, *ALWAYS))
def test_a_planted_bug_is_found(bug, tmp_path):
    dim, *changes = BUGS[bug]
    rng, row = np.random.default_rng(1), BY_DIM[dim]
    source = plant(tmp_path, row.source, *changes)
    q, k, v = (draw(2, n, row.dim, dtype=DTYPES[row.dtype], seed=n) for n in (200, 400, 400))
    masks = [blocks_of(rng, 2, 200, 400, density=0.5) for _ in range(3)]

    def compare():
        for seed in range(9):
            call = (row, q, k, v, None, masks[seed // 3], seed)
            got = calls.attention(*call, source, **BANDS[seed % 3])
            want = calls.attention(*call, **BANDS[seed % 3])
            for x, y in zip(got, want, strict=True):
                assert x.tobytes() == y.tobytes()

    with pytest.raises((emulator.EmulationError, AssertionError)):
        compare()
