"""The reduced set of the sanitizers, gradients of attention: every row on every kind of problem."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
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


class Part(NamedTuple):
    """The calls that are to reach a row, and what has the row chosen for them."""

    row: Any
    reached: frozenset[Any]  # this row and those that are launched with it
    problems: list[tuple[dict[str, Any], dict[str, Any]]]
    forced: Callable[[], contextlib.AbstractContextManager[None]]


def parts(target: str) -> list[Part]:
    """Return the calls of each row that some call can reach on this target."""
    from fa_cupy.gpu.kernels import attention_backward
    from fa_cupy.gpu.kernels.backward import Wanted
    from fa_cupy.gpu.kernels.registry import GRADIENTS

    # One of each call.
    of_rows = "bwd_dkdv_fp32_sm90", "bwd_dkdv_fp32", "bwd_dkdv_fp64"
    kernels = ("bwd_sm90", "bwd_dkdv_sm90", "bwd_dkdv_sm80", *of_rows)
    found = []
    for row in GRADIENTS:
        if row.kernel not in kernels:
            continue
        if target not in row.targets:
            print(f"{row.name}: not for {target}")
            continue
        problem_set = (masked_problems if row.sparse else problems)(row.dim)
        forced: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        if row.kernel == "bwd_dkdv_sm80":  # which is to take what others would
            forced = by_no_maps
        elif row.kernel == "bwd_dkdv_fp32":
            forced = by_mma
        if row.kernel in ("bwd_dkdv_sm80", *of_rows):
            problem_set = sm80_problems(row.dim, row.sparse)
        with forced():
            rows = frozenset(
                attention_backward.select(Wanted(row.dtype, row.dim, row.sparse), target)
            )
        if row not in rows:
            print(f"{row.name}: others are chosen for {target}")
            continue
        found.append(Part(row, rows, [*problem_set], forced))
    return found


def run(target: str, share: int = 0, shares: int = 1) -> int:
    """Make every call once and look at each result; return how many there were.

    Parameters
    ----------
    target : str
    share, shares : int
        One of so many shares of the `parts`, and how many there are.

    Raises
    ------
    RuntimeError
        Where a result is wrong, or no call reached a row.
    """
    from fa_cupy.core import plan_cache

    calls = 0
    for part in parts(target)[share::shares]:
        plan_cache.plans.clear()  # what is kept would not be loaded again
        with attention_calls.loaded_rows() as reached, part.forced():
            for shape, options in part.problems:
                _call(part.row, shape, options)
                calls += 1
        if missed := part.reached - reached:
            raise RuntimeError(f"no call reached {', '.join(x.name for x in missed)}")
    plan_cache.plans.clear()  # of those that took what others would
    return calls


@contextlib.contextmanager
def by_no_maps() -> Iterator[None]:
    """While entered, gradients are computed as if no tensor map could walk an array."""
    from fa_cupy.gpu.kernels import attention_backward

    select = attention_backward.select

    def unmapped(wanted: Any, target: str) -> Any:
        return select(wanted._replace(mapped=False), target)

    with mock.patch.object(attention_backward, "select", unmapped):
        yield


@contextlib.contextmanager
def by_mma() -> Iterator[None]:
    """While entered, gradients of float32 get no kernel of ``wgmma``."""
    from fa_cupy.gpu.kernels import attention_backward
    from fa_cupy.gpu.kernels.attention.full_precision.gradients import selection

    attention_backward.select.cache_clear()
    with mock.patch.object(selection, "MMA_DIM", 1 << 30):
        yield
    attention_backward.select.cache_clear()


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
