"""The reduced set of the sanitizers, gradients of attention: every row on every kind of problem."""

from __future__ import annotations

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


def arrays(dtype: np.dtype, shape: dict[str, Any]) -> dict[str, np.ndarray]:
    """Random arrays on the host: queries, keys, values, and gradients of output and LSE."""
    found = attention_calls.arrays(dtype, shape)
    rng = np.random.default_rng(2)
    rows = found["q"].shape[:-1]
    found["dout"] = rng.standard_normal((*rows, shape["v_dim"])).astype(np.float32).astype(dtype)
    if shape.get("dlse"):
        found["dlse"] = rng.standard_normal(rows).astype(np.float32)
    return found


def error(
    host: dict[str, np.ndarray], found: tuple[np.ndarray, ...], options: dict[str, Any]
) -> float:
    """Return the largest relative error of gradients, infinite where one should be finite."""
    q, k, v, dout = (host[name] for name in ("q", "k", "v", "dout"))
    given = {"mask": host.get("mask"), "dlse": host.get("dlse")}
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
        For every how manyth row of the table, and from which on.

    Raises
    ------
    RuntimeError
        Where a result is wrong, or no call reached a row.
    """
    from fa_cupy import attention, attention_backward
    from fa_cupy.gpu import compile, plan_bwd
    from fa_cupy.gpu.variants_bwd import BACKWARD, BwdKeysSm90, BwdSm90, select_bwd

    reached: set[Any] = set()
    load = compile.load

    def spy(row: Any, *rest: Any) -> Any:
        reached.add(row)
        return load(row, *rest)

    calls = 0
    mains = [row for row in BACKWARD if isinstance(row, (BwdSm90, BwdKeysSm90))]
    plan_bwd._plans.clear()  # what is kept would not be loaded again
    with mock.patch.object(compile, "load", spy):
        for row in mains[share::shares]:
            if target not in row.targets:
                print(f"{row.name}: not for {target}")
                continue
            dtype = peers.DTYPES["bf16" if row.dtype == "bfloat16" else "fp16"]
            for shape, options in (masked_problems if row.sparse else problems)(row.dim):
                host = arrays(dtype, shape)
                sent = {name: peers.to_device(x) for name, x in host.items()}
                attention_calls.as_mask(sent, host, shape)
                q, k, v, dout = (sent[name] for name in ("q", "k", "v", "dout"))
                masked = {"mask": sent.get("mask"), **options}
                out, lse = attention(q, k, v, return_lse=True, **masked)
                grads = attention_backward(dout, q, k, v, out, lse, dlse=sent.get("dlse"), **masked)
                if error(host, tuple(map(peers.to_host, grads)), options) > _WRONG:
                    raise RuntimeError(f"{row.name} {shape} {options}: the result is wrong")
                calls += 1
            missed = {*(select_bwd(row.dtype, row.dim, row.dim, row.sparse) or ())} - reached
            if missed:
                raise RuntimeError(f"no call reached {', '.join(x.name for x in missed)}")
    return calls
