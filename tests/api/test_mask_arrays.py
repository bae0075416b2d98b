"""What masks have in common with arrays of bool and with sparse matrices."""

import itertools
import operator
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

from fa_cupy import BitMask, attention, attention_backward, scaled_dot_product_attention
from tests.api.test_masks import check, dense_masks

# Into an array and back


@given(dense_masks())
def test_a_mask_becomes_an_array(dense):
    mask = BitMask(dense)
    check(mask, dense)
    assert np.asarray(mask).dtype == bool
    np.testing.assert_array_equal(np.asarray(mask), dense)
    np.testing.assert_array_equal(mask.toarray(), dense)
    np.testing.assert_array_equal(np.array(mask, dtype=np.float32), dense.astype(np.float32))
    assert mask.size == dense.size
    assert mask.nnz == np.count_nonzero(dense)
    assert type(mask.nnz) is int


def test_an_array_of_a_mask_is_a_copy():
    mask = BitMask(np.eye(3, dtype=bool))
    with pytest.raises(ValueError, match=r"^BitMask: the elements of a mask are in no array, want"):
        mask.__array__(copy=False)
    first, second = np.asarray(mask), np.array(mask, copy=True)
    first[...] = second[...] = True
    assert mask.nnz == 3


@pytest.mark.parametrize("form", ["csr_array", "coo_matrix", "dia_array"])
def test_a_mask_of_a_mask_or_a_sparse_matrix(form):
    band = np.tri(200) - np.tri(200, k=-50)
    mask = BitMask(getattr(sparse, form)(band))
    check(mask, band > 0)
    assert BitMask(mask) is mask


@pytest.mark.parametrize("given", [None, [[True]], np.eye(3), sparse.csr_array, "mask"])
def test_a_mask_of_something_else(given):
    with pytest.raises(TypeError, match=r"^BitMask\.from_(dense|csr): m"):
        BitMask(given)


# Sums


@given(dense_masks(), st.data())
def test_sums(dense, data):
    mask = BitMask(dense)
    every = range(-dense.ndim, dense.ndim)
    axis = data.draw(
        st.sampled_from([None, *every])
        | st.lists(st.sampled_from(range(dense.ndim)), unique=True).map(tuple)
    )
    found = mask.sum(axis=axis)
    np.testing.assert_array_equal(found, dense.sum(axis=axis))
    assert isinstance(found, int) or found.dtype == np.int64
    np.testing.assert_array_equal(mask.any(axis=axis), dense.any(axis=axis))
    np.testing.assert_array_equal(mask.all(axis=axis), dense.all(axis=axis))
    for name in ("sum", "any", "all"):
        kept = getattr(mask, name)(axis=axis, keepdims=True)
        want = getattr(dense, name)(axis=axis, keepdims=True)
        assert (kept.shape, kept.dtype) == (want.shape, want.dtype)
        np.testing.assert_array_equal(kept, want)


def test_sums_of_entries_that_share_a_matrix():
    dense = np.random.default_rng(0).random((3, 200, 150)) < 0.5
    whole = np.broadcast_to(dense[:, None], (3, 4, 200, 150))
    mask = BitMask(whole)
    for axis in (None, 0, 1, 2, 3, (0, 1), (0, 3), (1, 2), (2, 3), (1, 2, 3), ()):
        np.testing.assert_array_equal(mask.sum(axis), whole.sum(axis))
    assert mask.nnz == np.sum(mask) == whole.sum()
    for axis, dtype in itertools.product((None, -1), (np.float32, np.uint8)):  # which wraps around
        found, want = (np.sum(x, axis, dtype=dtype) for x in (mask, whole))
        assert found.dtype == want.dtype
        np.testing.assert_array_equal(found, want)
    with pytest.raises(TypeError, match="want a batch axis"):
        reversed(mask[0, 0])
    assert all(a.equals(b) for a, b in zip(reversed(mask), [*mask][::-1], strict=True))
    assert len(mask) == len([*mask]) == 3
    assert len(mask[0, 0]) == 200
    np.testing.assert_array_equal(np.any(mask, axis=-1), whole.any(axis=-1))
    np.testing.assert_array_equal(np.all(mask, axis=(0, -1)), whole.all(axis=(0, -1)))
    np.testing.assert_array_equal(np.sum(mask, -1, keepdims=True), whole.sum(-1, keepdims=True))
    with pytest.raises(TypeError, match=r"^BitMask\.sum: keepdims is 2 \(int\), want a bool$"):
        mask.sum(keepdims=2)
    for dtype in ("x", [1], 3):
        with pytest.raises(TypeError, match=r"^BitMask\.sum: dtype is .*, want a NumPy dtype$"):
            np.sum(mask, dtype=dtype)
    with pytest.raises(TypeError, match=r"^BitMask\.sum: out is array.*, want None$"):
        np.sum(mask, axis=-1, out=np.zeros((3, 4, 200), int))


@pytest.mark.parametrize(
    ("axis", "error"),
    [(2, ValueError), (-3, ValueError), (1.0, TypeError), ((0, 0), ValueError), ("x", TypeError),
     ((0, -2), ValueError), (True, ValueError)],
)  # fmt: skip
def test_errors_of_sums(axis, error):
    mask = BitMask(np.eye(3, dtype=bool))
    for method in ("sum", "any", "all"):
        with pytest.raises(error, match=rf"^BitMask\.{method}: axis is "):
            getattr(mask, method)(axis)


# Operators


@given(dense_masks(max_batch=1, lengths=(150, 270)), st.data())
def test_operators_with_arrays(dense, data):
    """With arrays and sparse matrices, on both sides and broadcast."""
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    shape = data.draw(
        st.sampled_from(
            [(), (270,), (1, 1), (150, 1), (1, 270), (150, 270), (2, 1, 150, 270), (2, 1, 1, 1)]
        )
    )
    array = rng.random(shape) < 0.5
    mask = BitMask(dense)
    check(mask & array, dense & array)
    check(array & mask, array & dense)
    check(mask | array, dense | array)
    check(array | mask, array | dense)
    check(mask ^ array, dense ^ array)
    check(array ^ mask, array ^ dense)
    check(mask == array, dense == array)
    check(array == mask, dense == array)
    check(mask != array, dense != array)
    check(array != mask, dense != array)
    if array.ndim == 2:
        array = np.broadcast_to(array, (150, 270))
        for matrix in (sparse.csr_array(array), sparse.coo_matrix(array.astype(float))):
            check(mask & matrix, dense & array)
            check(matrix | mask, dense | array)
            check(mask == matrix, dense == array)


def test_operators_with_bools():
    dense = np.tri(200, dtype=bool)
    mask = BitMask(dense)
    check(mask & True, dense)
    check(False | mask, dense)
    check(mask ^ np.True_, ~dense)
    check(mask == False, ~dense)  # noqa: E712
    check(mask == 0, ~dense)
    check(mask != np.int64(1), ~dense)
    with pytest.raises(TypeError, match=r"^BitMask: == 3 \(int\), want a bool or an array"):
        mask == 3  # noqa: B015
    assert (mask != "mask") is True


def test_bools_are_not_looked_at_pair_by_pair():
    mask = BitMask.from_window(10**6, 1)  # of 10**12 pairs
    assert (mask | False).equals(mask)
    assert (mask != False).equals(mask)  # noqa: E712
    assert (mask & False).nnz == 0


def test_what_a_mask_hides_is_not_looked_at():
    """A mask and an array are combined where the mask has blocks, in an array of any length."""
    length = 100_000
    mask = BitMask.from_window(length, 100)
    kept = np.arange(length) % 3 > 0
    both = mask & kept
    assert both.sum(axis=-1)[50_000] == kept[49_900:50_101].sum()
    assert not both.sum(axis=-2)[::3].any()


@pytest.mark.parametrize(
    ("other", "error", "text"),
    [
        (np.ones((3, 4), int), TypeError, "other has dtype int64, want bool (cast it: other != 0)"),
        (np.ones((4, 3), bool), ValueError,
         "other has shape (4, 3), want one that broadcasts to (..., 3, 4)"),
        (np.ones((2, 3, 4), bool), ValueError, "whose batch axes do not broadcast"),
        (np.ma.array(np.ones((3, 4), bool)), TypeError, "other is a masked array, want a plain"),
        (sparse.csr_array((4, 3)), ValueError, "want equal lengths"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("sign", ["__and__", "__or__", "__xor__", "__eq__", "__ne__"])
def test_errors_of_operators(sign, other, error, text):
    mask = BitMask(np.ones((5, 3, 4), bool))
    with pytest.raises(error, match=r"^BitMask: ") as caught:
        getattr(mask, sign)(other)
    assert text in str(caught.value)


def test_a_mask_is_not_a_truth_value():
    """So that ``assert a == b`` cannot pass by mistake."""
    mask = BitMask(np.eye(3, dtype=bool))
    with pytest.raises(ValueError, match=r"^BitMask: the truth value .* mask\.equals\(other\)"):
        bool(mask == mask)


# Slices


@given(st.data())
def test_slices_of_queries_and_keys(data):
    dense = data.draw(dense_masks(max_batch=1))
    ends = [st.none() | st.integers(-n - 3, n + 3) for n in dense.shape[-2:]]
    rows, cols = (slice(data.draw(end), data.draw(end)) for end in ends)
    mask = BitMask(dense)
    check(mask[..., rows, cols], dense[..., rows, cols])
    check(mask[..., cols], dense[..., cols])
    check(mask[..., rows, :], dense[..., rows, :])


@pytest.mark.parametrize("rows", [slice(0, 256), slice(128, 300), slice(130, 290), slice(1, None)])
@pytest.mark.parametrize("cols", [slice(None, 128), slice(256, None), slice(127, 129)])
def test_slices_of_full_and_partial_blocks(rows, cols):
    for dense in (
        np.ones((400, 400), bool),
        np.tri(400, dtype=bool),
        ~np.tri(400, k=-130, dtype=bool),
    ):
        check(BitMask(dense)[rows, cols], dense[rows, cols])


@pytest.mark.parametrize(
    "index",
    [(0, ..., slice(3, 140)), (..., 1, slice(None), slice(5)), (slice(1, None), 0, slice(9, 99)),
     (None, ..., slice(20)), (..., None, slice(20), slice(30)), (1, 1, slice(2, 3), slice(4, 5)),
     ([2, 0], ..., slice(7), slice(None)), (0, 1, slice(7), slice(8), ...), (...,),
     (np.array([True, False, True]), 1, slice(100)), (0, 0, slice(3), ...), (..., slice(0, 0)),
     (np.eye(3, 2, dtype=bool), slice(10), slice(20)), (slice(None),) * 4, ([2, 0], [1, 1])],
    ids=str,
)  # fmt: skip
def test_slices_with_indices_of_the_batch(index):
    dense = np.random.default_rng(0).random((3, 2, 150, 140)) < 0.3
    part = BitMask(dense)[index]
    check(part, dense[index])
    check(~part, ~dense[index])
    check(part.T, dense[index].swapaxes(-1, -2))


@pytest.mark.parametrize(
    ("index", "error", "text"),
    [
        ((0, 0, 0), IndexError, "queries have index 0 (int), want a slice"),
        ((..., 0), IndexError, "keys have index 0 (int), want a slice"),
        ((..., [1, 2], slice(None)), IndexError, "queries have index [1, 2] (list), want a slice"),
        ((..., None), IndexError, "keys have index None (NoneType), want a slice"),
        ((..., slice(0, 9, 2)), IndexError, "a slice of queries or keys has step 2, want 1"),
        ((..., slice(0, 1.5)), TypeError, "slice indices must be integers"),
        ((..., slice(3, 0, 0)), ValueError, "slice step cannot be zero"),
        ((..., 0, ...), IndexError, "has 2 Ellipses, want one"),
        ((slice(None),) * 5, IndexError, "the index of a mask of shape (3, 2, 5, 7) has 5 indices"),
        (np.ones((3, 2, 5), bool), IndexError, "queries have index array("),
        ((None,) * 29, ValueError, "of shape (3, 2, 5, 7) has 31 batch axes, want at most 30"),
    ],
)
def test_errors_of_slices(index, error, text):
    mask = BitMask(np.ones((3, 2, 5, 7), bool))
    with pytest.raises(error, match=r"^BitMask: ") as caught:
        mask[index]
    assert text in str(caught.value)


# Sparse matrices as masks of calls


def test_attention_takes_a_sparse_matrix():
    rng = np.random.default_rng(0)
    dense = rng.random((200, 150)) < 0.1
    q, (k, v) = rng.standard_normal((4, 200, 8)), rng.standard_normal((2, 4, 150, 8))
    wanted = attention(q, k, v, mask=dense, return_lse=True)
    dout = rng.standard_normal(q.shape)
    gradients = attention_backward(dout, q, k, v, *wanted, mask=dense)
    for matrix in (sparse.csr_array(dense), sparse.coo_matrix(dense * 2.5)):
        found = attention(q, k, v, mask=matrix, return_lse=True)
        for mine, theirs in zip(found, wanted, strict=True):
            np.testing.assert_allclose(mine, theirs)
        found = attention_backward(dout, q, k, v, *wanted, mask=matrix)
        for mine, theirs in zip(found, gradients, strict=True):
            np.testing.assert_allclose(mine, theirs)
    found = scaled_dot_product_attention(q, k, v, attn_mask=sparse.csr_array(dense))
    np.testing.assert_allclose(found, wanted[0])
    with pytest.raises(ValueError, match=r"^attention: mask has q_len 150, q has 200$"):
        attention(q, k, v, mask=sparse.csr_array(dense.T))
    words = r"^scaled_dot_product_attention: attn_mask is a sparse matrix of float64, want bool"
    with pytest.raises(TypeError, match=words):
        scaled_dot_product_attention(q, k, v, attn_mask=sparse.csr_array(dense * 1.0))


@pytest.mark.parametrize("lengths", [(4, 4), (16, 16), (128, 3), (3, 128), (22, 23), (23, 23)])
def test_many_small_masks(lengths):
    """Those of fewer than 512 pairs are made and combined all at once; (23, 23) has more."""
    rng = np.random.default_rng(0)
    density = rng.choice([0, 0.3, 0.7, 1], (2, 5, 7, 1, 1))
    a, b = rng.random((2, 5, 7, *lengths)) < density
    ours, theirs = BitMask(a), BitMask(b)
    np.testing.assert_array_equal(ours.to_dense(), a)
    assert ours.nnz == a.sum()
    states = a.any(axis=(2, 3)).astype(int) + a.all(axis=(2, 3))
    np.testing.assert_array_equal(ours.block_states()[..., 0, 0], states)
    for sign in (operator.and_, operator.or_, operator.xor, operator.eq, operator.ne):
        np.testing.assert_array_equal(sign(ours, theirs), sign(a, b))
        np.testing.assert_array_equal(sign(ours, b[0, 0]), sign(a, b[0, 0]))
        np.testing.assert_array_equal(sign(ours[2], theirs[::-1, 3:4]), sign(a[2], b[::-1, 3:4]))
    np.testing.assert_array_equal(~ours, ~a)
    each = BitMask.from_csr(sparse.csr_array(a[1, 2]))
    assert each.equals(ours[1, 2])
    rows = rng.standard_normal((5, 7, lengths[0], 8))
    keys, values = rng.standard_normal((2, 5, 7, lengths[1], 8))
    got = attention(rows, keys, values, mask=ours)
    np.testing.assert_allclose(got, attention(rows, keys, values, mask=a), rtol=1e-12)
    out, lse = attention(rows, keys, values, mask=a, return_lse=True)
    found = [
        attention_backward(rows, rows, keys, values, out, lse, mask=mask) for mask in (ours, a)
    ]
    for x, y in zip(*found, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lengths", [(300, 200), (128, 256), (1, 300), (300, 1), (5, 5)])
def test_arrays_that_repeat_a_row_or_a_column(lengths):
    """Blocks found from one row or column are those of the whole array."""
    rng = np.random.default_rng(0)
    n, m = lengths
    mask = BitMask(rng.random(lengths) < 0.5)
    for part in (1, 100, 300):
        row, column = np.zeros((2, 300), bool)
        row[:part], column[:part] = True, rng.random(part) < 0.5
        for x in (row[:m], row[:n, None], column[:m], column[:n, None]):
            whole = np.broadcast_to(x, lengths)
            assert BitMask(whole).equals(BitMask(whole.copy()))
            for sign in (operator.and_, operator.or_, operator.xor):
                np.testing.assert_array_equal(sign(mask, x), sign(mask.to_dense(), x))


def test_small_masks_that_repeat_one_are_counted_once():
    """An array of all bits of this stack has 48 MB."""
    mask = BitMask(np.broadcast_to(np.eye(22, dtype=bool), (100_000, 22, 22)))
    tracemalloc.start()
    try:
        assert mask.nnz == 2_200_000
        np.testing.assert_array_equal(mask.sum(axis=(-2, -1)), np.full(100_000, 22))
        assert mask.all(axis=(0, 1)).sum() == 0
        assert tracemalloc.get_traced_memory()[1] < 36e6
    finally:
        tracemalloc.stop()
