"""Plain definitions in float64 on SciPy, for comparison with the results of this library.

They take NumPy arrays, compute all Lq x Lk scores, and share no code with the other functions,
except for the parser and the derivatives of a `fa_cupy.Score`, and for the random numbers of
dropout. Arguments are not checked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa_cupy import _definitions
from fa_cupy._definitions import visible as visible

Array = NDArray[Any]


def attention(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    **options: Any,
) -> tuple[Array, Array]:
    """Attention and its log-sum-exp in float64.

    Parameters
    ----------
    q, k, v, bias, mask : numpy.ndarray
        As in `fa_cupy.attention`, but no sparse matrices. A `fa_cupy.BitMask` is unpacked to all
        its Lq x Lk elements.
    **options
        `scale`, `is_causal`, `causal_align`, `window`, `softcap`, `sinks`, `score`, `k_lengths`,
        `page_table`, `q_offsets`, `k_offsets`, `dropout` and `seed` of `fa_cupy.attention`. An
        expression is evaluated for all pairs at once.

    Returns
    -------
    out : numpy.ndarray of float64, shape (..., Lq, Dv)
    lse : numpy.ndarray of float64, shape (..., Lq)
        Log-sum-exp of the scores of each query.

    Examples
    --------
    >>> import numpy as np
    >>> from fa_cupy import reference
    >>> out, lse = reference.attention(np.zeros((1, 2)), np.ones((4, 2)), np.arange(4.0)[:, None])
    >>> out.item(), round(lse.item(), 4)
    (1.5, 1.3863)
    """
    with np.errstate(all="ignore"):
        scores = _definitions.scores_of(q, k, v, bias, mask, np.dtype(np.float64), **options)
        return _definitions.attend(scores, None)[:2]


def plain(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    dtype: Any,
    **options: Any,
) -> Array:
    """Attention computed plainly in low precision, to compare its error with that of others.

    Sums and softmax are in float32 (float64 for a `dtype` of float64). The weights are rounded to
    `dtype` before their product with `v`, and so is the output.

    Parameters
    ----------
    q, k, v, bias, mask : numpy.ndarray
        As in `attention`.
    dtype : numpy.dtype
        float16, bfloat16, float32 or float64.
    **options
        As in `attention`.

    Returns
    -------
    numpy.ndarray of `dtype`, shape (..., Lq, Dv)

    Examples
    --------
    >>> import numpy as np
    >>> from fa_cupy import attention, reference
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 100, 16)).astype(np.float16)
    >>> want, _ = reference.attention(q, k, v)
    >>> plain = reference.plain(q, k, v, dtype=np.float16)
    >>> bool(reference.relative_error(plain, want) < 1e-3)
    True
    >>> bool(reference.relative_error(attention(q, k, v), want) < 1e-3)
    True
    """
    dtype = np.dtype(dtype)
    real = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    with np.errstate(all="ignore"):
        scores = _definitions.scores_of(q, k, v, bias, mask, real, **options)
        return _definitions.attend(scores, dtype)[0].astype(dtype)


def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    dlse: Array | None = None,
    dtype: Any = None,
    **options: Any,
) -> tuple[Array, ...]:
    """Gradients of attention in float64, or computed plainly in low precision.

    Parameters
    ----------
    dout, q, k, v, bias, mask, dlse : numpy.ndarray
        As in `fa_cupy.attention_backward`.
    dtype : numpy.dtype, optional
        If given, scores and their gradients are in float32 (float64 for float64), and weights,
        gradients of scores, output and results are rounded to `dtype`, as in `plain`.
    **options
        As in `attention`.

    Returns
    -------
    dq, dk, dv : numpy.ndarray
        With the shapes of `q`, `k` and `v`.
    dbias : numpy.ndarray
        Only with `bias`.
    dsinks : numpy.ndarray
        Only with `sinks`.
    *dscore : numpy.ndarray
        Only with `score`: with the shapes of its arrays of floats.

    Notes
    -----
    A gradient is NaN where a term of its sum is not finite.

    Examples
    --------
    >>> import numpy as np
    >>> from fa_cupy import reference
    >>> x = np.array([[0.0], [1.0]])
    >>> [g.ravel().round(4).tolist() for g in reference.attention_backward(x, x, x, x)]
    [[0.0, 0.1966], [-0.1966, 0.1966], [0.2689, 0.7311]]
    """
    shapes = [None if x is None else np.shape(x) for x in (q, k, v, bias)]
    sinks = options.get("sinks")
    shapes.append(None if sinks is None else (*np.shape(sinks), 1))
    low = None if dtype is None else np.dtype(dtype)
    real = np.dtype(np.float64 if low in (None, np.float64) else np.float32)
    with np.errstate(all="ignore"):
        scores = _definitions.scores_of(q, k, v, bias, mask, real, sloped=True, **options)
        found = _definitions.gradients(scores, dout, dlse, low)
        result = [
            _definitions.summed(x, shape)
            for x, shape in zip(found, shapes, strict=True)
            if shape is not None
        ]
        if sinks is not None:
            result[-1] = result[-1][..., 0]
        result += _definitions.score_gradients(scores, found[3])
        return tuple(x if low is None else x.astype(low) for x in result)


def causal_product(
    q: Array,
    k: Array,
    v: Array,
    initial_state: Array | None = None,
    *,
    reverse: bool = False,
) -> tuple[Array, Array]:
    """Causal product and its last state in float64.

    Parameters
    ----------
    q, k, v : numpy.ndarray
    initial_state : numpy.ndarray, optional
    reverse : bool
        As in `fa_cupy.causal_product`.

    Returns
    -------
    out : numpy.ndarray of float64, shape (..., L, M)
    state : numpy.ndarray of float64, shape (..., E, M)
        The state after the last row, with the batch axes of `out`.

    Examples
    --------
    >>> import numpy as np
    >>> from fa_cupy import reference
    >>> x = np.array([[1.0], [2.0], [3.0]])
    >>> out, state = reference.causal_product(x, x, x)
    >>> out.ravel().tolist(), state.item()
    ([1.0, 10.0, 42.0], 14.0)
    """
    return _definitions.product(q, k, v, initial_state, np.dtype(np.float64), reverse)


def plain_product(q: Array, k: Array, v: Array, *, dtype: Any, reverse: bool = False) -> Array:
    """Causal product computed plainly in low precision, to compare its error with that of others.

    Sums are in float32 (float64 for a `dtype` of float64). The scores are rounded to `dtype` before
    their product with `v`, and so is the output.

    Parameters
    ----------
    q, k, v : numpy.ndarray
        As in `fa_cupy.causal_product`.
    dtype : numpy.dtype
        float16, bfloat16, float32 or float64.
    reverse : bool
        As in `fa_cupy.causal_product`.

    Returns
    -------
    numpy.ndarray of `dtype`, shape (..., L, M)

    Examples
    --------
    >>> import numpy as np
    >>> from fa_cupy import reference
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 100, 16)).astype(np.float16)
    >>> want, _ = reference.causal_product(q, k, v)
    >>> plain = reference.plain_product(q, k, v, dtype=np.float16)
    >>> bool(reference.relative_error(plain, want) < 1e-3)
    True
    """
    dtype = np.dtype(dtype)
    real = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    return _definitions.product(q, k, v, None, real, reverse, dtype)[0].astype(dtype)


def relative_error(x: Array, ref: Array) -> float:
    """Return the Frobenius norm of ``x - ref`` divided by that of `ref`.

    Parameters
    ----------
    x, ref : array_like
        The result and what it is compared with, both converted to float64.

    Returns
    -------
    float
        0.0 if both norms are 0. Elements that are finite in neither of the arrays are left out.
        Infinite if an element is finite in only one of them, if the shapes differ, or if `ref` is 0
        and `x` is not.

    Examples
    --------
    >>> import numpy as np
    >>> from fa_cupy import reference
    >>> reference.relative_error(np.array([1.0, np.nan]), np.array([2.0, np.nan]))
    0.5
    """
    x, ref = np.asarray(x, np.float64), np.asarray(ref, np.float64)
    finite = np.isfinite(ref)
    if x.shape != ref.shape or not np.array_equal(np.isfinite(x), finite):
        return np.inf
    error, norm = np.linalg.norm(x[finite] - ref[finite]), np.linalg.norm(ref[finite])
    if norm == 0:
        return 0.0 if error == 0 else np.inf
    return float(error / norm)
