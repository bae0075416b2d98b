"""Threads of the BLAS library: `make test` leaves each test process one, for there are several."""

import threadpoolctl


def two_threads():
    """As a fixture: two for each test, since the CPU path takes as many as BLAS may have."""
    libraries = threadpoolctl.ThreadpoolController().select(user_api="blas").lib_controllers
    before = [lib.get_num_threads() for lib in libraries]
    for lib in libraries:
        lib.set_num_threads(max(2, lib.get_num_threads()))
    yield
    for lib, threads in zip(libraries, before, strict=True):
        lib.set_num_threads(threads)
