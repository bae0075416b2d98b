"""Calls with rows whose log-sum-exp is too large for weights to be computed from it."""

import numpy as np

from tests.support.kernel_gradients import case

# Of a query's first number and a key's, by dtype: a score whose float32 LSE is too coarse for
# weights of the dtype, and whose product with log2(e) float32 does not hold.
LARGE = {"float16": (3 * 2.0**12, 8.0), "bfloat16": (3 * 2.0**18, 4.0)}


def far_case(dtype, heads, lengths, dim, every=7, seed=0, sizes=None, **options):
    """A call of which every so many queries have scores that are far.

    The best keys of a query have the same score, which is exact, and others are far below.
    """
    call = case(dtype, heads, lengths, (dim, dim), batch=1, dlse=True, seed=seed)
    of_queries, of_keys = sizes or LARGE[dtype]
    rng = np.random.default_rng(seed)
    call.k[..., 0] = (of_keys * rng.choice([1, 0.5, -1], call.k.shape[:-1])).astype(call.k.dtype)
    call.q[..., 0] = 0
    call.q[..., ::every, :] = 0
    signs = rng.choice([-1, 1], call.q[..., ::every, 0].shape)
    call.q[..., ::every, 0] = (of_queries * signs).astype(call.q.dtype)
    call.dout[...] = (call.dout.astype(np.float32) / 16).astype(call.dout.dtype)
    return call._replace(dlse=call.dlse / 16, options={"scale": 1.0, **options})


def padded_case(dtype, lengths, dim, pad, heads=(2, 2), every=3, **options):
    """A call where a bias puts all scores of every so many queries far below 0, and equals them."""
    call = case(dtype, heads, lengths, (dim, dim), batch=1)
    bias = np.zeros((1, 1, *lengths), np.asarray(pad).dtype)
    bias[..., ::every, :] = pad
    call.q[..., ::every, :] = 0
    return call._replace(options={"bias": bias, **options})
