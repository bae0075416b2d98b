"""Public functions computed in the emulator, by the plans that calls on a GPU run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fa_cupy import BitMask
from fa_cupy.core import attention_problem
from fa_cupy.gpu.kernels import forward
from fa_cupy.gpu.kernels.attention.attention_params import NAMES, Traits
from fa_cupy.gpu.kernels.variant import Variant
from validation.emulator.launcher import EmulatorLauncher
from validation.emulator.masks import lists_of

Array = np.ndarray[Any, Any]


def attention(
    row: Variant,
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None = None,
    mask: Array | BitMask | None = None,
    seed: int = 0,
    source: Path | None = None,
    truncating: bool = False,
    order: Array | None = None,
    by_tile: bool = False,
    **options: Any,
) -> tuple[Array, Array]:
    """`fa_cupy.attention` by one variant, with LSE.

    Parameters
    ----------
    row : Variant
    q, k, v, bias : numpy.ndarray
        As for `fa_cupy.attention`; aligned to 16 bytes where the variant wants it.
    mask : numpy.ndarray or BitMask, optional
        As for `fa_cupy.attention`; wants a variant for masks.
    seed, truncating : int, bool
        As for `emulator.launch`.
    source : Path, optional
        A kernel in place of the variant's own.
    order, by_tile
        As for `validation.emulator.masks.lists_of`.
    **options
        Of `fa_cupy.attention`.

    Raises
    ------
    EmulationError
        As `emulator.launch`.
    """
    problem = attention_problem.attention_problem(q, k, v, bias, mask, **options)
    out = np.full(problem.out_shape, np.nan, problem.dtype)
    lse = np.full(problem.out_shape[:-1], np.nan, np.float32)
    view = attention_problem.out_view(problem, out.shape, out.strides)
    sources = {} if source is None else {row.entry: source}
    launcher = EmulatorLauncher(seed, truncating, sources)
    plan = forward.make_plan(Traits(problem, view), launcher, row)
    pointers = [0 if x is None else x.ctypes.data for x in (q, k, v, bias, out, lse)]
    if mask is None:
        lists, addresses = None, ()
    else:
        lists = lists_of(problem, mask, order, by_tile)  # it owns what the addresses are of
        addresses = lists.pointers()
    pointers += [*addresses, *[0] * (len(NAMES) - len(pointers) - len(addresses))]
    # The workspace holds what another launch has left, perhaps the marks of one.
    plan.run(tuple(pointers))
    del lists
    return out, lse
