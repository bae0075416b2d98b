"""Many random calls of all rows, each with a schedule of its own, against the reference.

``python -m validation.emulator --seeds 10000``; a seed names row, shapes, options, data, schedule.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tqdm import tqdm

from fa_cupy import BitMask, reference
from fa_cupy.gpu.variants import VARIANTS, Variant, VariantSm90
from validation import emulator

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def draw(*shape: int, dtype: np.dtype, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """Random normal values."""
    values = np.random.default_rng(seed).standard_normal(shape)
    return (scale * values).astype(np.float32).astype(dtype)


def check(
    row: Variant,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    bias: np.ndarray | None = None,
    mask: np.ndarray | BitMask | None = None,
    seed: int = 0,
    source: Path | None = None,
    truncating: bool = False,
    order: np.ndarray | None = None,
    by_tile: bool = False,
    **options: Any,
) -> None:
    """Hold a call against the reference.

    Raises
    ------
    EmulationError
    AssertionError
    """
    how = {"seed": seed, "source": source, "truncating": truncating}
    how |= {"order": order, "by_tile": by_tile}
    out, lse = emulator.attention(row, q, k, v, bias, mask, **how, **options)
    dense = mask.to_dense() if isinstance(mask, BitMask) else mask
    want, want_lse = reference.attention(q, k, v, bias, dense, **options)
    largest = np.abs(np.nan_to_num(v.astype(np.float64))).max(initial=1)
    unit = 2.0**-10 if row.dtype == "float16" else 2.0**-7
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=0, atol=unit * largest)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-4, atol=1e-4)


def call(row: Variant, seed: int) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Arrays and options of a call that ``row`` can take."""
    rng = np.random.default_rng(seed)
    hopper, dtype = isinstance(row, VariantSm90), DTYPES[row.dtype]
    groups, heads = (int(rng.integers(1, 3)) for _ in range(2))
    q_len = int(rng.choice([1, 5, 64, 70, 130, 193]))
    k_len = int(rng.choice([1, 40, 64, 129, 200, 300]))
    step = 8 if hopper else 1
    dims = [row.dim - step * int(rng.integers(0, 3)) for _ in range(2)]
    scale = float(rng.choice([0.3, 1.0, 3.0]))
    shapes = ((groups * heads, q_len, dims[0]), (heads, k_len, dims[0]), (heads, k_len, dims[1]))
    arrays = [
        draw(1, *shape, dtype=dtype, seed=3 * seed + i, scale=scale)
        for i, shape in enumerate(shapes)
    ]
    options: dict[str, Any] = {}
    kind = rng.integers(0, 3)
    if kind == 1:
        options["is_causal"] = True
    elif kind == 2:
        options["window"] = (int(rng.integers(0, 100)), int(rng.integers(0, 100)))
    if kind:
        options["causal_align"] = str(rng.choice(["top_left", "bottom_right"]))
    transform = row.transform if isinstance(row, VariantSm90) else rng.random() < 0.3
    if transform:
        options["softcap"] = 3.0
    if row.sparse:
        shape = (groups * heads if rng.random() < 0.5 else 1, q_len, k_len)
        options["mask"] = random_mask(rng, shape)
        options["by_tile"] = bool(rng.random() < 0.5)
        if rng.random() < 0.5:
            rows = groups * heads * -(-q_len // 128)
            options["order"] = rng.permutation(rows).astype(np.int32)
    return arrays, options


def random_mask(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """A mask of blocks of 128 x 128, each empty, full or of some density."""
    *batch, q_len, k_len = shape
    blocks = (*batch, -(-q_len // 128), -(-k_len // 128))
    density = rng.choice([0.0, 1.0, 0.5, 0.1, 0.01, 0.99], blocks, p=[0.3, 0.3, 0.1, 0.1, 0.1, 0.1])
    share = density.repeat(128, axis=-2).repeat(128, axis=-1)[..., :q_len, :k_len]
    return rng.random(shape) < share


def rows_named(part: str) -> list[Variant]:
    """Return the row of that name, or all with ``part`` in theirs."""
    exact = [row for row in VARIANTS if part == row.name]
    return exact or [row for row in VARIANTS if part in row.name]


def one(seed: int, part: str = "", source: Path | None = None) -> str | None:
    """Run a seed on the rows of `rows_named`; what went wrong, or None."""
    rows = rows_named(part)
    row = rows[seed % len(rows)]
    arrays, options = call(row, seed)
    shapes = ", ".join(str(x.shape) for x in arrays)
    try:
        check(row, *arrays, seed=seed, source=source, **options)
    except (emulator.EmulationError, AssertionError) as error:
        with np.printoptions(threshold=8):
            return f"seed {seed}: {row.name} on {shapes}, {options}: {error}"
    return None


def sanitizer() -> str | None:
    """Return the path of the compiler's AddressSanitizer, None where there is none."""
    asked = [str(emulator.compiler()), "-print-file-name=libasan.so"]
    said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    return said if Path(said).is_absolute() else None


def _sanitized(library: str, argv: Sequence[str]) -> int:
    """Run the same command in a process that has AddressSanitizer loaded from its start."""
    more = {"LD_PRELOAD": library, emulator.SANITIZE: "1"}
    # Python itself leaves things behind; fibers leave their stacks without returning.
    more["ASAN_OPTIONS"] = "detect_leaks=0:detect_stack_use_after_return=0"
    command = [sys.executable, "-m", "validation.emulator", *argv]
    return subprocess.run(command, env={**os.environ, **more}, check=False).returncode


def main(argv: Sequence[str]) -> int:
    """Run the seeds; 1 where one of them fails."""
    p = argparse.ArgumentParser("python -m validation.emulator", description=__doc__)
    p.add_argument("--seeds", type=int, default=100, help="how many")
    p.add_argument("--first", type=int, default=0, help="the first one")
    p.add_argument("--row", default="", help="a row's name, or a part of several; empty: all")
    p.add_argument("--source", type=Path, help="a kernel in place of the rows' own")
    p.add_argument("--sanitize", action="store_true", help="under AddressSanitizer and UBSan")
    p.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    args = p.parse_args(argv)
    if emulator.compiler() is None:
        print("emulator: there is no C++ compiler")
        return 2
    rows = rows_named(args.row)
    if not rows:
        print(f"emulator: no row has {args.row!r} in its name")
        return 2
    if args.sanitize and emulator.SANITIZE not in os.environ:
        if library := sanitizer():
            return _sanitized(library, argv)
        print("emulator: the compiler has no AddressSanitizer")
        return 2
    used = {args.first + i for i in range(min(args.seeds, len(rows)))}
    emulator.build_rows([rows[seed % len(rows)] for seed in sorted(used)], args.source)
    seeds = range(args.first, args.first + args.seeds)
    if args.sanitize or args.jobs == 1 or args.seeds <= 8:  # under a debugger, too
        failed = [found for seed in seeds if (found := one(seed, args.row, args.source))]
    else:
        os.environ["OPENBLAS_NUM_THREADS"] = "1"  # of each process
        fixed = repeat(args.row), repeat(args.source)
        with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
            ran = pool.map(one, seeds, *fixed, chunksize=8)
            failed = [found for found in tqdm(ran, total=len(seeds), unit="seed") if found]
    more = f" --row {args.row}" if args.row else ""
    more += f" --source {args.source}" if args.source else ""
    for found in failed:
        seed = found.split(":")[0].removeprefix("seed ")
        print(f"{found}\nagain: python -m validation.emulator --first {seed} --seeds 1{more}")
    print(f"{len(seeds)} seeds over {len(rows)} rows, {len(failed)} failed")
    return int(bool(failed))
