"""Functions of elements on CuPy arrays, with the neighbours that a thread takes at once."""

import numpy as np
import pytest

from fa_cupy.cpu.distributed import sums as on_cpu
from fa_cupy.distributed.order import copy_bits, dense
from tests.support.kernel_attention import DTYPES

pytest.importorskip("cupy")
import cupy as cp

from fa_cupy.gpu import pointwise
from fa_cupy.gpu.distributed import sums

# Parts of arrays of one column or two rows more, among others: of some, no neighbours are aligned.
LAYOUTS = {
    "dense": lambda empty, shape: empty(shape),
    "a column on": lambda empty, shape: empty((*shape[:-1], shape[-1] + 1))[..., 1:],
    "some rows": lambda empty, shape: empty((*shape[:-2], shape[-2] + 2, shape[-1]))[..., 1:-1, :],
    "columns": lambda empty, shape: empty((*shape[:-2], shape[-1], shape[-2])).swapaxes(-1, -2),
    "backwards": lambda empty, shape: empty(shape)[..., ::-1, :],
}
SHAPES = [(2, 3, 8), (5, 6), (4, 7), (1, 1), (3, 0), (0, 4), (2, 3, 64, 32)]
PAIRS = [
    ("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float32"),
    ("float32", "float16"), ("bfloat16", "bfloat16"), ("float16", "float16"),
    ("float32", "float32"), ("float64", "float64"), ("float64", "float32"),
]  # fmt: skip
# No subnormal ones, which CuPy takes for 0.
SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e38, 1e-30, -1.0000001])


def on_host(x):
    """A copy on the host."""
    if x.dtype.name == "bfloat16":
        return x.view(np.uint16).get().view(x.dtype)
    return x.get()


def both(shape, dtype, layout, seed):
    """An array on the device, laid out in one of these ways, and one of the same numbers."""
    dtype = np.dtype(DTYPES.get(dtype, dtype))
    rng = np.random.default_rng(seed)
    with np.errstate(all="ignore"):
        host = np.where(
            rng.random(shape) < 0.2, rng.choice(SPECIAL, shape), rng.standard_normal(shape)
        ).astype(dtype)
    bits = f"u{dtype.itemsize}"
    device = LAYOUTS[layout](lambda shape: cp.zeros(shape, bits), shape)
    device[...] = cp.asarray(host.view(bits))
    return device.view(dtype), host


def same(got, want):
    """Whether numbers are the same, NaN included, and the signs of zeros."""
    got, want = (x.astype(np.float64) for x in (on_host(got), want))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got[got == 0]), np.signbit(want[want == 0]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dtypes_are_converted(shape, layout):
    for dtype, other in PAIRS:
        x, host = both(shape, dtype, layout, 1)
        found = sums.convert(x, np.dtype(DTYPES.get(other, other)))
        assert found.dtype == DTYPES.get(other, other)
        if min(shape) > 1 and layout in ("dense", "columns"):
            assert np.argsort(found.strides).tolist() == np.argsort(x.strides).tolist()
        same(found, on_cpu.convert(host, found.dtype))


@pytest.mark.parametrize("layouts", [(x, "dense") for x in LAYOUTS] + [("dense", "some rows")])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_are_those_of_numpy(shape, layouts):
    for dtype, other in PAIRS:
        x, host = both(shape, dtype, layouts[0], 1)
        more, host_more = both(shape, other, layouts[1], 2)
        sums.add(x, more)
        on_cpu.add(host, host_more)
        same(x, host)


def test_a_single_number():
    x, host = cp.asarray(np.float32(0.1)), np.array(np.float16(0.3))
    sums.add(x, cp.asarray(host))
    assert x.get() == np.float32(0.1) + np.float32(np.float16(0.3))
    assert sums.convert(x, np.dtype(np.float16)).get() == np.float16(x.get())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES[:3] + SHAPES[-1:], ids=str)
def test_results_are_merged(shape, layout):
    """As NumPy does, and with the same bits however many elements a thread takes."""
    for dtype, other in PAIRS[:-1]:
        rng = np.random.default_rng(3)
        real = np.float64 if dtype == "float64" else np.float32
        lses = rng.standard_normal((2, *shape[:-1])).astype(real)
        lses[rng.random(lses.shape) < 0.2] = -np.inf
        results = []
        for of_out in (layout, "a column on"):
            out, host = both(shape, dtype, of_out, 1)
            more, host_more = both(shape, other, "dense", 2)
            lse = cp.asarray(lses[0])
            sums.merge(out, lse, more, cp.asarray(lses[1]))
            results.append(on_host(out))
        host_lse = lses[0].copy()
        on_cpu.merge(host, host_lse, host_more, lses[1])
        close = {"float16": 2e-3, "bfloat16": 1e-2, "float32": 1e-6, "float64": 1e-14}[dtype]
        for found in results:
            found, want = (x.astype(np.float64) for x in (found, host))
            np.testing.assert_allclose(found, want, rtol=close, atol=close)
        bits = f"u{results[0].itemsize}"
        np.testing.assert_array_equal(results[0].view(bits), results[1].view(bits))
        np.testing.assert_allclose(lse.get(), host_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("of_out", LAYOUTS)
def test_bits_are_copied(layout, of_out):
    for shape in SHAPES:
        for dtype in ("bfloat16", "float32", "float64", "int8"):
            x, host = both(shape, dtype, layout, 1)
            out, _ = both(shape, dtype, of_out, 2)
            copy_bits(out, x)
            np.testing.assert_array_equal(on_host(out).view("u1"), host.view("u1"))
            found = dense(x)
            assert found.flags.c_contiguous
            np.testing.assert_array_equal(on_host(found).view("u1"), host.view("u1"))


def test_threads_take_as_many_neighbours_as_are_aligned():
    def lanes(shape, dtype, layout="dense"):
        return pointwise._lanes_of(both(shape, dtype, layout, 1)[0])

    assert lanes((5, 8), "bfloat16") == lanes((5, 8), "float32") == 4
    assert lanes((5, 8), "float64") == lanes((5, 6), "bfloat16") == lanes((5, 2), "float32") == 2
    assert lanes((5, 7), "float16") == lanes((5, 8), "float32", "a column on") == 1
    assert lanes((5, 8), "float32", "columns") == lanes((0, 8), "float32") == 1
    assert lanes((5, 8), "float16", "some rows") == lanes((5, 8), "float16", "backwards") == 4
