"""The host side of ``block_tables``: both tables of a mask, made from its lists."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fa_cupy.gpu.driver.targets import SHARED_LIMIT
from fa_cupy.gpu.kernels.attention.attention_params import MASK_LISTS
from fa_cupy.gpu.kernels.variant import Variant
from fa_cupy.layouts import BLOCK

#: Blocks of the mask that a block of threads looks at, along each axis.
SIDE = 32
#: ``struct BlockTablesParams`` of ``cuda_src/mask/block_tables.cu``.
BLOCK_TABLES_PARAMS = np.dtype(
    [("lists", MASK_LISTS)]
    + [(name, np.uint64) for name in ("by_query", "by_key", "prefix_counts")]
    + [(f"{name}_bits", np.uint64) for name in ("by_query", "by_key")]
    + [(name, np.int32) for name in ("q_blocks", "k_blocks")],
    align=True,
)


@dataclass(frozen=True, kw_only=True)
class BlockTables(Variant):
    """The variant of ``block_tables``, which serves masks of any shape."""

    @property
    def targets(self) -> tuple[str, ...]:
        """All."""
        return tuple(SHARED_LIMIT)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: blocks that it transposes, and how far it has counted."""
        return 2 * 4 * SIDE * (SIDE + 1)

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            ("FA_THREADS", self.threads),
            ("FA_SHARED_BYTES", self.shared_bytes),
            ("FA_BLOCK_TABLES_PARAMS_BYTES", BLOCK_TABLES_PARAMS.itemsize),
        )


TABLES = BlockTables(
    source="mask/block_tables", dtype="uint32", dim=BLOCK, tile_m=SIDE, tile_n=SIDE, warps=SIDE,
    stages=1, why="a warp for each row of blocks, and then for each column",
)  # fmt: skip
