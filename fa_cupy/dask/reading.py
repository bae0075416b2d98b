"""Arrays that are read from storage: which they are, and tasks that read their chunks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import dask
from dask.array.core import getter, getter_nofancy
from dask.blockwise import Blockwise
from dask.layers import ArraySliceDep
from dask.optimization import cull
from dask.utils import apply, key_split

from fa_cupy.dask.tiles import Cut, Tile

# Layers that only choose, cut, join or cast what was read, by the first part of their names.
_CHEAP = ("astype", "getitem", "rechunk-merge", "rechunk-split", "swapaxes", "transpose")


def is_read(x: Any) -> bool:
    """Return whether the chunks of a Dask array come from storage, with no computation on the way.

    Arrays in memory do not count, for there is nothing to be saved, nor do memory-mapped files,
    whose chunks are views that the system fills and frees. Nor do functions that make chunks: they
    may be slow, or random.
    """
    graph = x.__dask_graph__()
    stores, reads = set(), set()
    for name, layer in graph.layers.items():
        needs = graph.dependencies[name]
        if isinstance(layer, Blockwise) and layer.io_deps:
            if not _is_getter(layer) or not (needs or _is_store(_inlined(layer))):
                return False
            reads.add(name)
        elif not needs:
            if len(layer) != 1 or not _is_store(next(iter(layer.values()))):
                return False
            stores.add(name)
        elif key_split(name) not in _CHEAP:
            return False
    return bool(reads) and all(graph.dependencies[name] <= stores for name in reads)


class Chunks:
    """The chunks of an array for the tasks that use them.

    A task that uses a chunk from storage reads it by itself. So no chunk waits in memory for its
    next user, in whatever order a scheduler runs them.

    Parameters
    ----------
    cut : Cut
    """

    def __init__(self, cut: Cut) -> None:
        self._cut = cut
        self.is_read = is_read(cut.array)
        if self.is_read:
            (optimized,) = dask.optimize(cut.array)  # reads only what is used, where it can
            self._graph = dict(optimized.__dask_graph__())
            self._reads: dict[Any, tuple[Any, ...]] = {}

    def of(self, tile: Tile) -> tuple[Any, ...]:
        """Return the key of the chunk of a tile, or a task that reads it."""
        key = self._cut.key(tile)
        if not self.is_read:
            return key
        if key not in self._reads:
            graph, _ = cull(self._graph, [key])
            self._reads[key] = (partial(_read, graph, key),)
        return self._reads[key]


def _read(graph: Mapping[Any, Any], key: Any) -> Any:
    """Return what a small graph computes, in this thread."""
    return dask.get(graph, key)


def _is_getter(layer: Blockwise) -> bool:
    """Return whether a layer only cuts slices from a store, as `dask.array.from_array` makes it."""
    if any(not isinstance(dep, ArraySliceDep) for dep in layer.io_deps.values()):
        return False
    task = getattr(layer, "task", None)
    if task is not None:
        return task.func in (getter, getter_nofancy)
    # In older versions of Dask, tasks are tuples, and a layer has several of them once it is fused.
    tasks = layer.dsk.values()
    return all((x[1] if x[0] is apply else x[0]) in (getter, getter_nofancy) for x in tasks)


def _inlined(layer: Blockwise) -> Any:
    """Return the store that a getter without dependencies has among its arguments, or None."""
    return next((value for value, index in layer.indices if index is None), None)


def _is_store(value: Any) -> bool:
    """Return whether an object has rows, and is no array in memory."""
    value = getattr(value, "value", value)  # of a data node
    if hasattr(value, "__array_function__"):  # of NumPy, CuPy and the like, but of no store
        return False
    return all(hasattr(value, what) for what in ("shape", "dtype", "__getitem__"))
