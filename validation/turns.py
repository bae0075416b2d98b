"""Gradients whose turns at dQ are late: how much latency a row of ``bwd_sm90`` bears.

Blocks of keys add to dQ in a fixed order; each waits until the one before has passed its turn on,
by way of the L2 cache.  That takes longer on some cards than on others of the same name.  Here the
kernel is built once more with a pause, for two and for three storing threads, and timed over the
length of the pause: either after the buffer of what was added is free, before the turn is passed
on, or before the buffer is free, as if adding took longer.  The bits of the first head's results
must not change.

Rows go to ``validation/results/turns-<device>.json``, the picture to
``docs/_static/turns-<device>.png``.
"""

from __future__ import annotations

import argparse
import atexit
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from tqdm import tqdm

from validation import cases, peers, report, store, timing
from validation.families import FAMILIES

FAMILY = "attention_bwd"

PAUSES = (0, 400, 800, 1200, 1600, 2400, 3200, 4000, 4800, 6400)  # clocks
STORES = (2, 3)  # threads that store results
_COLORS = {2: "#8a8a8a", 3: "#c1272d"}
CLOCK = 1.7  # GHz, of a busy H200
# What each pause comes before, in the source.
PLACES = {
    "passed on late": "red_release_gpu_add_u32(params.dq_semaphore + query_tile, 1);",
    "added late": "release_staging();\n          if (!work.has_no_query) {",
}
_PAUSE = "for (const long long since = clock64(); clock64() - since < pause[{}];) {{}}"
_MEASURED = tuple(
    cases.Dense("bf16", dim, causal, 4096, 4, 2048 // dim, backward=True)
    for dim in (64, 96, 128)
    for causal in (False, True)
)


def source() -> bytes:
    """Return ``bwd_sm90`` with a pause at each of `PLACES`, of as many clocks as `pause` says."""
    from tests.support.planted import flat

    text = flat("cuda_src/attention/bwd_sm90.cu")
    for i, place in enumerate(PLACES.values()):
        if text.count(place) != 1:
            raise RuntimeError(f"turns: {place!r} is not there once, but {text.count(place)} times")
        text = text.replace(place, f"{_PAUSE.format(i)}\n{place}")
    return f'extern "C" __constant__ int pause[{len(PLACES)}];\n{text}'.encode()


def with_rows(change: Callable[[Sequence[Any]], Sequence[Any]]) -> Callable[..., peers.Call]:
    """Make an implementation of the family that runs what `change` makes of the table's rows."""
    from fa_cupy.core import plan_cache
    from fa_cupy.gpu.kernels import attention_backward

    table = FAMILIES[FAMILY].impls["fa_cupy"]
    plans: dict[Any, Any] = {}  # its own, as those of the other rows have the same keys
    atexit.register(plans.clear)  # as in plan_cache
    select = attention_backward.select

    def changed(*wanted: Any) -> Any:
        return tuple(change(select(*wanted)))

    def make(case: Any, inputs: Any) -> peers.Call:
        call = table(case, inputs)

        def run() -> Any:
            before = plan_cache.plans.copy()
            _fill(plan_cache.plans, plans)
            attention_backward.select = changed
            try:
                return call.run()
            finally:
                attention_backward.select = select
                _fill(plans, plan_cache.plans)
                _fill(plan_cache.plans, before)

        return call._replace(run=run)

    return make


def _fill(table: dict[Any, Any], entries: dict[Any, Any]) -> None:
    """Make a table hold these entries and no others."""
    table.clear()
    table.update(entries)


class Slowed:
    """A row of ``bwd_sm90`` whose turns are passed on late.

    Parameters
    ----------
    store_threads : int
        Of the row; the other fields are those of the table.
    """

    def __init__(self, store_threads: int) -> None:
        self._store_threads = store_threads
        self._modules: dict[Any, Any] = {}

    def rows(self, chain: Sequence[Any]) -> list[Any]:
        """Return the rows of a call with this one in the place of the table's."""
        from fa_cupy.gpu.kernels.attention.bwd_sm90 import BwdSm90

        return [self._row(row) if isinstance(row, BwdSm90) else row for row in chain]

    def _row(self, row: Any) -> Any:
        from fa_cupy.gpu.driver import compile

        row = dataclasses.replace(
            row, store_threads=self._store_threads, why="turns are passed on late"
        )
        if row not in self._modules:
            import cupy

            built = compile.compile_source(
                row.name, source(), "sm_90a", row.defines, made=row.headers
            )
            module = cupy.cuda.function.Module()
            module.load(built.cubin)
            self._modules[row] = module
            # Plans load their kernels from here.
            device = cupy.cuda.Device().id
            compile._loaded[row, "sm_90a", device] = module.get_function(row.entry)
        return row

    def pause(self, place: str, clocks: int) -> None:
        """Set how long the only pause from now on is, and where."""
        import cupy
        import numpy as np

        value = np.array([clocks if name == place else 0 for name in PLACES], np.int32)
        to_device = cupy.cuda.runtime.memcpyHostToDevice
        for module in self._modules.values():
            at = module.get_global_var("pause")
            cupy.cuda.runtime.memcpy(at, value.ctypes.data, value.nbytes, to_device)


def measure(case: cases.Dense, rounds: int) -> list[store.Row]:
    """Time a case for every number of storing threads and every pause."""
    import cupy

    inputs = FAMILIES[FAMILY].inputs(case, 1)
    slowed = {stores: Slowed(stores) for stores in STORES}
    calls = {stores: with_rows(slow.rows)(case, inputs) for stores, slow in slowed.items()}
    first = {stores: _bits(call.run()) for stores, call in calls.items()}  # and compiles
    samples: dict[tuple[int, str, int], list[float]] = {}
    for _ in range(rounds):
        for stores, place, clocks in product(STORES, PLACES, PAUSES):
            slowed[stores].pause(place, clocks)
            if _bits(calls[stores].run()) != first[stores]:
                raise RuntimeError(f"turns: {case.name}, {clocks} clocks, {place}: other bits")
            time.sleep(FAMILIES[FAMILY].rest_ms * 1e-3)
            sample = timing.burst(calls[stores], 4)
            samples.setdefault((stores, place, clocks), []).append(sample)
    del calls
    cupy.get_default_memory_pool().free_all_blocks()
    return [
        {
            "family": "turns", "case": case.name,
            "impl": f"{stores} stores, {place}, {clocks} clocks",
            "ms": (ms := statistics.median(taken)), "value": case.flops / ms / 1e9,
            "unit": "TFLOP/s", "stores": stores, "place": place, "clocks": clocks,
        }
        for (stores, place, clocks), taken in samples.items()
    ]  # fmt: skip


def _bits(grads: Any) -> list[bytes]:
    """Return the bytes of the gradients of the first head."""
    return [peers.to_host(x[0, 0]).tobytes() for x in grads]


def _lines(rows: Sequence[store.Row], case: str) -> dict[tuple[int, str], list[store.Row]]:
    """Return the rows of a case by storing threads and place of the pause."""
    return {
        (stores, place): [
            row
            for row in rows
            if (row["case"], row["stores"], row["place"]) == (case, stores, place)
        ]
        for stores, place in product(STORES, PLACES)
    }


def draw(rows: Sequence[store.Row], facts: dict[str, Any]) -> Any:
    """Draw speed over the pause, a panel a case; None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    names = list(dict.fromkeys(row["case"] for row in rows))
    across = (len(names) + 1) // 2
    figure = Figure(figsize=(3.4 * across, 5.4), layout="constrained")
    for i, name in enumerate(names):
        # Full and causal of one head_dim stand below each other.
        axes = figure.add_subplot(2, across, i // 2 + 1 + i % 2 * across)
        for (stores, place), own in _lines(rows, name).items():
            x, y = zip(*((row["clocks"] / CLOCK, row["value"]) for row in own), strict=True)
            color, style = _COLORS[stores], "o-" if place == "passed on late" else "s--"
            axes.plot(x, y, style, color=color, ms=3, label=f"{stores} storing threads, {place}")
        axes.set_title(name, fontsize=10)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("nanoseconds of the pause", fontsize=8)
        axes.set_ylabel("TFLOP/s", fontsize=8)
        axes.grid(lw=0.4)
        axes.legend(fontsize=6)
    figure.suptitle(f"Gradients on {facts['device']} ({facts['card'][:12]}), late turns")
    path = report.STATIC / f"turns-{store.slug(facts['device'])}.png"
    figure.savefig(path, dpi=110)
    return path


def main(argv: Sequence[str]) -> int:
    """Measure, store, print and draw."""
    p = argparse.ArgumentParser("python -m validation turns", description=__doc__)
    p.add_argument("--rounds", type=int, default=5, help="samples of each")
    p.add_argument("--out", default="", help="JSON file instead of results/turns-<device>.json")
    args = p.parse_args(argv)
    if not store.gpu_available():
        print("turns: needs CuPy and a GPU, and finds none")
        return 2
    from fa_cupy.gpu.driver.devices import current_target

    if current_target() != "sm_90a":
        print(f"turns: only kernels of sm_90a have turns, and this device runs {current_target()}")
        return 2
    rows: list[store.Row] = []
    for case in tqdm(_MEASURED, desc="turns", unit="case", file=sys.stderr):
        rows += measure(case, args.rounds)
    facts = store.header("gpu")
    path = store.Path(args.out) if args.out else store.path_for("turns", facts)
    store.merge(path, facts, rows)
    table = [["TFLOP/s", *(f"{n} clocks" for n in PAUSES)]]
    for name in dict.fromkeys(row["case"] for row in rows):
        for (stores, place), own in _lines(rows, name).items():
            speeds = (f"{row['value']:.0f}" for row in own)
            table.append([f"{name}, {stores} stores, {place}", *speeds])
    print(store.align(table))
    print(f"{facts['device']} {facts['card']}, {len(rows)} rows in {path}")
    print(f"drawn: {draw(rows, facts)}")
    return 0
