"""``python -m fa_cupy info``: what is here, and what would run."""

from __future__ import annotations

import argparse
import json
import math
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from fa_cupy import __version__
from fa_cupy.cli import counted, cuda_extra
from fa_cupy.core.linear_problem import ALGORITHMS
from fa_cupy.cpu import blas, thread_pool
from fa_cupy.cpu.products.executor import Machine
from fa_cupy.gpu.driver import compile, cubin_cache, devices, nvrtc, remedies
from fa_cupy.gpu.driver.targets import SHARED_LIMIT
from fa_cupy.gpu.kernels import attention_backward
from fa_cupy.gpu.kernels.attention.attention_params import MAX_LENGTH
from fa_cupy.gpu.kernels.attention.full_precision import fwd_fp32
from fa_cupy.gpu.kernels.attention.full_precision.fwd_fp32_sm90 import LEAST_ROWS
from fa_cupy.gpu.kernels.attention.full_precision.products_fp64 import DTYPE, prefers_cublas
from fa_cupy.gpu.kernels.attention.pairs import bwd_dkdv_pairs, bwd_dq_pairs, fwd_pairs
from fa_cupy.gpu.kernels.attention.pairs.pair_rows import row_serving
from fa_cupy.gpu.kernels.backward import Wanted, takes_dims
from fa_cupy.gpu.kernels.forward import Call, select
from fa_cupy.gpu.kernels.linear.cost_model import choose
from fa_cupy.gpu.kernels.score import ScoreMod
from fa_cupy.gpu.kernels.tensor_maps import DIM_STEP
from fa_cupy.gpu.kernels.variant import Variant
from fa_cupy.gpu.masks.pair_lists import MOST_PAIRS

#: What people call the types, besides their names.
DTYPES = {
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "fp64": "float64",
} | {name: name for name in ("float16", "bfloat16", "float32", "float64")}
_REQUIRED = ("numpy", "scipy", "ml_dtypes", "threadpoolctl", "tqdm")
_SMS = 132  # multiprocessors of a device that is not here: those of an H200
_CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")

Line = tuple[str, str]


def _version(*distributions: str) -> str | None:
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _cupy() -> str:
    """Return CuPy's version, or why there is none to use."""
    cupy, why = devices.import_cupy()
    found = _version(*_CUPY)
    if cupy is not None:
        shown = found or str(getattr(cupy, "__version__", "of an unknown version"))
        if remedies.too_old(shown):
            oldest = f"want {remedies.OLDEST_CUPY} or later"
            return f"{shown}, {oldest}: {remedies.command('CuPy')}"
        return shown
    if found is None and why == devices.ABSENT:
        return f"not installed: CuPy arrays need it: {remedies.command('CuPy')}"
    return f"{found} is installed, but treated as absent: {why}" if found else f"absent: {why}"


def _installed() -> Iterator[Line]:
    yield "fa_cupy", f"{__version__} in {Path(__file__).parents[1]}"
    yield "python", f"{platform.python_version()} on {platform.machine()}"
    yield "needs", ", ".join(f"{name} {_version(name) or 'missing'}" for name in _REQUIRED)
    yield "BLAS", blas.described()
    yield "cupy", _cupy()
    try:
        found = "{}.{}".format(*nvrtc.version())
        yield "nvrtc", f"{found}, cuda-bindings {_version('cuda-bindings')}"
    except ImportError as error:
        yield "nvrtc", str(error)
    if remedies.from_conda() and (missing := remedies.missing_from_conda()):
        yield "conda", f"lacks {', '.join(missing)}: {remedies.command(*missing)}"


def _machine() -> Iterator[Line]:
    newest = cuda_extra.driver_version()
    yield "driver", f"CUDA {newest // 1000}.{newest % 1000 // 10}" if newest else "none in use"
    found, why = devices.look()
    for one in found:
        yield (
            f"device {one.number}",
            f"{one.name}, compute capability {one.capability[0]}.{one.capability[1]}, "
            f"{one.multiprocessors} multiprocessors, {one.memory_bytes / 2**30:.0f} GiB",
        )
        yield "", f"target {one.target or 'none'}: {one.why}"
    if not found:
        yield "device", f"none ({why}): NumPy arrays only"


def _kept() -> Iterator[Line]:
    try:
        folder = cubin_cache.cache_dir()
        kept = [path for ending in ("cubin", "ptx") for path in folder.glob(f"*.{ending}")]
        sizes = [path.stat().st_size for path in kept]
        yield "cache", f"{folder}: {len(sizes)} kernels, {sum(sizes) / 1e6:.1f} MB"
    except OSError as error:
        yield "cache", str(error)
    # In a checkout; `make test` says whether the receipt still vouches for the tree.
    try:
        receipt = json.loads((compile.ROOT / "validation/results/receipt.json").read_text())
    except (OSError, ValueError):
        return
    if "pending" in receipt:
        mark = receipt["pending"]
        yield "GPU tests", f"PENDING since {mark['since']}: {mark['why']}"
    elif "run" in receipt:
        run = receipt["run"]
        failed = len(run["tests"].get("failed", []))
        passed = sum(run["tests"].get("passed", {}).values())
        where = f"{run['date'][:10]} on {run['environment']['device']}"
        yield "GPU tests", f"{passed} passed, {failed} failed, {where}"


def _call(options: argparse.Namespace) -> Iterator[Line]:
    *batch, q_len, head_dim = options.shape
    k_len = q_len if options.k_len is None else options.k_len
    v_dim = head_dim if options.v_dim is None else options.v_dim
    dtype = DTYPES[options.dtype]
    entries = math.prod(batch)
    flop = 2 * entries * q_len * k_len * (head_dim + v_dim) / (2 if options.causal else 1)
    yield (
        "call",
        f"{dtype}, {entries} x {q_len} queries x {k_len} keys, head_dim {head_dim}, v_dim {v_dim}"
        f"{', causal' if options.causal else ''}: {flop / 1e12:.3g} TFLOP",
    )
    yield "NumPy", f"tiled NumPy, on {counted(thread_pool.allowed(), 'thread')}"
    if q_len == k_len:
        parts = Machine.segments(k_len, entries)
        yield "", f"causal_product: chunked, {counted(parts, 'segment')} a sequence"
    target = options.target or devices.current_target()
    if target is None:
        yield "CuPy", "no device here; name one with --target, as in --target sm_90a"
        return
    sizes = dtype, entries, q_len, k_len, head_dim, v_dim
    yield from _attention(*sizes, target)
    yield from _backward(*sizes, target)
    yield from _pairs(dtype, q_len, k_len, head_dim, v_dim)
    if q_len == k_len:
        yield from _product(dtype, entries, q_len, head_dim, v_dim, target)


def _product(
    dtype: str, entries: int, length: int, qk_dim: int, v_dim: int, target: str
) -> Iterator[Line]:
    """Say how a causal product would be computed, and what the other ways would take."""
    sms = multiprocessors(target)
    call = dtype, entries, length, qk_dim, v_dim, target, sms
    taken = choose(*call)
    ways = {name: choose(*call, name) for name in ALGORITHMS if name != "auto"}
    served = {name: way for name, way in ways.items() if way is not None}
    name = next((name for name, way in served.items() if way == taken), None)
    name = name or "chunked, on cuBLAS products"
    yield "", f"causal_product on {sms} multiprocessors: {name}"
    if taken is None:
        return
    yield "", taken.text
    yield "", taken.row.why
    *before, _ = (row.name for row, _, _ in taken.launches(qk_dim, v_dim))
    if before:
        yield "", f"after {', '.join(before)}"
    for other, way in served.items():
        if other != name:
            yield "", f"by {other}: {way.text}"


def multiprocessors(target: str) -> int:
    """Return how many multiprocessors a device of a target has here, or an H200 if none is here."""
    return next((d.multiprocessors for d in devices.devices() if d.target == target), _SMS)


def _attention(
    dtype: str, entries: int, q_len: int, k_len: int, head_dim: int, v_dim: int, target: str
) -> Iterator[Line]:
    if max(q_len, k_len) > MAX_LENGTH:
        yield "CuPy", f"{target}: tiled CuPy, on cuBLAS products"
        yield "", f"kernels take up to {MAX_LENGTH:,} queries and keys"
        return
    walkable = not (head_dim % DIM_STEP or v_dim % DIM_STEP)
    walkable = walkable and min(q_len, k_len, head_dim, v_dim) > 0
    # Each entry has keys of its own, which are split where enough queries share them.
    call = Call(
        mapped=walkable, split=dtype == fwd_fp32.DTYPE and q_len >= LEAST_ROWS and k_len > 0
    )
    row = select(dtype, head_dim, v_dim, target, call)
    if row is None:
        yield "CuPy", f"{target}: tiled CuPy, on cuBLAS products"
        return
    yield "CuPy", f"{target}: {row.name}"
    yield "", _described(row, entries * -(-q_len // row.tile_m), target)
    yield "", row.why
    shown = [row]
    for what, other in (
        ("with a softcap or bias", call._replace(score=ScoreMod(softcap=True))),
        ("rows not of 16 bytes", call._replace(mapped=False)),
        ("with a mask", call._replace(masked=True)),
        ("with a mask, rows not of 16 bytes", call._replace(masked=True, mapped=False)),
    ):
        instead = select(dtype, head_dim, v_dim, target, other)
        if instead is not None and instead not in shown:
            yield "", f"{what}: {instead.name}"
            shown.append(instead)


def _backward(
    dtype: str, entries: int, q_len: int, k_len: int, head_dim: int, v_dim: int, target: str
) -> Iterator[Line]:
    """Say how gradients of attention would be computed, and which other kernels there are."""
    sizes = q_len, k_len, head_dim, v_dim
    taken = min(sizes) > 0 and max(q_len, k_len) <= MAX_LENGTH
    taken = taken and takes_dims(dtype, head_dim, v_dim)

    wanted = Wanted(dtype, max(head_dim, v_dim))
    rows = attention_backward.select(wanted, target) if taken else ()
    if not rows:
        yield "", "attention_backward: tiled CuPy, on cuBLAS products"
        return
    main = rows[1]  # what comes before and after it is the same for all dims
    pairs = entries * q_len * k_len
    faster = dtype == DTYPE and prefers_cublas(target, pairs, head_dim, v_dim)
    if faster:
        yield "", "attention_backward: tiled CuPy, on cuBLAS products, which are faster here"
        yield "", f"in a CUDA graph, with a mask, lengths or a score: {main.name}"
    else:
        yield "", f"attention_backward: {main.name}"
    yield "", f"with {', '.join(row.entry for row in rows if row is not main)}"
    shown = [main]
    for what, other in (
        ("with a mask", wanted._replace(masked=True)),
        ("with a softcap or bias", wanted._replace(score=ScoreMod(softcap=True))),
        ("rows not of 16 bytes", wanted._replace(mapped=False)),
        ("with a mask, rows not of 16 bytes", wanted._replace(masked=True, mapped=False)),
    ):
        instead = attention_backward.select(other, target)[1]
        if instead not in shown and not (faster and other.score):
            yield "", f"  {what}: {instead.name}"
            shown.append(instead)


def _pairs(dtype: str, q_len: int, k_len: int, head_dim: int, v_dim: int) -> Iterator[Line]:
    """Say which masks have kernels that read their pairs, and which ones."""
    dim = max(head_dim, v_dim)
    families = fwd_pairs.VARIANTS, bwd_dq_pairs.VARIANTS, bwd_dkdv_pairs.VARIANTS
    rows = [row for family in families if (row := row_serving(family, dtype, dim))]
    if rows and min(q_len, k_len, dim) > 0 and max(q_len, k_len) <= MAX_LENGTH:
        yield "", f"masks with fewer than {MOST_PAIRS[dtype]} pairs a block: {rows[0].name}"
        yield "", f"and {', '.join(row.name for row in rows[1:])}"


def _described(row: Variant, tiles: int, target: str) -> str:
    return (
        f"{tiles} tiles for blocks of {row.threads} threads, {row.shared_bytes / 1024:.0f} of "
        f"{SHARED_LIMIT[target] // 1024} KB of shared memory"
    )


def _shape(text: str) -> list[int]:
    sizes = [size.strip() for size in text.split(",")]
    if len(sizes) < 2 or not all(size.isdecimal() for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 4,16,4096,128")
    return [int(size) for size in sizes]


def length(text: str) -> int:
    """Read a length or dim from the command line."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m fa_cupy info",
        description="Say what is installed, and with --shape which kernel would serve a call.",
    )
    parser.add_argument("--shape", type=_shape, metavar="B,H,L,D", help="shape of the queries")
    parser.add_argument("--dtype", choices=DTYPES, default="float16")
    parser.add_argument("--k-len", type=length, help="number of keys (default: of queries)")
    parser.add_argument("--v-dim", type=length, help="last axis of the values (default: D)")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--target", choices=SHARED_LIMIT, help="default: the current device's")
    options = parser.parse_args(argv)
    parts = [_installed(), _machine(), _kept()]
    if options.shape:
        parts.append(_call(options))
    for part in parts:
        for label, text in part:
            print(f"{label:<10}  {text}")
    return 0
