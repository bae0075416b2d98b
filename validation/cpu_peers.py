"""Calls on the CPU, most of them small: inputs, implementations and the check.

Each implementation is what one would write with its library. Arrays are q, k and v, for gradients
with dout before them, under a mask with that array of bool after them; of "from_dense" they are
the array alone. Of "linear_attention", the state is the fourth array.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from validation import checks, peers, product_peers, timing
from validation.cases import CpuCall
from validation.checks import Check
from validation.peers import Call, UnavailableError

Arrays = tuple[Any, ...]
_BLOCK = 128
_CHUNKS = (16, 32, 64, 128, 256)  # rows
_MOST_CHECKED = 1 << 15  # elements; calls with more take much longer than their checks
_EPS = 1e-6  # what `linear_attention` adds to sums of weights
#: Chunks of the size that is chosen are timed again, in turn with the other implementations.
_CHOICE = timing.Sampling(burst_ms=1, rounds=8, statistic="minimum")


# ---------------------------------------------------------------------------------------- inputs
def random_numpy(case: CpuCall, seed: int) -> Arrays:
    """Normal numbers, queries of causal products scaled by dim**-0.5, and a random mask."""
    rng = np.random.default_rng(seed)
    mask = () if case.mask in ("", "none") else (_mask(case, rng),)
    if case.kind == "from_dense":
        return mask
    scale = case.head_dim**-0.5 if case.kind.startswith("causal_product") else 1.0
    dout = (peers.normal(np, rng, case.query_shape, case.dtype),) * case.backward
    q = peers.normal(np, rng, case.query_shape, case.dtype, scale)
    if case.kind == "linear_attention":
        return q, *_keys_and_state(case, rng)
    k, v = (peers.normal(np, rng, case.shape, case.dtype) for _ in range(2))
    if case.permuted:
        axes = *reversed(range(k.ndim - 2)), k.ndim - 2, k.ndim - 1
        k, v = k.transpose(axes), v.transpose(axes)
    return *dout, q, k, v, *mask


def _keys_and_state(case: CpuCall, rng: np.random.Generator) -> Arrays:
    """Keys and values of one row, and the state after a hundred other rows."""
    *batch, _, dim = case.shape
    before = [peers.normal(np, rng, (*batch, 100, dim), case.dtype) for _ in range(2)]
    k, v = (peers.normal(np, rng, case.shape, case.dtype) for _ in range(2))
    features, ones = np.exp(np.minimum(before[0], 0)), np.ones((*batch, 100, 1), np.float32)
    features += np.maximum(before[0], 0)
    return k, v, features.swapaxes(-1, -2) @ np.concatenate([before[1], ones], -1)


def _mask(case: CpuCall, rng: np.random.Generator) -> np.ndarray:
    kind, _, density = case.mask.partition(" ")
    edge = _BLOCK if kind == "blocks" else 1
    *batch, rows, keys = case.mask_shape
    seen = rng.random((*batch, -(-rows // edge), -(-keys // edge)), np.float32) < float(density)
    return np.asarray(seen.repeat(edge, -2).repeat(edge, -1)[..., :rows, :keys])


def _split(case: CpuCall, arrays: Arrays) -> tuple[Arrays, Any]:
    """Arrays without the mask, and the mask or None."""
    count = 4 if case.backward else 3
    return arrays[:count], arrays[count] if len(arrays) > count else None


def _same(result: Any) -> Any:
    return result


# ------------------------------------------------------------------------------- implementations
def fa_cupy(case: CpuCall, arrays: Arrays) -> Call:
    """This package, with a mask that is made beforehand."""
    import fa_cupy as package

    if case.kind == "from_dense":
        return Call(lambda: package.BitMask.from_dense(*arrays), _same, _same)
    if case.kind == "linear_attention":
        q, k, v, state = arrays
        options = {"initial_state": state, "return_state": True}
        return Call(lambda: package.linear_attention(q, k, v, **options), _same, _same)
    given, mask = _split(case, arrays)
    if mask is not None and not case.mask.startswith("array"):
        mask = package.BitMask.from_dense(mask)
    if case.kind == "causal_product":
        return Call(lambda: package.causal_product(*given), _same, _same)
    if case.kind == "causal_product_gradients":
        return Call(lambda: package.causal_product_backward(*given), _same, _same)
    if case.kind == "gradients":
        dout, *qkv = given
        out, lse = package.attention(*qkv, return_lse=True)
        return Call(lambda: package.attention_backward(dout, *qkv, out, lse), _same, _same)
    options = {"is_causal": case.causal, "mask": mask}
    return Call(lambda: package.attention(*given, **options), _same, _same)


def torch(case: CpuCall, arrays: Arrays) -> Call:
    """scaled_dot_product_attention, and causal products in chunks, on a thread for each core."""
    from fa_cupy.cpu import thread_pool

    _makes_no_masks(case)
    torch = peers.module("torch")
    torch.set_num_threads(thread_pool.processors())
    if case.kind == "linear_attention":
        tensors = [torch.from_numpy(x) for x in arrays]
        return Call(
            lambda: _linear_step(torch, torch.cat, *tensors),
            lambda found: tuple(x.numpy() for x in found), _same,
        )  # fmt: skip
    given, mask = _split(case, arrays)

    def bound(forward: Callable[..., Any]) -> Call:
        return product_peers.differentiated(case, given, forward)

    if case.kind.startswith("causal_product"):
        return _in_chunks(case, torch, torch.tril, torch.float32, bound)
    options = {"is_causal": case.causal, "enable_gqa": bool(case.query_heads)}
    if mask is not None:
        options["attn_mask"] = torch.from_numpy(mask)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return bound(lambda q, k, v: sdpa(q, k, v, **options))


def jax(case: CpuCall, arrays: Arrays) -> Call:
    """The formula in jax.numpy, compiled by jit."""
    _makes_no_masks(case)
    if case.permuted:
        raise UnavailableError("arrays have no strides")
    jax, jnp = peers.module("jax"), peers.module("jax.numpy")
    cpu = jax.devices("cpu")[0]
    if case.kind == "linear_attention":
        ready = [jax.device_put(x, cpu) for x in arrays]
        step = jax.jit(lambda *given: _linear_step(jnp, jnp.concatenate, *given))
        return Call(
            lambda: jax.block_until_ready(step(*ready)),
            lambda found: tuple(map(np.asarray, found)), _same,
        )  # fmt: skip
    given, mask = _split(case, arrays)
    *dout, q, k, v = (jax.device_put(x, cpu) for x in given)
    visible = () if mask is None else (jax.device_put(mask, cpu),)

    def bound(forward: Callable[..., Any]) -> Call:
        compiled = jax.jit(forward)
        if case.backward:
            pull = jax.vjp(compiled, q, k, v)[1]
            pulled = jax.jit(lambda pull, dout: pull(dout))

            def pull_back() -> Any:
                return jax.block_until_ready(pulled(pull, *dout))

            return Call(pull_back, lambda grads: tuple(map(np.asarray, grads)), _same)

        def run() -> Any:  # each call waits for its result, as those of the others do
            return jax.block_until_ready(compiled(q, k, v, *visible))

        return Call(run, np.asarray, _same)

    if case.kind.startswith("causal_product"):
        return _in_chunks(case, jnp, jnp.tril, jnp.float32, bound)

    def attend(q: Any, k: Any, v: Any, visible: Any = None) -> Any:
        shape, dtype = q.shape, q.dtype
        q, k, v = (x.astype(jnp.float32) for x in _grouped(case, q, k, v))
        scores = q @ k.swapaxes(-1, -2) * case.head_dim**-0.5
        if case.causal:
            visible = jnp.tril(jnp.ones((case.length, case.length), bool))
        if visible is None:
            return (jax.nn.softmax(scores) @ v).reshape(shape).astype(dtype)
        # where a query sees nothing, the output is 0
        weights = jnp.nan_to_num(jax.nn.softmax(jnp.where(visible, scores, -jnp.inf)))
        return weights @ v

    return bound(attend)


def numpy(case: CpuCall, arrays: Arrays) -> Call:
    """The formula in some lines of NumPy, with all scores in memory."""
    _makes_no_masks(case)
    if case.kind == "linear_attention":
        return Call(lambda: _linear_step(np, np.concatenate, *arrays), _same, _same)
    given, mask = _split(case, arrays)
    if case.kind == "causal_product":
        return _in_chunks(
            case, np, np.tril, np.float32,
            lambda forward: Call(lambda: forward(*given), _same, _same),
        )  # fmt: skip
    if case.kind == "causal_product_gradients":
        return Call(lambda: _product_gradients(*given), _same, _same)
    scale = np.float32(case.head_dim**-0.5)
    if case.kind == "gradients":
        dout, *qkv = given
        out, lse = _attention_with_lse(*qkv, scale)
        return Call(lambda: _attention_gradients(dout, *qkv, out, lse, scale), _same, _same)
    if case.causal:
        mask = np.tril(np.ones((case.length, case.length), bool))
    if mask is not None:
        return Call(lambda: _masked_attention(*given, scale, mask), _same, _same)
    if case.kind != "decode":
        return Call(lambda: _attention(*given, scale), _same, _same)
    q = given[0]

    def decode() -> np.ndarray:
        # NumPy's products of 16 bits are no calls of BLAS
        wide = (x.astype(np.float32, copy=False) for x in _grouped(case, *given))
        return _attention(*wide, scale).reshape(q.shape).astype(q.dtype)

    return Call(decode, _same, _same)


def numpy_checked(case: CpuCall, arrays: Arrays) -> Call:
    """The formula of `numpy`, behind the checks of arguments that each new call of fa_cupy makes.

    They say what is wrong in one line, which a formula alone does not.
    """
    if case.kind != "attention" or case.permuted or arrays[0].size > _MOST_CHECKED:
        raise UnavailableError("no small call of attention")
    from fa_cupy.core import dispatch
    from fa_cupy.core.attention_problem import ARGS, attention_problem

    formula = numpy(case, arrays).run

    def run() -> Any:
        given = dict(zip("qkv", arrays, strict=True))
        dispatch.require("attention", **given)
        dispatch.sparse_inputs("attention", ARGS, (*arrays, None, None))
        native = dispatch.to_native("attention", **given)
        inputs = dispatch.dense_inputs("attention", native, [*native.arrays, None, None])
        attention_problem(*inputs, is_causal=case.causal)
        dispatch.backend_of(native, "attention")
        return formula()

    return Call(run, _same, _same)


IMPLS: dict[str, Callable[[CpuCall, Arrays], Call]] = {
    "fa_cupy": fa_cupy,
    "torch": torch,
    "jax": jax,
    "numpy": numpy,
    "numpy_checked": numpy_checked,
}


def _makes_no_masks(case: CpuCall) -> None:
    if case.kind == "from_dense":
        raise UnavailableError("makes no masks")


def _grouped(case: CpuCall, q: Any, k: Any, v: Any) -> Arrays:
    """The same with heads of queries that share keys as rows of one matrix."""
    if case.query_heads:
        q = q.reshape(*k.shape[:2], -1, case.head_dim)
    return q, k, v


def _in_chunks(
    case: CpuCall,
    xp: Any,
    tril: Callable[[Any], Any],
    state_dtype: Any,
    bound: Callable[[Callable[..., Any]], Call],
) -> Call:
    """The causal product in chunks of the size that is fastest here; one chunk has no state."""

    def forward(chunk: int) -> Callable[..., Any]:
        if chunk == case.length:
            return lambda q, k, v: tril(q @ k.swapaxes(-1, -2)) @ v
        return lambda q, k, v: product_peers.chunked(q, k, v, tril, state_dtype, chunk)

    sizes = [size for size in _CHUNKS if case.length % size == 0]
    if not sizes:
        raise UnavailableError(f"no chunks for length {case.length}")
    return _fastest({f"chunks of {size} rows": bound(forward(size)) for size in sizes})


def _fastest(calls: Mapping[str, Call]) -> Call:
    """The fastest of some calls, with its name as the variant."""
    times = timing.interleaved(calls, _CHOICE)
    best = min(times, key=times.__getitem__)
    return calls[best]._replace(variant=best)


# --------------------------------------------------------------------------------- plain formulas
def _attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: np.float32) -> np.ndarray:
    scores = q @ k.swapaxes(-1, -2)
    scores *= scale
    scores -= scores.max(-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(-1, keepdims=True)
    return np.asarray(scores @ v)


def _masked_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: np.float32, mask: np.ndarray
) -> np.ndarray:
    """0 where a query sees nothing."""
    scores = q @ k.swapaxes(-1, -2)
    scores *= scale
    scores = np.where(mask, scores, np.float32(-np.inf))
    scores -= np.maximum(scores.max(-1, keepdims=True), np.finfo(np.float32).min)
    np.exp(scores, out=scores)
    scores /= np.maximum(scores.sum(-1, keepdims=True), np.finfo(np.float32).tiny)
    return np.asarray(scores @ v)


def _attention_with_lse(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: np.float32
) -> tuple[np.ndarray, np.ndarray]:
    scores = q @ k.swapaxes(-1, -2) * scale
    top = scores.max(-1, keepdims=True)
    lse = top + np.log(np.exp(scores - top).sum(-1, keepdims=True))
    return np.exp(scores - lse) @ v, lse


def _attention_gradients(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    scale: np.float32,
) -> Arrays:
    weights = q @ k.swapaxes(-1, -2)
    weights *= scale
    weights -= lse
    np.exp(weights, out=weights)
    dv = weights.swapaxes(-1, -2) @ dout
    ds = dout @ v.swapaxes(-1, -2)
    ds -= (dout * out).sum(-1, keepdims=True)
    ds *= weights
    ds *= scale
    dq = ds @ k
    dk = ds.swapaxes(-1, -2) @ q
    return dq, dk, dv


def _linear_step(
    xp: Any, concatenate: Callable[..., Any], q: Any, k: Any, v: Any, state: Any
) -> tuple[Any, Any]:
    """One row of linear attention with ``elu(x) + 1`` as features; its output and the new state."""
    x, y = (xp.where(a > 0, a + 1, xp.exp(a)) for a in (q, k))
    ones = xp.ones((*v.shape[:-1], 1), dtype=v.dtype)
    state = state + y.swapaxes(-1, -2) * concatenate([v, ones], -1)
    sums = x @ state
    return sums[..., :-1] / (sums[..., -1:] + _EPS), state


def _product_gradients(dout: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Arrays:
    scores = np.tril(q @ k.swapaxes(-1, -2))
    ds = np.tril(dout @ v.swapaxes(-1, -2))
    return ds @ k, ds.swapaxes(-1, -2) @ q, scores.swapaxes(-1, -2) @ dout


# ----------------------------------------------------------------------------------------- check
def check(case: CpuCall, arrays: Arrays) -> Check:
    """Compare with float64 as the checks of other families do.

    Of a mask that is made, 0 where it is the array and inf where it is not.
    """
    if case.kind == "from_dense":
        return lambda mask: 0.0 if np.array_equal(mask.to_dense(), arrays[0]) else float("inf")
    if case.kind == "linear_attention":
        return _step_check(case, arrays)
    if case.kind.startswith("causal_product"):
        return checks.product_check(case, arrays)
    if case.kind == "gradients":
        dout, *qkv = arrays
        return checks.backward_check(case, (*qkv, dout))
    return _attention_check(case, arrays)


def _step_check(case: CpuCall, arrays: Arrays) -> Check:
    """The larger relative Frobenius error of output and state, inf where one is not finite."""
    wanted = _linear_step(np, np.concatenate, *(x.astype(np.float64) for x in arrays))

    def error(found: Any) -> float:
        if not all(checks.all_finite(case.dtype, x) for x in found):
            return float("inf")
        pairs = zip(found, wanted, strict=True)
        return float(max(np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in pairs))

    return error


def _attention_check(case: CpuCall, arrays: Arrays) -> Check:
    """Relative Frobenius error on sampled rows of some matrices of the stack."""
    given, mask = _split(case, arrays)
    q, k, v = (x.reshape(-1, *x.shape[-2:]) for x in given)
    rows = checks.sampled_rows(q.shape[1])
    places = np.unique(np.linspace(0, len(q) - 1, 50).astype(int)).tolist()

    def reference(place: int) -> np.ndarray:
        of_keys = place * len(k) // len(q)
        q64, k64, v64 = (x.astype(np.float64) for x in (q[place], k[of_keys], v[of_keys]))
        scores = q64[rows] @ k64.T * case.head_dim**-0.5
        if case.causal:
            scores[np.arange(len(k64)) > rows[:, None]] = -np.inf
        if mask is not None:
            seen = mask[place] if mask.ndim == 3 else mask
            scores[~seen[rows]] = -np.inf
        top = scores.max(-1, keepdims=True)
        p = np.exp(scores - np.where(np.isneginf(top), 0, top))
        sums = p.sum(-1, keepdims=True)
        return np.asarray(p @ v64 / np.where(sums == 0, 1, sums))

    wanted = np.stack([reference(place) for place in places])
    error = checks.relative_error(case.dtype, places, rows, wanted)
    return lambda out: error(out.reshape(-1, *out.shape[-2:]))
