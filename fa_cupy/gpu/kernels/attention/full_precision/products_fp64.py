"""What all kernels for float64 share: which devices have their products."""

from __future__ import annotations

from dataclasses import dataclass

from fa_cupy.gpu.driver.targets import number_of
from fa_cupy.gpu.kernels.variant import Variant

DTYPE = "float64"


@dataclass(frozen=True, kw_only=True)
class ProductsFp64(Variant):
    """A row of a kernel that multiplies by ``cuda_src/common/mma_fp64.cuh``.

    Attributes
    ----------
    wide : bool
        Whether one instruction of SM90 makes a product, for which eight do before.
    """

    wide: bool

    @property
    def targets(self) -> tuple[str, ...]:
        """Targets the row may serve: those that have its instructions and its shared memory."""
        return tuple(t for t in super().targets if number_of(t) >= 90 or not self.wide)
