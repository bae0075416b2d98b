"""compute-sanitizer over a reduced set: memory accesses, races, initialisation, barriers.

The set is every row of the tables of kernels on every kind of problem, small: those of attention,
of its gradients and of causal products, which processes share out.  CuPy's memory pool is off, so
that an access past the end of an array is one past the end of an allocation.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from validation import (
    attention_calls,
    backward_calls,
    dropout_calls,
    keyed_calls,
    packed_calls,
    pair_calls,
    product_calls,
    store,
)

# By how many processes the calls are shared out, some of which take a tool a second.
_SHARES = {
    "attention": (attention_calls.run, 4),
    "attention_backward": (backward_calls.run, 6),
    "attention_keys": (keyed_calls.run, 2),
    "attention_pairs": (pair_calls.run, 2),
    "packed_sequences": (packed_calls.run, 10),
    "dropout": (dropout_calls.run, 3),
    "causal_product": (product_calls.run, 9),
}
# By name, what makes its calls on a target and counts them.
PARTS: dict[str, Callable[[str], int]] = {
    f"{name}_{i + 1}": partial(run, share=i, shares=shares)
    for name, (run, shares) in _SHARES.items()
    for i in range(shares)
}
_ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
_PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")
_DONE = "calls made: "


# ------------------------------------------------------------------------------------- the child
def child(part: str) -> int:
    """Make the calls of one part."""
    import cupy

    from fa_cupy.gpu.driver import devices

    cupy.cuda.set_allocator(None)
    target = devices.current_target()
    if target is None:
        print("no kernel runs on this device")
        return 1
    print(f"{_DONE}{PARTS[part](target)}")
    return 0


# ------------------------------------------------------------------------------------ the parent
def _findings(text: str) -> list[str]:
    """What was found, with the line that says where in a kernel: each once, with its number."""
    finding = re.compile(r"=+ (Error|Warning|Invalid|Un|Barrier|Program hit)")
    lines = text.replace(str(_ROOT), ".").splitlines()
    found = Counter(
        f"{line} {place.strip('= ')}".strip()
        for line, place in itertools.zip_longest(lines, lines[1:], fillvalue="")
        if finding.match(line)
    )
    return [f"{line} ({count} times)" for line, count in found.most_common()]


def read_log(text: str, seconds: float) -> dict[str, Any]:
    """What a tool found, for the receipt."""
    made = re.search(rf"{_DONE}(\d+)", text)
    counts = [int(a or b) for a, b in _SUMMARY.findall(text)]
    if not counts or "Device not supported" in text:
        said = [line.strip("= ") for line in text.splitlines() if line.startswith("=========")]
        return {"ran": False, "why": " ".join(said[:3] or [text[-300:]])[:300]}
    findings = _findings(text)
    errors = sum(counts)
    if made is None:  # it stopped early: no clean bill, whatever the summary counts
        errors = max(1, errors)
        said = [line for line in text.splitlines() if line.startswith("=====")]
        end = text.replace(str(_ROOT), ".")[-600:]  # a result names no folder of a machine
        findings.append("the calls did not end: " + "\n".join([*said[:20], end]))
    calls = int(made.group(1)) if made else 0
    return {
        "ran": True,
        "errors": errors,
        "calls": calls,
        "seconds": round(seconds, 1),
        "findings": findings[:20],
    }


def sanitizer() -> str | None:
    """The program, from the PATH or the toolkit's folder."""
    places = ":".join(_PLACES)
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=places)


def together(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a tool found in all parts; errors count, even where a part could not run."""
    ran = [one for one in found if one["ran"]]
    missing = list(dict.fromkeys(one["why"] for one in found if not one["ran"]))
    errors = sum(one["errors"] for one in ran)
    if missing and not errors:
        return {"ran": False, "why": "; ".join(missing)}
    return {
        "ran": True,
        "errors": errors,
        "calls": sum(one["calls"] for one in ran),
        "seconds": max(one["seconds"] for one in ran),
        "findings": [line for one in ran for line in one["findings"]] + missing,
    }


def _devices() -> list[str]:
    """Return the devices that this process sees, as ``CUDA_VISIBLE_DEVICES`` names them."""
    import cupy

    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    count = int(cupy.cuda.runtime.getDeviceCount())
    return named if named[0] else [str(i) for i in range(count)]


def run_tool(program: str, tool: str, part: str, limit: float, device: str) -> dict[str, Any]:
    """Run the child under one tool on one device."""
    command = [program, "--tool", tool, "--print-limit", "20"]
    if tool == "memcheck":
        # Bindings ask the driver for functions that it may not have; other failures of a call
        # become exceptions.
        command += ["--report-api-errors", "no"]
    if tool == "initcheck":
        # It does not see what bulk copies write, and would find every result unwritten that is
        # copied to the host.
        command += ["--check-api-memory-access", "no"]
    command += [sys.executable, "-m", "validation", "sanitize", "--child", "--parts", part]
    start = time.perf_counter()
    # a group of its own, because the tool's child would outlive it and hold the pipe
    process = subprocess.Popen(
        command,
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": device},
    )
    try:
        log, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"ran": False, "why": f"{part} stopped after {limit:.0f} s"}
    return read_log(log, time.perf_counter() - start)


def main(argv: Sequence[str]) -> int:
    """Run the tools; 1 where one found something or could not run."""
    p = argparse.ArgumentParser("python -m validation sanitize", description="compute-sanitizer")
    p.add_argument("--tools", default=",".join(TOOLS), help="comma list")
    p.add_argument("--parts", default=",".join(PARTS), help="comma list")
    p.add_argument("--limit", type=float, default=240, help="seconds for each tool and part")
    p.add_argument("--json", default="", help="file for what was found; the receipt reads it")
    p.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    names, parts = args.tools.split(","), args.parts.split(",")
    unknown = [name for name in parts if name not in PARTS]
    if unknown:
        print(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
        return 2
    if args.child:
        return child(parts[0])
    program = sanitizer()
    why = "compute-sanitizer is not installed" if program is None else ""
    why = why or ("" if store.gpu_available() else "no CuPy, or no GPU")

    devices = [] if why else _devices()

    def found_by(work: tuple[str, str], number: int) -> dict[str, Any]:
        if why:
            return {"ran": False, "why": why}
        return run_tool(str(program), *work, args.limit, devices[number % len(devices)])

    tools: dict[str, dict[str, Any]] = {}
    works = list(product(names, parts))
    # Side by side: a tool keeps one core busy, and the device hardly; all devices take turns.
    with ThreadPoolExecutor(len(works)) as pool:
        results = pool.map(found_by, works, range(len(works)))
        for tool in names:
            tools[tool] = found = together([next(results) for _ in parts])
            print(
                f"{tool}: {found['errors']} errors in {found['calls']} calls, "
                f"{found['seconds']:.0f} s"
                if found["ran"]
                else f"{tool}: NOT RUN: {found['why']}"
            )
            print("".join(f"  {line}\n" for line in found.get("findings", ())), end="", flush=True)
    if args.json:
        path = Path(args.json)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"tools": tools, "parts": parts, "date": store.now()}, indent=1)
        path.write_text(text + "\n", encoding="utf-8")
    return int(any(not found["ran"] or found["errors"] for found in tools.values()))
