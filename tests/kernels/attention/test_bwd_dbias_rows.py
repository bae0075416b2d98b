"""The kernels for the gradient of a bias in float32 and float64: their own source on the CPU."""

import functools
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import BitMask
from fa_cupy.gpu.kernels import backward
from fa_cupy.gpu.kernels.attention.dbias import bwd_dbias_fp32, bwd_dbias_fp64
from fa_cupy.gpu.kernels.attention_backward import make_plan, select
from tests.support.every_run import drawn, examples, only
from tests.support.gradients_of_biases import (
    BANDS,
    SINGLE,
    biased,
    check,
    check_hidden_pairs,
    check_spoiled,
    of_exact_scores,
    rows_of,
    solve,
)
from tests.support.kernel_attention import any_sinks, blocks_of
from tests.support.kernel_gradients import parts_of, traits_of
from tests.support.noting_launcher import NotingLauncher
from tests.support.planted import plant
from validation import emulator

pytestmark = pytest.mark.emulator

DOUBLE = np.dtype(np.float64)
DTYPES = {"float32": SINGLE, "float64": DOUBLE}
# Dims, and a target that takes the row: one of SM90 where there are rows for it alone.
ROWS = [
    *(("float64", dim, "sm_90a") for dim in (32, 64, 96, 128, 192, 256)),
    *(("float64", dim, target) for dim in (32, 64, 128) for target in ("sm_80", "sm_89")),
    *(("float32", dim, "sm_80") for dim in (32, 64, 96, 128)),
]
EACH = [("float32", "sm_80"), ("float64", "sm_89")]


@pytest.mark.parametrize(
    ("dtype", "dim", "target"), only(ROWS, ("float64", 64, "sm_90a"), ("float32", 64, "sm_80"))
)
@pytest.mark.parametrize("masked", [False, True])
def test_every_row(dtype, dim, target, masked):
    shape = 2, 90, 140
    call = biased(dtype, (2, 1), shape[1:], (dim, dim - 3), shape, DTYPES[dtype], batch=1)
    if masked:
        mask = blocks_of(np.random.default_rng(1), *shape, density=0.5)
        call = call._replace(options={**call.options, "mask": mask, **BANDS["causal"]})
    check(call, target=target, seed=2)


# The axes of the batch, of heads, queries and keys: all of them, or 1.
SHAPES = list(itertools.product((1, 2), (1, 4), (1, 70), (1, 90)))


@pytest.mark.parametrize(("dtype", "target"), EACH)
@pytest.mark.parametrize(
    "shape", only([(shape,) for shape in SHAPES], ((1, 4, 70, 1),), ((2, 1, 1, 90),)), ids=str
)
def test_a_bias_that_broadcasts_along_any_axes(dtype, target, shape):
    for i, heads in enumerate([(4, 4), (4, 2)]):
        how = {"dlse": True, **list(BANDS.values())[i]}
        check(biased(dtype, heads, (70, 90), (32, 32), shape, **how), target=target, seed=i)


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "target"), EACH)
@pytest.mark.parametrize("of", only(["float16", "float32", "float64"], "float16"))
def test_a_bias_of_any_type(dtype, target, of):
    for shape in ((2, 70, 91), (2, 70, 1), (1, 1, 1)):
        lengths = 70, shape[-1] if shape[-1] > 1 else 90
        call = biased(dtype, (2, 1), lengths, (32, 30), shape, np.dtype(of), dlse=True)
        if call.options["bias"].size > 4:
            call.options["bias"].reshape(-1)[::7] = -np.inf
        check(call, target=target)


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "target"), EACH)
def test_softcaps_scales_and_sinks(dtype, target):
    sinks = any_sinks(np.random.default_rng(5), 2, 2, 90)
    for more in ({"softcap": 2.0}, {"softcap": 30.0, "scale": 3.0}, {"scale": -0.2},
                 {"sinks": sinks, "dlse": True}):  # fmt: skip
        check(biased(dtype, (2, 2), (90, 70), (32, 32), (2, 90, 70), **more), target=target)


@pytest.mark.parametrize(("dtype", "target"), EACH)
def test_what_is_hidden_has_no_gradient(dtype, target):
    states = np.array([[2, 0, 1, 0], [0, 0, 0, 1]])
    random = np.random.default_rng(0).random((256, 512)) < 0.5
    mask = np.kron(states, np.ones((128, 128), int))
    mask = (mask == 2) | ((mask == 1) & random)
    call = biased(dtype, (2, 1), (256, 512), (32, 32), (256, 512), batch=1, mask=mask)
    want = check(call, target=target)[3]
    assert not want[~mask].any()
    call.k[:, :, 128:256] = call.v[:, :, 128:256] = np.nan
    assert solve(call, target)[3].tobytes() == want.tobytes()
    packed = call._replace(options={**call.options, "mask": BitMask.from_dense(mask)})
    assert solve(packed, target)[3].tobytes() == want.tobytes()


@pytest.mark.parametrize(("dtype", "target"), EACH)
@pytest.mark.parametrize("shape", only([((40, 50),), ((40, 1),), ((1, 50),)], ((40, 50),)))
def test_what_is_not_finite_spoils_what_it_belongs_to(dtype, target, shape):
    for which, bad in itertools.product(("q", "k", "v", "dout"), (np.nan, np.inf)):
        call = biased(dtype, (2, 1), (40, 50), (32, 32), (2, *shape), batch=1, dlse=True,
                      **BANDS["causal"])  # fmt: skip
        getattr(call, which)[0, 0, 30, 3] = bad
        check_spoiled(call, target=target)
        call.options["bias"][..., min(30, shape[1] - 1)] = -np.inf  # hides finite scores alone
        check_spoiled(call, target=target)


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "target"), EACH)
def test_nothing_leaks_from_hidden_pairs(dtype, target):
    check_hidden_pairs(dtype, dim=32, target=target)


@pytest.mark.parametrize(("dtype", "target"), EACH)
@pytest.mark.parametrize("shape", [(70, 90), (1, 90)])
def test_weights_of_large_scores_sum_to_one(dtype, target, shape):
    """With a bias of 1e30 on all keys, beside which scores lose what they differ by."""
    for far in (1e30, -1e30):
        call = biased(dtype, (2, 2), (70, 90), (32, 32), shape, batch=1)
        call.options["bias"][...] = far
        check(call, target=target)


@pytest.mark.parametrize("of", ["qk", "ov"])
def test_numbers_that_pairs_of_float16_do_not_hold(of):
    """Rows have a number of 1e6 that meets zeros, so that numbers of 1e-4 decide."""
    call = biased("float32", (1, 1), (70, 90), (32, 32), (70, 90), batch=1)
    q, k = (call.q, call.k) if of == "qk" else (call.dout, call.v)
    for x, col in ((q, 0), (k, 1)):
        x[...] *= 1e-3 if of == "ov" else 1e-2
        x[..., :2] = 0
        x[..., col] = 3e4
    check(call)


def test_weights_of_exact_scores():
    check(of_exact_scores())


# Repeatability


@pytest.mark.parametrize(
    ("dtype", "target", "shape"),
    only(
        [(*how, shape) for how in EACH for shape in ((70, 80), (1, 80), (1, 1))],
        (*EACH[0], (1, 80)),
        (*EACH[1], (70, 80)),
    ),
)
def test_any_number_of_splits(dtype, target, shape):
    """Of blocks that share a tile: sums have one order each."""
    call = biased(dtype, (4, 2), (70, 80), (32, 32), shape, batch=1, dlse=True)
    for blocks in (2, 40):
        found = {
            check(call, target=target, blocks=blocks, seed=seed)[3].tobytes() for seed in (0, 1)
        }
        assert len(found) == 1


@pytest.mark.long
@examples(12)
@given(
    dim=drawn((32, 64, 128), 32),
    dtype=st.sampled_from(EACH),
    of=st.sampled_from([np.dtype(np.float16), SINGLE, DOUBLE]),
    lengths=st.tuples(st.integers(1, 150), st.integers(1, 150)),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 1), (4, 2)]),
    axes=st.tuples(*[st.booleans()] * 4),
    band=st.sampled_from(list(BANDS)),
    dlse=st.booleans(),
    softcap=st.sampled_from([0.0, 2.0]),
    sparse=st.booleans(),
    blocks=st.integers(1, 9),
    seed=st.integers(0, 2**32),
)
def test_any_call(dim, dtype, of, lengths, heads, axes, band, dlse, softcap, sparse, blocks, seed):
    dtype, target = dtype
    sizes = 2, heads[0], *lengths
    shape = [n if has else 1 for n, has in zip(sizes, axes, strict=True)]
    more = {"softcap": softcap, "dlse": dlse, **BANDS[band]}
    if sparse:
        more["mask"] = blocks_of(np.random.default_rng(seed), *sizes)
    call = biased(dtype, heads, lengths, (dim, dim), shape, of, **more)
    check(call, target=target, seed=seed, blocks=blocks)


# Planted bugs: in which dtypes, what stands there and what is put in its place.
BOTH, *ONE = tuple(EACH), EACH[:1], EACH[1:]
BUGS = {
    "tiles are read before they have landed": (
        BOTH, "cp_async_wait_group<0>(); __syncthreads();  // the tiles",
        "__syncthreads();  // the tiles",
    ),
    "a step is read before it is found": (
        BOTH, "} __syncthreads(); return step.index", "} return step.index",
    ),
    "queries are never loaded again": (
        BOTH, "return shared.step.entry == shared.loaded_entry &&",
        "return shared.loaded_tile >= 0;",
    ),
    "one split is left out": (BOTH, "split < params.joined;", "split < params.joined - 1;"),
    "a split takes the place of others": (BOTH, "x[i] += from", "x[i] = from"),
    "the entry of a step is the first": (BOTH, "work.entry = step.entry;", "work.entry = 0;"),
    "delta is not taken away": (ONE[1], "subtract_delta(tiles.rows[0] + warp_row(), x);", ""),
    "hidden pairs count": (ONE[1], "two.x == kHiddenWeight ? low :", ""),
    "splits have less room than they take": (
        ONE[1], "join_and_write<kTeam>(params, own, all",
        "join_and_write<kTeam / 2>(params, own, all",
    ),
    "weights are not waited for": (ONE[1], "bar_sync(1 + pair, 64);", ""),
    "terms are not computed again": (
        ONE[0], "if (__any_sync(kFullWarp, !all_finite(terms)))", "if (false)",
    ),
    "a lane takes the term of another": (
        ONE[0], "term = lane == from ? found : term;", "term = found;",
    ),
    "the band is not asked": (
        ONE[0], "key < first_key(p, query) || key > last_key(p, query)", "false",
    ),
    "slopes of a softcap": (
        ONE[0], "multiply_and_weigh<false>(params, tiles", "multiply_and_weigh<true>(params, tiles",
    ),
}  # fmt: skip
ALL_BUGS = [(bug, *how) for bug, (dtypes, *_) in BUGS.items() for how in dtypes]
ALWAYS = (
    ("splits have less room than they take", *EACH[1]),
    ("terms are not computed again", *EACH[0]),
)


@functools.cache
def solved(dtype, target, softcap):
    """A call that bugs are planted for, whose blocks share tiles, and its gradient."""
    options = {"batch": 1, "softcap": softcap, **BANDS["causal"]}
    call = biased(dtype, (4, 2), (70, 80), (32, 32), (70, 80), **options)
    call.v[..., 79, 3] = np.nan  # which the last query sees alone
    return call, solve(call, target, blocks=40)[3]


@pytest.mark.parametrize(("bug", "dtype", "target"), only(ALL_BUGS, *ALWAYS))
def test_a_planted_bug_is_found(bug, dtype, target, tmp_path):
    call, want = solved(dtype, target, 3.0 if "softcap" in bug else 0.0)
    row = rows_of(call, target)[-1]
    sources = {row.entry: plant(tmp_path, row.source, BUGS[bug][1:])}
    for seed in range(8):
        try:
            got = solve(call, target, blocks=40, seed=seed, sources=sources)[3]
        except emulator.EmulationError:
            return
        if got.tobytes() != want.tobytes():
            return
    pytest.fail("8 seeds did not show it")


# The host side


def test_blocks_that_share_a_tile_are_joined_by_a_second_launch():
    x = np.zeros((4, 8, 1024, 64))
    launcher = NotingLauncher(multiprocessors=132)
    launcher.target = "sm_90a"
    plan, space = make_plan(traits_of(x, x, x, np.zeros((8, 1, 1)), dbias=True), launcher)
    first, joining = plan.steps[-2:]
    splits = int(first.params[0]["splits"])
    assert splits == 33  # two blocks for each multiprocessor
    assert (first.grid, joining.grid) == (8 * splits, 8)
    assert (joining.params[0]["splits"], joining.params[0]["joined"]) == (1, splits)
    assert parts_of(space)["partial_sums"] >= 8 * 8 * splits * 256
    plan, space = make_plan(traits_of(x, x, x, np.zeros((8, 1024, 1024)), dbias=True), launcher)
    assert [step.variant.kernel for step in plan.steps].count("bwd_dbias_fp64") == 1
    assert plan.steps[-1].grid == 8 * 16 * 16
    assert "partial_sums" not in space.places


def test_every_call_with_gradients_has_that_of_its_bias():
    for dtype, rows in (("float64", bwd_dbias_fp64), ("float32", bwd_dbias_fp32)):
        score = rows.VARIANTS[0].score
        for target, dim in itertools.product(("sm_80", "sm_89", "sm_90a"), (32, 64, 96, 128, 256)):
            wanted = backward.Wanted(dtype, dim, mapped=False, score=score)
            without = select(wanted, target)
            found = select(wanted._replace(dbias=True), target)
            if dtype == "float32" and dim > 128:  # cuBLAS computes it
                assert found == ()
                continue
            # Those of wgmma split rows in a way that the kernel for the bias does not read.
            main = [row.kernel.removesuffix("_sm90") for row in without]
            assert [row.kernel for row in found[:-1]] == main
            assert found[:-1] == without or any("sm90" in row.kernel for row in without)
            assert not found or found[-1].kernel == f"bwd_dbias_fp{dtype[5:]}"
            if found and dtype == "float64":  # which says what is known of whole tiles
                assert found[0].tile_m % found[-1].tile_m == 0
