"""Causal products by batched cuBLAS products on chunks: what the dedicated kernels do not serve.

Takes every dtype, dim and length, in float32 or float64 arithmetic: the algorithm of
`fa_cupy.tiled.chunked_scan` over `fa_cupy.tiled.segmented_scan`. Segments are short, so that the
products of one chunk of all of them fill the device; their states take no more memory than their
rows. Nothing waits for the device but one look at the end at whether all results are finite.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import cupy
import numpy as np

from fa_cupy.core.linear_problem import Product
from fa_cupy.gpu import workspace
from fa_cupy.gpu.cublas import linear_elementwise, tile_ops
from fa_cupy.tiled import segmented_scan
from fa_cupy.tiled.chunks import Sizes, triangle
from fa_cupy.tiled.segmented_scan import Part, Scan, Side, Work

# Bytes of scratch memory of a stack, about.
_SCRATCH_BYTES = 256 << 20
# So many segments are worked on at once where there are that many: with chunks of 128 rows, the
# 32768 rows from which on a product of matrices reaches its full speed.
_STACKED = 256
# Most products of one call of cuBLAS: what its kernels may count along an axis of their grid.
_MOST_STACKED = 65535


class Machine:
    """`tiled.segmented_scan.Machine` for CuPy arrays on the current device and stream; one a call.

    Parameters
    ----------
    name : str
        The public function that errors speak of.
    problem : Product
        What will be computed.
    """

    xp: Any = cupy
    sizes = Sizes(chunk=128, state_chunk=1024, most_rows=4096, least_chunk=32)

    def __init__(self, name: str, problem: Product) -> None:
        what = f"{problem.dtype} with dims {problem.qk_dim} and {problem.v_dim}"
        workspace.refuse_products(name, what)
        self._steps = _Steps(problem.state_dtype)
        # Rows of the least segment: those that take as much memory as a state.
        dims = problem.qk_dim, problem.v_dim
        self._least_segment = max(self.sizes.chunk, math.prod(dims) // max(1, sum(dims)))
        self._done: list[tuple[list[Any], Work, Any]] = []

    def segments(self, length: int, entries: int) -> int:
        """Return into how many segments sequences are cut if there are so many states."""
        wanted = math.ceil(_STACKED / max(1, entries))
        # Every segment beyond the first costs a second sum of outer products.
        enough = 1 if 2 * entries >= _STACKED else wanted
        return min(enough, max(1, length // self._least_segment))

    def largest(self, problem: Product, entries: int) -> int:
        """Return how many of so many entries make a stack at most."""
        size, cols = min(self.sizes.chunk, max(1, problem.k_len)), problem.qk_dim + problem.v_dim
        shared = zip(problem.batch, problem.shared, strict=True)
        copies = math.prod(n for n, is_shared in shared if is_shared)
        most = max(self.sizes.most_rows, self.sizes.least_chunk * copies)
        rows = max(1, min(size * copies, most))
        entry = rows * (2 * cols + size) + 2 * problem.qk_dim * problem.v_dim
        fitting = _SCRATCH_BYTES // (entry * problem.state_dtype.itemsize)
        return max(1, min(fitting, _MOST_STACKED))

    def run(self, tasks: list[Any], work: Work, flop: float) -> None:
        """Do all tasks, those whose results are not finite once more, exactly, in `finish`."""
        flags = cupy.zeros(len(tasks), np.int32)
        for index, task in enumerate(tasks):
            self._steps.flag = flags[index : index + 1]
            work(self._steps, task, False)
        self._done.append((tasks, work, flags))

    def finish(self) -> None:
        """Look at what is finite, and do the rest once more."""
        # What `work` knows holds this object: kept here, it would wait for the garbage collector.
        done, self._done = self._done, []
        for tasks, work, flags in done:
            for index in np.flatnonzero(flags.get()):
                work(self._steps, tasks[index], True)

    def accumulate(
        self, sums: Any, first: Any | None, last: Any | None, reverse: bool, inclusive: bool = False
    ) -> None:
        """Turn sums over segments (n, segments, E, M) into states before them, and `last`.

        With `inclusive`, into states after them.
        """
        n, count, *dims = sums.shape
        if last is None:
            last = cupy.empty((n, *dims), sums.dtype)
        if first is None:
            first = cupy.zeros((1, 1, 1), sums.dtype)
        if last.size:
            size = math.prod(dims)
            linear_elementwise.accumulate(first, size, count, reverse, inclusive, last, sums)


class _Steps(tile_ops.Steps):
    """`tiled.chunks.Steps` for CuPy arrays on the current device and stream.

    `flag` is an element that is set where a result is not finite.
    """

    flag: Any = None

    def __init__(self, dtype: np.dtype[Any]) -> None:
        super().__init__(dtype, tf32=False)
        self._triangles: dict[tuple[int, bool], Any] = {}

    def triangle(self, size: int, reverse: bool) -> Any:
        key = size, reverse
        if key not in self._triangles:
            self._triangles[key] = cupy.asarray(triangle(size, reverse))
        return self._triangles[key]

    def finite(self, x: Any) -> bool:
        if x.size:
            linear_elementwise.mark(x, self.flag)
        return True  # not known before `flag` is read


def product(
    problem: Product, q: Any, k: Any, v: Any, initial: Any, out: Any, state: Any, *, reverse: bool
) -> None:
    """Solve `problem`: write the output, and the state where that is not None."""
    machine = Machine("causal_product", problem)
    segmented_scan.product(machine, problem, q, k, v, initial, out, state, reverse=reverse)
    machine.finish()


def states(problem: Product, k: Any, v: Any, initial: Any, ends: Any, *, reverse: bool) -> Any:
    """Return the states at `ends`, ascending, of shape (*state_batch, len(ends), E, M)."""
    machine = Machine("prefix_state", problem)
    scan = Scan(machine, problem, Side(k, problem.k), Side(v, problem.v), (), reverse)
    found = scan.states(len(ends))
    # Each state is the one before it in the scan's order and what the rows between them add.
    bounds = [0, *ends.tolist(), problem.k_len]
    spans = [*itertools.pairwise(bounds)][slice(1, None) if reverse else slice(None, -1)]
    for first, part in _runs(spans):
        count = machine.segments(part.rows, scan.entries * part.segments)
        if count == 1:
            own = found.array[..., first : first + part.segments, :, :]
            scan.sum(part, scan.over(own))
            continue
        for index in range(part.segments):
            _sum_in_segments(scan, found.array, first + index, part, index, count)
    before = Side(initial, problem.initial, rows=False)
    for sums, start in segmented_scan.stacks_of(machine, problem, [found, before]):
        machine.accumulate(sums, start, None, reverse, inclusive=True)
    machine.finish()
    return found.array.reshape(*problem.state_shape[:-2], len(ends), *problem.state_shape[-2:])


def _runs(spans: list[tuple[int, int]]) -> Iterator[tuple[int, Part]]:
    """Yield spans of one length that follow on each other as one part, with the first's number."""
    lengths = [end - begin for begin, end in spans]
    first = 0
    for rows, run in itertools.groupby(lengths):
        count = len([*run])
        if rows:
            yield first, Part(spans[first][0], rows, count)
        first += count


def _sum_in_segments(
    scan: Scan, found: Any, place: int, part: Part, index: int, count: int
) -> None:
    """Sum one long span of `part` in so many segments at once, and what these leave."""
    rows, begin = part.rows // count, part.begin + index * part.rows
    sums = scan.states(count + 1).array
    scan.sum(Part(begin, rows, count), scan.over(sums[..., :count, :, :]))
    rest = part.rows - count * rows
    scan.sum(Part(begin + count * rows, rest, 1), scan.over(sums[..., count:, :, :]))
    found[..., place, :, :] = sums.sum(axis=-3)
