"""Attention of float32 whose keys and values are split beforehand: calls of any size on a GPU.

Other calls of few queries do not split them, as that would not pay.
"""

import numpy as np
import pytest
from hypothesis import given, note, settings

from fa_cupy import BitMask, attention, attention_backward, reference
from fa_cupy.gpu.kernels.attention.full_precision import fwd_fp32_sm90
from tests.support.float32_data import DATA
from tests.support.packed_sequences import visible
from tests.support.strategies import Case, cases, check_against_reference, normal

pytest.importorskip("cupy")
import cupy as cp

from fa_cupy.gpu.driver.devices import current_target
from tests.support import plans

SINGLE = np.dtype(np.float32)
CAUSAL = {"is_causal": True, "causal_align": "bottom_right"}


@pytest.fixture(autouse=True)
def split_always(cupy, monkeypatch):
    if current_target() != "sm_90a":
        pytest.skip("the kernel is for sm_90a")
    monkeypatch.setattr(fwd_fp32_sm90, "LEAST_ROWS", 1)
    plans.forget()
    yield
    plans.forget()


def solve(case, **more):
    """Solve a case on memory that was NaN, twice: the bits are the same."""
    q, k, v, bias, mask = case.native(cp)
    results = []
    for _ in range(2):
        out = cp.full(reference.attention(*case.arrays, **case.options)[0].shape, cp.nan, q.dtype)
        out, lse = attention(q, k, v, bias, mask, out=out, return_lse=True, **case.options, **more)
        results.append((out.get(), lse.get()))
    for x, y in zip(*results, strict=True):
        assert x.tobytes() == y.tobytes()
    return results[0]


@settings(max_examples=400)
@given(case=cases(dtypes=(SINGLE,)))
def test_any_call_agrees_with_the_reference(case):
    note(f"{[a if a is None else a.shape for a in case.arrays]} {case.options} {case.layouts}")
    check_against_reference(case, *solve(case))


@settings(max_examples=200)
@given(case=cases(dtypes=(SINGLE,)))
def test_any_call_in_tf32_has_what_is_not_finite_where_the_reference_has_it(case):
    note(f"{[a if a is None else a.shape for a in case.arrays]} {case.options} {case.layouts}")
    out, lse = solve(case, precision="tf32")
    want, want_lse = reference.attention(*case.arrays, **case.options)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(want) | np.isnan(want_lse)[..., None])
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))


@pytest.mark.parametrize("precision", [None, "tf32"])
@pytest.mark.parametrize("dim", [20, 64, 100, 128, 200, 256])
@pytest.mark.parametrize("how", ["full", "causal", "mask", "window", "packed"])
def test_long_calls(dim, how, precision):
    rng = np.random.default_rng(dim)
    q, k, v = (normal(rng, (2, heads, 1000, dim), SINGLE) for heads in (4, 2, 2))
    mask, options = None, {}
    if how == "mask":
        mask = np.repeat(np.repeat(rng.random((8, 8)) < 0.6, 128, 0), 128, 1)[:1000, :1000].copy()
        mask[:300, :500] &= rng.random((300, 500)) < 0.5
    elif how == "packed":
        options = {"q_offsets": np.array([0, 3, 3, 500, 731, 1000]), "is_causal": True}
    elif how != "full":
        options = CAUSAL if how == "causal" else {"window": (100, 30), "causal_align": "top_left"}
    given = None if mask is None else BitMask.from_dense(mask)
    found, _ = attention(
        *map(cp.asarray, (q, k, v)), None, given, return_lse=True, precision=precision, **options
    )
    assert "attention/fwd_fp32_sm90" in plans.kernels()
    rest = dict(options)
    if how == "packed":
        mask = visible(rest["q_offsets"], rest.pop("q_offsets"), (1000, 1000), is_causal=True)
        rest = {}
    want, _ = reference.attention(q, k, v, None, mask, **rest)
    error = reference.relative_error(found.get(), want)
    assert error < (6e-7 if precision is None else 6e-4)


def test_rows_of_all_sizes():
    rng = np.random.default_rng(0)
    q, k, v = (normal(rng, (2, 700, 64), SINGLE) for _ in range(3))
    for x in (q, k, v):
        x *= np.float32(10.0) ** rng.integers(-18, 18, (2, 700, 1)).astype(SINGLE)
    case = Case(q, k, v, None, None, options=CAUSAL)
    check_against_reference(case, *solve(case))


def frobenius(found, want):
    """The relative error in the norm of Frobenius, whatever the sizes of the numbers."""
    scale = np.abs(want).max()
    off, whole = (found.astype(np.float64) - want) / scale, want / scale
    return np.sqrt(np.square(off).sum() / np.square(whole).sum())


def in_plain_float32(dout, q, k, v):
    """The output and the gradients by CuPy's products of float32, which are not of TF32."""
    factor = SINGLE.type(q.shape[-1] ** -0.5)
    scores = q @ k.swapaxes(-1, -2) * factor
    weights = cp.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = weights @ v
    dscores = dout @ v.swapaxes(-1, -2) - (dout * out).sum(-1, keepdims=True)
    dscores *= weights
    return (
        out, dscores @ k * factor, dscores.swapaxes(-1, -2) @ q * factor,
        weights.swapaxes(-1, -2) @ dout,
    )  # fmt: skip


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("data", DATA)
def test_errors_are_at_most_twice_those_of_plain_float32(data, dim):
    """Of the output and of the gradients, each as a whole, for data that differ in size."""
    rng = np.random.default_rng(dim)
    arrays = DATA[data][0](*(normal(rng, (2, 700, dim), SINGLE) for _ in range(4)))
    dout, q, k, v = (np.ascontiguousarray(x, SINGLE) for x in arrays)
    wanted = reference.attention(q, k, v)[0], *reference.attention_backward(dout, q, k, v)[:3]
    dout, q, k, v = map(cp.asarray, (dout, q, k, v))
    plain = in_plain_float32(dout, q, k, v)
    out, lse = attention(q, k, v, return_lse=True)
    found = out, *attention_backward(dout, q, k, v, out, lse)
    assert "attention/fwd_fp32_sm90" in plans.kernels()
    for name, x, usual, want in zip(("out", "q", "k", "v"), found, plain, wanted, strict=True):
        error, limit = frobenius(x.get(), want), 2 * frobenius(usual.get(), want)
        assert error <= max(limit, 6e-7), (name, error, limit)


def of_columns(found, want):
    """The relative error of each column, in the norm of Frobenius."""
    scale = np.abs(want).max(-2, keepdims=True)
    off, whole = (found.astype(np.float64) - want) / scale, want / scale
    return np.sqrt(np.square(off).sum((0, -2)) / np.square(whole).sum((0, -2)))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("where", "size"),
    [("a column", size) for size in (1e5, 1e7, 1e9, 1e30)]
    + [("a number", size) for size in (1e5, 1e7, 1e9)],
)
def test_a_large_column_leaves_others_as_exact(where, size, dim):
    """Of the output next to large values, and of dV next to a large number in dO.

    Single numbers have their exponent with their row: from about 1e10 times the others on, weights
    of other rows lose digits for them.
    """
    rng = np.random.default_rng(dim)
    dout, q, k, v = (normal(rng, (2, 700, dim), SINGLE) for _ in range(4))
    for x in (v, dout)[: 2 if where == "a number" else 1]:
        if where == "a column":
            x[..., 5] *= SINGLE.type(size)
        else:
            x[:, 500, 5] = size
    wanted = reference.attention(q, k, v)[0], reference.attention_backward(dout, q, k, v)[2]
    dout, q, k, v = map(cp.asarray, (dout, q, k, v))
    usual = in_plain_float32(dout, q, k, v)
    out, lse = attention(q, k, v, return_lse=True)
    found = out, attention_backward(dout, q, k, v, out, lse)[2]
    assert "attention/fwd_fp32_sm90" in plans.kernels()
    for name, x, y, z in zip(("out", "v"), found, (usual[0], usual[3]), wanted, strict=True):
        error, limit = of_columns(x.get(), z).max(), 2 * of_columns(y.get(), z).max()
        assert error <= max(limit, 1.2e-6), (name, error, limit)


def test_two_streams():
    rng = np.random.default_rng(0)
    arrays = [[cp.asarray(normal(rng, (3, 900, 64), SINGLE)) for _ in range(3)] for _ in range(2)]
    wants = [attention(*x).get() for x in arrays]
    streams = [cp.cuda.Stream(non_blocking=True) for _ in arrays]
    cp.cuda.Device().synchronize()
    results = [[], []]
    for _ in range(20):
        for stream, inputs, found in zip(streams, arrays, results, strict=True):
            with stream:
                found.append(attention(*inputs))
    cp.cuda.Device().synchronize()
    for found, want in zip(results, wants, strict=True):
        assert all((x.get() == want).all() for x in found)


def test_a_captured_call_reads_new_values():
    rng = np.random.default_rng(0)
    q, k, v = (cp.asarray(normal(rng, (2, 900, 64), SINGLE)) for _ in range(3))
    attention(q, k, v)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        out = attention(q, k, v)
        graph = stream.end_capture()
        for seed in range(3):
            k[...] = cp.asarray(normal(np.random.default_rng(seed + 1), (2, 900, 64), SINGLE))
            graph.launch()
            stream.synchronize()
            want, _ = reference.attention(q.get(), k.get(), v.get())
            assert reference.relative_error(out.get(), want) < 1e-6
