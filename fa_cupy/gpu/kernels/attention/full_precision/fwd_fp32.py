"""The host side of ``fwd_fp32``: attention of float32 by ``mma.sync`` on pairs of float16."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from fa_cupy.gpu.kernels.attention.full_precision.key_lengths import BAND_BYTES
from fa_cupy.gpu.kernels.variant import DROPOUT_ENTRY_BYTES, Variant

DTYPE = "float32"
_WORK_BYTES = 80  # TileWork, KeyTiles and TileRange in cuda_src/common
_LISTED_BYTES = 48  # ListedRange and keys in fwd_fp32.cu


@dataclass(frozen=True, kw_only=True)
class FwdFp32(Variant):
    """A row of ``fwd_fp32``, which takes any call with a mask, or any without.

    Attributes
    ----------
    blocks : int
        Blocks that should fit on a multiprocessor.
    """

    blocks: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: tiles of Q, K and V in pairs, their exponents, the work."""
        tiles = 4 * self.dim * (self.tile_m + 2 * self.tile_n)
        listed = _LISTED_BYTES + 8 * self.threads if self.sparse else 0  # with words of a block
        work = _WORK_BYTES + (BAND_BYTES if self.lengths else 0)
        work += DROPOUT_ENTRY_BYTES * self.dropout
        return tiles + 4 * (self.tile_m + 2 * self.tile_n) + work + listed

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            *super().defines,
            ("FA_TILE_M", self.tile_m),
            ("FA_WARPS", self.warps),
            # Operands of scores take registers that two large blocks do not have.
            ("FA_BLOCKS", 1 if self.score and self.warps == 8 else self.blocks),
        )

    def for_lengths(self, lengths: bool) -> FwdFp32:
        """Return the build of this row for lengths, or for none; at 96 and 128 it spills some."""
        build = super().for_lengths(lengths)
        return dataclasses.replace(build, hot_targets=()) if lengths else build

    @property
    def rank(self) -> tuple[int, ...]:
        """Smaller dims first, then larger tiles: there is no other kernel for float32."""
        return (1, self.dim, -self.tile_m)


def _rows() -> Iterator[FwdFp32]:
    # dim, tile_m, tile_n, blocks, why. The last ones are for the 99 KB of the smallest targets.
    rows = (
        (32, 128, 64, 2, "as many queries as there are registers for share what splitting costs"),
        (64, 128, 64, 2, "as for 32"),
        (96, 128, 64, 1, "as for 32"),
        (128, 128, 64, 1, "as for 32; the keys of a tile are one sum of tensor cores"),
        (192, 128, 32, 1, "the output leaves registers for scores of 32 keys"),
        (256, 128, 32, 1, "as for 192"),
        (96, 64, 64, 2, "128 queries do not fit if there is a mask"),
        (128, 64, 64, 2, "128 queries do not fit"),
        (192, 64, 32, 2, "as for 128"),
        (256, 64, 16, 2, "as for 128; 32 keys do not fit either"),
    )
    for dim, tile_m, tile_n, blocks, why in rows:
        for sparse in (False, True) if (dim, tile_m) != (96, 64) else (True,):
            yield FwdFp32(
                source="attention/fwd_fp32", dtype=DTYPE, dim=dim, tile_m=tile_m, tile_n=tile_n,
                warps=tile_m // 16, stages=1, blocks=blocks, why=why, sparse=sparse,
                hot_targets=("sm_90a",) if dim in (96, 128) else (),  # others spill
            )  # fmt: skip


VARIANTS: tuple[FwdFp32, ...] = tuple(_rows())
