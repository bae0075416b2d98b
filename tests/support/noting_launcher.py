"""A launcher of plans that launches nothing and notes what it gets."""

from types import SimpleNamespace

import numpy as np

WORKSPACE = 0x10000


class NotingLauncher:
    """Notes launches, tensor maps and workspaces.

    Attributes
    ----------
    launched : list of tuple
        The step and a copy of its struct, of size 1, for each launch.
    encoded : list of int
        The addresses of the tensor maps, each of which consists of 16 copies of its address.
    taken : list of int
        Bytes of workspaces, all of which begin at `WORKSPACE`.
    refused : set of int
        Addresses that have no tensor map.
    """

    target = "sm_90a"

    def __init__(self, multiprocessors=10, refused=()):
        self.multiprocessors = multiprocessors
        self.launched, self.encoded, self.taken = [], [], []
        self.refused = set(refused)

    def kernels(self, steps):
        return [self.kernel(step) for step in steps]

    def kernel(self, step):
        return lambda arguments, _: self.launched.append((step, arguments.values.copy()))

    def tensor_map(self, pointer, dtype, *geometry):
        self.encoded.append(pointer)
        return None if pointer in self.refused else np.full(16, pointer, np.uint64).tobytes()

    def workspace(self, size):
        self.taken.append(size)
        return SimpleNamespace(ptr=WORKSPACE)
