"""Causal products of CuPy arrays: the rules of `test_causal_product`, at the dtypes' precision."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings

from fa_cupy import (
    causal_product,
    causal_product_backward,
    linear_attention,
    prefix_state,
    reference,
)
from tests.products import Case, cases, check_product, draw
from tests.strategies import BFLOAT16, DTYPES, LAYOUTS, UNIT, by_dtype, lay, to_numpy
from tests.test_causal_product import describe, solve

HALF, _, SINGLE, _ = DTYPES
SERVED = (HALF, BFLOAT16, SINGLE)
pytestmark = pytest.mark.gpu


def check(cupy, *arrays, **options):
    case = Case(*arrays, **options)
    out, state = solve(cupy, case)
    check_product(case, out, state, rounded=case.q.dtype != SINGLE)
    return out, state


@given(case=cases(dtypes=SERVED))
def test_any_call_agrees_with_the_reference(cupy, case):
    describe(case)
    check_product(case, *solve(cupy, case), rounded=case.q.dtype != SINGLE)


@given(case=cases(dtypes=SERVED))
@settings(max_examples=20)
def test_a_repeated_call_gives_the_same_bits(cupy, case):
    first, second = solve(cupy, case), solve(cupy, case)
    assert [x.tobytes() for x in first] == [x.tobytes() for x in second]


@pytest.mark.parametrize("batch", [(), (8,), (3, 50)])
@pytest.mark.parametrize("dims", [(32, 32), (64, 64), (96, 80), (128, 128), (200, 100), (20, 300)])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(**by_dtype(HALF, BFLOAT16))
def test_sequences_that_are_split_and_that_are_not(cupy, dtype, reverse, dims, batch):
    shapes = [(*batch, 1500, dims[0])] * 2 + [(*batch, 1500, dims[1])]
    arrays = draw(*shapes, dtype=dtype)
    initial = draw((*batch, *dims), seed=1)[0]
    out, _ = check(cupy, *arrays, initial, reverse=reverse)
    want, _ = reference.causal_product(*arrays, initial, reverse=reverse)
    assert reference.relative_error(out, want) <= (2.1e-3 if dtype == BFLOAT16 else 3.2e-4)


@pytest.mark.parametrize(("dtype", "limit"), [(HALF, 3.2e-4), (BFLOAT16, 2.1e-3)], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_error_of_long_sequences(cupy, dtype, limit, dim):
    q, k, v = draw(*[(65536, dim)] * 3, dtype=dtype)
    got = to_numpy(causal_product(*map(cupy.asarray, (q, k, v))))
    wide = [x.astype(np.float64) for x in (q, k, v)]
    rows = [0, 100, 4096, 30000, 50001, 65535]
    want = np.stack([wide[0][i] @ (wide[1][: i + 1].T @ wide[2][: i + 1]) for i in rows])
    assert reference.relative_error(got[rows], want) <= limit


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(**by_dtype(HALF, BFLOAT16))
def test_pieces_through_the_state_are_the_whole(cupy, dtype, reverse):
    q, k, v = map(cupy.asarray, draw(*[(2, 300, 40)] * 3, dtype=dtype))
    want, last = causal_product(q, k, v, return_state=True, reverse=reverse)
    pieces = [slice(a, b) for a, b in itertools.pairwise((0, 1, 70, 70, 213, 300))]
    found, state = {}, None
    for i, piece in sorted(enumerate(pieces), reverse=reverse):
        found[i], state = causal_product(
            *(x[:, piece] for x in (q, k, v)),
            initial_state=state,
            return_state=True,
            reverse=reverse,
        )
    out = cupy.concatenate([found[i] for i in range(len(pieces))], axis=1)
    limit = 8 * UNIT[dtype] * np.abs(to_numpy(want).astype(float)).max()
    np.testing.assert_allclose(
        to_numpy(out).astype(float), to_numpy(want).astype(float), rtol=0, atol=limit
    )
    np.testing.assert_allclose(to_numpy(state), to_numpy(last), rtol=0, atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(**by_dtype(*SERVED))
def test_strides_are_free(cupy, dtype, layout):
    arrays = draw((2, 3, 70, 16), (2, 3, 70, 16), (2, 3, 70, 8), dtype=dtype)
    initial = draw((2, 3, 16, 8))[0]
    check(cupy, *arrays, initial, layouts=(layout,) * 4)
    q, k, v = map(cupy.asarray, arrays)
    out = lay(cupy, np.full((2, 3, 70, 8), np.nan).astype(dtype), layout)
    assert causal_product(q, k, v, out=out) is out
    assert to_numpy(out).tobytes() == to_numpy(causal_product(q, k, v)).tobytes()


@pytest.mark.parametrize("shift", [0, 1])
def test_a_plan_serves_any_pointers(cupy, shift):
    arrays = draw(*[(2, 70, 16)] * 3, dtype=HALF)
    want = to_numpy(causal_product(*map(cupy.asarray, arrays)))
    memory = cupy.empty((3, 2 * 70 * 16 + shift), HALF)
    for place, array in zip(memory, arrays, strict=True):
        place[shift:] = cupy.asarray(array).ravel()
    moved = (place[shift:].reshape(2, 70, 16) for place in memory)
    assert to_numpy(causal_product(*moved)).tobytes() == want.tobytes()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(**by_dtype(*SERVED))
def test_what_is_not_finite_shows_where_it_is_read_only(cupy, dtype, bad, reverse):
    clean = draw((1500, 8), (1500, 8), (1500, 5), dtype=dtype)
    for which, row, col in ((0, 40, 2), (1, 70, 3), (2, 70, 3), (2, 1000, 0), (1, 1499, 0)):
        arrays = [x.copy() for x in clean]
        arrays[which][row, col] = bad
        out, _ = check(cupy, *arrays, reverse=reverse)
        spoiled = np.zeros(out.shape, bool)
        reached = slice(None, row + 1) if reverse else slice(row, None)
        rows = slice(row, row + 1) if which == 0 else reached
        spoiled[rows, col if which == 2 else slice(None)] = True
        np.testing.assert_array_equal(~np.isfinite(out.astype(float)), spoiled)


@pytest.mark.parametrize("shape", [(70000, 3, 8), (2**16, 2, 3, 8)])
@pytest.mark.parametrize(**by_dtype(BFLOAT16, SINGLE))
def test_more_entries_than_a_grid_axis_holds(cupy, dtype, shape):
    check(cupy, *draw(*[shape] * 3, dtype=dtype))


@pytest.mark.parametrize("algorithm", ["recurrent", "low_occupancy"])
@pytest.mark.parametrize("dims", [(20, 70), (64, 64), (128, 30), (250, 9), (300, 64)])
@pytest.mark.parametrize("reverse", [False, True])
def test_plain_kernels(cupy, algorithm, dims, reverse):
    q, k, v = draw((3, 700, dims[0]), (3, 700, dims[0]), (3, 700, dims[1]))
    got, state = causal_product(
        *map(cupy.asarray, (q, k, v)), return_state=True, reverse=reverse, algorithm=algorithm
    )
    want, last = reference.causal_product(q, k, v, reverse=reverse)
    assert reference.relative_error(to_numpy(got), want) <= 1e-6
    assert reference.relative_error(to_numpy(state), last) <= 1e-6


def test_more_elements_than_32_bits_count(cupy):
    # 2**31 elements each and a few: 17 GB.
    length, heads, dim = 4096, 8193, 64
    q, k, v = (cupy.empty((heads, length, dim), HALF) for _ in range(3))
    for x in (q, k, v):
        x.fill(0)
    small = draw(*[(length, dim)] * 3, dtype=HALF)
    for head in (0, heads - 1):
        for x, y in zip((q, k, v), small, strict=True):
            x[head] = cupy.asarray(y)
    out = causal_product(q, k, v)
    want, _ = reference.causal_product(*small)
    for head in (0, heads - 1):
        assert reference.relative_error(to_numpy(out[head]), want) <= 3.2e-4
    assert not out[1 : heads - 1].any()


def test_rows_of_a_long_stride(cupy):
    """Rows that are 2**31 bytes and more apart in all."""
    wide = cupy.zeros((300, 2**23), HALF)
    q, k, v = draw(*[(300, 16)] * 3, dtype=HALF)
    wide[:, -16:] = cupy.asarray(k)
    out = causal_product(cupy.asarray(q), wide[:, -16:], cupy.asarray(v))
    want, _ = reference.causal_product(q, k, v)
    assert reference.relative_error(to_numpy(out), want) <= 3.2e-4


def test_what_has_no_kernel_says_so(cupy):
    x = cupy.zeros((4, 5, 8), np.float16)
    double, wide = x.astype(np.float64), cupy.zeros((5, 300), np.float16)
    single = x.astype(np.float32)
    for call in (
        lambda: causal_product(double, double, double),
        lambda: causal_product(single, single, single, algorithm="chunked"),
        lambda: causal_product(wide, wide, wide),
        lambda: causal_product(x, x, x, algorithm="recurrent"),
        lambda: causal_product_backward(x, x, x, x),
        lambda: linear_attention(x, x, x),
        lambda: prefix_state(x, x),
    ):
        with pytest.raises(
            NotImplementedError, match="on a GPU there is causal_product of float16"
        ):
            call()
