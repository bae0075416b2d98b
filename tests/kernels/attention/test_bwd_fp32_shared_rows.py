"""Gradients in float32 where two warpgroups share rows, on the CPU.

They are the rows of ``bwd_dq_fp32_sm90`` and ``bwd_dkdv_fp32_sm90`` for dims above 128.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import Score
from tests.kernels.attention import test_bwd_fp32 as of_mma
from tests.kernels.attention.test_bwd_fp32_sm90 import CHAINS, SPARSE
from tests.support import packed_sequences
from tests.support.every_run import examples, only
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
ROWS, MASKED = CHAINS[256], SPARSE[256]
NARROW = (224, 224)  # columns that calls have less than the rows
# Of single keys, data that show the order of low parts: few do.
ORDERED = 14
#: As for one warpgroup, where tensor cores cut sums of one sign: 2.5 times plain float32 at most.
TIMES = {"offset scores": 3.0}


@pytest.mark.parametrize("data", of_mma.DATA)
def test_as_good_as_plain_float32(data):
    change, by_row = of_mma.DATA[data]
    arrays = arrays_of(ROWS, (80, 100), (1, 1), less=NARROW)
    arrays = [x.astype(SINGLE) for x in change(*arrays)]
    of_mma.check(ROWS, arrays, by_row=by_row, truncating=True, **TOP_LEFT)


@pytest.mark.parametrize("data", ["normal", "offset scores", "offset gradients"])
def test_all_columns(data):
    """Scores are sums of two parts of eight steps, which tensor cores cut."""
    change, by_row = of_mma.DATA[data]
    arrays = [x.astype(SINGLE) for x in change(*arrays_of(ROWS, (80, 100), (1, 1)))]
    of_mma.check(ROWS, arrays, TIMES.get(data, 2.0), by_row, truncating=True)


@examples(20)
@given(
    lengths=st.tuples(st.integers(1, 150), st.integers(1, 150)),
    heads=st.sampled_from([(1, 1), (4, 2)]),
    less=st.tuples(st.integers(0, 127), st.integers(0, 200)),
    band=st.sampled_from(BANDS),
    scale=st.sampled_from([None, -0.3, 1e-3, 0.0, 3.0]),
    sinks=st.booleans(),
    dlse=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_call(lengths, heads, less, band, scale, sinks, dlse, seed):
    rng = np.random.default_rng(seed)
    options = {**band, "scale": scale}
    if sinks:
        options["sinks"] = any_sinks(rng, 1, heads[0], lengths[0])
    given = rng.standard_normal((1, heads[0], lengths[0])).astype(SINGLE) if dlse else None
    arrays = arrays_of(ROWS, lengths, heads, less, seed)
    check_any(ROWS, arrays, 0.0, dlse=given, seed=seed, **options)


@examples(20)
@given(
    heads=st.sampled_from([(1, 1), (4, 2)]),
    own=st.booleans(),
    lengths=st.tuples(st.integers(1, 200), st.integers(1, 200)),
    band=st.sampled_from(BANDS),
    spoiled=st.booleans(),
    far=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_mask(heads, own, lengths, band, spoiled, far, seed):
    """Of each head or of all, with NaN in a key and a value, and with scores that are far."""
    size = 2.0**10 if far else 0
    check_mask(MASKED, 0.0, (8, 16), size, heads, own, lengths, band, spoiled, seed)


def test_a_log_sum_exp_of_more_keys_is_used_as_given():
    of_mma.check_more_keys(ROWS, 1e6)


def test_weights_of_rounded_scores():
    of_mma.check_cancelling_products(ROWS)
    of_mma.check_weights_by_hand(ROWS)


@pytest.mark.parametrize(
    ("axes", "softcap"),
    only(
        [((True, True, True), 0.0), ((True, False, True), 2.0), ((False, True, False), 0.0)],
        ((True, False, True), 2.0),
    ),
)
def test_scores(axes, softcap):
    """Biases of pairs, of keys and of queries, which may hide pairs; softcaps."""
    check_bias(ROWS, 0.0, (8, 8), axes, np.float32, (90, 70), BANDS[1], softcap, True, 1)


def test_a_score_expression():
    """Slopes are NaN of many pairs that are hidden."""
    score = Score("s + x[h] * sqrt(i - j)", x=np.array([0.5, -1.0], SINGLE))
    of_mma.check(ROWS, arrays_of(ROWS, (50, 70), less=(8, 8)), score=score, **TOP_LEFT)


def test_slopes_of_zero():
    """Pairs have a weight for dV, and none for dQ and dK."""
    score = Score("where(s > 0, s, 0) + x[h]", x=np.array([0.5, -1.0], SINGLE))
    of_mma.check(ROWS, arrays_of(ROWS, (50, 70), less=(8, 8)), score=score, **TOP_LEFT)


@examples(20)
@given(
    lengths=packed_sequences.packed_lengths(100),
    band=st.sampled_from(BANDS),
    seed=st.integers(0, 2**32),
)
def test_any_packed_sequences(lengths, band, seed):
    check_packed(ROWS, 0.0, (8, 8), lengths, band, 0.0, seed)


@examples(20)
@given(
    name=st.sampled_from(["dout", "q", "k", "v"]),
    band=st.sampled_from(BANDS),
    lengths=st.tuples(st.integers(1, 80), st.integers(1, 80)),
    value=st.sampled_from([np.nan, np.inf, -np.inf, 1e-42]),
    seed=st.integers(0, 2**32),
)
def test_extraordinary_numbers(name, band, lengths, value, seed):
    """Those that are not finite show where they belong: not in other rows, nor in hidden pairs."""
    rng = np.random.default_rng(seed)
    arrays = arrays_of(ROWS, lengths, less=(8, 16), seed=seed)
    spoiled = arrays[("dout", "q", "k", "v").index(name)]
    spoiled[tuple(rng.integers(0, spoiled.shape))] = value
    check_any(ROWS, arrays, 0.0, seed=seed, **band)


@pytest.mark.parametrize("size", only([2.0**6, 2.0**11, 2.0**60], 2.0**11))
def test_scores_that_are_far(size):
    """The best keys of a row have the same score, and others are far below: weights sum to 1."""
    arrays, dlse = far_scores(np.random.default_rng(3), ROWS, (150, 170), size)
    options = {**BANDS[1], "scale": 1.0}
    for seed in range(2):
        found = solve(ROWS, arrays, dlse=dlse, seed=seed, **options)
        for x, y in zip(found, definition(arrays, dlse=dlse, **options), strict=False):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5 * float(np.abs(y).max()))


@pytest.mark.parametrize("size", [1e6, 1e9])
def test_the_weight_of_a_single_key_is_one(size):
    of_mma.check_single_keys(ROWS, size, ORDERED, truncating=True)


def test_the_schedule_does_not_show():
    arrays = arrays_of(ROWS, (140, 170))
    found = {
        tuple(x.tobytes() for x in solve(ROWS, arrays, seed=seed, **BANDS[1])) for seed in range(3)
    }
    assert len(found) == 1


# By what they show in: the kernel, what is changed, and into what.
BUGS = {
    "high parts are read before they are there": (
        "dq", "wait(shared.full[0][0], 0);  // by all",
        "if (role == 0) wait(shared.full[0][0], 0);  // by all",
    ),
    "high parts of rows of a warp are those of the first one": (
        "dq", "row = warp_row() + lane % 16;", "row = lane % 16;",
    ),
    "high parts are not swizzled": ("dq", "lane / 16) ^ row % 8;", "lane / 16);"),
    "high parts of steps are those of the first one": ("dq", "high[step], other", "high[0], other"),
    "low parts of keys are left out": (
        "dkdv", "multiply_steps<kLow, 1 - kLow, kPart>", "multiply_steps<0, 1 - kLow, kPart>",
    ),
    "low parts of queries are left out": (
        "dq", "multiply_steps<1, 0, kPart>(x", "multiply_steps<0, 0, kPart>(x",
    ),
    "sums of low parts are those of other queries": (
        "dkdv", "2 * kPart>(x, high", "kPart>(x, high",
    ),
    "sums have other steps in one of the kernels": ("dkdv", "kLongestSum = 8", "kLongestSum = 4"),
    "the second half of the columns is left out": ("dkdv", "k < kSumCount; ++k)", "k < 1; ++k)"),
    "low parts keep their factor": ("dq", "kLowInverse, sum);", "1.0f, sum);"),
    "rows of a tile are its first eight": (
        "dkdv", "high = from + eight * kEightRowsBytes;", "high = from;",
    ),
    "what is known of rows is read before it is there": (
        "dkdv", "if (kOwnKeys || role == 1) wait_for_array(shared, pipeline, 1 - role);", "",
    ),
    "phases of the barrier of values are missed": (
        "dq", "if (kOwnKeys || role == 1) wait_for_array", "wait_for_array",
    ),
    "values are given back by a warpgroup that has not read them": (
        "dq", "if (role == 1) release_per_lane(shared.empty[stage][1]);",
        "if (role == 0) release_per_lane(shared.empty[stage][1]);",
    ),
    "what is known of queries is given back before it has been read": (
        "dkdv", "wgmma_wait_group<0>(); if (role == 1)",
        "wgmma_wait_group<0>(); if (role == 0) release_per_lane(shared.empty[stage][0]); "
        "if (role == 1)",
    ),
    "weights are read before they are there": (
        "dkdv", "bar_sync(barrier_of_rows(), 64); Scores weights;", "Scores weights;",
    ),
    "warps of other rows meet": (
        "dkdv", "return 1 + tid_x_again() % 128 / 32;",
        "return 1 + (tid_x_again() % 128 / 32 + tid_x_again() / 128) % 4;",
    ),
    "lost digits of dP are not looked for": (
        "dq", "check_range(shared, stage, 0, seen, ds);", "",
    ),
    "lost digits of scores are not looked for": (
        "dkdv", "check_range(shared, stage, 0, weights, unused);", "",
    ),
    "both have the same columns of dQ": ("dq", "tid_x_again() / 128 * (8 * kMmaV)", "0"),
    "columns of dQ are those of the first half": ("dq", "warp_col() / 64 * kSwizzleBytes", "0"),
    "a slope is forgotten": ("dkdv", "sloped[m][j][e] = slope;", ""),
    "what replaces a far LSE is sought by those that have no scores": (
        "dq", "if (role == 0) replace_far(", "if (role == 1) replace_far(",
    ),
    "dV is scaled": ("dkdv", "of_values ? 1.0f : p.scale", "p.scale"),
    "dK has the columns of dV": ("dkdv", "of_values ? p.v_dim : p.head_dim", "p.v_dim"),
    "rows of dV are computed again as those of dK": (
        "dkdv", "recompute_key<kDim>(params, work, row_of, key, of_values);",
        "recompute_key<kDim>(params, work, row_of, key, false);",
    ),
}  # fmt: skip


def cases():
    """Calls that bugs are planted for, and whether rows count by themselves."""
    arrays = arrays_of(ROWS, (140, 150), (2, 1), less=(8, 40))
    dlse = np.random.default_rng(0).standard_normal((1, 2, 140)).astype(SINGLE)
    far = [x.copy() for x in arrays]
    far[1][..., ::7, :] = 0  # equal scores
    far[1][..., ::7, 0], far[2][..., 0] = 2.0**20, 1.0
    yield arrays, False, {"dlse": dlse, **TOP_LEFT}
    yield far, False, {"dlse": dlse}
    for name in ("large numbers that meet zeros", "large gradients that meet zeros"):
        of = of_mma.DATA[name]
        arrays = of[0](*arrays_of(ROWS, (64, 90), (2, 1), less=NARROW))
        yield [x.astype(SINGLE) for x in arrays], of[1], TOP_LEFT


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug, tmp_path):
    which, old, new = BUGS[bug]
    row = ROWS[("preprocess", "dq", "dkdv").index(which)]
    sources = {row.entry: plant(tmp_path, row.source, (old, new))}

    def compare():
        for seed in range(2):
            for arrays, by_row, options in cases():
                of_mma.check(ROWS, arrays, by_row=by_row, seed=seed, sources=sources, **options)
        of_mma.check_single_keys(ROWS, 1e6, ORDERED, truncating=True, sources=sources)
        arrays = arrays_of(ROWS, (20, 100), (1, 1), less=NARROW)
        for seed in range(20):
            of_mma.check(ROWS, arrays, seed=seed, softcap=2.0, sources=sources)

    with pytest.raises((emulator.EmulationError, AssertionError)):
        compare()


@pytest.mark.long
def test_the_calls_of_bugs_are_right_without_them():
    for arrays, by_row, options in cases():
        of_mma.check(ROWS, arrays, by_row=by_row, **options)
