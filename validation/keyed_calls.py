"""The reduced set of the sanitizers, attention with key lengths and pages: every row."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np

from validation import peers
from validation.attention_calls import send

_WRONG = 0.02  # of a norm, in bfloat16


def problems(dim: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Shapes and options that reach every branch of the kernels with this `dim`.

    A page has "size" keys; "wide" numbers have 64 bits. An "offset" in elements keeps rows from
    being aligned. Behind the ends all is NaN. Large scores have rows computed once more.
    """
    plain = {"q_len": 3, "k_len": 410, "head_dim": dim, "v_dim": dim}
    causal = {"is_causal": True, "causal_align": "bottom_right"}
    return [
        (plain, {}),
        ({**plain, "size": 16}, causal),
        ({**plain, "size": 48, "wide": True, "v_dim": dim - 8}, {"softcap": 2.0}),
        ({**plain, "offset": 1, "size": 64, "head_dim": dim - 3}, {}),
        ({**plain, "offset": 1, "q_len": 40}, causal),
        ({**plain, "bias": True, "size": 128}, {"window": (100, 0), "causal_align": "top_left"}),
        ({**plain, "sinks": True, "q_len": 20}, causal),
        ({**plain, "scale": 1e8, "size": 32}, {}),
    ]


def arrays(
    dtype: np.dtype[Any], shape: dict[str, Any]
) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, np.ndarray[Any, Any]]]:
    """Arrays of a call on the host: those of attention, and those that say where the keys are."""
    rng = np.random.default_rng(1)
    k_len, q_len = shape["k_len"], shape["q_len"]
    sizes = {
        "q": (3, 4, q_len, shape["head_dim"]),
        "k": (3, 2, k_len, shape["head_dim"]),
        "v": (3, 2, k_len, shape["v_dim"]),
    }
    drawn = {name: rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
    lengths = np.array([k_len, 0, 2 * k_len // 3], np.int64 if shape.get("wide") else np.int32)
    keys = {"k_lengths": lengths}
    for name in ("k", "v"):
        for row, n in zip(drawn[name], lengths, strict=True):
            row[:, n:] = np.nan
    if "size" in shape:
        drawn["k"], drawn["v"], table = in_pages(
            rng, drawn["k"], drawn["v"], lengths, shape["size"]
        )
        keys["page_table"] = table.astype(lengths.dtype)
    if shape.get("bias"):
        k_len = keys["page_table"].shape[-1] * shape["size"]
        drawn["bias"] = rng.standard_normal((4, 1, k_len)).astype(np.float32)
    host = {name: x.astype(dtype) for name, x in drawn.items()}
    if shape.get("sinks"):
        host["sinks"] = np.array([[0.5], [-np.inf], [3.0], [300.0]], np.float32)
    return host, keys


def in_pages(
    rng: np.random.Generator,
    k: np.ndarray[Any, Any],
    v: np.ndarray[Any, Any],
    lengths: np.ndarray[Any, Any],
    size: int,
    garbage: float = np.nan,
) -> tuple[np.ndarray[Any, Any], ...]:
    """Return keys and values (batch, heads, k_len, dim) in pages, in any order, and the page table.

    Rows that no entry has are garbage, numbers of pages that none needs are out of range.
    """
    batch, _, k_len, _ = k.shape
    per_sequence = -(-k_len // size)
    count = batch * per_sequence + 2
    table = rng.permutation(count)[: batch * per_sequence].reshape(batch, per_sequence)
    pages = []
    for x in (k, v):
        shape = count, x.shape[1], size, x.shape[3]
        found = np.full(shape, garbage, np.float32).astype(x.dtype)
        for b, j in np.ndindex(batch, per_sequence):
            rows = x[b, :, j * size : min((j + 1) * size, lengths[b])]
            found[table[b, j], :, : rows.shape[1]] = rows
        pages.append(found)
    needed = -(-np.asarray(lengths) // size)
    table[np.arange(per_sequence) >= needed[:, None]] = rng.choice([-1, count, 2**30])
    return *pages, table


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
        Where a result is wrong.
    """
    from fa_cupy import attention, reference
    from fa_cupy.core import plan_cache
    from fa_cupy.gpu.kernels.attention.splitkv import fwd_splitkv

    calls = 0
    for row in fwd_splitkv.VARIANTS[share::shares]:
        if target not in row.targets:
            print(f"{row.name}: not for {target}")
            continue
        dtype = peers.DTYPES["bf16" if row.dtype == "bfloat16" else "fp16"]
        with mock.patch.object(fwd_splitkv, "VARIANTS", (row,)):
            plan_cache.plans.clear()
            for shape, options in problems(row.dim):
                host, keys = arrays(dtype, shape)
                sent = {name: send(x, shape.get("offset", 0)) for name, x in host.items()}
                on_device = {name: peers.to_device(x) for name, x in keys.items()}
                more = {**options, **({"scale": shape["scale"]} if "scale" in shape else {})}
                out = attention(**sent, **on_device, **more)
                want, _ = reference.attention(**host, **keys, **more)
                error = peers.to_host(out).astype(np.float64) - want
                if not np.linalg.norm(error) <= _WRONG * np.linalg.norm(want):
                    raise RuntimeError(f"{row.name} {shape} {options}: the result is wrong")
                calls += 1
    plan_cache.plans.clear()
    return calls
