"""Gradients under masks by the kernels for SM90: their own source on the CPU."""

import functools
import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import BitMask
from tests.support.every_run import drawn, examples, only, some
from tests.support.kernel_attention import BANDS, DTYPES, blocks_of
from tests.support.kernel_gradients import case, check, rows_of, solve
from tests.support.planted import plant
from validation import emulator

pytestmark = pytest.mark.emulator
DIMS = (64, 96, 128, 192, 256)
KINDS = (64, 128, 192)  # by bwd_sm90, in two ways, and by the two kernels for wide dims


def mask_of(seed, *shape, density=None):
    """Blocks that are empty, full, or seen in part; a row and a column of blocks is hidden."""
    mask = blocks_of(np.random.default_rng(seed), *shape, density=density)
    mask[..., 128:256, :] &= shape[-2] <= 256
    mask[..., 256:384] &= shape[-1] <= 384
    return mask


@pytest.mark.parametrize(
    ("dim", "dtype"),
    only(itertools.product(DIMS, DTYPES), (64, "bfloat16"), (128, "float16"), (192, "bfloat16")),
)
def test_every_row(dim, dtype):
    mask = mask_of(dim, 2, 200, 300)
    check(case(dtype, (2, 2), (200, 300), (dim, dim), batch=1, mask=mask), seed=1)
    mask = mask_of(dim + 1, 4, 130, 390)
    call = case(dtype, (4, 2), (130, 390), (dim - 8, dim - 16), batch=1, dlse=True, mask=mask,
                **BANDS[1])  # fmt: skip
    check(call, seed=2, blocks=3, together=3)


@pytest.mark.parametrize("dim", KINDS)
def test_rows_and_columns_that_are_hidden(dim):
    """Queries that see no key, and keys that no query sees, have gradients of 0."""
    mask = mask_of(7, 300, 420, density=0.3)
    mask[5], mask[:, [3, 130]] = False, False
    dq, dk, dv = check(case("bfloat16", (2, 1), (300, 420), (dim, dim), mask=mask), seed=3)
    assert not dq[:, :, 128:256].any()
    assert not dq[:, :, 5].any()
    for x in (dk, dv):
        assert not x[:, :, 256:384].any()
        assert not x[:, :, [3, 130]].any()
    call = case("float16", (2, 1), (200, 150), (dim, dim), mask=np.zeros((200, 150), bool))
    assert not any(x.any() for x in solve(call))


@examples(25)
@given(
    dim=drawn(DIMS, 64),
    dtype=drawn(DTYPES, "float16"),
    lengths=st.tuples(st.integers(1, 400), st.integers(1, 500)),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 1), (4, 2)]),
    entries=st.sampled_from([1, 2, None]),
    density=st.sampled_from([0.004, 0.05, 0.5, 0.95]),
    band=st.sampled_from(BANDS),
    dlse=st.booleans(),
    layout=st.sampled_from([None, "blhd"]),
    seed=st.integers(0, 2**32),
    blocks=st.integers(1, 4),
)
def test_any_call_with_any_schedule(
    dim, dtype, lengths, heads, entries, density, band, dlse, layout, seed, blocks
):
    rng = np.random.default_rng(seed)
    # Some matrices, of which batch entries share those of `chosen`; or one for each.
    masks = blocks_of(rng, entries or heads[0], *lengths, density=density)
    chosen = np.arange(heads[0]) % len(masks)
    dims = tuple(dim - 8 * int(x) for x in rng.integers(0, 4, 2))
    call = case(dtype, heads, lengths, dims, batch=1, dlse=dlse, layout=layout,
                mask=masks[chosen], **band)  # fmt: skip
    bits = BitMask.from_dense(masks)[chosen] if seed % 2 else None
    check(call, bits=bits, seed=seed, blocks=blocks, together=blocks)


@pytest.mark.parametrize(
    ("dim", "band"),
    only([(dim, band) for dim in KINDS for band in BANDS[:2]], (64, BANDS[1]), (192, BANDS[0])),
)
def test_the_schedule_does_not_show(dim, band):
    """Bit for bit the same, whoever comes first: the order of all sums is fixed."""
    mask = mask_of(1, 2, 200, 650)
    call = case("bfloat16", (2, 1), (200, 650), (dim, dim), batch=1, mask=mask, **band)
    schedules = [(1, 1), (2, 1), (6, 6), (5, 5)] if band else [(1, 1), (3, 3), (6, 6), (6, 3)]
    found = {
        tuple(x.tobytes() for x in solve(call, seed=seed, blocks=blocks, together=together))
        for seed, (blocks, together) in enumerate(schedules)
    }
    assert len(found) == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("dim", "band"),
    only(
        [(64, 0), (64, 2), (96, 1), (128, 0), (128, 1), (192, 1), (192, 2), (256, 0), (256, 2)],
        (128, 1),
        (192, 2),
    ),
)
def test_an_all_true_mask_is_no_mask(dim, band):
    """The same tiles in the same order."""
    band = BANDS[band]
    call = case("float16", (2, 1), (200, 330), (dim, dim), batch=1, **band)
    masked = call._replace(options={**band, "mask": np.ones((200, 330), bool)})
    for x, y in zip(solve(call), solve(masked), strict=True):
        assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize("dim", only(KINDS, 64, 192))
def test_blocks_that_are_hidden_are_not_read(dim):
    """0 * NaN would be NaN, and there is nobody here to compute such rows again."""
    states = np.array([[0, 2, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]]).repeat(128, 0).repeat(128, 1)
    random = np.random.default_rng(0).random(states.shape) < 0.5
    mask = (states == 2) | ((states == 1) & random)
    call = case("bfloat16", (2, 1), mask.shape, (dim, dim), batch=1, mask=mask)
    rows = rows_of(call)[:-1]
    want = solve(call, rows=rows)
    k, v = call.k.copy(), call.v.copy()
    k[:, :, :128] = v[:, :, :128] = np.nan
    for x, y in zip(solve(call._replace(k=k, v=v), rows=rows), want, strict=True):
        assert x.tobytes() == y.tobytes()
    # Queries of the second row of blocks see keys of the last column only.
    q, dout = call.q.copy(), call.dout.copy()
    q[:, :, 128:] = dout[:, :, 128:] = np.nan
    _, dk, dv = solve(call._replace(q=q, dout=dout), rows=rows)
    for x, y in ((dk, want[1]), (dv, want[2])):
        assert x[:, :, :384].tobytes() == y[:, :, :384].tobytes()
        assert np.isnan(x[:, :, 384:].astype(np.float32)).any()


def one_block(turned):
    """A mask of one block that is seen whole, with many words of hidden ones around it."""
    mask, rows = np.zeros((128 * 100, 130), bool), slice(128 * 70, 128 * 71)
    mask[rows] = True
    return (mask.T if turned else mask), rows


def check_one_block(dim, turned, sources=None):
    """It has the gradients that it has alone, and all others have 0."""
    mask, rows = one_block(turned)
    call = case("float16", (1, 1), mask.shape, (dim, dim), batch=1, mask=mask)
    found = dict(zip("qkv", solve(call, sources=sources or {}), strict=True))
    names = ("k", "v") if turned else ("q", "dout")
    part = {name: getattr(call, name)[:, :, rows] for name in names}
    want = dict(zip("qkv", solve(call._replace(options={}, **part)), strict=True))
    for name, x in found.items():
        if name in names:
            assert not np.delete(x, np.r_[rows], axis=2).any()
            x = x[:, :, rows]
        assert x.tobytes() == want[name].tobytes()


@pytest.mark.parametrize(
    ("dim", "turned"),
    only(itertools.product(KINDS, (False, True)), (64, True), (192, False)),
)
def test_a_block_among_hidden_ones_is_as_it_is_alone(dim, turned):
    check_one_block(dim, turned)


@pytest.mark.long
@pytest.mark.parametrize(
    ("dim", "change"),
    [
        (64, ("from = (from / 32 + 1) * 32;", "return end;")),
        (128, ("from = from / 32 * 32 - 1;", "return begin - 1;")),
        (128, ("begin = next; }", "return count; }")),
        (128, ("max(from - __clz(remaining_bits), begin - 1)", "from")),
    ],
    ids=["upwards", "downwards", "counted", "found"],
)
def test_walks_beyond_32_blocks_are_tested(dim, change, tmp_path):
    call = case("float16", (1, 1), (1, 1), (dim, dim), mask=np.ones((1, 1), bool))
    (row,) = (row for row in rows_of(call) if row.source == "attention/bwd_sm90")
    sources = {row.entry: plant(tmp_path, row.source, change)}
    with pytest.raises((emulator.EmulationError, AssertionError)):
        check_one_block(dim, False, sources)


# Of a kernel and a padded dim: what is said, then what stands there and what is put in its place.
# Where nothing is said, what comes out differs.
BUGS = {
    "hidden blocks are waited for": (
        "bwd_sm90", 128, "deadlock|", ("semaphore_value = visible_blocks_between(",
                                       "semaphore_value += 0 * visible_blocks_between("),
    ),
    "the first of the blocks that a tile sees does not begin its sums": (
        "bwd_sm90", 64, "deadlock|",
        ("count - prefix_count(first - 1)", "count - prefix_count(first)"),
    ),
    "a block is counted twice": (
        "bwd_sm90", 64, "deadlock|",
        ("kReverseKvOrder ? work.tile + 1 : end", "kReverseKvOrder ? work.tile : end"),
    ),
    "sums that nobody wrote are rounded": (
        "bwd_convert_dq", 64, "", ("keys.end - 1, block) > 0", "keys.end - 1, block) >= 0"),
    ),
    "words of the other half of a block's queries": (
        "bwd_sm90", 128, "", ("visible_bits[h] = visible_bits[h] >> tile % 2 * 16",
                              "visible_bits[h] = visible_bits[h] >> 0"),
    ),
    "words of the other warpgroup's keys": (
        "bwd_sm90", 64, "", ("shared.tile_info[q_stage].words_index, 64 * c.group,",
                             "shared.tile_info[q_stage].words_index, 64 * (1 - c.group),"),
    ),
    "words of the tile before": (
        "bwd_sm90", 128, "", ("load_mask_words(visible_bits, c.params.mask, "
                              "c.shared.tile_info[q_stage].words_index",
                              "load_mask_words(visible_bits, c.params.mask, "
                              "c.shared.tile_info[(q_stage + 2) % 3].words_index"),
    ),
    "what a band hides of a listed block shows": (
        "bwd_sm90", 64, "", ("if (needs_mask) visible_bits[h] &=", "if (0) visible_bits[h] &="),
    ),
    "steps are counted without the mask": (
        "bwd_sm90", 128, "deadlock|does not end",
        ("if (work.has_no_query) work.steps = 1;",
         "work.steps = (work.end - work.begin) * params.group;"),
    ),
    "a note is overwritten early": (
        "bwd_sm90", 64, "",
        ("wait(shared.q_empty[at], pipe.parity() ^ 1); if constexpr (kSparse) shared.tile_info",
         "shared.tile_info[at] = tile_info; wait(shared.q_empty[at], pipe.parity() ^ 1); "
         "shared.tile_info"),
    ),
    "rows of blocks of the group's first head": (
        "bwd_sm90", 128, "deadlock|",
        ("begin_block_row(cursor, block_row_of_keys<kTileN>(params, work, head)",
         "begin_block_row(cursor, block_row_of_keys<kTileN>(params, work, 0)"),
    ),
    "words of the other half of a block's keys": (
        "bwd_dkdv_sm90", 192, "",
        ("c.work.tile % 2 * 64, thread_in_group()", "0, thread_in_group()"),
    ),
    "gradients of scores that are hidden count": (
        "bwd_dkdv_sm90", 192, "",
        ("for (int h = 0; h < 2; ++h) mask_scores_of_row(s,",
         "for (int h = 0; h < 1; ++h) mask_scores_of_row(s,"),
    ),
    "K is given back before all lanes have read beside it": (
        "bwd_dq_sm90", 192, "",
        ("kSparse ? release_per_lane(c.shared.k_empty[k_stage]) :",
         "lane_in_warp() > 0 ? void() :"),
        ("(kSparse ? kArrivalsPerWarp : 1) * 4 * kGroups", "4 * kGroups"),
        ("wgmma_wait_group<kFirst || kAccumulateFirst ? 1 : 2>(); "
         "apply_band(visible_bits, c, k_stage);",
         "wgmma_wait_group<kFirst ? 1 : 2>(); release(c.shared.k_empty[k_stage]); "
         "apply_band(visible_bits, c, k_stage);"),
    ),
    "queries that see no key go through a block that there is": (
        "bwd_dq_sm90", 192, "",
        ("work.begin = mask_blocks(p.k_len) * kMaskBlock / kTileN;", "work.begin = 4;"),
    ),
}  # fmt: skip


@functools.cache
def solved(dim):
    """A call that bugs are planted for, its rows and its gradients.

    No row is computed again, and keys of a column of blocks that is hidden are NaN.
    """
    mask = np.stack([mask_of(2, 300, 650, density=0.5), mask_of(9, 300, 650, density=0.9)])
    call = case("bfloat16", (2, 1), (300, 650), (dim, dim), batch=1, mask=mask, **BANDS[1])
    call.k[:, :, 256:384] = np.nan
    rows = rows_of(call)[:-1]
    want = solve(call, rows=rows)
    assert all(np.isfinite(x.astype(np.float32)).all() for x in want)
    return call, rows, want


@pytest.mark.parametrize("bug", some(BUGS, lambda bug: BUGS[bug][0]))
def test_a_planted_bug_is_found(bug, tmp_path):
    kind, dim, message, *changes = BUGS[bug]
    call, rows, want = solved(dim)
    row = next(row for row in rows if row.source.endswith(kind))
    sources = {row.entry: plant(tmp_path, row.source, *changes)}
    for seed in range(40):
        try:
            got = solve(call, rows=rows, seed=seed, blocks=3, together=3, sources=sources)
        except emulator.EmulationError as error:
            if re.search(message, str(error)):
                return
            continue
        if any(x.tobytes() != y.tobytes() for x, y in zip(got, want, strict=True)):
            assert re.search(message, ""), "what comes out differs, and nothing was said"
            return
    pytest.fail("40 seeds did not show it")
