"""The host side of ``split_kv``: K and V of float32 as pairs of float16, in tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fa_cupy.gpu.kernels.attention.attention_params import MAX_BATCH_AXES, Traits
from fa_cupy.gpu.kernels.attention.full_precision import key_lengths
from fa_cupy.gpu.kernels.attention.full_precision.key_lengths import KEY_LENGTHS
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
    [("array", SPLIT_ARRAY, (2,))]
    + [(name, np.int32) for name in ("rows", "tiles", "aligned")]
    + [("k_lengths", KEY_LENGTHS)],
    align=True,
)
#: The parts of a workspace that the kernel writes: the tiles of K and those of V.
OUTPUTS = ("k_tiles", "v_tiles")
_ARRAYS = ("k", "v")


@dataclass(frozen=True, kw_only=True)
class OfSplitTiles(Variant):
    """A row of a kernel that writes or reads tiles of K and V.

    Attributes
    ----------
    parts : int
        2 for pairs of float16 and three products. 1 for numbers that are rounded to float16, which
        has as many digits as TF32.
    """

    parts: int

    @property
    def name(self) -> str:
        """Unique, for people and for file names."""
        return super().name + ("" if self.parts == 2 else "-rounded")

    @property
    def targets(self) -> tuple[str, ...]:
        """Those that have wgmma, which reads the tiles."""
        return ("sm_90a",)

    @property
    def tile_bytes(self) -> int:
        """Size of a ``SplitTile``: what is copied, and a factor for each column of pairs."""
        return self.copied_bytes + 4 * (self.dim if self.parts == 2 else 4)

    @property
    def copied_bytes(self) -> int:
        """What blocks copy of it: parts, an exponent for each row, and what these are."""
        return 2 * self.parts * self.tile_n * self.dim + 4 * self.tile_n + 16

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            *super().defines,
            ("FA_PARTS", self.parts),
            ("FA_SPLIT_TILE_BYTES", self.tile_bytes),
        )


class SplitKv(OfSplitTiles):
    """A row of ``split_kv``."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: two exponents, a count, columns of each warp and of all."""
        return 12 * self.warps + 4 * self.dim * (self.warps + 1)

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            *super().defines,
            ("FA_WARPS", self.warps),
            ("FA_SPLIT_KV_PARAMS_BYTES", SPLIT_KV_PARAMS.itemsize),
        )


#: A row for each tile that `fwd_fp32_sm90` has.
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


def _differ_by_length(traits: Traits) -> bool:
    """Whether entries with lengths of their own have keys and values of their own.

    Others are split to the end. What is behind one entry's may then be NaN, and rows computed
    again.
    """
    walked = zip(*(traits.strides[name] for name in (*_ARRAYS, key_lengths.ARRAY)), strict=True)
    return all(k and v for k, v, of_lengths in walked if of_lengths)


def step(traits: Traits, variant: SplitKv) -> tuple[Step, dict[str, int]]:
    """Return the launch, and the bytes of the parts of the workspace that it writes.

    Parameters
    ----------
    traits : Traits
        Of a problem with at most `MAX_BATCH_AXES` batch axes.
    variant : SplitKv
    """
    problem = traits.problem
    params = np.zeros(1, SPLIT_KV_PARAMS)
    p = params[0]
    p["rows"], p["tiles"] = problem.k_len, -(-problem.k_len // variant.tile_n)
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
        sizes[output] = blocks * variant.tile_bytes
        addresses |= {f"array.{number}.from": name, f"array.{number}.to": output}
        grid += blocks
    if variant.lengths and _differ_by_length(traits):
        params["k_lengths"] = key_lengths.filled(problem, traits.strides[key_lengths.ARRAY])
        addresses["k_lengths.start"] = key_lengths.ARRAY
    return Step(variant, grid, params, addresses, aligned=traits.aligned(_ARRAYS)), sizes
