"""`fwd_fp32_sm90`, attention of float32 by wgmma on pairs: its own source run on the CPU."""

import functools

import numpy as np
import pytest
from hypothesis import given

from fa_cupy import reference
from fa_cupy.gpu.kernels.attention.full_precision.fwd_fp32_sm90 import VARIANTS
from tests.support.attention_fp32 import (
    CAUSAL,
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
    powers,
)
from tests.support.every_run import drawn, examples, only
from tests.support.kernel_attention import blocks_of
from tests.support.planted import plant
from validation import emulator
from validation.emulator import calls

pytestmark = pytest.mark.emulator

PAIRS = [row for row in VARIANTS if row.parts == 2]
SPLITS = {row.split for row in PAIRS}
ROWS = {(row.dim, row.sparse): row for row in PAIRS}
D64, SPARSE, D128, D256 = (ROWS[x] for x in ((64, False), (64, True), (128, False), (256, False)))
ROUNDED = [row for row in VARIANTS if row.parts == 1]
SPARSE_128 = ROWS[128, True]  # two tiles make a block of a mask
FULL_AND_CAUSAL = pytest.mark.parametrize("options", [{}, TOP_LEFT], ids=["full", "causal"])


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("truncating", [False, True])
@FULL_AND_CAUSAL
def test_as_good_as_plain_float32(data, truncating, options):
    hold_data(D64, data, truncating=truncating, **options)


@pytest.mark.long
@pytest.mark.parametrize("row", [D128, D256], ids=lambda row: row.name)
@pytest.mark.parametrize("data", ["normal", "queries of all sizes", "values of all sizes"])
@FULL_AND_CAUSAL
def test_other_dims_are_as_good(row, data, options):
    hold_data(row, data, truncating=True, **options)


@pytest.mark.long
@pytest.mark.parametrize("size", [2000, 2.0**17, -1e9, -1e30])
@pytest.mark.parametrize("how", ["bias", "softcap", "mask", "causal"])
def test_scores_far_from_zero(size, how):
    check_scores_far_from_zero(D64, SPARSE, size, how)


@pytest.mark.parametrize("size", [1e4, 1e5, 1e6, 1e7, 1e8])
def test_equal_scores_have_equal_weights(size):
    check_equal_scores(D64, size)


@pytest.mark.long
@pytest.mark.parametrize("size", [20, 5000])
def test_rows_with_hidden_nan_are_divided_by_their_own_sum(size):
    check_hidden_nan(SPARSE, size)


@pytest.mark.long
@pytest.mark.parametrize("size", [0, 5000, 1e5])
def test_a_sink_weighs_what_a_key_of_its_score_does(size):
    check_sink(D64, size)


@pytest.mark.long
def test_only_rows_that_lose_digits_are_computed_again(tmp_path):
    check_rows_computed_again(D64, SPARSE, tmp_path, 1e2)


def test_subnormal_numbers():
    check_subnormal_numbers(D64)


@examples(30)
@given(row=drawn([D64, SPARSE, D128, SPARSE_128, D256], D64, SPARSE), call=any_calls())
def test_any_call_with_any_schedule(row, call):
    check_any_call(row, call)


@pytest.mark.long
@pytest.mark.parametrize("scores", SCORES)
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


@pytest.mark.long
def test_packed_sequences():
    check_packed(D64)


@pytest.mark.parametrize("row", [D64, SPARSE], ids=lambda row: row.name)
def test_neither_the_schedule_nor_the_order_shows(row):
    check_schedule(row)


def test_only_the_rows_of_the_output_are_written():
    check_rows_written(D64)


@pytest.mark.long
@pytest.mark.parametrize("row", only(PAIRS, D64), ids=lambda row: row.name)
def test_long_sequences(row):
    """Tensor cores cut sums of a tile alone, and the small products first."""
    arrays = arrays_of(row.dim, 20, 4096 if row is D64 else 1000)
    k_len = len(arrays[1])
    options = {"mask": np.ones((20, k_len), bool)} if row.sparse else {}
    for offset in (0, 10):
        arrays[2] += offset
        hold(row, arrays, times=1.5, truncating=True, **options)


def large_numbers(of_q, of_k):
    """Numbers beside which small ones lose digits, but which meet zeros."""
    q, k, v = arrays_of(64, 64, 150)
    q[:, 3], k[:, 3] = 2.0**of_q, 0
    k[:, 9], q[:, 9] = 2.0**of_k, 0
    return q, k, v


@pytest.mark.long
@pytest.mark.parametrize("row", ROUNDED, ids=lambda row: row.name)
def test_numbers_that_may_be_rounded(row):
    """As many digits as TF32 has, and the range of float32."""
    q, k, v = arrays_of(row.dim, 70, 300)
    mask = np.ones((70, 300), bool) if row.sparse else None
    for small, large in ((1, 1), (1e-30, 1e30)):
        given = q * SINGLE.type(small), k * SINGLE.type(large), v * SINGLE.type(large)
        out, _ = calls.attention(row, *given, None, mask, precision="tf32")
        error = reference.relative_error(out, reference.attention(*given)[0])
        assert 1e-5 < error < 1e-3


@pytest.mark.long
@pytest.mark.parametrize("exponent", range(0, 64, 4))
def test_large_numbers_that_meet_zeros(exponent):
    """Where small numbers lose what counts, rows are computed again."""
    hold(D64, large_numbers(exponent, exponent // 2))


def rows_of_zeros(x, rng):
    return x * (rng.random((len(x), 1)) < 0.3)


# What is done to rows of K or V. Tiles of D64 have 128 rows; the last of three ends behind the
# last key.
TILES = {
    "one exponent": lambda x, rng: x * np.exp2(rng.integers(0, 5, (len(x), 1))),
    "exponents of their own": lambda x, rng: x * np.exp2(rng.integers(-9, 9, (len(x), 1))),
    "far apart": lambda x, rng: x * np.exp2(rng.choice([-50, 0], (len(x), 1))),
    "rows of zeros": rows_of_zeros,
    "exponents and zeros": lambda x, rng: (
        rows_of_zeros(x, rng) * np.exp2(rng.integers(-9, 9, (len(x), 1)))
    ),
    "a tile of zeros": lambda x, rng: np.where(np.arange(len(x))[:, None] // 128 == 1, 0, x),
    "zeros in all tiles": lambda x, rng: 0 * x,
    "one row": lambda x, rng: np.where(np.arange(len(x))[:, None] == 130, x, 0),
    "one exponent, then others": lambda x, rng: (
        x * np.where(np.arange(len(x))[:, None] < 128, 1, np.exp2(rng.integers(-9, 9, (len(x), 1))))
    ),
}  # fmt: skip


@pytest.mark.parametrize("which", ["k", "v", "kv"])
@pytest.mark.parametrize("kind", TILES)
def test_tiles_whose_rows_have_one_exponent_or_others(kind, which):
    for seed in range(2):
        q, k, v = arrays_of(64, 70, 300, seed=seed)
        q, rng = q / 64, np.random.default_rng(seed)  # large scores would be rounded
        k, v = (
            TILES[kind](x, rng).astype(SINGLE) if name in which else x
            for name, x in (("k", k), ("v", v))
        )
        hold(D64, (q, k, v), rows=True, truncating=bool(seed), **(CAUSAL if seed else {}))


def one_number(v):
    """The last row, which the last query alone sees with causality, has a large number."""
    v = v.copy()
    v[-1, 5] = 1e9
    return v


def sizes_of(shape, most=30):
    return np.exp2(np.random.default_rng(most).integers(-most, most, shape))


# What is done to V, columns of which differ in size.
COLUMNS = {
    "one of 1e7": lambda v: v * np.where(np.arange(v.shape[1]) == 5, 1e7, 1),
    "one of 1e9": lambda v: v * np.where(np.arange(v.shape[1]) == 5, 1e9, 1),
    "one of 1e30": lambda v: v * np.where(np.arange(v.shape[1]) == 5, 1e30, 1),
    "all, from 2^-50 to 2^50": lambda v: v * np.exp2(np.linspace(-50, 50, v.shape[1])),
    "one number of 1e9": one_number,
    "numbers of all sizes": lambda v: v * sizes_of(v.shape),
    "columns and rows": lambda v: v * sizes_of((1, v.shape[1])) * sizes_of((len(v), 1), 20),
    "a few keys": lambda v: (v * np.exp2(np.linspace(-50, 50, v.shape[1])))[:131],
}


def hold_columns(row, kind, **how):
    q, k, v = arrays_of(row.dim, 70, 300)
    v = COLUMNS[kind](v).astype(SINGLE)
    hold(row, (q, k[: len(v)], v), columns=True, **how)


@pytest.mark.parametrize("row", only([D64, D128, D256], D64), ids=lambda row: row.name)
@pytest.mark.parametrize("kind", COLUMNS)
def test_columns_of_other_sizes(kind, row):
    """Each is as good as in plain float32, however large others are."""
    hold_columns(row, kind, truncating=True)


def test_a_large_number_that_is_hidden():
    """It has an exponent with its row, not with its column."""
    q, k, v = arrays_of(64, 70, 300)
    out, _ = calls.attention(D64, q, k, one_number(v).astype(SINGLE), **CAUSAL)
    want, _ = reference.attention(q, k, v, **CAUSAL)
    assert reference.relative_error(out[:-1, 5], want[:-1, 5]) < 1e-6


# What stands in the kernel or its headers, what is put there instead; on which row.
BUGS = {
    "a low part of a weight is left out": (
        D64, ("const int low = part == 0;", "const int low = 0;"),
    ),
    "a low part of a key is left out": (
        D64, ("b + k_place(step) + (part == 1 ? kKLow / 16 : 0)", "b + k_place(step)"),
    ),
    "a low part of a value is left out": (
        D64, ("b + step * (16 * 128 / 16) + (part == 1 ? kKLow / 16 : 0)",
              "b + step * (16 * 128 / 16)"),
    ),
    "a low part of a query is left out": (
        D64, ("a + q_place(step) + (part == 0 ? kQLow / 16 : 0)", "a + q_place(step)"),
    ),
    "weights of a tile keep their own maximum": (D64, ("factor[h] = new_weight *", "factor[h] =")),
    "the unit of the output does not change": (
        D64, ("const int unit = max(old_unit, new_unit);",
              "const int unit = rows.unit[h] == kNoExponent ? new_unit : rows.unit[h];"), NOT_AGAIN,
    ),
    "keys are taken to have one exponent": (D64, ("if (!k.is_mixed) {", "if (true) {"), NOT_AGAIN),
    "values are taken to have one exponent": (
        D64, ("if (v.is_mixed) return", "if (false) return"), NOT_AGAIN,
    ),
    "the exponent of values is left out": (D64, ("= v.exponent[0];", "= 0;"), NOT_AGAIN),
    "V is taken to be of one size": (D64, ("<= kMostSpread)", "<= 1000)"), NOT_AGAIN),
    "rows of Q are read before they are written": (
        D64, ("bar_sync(1 + group, 128);\n}", "}"),
    ),
    "wgmma may not see Q": (
        D64, ("fence_proxy_async_shared();\n  bar_sync(1 + group, 128);",
              "bar_sync(1 + group, 128);"),
    ),
    "K is filled while its exponents are read": (
        D64, ("release(shared.k_empty[k_stage]);\n      k_at.advance();", "k_at.advance();"),
        ("const Units units = scale_products(",
         "release(shared.k_empty[k_stage]);\n      const Units units = scale_products("),
    ),
    "V is filled while it is multiplied": (
        D64, ("wgmma_wait_group<0>();\n      release(shared.v_empty[v_stage]);",
              "wgmma_wait_group<0>();"),
        ("Product product;", "Product product; release(shared.v_empty[v_stage]);"),
    ),
    "V is not waited for": (D64, ("wait(shared.v_full[v_stage], v_at.parity());", "")),
    "K is not waited for": (
        D64, ("wait(shared.k_full[k_at.index()], k_at.parity());\n        start_qk", "start_qk"),
    ),
    "exponents land later than a tile": (
        D64, ("kCopiedBytes);\n  cp_async_bulk_load(", "2 * kKLow);\n  cp_async_bulk_load("),
    ),
    "the number of a tile is that of a later one": (
        D64, ("wait(shared.k_empty[stage], k_at.parity() ^ 1);\n    shared.key_tile[stage]",
              "shared.key_tile[stage]"),
        ("load_tile(shared.k[stage],",
         "wait(shared.k_empty[stage], k_at.parity() ^ 1); load_tile(shared.k[stage],"),
    ),
    "products of a tile are read too early": (
        D64, ("wgmma_wait_group<1>();\n      } else", "} else"),
    ),
    "scores are read too early": (
        D64, ("wgmma_wait_group<0>();\n      release(shared.v_empty[v_stage]);",
              "release(shared.v_empty[v_stage]);"),
    ),
    "the other columns of V are left out": (
        D128, ("part < kDim / kPvCols; ++part) {\n        gemm_pv",
               "part < 1; ++part) {\n        gemm_pv"),
    ),
    "the first half of the dims counts twice": (
        D256,
        ("gemm_stacked(second, q_tile, k_tile, 1);", "gemm_stacked(second, q_tile, k_tile, 0);"),
    ),
    "low parts of Q are left out": (
        D256, ("wgmma_descriptor(q_tile + kQLow, 0)", "wgmma_descriptor(q_tile, 0)"),
    ),
    "low parts of K are left out": (
        D256, ("s[0][j][e] += first[kMmaN + j][e] + second[kMmaN + j][e];", ""),
    ),
    "the wrong half of a block's words": (SPARSE_128, (">> at.in_block * (kTileN / 4)", ">> 0")),
    "words of other rows": (SPARSE, ("(c.shared.work.q_begin % kMaskBlock / 16 + c.warp)", "0")),
    "tiles of a block are all its first": (SPARSE_128, ("listed.in_block;\n    }", "0;\n    }")),
    "V of another entry": (
        D64, ("KVTile* v = params.v + element_of_entry(p, shared.work.batch, params.v_batch)",
              "KVTile* v = params.v + element_of_entry(p, shared.work.batch, params.k_batch)"),
        NOT_AGAIN,
    ),
    "rows that lose digits are not computed again": (
        D64, ("kParts == 2 ? 40 :", "kParts == 2 ? 55 :"),
    ),
}  # fmt: skip
# Of tiles whose numbers are of all sizes.
MIXED_BUGS = {
    "low parts keep their factor": (D64, ("sums[e / 4][e % 4] *= kLowInverse;", "")),
    "low parts of weights have no factor": (
        D64, ("split_weights(s, weights, kLowScale);", "split_weights(s, weights, 1.0f);"),
    ),
    "small numbers are not looked for": (
        D64.split, ("return threads >= min(kManySmall, count);", "return false;"),
    ),
    "low parts of values have no factor": (D64.split, ("has_columns ? kLowScale : 1.0f", "1.0f")),
    "columns have no exponents": (
        D64.split, ("const int exponent = split_exponent(most);", "const int exponent = 0;"),
    ),
    "columns of other rows count": (
        D64.split, ("fmaxf(most, x * power_of_two(own[g]))", "fmaxf(most, x)"),
    ),
    "columns keep their exponents": (
        D64, ("e % 2 ? of_columns.y : of_columns.x;", "1.0f;"),
    ),
    "exponents of columns are those of the first": (
        D128, ("column_factor + part * kPvCols", "column_factor"),
    ),
    "exponents of columns are those of another tile": (
        D64, ("v_tiles[key_tile].column_factor", "v_tiles[0].column_factor"),
    ),
}  # fmt: skip
ALWAYS = "K is filled while its exponents are read", "wgmma may not see Q"


@functools.cache
def cases(row):
    """Calls that bugs are planted for."""
    found = []
    for seed, data in enumerate(("values that jump", "values of all sizes")):
        q, k, v = (x.astype(SINGLE) for x in DATA[data][0](*arrays_of(row.dim, 140, 400)))
        options = dict(TOP_LEFT if seed else {})
        if row.sparse:
            options["mask"] = blocks_of(np.random.default_rng(seed), 140, len(k), density=0.5)
        found.append(((2 * q, k * powers(400, -seed, 0), v), options))
    if not row.sparse:
        q, k, v = arrays_of(row.dim, 140, 400, batch=(2,))
        found += [((q, k, v[:1]), {}), (large_numbers(24, 0), {})]
    return found


@pytest.mark.parametrize("bug", MIXED_BUGS)
def test_a_planted_bug_in_mixed_tiles_is_found(bug, tmp_path):
    row, change = MIXED_BUGS[bug]
    source = plant(tmp_path, row.source, change, *([] if row in SPLITS else [NOT_AGAIN]))

    def compare():
        for kind in COLUMNS:
            hold_columns(row if row in PAIRS else D64, kind, source=source)

    with pytest.raises((emulator.EmulationError, AssertionError)):
        compare()


@pytest.mark.parametrize("bug", only(BUGS, *ALWAYS))
def test_a_planted_bug_is_found(bug, tmp_path):
    row, *changes = BUGS[bug]
    check_planted(row, changes, cases(row), tmp_path)
