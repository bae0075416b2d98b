"""Functions with gradients for PyTorch, which `torch.compile` can record.

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
from fa_cupy._attention import TORCH_ARGS, check_attn_mask
from fa_cupy._score import arrays_of
from fa_cupy.core import attention_problem, checks, compositions, dispatch, linear_problem
from fa_cupy.torch import arguments
from fa_cupy.torch.functions import (
    Attention,
    CausalProduct,
    KernelRegression,
    LinearAttention,
    NonLocalMeans,
)

__all__ = [
    "attention",
    "causal_product",
    "kernel_regression",
    "linear_attention",
    "merge_attention",
    "non_local_means",
    "prefix_state",
    "scaled_dot_product_attention",
]

_SDPA = "scaled_dot_product_attention"


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
    k_lengths: Any = None,
    page_table: Any = None,
    q_offsets: Any = None,
    k_offsets: Any = None,
    dropout: float = 0.0,
    seed: Any = None,
) -> Any:
    """Attention of tensors, with gradients of `q`, `k`, `v`, `bias`, `sinks` and those of a score.

    Parameters
    ----------
    q, k, v, bias, mask, scale, is_causal, causal_align, window, softcap, sinks, precision
        As in `fa_cupy.attention`. `q`, `k`, `v`, `bias` and `sinks` may require gradients. `bias`
        cannot be a sparse matrix here.
    score : Score, optional
        As in `fa_cupy.attention`, with tensors as its arrays, which may require gradients too where
        `fa_cupy.attention_backward` can compute them.
    return_lse : bool
        Whether to return the log-sum-exp too. Gradients flow through it as well.
    k_lengths, page_table : torch.Tensor, optional
        As in `fa_cupy.attention`; `k_lengths` may also be an int. There are no gradients with a
        `page_table`.
    q_offsets, k_offsets : torch.Tensor, optional
        As in `fa_cupy.attention`: tensors of int32 or int64, on the CPU or on the device of `q`.
        `mask` cannot be a list here.
    dropout : float
        As in `fa_cupy.attention`.
    seed : int or torch.Tensor of one integer, optional
        As in `fa_cupy.attention`; a tensor is of int64, on the CPU or on the device of `q`. By
        default one is drawn by the generator of that device, which `torch.manual_seed` sets.

    Returns
    -------
    out : torch.Tensor, shape (..., Lq, Dv)
    lse : torch.Tensor, shape (..., Lq)
        Only with `return_lse`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As for `fa_cupy.attention`; in the gradients, as for `fa_cupy.attention_backward`. A
        NotImplementedError also for `page_table` with tensors that require gradients.

    See Also
    --------
    fa_cupy.attention_backward : computes the gradients; there are no second derivatives.

    Examples
    --------
    >>> import torch
    >>> from fa_cupy.torch import attention
    >>> q, k, v = torch.randn(3, 8, 100, 16).requires_grad_().unbind()
    >>> attention(q, k, v, is_causal=True).sum().backward()

    Sequences of 30, 50 and 20 tokens, end to end:

    >>> offsets = torch.tensor([0, 30, 80, 100])
    >>> attention(q, k, v, is_causal=True, q_offsets=offsets).sum().backward()

    Slopes that are learned:

    >>> from fa_cupy import Score
    >>> slopes = torch.ones(8, requires_grad=True)
    >>> score = Score("s - slopes[h] * abs(i - j)", slopes=slopes)
    >>> attention(q.detach(), k.detach(), v.detach(), score=score).sum().backward()
    >>> slopes.grad.shape
    torch.Size([8])

    A tenth of the weights left out, those of `fa_cupy.dropout_mask` for the same seed:

    >>> attention(q, k, v, dropout=0.1, seed=2024).sum().backward()
    """
    dispatch.refuse_sparse_bias("attention", bias, "torch.from_numpy(bias.toarray())")
    mask = arguments.bits_of("attention", "mask", mask)
    bits = mask if isinstance(mask, fa_cupy.BitMask) else None
    named = {"bias": bias, "mask": None if bits is not None else mask, "sinks": sinks}
    of_score = arrays_of("attention", score)
    arguments.require_tensors("attention", (*named,), q=q, k=k, v=v, **named, **of_score)
    with_lse = checks.flag("attention", "return_lse", return_lse)
    places = {"k_lengths": k_lengths, "page_table": page_table}
    places |= {"q_offsets": q_offsets, "k_offsets": k_offsets}
    places = arguments.places("attention", places, q, k, v, bias, sinks, *of_score.values())
    share, seed = arguments.dropped("attention", q, dropout, seed)
    arguments.require_tensors("attention", ("seed",), seed=seed)
    options = arguments.options(
        "attention", mask, score, scale, is_causal, causal_align, window, softcap, precision,
        dropout=share,
    )  # fmt: skip
    tensors = *named.values(), *places.values(), seed, *of_score.values()
    out, lse = _attention(options, bits, q, k, v, *tensors)
    return (out, lse) if with_lse else out


def _attention(options: arguments.Options, bits: Any, *tensors: Any) -> Any:
    """Return output and log-sum-exp; what is compiled finds a mask by its number alone."""
    held = None if torch.compiler.is_compiling() else bits
    return Attention.of(options, held, *tensors)


def causal_product(
    q: Any,
    k: Any,
    v: Any,
    *,
    initial_state: Any = None,
    return_state: bool = False,
    reverse: bool = False,
    algorithm: str = "auto",
    q_offsets: Any = None,
) -> Any:
    """Causal product of tensors, with gradients of `q`, `k`, `v` and `initial_state`.

    Parameters
    ----------
    q, k, v, initial_state, return_state, reverse, algorithm
        As in `fa_cupy.causal_product`. All tensors may require gradients.
    q_offsets : torch.Tensor, optional
        As in `fa_cupy.causal_product`, on the CPU or on the device of `q`.

    Returns
    -------
    out : torch.Tensor, shape (..., L, M)
    state : torch.Tensor, shape (..., E, M), or (..., sequences, E, M) with offsets
        Only with `return_state`; gradients flow through it as well.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As for `fa_cupy.causal_product`; in the gradients, as for
        `fa_cupy.causal_product_backward`.

    See Also
    --------
    fa_cupy.causal_product_backward : computes the gradients; there are no second derivatives.

    Examples
    --------
    >>> import torch
    >>> from fa_cupy.torch import causal_product
    >>> q, k, v = torch.randn(3, 8, 100, 16).requires_grad_().unbind()
    >>> causal_product(q, k, v).sum().backward()
    """
    name = "causal_product"
    arguments.require_tensors(name, ("initial_state",), q=q, k=k, v=v, initial_state=initial_state)
    arguments.places(name, {"q_offsets": q_offsets})
    with_state = checks.flag(name, "return_state", return_state)
    reverse = checks.flag(name, "reverse", reverse)
    if not isinstance(algorithm, str):
        linear_problem.algorithm(name, algorithm, "numpy", None)  # which says what is wanted
    out, state = CausalProduct.of(q, k, v, initial_state, q_offsets, reverse, algorithm)
    return (out, state) if with_state else out


def kernel_regression(
    x: Any,
    X: Any,
    y: Any,
    bandwidth: Any,
    kernel: str = "gaussian",
    *,
    mask: Any = None,
) -> Any:
    """Kernel regression of tensors, with gradients of `x`, `X`, `y` and `bandwidth`.

    Parameters
    ----------
    x, X, y, bandwidth, kernel, mask
        As in `fa_cupy.kernel_regression`. Only the first four may require gradients; a bandwidth
        that does is a tensor, without axes or with those of an array there.

    Returns
    -------
    torch.Tensor, shape (..., m) for `y` of one axis, else (..., m, c)
        Where no sample has a weight, NaN, and its gradients are 0.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As for `fa_cupy.kernel_regression`.

    Warns
    -----
    RuntimeWarning
        As for `fa_cupy.kernel_regression`.

    See Also
    --------
    fa_cupy.kernel_regression_backward : computes the gradients; there are no second derivatives.

    Examples
    --------
    >>> import torch
    >>> from fa_cupy.torch import kernel_regression
    >>> X, y = torch.rand(300, 2), torch.randn(300)
    >>> h = torch.tensor(0.2, requires_grad=True)
    >>> others = ~torch.eye(300, dtype=torch.bool)
    >>> error = kernel_regression(X, X, y, h, mask=others) - y
    >>> error.square().mean().backward()
    >>> h.grad.shape
    torch.Size([])
    """
    name = "kernel_regression"
    mask = arguments.bits_of(name, "mask", mask)
    bits = mask if isinstance(mask, fa_cupy.BitMask) else None
    is_number = isinstance(bandwidth, (int, float))  # which a compiler may not know yet
    is_array = isinstance(bandwidth, torch.Tensor) or (
        not is_number and getattr(bandwidth, "shape", ()) != ()
    )
    named = {"bandwidth": bandwidth if is_array else None}
    named["mask"] = None if bits is not None else mask
    arguments.require_tensors(name, (*named,), x=x, X=X, y=y, **named)
    widths = named["bandwidth"]
    width = None if is_array else arguments.number(name, "bandwidth", bandwidth)
    if widths is not None and widths.ndim == 0:
        widths = widths.reshape(1)
    number = None if bits is None else arguments.number_of(bits)
    held = None if torch.compiler.is_compiling() else bits
    (out,) = KernelRegression.of(held, x, X, y, widths, named["mask"], width, number, kernel)
    return out


def linear_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    feature_map: str | Callable[[Any], Any] = "elu1",
    eps: float = 1e-6,
    is_causal: bool = True,
    initial_state: Any = None,
    return_state: bool = False,
    q_offsets: Any = None,
    k_offsets: Any = None,
) -> Any:
    """Linear attention of tensors, with gradients of `q`, `k`, `v` and `initial_state`.

    Parameters
    ----------
    q, k, v, feature_map, eps, is_causal, initial_state, return_state
        As in `fa_cupy.linear_attention`. Gradients flow through a callable too, if it is made of
        PyTorch's operations; it is called with `q` and with `k`.
    q_offsets, k_offsets : torch.Tensor, optional
        As in `fa_cupy.linear_attention`, on the CPU or on the device of `q`.

    Returns
    -------
    out : torch.Tensor, shape (..., Lq, M)
    state : torch.Tensor, shape (..., F, M + 1), or (..., sequences, F, M + 1) with offsets
        Only with `return_state`; gradients flow through it as well.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As for `fa_cupy.linear_attention`.

    Notes
    -----
    PyTorch computes the features in float32 (float64 for float64 tensors), and `causal_product` the
    sums. The gradients need memory for both. With offsets, `fa_cupy.linear_attention` computes
    everything except the features of a callable. There are second derivatives only with
    ``is_causal=False`` and without offsets.

    Examples
    --------
    >>> import torch
    >>> from fa_cupy.torch import linear_attention
    >>> q, k, v = torch.randn(3, 8, 100, 16).requires_grad_().unbind()
    >>> linear_attention(q, k, v, feature_map=torch.nn.functional.softplus).sum().backward()
    """
    name = "linear_attention"
    arguments.require_tensors(name, ("initial_state",), q=q, k=k, v=v, initial_state=initial_state)
    offsets = {"q_offsets": q_offsets, "k_offsets": k_offsets}
    offsets = arguments.places(name, offsets)
    x, y = compositions.mapped(_LIBRARY, name, feature_map, q, k)
    if not torch.compiler.is_compiling():
        eps = checks.finite(name, "eps", eps, minimum=0.0)
    elif not 0.0 <= eps < float("inf"):  # no operator checks it
        raise ValueError(f"{name}: eps is {eps}, want a finite number >= 0")
    is_causal = checks.flag(name, "is_causal", is_causal)
    return_state = checks.flag(name, "return_state", return_state)
    if q_offsets is not None or k_offsets is not None:
        real = arguments.wide(q.dtype) if callable(feature_map) else q.dtype
        features = "identity" if callable(feature_map) else feature_map
        out, state = LinearAttention.of(
            (features, eps, is_causal), x.to(real), y.to(real), v.to(real), initial_state,
            *offsets.values(),
        )  # fmt: skip
        return (out.to(q.dtype), state) if return_state else out.to(q.dtype)
    if torch.compiler.is_compiling():
        arguments.require_one_dtype(name, q=q, k=k, v=v)
    else:
        for arrays in ((q, k, v), (x, y, v, initial_state)):
            given = map(arguments.stand_in, arrays)
            linear_problem.product_problem(name, *given, aligned=is_causal, normalised=True)
    real = arguments.wide(q.dtype)
    x, y = (compositions.features(_LIBRARY, feature_map, z.to(real)) for z in (x, y))
    out, state = compositions.linear_attention(
        _LIBRARY, x, y, v.to(real), eps, initial_state, is_causal=is_causal,
        return_state=return_state,
    )  # fmt: skip
    out = out.to(q.dtype)
    return (out, state) if return_state else out


def merge_attention(outs: Sequence[Any] | Any, lses: Sequence[Any] | Any) -> tuple[Any, Any]:
    """Combine attention results over disjoint sets of keys, with gradients of all parts.

    Parameters
    ----------
    outs, lses : sequence of torch.Tensor, or one torch.Tensor of them, stacked
        As in `fa_cupy.merge_attention`.

    Returns
    -------
    out : torch.Tensor, shape (..., Lq, Dv)
    lse : torch.Tensor, shape (..., Lq)
        As from `fa_cupy.merge_attention`. Where all parts are empty, gradients are 0.

    Raises
    ------
    TypeError, ValueError
        As for `fa_cupy.merge_attention`.

    Notes
    -----
    Made of PyTorch's operations, so that there are second derivatives too.

    Examples
    --------
    >>> import torch
    >>> from fa_cupy.torch import attention, merge_attention
    >>> q, k, v = torch.randn(3, 100, 16).requires_grad_().unbind()
    >>> parts = [attention(q, k[s], v[s], return_lse=True) for s in (slice(30), slice(30, 100))]
    >>> out, lse = merge_attention(*zip(*parts))
    >>> out.sum().backward()
    """
    name = "merge_attention"
    named = attention_problem.named_parts(name, outs, lses)
    arguments.require_tensors(name, **named)
    parts = [*named.values()]
    outs, lses = parts[: len(parts) // 2], parts[len(parts) // 2 :]
    if torch.compiler.is_compiling():
        arguments.check_parts(name, outs, lses)
    else:
        stand_ins = ([*map(arguments.stand_in, x)] for x in (outs, lses))
        attention_problem.matching_parts(name, *stand_ins)
    real = arguments.wide(outs[0].dtype)
    out, lse = compositions.merge(_LIBRARY, *([x.to(real) for x in xs] for xs in (outs, lses)))
    return out.to(outs[0].dtype), lse


def non_local_means(
    image: Any,
    h: float,
    patch_size: int = 7,
    patch_distance: int | None = 11,
    *,
    sigma: float = 0.0,
) -> Any:
    """Denoise an image by means of the pixels whose surroundings are alike, with its gradient.

    Parameters
    ----------
    image, h, patch_size, patch_distance, sigma
        As in `fa_cupy.non_local_means`. Only the image may require a gradient.

    Returns
    -------
    torch.Tensor
        Of the shape and dtype of the image.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As for `fa_cupy.non_local_means`.

    Notes
    -----
    The gradient takes into account that both the averaged pixels and their weights depend on the
    image. It is computed in float64. There are no second derivatives.

    Examples
    --------
    >>> import torch
    >>> from fa_cupy.torch import non_local_means
    >>> image = torch.rand(20, 30, requires_grad=True)
    >>> non_local_means(image, 0.5, patch_size=3, patch_distance=4).square().sum().backward()
    >>> image.grad.shape
    torch.Size([20, 30])
    """
    name = "non_local_means"
    arguments.require_tensors(name, image=image)
    h, sigma = arguments.number(name, "h", h), arguments.number(name, "sigma", sigma, minimum=0.0)
    (out,) = NonLocalMeans.of(image, h, patch_size, patch_distance, sigma)
    return out


def prefix_state(
    k: Any,
    v: Any,
    ends: Sequence[int] | Any = None,
    *,
    q: Any = None,
    initial_state: Any = None,
    reverse: bool = False,
) -> Any:
    """Return running sums of outer products, or their products with queries, with gradients.

    Parameters
    ----------
    k, v, ends, q, initial_state, reverse
        As in `fa_cupy.prefix_state`; the four tensors may require gradients.

    Returns
    -------
    torch.Tensor
        As from `fa_cupy.prefix_state`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As for `fa_cupy.prefix_state`.

    Notes
    -----
    Without `q`, PyTorch computes the sums, by one product between each two neighbouring positions;
    there are second derivatives. With `q`, the result is that of `causal_product` for a sequence in
    which queries and keys stand in the order of positions.

    Examples
    --------
    >>> import torch
    >>> from fa_cupy.torch import prefix_state
    >>> k, v = torch.randn(2, 1000, 8).requires_grad_().unbind()
    >>> states = prefix_state(k, v, range(100, 1001, 100))
    >>> states.sum().backward()
    """
    name = "prefix_state"
    optional = ("q", "initial_state")
    arguments.require_tensors(name, optional, q=q, k=k, v=v, initial_state=initial_state)
    reverse = checks.flag(name, "reverse", reverse)
    if ends is None:
        found = [0 if reverse else k.shape[-2]] * (1 if q is None else q.shape[-2])
    elif torch.compiler.is_compiling():
        found = [*ends]
        for i, end in enumerate(found):
            linear_problem.check_end(name, i, end, k.shape[-2])
    else:
        found = linear_problem.positions(name, ends, k.shape[-2]).tolist()
    if torch.compiler.is_compiling():
        arguments.require_one_dtype(name, k=k, v=v, q=q)
    else:
        stand_ins = map(arguments.stand_in, (q, k, v, initial_state))
        linear_problem.product_problem(name, *stand_ins, aligned=False)
    if q is not None:
        if len(found) != q.shape[-2]:
            raise ValueError(f"{name}: ends has {len(found)} positions, q has {q.shape[-2]} rows")
        return compositions.readings(_LIBRARY, q, k, v, initial_state, found, reverse=reverse)
    real = arguments.wide(k.dtype)
    states = compositions.states(
        k.to(real), v.to(real), initial_state, found, torch.stack, reverse=reverse
    )
    return states[..., 0, :, :] if ends is None else states


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    seed: Any = None,
) -> Any:
    """Attention with the names and the meaning of PyTorch's function, with gradients.

    Parameters
    ----------
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        As in `fa_cupy.scaled_dot_product_attention`. The three tensors may require gradients, and
        so may an `attn_mask` of floats.
    seed : int or torch.Tensor of one integer, optional
        As in `attention`; PyTorch's function has no such argument.

    Returns
    -------
    torch.Tensor, shape (..., L, Ev)

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As for `fa_cupy.scaled_dot_product_attention`.

    Examples
    --------
    >>> import torch
    >>> from fa_cupy.torch import scaled_dot_product_attention
    >>> q, k, v = torch.randn(3, 8, 100, 16).requires_grad_().unbind()
    >>> scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    """
    check_attn_mask(_SDPA, attn_mask)
    attn_mask = arguments.bits_of(_SDPA, "attn_mask", attn_mask)
    bits = attn_mask if isinstance(attn_mask, fa_cupy.BitMask) else None
    given = None if bits is not None else attn_mask
    named = dict(zip(TORCH_ARGS, (query, key, value, given), strict=False))
    arguments.require_tensors(_SDPA, ("attn_mask",), **named)
    share, seed = arguments.dropped(_SDPA, query, dropout_p, seed, "dropout_p")
    arguments.require_tensors(_SDPA, ("seed",), seed=seed)
    attention_problem.torch_options(_SDPA, attn_mask, is_causal)
    grouped = checks.flag(_SDPA, "enable_gqa", enable_gqa)
    options = arguments.options(
        _SDPA, attn_mask, None, scale, is_causal, "top_left", None, 0.0, None, grouped, share
    )
    is_mask = given is not None and given.dtype == torch.bool
    bias, mask = (None, given) if is_mask else (given, None)
    return _attention(options, bits, query, key, value, bias, mask, *[None] * 5, seed)[0]


def _zeros(x: Any, rows: int) -> Any:
    return x.new_zeros((*x.shape[:-2], rows, x.shape[-1]))


def _product(q: Any, k: Any, v: Any, initial: Any, reverse: bool) -> Any:
    return CausalProduct.of(q, k, v, initial, None, reverse, "auto")[0]


_LIBRARY = compositions.Library(
    torch, torch.Tensor.detach, _zeros, _product, arguments.require_tensors,
    arguments.check_features,
)  # fmt: skip
