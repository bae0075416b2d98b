"""The decisions of dropout for its users."""

from __future__ import annotations

from typing import Any

import numpy as np

from fa_cupy._bitmask import BitMask
from fa_cupy.core import arrays as core_arrays
from fa_cupy.core import backends, checks
from fa_cupy.dropout import arguments, decisions
from fa_cupy.score.program import entries

_NAME = "dropout_mask"


def dropout_mask(
    seed: Any,
    p: float,
    shape: tuple[int, ...],
    *,
    rows: slice | None = None,
    cols: slice | None = None,
    as_bits: bool = False,
) -> Any:
    """Return which weights `attention` keeps in a call with ``dropout=p`` and this seed.

    Parameters
    ----------
    seed : int or array of one integer
        From 0 to 2**64 - 1. An array on a GPU is of int64 or uint64, and is read there.
    p : float
        The probability that a weight is dropped, from 0 to 1.
    shape : tuple of int
        (..., Lq, Lk): that of the scores. The axes before the last two are the batch axes of the
        output of `attention`.
    rows : slice, optional
    cols : slice, optional
        The queries and the keys of a part of the weights, as slices of step 1; all of them by
        default.
    as_bits : bool, optional
        Whether to return a `BitMask`, not an array.

    Returns
    -------
    array of bool or BitMask, shape (..., rows, cols)
        True where a weight is kept. Of the library and on the device of `seed` if that is an array,
        otherwise a NumPy array.

    Raises
    ------
    TypeError, ValueError
        With a message that names the argument, its value and the value that is wanted.

    See Also
    --------
    attention : takes `dropout` and `seed`.

    Notes
    -----
    A decision depends on the seed, the batch entry, the head, the query, the key and `p`, and on
    nothing else: not on lengths, devices, dtypes or other options. The random numbers are those of
    Philox-4x32-10 [1]_, and `p` is exact to 2**-41. In a call with offsets, queries and keys count
    from the beginning of their sequence, and sequence s of batch entry b counts as batch entry
    ``b * sequences + s``: the decisions are those of sequences that are padded to one length.

    References
    ----------
    .. [1] J. K. Salmon, M. A. Moraes, R. O. Dror and D. E. Shaw, "Parallel random numbers: as easy
       as 1, 2, 3", SC, 2011.

    Examples
    --------
    >>> import numpy as np
    >>> from fa_cupy import attention, dropout_mask
    >>> kept = dropout_mask(7, 0.25, (2, 8, 100, 100))
    >>> round(float(kept.mean()), 2)
    0.75

    The output of `attention` is that of the kept weights alone, multiplied by 4 / 3:

    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 8, 100, 16))
    >>> weights = np.exp(0.25 * q @ k.swapaxes(-1, -2))
    >>> weights /= weights.sum(-1, keepdims=True)
    >>> out = attention(q, k, v, dropout=0.25, seed=7)
    >>> bool(np.allclose(out, (weights * kept / 0.75) @ v))
    True
    """
    native = core_arrays.to_native(_NAME, **given) if (given := arguments.arrays_of(seed)) else None
    number = seed if native is None else native.arrays[0]
    dropout = arguments.of_arguments(_NAME, p, number, "p")
    if seed is None:
        arguments.seed_of(_NAME, seed)
    if not isinstance(shape, (tuple, list)) or len(shape) < 2:
        raise TypeError(f"{_NAME}: shape is {checks.show(shape)}, want a tuple (..., Lq, Lk)")
    sizes = [checks.whole(_NAME, f"shape[{i}]", n) for i, n in enumerate(shape)]
    *batch, q_len, k_len = sizes
    of_rows, of_cols = _span("rows", rows, q_len), _span("cols", cols, k_len)
    bits = checks.flag(_NAME, "as_bits", as_bits)
    if native is not None and native.backend != "numpy":
        on_device = backends.gpu("masks.dropout")
        with native.context:
            found = on_device.of_shape(dropout, batch, of_rows, of_cols)
            return BitMask(found) if bits else native.give_back(found)
    wanted = (*batch, of_rows[1] - of_rows[0], of_cols[1] - of_cols[0])
    if dropout is None:
        found = np.ones(wanted, np.bool_)
    else:
        b, h = (np.broadcast_to(x, (*batch, 1, 1)).reshape(-1, 1, 1) for x in entries(np, batch))
        found = decisions.kept(dropout, b, h, of_rows, of_cols).reshape(wanted)
    if bits:
        return BitMask(found)
    return found if native is None else native.give_back(found)


def _span(arg: str, part: Any, length: int) -> tuple[int, int]:
    """Return first and last + 1 of a slice."""
    if part is None:
        return 0, length
    text = f"{_NAME}: {arg} is {checks.show(part)}, want a slice of"
    if not isinstance(part, slice):
        raise TypeError(f"{text} step 1")
    try:
        begin, end, step = part.indices(length)
    except TypeError:
        raise TypeError(f"{text} ints") from None
    except ValueError:  # of step 0
        raise ValueError(f"{text} step 1") from None
    if step != 1:
        raise ValueError(f"{text} step 1")
    return begin, max(begin, end)
