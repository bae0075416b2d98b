"""Attention and causal products on several GPUs of one host, compared with one GPU and a model.

``python -m validation ring`` times the same whole problem on one GPU and on all that are there,
forward and gradients, causal and full, by the ring and by the exchange for heads, and causal
products. It checks that results are the same bits when they are computed again, and their errors
against one GPU. The model is that of `fa_cupy.distributed.plan`, with the speeds measured here: of
the slowest GPU, for calls as large as those of a rank, and of copies between two GPUs. Rows go to
``validation/results/ring-<device>.json``.

``--predict`` prints what the model says of 8, 64 and 512 GPUs instead, and needs no GPU.
"""

from __future__ import annotations

import argparse
import statistics
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from fa_cupy import distributed
from fa_cupy.distributed import order as orders
from fa_cupy.distributed import plans
from fa_cupy.distributed.order import dense
from validation import copy_trace, store

FAMILY = "distributed"
HEADS, DIM = 16, 128
#: What the model takes a network adapter for: 400 Gb/s, in bytes.
FAR = 5e10
#: Operations a second of one H200 for these calls, at 262,144 tokens; used without a GPU.
_KNOWN = {"fwd": 7.4e14, "bwd": 5.6e14}
_TOKENS = (65_536, 262_144)
_PRODUCTS = (65_536, 262_144, 1_000_000)
_WAYS = ("ring", "heads")
_LONG = 400_000  # tokens from which on one call is timed, after one that is not


class Case(NamedTuple):
    """A whole problem.

    Attributes
    ----------
    what : str
        "attention" or "product".
    tokens : int
    gradients, is_causal : bool
    heads : int
    """

    what: str
    tokens: int
    gradients: bool
    is_causal: bool = True
    heads: int = HEADS

    @property
    def label(self) -> str:
        """What rows call it."""
        kind = ("causal" if self.is_causal else "full") if self.what == "attention" else "product"
        name = "bwd" if self.gradients else "fwd"
        return f"bf16 {self.tokens}x1 h{self.heads} d{DIM} {kind} {name}"

    @property
    def order(self) -> str:
        """The order of the sequence on the ranks."""
        return "zigzag" if self.what == "attention" and self.is_causal else "contiguous"

    def work(self, size: int) -> plans.Work:
        """Return it as the model takes it."""
        parts = tuple(orders.segments(self.tokens, size, self.order))
        band = (None, 0 if self.is_causal else None)
        return plans.Work(parts, parts, band, self.heads, self.heads, (DIM, DIM), 2, self.gradients)

    @property
    def flops(self) -> float:
        """Operations of attention."""
        pairs = self.tokens * (self.tokens + 1) / 2 if self.is_causal else self.tokens**2
        return self.work(1).flops_of_pair * pairs

    @property
    def rounds(self) -> int:
        """How many calls a sample has, or 0 for one sample of one call."""
        if self.what == "product":
            return 20
        return 0 if self.tokens >= _LONG else 1 if self.tokens >= _LONG // 2 else 3

    def rounds_of(self, size: int) -> int:
        """Return the same of some ranks: a sample takes about as long as one of one GPU."""
        return self.rounds if self.what == "product" else self.rounds * size

    def of_rank(self, size: int, way: str) -> Case:
        """Return one as large as the calls of one of some ranks."""
        if way == "ring":
            return self._replace(tokens=self.tokens // size)
        return self._replace(heads=self.heads // size)


def cases(tokens: Sequence[int], products: Sequence[int]) -> Iterator[Case]:
    """Yield the cases of some lengths, of attention and of causal products."""
    for length in tokens:
        for gradients in (False, True):
            for is_causal in (False, True):
                yield Case("attention", length, gradients, is_causal)
    for length in products:
        for gradients in (False, True):
            yield Case("product", length, gradients)


# Measurements


def inputs(case: Case) -> list[Any]:
    """Return q, k, v and dout of a whole problem, on CuPy's current device."""
    import cupy

    generator = cupy.random.default_rng(1)
    shape = (1, case.heads, case.tokens, DIM)
    scale = 1.0 if case.what == "attention" else DIM**-0.5
    return [
        (generator.standard_normal(shape, cupy.float32) * scale).astype(ml_dtypes.bfloat16)
        for _ in range(4 if case.gradients else 3)
    ]


def call_of(case: Case, comm: Any = None, way: str | None = None) -> Callable[..., Any]:
    """Return what computes a case on the arrays of `inputs`, or on the part of a rank."""
    import fa_cupy

    library: Any = fa_cupy if comm is None else distributed
    options = {} if comm is None else {"comm": comm}
    if case.what == "product":
        if case.gradients:
            return lambda q, k, v, dout: library.causal_product_backward(dout, q, k, v, **options)
        return lambda q, k, v: (library.causal_product(q, k, v, **options),)
    options["is_causal"] = case.is_causal
    if comm is not None:
        options |= {"order": case.order, "plan": way}
    if not case.gradients:
        return lambda q, k, v: library.attention(q, k, v, return_lse=True, **options)[:1]
    results: list[Any] = []

    def gradients(q: Any, k: Any, v: Any, dout: Any) -> Any:
        if not results:  # once: only gradients are timed
            results.extend(library.attention(q, k, v, return_lse=True, **options))
        return library.attention_backward(dout, q, k, v, *results, **options)

    return gradients


class Timed(NamedTuple):
    """Some calls that run together on all ranks.

    Attributes
    ----------
    seconds : float
        The median of the samples.
    first, last : tuple of array
        The results of the first call, which is not timed, and of the last one.
    """

    seconds: float
    first: Any
    last: Any


def timed(run: Callable[[], Any], meet: Callable[[], Any], rounds: int) -> Timed:
    """Time calls; `meet` lets all ranks begin together, and returns the longest of their times.

    The first call is not counted. Each of three samples has so many `rounds`; with none, one call
    more is timed.
    """
    import cupy

    stream = cupy.cuda.get_current_stream()

    def sample(calls: int) -> tuple[float, Any]:
        meet(0.0)
        begin = time.perf_counter()
        for _ in range(calls):
            result = run()
        stream.synchronize()
        return meet((time.perf_counter() - begin) / calls), result

    first = sample(1)[1]
    samples = [sample(rounds) for _ in range(3)] if rounds else [sample(1)]
    return Timed(statistics.median(x for x, _ in samples), first, samples[-1][1])


def relative_error(found: Any, wanted: Any) -> float:
    """Return the largest difference, relative to each element or, if larger, to their rms.

    The first keys of causal gradients are far larger than the rms, and rounded as such.
    """
    import cupy

    worst = 0.0
    size = 2**24
    flat = [x.reshape(-1) for x in (found, wanted)]
    for begin in range(0, flat[0].size, size):
        a, b = (x[begin : begin + size].astype(cupy.float32) for x in flat)
        scale = cupy.maximum(cupy.abs(b), cupy.sqrt(cupy.mean(b * b)))
        worst = max(worst, float((cupy.abs(a - b) / scale).max()))
    return worst


class Measured(NamedTuple):
    """What one case gave on some GPUs.

    Attributes
    ----------
    seconds : float
        Of the slowest rank.
    same : bool
        Whether a second computation gave the same bits.
    error : float
        Against one GPU; see `relative_error`.
    """

    seconds: float
    same: bool
    error: float


def of_one_gpu(case: Case, rounds: int) -> Timed:
    """Compute a case on device 0 alone."""
    import cupy

    with cupy.cuda.Device(0):
        run, arrays = call_of(case), inputs(case)
        return timed(lambda: run(*arrays), lambda seconds: seconds, rounds)


def of_slowest(ranks: Any, case: Case, rounds: int) -> float:
    """Return the seconds of a case on the slowest GPU, while all compute it, each for itself."""

    def alone(comm: Any) -> float:
        run, arrays = call_of(case), inputs(case)
        return timed(lambda: run(*arrays), lambda x: longest(comm, x), rounds).seconds

    return float(max(ranks(alone)))


def measure(ranks: Any, case: Case, way: str | None, wanted: Any) -> Measured:
    """Compute a case on all ranks; `wanted` are the results of one GPU, on device 0."""
    import cupy

    with cupy.cuda.Device(ranks.devices[0]):
        whole = inputs(case)
        cupy.cuda.Device().synchronize()

    def part(comm: Any) -> Any:
        mine = parts_of(whole, case, comm, ranks.devices[0])
        run = call_of(case, comm, way)
        found = timed(lambda: run(*mine), lambda x: longest(comm, x), case.rounds_of(comm.size))
        pairs = zip(found.first, found.last, strict=True)
        same = all(bool((x.view("u2") == y.view("u2")).all()) for x, y in pairs)
        return found.seconds, same, [dense(x.view("u2")) for x in found.first]

    found = ranks(part)
    with cupy.cuda.Device(ranks.devices[0]):
        error = 0.0
        for i, one in enumerate(wanted):
            here = [parts[i].copy() for _, _, parts in found]
            joined = distributed.join(here, order=case.order).view(ml_dtypes.bfloat16)
            error = max(error, relative_error(joined, one))
    return Measured(max(x for x, _, _ in found), all(x for _, x, _ in found), error)


def parts_of(whole: Sequence[Any], case: Case, comm: Any, device: int) -> list[Any]:
    """Return a rank's own parts of arrays on some device, on the rank's."""
    import cupy

    mine = []
    for x in whole:
        with cupy.cuda.Device(device):
            own = dense(distributed.split(x.view(np.uint16), comm, order=case.order))
            cupy.cuda.Device().synchronize()
        mine.append(own.copy().view(ml_dtypes.bfloat16))
        # Other ranks may get the memory of `own`, which the copy reads on a stream of this rank.
        cupy.cuda.get_current_stream().synchronize()
    return mine


def trace(case: Case, size: int, way: str) -> list[copy_trace.Interval]:
    """Return what the GPUs do in two calls that are not the first."""
    import cupy

    with distributed.local(size, devices=range(size), timeout=120) as ranks:
        with cupy.cuda.Device(0):
            whole = inputs(case)
            cupy.cuda.Device().synchronize()

        parts = ranks(lambda comm: parts_of(whole, case, comm, 0))

        def twice(comm: Any) -> None:
            run = call_of(case, comm, way)
            run(*parts[comm.rank])
            cupy.cuda.Device().synchronize()
            longest(comm, 0.0)
            run(*parts[comm.rank])

        ranks(twice)
        return copy_trace.traced(lambda: ranks(twice))


def longest(comm: Any, seconds: float) -> float:
    """Let all ranks go on together, and return the longest of their times."""
    found = comm.gather(struct.pack("=d", seconds), "validation")
    return max(struct.unpack("=d", x)[0] for x in found)


def link_speed(ranks: Any, nbytes: int) -> float:
    """Return the bytes a second that all ranks send to the next one at the same time."""
    import cupy

    def part(comm: Any) -> float:
        sent, received = cupy.zeros(nbytes, cupy.uint8), cupy.empty(nbytes, cupy.uint8)
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

        def run() -> tuple[Any]:
            comm.start([(after, sent)], [(before, received)], "validation").wait()
            return (received,)

        return timed(run, lambda x: longest(comm, x), 8).seconds

    return nbytes / max(ranks(part))


# The model


def predicted(case: Case, size: int, way: str, machine: plans.Machine) -> float:
    """Return the seconds of attention on some ranks by the model."""
    work = case.work(size)
    return work.ring(machine)[0] if way == "ring" else work.exchange(machine)[0]


def table(rates: dict[str, float], link: float) -> list[str]:
    """Return the lines of a table for 8, 64 and 512 GPUs: seconds, and the share of the ideal."""
    lines = ["tokens      GPUs  pass  kind     ring ms  share   heads ms  share   ring receives"]
    for tokens in (1_048_576, 8_388_608):
        for size in (8, 64, 512):
            for gradients in (False, True):
                name = "bwd" if gradients else "fwd"
                case = Case("attention", tokens, gradients)
                machine = plans.GPU._replace(flops=rates[name], link=link, far_link=FAR)
                ideal = case.flops / rates[name] / size
                ring, count = case.work(size).ring(machine)
                text = f"{tokens:<10,}  {size:<4}  {name}   causal"
                text += f"  {1e3 * ring:9.1f}  {ideal / ring:5.2f}"
                if HEADS % size == 0:
                    heads, _ = case.work(size).exchange(machine)
                    text += f"  {1e3 * heads:9.1f}  {ideal / heads:5.2f}"
                else:
                    text += "          -      -"
                lines.append(f"{text}   {count / 1e9:8.2f} GB")
    return lines


def rows(some: Sequence[Case], size: int, ways: Sequence[str]) -> Iterator[store.Row]:
    """Measure cases, and yield rows."""
    import cupy

    with distributed.local(size, devices=range(size), timeout=120) as ranks:
        link = link_speed(ranks, 2**27)
        print(f"copies between {size} GPUs: {link / 1e9:.0f} GB/s each way", flush=True)
        for case in some:
            one = of_one_gpu(case, case.rounds)
            yield row(case, "1 GPU", one.seconds)
            for way in ways if case.what == "attention" else (None,):
                found = measure(ranks, case, way, one.first)
                extra = {
                    "speedup": one.seconds / found.seconds, "same_bits": found.same,
                    "error": found.error,
                }  # fmt: skip
                if way is not None:
                    part = case.of_rank(size, way)
                    # As long as the work of a rank: power limits what runs for a while.
                    calls = max(case.rounds_of(size), 1) * (size if way == "ring" else 1)
                    seconds = of_slowest(ranks, part, calls)
                    yield row(part, f"{size} GPUs, slowest", seconds)
                    machine = plans.GPU._replace(flops=part.flops / seconds, link=link)
                    extra["model_ms"] = 1e3 * predicted(case, size, way, machine)
                yield row(case, f"{size} GPUs {way or 'scan'}", found.seconds, **extra)
            del one
            for device in range(size):
                with cupy.cuda.Device(device):
                    cupy.get_default_memory_pool().free_all_blocks()


def row(case: Case, impl: str, seconds: float, **extra: Any) -> store.Row:
    """Return a row of results, and print it."""
    facts = "  ".join(f"{name} {x:.4g}" for name, x in extra.items())
    print(f"{case.label:36} {impl:17} {1e3 * seconds:9.3f} ms  {facts}", flush=True)
    return {
        "family": FAMILY, "case": case.label, "impl": impl, "ms": 1e3 * seconds,
        "unit": "ms", **extra, "date": store.now(),
    }  # fmt: skip


def main(argv: list[str]) -> int:
    """Measure, or predict."""
    parser = argparse.ArgumentParser(prog="python -m validation ring", description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=_TOKENS)
    parser.add_argument("--products", type=int, nargs="*", default=_PRODUCTS)
    parser.add_argument("--ways", nargs="+", choices=_WAYS, default=_WAYS)
    parser.add_argument("--gpus", type=int, help="how many; all by default")
    parser.add_argument(
        "--predict", action="store_true", help="for 8, 64 and 512 GPUs, by the model"
    )
    parser.add_argument("--no-write", action="store_true", help="only print")
    parser.add_argument(
        "--trace", action="store_true",
        help="only say when copies run and when kernels do (needs torch)",
    )  # fmt: skip
    args = parser.parse_args(argv)
    if args.predict:
        print("\n".join(table(_KNOWN, plans.GPU.link)))
        return 0
    if not store.gpu_available():
        print("ring: no GPU, want at least 2 (or --predict)")
        return 1
    import cupy

    size = args.gpus or cupy.cuda.runtime.getDeviceCount()
    if args.trace:
        for case in cases(args.tokens, ()):
            for way in args.ways:
                events = trace(case, size, way)
                print("\n".join([f"{case.label}, {size} GPUs, {way}", *copy_trace.summary(events)]))
                print("\n".join(copy_trace.listed(events)), flush=True)
        return 0
    some = list(cases(args.tokens, args.products))
    facts = store.header("gpu")
    path = store.RESULTS / f"ring-{store.slug(facts['device'])}.json"
    for found in rows(some, size, args.ways):  # each is kept, should a later one fail
        if not args.no_write:
            store.merge(path, facts, [found])
    return 0
