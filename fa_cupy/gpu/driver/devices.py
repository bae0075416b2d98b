"""The devices that CuPy sees, and CuPy itself, which may be missing or broken."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from fa_cupy.gpu.driver import nvrtc
from fa_cupy.gpu.driver.targets import Chosen, target_of

ABSENT = "CuPy is not installed"


class Device(NamedTuple):
    """A GPU; `target` is what kernels are compiled for, None where none of them runs."""

    number: int
    name: str
    capability: tuple[int, int]
    target: str | None
    why: str  # the reason for that target
    multiprocessors: int
    memory_bytes: int


class Found(NamedTuple):
    """The visible devices; without one, `why` says in one line what is missing."""

    devices: list[Device]
    why: str = ""


def import_cupy() -> tuple[Any, str]:
    """Return CuPy, None where it is missing or broken, and in one line what is wrong with it.

    A folder that an installation left behind can be imported and holds nothing, and a damaged
    installation raises errors of any kind.
    """
    try:
        import cupy

        missing = [name for name in ("ndarray", "cuda") if not hasattr(cupy, name)]
    except ModuleNotFoundError as error:
        return None, ABSENT if error.name == "cupy" else _unusable(error)
    except (Exception, SystemExit) as error:
        return None, _unusable(error)
    if missing:
        place = getattr(cupy, "__file__", None) or next(iter(getattr(cupy, "__path__", [])), "it")
        return None, f"CuPy cannot be used: {place} has no cupy.{missing[0]}"
    return cupy, ""


def look() -> Found:
    """Return the visible devices, none where there is no CuPy, driver or GPU."""
    cupy, why = import_cupy()
    if cupy is None:
        return Found([], why)
    try:
        if not cupy.cuda.is_available():
            return Found([], "CuPy sees no CUDA device")
        count = cupy.cuda.runtime.getDeviceCount()
        return Found([_device(cupy, number) for number in range(count)])
    except (ImportError, AttributeError, OSError, RuntimeError) as error:  # CUDA's own is the last
        return Found([], _unusable(error))


def devices() -> list[Device]:
    """Return the visible devices, none where there is no CuPy, driver or GPU."""
    return look().devices


def current_target() -> str | None:
    """Return the target of CuPy's current device, None where no kernel can run."""
    found = devices()
    if not found:
        return None
    import cupy

    return found[int(cupy.cuda.Device().id)].target


@functools.cache
def target_of_device(device: int) -> str | None:
    """Return the target that kernels are compiled for on a device, None if no kernel can run."""
    import cupy

    return _chosen(cupy.cuda.runtime.getDeviceProperties(device)).target


@functools.cache
def multiprocessors(device: int) -> int:
    """Return how many multiprocessors a device has."""
    from cupy.cuda import runtime

    return int(runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, device))


def _device(cupy: Any, number: int) -> Device:
    facts = cupy.cuda.runtime.getDeviceProperties(number)
    return Device(
        number,
        facts["name"].decode(),
        (facts["major"], facts["minor"]),
        *_chosen(facts),
        facts["multiProcessorCount"],
        facts["totalGlobalMem"],
    )


def _chosen(facts: dict[str, Any]) -> Chosen:
    """Choose a target by the properties of a device and what NVRTC, where it is here, knows."""
    try:
        known = nvrtc.capabilities()
    except ImportError:  # the first compilation says how to install it
        known = None
    return target_of(facts["major"], facts["minor"], known, facts["sharedMemPerBlockOptin"])


def _unusable(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"CuPy cannot be used: {type(error).__name__}: {text[:200]}"
