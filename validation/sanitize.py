"""compute-sanitizer over a reduced set: memory accesses, races, initialisation, barriers.

The set is every row of the variant table on every kind of problem, small.  CuPy's memory pool is
off, so that an access past the end of an array is one past the end of an allocation.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from validation import peers, store

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
_PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")
_DONE = "calls made: "


# ------------------------------------------------------------------------------------- the child
def problems(dim: int, extra: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Array shapes and options that reach every branch of a forward kernel with this ``dim``.

    ``extra`` keys make the shapes of each row of the table its own, so that no plan of another row
    is met again; ``offset`` moves an array off the alignment that 16-byte copies need.
    """
    plain = {"q_len": 150, "k_len": 193 + extra, "head_dim": dim, "v_dim": dim}
    yield plain, {}
    yield {**plain, "q_len": 193 + extra}, {"is_causal": True}
    yield {**plain, "q_len": 33}, {"is_causal": True, "causal_align": "bottom_right"}
    yield {**plain, "q_len": 1, "heads": 4}, {"window": (20, 0), "causal_align": "bottom_right"}
    yield {**plain, "head_dim": dim - 3, "v_dim": dim - 15}, {}
    yield {**plain, "head_dim": dim - 8, "v_dim": dim - 16, "heads": 4, "q_len": 17}, {}
    yield plain, {"softcap": 2.0}
    yield {**plain, "offset": 1}, {"softcap": 2.0}
    yield {**plain, "bias": True, "heads": 4}, {"scale": -0.1}
    yield {**plain, "bias": True, "mask": True, "heads": 4}, {"scale": -0.1}
    yield {**plain, "nan": True, "mask": True}, {}
    yield {**plain, "q_len": 64 + extra, "k_len": 1}, {}
    yield {**plain, "q_len": 64 + extra, "k_len": 0}, {}


def serves(row: Any, shape: dict[str, Any], options: dict[str, Any]) -> bool:
    """Whether a row of ``fwd_sm90`` gets this call; the other kernel takes any."""
    from fa_cupy.gpu.params_sm90 import DIM_STEP
    from fa_cupy.gpu.variants import VariantSm90

    if not isinstance(row, VariantSm90):
        return True
    odd = any(shape[dim] % DIM_STEP for dim in ("head_dim", "v_dim"))
    odd = odd or shape.get("offset") or not shape["k_len"]
    transform = bool(options.keys() & {"softcap", "scale"} or shape.get("bias"))
    return not odd and not shape.get("mask") and transform == row.transform


def arrays(dtype: np.dtype, shape: dict[str, Any]) -> dict[str, np.ndarray]:
    """Random arrays on the host; 2 key heads, so that 4 query heads are grouped."""
    rng = np.random.default_rng(1)
    heads, q_len, k_len = shape.get("heads", 2), shape["q_len"], shape["k_len"]

    def draw(*of: int) -> np.ndarray:
        return rng.standard_normal(of).astype(np.float32).astype(dtype)

    found = {
        "q": draw(1, heads, q_len, shape["head_dim"]),
        "k": draw(1, 2, k_len, shape["head_dim"]),
        "v": draw(1, 2, k_len, shape["v_dim"]),
    }
    if shape.get("mask"):
        found["mask"] = rng.random((q_len, k_len)) < 0.7
        found["mask"][:, -1] = False  # where NaN may stand
    if shape.get("nan"):
        found["k"][..., -1, :] = found["v"][..., -1, :] = np.nan
    if shape.get("bias"):
        found["bias"] = draw(heads, 1, k_len)
    return found


def _send(array: np.ndarray, offset: int) -> Any:
    """A copy on the device that starts ``offset`` elements into its allocation."""
    flat = np.concatenate([np.zeros(offset, array.dtype), array.ravel()])
    return peers.to_device(flat)[offset:].reshape(array.shape)


def child() -> int:
    """Make every call once and look at each result, so that nothing can be left out in silence."""
    import cupy

    from fa_cupy import attention
    from fa_cupy.gpu import variants

    cupy.cuda.set_allocator(None)
    device = cupy.cuda.Device()
    capability = device.compute_capability
    target = variants.target_of(int(capability[:-1]), int(capability[-1]))
    calls = 0
    others = tuple(row for row in variants.VARIANTS if isinstance(row, variants.VariantSm80))
    for number, row in enumerate(variants.VARIANTS):
        if target not in row.targets:
            print(f"{row.name}: not for {target}")
            continue
        dtype = peers.DTYPES["bf16" if row.dtype == "bfloat16" else "fp16"]
        # What `select` chooses from; a row of fwd_sm90 needs one beside it for other pointers.
        rows = (row,) if row in others else (row, *others)
        with mock.patch.object(variants, "VARIANTS", rows):
            for shape, options in problems(row.dim, number):
                if not serves(row, shape, options):
                    continue
                host = arrays(dtype, shape)
                sent = {name: _send(x, shape.get("offset", 0)) for name, x in host.items()}
                out, _ = attention(**sent, **options, return_lse=True)
                if not np.isfinite(peers.to_host(out).astype(np.float32)).all():
                    print(f"{row.name} {shape} {options}: the result is not finite")
                    return 1
                calls += 1
    print(f"{_DONE}{calls}")
    return 0


# ------------------------------------------------------------------------------------ the parent
def read_log(text: str, seconds: float) -> dict[str, Any]:
    """What a tool found, for the receipt."""
    made = re.search(rf"{_DONE}(\d+)", text)
    counts = [int(a or b) for a, b in _SUMMARY.findall(text)]
    if not counts or "Device not supported" in text:
        said = [line.strip("= ") for line in text.splitlines() if line.startswith("=========")]
        return {"ran": False, "why": " ".join(said[:3] or [text[-300:]])[:300]}
    finding = re.compile(r"=+ (Error|Warning|Invalid|Un|Barrier|Program hit)")
    findings = [line for line in text.splitlines() if finding.match(line)]
    errors = sum(counts)
    if made is None:  # it stopped early: no clean bill, whatever the summary counts
        errors = max(1, errors)
        findings.append("the calls did not end: " + text[-600:])
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


def run_tool(program: str, tool: str, limit: float) -> dict[str, Any]:
    """Run the child under one tool."""
    command = [program, "--tool", tool, "--print-limit", "20"]
    if tool == "memcheck":
        # Bindings ask the driver for functions that it may not have; other failures of a call
        # become exceptions.
        command += ["--report-api-errors", "no"]
    command += [sys.executable, "-m", "validation", "sanitize", "--child"]
    root = Path(__file__).parents[1]
    start = time.perf_counter()
    # a group of its own, because the tool's child would outlive it and hold the pipe
    process = subprocess.Popen(
        command,
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        log, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"ran": False, "why": f"stopped after {limit:.0f} s"}
    return read_log(log, time.perf_counter() - start)


def main(argv: Sequence[str]) -> int:
    """Run the tools; 1 where one found something or could not run."""
    p = argparse.ArgumentParser("python -m validation sanitize", description="compute-sanitizer")
    p.add_argument("--tools", default=",".join(TOOLS), help="comma list")
    p.add_argument("--limit", type=float, default=240, help="seconds for each tool")
    p.add_argument("--json", default="", help="file for what was found; the receipt reads it")
    p.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    if args.child:
        return child()
    program = sanitizer()
    why = "compute-sanitizer is not installed" if program is None else ""
    why = why or ("" if store.gpu_available() else "no CuPy, or no GPU")

    def found_by(tool: str) -> dict[str, Any]:
        return {"ran": False, "why": why} if why else run_tool(str(program), tool, args.limit)

    names = args.tools.split(",")
    tools: dict[str, dict[str, Any]] = {}
    # Side by side: a tool keeps one core busy, and the device hardly.
    with ThreadPoolExecutor(len(names)) as pool:
        for tool, found in zip(names, pool.map(found_by, names), strict=True):
            tools[tool] = found
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
        text = json.dumps({"tools": tools, "date": store.now()}, indent=1)
        path.write_text(text + "\n", encoding="utf-8")
    return int(any(not found["ran"] or found["errors"] for found in tools.values()))
