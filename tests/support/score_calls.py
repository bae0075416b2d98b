"""Calls with a score on arrays of any namespace, which take and return arrays of NumPy."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fa_cupy import Score, attention, attention_backward
from tests.support.strategies import to_numpy


class Functions(NamedTuple):
    """Public functions."""

    attention: Callable
    attention_backward: Callable


def sent(xp, x):
    """An argument with its arrays in a namespace."""
    if isinstance(x, Score):
        arguments = {name: sent(xp, value) for name, value in x._arguments.items()}
        return Score(x.expression, **arguments)
    return xp.asarray(x) if isinstance(x, np.ndarray) else x


def functions(xp):
    """The functions on arrays of `xp`; those of NumPy are passed on as they are."""
    if xp is np:
        return Functions(attention, attention_backward)

    def on_device(function):
        def call(*args, **options):
            args = [sent(xp, x) for x in args]
            found = function(*args, **{name: sent(xp, x) for name, x in options.items()})
            if not isinstance(found, tuple):
                return to_numpy(found)
            return tuple(map(to_numpy, found))

        return call

    return Functions(on_device(attention), on_device(attention_backward))
