"""The arguments `q_offsets` and `k_offsets`: where packed sequences begin.

Sequences lie end to end along the length axis: sequence s has the rows ``offsets[s]`` to
``offsets[s + 1] - 1``. An array on a device is never read back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Offsets(NamedTuple):
    """What a problem holds of packed sequences.

    Attributes
    ----------
    sequences : int
        How many there are. Both arrays have one number more, in C order.
    q_dtype, k_dtype : numpy.dtype
        Of the arrays of offsets of the queries and of the keys: int32 or int64.
    """

    sequences: int
    q_dtype: np.dtype[Any]
    k_dtype: np.dtype[Any]
