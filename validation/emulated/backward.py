"""Attention backward by the kernels, on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from fa_cupy import BitMask
from fa_cupy.core import attention_problem
from fa_cupy.gpu.kernels.attention import bwd_sm80_params, bwd_sm90_params
from fa_cupy.gpu.kernels.attention.bwd_params import Gradients
from fa_cupy.gpu.kernels.attention.bwd_sm80_variants import BackwardSm80
from fa_cupy.gpu.kernels.attention.bwd_sm90_variants import BackwardVariant
from validation import emulator
from validation.emulated.forward import BLOCKS
from validation.emulated.masks import tables_of


def attention_backward(
    rows: Sequence[BackwardVariant],
    dout: np.ndarray[Any, Any],
    q: np.ndarray[Any, Any],
    k: np.ndarray[Any, Any],
    v: np.ndarray[Any, Any],
    out: np.ndarray[Any, Any],
    lse: np.ndarray[Any, Any],
    dlse: np.ndarray[Any, Any] | None = None,
    bias: np.ndarray[Any, Any] | None = None,
    mask: np.ndarray[Any, Any] | BitMask | None = None,
    seed: int = 0,
    sources: Mapping[str, Path] = MappingProxyType({}),
    blocks: int = BLOCKS,
    together: int = 1,
    truncating: bool = False,
    **options: Any,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Gradients of attention by some rows of the table.

    Parameters
    ----------
    rows : sequence of BackwardVariant
        In the order of their launches, as `select_bwd` or `select_bwd_sm80` returns them.
    dout, q, k, v, out, lse, dlse : numpy.ndarray
        `k` and `v` have the batch axes of `q`, but for a head axis that may have fewer heads.
    bias : numpy.ndarray, optional
        As for `fa_cupy.attention_backward`; only rows for SM80 take one.
    mask : numpy.ndarray or BitMask, optional
        As for `fa_cupy.attention_backward`; wants rows for masks.
    seed, truncating : int, bool
        As for `emulator.launch`.
    sources : mapping of Path
        Kernels in place of the rows' own, by the row's entry.
    blocks, together : int
        Of the launches whose blocks take work until none is left: how many blocks, and how many of
        them run at the same time.
    **options
        Of `fa_cupy.attention`.

    Raises
    ------
    EmulationError
        As `emulator.launch`.
    """
    problem = attention_problem.attention_problem(q, k, v, bias, mask, **options)
    dq, dk, dv = (np.full(x.shape, np.nan, x.dtype) for x in (q, k, v))
    queries = (attention_problem.out_view(problem, x.shape, x.strides) for x in (dout, out, dq))
    # As k and v are seen, so are dk and dv.
    like = attention_problem.attention_problem(q, dk, dv, bias, mask, **options)
    views = Gradients(*queries, like.k, like.v)
    if any(isinstance(row, BackwardSm80) for row in rows):
        assert bwd_sm80_params.takes(problem, views)
        steps, size = bwd_sm80_params.fill(problem, views, rows)
    else:
        assert bwd_sm90_params.takes(problem, views)
        steps, size = bwd_sm90_params.fill(problem, views, rows)
    # What lies in a workspace is anything: NaN, and words that are far from 0.
    space = np.full(size // 4 + 64, 0x7FC0DEAD, np.uint32)
    base = space[-space.ctypes.data % 256 // 4 :].ctypes.data
    lse = np.ascontiguousarray(lse, np.float32)
    dlse = None if dlse is None else np.ascontiguousarray(dlse, np.float32)
    arrays = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse, "dlse": dlse}
    arrays |= {"dq": dq, "dk": dk, "dv": dv, "bias": bias}
    pointers = {name: 0 if x is None else x.ctypes.data for name, x in arrays.items()}
    tables = None if mask is None else tables_of(problem, mask)
    if tables is not None:
        pointers |= tables.pointers()
    for step in steps:
        step.point(base, pointers)
        for name, geometry in step.maps.items():
            step.params[f"{name}_map"][0] = emulator.tensor_map(pointers[name], *geometry)
        row = step.row
        source = sources.get(row.entry)
        grid, at_once = (min(blocks, step.blocks), together) if step.shares else (step.blocks, 1)
        emulator.launch_row(row, grid, step.params, seed, source, truncating, at_once)
    return dq, dk, dv
