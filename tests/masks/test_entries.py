"""Masks whose blocks are nearly empty: pairs kept one by one, the same masks in every other way."""

import io
import pickle
import zipfile
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

from fa_cupy import BitMask, _bitmask
from fa_cupy.masks import entries
from fa_cupy.masks.blocks import BlockLists
from tests.api.test_masks import B, check, dense_masks, peak_of
from tests.masks.test_files import packed, refused

LEAST = entries.LEAST_BITS
LENGTHS = st.sampled_from([1, 60, 128, 130, 256, 300])


@st.composite
def mixed_masks(draw, lengths=None):
    """Arrays of bool whose blocks have numbers of bits on both sides of `LEAST_BITS`."""
    q_len, k_len = lengths or (draw(LENGTHS), draw(LENGTHS))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = [0, 1, 7, LEAST - 1, LEAST, LEAST + 1, B * B - 1, B * B]
    counts = draw(st.lists(st.sampled_from(sizes), min_size=1))
    dense = np.zeros((-(-q_len // B) * B, -(-k_len // B) * B), bool)
    for i in range(0, q_len, B):
        for j in range(0, k_len, B):
            block = np.arange(B * B) < rng.choice(counts)
            dense[i : i + B, j : j + B] = rng.permutation(block).reshape(B, B)
    return dense[:q_len, :k_len]


def indices_of(dense):
    """Keys of each query, in a random order, and -1."""
    most = int(dense.sum(axis=1).max(initial=0)) + 1
    found = np.full((len(dense), most), -1)
    for row, keys in zip(found, dense, strict=True):
        seen = np.random.default_rng(0).permutation(np.flatnonzero(keys))
        row[1 : 1 + len(seen)] = seen
    return found


@given(mixed_masks())
def test_every_constructor_makes_the_same_mask(dense):
    mask = BitMask.from_dense(dense)
    check(mask, dense)
    words = mask._store.with_words().words
    for other in (
        BitMask.from_csr(sparse.csr_array(dense)),
        BitMask.from_indices(indices_of(dense), dense.shape[1]),
        BitMask.from_function(lambda q, k: dense[q, k], dense.shape),
        BitMask.from_blocks(mask.block_states(), *dense.shape, words),
    ):
        assert other.equals(mask)
        for mine, theirs in zip(other.lists, mask.lists, strict=True):
            np.testing.assert_array_equal(mine, theirs, strict=True)
    np.testing.assert_array_equal(mask.to_csr().toarray(), dense)
    if dense.any():
        changed = dense.copy()
        changed[tuple(np.argwhere(dense)[-1])] = False
        assert not BitMask.from_dense(changed).equals(mask)


@given(st.data())
def test_algebra(data):
    lengths = data.draw(LENGTHS), data.draw(LENGTHS)
    a, b = (data.draw(mixed_masks(lengths=lengths)) for _ in range(2))
    x, y = BitMask.from_dense(a), BitMask.from_dense(b)
    check(x & y, a & b)
    check(x | y, a | b)
    check(x ^ y, a ^ b)
    check(x == y, a == b)
    check(x & b, a & b)
    check(~x, ~a)
    check(x.T, a.T)
    np.testing.assert_array_equal(x.sum(axis=0), a.sum(axis=0))
    np.testing.assert_array_equal(x.sum(axis=-1), a.sum(axis=-1))
    spans = [sorted(data.draw(st.integers(0, n)) for _ in range(2)) for n in lengths]
    part = tuple(slice(*span) for span in spans)
    check(x[part], a[part])
    assert (~~x).equals(x)
    assert (x | ~y).equals(~(~x & y))


@given(dense_masks(max_batch=1), st.data())
def test_files_and_slices(dense, data):
    mask = BitMask.from_dense(dense)
    if dense.ndim == 3 and len(dense):
        part = data.draw(st.integers(0, len(dense) - 1))
        mask, dense = mask[part], dense[part]
    mask.save(file := io.BytesIO())
    file.seek(0)
    found = BitMask.load(file)
    check(found, dense)
    assert found.equals(mask)
    assert pickle.loads(pickle.dumps(mask)).equals(mask)


@pytest.mark.parametrize("bits", [1, LEAST - 1, LEAST])
def test_the_form_of_a_block_depends_on_its_bits_alone(bits):
    dense = np.zeros((200, 300), bool)
    dense[np.arange(bits) // B, 128 + np.arange(bits) % B] = True
    lists = BitMask.from_dense(dense).lists
    assert (len(lists.words), len(lists.entry_keys)) == ((1, 0) if bits == LEAST else (0, bits))
    assert len(lists.entry_begin) == (0 if bits == LEAST else 201)
    # A block at an end of the matrix that is full there is full, however few bits that are.
    corner = BitMask.from_dense(np.pad(np.ones((5, 6), bool), ((128, 0), (256, 0)))).lists
    assert (corner.full.tolist(), len(corner.entry_keys)) == ([2], 0)


def test_memory_follows_the_entries():
    rng = np.random.default_rng(0)
    nodes, edges = 20_000, 145_000
    graph = sparse.csr_array(
        (np.ones(edges, np.float32), rng.integers(0, nodes, (2, edges))), shape=(nodes, nodes)
    )
    graph.sum_duplicates()
    mask, peak = peak_of(lambda: BitMask.from_csr(graph))
    assert mask.nbytes < 4 * graph.nnz + 8 * (nodes + 1) + 10_000
    assert peak < 100 * graph.nnz  # words would take 50 MB
    for made in (lambda: mask.T, lambda: mask & mask, lambda: mask | mask, mask.to_csr):
        assert peak_of(made)[1] < 150 * graph.nnz
    assert (mask.to_csr() != (graph != 0)).nnz == 0
    assert 0.99 < mask.block_density <= 1


# Files of before, and damaged ones


def members_of(mask, lists, version=2):
    """The members of a file with these lists."""
    arrays = dict(lists) | {"format": version, "lengths": np.array(mask.shape[-2:], np.int64),
                            "entries": mask.entries}  # fmt: skip
    found = {}
    for name, array in arrays.items():
        np.save(file := io.BytesIO(), array)
        found[f"{name}.npy"] = file.getvalue()
    return found


def mixed():
    dense = np.zeros((2, 300, 200), bool)
    dense[0, 3:140:9, ::50] = dense[1, 5, 7] = dense[0, 130:160, 130:180] = True
    return BitMask.from_dense(dense)


def test_files_and_pickles_without_entries_are_read():
    mask = mixed()
    assert len(mask.lists.entry_keys)
    assert len(mask.lists.words)
    old = mask._store.with_words()
    five = {name: getattr(old, name) for name in BlockLists._fields[:5]}
    found = BitMask.load(packed(members_of(mask, five, version=1)))
    assert found.equals(mask)
    assert len(found.lists.entry_keys) == len(mask.lists.entry_keys)
    again = _bitmask._restored(mask.shape[-2:], tuple(five.values()), mask.entries)
    assert again.equals(mask)
    refused(packed(members_of(mask, five, version=2)), "format 2, want 1")


def changed(name, change):
    """The lists of a mask, one of them changed in place."""
    lists = {key: x.copy() for key, x in mixed().lists._asdict().items()}
    change(lists[name])
    return lists


def put(index, value):
    def change(array):
        array[index] = value

    return change


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("entry_keys", put(0, -1)),
        ("entry_keys", put(0, 200)),  # there are 200
        ("entry_keys", put(1, 0)),  # not above the one before
        ("entry_begin", put(0, 1)),
        ("entry_begin", put(5, 2**62)),
        ("entry_begin", put(-1, 2)),
    ],
)
def test_entries_that_no_mask_has_are_refused(name, change):
    refused(packed(members_of(mixed(), changed(name, change))), "contradict each other")


def test_sparse_blocks_are_what_has_few_bits():
    """Neither words with few bits nor entries of a block with many, or of one that is listed."""
    mask = mixed()
    with mock.patch.object(entries, "LEAST_BITS", 4000):
        of_many = mixed().lists._asdict()
    assert not len(of_many["words"])
    refused(packed(members_of(mask, of_many)), "contradict each other")
    of_few = mask._store.with_words()._asdict()
    refused(packed(members_of(mask, of_few)), "contradict each other")
    listed = mask.lists._asdict()
    listed |= {"full_begin": np.array([0, 1, 1, 1, 1, 1, 1]), "full": np.zeros(1, np.int32)}
    refused(packed(members_of(mask, listed)), "contradict each other")
    shorter = mask.lists._asdict() | {"entry_begin": mask.lists.entry_begin[:-1]}
    refused(packed(members_of(mask, shorter)), "sizes of its lists contradict each other")


def test_files_have_a_member_for_each_list():
    mixed().save(file := io.BytesIO())
    with zipfile.ZipFile(file) as archive:
        names = {name.removesuffix(".npy") for name in archive.namelist()}
    assert names == {*BlockLists._fields, "format", "lengths", "entries"}
