"""Adapters of attention's gradients: one implementation each, on the same memory.

What the gradients are made from besides their inputs, the output and the log-sum-exp, each
implementation computes for itself before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from validation import peers
from validation.cases import Dense
from validation.peers import Call, UnavailableError

Arrays = tuple[Any, Any, Any, Any]  # q, k, v, dout


def random_numpy(case: Dense, seed: int) -> Arrays:
    """N(0, 1) numbers on the CPU, as `peers.random_numpy` lays them out."""
    return (*peers.random_numpy(case, seed), peers.random_numpy(case, seed + 1)[0])


def random_cupy(case: Dense, seed: int) -> Arrays:
    """N(0, 1) numbers on the GPU, as `peers.random_cupy` lays them out."""
    return (*peers.random_cupy(case, seed), peers.random_cupy(case, seed + 1)[0])


def _same(result: Any) -> Any:
    return result


def fa_cupy(case: Dense, arrays: Arrays) -> Call:
    """This package on arrays of the case's device."""
    from fa_cupy import attention, attention_backward

    *qkv, dout = arrays
    options = {"is_causal": case.causal, **peers.dropped(case)}
    out, lse = attention(*qkv, return_lse=True, **options)
    wait = _same if isinstance(dout, np.ndarray) else None

    def run() -> Any:
        return attention_backward(dout, *qkv, out, lse, **options)

    return Call(run, _same, wait)


def torch_sdpa(backend: str) -> Callable[[Dense, Arrays], Call]:
    """What autograd calls for `peers.torch_sdpa`: the gradients alone."""

    def prepare(case: Dense, arrays: Arrays) -> Call:
        torch = peers.module("torch")
        if isinstance(arrays[0], np.ndarray) or not torch.cuda.is_available():
            raise UnavailableError("on a GPU only")
        attention = peers.module("torch.nn.attention")
        *leaves, dout = map(peers.to_torch, arrays)
        leaves = [x.detach().requires_grad_() for x in leaves]
        with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)):
            out = torch.nn.functional.scaled_dot_product_attention(
                *leaves, dropout_p=case.dropout, is_causal=case.causal
            )
        return Call(
            lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
            lambda grads: tuple(map(peers.from_torch, grads)),
        )

    return prepare
