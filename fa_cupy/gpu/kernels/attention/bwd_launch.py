"""How a plan launches backward kernels, one after another in one workspace."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from cupy.cuda import get_current_stream

from fa_cupy.gpu.driver import compile
from fa_cupy.gpu.driver.devices import multiprocessors, target_of_device
from fa_cupy.gpu.driver.launch import Launch
from fa_cupy.gpu.driver.tensor_map_cache import MappedArguments, Maps
from fa_cupy.gpu.kernels.attention.bwd_params import MAPPED, Filled, Step

_pack = struct.Struct("=Q").pack_into


class _StepLaunch:
    """One launch of a call: the kernel, and where its struct wants addresses."""

    __slots__ = ("arrays", "launch", "maps", "params", "places")

    def __init__(self, step: Step, dtype: str, device: int) -> None:
        row, fields = step.row, step.params.dtype.fields
        assert fields is not None
        kernel = compile.load(row, str(target_of_device(device)), device)
        # Blocks that share out work take it in order, and wait for none that no block has taken.
        grid = min(multiprocessors(device), step.blocks) if step.shares else step.blocks
        self.launch = Launch(kernel, grid, row.threads, row.shared_bytes)
        self.params = step.params
        self.arrays = [(_place(step.params.dtype, at), name) for at, name in step.arrays.items()]
        self.places = [(_place(step.params.dtype, at), n) for at, n in step.places.items()]
        self.maps: Maps | None = None
        if step.maps:
            at = [fields[f"{name}_map"][1] for name in MAPPED]
            self.maps = Maps(dtype, [step.maps[name] for name in MAPPED], at)


def _place(dtype: np.dtype[Any], path: str) -> int:
    """Return where a field of a struct is, which may be ``outer.inner``."""
    found = 0
    for name in path.split("."):
        assert dtype.fields is not None
        dtype, at = dtype.fields[name][:2]
        found += at
    return found


class Launches:
    """The launches of a call.

    Parameters
    ----------
    filled : Filled
        From `fill` of `fa_cupy.gpu.kernels.attention.bwd_sm90_params` or of `bwd_sm80_params`.
    dtype : str
        Name of the dtype of q, k and v.
    device : int

    Attributes
    ----------
    rows : tuple of BackwardVariant
    workspace_bytes : int
    """

    __slots__ = ("_pool", "_steps", "rows", "workspace_bytes")

    def __init__(self, filled: Filled, dtype: str, device: int) -> None:
        self.rows = tuple(step.row for step in filled.steps)
        self.workspace_bytes = filled.workspace_bytes
        self._steps = [_StepLaunch(step, dtype, device) for step in filled.steps]
        # Structs of all launches that no thread is using; a launch copies one before it returns.
        self._pool: list[list[MappedArguments]] = []

    def __call__(self, pointers: dict[str, int], workspace: int) -> bool:
        """Launch with these addresses; False, and nothing launched, where one has no tensor map.

        Parameters
        ----------
        pointers : dict of int
            By the names of the arrays; that of ``dlse`` may be 0. Those of what a mask holds are
            named as in `fa_cupy.gpu.masks.block_tables.Tables.pointers`.
        workspace : int
            Address of `workspace_bytes` bytes, a multiple of 256, that nothing else uses until
            what is launched has run.
        """
        mapped = tuple(pointers[name] for name in MAPPED)
        try:
            every = self._pool.pop()
        except IndexError:
            every = [MappedArguments(step.params) for step in self._steps]
        try:
            for step, arguments in zip(self._steps, every, strict=True):
                new = step.maps is not None and arguments.mapped != mapped
                if new and not step.maps.write(arguments, mapped):  # type: ignore[union-attr]
                    return False
                for at, name in step.arrays:
                    _pack(arguments.memory, at, pointers[name])
                for at, place in step.places:
                    _pack(arguments.memory, at, workspace + place)
            stream = get_current_stream().ptr
            for step, arguments in zip(self._steps, every, strict=True):
                step.launch(arguments, stream)
        finally:
            self._pool.append(every)
        return True
