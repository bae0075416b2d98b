"""What all kernels of causal products have in common: their own source on the CPU."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import reference
from fa_cupy.gpu.kernels.linear import params
from fa_cupy.gpu.kernels.linear.params import traits_of
from tests.support.every_run import examples, only, parameter, some
from tests.support.kernel_products import NAMES, check, gradients, solve
from tests.support.product_rows import (
    CHUNK_FP32_SM80,
    CHUNK_FP32_SM90,
    CHUNK_FP64,
    CHUNK_SM80,
    CHUNK_SM90,
    PINGPONG,
    PLAIN,
    SMALL_SM80,
    SMALL_SM90,
    job,
)
from tests.support.products import DOUBLE, Case, draw, state_dtype
from tests.support.seeds import Chosen, one


@pytest.mark.emulator
@pytest.mark.parametrize(
    "row",
    some([*CHUNK_SM80, *CHUNK_SM90], lambda row: (row.source, row.dtype)),
    ids=lambda row: row.name,
)
def test_every_row(row):
    length = 3 * row.tile_m + 9
    shapes = (2, length, row.dim), (2, length, row.dim), (2, length, row.tile_n)
    arrays = draw(*shapes, dtype=NAMES[row.dtype])
    initial = draw((2, row.dim, row.tile_n), seed=1)[0]
    check(row, Case(*arrays, initial), seed=1)
    check(row, Case(*arrays, initial, reverse=True), segment_chunks=2, seed=2)
    # The plain formula rounds the scores too.
    out, _ = check(row, Case(*arrays), segment_chunks=1, seed=3)
    want, _ = reference.causal_product(*arrays)
    plain = reference.plain_product(*arrays, dtype=arrays[0].dtype)
    error, limit = (reference.relative_error(x, want) for x in (out, plain))
    assert error <= 1.03 * limit


@pytest.mark.emulator
@pytest.mark.parametrize("row", some(PLAIN, lambda row: row.source), ids=lambda row: row.name)
def test_every_plain_row(row):
    for seed, (length, qk_dim, v_dim) in enumerate(
        ((3 * row.tile_m + 5, row.dim, 68), (2 * row.tile_m, row.dim - 3, 7), (0, 5, 5))
    ):
        arrays = draw((2, length, qk_dim), (2, length, qk_dim), (2, length, v_dim))
        initial = draw((2, qk_dim, v_dim), seed=1)[0]
        check(row, Case(*arrays, initial, reverse=seed == 1), seed=seed)
    wide = draw((20, row.dim + 40), (20, row.dim + 40), (20, 4))  # in two turns
    check(row, Case(*wide, draw((row.dim + 40, 4))[0]))


@pytest.mark.emulator
@pytest.mark.parametrize(
    "row",
    some([*CHUNK_FP32_SM80, *CHUNK_FP32_SM90], lambda row: row.source),
    ids=lambda row: row.name,
)
def test_every_row_of_float32(row):
    length = 3 * row.tile_m + 9
    shapes = (2, length, row.dim), (2, length, row.dim), (2, length, row.tile_n)
    arrays = draw(*shapes)
    initial = draw((2, row.dim, row.tile_n), seed=1)[0]
    check(row, Case(*arrays, initial), seed=1, truncating=True)
    check(row, Case(*arrays, initial, reverse=True), segment_chunks=2, seed=2)
    out, state = check(row, Case(*arrays), segment_chunks=1, seed=3, truncating=True)
    want, last = reference.causal_product(*arrays)
    plain = reference.plain_product(*arrays, dtype=arrays[0].dtype)
    errors = [reference.relative_error(x, want) for x in (out, plain)]
    # Where three products share a sum, that is cut more often while it is large.
    # What plain sums come to is the machine's BLAS's.
    most = (4e-7, 1.6) if row in CHUNK_FP32_SM90 else (3e-7, 1.4)
    assert errors[0] <= min(most[0], most[1] * errors[1])
    assert reference.relative_error(state, last) <= 3e-7


@pytest.mark.long
@pytest.mark.emulator
@pytest.mark.parametrize(
    "row",
    some(CHUNK_FP64, lambda row: (row.source, row.key_parts, row.stages)),
    ids=lambda row: row.name,
)
def test_every_row_of_float64(row):
    length = 3 * row.tile_m + 9
    shapes = (2, length, row.dim), (2, length, row.dim), (2, length, row.tile_n)
    arrays = draw(*shapes, dtype=DOUBLE)
    initial = draw((2, row.dim, row.tile_n), dtype=DOUBLE, seed=1)[0]
    check(row, Case(*arrays, initial), seed=1)
    check(row, Case(*arrays, initial, reverse=True), segment_chunks=2, seed=2)
    out, state = check(row, Case(*arrays), segment_chunks=1, seed=3)
    for found, want in zip((out, state), in_extended_precision(*arrays), strict=True):
        assert reference.relative_error(found, want) <= 6e-16
    odd = draw((40, row.dim - 3), (40, row.dim - 3), (40, row.tile_n + 7), dtype=DOUBLE)
    check(row, Case(*odd), segment_chunks=1)
    q, k, v = (x[..., : min(row.dim, row.tile_n)] for x in arrays)  # columns of either are keys
    gradients(row, Case(q, k, v), *draw(v.shape, dtype=DOUBLE, seed=4), segment_chunks=2)


def in_extended_precision(q, k, v):
    """Output and state in the longest floats that NumPy has, rounded to float64."""
    q, k, v = (x.astype(np.longdouble) for x in (q, k, v))
    out = np.tril(q @ k.swapaxes(-1, -2)) @ v
    return out.astype(float), (k.swapaxes(-1, -2) @ v).astype(float)


@pytest.mark.emulator
@pytest.mark.parametrize(
    "row",
    only([CHUNK_FP32_SM80[0], CHUNK_FP32_SM90[0], PINGPONG], PINGPONG),
    ids=lambda row: row.name,
)
@pytest.mark.parametrize("truncating", only([False, True], True))
def test_error_of_a_long_sequence_of_float32(row, truncating):
    arrays = draw(*[(6000, 32)] * 3)
    out, state = solve(row, Case(*arrays), truncating=truncating)
    want, last = reference.causal_product(*arrays)
    assert reference.relative_error(out[-500:], want[-500:]) <= 4e-7
    assert reference.relative_error(state, last) <= 4e-7


def scaled(rng, x, exponents, axis):
    """`x` with rows (columns) times random powers of two between these."""
    shape = [1, 1]
    shape[axis] = x.shape[axis]
    return np.ldexp(x, rng.integers(*exponents, shape)).astype(np.float32)


EXPONENTS = [(0, (-8, 9)), (0, (-20, 21)), (0, (-30, 21)), (1, (-4, 5)), (1, (-10, 11))]


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("axis", "exponents"),
    only(EXPONENTS, (0, (-30, 21)), (1, (-10, 11))),
)
@pytest.mark.parametrize(
    "row", [CHUNK_FP32_SM80[0], CHUNK_FP32_SM90[0], PINGPONG], ids=lambda row: row.name
)
def test_float32_of_rows_and_columns_of_any_size(row, axis, exponents):
    """Each output has the accuracy of its own terms, though its neighbours are larger by far.

    A row's numbers are whole down to 2**-25 of its largest; on CHUNK_SM90 down to 2**-17.
    """
    if axis == 1 and row in CHUNK_FP32_SM90:
        exponents = tuple(max(-8, min(9, x)) for x in exponents)
    rng = np.random.default_rng(0)
    q, k, v = draw(*[(200, 32)] * 3)
    v = scaled(rng, v, exponents, axis)
    if axis == 0:
        q, k = (scaled(rng, x, exponents, 0) for x in (q, k))
    for segment_chunks in (None, 2):
        check(row, Case(q, k, v), segment_chunks, truncating=True)


ENDS = [
    (1e37, 1e-25, 1e20), (1e20, 1e30, 1e-28), (1e-30, 1e-20, 1e25), (1e-40, 1e30, 1e5),
    (1e20, 1e-40, 1e10), (1e-5, 1e37, 1e-39), (1e-30, 1e18, 1e18),
]  # fmt: skip


@pytest.mark.emulator
@pytest.mark.parametrize(
    "sizes", [parameter((sizes,), i in (0, 3)) for i, sizes in enumerate(ENDS)], ids=str
)
@pytest.mark.parametrize(
    "row", [CHUNK_FP32_SM80[0], CHUNK_FP32_SM90[0], PINGPONG], ids=lambda row: row.name
)
def test_float32_at_the_ends_of_its_range(row, sizes):
    """Scores may be more than float32 holds, or less, where states and outputs are not."""
    arrays = [np.float32(size) * x for x, size in zip(draw(*[(150, 32)] * 3), sizes, strict=True)]
    check(row, Case(*arrays))


@pytest.mark.emulator
def test_a_tiny_row_before_a_huge_one():
    q, k, v = draw(*[(64, 32)] * 3)
    k[:40] *= np.float32(1e-15)
    v[:40] *= np.float32(1e-15)
    k[40:] *= np.float32(1e15)
    q[::2] *= np.float32(1e12)
    for row in (*CHUNK_FP32_SM80[:2], CHUNK_FP32_SM90[0], PINGPONG):
        check(row, Case(q, k, v))


@pytest.mark.emulator
def test_keys_that_share_no_column():
    """One element each: what a row adds to the state is alone there, however small it is."""
    rng = np.random.default_rng(0)
    q, v = draw((64, 32), (64, 32))
    k = np.zeros((64, 32), np.float32)
    k[np.arange(64), np.arange(64) % 32] = np.ldexp(1.0, rng.integers(-14, 1, 64))
    for row in (CHUNK_FP32_SM80[0], CHUNK_FP32_SM90[0], PINGPONG):
        check(row, Case(q, k, v))


@pytest.mark.emulator
@pytest.mark.parametrize(
    "row",
    [
        SMALL_SM80[0],
        SMALL_SM90[0],
        CHUNK_FP32_SM80[0],
        CHUNK_FP32_SM90[0],
        CHUNK_FP64[0],
        PLAIN[0],
    ],
    ids=lambda row: row.name,
)
def test_heads_that_share_keys_or_values(row):
    arrays = draw((2, 4, 70, 16), (2, 2, 70, 16), (2, 1, 70, 24), dtype=NAMES[row.dtype])
    for seed, heads in enumerate((1, 2, 4)):
        initial = draw((heads, 16, 24), dtype=state_dtype(arrays[0].dtype))[0]
        check(row, Case(*arrays, initial), seed=seed)


@pytest.mark.emulator
@pytest.mark.parametrize("reverse", [False, True])
def test_more_batch_axes_than_a_kernel_walks(reverse):
    """Seven, none of which merge: two launches of each kernel, in the same memory for states."""
    batches = (2, 1) * 3 + (2,), (1, 2) * 3 + (1,)
    q, k, v = draw(*[(*batches[i], 70, 4) for i in (0, 1, 1)], dtype=NAMES[SMALL_SM80[0].dtype])
    case = Case(q, k, v, draw((*batches[0], 4, 4))[0], reverse)
    jobs = [traits_of(job(case.q, case.k, case.v, reverse))]
    assert len(params.fill(jobs[0], (1, 70), 1).parts) == 2
    check(SMALL_SM80[0], case, segment_chunks=1)


@pytest.mark.emulator
@examples(60)
@given(st.integers(0, 2**40))
def test_any_call_with_any_schedule(seed):
    assert one(seed, Chosen("product")) is None


@pytest.mark.emulator
@examples(6)
@given(
    row=st.sampled_from(
        [
            *SMALL_SM90,
            *(row for row in CHUNK_SM90 if row.dim > row.tile_n),
            *CHUNK_FP32_SM90[:3],
            PINGPONG,
        ]
    ),
    lengths=st.tuples(st.integers(1, 3), st.integers(1, 200)),
    dims=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    segment_chunks=st.sampled_from([None, 1]),
    seed=st.integers(0, 2**32),
)
def test_jobs_of_one_launch(row, lengths, dims, segment_chunks, seed):
    """They are what each of them is alone."""
    (entries, length), (qk_dim, v_dim) = (
        lengths,
        (8 + 8 * int(x * (row.dim // 8 - 1)) for x in dims),
    )
    q, k = draw(*[(entries, length, qk_dim)] * 2, dtype=NAMES[row.dtype], seed=seed)
    v, dout = draw(*[(entries, length, v_dim)] * 2, dtype=NAMES[row.dtype], seed=seed + 1)
    case, dstate = Case(q, k, v), draw((qk_dim, v_dim))[0]
    cases, found = gradients(row, case, dout, dstate, segment_chunks, seed=seed)
    for one_of, (out, state) in zip(cases, found, strict=True):
        alone, last = solve(row, one_of, segment_chunks, seed=seed + 1)
        assert (out.tobytes(), state.tobytes()) == (alone.tobytes(), last.tobytes())


@pytest.mark.emulator
@pytest.mark.parametrize(
    "row",
    some(
        [
            *CHUNK_SM80[:2],
            *SMALL_SM90,
            *CHUNK_FP32_SM80[:2],
            *CHUNK_FP32_SM90[:2],
            PINGPONG,
            CHUNK_FP64[0],
        ],
        lambda row: row.source,
    ),
    ids=lambda row: row.name,
)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_shows_where_it_is_read_only(row, bad):
    clean = draw((150, 24), (150, 24), (150, 32), dtype=NAMES[row.dtype])
    for reverse, (which, line, col) in itertools.product(
        (False, True), ((0, 40, 2), (1, 70, 3), (2, 70, 3), (2, 64, 0), (2, 127, 31))
    ):
        arrays = [x.copy() for x in clean]
        arrays[which][line, col] = bad
        out, _ = check(row, Case(*arrays, reverse=reverse))
        spoiled = np.zeros(out.shape, bool)
        reached = slice(None, line + 1) if reverse else slice(line, None)
        rows = slice(line, line + 1) if which == 0 else reached
        spoiled[rows, col if which == 2 else slice(None)] = True
        np.testing.assert_array_equal(~np.isfinite(out.astype(float)), spoiled)


@pytest.mark.emulator
@pytest.mark.parametrize("sizes", [(100, 100, 1e-4), (1e-3, 1e-3, 1e3), (1e-4, 30, 300)], ids=str)
@pytest.mark.parametrize(
    "row",
    some([*CHUNK_SM80[:2], *SMALL_SM90[:2]], lambda row: row.source),
    ids=lambda row: row.name,
)
def test_scores_and_states_of_any_size(row, sizes):
    """Where float16 ends they reach 1e5 or 1e6, or where it begins 1e-5."""
    arrays = [size * np.abs(x) for x, size in zip(draw(*[(400, 32)] * 3), sizes, strict=True)]
    check(row, Case(*(x.astype(NAMES[row.dtype]) for x in arrays)))


@pytest.mark.emulator
@pytest.mark.parametrize(
    "row",
    some(
        [
            *SMALL_SM80[::2],
            *SMALL_SM90[1:3],
            CHUNK_FP32_SM80[0],
            *CHUNK_FP32_SM90[:3:2],
            PINGPONG,
            CHUNK_FP64[0],
        ],
        lambda row: row.source,
    ),
    ids=lambda row: row.name,
)
def test_the_schedule_does_not_show(row):
    case = Case(*draw(*[(2, 300, 32)] * 3, dtype=NAMES[row.dtype]))
    found = {
        tuple(x.tobytes() for x in solve(row, case, segment_chunks=2, seed=seed))
        for seed in range(8)
    }
    assert len(found) == 1
