"""NVRTC, the run-time compiler: the only place that knows its bindings."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any


class CompileError(RuntimeError):
    """NVRTC refused a kernel; the message holds its log."""


def version() -> tuple[int, int]:
    """Return NVRTC's major and minor version."""
    return _library()[1]


def supported(target: str) -> bool:
    """Return whether this NVRTC knows a target such as ``"sm_90a"``."""
    capabilities = _library()[0].nvrtcGetSupportedArchs()[1]
    return int(target.removeprefix("sm_").rstrip("af")) in capabilities


def run(
    name: str,
    file: str,
    source: bytes,
    headers: Mapping[str, bytes],
    target: str,
    options: Sequence[str],
    kind: str = "CUBIN",
) -> tuple[str, bytes]:
    """Compile a source that sees nothing but these headers.

    Parameters
    ----------
    name : str
        What an error calls the kernel.
    file : str
        What errors and line information call the source.
    source : bytes
    headers : mapping of str to bytes
        By the name that ``#include`` gives them.
    target : str
        ``"sm_80"``, ``"sm_90a"``, ...
    options : sequence of str
    kind : {"CUBIN", "PTX"}

    Returns
    -------
    log : str
    image : bytes

    Raises
    ------
    CompileError
        With NVRTC's log, the target and the options.
    ImportError
        If NVRTC or its bindings are missing; says how to install them.
    """
    nvrtc, known = _library()
    error, program = nvrtc.nvrtcCreateProgram(
        source,
        file.encode(),
        len(headers),
        list(headers.values()),
        [header.encode() for header in headers],
    )
    _check(nvrtc, error)
    try:
        given = [f"--gpu-architecture={target}", *options]
        (error,) = nvrtc.nvrtcCompileProgram(program, len(given), [o.encode() for o in given])
        log = _fetch(nvrtc, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(
                f"NVRTC {known[0]}.{known[1]} refuses {name} for {target} ({error.name})\n"
                f"options: {' '.join(options)}\n{log}"
            )
        return log, _fetch(nvrtc, program, kind)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


@functools.cache
def _library() -> tuple[Any, tuple[int, int]]:
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # RuntimeError: the bindings find no library
        raise ImportError(
            "compiling a kernel needs NVRTC and cuda-bindings: pip install 'fa_cupy[cuda13]', or "
            f"'fa_cupy[cuda12]' for a CUDA 12 driver ({error})"
        ) from error
    return nvrtc, (major, minor)


def _fetch(nvrtc: Any, program: Any, what: str) -> bytes:
    error, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
    _check(nvrtc, error)
    data = bytearray(size)
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, data)[0])
    return bytes(data)


def _check(nvrtc: Any, error: Any) -> None:
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC: {error.name}")
