"""Graphs, and calls over the pairs of their masks for kernels in the emulator."""

import numpy as np

from fa_cupy import BitMask, reference
from tests.support import kernel_gradients, strategies
from tests.support.gradients import hold as hold_each
from tests.support.kernel_attention import DTYPES, draw
from tests.support.kernel_gradients import Case, Parts
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


def case(dtype, heads, lengths, dims, seen, *, batch=2, dlse=True, seed=0, scale=1.0, **options):
    """A call for gradients of random numbers; `seen` is its mask as an array."""
    (q_heads, k_heads), (q_len, k_len), (dim, v_dim) = heads, lengths, dims
    shapes = [(q_heads, q_len, dim), (k_heads, k_len, dim), (k_heads, k_len, v_dim)]
    arrays = [
        draw(batch, *shape, dtype=DTYPES[dtype], seed=4 * seed + i, scale=scale)
        for i, shape in enumerate([*shapes, (q_heads, q_len, v_dim)])
    ]
    given = draw(batch, q_heads, q_len, dtype=np.dtype(np.float32), seed=seed + 9) if dlse else None
    return Case(*arrays, given, {"mask": seen, **options})


def gradients(call, bits=None, pair_bias=None, **how):
    """Gradients of a case by pairs; `bits` is the same mask."""
    options = dict(call.options)
    bias, seen = options.pop("bias", None), options.pop("mask")
    bits = BitMask.from_dense(seen) if bits is None else bits
    dense = bias
    if pair_bias is not None:
        dense = with_pairs(pair_bias, seen) + (0 if bias is None else bias)
    out = np.empty_like(call.dout)
    with np.errstate(all="ignore"):
        exact, lse = reference.attention(*call[:3], dense, seen, **options)
        out[...] = exact.astype(out.dtype)
        return calls.gradients_by_pairs(
            call.dout, *call[:3], out, lse, call.dlse, bias, bits, pair_bias=pair_bias, **how,
            **options,
        )  # fmt: skip


def compare(call, got):
    """Hold gradients against the definition: beside plain ones in 16 bits, else by norms."""
    if call.q.dtype.itemsize == 2:
        return kernel_gradients.compare(call, got)
    parts = Parts.of(call, np.float64)
    exact = kernel_gradients.gradients(call, parts=parts)
    # Weights are off by the rounding of their score, of the LSE and of the exponential.
    room = [16 * x for x in kernel_gradients.slack(call, parts)]
    for name, x, most in zip(("dq", "dk", "dv"), got, room, strict=True):
        error = np.linalg.norm(x - getattr(exact, name))
        assert error <= most, (name, error, most)
    return None


def check_gradients(call, **how):
    """Hold gradients against the definition."""
    got = gradients(call, **how)
    compare(call, got)
    return got


def check_spoiled(call, **how):
    """Hold each element of gradients against float64, and where there is none."""
    with np.errstate(all="ignore"):
        found = dict(zip("qkv", gradients(call, **how), strict=True))
        options = dict(call.options)
        more = [options.pop(name, None) for name in ("bias", "mask")]
        definition = strategies.Case(*call[:3], *more, options=options)
        hold_each(definition, found, call.dout, call.dlse, strategies.UNIT[call.q.dtype])


def check_numbers(call, pair_bias, **how):
    """Hold gradients, that of a number for each pair among them, against the definition."""
    seen, bias = call.options["mask"], call.options.get("bias")
    dense = with_pairs(pair_bias, seen) + (0 if bias is None else bias)
    call = call._replace(options={**call.options, "bias": dense})
    *got, dbias = gradients(
        call._replace(options={**call.options, "bias": bias}), pair_bias=pair_bias, **how
    )
    compare(call, got)
    x = Parts.of(call, np.float64)
    out = (x.p @ x.v).astype(call.q.dtype).astype(np.float64)
    delta = (x.dout * out).sum(-1) - (0 if call.dlse is None else call.dlse)
    ds = (x.p * (x.dout @ x.v.swapaxes(2, 3) - delta[..., None]))[..., seen]
    shape = (1,) * (ds.ndim - pair_bias.ndim) + pair_bias.shape
    axes = tuple(i for i, n in enumerate(shape) if n == 1 and ds.shape[i] > 1)
    want = ds.sum(axis=axes, keepdims=True).reshape(pair_bias.shape)
    size = np.abs(ds).sum(axis=axes, keepdims=True).reshape(pair_bias.shape)
    np.testing.assert_allclose(dbias, want, rtol=0, atol=2e-5 * (1 + size.max()))
    return dbias
