"""The host side of ``tile_ranges``: which tiles of packed sequences work on each other."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from fa_cupy.core.attention_problem import Problem
from fa_cupy.gpu.driver.targets import SHARED_LIMIT
from fa_cupy.gpu.kernels.attention.packed.row_intervals import INTERVAL_BYTES
from fa_cupy.gpu.kernels.variant import Variant
from fa_cupy.gpu.plan import Step

#: What the kernel writes: fields of its struct, and names of parts of a workspace.
OUTPUTS = ("key_tiles", "query_tiles", "order")
#: ``struct TileRangesParams`` of ``cuda_src/attention/tile_ranges.cu``.
TILE_RANGES_PARAMS = np.dtype(
    [(name, np.uint64) for name in ("keys_of_row", *OUTPUTS)]
    + [(name, np.int32) for name in ("q_len", "k_len", "tile_m", "tile_n", "q_tiles", "k_tiles")],
    align=True,
)


@dataclass(frozen=True, kw_only=True)
class TileRanges(Variant):
    """The variant of ``tile_ranges``, which serves tiles of any size."""

    @property
    def targets(self) -> tuple[str, ...]:
        """All."""
        return tuple(SHARED_LIMIT)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: the work of as many tiles as there are threads."""
        return 4 * self.threads

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            *super().defines,
            ("FA_THREADS", self.threads),
            ("FA_TILE_RANGES_PARAMS_BYTES", TILE_RANGES_PARAMS.itemsize),
        )


VARIANT = TileRanges(
    source="attention/tile_ranges", dtype="int32", dim=1, tile_m=256, tile_n=1, warps=8, stages=1,
    why="a thread for each tile",
)  # fmt: skip


def tiles_of(problem: Problem, tile_m: int, tile_n: int) -> tuple[int, int]:
    """Return the tiles of query rows and of keys of a problem."""
    return -(-problem.q_len // tile_m), -(-problem.k_len // tile_n)


def sizes(problem: Problem, tile_m: int, tile_n: int) -> dict[str, int]:
    """Return the bytes of what the kernel can write, by name."""
    q_tiles, k_tiles = tiles_of(problem, tile_m, tile_n)
    items = q_tiles * INTERVAL_BYTES, k_tiles * INTERVAL_BYTES, 4 * q_tiles
    return dict(zip(OUTPUTS, items, strict=True))


def step(problem: Problem, tile_m: int, tile_n: int, wanted: Collection[str]) -> Step:
    """Return the launch that writes what is wanted of `OUTPUTS`.

    Parameters
    ----------
    problem : Problem
        With packed sequences, a query and a key.
    tile_m, tile_n : int
        Query rows and keys of a tile.
    wanted : collection of str
    """
    params = np.zeros(1, TILE_RANGES_PARAMS)
    p = params[0]
    p["q_len"], p["k_len"], p["tile_m"], p["tile_n"] = problem.q_len, problem.k_len, tile_m, tile_n
    q_tiles, k_tiles = p["q_tiles"], p["k_tiles"] = tiles_of(problem, tile_m, tile_n)
    threads = VARIANT.threads
    blocks = -(-q_tiles // threads) + (-(-k_tiles // threads) if "query_tiles" in wanted else 0)
    return Step(VARIANT, blocks, params, {name: name for name in ("keys_of_row", *wanted)})
