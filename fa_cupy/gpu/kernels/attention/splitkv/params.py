"""The parameters of ``fwd_splitkv``, and what follows from a problem for them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fa_cupy.core.attention_problem import Problem
from fa_cupy.gpu.kernels.attention.attention_params import (
    ATTENTION_PARAMS,
    MAX_BATCH_AXES,
    MAX_GRID,
    Traits,
    make_params,
)

_KEY_ARRAYS = ("k_lengths", "page_table")
#: What splits of the keys leave in a workspace: `partial_sizes`.
PARTIAL = ("partial_out", "partial_stats")
_MOST_SPLITS = 128
# To begin and to end a split, and to join it, takes about as long as so many tiles of keys.
_SPLIT_TILES = 2
# So large a part of the blocks that run at a time reads memory as fast as all of them do.
_READING_PART = 0.9

#: The same fields in the same order as ``struct FwdSplitkvParams`` in
#: ``cuda_src/common/splitkv.cuh``, which checks the size when it is compiled.
FWD_SPLITKV_PARAMS = np.dtype(
    [("common", ATTENTION_PARAMS)]
    + [(name, np.uint64) for name in (*_KEY_ARRAYS, "partial_out", "arrivals", "mark")]
    + [("partial_stats", np.uint64)]
    + [(f"{name}_batch", np.int64, (MAX_BATCH_AXES,)) for name in _KEY_ARRAYS]
    + [(name, np.int64) for name in ("page_table_col", "k_page", "v_page", "rows")]
    + [(name, np.int32) for name in ("page_size", "page_shift", "pages", "heads", "splits")]
    + [("band_from_end", np.int32)]
    + [(f"{name}_bytes", np.int32) for name in _KEY_ARRAYS]
    + [("aligned", np.int32)],
    align=True,
)


def supports(problem: Problem) -> bool:
    """Whether the kernel can solve a problem whose dims some kernel serves in any layout."""
    rows = math.prod(problem.batch) * problem.q_len
    axes = sum(n > 1 for n in problem.batch)
    few = axes <= MAX_BATCH_AXES and 0 < rows * _MOST_SPLITS <= MAX_GRID
    few = few and problem.dtype.itemsize == 2
    return few and problem.mask is None and problem.k_len > 0


def heads_of_tile(traits: Traits) -> int:
    """Return how many entries of the last batch axis share keys, and are rows of one tile.

    Where scores have a bias or an expression it is one: rows of a tile are queries to these.
    """
    strides, sizes = traits.strides, traits.sizes
    if not sizes or (traits.score is not None and traits.score.has_operands):
        return 1
    shared = ("k", "v", *traits.key_views)
    return 1 if any(strides[name][-1] for name in shared) else sizes[-1]


def splits_of(tiles: int, key_tiles: int, slots: int) -> int:
    """Return into how many parts the keys of each entry are split: the fastest number.

    Parameters
    ----------
    tiles : int
        Tiles of queries, of all batch entries.
    key_tiles : int
        Tiles of keys of an entry, at most.
    slots : int
        Blocks that run on the device at a time.

    Notes
    -----
    Blocks run in rounds of `slots`, which end when memory has been read. A last round of few blocks
    takes longer than its part. An H200 agrees, with a variant of 396 slots: 128 tiles of queries
    and 128 of keys, 1, 2, 3 and 6 splits take 156, 131, 132 and 135 us; 1,024 and 64 tiles, 1, 2, 5
    and 10 splits 496, 514, 508 and 524 us; 8 and 512 tiles, 24, 49 and 98 splits 44, 42 and 49 us.
    """

    def cost(splits: int) -> float:
        whole, rest = divmod(tiles * splits, slots)
        rounds = whole + (max(rest / slots, _READING_PART) if rest else 0)
        return float(rounds * (key_tiles / splits + _SPLIT_TILES))

    return min(range(1, max(1, min(_MOST_SPLITS, key_tiles)) + 1), key=cost)


def partial_sizes(dim: int, rows: int) -> dict[str, int]:
    """Return the bytes of what splits leave: outputs and two statistics of rows, in float32.

    Parameters
    ----------
    dim : int
        That outputs are padded to.
    rows : int
        Of all splits together.
    """
    return dict(zip(PARTIAL, (4 * dim * rows, 8 * rows), strict=True))


def make_splitkv_params(
    traits: Traits, tile_m: int, tile_n: int, slots: int
) -> np.ndarray[Any, Any]:
    """Return the struct of a problem, complete but for addresses.

    Parameters
    ----------
    traits : Traits
        Of a problem that the kernel `supports`.
    tile_m, tile_n : int
        Rows of a tile of queries, keys of a tile.
    slots : int
        Blocks that run on the device at a time.
    """
    problem, heads = traits.problem, heads_of_tile(traits)
    params = np.zeros(1, FWD_SPLITKV_PARAMS)
    p = params[0]
    common, aligned = make_params(traits, tile_m)[0], bool(traits.aligned())
    p["common"] = common[0]
    p["page_size"], p["pages"] = 1, 1
    for field, value in traits.key_fields.items():
        p[field] = value
    if problem.pages is not None:
        aligned = aligned and not (problem.pages.k_stride | problem.pages.v_stride) & 15
    p["aligned"] = aligned
    p["heads"], p["band_from_end"] = heads, problem.band_from_end
    entries = math.prod(problem.batch)
    p["rows"] = entries * problem.q_len
    tiles = p["common"]["q_tiles"] = -(-problem.q_len * heads // tile_m)
    p["splits"] = splits_of(entries // heads * int(tiles), -(-problem.k_len // tile_n), slots)
    return params
