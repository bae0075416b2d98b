"""What is asked of masks that are made on a device, of the stand-in for CuPy and of CuPy alike."""

import io
import pickle

import numpy as np
import pytest
from scipy import sparse

from fa_cupy import BitMask, layouts
from fa_cupy.gpu.masks.packing import WORDS

B = layouts.BLOCK


def same(found, wanted):
    """Compare a mask on the device with one on the CPU, list by list."""
    assert found.shape == wanted.shape
    assert not isinstance(found.lists.partial, np.ndarray)
    assert isinstance(wanted.lists.partial, np.ndarray)
    assert not len(found.lists.entry_keys)  # kernels read words
    there = found.get()
    for name, mine, theirs in zip(wanted.lists._fields, there.lists, wanted.lists, strict=True):
        assert mine.dtype == theirs.dtype, name
        np.testing.assert_array_equal(mine, theirs, err_msg=name)
    np.testing.assert_array_equal(found.entries, wanted.entries)
    assert found.equals(wanted)


def dense(rng, shape):
    """Blocks that are empty, full or neither."""
    tiles = [-(-n // B) for n in shape[-2:]]
    chance = rng.choice([0.0, 1.0, 0.5, 0.001], (*shape[:-2], *tiles)).repeat(B, -2).repeat(B, -1)
    return rng.random(shape) < chance[..., : shape[-2], : shape[-1]]


SHAPES = [(128, 128), (300, 200), (2, 130, 257), (0, 5), (5, 0), (0, 3, 3), (2, 2, 1, 400)]


def check_dense(cupy, shape):
    array = dense(np.random.default_rng(0), shape)
    same(BitMask.from_dense(cupy.asarray(array)), BitMask.from_dense(array))


def check_indices(cupy, shape, dtype):
    rng = np.random.default_rng(1)
    low = -3 if np.dtype(dtype).kind == "i" else 0
    count = 7 if shape[-1] or low else 0
    indices = rng.integers(low, max(shape[-1], 0), (*shape[:-1], count)).astype(dtype)
    same(
        BitMask.from_indices(cupy.asarray(indices), shape[-1]),
        BitMask.from_indices(indices, shape[-1]),
    )


def check_full_blocks_of_indices(cupy):
    """All bits of some blocks, one by one, in any order and twice."""
    rng = np.random.default_rng(0)
    keys = np.concatenate([np.arange(100, 300)] * 2)
    indices = np.stack([rng.permutation(keys) for _ in range(200)])
    same(BitMask.from_indices(cupy.asarray(indices), 300), BitMask.from_indices(indices, 300))


def csr_cases():
    """(matrices, whether a sequence is meant); duplicates, zeros, sums of 0, unsorted columns."""
    rng = np.random.default_rng(2)
    for dtype in (np.float32, np.float64, np.bool_):
        yield [sparse.csr_array(dense(rng, (200, 300)).astype(dtype))], False
    yield [sparse.csr_array(dense(rng, (140, 130))) for _ in range(3)], True
    yield [sparse.csr_array((3, 4), dtype=np.float64)], False
    data = np.array([1.0, 2.0, -2.0, 0.5, 0.5, 0.0])
    yield [sparse.csr_array((data, [200, 3, 3, 7, 7, 1], [0, 3, 5, 6]), shape=(3, 300))], False
    ones = np.ones((140, 150))
    ones[3, 3] = 0.0  # stored, as the next line makes it
    stored = sparse.csr_array(np.ones((140, 150)))
    stored.data = ones.reshape(-1)
    yield [stored], False


def check_csr(put, matrices, batched):
    given = [put(m) for m in matrices]
    found = BitMask.from_csr(given if batched else given[0])
    same(found, BitMask.from_csr(matrices if batched else matrices[0]))


def check_blocks(cupy, shape):
    mask = BitMask.from_dense(dense(np.random.default_rng(3), shape))
    states, words = mask.block_states(), mask._store.with_words().words
    found = BitMask.from_blocks(cupy.asarray(states), *shape[-2:], cupy.asarray(words))
    same(found, mask)
    whole = states == BitMask.FULL
    same(
        BitMask.from_blocks(cupy.asarray(whole), *shape[-2:]),
        BitMask.from_blocks(whole, *shape[-2:]),
    )
    ones = np.full((whole.size, *words.shape[1:]), 0xFFFFFFFF, np.uint32)
    all_full = BitMask.from_blocks(
        cupy.asarray(np.ones(states.shape, np.int32)), *shape[-2:], cupy.asarray(ones)
    )
    same(all_full, BitMask.from_dense(np.ones(shape, bool)))


def check_what_masks_answer(cupy):
    """The same as on the CPU, and on the device where arrays come out."""
    rng = np.random.default_rng(4)
    a, b = dense(rng, (2, 300, 200)), dense(rng, (300, 200))
    x, y = BitMask.from_dense(cupy.asarray(a)), BitMask.from_dense(cupy.asarray(b))
    on_cpu = BitMask.from_dense(a)
    assert repr(x).split(",")[:-1] == repr(on_cpu).split(",")[:-1]
    assert repr(x).endswith("B on CUDA device 0>")
    assert (x.density, x.block_density) == (on_cpu.density, on_cpu.block_density)
    assert x.nbytes > on_cpu.nbytes  # words of sparse blocks
    np.testing.assert_array_equal(x.block_states(), on_cpu.block_states())
    found = x[1].to_dense()
    assert type(found) is cupy.ndarray
    np.testing.assert_array_equal(found.get(), a[1])
    np.testing.assert_array_equal(x[::-1].to_dense().get(), a[::-1])
    same(both := x & y, BitMask.from_dense(a & b))
    assert both.lists is both.lists  # copied to the device once
    same(x | BitMask.from_dense(b), BitMask.from_dense(a | b))
    same(BitMask.from_dense(b) | x, BitMask.from_dense(a | b))
    same(~y, BitMask.from_dense(~b))
    same(x.T, BitMask.from_dense(a.swapaxes(-1, -2)))
    assert x.equals(on_cpu)
    assert on_cpu.equals(x)
    assert not x.equals(BitMask.from_dense(~a))
    assert x.get().get().equals(on_cpu)
    x[1].save(file := io.BytesIO())
    file.seek(0)
    loaded = BitMask.load(file)
    assert isinstance(loaded.lists.words, np.ndarray)
    assert loaded.equals(on_cpu[1])


def check_patterns(cupy):
    """Made on the CPU from what is on the device, where the masks belong."""
    rng = np.random.default_rng(6)
    q, k = rng.integers(-1, 3, (2, 1, 300)), rng.integers(-1, 3, (3, 200))
    given = [cupy.asarray(x) for x in (q, k)]
    same(BitMask.from_segments(*given), BitMask.from_segments(q, k))
    same(BitMask.from_segments(given[1]), BitMask.from_segments(k))
    src, dst = rng.integers(0, 200, (2, 500))
    found = BitMask.from_edges(cupy.asarray(src), cupy.asarray(dst), 200)
    same(found, wanted := BitMask.from_edges(src, dst, 200))
    (mine, order), (theirs, wanted_order) = found.reorder(), wanted.reorder()
    same(mine, theirs)
    np.testing.assert_array_equal(order, wanted_order)


def check_manners_of_arrays(cupy):
    """Operators with arrays, slices and sums; NumPy is refused what CuPy refuses it."""
    rng = np.random.default_rng(7)
    a, b = dense(rng, (2, 300, 200)), dense(rng, (300, 200))
    x, there = BitMask(cupy.asarray(a)), cupy.asarray(b)
    same(x & there, BitMask(a & b))
    same(BitMask(a) | there, BitMask(a | b))
    same(x ^ b, BitMask(a ^ b))
    same(x == cupy.asarray(b[:, :1]), BitMask(a == b[:, :1]))
    same(x[1, 5:290, 128:], BitMask(a[1, 5:290, 128:]))
    same(x[..., 128:, :], BitMask(a[:, 128:]))
    for axis in (None, 0, -1, (0, 1)):
        np.testing.assert_array_equal(x.sum(axis), a.sum(axis))
    with pytest.raises(TypeError, match=r"^BitMask: the mask is on CUDA device 0, want"):
        np.asarray(x)
    np.testing.assert_array_equal(np.asarray(x.get()), a)
    assert type(x.toarray()) is cupy.ndarray


def check_copies(cupy):
    """A mask of NumPy is copied once, and its slices share the copy; one of CuPy is not."""
    from fa_cupy.gpu.masks.device_mask import DeviceMask

    mask = BitMask.from_dense(dense(np.random.default_rng(5), (2, 300, 200)))
    found = DeviceMask.of(mask, 0)
    assert DeviceMask.of(mask[1], 0) is found
    assert found.words_by_block == 0
    lists = mask._store.with_words()
    for name in ("partial", "words", "full"):
        np.testing.assert_array_equal(getattr(found, name).get(), getattr(lists, name))
    for name in ("partial", "full"):
        begin = getattr(lists, f"{name}_begin")
        np.testing.assert_array_equal(getattr(found, f"{name}_begin").get(), begin[:-1])
        np.testing.assert_array_equal(getattr(found, f"{name}_end").get(), begin[1:])
    there = BitMask.from_dense(cupy.asarray(mask.to_dense()))
    assert DeviceMask.of(there, 0).words.data.ptr == there.lists.words.data.ptr
    assert pickle.loads(pickle.dumps(there.get())).equals(mask)


def expand(device_mask, entries, batch, lengths):
    """The array of bool that a kernel would see, from the arrays that it reads."""
    found = [x.get() for x in device_mask[:7]]
    partial_begin, partial_end, partial, words, full_begin, full_end, full = found
    words = words.reshape(-1, WORDS)
    q_tiles, k_tiles = (-(-n // B) for n in lengths)
    wide = np.zeros((len(entries), q_tiles, B, k_tiles, B), bool)
    for b, entry in enumerate(entries.get()):
        for i in range(q_tiles):
            t = entry * q_tiles + i
            for place in range(partial_begin[t], partial_end[t]):
                c = partial[place]
                at = t * device_mask.words_by_block + c if device_mask.words_by_block else place
                wide[b, i, :, c] = layouts.unpack(words[at].reshape(8, 32, 2))
            wide[b, i][:, full[full_begin[t] : full_end[t]]] = True
    flat = wide.reshape(len(entries), q_tiles * B, k_tiles * B)
    return flat[:, : lengths[0], : lengths[1]].reshape(*batch, *lengths)
