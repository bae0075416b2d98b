"""The host side of ``split_kv``: K and V of float32 as pairs of float16, in tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fa_cupy.gpu.kernels.attention.attention_params import MAX_BATCH_AXES, Traits
from fa_cupy.gpu.kernels.variant import Variant
from fa_cupy.gpu.plan import Step

#: ``struct SplitArray`` of ``cuda_src/attention/split_kv.cu``.
SPLIT_ARRAY = np.dtype(
    [("from", np.uint64), ("to", np.uint64)]
    + [(name, np.int64, (MAX_BATCH_AXES,)) for name in ("batch", "size")]
    + [("blocks", np.uint32), ("row", np.int32), ("cols", np.int32)],
    align=True,
)
#: ``struct SplitKvParams`` there.
SPLIT_KV_PARAMS = np.dtype(
    [("array", SPLIT_ARRAY, (2,))] + [(name, np.int32) for name in ("rows", "tiles", "aligned")],
    align=True,
)
#: The parts of a workspace that the kernel writes: the tiles of K and those of V.
OUTPUTS = ("k_tiles", "v_tiles")
_ARRAYS = ("k", "v")


def tile_bytes(tile_n: int, dim: int, parts: int) -> int:
    """Return the size of a ``SplitTile``: parts, an exponent for each row, and what these are."""
    return 2 * parts * tile_n * dim + 4 * tile_n + 16


@dataclass(frozen=True, kw_only=True)
class SplitKv(Variant):
    """A row of ``split_kv``, whose tiles are those of a kernel that reads them.

    Attributes
    ----------
    parts : int
        2 for pairs of float16, 1 for numbers that are rounded to it.
    """

    parts: int

    @property
    def name(self) -> str:
        """Unique, for people and for file names."""
        return super().name + ("" if self.parts == 2 else "-rounded")

    @property
    def targets(self) -> tuple[str, ...]:
        """Those of the kernels that read its tiles."""
        return ("sm_90a",)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: two exponents for each warp."""
        return 8 * self.warps

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            *super().defines,
            ("FA_WARPS", self.warps),
            ("FA_PARTS", self.parts),
            ("FA_SPLIT_TILE_BYTES", tile_bytes(self.tile_n, self.dim, self.parts)),
            ("FA_SPLIT_KV_PARAMS_BYTES", SPLIT_KV_PARAMS.itemsize),
        )


VARIANTS: tuple[SplitKv, ...] = tuple(
    SplitKv(
        source="attention/split_kv", dtype="float32", dim=dim, tile_m=1, tile_n=tile_n, warps=8,
        stages=1, parts=parts, why="eight lanes share a row, and all rows are in registers",
    )
    for dim, tile_n, parts in (
        (64, 128, 2), (128, 64, 2), (256, 32, 2), (64, 128, 1), (128, 128, 1), (256, 64, 1),
    )
)  # fmt: skip


def entry_steps(traits: Traits, name: str) -> tuple[list[int], list[int]]:
    """Return the sizes of the batch axes that an array walks, and its entries along each.

    An axis that it broadcasts has size 1, and 0 entries lead along it.
    """
    walked = [bool(step) for step in traits.strides[name]]
    sizes = [size if own else 1 for size, own in zip(traits.sizes, walked, strict=True)]
    steps = [own * math.prod(sizes[axis + 1 :]) for axis, own in enumerate(walked)]
    return sizes, steps


def step(traits: Traits, variant: SplitKv) -> tuple[Step, dict[str, int]]:
    """Return the launch, and the bytes of the parts of the workspace that it writes.

    Parameters
    ----------
    traits : Traits
        Of a problem with at most `MAX_BATCH_AXES` batch axes.
    variant : SplitKv
    """
    problem, tile_n = traits.problem, variant.tile_n
    params = np.zeros(1, SPLIT_KV_PARAMS)
    p = params[0]
    p["rows"], p["tiles"] = problem.k_len, -(-problem.k_len // tile_n)
    sizes: dict[str, int] = {}
    addresses: dict[str, str] = {}
    grid, item = 0, problem.dtype.itemsize
    for number, (name, output) in enumerate(zip(_ARRAYS, OUTPUTS, strict=True)):
        array, (axes, _) = p["array"][number], entry_steps(traits, name)
        array["batch"][: len(axes)] = [s // item for s in traits.strides[name]]
        array["size"] = 1
        array["size"][: len(axes)] = axes
        array["blocks"] = blocks = math.prod(axes) * int(p["tiles"])
        array["row"] = traits.views[name].strides[-2] // item
        array["cols"] = problem.head_dim if name == "k" else problem.v_dim
        sizes[output] = blocks * tile_bytes(tile_n, variant.dim, variant.parts)
        addresses |= {f"array.{number}.from": name, f"array.{number}.to": output}
        grid += blocks
    rows = [(*traits.strides[x], traits.views[x].strides[-2]) for x in _ARRAYS]
    kept = _ARRAYS if all(step % 16 == 0 for steps in rows for step in steps) else ()
    return Step(variant, grid, params, addresses, aligned=kept), sizes
