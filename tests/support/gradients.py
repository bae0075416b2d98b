"""Gradients of attention held against float64, element by element."""

import numpy as np

from fa_cupy import _definitions, attention, attention_backward, reference
from tests.support.keyed_cases import native_options
from tests.support.strategies import DTYPES, UNIT, normal, to_numpy

DOUBLE = DTYPES[3]
NAMES = ("q", "k", "v", "bias", "sinks")
# Where numbers end: of float16 and float64, else where float32 has lost its precision.
SMALLEST = {DTYPES[0]: 2.0**-24, DOUBLE: 2.0**-1022}


def sum_dtype(dtype):
    return DOUBLE if dtype == DOUBLE else DTYPES[2]


def solve(xp, case, dlse=False, need=None, mask=None):
    """Run a case forward and backward on `xp`; return what came in and the gradients, by name."""
    arrays = case.native(xp)
    if mask is not None:
        arrays[4] = mask
    options = native_options(xp, {a: x for a, x in case.options.items() if a != "precision"})
    sinks = options.get("sinks")
    out, lse = attention(*arrays, return_lse=True, **options)
    rng = np.random.default_rng(7)
    douts = normal(rng, out.shape, case.q.dtype), normal(rng, lse.shape, sum_dtype(case.q.dtype))
    dout, dstat = map(xp.asarray, douts)
    given = dict(zip(NAMES, (*arrays[:4], sinks), strict=True))
    names = need or [name for name, x in given.items() if x is not None]
    before = [to_numpy(x).tobytes() for x in (*arrays[:3], out, lse, dout)]
    found = attention_backward(
        dout, *arrays[:3], out, lse, *arrays[3:], dlse=dstat if dlse else None, need=need, **options
    )
    assert before == [to_numpy(x).tobytes() for x in (*arrays[:3], out, lse, dout)]
    assert len(found) == len(names)
    assert all(isinstance(x, xp.ndarray) for x in found)
    for name, x in zip(names, found, strict=True):
        assert (x.dtype, x.shape) == (given[name].dtype, given[name].shape)
    return douts, {name: to_numpy(x) for name, x in zip(names, found, strict=True)}


def check(xp, case, dlse=False, mask=None):
    """Compare all gradients of a case with float64."""
    (dout, dstat), found = solve(xp, case, dlse, mask=mask)
    hold(case, found, dout, dstat if dlse else None, UNIT[case.q.dtype] if xp is not np else 0.0)
    return found


def differences(loss, array, step=1e-5):
    """The gradient of ``loss()`` by an array that it reads, by central differences."""
    found = np.empty(array.shape)
    for index in np.ndindex(array.shape):
        before = array[index]
        array[index] = before + step
        up = loss()
        array[index] = before - step
        found[index] = (up - loss()) / (2 * step)
        array[index] = before
    return found


def hold(case, found, dout, dlse, rounded):
    """Compare gradients by name with float64; `rounded` as for `bounds`."""
    want = reference.attention_backward(dout, *case.arrays, dlse=dlse, **case.options)
    limits = bounds(case, dout, dlse, rounded)
    for (name, x), of, bound in zip(found.items(), want, limits, strict=False):
        argument = dict(zip(NAMES, (*case.arrays[:4], case.options.get("sinks")), strict=True))[
            name
        ]
        x = x.astype(np.float64).reshape(argument.shape)
        np.testing.assert_array_equal(np.isfinite(x), np.isfinite(of), name)
        finite = np.isfinite(of)
        limit = bound[finite] + 2 * UNIT[argument.dtype] * np.abs(of[finite])
        limit += max(SMALLEST.get(x, 2.0**-110) for x in (argument.dtype, sum_dtype(case.q.dtype)))
        error = np.abs(x[finite] - of[finite])
        assert (error <= limit).all(), (name, (error / limit).max())


def bounds(case, dout, dlse, rounded=0.0):
    """What arithmetic allows gradients to be off by, besides their rounding: of all but the mask.

    Weights carry an error of float32 (float64) that grows with the scores, and the output that the
    gradient is shifted by is rounded to the dtype. On a GPU, weights and gradients of scores are
    rounded too before they are multiplied; those that float16 has no full precision for, below
    2**-14, to a multiple of 2**-24.
    """
    dtype = case.q.dtype
    unit = UNIT[sum_dtype(dtype)]
    step = 2.0**-25 if rounded and dtype == DTYPES[0] else 0.0
    with np.errstate(all="ignore"):
        x = _definitions.scores_of(*case.arrays, DOUBLE, **case.options)
        given = x.q, x.k, x.v, dout.astype(np.float64), 0.0 if dlse is None else dlse[..., None]
        clean = (np.nan_to_num(a, posinf=0, neginf=0) for a in given)
        q, k, v, dout, dlse = map(np.abs, clean)
        weights = np.nan_to_num(_definitions.attend(x, None)[2])
        scale = case.options.get("scale")
        scale = abs(scale) if scale is not None else (case.q.shape[-1] or 1) ** -0.5
        size = scale * q.max(initial=0) * k.sum(-1).max(initial=0)
        if case.bias is not None:
            bias = case.bias.astype(np.float64)
            size += np.abs(bias[np.isfinite(bias)]).max(initial=0)
        sinks = case.options.get("sinks")
        if sinks is not None:
            size += np.abs(sinks[np.isfinite(sinks)]).astype(np.float64).max(initial=0)
        slack = 24 * unit * (8 + size)
        values = dout @ v.swapaxes(-1, -2)
        means = (dout * (weights @ v)).sum(-1, keepdims=True) + dlse
        step = np.where(x.attended, step, 0.0)
        # Where the output is small, it is rounded to a multiple of the smallest number.
        lost = 2 * UNIT[dtype] * means + SMALLEST.get(dtype, 0.0) * dout.sum(-1, keepdims=True)
        off = weights * ((slack + rounded) * (values + means) + lost) + step
        off_v = ((slack + rounded) * weights + step).swapaxes(-1, -2) @ dout
        keys = k.shape[-2]  # a sink is one more column
        of_keys = off[..., :keys]
        terms = of_keys @ k * scale, of_keys.swapaxes(-1, -2) @ q * scale
        found = *terms, off_v[..., :keys, :], of_keys
        shapes = [None if a is None else a.shape for a in case.arrays[:4]]
        limits = [
            _definitions.summed(a, s) for a, s in zip(found, shapes, strict=True) if s is not None
        ]
        if sinks is not None:
            limits.append(_definitions.summed(off[..., keys:], (*sinks.shape, 1))[..., 0])
        return limits
