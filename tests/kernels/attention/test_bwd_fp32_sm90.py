"""Gradients in float32 by wgmma on pairs of float16, on the CPU.

They are ``bwd_preprocess_fp32`` with pairs for wgmma, ``bwd_dq_fp32_sm90`` and
``bwd_dkdv_fp32_sm90``. What they have in common with the kernels of mma.sync is tested with these,
and what differs where two warpgroups share rows in ``test_bwd_fp32_shared_rows``.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy.gpu.kernels.attention.full_precision.gradients import (
    bwd_dkdv_fp32_sm90,
    bwd_dq_fp32_sm90,
    bwd_preprocess_fp32,
)
from fa_cupy.gpu.kernels.attention_backward import select
from fa_cupy.gpu.kernels.backward import Wanted
from fa_cupy.gpu.kernels.score import ScoreMod
from tests.kernels.attention import test_bwd_fp32 as of_mma
from tests.support import packed_sequences
from tests.support.every_run import drawn, examples, only
from tests.support.full_precision_gradients import (
    arrays_of,
    check_any,
    check_bias,
    check_mask,
    check_packed,
    definition,
    far_scores,
    solve,
)
from tests.support.kernel_attention import BANDS, any_sinks
from tests.support.planted import plant
from validation import emulator

pytestmark = pytest.mark.emulator

SINGLE, TOP_LEFT = of_mma.SINGLE, of_mma.TOP_LEFT
#: The rows of a call, by dim.
CHAINS, SPARSE = (
    {
        dq.dim: (first, dq, dkdv)
        for first in bwd_preprocess_fp32.SWIZZLED
        for dq, dkdv in zip(bwd_dq_fp32_sm90.VARIANTS, bwd_dkdv_fp32_sm90.VARIANTS, strict=True)
        if first.dim == dq.dim == dkdv.dim and dq.sparse == dkdv.sparse == sparse
    }
    for sparse in (False, True)
)
D64 = CHAINS[64]
# Of single keys, data that show the order of low parts: few do.
ORDERED = 23


@pytest.mark.parametrize("dim", only(CHAINS, 64, 128, 256))
def test_every_row(dim, tmp_path):
    """Of rows that look right because they were computed again nothing would be known."""
    rows = CHAINS[dim]
    sources = of_mma.sources_without(tmp_path, rows)
    for seed, band in enumerate(BANDS[:3]):
        arrays = arrays_of(rows, (150, 190), less=(seed, 2 * seed), seed=seed)
        of_mma.check(rows, arrays, seed=seed, sources=sources, truncating=seed == 1, **band)


@pytest.mark.parametrize("data", of_mma.DATA)
def test_as_good_as_plain_float32(data):
    change, by_row = of_mma.DATA[data]
    arrays = arrays_of(D64, (120, 150), (1, 1), less=(32, 32))
    arrays = [x.astype(SINGLE) for x in change(*arrays)]
    of_mma.check(D64, arrays, by_row=by_row, truncating=True, **TOP_LEFT)


def check_columns(rows, less=(0, 0), **call):
    """Columns of dV, where a single row of dO has a large number."""
    arrays = arrays_of(rows, (120, 100), (1, 1), less=less)
    arrays[0][..., 77, 5] = 1e9
    found, want, plain = (
        x[2].swapaxes(-1, -2)
        for x in (
            solve(rows, arrays, truncating=True, **call),
            definition(arrays),
            definition(arrays, dtype=SINGLE),
        )
    )
    (error,), (usual,) = (of_mma.errors([x], [want], rows=True) for x in (found, plain))
    limit = max(2 * usual.max(), of_mma.LIMIT)
    assert error.max() <= limit, (error.max(), limit)


@pytest.mark.parametrize("dim", only(CHAINS, 64))
def test_a_large_number_leaves_other_columns_as_exact(dim):
    check_columns(CHAINS[dim])


@pytest.mark.parametrize("dim", only(CHAINS, 64))
def test_scores_far_below_others_are_not_computed_again(dim, tmp_path):
    """Half of the queries see a key that is far above the others, for the rest it is far below."""
    rows = CHAINS[dim]
    arrays = arrays_of(rows, (120, 100), (1, 1))
    arrays[2][..., 61, 5] = 1e9
    of_mma.check(rows, arrays, sources=of_mma.sources_without(tmp_path, rows))


def test_long_sequences():
    """Where tensor cores add up a few terms at a time, cutting them shows no more than this."""
    for lengths in ((1000, 60), (60, 1000)):
        arrays = arrays_of(D64, lengths, (1, 1))
        of_mma.check(D64, arrays, times=1.6, truncating=True)


@examples(20)
@given(
    rows=drawn([*CHAINS.values()], D64),
    lengths=st.tuples(st.integers(1, 200), st.integers(1, 200)),
    heads=st.sampled_from([(1, 1), (4, 2)]),
    less=st.tuples(st.integers(0, 20), st.integers(0, 31)),
    band=st.sampled_from(BANDS),
    scale=st.sampled_from([None, -0.3, 1e-3, 0.0, 3.0]),
    sinks=st.booleans(),
    dlse=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_call(rows, lengths, heads, less, band, scale, sinks, dlse, seed):
    rng = np.random.default_rng(seed)
    options = {**band, "scale": scale}
    if sinks:
        options["sinks"] = any_sinks(rng, 1, heads[0], lengths[0])
    given = rng.standard_normal((1, heads[0], lengths[0])).astype(SINGLE) if dlse else None
    arrays = arrays_of(rows, lengths, heads, less, seed)
    check_any(rows, arrays, 0.0, dlse=given, seed=seed, **options)


@examples(20)
@given(
    rows=drawn([*SPARSE.values()], SPARSE[64]),
    heads=st.sampled_from([(1, 1), (4, 2)]),
    own=st.booleans(),
    lengths=st.tuples(st.integers(1, 200), st.integers(1, 200)),
    band=st.sampled_from(BANDS),
    spoiled=st.booleans(),
    far=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_mask(rows, heads, own, lengths, band, spoiled, far, seed):
    """Of each head or of all, with NaN in a key and a value, and with scores that are far."""
    size = 2.0**10 if far else 0
    check_mask(rows, 0.0, (8, 16), size, heads, own, lengths, band, spoiled, seed)


@pytest.mark.parametrize(
    ("axes", "softcap"),
    only(
        [((True, True, True), 0.0), ((True, False, True), 2.0), ((False, True, False), 0.0)],
        ((True, True, True), 0.0),
    ),
)
def test_scores(axes, softcap):
    """Biases of pairs, of keys and of queries, which may hide pairs; softcaps."""
    for seed, band in enumerate(BANDS[:2]):
        check_bias(D64, 0.0, (8, 8), axes, np.float32, (150, 70), band, softcap, True, seed)


@examples(20)
@given(
    lengths=packed_sequences.packed_lengths(100),
    band=st.sampled_from(BANDS),
    seed=st.integers(0, 2**32),
)
def test_any_packed_sequences(lengths, band, seed):
    check_packed(D64, 0.0, (8, 8), lengths, band, 0.0, seed)


@examples(20)
@given(
    name=st.sampled_from(["dout", "q", "k", "v"]),
    band=st.sampled_from(BANDS),
    lengths=st.tuples(st.integers(1, 80), st.integers(1, 80)),
    value=st.sampled_from([np.nan, np.inf, -np.inf, 1e-42, 1e5]),
    seed=st.integers(0, 2**32),
)
def test_extraordinary_numbers(name, band, lengths, value, seed):
    """Those that are not finite show where they belong: not in other rows, nor in hidden pairs.

    A number is beyond the range of float16. Of a row, numbers that are far below its largest one
    lose digits: where that is 1e9, other numbers are off by more than float32 rounds.
    """
    rng = np.random.default_rng(seed)
    arrays = arrays_of(D64, lengths, less=(8, 16), seed=seed)
    spoiled = arrays[("dout", "q", "k", "v").index(name)]
    spoiled[tuple(rng.integers(0, spoiled.shape))] = value
    check_any(D64, arrays, 0.0, seed=seed, **band)


@pytest.mark.parametrize("size", only([2.0**6, 2.0**11, 2.0**60], 2.0**11))
def test_scores_that_are_far(size):
    """The best keys of a row have the same score, and others are far below: weights sum to 1."""
    arrays, dlse = far_scores(np.random.default_rng(3), D64, (150, 170), size)
    options = {**BANDS[1], "scale": 1.0}
    found = solve(D64, arrays, dlse=dlse, **options)
    for x, y in zip(found, definition(arrays, dlse=dlse, **options), strict=False):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5 * float(np.abs(y).max()))


@pytest.mark.parametrize("size", [1e6, 1e9])
@pytest.mark.parametrize("truncating", [False, True])
def test_the_weight_of_a_single_key_is_one(size, truncating):
    of_mma.check_single_keys(D64, size, ORDERED, truncating=truncating)


@pytest.mark.parametrize("size", [1.0, 1e6])
def test_a_log_sum_exp_of_more_keys_is_used_as_given(size):
    of_mma.check_more_keys(D64, size)


def test_weights_of_rounded_scores():
    of_mma.check_cancelling_products(D64)
    of_mma.check_weights_by_hand(D64)


def test_rows_of_no_pair_are_zeros():
    arrays = arrays_of(D64, (190, 20))
    dq, _, _ = of_mma.check(D64, arrays, window=(3, 0), causal_align="top_left")
    assert not dq[..., 60:, :].any()
    _, dk, dv = of_mma.check(D64, arrays_of(D64, (20, 190)), **TOP_LEFT)
    assert not dk[..., 60:, :].any()
    assert not dv[..., 60:, :].any()


@pytest.mark.parametrize("offset", [1, 3])
def test_arrays_that_are_not_aligned(offset):
    """Rows of an odd number of elements, and arrays that begin at any of them."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, 2, 50, 67), SINGLE) for _ in range(4)]
    of_mma.check(D64, [x[..., offset : offset + 47] for x in arrays], **BANDS[1])


def test_the_schedule_does_not_show():
    arrays = arrays_of(D64, (140, 170))
    found = {
        tuple(x.tobytes() for x in solve(D64, arrays, seed=seed, **BANDS[1])) for seed in range(3)
    }
    assert len(found) == 1


def test_which_calls_they_compute():
    """All on Hopper in dims above 32, whatever the scores and masks are."""
    for dim, of in ((33, 64), (64, 64), (65, 128), (128, 128), (129, 256), (256, 256)):
        assert select(Wanted("float32", dim, mapped=False), "sm_90a") == CHAINS[of]
    assert select(Wanted("float32", 100, masked=True), "sm_90a") == SPARSE[128]
    score = ScoreMod(softcap=True)
    found = select(Wanted("float32", 64, score=score, packed=True), "sm_90a")
    assert found[1:] == tuple(row.for_score(score).for_sequences(True) for row in D64[1:])
    for target, dim in (("sm_80", 64), ("sm_100", 128), ("sm_90a", 32)):
        found = select(Wanted("float32", dim), target)
        assert [row.kernel for row in found] == [
            "bwd_preprocess_fp32", "bwd_dq_fp32", "bwd_dkdv_fp32",
        ]  # fmt: skip
        assert not found[0].swizzled
    assert not select(Wanted("float32", 257), "sm_90a")


# By what they show in: the kernel, what is changed, and into what.
BUGS = {
    "a tile is read before it is there": (
        "dq", "wait_for_array(shared, pipeline, 1); start_low(", "start_low(",
    ),
    "what is known of rows is read before it is there": (
        "dq", "wait_for_array(shared, pipeline, 0); start_low", "start_low",
    ),
    "a tile is overwritten while it is read": (
        "dkdv", "wait(shared.empty[stage][1], pipeline.parity() ^ 1);", "",
    ),
    "an array is given back before it has been read": (
        "dkdv", "add_product(shared, stage, 1, weights, dv);",
        "release_per_lane(shared.empty[stage][1]); add_product(shared, stage, 1, weights, dv); "
        "if (false)",
    ),
    "low parts of queries are left out": (
        "dq", "multiply_parts<kFirst, 1 - kFirst>(x,", "multiply_parts<0, 0>(x,",
    ),
    "low parts of keys are left out": (
        "dkdv", "multiply_parts<1 - kFirst, kFirst>(x, a, b, true);", "",
    ),
    "low parts of keys come first in one of the kernels": ("dkdv", "kOwnKeys ? 0 : 1", "1"),
    "low parts keep their factor": (
        "dq", "x[0][e / 4][e % 4] *= kLowInverse;", "x[0][e / 4][e % 4] *= 1.0f;",
    ),
    "a low part of a weight is left out": ("dkdv", "part == 0 ? two.low", "part == 0 ? 0"),
    "high parts meet low ones as they are": (
        "dq", "part == 1 && !kMixed ? x.smaller[j][r % 2] : two.high", "two.high",
    ),
    "a product is touched while it is computed": (
        "dq", "start_product(product, p, tile, part); wgmma_wait_group<0>();",
        "start_product(product, p, tile, part);",
    ),
    "rows of the second warpgroup are those of the first": (
        "dq", "tid_x_again() / 128 * (8 * kEightRowsBytes)", "0",
    ),
    "queries of a head are those of the first one": (
        "dkdv", "work.entry + at.head) + at.tile", "work.entry) + at.tile",
    ),
    "tiles are copied once where they are read twice": (
        "dq", "shared.work.any_far != 0 ? 2 : 1", "1",
    ),
    "rows are not swizzled": (
        "preprocess", "col / 8 % 8 ^ static_cast<int>(row % 8)", "col / 8 % 8",
    ),
    "dV is scaled": ("dkdv", "p.v_dim, dv, 1.0f);", "p.v_dim, dv, p.scale);"),
}  # fmt: skip


def cases():
    """Calls that bugs are planted for."""
    arrays = arrays_of(D64, (140, 150), (2, 1))
    dlse = np.random.default_rng(0).standard_normal((1, 2, 140)).astype(SINGLE)
    far = [x.copy() for x in arrays]
    far[1][..., ::7, :] = 0  # equal scores
    far[1][..., ::7, 0], far[2][..., 0] = 2.0**20, 1.0
    yield arrays, {"dlse": dlse, **TOP_LEFT}
    yield far, {"dlse": dlse}


# Of rows and scores of all sizes.
MIXED_BUGS = {
    "rows are taken to be of one size": ("dkdv", "kMostNear = 4;", "kMostNear = 1000;"),
    "low parts of mixed rows keep their factor": (
        "dkdv", "product[e / 4][e % 4] *= kLowInverse;", "product[e / 4][e % 4] *= 1.0f;",
    ),
    "low parts of mixed rows have no factor": (
        "dkdv", "return split(one, two);", "return split_near(one, two);",
    ),
    "high parts of mixed rows are smaller": (
        "dkdv", "part == 1 && !kMixed ?", "part == 1 ?",
    ),
    "exact scores are held against rounded ones": (
        "dkdv", "if (counts && size >= kFarFp32 &&", "if (false && size >= kFarFp32 &&",
    ),
    "the difference is subtracted": (
        "dkdv", "shift += exact_difference(row);", "shift -= exact_difference(row);",
    ),
    "the difference to the exact score is not found": (
        "dkdv", "if (of_largest_score) return most - row.shift;",
        "if (of_largest_score) return 1.0;",
    ),
    "scores of all sizes may lose digits": ("dkdv", "(1 << 25) < shift) {", "(1 << 25) < 1e30f) {"),
}  # fmt: skip


@pytest.mark.parametrize("bug", MIXED_BUGS)
def test_a_planted_bug_in_numbers_of_all_sizes_is_found(bug, tmp_path):
    which, old, new = MIXED_BUGS[bug]
    row = D64[("preprocess", "dq", "dkdv").index(which)]
    sources = {row.entry: plant(tmp_path, row.source, (old, new))}

    def compare():
        check_columns(D64, sources=sources)
        for data in ("a large number in a key", "large numbers that meet zeros"):
            arrays = of_mma.DATA[data][0](*arrays_of(D64, (120, 100), (1, 1)))
            of_mma.check(D64, [x.astype(SINGLE) for x in arrays], sources=sources)

    with pytest.raises((emulator.EmulationError, AssertionError)):
        compare()


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug, tmp_path):
    which, old, new = BUGS[bug]
    row = D64[("preprocess", "dq", "dkdv").index(which)]
    sources = {row.entry: plant(tmp_path, row.source, (old, new))}

    def compare():
        for seed in range(2):
            for arrays, options in cases():
                of_mma.check(D64, arrays, seed=seed, sources=sources, **options)
        of_mma.check_single_keys(D64, 1e6, ORDERED, truncating=True, sources=sources)

    with pytest.raises((emulator.EmulationError, AssertionError)):
        compare()


def test_the_calls_of_bugs_are_right_without_them():
    for arrays, options in cases():
        of_mma.check(D64, arrays, **options)
