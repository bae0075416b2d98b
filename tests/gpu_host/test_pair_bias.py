"""Sparse matrices of CuPy as bias: where their elements go, without a GPU."""

import copy
import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

import fa_cupy
from fa_cupy import BitMask, reference
from fa_cupy.core.sparse_bias import SparseBias
from tests.support import cupy_stand_in
from tests.support.cupy_stand_in import CAPTURE, owned
from tests.support.pair_calls import hold
from validation.emulator import calls

HALF = np.dtype(np.float16)


class Matrix:
    """A sparse matrix of CuPy, as far as it is looked at."""

    def __init__(self, matrix):
        self.format, self.shape, self.dtype = matrix.format, matrix.shape, matrix.dtype
        names = ("row", "col") if matrix.format == "coo" else ("indices", "indptr")
        for name in ("data", *names):
            setattr(self, name, owned(getattr(matrix, name)))

    def tocsr(self):
        raise AssertionError("computed on the device")

    def copy(self):
        found = copy.copy(self)
        found.__dict__ |= {
            name: x.copy() for name, x in vars(self).items() if isinstance(x, cupy_stand_in.ndarray)
        }
        return found


Matrix.__module__ = "cupyx.scipy.sparse._csr"


@pytest.fixture(scope="module")
def cupy():
    with cupy_stand_in.on_a_device() as cupy:
        yield cupy


def numbers_of(bias, mask):
    """The bias of each pair as kernels are given it."""
    from fa_cupy.gpu.masks.pair_bias import PairPlaces  # of the stand-in

    return PairPlaces.of(bias, mask).numbers(bias)


def gradient_of(bias, mask, sums):
    """The gradient of a bias, given that of its `numbers_of`."""
    from fa_cupy.gpu.masks.pair_bias import PairPlaces

    return PairPlaces.of(bias, mask).gradient(bias, owned(sums))


def on_host(matrix):
    """A `Matrix` as one of SciPy."""
    names = ("row", "col") if matrix.format == "coo" else ("indices", "indptr")
    data, first, second = (getattr(matrix, name).get() for name in ("data", *names))
    parts = (data, (first, second)) if matrix.format == "coo" else (data, first, second)
    return getattr(sparse, f"{matrix.format}_array")(parts, shape=matrix.shape)


def weights(seed, shape, share, form="csr", dtype=np.float32):
    """A matrix with stored zeros and elements in no order."""
    rng = np.random.default_rng(seed)
    seen = rng.random(shape) < share
    rows, cols = rng.permutation(np.argwhere(seen)).T
    data = rng.standard_normal(len(rows)).round(3).astype(dtype)
    data[::7] = 0
    found = sparse.coo_array((data, (rows, cols)), shape=shape).asformat(form)
    return found, seen


@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    share=st.sampled_from([0.0, 0.003, 0.1, 0.7]),
    form=st.sampled_from(["csr", "csc", "coo"]),
    dtype=st.sampled_from([np.float32, np.float64]),
    matrices=st.integers(0, 2),
)
def test_numbers_are_in_the_order_of_the_list(cupy, seed, shape, share, form, dtype, matrices):
    """With the mask of the bias, and with one or more of other pairs."""
    host, seen = weights(seed, shape, share, form, dtype)
    bias = SparseBias("attention", "bias", Matrix(host))
    if matrices:
        seen = np.random.default_rng(seed + 1).random((matrices, *shape)) < 0.2
        mask = BitMask(seen)
    else:
        mask, seen = bias.structure.pattern, seen[None]
        np.testing.assert_array_equal(mask.to_dense(), seen[0])
    found = numbers_of(bias, mask)
    assert found.dtype == np.float32
    want = np.concatenate([host.toarray()[of_matrix] for of_matrix in seen])
    np.testing.assert_array_equal(found.get()[: len(want)], want.astype(np.float32))
    assert len(found) == max(1, len(want))


@given(
    seed=st.integers(0, 2**32 - 1),
    share=st.sampled_from([0.0, 0.003, 0.1, 0.7]),
    form=st.sampled_from(["csr", "csc", "coo"]),
    dtype=st.sampled_from([np.float32, np.float64]),
    matrices=st.integers(0, 3),
)
def test_gradients_go_where_their_elements_are(cupy, seed, share, form, dtype, matrices):
    """Those of all matrices of a mask are added; elements of hidden pairs have none."""
    host, seen = weights(seed, (150, 140), share, form, dtype)
    given = Matrix(host)
    bias = SparseBias("attention", "bias", given)
    rng = np.random.default_rng(seed)
    shown = rng.random((matrices, 150, 140)) < 0.2 if matrices else seen[None]
    mask = BitMask(shown) if matrices else bias.structure.pattern
    of_pairs = np.zeros(shown.shape, np.float32)
    of_pairs[shown] = sums = rng.standard_normal(shown.sum()).astype(np.float32)
    found = gradient_of(bias, mask, np.append(sums, np.float32(np.nan)))
    assert (type(found), found.format, found.data.dtype) == (Matrix, form, dtype)
    names = ("row", "col") if form == "coo" else ("indices", "indptr")
    for name in names:
        np.testing.assert_array_equal(getattr(found, name).get(), getattr(given, name).get())
    np.testing.assert_array_equal(given.data.get(), host.data)
    want = np.where(seen, of_pairs.sum(axis=0), 0)
    np.testing.assert_allclose(on_host(found).toarray(), want, rtol=1e-6, atol=1e-6)
    assert found.data.size == host.data.size


@pytest.fixture
def runs(cupy, monkeypatch):
    """The pointers of each plan that is run."""
    from fa_cupy.gpu.plan import Plan

    noted = []
    run = Plan.run

    def noting(self, pointers, *args):
        noted.append((self, pointers))
        return run(self, pointers, *args)

    monkeypatch.setattr(Plan, "run", noting)
    return noted


@pytest.mark.parametrize("share", [0.01, 0.5])
@pytest.mark.parametrize("how", ["plain", "mask", "out", "odd rows", "lse"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_calls_run_the_kernel_over_pairs(cupy, runs, how, share, dtype):
    """However many pairs there are; the last address is that of the numbers."""
    host, seen = weights(3, (300, 300), share)
    bias = Matrix(host)
    q = owned(np.zeros((2, 300, 7 if how == "odd rows" else 64), dtype))
    options = {"mask": BitMask(seen)} if how == "mask" else {}
    if how == "out":
        options["out"] = owned(np.zeros(q.shape, dtype))
    if how == "lse":
        options["return_lse"] = True
    for _ in range(2):
        before = len(CAPTURE.log)
        fa_cupy.attention(q, q, q, bias, **options)
        launched = [name for kind, name, *_ in CAPTURE.log[before:] if kind == "launch"]
        assert set(launched) == {"attention_fwd_pairs"}
    assert len(runs) == 2
    for plan, pointers in runs:
        assert plan.names[-1] == "pair_bias"
        numbers = (ctypes.c_float * int(seen.sum())).from_address(pointers[-1])
        if (plan, pointers) == runs[-1]:  # memory of calls before may be used again
            np.testing.assert_array_equal(np.array(numbers), host.toarray()[seen])


@pytest.mark.parametrize("need", [None, ["bias"], ["v", "q"]])
@pytest.mark.parametrize("how", ["plain", "mask", "odd rows"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_gradients_run_the_kernels_over_pairs(cupy, monkeypatch, how, need, dtype):
    """The gradient of the bias is made of what they write where the last address points."""
    from fa_cupy.gpu.plan import Plan

    host, seen = weights(10, (300, 300), 0.5)
    run, wrote = Plan.run, np.arange(int(seen.sum()), dtype=np.float32)

    def writing(self, pointers, *args):
        assert self.names[-2:] == ("pair_bias", "pair_dbias")
        ran = run(self, pointers, *args)
        numbers, sums = (
            np.ctypeslib.as_array((ctypes.c_float * len(wrote)).from_address(at))
            for at in pointers[-2:]
        )
        np.testing.assert_array_equal(numbers, host.toarray()[seen])
        sums[:] = wrote
        return ran

    monkeypatch.setattr(Plan, "run", writing)
    bias, mask = Matrix(host), BitMask(seen) if how == "mask" else None
    q = owned(np.zeros((2, 300, 7 if how == "odd rows" else 64), dtype))
    lse = owned(np.zeros((2, 300), np.float32))
    for _ in range(2):
        before = len(CAPTURE.log)
        found = fa_cupy.attention_backward(q, q, q, q, q, lse, bias, mask, need=need)
        launched = [name for kind, name, *_ in CAPTURE.log[before:] if kind == "launch"]
        assert set(launched) == {"attention_bwd_dq_pairs", "attention_bwd_dkdv_pairs"}
        # One launch more adds up the gradient of the numbers.
        assert launched.count("attention_bwd_dq_pairs") == 1 + (need != ["v", "q"])
        by_name = dict(zip(need or ("q", "k", "v", "bias"), found, strict=True))
        dbias = by_name.pop("bias", None)
        assert all((x.shape, x.dtype) == (q.shape, q.dtype) for x in by_name.values())
        assert (dbias is None) == (need == ["v", "q"])
        if dbias is not None:
            np.testing.assert_array_equal(on_host(dbias).toarray()[seen], wrote)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0)])
def test_gradients_of_no_query_and_no_key(cupy, lengths):
    q, k = (owned(np.zeros((2, n, 8), HALF)) for n in lengths)
    lse, bias = owned(np.zeros((2, lengths[0]), np.float32)), Matrix(sparse.csr_array(lengths))
    (dbias,) = fa_cupy.attention_backward(q, q, k, k, q, lse, bias, need=["bias"])
    assert (dbias.shape, dbias.data.size) == (lengths, 0)


def test_gradients_of_sinks_are_refused(cupy):
    q, lse = owned(np.zeros((2, 30, 8), HALF)), owned(np.zeros((2, 30), np.float32))
    bias, sinks = Matrix(weights(7, (30, 30), 0.1)[0]), owned(np.zeros((2, 1), np.float32))
    with pytest.raises(NotImplementedError, match="attention_backward: bias is a sparse matrix"):
        fa_cupy.attention_backward(q, q, q, q, q, lse, bias, sinks=sinks)


def test_a_plan_is_not_that_of_the_mask_alone(cupy, runs):
    host, seen = weights(4, (300, 300), 0.01)
    q = owned(np.zeros((2, 300, 64), HALF))
    mask = BitMask(seen)
    for bias in (None, Matrix(host), None, Matrix(host)):
        fa_cupy.attention(q, q, q, bias, mask)
    assert [plan.names[-1] == "pair_bias" for plan, _ in runs] == [False, True, False, True]


def test_no_query_and_no_key(cupy, runs):
    for q_len, k_len in ((0, 5), (5, 0)):
        q, k = (owned(np.zeros((2, n, 64), HALF)) for n in (q_len, k_len))
        out, lse = fa_cupy.attention(
            q, k, k, Matrix(sparse.csr_array((q_len, k_len))), return_lse=True
        )
        assert (out.shape, lse.shape) == ((2, q_len, 64), (2, q_len))
    assert all("pair_bias" not in plan.names for plan, _ in runs)


def test_structures_are_found_out_once_and_kept(cupy, runs):
    """By the indices that a matrix has now, not by which arrays they are in."""
    from fa_cupy.gpu.masks import pair_bias

    pair_bias._KEPT.clear()
    host, seen = weights(11, (200, 200), 0.05)
    q, mask = owned(np.zeros((2, 200, 64), HALF)), BitMask(seen)
    first, again = (SparseBias("attention", "bias", Matrix(host)) for _ in range(2))
    assert again.structure is first.structure
    assert again.structure.pattern is first.structure.pattern
    places = pair_bias.PairPlaces.of(first, mask)
    assert pair_bias.PairPlaces.of(again, mask) is places

    matrix = Matrix(host)
    fa_cupy.attention(q, q, q, matrix, mask)
    row = int(np.flatnonzero(np.diff(host.indptr))[0])
    place, key = host.indptr[row], int(np.flatnonzero(~seen[row])[0])
    matrix.indices[place : place + 1] = host.indices[place] = key
    other = SparseBias("attention", "bias", matrix)
    assert other.structure is not first.structure
    found = pair_bias.PairPlaces.of(other, mask).numbers(other)
    np.testing.assert_array_equal(found.get(), host.toarray()[seen])

    for seed in range(20):
        SparseBias("attention", "bias", Matrix(weights(seed, (30, 30), 0.1)[0]))
    assert len(pair_bias._KEPT) == pair_bias._MOST


@pytest.mark.emulator
def test_the_kernel_adds_them(cupy):
    """In the emulator, given what a call hands to it."""
    rng = np.random.default_rng(5)
    host, seen = weights(6, (70, 90), 0.1)
    bias = SparseBias("attention", "bias", Matrix(host))
    mask = BitMask(seen | (rng.random(seen.shape) < 0.05))
    q, k, v = (rng.standard_normal((2, n, 32)).astype(HALF) for n in (70, 90, 90))
    numbers = numbers_of(bias, mask).get()
    out, lse = calls.attention_by_pairs(q, k, v, None, mask, pair_bias=numbers)
    want, want_lse = reference.attention(q, k, v, host.toarray(), mask)
    hold(HALF, v, out, lse, want, want_lse)
    dout = rng.standard_normal(out.shape).astype(HALF)
    *_, sums = calls.gradients_by_pairs(
        dout, q, k, v, out, lse, None, None, mask, pair_bias=numbers
    )
    dbias = on_host(gradient_of(bias, mask, sums)).toarray()
    want = reference.attention_backward(dout, q, k, v, host.toarray(), mask)[3]
    np.testing.assert_allclose(dbias, np.where(seen, want, 0), atol=2e-2)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"format": "dia"}, TypeError, "bias has format dia, want csr, csc or coo"),
        ({"dtype": np.dtype(complex)}, TypeError, "bias has dtype complex128, want float16"),
        ({"shape": (40, 2)}, ValueError, "bias is not a valid sparse matrix"),
        ({"q": np.zeros((2, 30, 8))}, NotImplementedError, "q has dtype float64 and head_dim 8"),
        ({"q": np.zeros((2, 30, 264), HALF)}, NotImplementedError, "float16 and head_dim 264, wa"),
        ({"q": np.zeros((2, 31, 8), HALF)}, ValueError, r"shape \(30, 30\), want \(31, 31\)"),
        ({"mask": np.ones((30, 30), bool)}, TypeError, r"mask is an array .* want a BitMask"),
    ],
)  # fmt: skip
def test_what_is_refused(cupy, runs, change, error, message):
    bias = Matrix(weights(7, (30, 30), 0.1)[0])
    q = owned(change.pop("q", np.zeros((2, 30, 8), HALF)))
    mask = owned(change.pop("mask")) if "mask" in change else None
    bias.__dict__ |= change
    with pytest.raises(error, match=f"^attention: .*{message}"):
        fa_cupy.attention(q, q, q, bias, mask)
    assert not runs


def test_too_many_pairs_are_refused_before_they_are_listed(cupy, runs, monkeypatch):
    from fa_cupy.gpu.masks import pair_lists

    def listed(*_):
        raise AssertionError("lists were made")

    monkeypatch.setattr(pair_lists, "_make", listed)
    n = 46400  # squared, more than 2**31
    bias = Matrix(sparse.coo_array(([1.0], ([0], [1])), shape=(n, n)))
    q, mask = owned(np.zeros((n, 8), HALF)), BitMask.from_window(n, (n, n))
    with pytest.raises(NotImplementedError, match=f"the mask has {n * n} pairs for 1 batch entr"):
        fa_cupy.attention(q, q, q, bias, mask)
    assert not runs


def test_elements_of_one_pair_are_refused(cupy):
    double = sparse.coo_array(([1.0, 2.0], ([0, 0], [1, 1])), shape=(2, 2))
    q = owned(np.zeros((2, 8), HALF))
    with pytest.raises(ValueError, match="bias stores several elements of one pair, want one"):
        fa_cupy.attention(q, q, q, Matrix(double))


def test_matrices_elsewhere_are_refused(cupy):
    host = weights(8, (30, 30), 0.1)[0]
    here, there = np.zeros((30, 8), np.float32), owned(np.zeros((30, 8), np.float32))
    with pytest.raises(ValueError, match="sparse matrix on the CPU, q is on CUDA device 0, want"):
        fa_cupy.attention(there, there, there, host)
    with pytest.raises(ValueError, match="matrix on CUDA device 0, q is on the CPU, want one dev"):
        fa_cupy.attention(here, here, here, Matrix(host))


def test_a_capture_is_refused(cupy):
    q, bias = owned(np.zeros((30, 8), HALF)), Matrix(weights(9, (30, 30), 0.1)[0])
    with (
        CAPTURE.record(),
        pytest.raises(NotImplementedError, match="attention: cannot be captured into a graph"),
    ):
        fa_cupy.attention(q, q, q, bias)
