"""Arrays as tensor maps see them, for the parameter structs of the kernels for SM90.

A tensor map walks an array without the help of a kernel, so that these kernels take fewer layouts
than those for SM80.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np

from fa_cupy.core.broadcasting import View

MAP_BYTES = 128  # CUDA Driver API, CUtensorMap
#: Batch axes of a tensor map: of its five, two are rows and columns.
MAP_AXES = 3
#: Dims are multiples of it. Boxes are clipped in steps of 16 bytes: a store of 33 columns writes 40
#: (seen on an H200).
DIM_STEP = 8
#: Bytes from an entry of an axis to the next:
MAX_STEP = 2**40  # CUDA Driver API, cuTensorMapEncodeTiled


def padded(fields: list[Any], alignment: int) -> np.dtype[Any]:
    """Return a struct whose size is a multiple of `alignment`, as that of an ``alignas`` one."""
    plain = np.dtype(fields, align=True)
    names = plain.names or ()
    return np.dtype(
        {
            "names": names,
            "formats": [plain[name] for name in names],
            "offsets": [plain.fields[name][1] for name in names] if plain.fields else [],
            "itemsize": -(-plain.itemsize // alignment) * alignment,
        },
        align=True,
    )


class Geometry(NamedTuple):
    """What `fa_cupy.gpu.driver.tensor_map.encode_tiled` wants to know besides pointer and dtype."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


def maps_walk(
    views: dict[str, View],
    steps: dict[str, list[int]],
    item: int,
    outputs: Collection[str] = ("out",),
) -> bool:
    """Whether tensor maps can walk arrays whose pointers are multiples of 16.

    Parameters
    ----------
    views : dict of View
        Of the arrays, by name.
    steps : dict of list of int
        Bytes along their batch axes, 0 where an array broadcasts.
    item : int
        Bytes of an element.
    outputs : collection of str
        Those that may not broadcast.
    """
    for name in views:
        (rows, cols), (row, col) = views[name].shape[-2:], views[name].strides[-2:]
        if (rows > 1 and not _walks(row)) or (cols > 1 and col != item):
            return False
        if not all(_walks(step) or (step == 0 and name not in outputs) for step in steps[name]):
            return False
    return True


def _walks(step: int) -> bool:
    return 0 < step < MAX_STEP and step % 16 == 0
