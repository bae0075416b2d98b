"""Arrays that are read from storage: which they are, and tasks that read their chunks again."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import dask
import numpy as np
from dask.blockwise import Blockwise
from dask.optimization import cull
from dask.utils import key_split

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


class Reader:
    """Tasks that read chunks of an array from storage, as often as they are made.

    So a chunk does not wait in memory until all its users have run.

    Parameters
    ----------
    x : dask.array.Array
    """

    def __init__(self, x: Any) -> None:
        (optimized,) = dask.optimize(x)  # one task reads what is then cut off, if possible
        self._graph = dict(optimized.__dask_graph__())

    def task(self, key: Any) -> tuple[Any, ...]:
        """Return a task that computes the chunk with this key of the array's graph."""
        graph, _ = cull(self._graph, [key])
        return (partial(_read, graph, key),)


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
