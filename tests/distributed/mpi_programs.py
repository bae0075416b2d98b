"""Programs that `test_mpi` starts by ``mpirun``: ``python -m tests.distributed.mpi_programs NAME``.

Each process runs the same program. Hypothesis draws the same cases in all of them, and a failure of
one is a failure of all, so that they shrink it together.
"""

import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import Phase, given, settings
from mpi4py import MPI

from fa_cupy import distributed
from tests.support.distributed_cases import cases, check_attention, check_products, product_cases

TIMEOUT = 20.0


def together(comm: Any, check: Callable[..., None], case: Any) -> None:
    """Check a case; an error of one rank is raised on all."""
    error = None
    try:
        check(case, comm)
    except Exception as e:
        error = e
    texts = comm.gather(b"" if error is None else repr(error).encode(), "the test")
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text:
            raise AssertionError(f"rank {rank}: {text.decode()}")


def checked(comm: Any, strategy: Any, check: Callable[..., None]) -> Callable[[], None]:
    """Make a test of hypothesis that all ranks run together."""

    @given(strategy)
    def run(case):
        together(comm, check, case)

    return run


def cases_of_all_sizes(examples: int) -> None:
    """Check random problems with 2, 3 and 4 of the processes."""
    world = MPI.COMM_WORLD
    phases = [Phase.generate, Phase.shrink]
    few = settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, phases=phases
    )
    for size in range(2, world.size + 1):
        some = world.Split(int(world.rank < size), world.rank)
        if world.rank < size:
            comm = distributed.MpiCommunicator(some, timeout=TIMEOUT)
            for strategy, check in ((cases, check_attention), (product_cases, check_products)):
                few(checked(comm, strategy(size), check))()
        world.Barrier()
    print(f"rank {world.rank}: all are right", flush=True)


def errors() -> None:
    """See that errors and the death of one rank reach the others, and that none waits for ever."""
    world = MPI.COMM_WORLD
    x = np.zeros((2, 8, 16))
    comm = distributed.MpiCommunicator(timeout=TIMEOUT)
    try:
        distributed.attention(x, x[..., : 16 - comm.rank], x, comm=comm)
    except (ValueError, distributed.RankError) as error:
        print(f"rank {comm.rank}: {type(error).__name__}: {error}", flush=True)
    # A long record takes a second exchange.
    assert [len(y) for y in comm.gather(b"x" * (900 + 400 * comm.rank), "here")] == [
        900 + 400 * rank for rank in range(comm.size)
    ]

    # One raises after all have agreed.
    comm = distributed.MpiCommunicator(timeout=TIMEOUT)
    begin = time.monotonic()
    try:
        with comm.guard():
            if comm.rank == 1:
                raise MemoryError("no memory left")
            comm.start([], [(1, np.empty(1000))], "a ring").wait()
    except (MemoryError, distributed.RankError) as error:
        print(f"rank {comm.rank}: {type(error).__name__}: {error}", flush=True)
    assert time.monotonic() - begin < TIMEOUT / 2
    world.Barrier()

    # One does not answer.
    comm = distributed.MpiCommunicator(timeout=0.5)
    if comm.rank != 1:
        try:
            distributed.attention(x, x, x, comm=comm)
        except TimeoutError as error:
            print(f"rank {comm.rank}: {type(error).__name__}: {error}", flush=True)
        try:
            distributed.attention(x, x, x, comm=comm)
        except distributed.RankError as error:
            print(f"rank {comm.rank}: {type(error).__name__}: {error}", flush=True)
    world.Barrier()

    # One dies while another waits for it: mpirun ends all.
    comm = distributed.MpiCommunicator(timeout=TIMEOUT)
    distributed.attention(x, x, x, comm=comm)
    print(f"rank {comm.rank}: computed once", flush=True)
    if comm.rank == 1:
        os._exit(3)
    distributed.attention(x, x, x, comm=comm)
    print(f"rank {comm.rank}: computed twice", flush=True)


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    program = {"cases": cases_of_all_sizes, "errors": errors}[name]
    try:
        program(*map(int, arguments))
    except Exception:  # as ``python -m mpi4py`` does: the others would wait for this process
        traceback.print_exc()
        MPI.COMM_WORLD.Abort(1)
