"""Operators and sums of masks, computed on the CPU."""

from __future__ import annotations

import functools
import math
import numbers
import operator
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fa_cupy.core import checks
from fa_cupy.masks import blocks as masks_blocks
from fa_cupy.masks import build, export
from fa_cupy.masks import checks as inputs
from fa_cupy.masks.blocks import EMPTY, FULL, PARTIAL, WORDS, BlockLists, Blocks, Grid
from fa_cupy.masks.storage import Store

Array = npt.NDArray[Any]
Mask = TypeVar("Mask", bound="Algebra")

_AND = functools.partial(masks_blocks.combined, op=np.bitwise_and)
_OR = functools.partial(masks_blocks.combined, op=np.bitwise_or)
# The same of arrays of bool; all others are `logical_xor`.
_OF_BITS = {"&": np.logical_and, "|": np.logical_or}


class Algebra:
    """The operators and sums of `fa_cupy.BitMask`. Masks belong to the device of the operands."""

    __slots__ = ()

    entries: Array
    _grid: Grid
    _store: Store
    _count: int | None

    @classmethod
    def _of(
        cls: type[Mask], grid: Grid, matrices: Any, entries: Array, device: int | None = None
    ) -> Mask:
        raise NotImplementedError

    @classmethod
    def _of_sparse(cls: type[Mask], name: str, matrices: dict[str, Any]) -> Mask:
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, ...]:
        """Batch axes, number of queries, number of keys."""
        return (*self.entries.shape, *self._grid)

    @property
    def size(self) -> int:
        """Number of pairs of a query and a key, visible or not, as of an array of bool."""
        return math.prod(self.shape)

    @property
    def nnz(self) -> int:
        """Number of visible pairs."""
        if self._count is None and self._grid.is_small:
            numbers, repeats = np.unique(self.entries, return_counts=True)
            pairs = self._small(numbers).sum(axis=(1, 2))
            object.__setattr__(self, "_count", int(pairs @ repeats))
        if self._count is None:
            outline = self._grid, self._store.outline(), self.entries
            matrices, entries = export.used(*outline)
            bits = [masks_blocks.bit_count(self._grid, m) for m in matrices]
            object.__setattr__(self, "_count", sum(bits[e] for e in entries.flat))
        return self._count or 0

    def sum(
        self, axis: int | tuple[int, ...] | None = None, dtype: Any = None, *, out: None = None,
        keepdims: bool = False,
    ) -> Any:  # fmt: skip
        """Count the visible pairs along axes.

        Parameters
        ----------
        axis : int or tuple of int, optional
            -1 counts the keys of each query, -2 the queries of each key, others entries of the
            batch. All axes by default.
        dtype : dtype, optional
            Of the result.
        out : None
            Nothing else is taken. `numpy.sum` passes it.
        keepdims : bool
            Whether the axes that are summed over stay, with size 1.

        Returns
        -------
        int, or ndarray of int64
            Of `dtype` if that is given. An array of the axes that are left, on the CPU. If it has
            both the axis of queries and that of keys, it takes 8 bytes for each pair.

        Raises
        ------
        TypeError, ValueError
            If an axis is not an int, is out of bounds or is given twice, and for a `dtype` that
            NumPy does not know.

        Examples
        --------
        >>> import numpy as np
        >>> from fa_cupy import BitMask
        >>> mask = BitMask(np.tri(4, dtype=bool))
        >>> mask.sum(), mask.sum(axis=-1), mask.sum(axis=-2)
        (10, array([1, 2, 3, 4]), array([4, 3, 2, 1]))
        """
        axes = self._axes("sum", axis, out)
        keeps = checks.flag("BitMask.sum", "keepdims", keepdims)
        try:
            kind = np.dtype(np.int64 if dtype is None else dtype)
        except (TypeError, ValueError, SyntaxError):
            shown = checks.show(dtype)
            raise TypeError(f"BitMask.sum: dtype is {shown}, want a NumPy dtype") from None
        if len(axes) == self.entries.ndim + 2:
            found: Any = self.nnz
        else:
            found = export.sums(self._grid, self._store.host(), self.entries, axes)
        if dtype is not None:
            found = np.asarray(found, np.int64).astype(kind)[()]
        return np.expand_dims(found, axes) if keeps else found

    def any(
        self, axis: int | tuple[int, ...] | None = None, *, out: None = None, keepdims: bool = False
    ) -> Any:
        """Return whether some pair is visible along axes, as `numpy.ndarray.any` does.

        Parameters
        ----------
        axis : int or tuple of int, optional
            As in `sum`: ``mask.any(axis=-1)`` is False for queries that see no key.
        out : None
        keepdims : bool
            As in `sum`.

        Returns
        -------
        bool, or ndarray of bool
            An array of the axes that are left, on the CPU.

        Raises
        ------
        TypeError, ValueError
            As `sum` does.

        Examples
        --------
        >>> import numpy as np
        >>> from fa_cupy import BitMask
        >>> mask = BitMask(np.array([[True, True], [False, True], [False, False]]))
        >>> mask.any(axis=-1), mask.all(axis=-1)
        (array([ True,  True, False]), array([ True, False, False]))
        """
        found = self.sum(self._axes("any", axis, out), keepdims=keepdims)
        return found > 0

    def all(
        self, axis: int | tuple[int, ...] | None = None, *, out: None = None, keepdims: bool = False
    ) -> Any:
        """Return whether all pairs are visible along axes, as `numpy.ndarray.all` does.

        Parameters
        ----------
        axis : int or tuple of int, optional
            As in `sum`.
        out : None
        keepdims : bool
            As in `sum`.

        Returns
        -------
        bool, or ndarray of bool
            An array of the axes that are left, on the CPU.

        Raises
        ------
        TypeError, ValueError
            As `sum` does.

        See Also
        --------
        BitMask.any : has an example of both.
        """
        axes = self._axes("all", axis, out)
        return self.sum(axes, keepdims=keepdims) == math.prod(self.shape[i] for i in axes)

    def equals(self, other: Any) -> bool:
        """Return whether two masks have the same shape and the same bits.

        Parameters
        ----------
        other : BitMask

        Returns
        -------
        bool

        Raises
        ------
        TypeError
            If `other` is not a BitMask.
        """
        if not isinstance(other, Algebra):
            raise TypeError(f"BitMask.equals: other is {checks.show(other)}, want a BitMask")
        if self.shape != other.shape:
            return False
        pairs = set(zip(self.entries.flat, other.entries.flat, strict=True))
        return all(
            np.array_equal(mine, theirs)
            for a, b in pairs
            for mine, theirs in zip(self._blocks(a), other._blocks(b), strict=True)
        )

    def __bool__(self) -> bool:
        raise ValueError(
            "BitMask: the truth value of a mask is ambiguous, want mask.any(), mask.all() or "
            "mask.equals(other)"
        )

    def __invert__(self: Mask) -> Mask:
        if self._grid.is_small:
            numbers, places = np.unique(self.entries, return_inverse=True)
            made: Any = masks_blocks.of_small(~self._small(numbers))
            return self._of(
                self._grid, made, places.reshape(self.entries.shape), self._store.device
            )
        matrices, entries = export.used(self._grid, self._store.host(), self.entries)
        made = [masks_blocks.inverted(self._grid, m) for m in matrices]
        return self._of(self._grid, made, entries, self._store.device)

    def __and__(self, other: Any) -> Any:
        return self._combined(other, "&", _AND)

    def __or__(self, other: Any) -> Any:
        return self._combined(other, "|", _OR)

    def __xor__(self, other: Any) -> Any:
        return self._combined(other, "^", _differing)

    def __eq__(self, other: object) -> Any:
        found = self._combined(other, "==", _differing)
        return found if found is NotImplemented else ~found

    def __ne__(self, other: object) -> Any:
        return self._combined(other, "!=", _differing)

    __hash__ = None  # type: ignore[assignment]
    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def _combined(self, other: Any, sign: str, op: Any) -> Any:
        other = self._operand(other, sign)
        if other is None:
            return NotImplemented
        if self._grid != other._grid:
            raise ValueError(
                f"BitMask: {sign} of shapes {self.shape} and {other.shape}, want equal lengths"
            )
        try:
            a, b = np.broadcast_arrays(self.entries, other.entries)
        except ValueError:
            raise ValueError(
                f"BitMask: {sign} of shapes {self.shape} and {other.shape}, whose batch axes do "
                "not broadcast"
            ) from None
        count = 1 + int(b.max(initial=0))
        pairs, entries = np.unique(a.astype(np.int64) * count + b, return_inverse=True)
        made: Any
        if self._grid.is_small:
            given = (self._small(pairs // count), other._small(pairs % count))
            made = masks_blocks.of_small(_OF_BITS.get(sign, np.logical_xor)(*given))
        else:
            ours, theirs = map(self._blocks, pairs // count), map(other._blocks, pairs % count)
            made = [op(self._grid, x, y) for x, y in zip(ours, theirs, strict=True)]
        devices = [mask._store.device for mask in (self, other)]
        device = devices[1] if devices[0] is None else devices[0]
        return self._of(self._grid, made, entries.reshape(a.shape), device)

    def _operand(self, other: Any, sign: str) -> Any:
        """Return what a mask is combined with as a mask of its lengths, None if it is no array."""
        if isinstance(other, type):
            return None
        if isinstance(other, Algebra):
            return other
        if checks.is_sparse(other):
            return self._of_sparse("BitMask", {"other": other})
        number = isinstance(other, (bool, np.bool_))
        scalar: Any = other if isinstance(other, numbers.Number) else None
        scalar = None if isinstance(other, np.timedelta64) else scalar
        if not number and sign in ("==", "!=") and scalar is not None:
            if scalar not in (0, 1):
                raise TypeError(f"BitMask: {sign} {checks.show(other)}, want a bool or an array")
            other, number = bool(other), True
        if number and not (other and sign == "&"):  # no pairs to look at
            keys, words = np.empty(0, np.int64), np.empty((0, *WORDS), np.uint32)
            blocks = masks_blocks.tightened(self._grid, keys, words, keys)
            made = [masks_blocks.inverted(self._grid, blocks) if other else blocks]
            return self._of(self._grid, made, np.array(0))
        if not (number or hasattr(other, "__dlpack__")):
            return None
        array, device = inputs.bools("BitMask", "other", other, self._grid)
        add: Any = build.add_dense
        if sign == "&":  # what the mask hides stays hidden
            matrices, _ = export.used(self._grid, self._store.outline(), self.entries)
            seen = [masks_blocks.without_words(self._grid, m) for m in matrices]
            listed = [keys for m in seen for keys in (m.partial, m.full)]
            add = build.adding_listed(np.unique(np.concatenate([np.empty(0, np.int64), *listed])))
        make = functools.partial(self._of, device=device)
        return build.from_rows(make, self._grid, array, add)

    def _axes(self, method: str, axis: Any, out: Any) -> tuple[int, ...]:
        """Return the axes of a sum, counted from 0."""
        if out is not None:
            raise TypeError(f"BitMask.{method}: out is {checks.show(out)}, want None")
        if axis is None:
            return tuple(range(self.entries.ndim + 2))
        ndim, found = self.entries.ndim + 2, []
        for one in axis if isinstance(axis, tuple) else (axis,):
            try:
                number = operator.index(one)
            except TypeError:
                number = ndim
            if isinstance(one, (bool, np.bool_)) or not -ndim <= number < ndim:
                kind = ValueError if hasattr(one, "__index__") else TypeError
                raise kind(
                    f"BitMask.{method}: axis is {checks.show(axis)}, want None, an int from "
                    f"{-ndim} to {ndim - 1} or a tuple of these"
                )
            found.append(number % ndim)
        if len(set(found)) < len(found):
            raise ValueError(
                f"BitMask.{method}: axis is {axis}, which has an axis twice, want each once"
            )
        return tuple(found)

    def _small(self, numbers: Array) -> npt.NDArray[np.bool_]:
        """Return matrices of a mask of small ones as an array of bool."""
        return export.of_small(self._grid, self._store.host(), numbers)

    def _blocks(self, matrix: int) -> Blocks:
        lists: BlockLists = self._store.host()
        return lists.blocks(self._grid, int(matrix))


def _differing(grid: Grid, a: Blocks, b: Blocks) -> Blocks:
    """Return the blocks of the bits in which two matrices differ."""
    if not any(len(keys) for x in (a, b) for keys in (x.partial, x.full)):
        codes = np.setxor1d(a.entries, b.entries, assume_unique=True)
        return masks_blocks.of_entries(grid, codes)
    a, b = (masks_blocks.with_words(grid, x) for x in (a, b))
    keys = functools.reduce(np.union1d, (a.partial, a.full, b.partial, b.full)).astype(np.int64)
    (a_state, a_place), (b_state, b_place) = a.find(keys), b.find(keys)
    mixed = np.flatnonzero((a_state == PARTIAL) | (b_state == PARTIAL))
    words = np.zeros((len(mixed), *WORDS), np.uint32)
    for blocks, states, place in ((a, a_state[mixed], a_place), (b, b_state[mixed], b_place)):
        words[states == FULL] ^= np.uint32(0xFFFFFFFF)
        has_words = np.flatnonzero(states == PARTIAL)
        for part in masks_blocks.chunks(len(has_words)):
            at = has_words[part]
            words[at] ^= blocks.words[place[mixed[at]]]
    one = np.minimum(a_state, b_state) == EMPTY
    full = keys[one & (np.maximum(a_state, b_state) == FULL)]
    return masks_blocks.tightened(grid, keys[mixed], words, full)
