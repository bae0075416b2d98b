"""Peak memory of a long sequence: that no array of length x length ever exists.

On the CPU a new process reads its own peak from the kernel; on the GPU CuPy's pool tells how much
it had to take.  Both count what is above inputs and output.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from validation import peers, store
from validation.cases import Dense

FAMILY = "memory"
LIMIT_MB = {"cpu": 300.0, "gpu": 300.0}
CASES = {
    "cpu": Dense("fp32", 64, False, 65536, 1, 1),
    "gpu": Dense("bf16", 128, False, 65536, 1, 16),
}


def _status(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def on_cpu(length: int) -> dict[str, float]:
    """Peak above inputs and output in bytes, and seconds; to be called in a new process.

    Nothing is warmed up: threads and their BLAS buffers count.
    """
    from fa_cupy import attention

    case = dataclasses.replace(CASES["cpu"], length=length)
    q, k, v = peers.random_numpy(case, 1)
    before = _status("VmRSS")
    start = time.perf_counter()
    out = attention(q, k, v)
    seconds = time.perf_counter() - start
    return {"bytes": _status("VmHWM") - before - out.nbytes, "s": seconds}


def on_gpu(length: int) -> dict[str, float]:
    """Bytes that CuPy's pool took for the call beyond its output, and seconds."""
    import cupy

    from fa_cupy import attention

    case = dataclasses.replace(CASES["gpu"], length=length)
    qkv = peers.random_cupy(case, 1)
    pool = cupy.cuda.MemoryPool()  # of its own: the default one has blocks that the inputs left
    start = time.perf_counter()
    with cupy.cuda.using_allocator(pool.malloc):
        out = attention(*qkv)
    cupy.cuda.Device().synchronize()
    seconds = time.perf_counter() - start
    return {"bytes": pool.total_bytes() - out.nbytes, "s": seconds}


def measure(device: str, length: int) -> store.Row:
    """The row of one device."""
    if device == "gpu":
        found = on_gpu(length)
    else:
        code = (
            "import json; from validation import memory; "
            f"print(json.dumps(memory.on_cpu({length})))"
        )
        root = Path(__file__).parents[1]
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"the measuring process failed:\n{done.stderr[-2000:]}")
        found = json.loads(done.stdout.splitlines()[-1])
    name = dataclasses.replace(CASES[device], length=length).name
    fixed = {"family": FAMILY, "case": name, "impl": "fa_cupy", "unit": "MB", "error": None}
    return {**fixed, "ms": found["s"] * 1e3, "value": found["bytes"] / 1e6}


def main(argv: Sequence[str]) -> int:
    """Measure here; 1 where a limit is passed."""
    p = argparse.ArgumentParser("python -m validation memory", description="peak memory")
    p.add_argument("--device", choices=("cpu", "gpu"), default=None)
    p.add_argument("--length", type=int, default=65536)
    p.add_argument("--out", default="", help="JSON file instead of results/bench-<device>.json")
    args = p.parse_args(argv)
    device = args.device or ("gpu" if store.gpu_available() else "cpu")
    row = measure(device, args.length)
    facts = store.header(device)
    path = Path(args.out) if args.out else store.path_for("bench", facts)
    store.merge(path, facts, [row])
    over = row["value"] > LIMIT_MB[device]
    print(
        f"{row['case']} on {facts['device']}: {row['value']:.0f} MB above inputs and output, "
        f"at most {LIMIT_MB[device]:.0f}{' OVER' * over}; {row['ms'] / 1e3:.1f} s"
    )
    return int(over)
