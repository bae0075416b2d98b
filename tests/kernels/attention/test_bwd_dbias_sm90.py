"""The kernel for the gradient of a bias of pairs on SM90: its own source on the CPU."""

import functools
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy.gpu.kernels import backward
from fa_cupy.gpu.kernels.attention.dbias import bwd_dbias_sm90
from fa_cupy.gpu.kernels.attention_backward import make_plan, select
from fa_cupy.gpu.kernels.score import ScoreMod
from tests.support import gradients_of_biases as biases
from tests.support.every_run import drawn, examples, only
from tests.support.gradients_of_biases import BANDS, SINGLE, TOP, biased
from tests.support.kernel_attention import DTYPES, any_sinks, draw
from tests.support.kernel_gradients import case, traits_of
from tests.support.large_lse import far_case, padded_case
from tests.support.noting_launcher import NotingLauncher
from tests.support.planted import plant
from validation import emulator

DIMS = (64, 128, 256)
solve, check, check_spoiled, rows_of = (
    functools.partial(f, target="sm_90a", fills=True)
    for f in (biases.solve, biases.check, biases.check_spoiled, biases.rows_of)
)


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("dim", "dtype"),
    only(itertools.product(DIMS, DTYPES), (64, "float16"), (128, "bfloat16"), (256, "float16")),
)
def test_every_row(dim, dtype):
    call = biased(dtype, (2, 1), (150, 140), (dim, dim - 8), (150, 140), dlse=True)
    assert rows_of(call)[-1].kernel == "bwd_dbias_sm90"
    check(call)
    narrow = biased(dtype, (2, 2), (150, 140), (dim - 24, dim), (2, 150, 140), **BANDS["causal"])
    check(narrow, seed=2)


@pytest.mark.long
@pytest.mark.emulator
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("heads", [1, 4])
def test_a_bias_that_broadcasts_along_the_batch(batch, heads):
    for i, k_heads in enumerate([4, 2]):
        how = {"dlse": True, "batch": 3, **list(BANDS.values())[i]}
        shape = batch, heads, 150, 140
        check(biased("float16", (4, k_heads), (150, 140), (64, 64), shape, **how), seed=i)


@pytest.mark.emulator
@pytest.mark.parametrize("of", ["float16", "bfloat16", "float32", "float64"])
def test_a_bias_of_any_type(of):
    dtype = DTYPES.get(of, np.dtype(of) if of not in DTYPES else None)
    for lengths in ((70, 91), (70, 128)):
        call = biased("float16", (2, 1), lengths, (64, 40), lengths, dtype, dlse=True)
        call.options["bias"].reshape(-1)[::7] = -np.inf
        check(call)


@pytest.mark.emulator
def test_a_bias_lies_in_memory_as_it_likes():
    wide = draw(2, 140, 300, dtype=SINGLE, seed=3)
    for bias in (
        wide[:, :, :130],
        wide[:, ::-1, 260::-2],
        np.ascontiguousarray(wide[:, :, :130].swapaxes(1, 2)).swapaxes(1, 2),
        np.broadcast_to(wide[:1, :, :130], (2, 140, 130)),
    ):
        lengths = bias.shape[1:]
        found = check(case("float16", (2, 2), lengths, (64, 64), bias=bias))
        assert found[3].shape == bias.shape


@pytest.mark.long
@pytest.mark.emulator
@pytest.mark.parametrize(
    "lengths",
    only([((1, 1),), ((1, 300),), ((300, 1),), ((129, 127),), ((257, 385),)], ((129, 127),)),
    ids=str,
)
def test_odd_lengths(lengths):
    check(biased("bfloat16", (2, 1), lengths, (64, 64), lengths, dlse=True))


@pytest.mark.emulator
def test_softcaps_and_scales():
    for more in ({"softcap": 2.0}, {"softcap": 30.0, "scale": 3.0}, {"scale": -0.2}):
        check(biased("bfloat16", (2, 2), (90, 70), (64, 64), (90, 70), **more))


@pytest.mark.emulator
def test_sinks_are_in_the_log_sum_exp():
    sinks = any_sinks(np.random.default_rng(5), 2, 2, 90)
    check(biased("float16", (2, 1), (90, 70), (64, 64), (90, 70), sinks=sinks, dlse=True))


@pytest.mark.emulator
def test_bands_that_leave_out_whole_tiles():
    for window in ((0, 0), (5, 0), (None, 5)):
        band = {"window": window, "causal_align": TOP}
        check(biased("float16", (1, 1), (290, 290), (64, 64), (290, 290), **band))
    call = biased("bfloat16", (1, 1), (300, 70), (64, 64), (300, 70), **BANDS["causal"])
    assert not check(call)[3][:230].any()


# Not finite, and large


@pytest.mark.emulator
def test_what_is_not_finite_spoils_what_it_belongs_to():
    for which, bad in itertools.product(("q", "k", "v", "dout", "bias"), (np.nan, np.inf)):
        call = biased("bfloat16", (2, 1), (90, 80), (64, 64), (90, 80), batch=1, dlse=True,
                      **BANDS["causal"])  # fmt: skip
        if which == "bias":
            call.options["bias"][50, 3] = bad
        else:
            getattr(call, which)[0, 0, 50, 3] = bad
        check_spoiled(call)


@pytest.mark.long
@pytest.mark.emulator
def test_nothing_leaks_from_hidden_pairs():
    biases.check_hidden_pairs(target="sm_90a", fills=True)


@pytest.mark.long
@pytest.mark.emulator
@pytest.mark.parametrize("dim", DIMS)
def test_weights_of_large_scores_sum_to_one(dim):
    for dtype in DTYPES:
        call = far_case(dtype, (2, 1), (150, 140), dim, **BANDS["causal"])
        bias = draw(150, 140, dtype=SINGLE, seed=2)
        bias = (64 * np.round(bias)).astype(np.float32)  # scores that are exact stay so
        check(call._replace(options={**call.options, "bias": bias}))


@pytest.mark.emulator
@pytest.mark.parametrize("pad", [np.float16(-65504), np.float32(-1e9), np.float64(-1e30)])
def test_a_row_of_nothing_but_padding(pad):
    for more in ({}, {"softcap": 3.0}, BANDS["causal"]):
        call = padded_case("float16", (90, 70), 64, pad, heads=(4, 2), **more)
        bias = np.broadcast_to(call.options["bias"], (*call.options["bias"].shape[:-2], 90, 70))
        check(call._replace(options={**call.options, "bias": bias.copy()}))


# Any schedule, any call


@pytest.mark.emulator
@pytest.mark.parametrize("dim", DIMS)
def test_the_schedule_does_not_show(dim):
    call = biased("bfloat16", (4, 2), (150, 140), (dim, dim), (150, 140))
    found = {solve(call, seed=seed)[3].tobytes() for seed in range(3)}
    assert len(found) == 1


@pytest.mark.emulator
@examples(24)
@given(
    dim=drawn(DIMS, 64),
    dtype=drawn(DTYPES, "float16"),
    of=st.sampled_from([*DTYPES.values(), SINGLE, np.dtype(np.float64)]),
    lengths=st.tuples(st.integers(1, 200), st.integers(1, 200)),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 1), (4, 2)]),
    axes=st.tuples(*[st.booleans()] * 2),
    band=st.sampled_from(list(BANDS)),
    softcap=st.sampled_from([None, 2.0]),
    dlse=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_call(dim, dtype, of, lengths, heads, axes, band, softcap, dlse, seed):
    shape = [n if has else 1 for n, has in zip((2, heads[0]), axes, strict=True)]
    more = BANDS[band] if softcap is None else {"softcap": softcap, **BANDS[band]}
    call = biased(dtype, heads, lengths, (dim, dim), (*shape, *lengths), of, dlse=dlse, **more)
    check(call, seed=seed)


# Planted bugs: what stands there and what is put in its place.
BUGS = {
    "tiles are read before they have landed": (
        "wait(shared.full[pipe.index()], pipe.parity());", "",
    ),
    "a stage is filled while others read it": (
        "wait(shared.empty[pipe.index()], pipe.parity() ^ 1);", "",
    ),
    "Q and K are given back before their product": (
        "wgmma_wait_group<kEarlyParts>(); if (!any_large)", "if (!any_large)",
    ),

    "delta is not taken away": ("dp[0][j][e] - delta[e / 2]", "dp[0][j][e]"),
    "the entry is always the first": ("entry_of(params, own.entry, step);", "own.entry;"),
    "a band is not looked at": ("if (!own.in_band)", "if (false)"),
}  # fmt: skip
# Where Q and K come in parts.
BUGS_OF_PARTS = {
    "Q and K are the first columns again": (
        "params.k_step, part * kStageDim, 0", "params.k_step, 0, 0",
    ),
    "dO and V are the first columns again": (
        "params.v_step, part * kStageDim, 0", "params.v_step, 0, 0",
    ),
    "only the last columns count": ("!is_first || step > 0", "step > 0"),
    "large weights are of the first columns": ("of_part(first, chunk / kChunks)", "first"),
    "one stage of Q and K is given back": (
        "if (!any_large) release_parts(shared, qk_pipe);",
        "if (!any_large) release_per_lane(shared.empty[qk_pipe.index()]);",
    ),
    "Q and K of large weights are given back first": (
        "if (!any_large) release_parts(shared, qk_pipe);", "release_parts(shared, qk_pipe);",
    ),
}  # fmt: skip
ALWAYS = (
    "tiles are read before they have landed", "a stage is filled while others read it",
    "only the last columns count",
)  # fmt: skip


@functools.cache
def solved(dim):
    """A call that bugs are planted for, and its gradient."""
    if dim == 128:
        lengths = 200, 260
        call = biased("bfloat16", (4, 2), lengths, (dim, dim), lengths, **BANDS["causal"])
    else:
        lengths = 150, 140
        call = far_case("bfloat16", (2, 1), lengths, dim)
        bias = (64 * np.round(draw(*lengths, dtype=SINGLE, seed=2))).astype(np.float32)
        call = call._replace(options={**call.options, "bias": bias})
    return call, solve(call)[3]


@pytest.mark.emulator
@pytest.mark.parametrize("bug", only([*BUGS, *BUGS_OF_PARTS], *ALWAYS))
def test_a_planted_bug_is_found(bug, tmp_path):
    call, want = solved(128 if bug in BUGS else 256)
    row = rows_of(call)[-1]
    sources = {row.entry: plant(tmp_path, row.source, (BUGS | BUGS_OF_PARTS)[bug])}
    for seed in range(8):
        try:
            got = solve(call, seed=seed, sources=sources)[3]
        except emulator.EmulationError:
            return
        if got.tobytes() != want.tobytes():
            return
    pytest.fail("8 seeds did not show it")


# The host side


def step_of(q, k, bias, **options):
    """The launch of the last kernel of a call on a device with 132 multiprocessors."""
    launcher = NotingLauncher(multiprocessors=132)
    launcher.target = "sm_90a"
    plan, _ = make_plan(traits_of(q, k, k, bias, dbias=True, **options), launcher)
    return plan.steps[-1]


def test_a_block_for_each_tile():
    q, k = np.zeros((4, 16, 2048, 128), np.float16), np.zeros((4, 2, 2048, 128), np.float16)

    def launch(*shape, keys=k):
        step = step_of(q, keys, np.zeros(shape, np.float16))
        return step.variant.kernel, step.grid

    assert launch(2048, 2048) == ("bwd_dbias_sm90", 256)
    assert launch(4, 1, 2048, 2048) == ("bwd_dbias_sm90", 1024)
    assert launch(16, 2048, 2048) == ("bwd_dbias_sm90", 4096)
    assert launch(4, 16, 2048, 1)[0] == launch(4, 16, 1, 2048)[0] == "bwd_dbias_sm80"
    assert launch(2048, 1000, keys=k[:, :, :1000].copy())[0] == "bwd_dbias_sm80"  # 128 tiles
    mask = np.ones((2048, 2048), bool)
    bias = np.zeros((2048, 2048), np.float16)
    assert step_of(q, k, bias, mask=mask).variant.kernel == "bwd_dbias_sm80"


def test_it_serves_what_it_is_for():
    pair = ScoreMod(bias_axes="pair", bias_dtype="float16")
    for dim, masked, mapped, fills in itertools.product(
        (64, 128, 192, 256), (False, True), (False, True), (False, True)
    ):
        wanted = backward.Wanted(
            "float16", dim, masked, mapped, score=pair, dbias=True, dbias_fills=fills
        )
        serves = not masked and mapped and fills
        kernel = "bwd_dbias_sm90" if serves else "bwd_dbias_sm80"
        assert select(wanted, "sm_90a")[-1].kernel == kernel
        of_keys = wanted._replace(score=pair._replace(bias_axes="key"))
        assert select(of_keys, "sm_90a")[-1].kernel == "bwd_dbias_sm80"
        assert select(wanted._replace(mapped=False), "sm_80")[-1].kernel == "bwd_dbias_sm80"


def test_as_many_stages_as_fit():
    stages = {}
    for row in bwd_dbias_sm90.VARIANTS:
        for of in ("bfloat16", "float64"):
            score = ScoreMod(bias_axes="pair", bias_dtype=of)
            stages[row.dim, of] = row.for_score(score).stages
    assert stages == {
        (64, "bfloat16"): 5, (64, "float64"): 4, (128, "bfloat16"): 3, (128, "float64"): 2,
        (256, "bfloat16"): 6, (256, "float64"): 5,
    }  # fmt: skip
