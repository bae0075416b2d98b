"""All kernels that there are, from the tables of their families."""

from __future__ import annotations

from fa_cupy.gpu.kernels import attention_backward
from fa_cupy.gpu.kernels.forward import VARIANTS
from fa_cupy.gpu.kernels.linear.table import PRODUCTS
from fa_cupy.gpu.kernels.mask.block_tables import TABLES
from fa_cupy.gpu.kernels.mask.transpose_words import TRANSPOSE
from fa_cupy.gpu.kernels.variant import Variant

#: Those that make tables of masks.
MASKS: tuple[Variant, ...] = (TABLES, TRANSPOSE)
ROWS: tuple[Variant, ...] = (*VARIANTS, *attention_backward.VARIANTS, *PRODUCTS, *MASKS)
