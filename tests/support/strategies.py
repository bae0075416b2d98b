"""Attention problems drawn by hypothesis, for the CPU and the GPU, and how results are compared.

A case is drawn as shapes, options and a seed; the numbers come from the seed.
"""

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from fa_cupy import reference

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = (np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64))
LAYOUTS = ("dense", "blhd", "transposed", "steps", "rows", "reversed", "upward", "offset")

# Legal options at the ends of float32 and float64 under which scores of ordinary data are finite.
EXTREMES = (
    {"softcap": 5e-324},
    {"softcap": 1e30},
    {"softcap": 1e39},
    {"softcap": 1.7e308},
    {"scale": 5e-324},
    {"scale": 1e-300, "softcap": 0.0},
    {"scale": 5e-324, "softcap": 30.0},
    {"scale": 1e300, "softcap": 1e-300},
    {"scale": -1e300, "softcap": 5.0},
    {"scale": 1e-300, "softcap": 1e300},
)

# Round-off of one element: half the spacing at 1.
UNIT = {dtype: float(ml_dtypes.finfo(dtype).eps) / 2 for dtype in DTYPES}


def by_dtype(*dtypes):
    """Arguments for `pytest.mark.parametrize` over dtypes."""
    return {"argnames": "dtype", "argvalues": dtypes or DTYPES, "ids": lambda d: d.name}


def normal(rng, shape, dtype):
    """N(0, 1) numbers of any of the four dtypes."""
    return np.asarray(rng.standard_normal(shape)).astype(dtype)


def to_numpy(x):
    """A NumPy or CuPy array as a NumPy array."""
    return x.get() if hasattr(x, "get") else np.asarray(x)


def lay(xp, array, layout):
    """`array` in the namespace `xp`, lying in memory as `layout` says; what lies between is NaN."""
    if layout == "blhd" and array.ndim >= 3:
        return xp.asarray(np.ascontiguousarray(array.swapaxes(-3, -2))).swapaxes(-3, -2)
    if layout == "transposed":
        return xp.asarray(np.ascontiguousarray(array.swapaxes(-2, -1))).swapaxes(-2, -1)
    if layout in ("steps", "rows"):
        axis = -1 if layout == "steps" else -2
        shape = list(array.shape)
        shape[axis] *= 2
        wide = np.full(shape, np.nan).astype(array.dtype)
        index = (..., slice(None, None, 2), *[slice(None)] * (-1 - axis))
        wide[index] = array
        return xp.asarray(wide)[index]
    if layout in ("reversed", "upward"):
        index = (..., slice(None, None, -1), *[slice(None)] * (layout == "upward"))
        return xp.asarray(np.ascontiguousarray(array[index]))[index]
    if layout == "offset":  # one element past where the allocator aligns
        flat = np.full(array.size + 1, np.nan).astype(array.dtype)
        flat[1:] = array.reshape(-1)
        return xp.asarray(flat)[1:].reshape(array.shape)
    return xp.asarray(np.ascontiguousarray(array))


@dataclass
class Case:
    """An attention call: arrays as NumPy arrays, how they are to lie in memory, and options."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    bias: np.ndarray | None = None
    mask: np.ndarray | None = None
    options: dict[str, Any] = field(default_factory=dict)
    layouts: tuple[str, ...] = ("dense",) * 5
    with_out: bool = False

    @property
    def arrays(self):
        """The five arrays."""
        return self.q, self.k, self.v, self.bias, self.mask

    def native(self, xp):
        """The five arrays in the namespace `xp`, each in its layout."""
        pairs = zip(self.arrays, self.layouts, strict=True)
        return [
            None if a is None else lay(xp, a, how if a.ndim > 1 else "dense") for a, how in pairs
        ]


def check_against_reference(case, out, lse, rounded=0.0):
    """Compare output and log-sum-exp with float64, element by element.

    The bound is what arithmetic allows: the weights and the output are rounded to the dtype, and
    scores carry an error of float32 (float64) that grows with the terms they are summed from.
    Where all numbers are rounded first, `rounded` is by how much, relatively.
    """
    dtype = case.q.dtype
    want, want_lse = reference.attention(*case.arrays, **case.options)
    assert out.dtype == dtype
    assert out.shape == want.shape
    assert lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    assert lse.shape == want_lse.shape
    out, lse = out.astype(np.float64), lse.astype(np.float64)
    np.testing.assert_array_equal(np.isfinite(lse), np.isfinite(want_lse))
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    np.testing.assert_array_equal(np.isfinite(out), np.isfinite(want))

    clean = [np.nan_to_num(x.astype(np.float64), posinf=0, neginf=0) for x in case.arrays[:3]]
    terms = np.abs(clean[0]).max(initial=0) * np.abs(clean[1]).sum(-1).max(initial=0)
    scale = case.options.get("scale")
    score = terms * (abs(scale) if scale is not None else case.q.shape[-1] ** -0.5 if terms else 0)
    unit = rounded or UNIT[DTYPES[3] if dtype == np.float64 else DTYPES[2]]
    if case.options.get("softcap"):  # no error goes beyond that of one cap for the other
        score = min(score, 2 * case.options["softcap"] / (8 * unit))
        if not all(np.isfinite(x.astype(np.float64)).all() for x in case.arrays[:2]):
            # What an infinite product scores; an infinite bound times a spread of 0 would be NaN.
            score = max(score, min(2 * case.options["softcap"], 1e290))
    if case.bias is not None:
        bias = case.bias.astype(np.float64)
        score += np.abs(bias[np.isfinite(bias)]).max(initial=0)
    if case.options.get("sinks") is not None:
        sinks = case.options["sinks"].astype(np.float64)
        score += np.abs(sinks[np.isfinite(sinks)]).max(initial=0)
    slack = 8 * unit * (8 + score)
    largest = np.abs(clean[2]).max(initial=0)
    spread = reference.attention(
        *case.arrays[:2], np.abs(clean[2]), *case.arrays[3:], **case.options
    )
    bound = (3 * max(UNIT[dtype], rounded) + slack) * spread[0] + (
        dtype == np.float16
    ) * 2.0**-23 * (1 + largest)
    finite = np.isfinite(want)
    error = np.abs(out[finite] - want[finite])
    assert (error <= bound[finite]).all(), (error / bound[finite]).max()
    finite = np.isfinite(want_lse)
    # A softcap at the end of the range of float32 (float64) is lowered, to keep room for the bias.
    far = float(np.finfo(np.float64 if dtype == np.float64 else np.float32).max) * 2.0**-24
    error = np.abs(np.clip(lse[finite], -far, far) - np.clip(want_lse[finite], -far, far))
    assert (error <= slack).all(), error.max()


_SMALL = st.integers(1, 40)
_LENGTH = _SMALL | st.sampled_from([1, 16, 63, 64, 65, 127, 128, 129, 200])
_DIM = _SMALL | st.sampled_from([8, 16, 32, 64, 72, 96, 128, 136])
_RARELY = st.sampled_from([False] * 12 + [True])


@st.composite
def cases(draw, dtypes=DTYPES, max_batch=12, few_builds=False, biased=None, masked=None):
    """Attention problems: odd, tiny and empty shapes, grouped heads, broadcasting, any option.

    With `few_builds` dims are up to 64, and there is one kind of bias for each dim of kernels, so
    that compiling does not take more time than checking. Whether there is a bias, or a mask, is
    drawn where nothing says so.
    """
    dtype = draw(st.sampled_from(dtypes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    q_len, k_len = draw(_LENGTH), draw(_LENGTH)
    if draw(st.booleans()):
        k_len = q_len
    elif draw(_RARELY):  # many tiles
        k_len = draw(st.sampled_from([400, 1000, 2100]))
    dims = st.integers(1, 32) | st.just(64) if few_builds else _DIM
    head_dim, v_dim = draw(dims), draw(dims)
    if draw(st.booleans()):
        v_dim = head_dim
    if draw(_RARELY):
        which = draw(st.integers(0, 3))
        sizes = [q_len, k_len, head_dim, v_dim]
        sizes[which] = 0
        q_len, k_len, head_dim, v_dim = sizes

    batch, (q_batch, k_batch, v_batch) = draw(batches(max_batch))
    q = normal(rng, (*q_batch, q_len, head_dim), dtype)
    k = normal(rng, (*k_batch, k_len, head_dim), dtype)
    v = normal(rng, (*v_batch, k_len, v_dim), dtype)
    scores = (*batch, q_len, k_len)
    bias = mask = None
    if draw(st.booleans()) if biased is None else biased:
        kinds = _bias_kinds(scores, dtype, max(head_dim, v_dim), few_builds)
        bias = normal(rng, *draw(kinds))
        if draw(st.booleans()):
            bias[rng.random(bias.shape) < draw(st.sampled_from([0.1, 0.9]))] = -np.inf
    if draw(st.booleans()) if masked is None else masked:
        density = draw(st.sampled_from([0.0, 0.05, 0.5, 0.95, 1.0]))
        mask = rng.random(draw(broadcastable(scores))) < density
    if draw(_RARELY):  # something that is not finite, attended to or not
        for x in (q, k, v):
            x[rng.random(x.shape) < draw(st.sampled_from([0.0, 0.001, 0.02]))] = draw(
                st.sampled_from([np.nan, np.inf, -np.inf])
            )
    layouts = st.sampled_from(LAYOUTS)
    return Case(
        *(q, k, v, bias, mask),
        options=draw(options(q_len, k_len)),
        layouts=tuple(draw(layouts) for _ in range(5)),
        with_out=draw(st.booleans()),
    )


@st.composite
def _bias_kinds(draw, scores, dtype, dim, few=False):
    """Shape and dtype of a bias for scores of that shape.

    Kernels have a build for each dtype and for each set of axes, which takes seconds to compile:
    with 16-bit arrays, and if there are to be `few`, there is one kind of bias for each dim that
    kernels are built for.
    """
    shape = draw(broadcastable(scores))
    if len(shape) < 2 or not (few or dtype in DTYPES[:2]):
        return shape, draw(st.just(dtype) if few else st.sampled_from(DTYPES))
    (q_len, k_len), number = scores[-2:], -(-dim // 32) + (dtype == BFLOAT16)
    rows, own = [
        ((1, k_len), DTYPES[2]), ((q_len, k_len), dtype),
        ((q_len, k_len), DTYPES[2]), ((q_len, 1), DTYPES[3]),
    ][number % 4]  # fmt: skip
    return (*shape[:-2], *rows), own


@st.composite
def options(draw, q_len, k_len):
    """Options of `attention` that are valid for these lengths."""
    chosen: dict[str, Any] = {}
    if draw(st.booleans()):
        chosen["scale"] = draw(st.sampled_from([0.0, -0.5, 1.0]) | st.floats(-1.5, 1.5))
    if draw(st.booleans()):
        chosen["is_causal"] = True
    if draw(st.booleans()):
        side = st.none() | st.integers(0, 80)
        chosen["window"] = (draw(side), draw(side))
    align = st.sampled_from(["top_left", "bottom_right"])
    chosen["causal_align"] = draw(align if q_len != k_len else st.none() | align)
    if draw(_RARELY):
        chosen["softcap"] = draw(st.floats(0.25, 50))
    if draw(_RARELY):  # the ends of what the arithmetic can hold, where scores are 0 or capped
        chosen |= draw(st.sampled_from(EXTREMES))
    return chosen


@st.composite
def batches(draw, max_batch):
    """The batch shape of the result, and those of q, k and v."""
    rank = draw(st.integers(0, 3))
    batch = tuple(draw(st.lists(st.integers(1, 4), min_size=rank, max_size=rank)))
    while np.prod(batch, dtype=int) > max_batch:
        batch = (1, *batch[1:]) if batch[0] > 1 else (*batch[:-1], 1)
    if rank and draw(_RARELY):
        batch = (0, *batch[1:])
    if rank >= 2 and draw(st.booleans()):  # grouped heads
        heads, group = batch[-1] or 1, draw(st.integers(1, 4))
        batch = (*batch[:-1], heads * group)
        fewer = (*batch[:-1], heads)
        return batch, (batch, fewer, fewer)
    own = [batch]
    for _ in range(2):
        kept = [draw(st.booleans()) for _ in batch]
        shape = tuple(n if keep else 1 for n, keep in zip(batch, kept, strict=True))
        own.append(shape[draw(st.integers(0, rank)) if rank and draw(st.booleans()) else 0 :])
    return batch, draw(st.permutations(own))


@st.composite
def broadcastable(draw, shape):
    """A shape that broadcasts to `shape`: axes of length 1, leading axes left out."""
    kept = [draw(st.booleans()) or draw(st.booleans()) for _ in shape]
    own = tuple(n if keep else 1 for n, keep in zip(shape, kept, strict=True))
    return own[draw(st.sampled_from([0, 0, 0, *range(len(shape) + 1)])) :]
