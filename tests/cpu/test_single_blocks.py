"""Masks of single blocks, whose matrices are read as bits that are kept with the mask."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import BitMask, Score, attention, attention_backward
from fa_cupy.core import attention_problem
from fa_cupy.cpu import tile_ops
from fa_cupy.cpu.masks import single
from fa_cupy.masks import export
from tests.support import blas
from tests.support.blas import two_threads
from tests.support.strategies import Case, check_against_reference, normal

with_threads = pytest.fixture(autouse=True, scope="module")(two_threads)

# Matrices that are small, sparse, and with words; of whole bytes and not.
SIZES = [(4, 4), (5, 7), (1, 13), (24, 24), (40, 41), (128, 128), (100, 3)]


def stack(shape, seed=0):
    """Matrices of all kinds: empty, sparse, others, full."""
    rng = np.random.default_rng(seed)
    share = rng.choice([0, 0.03, 0.5, 0.97, 1], shape[:-2])[..., None, None]
    return rng.random(shape) < share


def arrays(batch, q_len, k_len, dim=8):
    rng = np.random.default_rng(1)
    return [normal(rng, (*batch, n, dim), np.float32) for n in (q_len, k_len, k_len)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_matrices_of_single_blocks(size):
    seen = stack((9, *size))
    mask = BitMask(seen)
    for numbers in ([*range(9)], [3], [8, 0, 0, 4], []):
        found = export.of_single(mask._grid, mask._store.host(), np.array(numbers, np.int32))
        np.testing.assert_array_equal(found, seen[numbers])
    np.testing.assert_array_equal(mask.to_dense(), seen)


@pytest.mark.parametrize("step", [1, 50, 1 << 20])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_bits_are_those_of_the_mask_and_kept(size, step, monkeypatch):
    monkeypatch.setattr(single, "_ELEMENTS", step)
    seen = stack((3, 4, *size))
    mask = BitMask(seen)
    bits = single.bits_of(mask)
    wanted = np.packbits(seen.reshape(3, 4, -1), axis=-1, bitorder="little")
    np.testing.assert_array_equal(bits[:, :, 0], wanted)
    assert single.bits_of(mask) is bits
    assert not bits.flags.writeable
    shared = BitMask(np.broadcast_to(seen[:1], seen.shape))
    assert single.bits_of(shared).shape == (1, 4, 1, wanted.shape[-1])


def test_masks_without_such_bits():
    assert single.bits_of(BitMask(stack((2, 129, 4)))) is None
    assert single.bits_of(BitMask(np.zeros((2, 0, 4), bool))) is None
    few = BitMask(stack((2, 128, 128), seed=3))
    many = few[np.arange(1000) % 2]
    assert many.nbytes < 1000 * 2048
    assert single.bits_of(few) is not None
    assert single.bits_of(many) is None


# Shapes of queries, of keys and of masks; the last ones share keys, and queries of one row are then
# rows of one product.
SHAPES = [
    ((6,), (6,), (6,)),
    ((2, 3), (2, 3), (3,)),
    ((2, 3), (2, 3), (2, 1)),
    ((2, 3), (2, 3), ()),
    ((300,), (300,), (300,)),
    ((2, 6), (2, 2), (2, 6)),
    ((2, 6), (2, 2), (6,)),
    ((2, 6), (2, 2), (2, 1)),
]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_attention_is_that_under_the_array(shapes, size):
    """Bit for bit, with any number of threads."""
    (queries, keys, batch), (q_len, k_len) = shapes, size
    q = arrays(queries, q_len, k_len)[0]
    _, k, v = arrays(keys, q_len, k_len)
    seen = stack((*batch, *size))
    wanted = attention(q, k, v, mask=seen, return_lse=True)
    check_against_reference(Case(q, k, v, None, seen), *wanted)
    mask = BitMask(seen)
    for threads in (1, 2, 5):
        with blas.threads(threads):
            found = attention(q, k, v, mask=mask, return_lse=True)
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(a, b)


@given(st.sampled_from(SIZES), st.integers(0, 2**32 - 1), st.booleans())
def test_options_and_indices(size, seed, expression):
    rng = np.random.default_rng(seed)
    q, k, v = arrays((5, 2), *size)
    seen = stack((4, *size), seed)
    places = rng.integers(0, 4, (5, 2))
    options = [
        {"is_causal": True, "causal_align": "bottom_right"},
        {"window": (3, 2), "causal_align": "top_left"},
        {"softcap": 2.0, "sinks": normal(rng, (2, 1), np.float32)},
        {"bias": normal(rng, (2, 1, size[1]), np.float32)},
    ][seed % 4]
    if expression:
        options = {"score": Score("2 * s")}
    wanted = attention(q, k, v, mask=seen[places], **options)
    np.testing.assert_array_equal(attention(q, k, v, mask=BitMask(seen)[places], **options), wanted)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_and_hidden(bad):
    q, k, v = arrays((50,), 8, 9)
    seen = stack((50, 8, 9))
    seen[7, :, 4] = False
    k[7, 4], v[7, 4], v[11, 2] = bad, bad, bad
    out, lse = attention(q, k, v, mask=BitMask(seen), return_lse=True)
    check_against_reference(Case(q, k, v, None, seen), out, lse)


def test_rows_of_several_tiles(monkeypatch):
    """Under a window, half of the queries of a matrix are a tile."""
    q, k, v = arrays((40,), 128, 100)
    seen = stack((40, 128, 100))
    cut, tile = set(), tile_ops.PackedMatrices.tile

    def noted(self, elements):
        cut.add((self.rows.start, self.keys.start))
        return tile(self, elements)

    monkeypatch.setattr(tile_ops.PackedMatrices, "tile", noted)
    options = {"window": (5, 5), "causal_align": "top_left"}
    found = attention(q, k, v, mask=BitMask(seen), **options)
    np.testing.assert_array_equal(found, attention(q, k, v, mask=seen, **options))
    assert cut == {(0, 0), (64, 59)}


def test_heads_of_several_tiles():
    """Heads that share keys are the rows of a tile, 512 of them at most."""
    q = arrays((2, 1500), 1, 13)[0]
    _, k, v = arrays((2, 1), 1, 13)
    for shape in ((2, 1500, 1, 13), (2, 1, 1, 13), (1, 13)):
        seen = np.random.default_rng(0).random(shape) < 0.5
        found = attention(q, k, v, mask=BitMask(seen))
        np.testing.assert_array_equal(found, attention(q, k, v, mask=seen))


def test_repeated_calls_are_checked_once(monkeypatch):
    """A repeated call uses the plan of the first one; a mask of another size gets its own plan."""
    q, k, v = arrays((30,), 4, 4)
    calls, check = [], attention_problem.attention_problem

    def counted(*given, **options):
        calls.append(options)
        return check(*given, **options)

    attention(q, k, v)  # from here on calls are looked up
    monkeypatch.setattr(attention_problem, "attention_problem", counted)
    for seed in range(3):
        seen = stack((30, 4, 4), seed)
        found = attention(q, k, v, mask=BitMask(seen))
        np.testing.assert_array_equal(found, attention(q, k, v, mask=seen))
    assert len(calls) == 2
    with pytest.raises(ValueError, match="mask has q_len 2, q has 4"):  # as many bits
        attention(q, k, v, mask=BitMask(stack((30, 2, 8))))
    with pytest.raises(ValueError, match="broadcast"):
        attention(q, k, v, mask=BitMask(stack((29, 4, 4))))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("shapes", SHAPES[:-3], ids=str)
def test_gradients_are_those_under_the_array(shapes, size):
    (queries, keys, batch), (q_len, k_len) = shapes, size
    q = arrays(queries, q_len, k_len)[0]
    _, k, v = arrays(keys, q_len, k_len)
    seen = stack((*batch, *size))
    out, lse = attention(q, k, v, mask=seen, return_lse=True)
    mask, options = BitMask(seen), {"need": ("q", "v")}
    for more in ({}, {"softcap": 3.0}, options):
        wanted = attention_backward(out, q, k, v, out, lse, mask=seen, **more)
        for threads in (1, 2):
            with blas.threads(threads):
                found = attention_backward(out, q, k, v, out, lse, mask=mask, **more)
            for a, b in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(a, b)


def test_gradients_say_what_does_not_fit():
    q, k, v = arrays((30,), 4, 4)
    out, lse = attention(q, k, v, return_lse=True)
    attention_backward(out, q, k, v, out, lse)
    for shape, said in (((30, 2, 8), "mask has q_len 2, q has 4"), ((29, 4, 4), "broadcast")):
        with pytest.raises(ValueError, match=said):
            attention_backward(out, q, k, v, out, lse, mask=BitMask(np.ones(shape, bool)))
