"""How a plan launches kernels for SM90: tensor maps for its pointers, states of segments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from fa_cupy.gpu import workspace
from fa_cupy.gpu.driver import compile
from fa_cupy.gpu.driver.devices import multiprocessors, target_of_device
from fa_cupy.gpu.driver.launch import Arguments, Launch
from fa_cupy.gpu.driver.tensor_map_cache import MappedArguments, Maps
from fa_cupy.gpu.kernels.attention.fwd_sm90 import MAPPED
from fa_cupy.gpu.kernels.linear import params
from fa_cupy.gpu.kernels.linear.heuristics import Choice, choose
from fa_cupy.gpu.kernels.linear.sm80_variants import ProductVariant
from fa_cupy.gpu.kernels.linear.sm90_params import (
    POINTERS_AT,
    PRODUCT_JOB,
    Job,
    fill,
    pack_pointers,
    takes,
)
from fa_cupy.gpu.kernels.linear.sm90_variants import VariantSm90
from fa_cupy.gpu.kernels.tensor_maps import MAP_BYTES

_JOB_BYTES = PRODUCT_JOB.itemsize


def choice_for(jobs: Sequence[Job], device: int, algorithm: str = "auto") -> Choice | None:
    """Return how the kernels for SM90 compute some products in one launch; None if they do not.

    Parameters
    ----------
    jobs : sequence of Job
        One to three, of as many batch entries and rows each, and of one dtype.
    device : int
    algorithm : str, optional
        Of `fa_cupy.core.linear_problem.ALGORITHMS`.
    """
    if not all(map(takes, jobs)):
        return None
    problem = jobs[0].problem
    choice = choose(
        problem.dtype.name, math.prod(problem.batch), problem.k_len,
        max(job.problem.qk_dim for job in jobs), max(job.problem.v_dim for job in jobs),
        str(target_of_device(device)), multiprocessors(device), algorithm, jobs=len(jobs),
    )  # fmt: skip
    return choice if choice is not None and isinstance(choice.row, VariantSm90) else None


class ProductSm90:
    """The launches of some products, all in one, by rows for SM90.

    Parameters
    ----------
    jobs : sequence of Job
    choice : Choice
        What `choice_for` returned for them.
    device : int
    other : callable
        Returns what to call in place of this for pointers that tensor maps cannot have; called
        once, when first needed.
    """

    __slots__ = (
        "_jobs", "_launches", "_maps", "_other", "_other_made", "_params", "_pool", "_workspaces",
    )  # fmt: skip

    def __init__(
        self,
        jobs: Sequence[Job],
        choice: Choice,
        device: int,
        other: Callable[[], Callable[..., None]],
    ) -> None:
        target = str(target_of_device(device))
        self._other = other
        self._other_made: Callable[..., None] | None = None
        self._jobs = range(len(jobs))
        # The states' rows have as many value columns as the outputs', so one struct serves both.
        self._params, maps, blocks = fill(jobs, choice.row.tile_n, choice.split)
        geometry = [own[name] for own in maps for name in MAPPED]
        places = [i * _JOB_BYTES + at * MAP_BYTES for i in self._jobs for at in range(len(MAPPED))]
        self._maps = Maps(jobs[0].problem.dtype.name, geometry, places)
        # Parameter structs that no thread is using; a launch copies one before it returns.
        self._pool: list[MappedArguments] = []
        self._workspaces = [
            4 * math.prod((*job.problem.batch, choice.segments, *_dims(job)))
            for job in jobs
            if choice.states is not None
        ]
        self._launches: list[Launch | _JobLaunch] = []
        for row, _, segments in choice.launches(*_dims(jobs[0])):
            kernel = compile.load(row, target, device)
            if not isinstance(row, VariantSm90):
                own = (_JobLaunch(i, job, choice, row, kernel) for i, job in enumerate(jobs))
                self._launches += own
            else:
                grid = blocks * segments
                self._launches.append(Launch(kernel, grid, row.threads, row.shared_bytes))

    def __call__(self, *pointers: tuple[int, ...]) -> None:
        """Launch with these addresses.

        Parameters
        ----------
        pointers : tuple of int
            Of each job: q, k, v, out, initial state, state; 0 where there is no array.
        """
        mapped = pointers[0][:4] if len(pointers) == 1 else sum((p[:4] for p in pointers), ())
        try:
            arguments = self._pool.pop()
        except IndexError:
            arguments = MappedArguments(self._params)
        if arguments.mapped != mapped and not self._maps.write(arguments, mapped):
            self._pool.append(arguments)
            self.for_any_pointers()(*pointers)
            return
        states = workspace.take(sum(self._workspaces)) if self._workspaces else None
        places = [0] * len(pointers)
        if states is not None:
            places = [states.ptr + sum(self._workspaces[:i]) for i in self._jobs]
        for i in self._jobs:
            at = POINTERS_AT + i * _JOB_BYTES
            out, initial, state = pointers[i][3:]
            pack_pointers(arguments.memory, at, initial, state, places[i], out)
        for launch in self._launches:
            if isinstance(launch, Launch):
                launch(arguments)
            else:
                launch(pointers[launch.job], places[launch.job])
        self._pool.append(arguments)

    def for_any_pointers(self) -> Callable[..., None]:
        """Return what serves pointers that have no tensor map, made at the first call."""
        if self._other_made is None:
            self._other_made = self._other()
        return self._other_made


class _JobLaunch:
    """The launches of a kernel that takes one product, ``state_prefix_sum``, for one job."""

    __slots__ = ("_launches", "_params", "_pool", "_shifts", "job")

    def __init__(
        self, index: int, job: Job, choice: Choice, row: ProductVariant, kernel: Any
    ) -> None:
        self.job = index
        ((tiles, segments),) = (one[1:] for one in choice.launches(*_dims(job)) if one[0] is row)
        self._params, parts, self._shifts, _ = params.fill(*job, choice.split, tiles)
        self._params["tiles"] = tiles
        self._pool: list[Arguments] = []
        self._launches = [
            (offsets, first, Launch(kernel, blocks * segments, row.threads, row.shared_bytes))
            for offsets, first, blocks, _ in parts
        ]

    def __call__(self, pointers: tuple[int, ...], workspace: int) -> None:
        try:
            arguments = self._pool.pop()
        except IndexError:
            arguments = Arguments(self._params)
        for offsets, first, launch in self._launches:
            places = zip((*pointers, workspace), self._shifts, offsets, strict=True)
            at = [p and p + shift + offset for p, shift, offset in places]
            # Tensor maps walk the same rows, so these are aligned.
            params.pack_head(arguments.bytes, 0, *at, first, 1)
            launch(arguments)
        self._pool.append(arguments)


def _dims(job: Job) -> tuple[int, int]:
    return job.problem.qk_dim, job.problem.v_dim
