"""Builds for packed sequences, in the emulator, against one call for each sequence."""

import itertools

import numpy as np
import pytest

from fa_cupy import causal_product
from fa_cupy.core import linear_problem
from fa_cupy.gpu.kernels import products
from fa_cupy.gpu.kernels.linear import params
from fa_cupy.gpu.kernels.linear.choice import Choice
from fa_cupy.gpu.kernels.linear.table import PACKED, serving
from fa_cupy.gpu.kernels.linear.variant import ProductSm90Variant
from fa_cupy.keys.offsets import Offsets
from tests.support.every_run import some
from tests.support.kernel_products import NAMES
from tests.support.products import draw
from tests.support.strategies import DTYPES, UNIT
from validation.emulator.launcher import EmulatorLauncher

pytestmark = pytest.mark.emulator

BOUNDS = np.array([3, 10, 10, 140, 141, 210, 220])
LENGTH = 225
NAMES = NAMES | {"float64": DTYPES[3]}
ROWS = [row for row in PACKED if row.algorithm]


def states_of(row):
    return dict(serving(row.dtype, "sm_90a", packed=True)).get(row)


def check(monkeypatch, row, segments, reverse):
    """Compare what a row computes with what each sequence has by itself."""
    dtype = NAMES[row.dtype]
    less = (8, 8) if isinstance(row, ProductSm90Variant) else (3, 1)
    dims = row.dim - less[0], min(row.dim, row.tile_n) - less[1]
    q, k, v = draw(*((2, LENGTH, d) for d in (dims[0], *dims)), dtype=dtype)
    where = Offsets(len(BOUNDS) - 1, BOUNDS.dtype, BOUNDS.dtype)
    problem = linear_problem.product_problem("test", q, k, v, offsets=where)
    initial = draw(problem.state_shape, dtype=problem.state_dtype, seed=1)[0]
    problem = linear_problem.product_problem("test", q, k, v, initial, offsets=where)
    out, state = np.full(problem.out_shape, 7, dtype), np.full_like(initial, 7)
    choice = Choice(row, states_of(row) if segments > 1 else None, segments, 64, 1.0)
    monkeypatch.setattr(products, "choose", lambda *given, **options: choice)
    job = params.packed_job(
        problem, problem.view(out.shape, out.strides), problem.state_view(state), reverse,
        "q_spans", zero_invalid=False,
    )  # fmt: skip
    plan = products.packed_plan([job], problem, EmulatorLauncher())
    assert [step.variant for step in plan.steps].count(row) == 1
    plan.run(tuple(x.ctypes.data for x in (q, k, v, out, initial, state, BOUNDS, BOUNDS)))
    for s, (begin, end) in enumerate(itertools.pairwise(BOUNDS)):
        parts = [x[:, begin:end].astype(float) for x in (q, k, v)]
        want, last = causal_product(
            *parts, initial_state=initial[:, s].astype(float), reverse=reverse, return_state=True
        )
        largest = 40 * np.abs(want).max(initial=1)
        unit = max(UNIT[dtype], 100 * UNIT[problem.state_dtype])
        assert (np.abs(out[:, begin:end].astype(float) - want) <= unit * largest).all()
        np.testing.assert_allclose(state[:, s], last, atol=unit * np.abs(last).max(initial=1))
    assert not out[:, :3].any()
    assert not out[:, 220:].any()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("row", some(ROWS, lambda row: (row.source, row.dtype)))
def test_rows_of_sequences(monkeypatch, row, reverse):
    check(monkeypatch, row, 1, reverse)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    "row",
    some([row for row in ROWS if row.algorithm == "chunked"], lambda row: (row.source, row.dtype)),
)
def test_segments_of_sequences(monkeypatch, row, reverse):
    """More of them than some sequences have chunks."""
    check(monkeypatch, row, 3, reverse)
