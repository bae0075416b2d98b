"""Attention by the kernels, on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fa_cupy import BitMask
from fa_cupy.core import attention_problem
from fa_cupy.gpu.kernels.attention import fwd_params, fwd_sm90_params
from fa_cupy.gpu.kernels.attention.fwd_variants import Variant, VariantSm90
from validation import emulator
from validation.emulated.masks import lists_of

#: Multiprocessors of the emulated device; few, so that blocks take several tiles.
BLOCKS = 2


def attention(
    row: Variant,
    q: np.ndarray[Any, Any],
    k: np.ndarray[Any, Any],
    v: np.ndarray[Any, Any],
    bias: np.ndarray[Any, Any] | None = None,
    mask: np.ndarray[Any, Any] | BitMask | None = None,
    seed: int = 0,
    source: Path | None = None,
    truncating: bool = False,
    order: np.ndarray[Any, Any] | None = None,
    by_tile: bool = False,
    **options: Any,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """`fa_cupy.attention` by one row of the variant table, with LSE.

    Parameters
    ----------
    row : Variant
    q, k, v, bias : numpy.ndarray
        As for `fa_cupy.attention`; aligned to 16 bytes where the row wants it.
    mask : numpy.ndarray or BitMask, optional
        As for `fa_cupy.attention`; wants a row for masks.
    seed, truncating : int, bool
        As for `emulator.launch`.
    source : Path, optional
        A kernel in place of the row's own.
    order, by_tile
        As for `validation.emulated.masks.lists_of`.
    **options
        Of `fa_cupy.attention`.

    Raises
    ------
    EmulationError
        As `emulator.launch`.
    """
    problem = attention_problem.attention_problem(q, k, v, bias, mask, **options)
    lists = None if mask is None else lists_of(problem, mask, order, by_tile)
    out = np.full(problem.out_shape, np.nan, problem.dtype)
    lse = np.full(problem.out_shape[:-1], np.nan, np.float32)
    view = attention_problem.out_view(problem, out.shape, out.strides)
    places = (q, k, v, bias, out, lse)
    pointers = [0 if x is None else x.ctypes.data for x in places]
    how = seed, source, truncating
    if isinstance(row, VariantSm90):
        filled, maps, parts = fwd_sm90_params.fill(problem, view, row.tile_m, row.tile_n)
        for name in fwd_sm90_params.MAPPED:
            words = emulator.tensor_map(pointers[fwd_params.POINTERS.index(name)], *maps[name])
            filled[f"{name}_map"].view(np.uint64)[:] = words
        ((first, tiles, *rest),) = parts
        filled["common"][list(fwd_params.POINTERS)] = tuple(pointers)
        filled["common"]["first_batch"], filled["common"]["aligned"] = first, 1
        if lists is not None:
            filled["common"]["mask"] = tuple(lists.pointers())
        counter = np.random.default_rng(seed).integers(0, 2**63, 4, np.uint64)
        counter = counter[counter.ctypes.data // 8 % 2 :]
        address = counter.ctypes.data if tiles > BLOCKS else 0
        filled["scheduler"] = (address, seed + 1, tiles, *rest)
        emulator.launch_row(row, min(BLOCKS, tiles), filled, *how)
        return out, lse
    filled, parts, aligned = fwd_params.fill(problem, view, row.tile_m)
    for offsets, first, blocks, entry in parts:
        at = [p and p + offset for p, offset in zip(pointers, offsets, strict=True)]
        aligned = aligned and not any(p % 16 for p in (*at[:3], at[4]))
        fwd_params.pack_head(filled, 0, *at, first, aligned)
        if lists is not None:
            listed = lists.pointers().of_part(entry, len(parts) == 1)
            fwd_params.pack_mask(filled, fwd_params.MASK_AT, *listed)
        emulator.launch_row(row, blocks, filled, *how)
    return out, lse
