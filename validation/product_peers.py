"""Adapters of causal products and their gradients: one implementation each, on the same numbers.

Arrays are (batch, heads, length, dim), contiguous; fla-core gets copies in its own order, which are
made before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from validation import peers
from validation.cases import CausalProduct
from validation.peers import Call, UnavailableError

Arrays = tuple[Any, ...]  # q, k, v, for gradients with dout before them
CHUNK = 128  # rows of a chunk of `chunked`


# ---------------------------------------------------------------------------------------- inputs
def _random(xp: Any, case: CausalProduct, seed: int) -> Arrays:
    """Normal numbers; queries are scaled by dim**-0.5, as attention scales its scores."""
    rng = xp.random.default_rng(seed)
    scales = ((1.0,) if case.backward else ()) + (case.dim**-0.5, 1.0, 1.0)
    return tuple(peers.normal(xp, rng, case.shape, case.dtype, scale) for scale in scales)


def random_numpy(case: CausalProduct, seed: int) -> Arrays:
    """Inputs on the CPU."""
    return _random(np, case, seed)


def random_cupy(case: CausalProduct, seed: int) -> Arrays:
    """Inputs on the GPU."""
    return _random(peers.module("cupy"), case, seed)


# ------------------------------------------------------------------------------- implementations
def _same(result: Any) -> Any:
    return result


def _wait(arrays: Arrays) -> Callable[[Any], object] | None:
    return _same if isinstance(arrays[0], np.ndarray) else None


def fa_cupy(algorithm: str = "auto") -> Callable[[CausalProduct, Arrays], Call]:
    """This package; an algorithm that is named serves float32 without gradients only."""

    def prepare(case: CausalProduct, arrays: Arrays) -> Call:
        from fa_cupy import causal_product, causal_product_backward

        if algorithm != "auto" and case.dtype != "fp32":
            raise UnavailableError("float32 only")
        if case.backward:
            return Call(lambda: causal_product_backward(*arrays), _same, _wait(arrays))
        return Call(lambda: causal_product(*arrays, algorithm=algorithm), _same, _wait(arrays))

    return prepare


def fa_cupy_cublas(case: CausalProduct, arrays: Arrays) -> Call:
    """This package's products of cuBLAS, whether or not a kernel takes the case."""
    from fa_cupy.core.linear_problem import product_problem

    cublas = peers.module("fa_cupy.gpu.cublas.linear_attention")
    gradients = peers.module("fa_cupy.gpu.causal_product_backward")
    xp = peers.module("cupy")
    problem = product_problem("causal_product", *arrays[-3:])

    def compute(terms: Any) -> None:
        for term in terms:
            results = term.initial, term.out, term.state
            cublas.product(*term[:4], *results, reverse=term.reverse)

    def backward() -> Any:
        found = gradients.backward(
            problem, *arrays, None, None, reverse=False, compute_terms=compute
        )
        return found[:3]

    def forward() -> Any:
        out = xp.empty(problem.out_shape, problem.dtype)
        cublas.product(problem, *arrays, None, out, None, reverse=False)
        return out

    return Call(backward if case.backward else forward, _same, _wait(arrays))


def chunked(
    q: Any,
    k: Any,
    v: Any,
    tril: Callable[[Any], Any],
    state_dtype: Any,
    chunk: int = CHUNK,
) -> Any:
    """The formula of docs/explain/causal_products.rst for all chunks at once; NumPy, torch or JAX.

    The states before all chunks stand in memory.  They are summed in `state_dtype`, float32 or
    float64, as the others sum theirs: running sums in bfloat16 would be off by percents.
    """
    shape = v.shape
    q, k, v = (x.reshape(*x.shape[:2], -1, chunk, x.shape[-1]) for x in (q, k, v))
    sums = k.swapaxes(-1, -2) @ v
    states = sums.cumsum(2, dtype=state_dtype) - sums
    states = states.astype(q.dtype) if hasattr(states, "astype") else states.to(q.dtype)
    return (q @ states + tril(q @ k.swapaxes(-1, -2)) @ v).reshape(shape)


def differentiated(
    case: CausalProduct, arrays: Arrays, forward: Callable[..., Any], swapped: bool = False
) -> Call:
    """A function of torch tensors, or its gradients by autograd, which keeps what it needs.

    With `swapped` it takes and gives (batch, length, heads, dim).
    """
    torch = peers.module("torch")

    def give(array: Any) -> Any:
        tensor = peers.to_torch(array)
        return tensor.transpose(1, 2).contiguous() if swapped else tensor

    def take(tensor: Any) -> Any:
        return peers.from_torch(tensor.transpose(1, 2) if swapped else tensor)

    tensors = [give(x) for x in arrays]
    if not case.backward:
        return Call(lambda: forward(*tensors), take, _wait(arrays))
    dout, *inputs = tensors
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = forward(*leaves)
    return Call(
        lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
        lambda grads: tuple(map(take, grads)),
        _wait(arrays),
    )


def torch_chunk(case: CausalProduct, arrays: Arrays) -> Call:
    """`chunked` in torch: a handful of batched products, with the states in memory."""
    torch = peers.module("torch")
    if not isinstance(arrays[0], np.ndarray) and not torch.cuda.is_available():
        raise UnavailableError("this torch has no CUDA")

    def forward(q: Any, k: Any, v: Any) -> Any:
        return chunked(q, k, v, torch.tril, torch.promote_types(q.dtype, torch.float32))

    return differentiated(case, arrays, forward)


def fla(function: str) -> Callable[[CausalProduct, Arrays], Call]:
    """A function of fla-core's linear attention (Triton), unscaled and unnormalised.

    Its kernels are compiled and tuned for a shape by the first call.
    """

    def prepare(case: CausalProduct, arrays: Arrays) -> Call:
        attend = getattr(peers.module("fla.ops.linear_attn"), function)
        if isinstance(arrays[0], np.ndarray):
            raise UnavailableError("on a GPU only")

        def forward(q: Any, k: Any, v: Any) -> Any:
            return attend(q, k, v, scale=1.0, normalize=False)[0]

        return differentiated(case, arrays, forward, swapped=True)

    return prepare
