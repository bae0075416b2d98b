"""Packed sequences one by one: each is a problem of its own, with parts of the arrays.

For any array namespace; the offsets are in the memory of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fa_cupy._bitmask import BitMask
from fa_cupy.core.attention_problem import Problem, View, batch_view, sum_dtype
from fa_cupy.keys.layout import KeyArrays
from fa_cupy.score import tree
from fa_cupy.score.program import Operands
from fa_cupy.tiled.softcap import in_range

Array = Any  # numpy.ndarray or cupy.ndarray


class Part(NamedTuple):
    """The queries and the keys of a sequence.

    Attributes
    ----------
    number : int
        Of the sequence; -1 for queries of none, which have no keys.
    rows, keys : slice
    """

    number: int
    rows: slice
    keys: slice

    @property
    def lengths(self) -> tuple[int, int]:
        """Queries and keys."""
        return self.rows.stop - self.rows.start, self.keys.stop - self.keys.start

    @property
    def pairs(self) -> int:
        """Of a query and a key."""
        rows, keys = self.lengths
        return rows * keys

    def of_rows(self, x: Array | None) -> Array | None:
        """Return the part of an array (..., queries, dim)."""
        return None if x is None else x[..., self.rows, :]

    def of_keys(self, x: Array) -> Array:
        """Return the part of an array (..., keys, dim)."""
        return x[..., self.keys, :]

    def of_scores(self, x: Array | None) -> Array | None:
        """Return the part of an array that broadcasts to (..., queries, keys)."""
        if x is None or not x.ndim:
            return x
        last = slice(None) if x.shape[-1] == 1 else self.keys
        if x.ndim == 1:
            return x[last]
        return x[..., slice(None) if x.shape[-2] == 1 else self.rows, last]

    def of_numbers(self, x: Array | None) -> Array | None:
        """Return the part of an array that broadcasts to (..., queries)."""
        if x is None or not x.ndim or x.shape[-1] == 1:
            return x
        return x[..., self.rows]

    def mask(self, mask: Any) -> Any:
        """Return that of the sequence, of a mask or of one for each sequence."""
        if mask is None or self.keys.start == self.keys.stop:
            return None
        if isinstance(mask, tuple):
            return mask[self.number]
        if isinstance(mask, BitMask):
            return mask[..., self.rows, self.keys]
        return self.of_scores(mask)

    def alone(self, problem: Problem, mask: Any) -> Problem:
        """Return the problem of the sequence, whose arrays are parts; `mask` is from `mask`."""
        rows, keys = self.lengths
        lower, upper = band_of(problem, rows, keys)

        def cut(view: View | None, *sizes: int) -> Any:
            return view and View((*view.shape[:-2], *sizes), view.strides)

        found = replace(
            problem, q_len=rows, k_len=keys, lower=lower, upper=upper, offsets=None,
            band_from_end=False, out_shape=(*problem.out_shape[:-2], rows, problem.v_dim),
            q=cut(problem.q, rows, problem.head_dim), k=cut(problem.k, keys, problem.head_dim),
            v=cut(problem.v, keys, problem.v_dim), bias=cut(problem.bias, rows, keys),
            sinks=cut(problem.sinks, rows, 1), mask=None,
            dropout=problem.dropout and problem.dropout.of_sequence(self.number),
        )  # fmt: skip
        if mask is None:
            return found
        seen = mask.entries[..., None, None] if isinstance(mask, BitMask) else mask
        return replace(found, mask=batch_view(found, seen, rows, keys))

    def taken(
        self, problem: Problem, inputs: Sequence[Any]
    ) -> tuple[Callable[[], Problem], Sequence[Any]]:
        """Return what makes the problem of the sequence, and its q, k, v, bias and mask."""
        q, k, v, bias, mask = inputs
        shown = self.mask(mask)
        arrays = self.of_rows(q), self.of_keys(k), self.of_keys(v), self.of_scores(bias), shown
        return partial(self.alone, problem, shown), arrays


def on_host(keys: KeyArrays) -> bool:
    """Whether both arrays of offsets can be read without waiting for a device."""
    return isinstance(keys.q_offsets, np.ndarray) and isinstance(keys.k_offsets, np.ndarray)


def refuse_positions(name: str, score: Operands | None) -> None:
    """Raise for a score by positions in sequences, where the host cannot know where these begin."""
    if score is not None and {"i", "j"} & set(tree.variables_of(score.program.root)):
        raise NotImplementedError(
            f"{name}: score has i or j, and no kernel serves this call with offsets on a device, "
            "want q_offsets and k_offsets in NumPy arrays"
        )


def parts(keys: KeyArrays, q_len: int) -> list[Part]:
    """Return those that have queries, in order, with queries of no sequence."""
    q, k = keys.q_offsets.tolist(), keys.k_offsets.tolist()
    found = [(-1, 0, q[0], 0, 0)]
    found += [(i, *x) for i, x in enumerate(zip(q, q[1:], k, k[1:], strict=False))]
    found.append((-1, q[-1], q_len, 0, 0))
    return [Part(i, slice(a, b), slice(c, d)) for i, a, b, c, d in found if a < b]


def shifted_band(problem: Problem, q_len: int, k_len: int) -> tuple[int | None, int | None]:
    """Return the bounds of a problem for so many queries and keys in place of its own."""
    shift = 0
    if problem.band_from_end:
        shift = (k_len - q_len) - (problem.k_len - problem.q_len)
    lower, upper = (None if x is None else x + shift for x in (problem.lower, problem.upper))
    return lower, upper


def band_of(problem: Problem, q_len: int, k_len: int) -> tuple[int | None, int | None]:
    """Return the bounds of a sequence of so many queries and keys; one that never binds is None."""
    lower, upper = shifted_band(problem, q_len, k_len)
    if lower is not None and lower <= 1 - q_len:
        lower = None
    if upper is not None and upper >= k_len - 1:
        upper = None
    return lower, upper


def attention(
    solve: Callable[..., tuple[Array, Array | None]],
    empty: Callable[..., Array],
    problem: Problem,
    inputs: Sequence[Any],
    out: Array | None,
    return_lse: bool,
    sinks: Array | None,
    score: Operands | None,
    keys: KeyArrays,
) -> tuple[Array, Array | None]:
    """Solve a problem with offsets sequence by sequence.

    Parameters
    ----------
    solve : callable
        A backend's `attention`.
    empty : callable
        ``empty(shape, dtype, like)`` returns memory for a result.
    problem : Problem
    inputs : sequence of array or None
        q, k, v, bias and mask.
    out, return_lse, sinks, score
        As of `solve`.
    keys : KeyArrays
        The offsets, in the memory of the host.
    """
    out = empty(problem.out_shape, problem.dtype, inputs[0]) if out is None else out
    lse = None
    if return_lse:
        lse = empty(problem.out_shape[:-1], sum_dtype(problem.dtype))
    for part in parts(keys, problem.q_len):
        alone, given = part.taken(problem, inputs)
        more = part.of_rows(out), return_lse, part.of_numbers(sinks), score
        _, rows = solve(alone(), *given, *more)
        if lse is not None:
            lse[..., part.rows] = rows
    return out, lse


class Backend(NamedTuple):
    """What `backward` needs of a backend.

    Attributes
    ----------
    xp : module
        Namespace of the arrays.
    solve : callable
        ``solve(problem, inputs, results, need, sinks, score)`` returns gradients of a part;
        ``problem()`` makes its problem.
    empty : callable
        ``empty(shape, dtype, like)`` returns memory for a result.
    copy : callable
        ``copy(out, x)`` copies between any of the four dtypes.
    each : callable
        ``each(work, parts)`` returns the values of ``work(part)``, in order.
    group : callable, optional
        ``group(parts, found)`` writes gradients of some sequences, which are theirs alone, to those
        of all, and returns the other parts.
    """

    xp: Any
    solve: Callable[..., dict[str, Array]]
    empty: Callable[..., Array]
    copy: Callable[[Array, Array], Any]
    each: Callable[[Callable[[Part], Any], list[Part]], list[Any]]
    group: Callable[[list[Part], dict[str, Array]], list[Part]] | None = None


def backward(
    backend: Backend,
    problem: Problem,
    inputs: Sequence[Any],
    results: Sequence[Any],
    need: Sequence[str],
    sinks: Array | None,
    score: Operands | None,
    keys: KeyArrays,
) -> dict[str, Array]:
    """Return gradients of a problem with offsets, sequence by sequence.

    Parameters
    ----------
    backend : Backend
    problem, inputs, results, need, sinks, score
        As of a backend's `backward`.
    keys : KeyArrays
        The offsets, in the memory of the host.
    """
    own = {"q", "k", "v"}
    if problem.bias is not None:
        own |= {"bias"} if inputs[3].shape[-2:] == (problem.q_len, problem.k_len) else set()
    if sinks is not None:
        own |= {"sinks"} if sinks.shape[-1:] == (problem.q_len,) else set()
    found = parts(keys, problem.q_len)
    return by_parts(backend, problem, inputs, results, need, sinks, score, found, own)


def by_parts(
    backend: Backend,
    problem: Problem,
    inputs: Sequence[Any],
    results: Sequence[Any],
    need: Sequence[str],
    sinks: Array | None,
    score: Operands | None,
    parts: Sequence[Any],
    own: set[str],
) -> dict[str, Array]:
    """Return gradients of a problem, part by part.

    What several parts add to is summed in their order, so that results are repeatable.

    Parameters
    ----------
    backend : Backend
    problem, inputs, results, need, sinks, score
        As of a backend's `backward`.
    parts : sequence of Part or Entries
    own : set of str
        The arguments each of whose elements belongs to one part.
    """
    with np.errstate(all="ignore"):
        *qkv, bias, mask = inputs
        given = dict(zip(("q", "k", "v", "bias", "sinks"), (*qkv, bias, sinks), strict=True))
        given |= {} if score is None else dict(score.named())
        sums = _Sums(backend, sum_dtype(problem.dtype), given, need, own)
        bias, sinks = (sums.read(name, given[name]) for name in ("bias", "sinks"))
        if bias is not None and bias is not given["bias"]:
            laid = batch_view(problem, bias, problem.q_len, problem.k_len)
            problem = replace(problem, bias=laid, bias_dtype=bias.dtype)
        if sinks is not None and sinks is not given["sinks"]:
            laid = batch_view(problem, sinks[..., None], problem.q_len, 1)
            problem = replace(problem, sinks=laid, sinks_dtype=sinks.dtype)
        score = sums.read_score(score)

        def work(part: Any) -> dict[str, Array]:
            out, lse, dout, dlse = results
            of_out = part.of_rows(out), part.of_numbers(lse)
            of_dout = part.of_rows(dout), part.of_numbers(dlse)
            alone, arrays = part.taken(problem, (*qkv, bias, mask))
            found = backend.solve(
                alone, arrays, (*of_out, *of_dout), need, part.of_numbers(sinks), score
            )
            return sums.without_disjoint(part, found)

        left = [*parts]
        if backend.group is not None:
            left = backend.group(left, sums.found)
        for part, terms in zip(left, backend.each(work, left), strict=True):
            sums.add(part, terms)
        return sums.finished()


class _Sums:
    """The gradients of all parts together.

    Attributes
    ----------
    found : dict of array
        By name, in the dtype of the argument or of sums.
    """

    def __init__(
        self,
        backend: Backend,
        dtype: np.dtype[Any],
        given: Mapping[str, Array],
        need: Sequence[str],
        own: set[str],
    ) -> None:
        self._backend, self._dtype, self._own = backend, dtype, own
        self.found = {}
        for name in need:
            of = given[name]
            dtype = of.dtype if name in own else self._dtype
            self.found[name] = backend.empty(of.shape, dtype, of)
            self.found[name].view(f"u{dtype.itemsize}").fill(0)
        self._given = given

    def read(self, name: str, x: Array | None) -> Array | None:
        """Return an argument: in the dtype of sums, if its gradient is to be one."""
        if x is None or name not in self.found or name in self._own or x.dtype == self._dtype:
            return x
        xp = self._backend.xp
        found = xp.empty(x.shape, self._dtype)
        wide = name == "bias" and x.dtype.itemsize > self._dtype.itemsize
        self._backend.copy(found, in_range(xp, x, self._dtype) if wide else x)
        return found

    def read_score(self, score: Operands | None) -> Operands | None:
        """Return a score whose arrays are those that `read` returns."""
        if score is None:
            return None
        values: list[Any] = [
            x if isinstance(x, float) else self.read(f"score.{name}", x)
            for name, x in zip(score.names, score.values, strict=True)
        ]
        dtypes = [
            dtype if x is y else y.dtype.name
            for dtype, x, y in zip(score.program.dtypes, score.values, values, strict=True)
        ]
        program = replace(score.program, dtypes=tuple(dtypes))
        return replace(score, program=program, values=tuple(values))

    def _part(self, name: str, part: Any) -> Array:
        x = self.found[name]
        if name in ("k", "v"):
            return part.of_keys(x)
        of = {"q": part.of_rows, "bias": part.of_scores, "sinks": part.of_numbers}.get(name)
        return x if of is None else of(x)

    def without_disjoint(self, part: Any, found: dict[str, Array]) -> dict[str, Array]:
        """Keep gradients that are a part's own, and return the others."""
        for name in self._own & found.keys():
            target = self._part(name, part)
            unsigned = f"u{target.dtype.itemsize}"
            target.view(unsigned)[...] = found[name].view(unsigned)
        return {name: x for name, x in found.items() if name not in self._own}

    def add(self, part: Any, terms: Mapping[str, Array]) -> None:
        """Add the gradients of a part."""
        for name, term in terms.items():
            target = self._part(name, part)
            if term.dtype != target.dtype:
                wide = self._backend.xp.empty(term.shape, target.dtype)
                self._backend.copy(wide, term)
                term = wide
            target += term

    def finished(self) -> dict[str, Array]:
        """Return all gradients, in the dtypes of their arguments."""
        found = {}
        for name, total in self.found.items():
            of = self._given[name]
            found[name] = total
            if total.dtype != of.dtype:
                found[name] = self._backend.empty(of.shape, of.dtype, of)
                self._backend.copy(found[name], total)
        return found
