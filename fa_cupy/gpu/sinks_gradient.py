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


def rows_of(problem: Problem, plan: Plan, places: Mapping[str, int], memory: Any) -> Rows:
    """Return views of a workspace, before the plan runs in it.

    Parameters
    ----------
    problem : Problem
    plan : Plan
        With a launch of ``bwd_preprocess``.
    places : dict of int
        Where the parts of its workspace begin.
    memory : cupy.cuda.MemoryPointer
        The workspace.
    """
    (params,) = (x.params for x in plan.steps if "entry_rows" in (x.params.dtype.names or ()))
    entries, rows = math.prod(problem.batch), int(params["entry_rows"][0])
    pairs = (entries, rows // 2, 2, 2)  # float4 of two rows: the LSE of each, delta of each
    lse_delta = cupy.ndarray(pairs, np.float32, memory + places["lse_delta"])
    statistics = cupy.ndarray((entries, rows, 2), np.float32, memory + places["row_statistics"])
    # They are not computed where a row sees no key: no sum comes out NaN.
    statistics.fill(_UNSEEN)
    found = statistics[:, : problem.q_len]
    return Rows(lse_delta[:, :, 0], lse_delta[:, :, 1], found[..., 0], found[..., 1])


def gradient(problem: Problem, sinks: Any, lse: Any, rows: Rows, empty: Callable[..., Any]) -> Any:
    """Return the gradient of `sinks`, given the natural LSE and what is known of the rows.

    Parameters
    ----------
    problem : Problem
    sinks, lse : cupy.ndarray
        Of the call.
    rows : Rows
        After the run of the plan.
    empty : callable
        ``empty(shape, dtype, like)`` returns memory for a result.
    """
    shape = math.prod(problem.batch), problem.q_len
    stored, delta = (x.reshape(shape[0], -1)[:, : problem.q_len] for x in (rows.lse, rows.delta))
    sink = _in_float32(sinks)
    view = attention_problem.batch_view(problem, sink[..., None], problem.q_len, 1)
    sink = attention_problem.view(cupy, sink, view).reshape(shape)

    weights = cupy.exp(sink - lse.reshape(shape))
    in_log2 = cupy.maximum(cupy.minimum(sink * _LOG2E, _MOST), -_MOST)
    apart = cupy.exp((in_log2 - rows.row_max) * _LN2) * rows.inverse_sum
    apart = cupy.where(rows.inverse_sum == _UNSEEN, np.float32(1), apart)
    is_large = stored.view(np.uint32) == np.uint32(_LARGE_LSE_MARKER)
    weights = cupy.where(is_large, apart, weights)
    unseen = cupy.isneginf(sink)
    if problem.offsets is not None:  # an LSE of NaN where a sequence's offsets are out of range
        unseen = unseen | (stored == np.float32(np.inf))
    terms = cupy.where(unseen, np.float32(0), -weights * delta)

    result = empty(sinks.shape, sinks.dtype, sinks)
    view = attention_problem.batch_view(problem, result[..., None], problem.q_len, 1)
    axes = zip(view.shape[:-1], view.strides[:-1], strict=True)
    broadcast = tuple(axis for axis, (_, step) in enumerate(axes) if step == 0)
    terms = terms.reshape(view.shape[:-1])
    if broadcast:
        terms = terms.sum(axis=broadcast, dtype=np.float64)
    _store(result, terms.reshape(result.shape))
    return result


def _in_float32(x: Any) -> Any:
    if x.dtype == attention_problem.BFLOAT16:
        return elementwise.from_bfloat16(x.view(np.uint16))
    return x.astype(np.float32)


def _store(out: Any, value: Any) -> None:
    if out.dtype == attention_problem.BFLOAT16:
        elementwise.to_bfloat16(value.astype(np.float32), out.view(np.uint16))
    else:
        out[...] = value.astype(out.dtype)
