"""The kernels of causal products: their own source on the CPU, and what chooses between them."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_cupy import reference
from fa_cupy.core import linear_problem
from fa_cupy.gpu.driver.targets import SHARED_LIMIT
from fa_cupy.gpu.kernels import products
from fa_cupy.gpu.kernels.linear import params
from fa_cupy.gpu.kernels.linear.cost_model import choose
from fa_cupy.gpu.kernels.linear.params import POINTERS, PRODUCT_PARAMS, Job, traits_of
from fa_cupy.gpu.kernels.linear.sm80.chunk_fp32_sm80 import ChunkFp32Sm80
from fa_cupy.gpu.kernels.linear.sm80.chunk_sm80 import ChunkSm80
from fa_cupy.gpu.kernels.linear.sm90.chunk_fp32_pingpong_sm90 import ChunkFp32PingpongSm90
from fa_cupy.gpu.kernels.linear.sm90.chunk_fp32_sm90 import ChunkFp32Sm90
from fa_cupy.gpu.kernels.linear.sm90.chunk_sm90 import ChunkSm90
from fa_cupy.gpu.kernels.linear.sm90_params import ADDRESSES, MAPPED, PRODUCT_JOB, takes
from fa_cupy.gpu.kernels.linear.table import PRODUCTS
from fa_cupy.gpu.kernels.linear.variant import ProductSm90Variant
from tests.support.every_run import examples, only, parameter, some
from tests.support.kernel_products import NAMES, check, gradients, solve, split
from tests.support.noting_launcher import WORKSPACE, NotingLauncher
from tests.support.planted import plant
from tests.support.products import Case, draw
from tests.support.seeds import Chosen, one
from tests.support.strategies import DTYPES, lay
from validation import emulator
from validation.emulator import calls

CHUNKED = [row for row in PRODUCTS if isinstance(row, ChunkSm80)]
SM90 = [row for row in PRODUCTS if isinstance(row, ChunkSm90)]
SINGLE = [row for row in PRODUCTS if isinstance(row, ChunkFp32Sm80)]
SINGLE_SM90 = [row for row in PRODUCTS if isinstance(row, ChunkFp32Sm90)]
TURNS = next(row for row in PRODUCTS if isinstance(row, ChunkFp32PingpongSm90))
SINGLE_SM90.append(TURNS)
PLAIN = [row for row in PRODUCTS if row.algorithm in ("recurrent", "low_occupancy")]
SMALL_SM90 = [row for row in SM90 if row.dim == 64 and (row.tile_n == 128 or row.blocks == 2)]
SMALL = [row for row in CHUNKED if row.dim == 32 or (row.dim, row.stages) == (64, 3)]


@pytest.mark.emulator
@pytest.mark.parametrize(
    "row", some([*CHUNKED, *SM90], lambda row: (row.source, row.dtype)), ids=lambda row: row.name
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
    "row", some([*SINGLE, *SINGLE_SM90], lambda row: row.source), ids=lambda row: row.name
)
def test_every_row_of_single_precision(row):
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
    most = (4e-7, 1.6) if row in SINGLE_SM90 else (3e-7, 1.4)
    assert errors[0] <= min(most[0], most[1] * errors[1])
    assert reference.relative_error(state, last) <= 3e-7


@pytest.mark.emulator
@pytest.mark.parametrize(
    "row", only([SINGLE[0], SINGLE_SM90[0], TURNS], TURNS), ids=lambda row: row.name
)
def test_error_of_a_long_sequence_of_single_precision(row):
    arrays = draw(*[(6000, 32)] * 3)
    for truncating in (False, True):
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
@pytest.mark.parametrize("row", [SINGLE[0], SINGLE_SM90[0], TURNS], ids=lambda row: row.name)
def test_single_precision_of_rows_and_columns_of_any_size(row, axis, exponents):
    """Each output has the accuracy of its own terms, though its neighbours are larger by far.

    A row's numbers are whole down to 2**-25 of its largest; on SM90 down to 2**-17.
    """
    if axis == 1 and row in SINGLE_SM90:
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
@pytest.mark.parametrize("row", [SINGLE[0], SINGLE_SM90[0], TURNS], ids=lambda row: row.name)
def test_single_precision_at_the_ends_of_its_range(row, sizes):
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
    for row in (*SINGLE[:2], SINGLE_SM90[0], TURNS):
        check(row, Case(q, k, v))


@pytest.mark.emulator
def test_keys_that_share_no_column():
    """One element each: what a row adds to the state is alone there, however small it is."""
    rng = np.random.default_rng(0)
    q, v = draw((64, 32), (64, 32))
    k = np.zeros((64, 32), np.float32)
    k[np.arange(64), np.arange(64) % 32] = np.ldexp(1.0, rng.integers(-14, 1, 64))
    for row in (SINGLE[0], SINGLE_SM90[0], TURNS):
        check(row, Case(q, k, v))


@pytest.mark.emulator
@pytest.mark.parametrize(
    "row", [SMALL[0], SMALL_SM90[0], SINGLE[0], SINGLE_SM90[0], PLAIN[0]], ids=lambda row: row.name
)
def test_heads_that_share_keys_or_values(row):
    arrays = draw((2, 4, 70, 16), (2, 2, 70, 16), (2, 1, 70, 24), dtype=NAMES[row.dtype])
    for seed, heads in enumerate((1, 2, 4)):
        check(row, Case(*arrays, draw((heads, 16, 24))[0]), seed=seed)


@pytest.mark.emulator
@pytest.mark.parametrize("reverse", [False, True])
def test_more_batch_axes_than_a_kernel_walks(reverse):
    """Seven, none of which merge: two launches of each kernel, in the same memory for states."""
    batches = (2, 1) * 3 + (2,), (1, 2) * 3 + (1,)
    q, k, v = draw(*[(*batches[i], 70, 4) for i in (0, 1, 1)], dtype=NAMES[SMALL[0].dtype])
    case = Case(q, k, v, draw((*batches[0], 4, 4))[0], reverse)
    jobs = [traits_of(job(case.q, case.k, case.v, reverse))]
    assert len(params.fill(jobs[0], (1, 70), 1).parts) == 2
    check(SMALL[0], case, segment_chunks=1)


@pytest.mark.emulator
@examples(60)
@given(st.integers(0, 2**40))
def test_any_call_with_any_schedule(seed):
    assert one(seed, Chosen("product")) is None


@pytest.mark.emulator
@examples(6)
@given(
    row=st.sampled_from(
        [*SMALL_SM90, *(row for row in SM90 if row.dim > row.tile_n), *SINGLE_SM90[:3], TURNS]
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
    some([*CHUNKED[:2], *SMALL_SM90, *SINGLE[:2], *SINGLE_SM90[:2], TURNS], lambda row: row.source),
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
    "row", some([*CHUNKED[:2], *SMALL_SM90[:2]], lambda row: row.source), ids=lambda row: row.name
)
def test_scores_and_states_of_any_size(row, sizes):
    """Where float16 ends they reach 1e5 or 1e6, or where it begins 1e-5."""
    arrays = [size * np.abs(x) for x, size in zip(draw(*[(400, 32)] * 3), sizes, strict=True)]
    check(row, Case(*(x.astype(NAMES[row.dtype]) for x in arrays)))


@pytest.mark.emulator
@pytest.mark.parametrize(
    "row",
    some(
        [*SMALL[::2], *SMALL_SM90[1:3], SINGLE[0], *SINGLE_SM90[:3:2], TURNS],
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


# What is taken out of a kernel, and what stands there instead.
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
SINGLE_BUGS = {
    "a buffer is filled while it is in use": (
        "rows.store(shared, i % kBuffers);",
        "rows.store(shared, i % 2);",
    ),
    "scores while the chunk is split": (
        "if (i >= 1 && i <= chunks()) multiply_scores(shared, i - 1);\n      TeamSync::follow",
        "if (i < chunks()) multiply_scores(shared, i);\n      TeamSync::follow",
    ),
    "weights of the wrong chunk": (
        "cvta_to_shared(shared.p[chunk % 2][0]) + rows_first",
        "cvta_to_shared(shared.p[0][0]) + rows_first",
    ),
    "a low part is left out": (
        "mma_f16(sums[n].cross, a_low,",
        "mma_f16(sums[n].cross, a,",
    ),
    "exponents of the wrong chunk": (
        "shared.q_exponent[buffer][row + 8 * h];",
        "shared.q_exponent[0][row + 8 * h];",
    ),
}


# The same for chunk_sm90.cu.
BUGS_SM90 = {
    "scores of a chunk that has not landed": (
        "wait(shared.full[pipe.index()], pipe.parity());\n  gemm_qk",
        "gemm_qk",
    ),
    "scores over those in use": (
        "wait(shared.p_empty[p_stage], p_pipe.parity() ^ 1);\n      write_weights",
        "write_weights",
    ),
    "outputs without scores": (
        "if (i + 1 < chunks) wait(shared.p_full[next_p_pipe.index()], next_p_pipe.parity());",
        "",
    ),
    "an output over one that is being stored": (
        "wait(shared.out_empty[out_stage][group], out_pipe.parity() ^ 1);",
        "",
    ),
    "a chunk given back while it is multiplied": (
        "wgmma_wait_group<1>();  // for the outputs\n      release(shared.empty[stage]);",
        "release(shared.empty[stage]);\n      wgmma_wait_group<1>();",
    ),
    "outputs that are not there yet": (
        "wgmma_wait_group<1>();  // for the outputs",
        "",
    ),
    "a rounded state over one in use": ("wgmma_wait_group<2>();", ""),
    "sums that are not there yet": (
        "wgmma_wait_group<0>();\n      pipe.advance();",
        "pipe.advance();",
    ),
    "scores that are not there yet": (
        "wgmma_wait_group<0>();\n    mask_scores",
        "mask_scores",
    ),
    "scores without a proxy fence": (
        "fence_proxy_async_shared();\n      release_per_lane(shared.p_full[p_stage]);",
        "release_per_lane(shared.p_full[p_stage]);",
    ),
    "scores on both sides of the diagonal": (
        "if ((causal_bits >> n & 1) == 0)",
        "if (causal_bits == 0)",
    ),
}


# The same for chunk_fp32_sm90.cu.
BUGS_SINGLE_SM90 = {
    "rows are split before they have landed": (
        "wait(shared.raw_full[from][array], raw_pipe.parity());",
        "",
    ),
    "rows are loaded over those that are split": (
        "fence_proxy_async_shared();\n      bar_sync(1, 128);",
        "fence_proxy_async_shared();\n      __syncwarp();",
    ),
    "pairs over those in use": ("wait(shared.empty[array], ~i & 1);", ""),
    "pairs without a proxy fence": (
        "fence_proxy_async_shared();\n      bar_sync(1, 128);",
        "bar_sync(1, 128);",
    ),
    "scores of keys that are not there yet": (
        "wait(shared.full[kK], i & 1);\n    gemm_split_abt",
        "gemm_split_abt",
    ),
    "outputs without scores": ("wait(shared.p_full, i & 1);", ""),
    "keys given back before their sums": (
        "wgmma_wait_group<0>();\n      if (block == kDimBlocks - 1) release",
        "if (block == kDimBlocks - 1) release_per_lane(shared.empty[kK]);\n"
        "      wgmma_wait_group<0>();\n      if (false) release",
    ),
    "values without their low part": ("part == 0 ? kLowV : 0", "part == 9 ? kLowV : 0"),
    "weights without their low part": ("part == 1 ? kLowP : 0", "part == 9 ? kLowP : 0"),
    "exponents of other rows": (
        "scale_to_common_exponent(values, values_low, shared.kv_exponent)",
        "scale_to_common_exponent(values, values_low, shared.q_exponent)",
    ),
    "queries given back while they are multiplied": (
        "    wgmma_wait_group<0>();\n    wait(shared.full[kV], i & 1);",
        "    release_per_lane(shared.empty[kQ]);\n    wait(shared.full[kV], i & 1);",
    ),
    "scores on both sides of the diagonal": (" > 0) s[v][e] = 0.0f;", " > 99) s[v][e] = 0.0f;"),
}


def show(row, bug, tmp_path, choice=None):
    """Fail unless some schedule shows a bug in a row of a choice, by default in its only one."""
    sources = {row.entry: plant(tmp_path, row.source, bug)}
    case = Case(*draw(*[(500, 32)] * 3, dtype=NAMES[row.dtype]))
    choice = choice or split(row, 500, None)
    want = calls.causal_product(choice, *case.native(np))
    for seed in range(30):
        try:
            got = calls.causal_product(choice, *case.native(np), seed=seed, sources=sources)
        except emulator.EmulationError:
            return
        if any(x.tobytes() != y.tobytes() for x, y in zip(got, want, strict=True)):
            return
    pytest.fail("30 seeds did not show it")


@pytest.mark.emulator
@pytest.mark.parametrize("bug", only(BUGS, next(iter(BUGS))))
def test_a_planted_bug_is_found(bug, tmp_path):
    show(SMALL[1], BUGS[bug], tmp_path)


@pytest.mark.emulator
@pytest.mark.parametrize("bug", only(BUGS_SM90, next(iter(BUGS_SM90))))
def test_a_bug_planted_for_sm90_is_found(bug, tmp_path):
    show(SMALL_SM90[2], BUGS_SM90[bug], tmp_path)


@pytest.mark.emulator
@pytest.mark.parametrize("bug", only(BUGS_SINGLE_SM90, next(iter(BUGS_SINGLE_SM90))))
def test_a_bug_planted_in_single_precision_for_sm90_is_found(bug, tmp_path):
    show(SINGLE_SM90[0], BUGS_SINGLE_SM90[bug], tmp_path)


BUGS_TURNS = {
    "values split that have not landed": (
        "wait(shared.raw_full[stage][kV], pipe.parity());",
        "",
    ),
    "rows loaded over those in use": (
        "(i + kPrefetchChunks)};\n      wait(shared.empty[later_pipe.index()], "
        "later_pipe.parity() ^ 1);",
        "(i + kPrefetchChunks)};",
    ),
    "a state over one in use": ("wait(shared.s_empty[state_stage], state.parity() ^ 1);", ""),
    "a state that is not there yet": ("wait(shared.s_full[state_stage], state.parity());", ""),
    "weights of two of a row's four lanes alone": (
        "max_over_lanes(largest[h])",
        "max(largest[h], __shfl_xor_sync(kFullWarp, largest[h], 1))",
    ),
    "outputs that are not there yet": (
        "release_per_lane(shared.s_empty[state_stage]);\n    wgmma_wait_group<0>();",
        "release_per_lane(shared.s_empty[state_stage]);",
    ),
    "a state let go while it is multiplied": ("wgmma_wait_group<1>();", ""),
    "a place that the outputs are not done with": ("kArrivalsPerWarp * 8", "kArrivalsPerWarp * 4"),
    "values that are not finite looked at too late": (
        "    bar_sync(1, 128);\n",
        "",
    ),
}


@pytest.mark.emulator
@pytest.mark.parametrize("bug", only(BUGS_TURNS, next(iter(BUGS_TURNS))))
def test_a_bug_planted_where_warpgroups_take_turns_is_found(bug, tmp_path):
    # With more places the state's warpgroup gets further ahead of the outputs.
    stages = 4 if bug == "a state over one in use" else TURNS.stages
    show(dataclasses.replace(TURNS, stages=stages), BUGS_TURNS[bug], tmp_path)


# The same for chunk_state_fp32_sm90.cu.
BUGS_STATES = {
    "rows split that have not landed": ("wait(shared.raw_full[at], pipe.parity());", ""),
    "rows loaded over those in use": (
        "wait(shared.empty[later_pipe.index()], later_pipe.parity() ^ 1);",
        "",
    ),
    "pairs that are not there yet": ("wait(shared.full[at], pipe.parity());", ""),
    "pairs without a proxy fence": ("fence_proxy_async_shared();", ""),
    "a place let go while it is multiplied": (
        "wgmma_wait_group<0>();\n      if (block == kDimBlocks - 1) "
        "release_per_lane(shared.empty[at]);",
        "if (block == kDimBlocks - 1) release_per_lane(shared.empty[at]);\n      "
        "wgmma_wait_group<0>();",
    ),
    "sums that are not there yet": ("wgmma_wait_group<0>();\n      if (block", "if (block"),
    "exponents of another chunk": (
        "scale_to_common_exponent(values, values_low, shared.kv_exponent[at])",
        "scale_to_common_exponent(values, values_low, shared.kv_exponent[0])",
    ),
}


@pytest.mark.emulator
@pytest.mark.parametrize("bug", only(BUGS_STATES, next(iter(BUGS_STATES))))
def test_a_bug_planted_in_sums_of_single_precision_is_found(bug, tmp_path):
    choice = split(TURNS, 500, 7)
    show(choice.states, BUGS_STATES[bug], tmp_path, choice)


# The same for blocks of chunk_sm90.cu that sum what lies before their segment.
BUGS_PREFIX = {
    "sums of a chunk that has not landed": (
        "wait(shared.full[stage], pipe.parity());\n    gemm_kv",
        "gemm_kv",
    ),
    "sums that are not there yet": (
        "wgmma_wait_group<0>();\n    release(shared.empty[stage]);\n    if",
        "release(shared.empty[stage]);\n    if",
    ),
    "a place let go for one of two": ("if (group == 0) release(shared.empty[stage]);", ""),
    "queries awaited that nobody loads": ("(outputs ? 2 : 1) * kDimBlocks", "2 * kDimBlocks"),
    "chunks that lie elsewhere": ("(i - chunks_before_segment) * work.step", "i * work.step"),
}


@pytest.mark.emulator
@pytest.mark.parametrize("bug", only(BUGS_PREFIX, next(iter(BUGS_PREFIX))))
def test_a_bug_planted_in_sums_before_a_segment_is_found(bug, tmp_path):
    show(SMALL_SM90[2], BUGS_PREFIX[bug], tmp_path, split(SMALL_SM90[2], 500, 4, own_prefix=True))


@pytest.mark.emulator
@pytest.mark.parametrize("row", some(SM90[1::2], lambda row: row.dtype), ids=lambda row: row.name)
def test_blocks_that_sum_what_lies_before_their_segment(row):
    length = 6 * row.tile_m + 13
    shapes = (2, length, row.dim), (2, length, row.dim), (2, length, row.tile_n)
    q, k, v = draw(*shapes, dtype=NAMES[row.dtype])
    initial = draw((2, row.dim, row.tile_n), seed=1)[0]
    for seed, (reverse, chunks) in enumerate([(False, 3), (True, 1), (True, 6), (False, 2)]):
        if seed == 3:
            v[0, 100, 3], v[1, 300, 2] = np.nan, np.inf
        check(row, Case(q, k, v, initial, reverse), chunks, own_prefix=True, seed=seed)


@pytest.mark.emulator
@pytest.mark.parametrize("bug", only(SINGLE_BUGS, next(iter(SINGLE_BUGS))))
def test_a_bug_planted_in_single_precision_is_found(bug, tmp_path):
    show(SINGLE[0], SINGLE_BUGS[bug], tmp_path)


# The choice


@settings(max_examples=200)
@given(
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    entries=st.integers(1, 300) | st.sampled_from([65536, 10**6]),
    length=st.integers(0, 10**6) | st.sampled_from([2**31, 2**33]),
    qk_dim=st.integers(1, 256),
    v_dim=st.integers(1, 600),
    target=st.sampled_from([*SHARED_LIMIT]),
    sms=st.integers(1, 200),
)
def test_a_choice_covers_its_call(dtype, entries, length, qk_dim, v_dim, target, sms):
    found = choose(dtype, entries, length, qk_dim, v_dim, target, sms, "chunked")
    if found is None and dtype == "float32":
        assert qk_dim > (128 if SHARED_LIMIT[target] > 160 * 1024 else 64)
        return
    if found is None:
        assert qk_dim > 128
        assert SHARED_LIMIT[target] < 160 * 1024
        return
    assert found.row.dtype == dtype
    assert found.row.dim >= qk_dim
    assert target in found.row.targets
    # Else a block sums what lies before its segment itself, where there are few of them.
    own = isinstance(found.row, ChunkSm90) and entries * found.segments <= sms
    assert (found.states is None) == (found.segments == 1) or (found.states is None and own)
    assert found.segment_rows % found.row.tile_m == 0
    assert found.segment_rows < 2**31
    assert (found.segments - 1) * found.segment_rows < max(1, length)
    assert found.segments * found.segment_rows >= length
    # The workspace is no larger than the arrays.
    if found.segments > 1 and length < 2**31 - 2**16:
        assert found.segments <= length // found.row.tile_m


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_full_device_takes_one_pass_and_an_empty_one_is_filled(dtype):
    full = choose(dtype, 128, 4096, 64, 64, "sm_90a", 132)
    assert (full.segments, full.row.tile_n) == (1, 64)
    for entries, sms in itertools.product((1, 8, 16), (84, 108, 132)):
        found = choose(dtype, entries, 65536, 64, 64, "sm_90a", sms)
        assert 0.8 * sms <= entries * found.segments <= 3 * sms


@pytest.mark.parametrize(
    ("call", "source", "states", "segments"),
    [
        (("float32", 128, 4096, 64), "chunk_fp32_pingpong_sm90", None, 1),
        (("float32", 8, 65536, 64), "chunk_fp32_pingpong_sm90", "chunk_state_fp32_sm90", 16),
        (("float32", 16, 32768, 128), "chunk_fp32_sm90", "chunk_state_fp32_sm90", 8),
        (("bfloat16", 8, 1024, 64), "chunk_sm90", None, 16),
        (("bfloat16", 8, 65536, 64), "chunk_sm90", "chunk_state_sm90", 16),
    ],
)
def test_what_was_fastest_is_chosen(call, source, states, segments):
    """On an H200 (validation/NOTES.md)."""
    found = choose(*call, call[-1], "sm_90a", 132)
    assert found.row.source == f"linear/{source}"
    assert found.states is None if states is None else found.states.source == f"linear/{states}"
    assert found.segments == segments


def test_few_short_sequences_take_one_launch():
    """With all multiprocessors; long ones take three, and no row twice."""
    for entries, length in itertools.product((1, 3, 8, 30), (128, 300, 1024, 2048)):
        found = choose("float16", entries, length, 64, 64, "sm_90a", 132)
        assert found.states is None
        segments = min(-(-length // 64), 132 // entries)
        assert 0.5 * segments < found.segments <= segments
        assert choose("float16", entries, 65536, 64, 64, "sm_90a", 132).states is not None


@pytest.mark.parametrize("qk_dim", [1, 64, 200, 1000])
def test_plain_kernels_take_any_dim(qk_dim):
    calls = [("float32", n, 5000, qk_dim, 64, "sm_90a", 132) for n in (1, 1000)]
    few, many = (choose(*call) for call in calls)
    if qk_dim == 64:
        assert many.row.source == "linear/chunk_fp32_pingpong_sm90"
        assert few.row.source.startswith("linear/chunk_fp32_sm")
        assert choose(*calls[0], mapped=False).row.source == "linear/chunk_fp32_sm80"
    elif qk_dim <= 128:
        assert few.row.source == "linear/chunk_fp32_sm80"
    else:
        assert (few.row.source, many.row.source) == ("linear/low_occupancy", "linear/recurrent")
    for name in ("recurrent", "low_occupancy"):
        found = choose("float32", 8, 100, qk_dim, 64, "sm_80", 108, name)
        assert found.row.source == f"linear/{name}"
        assert found.row.dim >= min(256, qk_dim)


def test_what_no_kernel_computes():
    assert choose("float64", 8, 100, 64, 64, "sm_90a", 132) is None
    assert choose("float32", 8, 100, 129, 64, "sm_90a", 132, "chunked") is None
    assert choose("float16", 8, 100, 64, 64, "sm_90a", 132, "recurrent") is None
    assert choose("float16", 8, 100, 257, 64, "sm_90a", 132) is None
    assert choose("float32", 8, 2**31, 200, 64, "sm_90a", 132) is None


def job(q, k, v, reverse=False, state=None):
    """A product of arrays, whose output is dense."""
    problem = linear_problem.product_problem("causal_product", q, k, v)
    out = np.empty(problem.out_shape, problem.dtype)
    return Job(problem, problem.view(out.shape, out.strides), state, reverse)


@pytest.mark.parametrize("algorithm", ["chunked", "recurrent", "low_occupancy"])
def test_a_plan_follows_the_algorithm_that_was_asked_for(algorithm):
    launcher = NotingLauncher(132)
    jobs = [job(*draw(*[(8, 1000, 64)] * 3))]
    plan = products.make_plan(jobs, launcher, algorithm)
    plan.run((16, 32, 48, 64, 0, 0))
    sources = [step.variant.source for step, _ in launcher.launched]
    assert {"chunked": "chunk"}.get(algorithm, algorithm) in sources[-1]
    assert len(sources) == (3 if algorithm == "chunked" else 1)


def test_what_has_no_kernel_has_no_plan():
    launcher = NotingLauncher(132)
    double = [job(*draw(*[(8, 100, 64)] * 3, dtype=np.float64))]
    assert products.make_plan(double, launcher) is None
    jobs = [job(*draw(*[(8, 100, 64)] * 3))]
    assert products.make_plan(jobs, launcher) is not None
    for missing, algorithm in ((None, "auto"), (None, "recurrent")):
        launcher.target = missing
        assert products.make_plan(jobs, launcher, algorithm) is None


@pytest.mark.parametrize("dtype", [DTYPES[1], DTYPES[2]])
@pytest.mark.parametrize("count", [1, 3])
def test_addresses_without_tensor_maps_go_to_kernels_that_need_none(dtype, count):
    """To one for each product; with dims that no tensor map walks to them from the start."""
    launcher = NotingLauncher(132)
    plan = products.make_plan([job(*draw(*[(3, 9000, 64)] * 3, dtype=dtype))] * count, launcher)
    pointers = [16 * (1 + i) for i in range(6 * count)]
    plan.run(tuple(pointers))
    mapped = {step.variant.source.removeprefix("linear/") for step, _ in launcher.launched}
    assert all(source.endswith("sm90") for source in mapped - {"state_prefix_sum"})
    assert plan.other is None
    launcher.launched.clear()
    pointers[1] += 4
    plan.run(tuple(pointers))
    single = "_fp32" if dtype == np.float32 else ""
    chain = [f"linear/chunk_state{single}_sm80", "linear/state_prefix_sum"]
    chain.append(f"linear/chunk{single}_sm80")
    assert [step.variant.source for step, _ in launcher.launched] == chain * count
    assert launcher.taken[-1] == plan.other.workspace_bytes
    for i, (_, filled) in enumerate(launcher.launched):
        first = 6 * (i // 3)
        assert filled[list(products.ARRAYS)][0].tolist() == tuple(pointers[first : first + 6])
        assert filled["workspace"] == WORKSPACE
        assert filled["aligned"] == (first > 0)
    odd = [job(*draw(*[(3, 9000, 63)] * 3, dtype=dtype))]
    plan = products.make_plan(odd, launcher)
    assert [step.variant.source for step in plan.steps] == chain
    assert products.make_plan(odd * 2, launcher) is None


@pytest.mark.parametrize("reverse", [False, True])
def test_states_of_segments_of_float32_are_summed_for_each_job(reverse):
    q, k, v = draw(*[(2, 1000, 64)] * 3)
    jobs = [traits_of(job(q, k, v, reverse))] * 2
    launcher = NotingLauncher()
    plan = products.plan_by(split(SINGLE_SM90[0], 1000, 4), jobs, launcher)
    pointers = (16, 32, 48, 64, 80, 0, 96, 112, 128, 144, 0, 0)
    plan.run(pointers)
    assert plan.other is None
    assert [(step.variant.source, step.grid) for step, _ in launcher.launched] == [
        ("linear/chunk_state_fp32_sm90", 12),
        ("linear/state_prefix_sum", 32),
        ("linear/state_prefix_sum", 32),
        ("linear/chunk_fp32_sm90", 16),
    ]
    last = q.strides[-2] * 999 if reverse else 0
    second = WORKSPACE + 4 * 2 * 4 * 64 * 64  # workspace of the second job
    filled = launcher.launched[2][1]
    found = [int(filled[name][0]) for name in POINTERS]
    assert found == [*(x + last for x in pointers[6:10]), 0, 0, second]
    assert (filled["first_batch"], filled["aligned"]) == (0, 1)
    for _, filled in (launcher.launched[0], launcher.launched[-1]):
        for i, want in enumerate(((80, 0, WORKSPACE, 64), (0, 0, second, 144))):
            own = filled["job"][0, i]
            assert tuple(int(own[name]) for name in ADDRESSES) == want
            assert [own[f"{name}_map"][0] for name in MAPPED] == [*pointers[6 * i : 6 * i + 4]]


@pytest.mark.parametrize(
    ("dtype", "kind", "other"),
    [("bfloat16", ChunkSm90, ChunkSm80),
     ("float32", (ChunkFp32Sm90, ChunkFp32PingpongSm90), ChunkFp32Sm80)],
)  # fmt: skip
@pytest.mark.parametrize(("entries", "dim", "tile_n"), [(128, 64, 64), (128, 128, 128)])
def test_hopper_computes_what_tensor_maps_can_walk(dtype, kind, other, entries, dim, tile_n):
    call = dtype, entries, 4096, dim, dim, "sm_90a", 132
    for algorithm in ("auto", "chunked"):
        found = choose(*call, algorithm)
        assert isinstance(found.row, kind)
        assert (found.row.tile_n, found.segments) == (tile_n, 1)
        assert isinstance(choose(*call, algorithm, mapped=False).row, other)
        assert isinstance(choose(*call[:5], "sm_100", 132, algorithm).row, other)
    assert isinstance(choose(*call, jobs=3).row, kind)
    assert choose(dtype, 8, 4096, 64, 64, "sm_80", 108, jobs=3) is None


@pytest.mark.parametrize("algorithm", ["recurrent", "low_occupancy"])
def test_hopper_does_not_take_what_another_algorithm_was_asked_for(algorithm):
    found = choose("float32", 128, 4096, 64, 64, "sm_90a", 132, algorithm)
    assert not isinstance(found.row, ProductSm90Variant)


@pytest.mark.parametrize(
    ("shape", "layout", "taken"),
    [
        ((2, 3, 70, 64), "dense", True),
        ((2, 3, 70, 64), "blhd", True),
        ((2, 3, 70, 64), "rows", True),
        ((70, 64), "dense", True),
        ((1, 64), "dense", True),
        ((70, 60), "dense", False),  # no multiple of 16 bytes
        ((70, 64), "upward", False),
        ((70, 64), "steps", False),
        ((2, 3, 2, 3, 70, 8), "dense", True),  # one axis to the kernel
    ],
)
def test_what_tensor_maps_can_walk(shape, layout, taken):
    (x,) = draw(shape, dtype=DTYPES[0])
    x = lay(np, x, layout)
    initial = lay(np, np.zeros((shape[-1],) * 2, np.float32), "transposed")
    for first in (None, initial):
        problem = linear_problem.product_problem("causal_product", x, x, x, first)
        out, state = np.empty(problem.out_shape, x.dtype), np.empty(problem.state_shape, np.float32)
        views = [problem.view(array.shape, array.strides) for array in (out, state)]
        assert takes(traits_of(Job(problem, *views, False))) == taken
        assert takes(traits_of(Job(problem, views[0], None, False))) == taken


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_states_are_of_any_layout(dtype):
    """Threads read and write them: no tensor map walks them, whatever the dtype of the rows."""
    q, k, v = draw(*[(2, 70, 16)] * 3, dtype=dtype)
    (initial,) = draw((2, 16, 16))
    for state in (initial, initial.swapaxes(-1, -2), np.zeros((2, 16, 33), np.float32)[..., 1::2]):
        problem = linear_problem.product_problem("causal_product", q, k, v, state)
        view = problem.view(v.shape, v.strides)
        for last in (None, problem.view(state.shape, state.strides)):
            assert takes(traits_of(Job(problem, view, last, False)))


@pytest.mark.parametrize(("dim", "taken"), [(64, True), (60, True), (62, False)])
def test_what_tensor_maps_of_float32_can_walk(dim, taken):
    (x,) = draw((70, dim))
    problem = linear_problem.product_problem("causal_product", x, x, x)
    assert takes(traits_of(Job(problem, problem.view(x.shape, x.strides), None, False))) == taken


def test_axes_that_no_tensor_map_has():
    q, k = (np.zeros(shape, np.float16) for shape in ((2, 1, 2, 1, 9, 8), (1, 2, 1, 2, 9, 8)))
    problem = linear_problem.product_problem("causal_product", q, k, k)
    out = np.empty(problem.out_shape, problem.dtype)
    assert not takes(traits_of(Job(problem, problem.view(out.shape, out.strides), None, False)))


def test_the_heads_of_the_structs():
    assert PRODUCT_JOB.names[:4] == tuple(f"{name}_map" for name in MAPPED)
    assert PRODUCT_JOB.names[4:8] == ADDRESSES
    assert PRODUCT_PARAMS.names[: len(POINTERS)] == POINTERS
