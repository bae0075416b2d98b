"""Exact attention on NumPy arrays: the tiled algorithm, spread over threads."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fa_cupy import _arrays, _check, _stacks, _tiled, _tiles
from fa_cupy.cpu import _threads

Array = npt.NDArray[Any]

# While all scores stay within +-this, exp(score) is used as it is, with no maximum subtracted:
# weights are then within 1e-7 and 1e7 of 1, far from the ends of float32.
_SMALL_SCORE = 16.0
# Work below this runs in the calling thread: starting a thread costs about 0.1 ms.
_PARALLEL_FLOP = 2e7
# Most queries of a tile: more would compute more scores above the diagonal in vain.
_MOST_M = 512
# Small problems are split into this many tasks where that leaves tiles of 64 queries or more. The
# number is fixed, so that results do not depend on the number of threads.
_LEAST_TASKS = 16
# Float16 keys and values are converted once per batch entry up to this many bytes of float32, and
# once per tile beyond.
_CONVERTED_BYTES = 64 << 20


def attention(
    problem: _check.Problem,
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None,
    mask: Array | None,
    out: Array | None,
    return_lse: bool,
) -> tuple[Array, Array | None]:
    """Solve `problem` for NumPy arrays.

    Parameters
    ----------
    problem : Problem
        From `fa_cupy._check.attention_problem`.
    q, k, v, bias, mask : numpy.ndarray or None
        The arrays that `problem` was made from.
    out : numpy.ndarray or None
        Array for the output; None allocates one laid out in memory as `q` is.
    return_lse : bool
        Whether the LSE is wanted.

    Returns
    -------
    out : numpy.ndarray
        Of shape ``problem.out_shape``.
    lse : numpy.ndarray or None
        Of shape ``problem.out_shape[:-1]``: float64 for float64 input, otherwise float32.
    """
    dtype = np.dtype(np.float64 if problem.dtype == np.float64 else np.float32)
    if out is None:
        out = _arrays.empty_like_layout(np, problem, q, problem.dtype)
    lse = np.empty(problem.out_shape[:-1], dtype)
    tile = _tile(problem, dtype)
    tasks = _tasks(problem, (q, k, v, bias, mask, out, lse), tile, dtype)

    def new_worker() -> Callable[[_Task], None]:
        steps = _Steps(dtype)

        def work(task: _Task) -> None:
            x = task.stack.borrow()
            rows = (task.row_begin, task.row_end, tile.tile_n)
            with np.errstate(all="ignore"):
                if not _tiled.attend(steps, problem, x, *rows):
                    _tiled.attend_exactly(steps, problem, x, *rows)
            task.stack.give_back()

        return work

    flop = 2 * sum(t.cost for t in tasks) * (problem.head_dim + problem.v_dim)
    _threads.run(tasks, new_worker, parallel=flop > _PARALLEL_FLOP)
    return out, lse if return_lse else None


def _tile(problem: _check.Problem, dtype: np.dtype[Any]) -> _tiles.Tile:
    most, entries = _MOST_M, math.prod(problem.batch)
    while most > 64 and entries * math.ceil(problem.q_len / most) < _LEAST_TASKS:
        most //= 2
    tile = _tiles.tile_sizes(
        problem.head_dim,
        problem.v_dim,
        dtype.itemsize,
        _tiles.CPU_CACHE_BYTES,
        problem.q_len,
        problem.k_len,
        max_m=most,
    )
    # Even tiles, rather than a short one at the end.
    rows = math.ceil(problem.q_len / tile.tile_m) or 1
    return tile._replace(tile_m=math.ceil(problem.q_len / rows / 16) * 16 or 16)


class _Task(NamedTuple):
    """Some queries of one stack of batch entries."""

    stack: _Stack
    row_begin: int
    row_end: int
    cost: int  # number of scores


def _tasks(
    problem: _check.Problem, arrays: tuple[Any, ...], tile: _tiles.Tile, dtype: np.dtype[Any]
) -> list[_Task]:
    """Split the problem, the largest tasks of each stack first, so that threads end together."""
    out, lse = arrays[5:]
    out_view = _check.out_view(problem, out.shape, out.strides)
    lse_view = _check.out_view(problem, (*lse.shape, 1), (*lse.strides, lse.itemsize))
    views = (problem.q, problem.k, problem.v, problem.bias, problem.mask, out_view, lse_view)
    rows = []
    for begin in range(0, problem.q_len, tile.tile_m):
        end = min(begin + tile.tile_m, problem.q_len)
        first, last = _tiled.visible_keys(problem, begin, end)
        rows.append((begin, end, (end - begin) * (last - first)))
    rows.sort(key=lambda row: -row[2])

    whole = _tiles.footprint(*tile, problem.head_dim, problem.v_dim, dtype.itemsize)
    tasks = []
    most = min(_tiles.CPU_CACHE_BYTES // whole, math.prod(problem.batch) // _LEAST_TASKS)
    for x in _stacks.stacks(np, arrays, views, max(1, most)):
        stack = _Stack(_tiled.Operands(*x), dtype, users=len(rows))
        n = x[0].shape[0]
        tasks += [_Task(stack, begin, end, n * cost) for begin, end, cost in rows]
    return tasks


class _Stack:
    """Operands of stacked batch entries, float16 keys and values converted while in use."""

    def __init__(self, x: _tiled.Operands, dtype: np.dtype[Any], users: int) -> None:
        elements = x.k.size + x.v.size
        self._convert = x.k.dtype == np.float16 and elements * dtype.itemsize <= _CONVERTED_BYTES
        self._given = self._ready = x
        self._dtype = dtype
        self._users = users
        self._lock = threading.Lock()

    def borrow(self) -> _tiled.Operands:
        with self._lock:
            x = self._given
            if self._convert and self._ready is x:
                self._ready = _tiled.Operands(
                    x.q,
                    x.k.astype(self._dtype, "C"),
                    x.v.astype(self._dtype, "C"),
                    x.bias,
                    x.mask,
                    x.out,
                    x.lse,
                )
            return self._ready

    def give_back(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._ready = self._given


class _Steps:
    """`_tiled.Steps` for NumPy; one per thread, since scratch memory is its own."""

    xp: Any = np

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self._scratch: dict[str, Array] = {}
        self._ones = np.ones(0, dtype)

    def scratch(self, name: str, shape: tuple[int, ...]) -> Array:
        size = int(np.prod(shape))
        buffer = self._scratch.get(name)
        if buffer is None or buffer.size < size:
            raw = np.empty(size * self.dtype.itemsize + 63, np.uint8)
            offset = -raw.ctypes.data % 64  # whole cache lines for vector loads
            buffer = raw[offset : offset + size * self.dtype.itemsize].view(self.dtype)
            self._scratch[name] = buffer
        return buffer[:size].reshape(shape)

    def queries(self, q: Array, factor: float) -> tuple[Array, float]:
        now, later = (factor, 1.0) if _tiled.folds(factor) else (1.0, factor)
        out = self.scratch("q", q.shape)
        # In float64, so that the factor itself is not rounded.
        np.multiply(q, np.float64(now), out=out, casting="unsafe")
        return out, later

    def scores(self, queries: tuple[Array, float], first: int, k: Array, out: Array) -> None:
        q, factor = queries
        np.matmul(q[:, first:], k.swapaxes(1, 2), out=out)
        if factor != 1:
            np.multiply(out, np.float64(factor), out=out, casting="unsafe")

    def operand(self, name: str, x: Array) -> Array:
        if x.dtype == self.dtype and x.flags.aligned and _readable_by_blas(x):
            return x
        out = self.scratch(name, x.shape)
        np.copyto(out, x, casting="unsafe")
        return out

    def matmul(self, a: Array, b: Array, out: Array, add: bool = False) -> None:
        if add:
            product = self.scratch("product", out.shape)
            np.matmul(a, b, out=product)
            np.add(out, product, out=out)
        else:
            np.matmul(a, b, out=out)

    def add_bias(self, scores: Array, bias: Array) -> None:
        np.add(scores, bias, out=scores, casting="unsafe")

    def hidden(self, mask: Array) -> bool:
        return not _distinct(mask).any()

    def mask_scores(self, scores: Array, mask: Array) -> None:
        mask = _distinct(mask)
        if mask.all():
            return
        # +inf where a score may stay and -inf where not: fmin takes the number out of (NaN, -inf),
        # and arithmetic is ten times as fast as a masked copy.
        limit = self.scratch("limit", mask.shape)
        np.subtract(mask, 0.5, out=limit, casting="unsafe")
        np.multiply(limit, np.inf, out=limit)
        np.fmin(scores, limit, out=scores)

    def band_scores(self, scores: Array, shift: int, lower: int | None, upper: int | None) -> None:
        _, m, n = scores.shape
        # limit[i, j] depends on j - i only: a window that slides over one ramp.
        ramp = np.full(m + n - 1, np.inf, self.dtype)  # ramp[j - i + m - 1]
        if lower is not None:
            ramp[: max(0, lower - shift + m - 1)] = -np.inf
        if upper is not None:
            ramp[max(0, upper - shift + m) :] = -np.inf
        step = self.dtype.itemsize
        limit = np.lib.stride_tricks.as_strided(ramp[m - 1 :], (m, n), (-step, step))
        np.fmin(scores, limit, out=scores)

    def softmax(self, rows: _tiled.Rows, scores: Array) -> None:
        sums = self.scratch("sums", rows.total.shape)
        if rows.unshifted and scores.max() <= _SMALL_SCORE:
            np.exp(scores, out=scores)
            self._sum(scores, sums)
            np.add(rows.total, sums, out=rows.total)
            return
        top = self.scratch("new_top", rows.top.shape)
        np.maximum.reduce(scores, axis=-1, keepdims=True, out=top)
        if not rows.started and np.abs(top).max() <= _SMALL_SCORE:
            rows.started = rows.unshifted = True
            rows.top.fill(0)
            np.exp(scores, out=scores)
            self._sum(scores, rows.total)
            return
        rows.unshifted = False
        if rows.started:
            np.maximum(top, rows.top, out=top)
        shift = np.where(top == -np.inf, 0, top)  # -inf - -inf would be NaN
        np.subtract(scores, shift, out=scores)
        np.exp(scores, out=scores)
        self._sum(scores, sums)
        if not rows.started:
            np.copyto(rows.total, sums)
        else:
            if (top > rows.top).any():
                decay = np.exp(rows.top - shift)
                np.multiply(rows.total, decay, out=rows.total)
                np.multiply(rows.acc, decay, out=rows.acc)
            np.add(rows.total, sums, out=rows.total)
        np.copyto(rows.top, top)
        rows.started = True

    def finish(self, rows: _tiled.Rows, out: Array, lse: Array) -> bool:
        np.add(rows.top, np.log(rows.total), out=lse)
        np.copyto(rows.total, 1, where=rows.total == 0)
        np.divide(rows.acc, rows.total, out=rows.acc)
        self.store(out, rows.acc)
        return bool(np.isfinite(rows.acc).all())

    def store(self, out: Array, value: Array) -> None:
        np.copyto(out, value, casting="unsafe")

    def _sum(self, weights: Array, out: Array) -> None:
        """Row sums, as a product with ones: BLAS sums rows four times as fast as a reduction."""
        if self._ones.size < weights.shape[-1]:
            self._ones = np.ones(weights.shape[-1], self.dtype)
        np.matmul(weights, self._ones[: weights.shape[-1]], out=out[..., 0])


def _readable_by_blas(x: Array) -> bool:
    """Whether matmul takes `x` (n, rows, cols) to BLAS, and not to a loop of its own."""
    row, col = x.strides[1:]
    return col == x.itemsize and row >= x.shape[2] * col and row % col == 0


def _distinct(mask: Array) -> Array:
    """Return `mask` with axes along which it is broadcast cut to length 1."""
    return mask[tuple(slice(1) if s == 0 else slice(None) for s in mask.strides)]
