"""Adapters: one implementation of a problem each, called on the same memory.

Inputs are NumPy or CuPy arrays; the peers see them through DLPack, without a copy (JAX gets one,
outside the timed region).  16-bit floats travel as integers of their width, because not every
DLPack has bfloat16.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from validation.cases import Dense

DTYPES = {
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp32": np.dtype(np.float32),
    "fp64": np.dtype(np.float64),
}
Qkv = tuple[Any, Any, Any]
#: Of dropout in this package.
SEED = 2024


class UnavailableError(Exception):
    """The implementation is not installed, or does not take the case."""


class Call(NamedTuple):
    """An implementation bound to its inputs."""

    run: Callable[[], Any]
    """One call, or `calls` of them; returns the result as the implementation gives it."""
    native: Callable[[Any], Any]
    """That result as a NumPy or CuPy array (batch, heads, length, dim)."""
    wait: Callable[[Any], object] | None = None
    """Blocks until a result stands; None for work on CuPy's current stream (CUDA events)."""
    variant: str = ""
    """Which of several forms it is, where the fastest one was chosen."""
    calls: int = 1
    """How many calls of the implementation one run makes, all of them in one CUDA graph."""


def _same(result: Any) -> Any:
    return result


def module(name: str) -> Any:
    """An optional module; `UnavailableError` where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnavailableError(f"{name} is not installed ({error})") from error


# ------------------------------------------------------------------------------------ conversion
def _integers(array: Any) -> Any:
    return array.view(f"i{array.dtype.itemsize}")


def to_host(array: Any) -> np.ndarray:
    """A copy on the host; the array itself where it is there."""
    if isinstance(array, np.ndarray):
        return array
    # integers, because what is not contiguous is packed by a kernel before it is copied
    return np.ascontiguousarray(_integers(array).get()).view(array.dtype)


def to_device(array: np.ndarray) -> Any:
    """A copy on CuPy's current device."""
    return module("cupy").asarray(_integers(array)).view(array.dtype)


def _torch_dtypes() -> dict[str, Any]:
    torch = module("torch")
    return {
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "fp32": torch.float32,
        "fp64": torch.float64,
    }


def to_torch(array: Any) -> Any:
    """The same memory as a torch tensor."""
    torch = module("torch")
    name = next(name for name, dtype in DTYPES.items() if dtype == array.dtype)
    return torch.from_dlpack(_integers(array)).view(_torch_dtypes()[name])


def from_torch(tensor: Any) -> Any:
    """The same memory as a NumPy or CuPy array."""
    torch = module("torch")
    xp = module("cupy") if tensor.is_cuda else np
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    name = next(name for name, dtype in _torch_dtypes().items() if dtype == tensor.dtype)
    return xp.from_dlpack(tensor.view(integers)).view(DTYPES[name])


def normal(xp: Any, rng: Any, shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> Any:
    """Normal numbers in the namespace `xp`, of standard deviation `scale` before they are rounded.

    Parameters
    ----------
    xp : module
        NumPy or CuPy.
    rng : Generator
        That namespace's.
    shape : tuple of int
    dtype : str
        A key of `DTYPES`.
    scale : float, optional
    """
    drawn = xp.float64 if dtype == "fp64" else xp.float32
    x = rng.standard_normal(shape, dtype=drawn)
    if scale != 1:
        x *= drawn(scale)
    if dtype == "bf16" and xp is not np:  # CuPy knows no bfloat16: round to the upper half
        bits = (x.view(xp.uint32) + xp.uint32(0x8000)) >> xp.uint32(16)
        return bits.astype(xp.uint16).view(DTYPES["bf16"])
    return x.astype(DTYPES[dtype], copy=False)


def random_numpy(case: Dense, seed: int) -> Qkv:
    """N(0, 1) q, k, v of shape (batch, heads, length, dim) on the CPU, contiguous."""
    rng = np.random.default_rng(seed)
    heads = (case.heads, case.key_heads)
    q_shape, kv_shape = ((case.batch, n, case.length, case.head_dim) for n in heads)
    q, k, v = (normal(np, rng, shape, case.dtype) for shape in (q_shape, kv_shape, kv_shape))
    return q, k, v


def random_cupy(case: Dense, seed: int) -> Qkv:
    """N(0, 1) q, k, v on the GPU: (batch, heads, length, dim) views of (batch, length, heads, dim).

    That is how projections leave the data, and what every peer takes without a copy.
    """
    cp = module("cupy")
    rng = cp.random.default_rng(seed)

    def draw(heads: int) -> Any:
        shape = (case.batch, case.length, heads, case.head_dim)
        return normal(cp, rng, shape, case.dtype).swapaxes(-3, -2)

    return draw(case.heads), draw(case.key_heads), draw(case.key_heads)


def poison(*arrays: Any) -> None:
    """Leave NaN in the memory that outputs shaped like ``arrays`` will most likely be given.

    The pools of CuPy and torch hand out the block that was freed last, so an element which an
    implementation does not write is read as NaN (all bits set, in every float type).
    """
    if isinstance(arrays[0], np.ndarray):
        return  # malloc promises nothing of the kind; the CPU's rows are compared instead
    cp = module("cupy")
    blocks = [cp.full(array.nbytes, 0xFF, dtype=cp.uint8) for array in arrays]
    try:
        torch = module("torch")
        options = {"dtype": torch.uint8, "device": "cuda"}
        blocks += [torch.full((array.nbytes,), 0xFF, **options) for array in arrays]
    except UnavailableError:
        pass
    cp.cuda.Device().synchronize()
    blocks.clear()


# ------------------------------------------------------------------------------------- attention
def fa_cupy(case: Dense, qkv: Qkv) -> Call:
    """This package on arrays of the case's device."""
    from fa_cupy import attention

    q, k, v = qkv
    wait = _same if isinstance(q, np.ndarray) else None
    window = (case.window - 1, 0) if case.window else None
    options = {"is_causal": case.causal, "window": window, "precision": case.precision or None}
    options |= dropped(case)
    return Call(lambda: attention(q, k, v, **options), _same, wait)


def dropped(case: Dense) -> dict[str, Any]:
    """Return the arguments of dropout of a case; none for a case without."""
    return {"dropout": case.dropout, "seed": SEED} if case.dropout else {}


def torch_sdpa(backend: str) -> Callable[[Dense, Qkv], Call]:
    """torch's scaled_dot_product_attention, held to one back end of the SDPBackend enumeration."""

    def prepare(case: Dense, qkv: Qkv) -> Call:
        torch = module("torch")
        on_cpu = isinstance(qkv[0], np.ndarray)
        if not on_cpu and not torch.cuda.is_available():
            raise UnavailableError("this torch has no CUDA")
        if case.window:
            raise UnavailableError("no windows")
        if not on_cpu and case.dtype == "fp32" and backend != "EFFICIENT_ATTENTION":
            raise UnavailableError("16-bit floats only")
        sdpa = torch.nn.functional.scaled_dot_product_attention
        attention = module("torch.nn.attention")
        chosen = getattr(attention.SDPBackend, backend)
        q, k, v = map(to_torch, qkv)

        def run() -> Any:
            with attention.sdpa_kernel(chosen):
                return sdpa(
                    q, k, v, dropout_p=case.dropout, is_causal=case.causal,
                    enable_gqa=bool(case.kv_heads),
                )  # fmt: skip

        return Call(run, from_torch, _same if on_cpu else None)

    return prepare


def torch_flash_window(case: Dense, qkv: Qkv) -> Call:
    """torch's FlashAttention-2 by its operator, which takes windows as its function does not."""
    torch = module("torch")
    if not case.window or isinstance(qkv[0], np.ndarray):
        raise UnavailableError("windows on a GPU only")
    q, k, v = (to_torch(x).transpose(1, 2) for x in qkv)  # (batch, length, heads, dim)
    n = case.length
    sides = {"window_size_left": case.window - 1, "window_size_right": 0}

    def run() -> Any:
        forward = torch.ops.aten._flash_attention_forward
        return forward(q, k, v, None, None, n, n, 0.0, True, False, **sides)[0].transpose(1, 2)

    return Call(run, from_torch)


def jax_modules() -> tuple[Any, Any]:
    """``jax`` and ``jax.numpy``, which leave the memory of the GPU to others."""
    # without this JAX takes three quarters of it when it is imported
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return module("jax"), module("jax.numpy")


def jax(case: Dense, qkv: Qkv) -> Call:
    """jax.nn.dot_product_attention through cuDNN, compiled; timed by the host's clock."""
    if case.dtype == "fp32":
        raise UnavailableError("16-bit floats only")
    if case.window:
        raise UnavailableError("no windows")
    jax, jnp = jax_modules()
    cp = module("cupy")
    dtype = {"bf16": jnp.bfloat16, "fp16": jnp.float16}[case.dtype]

    def convert(array: Any) -> Any:  # JAX's axes are (batch, length, heads, dim)
        integers = jax.dlpack.from_dlpack(cp.ascontiguousarray(_integers(array).swapaxes(-3, -2)))
        return jax.lax.bitcast_convert_type(integers, dtype)

    q, k, v = map(convert, qkv)
    cp.cuda.Device().synchronize()

    options = {"is_causal": case.causal, "implementation": "cudnn"}
    attention = jax.jit(functools.partial(jax.nn.dot_product_attention, **options))

    def native(out: Any) -> Any:
        integers = jax.block_until_ready(jax.lax.bitcast_convert_type(out, jnp.int16))
        return cp.from_dlpack(integers).view(DTYPES[case.dtype]).swapaxes(-3, -2)

    return Call(lambda: attention(q, k, v), native, jax.block_until_ready)


def plain_cupy(case: Dense, qkv: Qkv) -> Call:
    """Matmul, softmax, matmul in CuPy, with the whole matrix of scores in memory."""
    if case.dtype == "bf16":
        raise UnavailableError("CuPy's matmul has no bfloat16")
    cp = module("cupy")
    q, k, v = qkv
    keep = cp.tril(cp.ones((case.length, case.length), dtype=bool)) if case.causal else None
    lowest = float(np.finfo(DTYPES[case.dtype]).min)

    def run() -> Any:
        scores = cp.matmul(q, k.swapaxes(-1, -2))
        scores *= case.head_dim**-0.5
        if keep is not None:
            scores = cp.where(keep, scores, scores.dtype.type(lowest))
        scores -= scores.max(-1, keepdims=True)
        cp.exp(scores, out=scores)
        sums = scores.sum(-1, keepdims=True, dtype=np.promote_types(scores.dtype, np.float32))
        scores /= sums.astype(scores.dtype)
        return cp.matmul(scores, v)

    return Call(run, _same)
