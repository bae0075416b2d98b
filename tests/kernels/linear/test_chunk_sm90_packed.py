"""Packed builds of `chunk_sm90` and `chunk_state_sm90`, in the emulator, against the plain ones."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy.gpu.kernels.linear.sm90.chunk_sm90 import ChunkSm90
from fa_cupy.gpu.kernels.linear.table import PACKED
from tests.support import packed_sequences
from tests.support.every_run import examples, only, some
from tests.support.kernel_products import NAMES
from tests.support.packed_kernels import check_slices, packed_split, solve
from tests.support.planted import plant
from tests.support.products import Case, draw
from tests.support.strategies import normal
from validation import emulator

pytestmark = pytest.mark.emulator

ROWS = [row for row in PACKED if isinstance(row, ChunkSm90)]
# One with early sums, and one with late ones.
USUAL = [ROWS[0], ROWS[3]]
BATCHES = [((), (), ()), ((2,), (2,), (2,)), ((2,), (1,), (1,)), ((1, 2), (2, 1), (2, 1))]
BAD = ("nothing", "neighbours", "large neighbours", "anything")


@st.composite
def calls_of(draw, row):
    """A case, its offsets and states, the choice, and whether results of no sequence become 0."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    length = draw(st.sampled_from([1, 64, 100, 200, 330]))
    if draw(st.booleans()):
        offsets = draw(packed_sequences.offsets(draw(st.integers(1, 5)), length))
    else:
        (offsets,) = draw(packed_sequences.disordered([length]))
    batches = draw(st.sampled_from(BATCHES))
    dims = (
        draw(st.sampled_from([8, row.dim - 8, row.dim])),
        draw(st.sampled_from([8, row.tile_n, row.tile_n + 8])),
    )
    q, k, v = (
        normal(rng, (*batch, length, dim), NAMES[row.dtype])
        for batch, dim in zip(batches, (dims[0], *dims), strict=True)
    )
    bad = draw(st.sampled_from(BAD))
    if bad.endswith("neighbours"):  # every other sequence, and what belongs to none
        spans = [*packed_sequences.ranges(offsets, offsets, (length, length))]
        kept = np.zeros(length, bool)
        for rows, _, _ in spans[draw(st.integers(0, 1)) :: 2]:
            kept[rows] = True
        for x in (q, k, v):
            x[..., ~kept, :] = 3e4 if bad.startswith("large") else np.nan
    if bad == "anything":
        for x in (q, k, v):
            x[rng.random(x.shape) < 0.002] = draw(st.sampled_from([np.nan, np.inf]))
    states = None
    if draw(st.booleans()):
        wide = np.broadcast_shapes(*batches[1:])
        states = normal(rng, (*wide, len(offsets) - 1, *dims), np.float32)
    layouts = tuple(draw(st.sampled_from(["dense", "rows"])) for _ in range(3))
    case = Case(q, k, v, None, draw(st.booleans()), (*layouts, "dense"))
    choice = packed_split(row, draw(st.integers(1, 3)), draw(st.booleans()))
    return case, offsets, states, choice, draw(st.booleans()), draw(st.integers(0, 99))


@pytest.mark.parametrize("row", only(ROWS, *USUAL), ids=lambda row: row.name)
@examples(40)
@given(data=st.data())
def test_each_sequence_has_what_the_plain_kernel_computes(row, data):
    case, offsets, states, choice, zero_invalid, seed = data.draw(calls_of(row))
    out, last = solve(choice, case, offsets, states, zero_invalid, seed=seed)
    check_slices(choice, case, offsets, out, last, states, zero_invalid)


OFFSETS = np.array([3, 10, 10, 140, 141, 205])
LENGTH = 220


def arrays(row, reverse):
    """A case with an infinity in its third sequence and NaN and large numbers around it; states."""
    case = Case(
        *draw(*((2, LENGTH, d) for d in (row.dim, row.dim, row.tile_n)), dtype=NAMES[row.dtype]),
        reverse=reverse,
    )
    for x in case.arrays[:3]:
        x[:, [*range(10), *range(140, LENGTH)]] = np.nan
    case.q[:, 138:140] = 2e-5 * case.q[:, 138:140].astype(np.float32)  # rows of its last chunk
    case.q[:, 141:] = 3e4
    case.v[0, 100, 5] = np.inf
    return case, draw((2, len(OFFSETS) - 1, row.dim, row.tile_n), seed=1)[0]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("row", some(ROWS, lambda row: row.dtype), ids=lambda row: row.name)
def test_any_schedule_gives_the_same_bits(row, reverse):
    case, states = arrays(row, reverse)
    for segments, own_prefix in ((1, False), (2, False), (2, True)):
        choice = packed_split(row, segments, own_prefix)
        first = solve(choice, case, OFFSETS, states)
        check_slices(choice, case, OFFSETS, *first, states)
        for seed in range(1, 4):
            again = solve(choice, case, OFFSETS, states, seed=seed)
            assert [x.tobytes() for x in again] == [x.tobytes() for x in first]


# What is taken out of the kernel, and what stands there instead.
KEYS = "if (more) clear_later_keys(shared.k[from], rows_of_chunk(shared.work, i + 1));"
FIRST_KEYS = "clear_later_keys(shared.k[pipe.index()], rows_of_chunk(shared.work, 0));"
BUGS = {
    "keys of the next sequence": (False, (KEYS, "")),
    "keys of the next sequence, first": (True, (FIRST_KEYS, ";")),
    "values of the next sequence": (
        False,
        ("if (rows < kChunk) clear_later_values(shared.v[stage], rows, warp);", ""),
    ),
    "queries of the next sequence": (
        False,
        ("visible_bits = without_later_rows(", "visible_bits = causal_bits; without_later_rows("),
    ),
    "outputs of the next sequence": (
        False,
        ("if (kPacked && (!elected || rows < kChunk)) continue;", "if (!elected) continue;"),
    ),
    "zeros without a proxy fence": (
        False,
        ("fence_proxy_async_shared();\n bar_sync(kClearKeysBarrier, 128);",
         "bar_sync(kClearKeysBarrier, 128);"),
    ),
    "chunks that begin with the array": (False, ("return work.begin + row;", "return row;")),
    "no state of sequences without rows": (
        False,
        ("if (kPacked && warp >= 8) keep_first_state", "if (false) keep_first_state"),
    ),
    "states of other sequences": (False, ("w.initial = sequence * job.initial_sequence;", "")),
}  # fmt: skip


def show(row, bug, choice, reverse, folder):
    """Fail unless some schedule shows a bug in a row of a choice."""
    sources = {row.entry: plant(folder, row.source, bug)}
    case, states = arrays(choice.row, reverse)
    want = solve(choice, case, OFFSETS, states)
    for seed in range(20):
        try:
            got = solve(choice, case, OFFSETS, states, seed=seed, sources=sources)
        except emulator.EmulationError:
            return
        if any(x.tobytes() != y.tobytes() for x, y in zip(got, want, strict=True)):
            return
    pytest.fail("20 seeds did not show it")


@pytest.mark.parametrize("bug", only(BUGS, next(iter(BUGS))))
def test_a_planted_bug_is_found(bug, tmp_path):
    reverse, change = BUGS[bug]
    show(ROWS[0], change, packed_split(ROWS[0], 1), reverse, tmp_path)


PREFIX_BUGS = {
    "keys and values that are only summed": (
        "clear_later_rows(shared.k[stage], shared.v[stage], rows_of_chunk(shared.work, -i)",
        "clear_later_rows(shared.k[stage], shared.v[stage], kChunk",
    ),
    "the state of the last segment, which may have no rows": (
        "w.is_last = first < max(chunks, 1) && chunks <= first + w.segment_chunks;",
        "w.is_last = w.segment == params.segments - 1;",
    ),
}


@pytest.mark.parametrize("bug", only(PREFIX_BUGS))
def test_a_bug_planted_in_sums_before_a_segment_is_found(bug, tmp_path):
    show(ROWS[0], PREFIX_BUGS[bug], packed_split(ROWS[0], 3, own_prefix=True), True, tmp_path)


STATE_BUGS = {
    "keys and values of the next sequence": ("if (rows >= kChunk) return;", "return;"),
    "zeros without a proxy fence": (
        "fence_proxy_async_shared();\n bar_sync(barrier, 128 * kGroups);",
        "bar_sync(barrier, 128 * kGroups);",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", only(STATE_BUGS))
def test_a_bug_planted_in_sums_of_segments_is_found(bug, tmp_path):
    choice = packed_split(ROWS[0], 3)
    show(choice.states, STATE_BUGS[bug], choice, True, tmp_path)
