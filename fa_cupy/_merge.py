"""Attention over parts of the keys, combined."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from fa_cupy.core import arrays, attention_problem


def merge_attention(outs: Sequence[Any] | Any, lses: Sequence[Any] | Any) -> tuple[Any, Any]:
    """Combine attention results over disjoint sets of keys.

    Attention over all the keys follows from the outputs and log-sum-exps of attention over parts
    of them (devices, pages, chunks of a stream): each output weighs ``exp(lse)``.

    Parameters
    ----------
    outs : sequence of arrays of shape (..., Lq, Dv), or one array of them, stacked
        Outputs of `attention` for the same queries.
    lses : sequence of arrays of shape (..., Lq), or one array of them, stacked
        Their log-sum-exps.

    Returns
    -------
    out : array, shape (..., Lq, Dv)
        Of the kind and dtype of the parts.
    lse : array, shape (..., Lq)
        float32, or float64 for float64 outputs, in which all is computed.

    Raises
    ------
    TypeError, ValueError
        If the parts do not match.

    Notes
    -----
    A part with log-sum-exp -inf counts for nothing, whatever its output holds. Where all of them
    are -inf the output is 0. The parts are summed in the order given.

    Shares of the parts are as accurate as their log-sum-exps. In float32 one of -1e9, as under a
    padding bias, is a multiple of 64: such parts weigh the same, or one of them counts alone. Hide
    padding with a mask instead. Gradients of a part (`attention_backward`) take the merged `out`
    and `lse`; where those are so large, they cannot be told from the part's own.

    Examples
    --------
    >>> import numpy as np
    >>> from fa_cupy import attention, merge_attention
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 100, 16))
    >>> parts = [attention(q, k[s], v[s], return_lse=True) for s in (slice(0, 30), slice(30, 100))]
    >>> out, lse = merge_attention(*zip(*parts))
    >>> bool(np.allclose(out, attention(q, k, v)))
    True
    """
    named: dict[str, Any] = {}
    for arg, parts in (("outs", outs), ("lses", lses)):
        if getattr(parts, "shape", ()):
            stacked: Any = parts
            parts = [stacked[i, ...] for i in range(stacked.shape[0])]
        elif not isinstance(parts, Sequence):
            raise TypeError(
                f"merge_attention: {arg} is a {type(parts).__name__}, want a sequence of arrays"
            )
        if any(part is None for part in parts):
            raise TypeError(f"merge_attention: {arg} has a part that is None, want arrays")
        named |= {f"{arg}[{i}]": part for i, part in enumerate(parts)}
    count = sum(arg.startswith("outs") for arg in named)
    if count == 0 or len(named) != 2 * count:
        raise ValueError(
            f"merge_attention: lses has {len(named) - count} parts, outs has {count}, "
            "want the same number, at least 1"
        )
    native = arrays.to_native("merge_attention", **named)
    attention_problem.matching_parts(
        "merge_attention", native.arrays[:count], native.arrays[count:]
    )
    with native.context:
        out, lse = _merge(sys.modules[native.backend], native.arrays[:count], native.arrays[count:])
        return native.give_back(out), native.give_back(lse)


def _merge(xp: Any, outs: list[Any], lses: list[Any]) -> tuple[Any, Any]:
    """Merge native parts; the arithmetic is in float32, or float64 for float64 outputs."""
    real = np.float64 if outs[0].dtype == np.float64 else np.float32
    # Silent, whatever the caller has NumPy do: 0 * inf, log(0) and what is too small or too large
    # have their IEEE results, which are the wanted ones.
    with np.errstate(all="ignore"):
        lses = [lse.astype(real) for lse in lses]
        top = lses[0]
        for lse in lses[1:]:
            top = xp.maximum(top, lse)
        top = xp.where(xp.isneginf(top), real(0), top)
        total = xp.zeros_like(top)
        weighted = xp.zeros_like(outs[0], dtype=real)
        for out, lse in zip(outs, lses, strict=True):
            weight = xp.exp(lse - top)
            total += weight
            empty = xp.isneginf(lse)[..., None]
            weighted += xp.where(empty, real(0), weight[..., None] * out.astype(real))
        weighted /= xp.where(total == 0, real(1), total)[..., None]
        return weighted.astype(outs[0].dtype), top + xp.log(total)
