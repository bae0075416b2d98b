"""Data of all sizes for attention of float32, which kernels split into pairs of float16."""

import numpy as np


def powers(count, least, most, seed=0):
    """A column of powers of ten."""
    exponents = np.random.default_rng(seed).integers(least, most, (count, 1), endpoint=True)
    return np.float32(10.0) ** exponents.astype(np.float32)


def with_first(x, value):
    """The array with this value in its first three columns."""
    return np.where(np.arange(x.shape[-1]) < 3, value, x)


def with_number(x, row, value):
    """The array with this value in a column of a row."""
    x = x.copy()
    x[..., row, 5] = value
    return x


#: What is done to normal data, and whether rows of gradients differ in size.
DATA = {
    "normal": (lambda dout, q, k, v: (dout, q, k, v), False),
    "offset values": (lambda dout, q, k, v: (dout, q, k, v + 100), False),
    "offset scores": (lambda dout, q, k, v: (dout, q + 1, k + 1, v), False),
    "offset gradients": (lambda dout, q, k, v: (dout + 30, q, k, v), False),
    "small values": (lambda dout, q, k, v: (dout, q, k, v * 1e-30), False),
    "large values": (lambda dout, q, k, v: (dout, q, k, v * 1e30), False),
    "small gradients": (lambda dout, q, k, v: (dout * 1e-30, q, k, v), False),
    "large gradients": (lambda dout, q, k, v: (dout * 1e30, q, k, v), False),
    "small queries": (lambda dout, q, k, v: (dout, q * 1e-30, k * 1e30, v * 1e-30), False),
    "large queries": (lambda dout, q, k, v: (dout, q * 1e30, k * 1e-30, v), False),
    "gradients of all sizes": (
        lambda dout, q, k, v: (dout * powers(dout.shape[-2], -30, 30), q, k, v), True,
    ),
    "gradients that jump": (
        lambda dout, q, k, v: (
            dout * np.where(np.arange(dout.shape[-2]) % 32 < 24, 1e30, 1e-30)[:, None], q, k, v,
        ),
        True,
    ),
    "values of all sizes": (
        lambda dout, q, k, v: (dout, q, k, v * powers(v.shape[-2], -30, 30)), False,
    ),
    "keys of all sizes": (
        lambda dout, q, k, v: (dout, q, k * powers(k.shape[-2], -30, 0), v), False,
    ),
    "queries of all sizes": (
        lambda dout, q, k, v: (dout, q * powers(q.shape[-2], -30, 0), k, v), False,
    ),
    "large numbers that meet zeros": (
        lambda dout, q, k, v: (
            dout, with_first(q, 1e30), with_first(k, 0), v,
        ),
        False,
    ),
    "large gradients that meet zeros": (
        lambda dout, q, k, v: (
            with_first(dout, 1e25), q, k, with_first(v, 0),
        ),
        False,
    ),
    "a large number in a gradient": (
        lambda dout, q, k, v: (with_number(dout, 77, 1e9), q, k, v), False,
    ),
    "a large number in a value": (
        lambda dout, q, k, v: (dout, q, k, with_number(v, 77, 1e9)), False,
    ),
    # Nearly all its scores are far above others, or far below; one loses digits.
    "a large number in a key": (
        lambda dout, q, k, v: (dout, with_number(q, 70, 1e-12), with_number(k, 61, 1e9), v), False,
    ),
    "columns of all sizes": (
        lambda dout, q, k, v: (
            dout, q * powers(q.shape[-1], -15, 15).T, k / powers(q.shape[-1], -15, 15).T, v,
        ),
        False,
    ),
}  # fmt: skip
