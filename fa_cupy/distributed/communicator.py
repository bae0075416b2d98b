"""What ranks need of each other: records, arrays, and errors that reach all of them."""

from __future__ import annotations

import contextlib
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from fa_cupy.core import checks


class RankError(RuntimeError):
    """Another rank has failed, or has ended while this one waits for it."""


class Transfer(Protocol):
    """Arrays on their way, as `Communicator.start` returns them."""

    def wait(self) -> None:
        """Let what follows on this rank use all of them.

        On a GPU the current stream waits, not the host. Transfers are waited for in the order in
        which they were started.
        """

    def arrive(self) -> None:
        """Let what follows on this rank use what it receives, as `wait` does.

        Other ranks may still read the arrays that this one sends, so the caller must not write to
        them. The host does not wait for slower ranks unless it needs their data.
        """


class Communicator(ABC):
    """What the functions of `fa_cupy.distributed` need of a group of ranks.

    Attributes
    ----------
    rank : int
        The number of this rank, from 0 on.
    size : int
        The number of ranks.
    timeout : float
        Seconds after which waiting for another rank is an error.
    """

    rank: int
    size: int
    timeout: float
    #: Whether a rank that the last `gather` heard of goes on without waiting for this one.
    others_go_on: bool = False

    @abstractmethod
    def gather(self, record: bytes, place: str) -> list[bytes]:
        """Return the records of all ranks, by rank; all of them call this.

        Parameters
        ----------
        record : bytes
            That of this rank, of any length.
        place : str
            The name of the operation, for error messages.
        """

    @abstractmethod
    def start(
        self,
        sends: Sequence[tuple[int, Any]],
        receives: Sequence[tuple[int, Any]],
        place: str,
    ) -> Transfer:
        """Start to send arrays to ranks, and to receive arrays from ranks.

        Parameters
        ----------
        sends, receives : sequence of (int, array)
            Each with the other rank. The arrays are dense in C order, and must not be changed until
            `Transfer.wait` has returned. What a rank sends to another one arrives in that order, in
            arrays of the same size.
        place : str
            The name of the operation, for error messages.
        """

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Tell all ranks that this one cannot go on: they raise a `RankError` where they wait."""

    def announce(self, record: bytes, place: str) -> None:
        """Send the record of a call to all ranks, and compare it with their records.

        A communicator may let this rank go on before the records of others have come. It then
        compares each of them before it uses anything else that comes from that rank.

        Parameters
        ----------
        record : bytes
            That of this rank.
        place : str
            The name of the operation, for error messages.

        Raises
        ------
        RankError, ValueError
            If the records differ.
        """
        compare(place, self.rank, dict(enumerate(self.gather(record, place))))

    def turn(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which other ranks of the same process wait until this one waits.

        It is for threads that only queue work on GPUs: without it, Python would switch between them
        at each call of CUDA. For other ranks it does nothing.
        """
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Return a context whose errors reach the other ranks."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise


class Facts(NamedTuple):
    """What the ranks of a call compare, before any array is sent unless a call is announced.

    Attributes
    ----------
    shared : mapping of str
        What has to be the same on all ranks, by argument.
    own : object
        What each rank needs to know of the others.
    """

    shared: Mapping[str, Any]
    own: Any


def require(name: str, comm: Any, arg: str = "comm") -> Communicator:
    """Return `comm` if it is a communicator with a valid rank; raise an error otherwise."""
    if not isinstance(comm, Communicator):
        raise TypeError(
            f"{name}: {arg} is {checks.show(comm)}, want a communicator of fa_cupy.distributed "
            "(that of local(n), an MpiCommunicator or an NcclCommunicator)"
        )
    rank, size = (getattr(comm, fact, None) for fact in ("rank", "size"))
    if not checks.is_int(rank) or not checks.is_int(size):
        raise TypeError(
            f"{name}: {arg} has rank {checks.show(rank)} and size {checks.show(size)}, want ints"
        )
    if not 0 <= comm.rank < comm.size:
        raise ValueError(f"{name}: {arg} has rank {rank} and size {size}, want 0 <= rank < size")
    return comm


def record_of(name: str, facts: Facts) -> bytes:
    """Return what a rank tells the others of its call."""
    return pickle.dumps((name, None, *facts))


def agree(
    comm: Communicator, name: str, describe: Callable[[], Facts | bytes], later: bool = False
) -> list[Any]:
    """Return `Facts.own` of all ranks, after all of them have seen that their calls match.

    An error of `describe` on one rank is raised on all: there as it is, elsewhere as a `RankError`.
    The ranks decide by the records of all, so that none of them waits for one that has raised.

    Parameters
    ----------
    comm : Communicator
    name : str
        The public function that errors speak of.
    describe : callable
        Checks the arguments of this rank and returns its `Facts`, or `record_of` them.
    later : bool, optional
        Whether this rank may go on before it has heard of the others (`Communicator.announce`).
        Nothing is returned then.
    """
    error: Exception | None = None
    try:
        facts = describe()
        record = facts if isinstance(facts, bytes) else record_of(name, facts)
    except Exception as e:
        error = e
        record = pickle.dumps((name, f"{type(error).__name__}: {error}", {}, None))
    if later:
        try:
            comm.announce(record, name)
        except (RankError, ValueError):
            if error is None:
                raise
        if error is not None:
            raise error
        return []
    records = comm.gather(record, name)
    try:
        if error is not None:
            raise error
        return compare(name, comm.rank, dict(enumerate(records)))
    except Exception as found:
        if comm.others_go_on:  # what comes from them next is not what this rank will ask for
            comm.fail(found)
        raise


def compare(name: str, rank: int, records: Mapping[int, bytes]) -> list[Any]:
    """Return `Facts.own` of ranks, whose calls have to match.

    Parameters
    ----------
    name : str
        The public function that this rank is in.
    rank : int
        This rank.
    records : mapping of bytes
        From `record_of`, by rank in ascending order.

    Raises
    ------
    RankError
        If one is in another function, or has raised an error.
    ValueError
        If their arguments differ where they have to be the same.
    """
    mine = records[rank]
    if all(other == mine for other in records.values()):
        return [pickle.loads(mine)[3]] * len(records)
    found = {number: pickle.loads(other) for number, other in records.items()}
    for number, (other, text, _, _) in found.items():
        if other != name:
            raise RankError(f"{name}: rank {number} is in {other}, rank {rank} in {name}")
        if text is not None:
            raise RankError(f"{name}: rank {number} has raised {text}")
    lowest = min(found)
    first = found[lowest][2]
    for number, (_, _, shared, _) in found.items():
        for arg, value in shared.items():
            if value != first[arg]:
                raise ValueError(
                    f"{name}: {arg} is {checks.show(first[arg])} on rank {lowest} and "
                    f"{checks.show(value)} on rank {number}, want the same on all ranks"
                )
    return [own for _, _, _, own in found.values()]


def overdue(place: str, rank: int, timeout: float, other: int | None = None) -> TimeoutError:
    """Return the error of a rank that waits for too long."""
    awaited = "other ranks" if other is None else f"rank {other}"
    return TimeoutError(
        f"{place}: rank {rank} has waited {timeout:g} s for {awaited}, which may have ended or be "
        "in another function (the argument `timeout` of the communicator sets this time)"
    )


def over_ranks(comm: Communicator, xp: Any, own: Any, place: str) -> Any:
    """Return the sum of arrays of all ranks, in the order of these; `own` is that of this one."""
    others = [(comm.rank + i) % comm.size for i in range(1, comm.size)]
    parts = {rank: xp.empty(own.shape, own.dtype) for rank in others}
    comm.start([(rank, own) for rank in others], list(parts.items()), place).wait()
    parts[comm.rank] = own
    found = parts[0].copy()
    with np.errstate(all="ignore"):
        for rank in range(1, comm.size):
            found += parts[rank]
    return found
