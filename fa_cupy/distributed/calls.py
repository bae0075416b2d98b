"""A call of attention on all ranks: its checks, and what one piece of it computes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fa_cupy import _attention
from fa_cupy._bitmask import BitMask
from fa_cupy.core import arrays as core_arrays
from fa_cupy.core import attention_problem, backends, checks
from fa_cupy.core.arrays import Laid, Native
from fa_cupy.distributed import order as orders
from fa_cupy.distributed import pieces as of_pieces
from fa_cupy.distributed import plans
from fa_cupy.distributed.communicator import Communicator, Facts, agree, require
from fa_cupy.distributed.order import Segment, rows_of
from fa_cupy.distributed.pieces import FAR, Band, Piece

WAYS = ("ring", "heads")


class Hop(NamedTuple):
    """What a rank does while it has the keys of the rank `distance` places before it.

    Attributes
    ----------
    distance : int
    pieces : tuple of Piece
        Empty where the rank needs none of these keys.
    received, sent : tuple of int or None
        The rows of keys that come from that rank, and those of this rank that go to the rank as
        many places after it: begin and end.
    """

    distance: int
    pieces: tuple[Piece, ...]
    received: tuple[int, int] | None
    sent: tuple[int, int] | None


class Places(NamedTuple):
    """Which positions the ranks have, and which keys are visible.

    Attributes
    ----------
    queries, keys : tuple
        The segments of each rank.
    band : tuple of int or None
        Of positions in the whole sequence.
    apart : bool
        Whether a piece has keys of one segment only, for a bias or mask with an axis of keys.
    """

    queries: tuple[tuple[Segment, ...], ...]
    keys: tuple[tuple[Segment, ...], ...]
    band: Band
    apart: bool

    @property
    def length(self) -> int:
        """The number of all keys."""
        return sum(part.rows for parts in self.keys for part in parts)


@functools.lru_cache(maxsize=256)
def own_pieces(places: Places, rank: int) -> tuple[Piece, ...]:
    """Return the pieces of a rank's queries with its own keys."""
    queries, keys = places.queries[rank], places.keys[rank]
    return tuple(of_pieces.own_pieces(queries, keys, places.band, places.apart))


@functools.lru_cache(maxsize=256)
def hops(places: Places, rank: int) -> tuple[Hop, ...]:
    """Return the hops of a rank by distance, also where it neither receives nor sends keys.

    All ranks have the same ones: so what two ranks send each other comes in one order.
    """
    size, found = len(places.queries), []

    def between(queries: int, keys: int) -> list[Piece]:
        given = places.queries[queries % size], places.keys[keys % size]
        return of_pieces.pieces(*given, places.band, places.apart)

    for distance in range(1, size):
        received = tuple(between(rank, rank - distance))
        sent = between(rank + distance, rank)
        found.append(Hop(distance, received, of_pieces.span(received), of_pieces.span(sent)))
    return tuple(found)


@dataclass(frozen=True)
class Call:
    """One call of attention, after all ranks have agreed on it.

    Attributes
    ----------
    name : str
        The public function.
    comm : Communicator
    native : Native
    arrays : dict of array or None
        By argument, as native arrays; `bias` has two axes or more.
    places : Places
    way : str
        "ring" or "heads".
    is_causal : bool
    window : tuple or None
    options : dict
        Of every piece: `scale`, `softcap` and, but for gradients, `precision`.
    out_shape : tuple of int
        Of the output of this rank.
    shared : frozenset of str
        Which of bias, mask and sinks are the same on all ranks, with no axis of queries.
    need : tuple of str
        The gradients that are wanted.
    """

    name: str
    comm: Communicator
    native: Native
    arrays: Mapping[str, Any]
    places: Places
    way: str
    is_causal: bool
    window: tuple[int | None, int | None] | None
    options: Mapping[str, Any]
    out_shape: tuple[int, ...]
    shared: frozenset[str]
    need: tuple[str, ...]

    @property
    def xp(self) -> Any:
        """NumPy or CuPy."""
        return sys.modules[self.native.backend]

    @property
    def sums(self) -> Any:
        """The module that adds up results of these arrays."""
        return backends.module(self.native.backend, "distributed.sums")

    def of_piece(self, piece: Piece, source: int) -> dict[str, Any]:
        """Return the arguments of a piece besides queries, keys and values.

        `source` is the rank whose keys these are.
        """
        found: dict[str, Any] = dict(self.options)
        if piece.shift is not None:
            found |= {"is_causal": self.is_causal, "window": self.window}
            same = piece.queries[1] - piece.queries[0] == piece.keys[1] - piece.keys[0]
            if piece.shift or not same:
                found["causal_align"] = checks.Shift(piece.shift)
        sinks = self.arrays["sinks"]
        if piece.sinks and sinks is not None:
            found["sinks"] = self.own_sinks(piece)
        for arg in ("bias", "mask"):
            array = self.arrays[arg]
            if array is not None:
                found[arg] = array[self.index(arg, piece, source)]
        return found

    def own_sinks(self, piece: Piece) -> Any:
        """Return the sinks of the queries of a piece."""
        sinks = self.arrays["sinks"]
        return (
            sinks if sinks.ndim == 0 or sinks.shape[-1] == 1 else sinks[..., slice(*piece.queries)]
        )

    def index(self, arg: str, piece: Piece, source: int) -> tuple[Any, ...]:
        """Return the index of the pairs of a piece in a bias or mask."""
        rows, columns = self.arrays[arg].shape[-2:]
        whole, begin = slice(None), 0
        of_rows, of_columns = whole, whole
        if rows != 1 or isinstance(self.arrays[arg], BitMask):
            of_rows = slice(*piece.queries)
        if columns != 1 or isinstance(self.arrays[arg], BitMask):
            for segment in self.places.keys[source]:
                if begin <= piece.keys[0] and piece.keys[1] <= begin + segment.rows:
                    at = segment.start - begin
                    of_columns = slice(piece.keys[0] + at, piece.keys[1] + at)
                begin += segment.rows
        return (..., of_rows, of_columns)

    def compute(
        self, piece: Piece, k: Any, v: Any, source: int, first: int, out: Any = None
    ) -> Any:
        """Return output and log-sum-exp of a piece; `k` and `v` begin at the row `first`."""
        keys = piece.keys[0] - first, piece.keys[1] - first
        return _attention.attention(
            rows_of(self.arrays["q"], *piece.queries), rows_of(k, *keys), rows_of(v, *keys),
            return_lse=True, out=out, **self.of_piece(piece, source),
        )  # fmt: skip


def prepare(
    name: str,
    comm: Any,
    given: Mapping[str, Any],
    *,
    plan: Any,
    order: Any,
    is_causal: Any,
    window: Any,
    gradients: bool = False,
    need: Any = None,
    return_lse: Any = False,
    **options: Any,
) -> Call:
    """Check a call together with the other ranks.

    Parameters
    ----------
    name : str
        The public function that errors speak of.
    comm : Communicator
    given : mapping of array or None
        By argument: q, k, v, bias, mask, sinks and, for gradients, dout, out, lse and dlse.
    plan, order, is_causal, window, **options
        As in `attention`.
    gradients : bool, optional
        Whether these are the arguments of gradients.
    need : sequence of str, optional
        Which of these.
    """
    comm = require(name, comm)
    found: dict[str, Any] = {}

    def describe() -> Facts:
        native, arrays = _native(name, given)
        found["out_shape"] = _check(name, arrays, gradients, options)
        found["native"], found["arrays"] = native, arrays
        checks.flag(name, "return_lse", return_lse)
        optional = {arg: given[arg] for arg in ("bias", "sinks")}
        found["need"] = _attention.gradients_wanted(name, need, (), **optional) if gradients else ()
        checks.band(name, is_causal, None, window, FAR, FAR)
        found["window"] = None if window is None else tuple(window)
        if plan is not None and not (isinstance(plan, str) and plan in WAYS):
            raise ValueError(f"{name}: plan is {checks.show(plan)}, want None, 'ring' or 'heads'")
        shapes = {f"the shape of {arg} but its length": _other_axes(arrays[arg]) for arg in "qkv"}
        shared = {
            "order": orders.checked_order(name, order), "plan": plan,
            "is_causal": bool(is_causal), "window": found["window"], "the library": native.backend,
            "the dtype": arrays["q"].dtype.name, **shapes, **options, "need": found["need"],
            **{f"whether {arg} is given": arrays.get(arg) is not None for arg in _SHARED},
            "the kind of bias": _kind(arrays["bias"], 2),
            "the kind of sinks": _kind(arrays["sinks"], 1),
        }  # fmt: skip
        given_axes = ("q", "k", "bias", "mask")
        lengths = {arg: arrays[arg].shape[-2:] for arg in given_axes if arrays[arg] is not None}
        if arrays["sinks"] is not None:
            lengths["sinks"] = (1, *arrays["sinks"].shape)[-1:]
        return Facts(shared, lengths)

    ranks = agree(comm, name, describe)
    arrays = found["arrays"]
    places = _places(name, ranks, order, is_causal, window)
    shared = frozenset(arg for arg in _SHARED[:3] if _is_shared(ranks, arg))
    backend = found["native"].backend
    way = plans.way_of(name, plan, arrays, places, shared, gradients, backend)
    return Call(
        name, comm, found["native"], arrays, places, way,
        bool(is_causal), found["window"], options, found["out_shape"], shared, found["need"],
    )  # fmt: skip


_SHARED = ("bias", "mask", "sinks", "dlse")


def _refuse_capture(name: str, native: Native) -> None:
    """Raise if the current stream is being captured: a graph has no hosts that agree."""
    if native.backend == "cupy":
        backends.gpu("workspace").refuse(name, "ranks compare their arguments on the host")


def _native(name: str, given: Mapping[str, Any]) -> tuple[Native, dict[str, Any]]:
    """Return arguments as native arrays; a BitMask stays as it is."""
    for arg in ("bias", "mask"):
        if checks.is_sparse(given.get(arg)):
            raise TypeError(f"{name}: {arg} is a sparse matrix, want an array{_OR[arg]}")
    kept = given["mask"] if isinstance(given["mask"], BitMask) else None
    others = {arg: None if x is kept else x for arg, x in given.items()}
    for arg in ("dout", "q", "k", "v", "out", "lse"):
        if arg in others and others[arg] is None:
            raise TypeError(f"{name}: {arg} is None, want an array")
    native = core_arrays.to_native(name, writes=None, **others)
    _refuse_capture(name, native)
    arrays = dict(zip(others, native.arrays, strict=True))
    if kept is not None:
        arrays["mask"] = kept
    for arg in ("bias", "mask"):
        array = arrays[arg]
        if array is not None and array.ndim < 2:
            arrays[arg] = array.reshape((1,) * (2 - array.ndim) + array.shape)
    return native, arrays


_OR = {"bias": "", "mask": " of bool or a BitMask (BitMask.from_csr)"}


def _check(name: str, arrays: Mapping[str, Any], gradients: bool, options: Any) -> tuple[int, ...]:
    """Return the shape of the output of this rank.

    Raise for arguments that do not fit together here, whatever other ranks have.
    """
    inputs: list[Any] = [arrays[arg] for arg in "qkv"]
    for arg in ("bias", "mask"):
        x = arrays[arg]
        if isinstance(x, BitMask):
            x = x.entries
            inputs.append(Laid((*x.shape, 1, 1), (*x.strides, 0, 0), np.dtype(bool)))
        elif x is None:
            inputs.append(None)
        else:  # its last axes are those of all keys, which other ranks know of
            inputs.append(Laid((*x.shape[:-2], 1, 1), x.strides, x.dtype))
    if gradients:
        out, lse, dout, dlse = (arrays[arg] for arg in ("out", "lse", "dout", "dlse"))
        problem = attention_problem.gradient_problem(
            inputs, out, lse, dout, dlse, name, sinks=arrays["sinks"], **options
        )
    else:
        problem = attention_problem.attention_problem(
            *inputs, sinks=arrays["sinks"], name=name, **options
        )
    return problem.out_shape


def _other_axes(x: Any) -> tuple[int, ...]:
    return (*x.shape[:-2], x.shape[-1])


def _kind(x: Any, last: int) -> tuple[Any, ...] | None:
    """Return the dtype and the axes of batch entries of an array with so many axes after them."""
    if x is None:
        return None
    axes = list(x.shape[: max(0, x.ndim - last)])
    while axes[:1] == [1]:
        del axes[0]
    return x.dtype.name, *axes


def _places(
    name: str, ranks: Sequence[Mapping[str, Any]], order: str, is_causal: Any, window: Any
) -> Places:
    """Return where the rows of all ranks stand; errors are the same on all ranks."""
    q_lens, k_lens = ([own[arg][0] for own in ranks] for arg in "qk")
    queries = orders.segments_of(name, "q", q_lens, order)
    keys = orders.segments_of(name, "k", k_lens, order)
    band = checks.band(name, is_causal, None, window, FAR, FAR)
    length = sum(k_lens)
    if band != (None, None) and q_lens != k_lens:
        raise ValueError(
            f"{name}: q has the lengths {q_lens} on the ranks and k has {k_lens}, want the same "
            "with is_causal or window"
        )
    apart = False
    for rank, own in enumerate(ranks):
        for arg in ("bias", "mask"):
            if arg in own:
                rows, columns = own[arg]
                if rows not in (1, q_lens[rank]) or columns not in (1, length):
                    raise ValueError(
                        f"{name}: {arg} has {rows} rows and {columns} columns on rank {rank}, want "
                        f"1 or {q_lens[rank]} (its queries) and 1 or {length} (all keys)"
                    )
                apart = apart or columns != 1
    return Places(tuple(queries), tuple(keys), band, apart)


def _is_shared(ranks: Sequence[Mapping[str, Any]], arg: str) -> bool:
    """Whether an argument has no axis of queries, so that all ranks have the same.

    Where no rank has more than one query, a row is that of a rank.
    """
    if arg not in ranks[0]:
        return False
    return {own[arg][0] for own in ranks} == {1} and max(own["q"][0] for own in ranks) > 1
