"""Tensor maps of a plan: made once for each pointer, written into parameter structs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fa_cupy.gpu.driver.launch import Arguments, bind_context
from fa_cupy.gpu.driver.tensor_map import LayoutError, encode_tiled
from fa_cupy.gpu.kernels.tensor_maps import MAP_BYTES, Geometry

_MOST_MAPS = 256  # of one array of one plan; a training loop meets the same few pointers


class MappedArguments(Arguments):
    """A parameter struct, and the pointers that its tensor maps are for, if all are there."""

    __slots__ = ("mapped", "memory")

    def __init__(self, values: Any) -> None:
        super().__init__(values)
        self.memory = memoryview(self.bytes)  # type: ignore[arg-type]
        self.mapped: tuple[int, ...] | None = None


class Maps:
    """The tensor maps of the arrays of a plan, for the pointers that it met lately.

    Parameters
    ----------
    dtype : str
    geometry : sequence of Geometry
        Of the arrays.
    places : sequence of int
        Bytes from the start of a struct to the map of each array.
    """

    __slots__ = ("_dtype", "_geometry", "_places", "known")

    def __init__(self, dtype: str, geometry: Sequence[Geometry], places: Sequence[int]) -> None:
        self._dtype = dtype
        self._geometry = geometry
        self._places = [slice(place, place + MAP_BYTES) for place in places]
        self.known: list[dict[int, bytes | None]] = [{} for _ in geometry]

    def write(self, arguments: MappedArguments, pointers: tuple[int, ...]) -> bool:
        """Write the maps of these pointers; False where one cannot have a map."""
        old = arguments.mapped
        arguments.mapped = None  # until all maps are there
        for i, pointer in enumerate(pointers):
            if old is None or pointer != old[i]:
                known = self.known[i]
                encoded = known[pointer] if pointer in known else self._encoded(i, pointer)
                if encoded is None:
                    return False
                arguments.memory[self._places[i]] = encoded
        arguments.mapped = pointers
        return True

    def _encoded(self, which: int, pointer: int) -> bytes | None:
        if pointer & 15:
            return None
        bind_context()
        try:
            encoded = encode_tiled(pointer, self._dtype, *self._geometry[which]).tobytes()
        except LayoutError:
            encoded = None
        known = self.known[which]
        if len(known) >= _MOST_MAPS:
            known.clear()
        known[pointer] = encoded
        return encoded
