"""The kernels of causal products for SM90, one row a compiled variant, with the reason for each.

A part of the table in `fa_cupy.gpu.kernels.linear.sm80_variants`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fa_cupy.gpu.kernels.linear.sm90_params import PRODUCT_SM90_PARAMS
from fa_cupy.gpu.kernels.linear.variant import DTYPE_NAMES, ProductVariant

_WORK_BYTES = 64  # Work in cuda_src/common/linear_sm90.cuh


@dataclass(frozen=True, kw_only=True)
class VariantSm90(ProductVariant):
    """A row of a kernel that tensor maps feed: a warpgroup for every 64 of its value columns."""

    @property
    def name(self) -> str:
        """Unique, for people and for file names."""
        return super().name + (f"-b{self.blocks}" if self.blocks > 1 else "")

    @property
    def targets(self) -> tuple[str, ...]:
        """The only target that has wgmma."""
        return ("sm_90a",)

    @property
    def groups(self) -> int:
        """Warpgroups that hold the state."""
        return self.tile_n // 64

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (*super().defines, ("FA_SM90_PARAMS_BYTES", PRODUCT_SM90_PARAMS.itemsize))


@dataclass(frozen=True, kw_only=True)
class ChunkedSm90Variant(VariantSm90):
    """A row of ``chunk_sm90``: a warpgroup feeds, another one makes scores.

    Attributes
    ----------
    p_slots : int
        Places for the weights of a chunk.
    out_slots : int
        Places for finished chunks of the output.
    """

    p_slots: int
    out_slots: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage)``, which the kernel checks."""
        rows = self.stages * (2 * self.dim + self.tile_n)
        rows += self.p_slots * 64 + self.out_slots * self.tile_n
        notes = self.p_slots * (24 + 4 * self.tile_n)
        barriers = 2 * (self.stages + self.p_slots + self.out_slots * self.groups)
        return 2 * self.tile_m * rows + notes + 8 * barriers + _WORK_BYTES

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            *super().defines,
            ("FA_P_STAGES", self.p_slots),
            ("FA_OUT_STAGES", self.out_slots),
        )


@dataclass(frozen=True, kw_only=True)
class StatesSm90Variant(VariantSm90):
    """A row of ``chunk_state_sm90``: a warpgroup feeds."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage)``, which the kernel checks."""
        rows = self.stages * (self.dim + self.tile_n)
        return 2 * self.tile_m * rows + 16 * self.stages + _WORK_BYTES


@dataclass(frozen=True, kw_only=True)
class ChunkedSingleSm90Variant(VariantSm90):
    """A row of ``chunk_fp32_sm90``: a warpgroup splits float32, another one makes scores.

    One chunk lies in shared memory as pairs of float16, beside `stages` of them as they come.
    """

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage)``, which the kernel checks."""
        columns = (self.stages + 1) * (2 * self.dim + self.tile_n) + 64
        notes = 4 * self.tile_m + self.tile_n + 4
        barriers = 3 * self.stages + 7
        return 4 * (self.tile_m * columns + notes) + 8 * barriers + _WORK_BYTES + 8


@dataclass(frozen=True, kw_only=True)
class StatesSingleSm90Variant(VariantSm90):
    """A row of ``chunk_state_fp32_sm90``: `splitters` warpgroups split float32 in turns."""

    splitters: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage)``, which the kernel checks."""
        rows = self.stages * (self.dim + self.tile_n + 1)
        return 4 * self.tile_m * rows + 24 * self.stages + _WORK_BYTES

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (*super().defines, ("FA_SPLIT_WARPGROUPS", self.splitters))


@dataclass(frozen=True, kw_only=True)
class ChunkedSingleTurnsVariant(VariantSm90):
    """A row of ``chunk_fp32_pingpong_sm90``: two warpgroups take turns at scores and outputs."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage)``, which the kernel checks."""
        chunk = 4 * self.tile_m * (2 * self.dim + self.tile_n) + 6 * self.tile_m + self.tile_n + 16
        state = 4 * self.tile_n * (self.dim + 1) + 16  # there are two
        return self.stages * (chunk + 7 * 8) + 2 * state + _WORK_BYTES + 8


def chunk_sm90() -> Iterator[ChunkedSm90Variant]:
    """Yield the rows of ``chunk_sm90``."""
    # dim, tile_n, stages, p_slots, out_slots, blocks, why. A multiprocessor has 32 KB a
    # microsecond; a chunk of 64 rows takes 24 KB of loads at dims of 64, 48 KB at dims of 128.
    rows = (
        (64, 64, 5, 3, 4, 1, "three chunks of 24 KB and three outputs under way"),
        (64, 64, 3, 2, 2, 2, "two blocks on a multiprocessor fill each other's waits"),
        (64, 128, 4, 3, 2, 1, "scores once for 128 value columns"),
        (128, 64, 4, 3, 2, 1, "as for 64; more blocks where there are few batch entries"),
        (128, 128, 4, 2, 1, 1, "two chunks of 48 KB under way"),
    )
    for dim, tile_n, stages, p_slots, out_slots, blocks, why in rows:
        for dtype in DTYPE_NAMES:
            yield ChunkedSm90Variant(
                source="linear/chunk_sm90", dtype=dtype, dim=dim, tile_m=64, tile_n=tile_n,
                warps=8 + tile_n // 16, stages=stages, p_slots=p_slots, out_slots=out_slots,
                blocks=blocks, why=why,
            )  # fmt: skip


def chunk_fp32_sm90() -> Iterator[ChunkedSingleSm90Variant]:
    """Yield the rows of ``chunk_fp32_sm90``."""
    # dim, tile_n, stages, why. A chunk of 64 rows takes 96 KB of loads at dims of 128, and as much
    # as pairs of float16. Dims of 64 are those of `chunk_fp32_pingpong_sm90`.
    rows = (
        (64, 128, 2, "scores once for 128 value columns; 64 KB under way"),
        (128, 64, 1, "80 KB under way; more blocks where there are few batch entries"),
        (128, 128, 1, "Q, K and V come and go apart: all that 227 KB have room for"),
    )
    for dim, tile_n, stages, why in rows:
        yield ChunkedSingleSm90Variant(
            source="linear/chunk_fp32_sm90", dtype="float32", dim=dim, tile_m=64,
            tile_n=tile_n, warps=8 + tile_n // 16, stages=stages, blocks=1, why=why,
        )  # fmt: skip


def chunk_state_sm90() -> Iterator[StatesSm90Variant]:
    """Yield the rows of ``chunk_state_sm90``."""
    # dim, tile_n, stages, blocks, why.
    rows = (
        (64, 64, 6, 2, "ten chunks of 16 KB under way on a multiprocessor"),
        (64, 128, 4, 2, "six chunks of 24 KB under way; K is read once for 128 value columns"),
        (128, 64, 8, 1, "seven chunks of 24 KB under way; two blocks would have 128 registers"),
        (128, 128, 6, 1, "five chunks of 32 KB under way"),
    )
    for dim, tile_n, stages, blocks, why in rows:
        for dtype in DTYPE_NAMES:
            yield StatesSm90Variant(
                source="linear/chunk_state_sm90", dtype=dtype, dim=dim, tile_m=64, tile_n=tile_n,
                warps=4 + tile_n // 16, stages=stages, blocks=blocks, why=why,
            )  # fmt: skip


def chunk_fp32_pingpong_sm90() -> Iterator[ChunkedSingleTurnsVariant]:
    """Yield the row of ``chunk_fp32_pingpong_sm90``."""
    yield ChunkedSingleTurnsVariant(
        source="linear/chunk_fp32_pingpong_sm90", dtype="float32", dim=64, tile_m=64, tile_n=64,
        warps=16, stages=3, blocks=1,
        why="each warpgroup has the time of two chunks for one; one of 48 KB under way",
    )  # fmt: skip


def chunk_state_fp32_sm90() -> Iterator[StatesSingleSm90Variant]:
    """Yield the rows of ``chunk_state_fp32_sm90``."""
    # dim, tile_n, stages, splitters, why. A chunk of 64 rows takes 32 KB of loads at dims of 64 and
    # 64 KB at dims of 128.
    rows = (
        (64, 64, 6, 2, "four chunks of 32 KB under way"),
        (64, 128, 4, 1, "two chunks of 48 KB under way"),
        (128, 64, 4, 1, "two chunks of 48 KB under way"),
        (128, 128, 3, 1, "a chunk of 64 KB under way"),
    )
    for dim, tile_n, stages, splitters, why in rows:
        yield StatesSingleSm90Variant(
            source="linear/chunk_state_fp32_sm90", dtype="float32", dim=dim, tile_m=64,
            tile_n=tile_n, warps=4 * splitters + tile_n // 16, stages=stages, splitters=splitters,
            blocks=1, why=why,
        )  # fmt: skip
