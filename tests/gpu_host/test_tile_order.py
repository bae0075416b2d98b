"""The order in which kernels work through the rows of blocks of a mask."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import BitMask
from fa_cupy.core import attention_problem
from fa_cupy.gpu.kernels.attention import attention_params
from fa_cupy.gpu.masks import tile_order

B = 128
SMS = 132


def problem(q_shape, k_shape, mask=None, **options):
    """The problem of arrays of these shapes, which are never made."""

    def array(shape):
        strides = np.cumprod([2, *shape[:0:-1]], dtype=np.int64)[::-1]
        return np.lib.stride_tricks.as_strided(np.zeros(1, np.float16), shape, strides)

    return attention_problem.attention_problem(
        *map(array, (q_shape, k_shape, k_shape)), None, mask, **options
    )


@st.composite
def masked_calls(draw):
    """A mask of random states and words for a few entries, and a band."""
    lengths = draw(st.integers(1, 700)), draw(st.integers(1, 900))
    matrices, entries = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tiles = [-(-n // B) for n in lengths]
    share = draw(st.sampled_from([0.1, 0.5, 1.0]))
    states = rng.choice([0, 1, 2], (matrices, *tiles), p=[1 - share, share / 2, share / 2])
    words = rng.integers(1, 2**32, (np.count_nonzero(states == 1), 8, 32, 2), np.uint32)
    mask = BitMask.from_blocks(states, *lengths, words)[rng.integers(0, matrices, entries)]
    options = {}
    if draw(st.booleans()):
        options = {"is_causal": True}
    if draw(st.booleans()):
        side = st.none() | st.integers(0, 500)
        options["window"] = (draw(side), draw(side))
    options["causal_align"] = draw(st.sampled_from(["top_left", "bottom_right"]))
    return mask, options


def costs(mask, call):
    """What each row of blocks costs, by its definition: a list for each batch entry."""
    states = mask.block_states()
    found = np.zeros(states.shape[:2], int)
    for (entry, row, tile), state in np.ndenumerate(states):
        first, last = row * B, min((row + 1) * B, call.q_len) - 1
        low = 0 if call.lower is None else first + call.lower
        high = call.k_len - 1 if call.upper is None else min(call.k_len - 1, last + call.upper)
        if tile * B <= high and tile * B + B > low:
            found[entry, row] += (0, 6, 5)[state]
    return found


@given(masked_calls(), st.integers(1, 7))
def test_the_longest_rows_of_a_section_come_first(call, section):
    mask, options = call
    entries = len(mask.entries)
    asked = problem((entries, mask.shape[-2], 64), (entries, mask.shape[-1], 64), mask, **options)
    order = tile_order.work_order(np, asked, mask._store.with_words(), mask.entries, section)
    assert order.dtype == np.int32
    cost = costs(mask, asked)
    tiles = cost.shape[1]
    assert sorted(order) == list(range(cost.size))
    even = cost.max() <= 1.2 * cost.min()
    keys = []
    for item in order.tolist():
        entry, row = divmod(item, tiles)
        group = entry if even else entry // section
        keys.append((group, -cost[entry, row], -row, entry))
    assert keys == sorted(keys)


def test_rows_that_cost_the_same_go_entry_by_entry():
    mask = BitMask.from_dense(np.random.default_rng(0).random((300, 300)) < 0.5)[None][[0] * 3]
    asked = problem((3, 300, 64), (3, 300, 64), mask)
    order = tile_order.work_order(np, asked, mask._store.with_words(), mask.entries, 3)
    assert order.tolist() == [2, 1, 0, 5, 4, 3, 8, 7, 6]
    # A band makes them unequal.
    asked = problem((3, 300, 64), (3, 300, 64), mask, is_causal=True)
    order = tile_order.work_order(np, asked, mask._store.with_words(), mask.entries, 3)
    assert order.tolist() == [2, 5, 8, 1, 4, 7, 0, 3, 6]


def test_too_many_rows_have_no_order():
    mask = BitMask.from_blocks(np.ones((1, 1), bool), 100, 100)
    asked = problem((2**31, 100, 8), (1, 100, 8), mask)
    entries = np.broadcast_to(mask.entries, 2**31)
    assert tile_order.work_order(np, asked, mask._store.with_words(), entries, 1) is None


@pytest.mark.parametrize(
    ("q_shape", "k_shape", "want"),
    [
        ((1, 16, 8192, 128), (1, 16, 8192, 128), 8),  # 4 MiB an entry
        ((1, 64, 131072, 128), (1, 64, 131072, 128), 1),
        ((4, 16, 2048, 128), (4, 16, 2048, 128), 32),
        ((4, 32, 4096, 256), (4, 1, 4096, 256), 32),  # all heads read the same
        ((32, 16, 512, 128), (32, 16, 512, 128), 32),
        ((1, 3, 512, 128), (1, 3, 512, 128), 3),
        ((5, 16, 8192, 128), (5, 16, 8192, 128), 8),
        ((2, 9, 8192, 128), (2, 9, 8192, 128), 9),  # about equal: no small one at the end
        ((1, 2, 128, 0), (1, 2, 128, 0), 2),
    ],
)
def test_a_section_fits_the_cache_and_has_rows_enough(q_shape, k_shape, want):
    assert tile_order.section(problem(q_shape, k_shape), SMS) == want


def test_keys_and_values_that_are_shared_count_once():
    one = attention_params.cached_entries(
        problem((8, 4096, 64), (1, 4096, 64)), [8], {"k": [0], "v": [0]}
    )
    assert one == 8 * (32 << 20) // (4096 * 128 * 2)
