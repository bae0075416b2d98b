"""The archives that masks are kept in: what they hold is known before anything is expanded.

An archive can hold a thousand times its own size, in members of any name. Sizes are therefore read
from the headers, held against each other and against what a mask needs, and only then is there
memory for them.
"""

from __future__ import annotations

import math
import re
import zipfile
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fa_cupy.masks import blocks
from fa_cupy.masks.blocks import WORDS, BlockLists, Grid

Array = npt.NDArray[Any]

FORMAT = 2
_OLD_FORMAT = 1  # without entries: all partial blocks have words
_OLD_FIELDS = BlockLists._fields[:5]
_SINGLE = ("format", "lengths", "entries")  # of integers of any kind
# Of the fields of BlockLists.
_DTYPES = (np.int64, np.int32, np.uint32, np.int64, np.int32, np.int64, np.int32)
_MAGIC = b"\x93NUMPY\x01\x00"
_HEADER = re.compile(
    rb"\{'descr': '([<>|][a-z]\d{1,3})', 'fortran_order': (True|False), "
    rb"'shape': \(((?:\d{1,18}, ?)*(?:\d{1,18})?)\), \} *\n"
)
_LONGEST_HEADER = 4096
# Limits on what an archive may expand to: so many bytes for each of its own, and so many besides.
# `BitMask.save` does not compress, so only archives that others have compressed come near them. The
# lists of a mask of a million keys, where each query sees its neighbours, have 20 MB.
_GROWTH = 64
_ALWAYS_FREE = 128 << 20  # bytes
_PIECE = 1 << 24  # bytes read at a time


class Member(NamedTuple):
    """What the header of an array says, and where its data are."""

    info: zipfile.ZipInfo
    begin: int  # of the data, in the member
    dtype: str
    fortran: bool
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def read(self, archive: zipfile.ZipFile) -> Array:
        """Return the array, which is read-only."""
        data = np.empty(self.info.file_size - self.begin, np.uint8)
        with archive.open(self.info) as file:
            file.read(self.begin)
            for i in range(0, len(data), _PIECE):
                piece = file.read(_PIECE)
                data[i : i + _PIECE] = np.frombuffer(piece, np.uint8)
            file.read(1)  # at the end the checksum is looked at
        data.flags.writeable = False
        order: Any = "F" if self.fortran else "C"
        return data.view(self.dtype).reshape(self.shape, order=order)


def read(file: IO[bytes], size: int) -> tuple[Grid, BlockLists, Array, bool]:
    """Return the parts of a mask as they stand in an archive of so many bytes.

    The last one is whether the file is of the format in which sparse blocks have words.

    Raises
    ------
    ValueError, zipfile.BadZipFile, zlib.error, EOFError, OverflowError, NotImplementedError, \
    struct.error
        For what is no archive of a mask.
    """
    with zipfile.ZipFile(file) as archive:
        members = _members(archive)
        total = sum(member.info.file_size for member in members.values())
        if total > _ALWAYS_FREE + _GROWTH * size:
            raise ValueError(
                f"{total} bytes from an archive of {size}, want at most {_ALWAYS_FREE} and "
                f"{_GROWTH} for each of the archive"
            )
        version, lengths = (members[key].read(archive) for key in ("format", "lengths"))
        fields = BlockLists._fields if "entry_keys" in members else _OLD_FIELDS
        wanted = FORMAT if fields is BlockLists._fields else _OLD_FORMAT
        if int(version) != wanted:
            raise ValueError(f"format {int(version)}, want {wanted} for these members")
        grid = Grid(*(int(n) for n in lengths))
        _check_sizes(grid, members)
        entries = members["entries"].read(archive).astype(np.int64)
        # In the order of the fields: words, the largest, after the list that says how many.
        lists = BlockLists(*(members[key].read(archive) for key in fields))
    return grid, lists, entries, wanted == _OLD_FORMAT


def _members(archive: zipfile.ZipFile) -> dict[str, Member]:
    """Return what the headers say of each array, no other than those of a mask."""
    names = [info.filename for info in archive.infolist()]
    fields = BlockLists._fields if "entry_keys.npy" in names else _OLD_FIELDS
    wanted = [f"{key}.npy" for key in (*_SINGLE, *fields)]
    if sorted(names) != sorted(wanted):
        other = sorted(set(names) ^ set(wanted)) or sorted(names)
        raise ValueError(f"its members are not those of a mask: {', '.join(other)[:200]}")
    members = {name[: -len(".npy")]: _member(archive, archive.getinfo(name)) for name in wanted}
    for key, dtype in zip(fields, _DTYPES, strict=False):
        if members[key].dtype != np.dtype(dtype).str:
            raise ValueError(f"{key} has dtype {members[key].dtype}, want {np.dtype(dtype)}")
    for key in _SINGLE:
        if not re.fullmatch(r"[<>|][iu][1248]", members[key].dtype):
            raise ValueError(f"{key} has dtype {members[key].dtype}, want integers")
    for key, shape in (("format", ()), ("lengths", (2,))):
        if members[key].shape != shape:
            raise ValueError(f"{key} has shape {members[key].shape}, want {shape}")
    return members


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Member:
    if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{info.filename} is encrypted or compressed in another way than deflate")
    with archive.open(info) as file:
        head = file.read(len(_MAGIC) + 2)
        length = int.from_bytes(head[-2:], "little")
        text = file.read(length) if length <= _LONGEST_HEADER else b""
    found = _HEADER.fullmatch(text)
    if not head.startswith(_MAGIC) or len(head) != len(_MAGIC) + 2 or found is None:
        raise ValueError(f"{info.filename} has no header of an array")
    shape = tuple(int(n) for n in found[3].split(b",") if n.strip())
    member = Member(info, len(head) + length, found[1].decode(), found[2] == b"True", shape)
    itemsize = int(member.dtype[2:])
    if info.file_size != member.begin + itemsize * member.size:
        raise ValueError(f"{info.filename} has {info.file_size} bytes, but shape {shape}")
    return member


def _check_sizes(grid: Grid, members: dict[str, Member]) -> None:
    """Raise unless the arrays are as long as those of some mask of these lengths."""
    if not 0 <= min(grid) <= max(grid) < blocks.LONGEST:
        raise ValueError(f"lengths {tuple(grid)}, want two from 0 to {blocks.LONGEST - 1}")
    partial, full = members["partial"], members["full"]
    begin = members["partial_begin"].shape
    # A matrix that no entry uses is not kept.
    rows = members["entries"].size * grid.q_tiles
    fits = len(begin) == 1 <= begin[0] <= rows + 1 and (begin[0] - 1) % max(1, grid.q_tiles) == 0
    fits = fits and members["full_begin"].shape == begin
    fits = fits and len(partial.shape) == len(full.shape) == 1
    fits = fits and partial.size + full.size <= (begin[0] - 1) * grid.k_tiles
    fits = fits and members["words"].shape == (*partial.shape, *WORDS)
    if fits and "entry_keys" in members:
        keys, first = members["entry_keys"], members["entry_begin"].shape
        matrices = (begin[0] - 1) // max(1, grid.q_tiles)
        size = matrices * grid.q_len + 1 if keys.size else 0
        fits = len(keys.shape) == 1 and first == (size,)
    if not fits:
        raise ValueError("the sizes of its lists contradict each other")
