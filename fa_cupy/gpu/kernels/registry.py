"""All kernels that there are, from the tables of their families."""

from __future__ import annotations

from fa_cupy.gpu.kernels import attention_backward
from fa_cupy.gpu.kernels.forward import VARIANTS
from fa_cupy.gpu.kernels.linear.table import PRODUCTS
from fa_cupy.gpu.kernels.mask.variants import MASKS
from fa_cupy.gpu.kernels.variant import Variant

ROWS: tuple[Variant, ...] = (*VARIANTS, *attention_backward.VARIANTS, *PRODUCTS, *MASKS)
