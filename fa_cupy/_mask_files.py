"""Masks in files: .npz archives of their lists."""

from __future__ import annotations

import errno
from os import PathLike
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from fa_cupy import _blocks, _options
from fa_cupy._blocks import WORDS, BlockLists, Grid

Array = npt.NDArray[Any]

_FORMAT = 1
_DTYPES = (np.int64, np.int32, np.uint32, np.int64, np.int32)  # of the fields of BlockLists


def save(
    file: str | PathLike[str] | IO[bytes], grid: Grid, lists: BlockLists, entries: Array
) -> None:
    """Write a mask; see `fa_cupy.BitMask.save`."""
    arrays: dict[str, Any] = lists._asdict()
    arrays |= {"format": _FORMAT, "lengths": np.array(grid, np.int64), "entries": entries}
    if not isinstance(file, (str, PathLike)):
        _require("BitMask.save", file, "write")
        np.savez(file, **arrays)
        return
    with open(file, "wb") as opened:  # to a name, NumPy would add an ending
        np.savez(opened, **arrays)


def load(file: str | PathLike[str] | IO[bytes]) -> tuple[Grid, BlockLists, Array]:
    """Read a mask; see `fa_cupy.BitMask.load`."""
    if isinstance(file, (str, PathLike)):
        with open(file, "rb") as opened:  # NumPy does not close what turns out to be no archive
            return _read(opened, str(file))
    _require("BitMask.load", file, "read")
    return _read(file, repr(file))


def _require(name: str, file: Any, method: str) -> None:
    if not callable(getattr(file, method, None)):
        raise TypeError(f"{name}: file is {_options.show(file)}, want a path or a binary file")


def _read(file: IO[bytes], name: str) -> tuple[Grid, BlockLists, Array]:
    try:
        with np.load(file, allow_pickle=False) as archive:
            found = {key: archive[key] for key in archive.files}
        for key in ("format", "lengths", "entries"):
            if found[key].dtype.kind not in "iu":
                raise ValueError(f"{key} has dtype {found[key].dtype}, want integers")
        if int(found["format"]) != _FORMAT:
            raise ValueError(f"format {int(found['format'])}, want {_FORMAT}")
        grid = Grid(*(int(n) for n in found["lengths"]))
        lists = BlockLists(*(found[key] for key in BlockLists._fields))
        entries = found["entries"].astype(np.int64)
        _check(grid, lists, entries)
    except MemoryError:
        raise
    except Exception as error:  # of many kinds, as a bit falls in an archive, a header or an array
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # a place before the first
            raise
        raise ValueError(f"BitMask.load: {name} holds no mask ({error})") from error
    for array in lists:
        array.flags.writeable = False
    return grid, lists, entries


def _check(grid: Grid, lists: BlockLists, entries: Array) -> None:
    """Raise a ValueError unless lists are what some mask has, for a kernel follows them."""
    for name, array, dtype in zip(BlockLists._fields, lists, _DTYPES, strict=True):
        if array.dtype != dtype:
            raise ValueError(f"{name} has dtype {array.dtype}, want {np.dtype(dtype)}")
    count = 1 + int(entries.max(initial=-1))
    fits = 0 <= min(grid) <= max(grid) < _blocks.LONGEST and entries.min(initial=0) >= 0
    fits = fits and lists.words.shape == (len(lists.partial), *WORDS)
    for begin, tiles in ((lists.partial_begin, lists.partial), (lists.full_begin, lists.full)):
        fits = fits and begin.ndim == tiles.ndim == 1
        fits = fits and len(begin) > count * grid.q_tiles and begin[0] == 0
        fits = fits and len(begin) == len(lists.full_begin)
        fits = fits and (len(begin) - 1) % max(1, grid.q_tiles) == 0
        fits = fits and begin[-1] == len(tiles) and bool((np.diff(begin) >= 0).all())
        fits = fits and tiles.min(initial=0) >= 0 and tiles.max(initial=-1) < grid.k_tiles
        if not fits:
            break
        follows = np.ones(len(tiles) + 1, np.bool_)
        follows[begin] = False  # the first of a row
        fits = bool((np.diff(tiles)[follows[1:-1]] > 0).all())
    if fits:
        partial, full = _places(grid, lists)
        fits = len(np.intersect1d(partial, full, assume_unique=True)) == 0
        own = partial % max(1, grid.q_tiles * grid.k_tiles)  # each within its matrix
        fits = fits and _blocks.are_tight(grid, own, lists.words)
    if not fits:
        raise ValueError("its lists contradict each other")


def _places(grid: Grid, lists: BlockLists) -> list[Array]:
    """Return where partial and full blocks lie among all blocks, counted row by row."""
    return [
        np.repeat(np.arange(len(begin) - 1), np.diff(begin)) * grid.k_tiles + tiles
        for begin, tiles in ((lists.partial_begin, lists.partial), (lists.full_begin, lists.full))
    ]
