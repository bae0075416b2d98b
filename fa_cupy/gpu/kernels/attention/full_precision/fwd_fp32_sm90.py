"""The host side of ``fwd_fp32_sm90``: attention of float32 by ``wgmma`` on pairs of float16."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fa_cupy.gpu.kernels.attention.attention_params import (
    MAX_BATCH_AXES,
    MAX_GRID,
    Traits,
    make_params,
    mask_addresses,
)
from fa_cupy.gpu.kernels.attention.full_precision import split_kv
from fa_cupy.gpu.kernels.attention.full_precision.key_lengths import BAND_BYTES
from fa_cupy.gpu.kernels.variant import DROPOUT_ENTRY_BYTES, PARAMS
from fa_cupy.gpu.plan import Step

DTYPE = "float32"
#: ``struct FwdFp32Sm90Params`` of ``cuda_src/attention/fwd_fp32_sm90.cu``.
FWD_FP32_SM90_PARAMS, _PARAMS_WITH_DROPOUT = (
    np.dtype(
        [("common", common)]
        + [(name, np.uint64) for name in ("k", "v")]
        + [(f"{name}_batch", np.int64, (MAX_BATCH_AXES,)) for name in ("k", "v")],
        align=True,
    )
    for common in PARAMS
)
#: So many queries that share keys pay for splitting these: about 200 take as long as that does.
LEAST_ROWS = 512
_ARRAYS = ("q", "out")  # whose rows the kernel reads and writes itself
_ATOM_BYTES = 1024  # of the swizzle: tiles in shared memory begin at its multiples
_WORK_BYTES = 120  # TileWork, KeyTiles, TileRange and ListedRange in cuda_src/common


@dataclass(frozen=True, kw_only=True)
class FwdFp32Sm90(split_kv.OfSplitTiles):
    """A row of ``fwd_fp32_sm90``, which takes any call with a mask, or any without.

    Attributes
    ----------
    v_stages : int
        Tiles of V in flight; `stages` are those of K.
    """

    v_stages: int

    @property
    def split(self) -> split_kv.SplitKv:
        """The kernel that splits K and V for it."""
        wanted = self.tile_n, self.dim, self.parts
        rows = (row for row in split_kv.VARIANTS if (row.tile_n, row.dim, row.parts) == wanted)
        return next(rows).for_lengths(self.lengths)

    @property
    def params(self) -> np.dtype[Any]:
        """Of its struct."""
        return _PARAMS_WITH_DROPOUT if self.dropout else FWD_FP32_SM90_PARAMS

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: Q, tiles of K and V in pairs, factors, barriers, the work."""
        tiles = self.stages + self.v_stages
        pairs = 2 * self.parts * self.dim * self.tile_m + tiles * self.copied_bytes
        rest = 4 * (self.tile_m + self.stages) + 4  # a number for each tile of K, and a gap
        work = _WORK_BYTES + (BAND_BYTES if self.lengths else 0)
        work += DROPOUT_ENTRY_BYTES * self.dropout
        return _round_up(pairs + rest // 8 * 8 + 16 * tiles + work)

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            *super().defines,
            ("FA_V_STAGES", self.v_stages),
            ("FA_FWD_FP32_SM90_BYTES", self.params.itemsize),
        )

    @property
    def rank(self) -> tuple[int, ...]:
        """Before all rows of ``fwd_fp32``."""
        return (0, self.dim)


def _round_up(count: int) -> int:
    return -(-count // _ATOM_BYTES) * _ATOM_BYTES


#: Parts and dims of rows that spill 4 bytes, and 32 next to mixed tiles.
_SPILLING = ((1, 128), (2, 256))


def _rows() -> Iterator[FwdFp32Sm90]:
    # stages, v_stages and why, for each tile that split_kv has.
    rows = (
        (2, 2, "as many keys as there are registers for"),
        (2, 2, "as for 64"),
        (2, 1, "as for 64; shared memory is full"),
        (2, 2, "as for pairs"),
        (2, 2, "as for pairs"),
        (2, 2, "as for pairs"),
    )
    for tile, (stages, v_stages, why) in zip(split_kv.VARIANTS, rows, strict=True):
        parts, dim = tile.parts, tile.dim
        for sparse in (False, True):
            yield FwdFp32Sm90(  # two warpgroups compute, with 64 queries each
                source="attention/fwd_fp32_sm90", dtype=DTYPE, dim=dim, tile_m=128,
                tile_n=tile.tile_n, warps=12, stages=stages, v_stages=v_stages, parts=parts,
                why=why, sparse=sparse,
                hot_targets=("sm_90a",) if (parts, dim) not in _SPILLING else (),
            )  # fmt: skip


VARIANTS: tuple[FwdFp32Sm90, ...] = tuple(_rows())


def supports(traits: Traits) -> bool:
    """Whether it pays to split K and V of a problem of float32 beforehand.

    So many queries must share keys that these are worth splitting, and one launch must do.
    """
    problem, sizes = traits.problem, traits.sizes
    if not problem.k_len:
        return False
    shared = problem.q_len * math.prod(
        size
        for size, *steps in zip(sizes, traits.strides["k"], traits.strides["v"], strict=True)
        if not any(steps)
    )
    tiles = math.prod(sizes) * -(-max(problem.q_len, problem.k_len) // 64)
    return len(sizes) <= MAX_BATCH_AXES and 2 * tiles <= MAX_GRID and shared >= LEAST_ROWS


def steps(traits: Traits, variant: FwdFp32Sm90) -> tuple[list[Step], dict[str, int]]:
    """Return the two launches of a problem, and the bytes of the parts of their workspace."""
    first, sizes = split_kv.step(traits, variant.split)
    common, parts = make_params(traits, variant.tile_m)
    (part,) = parts
    params = np.zeros(1, variant.params)
    params["common"] = common
    tiles = -(-traits.problem.k_len // variant.tile_n)
    for name in ("k", "v"):
        entries = split_kv.entry_steps(traits, name)[1]
        params[f"{name}_batch"][0][: len(entries)] = [n * tiles for n in entries]
    addresses = {f"common.{field}": name for field, name in traits.fields.items()}
    addresses |= dict(zip(("k", "v"), split_kv.OUTPUTS, strict=True))
    if traits.problem.mask is not None:
        addresses |= mask_addresses("common.")
    kept = traits.aligned(_ARRAYS)
    return [first, Step(variant, part.blocks, params, addresses, aligned=kept)], sizes
