"""Masks in files: .npz archives of their lists."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from os import PathLike
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from fa_cupy.core import checks
from fa_cupy.masks import archive, blocks
from fa_cupy.masks.blocks import BlockLists, Grid

Array = npt.NDArray[Any]

_BEGIN = b"PK\x03\x04"  # of an archive
# What reading a damaged archive may raise: a single flipped bit can lead to any of these.
_FAULTS = (
    ValueError, zipfile.BadZipFile, zlib.error, EOFError, OverflowError, NotImplementedError,
    struct.error,
)  # fmt: skip
_MOST_LINKS = 40  # that Linux follows


def save(
    file: str | PathLike[str] | IO[bytes], grid: Grid, lists: BlockLists, entries: Array
) -> None:
    """Write a mask; see `fa_cupy.BitMask.save`."""
    arrays: dict[str, Any] = lists._asdict()
    arrays |= {
        "format": archive.FORMAT,
        "lengths": np.array(grid, np.int64),
        "entries": entries,
    }
    if not isinstance(file, (str, PathLike)):
        _require("BitMask.save", file, "write", "read")  # NumPy takes what has no `read` for a path
        np.savez(file, **arrays)
        return
    name = os.fsdecode(file)
    if not os.path.basename(name):  # a folder, or nothing: Python has an error for each
        with open(name, "wb"):
            pass
    with _opened(name) as opened:  # to a name, NumPy would add an ending
        np.savez(opened, **arrays)


def load(file: str | PathLike[str] | IO[bytes]) -> tuple[Grid, BlockLists, Array]:
    """Read a mask; see `fa_cupy.BitMask.load`."""
    if isinstance(file, (str, PathLike)):
        with open(file, "rb") as opened:
            return _read(opened, str(file))
    _require("BitMask.load", file, "read", "seek", "tell")
    return _read(file, repr(file))


def _require(name: str, file: Any, *methods: str) -> None:
    if not all(callable(getattr(file, method, None)) for method in methods):
        raise TypeError(f"{name}: file is {checks.show(file)}, want a path or a binary file")


@contextlib.contextmanager
def _opened(path: str) -> Iterator[IO[bytes]]:
    """Open a file for writing, to take the place of what stands there once all is written.

    Pipes and devices are written to as they are, and so are files that are open under a name such
    as /dev/stdout.
    """
    target = _replaceable(path)
    if target is None:
        with open(path, "wb") as file:
            yield file
        return
    # Hidden, and of a length that any file system takes.
    folder = os.path.dirname(target)
    temporary = os.path.join(folder, f".{os.urandom(8).hex()}.part")
    try:
        with _new(temporary, folder) as file:
            _take_over_mode(target, file)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _new(path: str, folder: str) -> IO[bytes]:
    """Create a file, with the permissions of any new file; errors name the folder."""
    try:
        return open(path, "xb")
    except OSError as error:
        raise OSError(error.errno, error.strerror, folder) from None


def _replaceable(path: str) -> str | None:
    """Return the name of the file at the end of all links, None where it is to be written as it is.

    Raises
    ------
    OSError
        As `open` would, for what cannot be written.
    """
    target = path
    for _ in range(_MOST_LINKS):
        folder, name = os.path.split(target)
        target = os.path.join(os.path.realpath(folder), name)
        if target.startswith("/proc/"):  # an open file, which need not lie where it says
            return None
        if not os.path.islink(target):
            break
        target = os.path.join(os.path.dirname(target), os.readlink(target))
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.stat(path).st_mode):
            return None
        os.close(os.open(path, os.O_WRONLY))
    return os.path.realpath(path)


def _take_over_mode(target: str, file: IO[bytes]) -> None:
    """Give a file the permissions of the one that it replaces, and as far as may be its owner."""
    if not hasattr(os, "fchmod"):  # Windows: a file has the permissions of its folder
        return
    with contextlib.suppress(FileNotFoundError):
        before, now = os.stat(target), os.fstat(file.fileno())
        if (before.st_uid, before.st_gid) != (now.st_uid, now.st_gid):
            with contextlib.suppress(PermissionError):
                os.fchown(file.fileno(), before.st_uid, before.st_gid)
        if before.st_mode != now.st_mode:
            os.fchmod(file.fileno(), stat.S_IMODE(before.st_mode))


def _read(file: IO[bytes], name: str) -> tuple[Grid, BlockLists, Array]:
    try:
        begin = file.tell()
        if file.read(len(_BEGIN)) != _BEGIN:
            raise ValueError("it is not an .npz archive")
        size = file.seek(0, os.SEEK_END) - begin
        grid, lists, entries, old = archive.read(file, size)
        _check(grid, lists, entries, old)
        lists = blocks.canonical(grid, lists) if old else lists
    except (*_FAULTS, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # a place before the first
            raise
        raise ValueError(f"BitMask.load: {name} is not the file of a mask ({error})") from error
    return grid, lists, entries


def _check(grid: Grid, lists: BlockLists, entries: Array, old: bool) -> None:
    """Raise a ValueError unless lists are what some mask has, for a kernel follows them."""
    count = 1 + int(entries.max(initial=-1))
    fits = entries.min(initial=0) >= 0 and len(lists.partial_begin) > count * grid.q_tiles
    fits = fits and _ascend(lists.partial_begin, lists.partial, grid.k_tiles)
    fits = fits and _ascend(lists.full_begin, lists.full, grid.k_tiles)
    if len(lists.entry_keys):
        fits = fits and _ascend(lists.entry_begin, lists.entry_keys, grid.k_len)
    matrices = (len(lists.full_begin) - 1) // max(1, grid.q_tiles)
    fits = fits and all(
        blocks.are_tight(grid, lists.blocks(grid, i), not old) for i in range(matrices)
    )
    if not fits:
        raise ValueError("its lists contradict each other")


def _ascend(begin: Array, numbers: Array, end: int) -> bool:
    """Return whether rows of numbers, none of them `end` or more, ascend."""
    fits = begin[0] == 0 and begin[-1] == len(numbers)
    fits = fits and 0 <= begin.min() <= begin.max() <= len(numbers)  # so that no step wraps
    fits = fits and bool((np.diff(begin) >= 0).all())
    if not (fits and numbers.min(initial=0) >= 0 and numbers.max(initial=-1) < end):
        return False
    follows = np.ones(len(numbers) + 1, np.bool_)
    follows[begin] = False  # the first of a row
    return bool((np.diff(numbers)[follows[1:-1]] > 0).all())
