"""Packing masks on a GPU, and masks made of CuPy's arrays: against the CPU, bit for bit."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_cupy import BitMask
from fa_cupy.core.attention_problem import View
from tests.api.test_masks import dense_masks
from tests.support import mask_sources
from tests.support.mask_sources import SHAPES, same

LAYOUTS = ("plain", "turned", "reversed", "spaced", "shifted", "aligned")


def laid_out(cupy, bits, layout):
    """An array of CuPy with these elements, in memory that is full of True elsewhere."""
    *batch, q_len, k_len = bits.shape
    shape, pick = {
        "plain": ((*batch, q_len, k_len), np.s_[...]),
        "turned": ((*batch, k_len, q_len), None),
        "reversed": ((*batch, q_len, k_len), np.s_[..., ::-1, ::-1]),
        "spaced": ((*batch, q_len, 3 * k_len + 2), np.s_[..., 2 : 2 + 3 * k_len : 3]),
        "shifted": ((*batch, q_len, -(-k_len // 16) * 16 + 16), np.s_[..., 1 : 1 + k_len]),
        "aligned": ((*batch, q_len, -(-k_len // 16) * 16 + 16), np.s_[..., :k_len]),
    }[layout]
    memory = cupy.ones(shape, np.bool_)
    found = memory.swapaxes(-1, -2) if pick is None else memory[pick]
    found[...] = cupy.asarray(bits)
    return found


@given(dense=dense_masks(), layout=st.sampled_from(LAYOUTS))
@settings(max_examples=500)
def test_any_mask_is_packed_as_on_the_cpu(cupy, dense, layout):
    packed, wanted = BitMask.from_dense(laid_out(cupy, dense, layout)), BitMask.from_dense(dense)
    if dense.size:
        same(packed, wanted)
    else:  # NumPy's strides of empty arrays are 0, as of entries that are one
        assert packed.equals(wanted)


@pytest.mark.parametrize("k_len", [*range(1, 40), 112, 127, 128, 129, 143, 144, 145, 255, 256, 257])
def test_every_length_and_offset(cupy, k_len):
    rng = np.random.default_rng(k_len)
    dense = rng.random((131, k_len)) < 0.5
    wanted = BitMask.from_dense(dense)
    for offset in range(17):
        memory = cupy.ones((131, k_len + 32), np.bool_)
        part = memory[:, offset : offset + k_len]
        part[...] = cupy.asarray(dense)
        same(BitMask.from_dense(part), wanted)


@pytest.mark.parametrize("value", [1, 2, 64, 127, 128, 254, 255])
@pytest.mark.parametrize("offset", [0, 1])
def test_any_byte_that_is_not_zero_is_true(cupy, value, offset):
    chosen = np.random.default_rng(value).random((256, 256)) < 0.5
    memory = cupy.full((256, 272), 0, np.uint8)
    part = memory[:, offset : offset + 256]
    part[...] = cupy.asarray(chosen.astype(np.uint8) * value)
    same(BitMask.from_dense(part.view(np.bool_)), BitMask.from_dense(chosen))


def test_each_byte_of_a_block_alone(cupy):
    """Every (row, column) once, 128 at a time; then the same with all others set."""
    row, col = np.arange(128), np.arange(128)
    for shift in range(128):
        dense = np.zeros((128, 128), bool)
        dense[row, (col + shift) % 128] = True
        same(BitMask.from_dense(cupy.asarray(dense)), BitMask.from_dense(dense))
        same(BitMask.from_dense(cupy.asarray(~dense)), BitMask.from_dense(~dense))


@given(data=st.data())
@settings(max_examples=500)
def test_packing_on_the_fly(cupy, data):
    """What an attention kernel reads, from a view with axes that are repeated."""
    from fa_cupy.gpu.masks import device_mask

    dense = data.draw(dense_masks())
    mask = laid_out(cupy, dense, data.draw(st.sampled_from(LAYOUTS)))
    shape, strides = list(mask.shape), list(mask.strides)
    for axis in range(mask.ndim - 1):  # an axis of one element may be repeated
        if data.draw(st.booleans()):
            mask, dense = (x[(slice(None),) * axis + (slice(0, 1),)] for x in (mask, dense))
            shape[axis], strides[axis] = data.draw(st.sampled_from([1, 3, 130, 300])), 0
    if dense.size == 0:
        shape = [n if m else 0 for n, m in zip(shape, dense.shape, strict=True)]
    if np.prod(shape) > 1e7:
        return
    view = View(tuple(shape), tuple(strides))
    found, entries = device_mask.pack(mask, view)
    seen = mask_sources.expand(found, entries, shape[:-2], shape[-2:])
    np.testing.assert_array_equal(seen, np.broadcast_to(dense, shape))


def test_long_rows_and_many_matrices(cupy):
    """More key tiles than a warp looks at together, more axes than a struct of few would hold."""
    rng = np.random.default_rng(0)
    long = mask_sources.dense(rng, (130, 128 * 70 + 3))
    same(BitMask.from_dense(cupy.asarray(long)), BitMask.from_dense(long))
    deep = rng.random((2,) * 10 + (3, 5)) < 0.5
    turned = deep.transpose(*range(9, -1, -1), 10, 11)
    there = cupy.asarray(deep).transpose(*range(9, -1, -1), 10, 11)
    same(BitMask.from_dense(there), BitMask.from_dense(turned))


def test_packing_repeats_and_waits_for_nobody(cupy):
    from fa_cupy.gpu.masks import device_mask

    mask = cupy.random.default_rng(0).random((2, 1000, 1100)) < 0.5
    view = View(mask.shape, mask.strides)
    first, _ = device_mask.pack(mask, view)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        device_mask.pack(mask, view)  # memory of this stream's pool is there for the capture
        stream.begin_capture()
        again, _ = device_mask.pack(mask, view)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    for name in ("partial_begin", "partial_end", "words"):  # all blocks are partial
        assert (getattr(first, name) == getattr(again, name)).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_masks_of_arrays(cupy, shape):
    mask_sources.check_dense(cupy, shape)
    mask_sources.check_blocks(cupy, shape)
    for dtype in (np.int64, np.int32, np.int16, np.uint16, np.uint64):
        mask_sources.check_indices(cupy, shape, dtype)


def test_indices_that_fill_blocks(cupy):
    mask_sources.check_full_blocks_of_indices(cupy)


def test_sparse_matrices(cupy):
    from cupyx.scipy import sparse

    def put(matrix):
        parts = [cupy.asarray(getattr(matrix, name)) for name in ("data", "indices", "indptr")]
        return sparse.csr_matrix(tuple(parts), shape=matrix.shape)

    for matrices, batched in mask_sources.csr_cases():
        mask_sources.check_csr(put, matrices, batched)
        found = BitMask.from_csr(put(matrices[0])).to_csr()
        assert (found.get() != (matrices[0] != 0)).nnz == 0
    for form in ("coo", "csc", "csr"):
        given = put(matrices[0]).asformat(form)
        same(BitMask.from_csr(given), BitMask.from_csr(matrices[0]))
        indices = given.row if form == "coo" else given.indices
        for outside in (max(given.shape), 10**6, -1):  # before anybody follows them
            indices[0] = outside
            with pytest.raises(
                ValueError, match=r"^BitMask\.from_csr: matrix is .* indices do not"
            ):
                BitMask.from_csr(given)
    above = sparse.dia_matrix((cupy.ones((1, 3)), cupy.array([1])), shape=(3, 3))
    same(BitMask.from_csr(above), BitMask.from_dense(np.eye(3, k=1, dtype=bool)))
    with pytest.raises(TypeError, match=r"^BitMask\.from_csr: matrix\[1\] is a cupy"):
        BitMask.from_csr([matrices[0], put(matrices[0])])


def test_broadcast_axes_are_packed_once(cupy):
    one = np.random.default_rng(0).random((3, 1, 200, 200)) < 0.5
    mask = BitMask.from_dense(cupy.broadcast_to(cupy.asarray(one), (3, 50, 200, 200)))
    same(mask, BitMask.from_dense(np.broadcast_to(one, (3, 50, 200, 200))))
    assert len(mask.lists.words) == 3 * 4


def test_what_masks_answer(cupy):
    mask_sources.check_what_masks_answer(cupy)
    dense = np.random.default_rng(0).random((3, 140, 150)) < 0.5
    mask = BitMask.from_dense(cupy.asarray(dense))
    same(pickle.loads(pickle.dumps(mask[1])), BitMask.from_dense(dense)[1])


def test_patterns(cupy):
    mask_sources.check_patterns(cupy)


def test_manners_of_arrays(cupy):
    mask_sources.check_manners_of_arrays(cupy)
    array = np.random.default_rng(0).random((140, 150)) < 0.5
    same(
        cupy.asarray(array) & BitMask.from_window(150, 3)[:140],
        BitMask(array & (np.abs(np.subtract.outer(np.arange(140), np.arange(150))) <= 3)),
    )


def test_copies_are_kept(cupy):
    mask_sources.check_copies(cupy)


def test_a_driver_says_what_it_refuses(cupy, tmp_path, monkeypatch):
    from fa_cupy.gpu.driver import compile

    (tmp_path / "ptx").mkdir()
    (tmp_path / "ptx/bad.ptx").write_text(".version 7.4\n.target sm_80\n.address_size 64\nno\n")
    monkeypatch.setattr(compile, "ROOT", tmp_path)
    with pytest.raises(RuntimeError, match=r"ptx/bad\.ptx: the driver .* of device 0 refuses it"):
        compile.load_ptx("bad.ptx", "bad", 0)
