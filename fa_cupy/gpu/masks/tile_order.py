"""The order in which the kernels of attention work through the rows of blocks of a mask.

Written over a namespace: lists on a device are sorted there, and nothing waits for them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fa_cupy.core.attention_problem import Problem
from fa_cupy.gpu.kernels.attention.attention_params import cached_entries, merge_axes
from fa_cupy.layouts import BLOCK
from fa_cupy.masks.blocks import BlockLists

# What blocks cost, in fifths of a full one: words are read and tested.
_FULL_COST, _PARTIAL_COST = 5, 6
# Rows of blocks are as good as equal if none costs so many times as much as another.
_EVEN = 1.2
# Rows of blocks that are sorted together: for each multiprocessor at least, so that the long ones
# are shared out evenly (`_entries_per_l2_group` of `fwd_sm90` has what was measured); and batch
# entries at most.
_LEAST_ROWS, _MOST_ENTRIES = 2, 32

Array = Any  # numpy.ndarray or cupy.ndarray


def section(problem: Problem, multiprocessors: int) -> int:
    """Return how many batch entries are sorted together.

    As many as have their keys and values in the L2 cache at once, or more where those are too few
    rows of blocks to be shared out. Sections are about equal, as `_entries_per_l2_group` of
    `fwd_sm90` makes its groups.
    """
    sizes, steps = merge_axes(problem.batch, {"k": problem.k, "v": problem.v})
    rows = _LEAST_ROWS * multiprocessors
    least = -(-rows // -(-problem.q_len // BLOCK))
    wanted = min(_MOST_ENTRIES, max(least, cached_entries(problem, sizes, steps)))
    entries = math.prod(problem.batch)
    return -(-entries // max(1, round(entries / wanted)))


def work_order(
    xp: Any, problem: Problem, lists: BlockLists, entries: Array, section: int
) -> Array | None:
    """Return the order in which rows of blocks are worked through: longest first.

    The batch entries of a section are sorted together, but where all rows cost about the same each
    entry is a section, so that its keys and values are in the L2 cache when its rows read them.
    Rows that cost the same go from the last queries to the first, entries taking turns.

    Parameters
    ----------
    xp : module
        Namespace of the arrays. Nothing here waits for a device.
    problem : Problem
    lists : BlockLists
        Of the mask; its words are not looked at.
    entries : array of int32, shape (n,)
        The matrix of each batch entry.
    section : int
        How many batch entries are sorted together.

    Returns
    -------
    array of int32, or None
        Of ``batch entry * rows of blocks + row of blocks``; None where there are too many.
    """
    n, q_tiles, k_tiles = len(entries), -(-problem.q_len // BLOCK), -(-problem.k_len // BLOCK)
    if n * q_tiles >= 2**31:
        return None
    bounds = _bounds(problem, q_tiles, k_tiles)
    cost = _FULL_COST * _counts(xp, lists.full_begin, lists.full, k_tiles, bounds)
    cost = cost + _PARTIAL_COST * _counts(xp, lists.partial_begin, lists.partial, k_tiles, bounds)
    cost = cost.reshape(-1, q_tiles)[entries][:, ::-1].T
    entry = xp.arange(n, dtype=np.int64)
    even = cost.max() <= _EVEN * cost.min()
    group = xp.where(even, entry, entry // section)
    most = _PARTIAL_COST * k_tiles
    key = group * (most + 1) + (most - cost)
    from_last, entry = xp.divmod(xp.argsort(key.reshape(-1), kind="stable"), n)
    order: Array = (entry * q_tiles + (q_tiles - 1 - from_last)).astype(np.int32)
    return order


def _bounds(problem: Problem, q_tiles: int, k_tiles: int) -> tuple[Array, Array] | None:
    """Return the key tiles that the band leaves to each row of blocks; None without a band."""
    if problem.lower is None and problem.upper is None:
        return None
    first = np.arange(q_tiles, dtype=np.int64) * BLOCK
    last = np.minimum(first + BLOCK, problem.q_len) - 1
    low, high = np.zeros_like(first), np.full_like(first, k_tiles)
    if problem.lower is not None:
        low = (first + problem.lower).clip(0, k_tiles * BLOCK) // BLOCK
    if problem.upper is not None:
        high = (last + problem.upper).clip(-1, problem.k_len - 1) // BLOCK + 1
    return low, high


def _counts(
    xp: Any, begin: Array, tiles: Array, k_tiles: int, bounds: tuple[Array, Array] | None
) -> Array:
    """Return how many listed blocks each row of blocks has within its bounds."""
    if bounds is None or len(tiles) == 0:
        return begin[1:] - begin[:-1]
    # Rows one after the other, so that all listed blocks ascend.
    row = xp.searchsorted(begin, xp.arange(len(tiles)), side="right") - 1
    listed = row * k_tiles + tiles
    rows = np.arange(len(begin) - 1, dtype=np.int64)
    low, high = (xp.asarray(rows * k_tiles + b[rows % len(b)]) for b in bounds)
    return xp.searchsorted(listed, high) - xp.searchsorted(listed, low)
