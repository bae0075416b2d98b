"""All kernels that there are, from the tables of their families."""

from __future__ import annotations

from fa_cupy.gpu.kernels.attention.bwd_sm80_variants import BACKWARD_SM80
from fa_cupy.gpu.kernels.attention.bwd_sm90_variants import BACKWARD
from fa_cupy.gpu.kernels.forward import VARIANTS
from fa_cupy.gpu.kernels.linear.table import PRODUCTS
from fa_cupy.gpu.kernels.mask.variants import MASKS
from fa_cupy.gpu.kernels.variant import Variant

ROWS: tuple[Variant, ...] = (*VARIANTS, *BACKWARD, *BACKWARD_SM80, *PRODUCTS, *MASKS)
