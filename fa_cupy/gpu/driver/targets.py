"""Targets of the compiler: which one serves a device, and how much shared memory each has."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

#: Dynamic shared memory that one block can have, in bytes (CUDA C++ Programming Guide, table
#: "Technical Specifications per Compute Capability", less the 1 KB that the system keeps).
SHARED_LIMIT = {
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_87": 163 * 1024,
    "sm_89": 99 * 1024,
    "sm_90a": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_103": 227 * 1024,
    "sm_110": 227 * 1024,
    "sm_120": 99 * 1024,
    "sm_121": 99 * 1024,
    # PTX, for devices of which NVRTC knows no target. The driver compiles it; what follows "+" is
    # for rows alone, and NVRTC does not see it.
    "compute_80": 99 * 1024,
    "compute_80+163K": 163 * 1024,
    "compute_80+227K": 227 * 1024,
}


class Chosen(NamedTuple):
    """The target of a device, None where no kernel runs, and why it is that one."""

    target: str | None
    why: str


def target_of(
    major: int, minor: int, known: Collection[int] | None = None, shared: int | None = None
) -> Chosen:
    """Choose what kernels are compiled for on a device.

    A cubin runs on later devices of its own major too, so that the newest target counts that is
    not above the device. If there is no such target, PTX is used, which runs on all later devices.

    Parameters
    ----------
    major, minor : int
        The compute capability.
    known : collection of int, optional
        What NVRTC can compile for, as 103 for sm_103; by default all targets.
    shared : int, optional
        Dynamic shared memory in bytes that a block can have; by default enough for any target.
    """
    if major < 8:
        return Chosen(None, "too old for the kernels: products of cuBLAS serve it")
    own = f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")
    fits = [t for t, limit in SHARED_LIMIT.items() if shared is None or limit <= shared]
    cubins = {t: number_of(t) for t in fits if t.startswith("sm_")}
    # What ends in "a" runs on the very capability that it names.
    runs = [
        t
        for t, number in cubins.items()
        if t == own or (number // 10 == major and number % 10 < minor and t[-1] != "a")
    ]
    runs = [t for t in runs if known is None or cubins[t] in known]
    if own in runs:
        return Chosen(own, "its own")
    if own not in SHARED_LIMIT:
        why = f"fa_cupy has no target {own}"
    elif own not in fits:
        why = f"{shared} bytes of shared memory are less than {own} has"
    else:
        why = f"NVRTC does not know {own}"
    if runs:
        return Chosen(max(runs, key=cubins.__getitem__), f"the newest that runs on it: {why}")
    virtual = [t for t in fits if t not in cubins]
    if not virtual:
        return Chosen(None, f"{shared} bytes of shared memory are less than kernels need")
    chosen = virtual[0] if shared is None else max(virtual, key=SHARED_LIMIT.__getitem__)
    return Chosen(chosen, f"PTX, which the driver compiles: {why}")


def number_of(target: str) -> int:
    """Return the compute capability that a target names, as 90 for ``"sm_90a"``."""
    return int(target.partition("+")[0].partition("_")[2].rstrip("af"))
