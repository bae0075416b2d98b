"""Causal products drawn by hypothesis, and plain definitions to hold their results against."""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import note
from hypothesis import strategies as st

from fa_cupy import causal_product, causal_product_backward, reference
from tests.support import keyed_cases
from tests.support.strategies import DTYPES, LAYOUTS, UNIT, batches, lay, normal, to_numpy

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


def solve(xp, case):
    """Run a case on `xp`; inputs must stay as they are and every element of `out` be written."""
    q, k, v, initial = arrays = case.native(xp)
    before = [None if a is None else to_numpy(a).tobytes() for a in arrays]
    shape = reference.causal_product(*case.arrays)[0].shape
    poison = np.full(shape, np.nan).astype(case.q.dtype)
    out = xp.asarray(poison) if case.with_out else None
    result, state = causal_product(
        q, k, v, initial_state=initial, return_state=True, reverse=case.reverse, out=out
    )
    assert out is None or result is out
    assert before == [None if a is None else to_numpy(a).tobytes() for a in arrays]
    return to_numpy(result), to_numpy(state)


def describe(case):
    shapes = [None if a is None else (a.shape, a.dtype.name) for a in case.arrays]
    note(f"{shapes} reverse={case.reverse} {case.layouts}")


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


def check_gradients(xp, case, with_dstate=False, rounded=False):
    """Compare gradients with float64, element by element; see `check_product`.

    What is not finite is left alone: which elements it reaches is another test's matter.
    """
    rng = np.random.default_rng(5)
    q, k, v, initial = case.native(xp)
    options = {"initial_state": initial, "reverse": case.reverse}
    out, last = causal_product(q, k, v, return_state=True, **options)
    dtype = case.q.dtype
    dout = normal(rng, out.shape, dtype)
    dstate = normal(rng, last.shape, state_dtype(dtype)) if with_dstate else None
    device_dstate = None if dstate is None else xp.asarray(dstate)
    got = causal_product_backward(xp.asarray(dout), q, k, v, dstate=device_dstate, **options)
    given_arrays = [a for a in case.arrays if a is not None]
    assert len(got) == len(given_arrays)
    for x, mine in zip(given_arrays, got, strict=True):
        assert mine.dtype == x.dtype
        assert mine.shape == x.shape
    hold_gradients(case, [to_numpy(x) for x in got], dout, dstate, rounded)


def hold_gradients(case, got, dout, dstate, rounded=False):
    """Compare gradients with float64, unless something is not finite; see `check_gradients`."""
    if not all(np.isfinite(a.astype(float)).all() for a in case.arrays if a is not None):
        return
    dtype = case.q.dtype
    arrays = (dout, *case.arrays, dstate)
    want = gradients(*arrays, case.reverse)
    sizes = (None if a is None else np.abs(a.astype(float)) for a in arrays)
    spread = gradients(*sizes, case.reverse)
    slack = 16 * UNIT[state_dtype(dtype)]
    # A gradient is a product, of 16 bits where those are `rounded`, and then a sum of such.
    of_terms = 3.5 * UNIT[dtype] if rounded else slack
    tiny = (dtype == DTYPES[0]) * 2.0**-24 * (1 + case.q.shape[-2] * rounded)
    for i, (mine, theirs, terms) in enumerate(zip(got, want, spread, strict=True)):
        unit, own = (slack, slack) if i == 3 else (2 * UNIT[dtype], of_terms)
        check_close(mine, theirs, unit * np.abs(theirs) + own * terms + tiny)


@dataclass
class Packed:
    """A call with packed sequences: a case without a state, and the states and offsets of them."""

    case: Case
    offsets: np.ndarray
    initial: np.ndarray | None

    @property
    def spans(self):
        return [slice(int(a), int(b)) for a, b in itertools.pairwise(self.offsets)]

    def options(self, xp):
        """Those of a call in the namespace `xp`."""
        states = None if self.initial is None else xp.asarray(self.initial)
        offsets = xp.asarray(self.offsets)
        return {"initial_state": states, "reverse": self.case.reverse, "q_offsets": offsets}


def _state(states, s):
    return None if states is None else states[..., s, :, :]


@st.composite
def packed_cases(draw, dtypes=DTYPES):
    """Cases of `cases` with packed sequences, each with its state if there are states."""
    case = draw(cases(dtypes))
    bounds = draw(keyed_cases.offsets(draw(st.integers(0, 7)), case.q.shape[-2]))
    initial, case.initial = case.initial, None
    if initial is not None:
        rng = np.random.default_rng(draw(st.integers(0, 100)))
        shape = *initial.shape[:-2], len(bounds) - 1, *initial.shape[-2:]
        initial = normal(rng, shape, initial.dtype)
    return Packed(case, bounds, initial)


def check_packed(xp, packed, with_dstate=False, rounded=False):
    """Compare products of packed sequences and their gradients, each sequence by itself."""
    case, rng = packed.case, np.random.default_rng(5)
    q, k, v, _ = case.native(xp)
    options = packed.options(xp)
    result = causal_product(q, k, v, return_state=True, **options)
    dout, dstate = (normal(rng, x.shape, x.dtype) for x in result)
    dstate = dstate if with_dstate else None
    grads = causal_product_backward(
        xp.asarray(dout), q, k, v,
        dstate=None if dstate is None else xp.asarray(dstate), **options
    )  # fmt: skip
    out, state, *grads = map(to_numpy, (*result, *grads))
    outside = np.ones(out.shape[-2], bool)
    for s, rows in enumerate(packed.spans):
        outside[rows] = False
        alone = [x[..., rows, :] for x in (case.q, case.k, case.v)]
        own = Case(*alone, _state(packed.initial, s), case.reverse)
        check_product(own, out[..., rows, :], state[..., s, :, :], rounded)
        got = [x[..., rows, :] for x in grads[:3]] + [x[..., s, :, :] for x in grads[3:]]
        hold_gradients(own, got, dout[..., rows, :], _state(dstate, s), rounded)
    for x in (out, *grads[:3]):
        assert not x[..., outside, :].astype(float).any()


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


def plain_states(k, v, ends, initial=None, reverse=False):
    """States in float64, one after the other."""
    k, v = k.astype(float), v.astype(float)
    spans = [slice(end, None) if reverse else slice(None, end) for end in ends]
    found = [k[..., s, :].swapaxes(-1, -2) @ v[..., s, :] for s in spans]
    return [x if initial is None else x + initial for x in found]


FEATURES = {
    "elu1": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
    "relu": lambda x: np.maximum(x, 0),
    "exp": np.exp,
    "identity": lambda x: x,
}


def plain_attention(q, k, v, feature=FEATURES["elu1"], eps=1e-6):
    """Linear attention in float64 from all of its weights."""
    q, k, v = (x.astype(float) for x in (q, k, v))
    shape = (*q.shape[:-1], v.shape[-1])
    q, k, v = feature(q), expand_heads(feature(k), shape), expand_heads(v, shape)
    weights = np.tril(q @ k.swapaxes(-1, -2))
    return weights @ v / (weights.sum(axis=-1, keepdims=True) + eps)
