"""Argument checks, and the canonical problem that every backend solves.

Nothing here touches data: a problem is made of shapes, strides and dtypes, so that a plan for it
can be cached and so that every mistake is reported before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from fa_cupy._bitmask import BitMask
from fa_cupy.core import arrays as core_arrays
from fa_cupy.core import broadcasting, checks
from fa_cupy.core.broadcasting import View as View  # for the backends
from fa_cupy.dropout.arguments import Dropout
from fa_cupy.keys import offsets
from fa_cupy.keys.layout import KeyLayout, Pages
from fa_cupy.keys.offsets import Offsets
from fa_cupy.score.program import BoundScore, Operands

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT_DTYPES = (np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64))
_FLOAT_NAMES = "float16, bfloat16, float32 or float64"
ARGS = ("q", "k", "v", "bias", "mask")
_MORE = ("sinks", "k_lengths", "page_table", "q_offsets", "k_offsets")


@dataclass(frozen=True)
class Problem:
    """One attention call in canonical form; see `attention_problem`.

    All views share the axes `batch`; a broadcast axis has stride 0. Where `q` has more heads than
    `k` or `v`, the head axis is split into (kv_heads, group).

    Key j is visible to query i only if ``i + lower <= j <= i + upper``; None means no bound.

    With `k_lengths`, entry b has the keys below ``k_lengths[b]``; where `band_from_end` is True,
    both bounds are to be shifted by ``k_lengths[b] - k_len``. With `pages`, `k` and `v` are views
    of the first page as if it went on: their strides along the entries are 0.

    With `offsets`, the band counts positions from the beginning of each sequence; where
    `band_from_end` is True, both bounds are to be shifted by ``keys - queries`` of the sequence
    less ``k_len - q_len``.
    """

    batch: tuple[int, ...]
    q_len: int
    k_len: int
    head_dim: int
    v_dim: int
    dtype: np.dtype[Any]
    q: View  # (*batch, q_len, head_dim)
    k: View  # (*batch, k_len, head_dim)
    v: View  # (*batch, k_len, v_dim)
    bias: View | None  # (*batch, q_len, k_len)
    bias_dtype: np.dtype[Any] | None
    mask: View | None  # (*batch, q_len, k_len) of bool, or of a BitMask's entries; not of no keys
    sinks: View | None  # (*batch, q_len, 1)
    sinks_dtype: np.dtype[Any] | None
    out_shape: tuple[int, ...]  # the user's: (*user_batch, q_len, v_dim)
    scale: float
    lower: int | None
    upper: int | None
    softcap: float  # 0.0: off
    precision: str | None
    score: BoundScore | None = None  # what a score is made by, between softcap and bias
    k_lengths: View | None = None  # batch
    k_lengths_dtype: np.dtype[Any] | None = None
    pages: Pages | None = None
    band_from_end: bool = False  # whether the band is that of entries with all k_len keys
    offsets: Offsets | None = None
    dropout: Dropout | None = None
    bias_aligned: bool = True  # whether the bias begins at a multiple of 16 bytes, on a GPU


def attention_problem(
    q: Any, k: Any, v: Any, bias: Any, mask: Any, *,
    scale: Any = None, is_causal: Any = False, causal_align: Any = None, window: Any = None,
    softcap: Any = 0.0, sinks: Any = None, precision: Any = None, score: Operands | None = None,
    k_lengths: Any = None, page_table: Any = None, q_offsets: Any = None, k_offsets: Any = None,
    dropout: Dropout | None = None, out: Any = None,
    name: str = "attention", args: Sequence[str] = ARGS, grouped: bool = True,
) -> Problem:  # fmt: skip
    """Check the arguments of an attention call and bring them into canonical form.

    Parameters
    ----------
    q, k, v, bias, mask, sinks, out : numpy.ndarray or cupy.ndarray, or None for the last four
        Native arrays; only their metadata is read (and the address of `out`, to see overlaps).
        `mask` may be a BitMask.
    scale, is_causal, causal_align, window, softcap, precision
        As in `fa_cupy.attention`.
    score : Operands or None
        The score expression with its native arrays.
    k_lengths, page_table, q_offsets, k_offsets : numpy.ndarray or cupy.ndarray, or None
        As in `fa_cupy.attention`; their numbers are not read, but for the lengths of sequences with
        offsets on the host, which indices of a score stay in.
    dropout : Dropout or None
        From the arguments `dropout` and `seed`.
    name : str
        The public function that errors speak of.
    args : sequence of str
        Its names for the first five arrays.
    grouped : bool
        Whether `k` and `v` may have fewer heads than `q`.

    Returns
    -------
    Problem

    Raises
    ------
    TypeError, ValueError
        With a message that names the argument, what it got and what is wanted.
    """
    layout, given, of_keys = None, (q, k, v), (k_lengths, page_table)
    if k_lengths is not None or page_table is not None:
        layout = KeyLayout(name, args, given, *of_keys)
        k, v = layout.k, layout.v
    rows = dict(zip(args, (q, k, v), strict=False))
    dtype, bias_dtype, sinks_dtype = _dtypes(name, args, rows, bias, mask, sinks)
    column = None if sinks is None else sinks[..., None]  # one score of each row
    q_len, k_len, head_dim, v_dim = _sizes(name, rows)
    if isinstance(mask, BitMask):
        mask = _entries(name, args, mask, (q_len, k_len))  # from here on an array like any other
    groups = broadcasting.head_groups(name, args, q, k, v, grouped)
    lengths = q_len, k_len
    user_batch = _batch(name, args, groups, (q, k, v, bias, mask), lengths, column, layout, of_keys)
    view = partial(broadcasting.over, user_batch, groups)
    packed = q_offsets is not None and offsets.checked(name, args, lengths, q_offsets, k_offsets)
    arg = layout.arg if layout else "k_offsets" if k_offsets is not None else None
    lower, upper = checks.band(name, is_causal, causal_align, window, *lengths, arg)
    from_end = causal_align == "bottom_right" and (lower, upper) != (None, None)
    places = {} if layout is None else layout.fields(user_batch, groups, from_end)
    if packed:
        places = {"offsets": packed, "band_from_end": from_end and k_offsets is not None}
    problem = Problem(
        batch=broadcasting.split_heads(user_batch, groups),
        q_len=q_len,
        k_len=k_len,
        head_dim=head_dim,
        v_dim=v_dim,
        dtype=dtype,
        q=view(q, q_len, head_dim),
        k=view(k, k_len, head_dim),
        v=view(v, k_len, v_dim),
        bias=None if bias is None else view(bias, q_len, k_len),
        bias_dtype=bias_dtype,
        mask=None if mask is None or k_len == 0 else view(mask, q_len, k_len),
        sinks=None if sinks is None else view(column, q_len, 1),
        sinks_dtype=sinks_dtype,
        out_shape=(*user_batch, q_len, v_dim),
        scale=(head_dim or 1) ** -0.5 if scale is None else checks.finite(name, "scale", scale),
        lower=lower,
        upper=upper,
        softcap=checks.finite(name, "softcap", softcap, minimum=0.0),
        precision=checks.precision(name, precision, dtype),
        score=_bound(name, score, user_batch, lengths, q_offsets, k_offsets) if score else None,
        dropout=dropout and dropout.packed(q_offsets),
        **places,
    )
    if out is not None:
        names = (*args, *_MORE)
        more = (bias, mask, sinks, k_lengths, page_table, q_offsets, k_offsets)
        inputs = [*zip(names, (*given, *more), strict=True), *(score.named() if score else [])]
        check_out(name, out, problem.out_shape, dtype, inputs)
    return problem


def _dtypes(
    name: str, args: Sequence[str], rows: dict[str, Any], bias: Any, mask: Any, sinks: Any
) -> tuple[np.dtype[Any], np.dtype[Any] | None, np.dtype[Any] | None]:
    """Return the dtypes of `rows`, which are q, k and v by argument, of bias and of sinks."""
    bias_arg, mask_arg = args[3:]
    dtype = common_dtype(name, rows)
    others = f"bool (cast it: {mask_arg} != 0), " if bias_arg == mask_arg else ""
    bias_dtype = None if bias is None else float_dtype(name, bias_arg, bias, others)
    sinks_dtype = None if sinks is None else float_dtype(name, "sinks", sinks)
    if mask is not None and mask.dtype != np.bool_:
        raise TypeError(
            f"{name}: {mask_arg} has dtype {mask.dtype}, want bool (cast it: {mask_arg} != 0)"
        )
    return dtype, bias_dtype, sinks_dtype


def _sizes(name: str, rows: dict[str, Any]) -> tuple[int, int, int, int]:
    """Return q_len, k_len, head_dim and v_dim of q, k and v, given by argument."""
    check_axes(name, rows)
    (q_arg, q), (k_arg, k), (v_arg, v) = rows.items()
    q_len, head_dim = q.shape[-2:]
    k_len, v_dim = v.shape[-2:]
    if k.shape[-1] != head_dim:
        raise ValueError(f"{name}: {k_arg} has head_dim {k.shape[-1]}, {q_arg} has {head_dim}")
    if k.shape[-2] != k_len:
        raise ValueError(f"{name}: {v_arg} has length {k_len}, {k_arg} has {k.shape[-2]}")
    return q_len, k_len, head_dim, v_dim


def _entries(name: str, args: Sequence[str], mask: BitMask, lengths: tuple[int, int]) -> Any:
    """Return the entries of a mask of these lengths, with axes of size 1 in place of them."""
    named = zip(("q_len", "k_len"), args[:2], mask.shape[-2:], lengths, strict=True)
    for what, arg, got, want in named:
        if got != want:
            raise ValueError(f"{name}: {args[4]} has {what} {got}, {arg} has {want}")
    return mask.entries[..., None, None]


def _batch(
    name: str,
    args: Sequence[str],
    groups: tuple[int, ...],
    arrays: Sequence[Any],
    lengths: tuple[int, int],
    sinks: Any,
    layout: KeyLayout | None,
    of_keys: tuple[Any, Any],
) -> tuple[int, ...]:
    """Return the batch axes of scores: those of all arrays, broadcast; sinks have an axis more.

    `layout` was made from `of_keys`, which are key lengths and a page table.
    """
    given = [(arg, x) for arg, x in zip(args, arrays, strict=True) if x is not None]
    more = [] if sinks is None else [("sinks", sinks)]
    batch = broadcasting.broadcast_batch(name, groups, given + more)
    for arg, array in given[3:]:  # bias and mask
        broadcasting.check_score_axes(name, arg, array.shape, (*batch, *lengths))
    if sinks is not None and sinks.shape[:-1][-1:] not in ((), (1,), (lengths[0],)):
        raise ValueError(
            f"{name}: sinks has shape {sinks.shape[:-1]}, want one that broadcasts to "
            f"{(*batch, lengths[0])}, as (heads, 1) does"
        )
    if layout is None:
        return batch
    most = broadcasting.MOST_BATCH_AXES - 1  # without that of heads
    for arg, array, own in zip(("k_lengths", "page_table"), of_keys, (0, 1), strict=True):
        if array is not None and array.ndim - own > most:
            broadcasting.check_batch_axes(name, arg, array.ndim - own, most)
    return layout.broadcast(batch)


def _bound(
    name: str,
    score: Operands,
    batch: tuple[int, ...],
    lengths: tuple[int, int],
    q_offsets: Any,
    k_offsets: Any,
) -> BoundScore:
    """Return what a problem holds of a score, whose positions are those in a sequence."""
    if q_offsets is not None:
        lengths = offsets.longest(lengths, q_offsets, k_offsets)
    return score.bound(name, (*batch, lengths[0], 0), lengths[1])


def gradient_problem(
    inputs: Sequence[Any], out: Any, lse: Any, dout: Any, dlse: Any, name: str, **options: Any
) -> Problem:
    """Check what gradients of attention are made from; return the problem of the attention.

    Parameters
    ----------
    inputs : sequence of array
        q, k, v, bias and mask.
    out, lse, dout, dlse : array
        Results and their gradients; `dlse` may be None.
    name : str
        The public function that errors speak of.
    **options
        As for `attention_problem`, sinks among them.
    """
    problem = attention_problem(*inputs, name=name, args=ARGS, **options)
    shape, dtype = problem.out_shape, problem.dtype
    for arg, array in (("out", out), ("dout", dout)):
        checks.check_gradient(name, arg, array, shape, dtype)
    for arg, array in (("lse", lse), ("dlse", dlse)):
        if array is not None:
            checks.check_gradient(name, arg, array, shape[:-1], sum_dtype(dtype))
    return problem


def view(xp: Any, array: Any, v: View) -> Any:
    """Return `array` seen through `v`, without a copy; `xp` is its namespace."""
    return xp.lib.stride_tricks.as_strided(array, v.shape, v.strides)


def out_view(problem: Problem, shape: Sequence[int], strides: Sequence[int]) -> View:
    """Return the view over ``problem.batch`` of an output or an LSE of the user's shape.

    Parameters
    ----------
    problem : Problem
    shape, strides : sequence of int
        Of an array of shape ``problem.out_shape`` or ``problem.out_shape[:-1]``.
    """
    axes = len(problem.out_shape) - 2
    groups = problem.batch[axes - 1 :] if len(problem.batch) > axes else ()
    heads = broadcasting.batch_strides(shape[:axes], strides[:axes], axes, groups)
    return View((*problem.batch, *shape[axes:]), (*heads, *strides[axes:]))


def batch_view(problem: Problem, array: Any, rows: int, cols: int) -> View:
    """Return the view over ``problem.batch`` of an array that broadcasts to the user's batch."""
    axes = len(problem.out_shape) - 2
    groups = problem.batch[axes - 1 :] if len(problem.batch) > axes else ()
    return broadcasting.over(problem.out_shape[:-2], groups, array, rows, cols)


def check_out(
    name: str,
    out: Any,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    inputs: Iterable[tuple[str, Any]],
) -> None:
    """Raise unless `out` can take a result of `shape` and `dtype` computed from `inputs`."""
    if out.shape != shape:
        raise ValueError(f"{name}: out has shape {out.shape}, want {shape}")
    if out.dtype != dtype:
        raise TypeError(f"{name}: out has dtype {out.dtype}, want {dtype}")
    if not getattr(out.flags, "writeable", True):  # CuPy's flags have no such entry
        raise ValueError(f"{name}: out is read-only, want a writeable array")
    if core_arrays.overlaps_itself(out):
        raise ValueError(
            f"{name}: out has strides {out.strides} for shape {out.shape}, "
            "want every element at an address of its own"
        )
    for arg, array in inputs:
        if array is not None and core_arrays.overlap(out, array):
            raise ValueError(f"{name}: out overlaps {arg} in memory, want separate memory")


def named_parts(name: str, outs: Any, lses: Any) -> dict[str, Any]:
    """Return parts of an attention result by the names that errors have for them: outs, then lses.

    Each may be one array of them, stacked.
    """
    named: dict[str, Any] = {}
    for arg, parts in (("outs", outs), ("lses", lses)):
        parts = checks.sequence(name, arg, parts, "a sequence of arrays")
        if hasattr(parts, "shape"):
            stacked: Any = parts
            parts = [stacked[i, ...] for i in range(stacked.shape[0])]
        if any(part is None for part in parts):
            raise TypeError(f"{name}: {arg} has a part that is None, want arrays")
        named |= {f"{arg}[{i}]": part for i, part in enumerate(parts)}
    count = sum(arg.startswith("outs") for arg in named)
    if count == 0 or len(named) != 2 * count:
        raise ValueError(
            f"{name}: lses has {len(named) - count} parts, outs has {count}, "
            "want the same number, at least 1"
        )
    return named


def torch_options(name: str, attn_mask: Any, is_causal: Any) -> None:
    """Raise for options of PyTorch's function that there are not together."""
    if attn_mask is not None and checks.flag(name, "is_causal", is_causal):
        raise ValueError(f"{name}: is_causal is True and attn_mask is given, want one of them")


def check_options(
    name: str,
    *,
    scale: Any,
    is_causal: Any,
    causal_align: Any,
    window: Any = None,
    softcap: Any = 0.0,
    precision: Any = None,
) -> tuple[float | None, bool, float]:
    """Check options as far as they do not depend on arrays, as if these had one row each.

    Returns
    -------
    scale : float or None
    is_causal : bool
    softcap : float
    """
    checks.band(name, is_causal, causal_align, window, 1, 1)
    checks.precision(name, precision, np.dtype(np.float32))
    number = None if scale is None else checks.finite(name, "scale", scale)
    return number, bool(is_causal), checks.finite(name, "softcap", softcap, minimum=0.0)


def matching_parts(name: str, outs: list[Any], lses: list[Any]) -> None:
    """Raise unless outputs and log-sum-exps are parts of one attention result."""
    common_dtype(name, {f"outs[{i}]": out for i, out in enumerate(outs)})
    for i, lse in enumerate(lses):
        float_dtype(name, f"lses[{i}]", lse)
    check_part_shapes(name, outs, lses)


def check_part_shapes(name: str, outs: Sequence[Any], lses: Sequence[Any]) -> None:
    """Raise unless parts have shapes of one attention result, as arrays of any library."""
    shape = tuple(outs[0].shape)
    if len(shape) < 2:
        raise ValueError(f"{name}: outs[0] has shape {shape}, want at least 2 axes (length, v_dim)")
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if tuple(out.shape) != shape:
            raise ValueError(f"{name}: outs[{i}] has shape {tuple(out.shape)}, outs[0] has {shape}")
        if tuple(lse.shape) != shape[:-1]:
            raise ValueError(f"{name}: lses[{i}] has shape {tuple(lse.shape)}, want {shape[:-1]}")


def common_dtype(name: str, arrays: dict[str, Any]) -> np.dtype[Any]:
    """Return the float dtype of all `arrays`, by argument."""
    lead, first = next(iter(arrays.items()))
    dtype = float_dtype(name, lead, first)
    for arg, array in arrays.items():
        if float_dtype(name, arg, array) != dtype:
            raise TypeError(f"{name}: {arg} has dtype {array.dtype}, {lead} has {dtype}")
    return dtype


def sum_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of sums and of the LSE: float32, or float64 for float64."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def check_axes(name: str, arrays: dict[str, Any]) -> None:
    """Raise for an array that has no rows and columns."""
    for arg, array in arrays.items():
        if array.ndim < 2:
            raise ValueError(
                f"{name}: {arg} has shape {array.shape}, want at least 2 axes (..., length, dim)"
            )


def dtype_of(name: str, dtype: Any) -> np.dtype[Any]:
    """Return one of `FLOAT_DTYPES`, given as NumPy takes dtypes; raise TypeError for another."""
    text = f"{name}: dtype is {checks.show(dtype)}, want {_FLOAT_NAMES}"
    try:
        found = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError):
        raise TypeError(text) from None
    for known in FLOAT_DTYPES:
        if found == known and dtype is not None:  # which NumPy takes for float64
            return known
    raise TypeError(text)


def float_dtype(name: str, arg: str, array: Any, others: str = "") -> np.dtype[Any]:
    """Return the dtype of an array, one of `FLOAT_DTYPES`; raise TypeError for another.

    `others` is what the error names before these.
    """
    for dtype in FLOAT_DTYPES:
        if array.dtype == dtype:
            return dtype
    if array.dtype.kind == "f" and array.dtype.newbyteorder() in FLOAT_DTYPES:
        raise TypeError(
            f"{name}: {arg} has dtype {array.dtype.str}, want native byte order "
            f"({array.dtype.newbyteorder().name})"
        )
    raise TypeError(f"{name}: {arg} has dtype {array.dtype}, want {others}{_FLOAT_NAMES}")
