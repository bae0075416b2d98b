"""Bit masks: which keys each query sees, packed block by block."""

from __future__ import annotations

from os import PathLike
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from fa_cupy import _blocks, _mask_files, _mask_outputs
from fa_cupy._blocks import BlockLists, Blocks, Grid
from fa_cupy._mask_sources import Sources

Array = npt.NDArray[Any]
File = str | PathLike[str] | IO[bytes]


class BitMask(Sources):
    """Which keys each query may attend to, one bit a pair, without the pairs that none attends to.

    A mask of shape (..., Lq, Lk) is cut into blocks of 128 queries and 128 keys. A block is empty,
    full or partial; only partial blocks store bits, 2 kB each, and only blocks that are not empty
    are listed, so that a mask takes memory by the number of its blocks. It is passed as ``mask`` to
    `attention`, which skips empty blocks and treats full ones as no mask.

    Masks are made by `from_dense`, `from_indices`, `from_csr`, `from_blocks`, `from_function` and
    `load`, and never change. ``a & b``, ``a | b`` and ``~a`` combine them, batch axes broadcasting
    as in NumPy; ``a == b`` asks whether all bits are the same; ``a[i]`` picks batch entries, by
    whatever picks elements of an array of the batch shape, and shares the memory of `a`.

    Where lengths are no multiples of 128, the last blocks stick out of the matrix. Bits out there
    are 0 and do not count: a block is full if it is so inside.

    Attributes
    ----------
    lists : BlockLists
        ``partial_begin, partial, words, full_begin, full``: row ``t = entry * ceil(Lq / 128) + i``
        lists the key tiles ``partial[partial_begin[t] : partial_begin[t + 1]]``, with the words of
        the same places in the fragment order of `fa_cupy.layouts`, and ``full`` likewise. Those of
        `T` go by key tiles, and their bits by queries. Read-only.
    entries : ndarray of int32, shape of the batch
        The `entry` of each batch entry: those that are the same share one. Read-only.

    Examples
    --------
    >>> import numpy as np
    >>> from fa_cupy import BitMask, attention
    >>> documents = np.repeat(np.arange(5), 200)
    >>> same = BitMask.from_function(lambda q, k: documents[q] == documents[k], (1000, 1000))
    >>> same
    <BitMask (1000, 1000): 4 full and 22 partial blocks of 64, 45.3 kB>
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 1000, 16))
    >>> out = attention(q, k, v, mask=same, is_causal=True)
    >>> bool(np.allclose(out[:, 200], v[:, 200]))  # the first query of the second document
    True
    """

    __slots__ = ("_count", "_grid", "_transposed", "entries", "lists")
    __array_ufunc__ = None  # an array on the left leaves operators to this class

    EMPTY, PARTIAL, FULL = _blocks.EMPTY, _blocks.PARTIAL, _blocks.FULL
    dtype = np.dtype(np.bool_)  # of the elements, as of an array of bool

    entries: Array
    lists: BlockLists
    _grid: Grid
    _count: int | None
    _transposed: BitMask | None

    def __init__(self) -> None:
        raise TypeError("BitMask: want from_dense, from_indices, from_csr, from_blocks, ...")

    @classmethod
    def _of(cls, grid: Grid, matrices: Any, entries: Array) -> BitMask:
        return cls._wrap(grid, _blocks.joined(grid, matrices), entries)

    @classmethod
    def _wrap(cls, grid: Grid, lists: BlockLists, entries: Array) -> BitMask:
        self = object.__new__(cls)
        entries = np.asarray(entries, np.int32).view()
        entries.flags.writeable = False
        fields = {"_grid": grid, "lists": lists, "entries": entries}
        for name, value in {**fields, "_count": None, "_transposed": None}.items():
            object.__setattr__(self, name, value)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"BitMask: {name} cannot be set, a mask never changes")

    @property
    def shape(self) -> tuple[int, ...]:
        """Batch axes, number of queries, number of keys."""
        return (*self.entries.shape, *self._grid)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.entries.ndim + 2

    @property
    def nbytes(self) -> int:
        """Bytes that the mask holds, of all entries that it shares with the one it is a slice of.

        What `T` keeps is not counted.
        """
        return self.entries.nbytes + sum(array.nbytes for array in self.lists)

    @property
    def density(self) -> float:
        """Share of pairs of a query and a key that attend, from 0 to 1; 0 where there are none."""
        if self._count is None:
            matrices, entries = _mask_outputs.used(*self._parts)
            bits = [_blocks.bit_count(self._grid, m) for m in matrices]
            object.__setattr__(self, "_count", sum(bits[e] for e in entries.flat))
        return (self._count or 0) / max(1, self.entries.size * self._grid.q_len * self._grid.k_len)

    @property
    def block_density(self) -> float:
        """Share of blocks that are not empty, from 0 to 1; 0 where there are none."""
        return sum(_mask_outputs.listed(*self._parts)) / max(1, self._block_count())

    @property
    def T(self) -> BitMask:
        """The mask with queries and keys swapped, made when first asked for and kept.

        Its lists are those of this mask by key tiles, with each block's bits transposed.
        """
        if self._transposed is None:
            matrices, entries = _mask_outputs.used(*self._parts)
            blocks = [_blocks.transposed(self._grid, m) for m in matrices]
            turned = self._of(Grid(self._grid.k_len, self._grid.q_len), blocks, entries)
            object.__setattr__(turned, "_transposed", self)
            object.__setattr__(self, "_transposed", turned)
        assert self._transposed is not None
        return self._transposed

    def __getitem__(self, index: Any) -> BitMask:
        parts = index if isinstance(index, tuple) else (index,)
        if any(part is Ellipsis for part in parts):
            raise IndexError("BitMask: the index has ..., want indices of batch axes only")
        try:
            entries = self.entries[index]
        except IndexError as error:
            raise IndexError(f"BitMask: for batch shape {self.entries.shape}, {error}") from None
        return self._wrap(self._grid, self.lists, entries)

    def __invert__(self) -> BitMask:
        matrices, entries = _mask_outputs.used(*self._parts)
        return self._of(self._grid, [_blocks.inverted(self._grid, m) for m in matrices], entries)

    def __and__(self, other: Any) -> Any:
        return self._combined(other, "&", np.bitwise_and)

    def __or__(self, other: Any) -> Any:
        return self._combined(other, "|", np.bitwise_or)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BitMask):
            return NotImplemented
        if self.shape != other.shape:
            return False
        pairs = set(zip(self.entries.flat, other.entries.flat, strict=True))
        return all(
            np.array_equal(mine, theirs)
            for a, b in pairs
            for mine, theirs in zip(self._blocks(a), other._blocks(b), strict=True)
        )

    def block_states(self) -> npt.NDArray[np.int8]:
        """Return the state of each block.

        Returns
        -------
        ndarray of int8, shape (..., ceil(Lq / 128), ceil(Lk / 128))
            ``BitMask.EMPTY`` (0), ``BitMask.PARTIAL`` (1) or ``BitMask.FULL`` (2).
        """
        return _mask_outputs.block_states(*self._parts)

    def to_dense(self) -> npt.NDArray[np.bool_]:
        """Return the mask as an array of bool, of its shape: 1 byte for each pair.

        Examples
        --------
        >>> import numpy as np
        >>> from fa_cupy import BitMask
        >>> BitMask.from_dense(np.eye(3, dtype=bool)).to_dense().astype(int)
        array([[1, 0, 0],
               [0, 1, 0],
               [0, 0, 1]])
        """
        return _mask_outputs.dense(*self._parts)

    def to_csr(self) -> Any:
        """Return a mask without batch axes as a sparse matrix.

        Returns
        -------
        scipy.sparse.csr_array of bool, shape (Lq, Lk)
            True is stored and nothing else, columns in ascending order.

        Raises
        ------
        ValueError
            For a mask with batch axes: pick an entry first.
        """
        if self.entries.ndim:
            raise ValueError(
                f"BitMask.to_csr: the mask has shape {self.shape}, want 2 axes (as of mask[0])"
            )
        return _mask_outputs.csr(self._grid, self.lists, int(self.entries))

    def save(self, file: File) -> None:
        """Write the mask to a file, as an .npz archive of its lists.

        Parameters
        ----------
        file : path-like or binary file
            Entries that no batch entry uses, such as those sliced away, are left out.
        """
        lists, (matrices, entries) = (
            self.lists,
            _mask_outputs.used(*self._parts),
        )
        if len(matrices) * self._grid.q_tiles + 1 < len(lists.full_begin):
            lists = _blocks.joined(self._grid, matrices)
        _mask_files.save(file, self._grid, lists, entries)

    @classmethod
    def load(cls, file: File) -> BitMask:
        """Read a mask that `save` wrote.

        Parameters
        ----------
        file : path-like or binary file

        Returns
        -------
        BitMask

        Raises
        ------
        ValueError
            For a file that holds no mask, or a damaged one.
        """
        return cls._wrap(*_mask_files.load(file))

    def __reduce__(self) -> Any:
        return _restored, (tuple(self._grid), tuple(self.lists), self.entries)

    def __repr__(self) -> str:
        partial, full = _mask_outputs.listed(*self._parts)
        size = self.nbytes / 1e3
        memory = f"{size:.1f} kB" if size < 1e3 else f"{size / 1e3:.1f} MB"
        return (
            f"<BitMask {self.shape}: {full} full and {partial} partial blocks "
            f"of {self._block_count()}, {memory}>"
        )

    def _combined(self, other: Any, sign: str, op: Any) -> Any:
        if not isinstance(other, BitMask):
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
        made = [
            _blocks.combined(self._grid, self._blocks(p // count), other._blocks(p % count), op)
            for p in pairs
        ]
        return self._of(self._grid, made, entries.reshape(a.shape))

    @property
    def _parts(self) -> tuple[Grid, BlockLists, Array]:
        return self._grid, self.lists, self.entries

    def _blocks(self, matrix: int) -> Blocks:
        return self.lists.blocks(self._grid, int(matrix))

    def _block_count(self) -> int:
        return self.entries.size * self._grid.q_tiles * self._grid.k_tiles


def _restored(lengths: tuple[int, int], lists: tuple[Array, ...], entries: Array) -> BitMask:
    for array in lists:
        array.flags.writeable = False
    return BitMask._wrap(Grid(*lengths), BlockLists(*lists), entries)
