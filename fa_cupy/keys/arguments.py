"""The arguments of a call that say where its keys are, from what the caller gives to the backend.

These are key lengths, a page table and offsets. Those in the memory of the host may go with arrays
on a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fa_cupy._bitmask import BitMask
from fa_cupy.core import backends, dispatch
from fa_cupy.keys import layout, offsets
from fa_cupy.keys.layout import KeyArrays


class Places:
    """Those of one call.

    Parameters
    ----------
    name : str
        The public function that errors speak of.
    mask_arg : str
        Its name for the mask.
    **given
        `k_lengths`, `page_table`, `q_offsets` and `k_offsets`; most are None.

    Attributes
    ----------
    options : dict of array
        The arguments that are given, by name: as native arrays or NumPy's, after `native`.
    """

    def __init__(self, name: str, mask_arg: str, **given: Any) -> None:
        self._name, self._mask_arg = name, mask_arg
        self.options = {arg: x for arg, x in given.items() if x is not None}
        self._masks: tuple[BitMask, ...] | None = None
        self._host: dict[str, Any] = {}
        self._keys = KeyArrays()
        offsets.refuse(name, [*self.options])

    def __bool__(self) -> bool:
        return bool(self.options)

    def without_masks(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """Return arrays that end with the mask, without a list of masks."""
        if "q_offsets" in self.options:
            self._masks = offsets.masks_of(self._name, self._mask_arg, arrays[-1])
        return tuple(arrays) if self._masks is None else (*arrays[:-1], None)

    def separated(self, arrays: Sequence[Any]) -> dict[str, Any]:
        """Return the arguments that are to be of the library and on the device of q.

        `arrays` begin with q, and end with what `sparse_inputs` has for bias and mask.
        """
        if not self:
            return {}
        dispatch.refuse_bits(self._name, arrays, self.options)
        given, self._host = layout.separated(self._name, arrays[0], self.options)
        return given

    def native(self, by_arg: Mapping[str, Any]) -> None:
        """Take native arrays, by argument, in place of those that `separated` returned."""
        self.options = {arg: self._host.get(arg, by_arg.get(arg)) for arg in self.options}

    def check(self, problem: Any) -> None:
        """Raise for numbers on the host that are out of range, and for wrong masks."""
        lengths = problem.q_len, problem.k_len
        if problem.offsets is None:
            self._keys = KeyArrays(*(self.options.get(x) for x in ("k_lengths", "page_table")))
            layout.check_numbers(self._name, problem, self._keys)
            return
        self._keys = offsets.key_arrays(*(self.options.get(x) for x in ("q_offsets", "k_offsets")))
        offsets.check_numbers(self._name, lengths, self._keys)
        if self._masks is not None:
            offsets.check_masks(self._name, self._mask_arg, problem, self._keys, self._masks)

    def inputs(self, inputs: Sequence[Any]) -> list[Any]:
        """Return arrays that end with the mask, with the list of masks."""
        return [*inputs] if self._masks is None else [*inputs[:-1], self._masks]

    def for_backend(self, backend: str) -> dict[str, Any]:
        """Return what a backend's function gets; the device of its arrays must be current."""
        if not self:
            return {}
        if backend != "numpy":
            for arg, x in self.options.items():
                if isinstance(x, np.ndarray) and x.ndim:
                    backends.gpu("workspace").refuse(self._name, f"{arg} is copied from the host")
        found = {"keys": layout.on_device(backend, self._keys)}
        arrays = self._keys.lengths, self._keys.q_offsets
        if backend != "numpy" and any(isinstance(x, np.ndarray) for x in arrays):
            found["on_host"] = self._keys
        return found
