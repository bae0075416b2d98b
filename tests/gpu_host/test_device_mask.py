"""Masks on a device without one: the stand-in for CuPy, which runs the PTX in the interpreter."""

from types import SimpleNamespace

import numpy as np
import pytest
from scipy import sparse

from fa_cupy import BitMask
from fa_cupy.core import arrays
from fa_cupy.core.attention_problem import View
from tests.support import cupy_stand_in, mask_sources
from tests.support.mask_sources import SHAPES


@pytest.fixture(scope="module")
def cupy():
    with cupy_stand_in.in_place_of_cupy() as cupy:
        yield cupy


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_from_dense(cupy, shape):
    mask_sources.check_dense(cupy, shape)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.int16, np.uint16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_from_indices(cupy, shape, dtype):
    mask_sources.check_indices(cupy, shape, dtype)


@pytest.mark.long
def test_from_indices_that_fill_blocks(cupy):
    mask_sources.check_full_blocks_of_indices(cupy)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_from_blocks(cupy, shape):
    mask_sources.check_blocks(cupy, shape)


def csr_of(cupy, matrix):
    parts = {name: cupy.asarray(getattr(matrix, name)) for name in ("data", "indices", "indptr")}
    found = SimpleNamespace(**parts, shape=matrix.shape, format="csr")
    found.tocsr = lambda: found
    return found


def coo_of(cupy, row, col):
    parts = {"data": np.ones(3), "row": np.array(row), "col": np.array(col)}
    found = SimpleNamespace(**{k: cupy.asarray(v) for k, v in parts.items()})
    found.shape, found.format = (3, 4), "coo"
    found.tocsr = lambda: csr_of(cupy, sparse.coo_array((np.ones(3), (row, col)), (3, 4)).tocsr())
    return found


def test_from_coo(cupy):
    mask = BitMask.from_csr(coo_of(cupy, [0, 2, 1], [3, 1, 2]))
    assert np.argwhere(mask.get().to_dense()).tolist() == [[0, 3], [1, 2], [2, 1]]
    for row, col in (([0, 3, 1], [0, 1, 2]), ([0, 1, 2], [0, 4, 1]), ([-1, 1, 2], [0, 1, 2])):
        with pytest.raises(ValueError, match="valid sparse matrix: its indices do not match"):
            BitMask.from_csr(coo_of(cupy, row, col))
    with pytest.raises(ValueError, match="the lengths of its arrays do not match"):
        BitMask.from_csr(coo_of(cupy, [0, 1], [0, 1, 2]))


@pytest.mark.parametrize(("matrices", "batched"), [*mask_sources.csr_cases()])
def test_from_csr(cupy, matrices, batched):
    mask_sources.check_csr(lambda m: csr_of(cupy, m), matrices, batched)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"indptr": [0, 1, 2, 9]}, "do not match"),
        ({"indptr": [0, 2, 1, 3]}, "do not match"),
        ({"indptr": [1, 1, 2, 3]}, "do not match"),
        ({"indptr": [0, 3]}, "lengths"),
        ({"indices": [0, 1, 4]}, "do not match"),
        ({"indices": [0, -1, 2]}, "do not match"),
        ({"data": [1.0]}, "lengths"),
    ],
)
def test_damaged_csr_is_refused(cupy, change, text):
    parts = {"data": [1.0] * 3, "indices": [0, 1, 2], "indptr": [0, 1, 2, 3]} | change
    matrix = SimpleNamespace(**{k: np.array(v) for k, v in parts.items()}, shape=(3, 4))
    with pytest.raises(ValueError, match=rf"^BitMask\.from_csr: matrix is not a valid sp.*{text}"):
        BitMask.from_csr(csr_of(cupy, matrix))


def test_what_masks_answer(cupy):
    mask_sources.check_what_masks_answer(cupy)


def test_patterns(cupy):
    mask_sources.check_patterns(cupy)


def test_manners_of_arrays(cupy):
    mask_sources.check_manners_of_arrays(cupy)


def test_copies_are_kept(cupy):
    mask_sources.check_copies(cupy)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_lists_are_sent_to_one_memory(cupy, shape, monkeypatch):
    from fa_cupy.gpu.masks import device_mask

    mask = BitMask.from_dense(mask_sources.dense(np.random.default_rng(0), shape))
    sizes, wanted = [], mask._store.with_words()
    monkeypatch.setattr(device_mask, "alloc", lambda n: sizes.append(n) or cupy.cuda.alloc(n))
    sent = mask._store.on(0)
    assert sizes == [sum(x.nbytes for x in wanted)]
    assert sent.words.data.ptr % 16 == 0
    for mine, want in zip(sent[:5], wanted[:5], strict=True):
        np.testing.assert_array_equal(mine.get(), want, strict=True)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda c, a: BitMask.from_dense(c.asarray(a * 1)), TypeError, "from_dense: mask has dtyp"),
        (lambda c, a: BitMask.from_dense(c.asarray(a[0])), ValueError, "want at least 2 axes"),
        (lambda c, a: BitMask.from_indices(c.asarray(a * 1), 1), ValueError,
         "from_indices: indices has 1, want less than 1"),
        (lambda c, a: BitMask.from_blocks(c.asarray(a * 3), 300, 300), ValueError,
         "from_blocks: states has 0 to 3, want EMPTY"),
        (lambda c, a: BitMask.from_blocks(c.asarray(a * 1), 300, 300), ValueError,
         "from_blocks: words is None, want shape (6, 8, 32, 2)"),
        (lambda c, a: BitMask.from_blocks(c.asarray(a * 1), 300, 300,
                                          np.zeros((6, 8, 32, 2), np.uint32)), TypeError,
         "from_blocks: words is a numpy.ndarray, states is a "),
    ],
)  # fmt: skip
def test_errors(cupy, call, error, text):
    with pytest.raises(error, match=r"^BitMask\.from_") as caught:
        call(cupy, np.tri(3, dtype=bool))
    assert text in str(caught.value)


@pytest.mark.parametrize("share", [False, True])
def test_packing_on_the_fly(cupy, share):
    from fa_cupy.gpu.masks import device_mask

    rng = np.random.default_rng(0)
    if share:
        base = rng.integers(0, 2, (2, 384)).astype(bool)
        base[0, :128], base[1, 128:256] = False, True  # lists with gaps
        view = View((2, 3, 300, 384), (384, 0, 0, 1))
    else:
        base = mask_sources.dense(rng, (2, 300, 384))
        view = View((2, 3, 300, 384), (base.strides[0], 0, *base.strides[1:]))
    mask, entries = device_mask.pack(cupy.asarray(base), view)
    assert (mask.words_by_block == 0) == share
    assert entries.get().tolist() == [0, 0, 0, 1, 1, 1]
    found = mask_sources.expand(mask, entries, (2, 3), (300, 384))
    np.testing.assert_array_equal(found, np.lib.stride_tricks.as_strided(base, *view))


def test_nothing_is_launched_for_nothing(cupy):
    from fa_cupy.gpu.masks import device_mask

    for shape in ((0, 0), (0, 5), (5, 0), (0, 5, 5), (2, 0, 7)):
        array = cupy.zeros(shape, bool)
        mask, entries = device_mask.pack(array, View(array.shape, array.strides))
        found = mask_sources.expand(mask, entries, shape[:-2], shape[-2:])
        assert found.shape == shape


def test_the_stand_in_is_gone_afterwards():
    with cupy_stand_in.in_place_of_cupy() as cupy:
        assert arrays._place("x", "y", cupy.zeros(3))[0] == "cupy"
    import sys

    assert sys.modules.get("cupy") is not cupy
