"""The host side of ``bwd_dbias_sm90``, which computes the gradient of a bias of pairs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from fa_cupy.gpu.driver.targets import SHARED_LIMIT
from fa_cupy.gpu.kernels.attention.dbias.bwd_dbias_sm80 import DBIAS_STRIDES, fill_strides
from fa_cupy.gpu.kernels.backward import BWD_SM90_PARAMS, BackwardSm90, Launches, Traits
from fa_cupy.gpu.kernels.score import ScoreMod
from fa_cupy.gpu.kernels.variant import DTYPE_NAMES
from fa_cupy.gpu.plan import Step

_MOST_STAGES = 5
# Columns of Q and K that come into a stage. At dim 256 whole rows of both, and of dO and V, would
# take 256 kB; columns by 64 leave room for six stages.
_STAGE_DIM = {64: 64, 128: 128, 256: 64}


def _derived(base: np.dtype[Any], fields: list[Any]) -> np.dtype[Any]:
    """Return the struct of more fields behind a base, whose alignment is 64."""
    more = np.dtype(fields, align=True)
    placed = [
        (name, field[0], start + field[1])
        for start, struct in ((0, base), (base.itemsize, more))
        for name, field in (struct.fields or {}).items()
    ]
    names, formats, offsets = zip(*placed, strict=True)
    size = base.itemsize + -(-more.itemsize // 64) * 64
    return np.dtype(
        {"names": names, "formats": formats, "offsets": offsets, "itemsize": size},
        align=True,
    )


#: ``struct DbiasParams`` of ``cuda_src/attention/bwd_dbias_sm90.cu``.
DBIAS_SM90_PARAMS = _derived(
    BWD_SM90_PARAMS, [(name, np.uint64) for name in ("dbias", "row_statistics")] + DBIAS_STRIDES
)


@dataclass(frozen=True, kw_only=True)
class BwdDbiasSm90(BackwardSm90):
    """A row of ``bwd_dbias_sm90``: two warpgroups of 64 queries each, and one that feeds them."""

    @property
    def stage_dim(self) -> int:
        """Columns of Q and K, or of dO and V, in a stage of shared memory."""
        return _STAGE_DIM[self.dim]

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage)``, which the kernel checks."""
        assert self.score is not None
        tiles = self.stages * 2 * self.stage_dim * (self.tile_m + self.tile_n)
        bias = self.tile_m * self.tile_n * (2 if self.score.has_16_bit_pairs else 4)
        rows = -(-self.stages * self.stage_dim // (2 * self.dim)) * 8 * self.tile_m
        return tiles + bias + rows + 16 * self.stages

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        more = {
            "FA_DBIAS_PARAMS_BYTES": DBIAS_SM90_PARAMS.itemsize,
            "FA_STAGE_DIM": self.stage_dim,
        }
        return (*super().defines, *more.items())

    def for_score(self, score: ScoreMod | None) -> BwdDbiasSm90:
        """Return the build of this row for calls with such scores, of as many stages as fit."""
        most = _MOST_STAGES * self.dim // self.stage_dim
        row = dataclasses.replace(self, score=score, stages=most)
        while row.shared_bytes > SHARED_LIMIT["sm_90a"]:
            row = dataclasses.replace(row, stages=row.stages - 1)
        return row

    def step(self, traits: Traits, launches: Launches) -> Step:
        """Return the launch: a block for each tile of the gradient."""
        problem, steps = traits.problem, traits.steps["dbias"]
        tiles = -(-problem.q_len // self.tile_m) * -(-problem.k_len // self.tile_n)
        tiles *= math.prod(n for n, step in zip(traits.size, steps, strict=True) if step)
        boxes = dict.fromkeys(("q", "k", "v", "dout"), self.tile_m)
        step = self.mapped_step(traits, launches, tiles, boxes, dtype=DBIAS_SM90_PARAMS)
        fill_strides(step.params[0], traits)
        addresses = {**step.addresses, **{name: name for name in ("dbias", "row_statistics")}}
        return step._replace(grid=tiles, addresses=addresses, persistent=False)


def _rows() -> Iterator[BwdDbiasSm90]:
    # dim, score, why; of stages there are as many as shared memory has room for.
    pair = ScoreMod(bias_axes="pair", bias_dtype="bfloat16")
    softcap = ScoreMod(softcap=True, bias_axes="pair", bias_dtype="float32")
    rows = (
        (64, softcap, "sums, scores and dP of 64 x 128 pairs are 192 registers a thread"),
        (128, pair, "as for 64; a tile reads the fewest bytes a pair"),
        (256, pair, "as for 128; Q and K come in parts of 64 columns"),
    )
    for (dim, score, why), dtype in product(rows, DTYPE_NAMES):
        yield BwdDbiasSm90(
            source="attention/bwd_dbias_sm90", dtype=dtype, dim=dim, tile_m=128, tile_n=128,
            warps=12, stages=_MOST_STAGES, score=score, why=why,
        ).for_score(score)  # fmt: skip


VARIANTS = tuple(_rows())
