"""Key lengths and page tables: rules that hold on the CPU and the GPU alike, and a fuzz of them."""

import re
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from fa_cupy import BitMask, Score, attention, reference
from fa_cupy.keys import layout
from fa_cupy.keys.layout import KeyArrays
from tests.support.every_run import by_dtype_examples
from tests.support.keyed_cases import cases_with_lengths, native_options, paged_cases
from tests.support.strategies import (
    DTYPES,
    Case,
    by_dtype,
    check_against_reference,
    normal,
    to_numpy,
)

HALF, BFLOAT16, SINGLE, DOUBLE = DTYPES
LENGTHS = np.array([0, 77, 130, 1])
BANDS = (
    {},
    {"is_causal": True, "causal_align": "bottom_right"},
    {"is_causal": True, "causal_align": "top_left"},
    {"window": (20, 3), "causal_align": "bottom_right"},
    {"window": (None, 3), "causal_align": "top_left"},
)


def draw(*shapes, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [normal(rng, shape, dtype) for shape in shapes]


def solve(xp, *arrays, **options):
    """Output and log-sum-exp as NumPy arrays."""
    arrays = [None if x is None else xp.asarray(x) for x in arrays]
    found = attention(*arrays, return_lse=True, **native_options(xp, options))
    return [to_numpy(x) for x in found]


def in_pages(x, lengths, size, seed=0):
    """Pages of keys (batch, heads, k_len, dim) in any order, with NaN in between, and the table."""
    batch, heads, k_len, dim = x.shape
    per_sequence = -(-k_len // size)
    count = batch * per_sequence + 3
    pages = np.full((count, heads, size, dim), np.nan).astype(x.dtype)
    numbers = np.random.default_rng(seed).permutation(count)[: batch * per_sequence]
    table = numbers.reshape(batch, per_sequence)
    for b, length in enumerate(lengths):
        for j in range(length):
            pages[table[b, j // size], :, j % size] = x[b, :, j]
        table[b, -(-length // size) :] = -1
    return pages, table


def describe(case):
    options = {name: getattr(x, "shape", x) for name, x in case.options.items()}
    note(f"{case.q.dtype} {[x.shape for x in case.arrays if x is not None]} {options}")


# The definition


@pytest.mark.parametrize(**by_dtype())
@by_dtype_examples()
@given(data=st.data())
def test_any_call_with_lengths_agrees_with_the_reference(xp, dtype, data):
    case = data.draw(cases_with_lengths([dtype]))
    describe(case)
    shape = reference.attention(*case.arrays, **case.options)[0].shape
    out = xp.asarray(np.full(shape, np.nan).astype(case.q.dtype)) if case.with_out else None
    options = native_options(xp, case.options)
    found, lse = attention(*case.native(xp), return_lse=True, out=out, **options)
    assert out is None or found is out
    check_against_reference(case, to_numpy(found), to_numpy(lse))


@pytest.mark.parametrize(**by_dtype())
@by_dtype_examples()
@given(data=st.data())
def test_any_call_with_pages_agrees_with_the_reference(xp, dtype, data):
    case = data.draw(paged_cases([dtype]))
    describe(case)
    shape = reference.attention(*case.arrays, **case.options)[0].shape
    out = xp.asarray(np.full(shape, np.nan).astype(case.q.dtype)) if case.with_out else None
    options = native_options(xp, case.options)
    found, lse = attention(*case.native(xp), return_lse=True, out=out, **options)
    check_against_reference(case, to_numpy(found), to_numpy(lse))


@pytest.mark.parametrize("options", BANDS, ids=str)
@pytest.mark.parametrize("q_len", [1, 5, 70])
@pytest.mark.parametrize(**by_dtype())
def test_entries_are_problems_of_their_own(xp, dtype, q_len, options):
    """With keys, values and bias cut off at the ends, one entry at a time."""
    q, k, v, bias = draw(
        (4, 8, q_len, 32), (4, 4, 130, 32), (4, 2, 130, 24), (4, 1, q_len, 130), dtype=dtype
    )
    out, lse = solve(xp, q, k, v, bias, k_lengths=LENGTHS, **options)
    for b, n in enumerate(LENGTHS):
        parts = q[b, None], k[b, None, :, :n], v[b, None, :, :n], bias[b, None, ..., :n]
        case = Case(*parts, options=options)
        check_against_reference(case, out[b, None], lse[b, None])


@pytest.mark.parametrize("options", BANDS, ids=str)
@pytest.mark.parametrize("size", [16, 64, 128])
@pytest.mark.parametrize("q_len", [1, 3, 70])
def test_pages_hold_the_same_keys(xp, q_len, size, options):
    q, k, v = draw((4, 8, q_len, 32), (4, 4, 130, 32), (4, 4, 130, 24))
    (k_pages, table), (v_pages, _) = (in_pages(x, LENGTHS, size) for x in (k, v))
    options = {**options, "k_lengths": LENGTHS}
    found = solve(xp, q, k_pages, v_pages, page_table=table, **options)
    want = solve(xp, q, k, v, **options)
    for x, y in zip(found, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


# What is not there


@pytest.mark.parametrize(**by_dtype())
@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e4])
def test_what_lies_behind_the_end_never_shows(xp, dtype, garbage):
    q, k, v, bias = draw((4, 6, 9, 16), (4, 3, 130, 16), (4, 3, 130, 16), (4, 1, 1, 130),
                         dtype=dtype)  # fmt: skip
    before = solve(xp, q, k, v, bias, k_lengths=LENGTHS)
    for b, n in enumerate(LENGTHS):
        for x in (k[b], v[b]):
            x[:, n:] = garbage
        bias[b, ..., n:] = garbage
    after = solve(xp, q, k, v, bias, k_lengths=LENGTHS)
    for x, y in zip(before, after, strict=True):
        assert np.isfinite(x[1:]).all()
        # Products by cuBLAS are summed in another order where something is not finite.
        by_blas = xp is not np and np.dtype(dtype).itemsize > 2
        np.testing.assert_allclose(x, y, rtol=1e-5 if by_blas else 0, atol=1e-6 if by_blas else 0)


@pytest.mark.gpu
def test_numbers_that_are_not_aligned_are_refused(cupy):
    """A kernel that reads one ends the context: by the first call of a kind and by later ones."""
    q, k, v = (cupy.asarray(x) for x in draw((4, 8, 1, 64), (4, 2, 600, 64), (4, 2, 600, 64),
                                             dtype=HALF))  # fmt: skip
    odd = cupy.zeros(9, np.int32)[1:].view(np.int64)
    for lengths in (odd, cupy.zeros(4, np.int64), odd):
        if lengths is not odd:
            assert not attention(q, k, v, k_lengths=lengths).any()
            continue
        with pytest.raises(ValueError, match="k_lengths is at address"):
            attention(q, k, v, k_lengths=lengths)


def test_without_keys_the_output_is_0_and_the_lse_that_of_the_sink(xp):
    q, k, v, sinks = draw((2, 3, 4, 8), (2, 3, 16, 8), (2, 3, 16, 5), (3, 1))
    out, lse = solve(xp, q, k, v, k_lengths=np.array([0, 16]))
    assert not out[0].any()
    assert np.isneginf(lse[0]).all()
    assert np.isfinite(lse[1]).all()
    out, lse = solve(xp, q, k, v, k_lengths=0, sinks=sinks)
    assert not out.any()
    np.testing.assert_array_equal(lse, np.broadcast_to(sinks, lse.shape))


def test_a_table_without_pages_has_no_keys(xp):
    q, k = draw((2, 3, 4, 8), (5, 3, 16, 8))
    out, lse = solve(xp, q, k, k, page_table=np.zeros((2, 0), np.int32))
    assert not out.any()
    assert np.isneginf(lse).all()


def test_sequences_without_keys_need_no_page():
    """A cache to which nothing has been appended may have no memory."""
    q, pages = np.ones((3, 1, 2, 4)), np.zeros((0, 1, 16, 4))
    places = {"page_table": np.zeros((3, 2), int), "k_lengths": np.zeros(3, int)}
    out, lse = attention(q, pages, pages, return_lse=True, **places)
    want = reference.attention(q, pages, pages, **places)
    np.testing.assert_array_equal(out, np.zeros((3, 1, 2, 4)))
    np.testing.assert_array_equal(lse, np.full((3, 1, 2), -np.inf))
    for x, y in zip((out, lse), want, strict=True):
        np.testing.assert_array_equal(x, y)


# Batch axes


@pytest.mark.parametrize("lengths", [5, np.int16(5), np.array(5), np.array(5, np.int32)], ids=repr)
@pytest.mark.parametrize("axes", [2, 3, 4, 5])
def test_one_length_for_all(xp, axes, lengths):
    q, k, v = draw((2, 3, 2, 7, 8), (2, 3, 2, 9, 8), (2, 3, 2, 9, 4))
    q, k, v = (x[(0,) * (5 - axes)] for x in (q, k, v))
    out, _ = solve(xp, q, k, v, k_lengths=lengths)
    want, _ = solve(xp, q, k[..., :5, :], v[..., :5, :])
    np.testing.assert_allclose(out, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(3,), (1,), (2, 1), (1, 3), (2, 3)], ids=str)
def test_lengths_broadcast_with_the_batch(xp, shape):
    q, k, v = draw((2, 1, 4, 7, 8), (1, 3, 2, 9, 8), (1, 3, 2, 9, 4))
    lengths = np.random.default_rng(1).integers(0, 10, shape)
    out, lse = solve(xp, q, k, v, k_lengths=lengths)
    case = Case(q, k, v, options={"k_lengths": lengths})
    assert out.shape == (2, 3, 4, 7, 4)
    check_against_reference(case, out, lse)


def test_lengths_and_tables_add_batch_entries(xp):
    """One set of queries for several sequences, and one sequence for all."""
    q, k, v = draw((1, 4, 7, 8), (6, 2, 16, 8), (6, 2, 16, 4))
    table = np.array([[0, 3, 1], [0, 3, 2]])
    for options in (
        {"page_table": table}, {"page_table": table, "k_lengths": np.array([40, 3])},
        {"page_table": table[0], "k_lengths": np.array([40, 3])},
        {"page_table": table[:1], "k_lengths": np.array([40, 3])},
    ):  # fmt: skip
        out, lse = solve(xp, q, k, v, **options)
        assert out.shape == (2, 4, 7, 4)
        check_against_reference(Case(q, k, v, options=options), out, lse)


def test_scores_know_the_entry_the_head_and_the_positions(xp):
    q, k, v = draw((4, 8, 9, 16), (4, 2, 130, 16), (4, 2, 130, 16))
    weights = draw((4, 8, 9, 130))[0]
    (k_pages, table), (v_pages, _) = (in_pages(x, LENGTHS, 32) for x in (k, v))
    for text in ("s + 0.3 * b - 0.01 * (h + 1) * abs(i - j)", "s + w[b, h, i, j]"):
        arrays = {"w": np.pad(weights, ((0, 0),) * 3 + ((0, 30),))} if "w" in text else {}
        given = {name: xp.asarray(x) for name, x in arrays.items()}
        for options in BANDS:
            options = {**options, "k_lengths": LENGTHS}
            want = reference.attention(q, k, v, score=Score(text, **arrays), **options)
            out, lse = solve(xp, q, k, v, score=Score(text, **given), **options)
            np.testing.assert_allclose(out, want[0], atol=1e-5)
            np.testing.assert_allclose(lse, want[1], atol=1e-4)
            out, lse = solve(
                xp, q, k_pages, v_pages, score=Score(text, **given), page_table=table, **options
            )
            np.testing.assert_allclose(out, want[0], atol=1e-5)
            np.testing.assert_allclose(lse, want[1], atol=1e-4)


# Errors


def refusals():
    q, k, pages = ((2, 4, 5, 8), (2, 4, 32, 8), (6, 4, 16, 8))
    table = np.zeros((2, 2), np.int32)
    return {
        "k_lengths is -1, want 0 to 32": (q, k, {"k_lengths": -1}),
        "k_lengths is 33, want 0 to 32": (q, k, {"k_lengths": 33}),
        "k_lengths[1] is 40, want 0 to 32": (q, k, {"k_lengths": np.array([1, 40])}),
        "k_lengths[0] is -3, want 0 to 32": (q, k, {"k_lengths": np.array([-3, 4], np.int32)}),
        f"k_lengths is {2**70} (int), want an int of 64 bits": (q, k, {"k_lengths": 2**70}),
        "k_lengths has batch shape (3,), want one that broadcasts with (2,)": (
            q, k, {"k_lengths": np.ones(3, int)}),
        "k_lengths has batch shape (4,), want () for arrays of batch shape (4,)": (
            q[1:], k[1:], {"k_lengths": np.ones(4, int)}),
        "k_lengths has batch shape (4,), want () for arrays of batch shape ()": (
            q[2:], k[2:], {"k_lengths": np.ones(4, int)}),
        "is_causal with k_lengths needs causal_align='top_left'": (
            q, (2, 4, 5, 8), {"k_lengths": 5, "is_causal": True}),
        "window with page_table needs causal_align='top_left'": (
            (2, 4, 32, 8), pages, {"page_table": table, "window": (1, 1)}),
        "page_table has shape (), want (..., pages_per_sequence)": (
            q, pages, {"page_table": np.array(3)}),
        "page_table[1, 0] is 6, want 0 to 5": (
            q, pages, {"page_table": np.array([[0, 1], [6, 0]])}),
        "page_table[0, 1] is -1, want 0 to 5": (
            q, pages, {"page_table": np.array([[0, -1], [2, -1]]), "k_lengths": np.array([17, 16])},
        ),
        "page_table[0, 0] is 0, want no page to be needed: there are 0": (
            q, (0, 4, 16, 8), {"page_table": table}),
        "page_table[0, 1] is 7, want 0 to 5": (  # the only row of the table
            q, pages, {"page_table": np.array([[0, 7]]), "k_lengths": np.array([16, 17])}),
        "page_table has batch shape (3,), want one that broadcasts with (2,)": (
            q, pages, {"page_table": np.zeros((3, 2), int)}),
        "k has shape (4, 32, 8), want (pages, heads, page_size, head_dim) with page_table": (
            q, k[1:], {"page_table": table}),
        "k has page_size 24, want a positive multiple of 16": (
            q, (6, 4, 24, 8), {"page_table": table}),
        "k has page_size 0, want a positive multiple of 16": (
            q, (6, 4, 0, 8), {"page_table": table}),
        "k has 3 heads, q has 4": (q, (6, 3, 16, 8), {"page_table": table}),
        "k has head_dim 9, q has 8": (q, (6, 4, 16, 9), {"page_table": table}),
    }  # fmt: skip


@pytest.mark.parametrize("message", refusals())
def test_values_and_shapes_are_checked(message):
    q, k, options = refusals()[message]
    q, k = np.zeros(q, np.float32), np.zeros(k, np.float32)
    with pytest.raises(ValueError, match=f"^attention: {re.escape(message)}"):
        attention(q, k, k, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k_lengths": True}, "k_lengths is True (bool), want an int"),
        ({"k_lengths": np.True_}, "True_ (bool), want an int or an array"),
        (
            {"k_lengths": np.timedelta64(3, "s")},
            "np.timedelta64(3,'s') (timedelta64), want an int or an array",
        ),
        ({"k_lengths": 3.0}, "k_lengths is 3.0 (float), want an int or an array of int32 or int64"),
        ({"k_lengths": [3, 4]}, "k_lengths is [3, 4] (list), want an int or an array"),
        ({"k_lengths": np.ones(2)}, "k_lengths has dtype float64, want int32 or int64"),
        ({"k_lengths": np.ones(2, bool)}, "k_lengths has dtype bool, want int32 or int64"),
        ({"k_lengths": np.ones(2, np.uint8)}, "k_lengths has dtype uint8, want int32 or int64"),
        ({"k_lengths": np.ones(2, ">i4")}, "k_lengths has dtype >i4, want int32 or int64"),
        ({"k_lengths": np.ma.ones(2, int)}, "k_lengths is a masked array"),
        ({"page_table": np.ones((2, 2))}, "page_table has dtype float64, want int32 or int64"),
        (
            {"page_table": [[1, 2]]},
            "page_table is [[1, 2]] (list), want an array of int32 or int64",
        ),
        ({"page_table": "x"}, "page_table is a str, want an array"),
    ],
)
def test_types_are_checked(options, message):
    q, k = np.zeros((2, 4, 5, 8), np.float32), np.zeros((2, 4, 32, 8), np.float32)
    with pytest.raises(TypeError, match=f"^attention: .*{re.escape(message)}"):
        attention(q, k, k, **options)


@pytest.mark.parametrize("options", [{"k_lengths": 3}, {"page_table": np.zeros((1, 2), int)}])
def test_sparse_masks_and_biases_are_refused(options):
    sparse = pytest.importorskip("scipy.sparse")
    q, k = np.zeros((1, 4, 5, 8), np.float32), np.zeros((1, 4, 32, 8), np.float32)
    (arg,) = options
    matrix = sparse.csr_array(np.ones((5, 32)))
    for mask in (BitMask(np.ones((5, 32), bool)), matrix != 0):
        with pytest.raises(ValueError, match=f"mask is a BitMask or a sparse .* bool with {arg}"):
            attention(q, k, k, mask=mask, **options)
    with pytest.raises(ValueError, match=f"bias is a sparse matrix, want an array with {arg}"):
        attention(q, k, k, matrix, **options)


def test_out_may_not_overlap_the_lengths():
    memory = np.zeros(100)
    out, lengths = memory[:20].reshape(1, 1, 5, 4), memory[10:11].view(np.int64)
    q, k = np.zeros((1, 1, 5, 4)), np.zeros((1, 1, 7, 4))
    with pytest.raises(ValueError, match="out overlaps k_lengths in memory"):
        attention(q, k, k, k_lengths=lengths, out=out)
    table = memory[10:11].view(np.int64).reshape(1, 1)
    with pytest.raises(ValueError, match="out overlaps page_table in memory"):
        attention(q, np.zeros((1, 1, 16, 4)), np.zeros((1, 1, 16, 4)), page_table=table, out=out)


# Other libraries


class Tensor:
    """An array of a library that has nothing but DLPack."""

    def __init__(self, x):
        self.x = x

    def __dlpack__(self, **options):
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()

    def __array_namespace__(self):
        return SimpleNamespace(from_dlpack=lambda x: Tensor(np.asarray(x)))


def test_lengths_and_tables_by_dlpack():
    q, k = draw((2, 4, 5, 8), (6, 2, 16, 8))
    lengths, table = np.array([20, 3], np.int32), np.array([[4, 1], [3, -1]])
    want = attention(q, k, k, k_lengths=lengths, page_table=table)
    arrays = [Tensor(x) for x in (q, k, k)]
    for of_lengths in (Tensor, np.asarray):
        for of_table in (Tensor, np.asarray):
            options = {"k_lengths": of_lengths(lengths), "page_table": of_table(table)}
            found = attention(*arrays, **options)
            assert type(found) is Tensor
            np.testing.assert_array_equal(found.x, want)
    out = attention(*arrays, k_lengths=3, page_table=Tensor(table))
    np.testing.assert_array_equal(out.x[1], want[1])
    with pytest.raises(ValueError, match=r"k_lengths\[0\] is 33, want 0 to 32"):
        attention(*arrays, k_lengths=Tensor(np.array([33, 1])), page_table=Tensor(table))
    with pytest.raises(TypeError, match=r"k_lengths is a tests\.Tensor, q is a numpy\.ndarray"):
        attention(q, k[:2], k[:2], k_lengths=Tensor(lengths))


def test_numbers_of_the_host_are_checked_and_copied_to_the_device():
    """Those of a device are neither, and one number is written by a kernel."""
    device = type("DeviceArray", (), {"shape": (2, 3), "dtype": np.dtype(int)})()
    written = []
    module = SimpleNamespace(
        asarray=lambda x: written.append(x.tolist()) or "copy",
        full=lambda shape, value, dtype: written.append((shape, value, dtype)) or "filled",
    )
    problem = SimpleNamespace(k_len=48, pages=SimpleNamespace(size=16, count=5))
    some = np.array([3, 48], np.int32)
    keys = KeyArrays(some, device)
    layout.check_numbers("attention", problem, keys)
    with pytest.raises(ValueError, match=r"k_lengths\[1\] is 49, want 0 to 48"):
        layout.check_numbers("attention", problem, KeyArrays(some + 1, device))
    # How much of a table is needed, lengths on the device do not say.
    layout.check_numbers("attention", problem, KeyArrays(device, np.full((2, 3), 7)))
    with mock.patch.dict(sys.modules, cupy=module):
        assert layout.on_device("cupy", keys) == KeyArrays("copy", device)
        assert layout.on_device("cupy", KeyArrays(np.asarray(5))) == KeyArrays("filled")
        moved = layout.on_device("cupy", KeyArrays(q_offsets=some, k_offsets=some))
        assert moved == KeyArrays(q_offsets="copy", k_offsets="copy")
    assert written == [[3, 48], ((), 5, np.dtype(int)), [3, 48]]  # one copy of both offsets


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_lengths_of_another_library_or_of_numpy(library):
    module = pytest.importorskip(library)
    make = module.from_numpy if library == "torch" else module.numpy.asarray
    q, k, v = draw((2, 4, 5, 8), (6, 2, 16, 8), (6, 2, 16, 8))
    lengths, table = np.array([20, 3], np.int32), np.array([[4, 1], [3, 3]], np.int32)
    want = attention(q, k, v, k_lengths=lengths, page_table=table)
    arrays = [make(x) for x in (q, k, v)]
    for given_as in (make, np.asarray):
        found = attention(*arrays, k_lengths=given_as(lengths), page_table=given_as(table))
        assert type(found) is type(arrays[0])
        np.testing.assert_array_equal(np.asarray(found), want)
    found = attention(*arrays, k_lengths=7, page_table=make(table))
    np.testing.assert_array_equal(
        np.asarray(found), attention(q, k, v, k_lengths=7, page_table=table)
    )
    with pytest.raises(ValueError, match=r"k_lengths\[0\] is 33, want 0 to 32"):
        attention(*arrays, k_lengths=make(np.array([33, 1], np.int32)), page_table=make(table))


def test_arrays_of_two_libraries_are_refused():
    module = pytest.importorskip("torch")
    q, k = np.zeros((1, 1, 5, 4)), np.zeros((1, 1, 7, 4))
    with pytest.raises(TypeError, match=r"k_lengths is a torch\.Tensor, q is a numpy\.ndarray"):
        attention(q, k, k, k_lengths=module.ones(1, dtype=module.int64))
