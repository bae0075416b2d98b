"""The kernels of attention backward for SM80: their own source on the CPU, whatever the options."""

import functools
import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import BitMask
from fa_cupy.gpu.kernels.attention import bwd_dkdv_sm80, bwd_dq_sm80
from fa_cupy.gpu.kernels.attention_backward import make_plan
from tests.support import kernel_gradients
from tests.support.every_run import drawn, examples, only
from tests.support.kernel_attention import DTYPES, blocks_of, draw
from tests.support.kernel_gradients import any_transform, case, parts_of, rows_sm80, traits_of
from tests.support.noting_launcher import NotingLauncher
from tests.support.planted import plant
from tests.support.seeds import Chosen, one
from validation import emulator

DIMS = (32, 64, 96, 128, 192, 256)
TOP, BOTTOM = "top_left", "bottom_right"
ROWS = list(itertools.product(DIMS, DTYPES))
BANDS = {
    "none": {},
    "causal": {"is_causal": True, "causal_align": BOTTOM},
    "window": {"window": (70, 5), "causal_align": TOP},
}


def chain(call):
    """The rows that serve a call."""
    dims = call.q.shape[-1], call.v.shape[-1]
    masked = call.options.get("mask") is not None
    return rows_sm80(call.q.dtype.name, *dims, masked)


def solve(call, **how):
    return kernel_gradients.solve(call, rows=chain(call), **how)


def check(call, **how):
    return kernel_gradients.check(call, rows=chain(call), **how)


def masked(call, seed=0, density=None, heads=True, bits=False):
    """The call under a mask of its own for each head, or one for all."""
    shape = (*call.q.shape[:2],) if heads else ()
    rng = np.random.default_rng(seed)
    mask = blocks_of(rng, *shape, call.q.shape[2], call.k.shape[2], density=density)
    return call._replace(
        options={**call.options, "mask": BitMask.from_dense(mask) if bits else mask}
    )


@pytest.mark.emulator
@pytest.mark.parametrize(("dim", "dtype"), only(ROWS, (64, "float16"), (256, "bfloat16")))
def test_every_row(dim, dtype):
    check(case(dtype, (2, 2), (70, 140), (dim, dim)), seed=1)
    causal = BANDS["causal"]
    check(case(dtype, (4, 2), (130, 150), (dim - 8, dim - 16), batch=1, dlse=True, **causal))
    window = BANDS["window"]
    check(case(dtype, (1, 1), (200, 190), (dim, dim - 24), batch=1, layout="blhd", **window),
          seed=3)  # fmt: skip


@pytest.mark.emulator
@pytest.mark.parametrize(("dim", "dtype"), only(ROWS, (64, "float16"), (128, "bfloat16")))
def test_every_row_under_a_mask(dim, dtype):
    # The dtypes share the causal band, and one has each of the others.
    left_out = 2 if dtype == "float16" else 0
    for i, band in enumerate(BANDS.values()):
        if i == left_out:
            continue
        call = case(dtype, (2, 1), (200 - i, 290 + i), (dim, dim), batch=1, dlse=True, **band)
        check(masked(call, i, heads=i < 2, bits=i > 0), seed=i)


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("dim", "sparse"), only(itertools.product(DIMS, (False, True)), (128, False), (64, True))
)
def test_every_row_with_all_that_comes_before_the_softmax(dim, sparse):
    for i, band in enumerate(BANDS.values()):
        call = case("bfloat16", (2, 1), (100, 140), (dim, dim), batch=1, **band)
        bias = draw(2, 100, 140, dtype=np.dtype(np.float32), seed=i)
        more = {"bias": bias, "softcap": (0.0, 2.0, 20.0)[i], "scale": (None, 0.2, -0.1)[i]}
        call = call._replace(options={**call.options, **more})
        check(masked(call, i) if sparse else call, seed=i)


SHAPES = (1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 70, 1), (1, 1, 1, 90), (2, 2, 70, 90)
BIASES = [(shape,) for shape in SHAPES]


@pytest.mark.long
@pytest.mark.emulator
@pytest.mark.parametrize("shape", only(BIASES, BIASES[2], BIASES[5]), ids=str)
def test_a_bias_of_any_type_along_any_axes(shape):
    dtypes = (*DTYPES.values(), np.dtype(np.float32), np.dtype(np.float64))
    for i, dtype in enumerate(dtypes):
        bias = draw(*shape, dtype=np.dtype(np.float32)).astype(dtype)
        if bias.size > 4:
            bias.reshape(-1)[::7] = -np.inf
        for heads in ((2, 2), (2, 1)):
            given = case("float16", heads, (70, 90), (32, 32), bias=bias, dlse=True)
            causal = (i + heads[1]) % 2
            check(given._replace(options={"bias": bias, **(BANDS["causal"] if causal else {})}))
    # Not as an array of C lies, and one that is not contiguous.
    turned = np.ascontiguousarray(bias.swapaxes(2, 3)).swapaxes(2, 3)[..., ::-1, :]
    check(given._replace(options={"bias": turned}))


@pytest.mark.emulator
def test_a_row_that_a_bias_leaves_nothing():
    bias = np.zeros((60, 80), np.float32)
    bias[7], bias[:, 9] = -np.inf, -np.inf
    dq, dk, dv = check(case("float16", (1, 1), (60, 80), (64, 64), bias=bias))
    assert not dq[:, :, 7].any()
    assert not dk[:, :, 9].any()
    assert not dv[:, :, 9].any()


@pytest.mark.long
@pytest.mark.emulator
def test_softcaps_of_any_size():
    for dim in (32, 128):
        for softcap in (1e-3, 0.5, 7.0, 1e4):
            for scale in (1.0, 5.0):
                check(case("bfloat16", (1, 1), (90, 70), (dim, dim), batch=1, scale=scale,
                           softcap=softcap))  # fmt: skip


@pytest.mark.long
@pytest.mark.emulator
@pytest.mark.parametrize("dim", only(DIMS, 64))
def test_rows_and_keys_that_see_nothing(dim):
    """Queries without keys have no gradient, nor have keys without queries."""
    for lengths, align in (((300, 70), BOTTOM), ((70, 300), TOP)):
        call = case("bfloat16", (2, 1), lengths, (dim, dim), batch=1, is_causal=True,
                    causal_align=align)  # fmt: skip
        dq, dk, dv = check(call, seed=4)
        if align == BOTTOM:
            assert not dq[:, :, :230].astype(np.float32).any()
        else:
            assert not dk[:, :, 70:].astype(np.float32).any()
            assert not dv[:, :, 70:].astype(np.float32).any()
    # Bands and masks that leave out whole tiles on both sides.
    for window in ((0, 0), (5, 0)):
        check(case("float16", (1, 1), (290, 290), (dim, dim), batch=1, window=window), seed=5)
    mask = np.zeros((290, 290), bool)
    for seen in (None, slice(140, 150)):
        if seen is not None:
            mask[seen, 260:] = True
        call = case("float16", (2, 1), (290, 290), (dim, dim), batch=1, mask=mask)
        dq, dk, dv = check(call, seed=6)
        assert not dk[:, :, :260].any()
        assert not dv[:, :, :260].any()
        assert not dq[:, :, :140].any()


@pytest.mark.emulator
@examples(40)
@given(
    dim=drawn(DIMS, 64),
    dtype=drawn(DTYPES, "float16"),
    lengths=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 1), (4, 2)]),
    less=st.tuples(st.sampled_from([0, 8, 24]), st.sampled_from([0, 8, 16])),
    band=st.sampled_from(["none", "causal", (0, 0), (64, 0), (0, 63), (130, 70), (None, 5)]),
    align=st.sampled_from([TOP, BOTTOM]),
    dlse=st.booleans(),
    layout=st.sampled_from([None, "blhd"]),
    sparse=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_call(dim, dtype, lengths, heads, less, band, align, dlse, layout, sparse, seed):
    options = {"causal_align": align} if band != "none" else {}
    if band == "causal":
        options["is_causal"] = True
    elif band != "none":
        options["window"] = band
    dims = dim - less[0], dim - less[1]
    call = case(dtype, heads, lengths, dims, batch=1, dlse=dlse, layout=layout)
    rng = np.random.default_rng(seed)
    more = any_transform(rng, sparse, 1, heads[0], *lengths)
    check(call._replace(options={**options, **more}), seed=seed)


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("dim", "sparse"),
    only(itertools.product((32, 64, 96, 128, 256), (False, True)), (128, False), (64, True)),
)
def test_the_schedule_does_not_show(dim, sparse):
    """Bit for bit the same, whoever comes first: the order of all sums is fixed."""
    call = case("bfloat16", (2, 1), (150, 140), (dim, dim), batch=1, **BANDS["causal"])
    call = masked(call, density=0.5) if sparse else call
    found = {tuple(x.tobytes() for x in solve(call, seed=seed)) for seed in range(4)}
    assert len(found) == 1


@pytest.mark.emulator
@pytest.mark.parametrize("dim", only((64, 128, 256), 64))
def test_blocks_that_a_mask_hides_are_not_read(dim):
    """0 * NaN would be NaN and have rows computed again, whose last bits differ."""
    states = np.array([[2, 0, 1, 0], [0, 0, 0, 1]])
    random = np.random.default_rng(0).random((256, 512)) < 0.5
    mask = np.kron(states, np.ones((128, 128), int))
    mask = (mask == 2) | ((mask == 1) & random)
    call = case("float16", (1, 1), (256, 512), (dim, dim), batch=1, mask=mask)
    want = solve(call)
    call.k[:, :, 128:256] = call.v[:, :, 128:256] = np.nan
    got = solve(call)
    assert [x.tobytes() for x in got] == [x.tobytes() for x in want]


@pytest.mark.long
@pytest.mark.emulator
def test_an_all_true_mask_is_no_mask():
    for dim in (64, 192):
        for band in (BANDS["none"], BANDS["causal"]):
            call = case("bfloat16", (1, 1), (150, 270), (dim, dim), batch=1, **band)
            want = solve(call)
            got = solve(call._replace(options={**band, "mask": np.ones((150, 270), bool)}))
            assert [x.tobytes() for x in got] == [x.tobytes() for x in want]


@pytest.mark.long
@pytest.mark.emulator
def test_sums_of_tensor_cores_that_truncate():
    for dim in (64, 128, 256):
        call = case("float16", (1, 1), (70, 140), (dim, dim), batch=1)
        assert solve(call, truncating=True)[0].tobytes() != solve(call)[0].tobytes()
        check(call, truncating=True)


@pytest.mark.long
@pytest.mark.emulator
def test_scores_of_any_size():
    """Weights of 1 and of nothing; keys of zeros behind the last one would weigh 2**200."""
    for dim in (32, 96, 256):
        call = case("bfloat16", (1, 1), (100, 130), (dim, dim), scale=6.0)
        check(call)
        q = np.abs(call.q)
        check(call._replace(q=q, k=-np.abs(call.k)))


# Of a kernel and a padded dim: what stands there and what is put in its place.
BUGS = {
    "a tile is read before it has landed": (
        "bwd_dkdv_sm80", 64, ("cp_async_wait_group<0>(); __syncthreads();  // this tile",
                              "__syncthreads();  // this tile"),
    ),
    "a tile of Q is loaded over the one that is read": (
        "bwd_dkdv_sm80", 96, ("load_q(params, shared, next, (i + 1) % kQStages);",
                              "load_q(params, shared, next, i % kQStages);"),
    ),
    "dO is overwritten while others read it": (
        "bwd_dkdv_sm80", 128, ("__syncthreads();  // all warps have read this tile of dO", "//"),
    ),
    "weights are read before all are there": (
        "bwd_dkdv_sm80", 256, ("score_row(), score_col()); __syncthreads(); }",
                               "score_row(), score_col()); }"),
    ),
    "dS of other keys": (
        "bwd_dkdv_sm80", 192, ("accumulate_gradient<kExchangeWeights>(dk, ds, ds_tile,",
                               "accumulate_gradient<kExchangeWeights>(dk, ds, p_tile,"),
    ),
    "one head of those that share keys": (
        "bwd_dkdv_sm80", 32, ("work.tiles.begin < work.tiles.end ? params.group : 0",
                              "work.tiles.begin < work.tiles.end ? 1 : 0"),
    ),
    "delta of the other query": (
        "bwd_dkdv_sm80", 64, ("dp[i][j][e] -= e % 2 ? delta.y : delta.x",
                              "dp[i][j][e] -= e % 2 ? delta.x : delta.y"),
    ),
    "columns of another warp": (
        "bwd_dkdv_sm80", 192, ("kGroups * (j / 2)) + j % 2;", "(j / 2)) + j % 2;"),
    ),
    "the first tile of keys only is cut by the band": (
        "bwd_dq_sm80", 64, ("tile >= work.tiles.full_begin && tile < work.tiles.full_end",
                            "tile >= work.tiles.full_begin"),
    ),
    "V is overwritten while others read it": (
        "bwd_dq_sm80", 128, ("__syncthreads();  // all warps have read this tile of V", "//"),
    ),
    "K is loaded over the tile that is read": (
        "bwd_dq_sm80", 256, ("load_k(params, shared, work, next, (i + 1) % kKStages);",
                             "load_k(params, shared, work, next, i % kKStages);"),
    ),
    "delta is not taken away": (
        "bwd_dq_sm80", 96, ("dp[i][j][e] -= delta[i][e / 2];", ";"),
    ),
    "keys behind the last one are seen": (
        "bwd_dq_sm80", 32, ("mask_scores<false, kSparse>(params, params.common, s, in_band,",
                                 "mask_scores<false, kSparse>(params, params.common, s, true,"),
    ),
    "words of the wrong slab": (
        "bwd_dkdv_sm80-sparse", 64, ("own % kMaskBlock / 16 * kSlabWords",
                                     "own % 64 / 16 * kSlabWords"),
    ),
    "words of the wrong columns": (
        "bwd_dq_sm80-sparse", 64, ("row_words.y >> other % kMaskBlock / 8 * 2;",
                                        "row_words.y >> other % 64 / 8 * 2;"),
    ),
    "a row of blocks of another head": (
        "bwd_dkdv_sm80-sparse", 128, ("work.entry * params.group + step.head, work.first_key",
                                      "work.entry * params.group, work.first_key"),
    ),
    "a band is not looked at where there are words": (
        "bwd_dq_sm80-sparse", 96, ("if (!in_band) restrict_to_band",
                                        "if (!in_band && !is_partial) restrict_to_band"),
    ),
    "a hidden block is gone through": (
        "bwd_dkdv_sm80-sparse", 256, ("min(max(tile, block * kTilesPerBlock), end)",
                                      "min(tile, end)"),
    ),
    "the slope of a softcap is left out": (
        "bwd_dkdv_sm80", 64,
        ("first_other, [&](int j, int e, float slope) { dp[i][j][e] *= slope; }",
         "first_other, [](int, int, float) {}"),
    ),
    "a bias of other rows": (
        "bwd_dq_sm80", 128, ("s[i], first_own + 16 * i,", "s[i], first_own,"),
    ),
    "query and key change places in a bias": (
        "bwd_dkdv_sm80", 96, ("const int64 col_step = kOwnKeys ? p.bias_row : p.bias_col;",
                              "const int64 col_step = kOwnKeys ? p.bias_col : p.bias_row;"),
    ),
}  # fmt: skip


# With a mask and without.
ALWAYS = (
    "a tile is read before it has landed",
    "words of the wrong columns",
)


@functools.cache
def solved(dim, sparse):
    """Calls that bugs are planted for, and their gradients."""
    bias = draw(2, 150, 260, dtype=np.dtype(np.float32))
    plain = case("bfloat16", (2, 1), (150, 260), (dim, dim), batch=1, **BANDS["causal"])
    full = plain._replace(options={"bias": bias, "softcap": 2.0})
    calls = [masked(call, 1, density=0.5) if sparse else call for call in (plain, full)]
    return calls, [solve(call) for call in calls]


@pytest.mark.emulator
@pytest.mark.parametrize("bug", only(BUGS, *ALWAYS))
def test_a_planted_bug_is_found(bug, tmp_path):
    kind, dim, *changes = BUGS[bug]
    name, _, sparse = kind.partition("-")
    calls, wants = solved(dim, sparse)
    (row,) = (row for row in chain(calls[0]) if row.source.endswith(name))
    sources = {row.entry: plant(tmp_path, row.source, *changes)}
    for seed in range(8):
        for call, want in zip(calls, wants, strict=True):
            try:
                got = solve(call, seed=seed, sources=sources)
            except emulator.EmulationError:
                return
            if any(x.tobytes() != y.tobytes() for x, y in zip(got, want, strict=True)):
                return
    pytest.fail("8 seeds did not show it")


@pytest.mark.long
@pytest.mark.emulator
def test_seeds_of_gradients(tmp_path):
    assert [one(seed, Chosen("backward", "sm80")) for seed in range(24)] == [None] * 24
    (row,) = (
        row
        for row in bwd_dkdv_sm80.VARIANTS
        if (row.dim, row.dtype, row.sparse) == (64, "float16", 0)
    )
    bug = plant(tmp_path, row.source, BUGS["delta of the other query"][2])
    assert any(one(seed, Chosen("backward", row.name, bug)) for seed in range(8))


def test_what_the_kernels_take():
    def strided(*arrays, **options):
        return traits_of(*arrays, **options).wanted.strided

    x = np.zeros((2, 4, 40, 64), np.float16)
    few = np.zeros((2, 2, 40, 64), np.float16)
    assert strided(x, x, x)
    assert strided(x, few, few, is_causal=True)
    assert strided(x, x, x, softcap=2.0, scale=-1.0)
    assert strided(x, few, few, np.zeros((2, 1, 40, 1), np.float64))
    assert strided(x, x, x, None, np.ones((4, 40, 40), bool))
    assert not strided(x[..., :63], x[..., :63], x)
    assert not strided(x, few, x)  # the sum over heads is of k alone
    assert not strided(x, x[..., :0, :], x[..., :0, :])
    odd = np.zeros((2, 40, 4, 68), np.float16)[..., :64].swapaxes(1, 2)
    assert not strided(odd, x, x)


def test_a_workspace_holds_what_kernels_write():
    q, k = np.zeros((3, 4, 130, 64), np.float16), np.zeros((3, 2, 300, 64), np.float16)
    launcher = NotingLauncher(multiprocessors=1000)
    launcher.target = "sm_80"
    plan, space = make_plan(traits_of(q, k, k), launcher)
    rows = rows_sm80("float16", 64, 64)
    first, keys, queries, redo = plan.steps
    assert [step.variant for step in plan.steps] == list(rows)
    parts = parts_of(space)
    tiles = 3 * 4 * 3, 3 * 2 * 5  # of 64 queries, of 64 keys
    for name, size in {
        "lse_delta": 3 * 4 * 256 * 8,
        "row_statistics": 3 * 4 * 256 * 8,
        "nonfinite_flags": 4 * (1 + sum(tiles)),
        "task_counters": 8,
    }.items():
        assert parts[name] >= size, name
    assert first.addresses["counters"] == "nonfinite_flags"
    assert first.params["counter_words"] * 4 == space.nbytes - space.places["nonfinite_flags"]
    assert parts["nonfinite_flags"] + parts["task_counters"] == (
        space.nbytes - space.places["nonfinite_flags"]
    )
    p = keys.params[0]
    assert (p["group"], p["entries"], p["row_pairs"]) == (2, 6, 128)
    assert keys.grid == 6 * -(-300 // rows[1].tile_n)
    assert queries.grid == 12 * -(-130 // rows[2].tile_m)
    assert redo.grid == tiles[0] + 2 * tiles[1]


def test_every_dim_has_rows_of_both_kernels_for_all_targets():
    for rows in (bwd_dkdv_sm80.VARIANTS, bwd_dq_sm80.VARIANTS):
        assert {(row.dim, row.dtype, row.sparse) for row in rows} == {
            (dim, dtype, sparse) for dim in DIMS for dtype in DTYPES for sparse in (False, True)
        }
        assert len({row.targets for row in rows}) == 1
        assert all(re.fullmatch(r"attention/bwd_(dkdv|dq)_sm80", row.source) for row in rows)
