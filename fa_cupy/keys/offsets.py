"""The arguments `q_offsets` and `k_offsets`: where packed sequences begin.

Sequences lie end to end along the length axis: sequence s has the rows ``offsets[s]`` to
``offsets[s + 1] - 1``. An array on a device is never read back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fa_cupy._bitmask import BitMask, bits_of_sparse
from fa_cupy.core import checks
from fa_cupy.keys.layout import DTYPES, WANTED, KeyArrays

_FIRST = {"q_offsets": "queries", "k_offsets": "keys"}


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


def refuse(name: str, given: Sequence[str]) -> None:
    """Raise for arguments, by name, that are not given together."""
    if "k_offsets" in given and "q_offsets" not in given:
        raise ValueError(f"{name}: k_offsets is given and q_offsets is None, want both")
    for other in ("k_lengths", "page_table"):
        if "q_offsets" in given and other in given:
            raise ValueError(f"{name}: q_offsets and {other} are given, want one of them")


def checked(
    name: str, args: Sequence[str], lengths: tuple[int, int], q_offsets: Any, k_offsets: Any
) -> Offsets:
    """Return what a problem holds of offsets, whose numbers are not read.

    Parameters
    ----------
    name : str
        The public function that errors speak of.
    args : sequence of str
        Its names for q and k.
    lengths : tuple of int
        Of q and k.
    q_offsets : array
    k_offsets : array or None
    """
    found = [q_offsets, q_offsets if k_offsets is None else k_offsets]
    for arg, x in zip(_FIRST, found, strict=True):
        if x.dtype not in DTYPES:
            raise TypeError(f"{name}: {arg} has dtype {x.dtype}, want {WANTED}")
        if x.ndim != 1 or not x.size:
            raise ValueError(f"{name}: {arg} has shape {x.shape}, want (sequences + 1,)")
    if k_offsets is None and lengths[0] != lengths[1]:
        raise ValueError(
            f"{name}: {args[1]} has length {lengths[1]}, {args[0]} has {lengths[0]}, want k_offsets"
            " with q_offsets, or equal lengths"
        )
    if found[0].size != found[1].size:
        raise ValueError(
            f"{name}: k_offsets has {found[1].size} numbers, q_offsets has {found[0].size}, want "
            "one more than sequences in both"
        )
    return Offsets(found[0].size - 1, *(x.dtype for x in found))


def key_arrays(q_offsets: Any, k_offsets: Any) -> KeyArrays:
    """Return native arrays as backends take them: both, in C order."""
    q, k = (x if x is None or x.flags.c_contiguous else x.copy() for x in (q_offsets, k_offsets))
    return KeyArrays(q_offsets=q, k_offsets=q if k is None else k)


def check_numbers(name: str, lengths: tuple[int, int], keys: KeyArrays) -> None:
    """Raise a ValueError for offsets on the host that descend or are out of range.

    Parameters
    ----------
    name : str
    lengths : tuple of int
        Of q and k.
    keys : KeyArrays
    """
    given = (keys.q_offsets, keys.k_offsets)
    for (arg, what), x, length in zip(_FIRST.items(), given, lengths, strict=True):
        if not isinstance(x, np.ndarray) or (arg == "k_offsets" and x is given[0]):
            continue
        if x[0] >= 0 and x[-1] <= length and (x[1:] >= x[:-1]).all():
            continue
        outside = (x < 0) | (x > length)
        if outside.any():
            at = int(outside.argmax())
            wanted = f"0 to {length}, the number of {what}"
        else:
            at = int((x[1:] < x[:-1]).argmax()) + 1
            wanted = f"{x[at - 1]} or more, as {arg} ascend"
        raise ValueError(f"{name}: {arg}[{at}] is {x[at]}, want {wanted}")


def longest(lengths: tuple[int, int], q_offsets: Any, k_offsets: Any) -> tuple[int, int]:
    """Return how many queries and keys a sequence has at most, as far as the host knows.

    Numbers may be out of range.
    """
    found = []
    given = (q_offsets, q_offsets if k_offsets is None else k_offsets)
    for x, length in zip(given, lengths, strict=True):
        if isinstance(x, np.ndarray):
            inside = np.clip(x, 0, length)
            length = int((inside[1:] - inside[:-1]).max(initial=0))
        found.append(length)
    return found[0], found[1]


def masks_of(name: str, arg: str, masks: Any) -> tuple[BitMask, ...] | None:
    """Return a list of masks, one for each sequence, as masks of bits; None for anything else."""
    if not isinstance(masks, (list, tuple)):
        return None
    found = [bits_of_sparse(name, f"{arg}[{i}]", x) for i, x in enumerate(masks)]
    for i, x in enumerate(found):
        if not isinstance(x, BitMask):
            raise TypeError(f"{name}: {arg}[{i}] is {checks.show(x)}, want a BitMask")
    return tuple(found)


def check_masks(
    name: str, arg: str, problem: Any, keys: KeyArrays, masks: Sequence[BitMask]
) -> None:
    """Raise unless there is a mask for each sequence, of its lengths."""
    if not (isinstance(keys.q_offsets, np.ndarray) and isinstance(keys.k_offsets, np.ndarray)):
        raise ValueError(
            f"{name}: {arg} is a list and offsets are on a device, want offsets in NumPy arrays"
        )
    count = problem.offsets.sequences
    if len(masks) != count:
        raise ValueError(f"{name}: {arg} has {len(masks)} masks, want {count}, one a sequence")
    lengths = zip(np.diff(keys.q_offsets).tolist(), np.diff(keys.k_offsets).tolist(), strict=True)
    batch = problem.out_shape[:-2]
    for i, (mask, of_sequence) in enumerate(zip(masks, lengths, strict=True)):
        if mask.shape[-2:] != of_sequence:
            raise ValueError(
                f"{name}: {arg}[{i}] has lengths {mask.shape[-2:]}, want {of_sequence}, those of "
                "its sequence"
            )
        own = mask.shape[:-2]
        both = zip(own[::-1], batch[::-1], strict=False)
        if len(own) > len(batch) or any(a not in (1, b) for a, b in both):
            raise ValueError(
                f"{name}: {arg}[{i}] has batch shape {own}, want one that broadcasts to {batch}"
            )


class Intervals(NamedTuple):
    """Which keys each query sees, and which queries belong to sequences that are not valid.

    Attributes
    ----------
    first, last : array of int64, shape (q_len,)
        Of the keys; `last` is less than `first` for a row that sees no key.
    bad : array of bool, shape (q_len,)
        Whether the query's sequence has an offset that descends or is out of range.
    """

    first: Any
    last: Any
    bad: Any


def intervals(xp: Any, problem: Any, keys: KeyArrays) -> Intervals:
    """Return the keys of each query, by causality and window too; nothing is read back.

    Parameters
    ----------
    xp : module
        `numpy` or `cupy`, of the offsets.
    problem : Problem
    keys : KeyArrays
    """
    (q, q_wrong), (k, k_wrong) = (
        _normalised(xp, x, length)
        for x, length in ((keys.q_offsets, problem.q_len), (keys.k_offsets, problem.k_len))
    )
    rows = xp.arange(problem.q_len)
    count = problem.offsets.sequences
    if not count:
        zeros = xp.zeros(problem.q_len, np.int64)
        return Intervals(zeros, zeros - 1, zeros < 0)
    s = xp.searchsorted(q[1:], rows, side="right")
    inside = (rows >= q[0]) & (s < count)
    s = xp.minimum(s, count - 1)
    wrong = q_wrong | k_wrong
    wrong = inside & (wrong[1:] | wrong[:-1])[s]
    begin, end = k[s], k[s + 1]
    first, last = begin, end - 1
    here = rows - q[s] + begin  # where a query stands if both begin together
    if problem.band_from_end:
        here = here + (end - begin) - (q[s + 1] - q[s]) - (problem.k_len - problem.q_len)
    if problem.lower is not None:
        first = xp.maximum(first, here + problem.lower)
    if problem.upper is not None:
        last = xp.minimum(last, here + problem.upper)
    hidden = wrong | (inside == 0) | (first > last)
    return Intervals(xp.where(hidden, 0, first), xp.where(hidden, -1, last), wrong)


def places(xp: Any, problem: Any, keys: KeyArrays) -> Any:
    """Return the sequence of each query, its first query and key, and 0; nothing is read back.

    Parameters
    ----------
    xp : module
        `numpy` or `cupy`, of the offsets.
    problem : Problem
    keys : KeyArrays

    Returns
    -------
    array of int32, shape (q_len, 4)
        Of queries of no sequence any numbers.
    """
    found = xp.zeros((problem.q_len, 4), np.int32)
    count = problem.offsets.sequences
    if count:
        q, _ = _normalised(xp, keys.q_offsets, problem.q_len)
        k, _ = _normalised(xp, keys.k_offsets, problem.k_len)
        s = xp.searchsorted(q[1:], xp.arange(problem.q_len), side="right")
        s = xp.minimum(s, count - 1)
        for column, x in enumerate((s, q[s], k[s])):
            found[:, column] = x
    return found


def _normalised(xp: Any, offsets: Any, length: int) -> tuple[Any, Any]:
    """Return offsets that ascend and are in range, and which of them were given otherwise."""
    given = offsets.astype(np.int64)
    inside = xp.clip(given, 0, length)
    # A running maximum by doubling steps: CuPy has no `maximum.accumulate`.
    found, step = inside, 1
    while step < found.size:
        found = xp.concatenate([found[:step], xp.maximum(found[step:], found[:-step])])
        step *= 2
    return found, found != given
