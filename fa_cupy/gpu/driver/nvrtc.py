"""NVRTC, the run-time compiler: the only place that knows its bindings."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from fa_cupy.gpu.driver import remedies


class CompileError(RuntimeError):
    """NVRTC refused a kernel; the message holds its log."""


def version() -> tuple[int, int]:
    """Return NVRTC's major and minor version."""
    return _library()[1]


def capabilities() -> list[int]:
    """Return the compute capabilities that this NVRTC can compile for, as 90 for sm_90 and sm_90a.

    Raises
    ------
    CompileError
        If NVRTC does not say.
    ImportError
        If NVRTC or its bindings are missing; says how to install them.
    """
    nvrtc, _ = _library()
    error, numbers = nvrtc.nvrtcGetSupportedArchs()
    _check(nvrtc, error)
    return list(numbers)


def kind_of(target: str) -> str:
    """Return what is compiled for a target: a cubin, or PTX, which the driver compiles."""
    return "PTX" if target.startswith("compute_") else "CUBIN"


def architecture(target: str) -> str:
    """Return what NVRTC calls a target; what follows "+" in its name is for the rows alone."""
    return target.partition("+")[0]


def run(
    name: str,
    file: str,
    source: bytes,
    headers: Mapping[str, bytes],
    target: str,
    options: Sequence[str],
    kind: str | None = None,
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
        ``"sm_80"``, ``"sm_90a"``, ``"compute_80"``, ...
    options : sequence of str
    kind : {"CUBIN", "PTX"}, optional
        By default what `kind_of` says of the target.

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
        given = [f"--gpu-architecture={architecture(target)}", *options]
        (error,) = nvrtc.nvrtcCompileProgram(program, len(given), [o.encode() for o in given])
        log = _fetch(nvrtc, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(
                f"NVRTC {known[0]}.{known[1]} refuses {name} for {target} ({error.name})\n"
                f"options: {' '.join(options)}\n{log}"
            )
        return log, _fetch(nvrtc, program, kind or kind_of(target))
    finally:
        nvrtc.nvrtcDestroyProgram(program)


@functools.cache
def _library() -> tuple[Any, tuple[int, int]]:
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # RuntimeError: the bindings find no library
        raise ImportError(
            "compiling a kernel needs NVRTC and cuda-bindings: "
            f"{remedies.command('NVRTC', 'cuda-bindings')} ({' '.join(str(error).split())})"
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
