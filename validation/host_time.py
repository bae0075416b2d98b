"""Time on the host: what a call costs before its kernel is queued, a first call, the import.

A call is timed over bursts without a synchronization inside; the problem is so small that the GPU
keeps up and the queue of launches never fills, which would make the host wait.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from validation import store
from validation.cases import Dense

# by how the name of a case starts
LIMITS_US = {
    "call": 11.0,
    "gradients": 25.0,
    "causal product": 12.0,
    "decoding": 13.0,
    "first call, fresh cache": 2e6,
    "first call, warm cache": 1.5e5,
    "first gradients, fresh cache": 2.5e6,
    "first gradients, warm cache": 1e5,
    "import": 2e5,
}
FAMILY = "host"
SMALL = {d: Dense(d, 128, False, 128, 2, 16) for d in ("fp16", "bf16")}


def per_call(run: Callable[[], Any], wait: Callable[[], Any], bursts: int, calls: int) -> float:
    """Median microseconds of a call over ``bursts`` of ``calls``, waited for between bursts."""
    for _ in range(calls):
        run()
    wait()
    samples = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(bursts):
            start = time.perf_counter()
            for _ in range(calls):
                run()
            samples.append((time.perf_counter() - start) / calls * 1e6)
            wait()
    finally:
        gc.enable()
    return statistics.median(samples)


def _row(case: str, impl: str, us: float) -> store.Row:
    fixed = {"family": FAMILY, "unit": "us", "error": None}
    return {**fixed, "case": case, "impl": impl, "ms": us / 1e3, "value": us}


def call_rows(bursts: int, calls: int) -> list[store.Row]:
    """Calls on ready arrays; ours returns the LSE too."""
    import cupy

    from fa_cupy import attention
    from validation import peers

    rows = []
    for dtype, case in SMALL.items():
        qkv = peers.random_cupy(case, 1)
        runs: dict[str, Callable[[], Any]] = {
            "fa_cupy": lambda qkv=qkv: attention(*qkv, return_lse=True),  # type: ignore[misc]
        }
        for name, backend in (("cudnn", "CUDNN_ATTENTION"), ("flash2", "FLASH_ATTENTION")):
            try:
                runs[name] = peers.torch_sdpa(backend)(case, qkv).run
            except peers.UnavailableError as reason:
                print(f"{name} left out: {reason}")
        for name, run in runs.items():
            us = per_call(run, cupy.cuda.Device().synchronize, bursts, calls)
            rows.append(_row(f"call {dtype} hd128 with lse", name, us))
    return rows + _other_rows(bursts, calls) + _decoding_rows(bursts, calls)


def _other_rows(bursts: int, calls: int) -> list[store.Row]:
    """Gradients of attention and causal products, which have several launches or a plan to pick."""
    import cupy

    import fa_cupy
    from validation import peers

    rows = []
    for dtype, case in SMALL.items():
        q, k, v = peers.random_cupy(case, 1)
        out, lse = fa_cupy.attention(q, k, v, return_lse=True)
        given = out, q, k, v, out, lse
        runs: dict[str, Callable[[], Any]] = {
            f"gradients {dtype} hd128": lambda x=given: fa_cupy.attention_backward(*x),  # type: ignore[misc]
            f"causal product {dtype} hd128": lambda x=(q, k, v): fa_cupy.causal_product(*x),  # type: ignore[misc]
        }
        for name, run in runs.items():
            us = per_call(run, cupy.cuda.Device().synchronize, bursts, calls)
            rows.append(_row(name, "fa_cupy", us))
    return rows


def _decoding_rows(bursts: int, calls: int) -> list[store.Row]:
    """One query to keys whose numbers, and pages, the device has: each call may find others.

    One entry of keys has two launches, or more entries one; pages are read by one launch.
    """
    import cupy

    from fa_cupy import attention

    heads, keys, page = 8, 4096, 64
    rows = []
    for entries, paged in ((1, False), (2, False), (2, True)):
        shape = (entries, heads, keys, 128)
        if paged:
            shape = (entries * keys // page, heads, page, 128)
        q, k = cupy.zeros((entries, 4 * heads, 1, 128), "f2"), cupy.zeros(shape, "f2")
        places = {"k_lengths": cupy.full(entries, keys, "i4")}
        if paged:
            table = cupy.arange(entries * keys // page, dtype="i4")
            places["page_table"] = table.reshape(entries, -1)

        def run(q: Any = q, k: Any = k, places: Mapping[str, Any] = places) -> Any:
            return attention(q, k, k, **places)

        us = per_call(run, cupy.cuda.Device().synchronize, bursts, calls)
        name = f"decoding fp16 hd128 B{entries}" + " paged64" * paged
        rows.append(_row(name, "fa_cupy", us))
    return rows


def _child(code: str, environment: Mapping[str, str]) -> dict[str, float]:
    """Run ``code`` in a new process; its last line is JSON.

    It may write bytecode, as pip does for what it installs, whatever holds for this process:
    compiling the modules of a first call takes as long as all else does.
    """
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "", **environment},
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"a measuring process failed:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


# The context, and CuPy's own kernels for these inputs, are there before the clock starts. What has
# been compiled is asked for again once it has stopped: the cache knows how long that took. The
# output and the log-sum-exp of the gradients are made up: their kernel is not what is timed.
_FIRST = """
import json, time
import cupy, fa_cupy
from validation import peers
from validation.host_time import SMALL
qkv = peers.random_cupy(SMALL["bf16"], 1)
cupy.cuda.Device().synchronize()
out, lse = qkv[0], cupy.ones(qkv[0].shape[:-1], "float32")
cupy.cuda.Device().synchronize()
start = time.perf_counter()
CALL
cupy.cuda.Device().synchronize()
s = time.perf_counter() - start
from fa_cupy.gpu.driver import compile
compiled = [compile.compile_variant(variant, target) for variant, target, _ in compile._loaded]
print(json.dumps({"s": s, "compile_s": sum(one.seconds for one in compiled)}))
"""
_CALLS = {
    "first call": "fa_cupy.attention(*qkv, return_lse=True)",
    "first gradients": "fa_cupy.attention_backward(out, *qkv, out, lse)",
}
_IMPORT = """
import json, sys, time
start = time.perf_counter()
import fa_cupy
s = time.perf_counter() - start
print(json.dumps({"s": s, "cupy": "cupy" in sys.modules}))
"""


def first_rows() -> list[store.Row]:
    """The first calls in new processes: with empty caches, then with what those left.

    NVRTC 13 keeps what it compiles as the driver does, in the folder and under the switch of the
    driver's own cache. Left alone it would answer a compilation of an earlier run in no time, so
    it gets an empty folder, and the first call does without it. The first row also holds what
    NVRTC took: a first call that is quick because nothing was compiled shows there.
    """
    rows = []
    for name, call in _CALLS.items():
        code = _FIRST.replace("CALL", call)
        with tempfile.TemporaryDirectory() as folder:
            caches = {
                "FA_CUPY_CACHE_DIR": str(Path(folder) / "fa_cupy"),
                "CUDA_CACHE_PATH": str(Path(folder) / "cuda"),
            }
            fresh = _child(code, {**caches, "CUDA_CACHE_DISABLE": "1"})
            warm = _child(code, caches)
        row = _row(f"{name}, fresh cache", "fa_cupy", fresh["s"] * 1e6)
        rows.append({**row, "compile_ms": fresh["compile_s"] * 1e3})
        rows.append(_row(f"{name}, warm cache", "fa_cupy", warm["s"] * 1e6))
    return rows


def import_rows(repeats: int = 5) -> list[store.Row]:
    """``import fa_cupy`` in new processes, which must not import CuPy."""
    found = [_child(_IMPORT, {}) for _ in range(repeats)]
    if any(one["cupy"] for one in found):
        raise RuntimeError("import fa_cupy imports CuPy")
    return [_row("import", "fa_cupy", statistics.median(one["s"] for one in found) * 1e6)]


def limit_us(row: store.Row) -> float | None:
    """What a row must stay under; None for a peer's."""
    if row["impl"] != "fa_cupy":
        return None
    return next(limit for start, limit in LIMITS_US.items() if row["case"].startswith(start))


def main(argv: Sequence[str]) -> int:
    """Measure what can be measured here; 1 where a limit is passed."""
    p = argparse.ArgumentParser("python -m validation host", description="time on the host")
    p.add_argument("--bursts", type=int, default=50)
    p.add_argument("--calls", type=int, default=200, help="calls a burst; under the queue's depth")
    p.add_argument("--out", default="", help="JSON file instead of results/bench-<device>.json")
    args = p.parse_args(argv)
    rows = import_rows()
    device = "gpu" if store.gpu_available() else "cpu"
    if device == "gpu":
        rows += first_rows() + call_rows(args.bursts, args.calls)
    else:
        print("no GPU, or no CuPy: only the import is measured")
    facts = store.header(device)
    path = Path(args.out) if args.out else store.path_for("bench", facts)
    store.merge(path, facts, rows)
    lines = [["host time", "impl", "us", "at most", ""]]
    late = 0
    for row in rows:
        limit = limit_us(row)
        over = limit is not None and row["value"] > limit
        late += over
        shown = "-" if limit is None else f"{limit:,.0f}"
        notes = [f"compiled in {row['compile_ms']:,.0f} ms"] if "compile_ms" in row else []
        notes += ["OVER"] * over
        cells = [row["case"], row["impl"], f"{row['value']:,.1f}", shown]
        lines.append([*cells, ", ".join(notes)])
    print(store.align(lines))
    print(f"{facts['device']}, {len(rows)} rows in {path}")
    return int(late > 0)
