"""Calls whose scores are large, and what their results must be."""

import math
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from fa_cupy import reference

LARGEST = float(np.finfo(np.float32).max)
BANDS = [
    {},
    {"is_causal": True, "causal_align": "bottom_right"},
    {"is_causal": True, "causal_align": "top_left"},
    {"window": (60, 3), "causal_align": "bottom_right"},
]
#: What changes scores before the softmax.
TRANSFORMS = ("bias", "lowest", "softcap", "negative", "huge")


class Call(NamedTuple):
    """Arguments of attention."""

    q: Any
    k: Any
    v: Any
    bias: Any
    mask: Any
    options: dict[str, Any]


def whole_scores(seed, dtype, dims, how=None, masked=False, q_len=70, k_len=150, heads=(2, 2)):
    """A call whose scores are whole numbers below 600 times powers of two, exact in float32.

    So that one score is as large as it is, and equals others, in whatever order its terms are added
    up; and nothing but the softmax has to be accurate. `how` is one of `TRANSFORMS`.
    """
    rng = np.random.default_rng(seed)
    head_dim, v_dim = dims
    signs = [(-2, 2), (0, 2)][rng.integers(0, 2)]
    q = rng.integers(*signs, (1, heads[0], q_len, head_dim), endpoint=True).astype(np.float32)
    some = rng.integers(-2, 2, (5, head_dim), endpoint=True).astype(np.float32)
    k = some[rng.integers(0, 5, (1, heads[1], k_len))]  # the same again and again
    if rng.random() < 0.5:
        k = np.abs(k) * rng.choice([-1, 1])  # far above 0, or far below
    wide = 24 // (1 + head_dim // 32)  # columns in use, or scores would have more digits
    q[..., wide:] = 0
    # Near and far rows and keys: mixed, or one after the other.
    lower = rng.integers(0, 2, k_len) if rng.random() < 0.5 else np.arange(k_len) < k_len // 2
    k *= np.where(lower[:: rng.choice([-1, 1])], 2.0**-6, 1)[:, None]
    if how != "bias":  # beside which they would have more digits than float32
        q *= 2.0 ** -rng.choice([0, 0, 12], q_len)[:, None]
    size = int(rng.choice([0, 6, 10, 13, 16, 18, 20, 22, 24, 28, 34, 50, 80, 95]))
    if how == "huge":  # a scale that the softmax does not take
        size = 100
    elif dtype != np.float16:  # as far as float32 goes
        size += int(rng.choice([0, 0, 18]))
        q, k = (x * 2.0 ** int(rng.choice([-20, 0, 10])) for x in (q, k))
    if how == "lowest":  # what is added to the end of float32 must not lead beyond it
        size = min(size, 50)
    v = rng.standard_normal((1, heads[1], k_len, v_dim)).astype(np.float32)
    options = dict(BANDS[rng.integers(0, len(BANDS))])
    options["scale"] = 2.0 ** min(size, 98 if how != "huge" else 100)
    largest = (float(np.abs(x).max(initial=2.0**-24)) for x in (q, k))
    unit = options["scale"] * math.prod(largest) / 4
    if how == "negative":
        options["scale"] *= -1
    bias = None
    if how == "softcap":
        options["softcap"] = min(2.0**-26 * unit, 2.0**99)  # every score but 0 is at the cap
    elif how == "lowest":
        bias = np.full((q_len, k_len), -LARGEST, np.float32)
        bias[rng.random((q_len, k_len)) < 0.01] = 0
    elif how == "bias":
        bias = rng.integers(-9, 9, (heads[0], 1, k_len)) * min(unit, 2.0**116)
        bias[..., rng.random(k_len) < 0.2] = -np.inf
        bias = bias.astype(rng.choice([np.float32, np.float64]))
    mask = rng.random((heads[0], q_len, k_len)) < 0.7 if masked else None
    spoiled = rng.integers(0, k_len, 3)
    if masked:
        mask[..., spoiled] = False
    if masked or "is_causal" in options or "window" in options:
        v[..., spoiled, :] = np.nan  # where it is seen, it shows
    return Call(*(x.astype(dtype) for x in (q, k, v)), bias, mask, options)


def hold(call, out, lse):
    """Hold results against float64: outputs to their own accuracy, however large the scores."""
    *arrays, options = call
    want, want_lse = reference.attention(*arrays, **options)
    unit = 2.0**-10 if call.q.dtype == np.float16 else 2.0**-7
    largest = np.abs(np.nan_to_num(call.v.astype(np.float64), nan=0, posinf=0, neginf=0)).max()
    out, finite = out.astype(np.float64), np.isfinite(want)
    np.testing.assert_array_equal(np.isfinite(out), finite)
    np.testing.assert_allclose(out[finite], want[finite], rtol=0, atol=(unit + 2.0**-9) * largest)
    got, wanted = (np.clip(x.astype(np.float64), -LARGEST, LARGEST) for x in (lse, want_lse))
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    # Tensor cores truncate where they add up, which moves a score of so many equal terms.
    np.testing.assert_allclose(got, wanted, rtol=4e-6, atol=2e-4)


def random_scores(seed, dtype, dims, size, q_len=70, k_len=150):
    """A call of random numbers whose scores reach a few times `size`."""
    rng = np.random.default_rng(seed)
    step = (size / np.sqrt(dims[0])) ** 0.5
    q, k = (step * rng.standard_normal((n, dims[0])) for n in (q_len, k_len))
    v = rng.standard_normal((k_len, dims[1]))
    return Call(*_rounded(dtype, q, k, v), None, None, {"scale": 1.0})


def spoiled_scores(dtype, dims, size):
    """The same under a causal mask, with a last value that is NaN: the last query alone sees it."""
    call = random_scores(1, dtype, dims, size)
    call.options.update(is_causal=True, causal_align="bottom_right")
    call.v[-1] = np.nan
    return call


def one_key(dtype, dims, size):
    """Calls of one key, whose weight is 1 whatever its score: above 0 and below."""
    v = np.random.default_rng(0).standard_normal((1, dims[1]))
    q, k, v = _rounded(dtype, np.full((70, dims[0]), size), np.full((1, dims[0]), size), v)
    return [Call(of_q, k, v, None, None, {}) for of_q in (q, -q)]


def rising_scores(dtype, dims):
    """A call whose first keys score far below 0, all others 0: their tiles come later."""
    rng = np.random.default_rng(0)
    k = np.where(np.arange(300) < 200, -rng.uniform(1, 2, 300), 0)[:, None] * np.ones(dims[0])
    q = rng.uniform(1, 2, (70, 1)) * np.ones(dims[0])
    arrays = _rounded(dtype, q, k, rng.standard_normal((300, dims[1])))
    return Call(*arrays, None, None, {"scale": 1e15})


def beyond_float32(dims, size):
    """Calls in bfloat16 whose products float32 does not hold, some of which are equal."""
    rng = np.random.default_rng(0)
    q, k = (rng.choice([0.5, 1], (n, dims[0])) * size for n in (70, 150))
    k[20:30] = k[1]
    q, k, v = _rounded(ml_dtypes.bfloat16, q, k, rng.standard_normal((150, dims[1])))
    return [Call(of_q, k, v, None, None, {}) for of_q in (q, -q)]


def same_bias(dtype, dims, size):
    """Calls in which every key has the same bias, beside which all scores are equal.

    Times log2(e) one of these biases lies where rounding goes either way.
    """
    rng = np.random.default_rng(0)
    q, k = (rng.choice([-0.01, 0.01], (n, dims[0])) for n in (70, 150))
    arrays = _rounded(dtype, q, k, rng.standard_normal((150, dims[1])))
    near = (size * np.linspace(0.99, 1, 2**16)).astype(np.float32)
    digits = np.ldexp(np.frexp(near * np.float64(np.float32(np.log2(np.e))))[0], 24)
    chosen = near[-1], near[np.argmin(np.abs(np.abs(digits) % 1 - 0.5))]
    biases = (np.full((70, 150), x) for x in chosen)
    return [Call(*arrays, bias, None, {"scale": 1.0}) for bias in biases]


def _rounded(dtype, *arrays):
    return [x.astype(np.float32).astype(dtype) for x in arrays]


def hold_as_plain(call, out, times=4):
    """Hold an output to be about as good as plain arithmetic in float32."""
    *arrays, options = call
    want, _ = reference.attention(*arrays, **options)
    plain = reference.plain(*arrays, dtype=call.q.dtype, **options)
    unit = 2.0**-10 if call.q.dtype == np.float16 else 2.0**-7
    found, usual = (reference.relative_error(x, want) for x in (out, plain))
    assert found <= times * usual + unit, (found, usual)
