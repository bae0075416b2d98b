"""Functions made of a causal product and of operations that PyTorch and JAX differentiate."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fa_cupy.core import checks, linear_problem

Array = Any

_FEATURES = ("elu1", "relu", "exp", "identity")


class Library(NamedTuple):
    """What PyTorch and JAX have under different names.

    Attributes
    ----------
    xp : module
        `torch` or `jax.numpy`.
    constant : callable
        ``constant(x)`` is `x`, without a gradient.
    zeros : callable
        ``zeros(x, rows)`` has as many rows, and otherwise the shape and the dtype of `x`.
    product : callable
        ``product(q, k, v, initial_state, reverse)`` is the causal product, differentiable.
    require : callable
        ``require(name, **arrays)`` raises for what is no array of the library.
    check_features : callable
        ``check_features(name, q, k, x, y)`` raises as `linear_problem.check_features`.
    """

    xp: Any
    constant: Callable[[Array], Array]
    zeros: Callable[[Array, int], Array]
    product: Callable[..., Array]
    require: Callable[..., None]
    check_features: Callable[..., None]


def mapped(
    library: Library, name: str, feature_map: Any, q: Array, k: Array
) -> tuple[Array, Array]:
    """Return what a callable makes of `q` and `k`, or both as they are for a name of features."""
    if isinstance(feature_map, str) and feature_map in _FEATURES:
        return q, k
    if callable(feature_map):
        found = feature_map(q), feature_map(k)
        library.require(name, **dict(zip(linear_problem.FEATURES, found, strict=True)))
        library.check_features(name, q, k, *found)
        return found
    raise ValueError(
        f"{name}: feature_map is {checks.show(feature_map)}, "
        f"want one of {', '.join(map(repr, _FEATURES))} or a callable"
    )


def features(library: Library, feature_map: Any, x: Array) -> Array:
    """Return the features of rows of float32 or float64 for a name; for a callable, the rows.

    The branch that an element does not take makes no NaN of its gradient.
    """
    xp = library.xp
    if feature_map == "elu1":
        return xp.where(x > 0, x + 1, xp.exp(xp.where(x > 0, 0, x)))
    if feature_map == "relu":
        return xp.where(x <= 0, 0, x)
    return xp.exp(x) if feature_map == "exp" else x


def linear_attention(
    library: Library,
    x: Array,
    y: Array,
    v: Array,
    eps: float,
    initial: Array | None = None,
    *,
    is_causal: bool = True,
    return_state: bool = False,
) -> tuple[Array, Array | None]:
    """Return means of `v` with weights ``x @ y.mT``, all of float32 or float64, and the state.

    The weights are summed as one more column of values: of the values' own size, because a kernel
    may give a row of values one scale.
    """
    xp = library.xp
    column = library.constant(xp.ones_like(v[..., :1]) if v.shape[-1] else _column(library, v))
    state = None
    if return_state or not is_causal:
        state = y.mT @ xp.concatenate((v, column), -1)
        state = state if initial is None else state + initial
    if not is_causal:
        sums, unit = _read(x, state), 1.0
    else:
        unit = _unit(library, v)
        values = xp.concatenate((v, column * unit), -1)
        if initial is not None:
            initial = xp.concatenate((initial[..., :-1], initial[..., -1:] * unit), -1)
        sums = library.product(x, y, values, initial, False)
    out = sums[..., :-1] / (sums[..., -1:] / unit + eps)
    return out, state if return_state else None


def _read(x: Array, state: Array) -> Array:
    """Return ``x @ state``, where several heads of `x` may share one of the state."""
    if x.ndim < 4 or state.ndim < 3:
        return x @ state
    heads = state.shape[-3]
    if heads == x.shape[-3] or 1 in (heads, x.shape[-3]):
        return x @ state
    grouped = x.reshape(*x.shape[:-3], heads, x.shape[-3] // heads, *x.shape[-2:])
    sums = grouped @ state[..., None, :, :]
    return sums.reshape(*sums.shape[:-4], x.shape[-3], *sums.shape[-2:])


def _column(library: Library, v: Array) -> Array:
    """Return ones for rows of no columns."""
    return library.xp.ones_like(v.sum(-1))[..., None]


def _unit(library: Library, v: Array) -> Array:
    """Return a power of two near the largest value, whose sums stay finite."""
    xp = library.xp
    if 0 in v.shape:
        return 1.0
    largest = xp.abs(library.constant(v)).max()
    usable = (largest > 0) & xp.isfinite(largest)
    power = xp.clip(xp.round(xp.log2(xp.where(usable, largest, 1.0))), min=-40, max=40)
    return xp.exp2(power)


def merge(library: Library, outs: Sequence[Array], lses: Sequence[Array]) -> tuple[Array, Array]:
    """Merge results over parts of the keys, all of float32 or float64.

    Where all parts are empty, gradients are 0: no logarithm of 0 and no -inf - -inf is on the way.
    """
    xp = library.xp
    top = library.constant(lses[0])
    for lse in lses[1:]:
        top = xp.maximum(top, library.constant(lse))
    top = xp.where(xp.isneginf(top), 0.0, top)
    total: Any = 0.0
    weights = []
    for lse in lses:
        empty = xp.isneginf(lse)
        weights.append(xp.where(empty, 0.0, xp.exp(xp.where(empty, 0.0, lse - top))))
        total = total + weights[-1]
    nothing = total == 0
    total = xp.where(nothing, 1.0, total)
    # Weights are divided before they meet values, whose sum could leave the range of floats.
    merged: Any = 0.0
    for out, lse, weight in zip(outs, lses, weights, strict=True):
        seen = xp.where(xp.isneginf(lse)[..., None], 0.0, out)
        merged = merged + (weight / total)[..., None] * seen
    return merged, xp.where(nothing, -float("inf"), top + xp.log(total))


def states(
    k: Array,
    v: Array,
    initial: Array | None,
    ends: Sequence[int],
    stack: Callable[..., Array],
    *,
    reverse: bool,
) -> Array:
    """Return the states at `ends`, of shape (..., P, E, M), from float32 or float64 arrays.

    Each is the one before it in the direction of the sum, and what the rows between them add.
    """

    def between(first: int, last: int) -> Array:
        return k[..., first:last, :].mT @ v[..., first:last, :]

    state = between(0, 0)
    if initial is not None:
        state = state + initial
    found = [state] * len(ends)
    place = k.shape[-2] if reverse else 0
    for end, index in sorted(zip(ends, itertools.count()), reverse=reverse):
        if end != place:
            state = state + (between(end, place) if reverse else between(place, end))
        found[index], place = state, end
    return stack(found, -3) if found else state[..., None, :, :][..., :0, :, :]


def readings(
    library: Library,
    q: Array,
    k: Array,
    v: Array,
    initial: Array | None,
    ends: Sequence[int],
    *,
    reverse: bool,
) -> Array:
    """Return what row i of `q` reads from the state at ``ends[i]``.

    Queries and keys become rows of one sequence, in which each query stands between the keys before
    its position and those after it, with a key and a value of zeros. The causal product of that
    sequence is what they read, in either direction.
    """
    xp, count, length = library.xp, len(ends), k.shape[-2]
    asked, of_q, of_k = [0] * count, [], []
    place = 0
    for end, index in sorted(zip(ends, itertools.count())):
        of_k += [*range(place, end), length]  # the row of zeros
        of_q += [count] * (end - place)
        asked[index] = len(of_q)
        of_q.append(index)
        place = end
    of_k += range(place, length)
    of_q += [count] * (length - place)

    def placed(x: Array, rows: list[int]) -> Array:
        whole = xp.concatenate((x, library.zeros(x, 1)), -2)
        return whole[..., xp.asarray(rows, dtype=xp.int32), :]

    merged = placed(q, of_q), placed(k, of_k), placed(v, of_k)
    out = library.product(*merged, initial, reverse)
    return out[..., xp.asarray(asked, dtype=xp.int32), :]
