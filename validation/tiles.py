"""Tile sizes of the CPU path around the planned one: which of them is the fastest.

Every call computes the same result with other tiles. The plan of `fa_cupy.tiled.tile_sizes` is
replaced for the time of a call, so that the code measured is the code that runs.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from tqdm import tqdm

from fa_cupy.core import attention_problem, plan_cache
from fa_cupy.cpu import attention as cpu
from fa_cupy.tiled import tile_sizes
from fa_cupy.tiled.tile_sizes import Tile
from validation import checks, peers, report, store, timing
from validation.cases import Dense
from validation.peers import Call

FAMILY = "tiles"
HEADS, LENGTH = 8, 2048
CASES = tuple(
    Dense(dtype, head_dim, False, LENGTH, 1, HEADS)
    for dtype, head_dim in product(("fp32", "fp16", "fp64"), (32, 64, 128, 256))
)
FACTORS = (0.5, 1, 2)  # of each edge of the planned tile


def name(case: Dense) -> str:
    """``float32 hd64``: the key of a case's rows."""
    return f"{peers.DTYPES[case.dtype].name} hd{case.head_dim}"


def compute_dtype(case: Dense) -> np.dtype[Any]:
    """What tiles are computed in."""
    return np.dtype(np.float64 if case.dtype == "fp64" else np.float32)


def planned(case: Dense) -> Tile:
    """The tile that serves ``case``."""
    shape = (case.batch, case.heads, case.length, case.head_dim)
    x = np.broadcast_to(np.zeros((), peers.DTYPES[case.dtype]), shape)
    defaults: dict[str, Any] = {"scale": None, "causal_align": None, "window": None}
    problem = attention_problem.attention_problem(
        *(x, x, x, None, None), is_causal=case.causal, softcap=0.0, precision=None, **defaults
    )
    return cpu.planned_tile(problem, compute_dtype(case))


@contextlib.contextmanager
def instead(tile: Tile) -> Iterator[None]:
    """While entered, this is what the planner answers, and no plan with another tile is known."""

    def answer(*_args: Any, **_options: Any) -> Tile:
        return tile

    planner = mock.patch.object(tile_sizes, "tile_sizes", answer)
    with planner, mock.patch.dict(plan_cache.plans, clear=True):
        yield


def candidates(case: Dense) -> list[Tile]:
    """Tiles around the planned one, as they run: `attention` makes the query tiles even."""
    centre = planned(case)
    found = {centre: None}
    for m, n in product(FACTORS, FACTORS):
        edges = (int(centre.tile_m * m), min(int(centre.tile_n * n), case.length))
        with instead(Tile(*edges)):
            found[planned(case)] = None
    return sorted(found)


def measure(case: Dense, rounds: int) -> list[store.Row]:
    """One row a tile, the tiles measured in turn."""
    qkv = peers.random_numpy(case, 1)
    check = checks.attention_check(case, qkv)
    ours = peers.fa_cupy(case, qkv)
    calls, errors = {}, {}
    for tile in candidates(case):

        def run(tile: Tile = tile) -> Any:
            with instead(tile):
                return ours.run()

        impl = f"{tile.tile_m}x{tile.tile_n}"
        calls[impl] = Call(run, ours.native, ours.wait)
        errors[impl] = check(run())
    fixed = {"family": FAMILY, "case": name(case), "unit": "GFLOP/s"}
    sampling = timing.Sampling(burst_ms=0, rounds=rounds)
    return [
        {**fixed, "impl": impl, "ms": ms, "value": case.flops / ms / 1e6, "error": errors[impl]}
        for impl, ms in timing.interleaved(calls, sampling).items()
    ]


def table(rows: Sequence[store.Row]) -> str:
    """Planned and fastest tile of each case."""
    lines = [["tiles (GFLOP/s)", "planned", "", "fastest", "", "fastest / planned"]]
    for case in CASES:
        speed = {row["impl"]: row["value"] for row in rows if row["case"] == name(case)}
        if speed:
            plan, best = "x".join(map(str, planned(case))), max(speed, key=speed.__getitem__)
            numbers = (f"{speed[plan]:.0f}", best, f"{speed[best]:.0f}")
            lines.append([name(case), plan, *numbers, f"{speed[best] / speed[plan]:.2f}"])
    return store.align(lines)


def main(argv: Sequence[str]) -> int:
    """Measure the cases asked for; 1 where a tile gives a wrong result."""
    p = argparse.ArgumentParser(
        "python -m validation tiles",
        description="tiles of the CPU path around the planned one; wants an idle machine",
    )
    p.add_argument("--cases", default="*", help="pattern, such as 'float32 *'")
    p.add_argument("--rounds", type=int, default=5, help="samples of each tile")
    p.add_argument("--out", default="", help="JSON file instead of results/bench-cpu.json")
    args = p.parse_args(argv)
    chosen = [case for case in CASES if fnmatch.fnmatchcase(name(case), args.cases)]
    if not chosen:
        print(f"no case matches {args.cases!r}; there are {', '.join(map(name, CASES))}")
        return 2
    rows = []
    wrong = []
    for case in tqdm(chosen, desc=FAMILY, unit="case", file=sys.stderr):
        fresh = measure(case, args.rounds)
        limit = report.ERROR_LIMIT.get(case.dtype, 1e-13)
        wrong += [f"{r['case']} {r['impl']}" for r in fresh if not r["error"] <= limit]
        rows += fresh
    facts = store.header("cpu")
    path = Path(args.out) if args.out else store.path_for("bench", facts)
    store.merge(path, facts, rows)
    print(table(rows))
    print(f"{facts['cpu']}, {len(rows)} rows in {path}")
    if wrong:
        print(f"wrong results: {', '.join(wrong)}")
    return int(bool(wrong))
