"""Gradients in float64 by mma.sync, ``bwd_dq_fp64`` and ``bwd_dkdv_fp64``, on the CPU."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import Score, reference
from fa_cupy.core.attention_problem import attention_problem
from fa_cupy.gpu.kernels.attention.full_precision import bwd_dkdv_fp64, bwd_dq_fp64
from fa_cupy.gpu.kernels.attention_backward import select
from fa_cupy.gpu.kernels.backward import Wanted
from fa_cupy.gpu.kernels.score import score_mod_of
from tests.support.every_run import examples, only, some
from tests.support.kernel_attention import BANDS, any_sinks
from tests.support.planted import plant
from validation import emulator
from validation.emulator import calls

pytestmark = pytest.mark.emulator

#: The rows of a call, by dim and whether they are of SM90; of 128 those of the smallest targets too.
PAIRS = {
    f"{dq.dim}-{dq.tile_m}{'-wide' if dq.wide else ''}": (dq, dkdv)
    for dq, dkdv in zip(bwd_dq_fp64.VARIANTS, bwd_dkdv_fp64.VARIANTS, strict=True)
}
# One of each number of stages, of warps that share columns, and of each instruction.
D64, D256, SMALL = PAIRS["64-64-wide"], PAIRS["256-32-wide"], PAIRS["64-32"]
NOT_AGAIN = "if ((recompute_lanes[0] | recompute_lanes[1]) == 0) return;", "return;"
NAMES = "dq", "dk", "dv"


def arrays_of(rows, lengths, heads=(2, 1), less=(0, 0), seed=0, scale=1.0):
    """Random dout, q, k and v for some rows."""
    rng, (q_len, k_len) = np.random.default_rng(seed), lengths
    dim, v_dim = (rows[0].dim - n for n in less)
    shapes = [(heads[0], q_len, v_dim), (heads[0], q_len, dim), (heads[1], k_len, dim)]
    shapes.append((heads[1], k_len, v_dim))
    return [scale * rng.standard_normal((1, *shape)) for shape in shapes]


def solve(rows, arrays, bias=None, given=None, dlse=None, **options):
    """The kernels' gradients; `given` are output and LSE in place of those of the definition."""
    how = {name: options.pop(name) for name in ("seed", "sources") if name in options}
    dout, q, k, v = arrays
    as_given = dict(options)
    calls.operands_in(as_given)
    score = score_mod_of(attention_problem(q, k, v, bias, None, **as_given), sloped=True)
    builds = [row.for_score(score).for_sequences("q_offsets" in options) for row in rows]
    with np.errstate(all="ignore"):
        out, lse = given or reference.attention(q, k, v, bias, **options)
        given = dout, q, k, v, out, lse, dlse, bias
        return calls.attention_backward(builds, *given, **how, **options)


def check(rows, arrays, bias=None, dlse=None, room=1.0, **options):
    """Hold gradients against the definition, in float64 too."""
    found = solve(rows, arrays, bias, dlse=dlse, **options)
    plain = {name: x for name, x in options.items() if name not in ("seed", "sources")}
    with np.errstate(all="ignore"):
        want = reference.attention_backward(*arrays, bias, dlse=dlse, **plain)
    for name, x, y in zip(NAMES, found, want, strict=False):
        largest = float(np.abs(np.nan_to_num(y, posinf=0, neginf=0)).max(initial=0))
        np.testing.assert_allclose(x, y, rtol=1e-13, atol=1e-13 * room * largest, err_msg=name)
    return found
