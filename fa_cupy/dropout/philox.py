"""Philox-4x32-10 [1]_: random numbers as a function of a counter and a key, without a state.

.. [1] J. K. Salmon, M. A. Moraes, R. O. Dror and D. E. Shaw, "Parallel random numbers: as easy as
   1, 2, 3", SC, 2011: section 3.3 and table 2 have the round and its constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = Any

_ROUNDS = 10
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox4x32(counter: Sequence[Array], seed: int) -> tuple[Array, Array, Array, Array]:
    """Return the four words of 32 bits of each counter.

    Parameters
    ----------
    counter : sequence of four arrays of uint64
        Numbers below 2**32, of shapes that broadcast. What depends on some axes alone is computed
        for these, so that axes of size 1 save work in the first rounds.
    seed : int
        The key: its low and its high 32 bits.

    Returns
    -------
    tuple of four arrays of uint64
        Numbers below 2**32.
    """
    a, b, c, d = counter
    keys = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(_ROUNDS):
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, c = (
            (product >> _HALF) ^ (word ^ np.uint64(key))
            for product, word, key in ((second, b, keys[0]), (first, d, keys[1]))
        )
        b, d = second & _LOW, first & _LOW
        keys = [(key + step) & 0xFFFFFFFF for key, step in zip(keys, _KEY_STEPS, strict=True)]
    return a, b, c, d
