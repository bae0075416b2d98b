"""The receipt of the last GPU run: written on a GPU machine, checked where there is none.

``python -m validation.receipt write RUN_FOLDER RECEIPT`` joins what pytest and the sanitizers left
in a folder, ``failed RUN_FOLDER`` names the tests that failed, a line each, ``check`` holds the
receipt against the tree, ``pending WHY`` marks a tree that no GPU has seen, ``digest`` prints what
the digest is made of. See ``make test-gpu``.
"""

import argparse
import datetime
import hashlib
import json
import os
import platform
import subprocess
import sys
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

from validation import store
from validation.digest import ROOT, Prints, digest, fingerprints

RECEIPT = Path("validation/results/receipt.json")
# What `make test-gpu` hands over from its two steps.
TESTS, SANITIZER = "tests.json", "sanitizer.json"
# The second run of what had failed: tests, where the machine was to blame, and files that could not
# be imported, which pytest names with this ending.
AGAIN, NOT_COLLECTED = "again.json", " (collection)"


def _seal(run: dict[str, Any]) -> str:
    """Digest a run's record, so that an edit by hand shows."""
    return hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()


def _today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _read(path: Path) -> dict[str, Any]:
    """Return a JSON object, empty where there is none to read."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _save(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


def environment() -> dict[str, str]:
    """Name the device and the versions that a run depends on."""
    import cupy
    from cuda.bindings import nvrtc

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = "unknown"
    _, major, minor = nvrtc.nvrtcVersion()
    return {
        "device": properties["name"].decode(),
        "card": store.card(cupy.cuda.Device().id),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "driver": driver,
        "driver_cuda": str(cupy.cuda.runtime.driverGetVersion()),
        "nvrtc": f"{major}.{minor}",
        "cupy": cupy.__version__,
        "numpy": metadata.version("numpy"),
        "hypothesis": metadata.version("hypothesis"),
        "python": platform.python_version(),
    }


def flaws(run: dict[str, Any]) -> list[str]:
    """Say why a run does not count as a pass; empty for one that does."""
    tests, tools = run.get("tests", {}), run.get("sanitizer", {}).get("tools", {})
    found = [f"failed: {name}" for name in tests.get("failed", [])]
    if not tests.get("passed"):
        found.append("no GPU test passed")
    if tests.get("left_out"):
        found.append(f"{tests['left_out']} GPU tests were left out by options")
    if not tests.get("whole"):
        found.append("the run was cut short, or covered only part of tests/")
    if not tools:
        found.append("no sanitizer reported")
    found += [f"not in the table: {line}" for line in run.get("code", {}).get("changes", [])]
    for name, tool in sorted(tools.items()):
        if tool.get("ran") and tool.get("errors") != 0:
            found.append(f"{name}: {tool.get('errors')} errors")
    return found


def _surplus(prints: Prints, others: Prints) -> dict[tuple[str, str], str]:
    """Return what these fingerprints have and the others lack, by path and name.

    Where several places share a fingerprint, those that the others have too are left out first.
    """
    count = Counter(value for names in others.values() for value in names.values())
    places = sorted(
        ((path, name), value) for path, names in prints.items() for name, value in names.items()
    )
    places.sort(key=lambda place: others.get(place[0][0], {}).get(place[0][1]) != place[1])
    found = {}
    for place, value in places:
        if count[value]:
            count[value] -= 1
        else:
            found[place] = value
    return found


def changes(recorded: Prints, prints: Prints) -> list[str]:
    """Name the definitions and kernels that differ between the recorded fingerprints and these."""
    gone, new = _surplus(recorded, prints), _surplus(prints, recorded)
    what = dict.fromkeys(gone, "gone") | dict.fromkeys(new, "new")
    for place in gone.keys() & new.keys():
        what[place] = "changed"
    for _, name in gone.keys() - new.keys():  # what has moved and was changed besides
        old = [place for place in what if place[1] == name and what[place] == "gone"]
        now = [place for place in what if place[1] == name and what[place] == "new"]
        if len(old) == len(now) == 1:
            del what[old[0]]
            what[now[0]] = "changed"
    return [f"{what[place]} since: {place[0]}: {place[1]}" for place in sorted(what)]


def problems(receipt: dict[str, Any], prints: Prints) -> list[str]:
    """Say why a receipt does not vouch for the tree with these fingerprints; empty if it does."""
    run = receipt.get("run")
    if not isinstance(run, dict):
        return ["there is no receipt of a GPU run"]
    if receipt.get("seal") != _seal(run):
        return ["the receipt was edited by hand"]
    if "definitions" not in run:
        return [*flaws(run), "the run was recorded by files, and cannot be compared"]
    return flaws(run) + changes(run["definitions"], prints)


def machine_code() -> dict[str, Any]:
    """Hold the table of machine code, which the digest is taken from, against what was compiled."""
    from fa_cupy.gpu.kernels.registry import ROWS
    from validation import sass

    made_with, recorded = sass.read(sass.TABLE)
    if sass.version() != made_with:
        why = f"the table was made with NVRTC {made_with}, this is {sass.version()}"
        return {"compared": False, "why": why}
    return {"compared": True, "changes": sass.changes(recorded, sass.compiled_rows(ROWS))}


def failed_in(tests: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the tests that failed, and the files that could not be imported."""
    failed = tests.get("failed", [])
    files = [name.removesuffix(NOT_COLLECTED) for name in failed if name.endswith(NOT_COLLECTED)]
    return [name for name in failed if not name.endswith(NOT_COLLECTED)], files


def with_second_run(tests: dict[str, Any], again: dict[str, Any]) -> dict[str, Any]:
    """Return the record of the tests with that of those that failed and were run again.

    The second one counts if it is of all that failed, all of it passed, and the definitions are the
    same. Those of files that could not be imported may differ: no test that passed has used them.
    The names of what was run again stay in the record, as `again`.
    """
    failed, files = failed_in(tests)
    passed = again.get("passed", {})
    of_tests = {name: n for name, n in passed.items() if name.partition("::")[0] not in files}
    recorded, found = (
        {path: names for path, names in run.get("definitions", {}).items() if path not in files}
        for run in (tests, again)
    )
    counts = (
        bool(failed or files)
        and found == recorded
        and not again.get("failed")
        and {*files} <= {*again.get("arguments", [])}
        and not again.get("left_out")
        and sum(of_tests.values()) == len(failed)
        and {name.partition("[")[0] for name in failed} == {*of_tests}
    )
    if not counts:
        return tests
    both = {
        key: dict(Counter(tests.get(key, {})) + Counter(again.get(key, {})))
        for key in ("passed", "hypothesis")
    }
    skipped = tests.get("skipped", {}) | again.get("skipped", {})
    new = {"failed": [], "again": tests["failed"], "definitions": again["definitions"]}
    return tests | both | new | {"skipped": skipped}


def write(folder: Path, target: Path) -> list[str]:
    """Write the receipt of the run whose parts lie in ``folder``; return what is wrong with it."""
    prints = fingerprints()
    tests, sanitizer = _read(folder / TESTS), _read(folder / SANITIZER)
    tests = with_second_run(tests, _read(folder / AGAIN))
    uncovered = sorted(
        {name.partition("::")[0] for name in tests.get("passed", {})} - prints.keys()
    )
    if uncovered:
        sys.exit(f"receipt: GPU tests that the digest does not see: {', '.join(uncovered)}")
    # What counts is the tree that the tests ran on, not the one that is here when they are done.
    recorded = tests.pop("definitions", {})
    try:
        machine = environment()
    except (ImportError, RuntimeError) as error:
        sys.exit(f"receipt: this machine cannot vouch for a GPU run: {error}")
    run = {
        "date": _today(),
        "digest": digest(recorded),
        "definitions": recorded,
        "code": machine_code(),
        "environment": machine,
        "tests": tests,
        "sanitizer": sanitizer,
    }
    receipt = {"run": run, "seal": _seal(run)}
    _save(target, receipt)
    return problems(receipt, prints)


def mark_pending(path: Path, why: str) -> None:
    """Mark the tree as not seen by a GPU; the next GPU run writes a receipt without the mark."""
    if not why.strip():
        sys.exit('receipt: say why, as in make receipt-pending WHY="no GPU could be had"')
    _save(path, _read(path) | {"pending": {"why": why.strip(), "since": _today()}})


def summary(run: dict[str, Any]) -> str:
    """Describe a run in one line."""
    tests, machine = run["tests"], run["environment"]
    return (
        f"{run['date'][:10]}, {machine['device']}, NVRTC {machine['nvrtc']}: "
        f"{sum(tests['passed'].values())} tests passed, {len(tests['skipped'])} skipped, "
        f"{sum(tests['hypothesis'].values())} hypothesis examples; "
        + (f"{len(tests['again'])} failed and passed when run again; " if "again" in tests else "")
        + f"machine code {'as in the table' if run['code']['compared'] else 'NOT COMPARED'}; "
        + "; ".join(
            f"{name} {'clean' if tool.get('ran') else 'NOT RUN: ' + str(tool.get('why'))}"
            for name, tool in sorted(run["sanitizer"]["tools"].items())
        )
    )


def _listing(lines: list[str], indent: str, most: int = 20) -> str:
    more = [f"and {len(lines) - most} more"] if len(lines) > most else []
    return "\n".join(indent + line for line in lines[:most] + more)


def check(path: Path, prints: Prints, strict: bool) -> int:
    """Print what the receipt says of the tree; return 1 where that is a failure."""
    receipt = _read(path)
    found = problems(receipt, prints)
    if "pending" in receipt:
        mark = receipt["pending"]
        print(f"{'!' * 78}\n!! NO GPU HAS SEEN THIS TREE since {mark['since']}: {mark['why']}")
        print(_listing(found, "!!   "))
        print(f"!! Nothing counts as done until `make test-gpu` has run.\n{'!' * 78}")
        return 0
    if not found:
        run = receipt["run"]
        tools = run["sanitizer"]["tools"].values()
        warning = "" if all(tool.get("ran") for tool in tools) else "WARNING, sanitizers missing; "
        if not run["code"]["compared"]:
            warning += f"WARNING, {run['code']['why']}; "
        print(f"receipt: current; {warning}{summary(run)}")
        return 0
    print(f"receipt: {'ERROR' if strict else 'WARNING'}, it does not vouch for this tree:")
    print(_listing(found, "  "))
    print('  Run `make test-gpu` on a GPU, or make receipt-pending WHY="...".')
    return int(strict)


def main(argv: list[str] | None = None) -> int:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(prog="validation.receipt", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write")
    writing.add_argument("folder", type=Path)
    writing.add_argument("target", type=Path)
    commands.add_parser("failed").add_argument("folder", type=Path)
    commands.add_parser("check")
    commands.add_parser("pending").add_argument("why")
    commands.add_parser("digest")
    options = parser.parse_args(argv)
    if options.command == "write":
        found = write(options.folder, options.target)
        print(f"receipt: {options.target}: {'not a pass' if found else 'a pass'}")
        if found:
            print(_listing(found, "  "))
        return int(bool(found))
    if options.command == "failed":
        failed, files = failed_in(_read(options.folder / TESTS))
        print("\n".join(failed + files))
        return 0
    if options.command == "pending":
        mark_pending(ROOT / RECEIPT, options.why)
        print(f"receipt: marked as pending in {RECEIPT}")
        return 0
    prints = fingerprints()
    if options.command == "digest":
        lines = (f"{v}  {path}: {name}" for path in prints for name, v in prints[path].items())
        print("\n".join([digest(prints), *lines]))
        return 0
    return check(ROOT / RECEIPT, prints, os.environ.get("FA_CUPY_RECEIPT") == "strict")


if __name__ == "__main__":
    sys.exit(main())
