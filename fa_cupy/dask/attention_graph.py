"""The graph of attention: tiles of queries and keys, and a tree that merges the tiles of a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import getitem
from typing import Any

from dask.base import tokenize

from fa_cupy._bitmask import BitMask
from fa_cupy.core.attention_problem import Problem, sum_dtype
from fa_cupy.dask import layers, reading, tasks
from fa_cupy.dask.tiles import Cut, Edges, Tile, batch_labels, labels_of

# Results that one task merges: fewer make more tasks, more keep more results in memory.
_TOGETHER = 4

_LAST = {
    "q": ("q", None),
    "k": ("k", None),
    "v": ("k", None),
    "bias": ("q", "k"),
    "mask": ("q", "k"),
    "sinks": ("q",),
}


@dataclass(frozen=True)
class AttentionGraph:
    """Attention of Dask arrays: the tiles of a problem and their tasks.

    Attributes
    ----------
    problem : Problem
        Made from the metadata of the arrays.
    arrays : mapping from str to dask.array.Array
        By argument.
    bits : BitMask or None
        The mask, if it is one.
    options : mapping
        Options of `fa_cupy.attention` that are the same for each tile.
    """

    problem: Problem
    arrays: Mapping[str, Any]
    bits: BitMask | None
    options: Mapping[str, Any]

    @cached_property
    def batch(self) -> tuple[int, ...]:
        """Labels of the batch axes."""
        return batch_labels(len(self.problem.out_shape) - 2)

    @cached_property
    def edges(self) -> Edges:
        """Where queries, keys and batch axes are cut."""
        shape = self.problem.out_shape
        sizes: dict[Any, int] = dict(zip((*self.batch, "q"), shape, strict=False))
        sizes["k"] = self.problem.k_len
        arrays = [(x, labels_of(x.ndim, *_LAST[arg])) for arg, x in self.arrays.items()]
        return Edges(sizes, arrays)

    @cached_property
    def cuts(self) -> dict[str, Cut]:
        """The arrays, cut at the edges, by argument."""
        return {
            arg: Cut.of(x, labels_of(x.ndim, *_LAST[arg]), self.edges)
            for arg, x in self.arrays.items()
        }

    @cached_property
    def token(self) -> str:
        """What tells this graph from others."""
        names = {arg: x.name for arg, x in self.arrays.items()}
        p = self.problem
        return str(tokenize(names, self.bits, p.lower, p.upper, dict(self.options)))

    def build(self, return_lse: bool) -> Any:
        """Return the output as a Dask array, or a pair with the log-sum-exp."""
        name = f"attention-{self.token}"
        q = self.arrays["q"]
        sums = sum_dtype(self.problem.dtype)
        layer, ends, used = self._tiles()
        below = [layers.of_array(x) for x in used]
        final: dict[Any, Any] = {}
        for tile in self.edges.tiles((*self.batch, "q")):
            where = tuple(tile.values())
            shape = (*self.edges.shape(tile, (*self.batch, "q")), self.problem.v_dim)
            end = partial(
                tasks.finish, like=q._meta, shape=shape, dtype=self.problem.dtype,
                sums=sums, with_lse=return_lse,
            )  # fmt: skip
            sinks = self.cuts["sinks"].key(tile) if "sinks" in self.cuts else None
            final[where] = (end, ends[where], sinks)
        rows = self.edges.chunks(self.problem.out_shape[:-1], (*self.batch, "q")).sizes
        chunks, dtype = (*rows, (self.problem.v_dim,)), self.problem.dtype
        if not return_lse:
            layer |= {(name, *where, 0): task for where, task in final.items()}
            return layers.array(layers.on_top(name, layer, below), chunks, q, dtype)
        both, lse_name = f"attention-pair-{self.token}", f"attention-lse-{self.token}"
        layer |= {(both, *where): task for where, task in final.items()}
        pairs = layers.on_top(both, layer, below)
        out = {(name, *where, 0): (getitem, (both, *where), 0) for where in final}
        lse = {(lse_name, *where): (getitem, (both, *where), 1) for where in final}
        return (
            layers.array(layers.on_top(name, out, [pairs]), chunks, q, dtype),
            layers.array(layers.on_top(lse_name, lse, [pairs]), rows, q, sums),
        )

    def _tiles(self) -> tuple[dict[Any, Any], dict[Any, list[Any]], list[Any]]:
        """Return the tasks of tiles and merges, what is left to merge by row, and arrays in use."""
        layer: dict[Any, Any] = {}
        ends: dict[Any, list[Any]] = {}
        keys = {arg: reading.Chunks(self.cuts[arg]) for arg in "kv"}
        bits = _Bits(self, layer) if self.bits is not None else None
        for i in range(self.edges.count("q")):
            for tile in self.edges.tiles(self.batch):
                row: dict[Any, int] = {**tile, "q": i}
                where = tuple(row.values())
                found = list(self._row(row, keys, bits, layer))
                ends[where] = self._tree(where, found, layer)
        read = {arg for arg, chunks in keys.items() if chunks.is_read}
        return layer, ends, [cut.array for arg, cut in self.cuts.items() if arg not in read]

    def _row(
        self,
        row: Tile,
        keys: Mapping[str, reading.Chunks],
        bits: _Bits | None,
        layer: dict[Any, Any],
    ) -> Iterator[Any]:
        """Add the tasks of all keys that some queries see; yield their keys."""
        if 0 in self.edges.shape(row, (*self.batch, "q")):
            return
        for j in self._seen(row["q"]):
            tile = {**row, "k": j}
            band = self._band(tile)
            bias, mask = (
                self.cuts[arg].key(tile) if arg in self.cuts else None for arg in ("bias", "mask")
            )
            if bits is not None and (mask := bits.key(tile)) is None:
                continue
            attend = partial(tasks.attend, band=band, options=dict(self.options))
            key = (f"attention-tile-{self.token}", *tile.values())
            k, v = (keys[arg].of(tile) for arg in "kv")
            layer[key] = (attend, self.cuts["q"].key(tile), k, v, bias, mask)
            yield key

    def _seen(self, number: int) -> range:
        """Return the intervals of keys that the queries of an interval see some of."""
        first, last = self.edges.bounds("q", number)
        lower, upper = self.problem.lower, self.problem.upper
        begin = 0 if lower is None else max(0, first + lower)
        end = self.problem.k_len if upper is None else min(self.problem.k_len, last + upper)
        return self.edges.between("k", begin, end)

    def _band(self, tile: Tile) -> tuple[int | None, int | None]:
        """Return the bounds of the band of visible keys, counted within a tile."""
        first, begin = (self.edges.bounds(label, tile[label])[0] for label in ("q", "k"))
        bounds = self.problem.lower, self.problem.upper
        lower, upper = (None if x is None else x + first - begin for x in bounds)
        return lower, upper

    def _tree(self, where: tuple[int, ...], found: Sequence[Any], layer: Any) -> list[Any]:
        """Add the tasks that merge the results of a row until few are left; return their keys."""
        left, level = [*found], 0
        while len(left) > _TOGETHER:
            merged = []
            for first in range(0, len(left), _TOGETHER):
                key = (f"attention-merge-{self.token}", *where, level, first)
                layer[key] = (tasks.merge, left[first : first + _TOGETHER])
                merged.append(key)
            left, level = merged, level + 1
        return left


class _Bits:
    """The parts of a `BitMask` that tiles read, each of which is made once."""

    def __init__(self, graph: AttentionGraph, layer: dict[Any, Any]) -> None:
        assert graph.bits is not None
        self._mask, self._edges, self._layer = graph.bits, graph.edges, layer
        self._name = f"attention-mask-{graph.token}"
        shape = graph.bits.shape
        self._labels = labels_of(len(shape), "q", "k")
        self._chunks = graph.edges.chunks(shape, self._labels)
        self._keys: dict[tuple[int, ...], Any] = {}

    def key(self, tile: Tile) -> Any:
        """Return the key of the part of a tile; None if it hides every pair."""
        where = self._chunks.at(tile)
        if where not in self._keys:
            part = self._mask[self._slices(where)]
            self._keys[where] = (self._name, *where) if part.any() else None
            if self._keys[where] is not None:
                self._layer[self._keys[where]] = part
        return self._keys[where]

    def _slices(self, where: tuple[int, ...]) -> tuple[slice, ...]:
        """Return the slices of a chunk of the mask."""
        found = []
        for sizes, number in zip(self._chunks.sizes, where, strict=True):
            first = sum(sizes[:number])
            found.append(slice(first, first + sizes[number]))
        return tuple(found)
