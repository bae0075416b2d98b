"""Attention over a sequence that is spread over ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from fa_cupy.core.arrays import empty_laid_out
from fa_cupy.distributed import calls, heads
from fa_cupy.distributed.blocks import Blocks
from fa_cupy.distributed.calls import Call
from fa_cupy.distributed.communicator import Communicator, require
from fa_cupy.distributed.order import rows_of
from fa_cupy.distributed.pieces import Piece


def attention(
    q: Any,
    k: Any,
    v: Any,
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
    precision: str | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention over a sequence of which each rank has a part.

    All ranks call this at the same time, each with its part of the queries, keys and values. Each
    gets the output of its own queries, which attend to the keys of all ranks.

    Parameters
    ----------
    q : array, shape (..., Lq, D)
        The queries of this rank: an array of NumPy, or on a GPU of CuPy or a library that supports
        DLPack, of any dtype of `fa_cupy.attention`. Lq may differ from rank to rank in contiguous
        order (see `order`).
    k : array, shape (..., Lk, D)
        The keys of this rank.
    v : array, shape (..., Lk, Dv)
        The values of this rank. Batch axes and heads are as in `fa_cupy.attention`.
    bias : array, broadcastable to (..., Lq, all keys), optional
        Added to the scores: the rows of this rank's queries. If all ranks have one row, and some
        rank has more than one query, it is one row for all queries, the same on all ranks. Columns
        are the keys of all ranks, in the order of their positions. Not a sparse matrix.
    mask : array of bool, broadcastable to (..., Lq, all keys), or BitMask, optional
        True where a query may attend to a key; rows and columns as those of `bias`.
    comm : Communicator
        The communicator of this rank: one from `local`, an `MpiCommunicator` or an
        `NcclCommunicator`.
    plan : {"ring", "heads"}, optional
        How the ranks share the work: see Notes. By default the way that `plan` estimates to be
        faster, with the speed of an H200 for arrays on a GPU, and that of two processor cores for
        NumPy arrays.
    order : {"contiguous", "zigzag"}
        Which rows of the sequence the ranks have: see `split`. In zigzag order the parts have to
        have the lengths that `split` gives them.
    scale : float, optional
    is_causal : bool
    window : (left, right), optional
    softcap : float
        As in `fa_cupy.attention`, the same on all ranks. Positions are those in the whole sequence.
        `is_causal` and `window` need as many keys as queries on each rank.
    sinks : array, broadcastable to (..., Lq), optional
        Those of the queries of this rank. Sinks that do not depend on the query, as those of shape
        (heads, 1), must be the same on all ranks.
    precision : {None, "tf32"}
        As in `fa_cupy.attention`.
    return_lse : bool
        Whether to return the log-sum-exp of each row of scores too.

    Returns
    -------
    out : array, shape (..., Lq, Dv)
        Of the queries of this rank; of the library, the dtype and the memory layout of `q`.
    lse : array, shape (..., Lq)
        Only with `return_lse`: float32, or float64 for float64 input.

    Raises
    ------
    TypeError, ValueError
        With a message that names the argument, before any array is sent. If the arguments of one
        rank are wrong, the others raise a `RankError`. Arguments that must be the same on all ranks
        and differ are a ValueError on all ranks.
    RankError, TimeoutError
        If another rank has failed, or does not answer within the time-out of `comm`.
    NotImplementedError
        While a stream is captured into a CUDA graph.

    See Also
    --------
    attention_backward : its gradients.
    split : the part of a rank.
    plan : which way is faster, and why.

    Notes
    -----
    With ``plan="ring"``, as in ring attention [1]_, a rank receives the keys and values of the
    other ranks, one rank at a time, while it computes with those that it already has. The results
    are merged by their log-sum-exps in float32 (float64 for float64 input), in the order of the
    distance between the ranks. A rank receives only keys that some of its queries see. With
    ``plan="heads"``, as in DeepSpeed-Ulysses [2]_, the ranks exchange their rows of all heads for
    all rows of some heads, and each computes attention for these heads. The numbers of heads must
    then be multiples of the number of ranks, and bias, mask and sinks must have one row for all
    queries.

    In both ways, results have the same bits in each run. Those of the ring differ from those of one
    GPU by rounding, as results of `fa_cupy.merge_attention` do.

    In zigzag order the ranks have the same work where attention is causal; in contiguous order the
    last rank has almost twice the average.

    References
    ----------
    .. [1] H. Liu, M. Zaharia and P. Abbeel, "Ring attention with blockwise transformers for
       near-infinite context", ICLR, 2024 (arXiv:2310.01889, 2023).
    .. [2] S. A. Jacobs et al., "DeepSpeed Ulysses: system optimizations for enabling training of
       extreme long sequence Transformer models", arXiv:2309.14509, 2023.

    Examples
    --------
    >>> import numpy as np
    >>> import fa_cupy
    >>> from fa_cupy import distributed
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 1000, 64))
    >>> def part(comm):
    ...     own = [distributed.split(x, comm, order="zigzag") for x in (q, k, v)]
    ...     return distributed.attention(*own, comm=comm, order="zigzag", is_causal=True)
    >>> with distributed.local(4) as ranks:
    ...     out = distributed.join(ranks(part), order="zigzag")
    >>> bool(np.allclose(out, fa_cupy.attention(q, k, v, is_causal=True)))
    True
    """
    given = {"q": q, "k": k, "v": v, "bias": bias, "mask": mask, "sinks": sinks}
    with require("attention", comm).turn():
        call = calls.prepare(
            "attention", comm, given, plan=plan, order=order, is_causal=is_causal, window=window,
            scale=scale, softcap=softcap, precision=precision, return_lse=return_lse,
        )  # fmt: skip
        with comm.guard(), call.native.context:
            solve = heads.attention if call.way == "heads" else _ring
            out, lse = (call.native.give_back(x) for x in solve(call))
    return (out, lse) if return_lse else out


def _ring(call: Call) -> tuple[Any, Any]:
    """Compute own queries with the keys of one rank after the other."""
    rank, size = call.comm.rank, call.comm.size
    own, around = calls.own_pieces(call.places, rank), calls.hops(call.places, rank)
    merged = _Merged(call, own, sum(len(hop.pieces) for hop in around))
    blocks = Blocks(call, around)
    blocks.start()
    for piece in own:
        merged.add(piece, call.arrays["k"], call.arrays["v"], rank, 0)
    for hop in around:
        received = blocks.next()
        for piece in hop.pieces:
            assert hop.received is not None
            k, v = received
            merged.add(piece, k, v, (rank - hop.distance) % size, hop.received[0])
    return merged.results()


class _Merged:
    """Output and log-sum-exp of all queries of a rank, over the keys so far.

    Sums of more than two parts are kept in float32, so that they are rounded once.
    """

    def __init__(self, call: Call, own: tuple[Piece, ...], more: int) -> None:
        self._call = call
        self._first = [piece for piece in own if piece.sinks]
        self._wide = len(own) - len(self._first) + more > 1
        self._out: Any = None
        self._lse: Any = None

    def add(self, piece: Piece, k: Any, v: Any, source: int, first: int) -> None:
        """Compute a piece and merge it; `k` and `v` begin at the row `first`."""
        call, begin, end = self._call, *piece.queries
        if piece.sinks and len(self._first) == 1:
            self._out, self._lse = call.compute(piece, k, v, source, first)
            self._widen()
            return
        if piece.sinks:  # one of some, which have all queries together
            if self._out is None:
                self._out, self._lse = self._empty()
            rows = self._out[..., begin:end, :]
            self._lse[..., begin:end] = call.compute(piece, k, v, source, first, rows)[1]
            if piece is self._first[-1]:
                self._widen()
            return
        out, lse = call.compute(piece, k, v, source, first)
        if self._out is None:  # queries of no row
            return
        call.sums.merge(rows_of(self._out, begin, end), self._lse[..., begin:end], out, lse)

    def results(self) -> tuple[Any, Any]:
        """Return output and log-sum-exp."""
        if self._out is None:
            self._out, self._lse = self._empty()
        return self._call.sums.convert(self._out, self._call.arrays["q"].dtype), self._lse

    def _widen(self) -> None:
        if self._wide and self._out.dtype != np.float64:
            self._out = self._call.sums.convert(self._out, np.dtype(np.float32))

    def _empty(self) -> tuple[Any, Any]:
        shape, q = self._call.out_shape, self._call.arrays["q"]
        dtype = np.float64 if q.dtype == np.float64 else np.float32
        out = empty_laid_out(self._call.xp, shape, q, q.dtype)
        return out, self._call.xp.empty(shape[:-1], dtype)
