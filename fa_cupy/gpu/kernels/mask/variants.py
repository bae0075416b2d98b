"""The kernels that make tables of masks, one row a compiled variant."""

from __future__ import annotations

from dataclasses import dataclass

from fa_cupy.gpu.driver.targets import SHARED_LIMIT
from fa_cupy.gpu.kernels.mask.structs import BLOCK_TABLES_PARAMS, TRANSPOSE_WORDS_PARAMS
from fa_cupy.gpu.kernels.variant import Variant
from fa_cupy.layouts import BLOCK

#: Blocks that a block of threads of ``tables`` looks at, along each axis.
SIDE = 32


@dataclass(frozen=True, kw_only=True)
class MaskKernel(Variant):
    """A row of a kernel of ``cuda_src/mask``, which serves masks of any shape."""

    @property
    def targets(self) -> tuple[str, ...]:
        """All."""
        return tuple(SHARED_LIMIT)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: what ``tables`` turns, and how far it has counted."""
        return 2 * 4 * SIDE * (SIDE + 1) if self.source.endswith("tables") else 0

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            ("FA_THREADS", self.threads),
            ("FA_SHARED_BYTES", self.shared_bytes),
            ("FA_BLOCK_TABLES_PARAMS_BYTES", BLOCK_TABLES_PARAMS.itemsize),
            ("FA_TRANSPOSE_WORDS_PARAMS_BYTES", TRANSPOSE_WORDS_PARAMS.itemsize),
        )


TABLES = MaskKernel(
    source="mask/block_tables", dtype="uint32", dim=BLOCK, tile_m=SIDE, tile_n=SIDE, warps=SIDE,
    stages=1, why="a warp for each row of blocks, and then for each column",
)  # fmt: skip
TURN = MaskKernel(
    source="mask/transpose_words", dtype="uint32", dim=BLOCK, tile_m=BLOCK, tile_n=BLOCK, warps=8,
    stages=1, why="a warp for each block",
)  # fmt: skip

#: All rows.
MASKS: tuple[MaskKernel, ...] = (TABLES, TURN)
