"""Gradients over packed sequences: the kernels' own source on the CPU."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import Score
from fa_cupy.gpu.driver import compile
from fa_cupy.gpu.kernels.attention_backward import select
from fa_cupy.gpu.kernels.registry import GRADIENTS, SCORE_EXAMPLES
from tests.kernels.test_compile import SLOW_NOTES
from tests.support import packed_sequences
from tests.support.every_run import drawn, examples, only
from tests.support.kernel_attention import DTYPES
from tests.support.kernel_gradients import traits_of
from tests.support.packed_gradients import check, packed, rows_of, solve
from tests.support.planted import plant
from validation import emulator
from validation.emulator.calls import operands_in

DIMS = (64, 96, 128, 192, 256)
TARGETS = ("sm_90a", "sm_80")
TOP, BOTTOM = "top_left", "bottom_right"
BANDS = [
    {},
    {"is_causal": True, "causal_align": TOP},
    {"is_causal": True, "causal_align": BOTTOM},
    {"window": (40, 5), "causal_align": TOP},
    {"window": (0, 0), "causal_align": BOTTOM},
    {"window": (None, 7), "causal_align": BOTTOM},
]


def offsets(*numbers):
    return np.array(numbers, np.int32)


SOME = offsets(0, 3, 3, 70, 191, 200, 330)
GAPS = offsets(5, 40, 40, 41, 180, 260), offsets(9, 9, 30, 160, 161, 250)


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("target", "dim", "dtype"),
    only(
        itertools.product(TARGETS, DIMS, DTYPES),
        ("sm_90a", 64, "float16"),
        ("sm_90a", 128, "bfloat16"),
        ("sm_90a", 256, "bfloat16"),
        ("sm_80", 64, "float16"),
    ),
)
def test_every_row(target, dim, dtype):
    for i, band in enumerate(BANDS[1:3]):
        x = packed(dtype, (2, 1), (335, 335), (dim, dim), (SOME, SOME), band, dlse=i > 0)
        check(x, rows_of(x, target), seed=1)
        x = packed(dtype, (2, 2), (270, 300), (dim - 8, dim), GAPS, band)
        check(x, rows_of(x, target), seed=2)


@pytest.mark.emulator
@examples(25)
@given(
    target=st.sampled_from(TARGETS),
    dim=drawn(DIMS, 64),
    dtype=drawn(DTYPES, "float16"),
    lengths=packed_sequences.packed_lengths(),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 1), (4, 2)]),
    band=st.sampled_from(BANDS),
    softcap=st.sampled_from([0.0, 2.0]),
    layout=st.sampled_from([None, "blhd"]),
    seed=st.integers(0, 2**32),
    blocks=st.integers(1, 4),
)
def test_any_sequences_with_any_schedule(
    target, dim, dtype, lengths, heads, band, softcap, layout, seed, blocks
):
    sizes, *both = lengths
    options = {"softcap": softcap} if softcap else {}
    x = packed(dtype, heads, sizes, (dim, dim - 8), both, band, layout=layout, **options)
    check(x, rows_of(x, target), seed=seed, blocks=blocks, together=blocks)


@pytest.mark.emulator
@examples(10)
@given(
    dim=drawn((64, 128, 192), 64),
    target=st.sampled_from(TARGETS),
    fills=st.booleans(),
    axes=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    lengths=packed_sequences.packed_lengths(),
    band=st.sampled_from(BANDS),
    seed=st.integers(0, 2**32),
)
def test_a_bias_and_its_gradient(dim, target, fills, axes, lengths, band, seed):
    sizes, *both = lengths
    shape = tuple(n if has else 1 for n, has in zip((2, *sizes), axes, strict=True))
    bias = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    x = packed("float16", (2, 1), sizes, (dim, dim), both, band, bias=bias, dlse=True)
    dbias = check(x, rows_of(x, target, dbias=True, dbias_fills=fills), seed=seed)[3]
    seen = np.broadcast_to(x.call.options["mask"], (1, 2, *sizes))
    for axis, has in enumerate(axes):
        seen = seen if has else seen.any(axis=axis + 1, keepdims=True)
    assert not dbias[~seen[0]].any()


SCORES = {
    "tanh": Score("3 * tanh(s) * x[h]", x=np.array([0.5, -1.0])),
    "entries": Score("s + x[h]", x=np.array([0.5, -1.0], np.float32)),
}


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("score", "dim"), only(itertools.product(SCORES, DIMS), ("tanh", 64), ("entries", 192))
)
def test_scores_of_no_positions(score, dim):
    for target in TARGETS:
        x = packed("float16", (2, 1), (270, 300), (dim, dim), GAPS, BANDS[1], score=SCORES[score])
        check(x, rows_of(x, target))


@pytest.mark.parametrize("text", ["s - abs(i - j)", "s + x[i]", "s * x[j]"])
def test_scores_of_positions_have_no_kernel(text):
    """To kernels, positions count from the beginning of the first sequence."""
    score = Score(text, x=np.zeros(300, np.float32)) if "x" in text else Score(text)
    assert serving({"score": score}, None) == serving({}, np.ones((270, 300), bool)) == ()
    assert serving({"score": SCORES["tanh"]}, None)


def serving(options, mask):
    """The kernels of a call of packed sequences."""
    operands_in(options)
    arrays = (np.zeros((2, 300, 64), np.float16),) * 3
    arrays = (arrays[0][:, :270], *arrays[1:])
    found = traits_of(*arrays, mask=mask, q_offsets=GAPS[0], k_offsets=GAPS[1], **options)
    return select(found.wanted, "sm_90a")


@pytest.mark.emulator
@pytest.mark.parametrize("target", TARGETS)
def test_sinks_and_rows_that_see_no_key(target):
    sinks = np.array([[0.5], [-1.0]], np.float32)
    x = packed("bfloat16", (2, 1), (270, 300), (64, 64), GAPS, BANDS[2], sinks=sinks, dlse=True)
    check(x, rows_of(x, target))


@pytest.mark.emulator
@pytest.mark.parametrize("target", only([(target,) for target in TARGETS], ("sm_90a",)))
def test_rows_of_large_scores(target):
    """Their weights come from the largest score of the row, in each sequence."""
    bias = np.zeros((270, 1), np.float32)
    bias[20:60] = -1e9
    x = packed("float16", (1, 1), (270, 300), (64, 64), GAPS, BANDS[1], bias=bias)
    found = check(x, rows_of(x, target, dbias=True))
    assert found[0][..., 20:60, :].any()


@pytest.mark.emulator
@examples(15)
@given(
    dim=drawn((64, 128, 256), 64),
    target=st.sampled_from(TARGETS),
    data=st.data(),
    band=st.sampled_from(BANDS),
    blocks=st.integers(1, 4),
)
def test_offsets_of_any_numbers(dim, target, data, band, blocks):
    """Sequences whose offsets are out of order have gradients of 0, and all others theirs."""
    sizes = data.draw(st.tuples(st.integers(1, 200), st.integers(1, 200)))
    both = data.draw(packed_sequences.disordered(sizes))
    x = packed("bfloat16", (2, 1), sizes, (dim, dim), both, band, dlse=True)
    dq, dk, dv = check(x, rows_of(x, target), blocks=blocks, together=blocks)
    seen = x.call.options["mask"]
    assert not dq[..., ~seen.any(1), :].any()
    assert not dk[..., ~seen.any(0), :].any()
    assert not dv[..., ~seen.any(0), :].any()


@pytest.mark.emulator
@pytest.mark.parametrize("dim", only((64, 128, 256), 64))
def test_what_other_sequences_hold_is_not_read(dim):
    """NaN in rows of one sequence, or between sequences, reaches no gradient of the others."""
    both = offsets(2, 70, 150, 150), offsets(0, 60, 140, 150)
    for target in TARGETS:
        x = packed("float16", (2, 1), (160, 150), (dim, dim), both, BANDS[1])
        rows = rows_of(x, target)
        want = solve(x, rows)
        for array, place in ((x.call.k, 145), (x.call.v, 145), (x.call.q, 155), (x.call.dout, 1)):
            array[..., place, :] = np.nan
        for a, b in zip(want, solve(x, rows), strict=True):
            np.testing.assert_array_equal(np.isnan(b.astype(np.float32)), False)
            np.testing.assert_allclose(a.astype(float), b.astype(float), rtol=0.02, atol=0.02)


@pytest.mark.emulator
@pytest.mark.parametrize("dim", only((64, 128), 128))
def test_the_schedule_does_not_show(dim):
    """Bit for bit the same, whoever comes first: the order of all sums is fixed."""
    x = packed("bfloat16", (2, 1), (335, 335), (dim, dim), (SOME, SOME), BANDS[2])
    found = {
        tuple(g.tobytes() for g in solve(x, seed=seed, blocks=blocks, together=together))
        for seed, (blocks, together) in enumerate([(1, 1), (3, 3), (8, 8), (8, 3)])
    }
    assert len(found) == 1


BUILDS = [
    (row.for_sequences(True), target)
    for row in GRADIENTS
    if not row.sparse
    for target in sorted({*TARGETS} & {*row.targets})
]
NAMED = {f"{row.name}-{target}": (row, target) for row, target in BUILDS}


@pytest.mark.parametrize(
    "name",
    only(
        NAMED,
        "attention_bwd_sm90-bfloat16-d128-64x128-w12-s3-packed-sm_90a",
    ),
)
def test_builds_keep_what_they_know_in_registers(name):
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    row, target = NAMED[name]
    found = compile.resource_report(compile.compile_variant(row, target).log)
    assert not [note for note in found.notes if any(code in note for code in SLOW_NOTES)]
    if target in row.hot_targets:
        assert max(found.stack, found.spill_stores, found.spill_loads) == 0


@pytest.mark.parametrize("score", SCORE_EXAMPLES)
def test_tiles_of_128_queries_have_no_registers_for_other_scores(score):
    (row,) = (
        row for row in GRADIENTS if row.name == "attention_bwd_sm90-float16-d64-128x128-w12-s2"
    )
    assert row.for_sequences(True).tile_m == 128
    first, second = row.for_score(score).for_sequences(True), row.for_sequences(True)
    assert first == second.for_score(score)
    assert first.tile_m == 64


def test_other_builds_know_nothing_of_sequences():
    for row, _ in BUILDS:
        plain = dataclasses.replace(row, packed=False)
        assert {*row.defines} - {*plain.defines} == {("FA_PACKED", 1)}
        assert row.for_sequences(False) == row


# The second sequence has no key, and where its keys would be a tile of keys ends.
NO_KEYS = offsets(0, 60, 400, 460), offsets(0, 128, 128, 250)
# The kernel, dim, what may be said of it, and what is changed.
BUGS = {
    "a turn follows from what rows see": (
        "bwd_sm90", 64, "deadlock",
        ("return kReverseKvOrder ? of_tile->last : of_tile->first;",
         "return last_key(p, min(query_tile * kTileM + kTileM, p.q_len) - 1) / kTileN;"),
    ),
    "no block of keys works on rows that see nothing": (
        "bwd_sm90", 128, "", ("if constexpr (kInTurns) return recorded_query_tiles(p, tile);", ""),
    ),
    "pairs of two sequences are not hidden": (
        "bwd_sm90", 128, "",
        ("if (!needs_mask) return; const int query", "return; const int query"),
    ),
}  # fmt: skip


def idle(rows, folder):
    """The kernel that computes rows again whose sums are not finite, which does nothing."""
    (row,) = (row for row in rows if row.kernel == "bwd_nonfinite")
    change = ("if (params.nonfinite_flags[0] == 0) return;", "return;")
    return {row.entry: plant(folder, row.source, change)}


@pytest.mark.emulator
@pytest.mark.parametrize("bug", only(BUGS, "a turn follows from what rows see"))
def test_a_planted_bug_is_found(bug, tmp_path):
    kernel, dim, message, change = BUGS[bug]
    x = packed("bfloat16", (2, 1), (460, 250), (dim, dim), NO_KEYS, BANDS[2])
    rows = rows_of(x)
    (row,) = (row for row in rows if row.kernel == kernel)
    sources = idle(rows, tmp_path)
    want = check(x, rows, sources=sources)
    sources[row.entry] = plant(tmp_path, row.source, change)
    if message:
        with pytest.raises(emulator.EmulationError, match=message):
            solve(x, rows, sources=sources)
    else:
        got = solve(x, rows, sources=sources)
        assert any(a.tobytes() != b.tobytes() for a, b in zip(want, got, strict=True))


@pytest.mark.emulator
@pytest.mark.parametrize("target", only([(target,) for target in TARGETS], ("sm_90a",)))
def test_nothing_is_computed_twice_for_sequences_out_of_order(target, tmp_path):
    """Their output is NaN, and nobody takes it for numbers that a sum should have."""
    both = offsets(0, 70, 60, 150, 200), offsets(0, 70, 90, 150, 200)
    x = packed("float16", (2, 1), (200, 200), (64, 64), both, BANDS[1], dlse=True)
    rows = rows_of(x, target)
    check(x, rows, sources=idle(rows, tmp_path))
