"""The host side of ``fwd_fp64``: attention in float64 by ``mma.sync``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fa_cupy.gpu.kernels.attention.attention_params import (
    ATTENTION_PARAMS,
    Traits,
    make_params,
    mask_addresses,
)
from fa_cupy.gpu.kernels.attention.full_precision.key_lengths import BAND_BYTES
from fa_cupy.gpu.kernels.attention.full_precision.products_fp64 import DTYPE, ProductsFp64
from fa_cupy.gpu.plan import Step
from fa_cupy.tiled.softcap import transform

#: ``struct FwdFp64Params`` of ``cuda_src/attention/fwd_fp64.cu``.
FWD_FP64_PARAMS = np.dtype(
    [("common", ATTENTION_PARAMS), ("lse", np.uint64)]
    + [(name, np.float64) for name in ("scale", "softcap", "factor")]
    + [("aligned", np.int32)],
    align=True,
)
_WORK_BYTES = 112  # TileWork, KeyTiles and ListedRange in cuda_src/common


@dataclass(frozen=True, kw_only=True)
class FwdFp64(ProductsFp64):
    """A row of ``fwd_fp64``, which takes any call with a mask, or any without.

    Attributes
    ----------
    column_warps : int
        Warps that share rows, each with a part of the output's columns.
    """

    column_warps: int = 1

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: a tile each of Q, K and V, and the block's work."""
        work = _WORK_BYTES + (BAND_BYTES if self.lengths else 0)
        return 8 * self.dim * (self.tile_m + 2 * self.tile_n) + work

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            *super().defines,
            ("FA_TILE_M", self.tile_m),
            ("FA_WARPS", self.warps),
            ("FA_BLOCKS", 1),
            ("FA_COLUMN_WARPS", self.column_warps),
            ("FA_WIDE_MMA", int(self.wide)),
            ("FA_FWD_FP64_BYTES", FWD_FP64_PARAMS.itemsize),
        )

    @property
    def rank(self) -> tuple[int, ...]:
        """Smaller dims first, then those of SM90, then larger tiles."""
        return (self.dim, not self.wide, -self.tile_m * self.tile_n)


def _rows() -> Iterator[FwdFp64]:
    # dim, tile_m, tile_n, warps, column_warps, wide, why.
    rows = (
        (32, 128, 64, 8, 1, True, "16 rows a warp, two warps for each tensor core"),
        (64, 128, 64, 8, 1, True, "as for 32"),
        (96, 128, 32, 8, 1, True, "as for 32; scores of 64 keys would spill"),
        (128, 128, 32, 8, 1, True, "as for 96"),
        (192, 64, 32, 8, 2, True, "two warps share rows: the output would not fit in registers"),
        (256, 64, 16, 8, 2, True, "as for 192; shared memory is full"),
        (32, 64, 64, 4, 1, False, "fits the 99 KB of the smallest targets"),
        (64, 64, 48, 4, 1, False, "as for 32"),
        (128, 64, 16, 4, 1, False, "as for 32"),
        (256, 32, 16, 4, 2, False, "as for the row of SM90; not for the smallest targets"),
    )
    for dim, tile_m, tile_n, warps, column_warps, wide, why in rows:
        for sparse in (False, True):  # with a mask, tiles of keys divide its blocks of 128
            yield FwdFp64(
                source="attention/fwd_fp64", dtype=DTYPE, dim=dim, tile_m=tile_m,
                tile_n=32 if sparse and 128 % tile_n else tile_n, warps=warps, stages=1, why=why,
                column_warps=column_warps, wide=wide, sparse=sparse,
                hot_targets=(),  # log takes a stack of 8 bytes
            )  # fmt: skip


VARIANTS: tuple[FwdFp64, ...] = tuple(_rows())


def steps(traits: Traits, variant: FwdFp64) -> list[Step]:
    """Return the launches of a problem: one, unless it has more tiles or axes than one takes."""
    problem = traits.problem
    (params, parts), kept = make_params(traits, variant.tile_m), traits.aligned()
    filled = np.zeros(1, FWD_FP64_PARAMS)
    filled["common"], filled["scale"] = params, problem.scale
    if problem.softcap:
        filled["factor"], filled["softcap"] = transform(problem, problem.dtype)
    addresses = {f"common.{field}": name for field, name in traits.fields.items()}
    addresses["lse"] = addresses.pop("common.lse")
    found = []
    for part in parts:
        own = filled.copy()
        own["common"]["first_batch"] = part.first_batch
        shifts = dict(zip(traits.pointers, part.offsets, strict=True))
        listed = {}
        if problem.mask is not None:
            listed = mask_addresses("common.", whole=len(parts) == 1)
            shifts["mask.matrix_of_entry"] = 4 * part.entry
        to = addresses | listed
        found.append(Step(variant, part.blocks, own, to, shifts=shifts, aligned=kept))
    return found
