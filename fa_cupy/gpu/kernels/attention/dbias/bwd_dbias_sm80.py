"""The host side of ``bwd_dbias_sm80``, which computes the gradient of a bias on any device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from fa_cupy.gpu.kernels.backward import (
    BACKWARD_FIELDS,
    BackwardSm80,
    Launches,
    Traits,
    strided_params,
)
from fa_cupy.gpu.kernels.score import ScoreMod
from fa_cupy.gpu.kernels.tensor_maps import MAP_AXES
from fa_cupy.gpu.kernels.variant import DTYPE_NAMES, Variant
from fa_cupy.gpu.plan import Step

#: Fields of the structs of both kernels, in elements: how the gradient lies in memory.
DBIAS_STRIDES: list[Any] = [
    *[(name, np.int64) for name in ("dbias_row", "dbias_col")],
    ("dbias_batch", np.int64, (MAP_AXES,)),
]
#: ``struct DbiasParams`` of ``cuda_src/attention/bwd_dbias_sm80.cu``.
DBIAS_PARAMS = np.dtype(
    [*BACKWARD_FIELDS]
    + [(name, np.uint64) for name in ("dbias", "row_statistics", "partial_sums", "split_counters")]
    + DBIAS_STRIDES
    + [(name, np.int32) for name in ("sums_queries", "sums_keys", "splits")],
    align=True,
)
# Blocks for each multiprocessor that a launch should have: with fewer tiles, blocks share them.
_WAVES = 2
_LEAST_STEPS = 2  # of a split
_WORK_BYTES = 144  # OwnTile, three of PairStep and a word


@dataclass(frozen=True, kw_only=True)
class BwdDbiasSm80(BackwardSm80):
    """A row of ``bwd_dbias_sm80``. Each row has scores with a bias."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage)``, which the kernel checks."""
        return 4 * self.dim * (self.tile_m + self.tile_n) + 8 * self.tile_m + _WORK_BYTES

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (*super().defines, ("FA_DBIAS_PARAMS_BYTES", self.sized(DBIAS_PARAMS)))

    def step(self, traits: Traits, launches: Launches) -> Step:
        """Return the launch: a block for each tile of the gradient, or for each split of one."""
        params, addresses = strided_params(traits, launches, self.tile_m, False, DBIAS_PARAMS)
        outputs, splits, numbers = fill_splits(params[0], traits, launches, self)
        addresses |= {name: name for name in ("dbias", "row_statistics")}
        if splits > 1:
            launches.scratch["partial_sums"] = 4 * outputs * splits * numbers * self.threads
            launches.counters["split_counters"] = 4 * outputs
            addresses |= {name: name for name in ("partial_sums", "split_counters")}
        return Step(self, outputs * splits, params, addresses)


def fill_strides(params: np.void, traits: Traits) -> None:
    """Write how the gradient lies in memory into a struct."""
    dtype, view = traits.problem.bias_dtype, traits.views["dbias"]
    assert dtype is not None
    params["dbias_row"], params["dbias_col"] = (x // dtype.itemsize for x in view.strides[-2:])
    params["dbias_batch"] = [x // dtype.itemsize for x in traits.steps["dbias"]]


def fill_splits(
    params: np.void, traits: Traits, launches: Launches, row: Variant
) -> tuple[int, int, int]:
    """Write how blocks divide the gradient into a struct, and how it lies in memory.

    Returns
    -------
    (int, int, int)
        Tiles of the gradient, blocks that share one, and numbers that a thread has of it.
    """
    problem = traits.problem
    fill_strides(params, traits)
    tiles = -(-problem.q_len // row.tile_m), -(-problem.k_len // row.tile_n)
    summed = [step == 0 for step in traits.views["dbias"].strides[-2:]]
    params["sums_queries"], params["sums_keys"] = summed
    of_axes = [*zip(traits.size, (step == 0 for step in traits.steps["dbias"]), strict=True)]
    of_axes += zip(tiles, summed, strict=True)
    outputs = math.prod(n for n, is_summed in of_axes if not is_summed)
    shared = math.prod(n for n, is_summed in of_axes if is_summed)
    wanted = -(-_WAVES * launches.multiprocessors // outputs)
    params["splits"] = splits = max(1, min(wanted, shared // _LEAST_STEPS))
    return outputs, splits, 1 if any(summed) else row.tile_m * row.tile_n // row.threads


def _rows() -> Iterator[BwdDbiasSm80]:
    # dim, tile_m, tile_n, warps, score, why. Calls get builds for their scores; those of the table
    # are examples. Of one dim, the first row that a device has the shared memory for is taken.
    pair = ScoreMod(bias_axes="pair", bias_dtype="bfloat16")
    key = ScoreMod(bias_axes="key", bias_dtype="float32")
    query = ScoreMod(bias_axes="query", bias_dtype="float16")
    softcap = ScoreMod(softcap=True, bias_axes="pair", bias_dtype="float32")
    rows = (
        (32, 128, 128, 8, key, "sums, scores and dP of 32 x 64 pairs are 192 registers a thread"),
        (64, 128, 128, 8, pair, "as for 32"),
        (96, 128, 128, 8, query, "as for 32; all that fits the 99 KB of the smallest targets"),
        (128, 128, 128, 8, pair, "as for 32; a tile reads the fewest bytes a pair"),
        (128, 128, 64, 8, softcap, "fits the 99 KB of the smallest targets"),
        (192, 64, 64, 4, softcap, "fits the 99 KB of the smallest targets"),
        (256, 64, 32, 4, pair, "as for 192"),
    )
    for dim, tile_m, tile_n, warps, score, why in rows:
        for dtype, sparse in product(DTYPE_NAMES, (False, True)):
            yield BwdDbiasSm80(
                source="attention/bwd_dbias_sm80", dtype=dtype, dim=dim, tile_m=tile_m,
                tile_n=tile_n, warps=warps, stages=1, blocks=1, sparse=sparse, score=score, why=why,
            )  # fmt: skip


VARIANTS = tuple(_rows())
