"""Who holds what of an accumulator, and the word orders of mask blocks, element by element."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import layouts
from fa_cupy.layouts import BLOCK, ORDERS
from tests.kernels.ptx import test_wrappers_sm90
from tests.support import cupy_stand_in

ROWS, COLS = np.indices((BLOCK, BLOCK))
ADDRESS = {"fragment": layouts.fragment_address, "row_major": layouts.row_major_address}
TILES = [layouts.mma(n) for n in (8, 64, 128, 256)] + [layouts.wgmma(n) for n in range(8, 257, 8)]
by_tile = pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t.rows}x{t.cols}")
by_order = pytest.mark.parametrize("order", sorted(ORDERS))


def everything(tile):
    """All (thread, register) of an accumulator, as two columns of a table."""
    thread, register = np.indices((tile.threads, tile.registers))
    return thread.reshape(-1), register.reshape(-1)


@by_tile
def test_every_element_is_held_once(tile):
    thread, register = everything(tile)
    row, col = tile.element(thread, register)
    found = np.zeros((tile.rows, tile.cols), int)
    np.add.at(found, (row, col), 1)
    assert (found == 1).all()
    again = tile.holder(row, col)
    np.testing.assert_array_equal(again, (thread, register))


def test_an_accumulator_of_wgmma_is_as_the_ptx_isa_says():
    """Figure "WGMMA .m64nNk16 register fragment layout for accumulator matrix D", some of it."""
    tile = layouts.wgmma(16)
    held = {thread: [tuple(map(int, tile.element(thread, r))) for r in range(8)] for thread in
            (0, 1, 4, 31, 32, 127)}  # fmt: skip
    assert held[0] == [(0, 0), (0, 1), (8, 0), (8, 1), (0, 8), (0, 9), (8, 8), (8, 9)]
    assert held[1][:4] == [(0, 2), (0, 3), (8, 2), (8, 3)]
    assert held[4][:3] == [(1, 0), (1, 1), (9, 0)]
    assert held[31][:3] == [(7, 6), (7, 7), (15, 6)]
    assert held[32][0] == (16, 0)
    assert held[127][-1] == (63, 15)


def test_an_accumulator_of_mma_is_as_the_ptx_isa_says():
    """Table of m16n8k16: row groupID, + 8 for i >= 2; column 2 * threadID_in_group + (i & 1)."""
    for lane in range(32):
        for i in range(4):
            row, col = layouts.mma().element(lane, i)
            assert (row, col) == (lane // 4 + (8 if i >= 2 else 0), lane % 4 * 2 + (i & 1))


@pytest.mark.parametrize("n", range(8, 257, 8))
def test_a_device_holds_accumulators_of_wgmma_so(n):
    """As the probes of `test_wgmma_accumulator_map` and `test_wgmma` find them there."""
    tile, matrix = layouts.wgmma(n), np.arange(64 * n).reshape(64, n)
    held = matrix[tile.element(*np.indices((tile.threads, tile.registers)))]
    probed = test_wrappers_sm90.accumulator(matrix)
    np.testing.assert_array_equal(probed.reshape(tile.threads, tile.registers), held)


@pytest.mark.parametrize(("make", "n"), [("wgmma", 4), ("wgmma", 264), ("mma", 12), ("mma", 0)])
def test_no_such_accumulator(make, n):
    with pytest.raises(ValueError, match=rf"^{make}: n is {n} \(int\), want a multiple of 8"):
        getattr(layouts, make)(n)


@by_order
def test_every_bit_has_an_address_of_its_own(order):
    word, bit = ADDRESS[order](ROWS, COLS)
    assert np.array_equal(np.sort((32 * word + bit).reshape(-1)), np.arange(BLOCK * BLOCK))


@by_order
@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "u8"])
def test_addresses_of_narrow_indices_do_not_wrap_around(order, dtype):
    """As those of int64, and of that dtype: also where rows and columns have two dtypes."""
    want = ADDRESS[order](ROWS, COLS)
    for row, col in ((ROWS.astype(dtype), COLS.astype(dtype)), (ROWS.astype(dtype), COLS)):
        for found, expected in zip(ADDRESS[order](row, col), want, strict=True):
            assert found.dtype == np.int64
            np.testing.assert_array_equal(found, expected)
    scalars = ADDRESS[order](np.dtype(dtype).type(127), np.dtype(dtype).type(127))
    assert scalars == tuple(x[127, 127] for x in want)


@by_order
def test_addresses_of_cupy_arrays(order):
    row, col = (cupy_stand_in.owned(x.astype(np.uint8)) for x in (ROWS, COLS))
    for found, want in zip(ADDRESS[order](row, col), ADDRESS[order](ROWS, COLS), strict=True):
        assert isinstance(found, cupy_stand_in.ndarray)
        np.testing.assert_array_equal(found.get(), want)


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2"])
def test_registers_of_narrow_indices_do_not_wrap_around(dtype):
    tile = layouts.wgmma(256)
    thread, register = np.indices((tile.threads, tile.registers))
    row, col = tile.element(thread, register)
    fits = (np.stack([thread, register, row, col]) <= np.iinfo(dtype).max).all(axis=0)
    thread, register, row, col = (x[fits] for x in (thread, register, row, col))
    narrow = tile.element(thread.astype(dtype), register.astype(dtype))
    np.testing.assert_array_equal(narrow, (row, col))
    narrow = tile.holder(row.astype(dtype), col.astype(dtype))
    np.testing.assert_array_equal(narrow, (thread, register))
    narrow = tile.mask_bit(register.astype(dtype), first_col=4096)
    np.testing.assert_array_equal(narrow, tile.mask_bit(register, first_col=4096))


def test_addresses_of_nothing():
    for found in (*layouts.mma().element([], []), *layouts.fragment_address([], [])):
        assert (found.dtype, found.shape) == (np.int64, (0,))


@by_order
def test_an_address_of_ints_is_of_ints(order):
    assert ADDRESS[order](9, 40) == tuple(x[9, 40] for x in ADDRESS[order](ROWS, COLS))
    assert ADDRESS["row_major"](9, 40) == (37, 8)
    assert {type(x) for x in ADDRESS["row_major"](9, 40)} == {int}


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: layouts.fragment_address(1.0, 2), "fragment_address: row has dtype float64"),
        (lambda: layouts.fragment_address(1, ROWS > 0), "fragment_address: col has dtype bool"),
        (lambda: layouts.row_major_address(ROWS / 2, 0), "row_major_address: row has dtype float"),
        (lambda: layouts.row_major_address(0, "1"), "row_major_address: col has dtype <U1"),
        (
            lambda: layouts.mma().element(np.timedelta64(1, "s"), 0),
            "element: thread has dtype timedel",
        ),
        (lambda: layouts.mma().holder(0, None), "holder: col has dtype object"),
        (lambda: layouts.mma().mask_bit([0.5]), "mask_bit: register has dtype float64"),
    ],
)
def test_indices_are_integers(call, text):
    with pytest.raises(TypeError, match=f"^{text}.*, want integers$"):
        call()


@by_order
def test_packing_puts_every_bit_at_its_address(order):
    """Each column alone, then each row alone: together every bit."""
    word, bit = ADDRESS[order](ROWS, COLS)
    for chosen in (ROWS, COLS):
        bits = chosen == np.arange(BLOCK)[:, None, None]
        words = layouts.pack(bits, order)
        assert words.shape == (BLOCK, *ORDERS[order])
        assert words.dtype == np.uint32
        flat = words.reshape(BLOCK, -1)
        np.testing.assert_array_equal(flat[:, word] >> bit.astype(np.uint32) & 1, bits)
        np.testing.assert_array_equal(layouts.unpack(words, order), bits)


@given(st.data())
def test_any_pattern_comes_back(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    batch = tuple(data.draw(st.lists(st.integers(0, 3), max_size=2)))
    density = data.draw(st.sampled_from([0.0, 0.001, 0.5, 0.999, 1.0]))
    bits = rng.random((*batch, BLOCK, BLOCK)) < density
    kinds = {"plain": bits, "turned": bits.swapaxes(-1, -2), "reversed": bits[..., ::-1, ::-1]}
    bits = kinds[data.draw(st.sampled_from(sorted(kinds)))]
    for order, shape in ORDERS.items():
        words = layouts.pack(bits, order)
        assert words.shape == (*batch, *shape)
        np.testing.assert_array_equal(layouts.unpack(words, order), bits)
        other = "row_major" if order == "fragment" else "fragment"
        there = layouts.pack(layouts.unpack(words, order), other)
        np.testing.assert_array_equal(layouts.pack(layouts.unpack(there, other), order), words)


@pytest.mark.parametrize("first_col", range(0, BLOCK, 64))
@by_tile
def test_a_thread_finds_its_mask_in_its_own_words(tile, first_col):
    """What a kernel does: read two words a block, take bit by bit, know the element by register."""
    rng = np.random.default_rng(0)
    blocks = rng.random((4, BLOCK, BLOCK)) < 0.5
    words = layouts.pack(blocks)  # four blocks side by side
    dense = blocks.swapaxes(0, 1).reshape(BLOCK, -1)
    thread, register = everything(tile)
    row, col = tile.element(thread, register)
    block, i, bit = tile.mask_bit(register, first_col)
    seen = words[block, thread // 32, thread % 32, i] >> bit.astype(np.uint32) & 1
    np.testing.assert_array_equal(seen, dense[row, first_col + col])


def test_a_tile_of_64_columns_takes_halves_and_one_of_256_two_words():
    half = layouts.wgmma(64).mask_bit(np.arange(32), first_col=64)
    assert set(half[0]) == {0}
    assert set(half[2]) == set(range(16, 32))
    block, i, bit = layouts.wgmma(256).mask_bit(np.arange(128))
    assert {*zip(block, i, strict=True)} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert sorted(bit[(block == 1) & (i == 0)]) == list(range(32))


@pytest.mark.parametrize("slab", range(8))
def test_a_warp_reads_256_bytes_in_a_row(slab):
    """One load of 8 bytes a lane: consecutive, so every bank once in each half of the warp."""
    tile = layouts.mma(BLOCK)
    addresses = []
    for lane in range(32):
        row, col = tile.element(lane, np.arange(tile.registers))
        word, _ = layouts.fragment_address(16 * slab + row, col)
        assert len(set(word)) == 2
        assert word.max() == word.min() + 1
        addresses += [int(word.min()), int(word.max())]
    assert addresses == list(range(64 * slab, 64 * (slab + 1)))
    for half in (addresses[:32], addresses[32:]):
        assert {word % 32 for word in half} == set(range(32))


BITS = np.zeros((BLOCK, BLOCK), bool)
WORDS = np.zeros((8, 32, 2), np.uint32)


@pytest.mark.parametrize(
    ("function", "arguments", "error", "text"),
    [
        ("pack", (BITS.astype(int),), TypeError, "pack: bits has dtype int64, want bool"),
        ("pack", (BITS[1:],), ValueError, "bits has shape (127, 128), want (..., 128, 128)"),
        ("pack", (BITS, "col"), ValueError, "order is 'col', want 'fragment' or 'row_major'"),
        ("pack", (BITS, None), ValueError, "order is None, want"),
        ("unpack", (WORDS.view(np.int32),), TypeError, "words has dtype int32, want uint32"),
        ("unpack", (WORDS, "row_major"), ValueError, "words has shape (8, 32, 2), want (..., 128,"),
        ("unpack", (WORDS[0],), ValueError, "words has shape (32, 2), want (..., 8, 32, 2)"),
        ("pack", ([[True]],), TypeError, "pack: bits is a list, want an array of bool"),
        (
            "pack",
            (np.ma.array(BITS, mask=True),),
            TypeError,
            "bits is a MaskedArray, want an array",
        ),
        ("unpack", (None,), TypeError, "words is a NoneType, want an array of uint32"),
        ("wgmma", ("8",), TypeError, "n is '8' (str), want a multiple of 8 from 8 to 256"),
        ("wgmma", (8.0,), TypeError, "n is 8.0 (float), want a multiple of 8 from 8 to 256"),
        ("mma", (None,), TypeError, "n is None (NoneType), want a multiple of 8 from 8 on"),
    ],
)
def test_errors(function, arguments, error, text):
    with pytest.raises(error, match=f"^{function}: ") as caught:
        getattr(layouts, function)(*arguments)
    assert text in str(caught.value)


@by_order
def test_a_picture_shows_the_address_of_each_bit(order):
    pytest.importorskip("matplotlib")
    from fa_cupy import plot

    ax = plot.layout(order, rows=3, cols=40)
    word, bit = ADDRESS[order](*np.indices((3, 40)))
    assert [t.get_text() for t in ax.texts] == [str(b) for b in bit.reshape(-1)]
    labels = [t.get_text() for t in ax.get_yticklabels()]
    for row, label in enumerate(labels):
        assert set(word[row]) <= set(map(int, label.split(", ")))
    with pytest.raises(ValueError, match=r"^plot\.layout: order is 'x', want"):
        plot.layout("x")
    with pytest.raises(ValueError, match=r"^plot\.layout: order is \[\], want"):
        plot.layout([])
    for arg, count in (("rows", 129), ("cols", 129), ("rows", 0), ("cols", -1)):
        with pytest.raises(ValueError, match=rf"^plot\.layout: {arg} is .*, want an int from 1 to"):
            plot.layout(order, **{arg: count})
