"""The kernels' own sources on the CPU: compiled by g++ against headers that emulate ``ptx/``.

A test tool. See ``machine.hpp`` for what is emulated; the docs say what it finds.
"""

from __future__ import annotations

import _ctypes
import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from fa_cupy.gpu.driver.compile import ROOT
from fa_cupy.gpu.kernels.variant import Variant

FOLDER = Path(__file__).parent
BUILD = ROOT / "build" / "emulator"
#: In the environment of a process that has AddressSanitizer loaded (`tests.support.seeds`).
SANITIZE = "FA_CUPY_EMULATOR_SANITIZE"
# -g1: messages name lines. Variables, which nothing asks for, take a fifth of the time to compile.
_COMMON = ("-std=c++17", "-g1", "-fPIC", "-fvisibility=hidden", f"-I{FOLDER}", f"-I{ROOT}")
# A library with a symbol that is unique in a process stays there when it is closed.
_COMMON += ("-fno-gnu-unique",)
# Some compilers define it, and then a jump to another fiber's stack aborts the process.
_COMMON += ("-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=0")
_SANITIZERS = ("-fsanitize=address", "-fsanitize=undefined", "-fno-sanitize-recover=undefined")
# Kernels: -O1, so that a debugger finds its way; each load and store is reported to machine.cpp.
_KERNEL = ("-O1", "-w", "-fno-strict-aliasing", "-fno-exceptions", "-fasynchronous-unwind-tables")
# What a function returns by value into shared memory is stored unreported; inlined it is not, and
# a kernel is long enough for a compiler to stop inlining.
_KERNEL += ("--param=large-function-insns=100000",)
_REPORTED = ("-fsanitize=thread",)


_MOST_LOADED = 16
_LOADED: dict[Path, ctypes.CDLL] = {}  # the last one used is the last one


class EmulationError(RuntimeError):
    """A kernel did what the GPU would not forgive, or deadlocked."""


class CompilerError(RuntimeError):
    """A kernel is no C++: nothing that a test of a bug may take for its discovery."""


def compiler() -> str | None:
    """Return the path of g++, None where there is none."""
    return shutil.which(os.environ.get("CXX", "g++"))


def _compile(target: Path, *arguments: str) -> Path:
    """Run the compiler unless ``target``, whose name holds a digest of all inputs, is there.

    Of processes that want the same, one runs it.
    """
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                made = target.with_suffix(f".{os.getpid()}{target.suffix}")
                command = [str(compiler()), *arguments, *_COMMON, "-o", str(made)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise CompilerError(f"{target.name}: {done.stderr[:4000]}")
                made.replace(target)
    return target


def _digest(paths: Iterable[Path], *options: object) -> str:
    digest = hashlib.sha256(repr((compiler(), _COMMON, *options)).encode())
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


# What a process has seen of the files that all kernels share, it holds to: tests plant bugs in
# kernels only, and reading a hundred files for each launch took longer than the launch.
@functools.cache
def _machine() -> Path:
    """Compile what runs the blocks, a library that those of kernels name."""
    options = ("-O1", _SANITIZERS[0]) if SANITIZE in os.environ else ("-O2", "-ftree-vectorize")
    headers = [FOLDER / name for name in ("engine.hpp", "machine.hpp", "context.hpp")]
    sources = [FOLDER / "machine.cpp", FOLDER / "instructions.cpp"]
    target = BUILD / f"machine-{_digest([*sources, *headers], options)}.so"
    return _compile(target, *options, "-shared", *map(str, sources))


@functools.cache
def _emulate() -> Any:
    """Return the machine's function that runs a launch."""
    run = ctypes.CDLL(str(_machine())).emulate
    run.argtypes = [
        ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_size_t,
        ctypes.c_uint64, ctypes.c_bool, ctypes.c_uint, ctypes.c_void_p, ctypes.c_char_p,
        ctypes.c_size_t,
    ]  # fmt: skip
    return run


@functools.cache
def _precompiled(*options: str) -> tuple[str, ...]:
    """Compile what every kernel includes first; return the options that use it."""
    header = FOLDER / "cuda.hpp"
    folder = BUILD / f"precompiled-{_digest([header, FOLDER / 'engine.hpp'], options)}"
    _compile(folder / "cuda.hpp.gch", *options, "-x", "c++-header", str(header))
    return f"-I{folder}", "-include", "cuda.hpp"


@functools.cache
def _headers() -> str:
    """Return a digest of all that a kernel is made of but its own source."""
    used = sorted([*FOLDER.rglob("*.cuh"), *ROOT.glob("cuda_src/*/*.cuh")])
    used += [FOLDER / "engine.hpp", FOLDER / "cuda.hpp", FOLDER / "entry.cpp"]
    return _digest([*used, ROOT / "ptx/types.cuh"], _machine().name)


def build(
    name: str,
    source: Path,
    defines: Sequence[tuple[str, int]],
    entries: Sequence[str],
    made: Mapping[str, bytes] = MappingProxyType({}),
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
    made : mapping of bytes, optional
        Headers that are no files, by the name in the include.

    Raises
    ------
    CompilerError
        With what the compiler said.
    """
    sanitize = SANITIZE in os.environ
    options = (*_KERNEL, *(_SANITIZERS if sanitize else _REPORTED))
    digest = _digest([source], options, defines, entries, sorted(made.items()), _headers())
    stem = f"{name}-{digest}"
    target = BUILD / f"{stem}.so"
    if not target.exists():
        listed = " ".join(f"ENTRY({entry})" for entry in entries)
        flags = [*(f"-D{key}={value}" for key, value in defines), f'-DKERNEL="{source.resolve()}"']
        flags += [f"-DENTRIES={listed}", "-c", str(FOLDER / "entry.cpp")]
        if made:
            flags.append(f"-I{_written(made)}")
        kernel = _compile(
            BUILD / f"{stem}.{os.getpid()}.o", *_precompiled(*options), *options, *flags
        )
        _compile(
            target, *(_SANITIZERS if sanitize else ()), "-shared", str(kernel), str(_machine())
        )
        kernel.unlink(missing_ok=True)
    return target


def build_row(row: Variant, source: Path | None = None) -> Path:
    """`build` of a row of the variant table, or of another kernel in its place."""
    source = source or ROOT / "cuda_src" / f"{row.source}.cu"
    return build(row.name, source, row.defines, (row.entry,), row.headers)


def _written(made: Mapping[str, bytes]) -> Path:
    """Return a folder of headers that were made, under their names."""
    digest = hashlib.sha256(repr(sorted(made.items())).encode()).hexdigest()[:16]
    folder = BUILD / f"headers-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in made.items():
        own = folder / f"{name}.{os.getpid()}"
        own.write_bytes(text)
        own.replace(folder / name)
    return folder


def _library(path: Path) -> ctypes.CDLL:
    """Load a kernel, or take one of the last that were."""
    library = _LOADED.pop(path, None) or ctypes.CDLL(str(path))
    _LOADED[path] = library
    if len(_LOADED) > _MOST_LOADED:
        _ctypes.dlclose(_LOADED.pop(next(iter(_LOADED)))._handle)
    return library


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
    kernel = ctypes.cast(_library(path).run_entry, ctypes.c_void_p)
    arguments = blocks, threads, shared, seed, truncating, together, raw.ctypes.data + at
    if _emulate()(kernel, entry.encode(), *arguments, message, len(message)):
        said = _line(path, message.value.decode())
        raise EmulationError(f"{entry}, seed {seed}: {said}")


def launch_row(
    row: Variant,
    blocks: int,
    filled: np.ndarray[Any, Any],
    seed: int = 0,
    source: Path | None = None,
    truncating: bool = False,
    together: int = 1,
) -> None:
    """`launch` of what `build_row` returns."""
    launch(build_row(row, source), row.entry, blocks, row.threads, row.shared_bytes, filled, seed,
           truncating, together)  # fmt: skip


def tensor_map(pointer: int, shape: Any, strides: Any, box: Any) -> np.ndarray[Any, Any]:
    """Return the emulator's tensor map; see ``ptx/tma.cuh`` beside this file."""
    return np.array([pointer, *shape, *strides, *box], np.uint64)
