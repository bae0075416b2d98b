"""What row_intervals writes of packed sequences, on the CPU."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy.core import attention_problem
from fa_cupy.dropout.arguments import Dropout
from fa_cupy.gpu.kernels.attention.row_intervals import (
    CACHED_TILES,
    OFFSETS,
    OUTPUTS,
    PADDING,
    intervals,
)
from fa_cupy.gpu.plan import Plan, workspace_of
from fa_cupy.keys import offsets as key_offsets
from fa_cupy.keys.layout import KeyArrays
from tests.support import packed_sequences
from tests.support.every_run import examples
from validation.emulator.launcher import EmulatorLauncher

pytestmark = pytest.mark.emulator
TOP, BOTTOM = "top_left", "bottom_right"
BANDS = [
    {},
    {"is_causal": True, "causal_align": TOP},
    {"is_causal": True, "causal_align": BOTTOM},
    {"window": (40, 5), "causal_align": TOP},
    {"window": (0, 0), "causal_align": BOTTOM},
    {"window": (None, 7), "causal_align": BOTTOM},
    {"window": (3, None), "causal_align": TOP},
]


def written(offsets, lengths, band, tile_m, tile_n):
    """The parts of a workspace that the launches write, by name."""
    q_len, k_len = lengths
    q, k = np.zeros((1, q_len, 8), np.float16), np.zeros((1, k_len, 8), np.float16)
    problem = attention_problem.attention_problem(
        q, k, k, None, None, q_offsets=offsets[0], k_offsets=offsets[1], **band
    )
    found = intervals(problem, tile_m, tile_n, OUTPUTS)
    space = workspace_of(found.sizes)
    memory = np.full(space.nbytes // 4, 0x5A5A5A5A, np.int32)
    plan = Plan([found.step], OFFSETS, EmulatorLauncher(), space)
    plan.run(tuple(x.ctypes.data for x in offsets), memory.ctypes.data)
    parts = {}
    for name, size in found.sizes.items():
        begin = space.places[name] // 4
        part = memory[begin : begin + size // 4]
        parts[name] = part if name == "order" else part.reshape(-1, 2).astype(np.int64)
    return parts


def check_intervals(found, seen):
    """Hold intervals against who sees whom: of each row of `seen`, and of those behind."""
    first, last = found.T
    assert len(found) == len(seen) + PADDING
    columns = np.arange(seen.shape[1])
    inside = (columns >= first[:, None]) & (columns <= last[:, None])
    np.testing.assert_array_equal(inside[: len(seen)], seen)
    assert not inside[len(seen) :].any()
    empty = ~inside.any(1)
    np.testing.assert_array_equal(last[empty], first[empty] - 1)
    assert (np.diff(first) >= 0).all()
    assert (np.diff(last) >= 0).all()


def check_tiles(parts, seen, tile_m, tile_n):
    """Hold the relation of tiles against itself, and against who sees whom."""
    rows = -(-seen.shape[0] // tile_m)
    works = np.zeros((rows, -(-seen.shape[1] // tile_n)), np.bool_)
    for tile, (first, last) in enumerate(parts["key_tiles"]):
        assert 0 <= first <= last < works.shape[1]  # each tile of rows is written
        works[tile, first : last + 1] = True
    other = np.zeros_like(works)
    for tile, (first, last) in enumerate(parts["query_tiles"]):
        assert first >= 0
        other[first : last + 1, tile] = True
    np.testing.assert_array_equal(works, other)
    for i, j in np.argwhere(seen):
        assert works[i // tile_m, j // tile_n]
    assert sorted(parts["order"]) == list(range(rows))


@examples(60)
@given(
    lengths=packed_sequences.packed_lengths(),
    band=st.sampled_from(BANDS),
    tiles=st.sampled_from([(64, 128), (128, 128), (128, 64), (192, 128)]),
)
def test_sequences_in_order(lengths, band, tiles):
    sizes, *offsets = lengths
    parts = written(offsets, sizes, band, *tiles)
    seen = packed_sequences.visible(*offsets, sizes, **band)
    check_intervals(parts["keys_of_row"], seen)
    check_intervals(parts["rows_of_key"], seen.T)
    check_tiles(parts, seen, *tiles)


@pytest.mark.parametrize("more", [0, 1])
def test_more_tiles_than_a_block_holds(more):
    """The tiles of queries that work on a tile of keys are the same in both ways."""
    rows = CACHED_TILES + more
    offsets = [np.array([0, 700, 700, rows - 9, rows]), np.array([0, 90, 120, 150, 160])]
    parts = written(offsets, (rows, 160), BANDS[1], 1, 64)
    seen = packed_sequences.visible(*offsets, (rows, 160), **BANDS[1])
    check_tiles(parts, seen, 1, 64)


@pytest.mark.parametrize("far", [2**31, 2**32 + 5, 2**62, -(2**31) - 1, -(2**32) + 5, -(2**62)])
@pytest.mark.parametrize("at", range(4))
def test_offsets_beyond_32_bits(far, at):
    """Behind one past the end there is no row left; behind a negative one all is as it was."""
    sizes, offsets = (90, 80), [np.array([5, 30, 60, 80]) for _ in range(2)]
    offsets[0][at] = far
    parts = written(offsets, sizes, {}, 64, 128)
    first, last = parts["keys_of_row"].T
    np.testing.assert_array_equal(
        first[: sizes[0]] < 0, packed_sequences.invalid_rows(*offsets, sizes)
    )
    columns = np.arange(sizes[1])
    seen = (columns >= (first & 0x7FFFFFFF)[:, None]) & (columns <= last[:, None])
    np.testing.assert_array_equal(seen[: sizes[0]], packed_sequences.visible(*offsets, sizes))


@examples(60)
@given(data=st.data(), band=st.sampled_from(BANDS))
def test_offsets_of_any_numbers(data, band):
    sizes = data.draw(st.tuples(st.integers(1, 300), st.integers(1, 300)))
    offsets = data.draw(packed_sequences.disordered(sizes, data.draw(st.integers(1, 5))))
    parts = written(offsets, sizes, band, 64, 128)
    seen = packed_sequences.visible(*offsets, sizes, **band)
    invalid = packed_sequences.invalid_rows(*offsets, sizes)
    marked = parts["keys_of_row"][:, 0] < 0
    np.testing.assert_array_equal(marked[: sizes[0]], invalid)
    assert not marked[sizes[0] :].any()
    parts["keys_of_row"][:, 0] &= 0x7FFFFFFF
    check_intervals(parts["keys_of_row"], seen)
    check_intervals(parts["rows_of_key"], seen.T)
    check_tiles(parts, seen, 64, 128)


@pytest.mark.parametrize("offsets", [[0, 3, 3, 70, 191], [5, 70, 60, 150, 200, 900], [7]], ids=str)
def test_places_of_rows(offsets):
    """With dropout also where each row is; in a sequence that is not valid anywhere."""
    q, k = np.zeros((1, 210, 8), np.float16), np.zeros((1, 250, 8), np.float16)
    both = [np.array(offsets), np.array(offsets) + 11]
    given = dict(zip(OFFSETS, both, strict=True))
    problem = attention_problem.attention_problem(
        q, k, k, None, None, dropout=Dropout(0.3, 1), **given
    )
    found = intervals(problem, 64, 64, [])
    space = workspace_of(found.sizes)
    memory = np.full(space.nbytes // 4, 0x5A5A5A5A, np.int32)
    plan = Plan([found.step], OFFSETS, EmulatorLauncher(), space)
    plan.run(tuple(x.ctypes.data for x in both), memory.ctypes.data)
    begin = space.places["places"] // 4
    places = memory[begin : begin + 4 * 210].reshape(-1, 4)
    keys = KeyArrays(**given)
    seen = packed_sequences.visible(*both, (210, 250)).any(axis=-1)
    np.testing.assert_array_equal(places[seen], key_offsets.places(np, problem, keys)[seen])
    for s, (rows, own, is_valid) in enumerate(packed_sequences.ranges(*both, (210, 250))):
        if is_valid and rows.stop > rows.start:
            want = np.broadcast_to([s, rows.start, own.start, 0], places[rows].shape)
            np.testing.assert_array_equal(places[rows], want)
