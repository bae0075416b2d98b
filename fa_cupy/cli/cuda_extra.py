"""Which CUDA extra suits this machine's driver; a script that runs before any installation."""

import ctypes
import sys

_LIBRARIES = ("nvcuda.dll",) if sys.platform == "win32" else ("libcuda.so.1", "libcuda.so")


def driver_version() -> int | None:
    """Return the newest CUDA version that the driver supports.

    Returns
    -------
    int or None
        ``1000 * major + 10 * minor``; None where no driver or no visible device is found.
    """
    for name in _LIBRARIES:
        try:
            driver = ctypes.CDLL(name)
        except OSError:
            continue
        version, devices = ctypes.c_int(), ctypes.c_int()
        # The driver library alone proves nothing: build machines carry it without a device.
        if (
            driver.cuInit(0) == 0
            and driver.cuDeviceGetCount(ctypes.byref(devices)) == 0
            and devices.value > 0
            and driver.cuDriverGetVersion(ctypes.byref(version)) == 0
        ):
            return version.value
    return None


def extra(version: int | None) -> str:
    """Return the name of the pip extra for a driver of this version, or an empty string.

    A driver runs code of its own CUDA major and of every one before it.

    Examples
    --------
    >>> extra(13000), extra(12080), extra(11080), extra(None)
    ('cuda13', 'cuda12', '', '')
    """
    major = (version or 0) // 1000
    return "cuda13" if major >= 13 else "cuda12" if major == 12 else ""


if __name__ == "__main__":
    print(extra(driver_version()))
