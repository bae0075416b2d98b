"""The graph of causal products: the states of chunks, their sums in order, and each chunk's end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fa_cupy.core.linear_problem import Product
from fa_cupy.dask import layers, reading
from fa_cupy.dask.tiles import Chunks, Cut, Edges, batch_labels, labels_of


@dataclass(frozen=True)
class ProductGraph:
    """A causal product or linear attention of Dask arrays: its chunks and their tasks.

    Attributes
    ----------
    name : str
        Which begins the names of the results.
    token : str
        What tells this graph from others.
    problem : Product
        Made from the metadata of the arrays.
    arrays : mapping from str to dask.array.Array
        By argument: q, k, v and perhaps initial_state.
    state_of, add, finish : callable
        Tasks: ``state_of(k, v)``, ``add(state, more)`` and ``finish(q, k, v, state)``.
    reverse : bool
        Whether the last chunk comes first.
    read_state : callable or None
        ``read_state(q, state)`` is the output of queries that see all keys, if they do.
    """

    name: str
    token: str
    problem: Product
    arrays: Mapping[str, Any]
    state_of: Callable[..., Any]
    add: Callable[..., Any]
    finish: Callable[..., Any]
    reverse: bool = False
    read_state: Callable[..., Any] | None = None

    @cached_property
    def batch(self) -> tuple[int, ...]:
        """Labels of the batch axes."""
        return batch_labels(len(self.problem.out_shape) - 2)

    @cached_property
    def labels(self) -> dict[str, tuple[Any, ...]]:
        """The labels of the axes of the arrays, by argument."""
        rows = "k" if self.read_state is None else "q"
        last: dict[str, Any] = {"q": (rows, None), "k": ("k", None), "v": ("k", None)}
        last |= {"initial_state": (None, None)}
        return {arg: labels_of(x.ndim, *last[arg]) for arg, x in self.arrays.items()}

    @cached_property
    def edges(self) -> Edges:
        """Where rows and batch axes are cut."""
        shape = self.problem.out_shape
        sizes: dict[Any, int] = dict(zip(self.batch, shape, strict=False))
        sizes |= {"q": self.problem.q_len, "k": self.problem.k_len}
        return Edges(sizes, [(x, self.labels[arg]) for arg, x in self.arrays.items()])

    @cached_property
    def cuts(self) -> dict[str, Cut]:
        """The arrays, cut at the edges, by argument."""
        return {arg: Cut.of(x, self.labels[arg], self.edges) for arg, x in self.arrays.items()}

    @cached_property
    def rows(self) -> dict[str, reading.Chunks]:
        """The chunks of q, k and v for their tasks."""
        return {arg: reading.Chunks(self.cuts[arg]) for arg in "qkv"}

    @cached_property
    def states(self) -> Chunks:
        """The chunks of states along their batch axes."""
        shape = self.problem.state_shape[:-2]
        return self.edges.chunks(shape, batch_labels(len(shape)))

    def build(self, return_state: bool) -> Any:
        """Return the output as a Dask array, or a pair with the last state."""
        name, rows = f"{self.name}-{self.token}", "k" if self.read_state is None else "q"
        arrays = {
            arg: layers.of_array(cut.array)
            for arg, cut in self.cuts.items()
            if arg not in self.rows or not self.rows[arg].is_read
        }
        of_keys = [layer for arg, layer in arrays.items() if arg != "q"]
        sums_name = f"{self.name}-sum-{self.token}"
        sums, before = self._sums(sums_name, return_state or self.read_state is not None)
        states = layers.on_top(sums_name, sums, of_keys)
        out = {}
        for tile in self.edges.tiles((*self.batch, rows)):
            state = before[self.states.at(tile)]
            if self.read_state is not None:
                task = (self.read_state, self.rows["q"].of(tile), state[-1])
            else:
                chunks = (self.rows[arg].of(tile) for arg in "qkv")
                task = (self.finish, *chunks, state[tile[rows]])
            out[(name, *tile.values(), 0)] = task
        below = [states, *arrays.values()]
        labels = (*self.batch, rows)
        sizes = self.edges.chunks(self.problem.out_shape[:-1], labels).sizes
        result = layers.array(
            layers.on_top(name, out, below), (*sizes, (self.problem.v_dim,)), self.arrays["q"],
            self.problem.dtype,
        )  # fmt: skip
        if not return_state:
            return result
        last_name = f"{self.name}-state-{self.token}"
        last = {(last_name, *where, 0, 0): found[-1] for where, found in before.items()}
        dims = [(size,) for size in self.problem.state_shape[-2:]]
        state = layers.array(
            layers.on_top(last_name, last, [states, *of_keys]), (*self.states.sizes, *dims),
            self.arrays["q"], self.problem.state_dtype,
        )  # fmt: skip
        return result, state

    def _sums(self, name: str, whole: bool) -> tuple[dict[Any, Any], dict[Any, list[Any]]]:
        """Return the tasks of states, and for each chunk of states the keys of the sums.

        The sums are those before each chunk of rows; the last one, of all, is there if `whole`.
        """
        layer: dict[Any, Any] = {}
        before: dict[Any, list[Any]] = {}
        count = self.edges.count("k")
        order = range(count - 1, -1, -1) if self.reverse else range(count)
        for where, tile in self.states.tiles():
            tile = {**dict.fromkeys(self.batch, 0), **tile}
            initial = self.cuts["initial_state"].key(tile) if "initial_state" in self.cuts else None
            sums = [None] * count + [initial]
            state = initial
            for number, c in enumerate(order):
                sums[c] = state
                if number == count - 1 and not whole:
                    break
                own = (f"{self.name}-chunk-{self.token}", *where, c)
                layer[own] = (self.state_of, *(self.rows[x].of({**tile, "k": c}) for x in "kv"))
                key = (name, *where, c)
                layer[key] = own if state is None else (self.add, state, own)
                state = key
            sums[count] = state
            before[where] = sums
        return layer, before
