"""The backends, imported on first use: NumPy arrays never import CuPy."""

from __future__ import annotations

import importlib
from typing import Any

_PACKAGES = {"numpy": "fa_cupy.cpu", "cupy": "fa_cupy.gpu"}


def module(backend: str, name: str) -> Any:
    """Return a module of the backend for "numpy" or "cupy" arrays."""
    return importlib.import_module(f"{_PACKAGES[backend]}.{name}")


def gpu(name: str) -> Any:
    """Return a module of the backend for CuPy arrays, as ``gpu("masks.build")``."""
    return module("cupy", name)
