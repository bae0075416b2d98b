"""Bit masks: every way to make one against a dense array, their algebra, files, pictures."""

import inspect
import io
import math
import pickle
import re
import tracemalloc
import warnings
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from fa_cupy import (
    BitMask,
    attention,
    kernel_regression,
    layouts,
    plot,
    scaled_dot_product_attention,
)
from fa_cupy.masks import entries

B = layouts.BLOCK
SIZES = st.sampled_from([0, 1, 2, 63, 127, 128, 129, 200, 256, 300]) | st.integers(0, 400)


@st.composite
def dense_masks(draw, max_batch=2, lengths=None):
    """Arrays of bool, of blocks that are empty, full, nearly so, or of any pattern."""
    q_len, k_len = lengths or (draw(SIZES), draw(SIZES))
    batch = tuple(draw(st.lists(st.integers(0, 3), max_size=max_batch)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tiles = (-(-q_len // B), -(-k_len // B))
    shares = draw(st.lists(st.sampled_from([0.0, 0.0, 1.0, 1.0, 0.5, 0.001, 0.999]), min_size=1))
    share = rng.choice(shares, size=(*batch, *tiles)).repeat(B, -2).repeat(B, -1)
    return rng.random((*batch, q_len, k_len)) < share[..., :q_len, :k_len]


def naive_states(dense):
    """State of each block of one matrix, by its part inside the matrix."""
    q_len, k_len = dense.shape
    return np.array(
        [
            [
                0 if not part.any() else 2 if part.all() else 1
                for j in range(0, k_len, B)
                for part in [dense[i : i + B, j : j + B]]
            ]
            for i in range(0, q_len, B)
        ],
        np.int8,
    ).reshape(-(-q_len // B), -(-k_len // B))


def check_lists(lists, mask, states, dense):
    """Look every block up in the lists, as a kernel does."""
    q_tiles, k_tiles = states.shape[-2:]
    wide = np.zeros((q_tiles * B, k_tiles * B), bool)
    for index in np.ndindex(mask.entries.shape):
        wide[: dense.shape[-2], : dense.shape[-1]] = dense[index]
        for i in range(q_tiles):
            t = mask.entries[index] * q_tiles + i
            partial = slice(*lists.partial_begin[t : t + 2])
            full = slice(*lists.full_begin[t : t + 2])
            assert lists.partial[partial].tolist() == np.flatnonzero(states[index][i] == 1).tolist()
            assert lists.full[full].tolist() == np.flatnonzero(states[index][i] == 2).tolist()
            for j, words in zip(lists.partial[partial], lists.words[partial], strict=True):
                part = wide[i * B : (i + 1) * B, j * B : (j + 1) * B]
                np.testing.assert_array_equal(words, layouts.pack(part))  # 0 outside the matrix


def check_forms(mask, dense):
    """Words where a block has many bits, and the keys of each row where it has few."""
    states = mask.block_states()
    for index in np.ndindex(mask.entries.shape):
        kept = mask._store.host().blocks(mask._grid, mask.entries[index])
        rows, keys = np.nonzero(dense[index])
        blocks, counts = np.unique(rows // B * mask._grid.k_tiles + keys // B, return_counts=True)
        partial = states[index].reshape(-1)[blocks] == BitMask.PARTIAL
        assert kept.partial.tolist() == blocks[partial & (counts >= entries.LEAST_BITS)].tolist()
        sparse = blocks[partial & (counts < entries.LEAST_BITS)]
        few = np.isin(rows // B * mask._grid.k_tiles + keys // B, sparse)
        assert kept.entries.tolist() == ((rows[few] << 31) + keys[few]).tolist()


def check(mask, dense):
    """Compare a mask with the array of bool that it stands for, in every way it can be asked."""
    assert mask.shape == dense.shape
    assert mask.ndim == dense.ndim
    assert mask.dtype == bool
    found = mask.to_dense()
    assert found.dtype == bool
    np.testing.assert_array_equal(found, dense)
    batch = dense.shape[:-2]
    tiles = tuple(-(-n // B) for n in dense.shape[-2:])
    states = np.zeros((*batch, *tiles), np.int8)
    for index in np.ndindex(batch):
        states[index] = naive_states(dense[index])
    np.testing.assert_array_equal(mask.block_states(), states)
    check_lists(mask._store.with_words(), mask, states, dense)
    check_forms(mask, dense)
    assert math.isclose(mask.density, dense.mean() if dense.size else 0.0)
    assert math.isclose(mask.block_density, (states > 0).mean() if states.size else 0.0)
    assert not any(array.flags.writeable for array in (*mask.lists, mask.entries))
    assert f"{(states == 2).sum()} full and {(states == 1).sum()} partial" in repr(mask)
    assert "reorder" not in repr(mask)


# Constructors


@given(dense_masks())
def test_from_dense(dense):
    check(BitMask.from_dense(dense), dense)


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 1e-4, 0.01, 0.5, 0.99, 1 - 1e-4, 1.0]))
def test_any_pattern_of_a_block(seed, density):
    bits = np.random.default_rng(seed).random((B, B)) < density
    mask = BitMask.from_dense(bits)
    check(mask, bits)
    check(~mask, ~bits)
    check(mask.T, bits.T)


@pytest.mark.parametrize("lengths", [(1, 1), (128, 128), (129, 127), (127, 129), (300, 130)])
def test_every_single_bit_at_the_ends_counts(lengths):
    """Full is what is full inside the matrix: one bit less, in any corner, makes it partial."""
    whole = np.ones(lengths, bool)
    assert BitMask.from_dense(whole).lists.words.size == 0
    for row in {0, lengths[0] // 2, lengths[0] - 1}:
        for col in {0, lengths[1] // 2, lengths[1] - 1}:
            for value in (False, True):
                dense = np.full(lengths, not value)
                dense[row, col] = value
                check(BitMask.from_dense(dense), dense)


@given(dense_masks(max_batch=0), st.sampled_from(["csr", "csc", "coo", "lil"]), st.booleans())
def test_from_csr(dense, fmt, old):
    kind = sparse.csr_matrix if old else sparse.csr_array
    matrix = kind(dense).asformat(fmt)
    check(BitMask.from_csr(matrix), dense)
    if dense.size:
        check(BitMask.from_csr([matrix, ~dense @ sparse.identity(dense.shape[1]) > 0, matrix][::2]),
              np.stack([dense, dense]))  # fmt: skip


def test_from_csr_counts_sums_and_no_stored_zeros():
    row, col = np.array([0, 0, 0, 1, 1, 2]), np.array([200, 3, 3, 7, 7, 1])
    data = np.array([1.0, 2.0, -2.0, 0.5, 0.5, 0.0])
    matrix = sparse.csr_array((data, col, [0, 3, 5, 6]), shape=(3, 300))
    kept = matrix.copy()
    mask = BitMask.from_csr(matrix)
    assert sorted(zip(*(i.tolist() for i in np.nonzero(mask.to_dense())), strict=True)) == [
        (0, 200), (1, 7)
    ]  # fmt: skip
    assert (matrix.indices == kept.indices).all()  # somebody else's matrix stays as it is
    again = BitMask.from_csr(sparse.coo_array((data, (row, col)), shape=(3, 300)))
    assert mask.equals(again)


def test_from_csr_leaves_the_matrix_as_it_is():
    """SciPy's checks cut arrays that are too long, and cast them."""
    data, indices = np.ones(8, ">f8"), np.array([2, 0, 1, 0, 0, 0, 0, 0])
    matrix = sparse.csr_array((3, 3))
    matrix.data, matrix.indices, matrix.indptr = data, indices, np.array([0, 2, 3, 3], np.int32)
    before = matrix.indptr
    mask = BitMask.from_csr(matrix)
    check(mask, np.array([[1, 0, 1], [0, 1, 0], [0, 0, 0]], bool))
    assert matrix.data is data
    assert matrix.indices is indices
    assert matrix.indptr is before


@given(dense_masks())
def test_to_csr_comes_back(dense):
    mask = BitMask.from_dense(dense)
    for index in np.ndindex(mask.entries.shape):
        matrix = mask[index].to_csr()
        assert isinstance(matrix, sparse.csr_array)
        assert matrix.has_canonical_format
        np.testing.assert_array_equal(matrix.toarray(), dense[index])
        assert BitMask.from_csr(matrix).equals(mask[index])


@given(st.data())
def test_from_indices(data):
    q_len, k_len, count = data.draw(SIZES), data.draw(SIZES), data.draw(st.integers(0, 9))
    batch = tuple(data.draw(st.lists(st.integers(0, 3), max_size=2)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    dtype = data.draw(st.sampled_from([np.int32, np.int64, np.int16, np.uint16]))
    low = 0 if dtype == np.uint16 else data.draw(st.sampled_from([-1, -50]))
    count = count if k_len or low < 0 else 0
    indices = rng.integers(low, max(k_len, 0), (*batch, q_len, count)).astype(dtype)
    dense = np.zeros((*batch, q_len, k_len), bool)
    for index in np.ndindex(indices.shape):
        if indices[index] >= 0:
            dense[(*index[:-1], indices[index])] = True
    check(BitMask.from_indices(indices, k_len), dense)


@given(dense_masks())
def test_from_blocks_with_words(dense):
    mask = BitMask.from_dense(dense)
    states = mask.block_states()
    words = mask._store.with_words().words.copy()
    again = BitMask.from_blocks(states, *dense.shape[-2:], words)
    check(again, dense)
    assert again.equals(mask)
    words[...] = 0  # the mask has its own
    check(again, dense)


def test_bits_outside_the_matrix_do_not_count():
    ones = np.full((4, 8, 32, 2), 0xFFFFFFFF, np.uint32)
    mask = BitMask.from_blocks(np.ones((2, 2), int), 200, 130, ones)
    check(mask, np.ones((200, 130), bool))
    assert mask.lists.words.size == 0
    outside = layouts.pack(np.arange(B)[:, None] + np.zeros(B, int) >= 72)[None]
    check(
        BitMask.from_blocks(np.array([[0], [1]]), 200, 130 - 2, outside), np.zeros((200, 128), bool)
    )


@given(st.data())
def test_from_blocks_of_bool(data):
    q_len, k_len = data.draw(SIZES), data.draw(SIZES)
    batch = tuple(data.draw(st.lists(st.integers(0, 3), max_size=2)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    grid = rng.random((*batch, -(-q_len // B), -(-k_len // B))) < 0.5
    dense = grid.repeat(B, -2).repeat(B, -1)[..., :q_len, :k_len]
    check(BitMask.from_blocks(grid, q_len, k_len), dense)


@given(dense_masks(), st.booleans())
def test_from_function(dense, with_states):
    asked = []

    def function(*index):
        *batch, q, k = index
        assert all(type(i) is int for i in batch)
        assert q.shape[1] == k.shape[0] == 1
        asked.append((*batch, q.min() // B, {*(k[0] // B)}))
        return dense[(*batch, q, k)]

    def block_states(*index):
        *batch, q_begin, q_end, k_begin, k_end = index
        states = naive_states(dense[tuple(batch)])
        assert q_end <= dense.shape[-2]
        assert (k_end <= dense.shape[-1]).all()
        assert (k_begin < k_end).all()
        return states[q_begin // B]

    mask = BitMask.from_function(function, dense.shape, block_states if with_states else None)
    check(mask, dense)
    if with_states:
        for *index, tiles in asked:
            found = mask.block_states()[tuple(index)]
            assert all(found[j] == BitMask.PARTIAL for j in tiles)


def test_a_function_may_broadcast():
    mask = BitMask.from_function(lambda b, q, k: k < 150 + b, (2, 300, 300))
    check(mask, np.broadcast_to(np.arange(300) < [[[150]], [[151]]], (2, 300, 300)))
    check(BitMask.from_function(lambda q, k: np.True_, (300, 10)), np.ones((300, 10), bool))


def test_broadcast_axes_are_packed_once():
    one = np.random.default_rng(0).random((3, 1, 200, 200)) < 0.5
    whole = np.broadcast_to(one, (3, 50, 200, 200))
    mask = BitMask.from_dense(whole)
    check(mask, whole)
    assert mask.nbytes < 1.1 * BitMask.from_dense(one).nbytes
    indices = np.broadcast_to(np.arange(200)[:, None], (40, 200, 1))
    mask = BitMask.from_indices(indices, 200)
    check(mask, np.broadcast_to(np.eye(200, dtype=bool), (40, 200, 200)))
    assert len(mask.lists.entry_keys) == 200


LAST = 2**31 - 2  # the last key that a mask can have


@pytest.mark.parametrize("shape", [(300, 0), (0, 300), (0, 0)])
@pytest.mark.parametrize("strides", [(0, 1), (1, 0), (0, 0), (300, 1)])
def test_empty_matrices_of_any_strides(shape, strides):
    """An empty array may have any strides; those of 0 are not rows that repeat."""
    dense = np.lib.stride_tricks.as_strided(np.zeros(1, np.bool_), shape, strides)
    assert dense.strides == strides
    mask = BitMask.from_dense(dense)
    assert (mask.shape, mask.nnz) == (shape, 0)
    assert mask.to_dense().shape == shape


def test_the_longest_masks():
    mask = BitMask.from_indices(np.array([[3, LAST]]), LAST + 1)
    assert mask.to_csr().indices.tolist() == [3, LAST]
    assert BitMask.from_csr(mask.to_csr()).equals(mask)
    assert mask.density == 2 / (LAST + 1)


# What masks do with each other


@given(st.data())
def test_algebra(data):
    lengths = data.draw(SIZES), data.draw(SIZES)
    a, b = (data.draw(dense_masks(max_batch=0, lengths=lengths)) for _ in range(2))
    rng = np.random.default_rng(0)
    if data.draw(st.booleans()):  # axes that broadcast
        a = a & (rng.random((3, 1, *lengths)) < data.draw(st.sampled_from([0.5, 1.0])))
        b = b | (rng.random((2, *lengths)) < data.draw(st.sampled_from([0.5, 0.0])))
    x, y = BitMask.from_dense(a), BitMask.from_dense(b)
    check(x & y, a & b)
    check(x | y, a | b)
    check(~x, ~a)
    check(x.T, a.swapaxes(-1, -2))
    assert x.T.T is x
    assert x.T is x.T
    assert (~~x).equals(x)
    check(x ^ y, a ^ b)
    check(x == y, a == b)
    check(x != y, a != b)
    assert (x & y).equals(y & x)
    assert (x | y).equals(y | x)
    assert (~(x & y)).equals(~x | ~y)
    assert (x & y).T.equals(x.T & y.T)
    assert (x & x).equals(x)
    assert (x | x).equals(x)
    assert not (x & ~x).density
    assert (x | ~x).density == (1.0 if a.size else 0.0)
    assert x.equals(y) == np.array_equal(a, b)


def test_equality_is_of_meaning():
    dense = np.tri(200, dtype=bool)
    mask = BitMask.from_dense(np.stack([dense, ~dense, dense]))
    assert mask[[0, 2]].equals(BitMask.from_dense(np.broadcast_to(dense, (2, 200, 200))))
    assert not mask[::-1].equals(mask[[1, 0, 1]])
    assert not mask[0].equals(mask[:1])  # of another shape
    for other in (dense, dense.tolist(), "mask", None):
        with pytest.raises(TypeError, match=r"^BitMask\.equals: other is .*, want a BitMask$"):
            mask.equals(other)
    with pytest.raises(TypeError):
        hash(mask)


@pytest.mark.parametrize(
    "index",
    [0, -1, slice(1, 3), (2, 1), (slice(None), 0), (0, slice(None, None, -1)), (None, 1), [2, 0],
     (slice(None), None, 1), np.array([True, False, True]), (), (slice(0, 0),)],
    ids=str,
)  # fmt: skip
def test_slices_pick_batch_entries(index):
    dense = np.random.default_rng(0).random((3, 2, 150, 140)) < 0.3
    mask = BitMask.from_dense(dense)
    part = mask[index]
    check(part, dense[index])
    assert part.lists is mask.lists  # nothing is copied
    check(~part, ~dense[index])
    check(part.T, dense[index].swapaxes(-1, -2))


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (3, "BitMask: for batch shape (3, 2), index 3 is out of bounds"),
        (slice(0, 1.5), "BitMask: for batch shape (3, 2), slice indices must be integers"),
        ([[0], [0, 1]], "BitMask: for batch shape (3, 2), setting an array element"),
    ],
)
def test_errors_of_indices_of_the_batch(index, text):
    mask = BitMask.from_dense(np.ones((3, 2, 5, 7), bool))
    with pytest.raises((IndexError, TypeError, ValueError)) as caught:
        mask[index]
    assert text in str(caught.value)


class OfTwoError(TypeError):
    """As of what JAX traces."""

    def __init__(self, first, second):
        super().__init__(first)


def test_errors_of_other_libraries_pass():
    class Traced:
        def __array__(self, dtype=None, copy=None):
            raise OfTwoError("traced", 1)

    with pytest.raises(OfTwoError, match="traced"):
        BitMask.from_dense(np.ones((3, 5, 7), bool))[Traced()]


def test_masks_do_not_change():
    mask = BitMask.from_dense(np.tri(200, dtype=bool))
    with pytest.raises(AttributeError, match="entries cannot be set"):
        mask.entries = 0
    with pytest.raises(ValueError, match="read-only"):
        mask.lists.words[0] = 0
    with pytest.raises(AttributeError, match="entries cannot be deleted"):
        del mask.entries


def test_iteration_is_over_the_first_batch_axis():
    dense = np.random.default_rng(0).random((3, 2, 150, 140)) < 0.3
    parts = list(BitMask.from_dense(dense))
    assert [part.shape for part in parts] == [(2, 150, 140)] * 3
    check(parts[2], dense[2])
    with pytest.raises(
        TypeError, match=r"^BitMask: iteration over a mask of shape \(150, 140\), w"
    ):
        iter(parts[0][0])


# Files


@given(dense_masks())
@settings(max_examples=30)
def test_files(tmp_path_factory, dense):
    mask = BitMask.from_dense(dense)
    path = tmp_path_factory.getbasetemp() / "a mask"  # of any name
    mask.save(path)
    check(BitMask.load(path), dense)
    mask.save(file := io.BytesIO())
    file.seek(0)
    assert BitMask.load(file).equals(mask)
    check(pickle.loads(pickle.dumps(mask)), dense)


def test_a_slice_is_saved_alone():
    mask = BitMask.from_dense(np.random.default_rng(0).random((20, 128, 128)) < 0.5)
    files = [io.BytesIO() for _ in range(2)]
    mask.save(files[0])
    mask[[3, 3]].save(files[1])
    assert len(files[1].getvalue()) < 0.2 * len(files[0].getvalue())
    files[1].seek(0)
    assert BitMask.load(files[1]).equals(mask[[3, 3]])
    again = pickle.loads(pickle.dumps(mask[3]))
    assert again.equals(mask[3])
    assert again.nbytes < 0.1 * mask.nbytes


@pytest.mark.parametrize(
    "change",
    [
        {"format": 1},
        {"format": 3},
        {"format": None},
        {"lengths": np.array([130, 300])},  # three rows of blocks, two for each matrix
        {"lengths": np.array([300, 130])},
        {"lengths": np.array([3000, 300])},
        {"lengths": np.array([-1, 300])},
        {"words": np.zeros((1, 8, 32, 2), np.uint32)},
        {"words": np.zeros((3, 512), np.uint32)},
        {"partial": np.array([0, 1, 3], np.int32)},
        {"partial": np.array([0, -1, 2], np.int32)},
        {"partial": np.array([0, 1, 2], np.int64)},
        {"partial_begin": np.array([0, 2, 1, 3])},
        {"partial_begin": np.array([0, 1, 2, 4])},
        {"partial_begin": np.array([1, 1, 2, 3])},
        {"full": np.array([0, 1, 1], np.int32)},
        {"full": np.array([0, 0, 2], np.int32)},  # full and partial
        {"full_begin": np.zeros((4, 1), np.int64)},
        {"full_begin": np.array([0, 0, 1, 3, 3, 3, 3])},
        {"entries": np.array(1)},
        {"entries": np.array(-1)},
        {"entries": np.array(0.0)},
        {"entries": np.array(2**63, np.uint64)},
        {"entries": None},
        {"words": np.full((3, 8, 32, 2), 0xFFFFFFFF, np.uint32)},
        {"words": np.zeros((3, 8, 32, 2), np.uint32)},
        {"lengths": np.array([300, 299])},  # which leaves bits outside
        {"lengths": np.array([300.7, 300.2])},
        {"lengths": np.array([np.inf, 300])},
        {"lengths": np.array([300, 2**31])},
        {"format": 1.5},
        {"format": np.inf},
    ],
    ids=str,
)
def test_damaged_files_are_refused(tmp_path, change):
    path = tmp_path / "mask.npz"
    BitMask.from_dense(np.tri(300, dtype=bool)).save(path)
    arrays = dict(np.load(path)) | change
    np.savez(path, **{name: x for name, x in arrays.items() if x is not None})
    with pytest.raises(
        ValueError, match=r"^BitMask\.load: .*mask\.npz is not the file of a mask \("
    ):
        BitMask.load(path)


def test_integers_of_any_kind_are_read(tmp_path):
    mask = BitMask.from_dense(np.tri(300, dtype=bool))
    mask.save(tmp_path / "mask")
    arrays = dict(np.load(tmp_path / "mask")) | {"entries": np.array(0, np.uint32)}
    np.savez(tmp_path / "mask.npz", **arrays)
    assert BitMask.load(tmp_path / "mask.npz").equals(mask)


@pytest.mark.parametrize("error", [MemoryError(), OSError(5, "I/O error")])
def test_what_is_not_the_fault_of_a_file(error):
    file = io.BytesIO()
    file.read = mock.Mock(side_effect=error)
    with pytest.raises(type(error)):
        BitMask.load(file)


@settings(max_examples=300)
@given(st.data())
def test_a_bit_that_falls_is_seen_or_does_not_matter(data):
    mask = BitMask.from_dense(np.tri(100, 90, dtype=bool))
    mask.save(file := io.BytesIO())
    content = bytearray(file.getvalue())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        with warnings.catch_warnings(action="ignore"):
            found = BitMask.load(io.BytesIO(content))
    except ValueError as error:
        text = r"BitMask\.load: <_io\.BytesIO .*> is not the file of a mask \("
        assert re.match(text, str(error))  # noqa: PT017
    else:
        assert found.equals(mask)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and no more", b"something else"])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "mask.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is not the file of a mask"):
        BitMask.load(path)
    np.save(path.with_suffix(".npy"), np.zeros(3))
    with pytest.raises(ValueError, match="is not the file of a mask"):
        BitMask.load(path.with_suffix(".npy"))
    with pytest.raises(FileNotFoundError):
        BitMask.load(tmp_path / "none")


# Errors

GRID = np.ones((3, 3), int)


def by_function(function, shape=(300, 300), states=None):
    return lambda: BitMask.from_function(function, shape, states)


class SameAgain:
    shape = (3, 3)

    def tocsr(self):
        return self


def damaged_matrix(form, part, value):
    """The identity of 3 rows as a sparse matrix, an array of which is another one."""
    matrix = sparse.csr_array(np.eye(3)).asformat(form)
    setattr(matrix, part, value)
    return matrix


def damaged(*change):
    return lambda: BitMask.from_csr(damaged_matrix(*change))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: BitMask.from_dense(GRID), TypeError,
         "from_dense: mask has dtype int64, want bool (cast it: mask != 0)"),
        (lambda: BitMask.from_dense(np.ones(3, bool)), ValueError,
         "from_dense: mask has shape (3,), want at least 2 axes"),
        (lambda: BitMask.from_dense([[True]]), TypeError, "from_dense: mask is a list, want an ar"),
        (lambda: BitMask.from_dense(np.ma.array(GRID > 0)), TypeError, "mask is a masked array"),
        (lambda: BitMask.from_csr(GRID), TypeError, "from_csr: matrix is array("),
        (lambda: BitMask.from_dense(None), TypeError, "from_dense: mask is None, want an array"),
        (lambda: BitMask.from_indices(None, 3), TypeError, "from_indices: indices is None, want"),
        (lambda: BitMask.from_indices(GRID, True), TypeError, "k_len is True (bool), want an int"),
        (lambda: BitMask.from_blocks(None, 3, 3), TypeError, "from_blocks: states is None, want"),
        (damaged("csr", "indices", np.array([0, 99, 2])), ValueError,
         "from_csr: matrix is not a valid sparse matrix: indices must be < 3"),
        (damaged("csc", "indices", np.array([0, 3, 2])), ValueError, "indices must be < 3"),
        (damaged("csc", "indices", np.array([0, -1, 2])), ValueError, "indices must be >= 0"),
        (damaged("bsr", "indices", np.array([0, 1, 3])), ValueError, "must be < 3"),
        (damaged("csc", "indptr", np.array([0, 1, 2, 9])), ValueError, "not a valid sparse matrix"),
        (damaged("csc", "indptr", np.array([0, 2, 1, 3])), ValueError, "not a valid sparse matrix"),
        (damaged("dia", "offsets", np.array([2**32])), ValueError, "offsets exceed int32"),
        (lambda: BitMask.from_csr(sparse.coo_array(([1.0], ([0], [0])), (2**40, 4))), ValueError,
         "from_csr: matrix has shape (1099511627776, 4), want axes shorter than 2**31"),
        (damaged("csc", "data", np.array([1, "x", 2.0], object)), ValueError, "not a valid sparse"),
        (damaged("dia", "offsets", np.array([0, 1])), ValueError, "not a valid sparse matrix"),
        (damaged("coo", "row", np.array([0, 3, 2])), ValueError, "not a valid sparse matrix"),
        (damaged("coo", "row", np.array([0, -1, 2])), ValueError, "not a valid sparse matrix"),
        (damaged("coo", "col", np.array([0, 10**6, 2])), ValueError, "not a valid sparse matrix"),
        (damaged("csr", "data", None), TypeError, "from_csr: matrix.data is None, want an array"),
        (damaged("csr", "indices", np.array([0.5, 1.0, 2.0])), TypeError,
         "from_csr: matrix.indices has dtype float64, want integers"),
        (lambda: BitMask.from_csr(sparse.csr_array), TypeError, "from_csr: matrix is <class"),
        (lambda: BitMask.from_csr(sparse.csr_array((1, 2**31))), ValueError,
         "from_csr: matrix has shape (1, 2147483648), want axes shorter than 2**31"),
        (lambda: BitMask.from_csr([GRID]), TypeError, "from_csr: matrix[0] is array("),
        (lambda: BitMask.from_window((2**16, 2**15), 1), ValueError,
         "from_window: shape is (65536, 32768) (tuple), want fewer than 2**31 elements"),
        (lambda: BitMask.from_indices(GRID, 2**31), ValueError,
         "k_len is 2147483648 (int), want an int >= 0 and below 2**31"),
        (lambda: BitMask.from_blocks(GRID, 2**70, 3), ValueError, "(int), want an int >= 0 and be"),
        (by_function(np.equal, (10**5000, 3, 3)), ValueError, "shape[0] is something that cannot"),
        (by_function(np.equal, (2**63, 0)), ValueError, "shape[0] is 9223372036854775808 (int)"),
        (by_function(np.equal, (1,) * 33), ValueError, "shape has 31 batch axes, want at most 30"),
        (by_function(np.equal, b"ab"), TypeError, "shape is b'ab' (bytes), want a sequence of int"),
        (by_function(lambda q, k: np.ma.array(q == k)), TypeError,
         "from_function: function returns a masked array, want a plain array"),
        (by_function(lambda q, k: [[True], [True, False]]), ValueError,
         "function returns [[True], [True, False]] (list), which is not an array, want one that"),
        (by_function(None), TypeError, "from_function: function is None (NoneType), want a call"),
        (by_function(np.equal, 3), TypeError, "from_function: shape is 3 (int), want a sequence"),
        (by_function(np.equal, states="x"), TypeError,
         "from_function: block_states is 'x' (str), want None or a callable"),
        (lambda: BitMask.from_csr(SameAgain()), TypeError, "tocsr() is not a CSR matrix, want"),
        (lambda: BitMask.from_csr([]), ValueError, "from_csr: matrix has no elements, want at"),
        (lambda: BitMask.from_csr([sparse.csr_array((3, 4)), sparse.csr_array((4, 3))]), ValueError,
         "from_csr: matrix[1] has shape (4, 3), matrix[0] has (3, 4)"),
        (lambda: BitMask.from_indices(GRID * 1.0, 3), TypeError,
         "from_indices: indices has dtype float64, want integers"),
        (lambda: BitMask.from_indices(GRID, 1), ValueError,
         "from_indices: indices has 1, want less than 1"),
        (lambda: BitMask.from_indices(GRID, -1), ValueError, "k_len is -1 (int), want an int >= 0"),
        (lambda: BitMask.from_indices(GRID, 3.0), TypeError, "k_len is 3.0 (float), want an int >"),
        (lambda: BitMask.from_blocks(GRID > 0, 300, 400), ValueError,
         "from_blocks: states has shape (3, 3), want (..., 3, 4) for 300 queries and 400 keys"),
        (lambda: BitMask.from_blocks(GRID, 300, 300), ValueError,
         "from_blocks: words is None, want shape (9, 8, 32, 2) for 9 partial blocks"),
        (lambda: BitMask.from_blocks(GRID, 300, 300, np.zeros((9, 8, 32, 2), int)), TypeError,
         "from_blocks: words has dtype int64, want uint32"),
        (lambda: BitMask.from_blocks(GRID, 300, 300, np.zeros((9, 512), "u4")), ValueError,
         "from_blocks: words has shape (9, 512), want (9, 8, 32, 2) for 9 partial blocks"),
        (lambda: BitMask.from_blocks(GRID * 3, 300, 300), ValueError,
         "from_blocks: states has 3 to 3, want EMPTY (0), PARTIAL (1) or FULL (2)"),
        (lambda: BitMask.from_blocks(-GRID, 300, 300), ValueError, "states has -1 to -1"),
        (lambda: BitMask.from_blocks(GRID * 1.0, 300, 300), TypeError,
         "from_blocks: states has dtype float64, want bool or integers"),
        (by_function(lambda q, k: q == k, (300,)), ValueError,
         "from_function: shape is (300,), want at least 2 axes"),
        (by_function(lambda q, k: q == k, (300, -1)), ValueError, "shape[1] is -1 (int), want an"),
        (by_function(lambda q, k: q - k), TypeError, "function returns dtype int64, want bool"),
        (by_function(lambda q, k: (q == k)[1:]), ValueError,
         "function returns shape (127, 300), want one that broadcasts to (128, 300)"),
        (by_function(lambda q, k: q == k, states=lambda *x: GRID[0] * 3), ValueError,
         "what block_states returns has 3 to 3, want EMPTY (0), PARTIAL (1) or FULL (2)"),
        (by_function(lambda q, k: q == k, states=lambda *x: GRID[0] > 0), TypeError,
         "what block_states returns has dtype bool, want integers"),
        (by_function(lambda q, k: q == k, states=lambda *x: GRID), ValueError,
         "block_states returns shape (3, 3), want one that broadcasts to (3,)"),
    ],
)  # fmt: skip
def test_errors(call, error, text):
    with pytest.raises(error, match=r"^BitMask\.from_") as caught:
        call()
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_errors_of_masks_together():
    a, b, c = (BitMask.from_dense(np.ones(s, bool)) for s in ((3, 5, 7), (2, 5, 7), (5, 8)))
    with pytest.raises(
        ValueError, match=r"^BitMask: & of shapes \(3, 5, 7\) and \(5, 8\), want eq"
    ):
        a & c
    with pytest.raises(
        ValueError, match=r"^BitMask: \| of shapes .* whose batch axes do not broad"
    ):
        a | b
    for other in (1, "mask", [True], np.ndarray, None):
        with pytest.raises(TypeError, match="operand"):
            a & other
        with pytest.raises(TypeError, match="operand"):
            other | a
    with pytest.raises(
        ValueError, match=r"^BitMask\.to_csr: the mask has shape \(3, 5, 7\), want 2"
    ):
        a.to_csr()


@pytest.mark.parametrize(
    "name", ["T", "density", "block_states", "nbytes", "nnz", "size", "toarray", "save", "load"]
)
def test_docstrings(name):
    assert inspect.getdoc(getattr(BitMask, name))


@pytest.mark.parametrize(
    "name",
    ["dense", "csr", "indices", "blocks", "function", "segments", "window", "edges"],
)
def test_docstrings_of_constructors_tell_all_parameters(name):
    method = getattr(BitMask, f"from_{name}")
    doc = inspect.getdoc(method)
    for section in ("Parameters", "Returns", "Raises", "Examples"):
        assert f"{section}\n{'-' * len(section)}\n" in doc
    for parameter in inspect.signature(method).parameters:
        assert parameter in doc.partition("Parameters")[2].partition("Returns")[0]


# Memory

LONG = 131_072
TILES = LONG // B


def sources():
    """A mask of 1 % of the blocks at length 131,072, by each constructor that names its blocks."""
    rng = np.random.default_rng(0)
    board = rng.random((TILES, TILES)) < 0.01
    i, j = np.nonzero(board)
    rows = (B * i + rng.integers(0, B, (3, len(i)))).reshape(-1)
    cols = (B * j + rng.integers(0, B, (3, len(i)))).reshape(-1)
    ones = np.ones(len(rows), bool)
    matrix = sparse.coo_array((ones, (rows, cols)), shape=(LONG, LONG)).tocsr()
    matrix.sum_duplicates()
    near = np.arange(LONG)[:, None] // 1280 * 1280 + rng.integers(0, 1280, (LONG, 4))
    near = np.minimum(near, LONG - 1).astype(np.int32)
    states = board.astype(np.int8)
    words = rng.integers(1, 2**32 - 1, (len(i), 8, 32, 2), np.uint32)

    def function(q, k):
        return (q + k) % 3 == 0

    def block_states(q_begin, q_end, k_begin, k_end):
        return states[q_begin // B]

    a, b = BitMask.from_csr(matrix), BitMask.from_blocks(states, LONG, LONG, words)
    return {
        "csr": lambda: BitMask.from_csr(matrix),
        "indices": lambda: BitMask.from_indices(near, LONG),
        "blocks": lambda: BitMask.from_blocks(states, LONG, LONG, words),
        "function": lambda: BitMask.from_function(function, (LONG, LONG), block_states),
        "and": lambda: a & b,
        "or": lambda: a | b,
        "T": lambda: b[()].T,
    }


def peak_of(function):
    tracemalloc.start()
    try:
        result = function()
        return result, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_is_that_of_the_stored_blocks():
    """A dense array would take 17 GB, one bit a pair 2 GB."""
    for name, make in sources().items():
        mask, peak = peak_of(make)
        stored, pairs = len(mask.lists.words), len(mask.lists.entry_keys)
        assert 0 < mask.block_density < 0.0105, name
        assert mask.nbytes < 2100 * stored + 4 * pairs + 8 * LONG + 2e5, name
        assert peak < 3 * 2048 * stored + 100 * pairs + 1e7, (name, peak)


def test_memory_of_full_blocks_is_a_few_bytes_each():
    states = np.zeros((TILES, TILES), bool)
    states[:, :10] = True
    mask, peak = peak_of(lambda: BitMask.from_blocks(states, LONG, LONG))
    assert mask.density == 10 / TILES
    assert mask.nbytes < 100_000
    assert peak < 4e6
    _, peak = peak_of(lambda: mask & mask)
    assert peak < 4e6


def test_memory_of_a_dense_array_that_is_packed():
    dense = np.zeros((3000, 3000), bool)
    dense[::50, :128] = True
    _, peak = peak_of(lambda: BitMask.from_dense(dense))
    assert peak < 4e6


# Pictures


@pytest.mark.parametrize("lengths", [(300, 500), (1500, 300), (0, 5), (5, 0), (1, 1)])
def test_a_picture_shows_states_and_bits(lengths):
    pytest.importorskip("matplotlib")
    dense = np.arange(lengths[1]) <= np.arange(lengths[0])[:, None]
    mask = BitMask.from_dense(dense)
    ax = plot.mask(mask)
    ax.figure.canvas.draw()
    shades = np.asarray(ax.collections[0].get_array()).reshape(
        dense.shape if max(lengths) <= 1024 else mask.block_states().shape
    )
    if max(lengths) <= 1024:
        np.testing.assert_array_equal(shades > 0, dense)
    else:
        np.testing.assert_array_equal(shades, mask.block_states())
    with pytest.raises(ValueError, match=r"^plot\.mask: mask has shape \(1, .*, want 2 axes"):
        plot.mask(mask[None])
    with pytest.raises(TypeError, match=r"^plot\.mask: mask is .* \(ndarray\), want a BitMask \("):
        plot.mask(dense)


def test_text_advises_another_order():
    """Where blocks are nearly empty and the mask is a graph, and not where that is done."""
    rng = np.random.default_rng(0)
    names, n = rng.permutation(2000), 2000
    chain = names[[*range(n), *range(n - 1)]], names[[*range(n), *range(1, n)]]
    mask = BitMask.from_edges(*chain, n)
    assert repr(mask).endswith(", nearly empty: 16 pairs in each (see BitMask.reorder)>")
    assert "nearly empty" not in repr(mask.reorder()[0])
    assert "nearly empty" not in repr(mask[:1000])  # queries and keys are not the same nodes
    assert "nearly empty" not in repr(BitMask.from_edges(*rng.integers(0, n, (2, 70 * 256)), n))


X, FULL = np.ones((3, 2)), BitMask.from_dense(np.ones((3, 3), bool))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("attention: mask", lambda mask: attention(X, X, X, mask=mask)),
        ("attention: mask[1]", lambda mask: attention(
            X, X, X, q_offsets=np.array([0, 3, 3]), mask=[FULL, mask])),
        ("scaled_dot_product_attention: attn_mask", lambda mask: scaled_dot_product_attention(
            X, X, X, mask)),
        ("kernel_regression: mask", lambda mask: kernel_regression(X, X, X[:, 0], 1.0, mask=mask)),
        ("BitMask: other", lambda mask: FULL & mask),
    ],
)  # fmt: skip
def test_errors_of_sparse_masks_name_the_function_that_was_called(name, call):
    matrix = damaged_matrix("csr", "indices", np.array([0, 99, 2]))
    matrix.data = matrix.data != 0
    with pytest.raises(ValueError, match=f"^{re.escape(name)} is not a valid sparse matrix: indic"):
        call(matrix)
