"""The planner: its inequality, its choice and its traffic estimate; stacks of batch entries."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy.core import attention_problem
from fa_cupy.tiled import batching, tile_sizes

DIM = st.integers(1, 2048)
BUDGET = st.sampled_from([*tile_sizes.SHARED_BYTES.values(), tile_sizes.CPU_CACHE_BYTES, 1 << 14])


@given(DIM, DIM, st.sampled_from([2, 4, 8]), BUDGET, st.integers(1, 10**6), st.integers(1, 10**6))
def test_tile_fits_its_budget(head_dim, v_dim, itemsize, budget, q_len, k_len):
    tile = tile_sizes.tile_sizes(head_dim, v_dim, itemsize, budget, q_len, k_len)
    if tile != (16, 16):  # the smallest there is
        assert tile_sizes.footprint(*tile, head_dim, v_dim, itemsize) <= budget
    assert tile.tile_m < max(17, 2 * q_len)
    assert tile.tile_n < max(17, 2 * k_len)


@given(DIM, DIM, st.sampled_from([2, 4, 8]), BUDGET)
def test_no_other_tile_that_fits_moves_less(head_dim, v_dim, itemsize, budget):
    def moved(m, n):
        return (head_dim + v_dim) / m + 2 * v_dim / n

    tile = tile_sizes.tile_sizes(head_dim, v_dim, itemsize, budget, 1 << 20, 1 << 20)
    for m, n in itertools.product(range(16, 1025, 16), repeat=2):
        known = m in tile_sizes._EDGES and n in tile_sizes._EDGES
        if known and tile_sizes.footprint(m, n, head_dim, v_dim, itemsize) <= budget:
            assert moved(*tile) <= moved(m, n)


def test_footprint_counts_what_is_held():
    m, n, d, dv = 128, 64, 96, 80
    held = [(m, d), (n, d), (n, dv), (m, n), (m, dv), (m,), (m,)]
    assert tile_sizes.footprint(m, n, d, dv, 4) == sum(np.zeros(s, np.float32).nbytes for s in held)
    own = sum(np.zeros(s, np.float32).nbytes for s in held[3:])
    inputs = sum(np.zeros(s, np.float16).nbytes for s in held[:3])
    assert tile_sizes.footprint(m, n, d, dv, 2, 4) == own + inputs


def test_bounds_on_the_edges():
    assert tile_sizes.tile_sizes(64, 64, 4, 1 << 30, 10**5, 10**5, max_m=128, max_n=64) == (128, 64)


def test_traffic():
    # One row of tiles reads everything once; halving the tile reads keys and values once more.
    lq, lk, d, dv = 256, 512, 64, 32
    inputs, out = lq * d + lk * (d + dv), lq * dv
    assert tile_sizes.traffic(lq, lk, d, dv, 2, 256).tiled == 2 * (inputs + out)
    assert tile_sizes.traffic(lq, lk, d, dv, 2, 128).tiled == 2 * (inputs + out + lk * (d + dv))
    assert tile_sizes.traffic(lq, lk, d, dv, 4, 64).plain == 4 * (inputs + out + 4 * lq * lk)


@given(st.data())
def test_stacks_cover_every_entry_once(data):
    batch = tuple(data.draw(st.lists(st.integers(0, 4), max_size=4)))
    rows, cols = 3, 2
    shared = tuple(data.draw(st.sampled_from([1, n])) for n in batch)
    order = data.draw(st.permutations(range(len(batch))))
    a = np.arange(math.prod(batch) * rows * cols).reshape(*(batch[i] for i in order), rows, cols)
    a = a.transpose(*np.argsort(order), len(batch), len(batch) + 1)
    b = np.arange(math.prod(shared) * cols).reshape(*shared, 1, cols)
    arrays = [a, None, np.broadcast_to(b, (*batch, rows, cols))]
    views = [None if x is None else attention_problem.View(x.shape, x.strides) for x in arrays]
    largest = data.draw(st.integers(1, 5))

    found = {}
    for x, absent, y in batching.stacks(np, arrays, views, largest):
        assert absent is None
        assert x.shape == y.shape == (x.shape[0], rows, cols)
        assert 1 <= x.shape[0] <= largest
        found.update((int(x[i, 0, 0]), (x[i], y[i])) for i in range(x.shape[0]))
    assert len(found) == math.prod(batch)
    for index in np.ndindex(batch):
        x, y = found[int(a[index][0, 0])]
        np.testing.assert_array_equal(x, a[index])
        np.testing.assert_array_equal(y, arrays[2][index])


@pytest.mark.parametrize(
    ("shape", "strides", "merged"),
    [
        ((2, 3, 4), [(12, 4, 1), (12, 4, 1)], (24,)),
        ((2, 3, 4), [(12, 4, 1), (4, 0, 1)], (2, 3, 4)),
        ((2, 6), [(6, 1), (0, 0)], (12,)),
        ((9, 2), [(2, 1), (1, 1)], (2, 9)),
        ((), [()], (1,)),
    ],
)
def test_axes_are_merged_where_strides_allow(shape, strides, merged):
    assert batching.merged(shape, strides).shape == merged
