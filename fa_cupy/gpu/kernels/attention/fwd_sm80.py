"""The host side of ``fwd_sm80``: attention by ``mma.sync``, for every layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from fa_cupy.gpu.kernels.attention.attention_params import (
    Traits,
    make_params,
    mask_addresses,
)
from fa_cupy.gpu.kernels.variant import DROPOUT_ENTRY_BYTES, DTYPE_NAMES, Variant
from fa_cupy.gpu.plan import Step

_WORK_BYTES = 72  # TileWork and KeyTiles in cuda_src/common
_LISTED_BYTES = 56  # ListedRange and keys in fwd_sm80.cu


@dataclass(frozen=True, kw_only=True)
class FwdSm80(Variant):
    """A row of ``fwd_sm80``, which takes any call with a mask, or any without.

    Attributes
    ----------
    blocks : int
        Blocks that should fit on a multiprocessor.
    """

    blocks: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: a Q tile and a ring of K and V tiles, and the block's work."""
        listed = _LISTED_BYTES + 16 * self.tile_m if self.sparse else 0  # with words of a block
        tiles = 2 * self.dim * (self.tile_m + 2 * self.stages * self.tile_n)
        return (
            tiles
            + _WORK_BYTES
            + DROPOUT_ENTRY_BYTES * self.dropout
            + listed
            + (2 * self.tile_m * self.tile_n if self.stages_bias else 0)
        )

    @property
    def stages_bias(self) -> bool:
        """Whether a bias of pairs comes by way of shared memory: ``kStageBias``."""
        fits = self.dim <= 64 and not self.sparse
        return fits and self.score is not None and self.score.has_16_bit_pairs

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            *super().defines,
            ("FA_TILE_M", self.tile_m),
            ("FA_WARPS", self.warps),
            ("FA_BLOCKS", self.blocks),
        )

    @property
    def rank(self) -> tuple[int, ...]:
        """After all rows of ``fwd_sm90``: smaller dims, then larger tiles first."""
        return (1, self.dim, -self.tile_m * self.tile_n)


def _rows() -> Iterator[FwdSm80]:
    # dim, tile_m, tile_n, warps, stages, why. Speeds: H200, 4096 tokens; validation/NOTES.md
    # has those of other tiles. Every row fits the 99 KB of the smallest targets. With a mask, tiles
    # of keys divide its blocks of 128.
    rows = (
        (32, 128, 128, 4, 2, "32 rows a warp: every K and V fragment serves two products"),
        (64, 128, 128, 4, 1, "as for 32; 2% faster with one stage than with two"),
        (96, 128, 64, 4, 2, "as for 32; 96 keys a tile spill"),
        (128, 128, 64, 4, 2, "as for 32; 5% faster with two stages than with one"),
        (192, 64, 96, 4, 1, "16 rows a warp, or the output would not fit in registers"),
        (256, 64, 64, 4, 1, "as for 192; two blocks are 15% faster than one of 8 warps"),
    )
    for dim, tile_m, tile_n, warps, stages, why in rows:
        for dtype, sparse in product(DTYPE_NAMES, (False, True)):
            # Without a mask 128 spills 36 bytes at most.
            hot = () if dim == 128 and not sparse else ("sm_90a",)
            yield FwdSm80(
                source="attention/fwd_sm80", dtype=dtype, dim=dim, tile_m=tile_m,
                tile_n=64 if sparse and 128 % tile_n else tile_n, warps=warps, stages=stages,
                blocks=2, why=why, sparse=sparse, hot_targets=hot,
            )  # fmt: skip


VARIANTS: tuple[FwdSm80, ...] = tuple(_rows())


def steps(traits: Traits, variant: Variant) -> list[Step]:
    """Return the launches of a problem: one, unless it has more tiles or axes than one takes."""
    (params, parts), kept = make_params(traits, variant.tile_m), traits.aligned()
    found = []
    for part in parts:
        own = params.copy()
        own["first_batch"] = part.first_batch
        if traits.problem.dropout is not None:
            own["dropout"]["first_entry"] = part.entry
        addresses = dict(traits.fields)
        shifts = dict(zip(traits.pointers, part.offsets, strict=True))
        if traits.problem.mask is not None:
            addresses |= mask_addresses(whole=len(parts) == 1)
            shifts["mask.matrix_of_entry"] = 4 * part.entry
        found.append(Step(variant, part.blocks, own, addresses, shifts=shifts, aligned=kept))
    return found
