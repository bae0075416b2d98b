"""The kernels' own source, run on the CPU: each row of the table, seeds, and planted bugs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_cupy import reference
from fa_cupy.gpu.compile import ROOT
from fa_cupy.gpu.variants import VARIANTS, VariantSm90
from tests.strategies import DTYPES
from validation import emulator

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler")

NAMES = {"float16": DTYPES[0], "bfloat16": DTYPES[1]}
PLAIN = {(row.source, row.dim): row for row in VARIANTS if not getattr(row, "transform", False)}
SM90 = PLAIN["attention/fwd_sm90", 64], PLAIN["attention/fwd_sm90", 128]


def draw(*shape, dtype, seed=0, scale=1.0):
    values = np.random.default_rng(seed).standard_normal(shape)
    return (scale * values).astype(np.float32).astype(dtype)


def check(row, q, k, v, bias=None, mask=None, seed=0, **options):
    out, lse = emulator.attention(row, q, k, v, bias, mask, seed=seed, **options)
    want, want_lse = reference.attention(q, k, v, bias, mask, **options)
    largest = np.abs(np.nan_to_num(v.astype(np.float64))).max(initial=1)
    unit = 2.0**-10 if row.dtype == "float16" else 2.0**-7
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=0, atol=unit * largest)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-4, atol=1e-4)
    return out, lse


@pytest.mark.parametrize("row", VARIANTS, ids=lambda row: row.name)
def test_every_row(row):
    dtype, dim = NAMES[row.dtype], row.dim
    q, k, v = (draw(4, n, dim, dtype=dtype, seed=i) for i, n in enumerate((150, 200, 200)))
    options = {"softcap": 3.0} if getattr(row, "transform", False) else {}
    check(row, q, k, v, seed=1, **options)
    check(row, q, k, v, seed=2, is_causal=True, causal_align="bottom_right", **options)
    check(row, q[:1], k[:1], v[:1, :, : dim - 8], seed=3, window=(70, 5), causal_align="top_left",
          **options)  # fmt: skip


@pytest.mark.parametrize("row", SM90, ids=lambda row: row.name)
def test_what_only_the_hopper_kernel_has(row):
    dtype = NAMES[row.dtype]
    # Heads of one group in a tile; scores that pass every reference; rows without keys; hidden NaN.
    q, k, v = (draw(1, h, n, 64, dtype=dtype, seed=n) for h, n in ((8, 5), (2, 300), (2, 300)))
    check(row, q, k, v, is_causal=True, causal_align="bottom_right")
    q, k, v = (draw(2, n, row.dim, dtype=dtype, seed=n, scale=3) for n in (130, 500, 500))
    for steep in (np.linspace(0.01, 2, 500), np.linspace(2, 0.01, 500)):
        check(row, q, (k.astype(np.float32) * steep[:, None]).astype(dtype), v)
    q, k, v = (draw(300, row.dim, dtype=dtype, seed=i) for i in range(3))
    check(row, q, k[:40], v[:40], is_causal=True, causal_align="bottom_right")
    k[200:], v[200:] = np.nan, np.nan
    got, _ = emulator.attention(row, q[:200], k, v, is_causal=True, causal_align="top_left")
    want, _ = reference.attention(q[:200], k[:200], v[:200], is_causal=True)
    assert np.isfinite(got.astype(np.float32)).all()
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=0, atol=0.05)


@pytest.mark.parametrize("size", [5000, 10000, 20000, 30000, 60000])
@pytest.mark.parametrize("dim", [64, 128])
def test_scores_of_any_size(dim, size):
    """Beyond 2**24 a product with the scale is far from its rounded value, in units of log2."""
    row = next(r for r in VARIANTS if (r.dtype, r.dim, r.targets) == ("float16", dim, ("sm_90a",)))
    q = np.full((130, dim), size, np.float16)
    k = np.full((300, dim), size, np.float16)
    v = np.full((300, dim), 0.75, np.float16)
    check(row, q, k, v)
    k[::3] /= 2
    check(row, q, k, v)


def test_a_lost_row_does_not_spread():
    row = SM90[1]
    q, k, v = (draw(n, row.dim, dtype=NAMES[row.dtype], seed=n) for n in (100, 400, 400))
    want, _ = emulator.attention(row, q, k, v)
    q[17] = np.nan
    got, lse = emulator.attention(row, q, k, v)
    others = np.arange(100) != 17
    assert got[others].tobytes() == want[others].tobytes()
    assert np.isnan(got[17].astype(np.float32)).all()
    assert np.isnan(lse[17])


@settings(deadline=None, max_examples=25)
@given(
    row=st.sampled_from(SM90),
    lengths=st.tuples(st.integers(1, 400), st.integers(1, 400)),
    window=st.sampled_from([None, (0, 0), (64, 0), (0, 63), (130, 70), (None, 5)]),
    heads=st.sampled_from([(1, 1), (3, 3), (4, 1), (6, 2)]),
    dim=st.sampled_from([8, 40, 64]),
    seed=st.integers(0, 2**32),
)
def test_any_call_with_any_schedule(row, lengths, window, heads, dim, seed):
    dtype = NAMES[row.dtype]
    q = draw(1, heads[0], lengths[0], dim, dtype=dtype, seed=1)
    k, v = (draw(1, heads[1], lengths[1], dim, dtype=dtype, seed=i) for i in (2, 3))
    options = {"window": window, "causal_align": "bottom_right"} if window else {}
    check(row, q, k, v, seed=seed, **options)


@pytest.mark.parametrize("row", SM90, ids=lambda row: row.name)
def test_the_schedule_does_not_show(row):
    q, k, v = (draw(3, n, row.dim, dtype=NAMES[row.dtype]) for n in (200, 420, 420))
    options = {"is_causal": True, "causal_align": "bottom_right"}
    found = {
        tuple(x.tobytes() for x in emulator.attention(row, q, k, v, seed=seed, **options))
        for seed in range(10)
    }
    assert len(found) == 1


# What is taken out of fwd_sm90.cu, what stands there instead, and the row that shows it.
BUGS = {
    "K is read before it has landed": (
        "wait(shared.k_full[k_place.index()], k_place.parity());\n      take_turn();\n",
        "take_turn();\n",
        1,
    ),
    "V is read before it has landed": (
        "        wait(shared.v_full[v_place.index()], v_place.parity());\n        wgmma_fence();",
        "        wgmma_fence();",
        1,
    ),
    "the parity of Q is wrong": (
        "wait(shared.q_full[q_place.index()][group], q_place.parity());",
        "wait(shared.q_full[q_place.index()][group], q_place.parity() ^ 1);",
        1,
    ),
    "K is given back before it has been read": (
        "      take_turn();\n      wgmma_fence();\n      start_scores(cols);",
        "      take_turn();\n      release(shared.k_empty[k_place.index()]);\n"
        "      wgmma_fence();\n      start_scores(cols);",
        1,
    ),
    "K is never given back": (
        "      release(shared.k_empty[k_place.index()]);\n      k_place.advance();\n      auto",
        "      k_place.advance();\n      auto",
        1,
    ),
    "scores are used before the product is done": (
        "      if constexpr (kOverlap && !kFirst) {\n        wgmma_wait_group<1>();",
        "      if constexpr (kOverlap && !kFirst) {\n        wgmma_wait_group<2>();",
        1,
    ),
    "the output is scaled before P V is done": (
        "        if constexpr (kOverlap) wgmma_wait_group<0>();\n        if (!kFirst && moved) {",
        "        if (!kFirst && moved) {",
        1,
    ),
    "fewer bytes are expected than come": (
        "mbarrier_arrive_expect_tx(barrier, kKTileBytes);",
        "mbarrier_arrive_expect_tx(barrier, kKTileBytes - 16);",
        0,
    ),
    "a turn is not passed on": (
        "      take_turn();\n      pass_turn();\n",
        "      take_turn();\n",
        0,
    ),
    "a lane speaks for others that still wait": ("      __syncwarp();  // or a lane", "//", 0),
    "Q is loaded while the output is stored": (
        "      cp_async_bulk_wait_group_read<0>();\n",
        "",
        0,
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug, tmp_path):
    old, new, which = BUGS[bug]
    text = (ROOT / "cuda_src/attention/fwd_sm90.cu").read_text()
    assert text.count(old) == 1
    source = tmp_path / "kernel.cu"
    source.write_text(text.replace(old, new))
    row = SM90[which]
    assert isinstance(row, VariantSm90)
    q, k, v = (draw(3, n, row.dim, dtype=NAMES[row.dtype], scale=2) for n in (200, 420, 420))
    options = {"is_causal": True, "causal_align": "bottom_right"}
    want = emulator.attention(row, q, k, v, **options)
    for seed in range(60):
        try:
            got = emulator.attention(row, q, k, v, seed=seed, source=source, **options)
        except emulator.EmulationError:
            return
        if any(x.tobytes() != y.tobytes() for x, y in zip(got, want, strict=True)):
            return
    pytest.fail("60 seeds did not show it")
