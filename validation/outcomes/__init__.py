"""Calls of all public functions, compared with results that are stored from before.

Every call has a name and is made on the same data everywhere. What does not depend on the machine
(errors, shapes, dtypes, strides, bits of masks) is compared exactly, floats by a summary within
rounding. On a machine whose name is stored with digests, all results are compared bit for bit.
The CPU writes the records that all machines are compared with; a GPU adds its digests.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from validation import store
from validation.outcomes import (
    attention,
    errors,
    keys,
    machine,
    masks,
    names,
    products,
    scores,
    smoothing,
)
from validation.outcomes.record import (
    GPU_TOLERANCE,
    TOLERANCE,
    Call,
    Outcome,
    difference,
    outcome,
)

FILE = store.RESULTS / "outcomes.json"
Found = dict[str, Outcome]


def calls(xp: Any = np) -> list[Call]:
    """Return all calls that can be made on arrays of the namespace `xp`."""
    modules = (names, attention, scores, products, smoothing, masks, keys, errors)
    found = [call for module in modules for call in module.calls()]
    return [call for call in found if xp is np or not call.cpu]


def run(xp: Any, chosen: Iterable[Call]) -> Found:
    """Make the calls; the result is by name."""
    with machine.fixed_threads():
        return {call.name: outcome(call, xp) for call in chosen}


def unexpected(chosen: Iterable[Call], found: Found) -> list[str]:
    """Return the calls that raised where they should not, or the other way round."""
    return [
        f"{call.name}: {found[call.name].record[0]}"
        for call in chosen
        if found[call.name].failed != call.fails
    ]


def differing_records(
    xp: Any, chosen: Iterable[Call], stored: Mapping[str, Any], found: Found
) -> list[str]:
    """Return how results differ from stored ones, as far as machines agree on them."""
    tolerance = TOLERANCE if xp is np else GPU_TOLERANCE
    lines = []
    for call in chosen:
        old = stored["calls"].get(call.name)
        what = "not stored"
        if old is not None:
            what = difference(
                old, found[call.name].record, tolerance, call.slack, xp is np or not call.dense
            )
        if what:
            lines.append(f"{call.name}: {what}")
    return lines


def gone(stored: Mapping[str, Any]) -> list[str]:
    """Return the calls that are stored and not made any more."""
    left = stored["calls"].keys() - {call.name for call in calls()}
    return [f"{name}: stored, and no call now" for name in sorted(left)]


def differing_bits(digests: Mapping[str, str], found: Found) -> list[str]:
    """Return the calls whose results have other bits than those that this machine stored."""
    return [
        f"{name}: other bits ({found[name].digest}, stored is {digest})"
        for name, digest in digests.items()
        if name in found and found[name].digest != digest
    ]


def updated(xp: Any, key: str, stored: Mapping[str, Any], found: Found) -> dict[str, Any]:
    """Return what to store after a run.

    Digests that other machines have of a call go where its results are other ones than before.
    """
    before = stored["digests"].get(key, {})
    now = {name: result.digest for name, result in found.items()}
    records = dict(stored["calls"])
    changed = {name for name in before if now.get(name) != before[name]}
    if xp is np:
        records = {name: result.record for name, result in found.items()}
        changed |= {name for name, old in stored["calls"].items() if records.get(name) != old}
    others = {
        other: {name: x for name, x in digests.items() if name not in changed}
        for other, digests in stored["digests"].items()
    }
    return {"calls": records, "digests": others | {key: now}}


def read(path: Path) -> dict[str, Any]:
    """Return what a file holds, nothing where there is none.

    Returns
    -------
    dict
        ``calls``: the record of each call; ``digests``: by machine, the digest of each call.
    """
    if not path.exists():
        return {"calls": {}, "digests": {}}
    file = json.loads(path.read_text(encoding="utf-8"))
    digests = {
        key: {name: of[i] for name, (_, of) in file["calls"].items() if of[i] is not None}
        for i, key in enumerate(file["machines"])
    }
    return {
        "calls": {name: record for name, (record, _) in file["calls"].items()},
        "digests": digests,
    }


def write(path: Path, stored: Mapping[str, Any]) -> None:
    """Write a file with one line for each call, so that differences can be read.

    The line holds the record and the digests in the order of the machines.
    """
    machines = list(stored["digests"])
    lines = []
    for name, record in stored["calls"].items():
        digests = [stored["digests"][key].get(name) for key in machines]
        line = json.dumps([record, digests], separators=(",", ":"))
        lines.append(f"{json.dumps(name)}: {line}")
    body = ",\n".join(lines)
    text = f'{{"machines": {json.dumps(machines, indent=1)},\n"calls": {{\n{body}\n}}}}\n'
    path.write_text(text, encoding="utf-8")


def _report(key: str, digests: Mapping[str, str], found: Found, lines: Sequence[str]) -> int:
    for line in lines:
        print(line)
    compared = len(digests.keys() & found.keys())
    print(f"{len(found)} calls, {compared} compared bit for bit on {key}: {len(lines)} differences")
    return 1 if lines else 0


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser("python -m validation outcomes", description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    for name, text in (("write", "store the results"), ("check", "compare with stored results")):
        action.add_argument(
            f"--{name}", nargs="?", const=FILE, type=Path, metavar="FILE", help=text
        )
    parser.add_argument("--cpu", action="store_true", help="NumPy arrays, also where a GPU is")
    options = parser.parse_args(argv)
    xp: Any = np
    if not options.cpu and store.gpu_available():
        import cupy as xp
    chosen = calls(xp)
    found, key = run(xp, chosen), machine.key(xp)
    path = options.write or options.check
    stored = read(path)
    lines = unexpected(chosen, found)
    if options.check or xp is not np:
        lines += differing_records(xp, chosen, stored, found) + gone(stored)
    if options.check:
        digests = stored["digests"].get(key, {})
        return _report(key, digests, found, lines + differing_bits(digests, found))
    if lines:  # on a GPU, results that differ from the CPU's are not stored
        return _report(key, {}, found, lines)
    write(path, updated(xp, key, stored, found))
    print(f"{path}: {len(found)} calls on {key}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
