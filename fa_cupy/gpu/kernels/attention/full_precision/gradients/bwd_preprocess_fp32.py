"""The host side of ``bwd_preprocess_fp32``, which splits the rows that gradients multiply."""

from __future__ import annotations

from dataclasses import dataclass

from fa_cupy.gpu.driver.targets import SHARED_LIMIT
from fa_cupy.gpu.kernels.attention.full_precision.gradients.backward_fp32 import DTYPE, BackwardFp32
from fa_cupy.gpu.kernels.backward import Traits, padded_rows
from fa_cupy.gpu.kernels.score import ScoreMod


@dataclass(frozen=True, kw_only=True)
class BwdPreprocessFp32(BackwardFp32):
    """A row of ``bwd_preprocess_fp32``, a warp of which takes one query or key.

    Attributes
    ----------
    swizzled : bool
        Whether pairs lie as kernels of wgmma read them.
    """

    swizzled: bool = False

    @property
    def name(self) -> str:
        """Unique, for people and for file names."""
        return super().name + ("-swizzled" if self.swizzled else "")

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (*super().defines, ("FA_SWIZZLED", int(self.swizzled)))

    @property
    def targets(self) -> tuple[str, ...]:
        """All, or those that have wgmma."""
        return ("sm_90a",) if self.swizzled else tuple(SHARED_LIMIT)

    @property
    def shared_bytes(self) -> int:
        """None."""
        return 0

    def for_score(self, score: ScoreMod | None) -> BwdPreprocessFp32:
        """Return the row: it computes no scores."""
        return self

    def blocks(self, traits: Traits) -> int:
        """Return how many there are: one for so many rows as it has warps."""
        queries, keys = padded_rows(traits.problem.q_len), padded_rows(traits.problem.k_len)
        rows = traits.entries * queries + traits.entries // traits.group * keys
        return rows // self.warps


def _rows(swizzled: bool, *dims: int) -> tuple[BwdPreprocessFp32, ...]:
    return tuple(
        BwdPreprocessFp32(
            source="attention/bwd_preprocess_fp32", dtype=DTYPE, dim=dim, tile_m=128, tile_n=64,
            warps=8, stages=1, why="rows are read and written once", own_keys=False,
            swizzled=swizzled,
        )
        for dim in dims
    )  # fmt: skip


#: The rows whose pairs kernels of mma.sync read, and those of ``wgmma``.
DENSE, SWIZZLED = _rows(False, 32, 64, 96, 128), _rows(True, 64, 128, 256)
VARIANTS = (*DENSE, *SWIZZLED)
