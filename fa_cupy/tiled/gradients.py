"""Gradients of attention while they are summed, and the arrays that tiles of them are made from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fa_cupy._bitmask import BitMask
from fa_cupy.core import attention_problem
from fa_cupy.core.attention_problem import Problem, View
from fa_cupy.tiled import attention
from fa_cupy.tiled.attention import Array


@dataclass(frozen=True)
class Operands(attention.Operands):
    """Arrays of n stacked batch entries; broadcast axes have stride 0, those of gradients too."""

    dout: Array  # (n, q_len, v_dim)
    dlse: Array | None  # (n, q_len, 1)
    base: Array  # (n, q_len, 1)
    columns: attention.SparseMask | None  # (n, k_len, q_len): a sparse mask with its axes swapped
    grads: dict[str, Array]  # what is wanted, of the shape of the argument
    # Where some rows are far, (n, q_len, 1) each: weights are exp(s - top) / total.
    top: Array | None = None
    total: Array | None = None


class Gradient:
    """A gradient that is being summed, with the axes of its argument.

    Parameters
    ----------
    xp : module
    problem : Problem
    of : array
        The argument.
    rows, cols : int
        What its last two axes broadcast to.
    dtype : numpy.dtype
        Of the sums.
    empty : callable
        ``empty(shape, dtype, like)`` returns memory for a result.
    once : bool
        Whether every element of an unshared argument gets one term only.
    """

    def __init__(
        self, xp: Any, problem: Problem, of: Any, rows: int, cols: int,
        dtype: np.dtype[Any], empty: Callable[..., Any], once: bool = False,
    ) -> None:  # fmt: skip
        self.sums = self._result = empty(of.shape, of.dtype, of)
        self.view = attention_problem.batch_view(problem, self.sums, rows, cols)
        # A gradient as large as all scores is not kept in two dtypes.
        direct = once and all(n == 1 or step for n, step in zip(*self.view, strict=True))
        if of.dtype != dtype and not direct:
            self.sums = xp.empty(of.shape, dtype)
            self.view = attention_problem.batch_view(problem, self.sums, rows, cols)
        self.clear()

    def clear(self) -> None:
        """Begin again."""
        self.sums.view(f"u{self.sums.dtype.itemsize}").fill(0)

    def finished(self, steps: Any) -> Any:
        """Return the gradient in the dtype of its argument."""
        if self.sums is not self._result:
            steps.store(self._result, self.sums)
        return self._result


def gradients(
    xp: Any,
    problem: Problem,
    inputs: Sequence[Any],
    need: Sequence[str],
    dtype: np.dtype[Any],
    empty: Callable[..., Any],
) -> dict[str, Gradient]:
    """Return what will hold the gradients of `inputs`: q, k, v and bias."""
    k_len = problem.k_len
    sizes = {
        "q": (problem.q_len, problem.head_dim),
        "k": (k_len, problem.head_dim),
        "v": (k_len, problem.v_dim),
        "bias": (problem.q_len, k_len),
    }
    return {
        name: Gradient(xp, problem, of, *sizes[name], dtype, empty, once=name == "bias")
        for name, of in zip(sizes, inputs, strict=False)
        if name in need
    }


def arrays(
    xp: Any,
    problem: Problem,
    inputs: Sequence[Any],
    results: Sequence[Any],
    grads: dict[str, Gradient],
    dtype: np.dtype[Any],
) -> tuple[list[Any], list[View | None]]:
    """Return what `operands` is made of, and the views over all batch axes.

    Parameters
    ----------
    xp : module
    problem : Problem
    inputs : sequence of array or None
        q, k, v, bias and mask. If that is a BitMask, its entries and those of its transpose are
        the last of the arrays.
    results : sequence of array or None
        Output and LSE, and the gradients of both.
    grads : dict
        From `gradients`.
    dtype : numpy.dtype
        Of the sums.
    """
    *inputs, mask = inputs
    bits = mask if isinstance(mask, BitMask) else None
    mask = None if bits is not None else mask
    out, lse, dout, dlse = results
    base = xp.empty(lse.shape, dtype)
    views = [problem.q, problem.k, problem.v, problem.bias, None if mask is None else problem.mask]
    for x in (out, dout):
        views.append(attention_problem.out_view(problem, x.shape, x.strides))
    for x in (lse, dlse, base):
        shape = (0,) if x is None else (*x.shape, 1)
        views.append(
            None
            if x is None
            else attention_problem.out_view(problem, shape, (*x.strides, x.itemsize))
        )
    views += [grad.view for grad in grads.values()]
    sums = [grad.sums for grad in grads.values()]
    entries = [] if bits is None else [x.entries[..., None, None] for x in (bits, bits.T)]
    views += [
        attention_problem.batch_view(problem, x, problem.q_len, problem.k_len) for x in entries
    ]
    return [*inputs, mask, out, dout, lse, dlse, base, *sums, *entries], views


def operands(
    stack: Sequence[Any], need: Sequence[str], mask: Any = None, columns: Any = None
) -> Operands:
    """Return a stack of `arrays` as operands, with a sparse mask and its transpose if given."""
    q, k, v, bias, dense, out, dout, lse, dlse, base = stack[:10]
    grads = dict(zip(need, stack[10:], strict=False))
    mask = dense if mask is None else mask
    return Operands(q, k, v, bias, mask, out, lse, dout, dlse, base, columns, grads)


def sparse(bits: BitMask | None, stack: Sequence[Any], tiles: Any) -> tuple[Any, ...]:
    """Return the mask of a stack of `arrays` and its transpose, as `operands` takes them.

    Parameters
    ----------
    bits : BitMask or None
        If None, nothing is returned.
    stack : sequence of array
    tiles : callable
        ``tiles(mask, entries)`` makes a `tiled.attention.SparseMask`.
    """
    if bits is None:
        return ()
    of_rows, of_columns = (entries[:, 0, 0] for entries in stack[-2:])
    return tiles(bits, of_rows), tiles(bits.T, of_columns)


def target(x: Operands, name: str, rows: tuple[int, int], keys: tuple[int, int]) -> Array:
    """Return the part of a gradient that a tile of these queries and keys adds to."""
    parts = {"q": (rows,), "k": (keys,), "v": (keys,), "bias": (rows, keys)}
    return x.grads[name][(slice(None), *(slice(*part) for part in parts[name]))]


def accumulate(steps: Any, target: Array, term: Array) -> None:
    """Add `term`, from `reduced`, to `target`; where the dtypes differ there is one term only."""
    target = target[tuple(slice(n) for n in term.shape)]
    if target.dtype == steps.dtype:
        steps.xp.add(target, term, out=target, casting="unsafe")
    else:
        steps.store(target, term)


def reduced(target: Array, term: Array) -> Array:
    """Sum `term` over the axes that `target` lacks."""
    axes = tuple(a for a in range(3) if target.strides[a] == 0 and term.shape[a] > 1)
    return term.sum(axis=axes, keepdims=True, dtype=np.float64) if axes else term
