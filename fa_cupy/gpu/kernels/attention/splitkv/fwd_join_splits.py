"""The host side of ``fwd_join_splits``: the output of keys that were split over blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fa_cupy.gpu.driver.targets import SHARED_LIMIT
from fa_cupy.gpu.kernels.attention.attention_params import Traits
from fa_cupy.gpu.kernels.attention.splitkv.params import (
    FWD_SPLITKV_PARAMS,
    PARTIAL,
    make_splitkv_params,
)
from fa_cupy.gpu.kernels.variant import DTYPE_NAMES, Variant
from fa_cupy.gpu.plan import Step


@dataclass(frozen=True, kw_only=True)
class FwdJoinSplits(Variant):
    """A row of ``fwd_join_splits``, for the dim that the outputs of splits are padded to."""

    @property
    def targets(self) -> tuple[str, ...]:
        """All."""
        return tuple(SHARED_LIMIT)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: none."""
        return 0

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        return (
            *super().defines,
            ("FA_WARPS", self.warps),
            ("FA_SPLITKV_PARAMS_BYTES", FWD_SPLITKV_PARAMS.itemsize),
        )

    @property
    def rank(self) -> tuple[int, ...]:
        """Smaller dims first."""
        return (self.dim,)


def _rows() -> Iterator[FwdJoinSplits]:
    for dim in (64, 96, 128, 192, 256):
        for dtype in DTYPE_NAMES:
            yield FwdJoinSplits(
                source="attention/fwd_join_splits", dtype=dtype, dim=dim, tile_m=4, tile_n=1,
                warps=4, stages=1, why="a warp for each row of the output",
            )  # fmt: skip


VARIANTS: tuple[FwdJoinSplits, ...] = tuple(_rows())


def step(traits: Traits, dim: int, splits: int) -> Step:
    """Return the launch that joins splits of a problem whose outputs are padded to `dim`."""
    variant = next(
        row for row in VARIANTS if (row.dtype, row.dim) == (traits.problem.dtype.name, dim)
    )
    params = make_splitkv_params(traits, variant.tile_m, variant.tile_n, slots=1)
    params["splits"], params["heads"] = splits, 1
    addresses = {f"common.{field}": name for field, name in traits.fields.items()}
    addresses |= {name: name for name in (*PARTIAL, *traits.key_views)}
    grid = -(-int(params["rows"][0]) // variant.warps)
    return Step(variant, grid, params, addresses)
