"""Attention by an exchange of parts of the sequence for heads, and back.

Before the exchange a rank has some rows of all heads, after it all rows of some heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fa_cupy import _attention
from fa_cupy.core.arrays import empty_laid_out
from fa_cupy.distributed.calls import Call
from fa_cupy.distributed.order import Segment, copy_bits, dense


def attention(call: Call) -> tuple[Any, Any]:
    """Return output and log-sum-exp of the queries of this rank."""
    places = call.places
    q, k, v = _to_heads(call, ("q", "k", "v"), (places.queries, places.keys, places.keys))
    out, lse = _attention.attention(q, k, v, return_lse=True, **_options(call))
    out, lse = _to_rows(
        call, (out, lse[..., None]), (places.queries,) * 2, (call.arrays["q"], None)
    )
    return out, lse[..., 0]


def gradients(call: Call) -> dict[str, Any]:
    """Return the gradients of q, k and v of this rank, and of what all ranks share.

    The latter are those of this rank's heads, and zeros for others.
    """
    need = call.need
    places, arrays = call.places, dict(call.arrays)
    names = ["q", "k", "v", "dout", "out"]
    rows = [places.queries, places.keys, places.keys, places.queries, places.queries]
    columns = [arg for arg in ("lse", "dlse") if arrays[arg] is not None]
    for arg in columns:
        arrays[arg] = arrays[arg][..., None]
    found = _to_heads(call, (*names, *columns), (*rows, *[places.queries] * len(columns)), arrays)
    q, k, v, dout, out, *of_lse = found
    given = dict(zip(columns, [x[..., 0] for x in of_lse], strict=True))
    lse = given.pop("lse")
    options = _options(call)
    grads = dict(
        zip(
            need,
            _attention.attention_backward(dout, q, k, v, out, lse, need=need, **given, **options),
            strict=True,
        )
    )
    back = [arg for arg in ("q", "k", "v") if arg in grads]
    of_rows = {"q": places.queries, "k": places.keys, "v": places.keys}
    parts = ([x[arg] for arg in back] for x in (grads, of_rows, call.arrays))
    grads |= zip(back, _to_rows(call, *parts), strict=True)
    for arg in ("bias", "sinks"):
        if arg in grads:
            real = np.dtype(np.float64 if grads[arg].dtype == np.float64 else np.float32)
            whole = call.xp.zeros(call.arrays[arg].shape, real)
            whole[_share(call, arg)] = call.sums.convert(grads[arg], real)
            grads[arg] = whole
    return grads


def _options(call: Call) -> dict[str, Any]:
    """Return the other arguments, of the heads of this rank."""
    found = {**call.options, "is_causal": call.is_causal, "window": call.window}
    for arg in ("bias", "mask", "sinks"):
        if call.arrays[arg] is not None:
            found[arg] = call.arrays[arg][_share(call, arg)]
    return found


def _share(call: Call, arg: str) -> tuple[Any, ...]:
    """Return the index of this rank's heads in a bias, a mask or sinks."""
    array, tail = call.arrays[arg], 1 if arg == "sinks" else 2
    if array.ndim <= tail or array.shape[-tail - 1] == 1:
        return (...,)
    share = array.shape[-tail - 1] // call.comm.size
    own = slice(call.comm.rank * share, (call.comm.rank + 1) * share)
    return (..., own, *[slice(None)] * tail)


def _to_heads(
    call: Call, names: Sequence[str], rows: Sequence[Any], arrays: Any = None
) -> list[Any]:
    """Return all rows of this rank's heads, of each array in the order of positions."""
    comm, arrays = call.comm, call.arrays if arrays is None else arrays
    given = [arrays[arg] for arg in names]

    def part(x: Any, rank: int) -> Any:
        share = x.shape[-3] // comm.size
        return x[..., rank * share : (rank + 1) * share, :, :]

    def shape(x: Any, length: int) -> tuple[int, ...]:
        return (*x.shape[:-3], x.shape[-3] // comm.size, length, x.shape[-1])

    sends = [(rank, dense(part(x, rank))) for rank in _others(comm) for x in given]
    receives = [
        (rank, call.xp.empty(shape(x, _length(own[rank])), x.dtype))
        for rank in _others(comm)
        for x, own in zip(given, rows, strict=True)
    ]
    transfer = comm.start(sends, receives, f"{call.name}: rows for heads")
    whole = []
    for x, own in zip(given, rows, strict=True):
        whole.append(call.xp.empty(shape(x, sum(map(_length, own))), x.dtype))
        _place(whole[-1], part(x, comm.rank), own[comm.rank])
    transfer.wait()
    for i, (rank, x) in enumerate(receives):
        which = i % len(given)
        _place(whole[which], x, rows[which][rank])
    return whole


def _to_rows(
    call: Call, given: Sequence[Any], rows: Sequence[Any], likes: Sequence[Any]
) -> list[Any]:
    """Return this rank's rows of all heads, from all rows of this rank's heads.

    Each result lies in memory as one of `likes` does, or in C order where that is None.
    """
    comm = call.comm

    def part(x: Any, own: Any, rank: int) -> Any:
        found = call.xp.empty((*x.shape[:-2], _length(own[rank]), x.shape[-1]), x.dtype)
        begin = 0
        for start, count in own[rank]:
            copy_bits(found[..., begin : begin + count, :], x[..., start : start + count, :])
            begin += count
        return found

    pairs = list(zip(given, rows, strict=True))
    sends = [(rank, part(x, own, rank)) for rank in _others(comm) for x, own in pairs]
    mine = [part(x, own, comm.rank) for x, own in pairs]
    receives = [(rank, call.xp.empty(x.shape, x.dtype)) for rank in _others(comm) for x in mine]
    transfer = comm.start(sends, receives, f"{call.name}: heads for rows")
    found = []
    for x, like in zip(mine, likes, strict=True):
        shape = (*x.shape[:-3], x.shape[-3] * comm.size, *x.shape[-2:])
        found.append(
            call.xp.empty(shape, x.dtype)
            if like is None
            else empty_laid_out(call.xp, shape, like, x.dtype)
        )
    parts = [(comm.rank, i, x) for i, x in enumerate(mine)]
    transfer.wait()
    parts += [(rank, i % len(mine), x) for i, (rank, x) in enumerate(receives)]
    for rank, which, x in parts:
        share = x.shape[-3]
        own_heads = slice(rank * share, (rank + 1) * share)
        copy_bits(found[which][..., own_heads, :, :], x)
    return found


def _place(whole: Any, part: Any, segments: Sequence[Segment]) -> None:
    """Write the rows of a rank to their positions."""
    begin = 0
    for start, rows in segments:
        copy_bits(whole[..., start : start + rows, :], part[..., begin : begin + rows, :])
        begin += rows


def _others(comm: Any) -> list[int]:
    """Return the other ranks, those after this one first."""
    return [(comm.rank + i) % comm.size for i in range(1, comm.size)]


def _length(segments: Sequence[Segment]) -> int:
    return sum(segment.rows for segment in segments)
