"""Attention with the keys split over blocks: fwd_splitkv, run on the CPU."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import Score, reference
from fa_cupy.core import attention_problem
from fa_cupy.gpu import plan as plan_module
from fa_cupy.gpu.kernels.attention.attention_params import Traits
from fa_cupy.gpu.kernels.attention.splitkv import fwd_splitkv, params
from fa_cupy.gpu.kernels.attention.splitkv.params import splits_of
from tests.support.every_run import examples, only, some
from tests.support.kernel_attention import (
    BANDS,
    DTYPES,
    SPLITKV,
    any_sinks,
    check,
    draw,
    finds_keyed,
    keyed_call,
    random_keyed_call,
)
from tests.support.planted import plant
from validation.emulator import calls
from validation.emulator.launcher import EmulatorLauncher

pytestmark = pytest.mark.emulator

ROWS = {(row.dim, row.tile_m): row for (row,) in SPLITKV if row.dtype == "float16"}
D64, D128, WIDE = ROWS[64, 16], ROWS[128, 16], ROWS[128, 64]


@pytest.mark.parametrize(
    "row", some([row for (row,) in SPLITKV], lambda row: row.tile_m, 2), ids=lambda row: row.name
)
def test_every_row(row):
    rng = np.random.default_rng(row.dim)
    for size, band in zip((None, 16, 48, 128, None), BANDS, strict=True):
        arrays, options = keyed_call(rng, row, 400, size)
        check(row, *arrays, **options, **band)
    q, k, v = (draw(2, n, row.dim, dtype=DTYPES[row.dtype], seed=n) for n in (3, 700, 700))
    check(row, q, k, v, softcap=3.0)
    check(row, q, k, v, bias=draw(2, 3, 700, dtype=DTYPES[row.dtype]), scale=-0.1)


@examples(20)
@given(st.sampled_from(SPLITKV), st.integers(0, 2**32))
def test_any_call(rows, seed):
    text, call = random_keyed_call(rows, seed)
    try:
        call({})
    except AssertionError as error:
        raise AssertionError(f"{rows[0].name}, seed {seed}: {text}") from error


@pytest.mark.parametrize("heads", only([1, 4, 20], 20))
def test_expressions_see_the_entries_of_packed_heads(heads):
    rng = np.random.default_rng(0)
    q = draw(2, heads, 3, 64, dtype=np.float16)
    k, v = (draw(2, 1, 200, 64, dtype=np.float16, seed=i) for i in (1, 2))
    score = Score("s - slopes[h] * abs(i - j) + b", slopes=rng.random(heads).astype(np.float32))
    options = {"k_lengths": np.array([130, 200]), "score": score}
    out, lse = calls.attention(D64, q, k, v, **dict(options))
    want, want_lse = reference.attention(q, k, v, **options)
    np.testing.assert_allclose(out, want, rtol=0, atol=4e-3)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("splits", only([1, 2, 7, 8, 9, 63, 65, 128], 9))
@pytest.mark.parametrize("row", only(list(ROWS.values()), D64), ids=lambda row: row.name)
def test_any_number_of_splits(row, splits, monkeypatch):
    """Some of which have no keys."""
    monkeypatch.setattr(params, "splits_of", lambda *_: splits)
    rng = np.random.default_rng(splits)
    arrays, options = keyed_call(rng, row, 1100, q_len=3)
    check(row, *arrays, **options)
    heads = arrays[0].shape[1]
    sinks = any_sinks(rng, 2, heads, 3)
    check(row, *arrays, **options, sinks=sinks, is_causal=True, causal_align="bottom_right")


# What is out of range


@pytest.mark.parametrize("bad", [-1, 401, 2**32 + 5, -(2**40)])
def test_a_length_out_of_range_is_nan(bad):
    q, k, v = (draw(3, 2, n, 64, dtype=np.float16, seed=n) for n in (2, 400, 400))
    lengths = np.array([100, bad, 400])
    out, lse = calls.attention(D64, q, k, v, k_lengths=lengths)
    assert np.isnan(out[1]).all()
    assert np.isnan(lse[1]).all()
    for b in (0, 2):
        n = lengths[b]
        want, _ = reference.attention(q[b], k[b, :, :n], v[b, :, :n])
        np.testing.assert_allclose(out[b], want, rtol=0, atol=4e-3)


@pytest.mark.parametrize("bad", [-1, 11, 2**31 - 1, 2**32 + 1])
@pytest.mark.parametrize("place", [0, 3])
def test_a_page_out_of_range_is_nan(bad, place):
    """Of its sequence alone, and only where a key of the page counts."""
    q = draw(2, 4, 1, 128, dtype=np.float16)
    k, v = (draw(11, 2, 64, 128, dtype=np.float16, seed=i) for i in (1, 2))
    table = np.random.default_rng(0).integers(0, 11, (2, 4))
    table[1, place] = bad
    found = {}
    for n in (256, 193, 192, 1, 0):
        found[n], lse = calls.attention(
            D128, q, k, v, k_lengths=np.array([200, n]), page_table=table
        )
        np.testing.assert_array_equal(np.isnan(lse), np.isnan(found[n][..., 0]))
        assert not np.isnan(lse[0]).any()
    needed = {n: n > 64 * place for n in found}
    assert {n: bool(np.isnan(x[1]).all()) for n, x in found.items()} == needed
    assert {n: bool(np.isnan(x[1]).any()) for n, x in found.items()} == needed


# Extremes of range


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite(value):
    """Where it is seen, the output is non-finite as that of the reference; hidden, it never is."""
    q, k, v = (draw(2, 2, n, 64, dtype=np.float16, seed=n) for n in (3, 300, 300))
    k[0, 0, 250], v[0, 1, 290] = value, value
    for n in (240, 260, 300):
        options = {"k_lengths": np.array([n, 77]), "is_causal": True}
        options["causal_align"] = "bottom_right"
        out, lse = calls.attention(D64, q, k, v, **options)
        with np.errstate(invalid="ignore"):
            want, want_lse = reference.attention(q, k, v, **options)
        np.testing.assert_array_equal(np.isnan(out), np.isnan(want))
        np.testing.assert_array_equal(np.isinf(out), np.isinf(want))
        np.testing.assert_allclose(lse, want_lse, rtol=1e-4, atol=1e-4)


def test_large_scores():
    """Rows whose scores float32 cannot tell apart are computed again, over all splits."""
    q, k, v = (draw(1, 2, n, 64, dtype=np.float16, seed=n) for n in (2, 400, 400))
    options = {"scale": 3e7, "k_lengths": np.array([333])}
    out, lse = calls.attention(D64, q, k, v, **options)
    want, want_lse = reference.attention(q, k, v, **options)
    np.testing.assert_allclose(out, want, rtol=0, atol=4e-3)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6)


@pytest.mark.parametrize("at", [30, 300])
def test_one_large_score_among_small_ones(at):
    """Its weight may be 0 in its split, whose row_max tells nevertheless."""
    for seed in range(4):
        q, k, v = (draw(1, 2, n, 64, dtype=np.float16, seed=3 * seed + n) for n in (2, 400, 401))
        k, v = k * np.float16(1e-3), v[:, :, :400]
        k[:, :, at] = 50 * q[:, :, 0]
        options = {"scale": 3e6 + 12345 * seed, "k_lengths": np.array([400])}
        out, lse = calls.attention(D64, q, k, v, **options)
        want, want_lse = reference.attention(q, k, v, **options)
        np.testing.assert_allclose(out[:, :, 0], want[:, :, 0], rtol=0, atol=4e-3)
        np.testing.assert_allclose(lse[:, :, 0], want_lse[:, :, 0], rtol=1e-6)


# Bits


def test_results_depend_on_no_schedule():
    rng = np.random.default_rng(0)
    arrays, options = keyed_call(rng, D128, 900, 64, q_len=2)
    first = calls.attention(D128, *arrays, **dict(options))
    for seed in range(1, 4):
        again = calls.attention(D128, *arrays, seed=seed, **dict(options))
        for x, y in zip(first, again, strict=True):
            assert x.tobytes() == y.tobytes()


def replayed(source, monkeypatch):
    """Results of a launch and of two more that share its memory and its mark, as in a graph."""
    monkeypatch.setattr(plan_module, "_marks", itertools.repeat(7 << 55 | 5))
    q, k, v = (draw(1, 2, n, 128, dtype=np.float16, seed=n) for n in (3, 700, 700))
    problem = attention_problem.attention_problem(q, k, v, None, None)
    out = np.empty(problem.out_shape, np.float16)
    view = attention_problem.out_view(problem, out.shape, out.strides)
    launcher = EmulatorLauncher(0, False, source)
    plan = fwd_splitkv.make_plan(Traits(problem, view), launcher, D128)
    assert plan.steps[0].params["splits"][0] > 1
    memory = np.full(plan.workspace_bytes // 8 + 1, 0x0123456789ABCDEF, np.uint64)
    space = memory.ctypes.data + -memory.ctypes.data % 16
    results = []
    for _ in range(3):
        out[...] = np.nan
        plan.run((*[x.ctypes.data for x in (q, k, v)], 0, out.ctypes.data, 0), space)
        results.append(out.copy())
    return results, reference.attention(q, k, v)[0]


def test_launches_that_are_replayed(monkeypatch, tmp_path):
    results, want = replayed({}, monkeypatch)
    for found in results:
        np.testing.assert_allclose(found, want, rtol=0, atol=4e-3)
    kept = ("if (shared.is_last) params.arrivals[work.tile] = 0;", ";")
    source = plant(tmp_path, "attention/fwd_splitkv", kept)
    (first, second, _), _ = replayed({D128.entry: source}, monkeypatch)
    assert np.isfinite(first).all()
    assert np.isnan(second).all()


def test_the_number_of_splits():
    """Small calls fill the device; large ones are not split."""
    assert splits_of(8, 512, 264) in range(27, 34)
    assert splits_of(1024, 64, 264) == 1
    assert splits_of(1, 1, 264) == 1
    for tiles in (1, 7, 100, 400, 5000):
        for key_tiles in (1, 3, 50, 10**6):
            assert 1 <= splits_of(tiles, key_tiles, 396) <= min(key_tiles, params._MOST_SPLITS)


def test_rows_are_chosen_by_the_number_of_queries():
    def chosen(q_heads, q_len, dim, target):
        problem, view = plan_of(q_heads, q_len, dim)
        return fwd_splitkv.select(Traits(problem, view), target)

    assert chosen(8, 1, 128, "sm_90a").tile_m == 16
    assert chosen(16, 8, 128, "sm_90a").tile_m == 64
    assert chosen(8, 1, 128, "sm_90a").stages == 3
    assert chosen(8, 1, 128, "sm_86").stages == 2
    assert chosen(8, 1, 200, "sm_80").dim == 256


def plan_of(q_heads, q_len, dim):
    """A problem with two heads of keys, and the view of its output."""
    q, k = (draw(1, n, rows, dim, dtype=np.float16) for n, rows in ((q_heads, q_len), (2, 300)))
    problem = attention_problem.attention_problem(q, k, k, None, None)
    return problem, attention_problem.out_view(problem, q.shape, q.strides)


# Planted bugs, each of which some call finds

BUGS = {
    "rows that are counted from the first page": (
        "found.row[pass] -= page", "found.row[pass] -= 0 * page"),
    "no mask in the last tile": (
        "tile >= seen.full_end) mask", "tile > seen.full_end) mask"),
    "no barrier before the next tile": (
        "- 2>(); __syncthreads();", "- 2>(); __syncwarp();"),
    "a tile that has not landed": (
        "cp_async_wait_group<kStages - 2>", "cp_async_wait_group<kStages - 1>"),
    "a split that is left out": (
        "if (first + i < params.splits)", "if (first + i + 1 < params.splits)"),
    "sums of another row_max": (
        "to.row_sum = to.row_sum * old_factor", "to.row_sum = to.row_sum"),
    "the band of all keys": (
        "band_from_end ? length - p.k_len : 0", "0"),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug, tmp_path):
    old, new = BUGS[bug]
    assert finds_keyed(D128, plant(tmp_path, "attention/fwd_splitkv", (old, new)))
