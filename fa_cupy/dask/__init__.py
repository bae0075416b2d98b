"""Attention and causal products of Dask arrays, chunked along any axis, the length included.

Importing this module imports dask; no other module of fa_cupy does. A call makes a graph and
computes nothing. Its tasks call the functions of `fa_cupy` on chunks, which are arrays of NumPy or
CuPy: no array is gathered in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

try:
    import dask
except ModuleNotFoundError as error:
    if error.name != "dask":
        raise
    message = "fa_cupy.dask needs Dask, which is not installed: pip install 'fa_cupy[dask]'"
    raise ModuleNotFoundError(message, name="dask") from error


from fa_cupy._bitmask import BitMask, bits_of_sparse
from fa_cupy.core import attention_problem, checks, dispatch, linear_problem
from fa_cupy.dask import tasks
from fa_cupy.dask.arguments import collected, library_of, stand_in, stand_ins
from fa_cupy.dask.attention_graph import AttentionGraph
from fa_cupy.dask.merge_graph import merged
from fa_cupy.dask.product_graph import ProductGraph

__all__ = ["attention", "causal_product", "linear_attention", "merge_attention"]

Array = Any
_PRODUCT_ARGS = ("q", "k", "v", "initial_state")
_FEATURE_MAPS = ("elu1", "relu", "exp", "identity")


def attention(
    q: Array,
    k: Array,
    v: Array,
    bias: Array = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    causal_align: str | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    sinks: Array = None,
    precision: str | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of Dask arrays, computed by tiles of queries and keys.

    Parameters
    ----------
    q : dask.array.Array, shape (..., Lq, D)
        Queries, of float16, bfloat16, float32 or float64. Chunks are arrays of NumPy or CuPy.
    k : dask.array.Array, shape (..., Lk, D)
    v : dask.array.Array, shape (..., Lk, Dv)
        Keys and values. Their batch axes broadcast with those of `q`, and with 4 axes or more each
        they may have fewer heads, as in `fa_cupy.attention`.
    bias : dask.array.Array, broadcastable to (..., Lq, Lk), optional
        Added to the scores. Not a sparse matrix.
    mask : dask.array.Array of bool, broadcastable to (..., Lq, Lk), or BitMask, optional
        True where a query may attend to a key. Each task gets its part of a `BitMask`, and tiles
        without a visible pair get no task. A sparse matrix becomes a `BitMask`.
    scale, is_causal, causal_align, window, softcap, precision
        As in `fa_cupy.attention`.
    sinks : dask.array.Array, broadcastable to (..., Lq), optional
        As in `fa_cupy.attention`.
    return_lse : bool
        Whether to return the log-sum-exp of each row of scores too.

    Returns
    -------
    out : dask.array.Array, shape (..., Lq, Dv)
        Of the dtype and the library of `q`.
    lse : dask.array.Array, shape (..., Lq)
        Only with `return_lse`: float32, or float64 for float64 input.

    Raises
    ------
    ModuleNotFoundError
        If Dask is not installed, when `fa_cupy.dask` is imported.
    TypeError, ValueError
        As for `fa_cupy.attention`, before a graph is made; for arguments that are no arrays of
        Dask, NumPy or CuPy, and for chunks of unknown sizes.

    See Also
    --------
    fa_cupy.attention : attention of arrays in memory, with the same arguments and more.

    Notes
    -----
    Arrays of NumPy or CuPy are taken as one chunk each. Axes are cut wherever a chunk of an
    argument ends, and the chunks of the result are these. The axes of D and Dv become one chunk.
    Chunks of length 0 vanish.

    Each tile of queries and keys is a task. Tiles that causality, the window or a `BitMask` hides
    have none. A tree merges the tiles of a row of chunks by their log-sum-exps, in float32
    (float64 for float64 input), in an order that only the chunks determine: results are the same
    in all bits from run to run and for all schedulers. Output of 16 bits is rounded after the last
    merge; chunks on a GPU are rounded by the kernel too.

    Keys and values that come directly from storage (`dask.array.from_zarr`, `dask.array.from_array`
    of a dataset of HDF5, with slices, casts and transposes) are read again for each chunk of
    queries, so that memory holds few of them. Those that a graph computes, `dask.array.map_blocks`
    without arrays included, are computed once and kept until their last use: store them first if
    all of them do not fit.

    Examples
    --------
    >>> import dask.array as da
    >>> import numpy as np
    >>> from fa_cupy import dask as on_dask
    >>> q, k, v = da.random.default_rng(0).standard_normal((3, 8, 1000, 64), chunks=(1, 4, 250, 64))
    >>> out = on_dask.attention(q, k, v, is_causal=True)
    >>> out.chunks
    ((4, 4), (250, 250, 250, 250), (64,))
    >>> bool(np.allclose(out[:, 0], v[:, 0]))  # the first query sees one key
    True
    """
    name = "attention"
    dispatch.require(name, q=q, k=k, v=v)
    mask = bits_of_sparse(name, "mask", mask)
    bits = mask if isinstance(mask, BitMask) else None
    dense = None if bits is not None else mask
    arrays = collected(name, q=q, k=k, v=v, bias=bias, mask=dense, sinks=sinks)
    given = stand_ins(arrays)
    problem = attention_problem.attention_problem(
        given["q"], given["k"], given["v"], given.get("bias"),
        given.get("mask") if bits is None else bits, scale=scale, is_causal=is_causal,
        causal_align=causal_align, window=window, softcap=softcap,
        sinks=given.get("sinks"), precision=precision,
    )  # fmt: skip
    with_lse = checks.flag(name, "return_lse", return_lse)
    options = {"scale": problem.scale, "softcap": problem.softcap, "precision": problem.precision}
    return AttentionGraph(problem, arrays, bits, options).build(with_lse)


def causal_product(
    q: Array,
    k: Array,
    v: Array,
    *,
    initial_state: Array = None,
    return_state: bool = False,
    reverse: bool = False,
    algorithm: str = "auto",
) -> Any:
    """Causal product of Dask arrays, computed chunk by chunk.

    Parameters
    ----------
    q : dask.array.Array, shape (..., L, E)
        Queries, of float16, bfloat16, float32 or float64. Chunks are arrays of NumPy or CuPy.
    k : dask.array.Array, shape (..., L, E)
    v : dask.array.Array, shape (..., L, M)
        Keys and values, whose batch axes broadcast and may have fewer heads, as in
        `fa_cupy.causal_product`.
    initial_state : dask.array.Array, shape (..., E, M), optional
        The sum before the first row.
    return_state : bool
        Whether to return the state after the last row too.
    reverse : bool
        Whether to go from the last row to the first.
    algorithm : {"auto", "chunked", "recurrent", "low_occupancy"}
        As in `fa_cupy.causal_product`.

    Returns
    -------
    out : dask.array.Array, shape (..., L, M)
        Of the dtype and the library of `q`.
    state : dask.array.Array, shape (..., E, M)
        Only with `return_state`, in float32, or float64 for float64 input.

    Raises
    ------
    ModuleNotFoundError
        If Dask is not installed, when `fa_cupy.dask` is imported.
    TypeError, ValueError
        As for `fa_cupy.causal_product`, before a graph is made; for arguments that are no arrays of
        Dask, NumPy or CuPy, and for chunks of unknown sizes.

    See Also
    --------
    fa_cupy.causal_product : the product of arrays in memory.

    Notes
    -----
    Three kinds of tasks: each chunk of rows gives the state that it adds, these are summed in
    order, and each chunk's product starts from the sum before it. A chunk can be freed when it is
    done. Chunks are as in `attention`, and the axes of E and M become one chunk.

    Examples
    --------
    >>> import dask.array as da
    >>> import numpy as np
    >>> from fa_cupy import dask as on_dask
    >>> q, k, v = da.random.default_rng(0).standard_normal((3, 1000, 16), chunks=(1, 300, 16))
    >>> out, state = on_dask.causal_product(q, k, v, return_state=True)
    >>> bool(np.allclose(state, k.T @ v))
    True
    """
    name = "causal_product"
    dispatch.require(name, q=q, k=k, v=v)
    arrays = collected(name, q=q, k=k, v=v, initial_state=initial_state)
    problem = linear_problem.product_problem(name, *map(stand_ins(arrays).get, _PRODUCT_ARGS))
    options: dict[str, Any] = {
        "reverse": checks.flag(name, "reverse", reverse),
        "algorithm": linear_problem.algorithm(name, algorithm, library_of(q), problem.dtype),
    }
    graph = ProductGraph(
        name=name, token=_token(name, arrays, options), problem=problem, arrays=arrays,
        state_of=tasks.state_of, add=tasks.add,
        finish=partial(tasks.causal_product, **options), reverse=options["reverse"],
    )  # fmt: skip
    return graph.build(checks.flag(name, "return_state", return_state))


def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    feature_map: str | Callable[[Any], Any] = "elu1",
    eps: float = 1e-6,
    is_causal: bool = True,
    initial_state: Array = None,
    return_state: bool = False,
) -> Any:
    """Linear attention of Dask arrays, computed chunk by chunk.

    Parameters
    ----------
    q : dask.array.Array, shape (..., Lq, E)
    k : dask.array.Array, shape (..., Lk, E)
    v : dask.array.Array, shape (..., Lk, M)
        As in `causal_product`; Lq and Lk may differ with ``is_causal=False``.
    feature_map : {"elu1", "relu", "exp", "identity"} or callable
        As in `fa_cupy.linear_attention`. A callable is called with chunks, and also once for `q`
        and once for `k` with one row of ones while the graph is made, to find the number of
        features, F. For processes and clusters it must be possible to pickle it.
    eps : float
        Added to the sums of weights.
    is_causal : bool
        Whether row i uses the keys up to i only.
    initial_state : dask.array.Array, shape (..., F, M + 1), optional
        The state before the first key.
    return_state : bool
        Whether to return the state after the last key too.

    Returns
    -------
    out : dask.array.Array, shape (..., Lq, M)
        Of the dtype and the library of `q`.
    state : dask.array.Array, shape (..., F, M + 1)
        Only with `return_state`, in float32, or float64 for float64 input.

    Raises
    ------
    ModuleNotFoundError
        If Dask is not installed, when `fa_cupy.dask` is imported.
    TypeError, ValueError
        As for `fa_cupy.linear_attention`, before a graph is made; for arguments that are no arrays
        of Dask, NumPy or CuPy, and for chunks of unknown sizes.

    See Also
    --------
    fa_cupy.linear_attention : the same for arrays in memory.
    causal_product : its notes apply here too.

    Examples
    --------
    >>> import dask.array as da
    >>> import numpy as np
    >>> from fa_cupy import dask as on_dask
    >>> q, k, v = da.random.default_rng(0).standard_normal((3, 1000, 16), chunks=(1, 300, 16))
    >>> out = on_dask.linear_attention(q, k, v)
    >>> bool(np.allclose(out[0], v[0], atol=1e-5))  # the first row sees only itself
    True
    """
    name = "linear_attention"
    known = isinstance(feature_map, str) and feature_map in _FEATURE_MAPS
    if not known and not callable(feature_map):
        raise ValueError(
            f"{name}: feature_map is {checks.show(feature_map)}, "
            f"want one of {', '.join(map(repr, _FEATURE_MAPS))} or a callable"
        )
    options: dict[str, Any] = {
        "feature_map": feature_map,
        "eps": checks.finite(name, "eps", eps, minimum=0.0),
    }
    causal = checks.flag(name, "is_causal", is_causal)
    with_state = checks.flag(name, "return_state", return_state)
    dispatch.require(name, q=q, k=k, v=v)
    arrays = collected(name, q=q, k=k, v=v, initial_state=initial_state)
    features = _features(name, arrays, feature_map)
    problem = linear_problem.product_problem(name, *features, aligned=causal, normalised=True)
    graph = ProductGraph(
        name=name, token=_token(name, arrays, options | {"causal": causal}), problem=problem,
        arrays=arrays,
        state_of=partial(tasks.normalised_state_of, feature_map=feature_map), add=tasks.add,
        finish=partial(tasks.linear_attention, **options),
        read_state=None if causal else partial(tasks.read_state, **options),
    )  # fmt: skip
    return graph.build(with_state)


def merge_attention(outs: Sequence[Array] | Array, lses: Sequence[Array] | Array) -> Any:
    """Combine attention results over disjoint sets of keys, of Dask arrays.

    Parameters
    ----------
    outs : sequence of dask.array.Array of shape (..., Lq, Dv), or one of them, stacked
        Outputs of `attention` for the same queries.
    lses : sequence of dask.array.Array of shape (..., Lq), or one of them, stacked
        Their log-sum-exps.

    Returns
    -------
    out : dask.array.Array, shape (..., Lq, Dv)
        Of the dtype and the library of the parts.
    lse : dask.array.Array, shape (..., Lq)
        float32, or float64 for float64 outputs.

    Raises
    ------
    ModuleNotFoundError
        If Dask is not installed, when `fa_cupy.dask` is imported.
    TypeError, ValueError
        If the parts do not match; for arguments that are no arrays of Dask, NumPy or CuPy, and for
        chunks of unknown sizes.

    See Also
    --------
    fa_cupy.merge_attention : the same for arrays in memory.

    Notes
    -----
    One task merges all parts of a chunk, in the order given.

    Examples
    --------
    >>> import dask.array as da
    >>> import numpy as np
    >>> from fa_cupy import dask as on_dask
    >>> q, k, v = da.random.default_rng(0).standard_normal((3, 100, 16), chunks=(1, 50, 16))
    >>> halves = slice(0, 50), slice(50, 100)
    >>> parts = [on_dask.attention(q, k[s], v[s], return_lse=True) for s in halves]
    >>> out, lse = on_dask.merge_attention(*zip(*parts))
    >>> bool(np.allclose(out, on_dask.attention(q, k, v)))
    True
    """
    return merged("merge_attention", outs, lses)


def _features(name: str, arrays: dict[str, Any], feature_map: Any) -> list[Any]:
    """Return stand-ins of the arrays of linear attention, with features in place of q and k."""
    found = stand_ins(arrays)
    if callable(feature_map):
        # What is wrong about the arrays themselves is said first.
        plain = (found[arg] for arg in "qkv")
        linear_problem.product_problem(name, *plain, aligned=False, normalised=True)
        for arg in "qk":
            x = arrays[arg]
            row = np.ones_like(x._meta, shape=(*(1,) * (x.ndim - 1), x.shape[-1]))
            of_row = feature_map(row)
            if not hasattr(of_row, "dtype") or not hasattr(of_row, "shape"):
                shown = checks.show(of_row)
                raise TypeError(f"{name}: feature_map({arg}) is {shown}, want an array")
            if of_row.dtype != x.dtype or of_row.shape[:-1] != row.shape[:-1]:
                raise ValueError(
                    f"{name}: feature_map({arg}) has dtype {of_row.dtype} and shape {of_row.shape} "
                    f"for an array of {row.dtype} and shape {row.shape}, want the same axes but "
                    "the last"
                )
            found[arg] = stand_in((*x.shape[:-1], of_row.shape[-1]), x.dtype)
    return [found.get(arg) for arg in _PRODUCT_ARGS]


def _token(name: str, arrays: dict[str, Any], options: dict[str, Any]) -> str:
    """Return what tells a graph from others."""
    return str(dask.base.tokenize(name, {arg: x.name for arg, x in arrays.items()}, options))
