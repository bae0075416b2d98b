"""The gradient of sinks, from what the kernels of attention backward know of each query.

With ``delta = sum(dout * out, -1) - dlse``, a query adds ``-exp(sink - lse) * delta``. The sums are
CuPy's, in float64 and in one order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import cupy
import numpy as np

from fa_cupy.core import attention_problem
from fa_cupy.core.attention_problem import Problem
from fa_cupy.gpu.cublas import elementwise
from fa_cupy.gpu.plan import Plan

_LARGE_LSE_MARKER = 0x7FC0FA40  # kLargeLseMarker of cuda_src/common/large_lse.cuh
_LOG2E = np.float32(math.log2(math.e))  # kLog2e
_LN2 = np.float32(math.log(2))
_MOST = np.finfo(np.float32).max
_UNSEEN = -1.0  # in `Rows.inverse_sum`: it is never negative


class Rows(NamedTuple):
    """What the kernels leave in the workspace; each has shape (entries, q_len).

    Attributes
    ----------
    lse : cupy.ndarray of float32
        In units of log2, or what says that it is too large for weights.
    delta : cupy.ndarray of float32
    row_max, inverse_sum : cupy.ndarray of float32
        Of rows with such an LSE: the largest score, in units of log2, and the inverse of the sum
        of exponentials relative to it, the sink's among them.
    """

    lse: Any
    delta: Any
    row_max: Any
    inverse_sum: Any


class KnownRows(NamedTuple):
    """What those of float32 and float64 leave there; a weight is ``factor * exp(score - shift)``.

    Attributes
    ----------
    shift, factor, delta : cupy.ndarray
        Of shape (entries, q_len). The shift of a row that sees nothing is infinite.
    """

    shift: Any
    factor: Any
    delta: Any


def rows_of(
    problem: Problem, plan: Plan, places: Mapping[str, int], memory: Any
) -> Rows | KnownRows:
    """Return views of a workspace, before the plan runs in it.

    Parameters
    ----------
    problem : Problem
    plan : Plan
        With a launch of ``bwd_preprocess``, or of kernels of float32 or float64.
    places : dict of int
        Where the parts of its workspace begin.
    memory : cupy.cuda.MemoryPointer
        The workspace.
    """
    params = next(x.params for x in plan.steps if "entry_rows" in (x.params.dtype.names or ()))
    entries, rows = math.prod(problem.batch), int(params["entry_rows"][0])
    if problem.dtype == np.float32:  # kShift, kFactor and kDelta of QueryField
        known = cupy.ndarray((3, entries, rows), np.float32, memory + places["query_rows"])
        return KnownRows(*known[:, :, : problem.q_len])
    if problem.dtype == np.float64:
        known = cupy.ndarray((entries, rows, 4), np.float64, memory + places["query_rows"])
        return KnownRows(*(known[:, : problem.q_len, i] for i in range(3)))
    pairs = (entries, rows // 2, 2, 2)  # float4 of two rows: the LSE of each, delta of each
    lse_delta = cupy.ndarray(pairs, np.float32, memory + places["lse_delta"])
    statistics = cupy.ndarray((entries, rows, 2), np.float32, memory + places["row_statistics"])
    # They are not computed where a row sees no key: no sum comes out NaN.
    statistics.fill(_UNSEEN)
    found = statistics[:, : problem.q_len]
    return Rows(lse_delta[:, :, 0], lse_delta[:, :, 1], found[..., 0], found[..., 1])


def gradient(
    problem: Problem, sinks: Any, lse: Any, rows: Rows | KnownRows, empty: Callable[..., Any]
) -> Any:
    """Return the gradient of `sinks`, given the natural LSE and what is known of the rows.

    Parameters
    ----------
    problem : Problem
    sinks, lse : cupy.ndarray
        Of the call.
    rows : Rows or KnownRows
        After the run of the plan.
    empty : callable
        ``empty(shape, dtype, like)`` returns memory for a result.
    """
    sink = _converted(sinks, attention_problem.sum_dtype(problem.dtype))
    view = attention_problem.batch_view(problem, sink[..., None], problem.q_len, 1)
    shape = math.prod(problem.batch), problem.q_len
    sink = attention_problem.view(cupy, sink, view).reshape(shape)
    if isinstance(rows, KnownRows):
        weights = rows.factor * cupy.exp(sink - rows.shift)
        unseen = cupy.isneginf(sink) | (rows.shift == np.inf)
        terms = cupy.where(unseen, 0.0, -weights * rows.delta)
    else:
        terms = _terms(problem, sink, lse, rows)

    result = empty(sinks.shape, sinks.dtype, sinks)
    view = attention_problem.batch_view(problem, result[..., None], problem.q_len, 1)
    axes = zip(view.shape[:-1], view.strides[:-1], strict=True)
    broadcast = tuple(axis for axis, (_, step) in enumerate(axes) if step == 0)
    terms = terms.reshape(view.shape[:-1])
    if broadcast:
        terms = terms.sum(axis=broadcast, dtype=np.float64)
    _store(result, terms.reshape(result.shape))
    return result


def _terms(problem: Problem, sink: Any, lse: Any, rows: Rows) -> Any:
    """Return what each query adds, of shape (entries, q_len) as `sink`."""
    shape = sink.shape
    stored, delta = (x.reshape(shape[0], -1)[:, : problem.q_len] for x in (rows.lse, rows.delta))
    weights = cupy.exp(sink - lse.reshape(shape))
    in_log2 = cupy.maximum(cupy.minimum(sink * _LOG2E, _MOST), -_MOST)
    apart = cupy.exp((in_log2 - rows.row_max) * _LN2) * rows.inverse_sum
    apart = cupy.where(rows.inverse_sum == _UNSEEN, np.float32(1), apart)
    is_large = stored.view(np.uint32) == np.uint32(_LARGE_LSE_MARKER)
    weights = cupy.where(is_large, apart, weights)
    unseen = cupy.isneginf(sink)
    if problem.offsets is not None:  # an LSE of NaN where a sequence's offsets are out of range
        unseen = unseen | (stored == np.float32(np.inf))
    return cupy.where(unseen, np.float32(0), -weights * delta)


def _converted(x: Any, dtype: np.dtype[Any]) -> Any:
    if x.dtype == attention_problem.BFLOAT16:
        x = elementwise.from_bfloat16(x.view(np.uint16))
    return x.astype(dtype)


def _store(out: Any, value: Any) -> None:
    if out.dtype == attention_problem.BFLOAT16:
        elementwise.to_bfloat16(value.astype(np.float32), out.view(np.uint16))
    else:
        out[...] = value.astype(out.dtype)
