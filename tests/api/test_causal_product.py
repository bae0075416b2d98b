"""Causal products: output, state and gradients against plain forms, and each rule that holds."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fa_cupy import causal_product, causal_product_backward, reference
from fa_cupy.core import linear_problem
from fa_cupy.cpu.products import executor
from fa_cupy.tiled import chunked_scan, chunks
from tests.support import blas
from tests.support.products import (
    Case,
    cases,
    check_gradients,
    check_product,
    describe,
    draw,
    expand_heads,
    gradients,
    solve,
    state_dtype,
)
from tests.support.strategies import (
    BFLOAT16,
    DTYPES,
    LAYOUTS,
    UNIT,
    by_dtype,
    lay,
    to_numpy,
)

HALF, _, SINGLE, DOUBLE = DTYPES
# A fixture that stays the same for all examples is what these tests mean.
with_fixture = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def xp():
    """The array namespaces that are served."""
    return np


@pytest.fixture(params=[None, 1, 3000, 1 << 20], ids="blocks of {}".format)
def small_chunks(monkeypatch, request):
    """Chunks and segments of a few rows, so that short sequences have many of them.

    Chunks come one by one, or in blocks of one, of some, and of all of them.
    """
    size = request.param
    blocks = None if size is None else chunks.Blocks(chunk=4, single=6, size=size)
    sizes = chunks.Sizes(8, state_chunk=16, most_rows=16, least_chunk=2, blocks=blocks)
    monkeypatch.setattr(executor.Machine, "sizes", sizes)
    monkeypatch.setattr(executor, "_LEAST_SEGMENT", 32)


def check(xp, *arrays, **options):
    case = Case(*arrays, **options)
    out, state = solve(xp, case)
    check_product(case, out, state)
    return out, state


@given(case=cases())
def test_any_call_agrees_with_the_reference(xp, case):
    describe(case)
    check_product(case, *solve(xp, case))


@given(case=cases())
@with_fixture
def test_many_chunks_and_segments_agree_with_the_reference(small_chunks, xp, case):
    describe(case)
    check_product(case, *solve(xp, case))


@given(case=cases())
@settings(max_examples=20)
def test_a_repeated_call_gives_the_same_bits(xp, case):
    first, second = solve(xp, case), solve(xp, case)
    assert [x.tobytes() for x in first] == [x.tobytes() for x in second]


# State


@given(
    cuts=st.lists(st.integers(0, 30), min_size=1, max_size=5),
    reverse=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_pieces_through_the_state_are_the_whole(xp, cuts, reverse, dtype):
    bounds = np.cumsum([0, *cuts]).tolist()
    q, k, v = map(xp.asarray, draw(*[(2, bounds[-1], 6)] * 3, dtype=dtype))
    initial = xp.asarray(draw((2, 6, 6), dtype=state_dtype(dtype), seed=1)[0])
    want, last = causal_product(q, k, v, initial_state=initial, return_state=True, reverse=reverse)
    pieces = [slice(a, b) for a, b in itertools.pairwise(bounds)]
    found, state = {}, initial
    for i, piece in sorted(enumerate(pieces), reverse=reverse):
        found[i], state = causal_product(
            *(x[:, piece] for x in (q, k, v)),
            initial_state=state,
            return_state=True,
            reverse=reverse,
        )
    out = np.concatenate([to_numpy(found[i]) for i in range(len(pieces))], axis=1).astype(float)
    want = to_numpy(want).astype(float)
    limit = (4 * UNIT[dtype] + 64 * UNIT[state_dtype(dtype)]) * np.abs(want).max(initial=1)
    np.testing.assert_allclose(out, want, rtol=0, atol=limit)
    np.testing.assert_allclose(to_numpy(state), to_numpy(last), rtol=0, atol=1e-4)


def test_the_state_is_the_sum_of_outer_products(xp):
    q, k, v = map(xp.asarray, draw((3, 50, 4), (3, 50, 4), (3, 50, 5), dtype=DOUBLE))
    for reverse in (False, True):
        _, state = causal_product(q, k, v, return_state=True, reverse=reverse)
        np.testing.assert_allclose(to_numpy(state), to_numpy(k.swapaxes(-1, -2) @ v))


def test_reverse_is_the_product_of_flipped_rows(xp):
    q, k, v = map(xp.asarray, draw(*[(2, 500, 8)] * 3, dtype=DOUBLE))
    got = causal_product(q, k, v, reverse=True)
    flipped = causal_product(*(x[:, ::-1] for x in (q, k, v)))[:, ::-1]
    np.testing.assert_allclose(to_numpy(got), to_numpy(flipped), atol=1e-11)


@pytest.mark.parametrize(
    ("q", "k", "v", "initial", "state"),
    [
        ((3,), (), (), (), ()),
        ((3,), (3,), (1,), (), (3,)),
        ((2, 8), (2, 2), (2, 2), (2, 2), (2, 2)),
        ((2, 8), (2, 2), (2, 4), (), (2, 4)),
        ((2, 8), (1, 2), (2, 2), (1,), (2, 2)),
        ((2, 8), (2, 2), (2, 2), (8,), (2, 8)),
        ((8,), (1,), (1,), (8,), (8,)),
        ((5, 1, 3), (5, 1, 1), (1, 2, 1), (), (5, 2, 1)),
    ],
)
def test_the_state_has_the_batch_axes_of_what_it_sums(xp, q, k, v, initial, state):
    arrays = draw((*q, 20, 4), (*k, 20, 4), (*v, 20, 3), (*initial, 4, 3))
    _, got = check(xp, *arrays)
    assert got.shape == (*state, 4, 3)


# Gradients


@given(case=cases(dtypes=(DOUBLE,)), with_dstate=st.booleans())
@with_fixture
def test_gradients_are_those_of_the_plain_form(small_chunks, xp, case, with_dstate):
    describe(case)
    check_gradients(xp, case, with_dstate)


@given(case=cases(dtypes=(HALF, BFLOAT16, SINGLE)), with_dstate=st.booleans())
@settings(max_examples=50)
def test_gradients_of_other_dtypes(xp, case, with_dstate):
    describe(case)
    check_gradients(xp, case, with_dstate)


@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_are_finite_differences(xp, reverse):
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(s) for s in ((2, 9, 3), (9, 3), (2, 9, 4), (3, 4))]
    dout, dstate = rng.standard_normal((2, 9, 4)), rng.standard_normal((2, 3, 4))

    def loss(q, k, v, initial):
        out, state = causal_product(
            *map(xp.asarray, (q, k, v)),
            initial_state=xp.asarray(initial),
            return_state=True,
            reverse=reverse,
        )
        return np.sum(to_numpy(out) * dout) + np.sum(to_numpy(state) * dstate)

    q, k, v, initial = map(xp.asarray, arrays)
    got = causal_product_backward(
        *(xp.asarray(dout), q, k, v),
        initial_state=initial,
        reverse=reverse,
        dstate=xp.asarray(dstate),
    )
    for i, x in enumerate(arrays):
        want = np.empty_like(x)
        for index in np.ndindex(x.shape):
            ends = []
            for step in (1e-3, -1e-3):
                moved = [a.copy() for a in arrays]
                moved[i][index] += step
                ends.append(loss(*moved))
            want[index] = (ends[0] - ends[1]) / 2e-3  # exact: the loss is linear in each array
        np.testing.assert_allclose(to_numpy(got[i]), want, atol=1e-9)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("length", "heads"), [(200, (4, 2)), (1100, (1, 1))])
def test_gradients_are_those_of_autograd(xp, length, heads, reverse):
    """Of the whole matrix of scores in float64, by a library that differentiates by itself."""
    torch = pytest.importorskip("torch")
    (n, m), (e, d) = heads, (24, 40)
    shapes = ((n, length, e), (m, length, e), (m, length, d), (m, e, d), (n, length, d), (m, e, d))
    arrays = draw(*((1, *shape) for shape in shapes), dtype=DOUBLE)
    q, k, v, initial = (torch.from_numpy(x).requires_grad_() for x in arrays[:4])
    dout, dstate = (torch.from_numpy(x) for x in arrays[4:])
    keys, values, start = (x.repeat_interleave(n // m, 1) for x in (k, v, initial))
    scores = q @ keys.mT
    out = (scores.triu() if reverse else scores.tril()) @ values + q @ start
    ((out * dout).sum() + ((initial + k.mT @ v) * dstate).sum()).backward()
    got = causal_product_backward(
        *map(xp.asarray, (arrays[4], *arrays[:3])),
        initial_state=xp.asarray(arrays[3]),
        dstate=xp.asarray(arrays[5]),
        reverse=reverse,
    )
    for mine, theirs in zip(got, (q, k, v, initial), strict=True):
        assert reference.relative_error(to_numpy(mine), theirs.grad.numpy()) <= 1e-14


@pytest.mark.parametrize(
    ("k_heads", "v_heads", "state_heads"), [(2, 2, 2), (4, 2, 2), (2, 4, 8), (1, 4, 1), (2, 2, 8)]
)
def test_gradients_are_summed_over_groups_of_heads(xp, k_heads, v_heads, state_heads):
    arrays = draw(
        *((2, 8, 20, 4), (2, k_heads, 20, 4), (2, v_heads, 20, 3), (state_heads, 4, 3)),
        dtype=DOUBLE,
    )
    check_gradients(xp, Case(*arrays), True)


def test_gradients_lie_as_their_arrays_do(xp):
    q, k, v = (lay(xp, x, "blhd") for x in draw(*[(2, 3, 33, 8)] * 3))
    grads = causal_product_backward(q, q, k, v)
    assert [g.strides for g in grads] == [x.strides for x in (q, k, v)]


@pytest.mark.parametrize(**by_dtype(HALF, BFLOAT16))
def test_errors_of_gradients_are_those_of_the_plain_formula(xp, dtype):
    q, k, v, dout = draw(*[(2, 512, 64)] * 4, dtype=dtype)
    got = causal_product_backward(*map(xp.asarray, (dout, q, k, v)))
    plain = (
        reference.plain_product(dout, v, k, dtype=dtype),
        reference.plain_product(v, dout, q, dtype=dtype, reverse=True),
        reference.plain_product(k, q, dout, dtype=dtype, reverse=True),
    )
    for mine, low, want in zip(got, plain, gradients(dout, q, k, v), strict=True):
        error = reference.relative_error(to_numpy(mine), want)
        assert error <= 1.1 * reference.relative_error(low, want)


# Accuracy


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dim", [40, 64, 128])
@pytest.mark.parametrize(**by_dtype(HALF, BFLOAT16))
def test_error_is_that_of_the_plain_formula(xp, dtype, dim, reverse):
    q, k, v = draw(*[(2, 512, dim)] * 3, dtype=dtype)
    want, _ = reference.causal_product(q, k, v, reverse=reverse)
    plain = reference.plain_product(q, k, v, dtype=dtype, reverse=reverse)
    got = causal_product(*map(xp.asarray, (q, k, v)), reverse=reverse)
    error = reference.relative_error(to_numpy(got), want)
    assert error <= 1.1 * reference.relative_error(plain, want)


@pytest.mark.parametrize(
    ("dtype", "limit"), [(BFLOAT16, 2.3e-3), (SINGLE, 2e-6), (DOUBLE, 1e-13)], ids=str
)
def test_error_of_long_sequences(xp, dtype, limit):
    q, k, v = draw(*[(65536, 32)] * 3, dtype=dtype)
    got = to_numpy(causal_product(*map(xp.asarray, (q, k, v))))
    wide = [x.astype(np.float64) for x in (q, k, v)]
    rows = [0, 100, 4096, 30000, 50001, 65535]
    want = np.stack([wide[0][i] @ (wide[1][: i + 1].T @ wide[2][: i + 1]) for i in rows])
    assert reference.relative_error(got[rows], want) <= limit


# Shapes and memory


@pytest.mark.parametrize(("q_heads", "k_heads", "v_heads"), [(8, 2, 2), (8, 4, 2), (8, 1, 4)])
@pytest.mark.parametrize("layout", ["dense", "blhd"])
def test_grouped_heads_are_repeated_heads(xp, q_heads, k_heads, v_heads, layout):
    q, k, v = draw((2, q_heads, 90, 8), (2, k_heads, 90, 8), (2, v_heads, 90, 5), dtype=DOUBLE)
    got = causal_product(*(lay(xp, a, layout) for a in (q, k, v)))
    k, v = (np.repeat(a, q_heads // a.shape[1], axis=1) for a in (k, v))
    want = np.tril(q @ k.swapaxes(-1, -2)) @ v
    np.testing.assert_allclose(to_numpy(got), want, atol=1e-11)


@pytest.mark.parametrize(
    "shapes",
    [
        ((0, 8), (0, 8), (0, 4)),
        ((5, 0), (5, 0), (5, 4)),
        ((5, 8), (5, 8), (5, 0)),
        ((0, 0), (0, 0), (0, 0)),
        ((0, 2, 5, 8), (0, 2, 5, 8), (0, 2, 5, 4)),
        ((2, 0, 5, 8), (5, 8), (5, 4)),
        ((5, 8), (0, 5, 8), (5, 4)),
    ],
)
def test_axes_of_length_zero(xp, shapes):
    q, k, v = draw(*shapes)
    initial = draw((q.shape[-1], v.shape[-1]), seed=1)[0]
    for state in (None, initial):
        out, _ = check(xp, q, k, v, state)
        grads = causal_product_backward(*map(xp.asarray, (out, q, k, v)), initial_state=state)
        want = gradients(out, q, k, v, state)
        for mine, theirs in zip(grads, want, strict=True):
            np.testing.assert_allclose(to_numpy(mine), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bad", [0.0, np.nan])
def test_no_dim_is_no_product(xp, bad):
    q = xp.zeros((5, 0))
    v = xp.full((5, 4), bad)
    assert (to_numpy(causal_product(q, q, v)) == 0).all()


def test_no_row_is_no_work(xp):
    q = np.broadcast_to(np.zeros((1, 0, 8), np.float32), (2**40, 0, 8))
    assert causal_product(q, q, q).shape == q.shape


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(**by_dtype())
def test_strides_are_free(xp, dtype, layout):
    arrays = draw((2, 3, 70, 16), (2, 3, 70, 16), (2, 3, 70, 8), dtype=dtype)
    initial = draw((2, 3, 16, 8), dtype=state_dtype(dtype))[0]
    check(xp, *arrays, initial, layouts=(layout,) * 4)


@pytest.mark.parametrize("layout", ["dense", "blhd", "transposed"])
@pytest.mark.parametrize(**by_dtype(HALF, SINGLE))
def test_out_is_laid_out_as_q(xp, dtype, layout):
    q, k, v = draw(*[(2, 3, 33, 16)] * 3, dtype=dtype)
    q = lay(xp, q, layout)
    assert causal_product(q, xp.asarray(k), xp.asarray(v)).strides == q.strides


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(**by_dtype())
def test_out_may_have_any_strides(xp, dtype, layout):
    q, k, v = map(xp.asarray, draw(*[(2, 3, 70, 16)] * 3, dtype=dtype))
    out = lay(xp, np.full((2, 3, 70, 16), np.nan).astype(dtype), layout)
    assert causal_product(q, k, v, out=out) is out
    assert to_numpy(out).tobytes() == to_numpy(causal_product(q, k, v)).tobytes()


def test_read_only_inputs(xp):
    arrays = draw((9, 8), (9, 8), (9, 8))
    for a in arrays:
        a.flags.writeable = False
    check(xp, *arrays)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_does_not_show(threads):
    q, k, v = draw(*[(2, 5000, 32)] * 3)
    want = causal_product(q, k, v, return_state=True)
    grads = causal_product_backward(q, q, k, v)
    with blas.threads(threads):
        again = causal_product(q, k, v, return_state=True)
        again += causal_product_backward(q, q, k, v)
    assert [x.tobytes() for x in again] == [x.tobytes() for x in (*want, *grads)]


# What is not finite


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(**by_dtype())
def test_what_is_not_finite_shows_where_it_is_read_only(xp, dtype, bad, reverse):
    clean = draw((150, 8), (150, 8), (150, 5), dtype=dtype)
    clean[0][100, 2] = 0  # and not where a weight of 0 meets it either
    for which, row, col in ((0, 40, 2), (1, 70, 3), (2, 70, 3), (2, 100, 0), (1, 149, 0)):
        arrays = [x.copy() for x in clean]
        arrays[which][row, col] = bad
        out, _ = check(xp, *arrays, reverse=reverse)
        spoiled = np.zeros(out.shape, bool)
        reached = slice(None, row + 1) if reverse else slice(row, None)
        rows = slice(row, row + 1) if which == 0 else reached
        spoiled[rows, col if which == 2 else slice(None)] = True
        np.testing.assert_array_equal(~np.isfinite(out.astype(float)), spoiled)


def test_an_initial_state_that_is_not_finite_spoils_its_column(xp):
    q, k, v, state = draw((90, 4), (90, 4), (90, 5), (4, 5))
    state[1, 2] = np.nan
    out, _ = check(xp, q, k, v, state)
    np.testing.assert_array_equal(np.isnan(out).all(axis=0), np.arange(5) == 2)
    np.testing.assert_array_equal(np.isnan(out).any(axis=0), np.arange(5) == 2)


@pytest.mark.parametrize("which", range(4))
def test_gradients_of_what_is_not_finite(xp, which):
    arrays = draw((150, 6), (150, 7), (150, 7), (150, 6))  # dout, q, k, v
    arrays[which][70, 3] = np.nan
    got = causal_product_backward(*map(xp.asarray, arrays))
    # As products that read each other's rows: dq reads earlier ones, dk and dv later ones.
    dout, q, k, v = (~np.isfinite(x) for x in arrays)
    for mine, (x, a, b), seen in (
        (got[0], (dout, v, k), np.tri(150)),
        (got[1], (v, dout, q), np.tri(150).T),
        (got[2], (k, q, dout), np.tri(150).T),
    ):
        bad = x.any(axis=1)[:, None] | (seen @ (a.any(axis=1)[:, None] | b) > 0)
        np.testing.assert_array_equal(~np.isfinite(to_numpy(mine)), bad)


@pytest.mark.parametrize("zero", [False, True])
def test_a_state_out_of_range_is_infinite(xp, zero):
    """Although each output is in range: the sum of k v is not, and q reads it after a chunk."""
    small, large = np.full((150, 3), 1e-20, np.float32), np.full((150, 3), 1e20, np.float32)
    q = np.zeros_like(small) if zero else small
    out = to_numpy(causal_product(*map(xp.asarray, (q, large, large))))
    assert np.isfinite(out[:16]).all()
    assert (np.isnan(out[-1]) if zero else np.isposinf(out[-1])).all()
    out = to_numpy(causal_product(*map(xp.asarray, (large, small, large))))
    np.testing.assert_allclose(out[:, 0], 3e20 * np.arange(1, 151), rtol=1e-4)


def test_finite_data_are_computed_once(monkeypatch):
    modes = []
    scan = chunked_scan.scan

    def spy(*arguments):
        modes.append(arguments[-1])
        return scan(*arguments)

    monkeypatch.setattr(chunked_scan, "scan", spy)
    causal_product(*draw(*[(2, 300, 8)] * 3))
    assert set(modes) == {False}


def test_floating_point_errors_are_nobodys_business():
    q, k, v = draw(*[(2, 40, 8)] * 3)
    k[:, 20:] = np.inf
    with np.errstate(all="raise"):
        causal_product(q, k, v, return_state=True)
        causal_product_backward(q, q, k, v)


# Arguments


X = np.zeros((2, 4, 5, 8), np.float32)
STATE = np.zeros((8, 8), np.float32)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"q": None}, TypeError, "q is None, want an array"),
        ({"k": [1.0]}, TypeError, "k is a list, want an array"),
        ({"k": X.astype(float)}, TypeError, "k has dtype float64, q has float32"),
        ({"q": X.astype(int)}, TypeError, "q has dtype int64, want float16, bfloat16, float32"),
        ({"v": X[0, 0, 0]}, ValueError, "v has shape (8,), want at least 2 axes (..., length, d"),
        ({"k": X[..., :4]}, ValueError, "k has dim 4, q has 8"),
        ({"v": X[..., :3, :]}, ValueError, "v has length 3, k has 5"),
        ({"q": X[..., :3, :]}, ValueError, "k has length 5, q has 3"),
        ({"k": X[:, :3]}, ValueError, "k has 3 heads, q has 4, want a divisor of it"),
        (
            {"k": X[:, :2], "v": X[:, [0, 1] * 4]},  # not every second head of v
            ValueError,
            "v has batch shape (2, 8), which does not broadcast with (2, 4) of q, k",
        ),
        ({"v": X[[0, 0, 0]]}, ValueError, "v has batch shape (3, 4), which does not broadcast"),
        (
            {"initial_state": STATE[:4]},
            ValueError,
            "initial_state has shape (4, 8), want (..., 8, 8), the dims of k and v",
        ),
        (
            {"initial_state": STATE.astype(float)},
            TypeError,
            "initial_state has dtype float64, want float32 for q of float32",
        ),
        (
            {"initial_state": np.zeros((3, 1, 8, 8), np.float32)},
            ValueError,
            "initial_state has batch shape (3, 1), which does not broadcast with (2, 4) of q, k, v",
        ),
        (
            {"k": X[:, :2], "initial_state": np.zeros((3, 8, 8), np.float32)},
            ValueError,
            "initial_state has 3 heads, want 1, 2 or 4",
        ),
        (
            {"initial_state": np.zeros((2, 8, 8), np.float32)},
            ValueError,
            "initial_state has 2 heads, want 1 or 4",
        ),
        ({"reverse": "yes"}, TypeError, "reverse is 'yes' (str), want a bool"),
    ],
)
def test_errors_of_both_directions(arguments, error, text):
    given_arrays = {"q": X, "k": X, "v": X} | arguments
    for function, more in ((causal_product, {}), (causal_product_backward, {"dout": X})):
        with pytest.raises(error) as caught:
            function(**(given_arrays | more))
        assert str(caught.value).startswith(f"{function.__name__}: {text}")


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"return_state": 2}, TypeError, "return_state is 2 (int), want a bool"),
        (
            {"algorithm": "fast"},
            ValueError,
            "algorithm is 'fast' (str), want 'auto', 'chunked', 'recurrent' or 'low_occupancy'",
        ),
        (
            {"algorithm": "recurrent"},
            ValueError,
            "algorithm is 'recurrent', which is a GPU kernel, want 'auto' or 'chunked' for arrays",
        ),
        ({"algorithm": None}, ValueError, "algorithm is None (NoneType), want 'auto', "),
        ({"out": X[0]}, ValueError, "out has shape (4, 5, 8), want (2, 4, 5, 8)"),
        ({"out": X.astype(float)}, TypeError, "out has dtype float64, want float32"),
        ({"out": X}, ValueError, "out overlaps q in memory, want separate memory"),
    ],
)
def test_errors_of_the_product(arguments, error, text):
    with pytest.raises(error) as caught:
        causal_product(X, X, X, **arguments)
    assert str(caught.value).startswith(f"causal_product: {text}")


def test_out_must_not_overlap_the_state():
    memory = np.zeros(64, np.float32)
    out, state = memory[:40].reshape(5, 8), memory.reshape(8, 8)
    with pytest.raises(ValueError, match="out overlaps initial_state in memory"):
        causal_product(X[0, 0], X[0, 0], X[0, 0], initial_state=state, out=out)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"dout": None}, TypeError, "dout is None, want an array"),
        ({"dout": X[0]}, ValueError, "dout has shape (4, 5, 8), want (2, 4, 5, 8)"),
        ({"dout": X.astype(float)}, TypeError, "dout has dtype float64, want float32"),
        ({"dstate": STATE}, ValueError, "dstate has shape (8, 8), want (2, 4, 8, 8)"),
        (
            {"dstate": np.zeros((2, 4, 8, 8))},
            TypeError,
            "dstate has dtype float64, want float32",
        ),
    ],
)
def test_errors_of_gradients(arguments, error, text):
    with pytest.raises(error) as caught:
        causal_product_backward(**({"dout": X, "q": X, "k": X, "v": X} | arguments))
    assert str(caught.value).startswith(f"causal_product_backward: {text}")


@pytest.mark.parametrize("algorithm", ["auto", "chunked"])
def test_algorithms_of_the_cpu(algorithm):
    q, k, v = draw(*[(30, 4)] * 3)
    want = causal_product(q, k, v)
    np.testing.assert_array_equal(causal_product(q, k, v, algorithm=algorithm), want)


@pytest.mark.parametrize(**by_dtype())
def test_algorithms_of_a_gpu(dtype):
    for algorithm in linear_problem.ALGORITHMS:
        if dtype == SINGLE or algorithm in ("auto", "chunked"):
            assert linear_problem.algorithm("f", algorithm, "cupy", dtype) == algorithm
            continue
        with pytest.raises(ValueError, match="is a kernel for float32, want 'auto' or 'chunked'"):
            linear_problem.algorithm("f", algorithm, "cupy", dtype)


# Other libraries


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x).to(torch.bfloat16) for x in draw(*[(2, 70, 8)] * 3))
    out, state = causal_product(q, k, v, return_state=True)
    assert (out.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    grads = causal_product_backward(out, q, k, v, initial_state=state)
    assert [g.dtype for g in grads] == [torch.bfloat16] * 3 + [torch.float32]
    want = torch.tril(q.float() @ k.float().mT) @ v.float()
    torch.testing.assert_close(out.float(), want, rtol=1e-2, atol=1e-2)


def test_gradients_are_those_of_torch():
    torch = pytest.importorskip("torch")
    q, k, v, s, dout = draw((2, 8, 40, 6), *[(2, 2, 40, 6)] * 2, (2, 1, 6, 6), (2, 8, 40, 6))
    tensors = [torch.from_numpy(x.astype(float)).requires_grad_() for x in (q, k, v, s)]
    tq, tk, tv, ts = tensors
    wide_k, wide_v = (x.repeat_interleave(4, 1) for x in (tk, tv))
    out = torch.tril(tq @ wide_k.mT) @ wide_v + tq @ ts
    want = torch.autograd.grad(out, tensors, torch.from_numpy(dout.astype(float)))
    inputs = (x.astype(float) for x in (dout, q, k, v))
    got = causal_product_backward(*inputs, initial_state=s.astype(float))
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, theirs.numpy(), atol=1e-10)


def test_array_api_arrays():
    strict = pytest.importorskip("array_api_strict")
    q, k, v = draw(*[(2, 70, 8)] * 3)
    out, state = causal_product(*map(strict.asarray, (q, k, v)), return_state=True)
    assert type(out) is type(state) is type(strict.asarray(q))
    np.testing.assert_array_equal(np.asarray(out), causal_product(q, k, v))
    grads = causal_product_backward(out, *map(strict.asarray, (q, k, v)))
    assert {type(g) for g in grads} == {type(out)}


def test_states_of_a_group_are_one(xp):
    """What queries share is summed once, and expands to what each of them would have summed."""
    q, k, v = draw((2, 8, 70, 6), (2, 2, 70, 6), (2, 2, 70, 4), dtype=DOUBLE)
    _, state = causal_product(*map(xp.asarray, (q, k, v)), return_state=True)
    want = k.swapaxes(-1, -2) @ v
    np.testing.assert_allclose(to_numpy(state), want, atol=1e-12)
    assert expand_heads(to_numpy(state), (2, 8, 70, 4)).shape == (2, 8, 6, 4)
