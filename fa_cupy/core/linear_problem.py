"""Checks of causal products, and the canonical problem that every backend solves.

As in `fa_cupy.core.attention_problem`, nothing here touches data.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from fa_cupy.core import attention_problem, broadcasting, checks
from fa_cupy.core.arrays import Laid
from fa_cupy.core.attention_problem import View
from fa_cupy.keys.offsets import Offsets

ALGORITHMS = ("auto", "chunked", "recurrent", "low_occupancy")
#: What takes every array, on every backend.
ANY = ALGORITHMS[:2]
#: What holds things in no order, or bytes and characters, is no sequence of positions.
_NO_POSITIONS = (Set, Mapping, str, bytes, bytearray, memoryview)


@dataclass(frozen=True)
class Product:
    """One causal product in canonical form; see `product_problem`.

    All views share the axes `batch`; a broadcast axis has stride 0. Where `q` has more heads than
    `k` or `v`, the head axis is split into (kv_heads, group). The states of two batch entries that
    differ along a `shared` axis only are the same.
    """

    batch: tuple[int, ...]
    shared: tuple[bool, ...]
    groups: tuple[int, ...]  # the factors of the head axis, or ()
    q_len: int  # equal to k_len but for readings at positions
    k_len: int
    qk_dim: int
    v_dim: int
    dtype: np.dtype[Any]
    state_dtype: np.dtype[Any]  # float32, or float64 for float64
    q: View | None  # (*batch, q_len, qk_dim)
    k: View  # (*batch, k_len, qk_dim)
    v: View  # (*batch, k_len, v_dim)
    # (*batch, qk_dim, v_dim), or one more column where it is normalised. Of packed sequences each
    # has a state: the axis of sequences comes after `batch`.
    initial: View | None
    out_shape: tuple[int, ...]  # the user's: (*user_batch, q_len, v_dim)
    state_shape: tuple[int, ...]  # the user's: (*state_batch, qk_dim, columns of `initial`)
    offsets: Offsets | None = None  # of packed sequences

    def view(self, shape: Sequence[int], strides: Sequence[int], tail: int = 2) -> View:
        """Return the view over `batch` of an array whose batch axes broadcast to the user's.

        Its last `tail` axes are no batch axes.
        """
        axes = len(self.out_shape) - 2
        cut = len(shape) - tail
        steps = broadcasting.batch_strides(shape[:cut], strides[:cut], axes, self.groups)
        return View((*self.batch, *shape[cut:]), (*steps, *strides[cut:]))

    def state_view(self, array: Any) -> View:
        """Return the view over `batch` of an array of states, which may be those of sequences."""
        return self.view(array.shape, array.strides, 2 if self.offsets is None else 3)


def product_problem(
    name: str,
    q: Any,
    k: Any,
    v: Any,
    initial_state: Any = None,
    *,
    aligned: bool = True,
    normalised: bool = False,
    offsets: Offsets | None = None,
) -> Product:
    """Check the arrays of a causal product and bring them into canonical form.

    Parameters
    ----------
    name : str
        The public function that errors speak of.
    q, k, v, initial_state : numpy.ndarray or cupy.ndarray, or None for the first and last
        Native arrays; only their metadata is read.
    aligned : bool, optional
        Whether `q` has to have as many rows as `k`.
    normalised : bool, optional
        Whether states have one more column than `v`: the sum of the keys, by which the normalised
        form divides.
    offsets : Offsets, optional
        Of packed sequences, each of which has a state.

    Returns
    -------
    Product

    Raises
    ------
    TypeError, ValueError
        With a message that names the argument, what it got and what is wanted.
    """
    named = {arg: x for arg, x in (("q", q), ("k", k), ("v", v)) if x is not None}
    lead = next(iter(named))
    dtype = attention_problem.common_dtype(name, named)
    state_dtype = attention_problem.sum_dtype(dtype)
    if initial_state is not None and initial_state.dtype != state_dtype:
        found = f"initial_state has dtype {initial_state.dtype}, want {state_dtype}"
        raise TypeError(f"{name}: {found} for {lead} of {dtype}")
    attention_problem.check_axes(name, named)
    (k_len, qk_dim), v_dim = k.shape[-2:], v.shape[-1]
    if v.shape[-2] != k_len:
        raise ValueError(f"{name}: v has length {v.shape[-2]}, k has {k_len}")
    if q is not None and q.shape[-1] != qk_dim:
        raise ValueError(f"{name}: k has dim {qk_dim}, q has {q.shape[-1]}")
    if q is not None and aligned and q.shape[-2] != k_len:
        raise ValueError(f"{name}: k has length {k_len}, q has {q.shape[-2]}")
    cols = v_dim + normalised
    states = () if offsets is None else (offsets.sequences,)
    state = None
    if initial_state is not None:
        state = _checked_state(name, initial_state, (*states, qk_dim, cols), normalised)

    groups = () if q is None else broadcasting.head_groups(name, ("q", "k", "v"), q, k, v, True)
    arrays = [*named.items()]
    if state is not None:
        arrays.append(("initial_state", _check_state_heads(name, state, named)))
    user_batch = broadcasting.broadcast_batch(name, groups, arrays, fewer=3)
    axes = len(user_batch)
    holders = [x.shape[:-2] for x in (k, v, state) if x is not None]
    extents = [broadcasting.batch_extents(shape, axes, groups) for shape in holders]

    def view(array: Any) -> View:
        return broadcasting.over(user_batch, groups, array, *array.shape[-2:])

    q_len = 0 if q is None else q.shape[-2]
    return Product(
        batch=broadcasting.split_heads(user_batch, groups),
        shared=tuple(all(n == 1 for n in sizes) for sizes in zip(*extents, strict=True)),
        groups=groups,
        q_len=q_len,
        k_len=k_len,
        qk_dim=qk_dim,
        v_dim=v_dim,
        dtype=dtype,
        state_dtype=state_dtype,
        q=None if q is None else view(q),
        k=view(k),
        v=view(v),
        initial=None if state is None else _with_axis(view(state), states, initial_state),
        out_shape=(*user_batch, q_len, v_dim),
        state_shape=(*_widest(holders), *states, qk_dim, cols),
        offsets=offsets,
    )


def algorithm(name: str, value: Any, backend: str, dtype: np.dtype[Any]) -> str:
    """Return `value`, the name of an algorithm that `backend` has for arrays of `dtype`."""
    if not isinstance(value, str) or value not in ALGORITHMS:
        wanted = ", ".join(map(repr, ALGORITHMS[:-1]))
        raise ValueError(
            f"{name}: algorithm is {checks.show(value)}, want {wanted} or {ALGORITHMS[-1]!r}"
        )
    reason = ""
    if backend == "numpy":
        reason = "is a GPU kernel, want 'auto' or 'chunked' for arrays on the CPU"
    elif dtype != np.float32:
        reason = f"is a kernel for float32, want 'auto' or 'chunked' for {dtype}"
    if reason and value not in ANY:
        raise ValueError(f"{name}: algorithm is {value!r}, which {reason}")
    return value


FEATURES = "feature_map(q)", "feature_map(k)"


def check_features(name: str, q: Any, k: Any, x: Any, y: Any) -> None:
    """Raise unless `x` and `y` can be what a callable has made of `q` and `k`."""
    named = dict(zip(("q", *FEATURES), (q, x, y), strict=True))
    attention_problem.common_dtype(name, named)
    check_feature_shapes(name, q, k, x, y)


def check_feature_shapes(name: str, q: Any, k: Any, x: Any, y: Any) -> None:
    """Raise unless `x` and `y` have shapes of features of `q` and `k`, arrays of any library."""
    of_q, of_k = FEATURES
    for arg, given, label, found in (("q", q, of_q, x), ("k", k, of_k, y)):
        if found.shape[:-1] != given.shape[:-1]:
            raise ValueError(
                f"{name}: {label} has shape {tuple(found.shape)}, {arg} has {tuple(given.shape)}, "
                "want the same axes but the last"
            )
    if x.shape[-1] != y.shape[-1]:
        raise ValueError(f"{name}: {of_k} has dim {y.shape[-1]}, {of_q} has {x.shape[-1]}")


def positions(name: str, ends: Any, k_len: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return `ends`, ints from 0 to `k_len`, as an array."""
    wanted = _wanted_ends(k_len)
    try:
        if isinstance(ends, _NO_POSITIONS) or _is_empty_non_int(ends):
            raise TypeError
        if not hasattr(ends, "shape"):
            len(ends)  # what has none may never end
        given = iter(ends)
    except TypeError:
        raise TypeError(
            f"{name}: ends is {checks.show(ends)}, want a sequence of ints {wanted}"
        ) from None
    found = []
    for i, end in enumerate(given):
        try:
            if isinstance(end, bool):
                raise TypeError
            found.append(operator.index(end))
        except TypeError:
            raise TypeError(
                f"{name}: ends[{i}] is {checks.show(end)}, want an int {wanted}"
            ) from None
        check_end(name, i, found[-1], k_len)
    return np.asarray(found, np.int64)


def check_end(name: str, i: int, end: int, k_len: int) -> None:
    """Raise for a position, `i` of all, that is not from 0 to `k_len`."""
    if not 0 <= end <= k_len:
        wanted = _wanted_ends(k_len)
        raise ValueError(f"{name}: ends[{i}] is {checks.show(end)}, want an int {wanted}")


def _wanted_ends(k_len: int) -> str:
    return f"from 0 to {k_len}, the length of k"


def _is_empty_non_int(ends: Any) -> bool:
    """Return whether `ends` is an empty array that is not a one-dimensional array of ints.

    An empty list may index a NumPy array, an empty array of floats may not.
    """
    shape, dtype = getattr(ends, "shape", ()), getattr(ends, "dtype", "int")
    kind = getattr(dtype, "kind", None)  # that of PyTorch has none
    is_int = re.match(r"(\w+\.)?u?int", str(dtype)) if kind is None else kind in "iu"
    return 0 in shape and (len(shape) != 1 or not is_int)


def _with_axis(view: View, states: tuple[int, ...], state: Any) -> View:
    """Return a view of `state` with the axis of sequences, if there is one."""
    if not states:
        return view
    (shape, strides), own = view, state.strides[-3]
    return View((*shape[:-2], *states, *shape[-2:]), (*strides[:-2], own, *strides[-2:]))


def _checked_state(name: str, state: Any, dims: tuple[int, ...], normalised: bool) -> Any:
    """Return a state, or those of sequences without their axis; the last axes are `dims`."""
    if state.shape[-len(dims) :] != dims:
        of = "features and of v, plus 1" if normalised else "k and v"
        of = f"the dims of {of}" if len(dims) == 2 else f"the number of sequences and dims of {of}"
        wanted = ", ".join(map(str, dims))
        raise ValueError(
            f"{name}: initial_state has shape {state.shape}, want (..., {wanted}), {of}"
        )
    if len(dims) == 2:
        return state
    shape, strides = ((*x[:-3], *x[-2:]) for x in (state.shape, state.strides))
    return Laid(shape, strides, state.dtype)


def _check_state_heads(name: str, state: Any, arrays: Mapping[str, Any]) -> Any:
    """Return `state`, which has one head, or as many as one of `arrays`, by argument."""
    if state.ndim < 3 or min(x.ndim for x in arrays.values()) < 4:
        return state
    counts = sorted({1, *(x.shape[-3] for x in arrays.values())})
    if counts != [1] and state.shape[-3] not in counts:
        raise ValueError(
            f"{name}: initial_state has {state.shape[-3]} heads, "
            f"want {', '.join(map(str, counts[:-1]))} or {counts[-1]}"
        )
    return state


def _widest(shapes: Sequence[Sequence[int]]) -> list[int]:
    """Broadcast batch shapes, in which the heads of one may divide those of another."""
    axes = max(map(len, shapes))
    padded = [(1,) * (axes - len(shape)) + tuple(shape) for shape in shapes]
    return [0 if 0 in sizes else max(sizes) for sizes in zip(*padded, strict=True)]
