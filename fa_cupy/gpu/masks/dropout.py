"""The decisions of dropout on a device, as CuPy arrays of bools."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np

from fa_cupy.dropout.arguments import Dropout
from fa_cupy.gpu import workspace
from fa_cupy.gpu.driver.arguments import Arguments
from fa_cupy.gpu.kernels.mask import dropout_mask


def kept(dropout: Dropout, b: Any, h: Any, rows: tuple[int, int], keys: tuple[int, int]) -> Any:
    """Return which pairs of some queries and keys are kept, as `fa_cupy.dropout.decisions` does.

    Parameters
    ----------
    dropout : Dropout
    b, h : cupy.ndarray of int64, shape (n, 1, 1)
        Batch entries and heads.
    rows, keys : tuple of int
        First and last + 1.

    Returns
    -------
    cupy.ndarray of bool, shape (n, rows, keys)
        Made on the current stream, without waiting for it.
    """
    shape = len(b), rows[1] - rows[0], keys[1] - keys[0]
    found = cupy.empty(shape, np.bool_)
    if dropout.p == 1.0:
        found.fill(False)
    elif found.size:
        places = 0 if dropout.places is None else dropout.places.data.ptr
        step = dropout_mask.step(dropout, len(b), rows, keys, places)
        p = step.params[0]
        p["kept"], p["b"], p["h"] = (x.data.ptr for x in (found, b, h))
        p["b_step"], p["h_step"] = (x.strides[0] // x.itemsize for x in (b, h))
        (kernel,) = workspace.launcher(found.data.device_id).kernels([step])
        kernel(Arguments(step.params), None)
    return found


def of_shape(
    dropout: Dropout | None, batch: Sequence[int], rows: tuple[int, int], keys: tuple[int, int]
) -> Any:
    """Return which pairs of all entries of a batch are kept, (*batch, rows, keys); all without."""
    wanted = *batch, rows[1] - rows[0], keys[1] - keys[0]
    if dropout is None:
        return cupy.ones(wanted, np.bool_)
    entry = cupy.arange(math.prod(batch), dtype=np.int64).reshape(-1, 1, 1)
    heads = max(1, math.prod(batch[-1:]))
    return kept(dropout, entry // heads, entry % heads, rows, keys).reshape(wanted)


class TileDropout:
    """The decisions on tiles of one stack of batch entries: a `tiled.attention.Dropout`.

    Parameters
    ----------
    dropout : Dropout
    b, h : cupy.ndarray of int64, shape (n, 1, 1)
        Of the stacked entries.

    Attributes
    ----------
    factor : float
        What kept weights are multiplied by.
    """

    def __init__(self, dropout: Dropout, b: Any, h: Any) -> None:
        self._dropout, self._b, self._h = dropout, b, h
        self.factor = dropout.factor

    def kept(self, rows: tuple[int, int], runs: Sequence[tuple[int, int]]) -> Any:
        """Return which pairs are kept, (n, rows, keys), those of runs of keys side by side."""
        found = [kept(self._dropout, self._b, self._h, rows, keys) for keys in runs]
        return found[0] if len(found) == 1 else cupy.concatenate(found, axis=-1)
