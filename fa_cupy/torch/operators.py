"""Operators for `torch.compile`, which records them without a look inside: ``torch.ops.fa_cupy``.

They have no gradients of their own, which are those of `fa_cupy.torch.functions`. Where nothing is
compiled, their functions are called without the way through PyTorch's dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

import fa_cupy
from fa_cupy._attention import TORCH_ARGS
from fa_cupy._kernel_regression import non_local_means_backward as backward_of_means
from fa_cupy.core import arrays as core_arrays
from fa_cupy.core import attention_problem
from fa_cupy.torch import arguments

_OPTIONS = (
    "int? bits, str? score, float? scale, bool is_causal, str? causal_align, int? left, "
    "int? right, float softcap, str? precision, bool? enable_gqa, float dropout"
)
_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, Tensor? sinks, "
_LENGTHS = "Tensor? k_lengths, Tensor? page_table, "
_OFFSETS = "Tensor? q_offsets, Tensor? k_offsets"
_SEED = "Tensor? seed"
_PRODUCT = "Tensor q, Tensor k, Tensor v, Tensor? initial_state, Tensor? q_offsets"
_LINEAR = f"Tensor q, Tensor k, Tensor v, Tensor? initial_state, {_OFFSETS}"


class _Result(NamedTuple):
    """How a result lies in memory: densely, its axes in the order of those of `like`."""

    shape: Sequence[int]
    dtype: torch.dtype
    like: Any | None = None  # None: in C order

    def empty(self, device: torch.device) -> Any:
        order: Sequence[int] = range(len(self.shape))
        if self.like is not None:
            order = core_arrays.memory_order(self.shape, _Layout(self.like))
        strides = core_arrays.dense_strides(self.shape, 1, order)
        return torch.empty_strided(self.shape, strides, dtype=self.dtype, device=device)

    def holding(self, x: Any) -> Any:
        """Return `x` in that layout: `x` itself, but where a backend has chosen another one."""
        found = self.empty(x.device)
        return x if x.stride() == found.stride() else found.copy_(x)


class _Layout:
    """What `memory_order` reads of an array, of a tensor."""

    def __init__(self, tensor: Any) -> None:
        self.shape = tensor.shape
        self.strides = tensor.stride()
        self.ndim = tensor.ndim
        self.dtype = tensor.dtype


def _operator(name: str, schema: str, results: Callable[..., list[_Result]]) -> Callable[..., Any]:
    """Return a decorator that makes an operator of a function whose results are `results`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        several = schema.endswith("[]")  # of any number

        def compiled(*args: Any) -> Any:
            made = zip(results(*args), function(*args), strict=True)
            found = [result.holding(x) for result, x in made]
            return found if several else tuple(found)

        def fake(*args: Any) -> Any:
            found = [result.empty(args[0].device) for result in results(*args)]
            return found if several else tuple(found)

        operator = torch.library.custom_op(
            f"fa_cupy::{name}", compiled, mutates_args=(), schema=schema
        )
        operator.register_fake(fake)

        def call(*args: Any) -> Any:
            return operator(*args) if torch.compiler.is_compiling() else function(*args)

        return call

    return decorate


def _widest(*shapes: Sequence[int]) -> list[int]:
    """Broadcast batch axes, in which the heads of one may divide those of another."""
    axes = max(map(len, shapes))
    padded = [(1,) * (axes - len(shape)) + tuple(shape) for shape in shapes]
    return [0 if 0 in sizes else max(sizes) for sizes in zip(*padded, strict=True)]


def _attention_results(
    q: Any, k: Any, v: Any, bias: Any, mask: Any, sinks: Any, k_lengths: Any, page_table: Any,
    q_offsets: Any, k_offsets: Any, seed: Any, arrays: Any, *options: Any,
) -> list[_Result]:  # fmt: skip
    bits = arguments.mask_of(options[0], mask)
    shapes = [x.shape[:-2] for x in (q, bias, bits) if x is not None]
    # Of pages, the first axis is none of the batch.
    shapes += [x.shape[1:-2] if page_table is not None else x.shape[:-2] for x in (k, v)]
    if sinks is not None:
        shapes.append(sinks.shape[:-1])
    if k_lengths is not None and k_lengths.ndim:
        shapes.append((*k_lengths.shape, 1))
    if page_table is not None and page_table.ndim > 1:
        shapes.append((*page_table.shape[:-1], 1))
    rows = [*_widest(*shapes), q.shape[-2]]
    return [
        _Result([*rows, v.shape[-1]], q.dtype, q),
        _Result(rows, arguments.wide(q.dtype)),
    ]


@_operator(
    "attention",
    f"({_INPUTS}{_LENGTHS}{_OFFSETS}, {_SEED}, Tensor[] arrays, {_OPTIONS}) -> (Tensor, Tensor)",
    _attention_results,
)
def attention(
    q: Any, k: Any, v: Any, bias: Any, mask: Any, sinks: Any, k_lengths: Any, page_table: Any,
    q_offsets: Any, k_offsets: Any, seed: Any, arrays: Any, *options: Any,
) -> Any:  # fmt: skip
    """Return the output of `fa_cupy.attention` and its log-sum-exp."""
    given = arguments.Options(*options)
    places = arguments.places_for(
        q, k_lengths=k_lengths, page_table=page_table, q_offsets=q_offsets, k_offsets=k_offsets,
        seed=seed,
    )  # fmt: skip
    mask = arguments.mask_of(given.bits, mask)
    if given.enable_gqa is not None:
        # For the names of its arguments in errors, and whether heads may be grouped.
        attention_problem.attention_problem(
            *map(arguments.stand_in, (q, k, v, bias, mask)), name="scaled_dot_product_attention",
            args=TORCH_ARGS, grouped=given.enable_gqa, **given.keywords(),
        )  # fmt: skip
    return fa_cupy.attention(
        q, k, v, bias, mask, sinks=sinks, score=arguments.score_of(given.score, arrays),
        precision=given.precision, return_lse=True, dropout=given.dropout, **places,
        **given.keywords(),
    )  # fmt: skip


def _attention_gradients(
    dout: Any, need: str, dlse: Any, out: Any, lse: Any, q: Any, k: Any, v: Any, bias: Any,
    mask: Any, sinks: Any, k_lengths: Any, q_offsets: Any, k_offsets: Any, seed: Any, arrays: Any,
    *options: Any,
) -> list[_Result]:  # fmt: skip
    given = {"q": q, "k": k, "v": v, "bias": bias, "sinks": sinks}
    given |= zip(arguments.score_arrays(options[1]), arrays, strict=True)
    return [_Result(given[arg].shape, given[arg].dtype, given[arg]) for arg in need.split(",")]


@_operator(
    "attention_backward",
    f"(Tensor dout, str need, Tensor? dlse, Tensor out, Tensor lse, {_INPUTS}Tensor? k_lengths, "
    f"{_OFFSETS}, {_SEED}, Tensor[] arrays, {_OPTIONS}) -> Tensor[]",
    _attention_gradients,
)
def attention_backward(
    dout: Any, need: str, dlse: Any, out: Any, lse: Any, q: Any, k: Any, v: Any, bias: Any,
    mask: Any, sinks: Any, k_lengths: Any, q_offsets: Any, k_offsets: Any, seed: Any, arrays: Any,
    *options: Any,
) -> Any:  # fmt: skip
    """Return the gradients of the arguments that `need` names, with commas between them."""
    given = arguments.Options(*options)
    places = arguments.places_for(
        q, k_lengths=k_lengths, q_offsets=q_offsets, k_offsets=k_offsets, seed=seed
    )
    return fa_cupy.attention_backward(
        dout, q, k, v, out, lse, bias, arguments.mask_of(given.bits, mask), sinks=sinks, dlse=dlse,
        score=arguments.score_of(given.score, arrays), need=need.split(","), dropout=given.dropout,
        **places, **given.keywords(),
    )  # fmt: skip


def _product_results(
    q: Any, k: Any, v: Any, initial: Any, q_offsets: Any, *options: Any, columns: int = 0
) -> list[_Result]:
    states = [] if q_offsets is None else [q_offsets.shape[0] - 1]  # one for each sequence
    shapes = [x.shape[:-2] for x in (k, v)]
    if initial is not None:
        shapes.append(initial.shape[: -2 - len(states)])
    state = _widest(*shapes)
    batch = _widest(q.shape[:-2], state)
    return [
        _Result([*batch, q.shape[-2], v.shape[-1]], q.dtype, q),
        _Result([*state, *states, k.shape[-1], v.shape[-1] + columns], arguments.wide(q.dtype)),
    ]


@_operator(
    "causal_product",
    f"({_PRODUCT}, bool reverse, str algorithm) -> (Tensor, Tensor)",
    _product_results,
)
def causal_product(
    q: Any, k: Any, v: Any, initial: Any, q_offsets: Any, reverse: bool, algorithm: str
) -> Any:
    """Return the output of `fa_cupy.causal_product` and its last state."""
    return fa_cupy.causal_product(
        q, k, v, initial_state=initial, return_state=True, reverse=reverse, algorithm=algorithm,
        **arguments.places_for(q, q_offsets=q_offsets),
    )  # fmt: skip


def _product_gradients(dout: Any, dstate: Any, *inputs: Any) -> list[_Result]:
    return [_Result(x.shape, x.dtype, x) for x in inputs[:4] if x is not None]


@_operator(
    "causal_product_backward",
    f"(Tensor dout, Tensor? dstate, {_PRODUCT}, bool reverse) -> Tensor[]",
    _product_gradients,
)
def causal_product_backward(
    dout: Any, dstate: Any, q: Any, k: Any, v: Any, initial: Any, q_offsets: Any, reverse: bool
) -> Any:
    """Return the gradients of all arguments that are given."""
    return fa_cupy.causal_product_backward(
        dout, q, k, v, initial_state=initial, reverse=reverse, dstate=dstate,
        **arguments.places_for(q, q_offsets=q_offsets),
    )  # fmt: skip


def _linear_results(
    q: Any, k: Any, v: Any, initial: Any, q_offsets: Any, *options: Any
) -> list[_Result]:
    return _product_results(q, k, v, initial, q_offsets, columns=1)


@_operator(
    "linear_attention",
    f"({_LINEAR}, str feature_map, float eps, bool is_causal) -> (Tensor, Tensor)",
    _linear_results,
)
def linear_attention(
    q: Any, k: Any, v: Any, initial: Any, q_offsets: Any, k_offsets: Any, feature_map: str,
    eps: float, is_causal: bool,
) -> Any:  # fmt: skip
    """Return the output of `fa_cupy.linear_attention` and its states."""
    return fa_cupy.linear_attention(
        q, k, v, feature_map=feature_map, eps=eps, is_causal=is_causal, initial_state=initial,
        return_state=True, **arguments.places_for(q, q_offsets=q_offsets, k_offsets=k_offsets),
    )  # fmt: skip


@_operator(
    "linear_attention_backward",
    f"(Tensor dout, Tensor? dstate, {_LINEAR}, str feature_map, float eps, bool is_causal) "
    "-> Tensor[]",
    _product_gradients,
)
def linear_attention_backward(
    dout: Any, dstate: Any, q: Any, k: Any, v: Any, initial: Any, q_offsets: Any, k_offsets: Any,
    feature_map: str, eps: float, is_causal: bool,
) -> Any:  # fmt: skip
    """Return the gradients of all arguments that are given."""
    return fa_cupy.linear_attention_backward(
        dout, q, k, v, feature_map=feature_map, eps=eps, is_causal=is_causal,
        initial_state=initial, dstate=dstate,
        **arguments.places_for(q, q_offsets=q_offsets, k_offsets=k_offsets),
    )  # fmt: skip


_REGRESSION = (
    "Tensor x, Tensor X, Tensor y, Tensor? widths, Tensor? mask, float? width, int? bits, "
    "str kernel"
)


def _regression_results(
    x: Any, X: Any, y: Any, widths: Any, mask: Any, width: Any, bits: Any, kernel: str
) -> list[_Result]:
    held = arguments.mask_of(bits, mask)
    shapes = [array.shape[:-2] for array in (x, X, y, held) if array is not None]
    if widths is not None:
        shapes.append(widths.shape[:-1])
    columns = y.shape[-1:] if y.ndim > 1 else ()
    return [_Result([*_widest(*shapes), x.shape[-2], *columns], y.dtype)]


@_operator("kernel_regression", f"({_REGRESSION}) -> Tensor[]", _regression_results)
def kernel_regression(
    x: Any, X: Any, y: Any, widths: Any, mask: Any, width: Any, bits: Any, kernel: str
) -> Any:
    """Return the estimate of `fa_cupy.kernel_regression`, in a list."""
    width = width if widths is None else widths
    mask = arguments.mask_of(bits, mask)
    return [fa_cupy.kernel_regression(x, X, y, width, kernel, mask=mask)]


def _regression_gradients(dout: Any, *inputs: Any) -> list[_Result]:
    return [_Result(x.shape, x.dtype) for x in inputs[:4] if x is not None]


@_operator(
    "kernel_regression_backward",
    f"(Tensor dout, {_REGRESSION}) -> Tensor[]",
    _regression_gradients,
)
def kernel_regression_backward(
    dout: Any, x: Any, X: Any, y: Any, widths: Any, mask: Any, width: Any, bits: Any, kernel: str
) -> Any:
    """Return the gradients of all arguments that are tensors of floats."""
    mask = arguments.mask_of(bits, mask)
    *found, dwidths = fa_cupy.kernel_regression_backward(
        dout, x, X, y, width if widths is None else widths, kernel, mask=mask
    )
    return found if widths is None else [*found, dwidths]


_MEANS = "Tensor image, float h, int patch_size, int? patch_distance, float sigma"


@_operator(
    "non_local_means",
    f"({_MEANS}) -> Tensor[]",
    lambda image, *_: [_Result(image.shape, image.dtype)],
)
def non_local_means(image: Any, h: float, size: int, distance: int | None, sigma: float) -> Any:
    """Return the image of `fa_cupy.non_local_means`, in a list."""
    return [fa_cupy.non_local_means(image, h, size, distance, sigma=sigma)]


@_operator(
    "non_local_means_backward",
    f"(Tensor dout, {_MEANS}) -> Tensor[]",
    lambda dout, image, *_: [_Result(image.shape, image.dtype)],
)
def non_local_means_backward(
    dout: Any, image: Any, h: float, size: int, distance: int | None, sigma: float
) -> Any:
    """Return the gradient of the image, in a list."""
    return [backward_of_means(dout, image, h, size, distance, sigma=sigma)]
