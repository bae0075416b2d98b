"""Public names and the parameters of public functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import fa_cupy
from fa_cupy import BitMask, layouts, reference
from validation.outcomes.record import Call


def _parameters(function: Any) -> str:
    """Return parameters with their kinds and defaults, without annotations."""
    signature = inspect.signature(function)
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    plain = signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)
    return str(plain)


def _public(owner: Any) -> dict[str, Any]:
    """Return the public members of a module or class."""
    names = getattr(owner, "__all__", None) or [n for n in dir(owner) if not n.startswith("_")]
    return {name: getattr(owner, name) for name in sorted(names)}


def _owned(module: Any) -> dict[str, Any]:
    """Return the public functions that a module defines."""
    return {
        name: x
        for name, x in sorted(vars(module).items())
        if inspect.isfunction(x) and not name.startswith("_") and x.__module__ == module.__name__
    }


def _listed(owner: Any) -> Callable[[Any], Any]:
    return lambda xp: ", ".join(_public(owner))


def calls() -> Iterator[Call]:
    """Yield one call for each list of names, and one for each function."""
    for name, owner in (("fa_cupy", fa_cupy), ("layouts", layouts), ("BitMask", BitMask)):
        yield Call(f"names of {name}", _listed(owner), cpu=True)
    members = {
        **_public(fa_cupy),
        **{f"BitMask.{name}": x for name, x in _public(BitMask).items()},
        **{f"layouts.{name}": x for name, x in _public(layouts).items()},
        **{f"Accumulator.{name}": x for name, x in _public(layouts.Accumulator).items()},
        **{f"reference.{name}": x for name, x in _owned(reference).items()},
    }
    for name, x in members.items():
        if inspect.isfunction(x) or inspect.ismethod(x):
            yield Call(f"parameters of {name}", lambda xp, x=x: _parameters(x), cpu=True)
