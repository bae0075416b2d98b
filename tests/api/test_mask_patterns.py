"""Masks of segments, windows and graphs against dense arrays, and the order of a graph's nodes."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import ndimage, sparse

from fa_cupy import BitMask, attention
from tests.api.test_masks import SIZES, check

SEEDS = st.integers(0, 2**32 - 1)


# Segments


@given(SEEDS, SIZES, SIZES, st.sampled_from([1, 2, 9, 300]), st.booleans())
def test_segments(seed, q_len, k_len, count, in_order):
    rng = np.random.default_rng(seed)
    kinds = [np.int8, np.int16, np.int32, np.int64, ">i4"]
    q, k = (
        rng.integers(-1, min(count, 127), n).astype(kinds[rng.integers(len(kinds))])
        for n in (q_len, k_len)
    )
    if in_order:
        q, k = np.sort(q), np.sort(k)
    check(BitMask.from_segments(q, k), (q[:, None] == k) & (q[:, None] >= 0))
    check(BitMask.from_segments(q), (q[:, None] == q) & (q[:, None] >= 0))


def test_segments_with_batch_axes():
    rng = np.random.default_rng(0)
    q, k = rng.integers(-1, 3, (2, 1, 140)), rng.integers(-1, 3, (3, 200))
    dense = (q[..., :, None] == k[..., None, :]) & (q[..., :, None] >= 0)
    check(BitMask.from_segments(q, k), dense)
    same = BitMask.from_segments(np.broadcast_to(k[0], (40, 200)))
    check(same, np.broadcast_to((k[0][:, None] == k[0]) & (k[0][:, None] >= 0), (40, 200, 200)))
    assert len(same.lists.words) <= 4  # made once


def test_segments_of_large_numbers():
    """Integers of all signs and sizes are compared as such, not as floats."""
    large = np.array([2**64 - 1, 2**63, 2**63 + 1, 5], np.uint64)
    check(BitMask.from_segments(large), np.eye(4, dtype=bool))
    signed = np.array([-1, 2**62, 2**62 + 1, 5])
    want = np.zeros((4, 4), bool)
    want[3, 3] = True
    check(BitMask.from_segments(large, signed), want)


def test_documents_are_attended_to_one_by_one():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 500, 8))
    ids = np.repeat([4, 0, 7, -1], [150, 200, 100, 50])
    out = attention(q, k, v, mask=BitMask.from_segments(ids))
    for part in (slice(0, 150), slice(150, 350), slice(350, 450)):
        np.testing.assert_allclose(out[:, part], attention(q[:, part], k[:, part], v[:, part]))
    assert not out[:, 450:].any()  # padding sees nothing


# Windows


def window(shape, reach):
    """Which elements see which, by their coordinates."""
    at = np.indices(shape).reshape(len(shape), -1)
    steps = at[:, None, :] - at[:, :, None]
    near = [(step >= -a) & (step <= b) for step, (a, b) in zip(steps, reach, strict=True)]
    return np.logical_and.reduce(near)


@given(SEEDS, st.integers(1, 4))
def test_windows(seed, axes):
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers(1, [600, 25, 9, 5][axes - 1], axes).tolist())
    shape = (*shape[:-1], shape[-1] + int(rng.choice([0, 0, 120]) / 4 ** (axes - 1)))
    reach = rng.integers(0, rng.choice([2, 5, 40]), (axes, 2)).tolist()
    check(BitMask.from_window(shape, reach), window(shape, reach))


@pytest.mark.parametrize("shape", [(3, 128), (40, 16), (2, 256), (5, 64, 2), (3, 8, 16), (2, 200)])
def test_windows_of_blocks_that_are_copied(shape):
    reach = [(1, 0), *[(2, 3)] * (len(shape) - 1)]
    check(BitMask.from_window(shape, reach), window(shape, reach))


@pytest.mark.parametrize(
    ("shape", "given", "reach"),
    [
        (300, 2, [(2, 2)]),
        ((300,), (3, None), [(3, 299)]),  # as the window of attention
        ([300], [(3, None)], [(3, 299)]),
        ([300], [7], [(7, 7)]),
        ((9, 40), 3, [(3, 3), (3, 3)]),
        ((9, 40), (0, 10), [(0, 0), (10, 10)]),
        ((9, 40), ((1, 0), None), [(1, 0), (39, 39)]),
        ((9, 40), None, [(8, 8), (39, 39)]),
        ((9, 40), np.int64(10**9), [(8, 8), (39, 39)]),
        ((0, 40), 1, [(0, 0), (0, 0)]),
        ((40, 0), 1, [(0, 0), (0, 0)]),
        ((), 1, None),
    ],
    ids=str,
)
def test_forms_of_windows(shape, given, reach):
    if reach is None:
        with pytest.raises(ValueError, match=r"from_window: shape is \(\), want at least 1 axis"):
            BitMask.from_window(shape, given)
        return
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    check(BitMask.from_window(shape, given), window(sizes, reach))


def test_windows_are_those_of_ndimage_and_attention():
    rng = np.random.default_rng(0)
    image = rng.random((20, 31))
    near = BitMask.from_window(image.shape, (2, 3)).to_dense()
    largest = np.where(near, image.reshape(-1), -np.inf).max(axis=-1)
    np.testing.assert_array_equal(
        largest.reshape(image.shape), ndimage.maximum_filter(image, size=(5, 7))
    )
    q, k, v = rng.standard_normal((3, 300, 8))
    np.testing.assert_allclose(
        attention(q, k, v, mask=BitMask.from_window(300, (9, 4))),
        attention(q, k, v, window=(9, 4)),
    )


def test_windows_take_memory_for_their_blocks():
    """65,536 pixels; an array of all pairs would take 4 GB."""
    tracemalloc.start()
    try:
        mask = BitMask.from_window((128, 512), 3)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    lines, pixels = (7 * n - 12 for n in (128, 512))
    assert mask.nnz == lines * pixels
    assert peak < 4 * mask.nbytes + 8e6


# Graphs


@given(SEEDS, SIZES, SIZES)
def test_edges(seed, q_len, k_len):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(0, 400)) if q_len and k_len else 0
    kind = rng.choice([np.int16, np.int32, np.int64, np.uint64])
    src, dst = (rng.integers(0, max(1, n), count).astype(kind) for n in (k_len, q_len))
    dense = np.zeros((q_len, k_len), bool)
    dense[dst.astype(int), src.astype(int)] = True
    mask = BitMask.from_edges(src, dst, (q_len, k_len))
    check(mask, dense)
    assert mask.equals(BitMask.from_csr(sparse.csr_array(dense)))


def test_queries_are_where_edges_end():
    """As messages do, values flow from `src` to `dst`."""
    src, dst = np.array([0, 2, 2]), np.array([1, 0, 0])  # an edge may be repeated
    values = np.array([[1.0], [10.0], [100.0]])
    out = attention(values, values, values, mask=BitMask.from_edges(src, dst, 3))
    assert out.tolist() == [[100.0], [1.0], [0.0]]


# Another order


@given(SEEDS, st.integers(0, 300))
@example(0, 1)
def test_reorder(seed, length):
    rng = np.random.default_rng(seed)
    edges = rng.integers(0, max(1, length), (2, 2 * length))
    mask = BitMask.from_edges(*edges, length)
    dense = mask.to_dense()
    again, order = mask.reorder()
    assert sorted(order.tolist()) == [*range(length)]
    assert order.dtype == np.int32
    check(again, dense[order][:, order])


@pytest.mark.parametrize("length", [4, 300])
def test_reorder_of_one_mask_of_a_batch(length):
    dense = np.random.default_rng(length).random((3, length, length)) < 0.1
    again, order = BitMask(dense)[2].reorder()
    check(again, dense[2][order][:, order])


def test_reorder_finds_the_line_that_nodes_stand_on():
    rng = np.random.default_rng(0)
    names = rng.permutation(2000)
    band = abs(np.subtract.outer(names, names)) <= 3
    mask = BitMask(band)
    again, order = mask.reorder()
    i, j = np.nonzero(again)
    assert abs(i - j).max() <= 6
    assert again.block_density < 0.3 * mask.block_density
    q, k, v = rng.standard_normal((3, 2, 2000, 4))
    out = np.empty_like(v)
    out[:, order] = attention(q[:, order], k[:, order], v[:, order], mask=again)
    np.testing.assert_allclose(out, attention(q, k, v, mask=mask))


# Errors

IDS = np.arange(6)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: BitMask.from_segments([1, 2]), TypeError, "from_segments: q_ids is a list, want"),
        (lambda: BitMask.from_segments(None), TypeError, "from_segments: q_ids is None, want an"),
        (lambda: BitMask.from_segments(IDS * 1.0), TypeError,
         "from_segments: q_ids has dtype float64, want integers"),
        (lambda: BitMask.from_segments(IDS, IDS > 0), TypeError,
         "from_segments: k_ids has dtype bool, want integers"),
        (lambda: BitMask.from_segments(np.array(3)), ValueError,
         "from_segments: q_ids has shape (), want at least 1 axis"),
        (lambda: BitMask.from_segments(np.ones((2, 6), int), np.ones((3, 6), int)), ValueError,
         "from_segments: q_ids has shape (2, 6), k_ids has (3, 6), want batch axes that broadcast"),
        (lambda: BitMask.from_window("ab", 1), TypeError, "from_window: shape is 'ab' (str), want"),
        (lambda: BitMask.from_window(-1, 1), ValueError, "from_window: shape is -1 (int), want"),
        (lambda: BitMask.from_window((2**20, 2**20), 1), ValueError,
         "from_window: shape has shape (1099511627776, 1099511627776), want axes shorter than"),
        (lambda: BitMask.from_window((4, 4), -1), ValueError, "window[0] is -1 (int), want None,"),
        (lambda: BitMask.from_window((4, 4), 1.0), TypeError, "window[0] is 1.0 (float), want"),
        (lambda: BitMask.from_window((4, 4), (1, 2, 3)), ValueError,
         "from_window: window is (1, 2, 3) (tuple), want one element for each of 2 axes"),
        (lambda: BitMask.from_window((4, 4), (1, (2, 3, 4))), ValueError,
         "from_window: window[1] is (2, 3, 4) (tuple), want None, an int >= 0 or a pair of these"),
        (lambda: BitMask.from_window((4, 4), "ab"), TypeError, "window[0] is 'ab' (str), want"),
        (lambda: BitMask.from_edges(IDS, IDS, 5), ValueError,
         "from_edges: src has nodes from 0 to 5, want from 0 to 4"),
        (lambda: BitMask.from_edges(IDS, IDS - 1, 6), ValueError,
         "from_edges: dst has nodes from -1 to 4, want from 0 to 5"),
        (lambda: BitMask.from_edges(IDS, IDS[:5], 6), ValueError,
         "from_edges: dst has shape (5,), want (6,)"),
        (lambda: BitMask.from_edges(IDS, None, 6), TypeError, "from_edges: dst is None, want an"),
        (lambda: BitMask.from_edges(IDS * 1.0, IDS, 6), TypeError,
         "from_edges: src has dtype float64, want integers"),
        (lambda: BitMask.from_edges(IDS, IDS, (6,)), ValueError,
         "from_edges: n is (6,) (tuple), want an int or a pair of ints"),
        (lambda: BitMask.from_edges(IDS, IDS, 6.0), TypeError, "from_edges: n is 6.0 (float), wan"),
        (lambda: BitMask(np.ones((3, 4), bool)).reorder(), ValueError,
         "reorder: the mask has shape (3, 4), want (L, L) (as of mask[0])"),
        (lambda: BitMask(np.ones((2, 4, 4), bool)).reorder(), ValueError,
         "reorder: the mask has shape (2, 4, 4), want (L, L)"),
    ],
)  # fmt: skip
def test_errors(call, error, text):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value).startswith("BitMask.")
    assert text in str(caught.value)
