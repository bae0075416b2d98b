"""Kernels for the gradient of a bias, held against the definition."""

import numpy as np

from fa_cupy import _definitions, reference
from fa_cupy.gpu.kernels import backward
from fa_cupy.gpu.kernels.attention_backward import select
from tests.support.gradients import UNIT, hold
from tests.support.kernel_attention import draw
from tests.support.kernel_gradients import Parts, case, score_of
from tests.support.strategies import Case as Definition
from validation.emulator.calls import attention_backward

TOP, BOTTOM = "top_left", "bottom_right"
SINGLE = np.dtype(np.float32)
BANDS = {
    "none": {},
    "causal": {"is_causal": True, "causal_align": BOTTOM},
    "window": {"window": (70, 5), "causal_align": TOP},
}


def rows_of(call, target="sm_80", fills=False):
    """The kernels of a call on a device, in the order of their launches.

    `fills`: whether the gradient is of pairs and has as many tiles as ``bwd_dbias_sm90`` wants.
    """
    dim = max(call.q.shape[-1], call.v.shape[-1])
    wanted = backward.Wanted(
        call.q.dtype.name, dim, call.options.get("mask") is not None, score=score_of(call),
        mapped=target == "sm_90a", dbias=True,
        dbias_fills=fills,
    )  # fmt: skip
    return select(wanted, target)


def solve(call, target="sm_80", fills=False, **how):
    """dq, dk, dv and dbias of the kernels, from the output and the LSE of the definition."""
    q, k, v, dout, dlse, options = call
    with np.errstate(all="ignore"):
        out, lse = reference.attention(q, k, v, **options)
        given = dout, q, k, v, out.astype(q.dtype), lse, dlse
        return attention_backward(rows_of(call, target, fills), *given, **how, **options)


def expected(call):
    """The gradient of the bias in float64, and what sums may be off by, element by element.

    The gradient is shifted by the output that the kernels are given, which is rounded.
    """
    x = Parts.of(call, np.float64)
    bias, out = call.options["bias"], (x.p @ x.v).astype(call.q.dtype).astype(np.float64)
    delta = (x.dout * out).sum(axis=-1, keepdims=True)
    size = np.abs(x.dout) @ np.abs(x.v).swapaxes(2, 3) + (np.abs(x.dout) * np.abs(out)).sum(
        axis=-1, keepdims=True
    )
    if call.dlse is not None:
        delta -= call.dlse[..., None]
        size += np.abs(call.dlse[..., None])
    terms = x.p * (x.dout @ x.v.swapaxes(2, 3) - delta)
    # Where an LSE is large, weights come from differences of scores.
    scores = np.abs(np.where(np.abs(x.lse) < 5000, x.lse, 0)).max(initial=1)
    sums = [_definitions.summed(y, bias.shape) for y in (terms, x.p * size)]
    return sums[0], 2 * unit_of_sums(call) * (16 + 4 * scores) * sums[1]


def unit_of_sums(call):
    """The unit of the type that a kernel adds up in: float64 for its own, else float32."""
    return 2.0**-53 if call.q.dtype == np.float64 else 2.0**-24


def check(call, **how):
    """Hold the gradient of the bias against the definition, but where all weights are tiny."""
    found = solve(call, **how)
    compare(call, found[3])
    return found


def compare(call, got):
    """Hold a gradient of the bias against the definition."""
    want, room = expected(call)
    bias = call.options["bias"]
    assert (got.dtype, got.shape) == (bias.dtype, bias.shape)
    error = np.abs(got.astype(np.float64) - want)
    unit = max(UNIT[bias.dtype], unit_of_sums(call))
    limit = room + unit * np.abs(want) + (2.0**-24 if bias.dtype == np.float16 else 1e-20)
    assert (error <= limit).all(), (error / limit).max()


def biased(dtype, heads, lengths, dims, shape, of=SINGLE, **options):
    """A call with a bias of a shape and a dtype."""
    bias = draw(*shape, dtype=SINGLE, seed=17).astype(of)
    return case(dtype, heads, lengths, dims, bias=bias, **options)


def of_exact_scores():
    """A call whose pairs are computed by hand: rows have a number of 1e8 that meets zeros.

    Scores of 2e5 are exact then. What stands for their log-sum-exp was rounded.
    """
    call = biased("float32", (1, 1), (20, 30), (32, 32), (20, 30), batch=1)
    for x, col in ((call.q, 0), (call.k, 1)):
        x[...] *= 1e-3
        x[..., :3] = 0, 0, 1e3
        x[..., col] = 1e8
    return call


def check_spoiled(call, **how):
    """Hold each element against float64, with NaN in the same places."""
    q, k, v, dout, dlse, options = call
    band = dict(options)
    more = [band.pop(name, None) for name in ("bias", "mask")]
    found = dict(zip(("q", "k", "v", "bias"), solve(call, **how), strict=True))
    with np.errstate(all="ignore"):
        hold(Definition(q, k, v, *more, options=band), found, dout, dlse, UNIT[q.dtype])
    return found["bias"].astype(np.float64)


def check_hidden_pairs(dtype="float16", dim=64, **how):
    """What pairs hold that a bias of -inf hides reaches no element; `how` is that of `check`."""
    bias = draw(150, 140, dtype=SINGLE, seed=4)
    bias[:, 9] = bias[7] = -np.inf
    call = case(dtype, (2, 2), (150, 140), (dim, dim), batch=1, bias=bias, dlse=True)
    want = check(call, **how)[3]
    call.v[..., 9, :] = np.inf
    call.dout[..., 7, :] = call.dlse[..., 7] = np.nan
    got = check_spoiled(call, **how)
    np.testing.assert_array_equal(got, want)
    assert not got[:, 9].any()
    assert not got[7].any()
