"""Which rows of a sequence each rank has."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fa_cupy.core import attention_problem, checks
from fa_cupy.core.arrays import word_of
from fa_cupy.distributed.communicator import Communicator, require

ORDERS = ("contiguous", "zigzag")


class Segment(NamedTuple):
    """Rows of a sequence that follow each other.

    Attributes
    ----------
    start : int
        The position of the first one.
    rows : int
    """

    start: int
    rows: int


def checked_order(name: str, order: Any) -> str:
    """Return `order`, the name of one."""
    if not isinstance(order, str) or order not in ORDERS:
        raise ValueError(f"{name}: order is {checks.show(order)}, want 'contiguous' or 'zigzag'")
    return order


def segments(length: int, size: int, order: str) -> list[tuple[Segment, ...]]:
    """Return the segments of each rank for a sequence that is split evenly.

    Chunks differ by one row at most, the first ones are the longer ones, as those of
    `numpy.array_split`. In zigzag order rank r has the chunks r and ``2 * size - 1 - r`` of
    ``2 * size``.
    """
    count = 2 * size if order == "zigzag" else size
    small, more = divmod(length, count)
    chunks = [Segment(i * small + min(i, more), small + (i < more)) for i in range(count)]
    if order == "zigzag":
        return [(chunks[r], chunks[-1 - r]) for r in range(size)]
    return [(chunk,) for chunk in chunks]


def segments_of(
    name: str, arg: str, lengths: Sequence[int], order: str
) -> list[tuple[Segment, ...]]:
    """Return the segments of each rank, whose parts have these lengths.

    In contiguous order a part may have any length. In zigzag order the lengths have to be those of
    `split`.
    """
    if order == "contiguous":
        starts = np.cumsum([0, *lengths]).tolist()
        return [(Segment(s, n),) for s, n in zip(starts, lengths, strict=False)]
    found = segments(sum(lengths), len(lengths), order)
    wanted = [sum(part.rows for part in parts) for parts in found]
    if list(lengths) != wanted:
        raise ValueError(
            f"{name}: {arg} has the lengths {[*lengths]} on the ranks, want {wanted} in zigzag "
            "order (those of fa_cupy.distributed.split)"
        )
    return found


def positions(length: int, comm: Communicator, *, order: str = "contiguous") -> Any:
    """Return the positions of a rank's rows in the whole sequence.

    Parameters
    ----------
    length : int
        Of the whole sequence.
    comm : Communicator
        Its `rank` and `size` say which part.
    order : {"contiguous", "zigzag"}
        See `split`.

    Returns
    -------
    numpy.ndarray of int64, shape (rows,)
        In ascending order, from 0 on.

    Raises
    ------
    TypeError, ValueError
        For other arguments, with a message that names them.

    See Also
    --------
    split : the rows at these positions.

    Examples
    --------
    >>> from fa_cupy import distributed
    >>> with distributed.local(2) as ranks:
    ...     ranks(lambda comm: distributed.positions(8, comm, order="zigzag").tolist())
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    name = "positions"
    comm = require(name, comm)
    length = checks.whole(name, "length", length, "an int >= 0 and below 2**60", range(2**60))
    parts = segments(length, comm.size, checked_order(name, order))[comm.rank]
    return np.concatenate([np.arange(part.start, part.start + part.rows) for part in parts])


def split(x: Any, comm: Communicator, *, order: str = "contiguous", axis: int = -2) -> Any:
    """Return the part of a whole array that belongs to a rank.

    Parameters
    ----------
    x : array
        Of NumPy or CuPy, with the whole sequence.
    comm : Communicator
        Its `rank` and `size` say which part.
    order : {"contiguous", "zigzag"}
        "contiguous": rank r has the rows after those of rank ``r - 1``. "zigzag": the sequence is
        cut into ``2 * size`` chunks, and rank r has chunk r and chunk ``2 * size - 1 - r``, so that
        all ranks have the same work where attention is causal. Chunks differ by one row at most,
        the first ones are the longer ones.
    axis : int
        That of the sequence. An array with one axis needs ``axis=0``.

    Returns
    -------
    array
        A view where the rows follow each other, otherwise a copy.

    Raises
    ------
    TypeError, ValueError
        For other arguments, such as an `axis` that `x` does not have.

    See Also
    --------
    join : the inverse.
    positions : where the rows stand.

    Examples
    --------
    >>> import numpy as np
    >>> from fa_cupy import distributed
    >>> x = np.arange(10)
    >>> with distributed.local(2) as ranks:
    ...     ranks(lambda comm: distributed.split(x, comm, axis=0))
    [array([0, 1, 2, 3, 4]), array([5, 6, 7, 8, 9])]
    """
    name = "split"
    comm = require(name, comm)
    axis = _axis(name, "x", x, axis)
    parts = segments(x.shape[axis], comm.size, checked_order(name, order))[comm.rank]
    first = [x[_along(x, axis, part.start, part.start + part.rows)] for part in parts]
    adjacent = all(a.start + a.rows == b.start for a, b in itertools.pairwise(parts))
    if adjacent:
        end = parts[-1].start + parts[-1].rows
        return x[_along(x, axis, parts[0].start, end)]
    return _concatenated(first, axis)


def join(parts: Sequence[Any], *, order: str = "contiguous", axis: int = -2) -> Any:
    """Return the whole array, from the parts of all ranks.

    Parameters
    ----------
    parts : sequence of arrays
        By rank, of NumPy or all on one device, and of one dtype. Their shapes may differ along
        `axis` only.
    order : {"contiguous", "zigzag"}
        That of `split`.
    axis : int
        The axis of the sequence.

    Returns
    -------
    array
        A new array, with the rows in the order of their positions.

    Raises
    ------
    TypeError, ValueError
        For other arguments, and if there are no parts. In zigzag order also if the parts do not
        have the lengths that `split` gives them; in contiguous order they may have any lengths.

    See Also
    --------
    split : the part of a rank.

    Examples
    --------
    >>> import numpy as np
    >>> from fa_cupy import distributed
    >>> x = np.arange(10.0).reshape(5, 2)
    >>> with distributed.local(3) as ranks:
    ...     parts = ranks(lambda comm: distributed.split(x, comm, order="zigzag"))
    >>> bool((distributed.join(parts, order="zigzag") == x).all())
    True
    """
    name = "join"
    order = checked_order(name, order)
    parts = list(checks.sequence(name, "parts", parts, "a sequence of arrays"))
    if not parts:
        raise ValueError(f"{name}: parts has no arrays, want one of each rank")
    axis = _axis(name, "parts[0]", parts[0], axis)
    for i, part in enumerate(parts[1:], 1):
        _check_part(name, f"parts[{i}]", part, parts[0], axis)
    own = segments_of(name, "parts", [part.shape[axis] for part in parts], order)
    chunks = []
    for part, rows in zip(parts, own, strict=True):
        begin = 0
        for segment in rows:
            chunk = part[_along(part, axis, begin, begin + segment.rows)]
            chunks.append((segment.start, chunk))
            begin += segment.rows
    return _concatenated([chunk for _, chunk in sorted(chunks, key=lambda x: x[0])], axis)


def library(x: Any) -> str:
    """Return the name of the library of an array."""
    return "numpy" if isinstance(x, np.ndarray) else type(x).__module__.partition(".")[0]


def dense(x: Any) -> Any:
    """Return `x` in C order without gaps: itself, or a copy."""
    if x.flags.c_contiguous:
        return x
    if library(x) == "numpy":
        return np.ascontiguousarray(x)
    out = sys.modules[library(x)].empty(x.shape, x.dtype)
    copy_bits(out, x)
    return out


def copy_bits(out: Any, x: Any) -> None:
    """Copy the bits of `x` to `out`, which has its shape and dtype.

    CuPy does not copy bfloat16 everywhere, and words of 8 bytes 2.6 times as fast as those of 2.
    """
    size = x.itemsize if library(x) == "numpy" else min(word_of(y, 8) for y in (out, x))
    out.view(f"u{size}")[...] = x.view(f"u{size}")


def rows_of(x: Any, begin: int, end: int) -> Any:
    """Return the view of some rows."""
    return x if begin == 0 and end == x.shape[-2] else x[..., begin:end, :]


def _check_array(name: str, arg: str, x: Any) -> None:
    known = library(x) in ("numpy", "cupy") and hasattr(x, "strides")
    if not known or isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name}: {arg} is {checks.show(x)}, want an array of NumPy or CuPy")


def _axis(name: str, arg: str, x: Any, axis: Any) -> int:
    """Return the axis of the sequence of an array, counted from the first one."""
    _check_array(name, arg, x)
    if not x.ndim:
        raise ValueError(f"{name}: {arg} has no axes, want an array with an axis to split")
    text = f"{name}: axis is {checks.show(axis)}, want one of {x.ndim} axes"
    if not checks.is_int(axis) or isinstance(axis, bool):
        raise TypeError(text)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(text)
    return int(axis) % int(x.ndim)


def _check_part(name: str, arg: str, part: Any, first: Any, axis: int) -> None:
    """Raise unless one of the arrays to join fits the first one, whatever its length is."""
    _check_array(name, arg, part)
    if library(part) != library(first):
        raise TypeError(
            f"{name}: {arg} is an array of {library(part)}, parts[0] is one of {library(first)}"
        )
    length = part.shape[axis : axis + 1]
    if part.shape != (*first.shape[:axis], *length, *first.shape[axis + 1 :]):
        raise ValueError(
            f"{name}: {arg} has shape {part.shape}, parts[0] has {first.shape}, "
            f"want them to differ in axis {axis} only"
        )
    if part.dtype != first.dtype:
        raise TypeError(f"{name}: {arg} has dtype {part.dtype}, parts[0] has {first.dtype}")


def _along(x: Any, axis: int, begin: int, end: int) -> tuple[slice, ...]:
    return (slice(None),) * axis + (slice(begin, end),)


def _concatenated(parts: list[Any], axis: int) -> Any:
    """Join arrays along an axis; those of bfloat16 as bits, which CuPy can copy everywhere."""
    xp = sys.modules[library(parts[0])]
    dtype = parts[0].dtype
    if dtype == attention_problem.BFLOAT16:
        return xp.concatenate([part.view(np.uint16) for part in parts], axis).view(dtype)
    return xp.concatenate(parts, axis)
