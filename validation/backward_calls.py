"""The reduced set of the sanitizers, gradients of attention: every row on every kind of problem."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np

from fa_cupy import reference
from validation import attention_calls, peers

_WRONG = 0.02  # of a norm; rounding to bfloat16 is a tenth of it


def problems(dim: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Array shapes and options that reach every branch of the kernels with this ``dim``.

    The "nan" of a hidden key has rows computed again.
    """
    plain = {"q_len": 150, "k_len": 193, "head_dim": dim, "v_dim": dim}
    top, bottom = ({"causal_align": side} for side in ("top_left", "bottom_right"))
    yield plain, {}
    yield {**plain, "heads": 4, "dlse": True}, {"is_causal": True, **bottom}
    yield {**plain, "q_len": 193, "k_len": 150}, {"is_causal": True, **bottom}
    yield {**plain, "k_len": 130, "dlse": True}, {"window": (70, 5), **top}
    yield {**plain, "head_dim": dim - 8, "v_dim": dim - 16, "heads": 4}, {"window": (0, 63), **top}
    yield {**plain, "q_len": 80, "k_len": 90, "heads": 4, "nan": True}, {"is_causal": True, **top}
    yield {**plain, "q_len": 1, "k_len": 1}, {}
    yield {**plain, "sinks": True, "heads": 4}, {"is_causal": True, "causal_align": "bottom_right"}


def masked_problems(dim: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The same for rows that serve masks, which are those of `attention_calls.masked_problems`."""
    plain = {"q_len": 300, "k_len": 450, "head_dim": dim, "v_dim": dim}
    bottom = {"is_causal": True, "causal_align": "bottom_right"}
    yield {**plain, "mask": "blocks"}, {}
    yield {**plain, "mask": "array", "dlse": True}, {}
    yield {**plain, "mask": "heads", "heads": 4}, bottom
    yield {**plain, "mask": "blocks"}, {"window": (100, 20), "causal_align": "top_left"}
    yield {**plain, "head_dim": dim - 8, "v_dim": dim - 16, "mask": "array", "heads": 4}, bottom
    yield {**plain, "mask": "nothing"}, {}
    yield {**plain, "q_len": 1, "k_len": 2, "mask": "array"}, {}


def sm80_problems(dim: int, sparse: bool) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The same for rows of the kernels of mma.sync, which take all options."""
    plain = {"q_len": 150, "k_len": 193, "head_dim": dim, "v_dim": dim, "dlse": True}
    if sparse:
        plain |= {"q_len": 300, "k_len": 450, "mask": "blocks"}
    bottom = {"is_causal": True, "causal_align": "bottom_right"}
    yield {**plain, "heads": 4, "nan": True}, {"is_causal": True, "causal_align": "top_left"}
    yield {**plain, "head_dim": dim - 8, "v_dim": dim - 16}, {}
    yield {**plain, "bias": True, "heads": 4}, {"softcap": 2.0, **bottom}
    yield {**plain, "bias": True}, {"window": (70, 5), "causal_align": "top_left"}
    yield {**plain, "sinks": True, "heads": 4}, bottom
    yield {**plain, "q_len": 1, "k_len": 2}, {"scale": -0.1}


def arrays(dtype: np.dtype, shape: dict[str, Any]) -> dict[str, np.ndarray]:
    """Random arrays on the host: queries, keys, values, and gradients of output and LSE."""
    found = attention_calls.arrays(dtype, shape)
    rng = np.random.default_rng(2)
    rows = found["q"].shape[:-1]
    found["dout"] = rng.standard_normal((*rows, shape["v_dim"])).astype(np.float32).astype(dtype)
    if shape.get("dlse"):
        found["dlse"] = rng.standard_normal(rows).astype(np.promote_types(dtype, np.float32))
    return found


def error(
    host: dict[str, np.ndarray], found: tuple[np.ndarray, ...], options: dict[str, Any]
) -> float:
    """Return the largest relative error of gradients, infinite where one should be finite."""
    q, k, v, dout = (host[name] for name in ("q", "k", "v", "dout"))
    given = {name: host.get(name) for name in ("bias", "mask", "dlse", "sinks")}
    want = reference.attention_backward(dout, q, k, v, **given, **options)
    # Where there is one key, gradients of scores are 0 but for how sums of products are rounded.
    small = 1e-4 * np.sqrt(dout.shape[-1])
    return max(
        min(reference.relative_error(x, of), float(np.abs(x.astype(float) - of).max()) / small)
        for x, of in zip(found, want, strict=True)
    )


def run(target: str, share: int = 0, shares: int = 1) -> int:
    """Make every call once and look at each result; return how many there were.

    Parameters
    ----------
    target : str
    share, shares : int
        One of so many shares of the rows, and how many there are.

    Raises
    ------
    RuntimeError
        Where a result is wrong, or no call reached a row.
    """
    from fa_cupy.core import plan_cache
    from fa_cupy.gpu.kernels import attention_backward
    from fa_cupy.gpu.kernels.backward import Wanted
    from fa_cupy.gpu.kernels.registry import GRADIENTS

    calls = 0
    select = attention_backward.select
    # One of each call.
    of_rows = "bwd_dkdv_fp32_sm90", "bwd_dkdv_fp32", "bwd_dkdv_fp64"
    kernels = ("bwd_sm90", "bwd_dkdv_sm90", "bwd_dkdv_sm80", *of_rows)
    mains = [row for row in GRADIENTS if row.kernel in kernels]
    for row in mains[share::shares]:
        if target not in row.targets:
            print(f"{row.name}: not for {target}")
            continue
        wanted = Wanted(row.dtype, row.dim, row.sparse)
        problem_set = (masked_problems if row.sparse else problems)(row.dim)
        patches: list[Any] = [by_mma()] if row.kernel == "bwd_dkdv_fp32" else []
        if row.kernel == "bwd_dkdv_sm80":  # which is to take what others would
            problem_set = sm80_problems(row.dim, row.sparse)
            wanted = wanted._replace(mapped=False)
            patches.append(mock.patch.object(attention_backward, "select", unmapped(select)))
        elif row.kernel in of_rows:
            problem_set = sm80_problems(row.dim, row.sparse)
        with by_mma() if row.kernel == "bwd_dkdv_fp32" else contextlib.nullcontext():
            rows = select(wanted, target)
        if row not in rows:
            print(f"{row.name}: others are chosen for {target}")
            continue
        plan_cache.plans.clear()  # what is kept would not be loaded again
        with contextlib.ExitStack() as stack:
            reached = stack.enter_context(attention_calls.loaded_rows())
            for patch in patches:
                stack.enter_context(patch)
            for shape, options in problem_set:
                _call(row, shape, options)
                calls += 1
        if missed := {*rows} - reached:
            raise RuntimeError(f"no call reached {', '.join(x.name for x in missed)}")
    plan_cache.plans.clear()  # of those that took what others would
    return calls


@contextlib.contextmanager
def by_mma() -> Iterator[None]:
    """While entered, gradients of float32 get no kernel of ``wgmma``."""
    from fa_cupy.gpu.kernels import attention_backward
    from fa_cupy.gpu.kernels.attention.full_precision.gradients import selection

    attention_backward.select.cache_clear()
    with mock.patch.object(selection, "MMA_DIM", 1 << 30):
        yield
    attention_backward.select.cache_clear()


def unmapped(select: Any) -> Any:
    """Return `select` as if no tensor map could walk an array."""
    return lambda wanted, target: select(wanted._replace(mapped=False), target)


def _call(row: Any, shape: dict[str, Any], options: dict[str, Any]) -> None:
    """Make one call and look at its results."""
    from fa_cupy import attention, attention_backward

    host = arrays(attention_calls.dtype_of(row), shape)
    sent = {name: peers.to_device(x) for name, x in host.items()}
    attention_calls.as_mask(sent, host, shape)
    q, k, v, dout = (sent[name] for name in ("q", "k", "v", "dout"))
    more = {name: sent.get(name) for name in ("bias", "mask", "sinks")} | options
    out, lse = attention(q, k, v, return_lse=True, **more)
    given = dout, q, k, v, out, lse
    grads = attention_backward(*given, dlse=sent.get("dlse"), **more)
    if error(host, tuple(map(peers.to_host, grads)), options) > _WRONG:
        raise RuntimeError(f"{row.name} {shape} {options}: the result is wrong")
