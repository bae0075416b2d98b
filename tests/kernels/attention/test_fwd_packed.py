"""Attention over packed sequences: the kernels' own source on the CPU."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import Score, reference
from fa_cupy.gpu.kernels.forward import VARIANTS
from tests.support import packed_sequences
from tests.support.every_run import drawn, examples, only, some
from tests.support.kernel_attention import FORWARD_DTYPES, any_sinks, draw, unit_of
from tests.support.planted import plant
from validation import emulator
from validation.emulator import calls

pytestmark = pytest.mark.emulator

ROWS = [row for row in VARIANTS if not row.sparse]
PLAIN = {(row.entry, row.dim): row for row in ROWS if row.dtype == "float16"}
SM80 = PLAIN["attention_fwd_sm80", 128]
D64, D128 = PLAIN["attention_fwd_sm90", 64], PLAIN["attention_fwd_sm90", 128]
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


SOME = (offsets(0, 3, 3, 70, 191, 200, 335),) * 2
GAPS = offsets(5, 40, 40, 41, 180, 260), offsets(9, 9, 30, 160, 161, 250)
#: Sequences of more than a tile, of either axis, and one key for many queries.
LONG = offsets(0, 333, 400, 650), offsets(1, 2, 450, 700)
#: A sequence whose end lies behind its beginning, one that meets it, one out of range.
WRONG = offsets(0, 70, 60, 150, 200, 900), offsets(0, 70, 90, 150, 200, 210)

# Rows that a kernel cannot compute it computes again, key by key: what would hide most bugs.
NOT_AGAIN = {
    "attention_fwd_sm80": ("if (any_recompute)", "if (false)"),
    "attention_fwd_sm90": (
        "largest_max >= kCoarseScore || nonfinite_bits != 0)", "largest_max != largest_max)",
    ),
    "attention_fwd_fp32": ("if (any_recompute) {", "if (false) {"),
    "attention_fwd_fp32_sm90": ("if (any_recompute) {", "if (false) {"),
}  # fmt: skip


def arrays_of(row, lengths, heads=(2, 1), dims=None, seed=0):
    """Random q, k and v for a row."""
    q_len, k_len = lengths
    head_dim, v_dim = dims or (row.dim, row.dim)
    shapes = (heads[0], q_len, head_dim), (heads[1], k_len, head_dim), (heads[1], k_len, v_dim)
    dtype = FORWARD_DTYPES[row.dtype]
    return [draw(1, *shape, dtype=dtype, seed=3 * seed + i) for i, shape in enumerate(shapes)]


def solve(row, arrays, both, band=None, bias=None, **how):
    """Output and LSE of a kernel; offsets of keys are not given where they are those of queries."""
    named = {"q_offsets": both[0]} | ({} if both[1] is both[0] else {"k_offsets": both[1]})
    return calls.attention(row, *arrays, bias, **named, **(band or {}), **how)


def check(row, arrays, both, band=None, bias=None, seed=0, source=None, **options):
    """Hold a call against the definition: a mask says who sees whom."""
    out, lse = solve(row, arrays, both, band, bias, seed=seed, source=source, **options)
    lengths = [x.shape[-2] for x in arrays[:2]]
    seen = packed_sequences.visible(*both, lengths, **(band or {}))
    with np.errstate(all="ignore"):
        want, want_lse = reference.attention(*arrays, bias, seen, **options)
    invalid = packed_sequences.invalid_rows(*both, lengths)
    want[..., invalid, :] = want_lse[..., invalid] = np.nan
    largest = float(np.abs(arrays[2].astype(np.float64)).max())
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    atol = unit_of(row) * largest
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=0, atol=atol)
    off = 1e-4 if getattr(row, "parts", 2) == 2 else 1e-2
    np.testing.assert_allclose(lse, want_lse, rtol=off, atol=off)
    return out, lse


@pytest.mark.parametrize("row", some(ROWS, lambda row: row.source), ids=lambda row: row.name)
def test_every_row(row, tmp_path):
    source = plant(tmp_path, row.source, NOT_AGAIN[row.entry])
    for seed, band in enumerate(BANDS[:3]):
        check(row, arrays_of(row, (335, 335)), SOME, band, seed=seed, source=source)
    dims = row.dim - 8, row.dim
    check(row, arrays_of(row, (270, 300), (2, 2), dims), GAPS, BANDS[3], seed=4, source=source)


@pytest.mark.parametrize("row", some(ROWS, lambda row: row.source, 1), ids=lambda row: row.name)
def test_sequences_longer_than_tiles(row):
    for band in (BANDS[0], BANDS[2]):
        check(row, arrays_of(row, (650, 700), (1, 1)), LONG, band)


def test_rows_of_a_later_sequence_find_their_own_maximum(tmp_path):
    """Though those of an earlier one in the tile have theirs: no scores are computed twice."""
    source = plant(
        tmp_path,
        D64.source,
        ("if (use_stale_max) reload_scores<kCols>", "if (false) reload_scores<kCols>"),
    )
    for both in (SOME, LONG):
        check(D64, arrays_of(D64, (both[0][-1], both[1][-1])), both, source=source)


@examples(30)
@given(
    row=drawn(ROWS, SM80, D128),
    lengths=packed_sequences.packed_lengths(),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 1), (4, 2)]),
    band=st.sampled_from(BANDS),
    softcap=st.sampled_from([0.0, 2.0]),
    sinks=st.booleans(),
    smaller=st.sampled_from([0, 8]),
    seed=st.integers(0, 2**32),
)
def test_any_sequences_with_any_schedule(row, lengths, heads, band, softcap, sinks, smaller, seed):
    sizes, *both = lengths
    arrays = arrays_of(row, sizes, heads, (row.dim - smaller, row.dim))
    options = {"softcap": softcap} if softcap else {}
    if sinks:
        options["sinks"] = any_sinks(np.random.default_rng(seed), 1, heads[0], sizes[0])
    check(row, arrays, both, band, seed=seed, **options)


@examples(20)
@given(
    row=drawn(ROWS, SM80, D128),
    axes=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    wide=st.booleans(),
    lengths=packed_sequences.packed_lengths(),
    band=st.sampled_from(BANDS),
    scaled=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_bias(row, axes, wide, lengths, band, scaled, seed):
    """Of keys, of queries, of pairs; of 16 bits, which are staged, wherever a sequence begins."""
    sizes, *both = lengths
    shape = tuple(n if has else 1 for n, has in zip((2, *sizes), axes, strict=True))
    dtype = np.float32 if wide else FORWARD_DTYPES[row.dtype]
    bias = draw(*shape, dtype=dtype, seed=seed)
    options = {"scale": -0.1} if scaled else {}
    check(row, arrays_of(row, sizes), both, band, bias, seed=seed, **options)


@pytest.mark.parametrize("row", only([SM80, D64, D128], D128), ids=lambda row: row.name)
@pytest.mark.parametrize("begin", only(range(1, 8), 1, 4))
def test_a_staged_bias_of_pairs_from_any_key_on(row, begin):
    """Rows of the bias are read by 16 bytes; where a sequence begins they are not aligned."""
    both = offsets(0, 100, 160), offsets(begin, 150 + begin, 290)
    bias = draw(160, 296, dtype=FORWARD_DTYPES[row.dtype], seed=begin)
    for cut in (0, 3):  # rows whose length is a multiple of 8, and others
        arrays = arrays_of(row, (160, 296 - cut))
        check(row, arrays, both, BANDS[0], np.ascontiguousarray(bias[:, : 296 - cut]))


@pytest.mark.parametrize("row", only([SM80, D64], D64), ids=lambda row: row.name)
def test_a_score_of_no_positions(row):
    score = Score("3 * tanh(s) * x[h]", x=np.array([0.5, -1.0]))
    arrays = arrays_of(row, (270, 300))
    out, lse = solve(row, arrays, GAPS, BANDS[1], score=score)
    seen = packed_sequences.visible(*GAPS, (270, 300), **BANDS[1])
    want, want_lse = reference.attention(*arrays, mask=seen, score=score)
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=0, atol=5e-3)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-3, atol=1e-3)


@examples(20)
@given(
    row=drawn(ROWS, SM80, D128),
    data=st.data(),
    band=st.sampled_from(BANDS),
    sinks=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_offsets_of_any_numbers(row, data, band, sinks, seed):
    """Sequences whose offsets are out of order are NaN, and all others what they are alone."""
    sizes = data.draw(st.tuples(st.integers(1, 200), st.integers(1, 200)))
    both = data.draw(packed_sequences.disordered(sizes))
    options = {"sinks": np.array([[0.5], [-np.inf]], np.float32)} if sinks else {}
    check(row, arrays_of(row, sizes), both, band, seed=seed, **options)


@pytest.mark.parametrize("row", only([SM80, D64, D128], D128), ids=lambda row: row.name)
@pytest.mark.parametrize("lengths", [(300, 1), (1, 300), (1, 1)])
def test_one_key_or_one_query(row, lengths):
    q_len, k_len = lengths
    both = offsets(0, q_len // 2, q_len, q_len), offsets(0, k_len // 2, k_len, k_len)
    for band in BANDS[:3]:
        check(row, arrays_of(row, lengths), both, band)


@pytest.mark.parametrize("row", [SM80, D128], ids=lambda row: row.name)
def test_no_sequence_at_all(row):
    """All rows belong to none: their result is that of the sinks."""
    for both in ((offsets(7),) * 2, (offsets(0, 0, 0), offsets(5, 5, 90))):
        arrays = arrays_of(row, (100, 100))
        out, lse = check(row, arrays, both, sinks=np.array([[0.5], [-np.inf]], np.float32))
        assert not out.astype(np.float32).any()
        assert (lse[0, 0] == 0.5).all()


@pytest.mark.parametrize("row", only([SM80, D64, D128], D128), ids=lambda row: row.name)
@pytest.mark.parametrize("biased", [False, True])
def test_what_other_sequences_hold_is_not_read(row, biased):
    """NaN in rows of one sequence, or between sequences, reaches no result of the others."""
    both = offsets(2, 70, 150, 150), offsets(0, 60, 140, 150)
    bias = draw(160, 150, dtype=FORWARD_DTYPES[row.dtype]) if biased else None
    arrays = arrays_of(row, (160, 150))
    want = check(row, arrays, both, BANDS[1], bias)
    arrays[1][..., 145, :] = arrays[2][..., 147, :] = np.nan  # the last one has no query
    arrays[0][..., (0, 1, 155), :] = np.nan
    if biased:
        bias[~packed_sequences.visible(*both, (160, 150))] = np.nan
    for a, b in zip(want, solve(row, arrays, both, BANDS[1], bias), strict=True):
        np.testing.assert_allclose(a.astype(float), b.astype(float), rtol=0.01, atol=0.01)
    arrays[1][..., 100, :] = arrays[2][..., 30, :] = np.nan  # what a sequence sees is its own
    arrays[0][..., 20, :] = np.nan
    out, lse = solve(row, arrays, both, BANDS[0])
    np.testing.assert_array_equal(np.isnan(lse[0, 0, 2:150]), [*[False] * 18, True, *[False] * 49,
                                                               *[True] * 80])  # fmt: skip
    assert np.isnan(out[..., 2:150, :].astype(float)).all()


@pytest.mark.parametrize("row", only([SM80, D64], D64), ids=lambda row: row.name)
def test_the_schedule_does_not_show(row):
    arrays = arrays_of(row, (335, 335))
    found = {
        tuple(x.tobytes() for x in solve(row, arrays, SOME, BANDS[2], seed=seed))
        for seed in range(4)
    }
    assert len(found) == 1


def test_builds_for_sequences_differ_by_a_define():
    for row in ROWS:
        build = row.for_sequences(True)
        assert {*build.defines} - {*row.defines} == {("FA_PACKED", 1)}
        assert row.for_sequences(False) == row


ALONE = offsets(0, 900), offsets(0, 210)  # a sequence that is out of range, and no other
ODD = offsets(0, 100, 210), offsets(5, 155, 205)
TOUCHED_AS_WHOLE = (
    ("const int full_low = first_key(p, last_row) - origin;", "const int full_low = low;"),
    ("const int full_high = last_key(p, first_row) - origin;", "const int full_high = high;"),
)
# On which row, with which offsets, of axes of which lengths, and what is changed.
BUGS = {
    "the first key of a tile is forgotten": (
        D128, GAPS, (260, 250), ("work.key_origin = origin;", "work.key_origin = 0;"),
    ),
    "a bias is not read by 16 bytes": (
        D128, ODD, (210, 208), ("first_key(p, q_begin) / 8 * 8", "first_key(p, q_begin)"),
    ),
    "rows of invalid sequences are not marked": (
        D64, WRONG, (210, 210),
        (
            "if constexpr (kPacked || kLengths) mark_invalid_rows(c, at, softmax, my_row);", "",
        ),
    ),
    "rows of invalid sequences are not marked, mma.sync": (
        SM80, WRONG, (210, 210),
        ("if constexpr (kPacked) mark_invalid_rows(params, softmax, first_row);", ""),
    ),
    "tiles of invalid sequences alone are not marked": (
        SM80, ALONE, (210, 210),
        ("if (is_invalid_row(params, work.q_begin + r)) value = FA_NAN;", ""),
    ),
    "tiles of two sequences are not hidden": (D64, LONG, (650, 700), *TOUCHED_AS_WHOLE),
    "tiles of two sequences are not hidden, mma.sync": (SM80, LONG, (650, 700), *TOUCHED_AS_WHOLE),
    "what the first row sees stands for its tile": (
        SM80, GAPS, (260, 250),
        ("high = last_key(p, last_row) - origin;", "high = last_key(p, first_row) - origin;"),
    ),
    "all blocks have one tile": (
        D64, LONG, (650, 700),
        ("query_tile_in_order(p, p.q_tiles - 1 - tile.query_tile)", "query_tile_in_order(p, 0)"),
    ),
}  # fmt: skip


def outcome(bug, source):
    """Make the calls of a bug, by a kernel in place of the row's."""
    row, both, lengths, *_ = BUGS[bug]
    bias = draw(*lengths, dtype=FORWARD_DTYPES[row.dtype]) if both is ODD else None
    for band in (BANDS[0], BANDS[2]):
        check(row, arrays_of(row, lengths), both, band, bias, source=source)


@pytest.mark.parametrize(
    "bug",
    only(
        BUGS,
        "the first key of a tile is forgotten",
        "rows of invalid sequences are not marked, mma.sync",
    ),
)
def test_a_planted_bug_is_found(bug, tmp_path):
    row, _, _, *changes = BUGS[bug]
    outcome(bug, plant(tmp_path, row.source, NOT_AGAIN[row.entry]))
    source = plant(tmp_path, row.source, NOT_AGAIN[row.entry], *changes)
    with pytest.raises((AssertionError, emulator.EmulationError)):
        outcome(bug, source)


def test_invalid_rows_are_not_computed_again(tmp_path):
    change = "recompute = recompute && !is_invalid_row(params, work, row);", ""
    source, arrays = plant(tmp_path, SM80.source, change), arrays_of(SM80, (210, 210))
    with pytest.raises(AssertionError):
        check(SM80, arrays, WRONG, source=source)
