"""`fwd_fp32`, attention of float32 on pairs of float16: its own source run on the CPU."""

import functools

import numpy as np
import pytest
from hypothesis import given

from fa_cupy.gpu.kernels.attention.full_precision.fwd_fp32 import VARIANTS
from tests.support.attention_fp32 import (
    DATA,
    NOT_AGAIN,
    SCORES,
    SINGLE,
    TOP_LEFT,
    any_calls,
    arrays_of,
    check_any_call,
    check_equal_scores,
    check_hidden_keys,
    check_hidden_nan,
    check_not_finite,
    check_packed,
    check_planted,
    check_products_beyond_float32,
    check_rows_computed_again,
    check_rows_without_keys,
    check_rows_written,
    check_schedule,
    check_score,
    check_scores_far_from_zero,
    check_sink,
    check_subnormal_numbers,
    hold,
    hold_data,
)
from tests.support.every_run import drawn, examples, only
from tests.support.kernel_attention import blocks_of

pytestmark = pytest.mark.emulator

ROWS = {(row.dim, row.sparse): row for row in reversed(VARIANTS)}  # those of SM90
D64, SPARSE, D256 = ROWS[64, False], ROWS[64, True], ROWS[256, False]
HALF_BLOCKS = next(row for row in VARIANTS if row.sparse and row.tile_m == 64)  # of a mask


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("truncating", [False, True])
@pytest.mark.parametrize("options", [{}, TOP_LEFT], ids=["full", "causal"])
def test_as_good_as_plain_float32(data, truncating, options):
    hold_data(D64, data, truncating=truncating, **options)


@pytest.mark.long
@pytest.mark.parametrize("size", [2000, 2.0**17, -1e9, -1e30])
@pytest.mark.parametrize("how", only(["bias", "softcap", "mask", "causal"], "bias"))
def test_scores_far_from_zero(size, how):
    check_scores_far_from_zero(D64, SPARSE, size, how)


@pytest.mark.parametrize("size", [1e4, 1e5, 1e6, 1e7, 1e8])
def test_equal_scores_have_equal_weights(size):
    check_equal_scores(D64, size)


@pytest.mark.parametrize("size", [20, 5000])
def test_rows_with_hidden_nan_are_divided_by_their_own_sum(size):
    check_hidden_nan(SPARSE, size)


@pytest.mark.parametrize("size", [0, 5000, 1e5])
def test_a_sink_weighs_what_a_key_of_its_score_does(size):
    check_sink(D64, size)


def test_only_rows_that_lose_digits_are_computed_again(tmp_path):
    check_rows_computed_again(D64, SPARSE, tmp_path, 1e4)


@pytest.mark.long
@pytest.mark.parametrize("row", only(VARIANTS, D64), ids=lambda row: row.name)
def test_long_sequences(row):
    """Where tensor cores add up a few terms at a time, cutting them shows no more than this."""
    arrays = arrays_of(row.dim, 20, 4096 if row is D64 else 1000)
    mask = np.ones((1, arrays[1].shape[0]), bool) if row.sparse else None
    for offset in (0, 10):
        arrays[2] += offset
        mask = None if mask is None else np.broadcast_to(mask, (20, mask.shape[1]))
        hold(row, arrays, times=1.5, truncating=True, **({"mask": mask} if row.sparse else {}))


def test_subnormal_numbers():
    check_subnormal_numbers(D64)


@examples(30)
@given(row=drawn([D64, SPARSE, D256], D64, SPARSE), call=any_calls())
def test_any_call_with_any_schedule(row, call):
    check_any_call(row, call)


@pytest.mark.parametrize("scores", only(SCORES, "bias of keys and a softcap"))
def test_scores_that_are_more_than_products(scores):
    check_score(D64, scores)


def test_numbers_that_are_not_finite():
    check_not_finite(D64)


def test_hidden_keys_under_a_mask():
    check_hidden_keys(SPARSE)


def test_products_beyond_float32():
    check_products_beyond_float32(D64)


def test_rows_without_keys_and_sinks():
    check_rows_without_keys(D64)


def test_packed_sequences():
    check_packed(D64)


@pytest.mark.parametrize("row", [D64, SPARSE], ids=lambda row: row.name)
def test_neither_the_schedule_nor_the_order_shows(row):
    check_schedule(row)


def test_only_the_rows_of_the_output_are_written():
    check_rows_written(D64)


# What stands in the kernel or its headers, what is put there instead; on which row.
BUGS = {
    "a low part of a weight is left out": (D64, ("a_low[r] = p[2 * step + r / 2][r % 2].low;",
                                                 "a_low[r] = 0;")),
    "a low part of a key is left out": (
        D64, ("ldmatrix_x4(low, address + kLow);", "ldmatrix_x4(low, address);"),
    ),
    "weights of a tile keep their own maximum": (D64, ("factor[h] = new_weight *", "factor[h] =")),
    "the unit of the output does not change": (
        D64, ("const int unit = max(old_unit, new_unit);",
              "const int unit = rows.unit[h] == kNoExponent ? new_unit : rows.unit[h];"), NOT_AGAIN,
    ),
    "V is taken to be of one size": (D64, ("<= kMostSpread)", "<= 1000)"), NOT_AGAIN),
    "exponents of the next tile": (
        D64, ("__syncthreads(); load_v(params, shared, tiles, tile);",
              "load_v(params, shared, tiles, tile);"),
    ),
    "K is filled while it is read": (
        D64, ("__syncthreads(); if (tile + 1 < tiles.end) load_k(",
              "if (tile + 1 < tiles.end) load_k("),
    ),
    "rows are split before they have landed": (
        D64, ("// every warp has left V.\n    cp_async_wait_group<0>();", ""),
    ),
    "the wrong half of a block's words": (SPARSE, (">> at.in_block * (kTileN / 4)", ">> 0")),
    "words of other rows": (HALF_BLOCKS, ("(shared.work.q_begin % kMaskBlock / 16 + tid / 32)",
                                     "(tid / 32)")),
    "the number of a block comes a tile late": (
        SPARSE, ("load_block_index(params, shared, tiles, tile + 1);",
                 "load_block_index(params, shared, tiles, tile);"),
    ),
}  # fmt: skip
ALWAYS = "the unit of the output does not change", "V is taken to be of one size"


@functools.cache
def cases(row):
    """Calls that bugs are planted for."""
    found = []
    for seed, data in enumerate(("values that jump", "values of all sizes")):
        q, k, v = (x.astype(SINGLE) for x in DATA[data][0](*arrays_of(64, 140, 140)))
        options = dict(TOP_LEFT)
        if row.sparse:
            options["mask"] = blocks_of(np.random.default_rng(seed), 140, len(k), density=0.5)
        found.append(((2 * q, k, v), options))
    return found


@pytest.mark.parametrize("bug", only(BUGS, *ALWAYS))
def test_a_planted_bug_is_found(bug, tmp_path):
    row, *changes = BUGS[bug]
    check_planted(row, changes, cases(row), tmp_path)
