"""Causal products of CuPy arrays: the rules of `tests/api`, at the dtypes' precision."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings

from fa_cupy import causal_product, causal_product_backward, reference
from tests.support.products import (
    Case,
    Packed,
    cases,
    check_gradients,
    check_packed,
    check_product,
    describe,
    draw,
    gradients,
    solve,
    state_dtype,
)
from tests.support.strategies import BFLOAT16, DTYPES, LAYOUTS, UNIT, by_dtype, lay, to_numpy

HALF, _, SINGLE, DOUBLE = DTYPES
# Relative errors of a product: its scores, states and results are rounded to 16 bits, or its sums
# are of float32 or float64.
LIMITS = {HALF: 3.2e-4, BFLOAT16: 2.1e-3, SINGLE: 2e-6, DOUBLE: 4e-15}


def rounded(dtype):
    """Whether a kernel rounds scores and states to the dtype."""
    return dtype.itemsize == 2


def check(cupy, *arrays, **options):
    case = Case(*arrays, **options)
    out, state = solve(cupy, case)
    check_product(case, out, state, rounded=rounded(case.q.dtype))
    return out, state


def some(batch):
    """The first batch entry, the last one and one between."""
    count = int(np.prod(batch))
    return [np.unravel_index(i, batch) for i in sorted({0, count * 2 // 5, count - 1})]


@given(case=cases())
@settings(max_examples=500)
def test_any_call_agrees_with_the_reference(cupy, case):
    describe(case)
    check_product(case, *solve(cupy, case), rounded=rounded(case.q.dtype))


@given(case=cases())
@settings(max_examples=20)
def test_a_repeated_call_gives_the_same_bits(cupy, case):
    first, second = solve(cupy, case), solve(cupy, case)
    assert [x.tobytes() for x in first] == [x.tobytes() for x in second]


@pytest.mark.parametrize("batch", [(), (3, 50)])
@pytest.mark.parametrize("dims", [(32, 32), (64, 64), (96, 80), (128, 128), (200, 100), (20, 300)])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(**by_dtype(HALF, BFLOAT16, SINGLE))
def test_sequences_that_are_split_and_that_are_not(cupy, dtype, reverse, dims, batch):
    """Of many batch entries a few are compared: each is a block's own work."""
    arrays = draw(*[(*batch, 777, dim) for dim in (dims[0], *dims)], dtype=dtype)
    arrays.append(draw((*batch, *dims), seed=1)[0])
    q, k, v, initial = map(cupy.asarray, arrays)
    options = {"initial_state": initial, "reverse": reverse, "return_state": True}
    out, state = map(to_numpy, causal_product(q, k, v, **options))
    for entry in some(batch):
        case = Case(*(x[entry] for x in arrays), reverse=reverse)
        check_product(case, out[entry], state[entry], rounded=rounded(dtype))
        want, _ = reference.causal_product(*case.arrays, reverse=reverse)
        assert reference.relative_error(out[entry], want) <= LIMITS[dtype]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (64, 128), (120, 60), (128, 128)])
@pytest.mark.parametrize("length", [2000, 20000])
@pytest.mark.parametrize(**by_dtype(HALF, BFLOAT16, SINGLE))
def test_states_of_sequences_that_are_split(cupy, dtype, length, dims, reverse):
    """By the blocks themselves, or by a kernel and a scan before them: some outputs, and states."""
    arrays = draw(*[(4, length, dim) for dim in (dims[0], *dims)], dtype=dtype)
    arrays.append(draw((4, *dims), seed=1)[0])
    q, k, v, initial = map(cupy.asarray, arrays)
    options = {"initial_state": initial, "reverse": reverse, "return_state": True}
    out, last = map(to_numpy, causal_product(q, k, v, **options))
    q, k, v, initial = (x.astype(np.float64) for x in arrays)
    rows = [0, 63, 64, length // 3, length - 65, length - 1]
    want = np.empty((4, len(rows), dims[1]))
    for n, row in enumerate(rows):
        read = slice(row, None) if reverse else slice(row + 1)
        state = initial + k[:, read].swapaxes(-1, -2) @ v[:, read]
        want[:, n] = (q[:, row, None] @ state)[:, 0]
    assert reference.relative_error(out[:, rows], want) <= 1.2 * LIMITS[dtype]
    whole = initial + k.swapaxes(-1, -2) @ v
    assert reference.relative_error(last, whole) <= LIMITS[SINGLE]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (40, 72), (64, 128), (128, 40), (128, 128)])
@pytest.mark.parametrize("heads", [2, 40])
@pytest.mark.parametrize(**by_dtype(HALF, BFLOAT16))
def test_packed_sequences_beside_numbers_that_are_not_finite(cupy, dtype, heads, dims, reverse):
    """On Hopper, chunks begin with each sequence, and tensor maps load rows of the next one."""
    offsets = np.array([3, 3, 67, 68, 200, 1100, 1163])
    shapes = ((heads, 1200, dim) for dim in (dims[0], *dims))
    case = Case(*draw(*shapes, dtype=dtype), reverse=reverse)
    for x in case.arrays[:3]:
        x[:, :3] = x[:, 1163:] = np.nan
        x[:, 68:200] = np.inf
    states = draw((heads, len(offsets) - 1, *dims), seed=1)[0]
    check_packed(cupy, Packed(case, offsets, states), with_dstate=True, rounded=True)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(**by_dtype())
def test_error_of_long_sequences(cupy, dtype, dim):
    q, k, v = draw(*[(65536, dim)] * 3, dtype=dtype)
    got = to_numpy(causal_product(*map(cupy.asarray, (q, k, v))))
    wide = [x.astype(np.float64) for x in (q, k, v)]
    rows = [0, 100, 4096, 30000, 50001, 65535]
    want = np.stack([wide[0][i] @ (wide[1][: i + 1].T @ wide[2][: i + 1]) for i in rows])
    limit = 1.2 * LIMITS[dtype] if rounded(dtype) else 400 * UNIT[dtype]  # sums of 65536 rows
    assert reference.relative_error(got[rows], want) <= limit


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(**by_dtype())
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
    limit = 16 * UNIT[dtype] * np.abs(to_numpy(want).astype(float)).max()
    np.testing.assert_allclose(
        to_numpy(out).astype(float), to_numpy(want).astype(float), rtol=0, atol=limit
    )
    np.testing.assert_allclose(to_numpy(state), to_numpy(last), rtol=0, atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(**by_dtype())
def test_strides_are_free(cupy, dtype, layout):
    arrays = draw((2, 3, 70, 16), (2, 3, 70, 16), (2, 3, 70, 8), dtype=dtype)
    initial = draw((2, 3, 16, 8), dtype=state_dtype(dtype))[0]
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
@pytest.mark.parametrize(**by_dtype())
def test_what_is_not_finite_shows_where_it_is_read_only(cupy, dtype, bad, reverse):
    clean = draw((900, 8), (900, 8), (900, 5), dtype=dtype)
    clean[0][800, 2] = 0  # and not where a weight of 0 meets it either
    for which, row, col in ((0, 40, 2), (1, 70, 3), (2, 70, 3), (2, 700, 0), (1, 899, 0)):
        arrays = [x.copy() for x in clean]
        arrays[which][row, col] = bad
        out, _ = check(cupy, *arrays, reverse=reverse)
        spoiled = np.zeros(out.shape, bool)
        reached = slice(None, row + 1) if reverse else slice(row, None)
        rows = slice(row, row + 1) if which == 0 else reached
        spoiled[rows, col if which == 2 else slice(None)] = True
        np.testing.assert_array_equal(~np.isfinite(out.astype(float)), spoiled)


@pytest.mark.parametrize("shape", [(70000, 3, 8), (2**16, 2, 3, 8)])
@pytest.mark.parametrize(**by_dtype(BFLOAT16, SINGLE, DOUBLE))
def test_more_entries_than_a_grid_axis_holds(cupy, dtype, shape):
    check(cupy, *draw(*[shape] * 3, dtype=dtype))


@pytest.mark.parametrize("algorithm", ["recurrent", "low_occupancy", "chunked"])
@pytest.mark.parametrize("dims", [(20, 70), (64, 64), (128, 30), (250, 9), (300, 64)])
@pytest.mark.parametrize("reverse", [False, True])
def test_algorithms_of_float32(cupy, algorithm, dims, reverse):
    q, k, v = draw((3, 500, dims[0]), (3, 500, dims[0]), (3, 500, dims[1]))
    got, state = causal_product(
        *map(cupy.asarray, (q, k, v)), return_state=True, reverse=reverse, algorithm=algorithm
    )
    want, last = reference.causal_product(q, k, v, reverse=reverse)
    assert reference.relative_error(to_numpy(got), want) <= LIMITS[SINGLE]
    assert reference.relative_error(to_numpy(state), last) <= LIMITS[SINGLE]


@pytest.mark.parametrize("algorithm", ["auto", "recurrent", "low_occupancy", "chunked"])
@pytest.mark.parametrize(**by_dtype())
def test_the_algorithm_is_what_was_asked_for(cupy, dtype, algorithm):
    from tests.support import plans  # which needs CuPy

    plans.forget()
    x = cupy.asarray(draw((3, 77, 24), dtype=dtype)[0])
    if dtype != SINGLE and algorithm in ("recurrent", "low_occupancy"):
        with pytest.raises(ValueError, match=f"algorithm is '{algorithm}', which is a kernel for"):
            causal_product(x, x, x, algorithm=algorithm)
        return
    assert causal_product(x, x, x, algorithm=algorithm).shape == x.shape
    launched = plans.kernels("causal_product")
    if algorithm in ("recurrent", "low_occupancy"):
        assert launched == [f"linear/{algorithm}"]
    elif algorithm == "chunked":
        assert [source[:12] for source in launched] == ["linear/chunk"]


@pytest.mark.parametrize("algorithm", ["auto", "chunked"])
@pytest.mark.parametrize("dims", [(257, 20), (300, 300), (64, 40)])
@pytest.mark.parametrize(**by_dtype())
def test_what_no_kernel_takes(cupy, dtype, dims, algorithm):
    """Dims above 256, in one stack of segments and in many entries."""
    for batch, length in (((), 1000), ((2, 3), 150)):
        arrays = draw(*[(*batch, length, dim) for dim in (dims[0], *dims)], dtype=dtype)
        q, k, v = map(cupy.asarray, arrays)
        out, state = causal_product(q, k, v, return_state=True, algorithm=algorithm)
        check_product(Case(*arrays), to_numpy(out), to_numpy(state), rounded=rounded(dtype))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(**by_dtype(BFLOAT16, DOUBLE))
def test_products_of_matrices_in_small_stacks(cupy, monkeypatch, dtype, reverse):
    """Several stacks and chunks; queries that share a state; one entry that is not finite."""
    from fa_cupy.gpu.cublas import linear_attention as cublas_linear_attention

    sizes = cublas_linear_attention.Machine.sizes._replace(chunk=16, most_rows=48, least_chunk=4)
    monkeypatch.setattr(cublas_linear_attention.Machine, "sizes", sizes)
    monkeypatch.setattr(cublas_linear_attention, "_SCRATCH_BYTES", 1 << 16)
    monkeypatch.setattr(cublas_linear_attention, "_STACKED", 12)
    arrays = draw((5, 6, 203, 260), (5, 2, 203, 260), (5, 1, 203, 7), dtype=dtype)
    initial = draw((2, 260, 7), dtype=state_dtype(dtype), seed=1)[0]
    check(cupy, *arrays, initial, reverse=reverse)
    arrays[1][3, 1, 100, 4] = np.nan
    arrays[2][1, 0, 180, 2] = np.inf
    check(cupy, *arrays, initial, reverse=reverse)
    arrays = draw((70, 4, 260), (4, 260), (4, 3), dtype=dtype)
    check(cupy, *arrays, reverse=reverse)


@pytest.mark.parametrize(**by_dtype(HALF, SINGLE))
def test_a_graph_keeps_to_memory_of_its_own(cupy, dtype):
    """A sequence that is split, whose states would lie in memory that the pool gives away again."""
    arrays = draw(*[(2, 3000, 64)] * 3, dtype=dtype)
    q, k, v = map(cupy.asarray, arrays)
    out = cupy.empty(v.shape, dtype)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        for _ in range(2):
            causal_product(q, k, v, out=out)
        stream.begin_capture()
        causal_product(q, k, v, out=out)
        graph = stream.end_capture()
        others = [cupy.full(2**14, 7, np.float32) for _ in range(200)]
        out.fill(0)
        graph.launch(stream)
        stream.synchronize()
        assert all((other == 7).all() for other in others)
    want, _ = reference.causal_product(*arrays)
    assert reference.relative_error(to_numpy(out), want) <= LIMITS[dtype]


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


# Gradients


@given(case=cases())
@settings(max_examples=300)
def test_any_gradients_agree_with_the_reference(cupy, case):
    describe(case)
    check_gradients(cupy, case, case.with_out, rounded=rounded(case.q.dtype))


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("batch", [(), (3, 50)])
@pytest.mark.parametrize(**by_dtype())
def test_gradients_of_sequences_that_are_split_and_that_are_not(
    cupy, dtype, batch, reverse, with_state
):
    arrays = draw(*[(*batch, 555, dim) for dim in (40, 24, 24, 40)], dtype=dtype)  # dout, q, k, v
    states = [None, None]
    if with_state:
        states = draw(*[(*batch, 24, 40)] * 2, dtype=state_dtype(dtype), seed=1)
    initial, dstate = (None if x is None else cupy.asarray(x) for x in states)
    got = causal_product_backward(
        *map(cupy.asarray, arrays), initial_state=initial, dstate=dstate, reverse=reverse
    )
    assert len(got) == 3 + with_state
    for entry in some(batch):
        own = (None if x is None else x[entry] for x in (*arrays, *states))
        want = gradients(*own, reverse=reverse)
        for i, (mine, theirs) in enumerate(zip(got, want, strict=True)):
            limit = LIMITS[dtype if i < 3 else state_dtype(dtype)]
            assert reference.relative_error(to_numpy(mine)[entry], theirs) <= limit


@pytest.mark.parametrize(
    ("q", "k", "v", "initial"),
    [
        ((2, 8), (2, 2), (2, 2), (2, 2)),
        ((2, 8), (2, 2), (2, 4), (8,)),
        ((2, 8), (1, 4), (2, 1), (1,)),
        ((5, 1, 3), (5, 1, 1), (1, 2, 1), ()),
        ((), (3,), (7, 1), (3,)),
        ((4, 3), (), (), ()),
    ],
)
@pytest.mark.parametrize(**by_dtype())
def test_gradients_are_summed_over_what_was_broadcast(cupy, dtype, q, k, v, initial):
    arrays = draw((*q, 45, 12), (*k, 45, 12), (*v, 45, 9), dtype=dtype)
    state = draw((*initial, 12, 9), dtype=state_dtype(dtype), seed=1)[0]
    for reverse, with_dstate in itertools.product((False, True), repeat=2):
        case = Case(*arrays, state, reverse=reverse)
        check_gradients(cupy, case, with_dstate, rounded=rounded(dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(**by_dtype(BFLOAT16, DOUBLE))
def test_gradients_of_any_strides(cupy, dtype, layout):
    arrays = draw(*[(2, 3, 70, 16)] * 2, (2, 3, 70, 8), dtype=dtype)
    initial = draw((2, 3, 16, 8), dtype=state_dtype(dtype))[0]
    case = Case(*arrays, initial, layouts=(layout,) * 4)
    check_gradients(cupy, case, True, rounded=rounded(dtype))
    dout, q, k, v = (lay(cupy, x, layout) for x in (arrays[2], *arrays))
    grads = causal_product_backward(dout, q, k, v)
    if layout in ("dense", "blhd", "transposed"):
        assert [g.strides for g in grads] == [x.strides for x in (q, k, v)]
    if layout in ("offset", "upward") and dtype == BFLOAT16:
        return  # tensor maps cannot walk them: another kernel, other last bits
    plain = causal_product_backward(*map(cupy.asarray, (arrays[2], *arrays)))
    for mine, theirs in zip(grads, plain, strict=True):
        assert to_numpy(mine).tobytes() == to_numpy(theirs).tobytes()


@pytest.mark.parametrize(
    "shapes",
    [
        ((0, 8), (0, 8), (0, 4)),
        ((5, 0), (5, 0), (5, 4)),
        ((5, 8), (5, 8), (5, 0)),
        ((0, 0), (0, 0), (0, 0)),
        ((0, 2, 5, 8), (0, 2, 5, 8), (0, 2, 5, 4)),
        ((2, 0, 5, 8), (5, 8), (5, 4)),
        ((2, 0, 5, 8), (2, 1, 5, 8), (5, 4)),
        ((0, 8, 5, 8), (1, 2, 5, 8), (1, 4, 5, 4)),
        ((5, 8), (0, 5, 8), (5, 4)),
    ],
)
@pytest.mark.parametrize(**by_dtype())
def test_axes_of_length_zero(cupy, dtype, shapes):
    arrays = draw(*shapes, dtype=dtype)
    initial = draw((shapes[0][-1], shapes[2][-1]), dtype=state_dtype(dtype), seed=1)[0]
    for state in (None, initial):
        check(cupy, *arrays, state)
        for with_dstate in (False, True):
            check_gradients(cupy, Case(*arrays, state), with_dstate, rounded=rounded(dtype))


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize(**by_dtype())
def test_gradients_of_what_is_not_finite(cupy, dtype, which):
    arrays = draw((150, 6), (150, 7), (150, 7), (150, 6), dtype=dtype)  # dout, q, k, v
    arrays[which][70, 3] = np.nan
    got = causal_product_backward(*map(cupy.asarray, arrays))
    dout, q, k, v = (~np.isfinite(x.astype(float)) for x in arrays)
    for mine, (x, a, b), seen in (
        (got[0], (dout, v, k), np.tri(150)),
        (got[1], (v, dout, q), np.tri(150).T),
        (got[2], (k, q, dout), np.tri(150).T),
    ):
        bad = x.any(axis=1)[:, None] | (seen @ (a.any(axis=1)[:, None] | b) > 0)
        np.testing.assert_array_equal(~np.isfinite(to_numpy(mine).astype(float)), bad)


@pytest.mark.parametrize(**by_dtype())
def test_gradients_repeat_in_two_streams_at_once(cupy, dtype):
    shapes = (1, 6, 500, 24), (1, 6, 500, 24), (1, 2, 500, 24), (1, 2, 500, 24)
    on_device = [[*map(cupy.asarray, draw(*shapes, dtype=dtype, seed=i))] for i in (1, 2)]
    want = [causal_product_backward(*arrays) for arrays in on_device]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in on_device]
    cupy.cuda.Device().synchronize()
    got = []
    for _ in range(5):
        for stream, arrays in zip(streams, on_device, strict=True):
            with stream:
                got.append(causal_product_backward(*arrays))
    for stream in streams:
        stream.synchronize()
    bits = [[to_numpy(x).tobytes() for x in grads] for grads in want]
    assert [[to_numpy(x).tobytes() for x in grads] for grads in got] == bits * 5
