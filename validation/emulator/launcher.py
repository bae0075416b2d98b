"""A launcher that runs plans on the CPU: the steps that users' calls launch, in the emulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np

from fa_cupy.gpu.driver.arguments import Arguments
from fa_cupy.gpu.plan import Step
from validation import emulator

#: Multiprocessors of the emulated device; few, so that blocks take several tiles.
MULTIPROCESSORS = 2


class EmulatorLauncher:
    """Launches the steps of plans in the emulator, on addresses of NumPy arrays.

    Parameters
    ----------
    seed, truncating : int, bool
        As for `emulator.launch`.
    sources : mapping of Path, optional
        Kernels in place of the variants' own, by their entry.
    multiprocessors : int, optional
    together : int, optional
        How many blocks of a persistent launch run at the same time.

    Attributes
    ----------
    target : str
    multiprocessors : int
    """

    target = "sm_90a"

    def __init__(
        self,
        seed: int = 0,
        truncating: bool = False,
        sources: Mapping[str, Path] = MappingProxyType({}),
        multiprocessors: int = MULTIPROCESSORS,
        together: int = 1,
    ) -> None:
        self.multiprocessors = multiprocessors
        self._how = seed, truncating
        self._sources = sources
        self._together = together

    def kernels(self, steps: Sequence[Step]) -> list[Callable[[Arguments, Any], None]]:
        """Return what runs the kernel of each step to its end."""
        return [self._kernel(step) for step in steps]

    def _kernel(self, step: Step) -> Callable[[Arguments, Any], None]:
        seed, truncating = self._how
        row, together = step.variant, self._together if step.persistent else 1
        source = self._sources.get(row.entry)

        def run(arguments: Arguments, _: Any = None) -> None:
            emulator.launch_row(
                row, step.grid, arguments.values, seed, source, truncating, together
            )

        return run

    @staticmethod
    def tensor_map(pointer: int, dtype: str, *geometry: Any) -> bytes | None:
        """Return the emulator's tensor map."""
        return emulator.tensor_map(pointer, *geometry).tobytes()

    @staticmethod
    def workspace(size: int) -> Any:
        """Return memory that holds NaN, and words that are far from 0."""
        space = np.full(size // 4 + 64, 0x7FC0DEAD, np.uint32)
        aligned = space[-space.ctypes.data % 256 // 4 :]
        return SimpleNamespace(ptr=aligned.ctypes.data, owner=space)
