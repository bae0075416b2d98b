"""What the ways of sharing attention cost, and the choice between them.

The model counts floating-point operations, bytes that a rank sends and receives or that it reads
and writes between calls of attention, and messages. A `Machine` says how fast these are.
`validation.ring` compares it with measured times.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

from fa_cupy.core import attention_problem, checks
from fa_cupy.distributed import order as orders
from fa_cupy.distributed import pieces as of_pieces
from fa_cupy.distributed.order import Segment
from fa_cupy.distributed.pieces import FAR, Band

_NAME = "plan"
_MOST = 2**16  # ranks, each of which is looked at


class Machine(NamedTuple):
    """How fast a rank computes and sends.

    Attributes
    ----------
    flops : float
        Floating-point operations a second in attention, in 16 bits.
    memory : float
        Bytes a second of its memory.
    link : float
        Bytes a second that it sends to a rank of the same host, while it receives as many.
    far_link : float
        The same to a rank of another host.
    latency : float
        Seconds from the start of a transfer to its first byte.
    call : float
        Seconds that each call of attention takes in addition to its operations.
    host : int
        Ranks of a host.
    float32, float64 : float, optional
        How many times as long operations take in these dtypes.
    """

    flops: float
    memory: float
    link: float
    far_link: float
    latency: float
    call: float
    host: int
    float32: float = 1.0
    float64: float = 1.0

    def seconds_of(self, flops: float, itemsize: int) -> float:
        """Return the seconds of operations of a dtype of so many bytes."""
        slower = {4: self.float32, 8: self.float64}.get(itemsize, 1.0)
        return flops * slower / self.flops

    def speed_between(self, size: int, distance: int) -> float:
        """Return the bytes a second of the slowest pair, if all ranks send over a distance."""
        near = size <= self.host or distance % size == 0
        return self.link if near else self.far_link


#: An H200 with NVLink and one network adapter of 400 Gb/s, at 16 bits and head_dim 128.
GPU = Machine(7.4e14, 3.6e12, 3.8e11, 5e10, 2e-5, 1e-5, 8, float32=12.0, float64=16.0)
#: Two processor cores, with copies through shared memory.
CPU = Machine(1e11, 1e10, 5e9, 1e9, 1e-4, 1e-4, 2**30)


class Plan(NamedTuple):
    """How attention is shared, as `plan` returns it.

    Attributes
    ----------
    way : str
        "ring" or "heads", the value for the argument `plan` of `attention`.
    seconds : dict of str to float
        The estimated time of each way that is possible.
    bytes : dict of str to int
        For each of these ways, what the rank that receives most receives.
    why : str
        The reason, as a sentence with the estimates.
    """

    way: str
    seconds: Mapping[str, float]
    bytes: Mapping[str, int]
    why: str


class Work(NamedTuple):
    """Attention that ranks share.

    Attributes
    ----------
    queries, keys : tuple
        The segments of each rank.
    band : tuple of int or None
    heads, kv_heads : int
        Of all batch entries.
    dims : tuple of int
        Of queries and keys, and of values.
    itemsize : int
    gradients : bool
    """

    queries: tuple[tuple[Segment, ...], ...]
    keys: tuple[tuple[Segment, ...], ...]
    band: Band
    heads: int
    kv_heads: int
    dims: tuple[int, int]
    itemsize: int
    gradients: bool

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.queries)

    @property
    def flops_of_pair(self) -> float:
        """Operations of a query and a key, of all heads: two products forward, five backward."""
        qk, v = self.dims
        return 2.0 * self.heads * (3 * qk + 2 * v if self.gradients else qk + v)

    def ring(self, machine: Machine) -> tuple[float, int]:
        """Return the seconds of the slowest rank, and the bytes that a rank receives at most.

        Of many ranks those are looked at that can be the slowest: the ones at both ends and in the
        middle, and the one with most queries.
        """
        rows = [sum(part.rows for part in parts) for parts in self.queries]
        some = {0, 1, self.size // 2, self.size - 1, rows.index(max(rows))}
        found = [self._ring_of(rank, machine) for rank in sorted(some) if rank < self.size]
        return max(seconds for seconds, _ in found), max(count for _, count in found)

    def _ring_of(self, rank: int, machine: Machine) -> tuple[float, int]:
        """Transfers run while the block before is computed; returned gradients after the last."""
        own = of_pieces.own_pieces(self.queries[rank], self.keys[rank], self.band)
        rate = machine.seconds_of(self.flops_of_pair, self.itemsize)
        computed = rate * of_pieces.pairs(own, self.band) + machine.call * len(own)
        row = self.itemsize * self.kv_heads * sum(self.dims)
        seconds, total = 0.0, 0
        last_return = 0.0
        for distance in range(1, self.size):
            source = (rank - distance) % self.size
            some = of_pieces.pieces(self.queries[rank], self.keys[source], self.band)
            span = of_pieces.span(some)
            count = 0 if span is None else row * (span[1] - span[0])
            total += count
            sent = 0.0
            if count:
                sent = machine.latency + count / machine.speed_between(self.size, distance)
            # Gradients of a block return while the next one is computed, by the other direction
            # of the links; the last ones have nothing to hide behind.
            seconds += max(computed, sent)
            last_return = sent if self.gradients else 0.0
            computed = rate * of_pieces.pairs(some, self.band) + machine.call * len(some)
            rows = sum(piece.queries[1] - piece.queries[0] for piece in some)
            k_rows = self._rows_returned(rank, distance) if self.gradients else 0
            computed += self._bytes_of_sums(rows, k_rows) / machine.memory
        total *= 2 if self.gradients else 1
        computed += self._bytes_of_rounding(rank) / machine.memory
        return seconds + computed + last_return, total

    def _rows_returned(self, rank: int, distance: int) -> int:
        """Return of how many own keys another rank returns the gradients."""
        other = self.queries[(rank + distance) % self.size]
        span = of_pieces.span(of_pieces.pieces(other, self.keys[rank], self.band))
        return 0 if span is None else span[1] - span[0]

    def _elements(self, q_rows: int, k_rows: int) -> int:
        """Return the elements of the results of some rows: of the output, or of gradients."""
        qk, v = self.dims
        if not self.gradients:
            return self.heads * q_rows * v
        return self.heads * q_rows * qk + self.kv_heads * k_rows * (qk + v)

    @property
    def _itemsize_of_sums(self) -> int:
        """The bytes of an element of the sums that a rank of the ring keeps.

        A rank with few pieces may keep sums in the dtype of the arrays, which is not modelled.
        """
        return self.itemsize if self.size == 2 else max(self.itemsize, 4)

    def _bytes_of_sums(self, q_rows: int, k_rows: int) -> int:
        """Return the bytes that are read and written where results are added to sums."""
        return self._elements(q_rows, k_rows) * (self.itemsize + 2 * self._itemsize_of_sums)

    def _bytes_of_rounding(self, rank: int) -> int:
        """Return those where the first results become sums, and sums become the results."""
        if self._itemsize_of_sums == self.itemsize or self.size == 1:
            return 0
        rows = [sum(part.rows for part in parts[rank]) for parts in (self.queries, self.keys)]
        return self._elements(*rows) * 2 * (self.itemsize + self._itemsize_of_sums)

    def exchange(self, machine: Machine) -> tuple[float, int]:
        """Return the seconds and bytes of the exchange for heads, where it is possible."""
        size = self.size
        q_rows = max(sum(part.rows for part in parts) for parts in self.queries)
        k_rows = max(sum(part.rows for part in parts) for parts in self.keys)
        qk, v = self.dims
        of_queries = (qk + v) * self.heads * q_rows
        of_keys = (qk + v) * self.kv_heads * k_rows
        if self.gradients:  # also dout and out, and dk and dv
            of_queries += (qk + v) * self.heads * q_rows
            of_keys *= 2
        count = self.itemsize * (of_queries + of_keys) * (size - 1) // size
        whole = Segment(0, sum(part.rows for parts in self.queries for part in parts))
        keys = Segment(0, sum(part.rows for parts in self.keys for part in parts))
        own = of_pieces.own_pieces((whole,), (keys,), self.band)
        rate = machine.seconds_of(self.flops_of_pair / size, self.itemsize)
        computed = rate * of_pieces.pairs(own, self.band)
        near = min(machine.host, size) - 1
        sent = count * near / max(1, size - 1) / machine.link
        sent += count * (size - 1 - near) / max(1, size - 1) / machine.far_link
        # Arrays of this rank's heads are put together from parts; results are also cut into parts,
        # and other arrays only if the rows of some heads do not follow each other in memory.
        results = self._elements(q_rows, k_rows)
        given = of_queries + of_keys - results
        copied = self.itemsize * (2 * given + 4 * results) / machine.memory
        return computed + machine.call + sent + copied + 2 * machine.latency, count


def choose(work: Work, machine: Machine, possible: str = "") -> Plan:
    """Return the faster way; `possible` says why the exchange for heads is impossible."""
    seconds: dict[str, float] = {}
    count: dict[str, int] = {}
    seconds["ring"], count["ring"] = work.ring(machine)
    if not possible:
        seconds["heads"], count["heads"] = work.exchange(machine)
    way = min(seconds, key=lambda x: seconds[x])
    times = ", ".join(f"{x} {1e3 * t:.3g} ms" for x, t in seconds.items())
    why = f"estimated {times}" + (f"; no exchange for heads: {possible}" if possible else "")
    return Plan(way, seconds, count, why)


def obstacle(size: int, heads: Sequence[int], rows_given: Sequence[str] = ()) -> str:
    """Return why an exchange for heads is impossible; empty where it is possible.

    Parameters
    ----------
    size : int
    heads : sequence of int
        Those of q, k and v; 0 for an array without an axis of heads.
    rows_given : sequence of str
        Arguments with rows of queries.
    """
    for arg, count in zip("qkv", heads, strict=True):
        if count == 0 or count % size:
            what = f"{count} heads" if count else "no axis of heads"
            return f"{arg} has {what}, want a multiple of the {size} ranks"
    if rows_given:
        return f"{rows_given[0]} has rows of queries, which stay on their ranks"
    return ""


def way_of(
    name: str, wanted: str | None, arrays: Mapping[str, Any], places: Any, shared: Set[str],
    gradients: bool, backend: str,
) -> str:  # fmt: skip
    """Return how the ranks share a call: the same on all ranks, as it depends on shared facts."""
    size = len(places.queries)
    heads = [arrays[arg].shape[-3] if arrays[arg].ndim > 2 else 0 for arg in "qkv"]
    given = [arg for arg in ("bias", "mask", "sinks") if arrays[arg] is not None]
    rows_given = [arg for arg in given if arg not in shared]
    why = obstacle(size, heads, rows_given)
    if wanted == "heads" and why:
        raise ValueError(f"{name}: plan is 'heads', and {why}")
    if wanted is not None or why or size == 1:
        return wanted or "ring"
    q, k, v = (arrays[arg] for arg in "qkv")
    return _way(
        places, _count(q), _count(k), (k.shape[-1], v.shape[-1]), q.dtype.itemsize, gradients,
        backend,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _way(
    places: Any, heads: int, kv_heads: int, dims: tuple[int, int], itemsize: int, gradients: bool,
    backend: str,
) -> str:  # fmt: skip
    work = Work(
        places.queries, places.keys, places.band, heads, kv_heads, dims, itemsize, gradients
    )
    return choose(work, CPU if backend == "numpy" else GPU).way


def _count(x: Any) -> int:
    found = 1
    for n in x.shape[:-2]:
        found *= n
    return found


def plan(
    shape: Sequence[int],
    size: int,
    *,
    kv_heads: int | None = None,
    v_dim: int | None = None,
    dtype: Any = "bfloat16",
    order: str = "contiguous",
    is_causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    gradients: bool = False,
    machine: Machine = GPU,
) -> Plan:
    """Estimate how long attention takes on some ranks, and choose how they share it.

    Parameters
    ----------
    shape : sequence of int
        Of all queries: (..., heads, length, D). There are as many keys.
    size : int
        The number of ranks, at most 65536.
    kv_heads : int, optional
        Heads of keys and values, a divisor of those of the queries; as many by default.
    v_dim : int, optional
        Columns of the values; D by default.
    dtype : dtype
        float16, bfloat16, float32 or float64: how many bytes are sent, and how fast `machine`
        computes.
    order : {"contiguous", "zigzag"}
    is_causal : bool
    window : (left, right), optional
        As in `attention`.
    gradients : bool
        Whether the time is that of `attention_backward`.
    machine : Machine
        By default ``fa_cupy.distributed.plans.GPU``, for H200s. There is also
        ``fa_cupy.distributed.plans.CPU``, for two processor cores. `attention` chooses by these.

    Returns
    -------
    Plan
        The faster way, with the times and the bytes of each.

    Raises
    ------
    TypeError, ValueError
        For other arguments.

    Examples
    --------
    >>> from fa_cupy import distributed
    >>> found = distributed.plan((16, 65536, 128), 2, is_causal=True, order="zigzag")
    >>> found.way, sorted(found.seconds)
    ('ring', ['heads', 'ring'])
    """
    shape = _checked_shape(shape)
    size = checks.whole(_NAME, "size", size, f"an int from 1 to {_MOST}", range(1, _MOST + 1))
    heads = shape[-3] if len(shape) > 2 else 0
    of_keys = heads if kv_heads is None else _checked_kv_heads(kv_heads, max(1, heads))
    dims = shape[-1], shape[-1] if v_dim is None else _whole("v_dim", v_dim)
    segments = tuple(orders.segments(shape[-2], size, orders.checked_order(_NAME, order)))
    band = checks.band(_NAME, is_causal, None, window, FAR, FAR)
    batch = 1
    for n in shape[:-3]:
        batch *= n
    work = Work(
        segments, segments, band, batch * max(1, heads), batch * max(1, of_keys), dims,
        attention_problem.dtype_of(_NAME, dtype).itemsize,
        checks.flag(_NAME, "gradients", gradients),
    )  # fmt: skip
    return choose(work, _checked_machine(machine), obstacle(size, (heads, of_keys, of_keys)))


def _whole(arg: str, value: Any, least: int = 0) -> int:
    wanted = f"an int >= {least} and below 2**62"
    return checks.whole(_NAME, arg, value, wanted, range(least, FAR))


def _checked_shape(shape: Any) -> tuple[int, ...]:
    given = checks.sequence(_NAME, "shape", shape, "a sequence of ints (..., heads, length, D)")
    found = tuple(_whole(f"shape[{i}]", n) for i, n in enumerate(given))
    if len(found) < 2:
        raise ValueError(f"{_NAME}: shape is {found}, want (..., heads, length, D)")
    if math.prod(max(1, n) for n in found) >= FAR:
        raise ValueError(f"{_NAME}: shape is {checks.show(found)}, want below 2**62 elements")
    return found


def _checked_kv_heads(kv_heads: Any, heads: int) -> int:
    count = _whole("kv_heads", kv_heads, 1)
    if heads % count:
        wanted = f"a divisor of {heads}, the number of heads"
        raise ValueError(f"{_NAME}: kv_heads is {count}, want {wanted}")
    return count


def _checked_machine(machine: Any) -> Machine:
    if not isinstance(machine, Machine):
        raise TypeError(f"{_NAME}: machine is {checks.show(machine)}, want a Machine")
    found: dict[str, Any] = {}
    for field, value in machine._asdict().items():
        arg = f"machine.{field}"
        if field == "host":
            found[field] = _whole(arg, value, 1)
            continue
        found[field] = checks.finite(_NAME, arg, value, 0.0)
        if not found[field] and field not in ("latency", "call"):
            raise ValueError(f"{_NAME}: {arg} is {checks.show(value)}, want a finite number > 0")
    return Machine(**found)
