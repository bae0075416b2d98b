"""The host side of ``transpose_words``: the words of the transposed blocks of a mask."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fa_cupy.gpu.driver.targets import SHARED_LIMIT
from fa_cupy.gpu.kernels.variant import Variant
from fa_cupy.layouts import BLOCK

#: ``struct TransposeWordsParams`` of ``cuda_src/mask/transpose_words.cu``.
TRANSPOSE_WORDS_PARAMS = np.dtype(
    [(name, np.uint64) for name in ("words", "transposed", "block_index")] + [("blocks", np.int64)]
)


@dataclass(frozen=True, kw_only=True)
class TransposeWords(Variant):
    """The variant of ``transpose_words``, which serves masks of any shape."""

    @property
    def targets(self) -> tuple[str, ...]:
        """All."""
        return tuple(SHARED_LIMIT)

    @property
    def shared_bytes(self) -> int:
        """None."""
        return 0

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            ("FA_THREADS", self.threads),
            ("FA_TRANSPOSE_WORDS_PARAMS_BYTES", TRANSPOSE_WORDS_PARAMS.itemsize),
        )


TRANSPOSE = TransposeWords(
    source="mask/transpose_words", dtype="uint32", dim=BLOCK, tile_m=BLOCK, tile_n=BLOCK, warps=8,
    stages=1, why="a warp for each block",
)  # fmt: skip
