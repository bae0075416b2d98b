"""The launches that come before a kernel for packed sequences, and where it finds their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fa_cupy.core.attention_problem import Problem
from fa_cupy.gpu.kernels.attention.attention_params import MASK_LISTS
from fa_cupy.gpu.kernels.attention.packed import row_intervals, tile_ranges
from fa_cupy.gpu.plan import Step
from fa_cupy.score import tree

#: The arrays of offsets, whose addresses calls give after those of all others.
OFFSETS = ("q_offsets", "k_offsets")
#: The fields of ``struct RowIntervals`` (``cuda_src/common/row_intervals.cuh``), in their order.
FIELDS = (*row_intervals.OUTPUTS, *tile_ranges.OUTPUTS)


class Intervals(NamedTuple):
    """What comes before a kernel.

    Attributes
    ----------
    steps : list of Step
    sizes : dict of int
        Bytes of the parts of the workspace that they write, by name.
    addresses : dict of str
        For the kernel: by field of ``AttentionParams``, the part of the workspace.
    """

    steps: list[Step]
    sizes: dict[str, int]
    addresses: dict[str, str]

    def before(self, steps: Sequence[Step], prefix: str = "") -> list[Step]:
        """Return all launches, given those of the kernel and the path of its ``AttentionParams``."""
        found = {f"{prefix}{field}": name for field, name in self.addresses.items()}
        return [*self.steps, *[s._replace(addresses={**s.addresses, **found}) for s in steps]]


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
        What the kernel reads besides intervals of rows and keys: of `tile_ranges.OUTPUTS`.
    """
    steps, sizes = [row_intervals.step(problem)], row_intervals.sizes(problem)
    if problem.k_len and wanted:
        steps.append(tile_ranges.step(problem, tile_m, tile_n, wanted))
        of_tiles = tile_ranges.sizes(problem, tile_m, tile_n)
        sizes |= {name: of_tiles[name] for name in wanted}
    places = dict(zip(FIELDS, MASK_LISTS.names or (), strict=False))
    return Intervals(steps, sizes, {f"mask.{places[name]}": name for name in sizes})
