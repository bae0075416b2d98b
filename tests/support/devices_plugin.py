"""A pytest plugin for GPU tests in several processes (``make test-gpu GPU_JOBS=28``).

The processes begin with different devices and have few cores each, and long tests come first.
"""

import os
import shutil
import subprocess

_CORES = 4  # of a process: kernels are compiled on them, and references computed
#: Tests in files of these names take longest, those by hypothesis next.
_LONG = ("test_validation.py", "test_outcomes.py")


def visible_devices(number, devices):
    """Return the order in which the process with this number sees the devices."""
    return ",".join(str((number + i) % devices) for i in range(devices))


def cores_of(number, cores):
    """Return the cores of the process with this number."""
    return {(number + i) % cores for i in range(min(_CORES, cores))}


def length_rank(nodeid, by_hypothesis):
    """Return a number that is the lower the longer a test is thought to take."""
    if any(f"/{name}::" in nodeid for name in _LONG):
        return 0
    return 1 if by_hypothesis else 2


def pytest_collection_modifyitems(items):
    """Put long tests first, so that none is alone at the end."""
    items.sort(
        key=lambda item: length_rank(
            item.nodeid, getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
        )
    )


def _spread(worker):
    """Give the process of a worker of pytest-xdist its devices and cores, before CUDA starts."""
    number = int(worker.removeprefix("gw"))
    devices = 0
    if shutil.which("nvidia-smi"):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
        devices = listed.stdout.count("(UUID:")
    if devices > 1 and "CUDA_VISIBLE_DEVICES" not in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices(number, devices)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores_of(number, os.cpu_count() or 1))


if "PYTEST_XDIST_WORKER" in os.environ and os.environ.get("FA_CUPY_SPREAD"):
    _spread(os.environ["PYTEST_XDIST_WORKER"])
