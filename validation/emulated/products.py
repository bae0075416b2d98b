"""Causal products by the kernels, on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from fa_cupy.core import linear_problem
from fa_cupy.gpu.kernels.linear import params, sm90_params
from fa_cupy.gpu.kernels.linear.heuristics import Choice
from fa_cupy.gpu.kernels.linear.sm80_variants import ProductVariant
from fa_cupy.gpu.kernels.linear.sm90_params import Job
from fa_cupy.gpu.kernels.linear.sm90_variants import VariantSm90
from validation import emulator

Array = np.ndarray[Any, Any]


def causal_product(
    choice: Choice,
    q: Array,
    k: Array,
    v: Array,
    initial: Array | None = None,
    reverse: bool = False,
    **how: Any,
) -> tuple[Array, Array]:
    """`fa_cupy.causal_product` by some rows of the table of products, with its state.

    Parameters
    ----------
    choice : Choice
        The rows, and how the sequence is split.
    q, k, v, initial, reverse
        As for `fa_cupy.causal_product`; rows must be dense.
    **how
        As for `causal_products`.
    """
    (found,) = causal_products(choice, [(q, k, v, initial, reverse)], **how)
    return found


def causal_products(
    choice: Choice,
    calls: Sequence[tuple[Any, ...]],
    seed: int = 0,
    sources: Mapping[str, Path] = MappingProxyType({}),
    truncating: bool = False,
) -> list[tuple[Array, Array]]:
    """Several causal products of as many rows each, with their states.

    By rows for SM90 they are the jobs of one launch.

    Parameters
    ----------
    choice : Choice
    calls : sequence of tuple
        Of each job q, k, v, initial state and whether it is in reverse, as for `causal_product`.
    seed, truncating : int, bool
        As for `emulator.launch`.
    sources : mapping of Path
        Kernels in place of the rows' own, by the row's entry.

    Raises
    ------
    EmulationError
        As `emulator.launch`.
    """
    jobs, arrays = [], []
    for q, k, v, initial, reverse in calls:
        problem = linear_problem.product_problem("causal_product", q, k, v, initial)
        out = np.full(problem.out_shape, np.nan, problem.dtype)
        state = np.full(problem.state_shape, np.nan, np.float32)
        whole, last = (problem.view(x.shape, x.strides) for x in (out, state))
        jobs.append(Job(problem, whole, last, reverse))
        workspace = None
        if choice.states is not None:
            sizes = int(np.prod(problem.batch)), choice.segments, problem.qk_dim, problem.v_dim
            workspace = np.full(sizes, np.nan, np.float32)
        arrays.append((q, k, v, out, initial, state, workspace))
    for row, _, segments in choice.launches(jobs[0].problem.qk_dim, jobs[0].problem.v_dim):
        how = seed, sources.get(row.entry), truncating
        if isinstance(row, VariantSm90):
            _launch_jobs(row, segments, jobs, arrays, choice, *how)
            continue
        for job, places in zip(jobs, arrays, strict=True):
            _launch_job(row, job, places, choice, *how)
    return [(places[3], places[5]) for places in arrays]


def _launch_jobs(
    row: VariantSm90,
    segments: int,
    jobs: Sequence[Job],
    arrays: Sequence[tuple[Any, ...]],
    choice: Choice,
    *how: Any,
) -> None:
    """Run a kernel that takes all products in one launch."""
    assert all(map(sm90_params.takes, jobs))
    filled, maps, blocks = sm90_params.fill(jobs, row.tile_n, choice.split)
    for p, geometry, places in zip(filled[0]["job"], maps, arrays, strict=False):
        *mapped, initial, state, workspace = map(_address, places)
        for name, pointer in zip(sm90_params.MAPPED, mapped, strict=True):
            p[f"{name}_map"] = emulator.tensor_map(pointer, *geometry[name])
        p["initial"], p["state"], p["workspace"] = initial, state, workspace
        p["out"] = mapped[3]
    emulator.launch_row(row, blocks * segments, filled, *how)


def _launch_job(
    row: ProductVariant, job: Job, places: tuple[Any, ...], choice: Choice, *how: Any
) -> None:
    """Run a kernel that takes one product a launch."""
    dims = job.problem.qk_dim, job.problem.v_dim
    ((tiles, segments),) = (one[1:] for one in choice.launches(*dims) if one[0] is row)
    filled, parts, shifts, aligned = params.fill(*job, choice.split, tiles)
    filled["tiles"] = tiles
    at = [x and x + shift for x, shift in zip(map(_address, places), shifts, strict=True)]
    aligned = aligned and not any(p % 16 for p in at[:4])
    for offsets, first, blocks, _ in parts:
        here = [p and p + offset for p, offset in zip(at, offsets, strict=True)]
        params.pack_head(filled, 0, *here, first, aligned)
        emulator.launch_row(row, blocks * segments, filled, *how)


def _address(x: Array | None) -> int:
    return 0 if x is None else x.ctypes.data
