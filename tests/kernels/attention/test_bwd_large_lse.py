"""Gradients by kernels where a log-sum-exp is too large for weights to be computed from it."""

import functools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import reference
from tests.support.every_run import drawn, examples, only
from tests.support.kernel_attention import BANDS, DTYPES, blocks_of
from tests.support.kernel_gradients import case, check, compare, rows_sm80, rows_sm90, solve
from tests.support.large_lse import LARGE, far_case, padded_case
from tests.support.planted import plant
from validation import emulator

pytestmark = pytest.mark.emulator
HOPPER = [(64, True), (128, True), (192, True)]  # in two ways by bwd_sm90, and by two kernels
AMPERE = [(32, False), (64, False), (128, False), (256, False)]
FEW = only([(64, True), (192, True), (64, False)], (64, True), (64, False))
EVERY = [(*which, band) for which in HOPPER + AMPERE for band in BANDS[:3]]
CAUSAL = {"is_causal": True, "causal_align": "bottom_right"}


def rows_of(call, hopper):
    name, dims = call.q.dtype.name, (call.q.shape[-1], call.v.shape[-1])
    masked = call.options.get("mask") is not None
    if hopper:
        return rows_sm90(name, *dims, masked)
    return rows_sm80(name, *dims, masked)


@pytest.mark.parametrize(
    ("dim", "hopper", "band"),
    only(EVERY, (64, True, BANDS[1]), (64, False, BANDS[2])),
)
def test_weights_of_large_scores_sum_to_one(dim, hopper, band):
    for dtype in DTYPES:
        call = far_case(dtype, (2, 1), (150, 140), dim, **band)
        check(call, rows=rows_of(call, hopper))


@pytest.mark.parametrize(
    ("dim", "hopper"),
    only([(64, True), (192, True), (64, False), (192, False)], (64, True), (64, False)),
)
def test_under_a_mask(dim, hopper):
    rng = np.random.default_rng(1)
    mask = blocks_of(rng, 2, 150, 270, density=0.5)
    call = far_case("bfloat16", (2, 1), (150, 270), dim, mask=mask)
    check(call, rows=rows_of(call, hopper))


@pytest.mark.parametrize("length", [4, 64, 200])
def test_a_row_of_nothing_but_padding(length):
    """All keys of a query have the old bias of -1e9: their weights are 1 / length."""
    bias = np.zeros((length, length), np.float32)
    bias[0] = -1e9
    call = case("float16", (1, 1), (length, length), (64, 64), batch=1, bias=bias)
    call.dout[...] = 0
    call.dout[..., 0, :] = 1
    dv = solve(call, rows=rows_of(call, False))[2].astype(np.float64)
    np.testing.assert_allclose(dv, 1 / length, rtol=2.0**-10)


PADS = [np.float16(-65504), ml_dtypes.bfloat16(-1e9), np.float32(-1e9), np.float64(-1e30)]


@pytest.mark.long
@pytest.mark.parametrize("pad", only(PADS, *PADS[1:3]), ids=lambda pad: pad.dtype.name)
def test_a_bias_of_any_type(pad):
    for more in ({}, {"softcap": 3.0}, CAUSAL):
        check(padded_case("float16", (90, 70), 64, pad, heads=(4, 2), **more),
              rows=rows_of(padded_case("float16", (9, 7), 64, pad), False))  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("shape", [(1, 1, 90, 1), (1, 2, 1, 1), (1, 1, 1, 1)])
def test_a_bias_that_broadcasts(shape):
    call = padded_case("bfloat16", (90, 70), 96, np.float32(-1e9), every=1)
    call.options["bias"] = np.full(shape, -1e9, np.float32)
    check(call, rows=rows_of(call, False))


@pytest.mark.parametrize("score", only((1e3, 5e3, 5.6e3, 5.7e3, 9e3, 1e5, 1e6, 1e7), 5.7e3, 1e7))
def test_two_equal_scores_have_half_the_weight_each(score):
    for dim, hopper in [(64, True), (128, True), (192, True), (64, False)]:
        call = case("bfloat16", (1, 1), (5, 2), (dim, dim), batch=1)._replace(options={"scale": 1})
        call.q[...], call.k[...], call.dout[...] = 0, 0, 0
        call.q[..., 0], call.k[..., 0], call.dout[..., 3, :] = score, 1, 1
        dv = solve(call, rows=rows_of(call, hopper))[2].astype(np.float64)
        np.testing.assert_allclose(dv, 0.5, rtol=2.0**-8)


@pytest.mark.parametrize(("dim", "hopper"), FEW)
def test_what_is_hidden_does_not_show(dim, hopper):
    rng = np.random.default_rng(2)
    mask = blocks_of(rng, 2, 150, 270, density=0.5)
    mask[:, :, [3, 140]] = False
    mask[:, [7, 9]] = False  # no key: 0, though 7 is one of the far ones
    call = far_case("bfloat16", (2, 2), (150, 270), dim, mask=mask, every=7)
    call.k[..., [3, 140], :] = call.v[..., [3, 140], :] = 0
    want = check(call, rows=rows_of(call, hopper))
    call.k[..., [3, 140], :] = np.nan
    call.v[..., [3, 140], :] = np.inf
    call.q[..., [7, 9], :] = np.nan
    got = solve(call, rows=rows_of(call, hopper))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x.astype(float), y.astype(float), rtol=2e-2, atol=2e-2)
    assert not got[0][..., [7, 9], :].any()
    assert not any(x[..., [3, 140], :].any() for x in got[1:])


@pytest.mark.parametrize(("dim", "hopper"), only([(128, True), (64, False)], (64, False)))
def test_a_score_that_is_not_a_number_is_its_rows_own(dim, hopper):
    call = far_case("bfloat16", (1, 1), (150, 140), dim, every=1, **CAUSAL)
    want = solve(call, rows=rows_of(call, hopper))
    call.k[..., 139, 5] = np.nan  # which the last ten queries see
    got = solve(call, rows=rows_of(call, hopper))
    assert np.isnan(got[0][..., 149, :].astype(float)).all()
    assert got[0][..., :128, :].tobytes() == want[0][..., :128, :].tobytes()
    assert np.isfinite(got[0][..., :149, :].astype(float)).all()


@pytest.mark.parametrize(("dim", "hopper"), FEW)
def test_others_keep_their_bits(dim, hopper):
    """Only tiles that a far row is in are computed again."""
    call = far_case("bfloat16", (4, 2), (300, 300), dim, every=1000, **CAUSAL)
    call.q[..., 0, :] = 0
    want = solve(call, rows=rows_of(call, hopper))
    call.q[:, 3, 200] = 0
    call.q[:, 3, 200, 0] = LARGE["bfloat16"][0]
    got = check(call, rows=rows_of(call, hopper))
    assert got[0][:, :3].tobytes() == want[0][:, :3].tobytes()
    assert got[0][:, 3, :192].tobytes() == want[0][:, 3, :192].tobytes()
    assert got[0][:, 3, 256:].tobytes() == want[0][:, 3, 256:].tobytes()
    for x, y in zip(got[1:], want[1:], strict=True):
        assert x[:, 0].tobytes() == y[:, 0].tobytes()
        assert x[:, 1, 256:].tobytes() == y[:, 1, 256:].tobytes()


@pytest.mark.long
def test_any_number_of_blocks_gives_the_same_bits():
    call = far_case("bfloat16", (2, 1), (130, 150), 64, every=5)
    want = solve(call, rows=rows_of(call, False))
    for seed, (blocks, together) in enumerate([(1, 1), (3, 2), (5, 5), (40, 7)]):
        got = solve(call, rows=rows_of(call, False), blocks=blocks, together=together, seed=seed)
        assert all(x.tobytes() == y.tobytes() for x, y in zip(got, want, strict=True))


@examples(25)
@given(
    which=st.sampled_from(HOPPER + AMPERE),
    dtype=drawn(DTYPES, "float16"),
    lengths=st.tuples(st.integers(1, 200), st.integers(1, 200)),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2)]),
    band=st.sampled_from(BANDS),
    every=st.integers(1, 70),
    sparse=st.booleans(),
    softcap=st.booleans(),
    power=st.integers(0, 12),
    seed=st.integers(0, 2**32),
)
def test_any_call(which, dtype, lengths, heads, band, every, sparse, softcap, power, seed):
    """No further off than twice what float32 itself is."""
    (dim, hopper), (of_queries, of_keys) = which, LARGE[dtype]
    sizes = of_queries * 2.0**-power, of_keys  # with and without scores that are far
    call = far_case(dtype, heads, lengths, dim, every, seed, sizes, **band)
    if sparse:
        mask = blocks_of(np.random.default_rng(seed), heads[0], *lengths)
        call = call._replace(options={**call.options, "mask": mask})
    if softcap and not hopper:
        call = call._replace(options={**call.options, "softcap": 2.0**18})
    compare(call, solve(call, rows=rows_of(call, hopper), seed=seed), times=2)


# As in test_bwd_nonfinite.
BUGS = {
    "no row is far": ("bwd_preprocess", "const bool is_large = fabsf(lse)",
                      "const bool is_large = 0 * fabsf(lse)"),
    "one thread of four adds up a row": ("bwd_nonfinite", "i < kThreads; i += kTile", "i < 1; ++i"),
    "products are exact": (
        "bwd_nonfinite", "ex2_approx_ftz(scale_score(score, scale) - of.x)",
        "ex2_approx_ftz(fmaf(score, scale, -of.x))",
    ),
    "weights are not divided by their sum": (
        "bwd_nonfinite", "scale_score(score, scale) - of.x) * of.y",
        "scale_score(score, scale) - of.x)",
    ),
    "the sums of another head": (
        "bwd_nonfinite", "batch_offsets(p, entry), lse_delta_of(params, entry)",
        "batch_offsets(p, entry), lse_delta_of(params, first_entry)",
    ),
    "nobody waits for the sums": ("bwd_nonfinite", "!= gridDim.x) {", "!= gridDim.x && 0) {"),
    "sums are there before they are added up": (
        "bwd_nonfinite", "shared.sums[threadIdx.x] = sums; __syncthreads();",
        "shared.sums[threadIdx.x] = sums;",
    ),
    "queries beyond 32 of a tile are not looked at": (
        "bwd_nonfinite", "is_large_lse(lse_delta.lse(first + 32 + lane))", "false",
    ),
}  # fmt: skip


@functools.cache
def planted_call():
    call = far_case("bfloat16", (4, 2), (200, 150), 64, every=40)
    call.q[..., 160, :] = call.q[..., 0, :]
    return call, check(call, rows=rows_of(call, False))


@pytest.mark.parametrize("bug", only(BUGS, "no row is far", "products are exact"))
def test_a_planted_bug_is_found(bug, tmp_path):
    kind, *change = BUGS[bug]
    call, want = planted_call()
    (row,) = (row for row in rows_of(call, False) if row.source.endswith(kind))
    sources = {row.entry: plant(tmp_path, row.source, change)}
    for seed in range(20):
        try:
            got = solve(call, rows=rows_of(call, False), sources=sources, seed=seed, blocks=5,
                        together=3)  # fmt: skip
        except emulator.EmulationError:
            return
        if any(x.tobytes() != y.tobytes() for x, y in zip(got, want, strict=True)):
            return
    pytest.fail("20 seeds did not show it")


@pytest.mark.parametrize(("dim", "hopper"), FEW)
def test_a_log_sum_exp_of_more_keys_is_used_as_given(dim, hopper, monkeypatch):
    """As of merged results: a call with half of the keys has half of the weights."""
    call = far_case("bfloat16", (2, 1), (150, 140), dim, sizes=(3 * 2.0**12, 1.0))
    whole = call._replace(k=np.concatenate([call.k] * 2, 2), v=np.concatenate([call.v] * 2, 2))
    want = check(whole, rows=rows_of(whole, hopper))
    real = reference.attention
    for_whole = real(whole.q, whole.k, whole.v, **whole.options)
    monkeypatch.setattr(reference, "attention", lambda *x, **options: for_whole)
    got = solve(call, rows=rows_of(call, hopper))
    for x, y in zip(got[1:], want[1:], strict=True):  # each key is there twice
        half = y[:, :, :140].astype(float)
        np.testing.assert_allclose(x.astype(float), half, rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose(
        2 * got[0].astype(float), want[0].astype(float), rtol=3e-2, atol=6e-2
    )
