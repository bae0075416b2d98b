"""The kernels of causal products: their own source on the CPU, and what chooses between them."""

import itertools
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_cupy import reference
from fa_cupy.gpu.compile import ROOT
from fa_cupy.gpu.product_choice import Choice, choose
from fa_cupy.gpu.product_params import HEAD_FORMAT, POINTERS, PRODUCT_PARAMS
from fa_cupy.gpu.products import (
    PRODUCTS,
    ChunkedVariant,
    RecurrentVariant,
    StatesVariant,
)
from fa_cupy.gpu.rows import SHARED_LIMIT
from tests.products import Case, check_product, draw
from tests.strategies import DTYPES, normal
from validation import emulator

needs_compiler = pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler")

NAMES = {"float16": DTYPES[0], "bfloat16": DTYPES[1], "float32": DTYPES[2]}
CHUNKED = [row for row in PRODUCTS if isinstance(row, ChunkedVariant)]
STATES = {(row.dtype, row.dim): row for row in PRODUCTS if isinstance(row, StatesVariant)}
PLAIN = [row for row in PRODUCTS if isinstance(row, RecurrentVariant)]
SMALL = [row for row in CHUNKED if row.dim == 32 or (row.dim, row.stages) == (64, 3)]


def split(row, length, segment_chunks):
    """The choice of a row with segments of so many chunks; None: one segment."""
    if segment_chunks is None:
        return Choice(row, None, 1, max(1, length), 0.0)
    rows = segment_chunks * row.tile_m
    segments = max(1, -(-length // rows))
    states = STATES[row.dtype, row.dim] if segments > 1 else None
    return Choice(row, states, segments, rows, 0.0)


def solve(row, case, segment_chunks=None, seed=0, source=None):
    choice = split(row, case.q.shape[-2], segment_chunks)
    return emulator.causal_product(choice, *case.native(np), case.reverse, seed, source)


def check(row, case, segment_chunks=None, seed=0):
    out, state = solve(row, case, segment_chunks, seed)
    check_product(case, out, state, rounded=isinstance(row, ChunkedVariant))
    return out, state


@needs_compiler
@pytest.mark.parametrize("row", CHUNKED, ids=lambda row: row.name)
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


@needs_compiler
@pytest.mark.parametrize("row", PLAIN, ids=lambda row: row.name)
def test_every_plain_row(row):
    for seed, (length, qk_dim, v_dim) in enumerate(
        ((3 * row.tile_m + 5, row.dim, 68), (2 * row.tile_m, row.dim - 3, 7), (0, 5, 5))
    ):
        arrays = draw((2, length, qk_dim), (2, length, qk_dim), (2, length, v_dim))
        initial = draw((2, qk_dim, v_dim), seed=1)[0]
        check(row, Case(*arrays, initial, reverse=seed == 1), seed=seed)
    wide = draw((20, row.dim + 40), (20, row.dim + 40), (20, 4))  # in two turns
    check(row, Case(*wide, draw((row.dim + 40, 4))[0]))


@st.composite
def calls(draw_):
    """Products that the kernels take as they are."""
    row = draw_(st.sampled_from([*SMALL, PLAIN[0], PLAIN[4]]))
    rng = np.random.default_rng(draw_(st.integers(0, 2**32 - 1)))
    length = draw_(st.integers(0, 2 * row.tile_m + 2) | st.sampled_from([63, 64, 65, 128, 300]))
    qk_dim = draw_(st.integers(1, row.dim) | st.just(row.dim))
    v_dim = draw_(st.integers(1, 40) | st.sampled_from([1, 32, 64, 72]))
    heads = draw_(
        st.sampled_from(
            [((), (), ()), ((3,), (3,), (3,)), ((2, 4), (2, 2), (2, 1)), ((2, 1), (1, 3), (3,))]
        )
    )
    shapes = [(*b, length, d) for b, d in zip(heads, (qk_dim, qk_dim, v_dim), strict=True)]
    arrays = [normal(rng, shape, NAMES[row.dtype]) for shape in shapes]
    if draw_(st.sampled_from([False, False, True])):
        for x in arrays:
            bad = rng.random(x.shape) < draw_(st.sampled_from([0.0, 0.001]))
            x[bad] = draw_(st.sampled_from([np.nan, np.inf, -np.inf]))
    initial = normal(rng, (qk_dim, v_dim), np.float32) if draw_(st.booleans()) else None
    layouts = st.sampled_from(["dense", "blhd", "rows", "upward", "offset"])
    case = Case(
        *arrays,
        initial,
        reverse=draw_(st.booleans()),
        layouts=(*(draw_(layouts) for _ in range(3)), "transposed"),
    )
    split_by = [None, 1, 2] if isinstance(row, ChunkedVariant) else [None]
    return row, case, draw_(st.sampled_from(split_by)), draw_(st.integers(0, 2**32))


@needs_compiler
@settings(max_examples=25)
@given(call=calls())
def test_any_call_with_any_schedule(call):
    row, case, segment_chunks, seed = call
    check(row, case, segment_chunks, seed)


@needs_compiler
@pytest.mark.parametrize("row", [CHUNKED[0], CHUNKED[1]], ids=lambda row: row.name)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_shows_where_it_is_read_only(row, bad):
    clean = draw((150, 30), (150, 30), (150, 32), dtype=NAMES[row.dtype])
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


@needs_compiler
@pytest.mark.parametrize("sizes", [(100, 100, 1e-4), (1e-3, 1e-3, 1e3), (1e-4, 30, 300)], ids=str)
@pytest.mark.parametrize("row", [CHUNKED[0], CHUNKED[1]], ids=lambda row: row.name)
def test_scores_and_states_of_any_size(row, sizes):
    """Where float16 ends they reach 1e5 or 1e6, or where it begins 1e-5."""
    arrays = [size * np.abs(x) for x, size in zip(draw(*[(400, 32)] * 3), sizes, strict=True)]
    check(row, Case(*(x.astype(NAMES[row.dtype]) for x in arrays)))


@needs_compiler
@pytest.mark.parametrize("row", SMALL[::2], ids=lambda row: row.name)
def test_the_schedule_does_not_show(row):
    case = Case(*draw(*[(2, 300, 32)] * 3, dtype=NAMES[row.dtype]))
    found = {
        tuple(x.tobytes() for x in solve(row, case, segment_chunks=2, seed=seed))
        for seed in range(8)
    }
    assert len(found) == 1


# What is taken out of chunked_sm80.cu, and what stands there instead.
BUGS = {
    "a chunk is read before it has landed": (
        "cp_async_wait_group<kStages - 3>();",
        "cp_async_wait_group<kStages - 2>();",
    ),
    "a chunk is loaded over one in use": (
        "if (i + kStages - 2 < chunks) load(i + kStages - 2);",
        "if (i + kStages - 1 < chunks) load(i + kStages - 1);",
    ),
    "scores of the wrong chunk": (
        "cvta_to_shared(shared.p[chunk % 2])",
        "cvta_to_shared(shared.p[0])",
    ),
}


@needs_compiler
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug, tmp_path):
    old, new = BUGS[bug]
    text = (ROOT / "cuda_src/linear/chunked_sm80.cu").read_text()
    assert text.count(old) == 1
    source = tmp_path / "kernel.cu"
    source.write_text(text.replace(old, new))
    row = SMALL[1]
    case = Case(*draw(*[(500, 32)] * 3, dtype=NAMES[row.dtype]))
    want = solve(row, case)
    for seed in range(30):
        try:
            got = solve(row, case, seed=seed, source=source)
        except emulator.EmulationError:
            return
        if any(x.tobytes() != y.tobytes() for x, y in zip(got, want, strict=True)):
            return
    pytest.fail("30 seeds did not show it")


# The choice


@settings(max_examples=200)
@given(
    dtype=st.sampled_from(["float16", "bfloat16"]),
    entries=st.integers(1, 300) | st.sampled_from([65536, 10**6]),
    length=st.integers(0, 10**6) | st.sampled_from([2**31, 2**33]),
    qk_dim=st.integers(1, 256),
    v_dim=st.integers(1, 600),
    target=st.sampled_from([*SHARED_LIMIT]),
    sms=st.integers(1, 200),
)
def test_a_choice_covers_its_call(dtype, entries, length, qk_dim, v_dim, target, sms):
    found = choose(dtype, entries, length, qk_dim, v_dim, target, sms)
    if found is None:
        assert qk_dim > 128
        assert SHARED_LIMIT[target] < 160 * 1024
        return
    assert found.row.dtype == dtype
    assert found.row.dim >= qk_dim
    assert target in found.row.targets
    assert (found.states is None) == (found.segments == 1)
    assert found.segment_rows % found.row.tile_m == 0
    assert found.segment_rows < 2**31
    assert (found.segments - 1) * found.segment_rows < max(1, length)
    assert found.segments * found.segment_rows >= length
    # The workspace is no larger than the arrays.
    if found.segments > 1 and length < 2**31 - 2**16:
        assert found.segments <= length // found.row.tile_m


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_full_device_takes_one_pass_and_an_empty_one_is_filled(dtype):
    full = choose(dtype, 128, 4096, 64, 64, "sm_90a", 132)
    assert (full.segments, full.row.tile_n) == (1, 64)
    for entries, sms in itertools.product((1, 8, 16), (84, 108, 132)):
        found = choose(dtype, entries, 65536, 64, 64, "sm_90a", sms)
        assert 0.8 * sms <= entries * found.segments <= 3 * sms


@pytest.mark.parametrize("qk_dim", [1, 64, 200, 1000])
def test_plain_kernels_take_any_dim(qk_dim):
    few, many = (choose("float32", n, 5000, qk_dim, 64, "sm_90a", 132) for n in (1, 1000))
    assert (few.row.source, many.row.source) == ("linear/low_occupancy", "linear/recurrent")
    for name in ("recurrent", "low_occupancy"):
        found = choose("float32", 8, 100, qk_dim, 64, "sm_80", 108, name)
        assert found.row.source == f"linear/{name}"
        assert found.row.dim >= min(256, qk_dim)


def test_what_no_kernel_computes():
    assert choose("float64", 8, 100, 64, 64, "sm_90a", 132) is None
    assert choose("float32", 8, 100, 64, 64, "sm_90a", 132, "chunked") is None
    assert choose("float16", 8, 100, 64, 64, "sm_90a", 132, "recurrent") is None
    assert choose("float16", 8, 100, 257, 64, "sm_90a", 132) is None
    assert choose("float32", 8, 2**31, 64, 64, "sm_90a", 132) is None


def test_the_head_of_the_struct():
    assert struct.calcsize(HEAD_FORMAT) == PRODUCT_PARAMS.fields["batch_axes"][1]
    assert PRODUCT_PARAMS.names[: len(POINTERS)] == POINTERS
