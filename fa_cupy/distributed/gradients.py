"""Gradients of attention over a sequence that is spread over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fa_cupy import _attention
from fa_cupy.core.arrays import empty_laid_out
from fa_cupy.distributed import calls, heads
from fa_cupy.distributed.blocks import Blocks
from fa_cupy.distributed.calls import Call, Hop
from fa_cupy.distributed.communicator import Communicator, Transfer, over_ranks, require
from fa_cupy.distributed.order import dense, rows_of
from fa_cupy.distributed.pieces import Piece


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    comm: Communicator,
    plan: str | None = None,
    order: str = "contiguous",
    scale: float | None = None,
    is_causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    sinks: Any = None,
    dlse: Any = None,
    need: Sequence[str] | None = None,
) -> tuple[Any, ...]:
    """Gradients of `fa_cupy.distributed.attention` with respect to its arrays.

    Parameters
    ----------
    dout : array, shape (..., Lq, Dv)
        Gradient of the output of this rank.
    q : array, shape (..., Lq, D)
    k : array, shape (..., Lk, D)
    v : array, shape (..., Lk, Dv)
        The arguments of `attention`.
    out : array, shape (..., Lq, Dv)
    lse : array, shape (..., Lq)
        Its results on this rank, with ``return_lse=True``.
    bias : array, broadcastable to (..., Lq, all keys), optional
    mask : array of bool, broadcastable to (..., Lq, all keys), or BitMask, optional
    comm : Communicator
    plan : {"ring", "heads"}, optional
    order : {"contiguous", "zigzag"}
    scale : float, optional
    is_causal : bool
    window : (left, right), optional
    softcap : float
    sinks : array, broadcastable to (..., Lq), optional
        The other arguments of that call; `plan` may be another one.
    dlse : array, shape (..., Lq), optional
        Gradient of the log-sum-exp; zero by default.
    need : sequence of {"q", "k", "v", "bias", "sinks"}, optional
        The gradients to compute, the same on all ranks; by default those of `q`, `k`, `v` and, if
        they are given, `bias` and `sinks`.

    Returns
    -------
    tuple of arrays
        The gradients in the order of `need`, each with the shape, the dtype and the memory layout
        of its argument on this rank. Those of a bias or of sinks without an axis of queries, which
        are the same on all ranks, are summed over the ranks: each gets the sum.

    Raises
    ------
    TypeError, ValueError, RankError, TimeoutError, NotImplementedError
        As `attention` does.

    See Also
    --------
    attention : what it computes, and how ranks share it.

    Notes
    -----
    With ``plan="ring"``, what the queries of a rank add to the gradients of another rank's keys and
    values goes back to that rank in the dtype of `k`. It is added there in float32 (float64 for
    float64 input), in the order of the distance between the ranks. Results have the same bits in
    each run.

    Examples
    --------
    >>> import numpy as np
    >>> import fa_cupy
    >>> from fa_cupy import distributed
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 8, 300, 16))
    >>> def part(comm):
    ...     options = {"comm": comm, "is_causal": True}
    ...     own = [distributed.split(x, comm) for x in (q, k, v)]
    ...     out, lse = distributed.attention(*own, return_lse=True, **options)
    ...     own_dout = distributed.split(dout, comm)
    ...     return distributed.attention_backward(own_dout, *own, out, lse, **options)
    >>> with distributed.local(3) as ranks:
    ...     dq, dk, dv = (distributed.join(parts) for parts in zip(*ranks(part)))
    >>> out, lse = fa_cupy.attention(q, k, v, is_causal=True, return_lse=True)
    >>> whole = fa_cupy.attention_backward(dout, q, k, v, out, lse, is_causal=True)
    >>> all(np.allclose(x, y) for x, y in zip((dq, dk, dv), whole))
    True
    """
    given = {
        "q": q, "k": k, "v": v, "bias": bias, "mask": mask, "sinks": sinks,
        "dout": dout, "out": out, "lse": lse, "dlse": dlse,
    }  # fmt: skip
    with require("attention_backward", comm).turn():
        call = calls.prepare(
            "attention_backward", comm, given, plan=plan, order=order, is_causal=is_causal,
            window=window, gradients=True, need=need, scale=scale, softcap=softcap,
        )  # fmt: skip
        with comm.guard(), call.native.context:
            found = _finished(call, heads.gradients(call) if call.way == "heads" else _ring(call))
            if "bias" in found:
                found["bias"] = found["bias"].reshape(bias.shape)
            return tuple(call.native.give_back(found[arg]) for arg in call.need)


def _finished(call: Call, found: dict[str, Any]) -> dict[str, Any]:
    """Return gradients with those of a bias and of sinks summed over ranks, where all share them.

    They have the dtype of their argument.
    """
    for arg in ("bias", "sinks"):
        if arg in found:
            of_all = arg in call.shared or call.way == "heads"
            total = _over_ranks(call, arg, found[arg]) if of_all else found[arg]
            found[arg] = call.sums.convert(total, call.arrays[arg].dtype)
    return found


def _ring(call: Call) -> dict[str, Any]:
    """Compute own queries with the keys of one rank after the other; return gradients of these."""
    rank, size = call.comm.rank, call.comm.size
    own, around = calls.own_pieces(call.places, rank), calls.hops(call.places, rank)
    returned = [hop for hop in around if hop.sent is not None]
    parts = len(own) + sum(len(hop.pieces) for hop in around)
    sums = {"q": _Sum(call, call.arrays["q"], parts)}
    for arg in "kv":
        sums[arg] = _Sum(call, call.arrays[arg], len(own) + len(returned))
    for arg in ("bias", "sinks"):
        if arg in call.need:
            sums[arg] = _Sum(call, call.arrays[arg], parts)
    blocks = Blocks(call, around)
    blocks.start()
    for piece in own:
        found = _compute(call, piece, call.arrays["k"], call.arrays["v"], rank, 0)
        for arg in ("k", "v"):
            if arg in found:
                sums[arg].add(found[arg], (..., slice(*piece.keys), slice(None)))
        _add(call, sums, piece, rank, found)
    pending: _Return | None = None
    for hop in around:
        received = blocks.next()
        source = (rank - hop.distance) % size
        other = {
            arg: _Sum(call, x, len(hop.pieces)) for arg, x in zip("kv", received, strict=False)
        }
        for piece in hop.pieces:
            assert hop.received is not None
            first = hop.received[0]
            k, v = received
            found = _compute(call, piece, k, v, source, first)
            keys = slice(piece.keys[0] - first, piece.keys[1] - first)
            for arg in other:
                if arg in found:
                    other[arg].add(found[arg], (..., keys, slice(None)))
            _add(call, sums, piece, source, found)
        if pending is not None:
            pending.add_to(sums)
        pending = _Return(call, hop, other)
    if pending is not None:
        pending.add_to(sums)
    return {arg: sums[arg].result() for arg in call.need}


def _compute(call: Call, piece: Piece, k: Any, v: Any, source: int, first: int) -> dict[str, Any]:
    """Return the gradients of a piece by argument; `k` and `v` begin at the row `first`."""
    need = [arg for arg in call.need if arg != "sinks" or piece.sinks]
    if not need:
        return {}
    keys = piece.keys[0] - first, piece.keys[1] - first
    dout, q, out = (rows_of(call.arrays[arg], *piece.queries) for arg in ("dout", "q", "out"))
    lse, dlse = (
        None if call.arrays[arg] is None else call.arrays[arg][..., slice(*piece.queries)]
        for arg in ("lse", "dlse")
    )
    found = _attention.attention_backward(
        dout, q, rows_of(k, *keys), rows_of(v, *keys), out, lse, dlse=dlse, need=need,
        **call.of_piece(piece, source),
    )  # fmt: skip
    return dict(zip(need, found, strict=True))


def _add(
    call: Call, sums: dict[str, _Sum], piece: Piece, source: int, found: dict[str, Any]
) -> None:
    """Add what a piece gives to gradients of queries, bias and sinks."""
    if "q" in found:
        sums["q"].add(found["q"], (..., slice(*piece.queries), slice(None)))
    if "bias" in found:
        sums["bias"].add(found["bias"], call.index("bias", piece, source))
    if "sinks" in found:
        sinks = call.arrays["sinks"]
        rows = sinks.ndim > 0 and sinks.shape[-1] != 1
        sums["sinks"].add(found["sinks"], (..., slice(*piece.queries)) if rows else (...,))


class _Return:
    """Gradients on their way to the rank whose keys they belong to, and those that come here."""

    def __init__(self, call: Call, hop: Hop, other: dict[str, _Sum]) -> None:
        comm, self._found = call.comm, {}
        self._hop = hop
        need = [arg for arg in ("k", "v") if arg in call.need]
        sends, receives = [], []
        if hop.received is not None:
            source = (comm.rank - hop.distance) % comm.size
            sends = [(source, dense(other[arg].result())) for arg in need]
        if hop.sent is not None:
            begin, end = hop.sent
            for arg in need:
                x = call.arrays[arg]
                shape = (*x.shape[:-2], end - begin, x.shape[-1])
                self._found[arg] = call.xp.empty(shape, x.dtype)
            reader = (comm.rank + hop.distance) % comm.size
            receives = [(reader, x) for x in self._found.values()]
        place = f"{call.name}: gradients at distance {hop.distance}"
        self._transfer: Transfer | None = None
        if sends or receives:
            self._transfer = comm.start(sends, receives, place)

    def add_to(self, sums: dict[str, _Sum]) -> None:
        """Add what has come to the gradients of this rank's keys and values."""
        if self._transfer is not None:
            self._transfer.wait()
        for arg, x in self._found.items():
            assert self._hop.sent is not None
            sums[arg].add(x, (..., slice(*self._hop.sent), slice(None)))


class _Sum:
    """The sum of some parts of a gradient, each of some elements of it.

    It is kept in float32 if there are more than two parts, so that it is rounded once.
    """

    def __init__(self, call: Call, like: Any, parts: int) -> None:
        self._call, self._like, self._parts = call, like, parts
        self._total: Any = None
        self._real = np.dtype(np.float64 if like.dtype == np.float64 else np.float32)

    def add(self, part: Any, index: tuple[Any, ...]) -> None:
        """Add a part to the elements at `index`."""
        if self._total is None:
            if part.shape == self._like.shape:
                self._total = part
                if self._parts > 2:
                    self._total = self._call.sums.convert(part, self._real)
                return
            self._total = self._zeros()
        self._call.sums.add(self._total[index], part)

    def result(self) -> Any:
        """Return the sum in the dtype of the argument."""
        total = self._zeros() if self._total is None else self._total
        return self._call.sums.convert(total, self._like.dtype)

    def _zeros(self) -> Any:
        found = empty_laid_out(self._call.xp, self._like.shape, self._like, self._real)
        found[...] = 0
        return found


def _over_ranks(call: Call, arg: str, total: Any) -> Any:
    """Return the sum of a gradient over all ranks."""
    real = np.dtype(np.float64 if total.dtype == np.float64 else np.float32)
    own = dense(call.sums.convert(total, real))
    return over_ranks(call.comm, call.xp, own, f"{call.name}: the gradient of {arg}")
