"""The host side of ``row_intervals``: which keys each row of packed sequences sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fa_cupy.core.attention_problem import Problem
from fa_cupy.gpu.driver.targets import SHARED_LIMIT
from fa_cupy.gpu.kernels.attention.attention_params import MASK_LISTS, band_limits
from fa_cupy.gpu.kernels.variant import Variant
from fa_cupy.gpu.plan import Step
from fa_cupy.score import tree

#: Rows behind the last one that have an interval too: ``kIntervalPadding`` of
#: ``cuda_src/common/row_intervals.cuh``.
PADDING = 256
#: Bytes of a ``struct Interval`` there.
INTERVAL_BYTES = 8
#: Tiles of rows of which a block holds what they work on: 16 kB, for 131,072 queries by 64.
CACHED_TILES = 2048
#: What the kernel writes, in the order of ``struct RowIntervals``: fields of its own struct, and
#: names of parts of a workspace. All but the first one are written where they are wanted.
OUTPUTS = ("keys_of_row", "rows_of_key", "key_tiles", "query_tiles", "order")
#: The arrays of offsets, whose addresses calls give after those of all others.
OFFSETS = ("q_offsets", "k_offsets")
#: ``struct RowIntervalsParams`` of ``cuda_src/attention/row_intervals.cu``.
ROW_INTERVALS_PARAMS = np.dtype(
    [(name, np.uint64) for name in (*OFFSETS, *OUTPUTS)]
    + [(name, np.int32) for name in ("sequences", "q_len", "k_len", "lower", "upper")]
    + [(name, np.int32) for name in ("band_from_end", "q_bytes", "k_bytes")]
    + [(name, np.int32) for name in ("tile_m", "tile_n", "q_tiles", "k_tiles")]
    + [("blocks", np.int32, (4,))],
    align=True,
)
#: With dropout also where each row is in its sequence.
PARAMS_WITH_PLACES = np.dtype([("plain", ROW_INTERVALS_PARAMS), ("places", np.uint64)], align=True)
#: Bytes of a ``struct PlaceInSequence`` of ``cuda_src/common/dropout.cuh``.
PLACE_BYTES = 16
# What the threads of each part of the grid write: those of tiles, which take longest, come first.
_PARTS = ("key_tiles", "order"), ("query_tiles",), ("keys_of_row",), ("rows_of_key",)


@dataclass(frozen=True, kw_only=True)
class RowIntervals(Variant):
    """The variant of ``row_intervals``, which serves sequences and tiles of any sizes."""

    @property
    def targets(self) -> tuple[str, ...]:
        """All."""
        return tuple(SHARED_LIMIT)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: a number for each warp and each thread, two for each tile."""
        return 4 * self.warps + 4 * self.threads + INTERVAL_BYTES * CACHED_TILES

    @property
    def params(self) -> np.dtype[Any]:
        """Of its struct."""
        return PARAMS_WITH_PLACES if self.dropout else ROW_INTERVALS_PARAMS

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            *super().defines,
            ("FA_THREADS", self.threads),
            ("FA_CACHED_TILES", CACHED_TILES),
            ("FA_ROW_INTERVALS_PARAMS_BYTES", self.params.itemsize),
        )


VARIANT = RowIntervals(
    source="attention/row_intervals", dtype="int32", dim=1, tile_m=256, tile_n=1, warps=8,
    stages=1, why="a thread for each row, each key and each tile",
)  # fmt: skip


class Intervals(NamedTuple):
    """What comes before a kernel.

    Attributes
    ----------
    step : Step
    sizes : dict of int
        Bytes of the parts of the workspace that it writes, by name.
    addresses : dict of str
        For the kernel: by field of ``AttentionParams``, the part of the workspace.
    """

    step: Step
    sizes: dict[str, int]
    addresses: dict[str, str]

    def before(self, steps: Sequence[Step], prefix: str = "") -> list[Step]:
        """Return all launches, given the kernels' and the path of their ``AttentionParams``.

        Builds without dropout have no field for the places of rows.
        """
        found = {f"{prefix}{field}": name for field, name in self.addresses.items()}
        plain = {field: name for field, name in found.items() if name != "places"}
        return [
            self.step,
            *[
                s._replace(addresses={**s.addresses, **(found if s.variant.dropout else plain)})
                for s in steps
            ],
        ]


def supports(problem: Problem) -> bool:
    """Whether kernels solve a problem of packed sequences that some kernel serves in any layout.

    There is no mask, and no expression that knows positions: to kernels these count from the
    beginning of the first sequence.
    """
    if problem.mask is not None:
        return False
    root = () if problem.score is None else (problem.score.program.root,)
    return not {"i", "j"} & set(tree.variables_of(*root))


def intervals(problem: Problem, tile_m: int, tile_n: int, wanted: Sequence[str]) -> Intervals:
    """Return what has to be launched before a kernel with tiles of this size.

    Parameters
    ----------
    problem : Problem
        With packed sequences.
    tile_m, tile_n : int
        Query rows and keys of a tile.
    wanted : sequence of str
        What the kernel reads besides the intervals of rows: some of `OUTPUTS`.
    """
    offsets = problem.offsets
    assert offsets is not None
    params = np.zeros(1, ROW_INTERVALS_PARAMS)
    p = params[0]
    p["sequences"], p["q_len"], p["k_len"] = offsets.sequences, problem.q_len, problem.k_len
    p["lower"], p["upper"] = band_limits(problem)
    p["band_from_end"] = problem.band_from_end
    p["q_bytes"], p["k_bytes"] = offsets.q_dtype.itemsize, offsets.k_dtype.itemsize
    p["tile_m"], p["tile_n"] = tile_m, tile_n
    q_tiles, k_tiles = -(-problem.q_len // tile_m), -(-problem.k_len // tile_n)
    items = problem.q_len + PADDING, problem.k_len + PADDING, q_tiles, k_tiles, q_tiles
    if not problem.k_len:  # there are no tiles of keys, and nothing to put in order
        wanted = [name for name in wanted if name == "rows_of_key"]
    names = [name for name in OUTPUTS if name == OUTPUTS[0] or name in wanted]
    count = {name: n for name, n in zip(OUTPUTS, items, strict=True) if name in names}
    sizes = {name: n * (4 if name == "order" else INTERVAL_BYTES) for name, n in count.items()}
    p["q_tiles"], p["k_tiles"] = q_tiles, k_tiles
    threads = [max(count.get(name, 0) for name in part) for part in _PARTS]
    p["blocks"] = blocks = [-(-n // VARIANT.threads) for n in threads]
    places = dict(zip(OUTPUTS, MASK_LISTS.names or (), strict=False))
    addresses = {name: name for name in (*OFFSETS, *sizes)}
    found = {f"mask.{places[name]}": name for name in sizes}
    if problem.dropout is None:
        return Intervals(Step(VARIANT, sum(blocks), params, addresses), sizes, found)
    more = np.zeros(1, PARAMS_WITH_PLACES)
    more["plain"] = params
    addresses = {f"plain.{name}": name for name in addresses} | {"places": "places"}
    sizes["places"] = PLACE_BYTES * items[0]
    step = Step(VARIANT.for_dropout(True), sum(blocks), more, addresses)
    return Intervals(step, sizes, found | {"dropout.places": "places"})
