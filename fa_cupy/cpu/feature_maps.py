"""Feature maps, applied in place to rows of float32 or float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def _elu1(x: Array) -> None:
    below = np.minimum(x, 0)
    np.exp(below, out=below)
    np.maximum(x, 0, out=x)
    np.add(x, below, out=x)


def _relu(x: Array) -> None:
    np.maximum(x, 0, out=x)


def _exp(x: Array) -> None:
    np.exp(x, out=x)


IN_PLACE: dict[str, Callable[[Array], None]] = {"elu1": _elu1, "relu": _relu, "exp": _exp}
