"""Keys and values of other ranks, which come while those at hand are computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fa_cupy.distributed.calls import Call, Hop
from fa_cupy.distributed.communicator import Transfer
from fa_cupy.distributed.order import dense, rows_of


class Blocks:
    """The keys and values of the ranks at some hops, in two buffers that take turns.

    A transfer begins one hop before the arrays are needed. It writes to the buffer of the hop
    before, which was computed by then.

    Parameters
    ----------
    call : Call
    around : sequence of Hop
        In their order.
    """

    def __init__(self, call: Call, around: Sequence[Hop]) -> None:
        self._call, self._around = call, around
        self._arrays = [call.arrays[arg] for arg in "kv"]
        rows = [hop.received[1] - hop.received[0] for hop in around if hop.received]
        sizes = [math.prod(self._shape(x, max(rows, default=0))) for x in self._arrays]
        turns = min(2, len(rows))
        self._buffers = [
            [call.xp.empty(n, x.dtype) for n, x in zip(sizes, self._arrays, strict=True)]
            for _ in range(turns)
        ]
        self._sent: dict[tuple[int, int], list[Any]] = {}
        self._coming: tuple[Transfer | None, list[Any]] | None = None
        self._started = self._received = 0

    def start(self) -> None:
        """Start the transfer of the first hop that is not started."""
        if self._started == len(self._around):
            return
        hop = self._around[self._started]
        self._started += 1
        comm, found = self._call.comm, []
        sends, receives = [], []
        if hop.sent is not None:
            to = (comm.rank + hop.distance) % comm.size
            sends = [(to, x) for x in self._part(hop.sent)]
        if hop.received is not None:
            source = (comm.rank - hop.distance) % comm.size
            buffers = self._buffers[self._received % len(self._buffers)]
            self._received += 1
            for flat, x in zip(buffers, self._arrays, strict=True):
                shape = self._shape(x, hop.received[1] - hop.received[0])
                found.append(flat[: math.prod(shape)].reshape(shape))
            receives = [(source, x) for x in found]
        transfer = None
        if sends or receives:
            place = f"{self._call.name}: keys at distance {hop.distance}"
            transfer = comm.start(sends, receives, place)
        self._coming = transfer, found

    def next(self) -> list[Any]:
        """Return the keys and values of the next hop, and start the transfer of the one after it.

        The list is empty where none are received.
        """
        assert self._coming is not None, "a transfer was started"
        transfer, found = self._coming
        self.start()
        if transfer is not None:
            transfer.wait()
        return found

    def _part(self, rows: tuple[int, int]) -> list[Any]:
        if rows not in self._sent:
            self._sent[rows] = [dense(rows_of(x, *rows)) for x in self._arrays]
        return self._sent[rows]

    @staticmethod
    def _shape(x: Any, rows: int) -> tuple[int, ...]:
        return (*x.shape[:-2], rows, x.shape[-1])
