"""How the splits of a row are joined: fwd_combine, run on the CPU behind fwd_splitkv."""

import numpy as np
import pytest

from fa_cupy import reference
from fa_cupy.gpu.kernels.attention.splitkv import fwd_combine, params
from tests.support.every_run import only
from tests.support.kernel_attention import SPLITKV, any_sinks, check, draw, finds_keyed, keyed_call
from tests.support.planted import plant
from validation.emulator import calls

pytestmark = pytest.mark.emulator

ROWS = {(row.dim, row.tile_m): row for (row,) in SPLITKV if row.dtype == "float16"}
D64, D128 = ROWS[64, 16], ROWS[128, 16]


def test_every_kernel_of_splits_has_one_that_joins_them():
    rows = {(row.dtype, row.dim) for row in fwd_combine.VARIANTS}
    assert rows == {(row.dtype, row.dim) for (row,) in SPLITKV}


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


# Planted bugs, each of which some call finds

BUGS = {
    "a split that is left out": (
        "if (first + i < params.splits)", "if (first + i + 1 < params.splits)"),
    "sums of another row_max": (
        "to.row_sum = to.row_sum * old_factor", "to.row_sum = to.row_sum"),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug, tmp_path):
    old, new = BUGS[bug]
    assert finds_keyed(D128, plant(tmp_path, "attention/fwd_combine", (old, new)))
