"""The parameter struct of a kernel, where a launch finds it."""

from __future__ import annotations

from typing import Any

import numpy as np


class Arguments:
    """A kernel's parameter struct, which its launch passes by value.

    Parameters
    ----------
    values : numpy.ndarray, of size 1
        The struct; copied.

    Attributes
    ----------
    values : numpy.ndarray
        The struct that launches pass.
    memory : memoryview
        Its bytes, for ``struct.pack_into``.
    address : int
        Of the array of one pointer that ``cuLaunchKernel`` takes.
    mapped : tuple of int or None
        The pointers that the tensor maps in the struct are for, if all of them are there.
    """

    __slots__ = ("_pointers", "address", "mapped", "memory", "values")

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.values = values.copy()
        self.memory = memoryview(self.values.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        self._pointers = np.array([self.values.ctypes.data], np.uint64)
        self.address = self._pointers.ctypes.data
        self.mapped: tuple[int, ...] | None = None
