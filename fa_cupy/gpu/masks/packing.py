"""The parameter structs of ``ptx/mask_pack.ptx``, and how a mask of bool fills them."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from fa_cupy.core.attention_problem import View
from fa_cupy.gpu.kernels.attention.attention_params import merge_axes
from fa_cupy.layouts import BLOCK

MAX_AXES = 32  # more than CuPy's arrays have
#: Threads of a block of each kernel.
PACK_THREADS, LISTS_THREADS, BITS_THREADS = 256, 128, 256
WORDS = BLOCK * BLOCK // 32  # of a block

MASK_PACK = np.dtype(
    [(name, np.uint64) for name in ("mask", "words", "states")]
    + [(name, np.int64) for name in ("row_stride", "col_stride")]
    + [(name, np.uint32) for name in ("q_len", "k_len", "q_tiles", "k_tiles")]
    + [("axes", np.uint32), ("wide", np.uint32), ("size", np.uint32, (MAX_AXES,))]
    + [("stride", np.int64, (MAX_AXES,))],
    align=True,
)
MASK_LISTS = np.dtype(
    [("states", np.uint64)]
    + [(f"partial{end}", np.uint64) for end in ("_begin", "_end", "")]
    + [(f"full{end}", np.uint64) for end in ("_begin", "_end", "")]
    + [("entries", np.uint64)]
    + [(name, np.uint32) for name in ("rows", "k_tiles", "count", "axes")]
    + [(name, np.uint32, (MAX_AXES,)) for name in ("size", "step")],
    align=True,
)
MASK_BITS = np.dtype([(name, np.uint64) for name in ("codes", "places", "words", "count")])


class Packing(NamedTuple):
    """How a mask of bool is packed: structs whose pointers are 0, and what they speak of.

    Attributes
    ----------
    pack, lists : numpy.ndarray
        Of size 1, of dtypes `MASK_PACK` and `MASK_LISTS`; not to be written to.
    own : tuple of int
        The batch axes, those of stride 0 as 1: a matrix each.
    matrices, q_tiles, k_tiles : int
        Rows of blocks are those that are packed: one, if `shared`.
    entries : int
        Batch entries.
    shared : bool
        Whether all rows of blocks are as the first, as for a mask that is the same for all queries.
    aligned : bool
        Whether dense rows begin at multiples of 16 bytes if the mask does.
    """

    pack: np.ndarray[Any, Any]
    lists: np.ndarray[Any, Any]
    own: tuple[int, ...]
    matrices: int
    q_tiles: int
    k_tiles: int
    entries: int
    shared: bool
    aligned: bool

    @property
    def blocks(self) -> int:
        """Blocks that are packed."""
        return self.matrices * self.q_tiles * self.k_tiles

    @property
    def threads(self) -> int:
        """What the lists take: a warp for each row of blocks, a thread for each entry."""
        return max(32 * self.matrices * self.q_tiles, self.entries)


@functools.lru_cache(maxsize=256)
def packing(view: View, share: bool) -> Packing:
    """Lay out how a mask is packed.

    Parameters
    ----------
    view : View
        Of the mask, (*batch, q_len, k_len).
    share : bool
        Whether one row of blocks may stand for all where they are the same.
    """
    *batch, q_len, k_len = view.shape
    *steps, row_stride, col_stride = view.strides
    own = tuple(1 if step == 0 and n else n for n, step in zip(batch, steps, strict=True))
    shared = share and row_stride == 0 and q_len > BLOCK
    rows = BLOCK if shared else q_len
    q_tiles, k_tiles = -(-rows // BLOCK), -(-k_len // BLOCK)
    matrices = math.prod(own)

    pack = np.zeros(1, MASK_PACK)
    sizes, strides = merge_axes(own, {"mask": view})
    pack["row_stride"], pack["col_stride"] = row_stride, col_stride
    pack["q_len"], pack["k_len"] = rows, k_len
    pack["q_tiles"], pack["k_tiles"] = q_tiles, k_tiles
    pack["axes"] = len(sizes)
    pack["size"][0, : len(sizes)], pack["stride"][0, : len(sizes)] = sizes, strides["mask"]

    lists = np.zeros(1, MASK_LISTS)
    lists["rows"], lists["k_tiles"] = matrices * q_tiles, k_tiles
    lists["count"] = math.prod(batch)
    of_entries = [0 if step == 0 else math.prod(own[a + 1 :]) for a, step in enumerate(steps)]
    places = View((*batch, 1, 1), (*of_entries, 0, 0))
    axes, jumps = merge_axes(tuple(batch), {"entries": places})
    lists["axes"] = len(axes)
    lists["size"][0, : len(axes)], lists["step"][0, : len(axes)] = axes, jumps["entries"]

    dense = col_stride == 1 and all(step % 16 == 0 for step in (row_stride, *strides["mask"]))
    return Packing(pack, lists, own, matrices, q_tiles, k_tiles, math.prod(batch), shared, dense)
