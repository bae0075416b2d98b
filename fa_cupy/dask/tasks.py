"""What the tasks of a graph compute: functions of chunks, which are arrays of NumPy or CuPy.

Results of attention over some keys are pairs of an output and a log-sum-exp, both in float32
(float64 for float64 input).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import fa_cupy

Array = Any
Part = tuple[Array, Array]


class Visible(NamedTuple):
    """The queries and keys of a tile that see each other, and the window between these."""

    rows: slice
    keys: slice
    window: tuple[int | None, int | None] | None


def visible(rows: int, keys: int, lower: int | None, upper: int | None) -> Visible | None:
    """Return what is to be computed of a tile; None if no query sees a key.

    Query i sees key j if ``i + lower <= j <= i + upper``; None means no bound. Without the first
    and last queries and keys, those that see nothing, each query may stand at the key of its own
    number: so a window of `fa_cupy.attention` can express every such band.

    Parameters
    ----------
    rows, keys : int
        Numbers of queries and keys of the tile.
    lower, upper : int or None
        Bounds, counted within the tile.
    """
    lower = None if lower is None or lower <= 1 - rows else lower
    upper = None if upper is None or upper >= keys - 1 else upper
    first, last, begin, end = 0, rows, 0, keys
    if upper is not None:
        first, end = max(0, -upper), min(keys, rows + upper)
    if lower is not None:
        begin, last = max(0, lower), min(rows, keys - lower)
    if first >= last or begin >= end:
        return None
    shift = first - begin
    window = None
    if lower is not None or upper is not None:
        window = (
            None if lower is None else -(lower + shift),
            None if upper is None else upper + shift,
        )
    return Visible(slice(first, last), slice(begin, end), window)


def attend(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None,
    mask: Any,
    *,
    band: tuple[int | None, int | None],
    options: Mapping[str, Any],
) -> Part:
    """Return attention of the queries of a chunk over the keys of a chunk."""
    xp, half = _namespace(q), q.dtype.itemsize == 2
    if half and xp is np:
        # Every sum is in float32, and so is the output: rounded once, after the last merge.
        q, k, v = (x.astype(np.float32) for x in (q, k, v))
    seen = visible(q.shape[-2], k.shape[-2], *band)
    if seen is None:
        raise AssertionError("a tile without visible keys has no task")
    rows, keys, window = seen
    out, lse = fa_cupy.attention(
        q[..., rows, :], k[..., keys, :], v[..., keys, :], _part(bias, rows, keys),
        _part(mask, rows, keys), window=window, causal_align=None if window is None else "top_left",
        return_lse=True, **options,
    )  # fmt: skip
    out = out.astype(lse.dtype, copy=False)
    if out.shape[-2] == q.shape[-2]:
        return out, lse
    whole = empty(out, (*out.shape[:-2], q.shape[-2], out.shape[-1]), lse.dtype)
    whole[0][..., rows, :], whole[1][..., rows] = out, lse
    return whole


def merge(parts: Sequence[Part]) -> Part:
    """Return attention over the keys of all parts, in their order."""
    if len(parts) == 1:
        return parts[0]
    merged: Part = fa_cupy.merge_attention(*zip(*parts, strict=True))
    return merged


def finish(
    parts: Sequence[Part],
    sinks: Array | None,
    *,
    like: Array,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    sums: np.dtype[Any],
    with_lse: bool,
) -> Any:
    """Return the output of some queries, or a pair with the log-sum-exp.

    Parameters
    ----------
    parts : sequence of Part
        Over the keys that they see; none if they see none.
    sinks : array or None
    like : array
        Any of the library of the result.
    shape : tuple of int
        Of the output.
    dtype, sums : numpy.dtype
        Of the output and the log-sum-exp.
    with_lse : bool
    """
    with np.errstate(all="ignore"):
        out, lse = merge(parts) if parts else empty(like, shape, sums)
        if sinks is not None:
            xp = _namespace(sinks)
            out, nothing = (xp.broadcast_to(x, shape) for x in (out, xp.zeros((), sums)))
            lse, sinks = (xp.broadcast_to(x.astype(sums), shape[:-1]) for x in (lse, sinks))
            out, lse = merge([(out, lse), (nothing, sinks)])
        out = out.astype(dtype, copy=False)
        return (out, lse) if with_lse else out


def empty(like: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Part:
    """Return attention of queries that see no key."""
    out = np.zeros_like(like, shape=shape, dtype=dtype)
    return out, np.full_like(like, -np.inf, shape=shape[:-1], dtype=dtype)


def state_of(k: Array, v: Array) -> Array:
    """Return the state that the rows of a chunk add."""
    return fa_cupy.prefix_state(*_same_heads(k, v))


def normalised_state_of(k: Array, v: Array, *, feature_map: Any) -> Array:
    """Return the state that the rows of a chunk add to that of linear attention."""
    k, v = _same_heads(k, v)
    # One query costs next to nothing, and callables need not take arrays of no row.
    _, state = fa_cupy.linear_attention(
        k[..., :1, :], k, v, feature_map=feature_map, is_causal=False, return_state=True
    )
    return state


def add(state: Array, more: Array) -> Array:
    """Return the sum of two states."""
    x, y = _same_heads(state, more)
    return x + y


def causal_product(q: Array, k: Array, v: Array, state: Array | None, **options: Any) -> Array:
    """Return the causal product of a chunk, given the state before it."""
    return fa_cupy.causal_product(q, k, v, initial_state=state, **options)


def linear_attention(
    q: Array, k: Array, v: Array, state: Array | None, *, feature_map: Any, eps: float
) -> Array:
    """Return causal linear attention of a chunk, given the state before it."""
    return fa_cupy.linear_attention(q, k, v, feature_map=feature_map, eps=eps, initial_state=state)


def read_state(q: Array, state: Array, *, feature_map: Any, eps: float) -> Array:
    """Return linear attention of the queries of a chunk, given the state of all keys."""
    if callable(feature_map):
        q, feature_map = feature_map(q), "identity"
    k, v = (
        _namespace(q).zeros((*state.shape[:-2], 0, dim), q.dtype)
        for dim in (q.shape[-1], state.shape[-1] - 1)
    )
    return fa_cupy.linear_attention(
        q, k, v, feature_map=feature_map, eps=eps, is_causal=False, initial_state=state
    )


def merge_attention(count: int, *arrays: Array) -> Part:
    """Return `fa_cupy.merge_attention` of so many outputs, and as many log-sum-exps after them."""
    merged: Part = fa_cupy.merge_attention(arrays[:count], arrays[count:])
    return merged


def _namespace(x: Array) -> Any:
    """Return the module of the library of an array."""
    return np if isinstance(x, np.ndarray) else sys.modules["cupy"]


def _part(x: Any, rows: slice, keys: slice) -> Any:
    """Return what some queries and keys have of a bias or mask, whose axes may be broadcast."""
    if x is None:
        return None
    cuts = zip((rows, keys)[2 - min(2, len(x.shape)) :], x.shape[-2:], strict=True)
    where = tuple(slice(None) if size == 1 else cut for cut, size in cuts)
    return x[(..., *where)]


def _same_heads(x: Array, y: Array) -> tuple[Array, Array]:
    """Return both with one number of heads, where each of them has more than one.

    The axis before the last two is that of heads wherever its sizes differ, in a state of 3 axes
    too: other axes broadcast.
    """
    if min(x.ndim, y.ndim) < 3:
        return x, y
    m, n = x.shape[-3], y.shape[-3]
    if min(m, n) > 1:
        x = x.repeat(n // m, axis=-3) if n > m else x
        y = y.repeat(m // n, axis=-3) if m > n else y
    return x, y
