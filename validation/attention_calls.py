"""The reduced set of the sanitizers, attention: every row of the table on every kind of problem."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np

from validation import peers


def problems(dim: int, extra: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Array shapes and options that reach every branch of a forward kernel with this ``dim``.

    ``extra`` keys make the shapes of each row of the table its own, so that no plan of another row
    is met again; ``offset`` moves an array off the alignment that 16-byte copies need.
    """
    plain = {"q_len": 150, "k_len": 193 + extra, "head_dim": dim, "v_dim": dim}
    yield plain, {}
    yield {**plain, "q_len": 193 + extra}, {"is_causal": True}
    yield {**plain, "q_len": 33}, {"is_causal": True, "causal_align": "bottom_right"}
    yield {**plain, "q_len": 1, "heads": 4}, {"window": (20, 0), "causal_align": "bottom_right"}
    yield {**plain, "head_dim": dim - 3, "v_dim": dim - 15}, {}
    yield {**plain, "head_dim": dim - 8, "v_dim": dim - 16, "heads": 4, "q_len": 17}, {}
    yield plain, {"softcap": 2.0}
    yield {**plain, "offset": 1}, {"softcap": 2.0}
    yield {**plain, "bias": True, "heads": 4}, {"scale": -0.1}
    yield {**plain, "sinks": True, "heads": 4}, {"is_causal": True, "causal_align": "bottom_right"}
    yield {**plain, "sinks": True, "heads": 4, "q_len": 17}, {}
    yield {**plain, "q_len": 64 + extra, "k_len": 1}, {}
    yield {**plain, "q_len": 64 + extra, "k_len": 0}, {}


def masked_problems(dim: int, extra: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The same for a row that serves masks: "array" is packed by the call, the others are masks.

    Of "blocks" some are empty, some full and some partial; of "nothing" all are empty.
    """
    plain = {"q_len": 300, "k_len": 450 + extra, "head_dim": dim, "v_dim": dim}
    yield {**plain, "mask": "blocks"}, {}
    yield {**plain, "mask": "array"}, {"softcap": 2.0}
    yield {**plain, "mask": "array", "q_len": 1, "heads": 4}, {}
    causal = {"is_causal": True, "causal_align": "bottom_right"}
    yield {**plain, "mask": "blocks"}, causal
    yield {**plain, "mask": "array", "nan": True}, causal
    yield {**plain, "mask": "blocks"}, {"window": (100, 20), "causal_align": "top_left"}
    yield {**plain, "head_dim": dim - 3, "v_dim": dim - 15, "mask": "blocks"}, {}
    yield {**plain, "head_dim": dim - 8, "v_dim": dim - 16, "heads": 4, "mask": "heads"}, {}
    yield {**plain, "bias": True, "mask": "heads", "heads": 4}, {"scale": -0.1}
    yield {**plain, "nan": True, "sinks": True, "mask": "blocks"}, {}
    yield {**plain, "offset": 1, "mask": "blocks"}, {}
    yield {**plain, "q_len": 64 + extra, "k_len": 1, "mask": "array"}, {}
    yield {**plain, "mask": "nothing"}, {}


def serves(row: Any, shape: dict[str, Any], options: dict[str, Any]) -> bool:
    """Whether a row gets this call, where it is the only one that could; most take any."""
    from fa_cupy.gpu.kernels.attention.fwd_sm90 import FwdSm90
    from fa_cupy.gpu.kernels.tensor_maps import DIM_STEP

    if not isinstance(row, FwdSm90):
        return True
    odd = any(shape[dim] % DIM_STEP for dim in ("head_dim", "v_dim"))
    odd = odd or shape.get("offset") or not shape["k_len"]
    return not odd


def arrays(dtype: np.dtype, shape: dict[str, Any]) -> dict[str, np.ndarray]:
    """Random arrays on the host; 2 key heads, so that 4 query heads are grouped."""
    rng = np.random.default_rng(1)
    heads, q_len, k_len = shape.get("heads", 2), shape["q_len"], shape["k_len"]

    def draw(*of: int) -> np.ndarray:
        return rng.standard_normal(of).astype(np.float32).astype(dtype)

    found = {
        "q": draw(1, heads, q_len, shape["head_dim"]),
        "k": draw(1, 2, k_len, shape["head_dim"]),
        "v": draw(1, 2, k_len, shape["v_dim"]),
    }
    if "mask" in shape:
        of = (heads, q_len, k_len) if shape["mask"] == "heads" else (q_len, k_len)
        found["mask"] = rng.random(of) < (0.0 if shape["mask"] == "nothing" else 0.7)
        if shape["mask"] != "array":
            found["mask"][..., 128:256, 100:300] = True
            found["mask"][..., :128, 200:] = False
            found["mask"][..., 256:290, :] = False  # rows of queries that see nothing
        found["mask"][..., -1] = False  # where NaN may stand
    if shape.get("nan"):
        found["k"][..., -1, :] = found["v"][..., -1, :] = np.nan
    if shape.get("bias"):
        found["bias"] = draw(heads, 1, k_len)
    if shape.get("sinks"):
        found["sinks"] = draw(heads, 1)
        found["sinks"][0] = 6000.0  # more than gradients compute weights from
    return found


def as_mask(sent: dict[str, Any], host: dict[str, np.ndarray], shape: dict[str, Any]) -> None:
    """Put a `BitMask` in place of an array that was sent, where the shape asks for one."""
    from fa_cupy import BitMask

    if shape.get("mask", "array") != "array":
        sent["mask"] = BitMask.from_dense(host["mask"])


def rows_beside(row: Any) -> tuple[Any, ...]:
    """Return the rows that `select` needs beside a row: for other pointers, or fewer queries."""
    from fa_cupy.gpu.kernels import forward
    from fa_cupy.gpu.kernels.attention.full_precision.fwd_fp32 import FwdFp32
    from fa_cupy.gpu.kernels.attention.full_precision.fwd_fp32_sm90 import FwdFp32Sm90
    from fa_cupy.gpu.kernels.attention.fwd_sm80 import FwdSm80
    from fa_cupy.gpu.kernels.attention.fwd_sm90 import FwdSm90

    kind = {FwdSm90: FwdSm80, FwdFp32Sm90: FwdFp32}.get(type(row))
    return tuple(other for other in forward.ROWS if kind and isinstance(other, kind))


def with_splits(row: Any) -> set[Any]:
    """Return a row, and that of ``split_kv`` which is launched before it, if there is one."""
    from fa_cupy.gpu.kernels.attention.full_precision.fwd_fp32_sm90 import FwdFp32Sm90

    return {row, row.split} if isinstance(row, FwdFp32Sm90) else {row}


@contextlib.contextmanager
def split_keys(always: bool) -> Iterator[None]:
    """While entered, keys of float32 are split for any number of queries, or for none."""
    from fa_cupy.gpu.kernels.attention.full_precision import fwd_fp32_sm90

    with mock.patch.object(fwd_fp32_sm90, "LEAST_ROWS", 1 if always else 1 << 62):
        yield


def dtype_of(row: Any) -> np.dtype:
    """The dtype of the arrays that a row takes."""
    return next(dtype for dtype in peers.DTYPES.values() if dtype.name == row.dtype)


@contextlib.contextmanager
def loaded_rows() -> Iterator[set[Any]]:
    """Collect the rows of the table of kernels that calls load."""
    from fa_cupy.gpu.driver import compile

    reached: set[Any] = set()
    load = compile.load

    def spy(row: Any, *rest: Any) -> Any:
        reached.add(row)
        return load(row, *rest)

    with mock.patch.object(compile, "load", spy):
        yield reached


def send(array: np.ndarray, offset: int) -> Any:
    """A copy on the device that starts ``offset`` elements into its allocation."""
    flat = np.concatenate([np.zeros(offset, array.dtype), array.ravel()])
    return peers.to_device(flat)[offset:].reshape(array.shape)


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
        Where a result is wrong or no call reached a row, so that nothing can be left out in
        silence.
    """
    from fa_cupy import attention
    from fa_cupy.core import plan_cache
    from fa_cupy.gpu.kernels import forward

    calls = 0
    for number, row in enumerate(forward.ROWS):
        if number % shares != share:
            continue
        if target not in row.targets:
            print(f"{row.name}: not for {target}")
            continue
        dtype = dtype_of(row)
        rows = row, *rows_beside(row)  # what `select` chooses from
        more = {"precision": "tf32"} if getattr(row, "parts", 2) == 1 else {}
        patched = mock.patch.object(forward, "ROWS", rows)
        with patched, split_keys(True), loaded_rows() as reached:
            forward.select.cache_clear()
            plan_cache.plans.clear()
            for shape, options in (masked_problems if row.sparse else problems)(row.dim, number):
                if not serves(row, shape, options):
                    continue
                host = arrays(dtype, shape)
                sent = {name: send(x, shape.get("offset", 0)) for name, x in host.items()}
                as_mask(sent, host, shape)
                out, _ = attention(**sent, **options, **more, return_lse=True)
                if not np.isfinite(peers.to_host(out).astype(np.float32)).all():
                    raise RuntimeError(f"{row.name} {shape} {options}: the result is not finite")
                calls += 1
        if missed := with_splits(row) - reached:
            raise RuntimeError(f"no call reached {', '.join(x.name for x in missed)}")
    forward.select.cache_clear()
    plan_cache.plans.clear()
    return calls
