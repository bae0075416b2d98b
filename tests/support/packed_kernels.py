"""Products of packed sequences by the rows of a choice, in the emulator, some blocks at a time."""

import dataclasses
from unittest import mock

import numpy as np

from fa_cupy.core import linear_problem
from fa_cupy.gpu.kernels import products
from fa_cupy.gpu.kernels.linear import params
from fa_cupy.gpu.kernels.linear.choice import Choice
from fa_cupy.keys.offsets import Offsets
from tests.support import kernel_products, packed_sequences
from tests.support.products import Case, check_product
from validation.emulator import calls
from validation.emulator.launcher import EmulatorLauncher


def packed_split(row, segments, own_prefix=False):
    """The choice of a row with as many segments of each sequence; see `kernel_products.split`."""
    states = None
    if segments > 1 and not own_prefix:
        states = kernel_products.states_of(row)
    return Choice(row, states, segments, 64, 0.0)


class _Together(EmulatorLauncher):
    """Some blocks of a launch run at the same time, by turns."""

    def __init__(self, **how):
        super().__init__(together=3, **how)

    def kernels(self, steps):
        return super().kernels([step._replace(persistent=True) for step in steps])


def solve(choice, case, offsets, states=None, zero_invalid=False, **how):
    """Output and states of a product; all of them are NaN before, or where `states` is None zeros.

    Parameters
    ----------
    choice : Choice
    case : Case
        Without an initial state.
    offsets : numpy.ndarray
    states : numpy.ndarray, optional
        The initial ones, with an axis of sequences.
    zero_invalid : bool, optional
        See `fa_cupy.gpu.kernels.linear.params.Sequences`.
    **how
        Of `EmulatorLauncher`.
    """
    q, k, v, _ = case.native(np)
    where = Offsets(len(offsets) - 1, offsets.dtype, offsets.dtype)
    problem = linear_problem.product_problem("test", q, k, v, states, offsets=where)
    out = np.full(problem.out_shape, np.nan, problem.dtype)
    last = np.full(problem.state_shape, np.nan, problem.state_dtype)
    job = params.packed_job(
        problem, problem.view(out.shape, out.strides), problem.state_view(last), case.reverse,
        "q_spans", zero_invalid,
    )  # fmt: skip
    with mock.patch.object(products, "choose", return_value=choice):
        plan = products.packed_plan([job], problem, _Together(**how))
    assert [step.variant for step in plan.steps].count(choice.row) == 1
    given = q, k, v, out, states, last, offsets, offsets
    plan.run(tuple([0 if x is None else x.ctypes.data for x in given]))
    assert plan.other is None, "tensor maps want addresses that are multiples of 16"
    return out, last


def check_slices(choice, case, offsets, out, last, states=None, zero_invalid=False):
    """Compare each sequence, to the bit, with a call of the same kernel without packed sequences.

    And where all is finite with float64; rows of no sequence are 0.
    """
    plain = dataclasses.replace(choice.row, packed=False)
    own_prefix = choice.segments > 1 and choice.states is None
    filler = 0 if zero_invalid else np.nan
    outside = np.ones(case.q.shape[-2], bool)
    lengths = (case.q.shape[-2],) * 2
    for s, (rows, _, is_valid) in enumerate(packed_sequences.ranges(offsets, offsets, lengths)):
        outside[rows] = False
        if not is_valid:
            np.testing.assert_array_equal(out[..., rows, :].astype(float), filler)
            np.testing.assert_array_equal(last[..., s, :, :], filler)
            continue
        first = None if states is None else np.ascontiguousarray(states[..., s, :, :])
        length = rows.stop - rows.start
        if not length:
            np.testing.assert_array_equal(last[..., s, :, :], 0 if first is None else first)
            continue
        alone = [np.ascontiguousarray(x[..., rows, :]) for x in (case.q, case.k, case.v)]
        chunks = -(-length // plain.tile_m)
        segment_chunks = -(-chunks // choice.segments) if choice.segments > 1 else None
        how = kernel_products.split(plain, length, segment_chunks, own_prefix)
        want = calls.causal_product(how, *alone, first, case.reverse)
        assert out[..., rows, :].tobytes() == want[0].tobytes(), s
        assert last[..., s, :, :].tobytes() == want[1].tobytes(), s
        if all((np.abs(x.astype(float)) < 100).all() for x in alone):  # and not NaN
            own = Case(*alone, first, case.reverse)
            check_product(own, out[..., rows, :], last[..., s, :, :], rounded=True)
    assert not out[..., outside, :].astype(float).any()
