"""Builds for packed sequences, in the emulator, against one call for each sequence."""

import itertools

import numpy as np
import pytest

from fa_cupy import causal_product
from fa_cupy.gpu.kernels.linear.table import PACKED
from fa_cupy.gpu.kernels.linear.variant import ProductSm90Variant
from tests.support.every_run import some
from tests.support.kernel_products import NAMES
from tests.support.packed_kernels import packed_split, solve
from tests.support.products import Case, draw
from tests.support.strategies import DTYPES, UNIT

pytestmark = pytest.mark.emulator

BOUNDS = np.array([3, 10, 10, 140, 141, 210, 220])
LENGTH = 225
NAMES = NAMES | {"float64": DTYPES[3]}
ROWS = [row for row in PACKED if row.algorithm]


def check(row, segments, reverse):
    """Compare what a row computes with what each sequence has by itself."""
    dtype = NAMES[row.dtype]
    less = (8, 8) if isinstance(row, ProductSm90Variant) else (3, 1)
    dims = row.dim - less[0], min(row.dim, row.tile_n) - less[1]
    q, k, v = draw(*((2, LENGTH, d) for d in (dims[0], *dims)), dtype=dtype)
    kind = np.float64 if row.dtype == "float64" else np.float32
    initial = draw((2, len(BOUNDS) - 1, *dims), dtype=kind, seed=1)[0]
    out, state = solve(packed_split(row, segments), Case(q, k, v, reverse=reverse), BOUNDS, initial)
    for s, (begin, end) in enumerate(itertools.pairwise(BOUNDS)):
        parts = [x[:, begin:end].astype(float) for x in (q, k, v)]
        want, last = causal_product(
            *parts, initial_state=initial[:, s].astype(float), reverse=reverse, return_state=True
        )
        largest = 40 * np.abs(want).max(initial=1)
        unit = max(UNIT[dtype], 100 * UNIT[initial.dtype])
        assert (np.abs(out[:, begin:end].astype(float) - want) <= unit * largest).all()
        np.testing.assert_allclose(state[:, s], last, atol=unit * np.abs(last).max(initial=1))
    assert not out[:, :3].any()
    assert not out[:, 220:].any()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("row", some(ROWS, lambda row: (row.source, row.dtype)))
def test_rows_of_sequences(row, reverse):
    check(row, 1, reverse)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    "row",
    some([row for row in ROWS if row.algorithm == "chunked"], lambda row: (row.source, row.dtype)),
)
def test_segments_of_sequences(row, reverse):
    """More of them than some sequences have chunks."""
    check(row, 3, reverse)
