"""The devices that CuPy sees."""

from __future__ import annotations

import functools
from typing import NamedTuple

from fa_cupy.gpu.variants import target_of


class Device(NamedTuple):
    """A GPU; `target` is what kernels are compiled for, None where none of them runs."""

    number: int
    name: str
    capability: tuple[int, int]
    target: str | None
    multiprocessors: int
    memory_bytes: int


def devices() -> list[Device]:
    """Return the visible devices, none where there is no CuPy, driver or GPU."""
    try:
        import cupy
    except ImportError:
        return []
    if not cupy.cuda.is_available():
        return []
    found = []
    for number in range(cupy.cuda.runtime.getDeviceCount()):
        facts = cupy.cuda.runtime.getDeviceProperties(number)
        capability = (facts["major"], facts["minor"])
        found.append(
            Device(
                number,
                facts["name"].decode(),
                capability,
                target_of(*capability),
                facts["multiProcessorCount"],
                facts["totalGlobalMem"],
            )
        )
    return found


def current_target() -> str | None:
    """Return the target of CuPy's current device, None where no kernel can run."""
    found = devices()
    if not found:
        return None
    import cupy

    return found[int(cupy.cuda.Device().id)].target


@functools.cache
def target_of_device(device: int) -> str | None:
    """Return the target that kernels are compiled for on a device, None where none runs."""
    import cupy

    digits = str(cupy.cuda.Device(device).compute_capability)  # "90", "120"
    return target_of(int(digits[:-1]), int(digits[-1]))


@functools.cache
def multiprocessors(device: int) -> int:
    """Return how many multiprocessors a device has."""
    from cupy.cuda import runtime

    return int(runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, device))
