"""Causal products drawn by hypothesis, and plain definitions to hold their results against."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from fa_cupy import reference
from tests.strategies import DTYPES, LAYOUTS, UNIT, batches, lay, normal

SINGLE, DOUBLE = DTYPES[2:]


def state_dtype(dtype):
    return DOUBLE if dtype == DOUBLE else SINGLE


def draw(*shapes, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [normal(rng, shape, dtype) for shape in shapes]


@dataclass
class Case:
    """A call: arrays as NumPy arrays, how they are to lie in memory, and options."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    initial: np.ndarray | None = None
    reverse: bool = False
    layouts: tuple[str, ...] = ("dense",) * 4
    with_out: bool = False

    @property
    def arrays(self):
        return self.q, self.k, self.v, self.initial

    def native(self, xp):
        """The four arrays in the namespace `xp`, each in its layout."""
        pairs = zip(self.arrays, self.layouts, strict=True)
        return [None if a is None else lay(xp, a, how) for a, how in pairs]


_LENGTH = st.integers(0, 40) | st.sampled_from([63, 64, 65, 128, 129, 200, 300])
_DIM = st.integers(1, 20) | st.sampled_from([0, 1, 8, 32, 64, 72])
_RARELY = st.sampled_from([False] * 8 + [True])


@st.composite
def cases(draw, dtypes=DTYPES):
    """Products of odd, tiny and empty shapes, grouped heads, broadcasting, states."""
    dtype = draw(st.sampled_from(dtypes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    length, qk_dim, v_dim = draw(_LENGTH), draw(_DIM), draw(_DIM)
    batch, own = draw(batches(8))
    q, k, v = (
        normal(rng, (*shape, length, dim), dtype)
        for shape, dim in zip(own, (qk_dim, qk_dim, v_dim), strict=True)
    )
    initial = None
    if draw(st.booleans()):
        kept = draw(st.sampled_from([own[1], own[2], batch, batch[1:], ()]))
        initial = normal(rng, (*kept, qk_dim, v_dim), state_dtype(dtype))
    if draw(_RARELY):
        for x in (q, k, v):
            bad = rng.random(x.shape) < draw(st.sampled_from([0.0, 0.002, 0.02]))
            x[bad] = draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    layouts = st.sampled_from(LAYOUTS)
    return Case(
        *(q, k, v, initial),
        reverse=draw(st.booleans()),
        layouts=tuple(draw(layouts) for _ in range(4)),
        with_out=draw(st.booleans()),
    )


def check_product(case, out, state, rounded=False):
    """Compare output and state with float64, element by element.

    The bound is what arithmetic allows: the output is rounded to the dtype, and sums are of float32
    (float64), with an error that grows with the terms that they are made of; where scores and
    states are `rounded` to the dtype too, theirs does so.
    """
    dtype = case.q.dtype
    want, last = reference.causal_product(*case.arrays, reverse=case.reverse)
    sizes = [np.abs(np.nan_to_num(x.astype(float), posinf=0, neginf=0)) for x in case.arrays[:3]]
    largest = None if case.initial is None else np.abs(case.initial)
    spread, state_spread = reference.causal_product(*sizes, largest, reverse=case.reverse)
    assert out.dtype == dtype
    assert out.shape == want.shape
    assert state.dtype == state_dtype(dtype)
    slack = 16 * UNIT[state_dtype(dtype)]
    tiny = (dtype == DTYPES[0]) * 2.0**-24
    of_terms = 2.5 * UNIT[dtype] if rounded else slack
    check_close(out, want, 2 * UNIT[dtype] * np.abs(want) + of_terms * spread + tiny)
    state = expand_heads(state, last.shape)
    check_close(state, last, slack * state_spread)


def expand_heads(x, shape):
    """A state or an input with the batch axes of the output: heads repeated, others broadcast."""
    if len(shape) >= 4 and x.ndim >= 3 and 1 < x.shape[-3] < shape[-3]:
        x = np.repeat(x, shape[-3] // x.shape[-3], axis=-3)
    return np.broadcast_to(x, (*shape[:-2], *x.shape[-2:]))


def check_close(got, want, bound):
    got = got.astype(np.float64)
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    finite = np.isfinite(want)
    error = np.abs(got[finite] - want[finite])
    assert (error <= bound[finite]).all(), (error / bound[finite]).max()


def gradients(dout, q, k, v, initial=None, dstate=None, reverse=False) -> list[Any]:
    """Gradients in float64 from the matrix of scores, summed over what was broadcast."""
    arrays = [x.astype(np.float64) for x in (q, k, v)]
    shape = dout.shape
    grad = dout.astype(np.float64)
    wide_q, wide_k, wide_v = (expand_heads(x, shape) for x in arrays)
    state = np.zeros((q.shape[-1], v.shape[-1])) if initial is None else initial
    wide_state = expand_heads(state.astype(np.float64), shape)
    seen = (np.triu if reverse else np.tril)(np.ones((q.shape[-2],) * 2))
    scores, dscores = (
        seen * (a @ b.swapaxes(-1, -2)) for a, b in ((wide_q, wide_k), (grad, wide_v))
    )
    dq = dscores @ wide_k + grad @ wide_state.swapaxes(-1, -2)
    dk = dscores.swapaxes(-1, -2) @ wide_q
    dv = scores.swapaxes(-1, -2) @ grad
    dinitial = wide_q.swapaxes(-1, -2) @ grad
    found = [sum_to(x, a.shape) for x, a in ((dq, q), (dk, k), (dv, v), (dinitial, state))]
    if dstate is not None:  # a state is shared by the queries of a group
        axes = dstate.shape[:-2]
        k, v = (expand_heads(x, (*axes, *x.shape[-2:])) for x in arrays[1:])
        found[1] = found[1] + sum_to(v @ dstate.swapaxes(-1, -2), found[1].shape)
        found[2] = found[2] + sum_to(k @ dstate, found[2].shape)
        found[3] = found[3] + sum_to(dstate.astype(np.float64), found[3].shape)
    return found[: 3 if initial is None else 4]


def sum_to(x, shape):
    """Sum over the axes along which an array of `shape` was broadcast or its heads repeated."""
    while x.ndim > len(shape):
        x = x.sum(axis=0)
    for axis, size in enumerate(shape[:-2]):
        if size == 1:
            x = x.sum(axis=axis, keepdims=True)
        elif size != x.shape[axis]:
            parts = np.split(x, size, axis=axis)
            x = np.concatenate([part.sum(axis=axis, keepdims=True) for part in parts], axis=axis)
    return x
