"""Gradients of attention over the visible pairs of sparse mask blocks, one by one.

The formulas are those of `fa_cupy.tiled.attention_backward`. First come the weights ``p`` and the
gradients ``ds`` of the scores of all entries, and dq, in the order of queries; then dk and dv, in
the order of keys. Each is the product of a sparse matrix and a dense one, and each element of the
results is summed by one task, so that results do not depend on the number of threads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fa_cupy.core import sparse_bias
from fa_cupy.core.attention_problem import Problem
from fa_cupy.cpu import thread_pool
from fa_cupy.cpu.masks.entries import Chunk, Entries, dense_of, product, scores_of
from fa_cupy.cpu.tile_ops import Queries, Steps
from fa_cupy.tiled import attention_backward, gradients
from fa_cupy.tiled.gradients import Operands

Array = npt.NDArray[Any]

_PARALLEL_FLOP = 2e7  # as in `fa_cupy.cpu.attention_backward`


class Turned(NamedTuple):
    """Entries in the order of keys."""

    entries: Entries  # of the transposed matrix: its keys are queries
    order: Array  # where each is among those in the order of queries

    @classmethod
    def of(cls, entries: Entries, k_len: int) -> Turned:
        """Return the entries of a matrix with so many keys."""
        from scipy import sparse

        numbers = np.arange(len(entries.keys))
        shape = (len(entries.begin) - 1, k_len)
        turned = sparse.csr_array((numbers, entries.keys, entries.begin), shape=shape).tocsc()
        return cls(Entries(turned.indptr, turned.indices), turned.data)


def add(
    steps: Steps, problem: Problem, x: Operands, entries: Entries, turned: Callable[[], Turned]
) -> bool:
    """Add what the entries of a stack of batch entries add to its gradients.

    Returns
    -------
    bool
        Whether all of it is finite. If not, nothing was added.
    """
    if not x.grads or not len(entries.keys):
        return True
    dense = [dense_of(a, steps.dtype) for a in (x.q, x.k, x.v, x.dout)]
    found = _Found(steps.dtype, problem, x, dense, entries)
    flop = x.q.shape[0] * len(entries.keys) * (6 * problem.head_dim + 4 * problem.v_dim)
    parallel = flop > _PARALLEL_FLOP
    tasks = _tasks(entries, problem.q_len)
    thread_pool.run(tasks, found.worker(found.of_queries), parallel)
    if x.grads.keys() & {"k", "v"}:
        by_key = turned()
        found.order = by_key.order
        tasks = _tasks(by_key.entries, problem.k_len)
        thread_pool.run(tasks, found.worker(found.of_keys), parallel)
    if not all(np.isfinite(a).all() for a in (found.weights, *found.terms.values())):
        return False
    rows = np.repeat(np.arange(problem.q_len), np.diff(entries.begin))
    for name, term in found.terms.items():
        if name in ("q", "k", "v"):
            target = x.grads[name]
            gradients.accumulate(steps, target, gradients.reduced(target, term))
        elif name == "bias" and isinstance(x.grads[name], sparse_bias.Sums):
            x.grads[name].add(entries.places, term)
        elif name in x.grads:
            _scatter(x.grads[name], term, rows, entries.keys)
    return True


def _tasks(entries: Entries, rows: int) -> list[list[Chunk]]:
    """Return the chunks of all entries, those of one row in one task."""
    chunks = entries.chunks(0, rows)
    return [[*some] for _, some in itertools.groupby(chunks, lambda chunk: chunk.row_begin)]


class _Found:
    """What is summed, in memory of its own, and the tasks that do it."""

    def __init__(
        self,
        dtype: np.dtype[Any],
        problem: Problem,
        x: Operands,
        dense: list[Array],
        entries: Entries,
    ) -> None:
        self._dtype, self._problem = dtype, problem
        self._q, k, v, self._dout = dense
        self._x = replace(x, q=self._q, k=k, v=v)
        n, e = len(self._q), len(entries.keys)
        self.order = np.empty(0, np.int64)
        self.weights = np.empty((n, e), dtype)
        self._of_scores = bool(x.grads.keys() - {"v"})
        self._sloped = bool(problem.softcap) or (x.score is not None and not x.score.adds)
        self._partials = [name for name in x.grads if name.startswith("element")]
        shapes = {"q": self._q.shape, "k": k.shape, "v": v.shape}
        #: Gradients of q, k and v, one where batch entries share it; of single scores by others;
        #: and "scores", by products q.k.
        self.terms = {
            name: np.empty((n, e), dtype)
            for name in (*x.grads, *(["scores"] if self._of_scores else []))
            if name not in shapes
        }
        for name in shapes.keys() & x.grads.keys():
            shared = n > 1 and x.grads[name].strides[0] == 0
            shape = (1, *shapes[name][1:]) if shared else shapes[name]
            self.terms[name] = np.zeros(shape, np.float64 if shared else dtype)

    def worker(
        self, work: Callable[[Steps, Chunk], None]
    ) -> Callable[[], Callable[[list[Chunk]], None]]:
        """Return what `thread_pool.run` calls in each thread."""

        def new_worker() -> Callable[[list[Chunk]], None]:
            steps = Steps(self._dtype)

            def of_task(chunks: list[Chunk]) -> None:
                with np.errstate(all="ignore"):
                    for chunk in chunks:
                        work(steps, chunk)

            return of_task

        return new_worker

    def of_queries(self, steps: Steps, chunk: Chunk) -> None:
        """Compute weights and gradients of the scores of some queries, and their dq."""
        x, rows, part = self._x, slice(chunk.row_begin, chunk.row_end), chunk.part
        shape = (len(x.q), len(chunk.keys))
        slope = np.empty(shape, steps.dtype) if self._sloped else None
        partials: dict[str, Any] = dict.fromkeys(self._partials)
        scores = scores_of(steps, self._problem, x, chunk, slope, partials)
        weights = self.weights[:, part]
        if x.top is None or x.total is None:
            top = attention_backward.finite_or_0(np, x.lse[:, rows, 0]).astype(steps.dtype)
            total = None
        else:
            top, total = x.top[:, rows, 0], np.repeat(x.total[:, rows, 0], chunk.counts, axis=1)
        weights[...] = scores
        steps.weigh(weights, np.repeat(top, chunk.counts, axis=1), total)
        if not self._of_scores:
            return
        dscores = self.terms["scores"][:, part]
        one = steps.dtype.type(1)
        steps.pair_scores(Queries(self._dout[:, rows], one), chunk.counts, x.v, chunk.keys, scores)
        np.subtract(scores, np.repeat(x.base[:, rows, 0], chunk.counts, axis=1), out=scores)
        np.multiply(scores, weights, out=dscores)
        if "bias" in self.terms:
            self.terms["bias"][:, part] = dscores
        for name, partial in partials.items():
            by_element = np.broadcast_to(partial, (len(x.q), 1, len(chunk.keys)))[:, 0]
            np.multiply(dscores, by_element, out=self.terms[name][:, part])
        if slope is not None:
            np.multiply(dscores, slope, out=dscores)
        if "q" in self.terms:
            self._multiply(steps, "q", chunk, dscores, x.k, scaled=True)

    def of_keys(self, steps: Steps, chunk: Chunk) -> None:
        """Compute dk and dv of some keys."""
        places = self.order[chunk.part]
        if "k" in self.terms:
            dscores = self.terms["scores"][:, places]
            self._multiply(steps, "k", chunk, dscores, self._q, scaled=True)
        if "v" in self.terms:
            self._multiply(steps, "v", chunk, self.weights[:, places], self._dout)

    def _multiply(
        self, steps: Steps, name: str, chunk: Chunk, a: Array, b: Array, scaled: bool = False
    ) -> None:
        before, after = 1.0, 1.0
        if scaled:
            factor = attention_backward.slope_of(self._problem, steps.dtype)
            before, after = attention_backward.scale_orders(factor)[0]
        if before != 1:
            a = a.copy()
            steps.scale(a, before)
        term = self.terms[name]
        outs = itertools.repeat(term[0], len(a)) if len(term) < len(a) else term
        for weights, dense, out in zip(a, b, outs, strict=True):
            found = product(weights, chunk.begin, chunk.keys, dense)
            steps.scale(found, after)
            out[chunk.row_begin : chunk.row_end] += found


def _scatter(target: Array, values: Array, rows: Array, keys: Array) -> None:
    """Add values (n, e) at (rows, keys) to a gradient (n, q_len, k_len), broadcast axes summed."""
    several, by_row, by_key = (
        size > 1 and step != 0 for size, step in zip(target.shape, target.strides, strict=True)
    )
    if not several:
        values = values.sum(axis=0, keepdims=True, dtype=np.float64)
    for of, added in zip(target, values, strict=False):
        if by_row and by_key:  # each element once
            of[rows, keys] += added.astype(of.dtype)
        elif by_row or by_key:
            axis = (rows, keys)[by_key]
            sums = np.bincount(axis, weights=added, minlength=of.shape[by_key])
            line = of[0] if by_key else of[:, 0]
            line += sums.astype(line.dtype)
        else:
            of[0, 0] += added.sum(dtype=np.float64).astype(of.dtype)
