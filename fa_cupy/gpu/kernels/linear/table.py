"""The kernels of causal products, one row a compiled variant.

Each kernel's rows, with the reason for each, are in the module named after it.
`fa_cupy.gpu.kernels.linear.cost_model` picks one for a call.
"""

from __future__ import annotations

import dataclasses

from fa_cupy.gpu.kernels.linear import low_occupancy, recurrent
from fa_cupy.gpu.kernels.linear.packed import other_rows, recurrent_fp64
from fa_cupy.gpu.kernels.linear.sm80 import (
    chunk_fp32_sm80,
    chunk_fp64,
    chunk_sm80,
    chunk_state_fp32_sm80,
    chunk_state_fp64,
    chunk_state_sm80,
)
from fa_cupy.gpu.kernels.linear.sm90 import (
    chunk_fp32_pingpong_sm90,
    chunk_fp32_sm90,
    chunk_sm90,
    chunk_state_fp32_sm90,
    chunk_state_sm90,
)
from fa_cupy.gpu.kernels.linear.state_prefix_sum import STATE_PREFIX_SUM, STATE_PREFIX_SUM_FP64
from fa_cupy.gpu.kernels.linear.variant import ProductSm90Variant, ProductVariant

PRODUCTS: tuple[ProductVariant, ...] = (
    *chunk_sm80.VARIANTS,
    *chunk_state_sm80.VARIANTS,
    STATE_PREFIX_SUM,
    *chunk_fp32_sm80.VARIANTS,
    *chunk_state_fp32_sm80.VARIANTS,
    *chunk_fp64.VARIANTS,
    *chunk_state_fp64.VARIANTS,
    STATE_PREFIX_SUM_FP64,
    *recurrent.VARIANTS,
    *low_occupancy.VARIANTS,
    *chunk_sm90.VARIANTS,
    *chunk_fp32_sm90.VARIANTS,
    *chunk_state_sm90.VARIANTS,
    *chunk_fp32_pingpong_sm90.VARIANTS,
    *chunk_state_fp32_sm90.VARIANTS,
)


#: Those for packed sequences: a block walks rows of one sequence.
PACKED: tuple[ProductVariant, ...] = (
    *(
        dataclasses.replace(row, packed=True)
        for row in PRODUCTS
        if not isinstance(row, ProductSm90Variant) or row.dtype != "float32"
    ),
    *recurrent_fp64.VARIANTS,
    *other_rows.VARIANTS,
)


def serving(
    dtype: str, target: str, packed: bool = False
) -> list[tuple[ProductVariant, ProductVariant | None]]:
    """Return the rows that compute outputs, each with the one that sums states of its segments."""
    table = PACKED if packed else PRODUCTS
    rows = [row for row in table if row.dtype == dtype and target in row.targets]
    states = {row.states_shape: row for row in rows if row.sums_states}
    return [
        (row, states.get(row.states_shape) if row.algorithm == "chunked" else None)
        for row in rows
        if row.algorithm
    ]
