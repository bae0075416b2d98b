"""Attention and causal products with gradients for PyTorch.

Importing this module imports torch; no other module of fa_cupy does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import fa_cupy

_Tensor = torch.Tensor


def attention(
    q: Any,
    k: Any,
    v: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    causal_align: str | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    sinks: Any = None,
    precision: str | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of tensors, with gradients of `q`, `k`, `v`, `bias` and `sinks`.

    Parameters
    ----------
    q, k, v, bias, mask, scale, is_causal, causal_align, window, softcap, sinks, precision
        As in `fa_cupy.attention`. Only these five tensors may require gradients.
    return_lse : bool
        Whether to return the log-sum-exp too. Gradients flow through it as well.

    Returns
    -------
    out : torch.Tensor, shape (..., Lq, Dv)
    lse : torch.Tensor, shape (..., Lq)
        Only with `return_lse`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As for `fa_cupy.attention`; in the gradients, as for `fa_cupy.attention_backward`.

    See Also
    --------
    fa_cupy.attention_backward : computes the gradients; there are no second derivatives.

    Examples
    --------
    >>> import torch
    >>> from fa_cupy.torch import attention
    >>> q, k, v = torch.randn(3, 8, 100, 16).requires_grad_().unbind()
    >>> attention(q, k, v, is_causal=True).sum().backward()
    """
    options = {
        "scale": scale,
        "is_causal": is_causal,
        "causal_align": causal_align,
        "window": window,
        "softcap": softcap,
    }
    out, lse = _Attention.apply(q, k, v, bias, sinks, mask, options, precision)
    return (out, lse) if return_lse else out


def causal_product(
    q: Any,
    k: Any,
    v: Any,
    *,
    initial_state: Any = None,
    return_state: bool = False,
    reverse: bool = False,
    algorithm: str = "auto",
) -> Any:
    """Causal product of tensors, with gradients of `q`, `k`, `v` and `initial_state`.

    Parameters
    ----------
    q, k, v, initial_state, return_state, reverse, algorithm
        As in `fa_cupy.causal_product`. Only the four tensors may require gradients.

    Returns
    -------
    out : torch.Tensor, shape (..., L, M)
    state : torch.Tensor, shape (..., E, M)
        Only with `return_state`; gradients flow through it as well.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As for `fa_cupy.causal_product`; in the gradients, as for
        `fa_cupy.causal_product_backward`.

    Examples
    --------
    >>> import torch
    >>> from fa_cupy.torch import causal_product
    >>> q, k, v = torch.randn(3, 8, 100, 16).requires_grad_().unbind()
    >>> causal_product(q, k, v).sum().backward()
    """
    found = _Product.apply(q, k, v, initial_state, return_state, reverse, algorithm)
    return found if return_state else found[0]


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        q: Any, k: Any, v: Any, bias: Any, sinks: Any, mask: Any, options: dict[str, Any],
        precision: Any,
    ) -> Any:  # fmt: skip
        return fa_cupy.attention(
            q, k, v, bias, mask, sinks=sinks, precision=precision, return_lse=True, **options
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, bias, sinks, mask, ctx.options, _ = inputs
        ctx.bits = None if isinstance(mask, _Tensor) else mask
        mask = mask if ctx.bits is None else None
        ctx.save_for_backward(q, k, v, *output, bias, mask, sinks)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        q, k, v, out, lse, bias, mask, sinks = ctx.saved_tensors
        names = "q", "k", "v", "bias", "sinks"
        need = [name for name, wanted in zip(names, ctx.needs_input_grad, strict=False) if wanted]
        found: dict[str, Any] = {}
        if need and not (dout is None and dlse is None):
            mask = mask if ctx.bits is None else ctx.bits
            dout = torch.zeros_like(out) if dout is None else dout
            grads = _Last.apply(
                lambda *x: fa_cupy.attention_backward(
                    *x[:-2], sinks=x[-2], dlse=x[-1], need=need, **ctx.options
                ),
                *(dout, q, k, v, out, lse, bias, mask, sinks, dlse),
            )
            found = dict(zip(need, grads, strict=True))
        return *map(found.get, names), None, None, None


class _Product(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        q: Any, k: Any, v: Any, initial: Any, with_state: bool, reverse: bool, algorithm: str
    ) -> Any:
        found = fa_cupy.causal_product(
            q, k, v, initial_state=initial, return_state=with_state, reverse=reverse,
            algorithm=algorithm,
        )  # fmt: skip
        return found if with_state else (found,)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, _, ctx.reverse, _ = inputs
        ctx.save_for_backward(*tensors)
        ctx.shape, ctx.like = output[0].shape, output[0].dtype
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Any, dstate: Any = None) -> Any:
        q, k, v, initial = ctx.saved_tensors
        found: tuple[Any, ...] = ()
        if not (dout is None and dstate is None):
            dout = torch.zeros(ctx.shape, dtype=ctx.like, device=q.device) if dout is None else dout
            found = _Last.apply(
                lambda *x: fa_cupy.causal_product_backward(
                    *x[:4], initial_state=x[4], reverse=ctx.reverse, dstate=x[5]
                ),
                *(dout, q, k, v, initial, dstate),
            )
        return *found, *[None] * (7 - len(found))


class _Last(torch.autograd.Function):  # type: ignore[misc]
    """Gradients, which know that they have none of their own."""

    @staticmethod
    def forward(function: Callable[..., Any], *tensors: Any) -> Any:
        return function(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            "fa_cupy.torch: a second derivative is not available, want a first one"
        )
