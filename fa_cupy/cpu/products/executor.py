"""What scans over segments run on: stacks of a few entries, spread over threads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from fa_cupy.core import linear_problem
from fa_cupy.cpu import thread_pool
from fa_cupy.cpu.tile_ops import Steps
from fa_cupy.tiled import segmented_scan, tile_sizes
from fa_cupy.tiled.chunks import Blocks, Sizes
from fa_cupy.tiled.segmented_scan import Array, Work

# Work below this runs in the calling thread: a second one begins after 0.1 ms or more, and both
# wait for the interpreter.
_PARALLEL_FLOP = 4e7
# Stacks are so small that there are this many, if each of them has this much work for a product.
# Where there are less than half as many entries, sequences are cut into segments, of so many rows
# at least: every segment beyond the first costs a second sum of outer products.
_LEAST_TASKS = 8
_TASK_FLOP = 2e7
_LEAST_SEGMENT = 512


class Machine:
    """`tiled.segmented_scan.Machine` for NumPy.

    Parameters
    ----------
    dtype : numpy.dtype
        Of sums.
    products : int, optional
        So many causal products are about as much work as there is.
    """

    xp: Any = np
    # Longer chunks compute more scores in vain, shorter ones make products in which BLAS is slow;
    # 64 measured best at dims of 64 and 128, and 32 in blocks.
    sizes = Sizes(
        chunk=64, state_chunk=256, most_rows=1024, least_chunk=16,
        blocks=Blocks(chunk=32, single=64, size=tile_sizes.CPU_CACHE_BYTES),
    )  # fmt: skip

    def __init__(self, dtype: np.dtype[Any], products: int = 1) -> None:
        self._dtype, self._products = dtype, products

    @staticmethod
    def segments(length: int, entries: int) -> int:
        """Return into how many segments sequences are cut if there are so many states."""
        wanted = math.ceil(_LEAST_TASKS / max(1, entries))
        return min(1 if wanted <= 2 else wanted, max(1, length // _LEAST_SEGMENT))

    def largest(self, problem: linear_problem.Product, entries: int) -> int:
        """Return how many of so many entries make a stack at most."""
        tasks, flop = 1, segmented_scan.flop(problem)
        if self.parallel(flop):
            most = int(min(_LEAST_TASKS, max(2, flop / _TASK_FLOP)))
            tasks = 1 << most.bit_length() - 1  # as equal parts of a power of two
        return min(self.fitting(problem), math.ceil(entries / tasks)) or 1

    def fitting(self, problem: linear_problem.Product) -> int:
        """Return the scratch memory of how many entries fits in a cache, at least 1."""
        cols, chunk = problem.qk_dim + problem.v_dim, self.sizes.chunk
        entry = (chunk * (2 * cols + chunk) + 2 * problem.qk_dim * problem.v_dim) * 4
        return max(1, tile_sizes.CPU_CACHE_BYTES // entry)

    def parallel(self, flop: float) -> bool:
        """Return whether a product of so many operations is work for several threads."""
        return self._products * flop > _PARALLEL_FLOP

    def run(self, tasks: list[Any], work: Work, flop: float) -> None:
        """Do all tasks, those whose results are not finite once more, exactly."""

        def do(task: Any) -> None:
            steps = Steps.unused(self._dtype)
            with np.errstate(all="ignore"):
                if not work(steps, task, False):
                    work(steps, task, True)
            steps.keep()

        def new_worker() -> Callable[[Any], None]:
            return do

        if len(tasks) > 1 and self.parallel(flop):
            thread_pool.run(tasks, new_worker)
        else:
            for task in tasks:
                do(task)

    def accumulate(
        self, sums: Array, first: Array | None, last: Array | None, reverse: bool
    ) -> None:
        """Turn sums over segments (n, segments, E, M) into states before them, and `last`."""
        state = np.zeros_like(sums[:, 0]) if first is None else first
        order = range(sums.shape[1])
        for index in reversed(order) if reverse else order:
            with np.errstate(all="ignore"):
                following = state + sums[:, index]
            sums[:, index], state = state, following
        if last is not None:
            last[...] = state
