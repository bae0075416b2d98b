"""How a plan launches ``fwd_sm90``: tensor maps for its pointers, and a counter for its tiles."""

from __future__ import annotations

import itertools
import os
from typing import Any

from cupy.cuda import alloc, get_current_stream, runtime

from fa_cupy.core.attention_problem import Problem, View
from fa_cupy.gpu import workspace
from fa_cupy.gpu.driver import compile
from fa_cupy.gpu.driver.devices import multiprocessors, target_of_device
from fa_cupy.gpu.driver.launch import Launch
from fa_cupy.gpu.driver.tensor_map_cache import MappedArguments, Maps
from fa_cupy.gpu.kernels.attention.fwd_params import MASK_AT, MaskPointers, pack_mask, pack_pointers
from fa_cupy.gpu.kernels.attention.fwd_sm80 import FwdSm80
from fa_cupy.gpu.kernels.attention.fwd_sm90_params import (
    COUNTER_BYTES,
    FWD_SM90_PARAMS,
    MAP_BYTES,
    MAPPED,
    fill,
    pack_counter,
)
from fa_cupy.gpu.kernels.attention.fwd_variants import Variant

# Where a struct begins with what a call writes: the pointers, the counter and its mark.
_POINTERS_AT = FWD_SM90_PARAMS.fields["common"][1] if FWD_SM90_PARAMS.fields else 0
_COUNTER_AT = FWD_SM90_PARAMS.fields["scheduler"][1] if FWD_SM90_PARAMS.fields else 0
_MAPS_AT = [MAP_BYTES * i for i in range(len(MAPPED))]

# One number for each launch. It starts where no other process did, because the memory that a
# counter gets may hold what another one left. Never 0, and `next` is one step to other threads.
_marks = itertools.count(int.from_bytes(os.urandom(8), "little") >> 1 | 1)


class PartLaunch:
    """What launches one part of a problem.

    Attributes
    ----------
    kernel : Launch
        Of a block for each tile, or of one for each multiprocessor.
    counts : bool
        Whether blocks share out more tiles than they are, and want a counter.
    params : numpy.ndarray
        The struct, all but what depends on pointers.
    pool : list of MappedArguments
        Copies that no thread is using; a launch reads one before it returns.
    """

    __slots__ = ("counts", "kernel", "params", "pool")

    def __init__(self, params: Any, kernel: Launch, counts: bool) -> None:
        self.params = params.copy()
        self.kernel = kernel
        self.counts = counts
        self.pool: list[MappedArguments] = []


class FwdSm90:
    """The launches of a problem by one row of the table.

    Parameters
    ----------
    problem : Problem
        One that `fa_cupy.gpu.kernels.attention.fwd_sm90_params.takes` accepts.
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
    launches : list of PartLaunch
    counts : bool
        Whether some part wants a counter.
    """

    __slots__ = (
        "_maps", "_other", "_other_made", "counts", "launches", "q_tiles", "row",
    )  # fmt: skip

    def __init__(
        self, problem: Problem, out: View, row: Variant, other: Variant, device: int
    ) -> None:
        kernel = compile.load(row, str(target_of_device(device)), device)
        self.row = row
        self._other_made: FwdSm80 | None = None
        self._other = problem, out, other, device
        params, maps, parts = fill(problem, out, row.tile_m, row.tile_n)
        self.q_tiles = int(params["common"]["q_tiles"][0])
        self._maps = Maps(problem.dtype.name, [maps[name] for name in MAPPED], _MAPS_AT)
        self.launches: list[PartLaunch] = []
        most = multiprocessors(device)
        for part in parts:
            launch = Launch(kernel, min(most, part.tiles), row.threads, row.shared_bytes)
            part.write(params)
            self.launches.append(PartLaunch(params, launch, most < part.tiles))
        self.counts = any(part.counts for part in self.launches)

    def __call__(
        self, pointers: tuple[int, ...], counter: int = 0, mask: MaskPointers | None = None
    ) -> None:
        """Launch with these addresses.

        Parameters
        ----------
        pointers : tuple of int
            In the order of `fa_cupy.gpu.kernels.attention.fwd_params.POINTERS`.
        counter : int
            Address of `fwd_sm90_params.COUNTER_BYTES` bytes that nothing else uses until
            what is launched has run; 0 allocates them where they are needed. A graph has a counter
            of its own.
        mask : MaskPointers, optional
            The mask, if the problem has one.
        """
        q, k, v, _, out, _ = pointers
        mapped = (q, k, v, out)
        if mask is not None:
            mask = mask.of_part(0, len(self.launches) == 1)
        for part in self.launches:
            try:
                arguments = part.pool.pop()
            except IndexError:
                arguments = MappedArguments(part.params)
            if arguments.mapped != mapped and not self._maps.write(arguments, mapped):
                # So it is at the first part, before anything is launched: all have the same maps.
                part.pool.append(arguments)
                self.for_any_pointers()(pointers, mask=mask)
                return
            pack_pointers(arguments.memory, _POINTERS_AT, *pointers)
            if mask is not None:
                pack_mask(arguments.memory, _POINTERS_AT + MASK_AT, *mask)
            if part.counts:
                self._launch(part, arguments, counter)
            else:
                part.kernel(arguments)
            part.pool.append(arguments)

    @staticmethod
    def _launch(part: PartLaunch, arguments: MappedArguments, counter: int) -> None:
        """Launch a part whose blocks share out more tiles than they are."""
        stream = get_current_stream().ptr
        # The order of the stream protects what is given back before the kernel has run.
        memory = None
        if runtime.streamIsCapturing(stream):
            # A result that the caller has may be gone, or be read, when the graph runs.
            memory = workspace.of_graph(COUNTER_BYTES)
        elif not counter:
            memory = alloc(COUNTER_BYTES)
        at = counter if memory is None else memory.ptr
        pack_counter(arguments.memory, _COUNTER_AT, at, next(_marks))
        part.kernel(arguments, stream)

    def for_any_pointers(self) -> FwdSm80:
        """Return the launches by the other kernel, made at the first call."""
        if self._other_made is None:
            self._other_made = FwdSm80(*self._other)
        return self._other_made
