"""A score on tiles: the part of the tiled algorithms that is not attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fa_cupy.score.evaluate import evaluate
from fa_cupy.score.program import Operands

Array = Any


class TileScore:
    """The score of one stack of batch entries.

    Parameters
    ----------
    xp : module
        Namespace of the arrays.
    operands : Operands
    b, h : array of int64, shape (n, 1, 1)
        Of the stacked entries.
    dtype : numpy.dtype
        Of scores.
    """

    def __init__(self, xp: Any, operands: Operands, b: Array, h: Array, dtype: Any) -> None:
        self._xp = xp
        self._operands = operands
        self._entries = {"b": b, "h": h}
        self._dtype = np.dtype(dtype)

    @property
    def adds(self) -> bool:
        """Whether scores change as s does: their derivative by s is 1."""
        return self._operands.program.adds

    def apply(
        self, scores: Array, i: Array, j: Array, slopes: Sequence[str] = ()
    ) -> dict[str, Array]:
        """Replace s by scores, in place.

        Parameters
        ----------
        scores : array, shape (n, rows, keys)
        i, j : array of int64
            Queries and keys, which broadcast to (rows, keys).
        slopes : sequence of str
            What derivatives of scores are wanted by: "s", and elements as `element_names` has them.

        Returns
        -------
        dict of str to array
            The derivatives, of shapes that broadcast to that of the scores.
        """
        variables = self._entries | {"s": scores, "i": i, "j": j}
        order = self._operands.program.steps(tuple(slopes))
        values = self._operands.values
        with np.errstate(all="ignore"):  # of scalars, which are NumPy's for CuPy too
            value, *found = evaluate(self._xp, order, variables, values, self._dtype)
        found = [x.copy() if x is scores else x for x in found]
        scores[...] = value
        return dict(zip(slopes, found, strict=True))


def element_names(operands: Operands, array: str) -> list[str]:
    """Return the names of the different elements of an array, given as "score.x", in a score."""
    number = operands.names.index(array.removeprefix("score."))
    elements = enumerate(operands.program.elements)
    return [f"element {place}" for place, element in elements if element.array == number]
