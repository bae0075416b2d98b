"""Builds of the forward kernels that drop weights, in the emulator."""

import numpy as np
import pytest

from fa_cupy.dropout.arguments import Dropout
from fa_cupy.gpu.kernels.attention.fwd_sm90 import FwdSm90
from fa_cupy.gpu.kernels.forward import VARIANTS
from fa_cupy.gpu.kernels.score import ScoreMod
from tests.support.every_run import some
from tests.support.kernel_attention import BANDS, FORWARD_DTYPES, blocks_of, check, draw
from tests.support.planted import plant
from validation import emulator

pytestmark = pytest.mark.emulator

DROPOUT = Dropout(0.3, 2**63 + 12345)
ROWS = [row.for_dropout(True) for row in VARIANTS if row.dtype in ("float16", "bfloat16")]
SM80, SM80_SPARSE, SM90, SM90_SPARSE = (
    next(x for x in ROWS if (isinstance(x, FwdSm90), x.sparse, x.dim) == (hopper, sparse, 64))
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


PLANTED = [
    (SM80, ("c[0] = static_cast<uint32>(second >> 32)", "c[0] = static_cast<uint32>(first >> 32)")),
    (SM80, ("(p, entry, first_row + 16 * i + 8 * h,", "(p, entry, first_row + 16 * i,")),
    (SM80, ("rotated_left(x[i][1], 4)", "rotated_left(x[i][1], 5)")),
    (SM80, ("inverse *= params.dropout.factor;", "")),
    (SM80, ("x[i][2] = entry.h;", "x[i][2] = 0;")),
    (SM90, ("x[i][3] = entry.b;", "x[i][3] = 0;")),
    (SM90, ("if constexpr (kDropout) drop_by_bits(s_tile, kept);", "")),
    (SM90, ("first_key / kDropoutGroup, tid_x_again() % 4", "first_key / kDropoutGroup, 0")),
    (DIM_128, ("key_tile * kTileN, kept);", "own.tile * 64, kept);")),
]


@pytest.mark.parametrize(
    ("row", "change"), PLANTED, ids=lambda x: x[0] if isinstance(x, tuple) else x.entry
)
def test_a_planted_bug_is_found(tmp_path, row, change):
    source = plant(tmp_path, row.source, change)
    with pytest.raises((AssertionError, emulator.EmulationError)):
        check(row, *arrays_for(row, 70), seed=1, dropout=DROPOUT, source=source)
