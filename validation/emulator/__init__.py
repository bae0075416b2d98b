"""The kernels' own sources on the CPU: compiled by g++ against headers that emulate ``ptx/``.

A test tool. See ``machine.hpp`` for what is emulated; the docs say what it finds.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from fa_cupy import BitMask, _check, _product
from fa_cupy.gpu import params, params_sm90, product_params, product_params_sm90
from fa_cupy.gpu.compile import ROOT
from fa_cupy.gpu.product_choice import Choice
from fa_cupy.gpu.products import ProductVariant
from fa_cupy.gpu.products_sm90 import VariantSm90 as ProductVariantSm90
from fa_cupy.gpu.variants import Variant, VariantSm90
from validation.emulator.masks import lists_of

FOLDER = Path(__file__).parent
BUILD = ROOT / "build" / "emulator"
#: Multiprocessors of the emulated device; few, so that blocks take several tiles.
BLOCKS = 2
#: In the environment of a process that has AddressSanitizer loaded (`validation.emulator.seeds`).
SANITIZE = "FA_CUPY_EMULATOR_SANITIZE"
_COMMON = ("-std=c++17", "-g", "-fPIC", "-fvisibility=hidden", f"-I{FOLDER}", f"-I{ROOT}")
# Some compilers define it, and then a jump to another fiber's stack aborts the process.
_COMMON += ("-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=0")
_SANITIZERS = ("-fsanitize=address", "-fsanitize=undefined", "-fno-sanitize-recover=undefined")
# Kernels: -O1, so that a debugger finds its way; each load and store is reported to machine.cpp.
_KERNEL = ("-O1", "-w", "-fno-strict-aliasing", "-fno-exceptions", "-fasynchronous-unwind-tables")
_REPORTED = ("-fsanitize=thread",)


class EmulationError(RuntimeError):
    """A kernel did what the GPU would not forgive, or deadlocked."""


def compiler() -> str | None:
    """Return the path of g++, None where there is none."""
    return shutil.which(os.environ.get("CXX", "g++"))


def _compile(target: Path, *arguments: str) -> Path:
    """Run the compiler unless ``target``, whose name holds a digest of all inputs, is there."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        made = target.with_suffix(f".{os.getpid()}{target.suffix}")
        command = [str(compiler()), *_COMMON, *arguments, "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise EmulationError(f"{target.name}: {done.stderr[:4000]}")
        made.replace(target)
    return target


def _digest(paths: Iterable[Path], *options: object) -> str:
    digest = hashlib.sha256(repr((compiler(), _COMMON, *options)).encode())
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def build(
    name: str, source: Path, defines: Sequence[tuple[str, int]], entries: Sequence[str]
) -> Path:
    """Compile a kernel for this machine, or take it from ``build/``.

    Parameters
    ----------
    name : str
        Of the file.
    source : Path
        A file of CUDA C++ that includes nothing but ``ptx/`` and ``cuda_src/common/``.
    defines : sequence of (str, int)
    entries : sequence of str
        Names of its kernels; each takes one struct.

    Raises
    ------
    EmulationError
        With what the compiler said.
    """
    sanitize = SANITIZE in os.environ
    options = ("-O1", _SANITIZERS[0]) if sanitize else ("-O2", "-ftree-vectorize")
    headers = [FOLDER / "engine.hpp", FOLDER / "machine.hpp"]
    objects = [
        _compile(BUILD / f"{path.stem}-{_digest([path, *headers], options)}.o",
                 *options, "-c", str(path))
        for path in (FOLDER / "machine.cpp", FOLDER / "instructions.cpp")
    ]  # fmt: skip
    options = (*_KERNEL, *(_SANITIZERS if sanitize else _REPORTED))
    used = sorted([*FOLDER.rglob("*.cuh"), *ROOT.glob("cuda_src/*/*.cuh")])
    used += [FOLDER / "engine.hpp", FOLDER / "cuda.hpp", FOLDER / "entry.cpp", source]
    used += [ROOT / "ptx/types.cuh", *objects]
    stem = f"{name}-{_digest(used, options, defines, entries)}"
    target = BUILD / f"{stem}.so"
    if not target.exists():
        listed = " ".join(f"ENTRY({entry})" for entry in entries)
        flags = [*(f"-D{key}={value}" for key, value in defines), f'-DKERNEL="{source.resolve()}"']
        flags += [f"-DENTRIES={listed}", "-c", str(FOLDER / "entry.cpp")]
        kernel = _compile(BUILD / f"{stem}.{os.getpid()}.o", *options, *flags)
        _compile(target, *(_SANITIZERS if sanitize else ()), "-shared", str(kernel),
                 *map(str, objects))  # fmt: skip
        kernel.unlink(missing_ok=True)
    return target


def build_row(row: Variant, source: Path | None = None) -> Path:
    """`build` of a row of the variant table, or of another kernel in its place."""
    source = source or ROOT / "cuda_src" / f"{row.source}.cu"
    return build(row.name, source, row.defines, (row.entry,))


def build_rows(rows: Sequence[Variant], source: Path | None = None) -> None:
    """`build_row` of many, as many at a time as there are cores."""
    build_row(rows[0], source)  # and with it the machine, once
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda row: build_row(row, source), rows))


@functools.cache
def _library(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))


def _line(path: Path, message: str) -> str:
    """Turn the callers at the end of a message, as offsets, into a line of the kernel."""
    said, *offsets = message.split(" +")
    program = shutil.which("addr2line")
    if not offsets or not program:
        return said
    command = [program, "-i", "-e", str(path), *offsets]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # Innermost first; what lies in this folder is the emulator's own.
    lines = (Path(line.split()[0]) for line in done.stdout.splitlines() if line.strip())
    where = next((x for x in lines if FOLDER not in x.parents and ".cu" in x.name), None)
    return f"{said}; at {where.name}" if where else said


def launch(
    path: Path,
    entry: str,
    blocks: int,
    threads: int,
    shared: int,
    filled: np.ndarray[Any, Any],
    seed: int,
    truncating: bool = False,
    together: int = 1,
) -> None:
    """Run a launch to its end.

    Parameters
    ----------
    path : Path
        What `build` returned.
    entry : str
    blocks, threads : int
    shared : int
        Bytes of shared memory.
    filled : numpy.ndarray
        The kernel's parameters.
    seed : int
        Of the order in which threads and what runs beside them take turns.
    truncating : bool
        Whether tensor cores cut what they add, as they were seen to, rather than round sums.
    together : int
        Blocks that run at the same time, by turns; the next begins when one of them has ended.

    Raises
    ------
    EmulationError
        With the seed and what each warp was at.
    """
    message = ctypes.create_string_buffer(4096)
    # The struct is aligned as in C++: a copy in the middle of a larger buffer.
    raw = np.zeros(filled.nbytes + 64, np.uint8)
    at = -raw.ctypes.data % 64
    raw[at : at + filled.nbytes] = filled.reshape(-1).view(np.uint8)
    run = _library(path).emulate
    run.argtypes = [
        ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_size_t, ctypes.c_uint64,
        ctypes.c_bool, ctypes.c_uint, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t,
    ]  # fmt: skip
    arguments = blocks, threads, shared, seed, truncating, together, raw.ctypes.data + at
    if run(entry.encode(), *arguments, message, len(message)):
        said = _line(path, message.value.decode())
        raise EmulationError(f"{entry}, seed {seed}: {said}")


def attention(
    row: Variant,
    q: np.ndarray[Any, Any],
    k: np.ndarray[Any, Any],
    v: np.ndarray[Any, Any],
    bias: np.ndarray[Any, Any] | None = None,
    mask: np.ndarray[Any, Any] | BitMask | None = None,
    seed: int = 0,
    source: Path | None = None,
    truncating: bool = False,
    debug: np.ndarray[Any, Any] | None = None,
    order: np.ndarray[Any, Any] | None = None,
    by_tile: bool = False,
    **options: Any,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """`fa_cupy.attention` by one row of the variant table, with LSE.

    Parameters
    ----------
    row : Variant
    q, k, v, bias : numpy.ndarray
        As for `fa_cupy.attention`; aligned to 16 bytes where the row wants it.
    mask : numpy.ndarray or BitMask, optional
        As for `fa_cupy.attention`; wants a row for masks.
    seed, truncating : int, bool
        As for `launch`.
    source : Path, optional
        A kernel in place of the row's own.
    debug : numpy.ndarray, optional
        Where a staged build writes what it holds, by block.
    order, by_tile
        As for `validation.emulator.masks.lists_of`.
    **options
        Of `fa_cupy.attention`.

    Raises
    ------
    EmulationError
        As `launch`.
    """
    problem = _check.attention_problem(q, k, v, bias, mask, **options)
    lists = None
    if mask is not None:
        lists = lists_of(problem, mask, order, by_tile, row_major=row.row_major > 0)
    out = np.full(problem.out_shape, np.nan, problem.dtype)
    lse = np.full(problem.out_shape[:-1], np.nan, np.float32)
    view = _check.out_view(problem, out.shape, out.strides)
    places = (q, k, v, bias, out, lse, debug)
    pointers = [0 if x is None else x.ctypes.data for x in places]
    path = build_row(row, source)
    block = (row.threads, row.shared_bytes)
    if isinstance(row, VariantSm90):
        filled, maps, parts = params_sm90.fill(problem, view, row.tile_m, row.tile_n)
        for name in params_sm90.MAPPED:
            words = tensor_map(pointers[params.POINTERS.index(name)], *maps[name])
            filled[f"{name}_map"].view(np.uint64)[:] = words
        ((first, tiles, *rest),) = parts
        filled["common"][list(params.POINTERS)] = tuple(pointers)
        filled["common"]["first_batch"], filled["common"]["aligned"] = first, 1
        if lists is not None:
            filled["common"]["mask"] = tuple(lists.pointers())
        counter = np.random.default_rng(seed).integers(0, 2**63, 4, np.uint64)
        counter = counter[counter.ctypes.data // 8 % 2 :]
        address = counter.ctypes.data if tiles > BLOCKS else 0
        filled["schedule"] = (address, seed + 1, tiles, *rest)
        launch(path, row.entry, min(BLOCKS, tiles), *block, filled, seed, truncating)
        return out, lse
    filled, parts, aligned = params.fill(problem, view, row.tile_m)
    for offsets, first, blocks, entry in parts:
        at = [p and p + offset for p, offset in zip(pointers, offsets, strict=True)]
        aligned = aligned and not any(p % 16 for p in (*at[:3], at[4]))
        params.pack_head(filled, 0, *at, first, aligned)
        if lists is not None:
            listed = lists.pointers().of_part(entry, len(parts) == 1)
            params.pack_mask(filled, params.MASK_AT, *listed)
        launch(path, row.entry, blocks, *block, filled, seed, truncating)
    return out, lse


def causal_product(
    choice: Choice,
    q: np.ndarray[Any, Any],
    k: np.ndarray[Any, Any],
    v: np.ndarray[Any, Any],
    initial: np.ndarray[Any, Any] | None = None,
    reverse: bool = False,
    seed: int = 0,
    source: Path | None = None,
    truncating: bool = False,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """`fa_cupy.causal_product` by some rows of the table of products, with its state.

    Parameters
    ----------
    choice : Choice
        The rows, and how the sequence is split.
    q, k, v, initial, reverse
        As for `fa_cupy.causal_product`; rows must be dense.
    seed : int
    source : Path, optional
        As for `attention`; in place of the outputs' kernel.
    truncating : bool
        As for `launch`.

    Raises
    ------
    EmulationError
        As `launch`.
    """
    if isinstance(choice.row, ProductVariantSm90):
        call = q, k, v, initial, reverse
        (found,) = causal_products_sm90(choice, [call], seed, source, truncating)
        return found
    problem = _product.product_problem("causal_product", q, k, v, initial)
    out = np.full(problem.out_shape, np.nan, problem.dtype)
    state = np.full(problem.state_shape, np.nan, np.float32)
    entries = int(np.prod(problem.batch))
    whole, last = (problem.view(x.shape, x.strides) for x in (out, state))
    filled, parts, shifts, aligned = product_params.fill(
        problem, whole, last, reverse, choice.split, 1
    )
    places: list[Any] = [q, k, v, out, initial, state, None]
    if choice.segments > 1:
        sizes = entries, choice.segments, problem.qk_dim, problem.v_dim
        places[-1] = np.full(sizes, np.nan, np.float32)
    at = [0 if x is None else x.ctypes.data + s for x, s in zip(places, shifts, strict=True)]
    aligned = aligned and not any(p % 16 for p in at[:4])
    for offsets, first, blocks, _ in parts:
        here = [p and p + offset for p, offset in zip(at, offsets, strict=True)]
        product_params.pack_head(filled, 0, *here, first, aligned)
        for row, tiles, segments in choice.launches(problem.qk_dim, problem.v_dim):
            filled["tiles"] = tiles
            path = build_row(row, source if row is choice.row else None)
            block = (row.threads, row.shared_bytes)
            launch(path, row.entry, blocks * tiles * segments, *block, filled, seed, truncating)
    return out, state


def causal_products_sm90(
    choice: Choice,
    calls: Sequence[tuple[Any, ...]],
    seed: int = 0,
    source: Path | None = None,
    truncating: bool = False,
) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Several causal products as the jobs of one launch, by rows for SM90, with their states.

    Parameters
    ----------
    choice : Choice
    calls : sequence of tuple
        Of each job q, k, v, initial state and whether it is in reverse, as for `causal_product`.
    seed : int
    source : Path, optional
        As for `attention`; in place of the outputs' kernel.
    truncating : bool
        As for `launch`.

    Raises
    ------
    EmulationError
        As `launch`.
    """
    jobs, arrays = [], []
    for q, k, v, initial, reverse in calls:
        problem = _product.product_problem("causal_product", q, k, v, initial)
        out = np.full(problem.out_shape, np.nan, problem.dtype)
        state = np.full(problem.state_shape, np.nan, np.float32)
        whole, last = (problem.view(x.shape, x.strides) for x in (out, state))
        jobs.append(product_params_sm90.Job(problem, whole, last, reverse))
        assert product_params_sm90.takes(jobs[-1])
        workspace = None
        if choice.segments > 1:
            sizes = int(np.prod(problem.batch)), choice.segments, problem.qk_dim, problem.v_dim
            workspace = np.full(sizes, np.nan, np.float32)
        arrays.append((q, k, v, out, initial, state, workspace))
    for row, _, segments in choice.launches(jobs[0].problem.qk_dim, jobs[0].problem.v_dim):
        if not isinstance(row, ProductVariantSm90):
            for job, places in zip(jobs, arrays, strict=True):
                _launch_for_job(row, job, places, choice, seed, truncating)
            continue
        filled, maps, blocks = product_params_sm90.fill(jobs, row.tile_n, choice.split)
        for p, geometry, places in zip(filled[0]["job"], maps, arrays, strict=False):
            *mapped, initial, state, workspace = (0 if x is None else x.ctypes.data for x in places)
            for name, pointer in zip(product_params_sm90.MAPPED, mapped, strict=True):
                p[f"{name}_map"] = tensor_map(pointer, *geometry[name])
            p["initial"], p["state"], p["workspace"] = initial, state, workspace
            p["out"] = mapped[3]
        path = build_row(row, source if row is choice.row else None)
        block = (row.threads, row.shared_bytes)
        launch(path, row.entry, blocks * segments, *block, filled, seed, truncating)
    return [(places[3], places[5]) for places in arrays]


def _launch_for_job(
    row: ProductVariant,
    job: product_params_sm90.Job,
    places: tuple[Any, ...],
    choice: Choice,
    seed: int,
    truncating: bool,
) -> None:
    """Run a kernel that takes one product a launch, for the states of a job's segments."""
    dims = job.problem.qk_dim, job.problem.v_dim
    ((tiles, segments),) = (one[1:] for one in choice.launches(*dims) if one[0] is row)
    filled, ((_, first, blocks, _),), shifts, _ = product_params.fill(*job, choice.split, tiles)
    filled["tiles"] = tiles
    pointers = [
        0 if x is None else x.ctypes.data + shift for x, shift in zip(places, shifts, strict=True)
    ]
    product_params.pack_head(filled, 0, *pointers, first, True)
    block = (row.threads, row.shared_bytes)
    launch(build_row(row), row.entry, blocks * segments, *block, filled, seed, truncating)


def tensor_map(pointer: int, shape: Any, strides: Any, box: Any) -> np.ndarray[Any, Any]:
    """Return the emulator's tensor map; see ``ptx/tma.cuh`` beside this file."""
    return np.array([pointer, *shape, *strides, *box], np.uint64)
