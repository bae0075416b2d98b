"""The kernel for the gradient of a bias: its own source on the CPU, after those for the others."""

import functools
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import BitMask
from fa_cupy.gpu.kernels import backward
from fa_cupy.gpu.kernels.attention.dbias import bwd_dbias_sm80
from fa_cupy.gpu.kernels.attention_backward import make_plan, select
from tests.support.every_run import drawn, examples, only
from tests.support.gradients_of_biases import (
    BANDS,
    BOTTOM,
    SINGLE,
    TOP,
    biased,
    check,
    check_hidden_pairs,
    check_spoiled,
    rows_of,
    solve,
)
from tests.support.kernel_attention import DTYPES, any_sinks, blocks_of, draw
from tests.support.kernel_gradients import any_transform, case, parts_of, traits_of
from tests.support.large_lse import far_case, padded_case
from tests.support.noting_launcher import NotingLauncher
from tests.support.planted import plant
from validation import emulator

DIMS = (32, 64, 96, 128, 192, 256)
ROWS = list(itertools.product(DIMS, DTYPES))


@pytest.mark.emulator
@pytest.mark.parametrize(("dim", "dtype"), only(ROWS, (64, "float16")))
@pytest.mark.parametrize("masked", [False, True])
def test_every_row(dim, dtype, masked):
    call = biased(dtype, (2, 1), (150, 140), (dim, dim - 8), (2, 150, 140), dlse=True)
    if masked:
        mask = blocks_of(np.random.default_rng(1), 2, 150, 140, density=0.5)
        check(call._replace(options={**call.options, "mask": mask, **BANDS["causal"]}), seed=2)
        return
    check(call)
    check(call, target="sm_89")  # whose tiles are smaller


EACH_AXES = [(150, 140), (150, 1), (1, 140), (1, 1)]
# The axes of the batch, of heads, queries and keys: all of them, or 1.
SHAPES = list(itertools.product((1, 2), (1, 4), (1, 150), (1, 140)))


@pytest.mark.long
@pytest.mark.emulator
@pytest.mark.parametrize(
    "shape",
    only(
        [(shape,) for shape in SHAPES],
        ((1, 1, 150, 140),),
        ((2, 1, 1, 140),),
    ),
    ids=str,
)
def test_a_bias_that_broadcasts_along_any_axes(shape):
    for i, heads in enumerate([(4, 4), (4, 2)]):
        how = {"dlse": True, **list(BANDS.values())[i]}
        check(biased("float16", heads, (150, 140), (32, 32), shape, **how), seed=i)


@pytest.mark.long
@pytest.mark.emulator
@pytest.mark.parametrize("missing", only([0, 1, 2, 3], 1))
def test_a_bias_with_fewer_axes(missing):
    shape = (2, 2, 70, 90)[missing:]
    for heads in ((2, 2), (2, 1)):
        check(biased("bfloat16", heads, (70, 90), (32, 32), shape))
        check(biased("bfloat16", heads, (70, 90), (32, 32), (*shape[:-1], 1), dlse=True))


@pytest.mark.long
@pytest.mark.emulator
@pytest.mark.parametrize("of", only(["float16", "bfloat16", "float32", "float64"], "float64"))
def test_a_bias_of_any_type(of):
    dtype = DTYPES.get(of, np.dtype(of) if of not in DTYPES else None)
    for shape in ((2, 70, 91), (2, 70, 1), (1, 1, 92), (1, 1, 1)):
        call = biased("float16", (2, 1), (70, shape[-1] if shape[-1] > 1 else 90), (32, 40), shape,
                      dtype, dlse=True)  # fmt: skip
        if call.options["bias"].size > 4:
            call.options["bias"].reshape(-1)[::7] = -np.inf
        check(call)


@pytest.mark.long
@pytest.mark.emulator
def test_a_bias_lies_in_memory_as_it_likes():
    wide = draw(2, 140, 300, dtype=SINGLE, seed=3)
    turned = np.ascontiguousarray(wide[:, :, :130].swapaxes(1, 2)).swapaxes(1, 2)
    for bias in (
        wide[:, :, :130],
        wide[:, ::-1, 260::-2],
        turned,
        np.broadcast_to(wide[:1, :1, :130], (2, 140, 130)),
        np.broadcast_to(wide[:, :, :1], (2, 140, 130)),
        wide.swapaxes(0, 1)[:, :, :130].copy().swapaxes(0, 1),
    ):
        bias = bias[..., :131]
        lengths = bias.shape[1:]
        found = check(case("float16", (2, 2), lengths, (32, 32), bias=bias))
        assert found[3].shape == bias.shape


@pytest.mark.long
@pytest.mark.emulator
@pytest.mark.parametrize(
    "lengths",
    only([((1, 1),), ((1, 300),), ((300, 1),), ((129, 127),), ((257, 65),)], ((1, 300),)),
    ids=str,
)
def test_odd_lengths(lengths):
    for shape in (lengths, (lengths[0], 1), (1, lengths[1]), (1, 1)):
        check(biased("bfloat16", (2, 1), lengths, (64, 64), (2, *shape), dlse=True))


@pytest.mark.long
@pytest.mark.emulator
@pytest.mark.parametrize("shape", only([((90, 70),), ((90, 1),), ((1, 70),)], ((90, 70),)), ids=str)
def test_softcaps_and_scales(shape):
    for more in ({"softcap": 2.0}, {"softcap": 30.0, "scale": 3.0}, {"scale": -0.2}):
        check(biased("bfloat16", (2, 2), (90, 70), (64, 64), (2, *shape), batch=1, **more))


@pytest.mark.long
@pytest.mark.emulator
def test_sinks_are_in_the_log_sum_exp():
    sinks = any_sinks(np.random.default_rng(5), 2, 2, 90)
    check(biased("float16", (2, 1), (90, 70), (32, 32), (90, 70), sinks=sinks, dlse=True))


@pytest.mark.emulator
@pytest.mark.parametrize("dim", only((64, 128), 64))
def test_what_is_hidden_has_no_gradient(dim):
    states = np.array([[2, 0, 1, 0], [0, 0, 0, 1]])
    random = np.random.default_rng(0).random((256, 512)) < 0.5
    mask = np.kron(states, np.ones((128, 128), int))
    mask = (mask == 2) | ((mask == 1) & random)
    call = biased("float16", (2, 1), (256, 512), (dim, dim), (256, 512), batch=1, mask=mask)
    want = check(call)[3]
    assert not want[~mask].any()
    call.k[:, :, 128:256] = call.v[:, :, 128:256] = np.nan
    assert solve(call)[3].tobytes() == want.tobytes()
    packed = call._replace(options={**call.options, "mask": BitMask.from_dense(mask)})
    assert solve(packed)[3].tobytes() == want.tobytes()
    hidden = call._replace(options={**call.options, "mask": np.zeros((256, 512), bool)})
    assert not solve(hidden)[3].any()


@pytest.mark.long
@pytest.mark.emulator
def test_bands_that_leave_out_whole_tiles():
    for window in ((0, 0), (5, 0), (None, 5)):
        for shape in ((290, 290), (290, 1), (1, 290)):
            band = {"window": window, "causal_align": TOP}
            check(biased("float16", (1, 1), (290, 290), (32, 32), shape, batch=1, **band))
    causal = {"is_causal": True, "causal_align": BOTTOM}
    call = biased("bfloat16", (1, 1), (300, 70), (64, 64), (300, 70), batch=1, **causal)
    assert not check(call)[3][:230].any()


# Not finite, and large


@pytest.mark.long
@pytest.mark.emulator
@pytest.mark.parametrize(
    "shape", only([((90, 80),), ((90, 1),), ((1, 80),), ((1, 1),)], ((90, 80),), ((1, 80),))
)
def test_what_is_not_finite_spoils_what_it_belongs_to(shape):
    for which, bad in itertools.product(("q", "k", "v", "dout"), (np.nan, np.inf)):
        call = biased("bfloat16", (2, 1), (90, 80), (32, 32), (2, *shape), batch=1, dlse=True,
                      **BANDS["causal"])  # fmt: skip
        getattr(call, which)[0, 0, 50, 3] = bad
        check_spoiled(call)


@pytest.mark.emulator
def test_nothing_leaks_from_hidden_pairs():
    check_hidden_pairs()


@pytest.mark.long
@pytest.mark.emulator
@pytest.mark.parametrize(
    ("shape", "target"),
    only(
        itertools.product(EACH_AXES, ("sm_80", "sm_90a")),
        ((150, 140), "sm_90a"),
        ((1, 140), "sm_80"),
    ),
)
def test_weights_of_large_scores_sum_to_one(shape, target):
    for dtype in DTYPES:
        call = far_case(dtype, (2, 1), (150, 140), 64, **BANDS["causal"])
        bias = draw(2, *shape, dtype=SINGLE, seed=2)
        bias = (64 * np.round(bias)).astype(np.float32)  # scores that are exact stay so
        check(call._replace(options={**call.options, "bias": bias}), target=target)


@pytest.mark.long
@pytest.mark.emulator
@pytest.mark.parametrize(
    "pad", only([np.float16(-65504), np.float32(-1e9), np.float64(-1e30)], np.float64(-1e30))
)
def test_a_row_of_nothing_but_padding(pad):
    for more in ({}, {"softcap": 3.0}, BANDS["causal"]):
        check(padded_case("float16", (90, 70), 64, pad, heads=(4, 2), **more))
    call = padded_case("bfloat16", (90, 70), 96, pad, every=1)
    for shape in ((1, 1, 90, 1), (1, 2, 1, 1), (1, 1, 1, 1)):
        check(call._replace(options={"bias": np.full(shape, pad)}))


# Repeatability


def split_call(shape=(1, 1), **options):
    return biased("bfloat16", (4, 2), (150, 140), (32, 32), shape, **options)


@pytest.mark.emulator
@pytest.mark.parametrize("shape", only([(shape,) for shape in EACH_AXES], ((150, 140),)))
def test_the_schedule_does_not_show(shape):
    found = {solve(split_call(shape), seed=seed)[3].tobytes() for seed in range(4)}
    assert len(found) == 1


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("shape", "blocks"),
    only(
        itertools.product(EACH_AXES, (1, 3, 40)),
        ((150, 140), 40),
        ((1, 140), 3),
        ((1, 1), 40),
    ),
    ids=str,
)
def test_any_number_of_splits(shape, blocks):
    check(split_call(shape, dlse=True), blocks=blocks)


@pytest.mark.emulator
@examples(24)
@given(
    dim=drawn(DIMS, 64),
    dtype=drawn(DTYPES, "float16"),
    of=drawn([*DTYPES.values(), SINGLE, np.dtype(np.float64)], SINGLE),
    lengths=st.tuples(st.integers(1, 200), st.integers(1, 200)),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 1), (4, 2)]),
    axes=st.tuples(*[st.booleans()] * 4),
    band=st.sampled_from(list(BANDS)),
    dlse=st.booleans(),
    target=drawn(["sm_80", "sm_89", "sm_90a"], "sm_80"),
    sparse=st.booleans(),
    blocks=st.integers(1, 9),
    seed=st.integers(0, 2**32),
)
def test_any_call(dim, dtype, of, lengths, heads, axes, band, dlse, target, sparse, blocks, seed):
    sizes = 2, heads[0], *lengths
    shape = [n if has else 1 for n, has in zip(sizes, axes, strict=True)]
    call = biased(dtype, heads, lengths, (dim, dim), shape, of, dlse=dlse, **BANDS[band])
    more = any_transform(np.random.default_rng(seed), sparse, *sizes)
    more["bias"] = call.options["bias"]
    if heads[0] != heads[1] or target != "sm_90a":
        more.pop("scale", None)
    check(call._replace(options={**call.options, **more}), target=target, seed=seed, blocks=blocks)


# Planted bugs: what stands there and what is put in its place.
BUGS = {
    "Q and K are read before they have landed": (
        "cp_async_wait_group<1>(); __syncthreads();  // Q, K",
        "__syncthreads();  // Q, K",
    ),
    "Q and K are overwritten while others read them": (
        "__syncthreads();  // nobody reads Q and K any more", "",
    ),
    "dO and V are overwritten while others read them": (
        "__syncthreads();  // nobody reads dO and V any more", "",
    ),
    "dO and V are read before they have landed": (
        "cp_async_wait_group<1>(); __syncthreads();  // dO", "__syncthreads();  // dO",
    ),
    "delta is not taken away": ("dp[i][j][e] - rows.delta[i][e / 2]", "dp[i][j][e]"),
    "a tile counts as that of the step before": ("if (tile == tile_before &&", "if ("),
    "the entry is always the first": ("entry += (from - rest * size) * step;", ""),
    "splits are not waited for": (
        "if (shared.arrived != params.splits - 1) return false;",
        "if (shared.arrived != 0) return false;",
    ),
    "one split is left out": ("own.begin + share);", "own.begin + share - 1);"),
    "the sums of one warp": (
        "const int parts = params.sums_keys ? Warps::kAcross : Warps::kDown;",
        "const int parts = 1;",
    ),
    "a band is not looked at": ("params.common, s, step.in_band,",
                                "params.common, s, true,"),
}  # fmt: skip
ALWAYS = (
    "Q and K are read before they have landed",
    "splits are not waited for",
)


@functools.cache
def solved():
    """Calls that bugs are planted for, and their gradients."""
    options = {"batch": 1, **BANDS["causal"]}
    calls = [
        biased("bfloat16", (4, 2), (300, 260), (64, 64), shape, **options)
        for shape in ((300, 260), (300, 1), (1, 260))
    ]
    return calls, [solve(call)[3] for call in calls]


@pytest.mark.emulator
@pytest.mark.parametrize("bug", only(BUGS, *ALWAYS))
def test_a_planted_bug_is_found(bug, tmp_path):
    calls, wants = solved()
    row = rows_of(calls[0])[-1]
    sources = {row.entry: plant(tmp_path, row.source, BUGS[bug])}
    for seed in range(8):
        for call, want in zip(calls, wants, strict=True):
            try:
                got = solve(call, seed=seed, sources=sources)[3]
            except emulator.EmulationError:
                return
            if got.tobytes() != want.tobytes():
                return
    pytest.fail("8 seeds did not show it")


# The host side


def step_of(q, k, bias, multiprocessors=132):
    """The launch of the kernel, and the parts of the workspace."""
    launcher = NotingLauncher(multiprocessors=multiprocessors)
    launcher.target = "sm_80"
    plan, space = make_plan(traits_of(q, k, k, bias, dbias=True), launcher)
    return plan.steps[-1], parts_of(space)


def test_how_many_blocks_share_a_tile():
    q, k = np.zeros((4, 16, 4096, 128), np.float16), np.zeros((4, 2, 4096, 128), np.float16)

    def launch(*shape):
        step, parts = step_of(q, k, np.zeros(shape, np.float16))
        p = step.params[0]
        assert "partial_sums" not in parts or p["splits"] > 1
        return step.grid, p["splits"], parts.get("partial_sums", 0)

    assert launch(4096, 4096) == (1024, 1, 0)
    assert launch(4, 16, 4096, 4096) == (65536, 1, 0)
    grid, splits, room = launch(1, 16, 1, 1)
    assert (grid, splits) == (16 * 17, 17)
    assert room >= 4 * grid * 256
    grid, splits, room = launch(1, 4096)
    assert (grid, splits) == (32 * 9, 9)
    q, k = q[:, :, :256], k[:, :, :256]
    grid, splits, room = launch(256, 256)
    assert (grid, splits) == (4 * 32, 32)  # a split has two steps at least
    assert room >= 4 * grid * 128 * 128


def test_every_dim_has_rows_for_all_targets():
    rows = bwd_dbias_sm80.VARIANTS
    assert {(row.dim, row.dtype, row.sparse) for row in rows} == {
        (dim, dtype, sparse) for dim in DIMS for dtype in DTYPES for sparse in (False, True)
    }
    for dim in DIMS:
        assert any("sm_89" in row.targets for row in rows if row.dim == dim)
    assert all(isinstance(row.score.bias_axes, str) and row.score.bias_axes for row in rows)


def test_the_kernel_is_launched_last_and_only_where_it_is_wanted():
    score = bwd_dbias_sm80.VARIANTS[0].score
    for target, mapped in (("sm_90a", True), ("sm_80", False)):
        wanted = backward.Wanted("float16", 64, mapped=mapped, score=score)
        without = select(wanted, target)
        rows = select(wanted._replace(dbias=True), target)
        assert rows[:-1] == without
        assert (rows[-1].kernel, rows[-1].score) == ("bwd_dbias_sm80", score)
