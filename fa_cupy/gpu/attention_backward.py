"""Gradients of attention on CuPy arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fa_cupy import _check
from fa_cupy.gpu import plan_bwd
from fa_cupy.gpu.plan import require_whole_elements

_NAME = "attention_backward"


def backward(
    problem: _check.Problem,
    inputs: tuple[Any, ...],
    results: tuple[Any, ...],
    need: tuple[str, ...],
    empty: Callable[..., Any],
) -> dict[str, Any]:
    """Return the gradients named by `need`; see `fa_cupy.gpu.tiled_backward.backward`.

    Kernels compute them where there are some for the call, cuBLAS products elsewhere.
    """
    q, k, v, bias, _ = inputs
    out, lse, dout, dlse = results
    require_whole_elements(_NAME, q=q, k=k, v=v, bias=bias, out=out, lse=lse, dout=dout, dlse=dlse)
    found = plan_bwd.backward(problem, inputs, results, need, empty)
    if found is not None:
        return found
    from fa_cupy.gpu import tiled_backward  # needs cuBLAS, which kernels do not

    return tiled_backward.backward(problem, inputs, results, need, empty)
