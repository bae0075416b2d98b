"""Calls of the kernels of gradients in float32 and float64, and what they are held against."""

import numpy as np

from fa_cupy import reference
from fa_cupy.core.attention_problem import attention_problem
from fa_cupy.gpu.kernels.score import score_mod_of
from tests.support import strategies
from tests.support.gradients import hold
from validation.emulator import calls

NAMES = "dq", "dk", "dv"


def arrays_of(rows, lengths, heads=(2, 1), less=(0, 0), seed=0, scale=1.0):
    """Random dout, q, k and v for some rows."""
    rng, (q_len, k_len) = np.random.default_rng(seed), lengths
    dim, v_dim = (rows[0].dim - n for n in less)
    shapes = [(heads[0], q_len, v_dim), (heads[0], q_len, dim), (heads[1], k_len, dim)]
    shapes.append((heads[1], k_len, v_dim))
    drawn = [scale * rng.standard_normal((1, *shape)) for shape in shapes]
    return [x.astype(rows[0].dtype) for x in drawn]


def solve(
    rows, arrays, bias=None, seen=None, dlse=None, seed=0, sources=None, invalid=(),
    truncating=False, **options,
):  # fmt: skip
    """The kernels' gradients of what the definition has for output and LSE.

    `seen` is the definition's mask. Offsets say the same to the kernels, if there are any, and
    `invalid` are the rows whose offsets are out of range.
    """
    dout, q, k, v = arrays
    as_given = dict(options)
    calls.operands_in(as_given)
    score = score_mod_of(attention_problem(q, k, v, bias, None, **as_given), sloped=True)
    builds = [row.for_score(score).for_sequences("q_offsets" in options) for row in rows]
    with np.errstate(all="ignore"):
        results = reference.attention(q, k, v, bias, seen, **without_offsets(options))
        out, lse = (x.astype(rows[0].dtype) for x in results)
    out[..., list(invalid), :] = lse[..., list(invalid)] = np.nan
    mask = seen if any(row.sparse for row in rows) else None
    given = dout, q, k, v, out, lse, dlse, bias, mask
    how = {"seed": seed, "sources": sources or {}, "truncating": truncating}
    return calls.attention_backward(builds, *given, **how, **options)


def without_offsets(options):
    """The options of the definition, to which a mask says which sequences there are."""
    if "q_offsets" not in options:
        return options
    of_sequences = "q_offsets", "k_offsets", "is_causal", "window", "causal_align"
    return {name: x for name, x in options.items() if name not in of_sequences}


def definition(arrays, bias=None, seen=None, dlse=None, **options):
    return reference.attention_backward(
        *arrays, bias, seen, dlse=dlse, **without_offsets(options)
    )  # fmt: skip


def check_any(rows, arrays, rounded, bias=None, seen=None, dlse=None, **options):
    """Hold gradients of any numbers against what their arithmetic allows, element by element.

    `rounded` is as for `tests.support.gradients.bounds`.
    """
    found = solve(rows, arrays, bias=bias, seen=seen, dlse=dlse, **options)
    own = {name: x for name, x in options.items() if name not in ("seed", "invalid", "truncating")}
    dout, *operands = arrays
    case = strategies.Case(*operands, bias, seen, options=without_offsets(own))
    with np.errstate(all="ignore"):
        hold(case, dict(zip("qkv", found, strict=True)), dout, dlse, rounded)
