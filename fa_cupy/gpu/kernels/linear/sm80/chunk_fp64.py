"""The rows of ``chunk_fp64``: chunks of float64."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fa_cupy.gpu.driver.targets import SHARED_LIMIT, number_of
from fa_cupy.gpu.kernels.linear.variant import WORK_BYTES, ProductVariant


@dataclass(frozen=True, kw_only=True)
class Fp64Variant(ProductVariant):
    """A row of a kernel of ``cuda_src/common/chunk_fp64.cuh``.

    Attributes
    ----------
    wide : bool
        Whether one instruction of SM90 makes a product, for which eight do before.
    key_parts : int
        Parts of the key columns, each with as many warps.
    """

    wide: bool
    key_parts: int = 1

    @property
    def name(self) -> str:
        """Unique, for people and for file names."""
        return super().name + ("" if self.wide else "-m8n8k4")

    @functools.cached_property
    def targets(self) -> tuple[str, ...]:
        """Targets the row may serve: those whose best instruction it has, and its shared memory."""
        return tuple(
            t
            for t, limit in SHARED_LIMIT.items()
            if self.shared_bytes <= limit and self.wide == (number_of(t) >= 90)
        )

    @functools.cached_property
    def states_shape(self) -> tuple[int, int | None]:
        """The instruction too, so that a device has the faster one in both."""
        return self.dim, int(self.wide)

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            *super().defines,
            ("FA_WARPS", self.warps),
            ("FA_KEY_PARTS", self.key_parts),
            ("FA_WIDE_MMA", int(self.wide)),
        )


@dataclass(frozen=True, kw_only=True)
class ChunkFp64(Fp64Variant):
    """A row of ``chunk_fp64``."""

    algorithm: ClassVar[str] = "chunked"

    @functools.cached_property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: chunks of Q, K and V, weights, and parts of outputs."""
        chunks = 8 * self.stages * self.tile_m * (2 * self.dim + self.tile_n)
        down = self.tile_m // 16
        weights = down * (down + 1) // 2
        partial = (self.key_parts - 1) * down * self.tile_n // 16
        buffers = 2 if self.stages == 3 else 1
        return chunks + 2048 * buffers * (weights + partial) + WORK_BYTES + 8  # a multiple of 16


def _variants() -> Iterator[ChunkFp64]:
    # dim, tile_n, tile_m, stages, warps, key parts, blocks, wide, why. One warp alone keeps a
    # tensor core busy for 64 of 112 clocks, whatever it has to multiply: two warps for each.
    rows = (
        (32, 32, 32, 3, 4, 2, 2, True, "two blocks hide each other's barriers"),
        (64, 64, 32, 3, 8, 2, 1, True, "parts of the keys, or there would be four warps"),
        (64, 80, 16, 3, 10, 2, 1, True, "linear attention has one column more"),
        (96, 96, 16, 3, 12, 2, 1, True, "as for 64"),
        (128, 128, 16, 3, 8, 1, 1, True, "16 columns a warp, whose state takes 128 registers"),
        (128, 64, 16, 2, 8, 2, 1, True, "few columns of values; 99 KB of shared memory"),
        (192, 64, 16, 2, 8, 2, 1, True, "parts of the keys, or the state would not fit"),
        (256, 64, 16, 2, 8, 2, 1, True, "as for 192"),
        (32, 64, 16, 3, 4, 1, 4, False, "fits the 99 KB of the smallest targets"),
        (64, 64, 16, 3, 4, 1, 3, False, "as for 32"),
        (128, 64, 16, 2, 4, 1, 2, False, "as for 32"),
        (256, 64, 16, 2, 8, 2, 1, False, "not for the smallest targets"),
    )
    for dim, tile_n, tile_m, stages, warps, key_parts, blocks, wide, why in rows:
        yield ChunkFp64(
            source="linear/chunk_fp64", dtype="float64", dim=dim, tile_m=tile_m, tile_n=tile_n,
            warps=warps, stages=stages, blocks=blocks, wide=wide, key_parts=key_parts, why=why,
        )  # fmt: skip


VARIANTS: tuple[ChunkFp64, ...] = tuple(_variants())
