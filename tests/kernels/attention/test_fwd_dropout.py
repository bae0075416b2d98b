"""Builds of the forward kernels that drop weights, in the emulator."""

import numpy as np
import pytest

from fa_cupy import reference
from fa_cupy.dropout.arguments import Dropout
from fa_cupy.gpu.kernels.attention.fwd_sm90 import FwdSm90
from fa_cupy.gpu.kernels.forward import VARIANTS
from fa_cupy.gpu.kernels.score import ScoreMod
from tests.kernels.attention.test_fwd_packed import NOT_AGAIN
from tests.support.every_run import some
from tests.support.kernel_attention import (
    BANDS,
    FORWARD_DTYPES,
    blocks_of,
    check,
    draw,
    unit_of,
)
from tests.support.planted import plant
from validation import emulator
from validation.emulator import calls

pytestmark = pytest.mark.emulator

DROPOUT = Dropout(0.3, 2**63 + 12345)
ROWS = [row.for_dropout(True) for row in VARIANTS]
SM80, SM80_SPARSE, SM90, SM90_SPARSE = (
    next(
        x
        for x in ROWS
        if (isinstance(x, FwdSm90), x.sparse, x.dim, x.dtype) == (hopper, sparse, 64, "float16")
    )
    for hopper in (False, True)
    for sparse in (False, True)
)
DIM_128 = next(x for x in ROWS if isinstance(x, FwdSm90) and not x.sparse and x.dim == 128)


def arrays_for(row, q_len=150, k_len=300, batch=(2, 2)):
    shapes = ((*batch, n, row.dim) for n in (q_len, k_len, k_len))
    return [draw(*x, dtype=FORWARD_DTYPES[row.dtype], seed=i) for i, x in enumerate(shapes)]


@pytest.mark.parametrize(
    "row", some(ROWS, lambda row: (row.source, row.sparse)), ids=lambda row: row.name
)
def test_every_row(row):
    """Of a mask and of dropout, both hide."""
    for shape, band in (((150, 300, (2, 2)), {}), ((70, 200, (1, 1)), BANDS[1])):
        options = {"dropout": DROPOUT, **band}
        if row.sparse:
            options["mask"] = blocks_of(np.random.default_rng(0), *shape[:2], density=0.5)
        check(row, *arrays_for(row, *shape), seed=1, **options)


@pytest.mark.parametrize("row", [SM80, SM90], ids=lambda row: row.name)
def test_rows_that_are_computed_again(row):
    """What is not finite reaches rows that keep its key, and scores may be of any size."""
    q, k, v = arrays_for(row, 20, 150, (1, 1))
    v[..., 7, :] = np.nan
    check(row, q, k, v, seed=1, dropout=DROPOUT)
    v[..., 7, :] = 1
    check(row, 300 * q, 300 * k, v, seed=1, dropout=DROPOUT)


@pytest.mark.parametrize("row", [SM80, SM90], ids=lambda row: row.name)
def test_scores_and_grouped_heads(row):
    q, k, v = arrays_for(row, 40, 150, (1, 4))
    row = row.for_score(ScoreMod(softcap=True))
    check(row, q, k[:, ::2], v[:, ::2], seed=1, dropout=DROPOUT, softcap=2.0,
          sinks=np.zeros((4, 1), np.float32))  # fmt: skip


#: Queries and keys at which sequences begin: keys at odd and even ones.
OFFSETS = np.array([0, 3, 3, 70, 191, 200]), np.array([5, 40, 61, 130, 131, 300])


def check_packed(row, q_len=210, k_len=320, batch=(2, 2), source=None, **options):
    """Hold a call against the definition."""
    q, k, v = arrays_for(row, q_len, k_len, batch)
    of_call = {"q_offsets": OFFSETS[0], "k_offsets": OFFSETS[1], **options}
    out, lse = calls.attention(row, q, k, v, dropout=DROPOUT, seed=1, source=source, **of_call)
    given = {"dropout": DROPOUT.p, "seed": DROPOUT.seed, **of_call}
    want, want_lse = reference.attention(q, k, v, **given)
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=0, atol=4 * unit_of(row))
    off = 1e-4 if getattr(row, "parts", 2) == 2 else 1e-2
    np.testing.assert_allclose(lse, want_lse, rtol=off, atol=off)


PACKED = [row for row in ROWS if not row.sparse]


@pytest.mark.parametrize("row", some(PACKED, lambda row: row.source), ids=lambda row: row.name)
def test_packed_sequences(row, tmp_path):
    source = plant(tmp_path, row.source, NOT_AGAIN[row.entry])
    check_packed(row, source=source)
    check_packed(row, batch=(1, 1), source=source, **BANDS[1])


@pytest.mark.parametrize("row", [SM80, SM90], ids=lambda row: row.name)
def test_packed_rows_that_are_computed_again(row):
    q, k, v = arrays_for(row, 210, 320, (1, 1))
    v[..., 70, :] = np.nan
    of_call = {"q_offsets": OFFSETS[0], "k_offsets": OFFSETS[1]}
    out, _ = calls.attention(row, q, k, v, dropout=DROPOUT, seed=1, **of_call)
    want, _ = reference.attention(q, k, v, dropout=DROPOUT.p, seed=DROPOUT.seed, **of_call)
    np.testing.assert_array_equal(np.isnan(out.astype(float)), np.isnan(want))


FP32, FP32_SM90 = (
    next(x for x in ROWS if x.source == f"attention/{stem}" and x.dim == 64 and not x.sparse)
    for stem in ("fwd_fp32", "fwd_fp32_sm90")
)
PLANTED_PACKED = [
    (SM80, ("entry.b += place.sequence;\n  row", "row")),
    (SM80, ("row -= place.first_row;", "")),
    (SM80, ("const int odd = key & 1;", "const int odd = 0;")),
    (SM80, ("entry, row, group + 2, t)", "entry, row, group, t)")),
    (SM90, ("first_col(c, at, key_tile), kept);", "key_tile * kTileN, kept);")),
    (FP32, ("first_row + tid_x_again() % 32 / 4,", "first_row,")),
    (FP32_SM90, ("q_begin + 16 * warp, key_tile", "q_begin, key_tile")),
]


@pytest.mark.parametrize(
    ("row", "change"), PLANTED_PACKED, ids=lambda x: x[0] if isinstance(x, tuple) else x.entry
)
def test_a_planted_bug_of_packed_sequences_is_found(tmp_path, row, change):
    source = plant(tmp_path, row.source, change)
    with pytest.raises((AssertionError, emulator.EmulationError)):
        check_packed(row, source=source)


PLANTED = [
    (SM80, ("c[0] = static_cast<uint32>(second >> 32)", "c[0] = static_cast<uint32>(first >> 32)")),
    (SM80, ("(p, entry, first_row + 16 * i + 8 * h,", "(p, entry, first_row + 16 * i,")),
    (SM80, ("rotated_left(x[i][1], 4)", "rotated_left(x[i][1], 5)")),
    (SM80, ("inverse *= params.dropout.factor;", "")),
    (SM80, ("x[i][2] = entry.h;", "x[i][2] = 0;")),
    (SM90, ("x[i][3] = entry.b;", "x[i][3] = 0;")),
    (SM90, ("if constexpr (kDropout) drop_by_bits(s_tile, kept);", "")),
    (SM90, ("first_key / kDropoutGroup, tid_x_again() % 4", "first_key / kDropoutGroup, 0")),
    (FP32, ("inverse *= kept_factor(params);", "inverse *= 1.0f;")),
    (FP32_SM90, ("16 * warp, key_tile * kTileN);", "16 * warp, 0);")),
    (DIM_128, ("first_col(c, at, key_tile), kept);", "own.tile * 64, kept);")),
]


@pytest.mark.parametrize(
    ("row", "change"), PLANTED, ids=lambda x: x[0] if isinstance(x, tuple) else x.entry
)
def test_a_planted_bug_is_found(tmp_path, row, change):
    source = plant(tmp_path, row.source, change)
    with pytest.raises((AssertionError, emulator.EmulationError)):
        check(row, *arrays_for(row, 70), seed=1, dropout=DROPOUT, source=source)
