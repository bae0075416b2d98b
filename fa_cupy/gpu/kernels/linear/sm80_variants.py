"""The kernels of causal products, one row a compiled variant, with the reason beside each.

`fa_cupy.gpu.kernels.linear.heuristics` picks one for a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fa_cupy.gpu.kernels.linear.sm90_variants import (
    chunk_fp32_pingpong_sm90,
    chunk_fp32_sm90,
    chunk_sm90,
    chunk_state_fp32_sm90,
    chunk_state_sm90,
)
from fa_cupy.gpu.kernels.linear.variant import DTYPE_NAMES
from fa_cupy.gpu.kernels.linear.variant import ProductVariant as ProductVariant

_WORK_BYTES = 72  # ProductWork in cuda_src/common


@dataclass(frozen=True, kw_only=True)
class ChunkedVariant(ProductVariant):
    """A row of ``chunk_sm80``.

    Attributes
    ----------
    score_warps, state_warps : int
        The warps of its two teams.
    """

    score_warps: int
    state_warps: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: rings of Q, K and V, two tiles of scores and notes."""
        rings = 2 * self.stages * self.dim + (self.stages + 1) * self.tile_n
        return (
            2 * self.tile_m * (rings + 2 * self.tile_m) + 8 * (self.tile_m // 16 + 4) + _WORK_BYTES
        )

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        teams = ("FA_SCORE_WARPS", self.score_warps), ("FA_STATE_WARPS", self.state_warps)
        return (*super().defines, *teams)


@dataclass(frozen=True, kw_only=True)
class StatesVariant(ProductVariant):
    """A row of ``chunk_state_sm80``, of four warps for each part of the key columns."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: rings of K and V."""
        return 2 * self.stages * self.tile_m * (self.dim + self.tile_n) + _WORK_BYTES

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (*super().defines, ("FA_KEY_PARTS", self.warps // 4))


@dataclass(frozen=True, kw_only=True)
class ChunkedSingleVariant(ProductVariant):
    """A row of ``chunk_fp32_sm80``: float32 as pairs of float16, three teams of warps.

    Attributes
    ----------
    split_warps, score_warps : int
        Those that make the pairs, and those with 16 rows of scores each; 0: split warps have them,
        too. Each of the others has 16 value columns.
    """

    split_warps: int
    score_warps: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: buffers of Q, K and V, two tiles of scores, exponents, notes."""
        rows = self.stages * (2 * self.dim + self.tile_n) + 2 * self.tile_m
        exponents = (2 * self.stages + 2) * self.tile_m
        notes = self.stages * self.split_warps + self.tile_n
        return 4 * (rows * self.tile_m + exponents + notes) + _WORK_BYTES + 8

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        teams = ("FA_SPLIT_WARPS", self.split_warps), ("FA_SCORE_WARPS", self.score_warps)
        return (*super().defines, *teams, ("FA_THREADS", self.threads))


@dataclass(frozen=True, kw_only=True)
class StatesSingleVariant(StatesVariant):
    """A row of ``chunk_state_fp32_sm80``: two teams of warps.

    Attributes
    ----------
    split_warps : int
        Those that make the pairs; each of the others has 16 value columns.
    """

    split_warps: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: buffers of K and V, and exponents."""
        row = self.dim + self.tile_n + 1
        return 4 * self.stages * self.tile_m * row + _WORK_BYTES

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        teams = ("FA_SPLIT_WARPS", self.split_warps), ("FA_THREADS", self.threads)
        return (*ProductVariant.defines.__get__(self), *teams)


@dataclass(frozen=True, kw_only=True)
class RecurrentVariant(ProductVariant):
    """A row of ``recurrent``: `tile_m` rows in each of `stages` buffers."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: rings of Q, K and V."""
        return 4 * self.stages * self.tile_m * (2 * self.dim + self.tile_n)


@dataclass(frozen=True, kw_only=True)
class LowOccupancyVariant(RecurrentVariant):
    """A row of ``low_occupancy``: a warp for every 8 rows of a tile."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: the rings, and what each warp has summed."""
        return super().shared_bytes + 4 * self.warps * self.dim * self.tile_n


@dataclass(frozen=True, kw_only=True)
class ScanVariant(ProductVariant):
    """The row of ``state_prefix_sum``, one thread an element of the state."""

    @property
    def shared_bytes(self) -> int:
        """None."""
        return 0


def _chunked() -> Iterator[ChunkedVariant]:
    # dim, tile_n, tile_m, stages, state warps, blocks, why. A chunk of 64 rows at dims of 64 is
    # 32 KB of traffic, of which two are to be under way on each multiprocessor.
    rows = (
        (32, 32, 64, 4, 2, 2, "two blocks on a multiprocessor hide each other's barriers"),
        (64, 64, 64, 4, 4, 1, "two chunks of 24 KB under way"),
        (64, 64, 64, 3, 4, 2, "for 99 KB of shared memory; two blocks where there are 227"),
        (96, 96, 64, 4, 3, 1, "32 columns a warp: three warps own 96"),
        (96, 96, 32, 4, 3, 1, "for 99 KB of shared memory"),
        (128, 128, 64, 4, 4, 1, "two chunks of 48 KB under way"),
        (128, 128, 32, 4, 4, 1, "for 163 KB of shared memory"),
        (128, 128, 32, 3, 4, 1, "for 99 KB of shared memory"),
        (256, 64, 32, 4, 4, 1, "16 columns a warp, or the state would not fit in registers"),
    )
    for dim, tile_n, tile_m, stages, state_warps, blocks, why in rows:
        for dtype in DTYPE_NAMES:
            yield ChunkedVariant(
                source="linear/chunk_sm80", dtype=dtype, dim=dim, tile_m=tile_m, tile_n=tile_n,
                warps=4 + state_warps, stages=stages, score_warps=4, state_warps=state_warps,
                blocks=blocks, why=why,
            )  # fmt: skip


def _states() -> Iterator[StatesVariant]:
    # dim, tile_n, tile_m, stages, warps, blocks, why.
    rows = (
        (32, 64, 64, 4, 4, 3, "16 columns a warp"),
        (64, 64, 64, 4, 4, 3, "as for 32"),
        (96, 128, 64, 3, 4, 2, "32 columns a warp: K is read once for 96"),
        (128, 128, 64, 3, 8, 1, "64 x 32 elements of the state a warp"),
        (256, 64, 32, 4, 8, 1, "128 x 16 elements of the state a warp"),
    )
    for dim, tile_n, tile_m, stages, warps, blocks, why in rows:
        for dtype in DTYPE_NAMES:
            yield StatesVariant(
                source="linear/chunk_state_sm80", dtype=dtype, dim=dim, tile_m=tile_m,
                tile_n=tile_n, warps=warps, stages=stages, blocks=blocks, why=why,
            )  # fmt: skip


def _chunked_single() -> Iterator[ChunkedSingleVariant]:
    # dim and tile_n, tile_m, score warps, blocks, why. 4 warps split, one has 16 value columns.
    rows = (
        (32, 32, 2, 2, "two blocks on a multiprocessor hide each other's barriers"),
        (64, 64, 4, 1, "a warp of each team on each quarter; 48 KB under way in registers"),
        (64, 32, 2, 1, "for 99 KB of shared memory"),
        (96, 32, 2, 1, "36 KB under way in registers"),
        (128, 32, 0, 1, "12 warps, or the state would not fit in registers"),
    )
    for dim, tile_m, score_warps, blocks, why in rows:
        yield ChunkedSingleVariant(
            source="linear/chunk_fp32_sm80", dtype="float32", dim=dim, tile_m=tile_m,
            tile_n=dim, warps=4 + score_warps + dim // 16, stages=3, split_warps=4,
            score_warps=score_warps, blocks=blocks, why=why,
        )  # fmt: skip


def _states_single() -> Iterator[StatesSingleVariant]:
    # dim and tile_n, tile_m, blocks, why. Warps: 4 that split, one for 16 columns.
    rows = (
        (32, 64, 3, "16 KB a buffer"),
        (64, 64, 1, "32 KB a buffer"),
        (96, 32, 1, "24 KB a buffer"),
        (128, 32, 1, "two state warps on each quarter; 32 KB a buffer"),
    )
    for dim, tile_m, blocks, why in rows:
        yield StatesSingleVariant(
            source="linear/chunk_state_fp32_sm80", dtype="float32", dim=dim, tile_m=tile_m,
            tile_n=dim, warps=4 + dim // 16, stages=2, split_warps=4, blocks=blocks, why=why,
        )  # fmt: skip


def _recurrent() -> Iterator[RecurrentVariant]:
    # dim, tile_m, stages, blocks, why. 64 value columns: 16 threads, times one for 8 key columns.
    rows = (
        (32, 32, 3, 4, "16 KB a stage, two of them under way"),
        (64, 32, 3, 2, "24 KB a stage, two of them under way"),
        (128, 32, 2, 2, "40 KB a stage, one of them under way"),
        (256, 16, 2, 1, "36 KB a stage, one of them under way; wider keys in turns"),
    )
    for dim, tile_m, stages, blocks, why in rows:
        yield RecurrentVariant(
            source="linear/recurrent", dtype="float32", dim=dim, tile_m=tile_m, tile_n=64,
            warps=dim // 16, stages=stages, blocks=blocks, why=why,
        )  # fmt: skip


def _low_occupancy() -> Iterator[LowOccupancyVariant]:
    # dim, tile_m, stages, blocks, why.
    rows = (
        (32, 64, 3, 2, "8 warps, 16 KB a stage"),
        (64, 128, 2, 1, "16 warps: long sequences alone on a multiprocessor take fewer tiles"),
        (64, 32, 3, 3, "4 warps, 17 KB a stage"),
        (128, 64, 2, 1, "8 warps, 66 KB a stage"),
        (128, 32, 2, 2, "4 warps, 33 KB a stage"),
        (256, 16, 2, 2, "2 warps, 33 KB a stage; wider keys in turns"),
    )
    for dim, tile_m, stages, blocks, why in rows:
        yield LowOccupancyVariant(
            source="linear/low_occupancy", dtype="float32", dim=dim, tile_m=tile_m, tile_n=4,
            warps=tile_m // 8, stages=stages, blocks=blocks, why=why,
        )  # fmt: skip


SCAN = ScanVariant(
    source="linear/state_prefix_sum", dtype="float32", dim=256, tile_m=1, tile_n=256, warps=8,
    stages=1, blocks=4, why="whole lines of states a warp",
)  # fmt: skip
PRODUCTS: tuple[ProductVariant, ...] = (
    *_chunked(),
    *_states(),
    SCAN,
    *_chunked_single(),
    *_states_single(),
    *_recurrent(),
    *_low_occupancy(),
    *chunk_sm90(),
    *chunk_fp32_sm90(),
    *chunk_state_sm90(),
    *chunk_fp32_pingpong_sm90(),
    *chunk_state_fp32_sm90(),
)
