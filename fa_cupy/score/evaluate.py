"""Evaluation of trees on tiles of scores, or on all of them, in NumPy or CuPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from fa_cupy.score.tree import Node, Order

Array = Any

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def evaluate(
    xp: Any, order: Order, variables: Mapping[str, Any], arrays: Sequence[Any], dtype: np.dtype[Any]
) -> list[Any]:
    """Return the values of the results of `order`.

    Parameters
    ----------
    xp : module
        Namespace of the arrays.
    order : Order
        From `tree.ordered`.
    variables : mapping of str to array or int
        `s` of `dtype`; integers are of int64. They broadcast against each other.
    arrays : sequence of array or float
        The arguments, by number.
    dtype : numpy.dtype
        Of floats.

    Returns
    -------
    list of array or scalar
        Of a shape that broadcasts to that of all variables together. What does not depend on a
        variable has an axis of size 1 in its place, or none. What is made of literals and numbers
        alone is a scalar of NumPy, in CuPy too.
    """
    values: list[Any] = []
    last = [0] * len(order.steps)  # when a value is used for the last time
    for place, step in enumerate(order.steps):
        for arg in step.args:
            last[arg] = place
    for place in order.results:
        last[place] = len(order.steps)
    for place, (node, args, _) in enumerate(order.steps):
        given = [values[arg] for arg in args]
        values.append(_value(xp, node, given, variables, arrays, dtype))
        for arg in args:
            if last[arg] == place:
                values[arg] = None  # tiles of memory
    return [values[place] for place in order.results]


def _value(
    xp: Any,
    node: Node,
    args: list[Any],
    variables: Mapping[str, Any],
    arrays: Sequence[Any],
    dtype: np.dtype[Any],
) -> Any:
    if node.op == "number":
        return dtype.type(node.value) if node.kind == "float" else np.int64(int(node.value or 0))
    if node.op == "variable":
        return variables[str(node.value)]
    if node.op == "load":
        kind = dtype if node.kind == "float" else np.dtype(np.int64)
        return _element(arrays[int(node.value or 0)], args, kind)
    if node.op == "power":
        return _power(args[0], int(node.value or 0))
    if node.op == "to_long":
        return args[0]  # integers are of 64 bits here
    if node.op == "to_float":
        return args[0].astype(dtype)
    if all(isinstance(x, np.generic) for x in args):
        xp = np  # CuPy would make arrays of them
    operation = _OPERATIONS.get(node.op)
    if operation is not None:
        return operation(xp, *args)
    return getattr(xp, node.op)(*args)


def _element(of: Any, indices: list[Any], dtype: np.dtype[Any]) -> Any:
    """Return elements of an array, or a number, in `dtype`."""
    if isinstance(of, float):
        return dtype.type(of)
    if of.dtype != _BFLOAT16:
        return of[tuple(indices)].astype(dtype)
    # CuPy does not convert bfloat16, which is the upper half of a float32.
    bits = of.view(np.uint16)[tuple(indices)].astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32).astype(dtype)


def _power(x: Any, exponent: int) -> Any:
    """Return a power by products: NumPy's takes ten times as long."""
    if exponent < 0:
        return x.dtype.type(1) / _power(x, -exponent)
    found, square = None, x
    while exponent:
        if exponent & 1:
            found = square if found is None else found * square
        exponent >>= 1
        if exponent:
            square = square * square
    return x.dtype.type(1) if found is None else found


def _sigmoid(xp: Any, x: Any) -> Any:
    one = x.dtype.type(1)
    return one / (one + xp.exp(-x))


def _where(xp: Any, condition: Any, x: Any, y: Any) -> Any:
    if isinstance(condition, np.generic):
        return x if condition else y
    return xp.where(condition, x, y)


# The others have NumPy's names.
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "float_power": lambda xp, x, y: xp.power(x, y),
    "min": lambda xp, x, y: xp.minimum(x, y),
    "max": lambda xp, x, y: xp.maximum(x, y),
    "and": lambda xp, x, y: xp.logical_and(x, y),
    "or": lambda xp, x, y: xp.logical_or(x, y),
    "not": lambda xp, x: xp.logical_not(x),
    "sigmoid": _sigmoid,
    "where": _where,
}
