"""`chunk_sm90` in the emulator: sums before a segment, and planted errors."""

import numpy as np
import pytest

from tests.support.every_run import only, some
from tests.support.kernel_products import NAMES, check, split
from tests.support.product_rows import CHUNK_SM90, SMALL_SM90, show
from tests.support.products import Case, draw

pytestmark = pytest.mark.emulator


@pytest.mark.parametrize(
    "row", some(CHUNK_SM90[1::2], lambda row: row.dtype), ids=lambda row: row.name
)
def test_blocks_that_sum_what_lies_before_their_segment(row):
    length = 6 * row.tile_m + 13
    shapes = (2, length, row.dim), (2, length, row.dim), (2, length, row.tile_n)
    q, k, v = draw(*shapes, dtype=NAMES[row.dtype])
    initial = draw((2, row.dim, row.tile_n), seed=1)[0]
    for seed, (reverse, chunks) in enumerate([(False, 3), (True, 1), (True, 6), (False, 2)]):
        if seed == 3:
            v[0, 100, 3], v[1, 300, 2] = np.nan, np.inf
        check(row, Case(q, k, v, initial, reverse), chunks, own_prefix=True, seed=seed)


# What is taken out of the kernel, and what stands there instead.
BUGS = {
    "scores of a chunk that has not landed": (
        "wait(shared.full[pipe.index()], pipe.parity());",
        "",
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
        "wgmma_wait_group<0>();\n    uint32 visible_bits",
        "uint32 visible_bits",
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


@pytest.mark.parametrize("bug", only(BUGS, next(iter(BUGS))))
def test_a_planted_bug_is_found(bug, tmp_path):
    show(SMALL_SM90[2], BUGS[bug], tmp_path)


# The same for blocks that sum what lies before their segment.
PREFIX_BUGS = {
    "sums of a chunk that has not landed": (
        "wait(shared.full[stage], pipe.parity());\n    if constexpr (kPacked) { clear_later_rows",
        "if constexpr (kPacked) { clear_later_rows",
    ),
    "sums that are not there yet": (
        "wgmma_wait_group<0>();\n    release(shared.empty[stage]);\n    if",
        "release(shared.empty[stage]);\n    if",
    ),
    "a place let go for one of two": ("if (group == 0) release(shared.empty[stage]);", ""),
    "queries awaited that nobody loads": ("(outputs ? 2 : 1) * kDimBlocks", "2 * kDimBlocks"),
    "chunks that lie elsewhere": (
        "row_of_chunk(work, i - chunks_before_segment)",
        "row_of_chunk(work, i)",
    ),
}


@pytest.mark.parametrize("bug", only(PREFIX_BUGS, next(iter(PREFIX_BUGS))))
def test_a_bug_planted_in_sums_before_a_segment_is_found(bug, tmp_path):
    show(
        SMALL_SM90[2],
        PREFIX_BUGS[bug],
        tmp_path,
        split(SMALL_SM90[2], 500, 4, own_prefix=True),
    )
