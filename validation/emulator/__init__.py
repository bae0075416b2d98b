"""The kernels' own sources on the CPU: compiled by g++ against headers that emulate ``ptx/``.

A test tool. See ``machine.hpp`` for what is emulated and what it finds.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from fa_cupy import _check, _product
from fa_cupy.gpu import params, params_sm90, product_params
from fa_cupy.gpu.compile import ROOT
from fa_cupy.gpu.product_choice import Choice
from fa_cupy.gpu.variants import Variant, VariantSm90

FOLDER = Path(__file__).parent
#: Multiprocessors of the emulated device; few, so that blocks take several tiles.
BLOCKS = 2
_OPTIONS = ("-std=c++17", "-O1", "-g", "-fPIC", "-shared", "-w", "-fno-strict-aliasing")


class EmulationError(RuntimeError):
    """A kernel did what the GPU would not forgive, or deadlocked."""


def compiler() -> str | None:
    """Return the path of g++, None where there is none."""
    return shutil.which(os.environ.get("CXX", "g++"))


@functools.cache
def load(row: Variant, source: Path | None = None) -> ctypes.CDLL:
    """Compile a row of the variant table for this machine, or take it from ``build/``.

    Parameters
    ----------
    row : Variant
    source : Path, optional
        A kernel in place of the row's own.

    Raises
    ------
    EmulationError
        With what the compiler said.
    """
    own = [*FOLDER.rglob("*.[hc]pp"), *FOLDER.rglob("*.cuh"), ROOT / "ptx/types.cuh"]
    sources = [*own, *ROOT.glob("cuda_src/**/*.cu*")]
    source = source or ROOT / "cuda_src" / f"{row.source}.cu"
    digest = hashlib.sha256(repr((row.defines, _OPTIONS)).encode())
    for path in [*sorted(sources), source]:
        digest.update(path.read_bytes())
    target = ROOT / "build" / "emulator" / f"{row.name}-{digest.hexdigest()[:16]}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        made = target.with_suffix(f".{os.getpid()}")
        command = [str(compiler()), *_OPTIONS, "-include", "cuda.hpp", f"-I{FOLDER}", f"-I{ROOT}"]
        command += [f"-D{name}={value}" for name, value in row.defines]
        command += [f'-DKERNEL="{source}"', f"-DENTRY={row.entry}"]
        command += [str(FOLDER / "machine.cpp"), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise EmulationError(f"{row.name}: {done.stderr[:4000]}")
        made.replace(target)
    return ctypes.CDLL(str(target))


def launch(
    row: Variant,
    blocks: int,
    filled: np.ndarray[Any, Any],
    seed: int,
    source: Path | None = None,
) -> None:
    """Run a launch to its end; see `load` and `attention` for the parameters.

    Raises
    ------
    EmulationError
        With the row, the seed and what each warp was at.
    """
    message = ctypes.create_string_buffer(4096)
    # The struct is aligned as in C++: a copy in the middle of a larger buffer.
    raw = np.zeros(filled.nbytes + 64, np.uint8)
    at = -raw.ctypes.data % 64
    raw[at : at + filled.nbytes] = filled.reshape(-1).view(np.uint8)
    run = load(row, source).emulate
    run.argtypes = [
        ctypes.c_uint, ctypes.c_uint, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_char_p,
        ctypes.c_size_t,
    ]  # fmt: skip
    if run(blocks, row.threads, seed, raw.ctypes.data + at, message, len(message)):
        raise EmulationError(f"{row.name}, seed {seed}: {message.value.decode()}")


def attention(
    row: Variant,
    q: np.ndarray[Any, Any],
    k: np.ndarray[Any, Any],
    v: np.ndarray[Any, Any],
    bias: np.ndarray[Any, Any] | None = None,
    mask: np.ndarray[Any, Any] | None = None,
    seed: int = 0,
    source: Path | None = None,
    **options: Any,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """`fa_cupy.attention` by one row of the variant table, with LSE.

    Parameters
    ----------
    row : Variant
    q, k, v, bias, mask : numpy.ndarray
        As for `fa_cupy.attention`; aligned to 16 bytes where the row wants it.
    seed : int
        Of the order in which threads and what runs beside them take turns.
    source : Path, optional
        A kernel in place of the row's own.
    **options
        Of `fa_cupy.attention`.

    Raises
    ------
    EmulationError
        As `launch`.
    """
    problem = _check.attention_problem(q, k, v, bias, mask, **options)
    out = np.full(problem.out_shape, np.nan, problem.dtype)
    lse = np.full(problem.out_shape[:-1], np.nan, np.float32)
    view = _check.out_view(problem, out.shape, out.strides)
    places = (q, k, v, bias, mask, out, lse, None)
    pointers = [0 if x is None else x.ctypes.data for x in places]
    if isinstance(row, VariantSm90):
        filled, maps, parts = params_sm90.fill(problem, view, row.tile_m, row.tile_n)
        for name in params_sm90.MAPPED:
            words = _map(pointers[params.POINTERS.index(name)], *maps[name])
            filled[f"{name}_map"].view(np.uint64)[:] = words
        ((first, tiles, *rest),) = parts
        filled["common"][list(params.POINTERS)] = tuple(pointers)
        filled["common"]["first_batch"], filled["common"]["aligned"] = first, 1
        counter = np.random.default_rng(seed).integers(0, 2**63, 4, np.uint64)
        counter = counter[counter.ctypes.data // 8 % 2 :]
        address = counter.ctypes.data if tiles > BLOCKS else 0
        filled["schedule"] = (address, seed + 1, tiles, *rest)
        launch(row, min(BLOCKS, tiles), filled, seed, source)
        return out, lse
    filled, parts, aligned = params.fill(problem, view, row.tile_m)
    for offsets, first, blocks in parts:
        at = [p and p + offset for p, offset in zip(pointers, offsets, strict=True)]
        aligned = aligned and not any(p % 16 for p in (*at[:3], at[5]))
        params.pack_head(filled, 0, *at, first, aligned)
        launch(row, blocks, filled, seed, source)
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

    Raises
    ------
    EmulationError
        As `launch`.
    """
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
    for offsets, first, blocks in parts:
        here = [p and p + offset for p, offset in zip(at, offsets, strict=True)]
        product_params.pack_head(filled, 0, *here, first, aligned)
        for row, tiles, segments in choice.launches(problem.qk_dim, problem.v_dim):
            filled["tiles"] = tiles
            own = None if row is not choice.row else source
            launch(row, blocks * tiles * segments, filled, seed, own)
    return out, state


def _map(pointer: int, shape: Any, strides: Any, box: Any) -> np.ndarray[Any, Any]:
    """Return the emulator's tensor map; see ``ptx/tma.cuh`` beside this file."""
    return np.array([pointer, *shape, *strides, *box], np.uint64)
