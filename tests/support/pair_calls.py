"""Graphs, and calls over the pairs of their masks for kernels in the emulator."""

import numpy as np

from fa_cupy import BitMask, reference
from tests.support.kernel_attention import DTYPES
from validation.emulator import calls

DTYPES = {**DTYPES, "float32": np.dtype(np.float32)}
UNITS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-19}


def graph(rng, *shape, density=0.03, hubs=2):
    """A mask of few pairs as an array: with hubs among queries and keys, and rows of no pair."""
    seen = rng.random(shape) < density
    *_, q_len, k_len = shape
    for _ in range(hubs):
        seen[..., rng.integers(0, q_len), :] |= rng.random(k_len) < 0.8
        seen[..., :, rng.integers(0, k_len)] |= rng.random(q_len) < 0.8
    seen[..., rng.random(q_len) < 0.2, :] = False
    seen[..., :, rng.random(k_len) < 0.2] = False
    return seen


def with_pairs(pair_bias, seen):
    """A dense bias that says what a number for each pair says, -inf for no pair.

    `pair_bias` has shape (..., pairs), in C order of the True elements of `seen`, (q_len, k_len).
    """
    bias = np.full((*pair_bias.shape[:-1], *seen.shape), -np.inf, np.float32)
    bias[..., seen] = pair_bias
    return bias


def check(q, k, v, seen, bias=None, bits=None, pair_bias=None, **options):
    """Hold a call against the reference; `seen` is the mask of `bits` as an array."""
    bits = BitMask.from_dense(seen) if bits is None else bits
    how = {name: options.pop(name) for name in ("piece_pairs", "source", "seed") if name in options}
    out, lse = calls.attention_by_pairs(q, k, v, bias, bits, pair_bias=pair_bias, **how, **options)
    given = bias
    if pair_bias is not None:
        given = with_pairs(pair_bias, seen).astype(np.float64)
        given = given if bias is None else given + bias.astype(np.float64)
    with np.errstate(all="ignore"):
        want, want_lse = reference.attention(q, k, v, given, seen, **options)
    hold(q.dtype, v, out, lse, want, want_lse)
    return out, lse


def hold(dtype, v, out, lse, want, want_lse):
    """Compare results; what is not finite must be at the same places."""
    largest = np.abs(np.nan_to_num(v.astype(np.float64), posinf=0, neginf=0)).max(initial=1)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    # Scores of a row are rounded as its LSE is, unless it is so large that float64 computes them.
    scores = np.abs(want_lse[np.isfinite(want_lse)])
    unit = max(UNITS[np.dtype(dtype).name], 2.0**-21 * scores[scores < 6000].max(initial=0))
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=0, atol=unit * largest)
    np.testing.assert_allclose(lse, want_lse, rtol=2e-6, atol=2e-5)
