"""Gradients of attention while they are summed, and the arrays that tiles of them are made from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fa_cupy._bitmask import BitMask
from fa_cupy.core import arrays as core_arrays
from fa_cupy.core import attention_problem
from fa_cupy.core.attention_problem import Problem, View
from fa_cupy.core.sparse_bias import SparseBias, Sums, TileSums
from fa_cupy.score.program import Operands as ScoreOperands
from fa_cupy.score.program import entries as score_entries
from fa_cupy.score.tiles import TileScore, element_names
from fa_cupy.tiled import attention
from fa_cupy.tiled.attention import Array


@dataclass(frozen=True)
class Operands(attention.Operands):
    """Arrays of n stacked batch entries; broadcast axes have stride 0, those of gradients too."""

    dout: Array  # (n, q_len, v_dim)
    dlse: Array | None  # (n, q_len, 1)
    base: Array  # (n, q_len, 1)
    columns: attention.SparseMask | None  # (n, k_len, q_len): a sparse mask with its axes swapped
    grads: dict[str, Array]  # what is wanted of q, k, v and bias, of the shape of the argument
    dsinks: Array | None  # (n, q_len, 1), if it is wanted
    # Weights are exp(s - top) / total, (n, q_len, 1) each. Without a total it is 1, without a top
    # that comes from `lse` tile by tile.
    top: Array | None = None
    total: Array | None = None
    #: Those of q, k and v that products are written to where they lie: all terms of an element come
    #: from one column of tiles, and where none comes, it is 0 already.
    direct: frozenset[str] = frozenset()


class Form(NamedTuple):
    """How a gradient lies in memory while it is summed; it follows from its argument's metadata."""

    shape: tuple[int, ...]  # of the argument
    dtype: np.dtype[Any]
    order: Sequence[int] | None  # its axes in memory, outermost first; None for C order
    sums: np.dtype[Any]  # dtype of the sums, which are apart where it is another one
    view: View  # of the sums, over all batch axes

    @classmethod
    def of(
        cls, problem: Problem, of: Any, rows: int, cols: int | None, dtype: np.dtype[Any],
        once: bool = False,
    ) -> Form:  # fmt: skip
        """Return the form of the gradient of an argument.

        Parameters
        ----------
        problem : Problem
        of : array
            The argument.
        rows, cols : int
            What its last two axes broadcast to. Without `cols` it has one axis less: it is one
            number a row.
        dtype : numpy.dtype
            Of the sums.
        once : bool
            Whether every element of an unshared argument gets one term only.
        """

        def view(dtype: np.dtype[Any], order: Sequence[int]) -> View:
            strides = core_arrays.dense_strides(of.shape, dtype.itemsize, order)
            if cols is None:
                column = _Metadata((*of.shape, 1), (*strides, dtype.itemsize), dtype)
                return attention_problem.batch_view(problem, column, rows, 1)
            return attention_problem.batch_view(
                problem, _Metadata(of.shape, strides, dtype), rows, cols
            )

        order = core_arrays.memory_order(of.shape, of)
        in_order = order == [*range(len(order))]
        found = cls(
            of.shape, of.dtype, None if in_order else order, of.dtype, view(of.dtype, order)
        )
        # A gradient as large as all scores is not kept in two dtypes.
        direct = once and all(n == 1 or step for n, step in zip(*found.view, strict=True))
        if of.dtype == dtype or direct:
            return found
        return found._replace(sums=dtype, view=view(dtype, range(len(of.shape))))

    def empty(self, xp: Any) -> Any:
        """Return memory for the result."""
        if self.order is None:
            return xp.empty(self.shape, self.dtype)
        memory = xp.empty([self.shape[axis] for axis in self.order], self.dtype)
        return memory.transpose([self.order.index(axis) for axis in range(len(self.order))])

    def takes_products(self) -> bool:
        """Whether a product of each batch entry can be written where its part of the sums lies."""
        *shape, rows, _ = self.view.shape
        *strides, row, col = self.view.strides
        itemsize, width = self.sums.itemsize, self.shape[-1] * self.sums.itemsize
        separate = all(n == 1 or step for n, step in zip(shape, strides, strict=True))
        return separate and col == itemsize and (rows == 1 or row >= width)


class _Metadata(NamedTuple):
    """What is read of an array that there is not yet."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]


class Gradient:
    """A gradient that is being summed, with the axes of its argument.

    Parameters
    ----------
    xp : module
    form : Form
    result : array
        Memory for the gradient, laid out so.
    """

    def __init__(self, xp: Any, form: Form, result: Any) -> None:
        self.sums = self._result = result
        self.view = form.view
        if form.sums != form.dtype:
            self.sums = xp.empty(form.shape, form.sums)

    def clear(self) -> None:
        """Begin again."""
        self.sums.view(f"u{self.sums.dtype.itemsize}").fill(0)

    def finished(self, steps: Any) -> Any:
        """Return the gradient in the dtype of its argument."""
        if self.sums is not self._result:
            steps.store(self._result, self.sums)
        return self._result


def forms(
    problem: Problem,
    inputs: Sequence[Any],
    need: Sequence[str],
    dtype: np.dtype[Any],
    sinks: Any = None,
    score: ScoreOperands | None = None,
) -> dict[str, Form]:
    """Return those of the gradients of `inputs`, q, k, v and bias, of sinks and of a score.

    For each element that the score loads of an array, there is one with an axis for each axis of
    scores: of size 1 where the element does not depend on it. A sparse bias has none.
    """
    k_len = problem.k_len
    sizes = {
        "q": (problem.q_len, problem.head_dim),
        "k": (k_len, problem.head_dim),
        "v": (k_len, problem.v_dim),
        "bias": (problem.q_len, k_len),
        "sinks": (problem.q_len, None),
    }
    found = {
        name: Form.of(problem, of, *sizes[name], dtype, once=name == "bias")
        for name, of in zip(sizes, (*inputs[:4], sinks), strict=True)
        if name in need and not (name == "bias" and isinstance(of, SparseBias))
    }
    for name, shape in score_shapes(problem, need, score).items():
        of = np.broadcast_to(np.zeros((), dtype), shape)
        found[name] = Form.of(problem, of, problem.q_len, k_len, dtype)
    return found


def gradients(
    xp: Any,
    problem: Problem,
    inputs: Sequence[Any],
    need: Sequence[str],
    dtype: np.dtype[Any],
    empty: Callable[..., Any],
    sinks: Any = None,
    score: ScoreOperands | None = None,
) -> dict[str, Any]:
    """Return what will hold the gradients that have `forms`, and that of a sparse bias.

    ``empty(shape, dtype, like)`` returns memory for a result.
    """
    named = dict(zip(("q", "k", "v", "bias", "sinks"), (*inputs[:4], sinks), strict=True))
    found: dict[str, Gradient | Sums] = {}
    for name, form in forms(problem, inputs, need, dtype, sinks, score).items():
        of = named.get(name)
        shape, kind = form.shape, form.dtype
        result = xp.empty(shape, kind) if of is None else empty(shape, kind, of)
        found[name] = gradient = Gradient(xp, form, result)
        gradient.clear()
    if "bias" in need and isinstance(inputs[3], SparseBias):
        found["bias"] = Sums(inputs[3])
    return found


def score_shapes(
    problem: Problem, need: Sequence[str], score: ScoreOperands | None
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the gradients of elements of a score's arrays, by their names."""
    if score is None:
        return {}
    batch = problem.out_shape[:-2]
    found = {}
    for array in need:
        for name in element_names(score, array) if array.startswith("score.") else ():
            axes = score.program.elements[int(name.split()[1])].axes or ""
            letters = f"{'b' * len(batch[:-1])}{'h' * len(batch[-1:])}ij"
            sizes = zip(letters, (*batch, problem.q_len, problem.k_len), strict=True)
            found[name] = tuple(n if axis in axes else 1 for axis, n in sizes)
    return found


def finished(
    steps: Any,
    need: Sequence[str],
    grads: dict[str, Gradient | Sums],
    empty: Callable[..., Any],
    score: ScoreOperands | None = None,
) -> dict[str, Any]:
    """Return the gradients named by `need`, each in the dtype of its argument.

    Parameters
    ----------
    steps : Steps
        Of a backend.
    need : sequence of str
    grads : dict of Gradient
        From `gradients`, after the last term.
    empty : callable
        As of `Gradient`.
    score : Operands, optional
    """
    found = {}
    for name in need:
        if name in grads:
            found[name] = grads[name].finished(steps)
        elif score is not None:
            found[name] = _score_gradient(steps, score, name, grads, empty)
    return found


def _score_gradient(
    steps: Any,
    score: ScoreOperands,
    array: str,
    grads: dict[str, Gradient | Sums],
    empty: Callable[..., Any],
) -> Any:
    """Return the gradient of an array of a score, given those of the elements that it loads."""
    of, xp = score.values[score.names.index(array.removeprefix("score."))], steps.xp
    total = xp.zeros(of.shape, steps.dtype)
    for name in element_names(score, array):
        axes = score.program.elements[int(name.split()[1])].axes or ""
        sums = grads[name].sums
        *outer, heads, rows, cols = (1,) * (3 - min(3, sums.ndim)) + sums.shape
        sums = sums.reshape(math.prod(outer), heads, rows, cols)
        sums = sums[tuple(slice(None) if axis in axes else 0 for axis in "bhij")]
        places = {}
        for axis, name in enumerate(x for x in "bhij" if x in axes):
            shape = tuple([-1 if other == axis else 1 for other in range(sums.ndim)])
            places[name] = xp.arange(sums.shape[axis]).reshape(shape)
        total[tuple(places[axis] for axis in axes)] += sums  # each element once
    result = empty(of.shape, of.dtype, of)
    steps.store(result, total)
    return result


def views(
    problem: Problem,
    inputs: Sequence[Any],
    results: Sequence[Any],
    grads: Sequence[View | None],
    dtype: np.dtype[Any],
    entries: Sequence[Any] = (),
) -> list[View | None]:
    """Return how `arrays` are looked at, over all batch axes; of these only metadata are read.

    Parameters
    ----------
    problem : Problem
    inputs, results : sequence of array or None
        As of `arrays`.
    grads : sequence of View or None
        Of `forms`; None for the gradient of a sparse bias.
    dtype : numpy.dtype
        Of the sums.
    entries : sequence of array
        From `batch_entries`.
    """
    out, lse, dout, dlse = results
    mask = None if isinstance(inputs[4], BitMask) or inputs[4] is None else problem.mask
    found = [problem.q, problem.k, problem.v, problem.bias, mask]
    for x in (out, dout):
        found.append(attention_problem.out_view(problem, x.shape, x.strides))
    dense = core_arrays.dense_strides(lse.shape, dtype.itemsize, range(lse.ndim))
    for x in (lse, dlse, _Metadata(lse.shape, dense, dtype)):
        shape = (0,) if x is None else (*x.shape, 1)
        found.append(
            None
            if x is None
            else attention_problem.out_view(problem, shape, (*x.strides, x.dtype.itemsize))
        )
    found += [problem.sinks, *grads]
    return found + [attention_problem.batch_view(problem, x, 1, 1) for x in entries]


def arrays(
    xp: Any,
    inputs: Sequence[Any],
    results: Sequence[Any],
    grads: dict[str, Gradient | Sums],
    dtype: np.dtype[Any],
    sinks: Any = None,
    entries: Sequence[Any] = (),
) -> list[Any]:
    """Return what `operands` is made of.

    Parameters
    ----------
    xp : module
    inputs : sequence of array or None
        q, k, v, bias and mask, which is left out if it is a BitMask.
    results : sequence of array or None
        Output and LSE, and the gradients of both.
    grads : dict
        From `gradients`.
    dtype : numpy.dtype
        Of the sums.
    sinks : array, optional
    entries : sequence of array
        From `batch_entries`.
    """
    *inputs, mask = inputs
    out, lse, dout, dlse = results
    base = xp.empty(lse.shape, dtype)
    mask = None if isinstance(mask, BitMask) else mask
    sums = [grad.sums for grad in grads.values()]
    return [*inputs, mask, out, dout, lse, dlse, base, sinks, *sums, *entries]


def batch_entries(xp: Any, problem: Problem, mask: Any, score: ScoreOperands | None) -> list[Any]:
    """Return b and h for a score or dropout, and the entries of a BitMask and of its transpose."""
    numbered = score is not None or problem.dropout is not None
    found = [*score_entries(xp, problem.out_shape[:-2])] if numbered else []
    if isinstance(mask, BitMask):
        found += [x.entries[..., None, None] for x in (mask, mask.T)]
    return found


def operands(
    stack: Sequence[Any],
    need: Sequence[str],
    mask: Any = None,
    columns: Any = None,
    *,
    score: Callable[[Any, Any], TileScore] | None = None,
    dropout: Callable[[Any, Any], attention.Dropout] | None = None,
    near: bool = False,
    direct: frozenset[str] = frozenset(),
) -> Operands:
    """Return a stack of `arrays` as operands, with a sparse mask and its transpose if given.

    ``score(b, h)`` makes the score of the entries, ``dropout(b, h)`` their dropout. `near` says
    that weights can be made from all log-sum-exps as they are.
    """
    q, k, v, bias, dense, out, dout, lse, dlse, base, sinks = stack[:11]
    grads = dict(zip(need, stack[11:], strict=False))
    dsinks = grads.pop("sinks", None)
    mask = dense if mask is None else mask
    numbers = stack[11 + len(need) : 13 + len(need)]
    return Operands(
        q, k, v, bias, mask, out, lse, sinks, dout, dlse, base, columns, grads, dsinks,
        top=lse if near else None, direct=direct, score=None if score is None else score(*numbers),
        dropout=None if dropout is None else dropout(*numbers),
    )  # fmt: skip


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
    parts = {"q": (rows,), "k": (keys,), "v": (keys,)}.get(name, (rows, keys))
    return x.grads[name][(slice(None), *(slice(*part) for part in parts))]


def add(
    steps: Any, x: Operands, keys: tuple[int, int], name: str, rows: tuple[int, int], term: Any
) -> None:
    """Add what a tile of these queries and keys adds to a gradient; None for nothing."""
    if term is not None:
        to = target(x, name, rows, keys)
        accumulate(steps, to, reduced(to, term))


def accumulate(steps: Any, target: Array, term: Array) -> None:
    """Add `term`, from `reduced`, to `target`; where the dtypes differ there is one term only."""
    if isinstance(target, TileSums):
        target.add(term)
        return
    target = target[tuple(slice(n) for n in term.shape)]
    if target.dtype == steps.dtype:
        steps.xp.add(target, term, out=target, casting="unsafe")
    else:
        steps.store(target, term)


def reduced(target: Array, term: Array) -> Array:
    """Sum `term` over the axes that `target` lacks."""
    if isinstance(target, TileSums):
        return target.of(term)
    axes = tuple(a for a in range(3) if target.strides[a] == 0 and term.shape[a] > 1)
    return term.sum(axis=axes, keepdims=True, dtype=np.float64) if axes else term
