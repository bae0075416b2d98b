"""Gradients in float64 by mma.sync, ``bwd_dq_fp64`` and ``bwd_dkdv_fp64``, on the CPU."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import Score, reference
from fa_cupy.gpu.kernels.attention.full_precision.gradients import bwd_dkdv_fp64, bwd_dq_fp64
from fa_cupy.gpu.kernels.attention_backward import select
from fa_cupy.gpu.kernels.backward import Wanted
from fa_cupy.gpu.kernels.score import ScoreMod
from tests.support import packed_sequences
from tests.support.every_run import drawn, examples, only, some
from tests.support.full_precision_gradients import (
    NAMES,
    arrays_of,
    check_any,
    check_bias,
    check_mask,
    check_packed,
    definition,
    solve,
)
from tests.support.kernel_attention import BANDS, any_sinks, blocks_of
from tests.support.planted import plant
from validation import emulator
from validation.emulator import calls

pytestmark = pytest.mark.emulator

#: The rows of a call, by dim, queries of a tile of ``bwd_dq_fp64``, and whether they are of SM90.
PAIRS, SPARSE = (
    {
        f"{dq.dim}-{dq.tile_m}{'-wide' if dq.wide else ''}": (dq, dkdv)
        for dq, dkdv in zip(bwd_dq_fp64.VARIANTS, bwd_dkdv_fp64.VARIANTS, strict=True)
        if dq.sparse == dkdv.sparse == sparse
    }
    for sparse in (False, True)
)
# One of each number of stages, of warps that share columns, and of each instruction.
D64, D256, SMALL = PAIRS["64-64-wide"], PAIRS["256-32-wide"], PAIRS["64-32"]
NOT_AGAIN = "if ((recompute_lanes[0] | recompute_lanes[1]) == 0) return;", "return;"
UNIT = 2.0**-53


def check(rows, arrays, seed=0, sources=None, invalid=(), **call):
    """Hold gradients of ordinary numbers against the definition, in float64 too."""
    found = solve(rows, arrays, seed=seed, sources=sources, invalid=invalid, **call)
    want = definition(arrays, **call)
    for name, x, y in zip(NAMES, found, want, strict=False):
        limit = 1e-13 * max(float(np.abs(y).max(initial=0)), 1e-150)
        np.testing.assert_allclose(x, y, rtol=1e-13, atol=limit, err_msg=name)
    return found


@pytest.mark.parametrize("which", some(PAIRS, lambda name: "wide" in name))
def test_every_row(which, tmp_path):
    """Of rows that look right because they were computed again nothing would be known."""
    rows = PAIRS[which]
    sources = {row.entry: plant(tmp_path, row.source, NOT_AGAIN) for row in rows}
    for seed, band in enumerate(BANDS[:3]):
        arrays = arrays_of(rows, (70, 90), less=(seed, 2 * seed), seed=seed)
        check(rows, arrays, seed=seed, sources=sources, **band)


@examples(30)
@given(
    rows=drawn([D64, D256, SMALL], SMALL),
    lengths=st.tuples(st.integers(1, 100), st.integers(1, 100)),
    heads=st.sampled_from([(1, 1), (4, 2)]),
    less=st.tuples(st.integers(0, 20), st.integers(0, 63)),
    band=st.sampled_from(BANDS),
    scale=st.sampled_from([None, -0.3, 1e-40, 0.0, 3.0]),
    softcap=st.sampled_from([0.0, 2.0]),
    sinks=st.booleans(),
    dlse=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_call(rows, lengths, heads, less, band, scale, softcap, sinks, dlse, seed):
    rng = np.random.default_rng(seed)
    options = {**band, "scale": scale, "softcap": softcap}
    if sinks:
        options["sinks"] = any_sinks(rng, 1, heads[0], lengths[0])
    given = rng.standard_normal((1, heads[0], lengths[0])) if dlse else None
    check_any(
        rows, arrays_of(rows, lengths, heads, less, seed), UNIT, dlse=given, seed=seed, **options
    )


@examples(20)
@given(
    axes=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    dtype=drawn([np.float16, np.float32, np.float64], np.float32),
    lengths=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    band=st.sampled_from(BANDS),
    softcap=st.sampled_from([0.0, 2.0]),
    hides=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_bias(axes, dtype, lengths, band, softcap, hides, seed):
    check_bias(SMALL, UNIT, (40, 40), axes, dtype, lengths, band, softcap, hides, seed)


@pytest.mark.parametrize("which", some(SPARSE, lambda name: "wide" in name))
def test_every_row_for_masks(which, tmp_path):
    rows = SPARSE[which]
    sources = {row.entry: plant(tmp_path, row.source, NOT_AGAIN) for row in rows}
    mask = blocks_of(np.random.default_rng(0), 140, 160, density=0.5)
    mask[5], mask[20:30, :30] = False, True
    arrays = arrays_of(rows, (140, 160), (1, 1), less=(rows[0].dim - 24, rows[0].dim - 16))
    check(rows, arrays, seen=mask, sources=sources, **BANDS[1])


@examples(20)
@given(
    heads=st.sampled_from([(1, 1), (4, 2)]),
    own=st.booleans(),
    lengths=st.tuples(st.integers(1, 200), st.integers(1, 200)),
    band=st.sampled_from(BANDS),
    spoiled=st.booleans(),
    far=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_mask(heads, own, lengths, band, spoiled, far, seed):
    """Of each head or of all, with NaN in a key and a value, and with scores that are far."""
    size = 2.0**14 if far else 0
    check_mask(
        SPARSE["64-32"], UNIT, (48, 56), size, heads, own, lengths, band, spoiled, seed
    )  # fmt: skip


@pytest.mark.parametrize("text", ["3 * tanh(s) * x[h] + 0.01 * (i - j)", "s + x[h] * sqrt(i - j)"])
def test_a_score_expression(text):
    """The second one is NaN of many pairs that are hidden."""
    score = Score(text, x=np.array([0.5, -1.0]))
    arrays = arrays_of(SMALL, (50, 70), less=(40, 40))
    check(SMALL, arrays, score=score, is_causal=True, causal_align="top_left")


@examples(20)
@given(
    lengths=packed_sequences.packed_lengths(100),
    band=st.sampled_from(BANDS),
    softcap=st.sampled_from([0.0, 2.0]),
    seed=st.integers(0, 2**32),
)
def test_any_packed_sequences(lengths, band, softcap, seed):
    check_packed(SMALL, UNIT, (40, 40), lengths, band, softcap, seed)


@pytest.mark.parametrize("which", only(["64-64-wide", "64-32"], "64-32"))
def test_the_error_is_that_of_float64(which):
    """Held against longer numbers: at most three times what the definition in float64 loses."""
    rows = PAIRS[which]
    arrays = arrays_of(rows, (70, 150), (1, 1), seed=1)
    found, plain = solve(rows, arrays), definition(arrays)
    dout, q, k, v = (x.astype(np.longdouble) for x in arrays)
    scale = 1 / np.sqrt(np.longdouble(rows[0].dim))
    weights = np.exp(scale * (q @ k.swapaxes(-1, -2)))
    weights /= weights.sum(-1, keepdims=True)
    delta = (dout * (weights @ v)).sum(-1, keepdims=True)
    ds = scale * weights * (dout @ v.swapaxes(-1, -2) - delta)
    want = ds @ k, ds.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ dout
    for x, y, exact in zip(found, plain, want, strict=True):
        own, other = (float(np.linalg.norm((z - exact).ravel())) for z in (x, y))
        assert own <= 3 * other
        assert own <= 4e-15 * float(np.linalg.norm(exact.ravel()))


@examples(20)
@given(
    rows=st.sampled_from([D64, SMALL]),
    name=st.sampled_from(["dout", "q", "k", "v"]),
    band=st.sampled_from(BANDS),
    lengths=st.tuples(st.integers(1, 80), st.integers(1, 80)),
    value=st.sampled_from([np.nan, np.inf, -np.inf]),
    seed=st.integers(0, 2**32),
)
def test_numbers_that_are_not_finite(rows, name, band, lengths, value, seed):
    """They show where they belong: not where a pair is hidden, nor in other rows."""
    rng = np.random.default_rng(seed)
    arrays = arrays_of(rows, lengths, less=(40, 48), seed=seed)
    spoiled = arrays[("dout", "q", "k", "v").index(name)]
    spoiled[tuple(rng.integers(0, spoiled.shape))] = value
    check_any(rows, arrays, UNIT, seed=seed, **band)


@pytest.mark.long
def test_sums_that_overflow():
    """Only where they have to: the scale is small, and terms are scaled first."""
    arrays = arrays_of(SMALL, (40, 50), less=(40, 40), seed=3)
    arrays[0] *= 1e155
    arrays[2] *= 1e155
    arrays[1] *= 1e-155
    check(SMALL, arrays, scale=1e-3)


@pytest.mark.parametrize("scale", [1e-120, 1e100])
def test_numbers_of_any_size(scale):
    """Scores stay ordinary; values and gradients are as large or as small as inputs."""
    arrays = arrays_of(SMALL, (40, 50), less=(40, 40))
    for x, factor in zip(arrays, (1.0, scale, 1 / scale, scale), strict=True):
        x *= factor
    check(SMALL, arrays)


@examples(20)
@given(
    rows=st.sampled_from([D64, SMALL]),
    size=st.sampled_from([2.0**11, 2.0**30, 2.0**60, 2.0**500]),
    band=st.sampled_from(BANDS[:3]),
    sinks=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_scores_that_are_far(rows, size, band, sinks, seed):
    """The best keys of a row have the same score, and others are far below: weights sum to 1."""
    rng = np.random.default_rng(seed)
    lengths = int(rng.integers(1, 80)), int(rng.integers(1, 80))
    arrays = arrays_of(rows, lengths, less=(40, 48), seed=seed)
    far = rng.random(arrays[1].shape[:3]) < 0.3
    arrays[1][far] = 0
    arrays[1][far, 0] = size * rng.choice([-1, 1], int(far.sum()))
    arrays[2][..., 0] = rng.choice([1, 0.5, -1], arrays[2].shape[:3])
    options = {**band, "scale": 1.0}
    if sinks:
        options["sinks"] = np.array([size, -np.inf])[:, None]
    given = rng.standard_normal((1, 2, lengths[0]))
    found = solve(rows, arrays, dlse=given, seed=seed, **options)
    for x, y in zip(found, definition(arrays, dlse=given, **options), strict=False):
        largest = float(np.abs(y).max(initial=0))
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12 * largest)


@pytest.mark.long
def test_a_row_of_nothing_but_padding():
    """All keys of a query have the bias -1e30, beside which scores vanish: equal weights."""
    bias = np.zeros((50, 60))
    bias[::3] = -1e30
    arrays = arrays_of(SMALL, (50, 60), less=(40, 40))
    check(SMALL, arrays, bias=bias)


def test_a_log_sum_exp_of_more_keys():
    """Of a part of the keys, the gradients with the LSE and the output of all, far or not."""
    arrays = arrays_of(SMALL, (40, 90), (1, 1), less=(40, 40), seed=2)
    bias = np.zeros((40, 1))
    bias[::2] = 1e4
    dout, q, k, v = arrays
    out, lse = reference.attention(q, k, v, bias)
    want = definition(arrays, bias=bias)
    builds = [row.for_score(ScoreMod(bias_axes="query", bias_dtype="float64")) for row in SMALL]
    parts = [
        calls.attention_backward(builds, dout, q, k[..., some, :], v[..., some, :], out, lse,
                                 None, bias)
        for some in (slice(0, 50), slice(50, 90))
    ]  # fmt: skip
    np.testing.assert_allclose(parts[0][0] + parts[1][0], want[0], rtol=1e-9, atol=1e-12)
    for place in (1, 2):
        joined = np.concatenate([x[place] for x in parts], -2)
        np.testing.assert_allclose(joined, want[place], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("offset", [1, 3])
def test_arrays_that_are_not_aligned(offset):
    """Rows of an odd number of elements, and arrays that begin at any of them."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, 2, 50, 67))[..., offset : offset + 27] for _ in range(4)]
    check(SMALL, arrays, **BANDS[1])


def test_rows_of_no_pair_are_zeros():
    arrays = arrays_of(SMALL, (90, 20), less=(40, 40))
    dq, _, _ = check(SMALL, arrays, window=(3, 0), causal_align="top_left")
    assert not dq[..., 60:, :].any()
    arrays = arrays_of(SMALL, (20, 90), less=(40, 40))
    _, dk, dv = check(SMALL, arrays, is_causal=True, causal_align="top_left")
    assert not dk[..., 60:, :].any()
    assert not dv[..., 60:, :].any()


@pytest.mark.parametrize("which", only(["64-64-wide", "256-32-wide", "64-32"], "64-32"))
def test_the_schedule_does_not_show(which):
    rows = PAIRS[which]
    arrays = arrays_of(rows, (40, 70))
    found = {
        tuple(x.tobytes() for x in solve(rows, arrays, seed=seed, **BANDS[1])) for seed in range(3)
    }
    assert len(found) == 1


def test_rows_and_their_choice():
    """Every dim has rows wherever shared memory is large enough; the smallest lack the widest.

    A tile of queries of ``bwd_dkdv_fp64`` reads what the other kernel knows of whole tiles.
    """
    for target in ("sm_80", "sm_90a", "sm_89", "sm_100", "sm_120", "compute_80"):
        for dim in (1, 33, 64, 100, 128, 129, 256):
            found = select(Wanted("float64", dim, mapped=False), target)
            if dim > 128 and target not in ("sm_90a", "sm_100"):
                assert not found
                continue
            dq, dkdv = found
            assert dq.tile_m % dkdv.tile_m == 0
            assert min(dq.dim, dkdv.dim) >= dim
            assert dq.wide == dkdv.wide
            assert dq.wide == (target in ("sm_90a", "sm_100") or (target == "sm_120" and dim < 33))
    for row in select(Wanted("float64", 64, masked=True), "sm_90a"):
        assert row.sparse
    assert not select(Wanted("float64", 64, strided=False), "sm_90a")
    assert not select(Wanted("float64", 257), "sm_90a")


# By what they show in: the kernel, what is changed, and into what.
BUGS = {
    "a tile is overwritten while it is read": (
        "dkdv", "__syncthreads();  // all warps have read this tile", "",
    ),
    "a tile of keys is overwritten while it is read": (
        "dq", "__syncthreads();  // all warps have read this tile", "",
    ),
    "a tile is read before it is there": (
        "dkdv", "__syncthreads();  // this tile is there, and all warps", "// all warps",
    ),
    "a warp does not wait for the weights": ("dkdv", "bar_sync(1 + pair, 64);", ""),
    "a warp does not wait for the other one": ("dq", "bar_sync(1 + pair, 64);", ""),
    "a pair waits at the barrier of another one": (
        "dq", "bar_sync(1 + pair, 64);", "bar_sync(1 + pair % 2 * role, 64);",
    ),
    "delta is forgotten": ("dq", "x[0][j][e] -= query_row(rows, j, e).delta;", ";"),
    "delta is that of another query": (
        "dkdv", "lane % 4 * 2 + 8 * j + e % 2 :", "lane % 4 * 2 + 8 * j :",
    ),
    "the gradient of the LSE is added": ("dq", "product - dlse", "product + dlse"),
    "dQ is not scaled": ("dq", "p.head_dim, dq, params.scale,", "p.head_dim, dq, 1.0,"),
    "dV is scaled": ("dkdv", "sums, of_values ? 1.0 : params.scale", "sums, params.scale"),
    "a head is left out": ("dkdv", "{at.head + 1, work.begin}", "{at.head + 2, work.begin}"),
    "queries of a head are those of the first one": (
        "dkdv", "const uint32 entry = work.entry + at.head;", "const uint32 entry = work.entry;",
    ),
    "the band is not looked at": (
        "dkdv", "if (at.tile < work.full_begin || at.tile >= work.full_end) {", "if (false) {",
    ),
    "the next row is read as if its chunks were not exchanged": (
        "dq", "k % 2 * Tile::kOddRow", "0u",
    ),
    "both warps sum up the same columns": ("dq", "2 * part + warp_role()", "2 * part"),
    "the slope of a softcap is forgotten": ("dq", "1.0 - part * part", "1.0"),
    "a far row keeps its LSE": ("dq", "row.shift = statistics.row_max;", ""),
    "weights of a far row are not normalised": ("dq", ": 1.0 / statistics.row_sum;", ": 1.0;"),
    "a lane is forgotten in a far row": (
        "dq", "int step = 1; step < 4; step *= 2", "int step = 1; step < 2; step *= 2",
    ),
    "a sink is forgotten in a far row": (
        "dq", "statistics.add(load_sink_fp64(p, entry, query));", "",
    ),
    "a mask is not looked at": ("dkdv", "if (words_index >= 0) {", "if (false) {"),
    "a mask's words are those of another head": (
        "dq", "mask_row(params, work.entry + at.head, work.first_own), other / kMaskBlock",
        "mask_row(params, 0, work.first_own), other / kMaskBlock",
    ),
    "hidden blocks of a mask are not skipped": (
        "dkdv", "at.tile = next_tile<kOtherRows>(params.mask, row, at.tile, work.end);", ";",
    ),
    "a mask counts for nothing where rows are computed again": (
        "dq", "if (!mask_leaves(params, entry, query, key)) return {-FA_INFINITY, 0.0};", "",
    ),
    "rows are not computed again": ("dkdv", *NOT_AGAIN),
    "hidden pairs count in rows that are computed again": (
        "dkdv", "if (found.score == -FA_INFINITY) return {false, 0.0, 0.0};", "",
    ),
    "a row that is computed again is not scaled": (
        "dq", "fma(params.scale * terms.ds, static_cast<double>(k[col]), sum)",
        "fma(terms.ds, static_cast<double>(k[col]), sum)",
    ),
}  # fmt: skip


def call_that_shows(bug):
    """Rows, arrays and options of a call in which a bug shows."""
    if "mask" in bug:
        rows, arrays = SPARSE["64-32"], arrays_of(SMALL, (140, 150), (2, 2), less=(48, 56))
        mask = blocks_of(np.random.default_rng(3), 2, 140, 150, density=0.5)
        mask[0, :128, :128], mask[1, :128, :128] = False, np.tri(128) > 0
        mask[..., 128:] = True
        if "again" in bug:
            mask[:, :, 3] = False
            arrays[3][..., 3, 0] = np.nan
        return rows, arrays, {"seen": mask}
    if "again" in bug:  # key 20 is hidden, and the first query sees one key only
        arrays, bias = arrays_of(SMALL, (30, 40), (1, 1), less=(40, 48)), np.zeros(40)
        arrays[3][..., 20, 0] = np.nan
        arrays[0][..., 0, 1] = np.inf
        bias[20] = -np.inf
        options = {"is_causal": True, "causal_align": "top_left", "bias": bias}
        return SMALL, arrays, options
    arrays = arrays_of(SMALL, (70, 80), (4, 2), less=(3, 2), scale=1.5)
    options = dict(BANDS[1], dlse=np.random.default_rng(1).standard_normal((1, 4, 70)))
    if "softcap" in bug:
        options["softcap"] = 2.0
    if "far" in bug:
        arrays[1][..., 0] = 2.0**20
        arrays[2][..., 0] = 2.0
        options |= {"scale": 1.0, "sinks": np.array([[2.0**21, 0.0]] * 2).reshape(4, 1)}
        arrays[1][..., 1:] = 0
    return SMALL, arrays, options


def hold_all(bug, sources, seeds=4):
    rows, arrays, options = call_that_shows(bug)
    if "again" not in bug:
        for seed in range(seeds):
            check(rows, arrays, seed=seed, sources=sources, **options)
        return
    found = solve(rows, arrays, sources=sources, **options)
    with np.errstate(all="ignore"):
        want = definition(arrays, **options)
    for x, y in zip(found, want, strict=False):
        kept = np.isfinite(y)
        np.testing.assert_array_equal(np.isfinite(x), kept)
        np.testing.assert_allclose(x[kept], y[kept], rtol=1e-12, atol=1e-13)


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", only(["", "softcap", "far", "mask", "again", "mask again"], "far", "again")
)
def test_calls_that_show_bugs_are_right_without(kind):
    hold_all(kind, None, seeds=1)


@pytest.mark.parametrize(
    "bug", only(BUGS, "a warp does not wait for the weights", "both warps sum up the same columns")
)
def test_a_planted_bug_is_found(bug, tmp_path):
    kernel, *change = BUGS[bug]
    row = next(row for row in SMALL if kernel in row.kernel)
    changes = [tuple(change)] if "again" in bug else [NOT_AGAIN, tuple(change)]
    sources = {row.entry: plant(tmp_path, row.source, *changes)}
    with pytest.raises((AssertionError, emulator.EmulationError)):
        hold_all(bug, sources)
