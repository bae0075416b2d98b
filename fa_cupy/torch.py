"""Attention and causal products with gradients for PyTorch.

Importing this module imports torch; no other module of fa_cupy does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    message = "fa_cupy.torch needs PyTorch, which is not installed: pip install torch"
    raise ModuleNotFoundError(message, name="torch") from error

import fa_cupy
from fa_cupy._score import arrays_of, with_arrays

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
    score: fa_cupy.Score | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of tensors, with gradients of `q`, `k`, `v`, `bias`, `sinks` and those of a score.

    Parameters
    ----------
    q, k, v, bias, mask, scale, is_causal, causal_align, window, softcap, sinks, precision
        As in `fa_cupy.attention`. Only these five tensors may require gradients.
    score : Score, optional
        As in `fa_cupy.attention`, with tensors as its arrays, which may require gradients too where
        `fa_cupy.attention_backward` can compute them.
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

    Slopes that are learned:

    >>> from fa_cupy import Score
    >>> slopes = torch.ones(8, requires_grad=True)
    >>> score = Score("s - slopes[h] * abs(i - j)", slopes=slopes)
    >>> attention(q.detach(), k.detach(), v.detach(), score=score).sum().backward()
    >>> slopes.grad.shape
    torch.Size([8])
    """
    options = {
        "scale": scale,
        "is_causal": is_causal,
        "causal_align": causal_align,
        "window": window,
        "softcap": softcap,
    }
    of_score = arrays_of("attention", score).values()
    out, lse = _Attention.apply(options, precision, mask, score, q, k, v, bias, sinks, *of_score)
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
        options: dict[str, Any], precision: Any, mask: Any, score: Any, q: Any, k: Any, v: Any,
        bias: Any, sinks: Any, *of_score: Any,
    ) -> Any:  # fmt: skip
        return fa_cupy.attention(
            q, k, v, bias, mask, sinks=sinks, score=_given(score, of_score), precision=precision,
            return_lse=True, **options,
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.options, _, mask, ctx.score, q, k, v, bias, sinks, *of_score = inputs
        ctx.bits = None if isinstance(mask, _Tensor) else mask
        mask = mask if ctx.bits is None else None
        ctx.save_for_backward(q, k, v, *output, bias, mask, sinks, *of_score)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        q, k, v, out, lse, bias, mask, sinks, *of_score = ctx.saved_tensors
        names = "q", "k", "v", "bias", "sinks", *arrays_of("attention", ctx.score)
        wanted = ctx.needs_input_grad[-len(names) :]
        need = [name for name, grad in zip(names, wanted, strict=True) if grad]
        found: dict[str, Any] = {}
        if need and not (dout is None and dlse is None):
            mask = mask if ctx.bits is None else ctx.bits
            dout = torch.zeros_like(out) if dout is None else dout
            grads = _Last.apply(
                lambda *x: fa_cupy.attention_backward(
                    *x[:8], sinks=x[8], dlse=x[9], score=_given(ctx.score, x[10:]), need=need,
                    **ctx.options,
                ),
                *(dout, q, k, v, out, lse, bias, mask, sinks, dlse, *of_score),
            )  # fmt: skip
            found = dict(zip(need, grads, strict=True))
        return None, None, None, None, *map(found.get, names)


def _given(score: Any, tensors: Sequence[Any]) -> Any:
    """Return a score with tensors as a function of autograd gets them; None if it is None."""
    if score is None:
        return None
    return with_arrays(score, dict(zip(arrays_of("attention", score), tensors, strict=True)))


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
