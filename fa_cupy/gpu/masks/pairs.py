"""Masks whose pairs are read one by one, as launches get them.

The lists of a `BitMask` are sent to a device once and kept with its store; that by keys, which only
gradients read, when they first are computed. No sparse block is unfolded.
"""

from __future__ import annotations

import math
from typing import Any

import cupy
import numpy as np

from fa_cupy._bitmask import BitMask
from fa_cupy.core.attention_problem import Problem
from fa_cupy.gpu import workspace
from fa_cupy.gpu.driver.launch import capturing
from fa_cupy.gpu.kernels.attention.attention_params import MAX_GRID
from fa_cupy.gpu.kernels.attention.pairs import pair_rows
from fa_cupy.gpu.kernels.attention.pairs.pair_rows import PairCounts
from fa_cupy.gpu.kernels.score import takes_scale
from fa_cupy.gpu.masks import pair_lists
from fa_cupy.gpu.masks.binding import Kept, apart, matrices, remember, stay

Array = Any  # cupy.ndarray


class CallPairs:
    """Says what launches of one kind of call get of the pairs of a mask.

    Parameters
    ----------
    problem : Problem
        With a mask, and with a query and a key.
    device : int
    gradients : bool, optional
        Whether launches read the list by keys too.
    """

    __slots__ = ("_device", "_gradients", "_key", "_view")

    def __init__(self, problem: Problem, device: int, gradients: bool = False) -> None:
        assert problem.mask is not None
        self._view = problem.mask
        self._device, self._gradients = device, gradients
        self._key = "pairs", device, gradients, self._view.shape, self._view.strides

    def __call__(self, mask: BitMask) -> tuple[tuple[int, ...], Any]:
        """Return addresses, and what has to live until the launches are queued.

        Parameters
        ----------
        mask : BitMask
            One that `pair_lists.chosen` chooses, of the shape and strides that the problem says.

        Returns
        -------
        pointers : tuple of int
            In the order of `pair_rows.BY_QUERY_ARRAYS`, and of `BY_KEY_ARRAYS` behind them for
            gradients.
        owners : object
        """
        kept = mask._kept.get(self._key) or self._prepared(mask)
        if kept.passing and capturing():
            kept = stay(mask, self._key, kept)
        return kept.pointers, kept

    def _prepared(self, mask: BitMask) -> Kept:
        by_query, by_key = (
            _sent(mask, by_key, self._device) if wanted else ()
            for by_key, wanted in ((False, True), (True, self._gradients))
        )
        with apart() as stream:
            entries = cupy.asarray(matrices(mask, self._view))
            stream.synchronize()
        arrays = (*by_query, entries, *by_key)
        return remember(mask, self._key, Kept(arrays, tuple([x.data.ptr for x in arrays])))


def counts_of(problem: Problem, mask: Any, device: int) -> PairCounts | None:
    """Return the counts of a mask whose pairs kernels read one by one; None for other calls.

    Parameters
    ----------
    problem : Problem
    mask : BitMask, cupy.ndarray or None
    device : int
    """
    if not isinstance(mask, BitMask):
        return None
    if not pair_rows.serves(problem, workspace.launcher(device).target):
        return None
    counts = pair_lists.chosen(mask, problem.dtype)
    return counts if counts is not None and _fit(problem, counts) else None


def counts_with_bias(name: str, problem: Problem, mask: BitMask, target: str | None) -> PairCounts:
    """Return the counts of a mask whose pairs have a bias each, however many they are.

    Raises
    ------
    NotImplementedError
        For a call that no kernel over pairs serves; `name` is what the error speaks of.
    """
    if problem.dropout is not None:
        raise NotImplementedError(
            f"{name}: dropout is {problem.dropout.p:g} and bias is a sparse matrix on a GPU, want "
            "one of them (or arrays on the CPU)"
        )
    if not takes_scale(problem):
        raise NotImplementedError(
            f"{name}: bias is a sparse matrix on a GPU, and scale and softcap are {problem.scale} "
            f"and {problem.softcap}, want numbers whose quotient has all digits in float32"
        )
    if not pair_rows.serves(problem, target):
        raise NotImplementedError(
            f"{name}: bias is a sparse matrix on a GPU, and q has dtype {problem.dtype} and "
            f"head_dim {problem.head_dim}, want float16, bfloat16 or float32 and dims of 1 to 256"
        )
    pairs = pair_lists.pairs_of(mask)  # their list has 20 bytes for each, and takes more to make
    counts = pair_lists.lists_of(mask).counts if pairs < pair_lists.MOST else None
    if counts is None or not _fit(problem, counts):
        raise NotImplementedError(
            f"{name}: bias is a sparse matrix on a GPU, and the mask has {pairs} pairs for "
            f"{math.prod(problem.batch)} batch entries, want fewer of one of them"
        )
    return counts


def _fit(problem: Problem, counts: PairCounts) -> bool:
    """Whether one launch can have all pieces of long rows."""
    pieces = math.prod(problem.batch) * max(counts.query_pieces, counts.key_pieces)
    return pieces <= MAX_GRID


def _sent(mask: BitMask, by_key: bool, device: int) -> tuple[Array, ...]:
    """Return a list of pairs on a device, sent there when first asked for and kept."""
    key = "sent", by_key, device
    found: tuple[Array, ...] | None = mask._store.pairs.get(key)
    if found is None:
        lists = pair_lists.lists_of(mask)
        source = lists.by_key if by_key else lists.by_query
        arrays = source if by_key else source[:-1]  # which has no places
        with apart() as stream:
            # An array of no element has no address, which kernels are not to take for none.
            made = [cupy.asarray(x if x.size else np.zeros(1, x.dtype)) for x in arrays]
            stream.synchronize()
        found = mask._store.pairs.setdefault(key, tuple(made))
    return found
