"""Attention of float32 and float64 on a GPU, and its gradients: the implementations.

Those that have the matrix of scores in memory take so many batch entries at a time that it fits
next to the others' memory. What is kept for gradients, and that results of parts are put together,
is not timed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from validation import backward_peers, peers
from validation.cases import ITEMSIZE, Dense
from validation.peers import Call, UnavailableError

Arrays = tuple[Any, ...]  # q, k, v, and of gradients dout
_MOST_BYTES = 10e9  # of a matrix of scores: of gradients there are about four at a time
_NEED = ("q", "k", "v")


def _same(result: Any) -> Any:
    return result


def _wait(arrays: Arrays) -> Any:
    return _same if isinstance(arrays[0], np.ndarray) else None


def _parts(case: Dense, arrays: Arrays) -> list[Arrays]:
    """The arrays of so many batch entries at a time that their scores have `_MOST_BYTES`."""
    entry = case.heads * case.length**2 * ITEMSIZE[case.dtype]
    count = max(1, int(_MOST_BYTES // entry))
    return [tuple(x[i : i + count] for x in arrays) for i in range(0, case.batch, count)]


# ------------------------------------------------------------------------------- cuBLAS and CuPy
def fa_cupy_cublas(case: Dense, arrays: Arrays) -> Call:
    """This package's tiles of cuBLAS products, whether or not a kernel takes the case."""
    from fa_cupy.core import attention_problem

    cublas = peers.module("fa_cupy.gpu.cublas.attention")
    inputs = *arrays, None, None
    problem = attention_problem.attention_problem(
        *inputs, is_causal=case.causal, precision=case.precision or None
    )
    return Call(lambda: cublas.attention(problem, *inputs, None, False)[0], _same, _wait(arrays))


def fa_cupy_cublas_backward(case: Dense, arrays: Arrays) -> Call:
    """The gradients of these tiles."""
    from fa_cupy.core import attention_problem

    forward = peers.module("fa_cupy.gpu.cublas.attention")
    cublas = peers.module("fa_cupy.gpu.cublas.attention_backward")
    workspace = peers.module("fa_cupy.gpu.workspace")
    *qkv, dout = arrays
    inputs = *qkv, None, None
    problem = attention_problem.attention_problem(*inputs, is_causal=case.causal)
    results = *forward.attention(problem, *inputs, None, True), dout, None

    def run() -> Any:
        found = cublas.backward(problem, inputs, results, _NEED, workspace.empty)
        return tuple(found[name] for name in _NEED)

    return Call(run, _same, _wait(arrays))


def plain_cupy(case: Dense, arrays: Arrays) -> Call:
    """`peers.plain_cupy`, some batch entries at a time."""
    if case.precision:
        raise UnavailableError("no TF32")
    xp = peers.module("cupy")
    runs = [
        peers.plain_cupy(dataclasses.replace(case, batch=len(part[0])), part).run
        for part in _parts(case, arrays)
    ]
    return Call(lambda: [run() for run in runs], xp.concatenate, _wait(arrays))


# ----------------------------------------------------------------------------------------- torch
def efficient(case: Dense, arrays: Arrays) -> Call:
    """torch's fused kernels that take float32, or their gradients."""
    if case.dtype != "fp32" or case.precision:
        raise UnavailableError("float32 without TF32 only")
    made = backward_peers.torch_sdpa if case.backward else peers.torch_sdpa
    return made("EFFICIENT_ATTENTION")(case, arrays)


@contextlib.contextmanager
def _precision(case: Dense) -> Iterator[None]:
    """Have torch's products of float32 in TF32 where the case allows it, and only there."""
    torch = peers.module("torch")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if case.precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _formula(q: Any, k: Any, v: Any, hidden: Any) -> Any:
    """Attention of tensors, with all scores in memory."""
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    if hidden is not None:
        scores.masked_fill_(hidden, float("-inf"))
    return scores.softmax(-1) @ v


def torch_plain(case: Dense, arrays: Arrays) -> Call:
    """Matmul, softmax, matmul in torch; for gradients what autograd calls for them."""
    torch = peers.module("torch")
    if not isinstance(arrays[0], np.ndarray) and not torch.cuda.is_available():
        raise UnavailableError("this torch has no CUDA")
    parts = [[*map(peers.to_torch, part)] for part in _parts(case, arrays)]
    hidden = None
    if case.causal:
        shape, device = (case.length, case.length), parts[0][0].device
        hidden = torch.ones(shape, dtype=torch.bool, device=device).triu(1)

    def together(found: list[Any]) -> Any:
        return peers.from_torch(torch.cat(found))

    def attend() -> Any:
        with _precision(case):
            return [_formula(*qkv, hidden) for qkv in parts]

    if not case.backward:
        return Call(attend, together, _wait(arrays))
    kept = []
    with _precision(case):
        for *inputs, dout in parts:
            leaves = [x.detach().requires_grad_() for x in inputs]
            kept.append((_formula(*leaves, hidden), leaves, dout))

    def differentiate() -> Any:
        with _precision(case):
            return [torch.autograd.grad(*graph, retain_graph=True) for graph in kept]

    def native(grads: list[Any]) -> Any:
        return tuple(together(of) for of in zip(*grads, strict=True))

    return Call(differentiate, native, _wait(arrays))


# ------------------------------------------------------------------------------------------- JAX
def jax_plain(case: Dense, arrays: Arrays) -> Call:
    """The formula in jax.numpy, compiled by jit, or what vjp makes of it; by the host's clock."""
    jax, jnp = peers.jax_modules()
    on_cpu = isinstance(arrays[0], np.ndarray)
    xp = np if on_cpu else peers.module("cupy")
    if not on_cpu and jax.default_backend() != "gpu":
        raise UnavailableError("this jax has no CUDA")
    jax.config.update("jax_enable_x64", case.dtype == "fp64")
    level = jax.lax.Precision.HIGH if case.precision == "tf32" else jax.lax.Precision.HIGHEST
    times = functools.partial(jnp.matmul, precision=level)

    def attend(q: Any, k: Any, v: Any) -> Any:
        scores = times(q * case.head_dim**-0.5, k.swapaxes(-1, -2))
        if case.causal:
            visible = jnp.tril(jnp.ones((case.length, case.length), bool))
            scores = jnp.where(visible, scores, -jnp.inf)
        return times(jax.nn.softmax(scores), v)

    def convert(x: Any) -> Any:
        return jax.device_put(x) if on_cpu else jax.dlpack.from_dlpack(xp.ascontiguousarray(x))

    parts = [[*map(convert, part)] for part in _parts(case, arrays)]
    compiled = jax.jit(attend)

    def together(found: list[Any]) -> Any:
        return xp.concatenate([np.asarray(x) if on_cpu else xp.from_dlpack(x) for x in found])

    if not case.backward:
        return Call(lambda: [compiled(*qkv) for qkv in parts], together, jax.block_until_ready)
    pulls = [(jax.vjp(compiled, *qkv)[1], dout) for *qkv, dout in parts]
    pulled = jax.jit(lambda pull, dout: pull(dout))

    def native(grads: list[Any]) -> Any:
        return tuple(together(of) for of in zip(*grads, strict=True))

    return Call(lambda: [pulled(*pull) for pull in pulls], native, jax.block_until_ready)


forward = {
    "fa_cupy": peers.fa_cupy,
    "fa_cupy_cublas": fa_cupy_cublas,
    "efficient": efficient,
    "torch_plain": torch_plain,
    "jax_plain": jax_plain,
    "plain_cupy": plain_cupy,
}
backward = {
    "fa_cupy": backward_peers.fa_cupy,
    "fa_cupy_cublas": fa_cupy_cublas_backward,
    "efficient": efficient,
    "torch_plain": torch_plain,
    "jax_plain": jax_plain,
}
