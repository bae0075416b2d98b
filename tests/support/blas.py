"""Threads of the BLAS library: `make test` leaves each test process one, for there are several."""

import os
from contextlib import contextmanager
from unittest import mock

import threadpoolctl

from fa_cupy.cpu import blas


def of_others():
    """The BLAS libraries that are not the CPU path's own."""
    own = None if blas.LIBRARY is None else os.path.realpath(blas.LIBRARY.path)
    found = threadpoolctl.ThreadpoolController().select(user_api="blas").lib_controllers
    return [library for library in found if os.path.realpath(library.filepath) != own]


def numbers():
    """How many threads each of them has now."""
    return [library.get_num_threads() for library in of_others()]


def two_threads():
    """As a fixture: two for each test, since the CPU path takes as many as BLAS may have."""
    libraries, before = of_others(), numbers()
    with mock.patch.object(os, "sched_getaffinity", return_value=range(64), create=True):
        for library in libraries:
            library.set_num_threads(max(2, library.get_num_threads()))
        yield
    for library, threads in zip(libraries, before, strict=True):
        library.set_num_threads(threads)


@contextmanager
def threads(number):
    """So many threads, whatever the machine has."""
    with (
        mock.patch.object(os, "sched_getaffinity", return_value=range(64), create=True),
        threadpoolctl.threadpool_limits(number, user_api="blas"),
    ):
        yield
