"""Arrays that are read from storage: which they are, and tasks that read their chunks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import dask
import numpy as np
from dask.blockwise import Blockwise
from dask.optimization import cull
from dask.utils import key_split

from fa_cupy.dask.tiles import Cut, Tile

# Layers that only choose, cut, join or cast what was read, by the first part of their names.
_CHEAP = ("astype", "getitem", "rechunk-merge", "rechunk-split", "swapaxes", "transpose")


def is_read(x: Any) -> bool:
    """Return whether the chunks of a Dask array come from storage, with no computation on the way.

    Arrays in memory do not count, for there is nothing to be saved, nor do memory-mapped files,
    whose chunks are views that the system fills and frees.
    """
    graph = x.__dask_graph__()
    sources = 0
    for name, layer in graph.layers.items():
        needs = graph.dependencies[name]
        if not needs and not isinstance(layer, Blockwise):
            if not _is_store(layer):
                return False
            sources += 1
        elif isinstance(layer, Blockwise) and layer.io_deps:  # the layer that reads
            sources += not needs
        elif key_split(name) not in _CHEAP:
            return False
    return sources > 0


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


def _is_store(layer: Mapping[Any, Any]) -> bool:
    """Return whether a layer is one object with rows, other than an array in memory."""
    if len(layer) != 1:
        return False
    value = next(iter(layer.values()))
    value = getattr(value, "value", value)  # of a data node
    if isinstance(value, np.ndarray):
        return False
    return all(hasattr(value, what) for what in ("shape", "dtype", "__getitem__"))
