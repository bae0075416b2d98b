"""The reduced set of the sanitizers, dropout: builds that drop weights, and tiles that do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from validation import attention_calls, packed_calls, peers

_WRONG = {"bf16": 0.02, "fp32": 1e-4, "fp64": 1e-9}  # of a norm; of each a few roundings
_SMALL = (32, 64, 96, 128, 192, 256)
#: Which kernels are to run, and with which dims; products of cuBLAS compute "tiles".
_DIMS = {"sm90": (64, 96, 128, 192, 256), "sm80": _SMALL, "fp32": (64,), "fp64": (64,)}
_DROPOUT = {"dropout": 0.3, "seed": 2**63 + 12345}
_BOTTOM = {"is_causal": True, "causal_align": "bottom_right"}


def problems() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Shapes, with what else goes to a device, and options that reach every branch."""
    plain = {"heads": (4, 2), "q_len": 150, "k_len": 200}
    packed = {**plain, "q_offsets": [0, 3, 3, 70, 141], "k_offsets": [5, 40, 61, 130, 199]}
    return [
        (plain, _BOTTOM),
        ({**plain, "mask": "pairs"}, {}),
        ({**plain, "bad": True}, {}),
        (packed, _BOTTOM),
        ({**packed, "bad": True}, {}),
        ({**plain, "k_lengths": [120, 7]}, {}),
    ]


def arrays(dtype: np.dtype[Any], dim: int, shape: dict[str, Any]) -> dict[str, Any]:
    """Arrays of a call on the host, by name."""
    rng = np.random.default_rng(1)
    heads, few = shape["heads"]
    sizes = {"q": (heads, shape["q_len"]), "k": (few, shape["k_len"]), "v": (few, shape["k_len"])}
    found: dict[str, Any] = {
        name: rng.standard_normal((2, *size, dim)).astype(np.float32).astype(dtype)
        for name, size in {**sizes, "dout": sizes["q"]}.items()
    }
    if "bad" in shape:
        found["v"][0, 0, 77] = np.nan
    if "mask" in shape:
        found["mask"] = rng.random((shape["q_len"], shape["k_len"])) < 0.6
    for name in ("q_offsets", "k_offsets", "k_lengths"):
        if name in shape:
            found[name] = np.array(shape[name], np.int32)
    return found


def solve(
    host: dict[str, Any], options: dict[str, Any], send: Callable[[Any], Any]
) -> tuple[Any, ...]:
    """Return output and gradients of a call on arrays that are sent."""
    from fa_cupy import attention, attention_backward

    sent = {name: send(x) for name, x in host.items()}
    q, k, v, dout = (sent.pop(name) for name in ("q", "k", "v", "dout"))
    options = {**options, **_DROPOUT}
    out, lse = attention(q, k, v, return_lse=True, **sent, **options)
    return out, *attention_backward(dout, q, k, v, out, lse, **sent, **options)


def is_right(host: dict[str, Any], options: dict[str, Any], found: Any, kernels: str) -> bool:
    """Whether a call's results are those of the definition, whose pairs are the CPU path's."""
    from fa_cupy import reference

    given, options = dict(host), {**options, **_DROPOUT}
    q, k, v, dout = (given.pop(name) for name in ("q", "k", "v", "dout"))
    wants = reference.attention(q, k, v, **given, **options)[:1]
    wants += reference.attention_backward(dout, q, k, v, **given, **options)
    limit = _WRONG.get(kernels, _WRONG["bf16"])
    return all(
        reference.relative_error(x.astype(np.float64), y) <= limit
        for x, y in zip(found, wants, strict=True)
    )


def rows_of(kernels: str, dim: int, target: str) -> set[Any]:
    """Return the builds that calls of this dim must reach."""
    from fa_cupy.gpu.kernels import attention_backward, forward
    from fa_cupy.gpu.kernels.attention import row_intervals
    from fa_cupy.gpu.kernels.backward import Wanted
    from fa_cupy.gpu.kernels.mask import dropout_mask

    if kernels not in ("sm90", "sm80"):
        return {dropout_mask.VARIANT}
    mapped, found = kernels == "sm90", {row_intervals.VARIANT.for_dropout(True)}
    for masked, packed in ((False, False), (True, False), (False, True)):
        row = forward.select("bfloat16", dim, dim, target, forward.Call(None, mapped, masked))
        assert row is not None
        found.add(row.for_sequences(packed).for_dropout(True))
        wanted = Wanted("bfloat16", dim, masked, mapped, packed=packed, dropout=True)
        found |= {*attention_backward.select(wanted, target)}
    return found


def run_calls(kernels: str, dim: int, target: str) -> int:
    """Make the calls of some kernels with one dim; return how many there were."""
    calls = 0
    with packed_calls.forced(kernels), attention_calls.loaded_rows() as reached:
        for shape, options in problems():
            host = arrays(packed_calls.dtype_of(kernels), dim, shape)
            found = [peers.to_host(x) for x in solve(host, options, peers.to_device)]
            if not is_right(host, options, found, kernels):
                raise RuntimeError(f"{kernels} {dim} {shape} {options}: the result is wrong")
            calls += 1
        if missed := rows_of(kernels, dim, target) - reached:
            raise RuntimeError(f"no call reached {', '.join(row.name for row in missed)}")
    return calls


def parts(target: str) -> list[tuple[str, int]]:
    """Return kernels and dims of the calls, those of the largest dims first."""
    kinds = [kind for kind in _DIMS if kind != "sm90" or target == "sm_90a"]
    return sorted(((kind, dim) for kind in kinds for dim in _DIMS[kind]), key=lambda x: -x[1])


def run(target: str, share: int = 0, shares: int = 1) -> int:
    """Make all calls that kernels of a target have, and say how many there were.

    Parameters
    ----------
    target : str
    share, shares : int
        One of so many shares of the `parts`, and how many there are.
    """
    return sum(run_calls(*part, target) for part in parts(target)[share::shares])
