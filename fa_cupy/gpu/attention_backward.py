"""Gradients of attention on CuPy arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fa_cupy.core import attention_problem
from fa_cupy.gpu import attention_backward_plan
from fa_cupy.gpu.plan import require_whole_elements

_NAME = "attention_backward"


def backward(
    problem: attention_problem.Problem,
    inputs: tuple[Any, ...],
    results: tuple[Any, ...],
    need: tuple[str, ...],
    empty: Callable[..., Any],
) -> dict[str, Any]:
    """Return the gradients named by `need`; see `fa_cupy.gpu.cublas.attention_backward.backward`.

    Kernels compute them where there are some for the call, cuBLAS products elsewhere.
    """
    q, k, v, bias, _ = inputs
    out, lse, dout, dlse = results
    require_whole_elements(_NAME, q=q, k=k, v=v, bias=bias, out=out, lse=lse, dout=dout, dlse=dlse)
    found = attention_backward_plan.backward(problem, inputs, results, need, empty)
    if found is not None:
        return found
    from fa_cupy.gpu.cublas import attention_backward  # needs cuBLAS, which kernels do not

    return attention_backward.backward(problem, inputs, results, need, empty)
