"""Sources to cubins, with neither a GPU nor a toolkit, and cubins to kernels that CuPy launches.

A kernel and the headers that it includes are handed to NVRTC in memory. No other file is visible
to the compiler, so the bytes that it can read are the bytes that the cache is keyed on.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from fa_cupy.gpu.driver import cubin_cache, nvrtc

if TYPE_CHECKING:
    from fa_cupy.gpu.kernels.variant import Variant

_PACKAGE = Path(__file__).resolve().parents[2]
#: Holds ``cuda_src`` and ``ptx``: the package where it is installed, its parent in a checkout.
ROOT = _PACKAGE if (_PACKAGE / "cuda_src").is_dir() else _PACKAGE.parent

#: If set, kernels are compiled with line numbers, and sources and log stay next to the cubin.
KEEP_VARIABLE = "FA_CUPY_KEEP_SOURCES"

# -v has ptxas report registers and spills, in the log. Lambdas have no place for "__device__".
_OPTIONS = ("-std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v")
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)

Defines = Iterable[tuple[str, int]]
_NOTHING: Mapping[str, bytes] = MappingProxyType({})


class Compiled(NamedTuple):
    """A compiled kernel.

    Attributes
    ----------
    cubin : bytes
        An ELF image for exactly one target; for a target of PTX that text, with a zero byte
        behind it.
    log : str
        What NVRTC and ptxas said; see `resource_report`.
    seconds : float
        How long the compilation took, whenever that was.
    cached : bool
        Whether it came from the disk.
    """

    cubin: bytes
    log: str
    seconds: float
    cached: bool


class Resources(NamedTuple):
    """What ptxas says of a kernel: registers a thread, bytes, and its remarks that have a code."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    static_shared: int
    notes: tuple[str, ...]


def compile_variant(variant: Variant, target: str, anew: bool = False) -> Compiled:
    """Compile one row of the variant table, or take it from the cache.

    Parameters
    ----------
    variant : Variant
    target : str
        One of the row's: ``"sm_80"``, ``"sm_90a"``, ``"compute_80"`` for PTX.
    anew : bool, optional
        Whether to compile it in any case.

    Raises
    ------
    fa_cupy.gpu.driver.nvrtc.CompileError
        With NVRTC's log, the variant's name and its defines.
    ImportError
        If NVRTC or its bindings are missing; says how to install them.
    """
    file, source = _source_of(variant)
    return compile_source(
        variant.name, source, target, variant.defines, file, anew, variant.headers
    )


def compile_source(
    name: str,
    source: bytes,
    target: str,
    defines: Defines = (),
    file: str = "kernel.cu",
    anew: bool = False,
    made: Mapping[str, bytes] = _NOTHING,
) -> Compiled:
    """Compile CUDA C++ that includes nothing but the headers of this project.

    Parameters
    ----------
    name : str
        For messages, and for the file in the cache.
    source : bytes
    target : str
    defines : iterable of (str, int)
        Macros.
    file : str
        What messages call the source.
    anew : bool
        As for `compile_variant`.
    made : mapping of bytes, optional
        Headers that are no files, by the name in the include.

    Raises
    ------
    fa_cupy.gpu.driver.nvrtc.CompileError, ImportError
        As `compile_variant`.
    """
    headers, options = _headers(source, made), _options(defines)
    key = _key(source, headers, target, options)
    file_name = f"{name}-{nvrtc.architecture(target)}-{key[:24]}.{nvrtc.kind_of(target).lower()}"
    path = cubin_cache.place(file_name)
    entry = None if path is None or anew else cubin_cache.read(path, key)
    if entry is not None:
        return Compiled(*entry, cached=True)
    start = time.perf_counter()
    log, cubin = nvrtc.run(name, file, source, headers, target, options)
    entry = cubin_cache.Entry(cubin, log, time.perf_counter() - start)
    if path is not None:
        with cubin_cache.costing_time(f"{name} could not be kept in", path.parent):
            cubin_cache.write(path, key, entry)
            if os.environ.get(KEEP_VARIABLE):
                _keep(path.with_suffix(".sources"), source, headers, f"{' '.join(options)}\n{log}")
    return Compiled(*entry, cached=False)


def emit_ptx(variant: Variant, target: str) -> str:
    """Return the PTX of a variant, compiled anew.

    Raises
    ------
    fa_cupy.gpu.driver.nvrtc.CompileError, ImportError
        As `compile_variant`.
    """
    file, source = _source_of(variant)
    headers, options = _headers(source, variant.headers), _options(variant.defines)
    _, image = nvrtc.run(variant.name, file, source, headers, target, options, "PTX")
    return image.rstrip(b"\0").decode()


_loaded: dict[tuple[Any, str, int], Any] = {}
atexit.register(_loaded.clear)  # a kernel cannot be unloaded once CuPy's modules are gone
_load_lock = threading.RLock()  # a kernel of a PTX file loads the file first


def load(variant: Variant, target: str, device: int) -> Any:
    """Return a variant's kernel, ready on a device; it is compiled and loaded at most once.

    Parameters
    ----------
    variant : Variant
    target : str
        That of the device.
    device : int
        CuPy's number of it.

    Returns
    -------
    cupy.cuda.Function
        The same one for the same arguments, in every thread.
    """

    def make() -> Any:
        return load_cubin(compile_variant(variant, target).cubin, variant.entry, device)

    return _once((variant, target, device), make)


def load_all(variants: Sequence[Variant], target: str, device: int) -> list[Any]:
    """Return the kernels of some variants; see `load`. Several are compiled at the same time."""
    with _load_lock:
        new = [v for v in dict.fromkeys(variants) if (v, target, device) not in _loaded]
        if len(new) > 1:
            for variant, compiled in zip(new, _compile_together(new, target), strict=False):
                kernel = load_cubin(compiled.cubin, variant.entry, device)
                _loaded[variant, target, device] = kernel
    return [load(variant, target, device) for variant in variants]


def _compile_together(variants: Sequence[Variant], target: str) -> list[Compiled]:
    """Compile in a thread each; return nothing where no thread can be started."""
    try:
        # Once the main thread has ended, neither the import nor a new thread may be possible.
        from concurrent.futures import ThreadPoolExecutor

        pool = ThreadPoolExecutor(len(variants))
        futures = [pool.submit(compile_variant, variant, target) for variant in variants]
    except RuntimeError:
        return []
    with pool:
        return [future.result() for future in futures]


def load_ptx(file: str, entry: str, device: int) -> Any:
    """Load a kernel of a PTX file on a device: the driver compiles it, or knows it from before.

    Parameters
    ----------
    file : str
        Of the folder ``ptx``.
    entry : str
        The kernel.
    device : int

    Returns
    -------
    cupy.cuda.Function
        The same one for the same arguments, in every thread.

    Raises
    ------
    RuntimeError
        If the driver does not take the file.
    """

    def module() -> Any:
        image = (ROOT / "ptx" / file).read_bytes() + b"\0"
        return _module(image, f"ptx/{file}", "it", device)

    def make() -> Any:
        return _once((file, "", device), module).get_function(entry)

    return _once((file, entry, device), make)


def load_cubin(cubin: bytes, entry: str, device: int) -> Any:
    """Load a cubin, or PTX, on a device; return the kernel called `entry`, a `cupy.cuda.Function`.

    It goes to the driver from memory: what was held against its digest is what is run, which a
    path (``cupy.RawModule(path=...)``) could not promise.

    Raises
    ------
    RuntimeError
        If the driver does not take it.
    """
    kind = "cubin" if cubin.startswith(b"\x7fELF") else "PTX"
    what = f"the {kind} of NVRTC {nvrtc.version()}"
    return _module(cubin, entry, what, device).get_function(entry)


def _module(image: bytes, name: str, what: str, device: int) -> Any:
    import cupy

    with cupy.cuda.Device(device):
        module = cupy.cuda.function.Module()
        try:
            module.load(image)
        except cupy.cuda.driver.CUDADriverError as error:
            raise RuntimeError(
                f"{name}: the driver (CUDA {cupy.cuda.runtime.driverGetVersion()}) of device "
                f"{device} refuses {what}: {error}"
            ) from error
        return module


def _once(key: tuple[Any, str, int], make: Callable[[], Any]) -> Any:
    """Return what is loaded by that key, made at most once."""
    found = _loaded.get(key)
    if found is None:
        with _load_lock:
            found = _loaded.get(key)
            if found is None:
                found = _loaded[key] = make()
    return found


def resource_report(log: str) -> Resources:
    """Read ptxas' report in a log; where there are several functions, the largest figures."""

    def most(pattern: str) -> int:
        return max(map(int, re.findall(pattern, log)), default=0)

    return Resources(
        most(r"Used (\d+) registers"),
        most(r"(\d+) bytes stack frame"),
        most(r"(\d+) bytes spill stores"),
        most(r"(\d+) bytes spill loads"),
        most(r"(\d+) bytes smem"),
        tuple(line.strip() for line in log.splitlines() if re.search(r"\bC\d{4}\b", line)),
    )


def _source_of(variant: Variant) -> tuple[str, bytes]:
    file = f"cuda_src/{variant.source}.cu"
    return file, (ROOT / file).read_bytes()


def _headers(source: bytes, made: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the headers that a source includes, directly or not, by the name in the include.

    One that is not there is left to NVRTC, whose message says where it is wanted.
    """
    found = dict(made)
    todo = [source, *made.values()]
    while todo:
        for name in map(bytes.decode, _INCLUDE.findall(todo.pop())):
            path = ROOT / name
            if name not in found and path.is_file():
                found[name] = path.read_bytes()
                todo.append(found[name])
    return dict(sorted(found.items()))


def _options(defines: Defines) -> list[str]:
    lines = ["-lineinfo"] if os.environ.get(KEEP_VARIABLE) else []
    return [*_OPTIONS, *lines, *(f"-D{name}={value}" for name, value in defines)]


def _key(source: bytes, headers: dict[str, bytes], target: str, options: list[str]) -> str:
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in headers.items()}
    digests["source"] = hashlib.sha256(source).hexdigest()
    facts = [digests, nvrtc.architecture(target), options, nvrtc.version()]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _keep(folder: Path, source: bytes, headers: dict[str, bytes], log: str) -> None:
    for name, data in {"kernel.cu": source, "nvrtc.log": log.encode(), **headers}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
