"""Names of machines: whatever the bits of results depend on."""

from __future__ import annotations

import contextlib
import platform
from importlib import metadata
from typing import Any

import numpy as np
import threadpoolctl

from validation import store

_WHEEL = "scipy-openblas32"


def key(xp: Any) -> str:
    """Return a name that two machines share only where results have the same bits."""
    return _cpu() if xp is np else _gpu(xp)


def fixed_threads() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which results do not depend on the number of threads.

    With a BLAS of the package's own they never do; NumPy's gets one thread.
    """
    if _wheel() is not None:
        return contextlib.nullcontext()
    return threadpoolctl.threadpool_limits(1, user_api="blas")


def _wheel() -> str | None:
    try:
        return metadata.version(_WHEEL)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    """Name NumPy, the vector instructions that it uses, the BLAS libraries and their core."""
    built = np.show_config(mode="dicts")
    simd = built["SIMD Extensions"]
    blas = built["Build Dependencies"]["blas"]
    parts = [
        f"NumPy {np.__version__} on {platform.machine()}",
        " ".join((*simd.get("baseline", ()), *simd.get("found", ()))),
        f"{blas['name']} {blas['version']}, core {store.openblas_core('numpy.libs')}",
        f"{_WHEEL} {_wheel()}",
    ]
    return "; ".join(parts)


def _gpu(cupy: Any) -> str:
    from cuda.bindings import nvrtc

    number = cupy.cuda.Device().id
    device = cupy.cuda.runtime.getDeviceProperties(number)
    _, *version = nvrtc.nvrtcVersion()
    parts = [
        f"{device['name'].decode()}, compute capability {device['major']}.{device['minor']}",
        f"{device['multiProcessorCount']} multiprocessors",
        f"NVRTC {version[0]}.{version[1]}",
        f"CuPy {cupy.__version__}",
        f"cuBLAS {cupy.cuda.cublas.getVersion(cupy.cuda.device.get_cublas_handle())}",
    ]
    return "; ".join(parts)
