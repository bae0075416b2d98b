"""How a plan launches ``fwd_sm90``: tensor maps for its pointers, and a counter for its tiles."""

from __future__ import annotations

import itertools
import os
from typing import Any

from cupy.cuda import alloc, get_current_stream, runtime

from fa_cupy._check import Problem, View
from fa_cupy.gpu import compile
from fa_cupy.gpu.devices import multiprocessors, target_of_device
from fa_cupy.gpu.fwd_sm80 import FwdSm80
from fa_cupy.gpu.launch import Arguments, Launch, bind_context
from fa_cupy.gpu.params import pack_head
from fa_cupy.gpu.params_sm90 import FWD_SM90_PARAMS, MAP_BYTES, MAPPED, Part, fill, pack_schedule
from fa_cupy.gpu.tensor_map import LayoutError, encode_tiled
from fa_cupy.gpu.variants import Variant

_COMMON_AT = FWD_SM90_PARAMS.fields["common"][1] if FWD_SM90_PARAMS.fields else 0
_SCHEDULE_AT = FWD_SM90_PARAMS.fields["schedule"][1] if FWD_SM90_PARAMS.fields else 0
_MAPS_AT = [slice(MAP_BYTES * i, MAP_BYTES * (i + 1)) for i in range(len(MAPPED))]
_COUNTER_BYTES = 16
_MOST_MAPS = 256  # of one array of one plan; a training loop meets the same few pointers

# One number for each launch. It starts where no other process did, because the memory that a
# counter gets may hold what another one left. Never 0, and `next` is one step to other threads.
_marks = itertools.count(int.from_bytes(os.urandom(8), "little") >> 1 | 1)


class MappedArguments(Arguments):
    """A parameter struct, and the pointers that its tensor maps are for."""

    __slots__ = ("mapped", "memory")

    def __init__(self, values: Any) -> None:
        super().__init__(values)
        self.memory = memoryview(self.bytes)  # type: ignore[arg-type]
        self.mapped = (0, 0, 0, 0)


class FwdSm90:
    """The launches of a problem by one row of the table.

    Parameters
    ----------
    problem : Problem
        One that `fa_cupy.gpu.params_sm90.takes` accepts.
    out : View
        Of the output, over ``problem.batch``.
    row, other : Variant
        The row of the table, and the one for pointers that tensor maps cannot have.
    device : int

    Attributes
    ----------
    row : Variant
    q_tiles : int
        Tiles of query rows in one batch entry, of all heads that share them.
    launches : list
        (`Part`, a `Launch` of a block for each tile or of one for each multiprocessor, None or a
        `Launch` of a block for each tile where they are more).
    """

    __slots__ = (
        "_dtype", "_geometry", "_known", "_other", "_other_made", "_params", "_pool", "launches",
        "q_tiles", "row",
    )  # fmt: skip

    def __init__(
        self, problem: Problem, out: View, row: Variant, other: Variant, device: int
    ) -> None:
        kernel = compile.load(row, str(target_of_device(device)), device)
        self.row = row
        self._other_made: FwdSm80 | None = None
        self._other = problem, out, other, device
        self._dtype = problem.dtype.name
        self._params, maps, parts = fill(problem, out, row.tile_m, row.tile_n)
        self.q_tiles = int(self._params["common"]["q_tiles"][0])
        self._geometry = [maps[name] for name in MAPPED]
        self._known: list[dict[int, bytes | None]] = [{} for _ in MAPPED]
        # Parameter structs that no thread is using; a launch copies one before it returns.
        self._pool: list[MappedArguments] = []
        self.launches: list[tuple[Part, Launch, Launch | None]] = []
        most = multiprocessors(device)
        for part in parts:
            few, all_tiles = (
                Launch(kernel, blocks, row.threads, row.shared_bytes)
                for blocks in (min(most, part.tiles), part.tiles)
            )
            self.launches.append((part, few, all_tiles if most < part.tiles else None))

    def __call__(self, pointers: tuple[int, ...]) -> None:
        """Launch with these addresses, in the order of `fa_cupy.gpu.params.POINTERS`."""
        q, k, v, _, _, out, _, _ = pointers
        try:
            arguments = self._pool.pop()
        except IndexError:
            arguments = MappedArguments(self._params)
        mapped = (q, k, v, out)
        if arguments.mapped != mapped and not self._map(arguments, mapped):
            self._pool.append(arguments)
            self.for_any_pointers()(pointers)
            return
        memory = arguments.memory
        for (first, *numbers), launch, all_tiles in self.launches:
            pack_head(memory, _COMMON_AT, *pointers, first, 1)
            if all_tiles is None:
                pack_schedule(memory, _SCHEDULE_AT, 0, 0, *numbers)
                launch(arguments)
            elif runtime.streamIsCapturing(get_current_stream().ptr):
                # What a graph records may run at any time, beside itself even: it gets no counter.
                pack_schedule(memory, _SCHEDULE_AT, 0, 0, *numbers)
                all_tiles(arguments)
            else:
                counter = alloc(_COUNTER_BYTES)  # the order of the stream protects it
                pack_schedule(memory, _SCHEDULE_AT, counter.ptr, next(_marks), *numbers)
                launch(arguments)
        self._pool.append(arguments)

    def for_any_pointers(self) -> FwdSm80:
        """Return the launches by the other kernel, made at the first call."""
        if self._other_made is None:
            self._other_made = FwdSm80(*self._other)
        return self._other_made

    def _map(self, arguments: MappedArguments, pointers: tuple[int, int, int, int]) -> bool:
        """Write the tensor maps of these pointers; False where one cannot have a map."""
        old = arguments.mapped
        arguments.mapped = (0, 0, 0, 0)  # until all maps are there
        for i, pointer in enumerate(pointers):
            if pointer != old[i]:
                known = self._known[i]
                encoded = known[pointer] if pointer in known else self._encoded(i, pointer)
                if encoded is None:
                    return False
                arguments.memory[_MAPS_AT[i]] = encoded
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
        known = self._known[which]
        if len(known) >= _MOST_MAPS:
            known.clear()
        known[pointer] = encoded
        return encoded
