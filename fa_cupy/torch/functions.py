"""The functions of `torch.autograd`: attention, causal products, regression, denoising."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fa_cupy.keys.layout import PLACES
from fa_cupy.torch import operators
from fa_cupy.torch.arguments import Options, score_arrays


class _Function(torch.autograd.Function):  # type: ignore[misc]
    """A function that `torch.func.vmap` calls once for each entry.

    Axes have meanings here (three of them are never grouped, a score has the index of a head), so
    that one more in front would make another problem of it.
    """

    @classmethod
    def of(cls, *args: Any) -> Any:
        """Call the function; what `torch.compile` records without gradients needs no more of it."""
        grads = torch.is_grad_enabled() and any(
            isinstance(x, torch.Tensor) and x.requires_grad for x in args
        )
        if not torch.compiler.is_compiling():
            return cls.apply(*args)
        return cls.apply(*_distinct(args)) if grads else cls.forward(*args)

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, *args: Any) -> Any:
        def entry(x: Any, axis: Any, i: int) -> Any:
            if not isinstance(axis, int):
                return x
            if info.batch_size:
                return x.select(axis, i)
            # Ones, as a bandwidth is not 0: results have the shapes of those of one entry.
            return x.new_ones((*x.shape[:axis], *x.shape[axis + 1 :]))

        found = [
            cls.apply(*(entry(x, axis, i) for x, axis in zip(args, in_dims, strict=True)))
            for i in range(max(1, info.batch_size))
        ]
        stacked = tuple(
            None if parts[0] is None else torch.stack(parts)[: info.batch_size]
            for parts in zip(*found, strict=True)
        )
        return stacked, tuple(None if x is None else 0 for x in stacked)


def _distinct(args: Sequence[Any]) -> list[Any]:
    """Return arguments with views of tensors that came before: a compiler takes none twice."""
    found: list[Any] = []
    for x in args:
        twice = isinstance(x, torch.Tensor) and any(x is other for other in found)
        found.append(x.view_as(x) if twice else x)
    return found


class _Gradients(_Function):
    """Gradients, which have none of their own.

    `torch.compile` has an error of its own for second derivatives, and cannot record such a
    function inside of a backward pass.
    """

    @classmethod
    def of(cls, *args: Any) -> Any:
        """Call the function."""
        call = cls.forward if torch.compiler.is_compiling() else cls.apply
        return call(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            "fa_cupy.torch: a second derivative is not available, want a first one"
        )


class Attention(_Function):
    """``apply(options, held, q, k, v, bias, mask, sinks, *places, *arrays)``: two results.

    These are output and log-sum-exp; `places` are the four arguments of `PLACES` and the seed of
    dropout. `held` is a BitMask that options have by its number, so that it is there in the
    backward pass.
    """

    @staticmethod
    def forward(options: Options, held: Any, *tensors: Any) -> Any:
        return operators.attention(*tensors[:11], list(tensors[11:]), *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.options, ctx.held, *tensors = inputs
        ctx.save_for_backward(*output, *tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        saved = ctx.saved_tensors
        score = score_arrays(ctx.options.score)
        names = ["q", "k", "v", "bias", "mask", "sinks", *PLACES, "seed", *score]
        wanted = ctx.needs_input_grad[2:]
        need = [name for name, grad in zip(names, wanted, strict=True) if grad]
        found: dict[str, Any] = {}
        if need and not (dout is None and dlse is None):
            dout = torch.zeros_like(saved[0]) if dout is None else dout
            given = *saved[:9], *saved[10:]  # without pages
            grads = AttentionGradients.of(ctx.options, ",".join(need), dout, dlse, *given)
            found = dict(zip(need, grads, strict=True))
        return None, None, *[found.get(name) for name in names]


class AttentionGradients(_Gradients):
    """``apply(options, need, dout, dlse, out, lse, q, k, v, bias, mask, sinks, *rest)``.

    The rest are `k_lengths`, `q_offsets`, `k_offsets`, the seed and the arrays of a score.
    """

    @staticmethod
    def forward(options: Options, need: str, *tensors: Any) -> Any:
        dout, *saved = tensors[:14]
        arrays = list(tensors[14:])
        return tuple(operators.attention_backward(dout, need, *saved, arrays, *options))


class CausalProduct(_Function):
    """``apply(q, k, v, initial_state, q_offsets, reverse, algorithm)``: output and last state."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return operators.causal_product(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.reverse, _ = inputs
        ctx.save_for_backward(*tensors)
        ctx.shape, ctx.like = output[0].shape, output[0].dtype
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Any, dstate: Any) -> Any:
        saved = ctx.saved_tensors
        if dout is None and dstate is None:
            return (None,) * 7
        if dout is None:
            dout = torch.zeros(ctx.shape, dtype=ctx.like, device=saved[0].device)
        found = CausalProductGradients.of(ctx.reverse, dout, dstate, *saved)
        return *found, *[None] * (7 - len(found))


class CausalProductGradients(_Gradients):
    """``apply(reverse, dout, dstate, q, k, v, initial_state, q_offsets)``."""

    @staticmethod
    def forward(reverse: bool, *tensors: Any) -> Any:
        return tuple(operators.causal_product_backward(*tensors, reverse))


class LinearAttention(_Function):
    """``apply(options, q, k, v, initial_state, q_offsets, k_offsets)``: output and states.

    The options are the feature map, eps and whether it is causal.
    """

    @staticmethod
    def forward(options: Any, *tensors: Any) -> Any:
        return operators.linear_attention(*tensors, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.options, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.shape, ctx.like = output[0].shape, output[0].dtype
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Any, dstate: Any) -> Any:
        saved = ctx.saved_tensors
        if dout is None and dstate is None:
            return (None,) * 7
        if dout is None:
            dout = torch.zeros(ctx.shape, dtype=ctx.like, device=saved[0].device)
        found = LinearAttentionGradients.of(ctx.options, dout, dstate, *saved)
        return None, *found, *[None] * (6 - len(found))


class LinearAttentionGradients(_Gradients):
    """``apply(options, dout, dstate, q, k, v, initial_state, q_offsets, k_offsets)``."""

    @staticmethod
    def forward(options: Any, *tensors: Any) -> Any:
        return tuple(operators.linear_attention_backward(*tensors, *options))


class KernelRegression(_Function):
    """``apply(held, x, X, y, widths, mask, width, bits, kernel)``: the estimate, in a tuple.

    `held` is a BitMask whose number is `bits`, so that it is there in the backward pass.
    """

    @staticmethod
    def forward(held: Any, *args: Any) -> Any:
        return tuple(operators.kernel_regression(*args))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.held, *tensors = inputs[:6]
        ctx.options = inputs[6:]
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:
        found = KernelRegressionGradients.of(ctx.options, dout, *ctx.saved_tensors)
        return None, *found, *[None] * (8 - len(found))


class KernelRegressionGradients(_Gradients):
    """``apply(options, dout, x, X, y, widths, mask)``."""

    @staticmethod
    def forward(options: Any, *tensors: Any) -> Any:
        return tuple(operators.kernel_regression_backward(*tensors, *options))


class NonLocalMeans(_Function):
    """``apply(image, h, patch_size, patch_distance, sigma)``: the denoised image, in a tuple."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return tuple(operators.non_local_means(*args))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        image, *ctx.options = inputs
        ctx.save_for_backward(image)

    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:
        (image,) = ctx.saved_tensors
        return *NonLocalMeansGradient.of(dout, image, *ctx.options), *[None] * 4


class NonLocalMeansGradient(_Gradients):
    """``apply(dout, image, h, patch_size, patch_distance, sigma)``."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return tuple(operators.non_local_means_backward(*args))
