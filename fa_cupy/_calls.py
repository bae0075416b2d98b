"""What public functions have in common: arrays that must be given, backends, where results go."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from fa_cupy import _arrays, _check

_PACKAGES = {"numpy": "fa_cupy.cpu", "cupy": "fa_cupy.gpu"}
_OPTIONAL = ("initial_state", "dstate", "out")


def require(name: str, **arrays: Any) -> None:
    """Raise for an array that is None."""
    for arg, array in arrays.items():
        if array is None:
            raise TypeError(f"{name}: {arg} is None, want an array")


def to_native(name: str, **arrays: Any) -> _arrays.Native:
    """Return arrays of a product as native arrays; only some of them may be None."""
    require(name, **{arg: x for arg, x in arrays.items() if arg not in _OPTIONAL})
    return _arrays.to_native(name, **arrays)


def backend_of(native: _arrays.Native, family: str) -> Any:
    """Return the module of a family of functions that computes with these arrays."""
    return importlib.import_module(f"{_PACKAGES[native.backend]}.{family}")


def check_out(name: str, out: Any, problem: Any, inputs: Sequence[Any]) -> None:
    """Raise unless `out`, where it is given, can take the output of a product."""
    if out is not None:
        named = zip(("q", "k", "v", "initial_state"), inputs, strict=False)
        _check.check_out(name, out, problem.out_shape, problem.dtype, named)


def result_for(native: _arrays.Native, problem: Any, q: Any, out: Any) -> Any:
    """Return where to write the output: `out`, or new memory where the caller's library makes it.

    None where that is the backend's to make.
    """
    if out is not None or native.new is None:
        return out
    order = _arrays.memory_order(problem.out_shape, q)
    return native.new(problem.out_shape, problem.dtype, order)
