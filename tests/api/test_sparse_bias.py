"""A sparse matrix as bias: values, gradients and what is refused, against float64."""

import copy
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import sparse

from fa_cupy import (
    BitMask,
    Score,
    attention,
    attention_backward,
    reference,
    scaled_dot_product_attention,
)
from fa_cupy.cpu.masks import entries as cpu_entries
from fa_cupy.masks import entries
from tests.api.test_gradients import plain_options
from tests.api.test_masks import peak_of
from tests.support import blas, gradients
from tests.support.blas import two_threads
from tests.support.every_run import examples
from tests.support.strategies import DTYPES, Case, cases, check_against_reference, normal

# Of diagonals by SciPy, which draws come to.
pytestmark = pytest.mark.filterwarnings("ignore::scipy.sparse.SparseEfficiencyWarning")
with_threads = pytest.fixture(autouse=True, scope="module")(two_threads)
HALF, BFLOAT16, SINGLE, DOUBLE = DTYPES
FORMATS = ("csr", "csc", "coo", "bsr", "dia", "lil", "dok")


def draw(*shapes, dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    return [normal(rng, shape, dtype) for shape in shapes]


def pattern_of(matrix):
    """The stored elements of a matrix as an array of bool, those of 0 too."""
    if matrix.format in ("csr", "csc", "coo"):  # SciPy does not compute with 16-bit floats
        matrix = copy.copy(matrix)
        matrix.data = np.ones(len(matrix.data))
    coo = matrix.tocsr().tocoo()
    found = np.zeros(matrix.shape, bool)
    found[coo.row, coo.col] = True
    return found


def random_bias(rng, shape, share, dtype=DOUBLE, form="csr", of_matrix=False):
    """A sparse matrix with some stored zeros."""
    seen = rng.random(shape) < share
    kind = sparse.csr_matrix if of_matrix else sparse.csr_array
    matrix = kind(seen.astype(float))
    matrix.data = rng.standard_normal(matrix.nnz).round(3)
    matrix.data[rng.random(matrix.nnz) < 0.1] = 0
    matrix = matrix.asformat(form)
    if dtype in (HALF, BFLOAT16):  # which SciPy does not convert to
        matrix.data = matrix.data.astype(dtype)
    else:
        matrix = matrix.astype(dtype)
    return matrix


def dense_of(matrix):
    """All elements, in float64."""
    matrix = copy.copy(matrix)
    if matrix.format in ("csr", "csc", "coo"):
        matrix.data = matrix.data.astype(float)
    return matrix.toarray().astype(float)


@st.composite
def sparse_cases(draw):
    """A case, its arguments, and the array of bool that says where its bias has elements."""
    case = draw(cases())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = case.q.shape[-2], case.k.shape[-2]
    dtype = draw(st.sampled_from(DTYPES))
    form = draw(st.sampled_from(FORMATS[:3] if dtype in (HALF, BFLOAT16) else FORMATS))
    share = draw(st.sampled_from([0.0, 0.003, 0.05, 0.5, 1.0]))
    bias = random_bias(rng, shape, share, dtype, form, draw(st.booleans()))
    if form in FORMATS[:3] and draw(st.sampled_from([False] * 5 + [True])):
        bias.data[rng.random(bias.nnz) < 0.05] = draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    stored = pattern_of(bias)
    case.bias = dense_of(bias).astype(dtype)
    mask = None if case.mask is None else np.broadcast_to(
        case.mask, (*case.mask.shape[:-2], *shape)
    ).copy()  # fmt: skip
    case.mask = stored if mask is None else mask
    if mask is not None:
        kinds = [lambda: mask, lambda: BitMask(mask)]
        kinds += [lambda: sparse.csc_array(mask)] if mask.ndim == 2 else []
        mask = draw(st.sampled_from(kinds))()
    case.layouts = (*case.layouts[:3], "dense", "dense")
    return case, (*case.native(np)[:3], bias, mask), stored


def small_blocks(least):
    """Which blocks are computed as entries, and a few entries at a time."""
    return (
        mock.patch.object(entries, "LEAST_BITS", least),
        mock.patch.object(cpu_entries, "_CHUNK", 50),
        mock.patch.object(cpu_entries, "_SMALL", 0),
    )


def maker_of(mask):
    """What makes the mask again, with the blocks of another limit. The limit now is its own."""
    if not isinstance(mask, BitMask):
        return lambda: mask
    seen = np.asarray(mask)
    return lambda: BitMask(seen)


LEAST = st.sampled_from([0, 20, 200, 20_000])


@given(drawn=sparse_cases(), least=LEAST)
def test_any_call_agrees_with_the_reference(drawn, least):
    case, arrays, _ = drawn
    (*arrays, mask), (one, two, three) = arrays, small_blocks(least)
    made = maker_of(mask)
    with one, two, three:
        out, lse = attention(*arrays, made(), return_lse=True, **case.options)
    check_against_reference(case, out, lse)


@pytest.mark.parametrize("arg", ["bias", "mask"])
def test_the_reference_takes_arrays(arg):
    q, k, v = draw((5, 4), (5, 4), (5, 4))
    matrix = sparse.csr_array(np.eye(5))
    for function, more in ((reference.attention, ()), (reference.attention_backward, (v,))):
        with pytest.raises(TypeError, match=f"^reference: {arg} is a sparse matrix, want an array"):
            function(*more, q, k, v, **{arg: matrix})


@pytest.mark.parametrize("mask_heads", [(3,), (1,), ()])
def test_heads_with_one_query_that_share_keys(mask_heads):
    """They are no rows of one product: the matrix has one row for all of them."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, rows, 8)) for n, rows in ((3, 1), (1, 70), (1, 70)))
    bias, mask = random_bias(rng, (1, 70), 0.5), rng.random((*mask_heads, 1, 70)) < 0.6
    found = attention(q, k, v, bias, mask, return_lse=True)
    want = reference.attention(q, k, v, dense_of(bias), mask)
    for x, y in zip(found, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)


@given(drawn=sparse_cases(), least=LEAST, with_dlse=st.booleans())
@examples(40, fewer=4)
def test_gradients_of_any_call_agree_with_the_reference(drawn, least, with_dlse):
    case, arrays, stored = drawn
    assume(plain_options(case))
    one, two, three = small_blocks(least)
    options = {arg: x for arg, x in case.options.items() if arg != "precision"}
    made = maker_of(arrays[4])
    with one, two, three:
        arrays = (*arrays[:4], made())
        out, lse = attention(*arrays, return_lse=True, **options)
        dout, dlse = draw(out.shape, lse.shape, seed=7)
        dout, dlse = dout.astype(out.dtype), dlse.astype(lse.dtype)
        dlse = dlse if with_dlse else None
        found = attention_backward(
            dout, *arrays[:3], out, lse, *arrays[3:], dlse=dlse, **options
        )  # fmt: skip
    bias, dbias = arrays[3], found[3]
    assert (type(dbias), dbias.dtype) == (type(bias), bias.dtype)
    if bias.format != "dia":  # which has whole diagonals
        np.testing.assert_array_equal(pattern_of(dbias), stored)
    want = reference.attention_backward(dout, *case.arrays, dlse=dlse, **options)[3]
    # Pairs without an element have a gradient too, which is not asked for.
    dense = np.where(stored, dense_of(dbias), want)
    by_name = dict(zip(gradients.NAMES, (*found[:3], dense), strict=False))
    gradients.hold(case, by_name, dout, dlse, 0.0)


def test_stored_zeros_are_seen_and_other_pairs_are_not():
    q, k, v = draw((3, 4), (5, 4), (5, 2))
    bias = sparse.csr_array(
        (np.array([0.0, 1.0, 0.0]), np.array([1, 4, 2]), np.array([0, 2, 3, 3])), shape=(3, 5)
    )
    out, lse = attention(q, k, v, bias, return_lse=True)
    scores = q[0] @ k[[1, 4]].T / 2 + [0.0, 1.0]
    weights = np.exp(scores) / np.exp(scores).sum()
    np.testing.assert_allclose(out, [weights @ v[[1, 4]], v[2], [0, 0]])
    assert lse[2] == -np.inf


def test_a_mask_shows_more_and_less_than_the_bias_has():
    """What has no element has a bias of 0; what the mask hides is not seen, NaN or not."""
    q, k, v = draw((2, 4), (3, 4), (3, 2))
    bias = sparse.csr_array(np.array([[5.0, np.nan, 0], [0, 0, -1.0]]))
    mask = np.array([[True, False, True], [True, True, True]])
    out = attention(q, k, v, bias, mask)
    dense = np.array([[5.0, 0, 0], [0, 0, -1.0]])
    np.testing.assert_allclose(out, reference.attention(q, k, v, dense, mask)[0])


@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"is_causal": True}, {"window": (40, 3)}])
@pytest.mark.parametrize("share", [0.01, 0.2])
def test_heads_sinks_scores_and_bands(share, options):
    """Grouped heads share one matrix, whose gradient is summed over them."""
    rng = np.random.default_rng(4)
    q, k, v, sinks = draw((2, 6, 150, 8), (2, 3, 150, 8), (1, 3, 150, 5), (6, 1))
    slopes = np.full(6, 0.01)
    options = options | {"sinks": sinks, "score": Score("s - w[h] * abs(i - j)", w=slopes)}
    bias = random_bias(rng, (150, 150), share)
    case = Case(q, k, v, bias.toarray(), pattern_of(bias), options)
    one, two, three = small_blocks(512)
    with one, two, three:
        out, lse = attention(q, k, v, bias, return_lse=True, **options)
        dout = draw(out.shape, seed=1)[0]
        found = attention_backward(
            dout, q, k, v, out, lse, bias, need=["bias", "q", "k", "v", "sinks"], **options
        )
    want = reference.attention(*case.arrays, **options)
    np.testing.assert_allclose(out, want[0], atol=1e-12)
    np.testing.assert_allclose(lse, want[1], atol=1e-12)
    dq, dk, dv, dbias, dsinks = reference.attention_backward(dout, *case.arrays, **options)[:5]
    np.testing.assert_allclose(found[0].toarray(), dbias, atol=1e-10)
    for mine, theirs in zip(found[1:], (dq, dk, dv, dsinks), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-10)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("share", [0.01, 0.2])
def test_finite_differences(form, share):
    """In float64, of all stored elements; the gradient's data lie as those of the bias."""
    rng = np.random.default_rng(3)
    q, k, v, dout = draw((2, 20, 4), (20, 4), (20, 3), (2, 20, 3))
    bias = random_bias(rng, (20, 20), share, form=form)
    out, lse = attention(q, k, v, bias, return_lse=True)
    (dbias,) = attention_backward(dout, q, k, v, out, lse, bias, need=["bias"])
    assert type(dbias) is type(bias)
    bias, dbias = bias.tocsr(), dbias.tocsr()
    want = gradients.differences(lambda: (dout * attention(q, k, v, bias)).sum(), bias.data)
    rows = np.repeat(np.arange(20), np.diff(bias.indptr))
    found = np.array([dbias[i, j] for i, j in zip(rows, bias.indices, strict=True)])
    np.testing.assert_allclose(found, want, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("form", ["csr", "csc", "coo", "bsr"])
def test_gradients_lie_as_the_elements_of_the_bias(form):
    """Also where they are in no order, so that steps along them are sums of arrays."""
    rng = np.random.default_rng(5)
    q, k, v, dout = draw((30, 4), (30, 4), (30, 3), (30, 3))
    bias = random_bias(rng, (30, 30), 0.2, form=form)
    if form in ("csr", "csc"):
        for begin, end in zip(bias.indptr, bias.indptr[1:], strict=False):
            turn = rng.permutation(end - begin)
            for x in (bias.indices, bias.data):
                x[begin:end] = x[begin:end][turn]
        bias.has_sorted_indices = False
    elif form == "coo":
        turn = rng.permutation(bias.nnz)
        bias = sparse.coo_array((bias.data[turn], (bias.row[turn], bias.col[turn])), (30, 30))
    before = bias.data.copy()
    out, lse = attention(q, k, v, bias, return_lse=True)
    (dbias,) = attention_backward(dout, q, k, v, out, lse, bias, need=["bias"])
    np.testing.assert_array_equal(bias.data, before)
    assert dbias.data.shape == bias.data.shape
    indices = ("row", "col") if form == "coo" else ("indices", "indptr")
    for name in indices:
        np.testing.assert_array_equal(getattr(dbias, name), getattr(bias, name))
        assert not np.shares_memory(getattr(dbias, name), getattr(bias, name))
    want = reference.attention_backward(dout, q, k, v, bias.toarray(), pattern_of(bias))[3]
    np.testing.assert_allclose(dbias.toarray(), want, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["csr", "csc", "coo", "bsr"])
def test_elements_of_one_pair_are_summed(form, dtype):
    parts = np.array([1.0, 0.5, 2.0, -3.0]), (np.array([0, 0, 1, 0]), np.array([2, 2, 0, 1]))
    coo = sparse.coo_array(parts, shape=(2, 3))
    matrix = coo
    if form == "bsr":
        blocks = coo.data[[0, 1, 3, 2], None, None], np.array([2, 2, 1, 0]), np.array([0, 3, 4])
        matrix = sparse.bsr_array(blocks, shape=(2, 3))
    elif form != "coo":  # as SciPy's own conversions sum them
        rows = coo.row if form == "csr" else coo.col
        order = np.argsort(rows, kind="stable")
        counts = np.bincount(rows, minlength=2 if form == "csr" else 3)
        begin = np.concatenate([[0], np.cumsum(counts)])
        own = (coo.col if form == "csr" else coo.row)[order]
        kind = sparse.csr_array if form == "csr" else sparse.csc_array
        matrix = kind((coo.data[order], own, begin), shape=(2, 3))
    assert matrix.nnz == 4
    matrix.data = matrix.data.astype(dtype)
    q, k, v, dout = draw((2, 4), (3, 4), (3, 2), (2, 2))
    dense = np.array([[0, -3.0, 1.5], [2.0, 0, 0]])
    out, lse = attention(q, k, v, matrix, return_lse=True)
    assert matrix.nnz == 4
    np.testing.assert_allclose(out, reference.attention(q, k, v, dense, dense != 0)[0])
    (dbias,) = attention_backward(dout, q, k, v, out, lse, matrix, need=["bias"])
    assert (dbias.nnz, dbias.format, dbias.dtype) == (3, form, dtype)
    want = reference.attention_backward(dout, q, k, v, dense, dense != 0)[3]
    dbias.data = dbias.data.astype(np.float64)  # SciPy does not compute with 16-bit floats
    rtol = {HALF: 2.0**-11, BFLOAT16: 2.0**-8, SINGLE: 2.0**-24, DOUBLE: 0}[dtype]
    np.testing.assert_allclose(dbias.toarray(), want, rtol, atol=1e-12)


@pytest.mark.parametrize("index", [np.int32, np.int64, np.uint16])
def test_any_dtype_of_indices(index):
    rng = np.random.default_rng(6)
    q, k, v = draw((40, 4), (50, 4), (50, 3))
    bias = random_bias(rng, (40, 50), 0.1)
    want = attention(q, k, v, bias)
    bias.indices, bias.indptr = bias.indices.astype(index), bias.indptr.astype(index)
    assert attention(q, k, v, bias).tobytes() == want.tobytes()


def test_a_mask_made_before_gives_the_same_bits():
    rng = np.random.default_rng(7)
    q, k, v = draw((3, 300, 8), (3, 400, 8), (3, 400, 8))
    bias = random_bias(rng, (300, 400), 0.02)
    mask = BitMask(pattern_of(bias))
    want = attention(q, k, v, bias)
    assert attention(q, k, v, bias, mask).tobytes() == want.tobytes()
    with blas.threads(1):
        assert attention(q, k, v, bias).tobytes() == want.tobytes()


@pytest.mark.parametrize("share", [0.003, 0.1])
def test_a_repeated_gradient_has_the_same_bits(share):
    rng = np.random.default_rng(8)
    q, k, v, dout = draw(*[(16, 400, 8)] * 4, dtype=np.float32)
    bias = random_bias(rng, (400, 400), share, SINGLE)
    out, lse = attention(q, k, v, bias, return_lse=True)
    first, second = (
        attention_backward(dout, q, k, v, out, lse, bias, need=["bias"])[0] for _ in range(2)
    )
    assert first.data.tobytes() == second.data.tobytes()
    with blas.threads(1):
        (third,) = attention_backward(dout, q, k, v, out, lse, bias, need=["bias"])
    assert first.data.tobytes() == third.data.tobytes()


def test_memory_follows_the_entries():
    """No array of all 10**10 pairs, nor one of all scores in blocks with an edge."""
    rng = np.random.default_rng(0)
    nodes, edges = 100_000, 300_000
    parts = np.ones(edges, np.float32), tuple(rng.integers(0, nodes, (2, edges)))
    bias = sparse.coo_array(parts, shape=(nodes, nodes)).tocsr()
    q, k, v = draw(*[(nodes, 8)] * 3, dtype=np.float32)
    (out, lse), peak = peak_of(lambda: attention(q, k, v, bias, return_lse=True))
    assert peak < 150 * edges
    (found, peak) = peak_of(lambda: attention_backward(out, q, k, v, out, lse, bias))
    assert peak < 400 * edges
    assert found[3].nnz == bias.nnz


def test_empty_lengths():
    for q_len, k_len in ((0, 3), (3, 0), (0, 0)):
        q, k, v = draw((2, q_len, 4), (k_len, 4), (k_len, 2))
        bias = sparse.csr_array((q_len, k_len))
        out, lse = attention(q, k, v, bias, return_lse=True)
        assert not out.any()
        assert (lse == -np.inf).all()
        *_, dbias = attention_backward(out, q, k, v, out, lse, bias)
        assert (dbias.shape, dbias.nnz) == ((q_len, k_len), 0)


EYE = sparse.csr_array(np.eye(2, 3))


@pytest.mark.parametrize(
    ("bias", "error", "message"),
    [
        (EYE[:1], ValueError, r"bias has shape \(1, 3\), want \(2, 3\)"),
        (EYE.T.tocsr(), ValueError, r"bias has shape \(3, 2\), want \(2, 3\)"),
        (EYE.astype(complex), TypeError, "bias has dtype complex128, want float16, bfloat16,"),
        (EYE.astype(bool), TypeError, "bias has dtype bool, want float16, bfloat16, float32"),
        (EYE.astype(int), TypeError, "bias has dtype int64, want float16, bfloat16, float32"),
        (sparse.csr_array, TypeError, "bias is <class"),
        (sparse.coo_array(np.eye(3)[0]), ValueError, r"bias has shape \(3,\), want"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("backward", [False, True])
def test_what_is_refused(bias, error, message, backward):
    q, k, v = draw((2, 4), (3, 4), (3, 5))
    out, lse = attention(q, k, v, return_lse=True)
    name = "attention_backward" if backward else "attention"
    call, given = attention, (q, k, v)
    if backward:
        call, given = attention_backward, (out, q, k, v, out, lse)
    with pytest.raises(error, match=f"^{name}: {message}"):
        call(*given, bias)


def test_damaged_matrices_are_refused():
    q, k, v = draw((2, 4), (3, 4), (3, 5))
    bias = EYE.copy()
    bias.indices = np.array([0, 3], np.int32)
    with pytest.raises(ValueError, match="attention: bias is not a valid sparse matrix: indices"):
        attention(q, k, v, bias)


def test_an_output_in_the_elements_of_the_bias_is_refused():
    memory = np.zeros(4)
    q, k, v = draw((2, 4), (2, 4), (2, 2))
    bias = sparse.csr_array((memory, np.array([0, 1, 0, 1]), np.array([0, 2, 4])), shape=(2, 2))
    assert np.shares_memory(bias.data, memory)
    with pytest.raises(ValueError, match="out overlaps bias in memory"):
        attention(q, k, v, bias, out=memory.reshape(2, 2))


def test_torchs_function_takes_sparse_masks_of_bool_only():
    q, k, v = draw((2, 4), (3, 4), (3, 5))
    with pytest.raises(TypeError, match="attn_mask is a sparse matrix of float64, want bool"):
        scaled_dot_product_attention(q, k, v, EYE)
    found = scaled_dot_product_attention(q, k, v, EYE != 0)
    np.testing.assert_array_equal(found, v[:2])


def test_arrays_of_other_libraries():
    torch = pytest.importorskip("torch")
    arrays = draw((2, 4), (3, 4), (3, 5))
    want, stats = attention(*arrays, EYE, return_lse=True)
    of_arrays = attention_backward(want, *arrays, want, stats, EYE)
    q, k, v = map(torch.from_numpy, arrays)
    out, lse = attention(q, k, v, EYE, return_lse=True)
    np.testing.assert_array_equal(out.numpy(), want)
    *found, dbias = attention_backward(out, q, k, v, out, lse, EYE)
    for mine, theirs in zip(found, of_arrays, strict=False):
        np.testing.assert_array_equal(mine.numpy(), theirs)
    assert isinstance(dbias, sparse.csr_array)
    np.testing.assert_array_equal(dbias.toarray(), of_arrays[3].toarray())


def test_functions_with_recorded_gradients_say_what_to_write():
    torch = pytest.importorskip("torch")
    from fa_cupy.torch import attention as of_torch

    q, k, v = map(torch.from_numpy, draw((2, 4), (3, 4), (3, 5)))
    with pytest.raises(TypeError, match=r"attention: bias is a sparse matrix, want torch\.from_n"):
        of_torch(q, k, v, EYE)
    jax = pytest.importorskip("jax")
    from fa_cupy.jax import attention as of_jax

    with pytest.raises(TypeError, match=r"attention: bias is a sparse matrix, want jax\.numpy\."):
        of_jax(*map(jax.numpy.asarray, draw((2, 4), (3, 4), (3, 5))), EYE)
