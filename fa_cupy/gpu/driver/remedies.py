"""The command that installs what a GPU needs, for where this Python and its CuPy come from."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

#: The oldest CuPy that is tested (setup.cfg).
OLDEST_CUPY = 14
#: Packages of conda-forge, by what they bring.
PACKAGES = {
    "CuPy": "cupy",
    "cuda-bindings": "cuda-bindings",
    "NVRTC": "cuda-nvrtc",
    "cuBLAS": "libcublas",
    "the headers of CUDA": "cuda-cudart-dev",
}
# CuPy's wheels, which conda does not have.
_WHEELS = ("cupy-cuda12x", "cupy-cuda13x")


def from_conda() -> bool:
    """Return whether CuPy comes from conda, or Python if CuPy is not installed."""
    return _records().is_dir() and not any(map(_installed, _WHEELS))


def missing_from_conda() -> list[str]:
    """Return which of `PACKAGES` an environment of conda lacks, by what they bring."""
    # The names of records end in a version and a build, which have no "-" themselves.
    have = {path.name.rsplit("-", 2)[0] for path in _records().glob("*-*-*.json")}
    have |= {"cupy"} & {name.removesuffix("-core") for name in have}
    return [what for what, package in PACKAGES.items() if package not in have]


def command(*wanted: str) -> str:
    """Return how to install what `PACKAGES` names, as the end of a sentence.

    Examples
    --------
    >>> command("NVRTC").partition(" install ")[0] in ("pip", "conda")
    True
    """
    if not from_conda():
        return "pip install 'fa_cupy[cuda13]', or 'fa_cupy[cuda12]' for a CUDA 12 driver"
    missing = [what for what in missing_from_conda() if what in wanted] or wanted
    names = " ".join(PACKAGES[what] for what in missing)
    names = re.sub(r"^cupy\b", f"'cupy>={OLDEST_CUPY}'", names)
    return (
        f"conda install -c conda-forge {names} cuda-version=13, or cuda-version=12 for a CUDA 12 "
        "driver"
    )


def too_old(version: str) -> bool:
    """Return whether a version of CuPy is older than what is tested."""
    major = version.partition(".")[0]
    return major.isdecimal() and int(major) < OLDEST_CUPY


def _records() -> Path:
    """Return the folder in which conda keeps a record of each package."""
    return Path(sys.prefix) / "conda-meta"


def _installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True
