"""Plans: the launches of one kind of call, complete but for the addresses of its arrays.

The host module of a kernel describes each launch as a `Step`. A `Plan` prepares its steps once, and
writes addresses into their parameter structs at each call. It knows no kernel and does not import
CuPy: a `Launcher`, that of the driver or that of the emulator, loads kernels, makes tensor maps,
gives memory and launches.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from fa_cupy.gpu.driver.arguments import Arguments

#: Names a number that is unique to each run of a plan and never 0. A kernel whose counter is not
#: set to zero compares the number in memory with it: if they differ, the first block sets the
#: counter up. The last block of each launch clears it, so that a replayed graph starts anew.
MARK = "mark"
# It starts where no other process did. `next` is one step to other threads.
_marks = itertools.count(int.from_bytes(os.urandom(8), "little") >> 1 | 1)
_MOST_MAPS = 256  # kept for an array of a step; a training loop meets the same few pointers
_MAP_BYTES = 128  # CUDA Driver API, CUtensorMap
_ALIGNMENT = 256  # of the parts of a workspace
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Step(NamedTuple):
    """One launch.

    Fields of the struct are named by a path, as ``common.q`` or, in an array of structs,
    ``job.1.out``. Arrays, the parts of a mask and the parts of the workspace have names of their
    own, which are those that the plan is given addresses by.

    Attributes
    ----------
    variant : Variant
        The compiled kernel; it knows its threads and its shared memory.
    grid : int
        Blocks, along x.
    params : numpy.ndarray
        The parameter struct, of size 1, complete but for what follows.
    addresses : mapping of str
        By field, the name of what it points to.
    maps : mapping of tuple
        By field, the name of the array that the tensor map is for, and its geometry: shape, strides
        in bytes and box.
    shifts : mapping of int
        Bytes to add to addresses, by name; a null pointer stays one.
    aligned : tuple of str
        Names of arrays. If there are any, the field ``aligned`` of the struct, or of its part
        ``common``, is set to whether all their addresses are multiples of 16.
    persistent : bool
        Whether blocks take tiles until none is left.
    """

    variant: Any
    grid: int
    params: np.ndarray[Any, Any]
    addresses: Mapping[str, str]
    maps: Mapping[str, tuple[str, Sequence[Any]]] = _NOTHING
    shifts: Mapping[str, int] = _NOTHING
    aligned: tuple[str, ...] = ()
    persistent: bool = False


Launch = Callable[[Arguments, Any], Any]


class Launcher(Protocol):
    """What a plan, and the choice of its kernels, need of a machine."""

    @property
    def target(self) -> str | None:
        """The target that kernels are compiled for; None if no kernel can run."""

    @property
    def multiprocessors(self) -> int:
        """The number of multiprocessors of the device."""

    def kernels(self, steps: Sequence[Step]) -> Sequence[Launch]:
        """Return what launches the kernel of each step: loaded, with all but its arguments.

        It is called with the arguments and with what the launch of the step before returned, None
        for the first step: the driver's returns the stream, which it then need not look up again.
        """

    def tensor_map(self, pointer: int, dtype: str, *geometry: Any) -> bytes | None:
        """Return a tensor map; None where an array at this address cannot have one."""

    def workspace(self, size: int) -> Any:
        """Return memory that lives until the launches are queued; ``ptr`` is its address."""


class Workspace(NamedTuple):
    """Memory that the launches of a call hand to each other.

    Attributes
    ----------
    places : dict of int
        Where its parts begin, by name.
    nbytes : int
    """

    places: Mapping[str, int]
    nbytes: int


def workspace_of(sizes: Mapping[str, int]) -> Workspace:
    """Return a workspace of parts of so many bytes, each of which begins at a multiple of 256."""
    places, end = {}, 0
    for name, size in sizes.items():
        places[name] = begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = begin + size
    return Workspace(places, end)


class Plan:
    """The launches of one kind of call, ready to run on any addresses.

    Parameters
    ----------
    steps : sequence of Step
        In the order of their launches.
    names : sequence of str
        What calls give addresses of, in that order.
    launcher : Launcher
    workspace : Workspace, optional
    fallback : callable, optional
        Returns the plan that runs in place of this one where an array has an address that no tensor
        map can be made for. It is called at most once, when it is first needed.

    Attributes
    ----------
    steps : tuple of Step
    workspace_bytes : int
    """

    __slots__ = (
        "_fallback", "_launcher", "_launches", "_marks", "_places", "_pool", "names", "other",
        "steps", "workspace_bytes",
    )  # fmt: skip

    def __init__(
        self,
        steps: Sequence[Step],
        names: Sequence[str],
        launcher: Launcher,
        workspace: Workspace | None = None,
        fallback: Callable[[], Plan] | None = None,
    ) -> None:
        self.steps = tuple(steps)
        self.names = tuple(names)
        self.other: Plan | None = None
        self._fallback = fallback
        self._launcher = launcher
        places, self.workspace_bytes = workspace or Workspace({}, 0)
        self._places = tuple(places.values())
        index = {name: i for i, name in enumerate((*names, *places))}
        self._launches = [
            _Launch(step, kernel, index, launcher)
            for step, kernel in zip(steps, launcher.kernels(steps), strict=True)
        ]
        self._marks = any(MARK in step.addresses.values() for step in steps)
        # Sets of structs that no thread is using: a launch copies its struct before it returns.
        self._pool: list[_Structs] = []

    def run(self, pointers: tuple[int, ...], workspace: int = 0) -> bool:
        """Queue the launches on the current stream.

        Parameters
        ----------
        pointers : tuple of int
            In the order of `names`; 0 where there is no array.
        workspace : int, optional
            Address of `workspace_bytes` bytes, a multiple of 16, that nothing else uses until what
            is launched has run; 0 takes them from the launcher.

        Returns
        -------
        bool
            False, with nothing launched, where an array cannot have a tensor map and there is no
            fallback.
        """
        given, memory = pointers, None
        if self._places:
            if not workspace:
                memory = self._launcher.workspace(self.workspace_bytes)
                workspace = memory.ptr
            pointers = (*pointers, *[workspace + place for place in self._places])
        try:
            structs = self._pool.pop()
        except IndexError:
            structs = _Structs(self._launches)
        # Calls in a loop often get the same memory again, and then nothing is to be written.
        if structs.pointers != pointers and not structs.write(pointers):
            self._pool.append(structs)
            memory = None  # the fallback takes its own
            return self.fallback().run(given) if self._fallback else False
        stream, mark = None, next(_marks) if self._marks else 0
        for launch, arguments in structs.launches:
            if launch.mark is not None:
                _pack_mark(arguments.memory, launch.mark, mark)
            stream = launch.kernel(arguments, stream)
        self._pool.append(structs)
        return True

    @property
    def places(self) -> tuple[int, ...]:
        """Where the parts of the workspace begin, in their order."""
        return self._places

    def fallback(self) -> Plan:
        """Return the plan that takes any addresses, made at the first call."""
        if self.other is None:
            assert self._fallback is not None
            self.other = self._fallback()
        return self.other


class _Structs:
    """The launches of a plan with a struct for each.

    Attributes
    ----------
    launches : list of tuple
        Each launch with its `Arguments`.
    pointers : tuple of int or None
        The addresses that are in all structs.
    """

    __slots__ = ("launches", "pointers")

    def __init__(self, launches: Sequence[_Launch]) -> None:
        self.launches = [(launch, Arguments(launch.params)) for launch in launches]
        self.pointers: tuple[int, ...] | None = None

    def write(self, pointers: tuple[int, ...]) -> bool:
        """Write addresses and tensor maps; False where an array cannot have a map."""
        self.pointers = None  # until all are there
        for launch, arguments in self.launches:
            # No function is called for a step: this takes a good part of a call's time.
            if launch.maps:
                mapped = launch.mapped(pointers)
                if arguments.mapped != mapped and not launch.write_maps(arguments, mapped):
                    return False
            values = pointers
            if launch.shifts:
                pairs = zip(pointers, launch.shifts, strict=False)
                values = tuple([p and p + shift for p, shift in pairs])
            for pack, at, select in launch.runs:
                pack(arguments.memory, at, *select(values))
            if launch.aligned is not None:
                at, select = launch.aligned
                bits = 0
                for pointer in select(pointers):
                    bits |= pointer
                _pack_flag(arguments.memory, at, not bits & 15)
        self.pointers = pointers
        return True


class _Launch:
    """A step with its kernel, and how addresses are written to its struct."""

    __slots__ = ("aligned", "kernel", "mapped", "maps", "mark", "params", "runs", "shifts")

    def __init__(
        self,
        step: Step,
        kernel: Launch,
        index: Mapping[str, int],
        launcher: Launcher,
    ) -> None:
        dtype = step.params.dtype
        self.kernel = kernel
        self.params = step.params
        places = {offset_of(dtype, path): name for path, name in step.addresses.items()}
        self.mark = next((at for at, name in places.items() if name == MARK), None)
        fields = sorted((at, index[name]) for at, name in places.items() if name != MARK)
        self.runs = list(_runs(fields))
        self.shifts: tuple[int, ...] = ()
        if any(step.shifts.values()):
            self.shifts = tuple(step.shifts.get(name, 0) for name in index)
        self.aligned: Any = None
        if step.aligned:
            path = "aligned" if "aligned" in (dtype.names or ()) else "common.aligned"
            self.aligned = offset_of(dtype, path), _several([index[x] for x in step.aligned])
        maps = step.maps.items()
        self.mapped = _several([index[name] for _, (name, _) in maps])
        self.maps = [
            _Map(offset_of(dtype, path), step.variant.dtype, geometry, launcher)
            for path, (_, geometry) in maps
        ]

    def write_maps(self, arguments: Arguments, pointers: tuple[int, ...]) -> bool:
        """Write the maps for these pointers; False where one cannot be made."""
        before, arguments.mapped = arguments.mapped, None  # until all maps are there
        for i, (own, pointer) in enumerate(zip(self.maps, pointers, strict=True)):
            if before is None or pointer != before[i]:
                encoded = own.encoded(pointer)
                if encoded is None:
                    return False
                arguments.memory[own.at : own.at + _MAP_BYTES] = encoded
        arguments.mapped = pointers
        return True


class _Map:
    """The tensor maps of one array of a step, for the pointers that it met lately."""

    __slots__ = ("_dtype", "_geometry", "_launcher", "at", "known")

    def __init__(self, at: int, dtype: str, geometry: Sequence[Any], launcher: Launcher) -> None:
        self.at = at
        self._dtype, self._geometry, self._launcher = dtype, geometry, launcher
        self.known: dict[int, bytes | None] = {}

    def encoded(self, pointer: int) -> bytes | None:
        """Return the map for an array at this address, made at most once."""
        try:
            return self.known[pointer]
        except KeyError:
            pass
        found = None
        if not pointer & 15:
            found = self._launcher.tensor_map(pointer, self._dtype, *self._geometry)
        if len(self.known) >= _MOST_MAPS:
            self.known.clear()
        self.known[pointer] = found
        return found


def offset_of(dtype: np.dtype[Any], path: str) -> int:
    """Return where a field of a struct begins, in bytes; see `Step` for paths."""
    found = 0
    for name in path.split("."):
        if dtype.subdtype is not None:
            dtype = dtype.subdtype[0]
            found += int(name) * dtype.itemsize
        else:
            assert dtype.fields is not None
            dtype, at = dtype.fields[name][:2]
            found += at
    return found


_pack_flag, _pack_mark = struct.Struct("=i").pack_into, struct.Struct("=Q").pack_into


def _runs(fields: list[tuple[int, int]]) -> Iterator[tuple[Callable[..., None], int, Any]]:
    """Yield what writes addresses that lie next to each other: packer, place, selection."""
    groups = itertools.groupby(enumerate(fields), lambda pair: pair[1][0] - 8 * pair[0])
    for _, group in groups:
        run = [field for _, field in group]
        yield struct.Struct(f"={len(run)}Q").pack_into, run[0][0], _several([i for _, i in run])


def _several(indices: list[int]) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    """Return what picks elements of a tuple, as a tuple."""
    if not indices:
        return lambda values: ()
    if len(indices) == 1:
        return itemgetter(slice(indices[0], indices[0] + 1))
    return itemgetter(*indices)
