"""Layers of graphs: arrays made of a new layer on top of others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import dask.array as da
from dask.highlevelgraph import HighLevelGraph

Layer = tuple[HighLevelGraph, str]  # a graph, and its last layer


def of_array(x: Any) -> Layer:
    """Return the layer of a Dask array."""
    return x.__dask_graph__(), x.name


def on_top(name: str, tasks: Mapping[Any, Any], below: Iterable[Layer]) -> Layer:
    """Return a layer of tasks, whose keys begin with `name` or not, that uses layers below."""
    layers: dict[str, Any] = {}
    needs: dict[str, set[str]] = {}
    used = set()
    for graph, last in below:
        layers |= graph.layers
        needs |= {layer: set(found) for layer, found in graph.dependencies.items()}
        used.add(last)
    return HighLevelGraph({**layers, name: tasks}, {**needs, name: used}), name


def array(layer: Layer, chunks: Sequence[Sequence[int]], like: Any, dtype: Any) -> Any:
    """Return the Dask array of a layer, with chunks of the library of those of `like`."""
    graph, name = layer
    meta = da.utils.meta_from_array(like._meta, ndim=len(chunks), dtype=dtype)
    return da.Array(graph, name, tuple(map(tuple, chunks)), meta=meta)
