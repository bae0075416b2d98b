"""Bytes through device memory, read from the hardware's counters by ncu, beside the claims.

What the tiled algorithm is for: a plain attention writes and reads matrices of length x length, the
tiled one reads its inputs and writes its output.  ncu runs this module again as its child, which
marks one call with the profiler's start and stop; every kernel in between counts.
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from validation import cases, peers, store

FAMILY = "traffic"
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
CASES = tuple(cases.Dense("fp16", 128, causal, 4096, 4, 16) for causal in (False, True))
IMPLS = {"fa_cupy": peers.fa_cupy, "plain_cupy": peers.plain_cupy}


def claims(case: cases.Dense, tile_m: int) -> dict[str, float]:
    """The formula's bytes (`fa_cupy.tiled.tile_sizes.traffic`) for each implementation."""
    from fa_cupy.tiled import tile_sizes

    itemsize = peers.DTYPES[case.dtype].itemsize
    size = (case.length, case.length, case.head_dim, case.head_dim, itemsize)
    moved = tile_sizes.traffic(*size, tile_m=tile_m)
    heads = float(case.batch * case.heads)
    return {"fa_cupy": heads * moved.tiled, "plain_cupy": heads * moved.plain}


def expected(case: cases.Dense) -> dict[str, float]:
    """Bytes that caches and CuPy's separate kernels lead to.

    fa_cupy: every array once, because the L2 cache holds the keys and values of the heads at work.
    plain_cupy: the same, and the matrix of scores written by the first product, read and written
    by the scale, the subtraction of the maximum, exp and the division, and read for the maximum,
    the sum and the second product, 12 times over; a causal mask is one more reading and writing.
    """
    itemsize = peers.DTYPES[case.dtype].itemsize
    rows = case.batch * case.heads * case.length
    once = 4.0 * rows * case.head_dim * itemsize
    passes = 14 if case.causal else 12
    return {"fa_cupy": once, "plain_cupy": once + passes * rows * case.length * itemsize}


def parse(text: str) -> dict[str, float]:
    """Sum of each metric over all kernels, in bytes, from ncu's ``--csv --page raw`` output."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    if not lines:
        raise ValueError(f"ncu printed no table:\n{text[-2000:]}")
    table = list(csv.DictReader(io.StringIO("\n".join(lines))))
    units, kernels = table[0], table[1:]
    if not kernels:
        raise ValueError("ncu saw no kernel")
    scale = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
    return {
        metric: sum(float(row[metric].replace(",", "")) for row in kernels) * scale[units[metric]]
        for metric in METRICS
    }


def child(impl: str, case: cases.Dense) -> None:
    """One call between the marks, after one that compiles and allocates."""
    import cupy
    from cupyx.profiler import profile

    call = IMPLS[impl](case, peers.random_cupy(case, 1))
    call.run()
    device = cupy.cuda.Device()
    device.synchronize()
    with profile():
        call.run()
        device.synchronize()


def measure(ncu: str, impl: str, case: cases.Dense, tile_m: int) -> store.Row:
    """Run the child under ncu."""
    command = [
        *(ncu, "--clock-control", "none", "--cache-control", "none"),
        *("--profile-from-start", "off", "--metrics", ",".join(METRICS)),
        *("--csv", "--page", "raw", "--print-units", "base"),
        *(sys.executable, "-m", "validation", "traffic", "--child", impl, "--case", case.name),
    ]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ncu failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    read, written = parse(done.stdout).values()
    fixed = {"family": FAMILY, "case": case.name, "impl": impl, "unit": "MB", "error": None}
    claimed = {"claim": claims(case, tile_m)[impl] / 1e6, "expected": expected(case)[impl] / 1e6}
    return {**fixed, "ms": None, "value": (read + written) / 1e6, **claimed}


def _tile_m(case: cases.Dense) -> int:
    """Query rows of the tile that serves ``case`` here."""
    import cupy

    from fa_cupy.gpu.driver import devices
    from fa_cupy.gpu.kernels import forward

    target = devices.target_of_device(cupy.cuda.Device().id)
    dtype = peers.DTYPES[case.dtype].name
    row = forward.select(dtype, case.head_dim, case.head_dim, target)
    if row is None:
        raise RuntimeError(f"no kernel serves {case.name} on {target}")
    return row.tile_m


def main(argv: Sequence[str]) -> int:
    """Measure every case with every implementation."""
    p = argparse.ArgumentParser("python -m validation traffic", description="bytes by ncu")
    p.add_argument("--out", default="", help="JSON file instead of results/bench-<device>.json")
    p.add_argument("--child", choices=tuple(IMPLS), help=argparse.SUPPRESS)
    p.add_argument("--case", default=CASES[0].name, help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    if args.child:
        child(args.child, next(case for case in CASES if case.name == args.case))
        return 0
    ncu = shutil.which("ncu")
    if ncu is None or not store.gpu_available():
        print("traffic: needs ncu on the PATH" if ncu is None else "traffic: needs CuPy and a GPU")
        return 2
    tile_m = _tile_m(CASES[0])
    rows = [measure(ncu, impl, case, tile_m) for case in CASES for impl in IMPLS]
    facts = store.header("gpu")
    path = Path(args.out) if args.out else store.path_for("bench", facts)
    store.merge(path, facts, rows)
    lines = [["through device memory", "impl", "MB", "formula", "with caches and passes"]]
    for row in rows:
        numbers = [f"{row[name]:,.0f}" for name in ("value", "claim", "expected")]
        lines.append([row["case"], row["impl"], *numbers])
    print(store.align(lines))
    print(f"{facts['device']}, {len(rows)} rows in {path}")
    return 0
