"""Attention backward by its definition, and how kernels are held against it."""

from typing import NamedTuple

import numpy as np

from fa_cupy import reference
from fa_cupy.gpu.variants_bwd import select_bwd
from validation.emulator.backward import attention_backward
from validation.emulator.seeds import DTYPES, draw


class Case(NamedTuple):
    """Arrays (batch, heads, length, dim) of a call, and its options."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    dlse: np.ndarray | None
    options: dict


def case(dtype, heads, lengths, dims, *, dlse=False, scale=1.0, seed=0, layout=None, **options):
    """A call of random numbers; `layout` says how each array lies in memory."""
    (q_heads, k_heads), (q_len, k_len), (dim, v_dim) = heads, lengths, dims
    shapes = [(q_heads, q_len, dim), (k_heads, k_len, dim), (k_heads, k_len, v_dim)]
    arrays = [
        draw(2, *shape, dtype=DTYPES[dtype], seed=4 * seed + i, scale=scale)
        for i, shape in enumerate([*shapes, (q_heads, q_len, v_dim)])
    ]
    if layout == "blhd":
        arrays = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in arrays]
    given = draw(2, q_heads, q_len, dtype=np.dtype(np.float32), seed=seed + 9) if dlse else None
    return Case(*arrays, given, options)


class Gradients(NamedTuple):
    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


def gradients(call, low=None):
    """In float64; with a type in `low`, weights and dS rounded to it and sums in float32."""
    real = np.float64 if low is None else np.float32

    def rounded(x):
        return x if low is None else x.astype(low).astype(real)

    q, k, v, dout = (x.astype(real) for x in call[:4])
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    scale = real(q.shape[-1] ** -0.5)
    seen = reference.visible(q.shape[2], k.shape[2], **call.options)
    s = np.where(seen, scale * (q @ k.swapaxes(2, 3)), -np.inf)
    top = s.max(axis=-1, keepdims=True, initial=-np.inf)
    top = np.where(top == -np.inf, 0, top)
    e = np.exp(s - top)
    total = e.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        p = np.where(total > 0, e / total, 0)
        lse = (np.log(total) + top)[..., 0]
    out = rounded(rounded(p) @ v)
    delta = (dout * out).sum(axis=-1)
    if call.dlse is not None:
        delta = delta - call.dlse
    ds = p * (dout @ v.swapaxes(2, 3) - delta[..., None])

    def of_keys(x):
        return x.reshape(*x.shape[:1], -1, group, *x.shape[2:]).sum(axis=2)

    dq = scale * (rounded(ds) @ k)
    dk = of_keys(scale * (rounded(ds).swapaxes(2, 3) @ q))
    dv = of_keys(rounded(p).swapaxes(2, 3) @ dout)
    return Gradients(out, lse, *map(rounded, (dq, dk, dv)))


def solve(call, rows=None, **how):
    """The kernels' dq, dk and dv; `how` is for `validation.emulator.backward`."""
    dtype = call.q.dtype
    rows = rows or select_bwd(dtype.name, call.q.shape[-1], call.v.shape[-1])
    exact = gradients(call)
    out = np.empty_like(call.dout)  # and laid out as it
    out[...] = exact.out.astype(dtype)
    q, k, v, dout, dlse, options = call
    return attention_backward(rows, dout, q, k, v, out, exact.lse, dlse, **how, **options)


def check(call, **how):
    """Hold the kernels' gradients against the definition, beside plain ones in low precision."""
    got = solve(call, **how)
    exact, plain = gradients(call), gradients(call, call.q.dtype)
    for name, x in zip(("dq", "dk", "dv"), got, strict=True):
        want = getattr(exact, name)
        error, limit = (
            np.linalg.norm(y - want) for y in (x.astype(np.float64), getattr(plain, name))
        )
        # Where a row has one key its dS is 0, but for how sums of products are rounded.
        room = 1e-6 * np.sqrt(want.size) * np.abs(call.v.astype(np.float64)).max()
        assert np.isfinite(error), name
        assert error <= 1.2 * limit + room, (name, error, limit)
    return got
