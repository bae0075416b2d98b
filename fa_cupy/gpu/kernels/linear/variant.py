"""What a row of the table of causal products says: one compiled variant of one kernel."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

from fa_cupy.gpu.driver.targets import SHARED_LIMIT
from fa_cupy.gpu.kernels.linear.params import PACKED_PRODUCT_PARAMS, PRODUCT_PARAMS
from fa_cupy.gpu.kernels.linear.sm90_params import (
    PACKED_PRODUCT_SM90_PARAMS,
    PRODUCT_SM90_PARAMS,
)
from fa_cupy.gpu.kernels.variant import Variant

WORK_BYTES = 72  # ProductWork in cuda_src/common/linear_params.cuh


@dataclass(frozen=True, kw_only=True)
class ProductVariant(Variant):
    """A row of a kernel that walks chunks: `tile_m` rows each, for `tile_n` value columns.

    Attributes
    ----------
    blocks : int
        Blocks that should fit on a multiprocessor.
    algorithm : str
        Of `fa_cupy.core.linear_problem.ALGORITHMS`, for rows that compute outputs; else empty.
    sums_states : bool
        Whether the row sums the states of segments.
    """

    blocks: int
    algorithm: ClassVar[str] = ""
    sums_states: ClassVar[bool] = False

    @functools.cached_property
    def targets(self) -> tuple[str, ...]:
        """Targets the row may serve, all of whose shared memory it fits."""
        return tuple(t for t, limit in SHARED_LIMIT.items() if self.shared_bytes <= limit)

    @functools.cached_property
    def states_shape(self) -> tuple[int, int | None]:
        """What a row that computes outputs has in common with the one that sums its states."""
        return self.dim, None

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        params = PACKED_PRODUCT_PARAMS if self.packed else PRODUCT_PARAMS
        return (
            ("FA_BF16", int(self.dtype == "bfloat16")),
            ("FA_FP64", int(self.dtype == "float64")),
            ("FA_DIM", self.dim),
            ("FA_TILE_M", self.tile_m),
            ("FA_TILE_N", self.tile_n),
            ("FA_STAGES", self.stages),
            ("FA_BLOCKS", self.blocks),
            ("FA_SHARED_BYTES", self.shared_bytes),
            ("FA_PARAMS_BYTES", params.itemsize),
            *self.key_defines,
        )


@dataclass(frozen=True, kw_only=True)
class ProductSm90Variant(ProductVariant):
    """A row of a kernel that tensor maps feed: a warpgroup for every 64 of its value columns."""

    @property
    def name(self) -> str:
        """Unique, for people and for file names."""
        return super().name + (f"-b{self.blocks}" if self.blocks > 1 else "")

    @functools.cached_property
    def targets(self) -> tuple[str, ...]:
        """The only target that has wgmma."""
        return ("sm_90a",)

    @functools.cached_property
    def states_shape(self) -> tuple[int, int | None]:
        """The value columns too: both have one parameter struct, which counts tiles of them."""
        return self.dim, self.tile_n

    @property
    def work_bytes(self) -> int:
        """Shared memory of ``WorkTile`` in ``cuda_src/common/linear_sm90.cuh``."""
        return 80 if self.packed else 64

    @functools.cached_property
    def groups(self) -> int:
        """Warpgroups that hold the state."""
        return self.tile_n // 64

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The constants the source is compiled with."""
        params = PACKED_PRODUCT_SM90_PARAMS if self.packed else PRODUCT_SM90_PARAMS
        return (*super().defines, ("FA_SM90_PARAMS_BYTES", params.itemsize))
