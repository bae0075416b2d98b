"""Timings beside the peers that are importable in this process.

``python -m validation bench`` runs every implementation of a case in turn, over several rounds, so
that a drift of the clocks meets all of them alike, and keeps the median, or the minimum of small
calls.  Before anything is timed, every result is compared with float64 arithmetic on the host, on
memory that was filled with NaN.  Rows go to ``validation/results/bench-<device>.json``; those of
other runs stay there, and ratios are only taken between rows of one run.

A family is one entry in `validation.families.FAMILIES`.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from validation import peers, report, small_multiples, store, timing
from validation.families import FAMILIES
from validation.peers import Call, UnavailableError


def measure(
    name: str, case: Any, impls: Sequence[str], rounds: int
) -> tuple[list[store.Row], dict[str, str]]:
    """Rows of one case, and why implementations are missing from it.

    With 0 rounds there are as many as the family has.
    """
    family = FAMILIES[name]
    inputs = family.inputs(case, 1)
    check = family.check(case, inputs)
    calls: dict[str, Call] = {}
    errors: dict[str, float] = {}
    missing: dict[str, str] = {}
    rows: list[store.Row] = []
    blank = {"family": name, "case": case.name, "ms": None, "value": None, "unit": family.unit}
    for impl in impls:
        try:
            call = family.impls[impl](case, inputs)
            call.run()  # compiles what has to be compiled
            peers.poison(*inputs)
            errors[impl] = check(call.native(call.run()))
            calls[impl] = call
        except UnavailableError as reason:
            missing[impl] = str(reason)
        except Exception as failure:  # a peer may fail in any way; its row says how
            text = f"{type(failure).__name__}: {failure}".splitlines()[0][:200]
            rows.append({**blank, "impl": impl, "error": None, "failed": text})
            missing[impl] = text
    if calls:
        sampling = dataclasses.replace(family, rounds=rounds) if rounds else family
        for impl, ms_of_a_run in timing.interleaved(calls, sampling).items():
            ms = ms_of_a_run / calls[impl].calls
            timed = {"impl": impl, "ms": ms, "value": family.value(case, ms), "error": errors[impl]}
            named = {"variant": calls[impl].variant} if calls[impl].variant else {}
            rows.append({**blank, **timed, "statistic": family.statistic, **named})
    return rows, missing


# --------------------------------------------------------------------------------------- command
def parser() -> argparse.ArgumentParser:
    """Options of the command."""
    p = argparse.ArgumentParser("python -m validation bench", description="time beside the peers")
    p.add_argument(
        "--families", default="", help="comma list; default: all that run on the device found"
    )
    p.add_argument("--cases", default="*", help="pattern, such as 'bf16 hd128 causal *'")
    p.add_argument("--impls", default="", help="comma list or 'all'; default: the main ones")
    p.add_argument(
        "--rounds",
        type=int,
        default=0,
        help="samples of each implementation; default: the family's",
    )
    p.add_argument("--budget", type=float, default=float("inf"), help="seconds; stops after them")
    p.add_argument("--out", default="", help="JSON file instead of results/bench-<device>.json")
    p.add_argument("--plot", default="", help="picture instead of docs/_static/bench-<device>.png")
    return p


def run_family(name: str, args: argparse.Namespace, started: float) -> list[store.Row]:
    """Measure, store, print and draw one family; returns the fresh rows."""
    family = FAMILIES[name]
    chosen = [case for case in family.cases if fnmatch.fnmatchcase(case.name, args.cases)]
    asked = args.impls.split(",") if args.impls else list(family.default_impls)
    asked = list(family.impls) if asked == ["all"] else asked
    impls = [impl for impl in asked if impl in family.impls]
    if not chosen or not impls:
        print(f"{name}: no case matches {args.cases!r} with implementations {asked}")
        return []
    rows: list[store.Row] = []
    missing: dict[str, dict[str, None]] = {}
    late = []
    lost: Exception | None = None
    for case in tqdm(chosen, desc=name, unit="case", file=sys.stderr):
        if time.perf_counter() - started > args.budget:
            late.append(case.name)
            continue
        # float32 stands beside plain CuPy, which the fused kernels of the peers do not serve
        extra = ["plain_cupy"] if case.dtype == "fp32" and not args.impls else []
        here = impls + [impl for impl in extra if impl in family.impls and impl not in impls]
        try:
            fresh, reasons = measure(name, case, here, args.rounds)
        except Exception as failure:  # most likely the device's context: keep what there is
            lost = failure
            break
        rows += fresh
        for impl, reason in reasons.items():
            missing.setdefault(impl, {})[reason] = None
    for impl, found in missing.items():
        print(f"{name}: {impl} left out of some or all cases: {'; '.join(found)}")
    if late:
        print(f"{name}: over the budget of {args.budget:.0f} s, not measured: {', '.join(late)}")
    if not rows:
        if lost is not None:
            raise lost
        return []
    facts = store.header(family.device)
    path = Path(args.out) if args.out else store.path_for("bench", facts)
    store.merge(path, facts, rows)
    print(report.table(rows, report.best_peers(facts, name)))
    print(f"{facts['device']}, {len(rows)} rows in {path}")
    together = {n for n, other in FAMILIES.items() if other.picture == family.picture}
    merged = [row for row in store.load(path)[1] if row["family"] in together]
    draw = small_multiples.draw if family.unit in report.TIMES else report.draw
    picture = draw(merged, facts, args.plot, family.picture)
    print(f"drawn: {picture}" if picture else "nothing drawn: no matplotlib, or too few lengths")
    if lost is not None:
        raise lost
    return rows


def main(argv: Sequence[str]) -> int:
    """Run the families asked for; 1 where an implementation failed or was wrong."""
    args = parser().parse_args(argv)
    device = "gpu" if store.gpu_available() else "cpu"
    names = [n for n in args.families.split(",") if n]
    names = names or [n for n, family in FAMILIES.items() if family.device == device]
    unknown = [n for n in names if n not in FAMILIES]
    if unknown:
        print(f"no family {unknown[0]!r}; there are {', '.join(FAMILIES)}")
        return 2
    started = time.perf_counter()
    findings: list[str] = []
    for name in names:
        if FAMILIES[name].device == "gpu" and device != "gpu":
            print(f"{name}: needs CuPy and a GPU, and finds none")
            return 2
        findings += report.wrong(run_family(name, args, started))
    print("\n".join(findings) if findings else f"all right, {time.perf_counter() - started:.0f} s")
    return 1 if findings else 0
