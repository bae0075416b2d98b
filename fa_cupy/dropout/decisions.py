"""Which pairs of a query and a key are kept.

A counter of `fa_cupy.dropout.philox` decides on 16 pairs: those of one query with the keys of a
group of 64 that one lane of a warp holds, as the words of a mask in fragment order have them
(`fa_cupy.layouts`). Query i, key j, head h and batch entry b are in counter ::

    4 * (j // 64) + j % 8 // 2,  i,  h,  b

at position ``n = 2 * (j % 64 // 8) + j % 2``, and 16 positions are half a word of a mask: low
halves have the first 64 keys of a block, high ones the others.

Of the four words of a counter, bit ``16 * (m % 2) + n`` of word ``m // 2`` is bit m of an integer
of 8 bits for each position. The exclusive or of the first three words, the second one rotated left
by 4 bits and the third one by 8, is one more integer, of 32 bits, for all 16: whatever two of them
are, it is uniform, as each of its bits is one of three positions. A pair is kept where ``of_8 *
2**32 + of_32`` is below ``(1 - p) * 2**40``. So a kernel compares 32 pairs in eight steps, bit by
bit from the lowest one up, and begins with what the integer of 32 bits says, which matters where
the other one is equal to its part of the threshold: the probability is exact to 2**-41, for little
more than what 8 bits cost. It correlates the 16 decisions of a counter, by ``f * (1 - f) / (p * (1
- p)) / 2**16`` where f is the fraction of ``(1 - p) * 2**8``: 4e-5 for a p of 0.1, and never more
than 2**-8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fa_cupy.dropout.arguments import Dropout
from fa_cupy.dropout.philox import philox4x32

Array = npt.NDArray[Any]

GROUP = 64  # keys of which a counter has a fourth
_LANES = 4
_PLANES = 8  # bits that each pair has for itself
# Counters that are computed together: so many numbers fit the cache.
_TOGETHER = 1 << 13


def words(
    dropout: Dropout, b: Array, h: Array, rows: tuple[int, int], groups: tuple[int, int]
) -> Array:
    """Return 16 decisions of each counter, as bits that are 1 where pairs are kept.

    Parameters
    ----------
    dropout : Dropout
    b, h : ndarray of int64, shape (n, 1, 1)
        Batch entries and heads.
    rows, groups : tuple of int
        First and last + 1 of the queries, and of the groups of 64 keys.

    Returns
    -------
    ndarray of uint16, shape (n, rows, groups, 4)
    """
    shape = (len(b), rows[1] - rows[0], groups[1] - groups[0], _LANES)
    if dropout.p == 1.0:
        return np.zeros(shape, np.uint16)
    entry = b * dropout.sequences + dropout.sequence
    of_keys = _LANES * np.arange(*groups)[:, None] + np.arange(_LANES)
    counter = (of_keys, np.arange(*rows)[:, None, None], h[..., None], entry[..., None])
    found = philox4x32([x.astype(np.uint64) for x in counter], dropout.seed)
    return np.broadcast_to(_below(found, dropout.threshold), shape)


def _below(found: Sequence[Array], threshold: int) -> Array:
    """Return for each counter which of its numbers are below the threshold."""
    own, shared = divmod(threshold, 1 << 32)
    of_all = found[0] ^ _rotated(found[1], 4) ^ _rotated(found[2], 8)
    kept = np.where(of_all < np.uint64(shared), np.uint16(0xFFFF), np.uint16(0))
    for plane in range(_PLANES):
        # A cast keeps the low 16 bits.
        bits = (found[plane // 2] >> np.uint64(16 * (plane % 2))).astype(np.uint16)
        np.invert(bits, out=bits)
        if own >> plane & 1:
            np.bitwise_or(bits, kept, out=kept)
        else:
            np.bitwise_and(bits, kept, out=kept)
    return kept


def _rotated(x: Array, bits: int) -> Array:
    """Return words of 32 bits rotated to the left."""
    rotated: Array = (x << np.uint64(bits) | x >> np.uint64(32 - bits)) & np.uint64(0xFFFFFFFF)
    return rotated


def kept(
    dropout: Dropout, b: Array, h: Array, rows: tuple[int, int], keys: tuple[int, int]
) -> Array:
    """Return which pairs of some queries and keys are kept.

    Parameters
    ----------
    dropout : Dropout
    b, h : ndarray of int64, shape (n, 1, 1)
    rows, keys : tuple of int
        First and last + 1.

    Returns
    -------
    ndarray of bool, shape (n, rows, keys)
    """
    groups = keys[0] // GROUP, -(-keys[1] // GROUP)
    n, m, count = len(b), rows[1] - rows[0], groups[1] - groups[0]
    found = np.empty((n, m, count * GROUP), np.bool_)
    for entries, part in _parts(n, m, count * _LANES):
        bounds = rows[0] + part.start, rows[0] + part.stop
        of_part = words(dropout, b[entries], h[entries], bounds, groups)
        found[entries, part] = _unpacked(of_part)
    first = keys[0] - groups[0] * GROUP
    return found[:, :, first : first + keys[1] - keys[0]]


def _parts(n: int, m: int, counters: int) -> Iterator[tuple[slice, slice]]:
    """Yield entries and rows whose counters are computed together."""
    height = max(1, min(m, _TOGETHER // max(1, counters)))
    width = max(1, _TOGETHER // max(1, counters * height))
    for entry in range(0, n, width):
        for row in range(0, m, height):
            yield slice(entry, min(entry + width, n)), slice(row, min(row + height, m))


def _unpacked(of_counters: Array) -> Array:
    """Return decisions as bools in the order of keys, (n, rows, keys)."""
    n, m, count, _ = of_counters.shape
    bits = np.unpackbits(of_counters.astype("<u2").view(np.uint8), axis=-1, bitorder="little")
    # Pairs of neighbouring keys move together, as numbers of 16 bits.
    pairs = bits.view(np.uint16).reshape(n, m, count, _LANES, GROUP // 8)
    in_order = np.ascontiguousarray(pairs.swapaxes(-1, -2))
    return in_order.view(np.bool_).reshape(n, m, count * GROUP)


class TileDropout:
    """The decisions on tiles of one stack of batch entries.

    Parameters
    ----------
    dropout : Dropout
    b, h : ndarray of int64, shape (n, 1, 1)
        Of the stacked entries.

    Attributes
    ----------
    factor : float
        What kept weights are multiplied by.
    """

    def __init__(self, dropout: Dropout, b: Array, h: Array) -> None:
        self._dropout, self._b, self._h = dropout, b, h
        self.factor = dropout.factor

    def kept(self, rows: tuple[int, int], runs: Sequence[tuple[int, int]]) -> Array:
        """Return which pairs are kept, (n, rows, keys), those of runs of keys side by side."""
        found = [kept(self._dropout, self._b, self._h, rows, keys) for keys in runs]
        return found[0] if len(found) == 1 else np.concatenate(found, axis=-1)
