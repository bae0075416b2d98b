"""Bit masks: the visible keys of each query, packed block by block."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from fa_cupy.core import backends, broadcasting, checks
from fa_cupy.masks import blocks as masks_blocks
from fa_cupy.masks import build, export, slices
from fa_cupy.masks.algebra import Algebra
from fa_cupy.masks.blocks import BlockLists, Grid
from fa_cupy.masks.constructors import Sources
from fa_cupy.masks.storage import Store

Array = npt.NDArray[Any]
File = str | PathLike[str] | IO[bytes]


class BitMask(Sources, Algebra):
    """The visible keys of each query, one bit a pair, without blocks in which no key is visible.

    A mask of shape (..., Lq, Lk) consists of blocks of 128 queries and 128 keys. A block is empty,
    full or partial. Only partial blocks store bits, 2 kB each, and only blocks that are not empty
    are listed. A *sparse* block, a partial one with fewer than 512 visible pairs, stores 4 bytes
    for each pair instead, so the memory of a mask depends on what is visible. It is passed as
    ``mask`` to `attention`, which skips empty blocks and computes full ones as without a mask.

    Masks never change. ``BitMask(x)`` is the mask of an array of bool or of a sparse matrix of
    SciPy or CuPy; `from_segments`, `from_window`, `from_edges`, `from_indices`, `from_blocks` and
    `from_function` make masks without an array of all pairs, `load` reads one.

    They behave like arrays of bool. ``a & b``, ``a | b``, ``a ^ b``, ``a == b``, ``a != b`` and
    ``~a`` are masks, computed element by element, with batch axes that broadcast; one operand may
    be a bool, an array of bool that broadcasts to the lengths of the mask, or a sparse matrix.
    `equals` is True if all bits are the same. ``a[i]`` selects batch entries, by any index of an
    array of the batch shape, and shares the memory of `a`. ``a[..., 100:500, :300]`` has a part of
    the queries and keys: slices of step 1. Other indices are an IndexError. ``np.asarray(a)`` is an
    array of bool.

    A mask is on the device of the arrays that it was made from, and can be used on any device: its
    lists are copied there at the first use, and kept. Masks are combined and sliced on the CPU;
    `get` returns a mask on the CPU. While a stream is captured into a CUDA graph, making a mask
    from arrays on a GPU raises a NotImplementedError.

    Where lengths are not multiples of 128, the last blocks reach beyond the matrix. Bits beyond it
    are 0 and are ignored: a block is full if all pairs inside the matrix are visible.

    Parameters
    ----------
    mask : array of bool, shape (..., Lq, Lk), sparse array or matrix, or BitMask
        An array as in `from_dense`, a sparse matrix as in `from_csr`. A mask is returned as it is.

    Attributes
    ----------
    lists : BlockLists
        ``partial_begin, partial, words, full_begin, full, entry_begin, entry_keys``: row
        ``t = entry * ceil(Lq / 128) + i`` of blocks has partial blocks at
        ``partial[partial_begin[t] : partial_begin[t + 1]]``, which are indices of blocks of keys.
        Their words have the same positions in ``words``, in the fragment order of
        `fa_cupy.layouts`. ``full`` has the full blocks in the same way. The visible pairs of sparse
        blocks are in CSR form instead: query q sees the keys
        ``entry_keys[entry_begin[r] : entry_begin[r + 1]]``, where ``r = entry * Lq + q``. Both are
        empty without sparse blocks, and on a GPU, where sparse blocks have words. NumPy or CuPy
        arrays, read-only.
    entries : ndarray of int32, shape of the batch
        The matrix (`entry` above) of each batch entry; equal ones may share a matrix. Read-only.

    Examples
    --------
    >>> import numpy as np
    >>> from fa_cupy import BitMask, attention
    >>> same = BitMask.from_segments(np.repeat(np.arange(5), 200))  # documents of 200 tokens
    >>> same
    <BitMask (1000, 1000): 4 full and 22 partial blocks of 64, 45.3 kB>
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 1000, 16))
    >>> out = attention(q, k, v, mask=same, is_causal=True)
    >>> bool(np.allclose(out[:, 200], v[:, 200]))  # the first query of the second document
    True
    """

    __slots__ = ("__weakref__", "_count", "_grid", "_kept", "_store", "_transposed", "entries")
    __array_ufunc__ = None  # an array on the left leaves operators to this class

    EMPTY, PARTIAL, FULL = masks_blocks.EMPTY, masks_blocks.PARTIAL, masks_blocks.FULL
    dtype = np.dtype(np.bool_)  # of the elements, as of an array of bool

    entries: Array
    _grid: Grid
    _store: Store
    _count: int | None
    _transposed: BitMask | None
    _kept: dict[Any, Any]  # what a backend has worked out of this mask

    def __new__(cls, mask: Any) -> BitMask:
        if isinstance(mask, BitMask):
            return mask
        return cls.from_csr(mask) if checks.is_sparse(mask) else cls.from_dense(mask)

    @classmethod
    def _of(cls, grid: Grid, matrices: Any, entries: Array, device: int | None = None) -> BitMask:
        made = isinstance(matrices, BlockLists)
        lists = matrices if made else masks_blocks.joined(grid, matrices)
        return cls._wrap(grid, Store(grid, lists, device), entries)

    @classmethod
    def _on_device(cls, grid: Grid, lists: Any, entries: Array) -> BitMask:
        device = lists.words.data.device_id
        return cls._wrap(grid, Store(grid, lists, device, device), entries)

    @classmethod
    def _wrap(cls, grid: Grid, store: Store, entries: Array) -> BitMask:
        self = object.__new__(cls)
        entries = np.asarray(entries, np.int32).view()
        entries.flags.writeable = False
        fields = {"_grid": grid, "_store": store, "entries": entries, "_kept": {}}
        for name, value in {**fields, "_count": None, "_transposed": None}.items():
            object.__setattr__(self, name, value)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"BitMask: {name} cannot be set, a mask never changes")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"BitMask: {name} cannot be deleted, a mask never changes")

    def __iter__(self) -> Iterator[BitMask]:
        if not self.entries.ndim:
            raise TypeError(
                f"BitMask: iteration over a mask of shape {self.shape}, want a batch axis"
            )
        return (self[i] for i in range(len(self.entries)))

    @property
    def lists(self) -> BlockLists:
        return self._store.home

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.entries.ndim + 2

    @property
    def nbytes(self) -> int:
        """Bytes of memory of the mask.

        A mask ``a[i]`` of batch entries shares the memory of `a`, all of which is counted. Not
        counted are `T` and copies on other devices.
        """
        return self.entries.nbytes + self._store.nbytes

    @property
    def density(self) -> float:
        """Share of pairs of a query and a key that are visible, from 0 to 1; 0 without pairs."""
        return self.nnz / max(1, self.size)

    @property
    def block_density(self) -> float:
        """Share of blocks that are not empty, from 0 to 1; 0 without blocks."""
        return sum(export.listed(*self._outline)) / max(1, self._block_count())

    @property
    def T(self) -> BitMask:
        """The mask with queries and keys swapped, made at the first use and kept."""
        if (turned := self._transposed) is None:
            matrices, entries = export.used(*self._parts)
            blocks = [masks_blocks.transposed(self._grid, m) for m in matrices]
            grid = Grid(self._grid.k_len, self._grid.q_len)
            turned = self._of(grid, blocks, entries, self._store.device)
            object.__setattr__(turned, "_transposed", self)
            object.__setattr__(self, "_transposed", turned)
        return turned

    def __len__(self) -> int:
        """Length of the first axis."""
        return self.shape[0]

    def __reversed__(self) -> Iterator[BitMask]:
        return iter([*self][::-1])

    def __getitem__(self, index: Any) -> BitMask:
        of_batch, *spans = slices.parts_of(index, self.shape)
        try:
            entries = self.entries[of_batch]
        except (IndexError, TypeError, ValueError) as e:
            if type(e) in (IndexError, TypeError, ValueError):  # others are not of an index
                e.args = (f"BitMask: for batch shape {self.entries.shape}, {e}",)
            raise
        what = f"the result of indexing a mask of shape {self.shape}"
        broadcasting.check_batch_axes("BitMask", what, np.ndim(entries))
        if spans == [(0, n) for n in self._grid]:
            return self._wrap(self._grid, self._store, entries)
        matrices, entries = export.used(self._grid, self._store.host(), np.asarray(entries))
        grid = Grid(*(end - begin for begin, end in spans))
        cut = [slices.cut(self._grid, matrix, *spans) for matrix in matrices]
        return self._of(grid, cut, entries, self._store.device)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("BitMask: the elements of a mask are in no array, want copy=None")
        if self._store.device is not None:
            raise TypeError(
                f"BitMask: the mask is on CUDA device {self._store.device}, want np.asarray of "
                "mask.get()"
            )
        return export.dense(*self._parts).astype(dtype or np.bool_, copy=False)

    def get(self) -> BitMask:
        """Return the mask on the CPU, as `cupy.ndarray.get` does for an array.

        Returns
        -------
        BitMask
            The mask itself, if it is on the CPU.
        """
        if self._store.device is None:
            return self
        return self._wrap(self._grid, Store(self._grid, self._store.host()), self.entries)

    def block_states(self) -> npt.NDArray[np.int8]:
        """Return the state of each block.

        Returns
        -------
        ndarray of int8, shape (..., ceil(Lq / 128), ceil(Lk / 128))
            ``BitMask.EMPTY`` (0), ``BitMask.PARTIAL`` (1) or ``BitMask.FULL`` (2), on the CPU.

        Examples
        --------
        >>> import numpy as np
        >>> from fa_cupy import BitMask
        >>> BitMask(np.tri(300, dtype=bool)).block_states()
        array([[1, 0, 0],
               [2, 1, 0],
               [2, 2, 1]], dtype=int8)
        """
        return export.block_states(*self._outline)

    def to_dense(self) -> Any:
        """Return the mask as an array of bool, of its shape: 1 byte for each pair.

        Returns
        -------
        ndarray or cupy.ndarray
            On the device of the mask.

        Examples
        --------
        >>> import numpy as np
        >>> from fa_cupy import BitMask
        >>> BitMask.from_dense(np.eye(3, dtype=bool)).to_dense().astype(int)
        array([[1, 0, 0],
               [0, 1, 0],
               [0, 0, 1]])
        """
        if self._store.device is None:
            return export.dense(*self._parts)
        device_mask = backends.gpu("masks.device_mask")
        lists = self._store.device_outline()._replace(words=self.lists.words)
        return device_mask.dense(self._grid, lists, self.entries, self._store.device)

    def toarray(self) -> Any:
        """Return the mask as an array of bool: `to_dense` by the name that SciPy gives it."""
        return self.to_dense()

    def to_csr(self) -> Any:
        """Return a mask without batch axes as a sparse matrix.

        Returns
        -------
        scipy.sparse.csr_array or cupyx.scipy.sparse.csr_matrix of bool, shape (Lq, Lk)
            On the device of the mask. Only True is stored, with columns in ascending order.

        Raises
        ------
        ValueError
            For a mask with batch axes: select an entry first, as in ``mask[0]``.

        See Also
        --------
        BitMask.from_csr : the mask of a sparse matrix, with an example.
        """
        if self.entries.ndim:
            raise ValueError(
                f"BitMask.to_csr: the mask has shape {self.shape}, want 2 axes (as of mask[0])"
            )
        found = export.csr(self._grid, self._store.host(), int(self.entries))
        if self._store.device is None:
            return found
        device_mask = backends.gpu("masks.device_mask")
        return device_mask.csr_on(found, self._store.device)

    def reorder(self) -> tuple[BitMask, npt.NDArray[np.int32]]:
        """Give positions a new order, so that the visible pairs are close to the diagonal.

        The reverse Cuthill-McKee order [1]_ of the mask, as of an undirected graph: neighbours get
        numbers that are close to each other, so that visible pairs are in fewer blocks.

        Returns
        -------
        mask : BitMask
            Its pair (i, j) is the pair (order[i], order[j]) of this mask.
        order : ndarray of int32, shape (L,)
            The old positions in their new order, on the CPU.

        Raises
        ------
        ValueError
            If the mask has batch axes or numbers of queries and keys that differ.

        Notes
        -----
        Queries, keys and values are taken in the new order, and the rows of the output are put back
        by ``out[..., order, :] = new``. The same holds for gradients. A `bias` is
        ``bias[..., order, :][..., order]``. Causality and windows go by position, and so do
        scores of ``i`` and ``j``: they mean something else in another order.

        ``repr(mask)`` says "nearly empty" where another order may help: where the mask has at least
        64 partial blocks, with at most 64 pairs in each on average.

        The order is computed on the CPU, from lists of the visible pairs: about 40 bytes for each.

        References
        ----------
        .. [1] A. George and J. Liu, "Computer Solution of Large Sparse Positive Definite Systems",
           1981; `scipy.sparse.csgraph.reverse_cuthill_mckee`.

        Examples
        --------
        >>> import numpy as np
        >>> from fa_cupy import BitMask, attention
        >>> rng = np.random.default_rng(0)
        >>> names = rng.permutation(1000)  # of the nodes along a chain
        >>> chain = BitMask.from_edges(names[[*range(1000), *range(999)]],
        ...                            names[[*range(1000), *range(1, 1000)]], 1000)
        >>> near, order = chain.reorder()
        >>> chain.block_density, near.block_density
        (1.0, 0.234375)
        >>> q, k, v = rng.standard_normal((3, 8, 1000, 16))
        >>> out = np.empty_like(v)
        >>> out[:, order] = attention(q[:, order], k[:, order], v[:, order], mask=near)
        >>> bool(np.allclose(out, attention(q, k, v, mask=chain)))
        True
        """
        if self.entries.ndim or self._grid.q_len != self._grid.k_len:
            raise ValueError(
                f"BitMask.reorder: the mask has shape {self.shape}, want (L, L) (as of mask[0])"
            )
        from scipy.sparse import csgraph

        pairs = export.csr(self._grid, self._store.host(), int(self.entries))
        order = csgraph.reverse_cuthill_mckee(pairs) if self._grid.q_len else np.empty(0, np.int32)
        order = order.astype(np.int32, copy=False)  # of one position it is of int64
        pairs = pairs[order][:, order]
        pairs.sort_indices()
        made = [build.of_csr(self._grid, pairs)]
        return self._of(self._grid, made, np.array(0), self._store.device), order

    def save(self, file: File) -> None:
        """Write the mask to a file, as an .npz archive of its lists.

        Parameters
        ----------
        file : path-like or binary file with `read` and `write`
            No ending is added to a path. A file that exists is replaced after the new one is
            complete. The new one is written in the same folder, which must be writable, and hard
            links keep the old file. A mask ``a[i]`` of batch entries is written without the other
            entries of `a`.

        Raises
        ------
        TypeError
            If `file` is neither a path nor a binary file.
        OSError
            If the file cannot be written.

        Examples
        --------
        >>> import io
        >>> import numpy as np
        >>> from fa_cupy import BitMask
        >>> mask = BitMask(np.tri(300, dtype=bool))
        >>> mask.save(file := io.BytesIO())
        >>> _ = file.seek(0)
        >>> BitMask.load(file).equals(mask)
        True
        """
        from fa_cupy.masks import npz  # brings zipfile and compressors

        npz.save(file, self._grid, *export.compact(*self._parts))

    @classmethod
    def load(cls, file: File) -> BitMask:
        """Read a mask that `save` wrote.

        Parameters
        ----------
        file : path-like or binary file with `read`, `seek` and `tell`
            A binary file is read from its current position.

        Returns
        -------
        BitMask
            On the CPU.

        Raises
        ------
        TypeError
            If `file` is neither a path nor a binary file.
        OSError
            If the file cannot be read.
        ValueError
            For a file without a mask, for a damaged file, and for a compressed file whose arrays
            exceed 128 MiB plus 64 times its size.

        See Also
        --------
        BitMask.save : writes such a file, with an example.
        """
        from fa_cupy.masks import npz  # brings zipfile and compressors

        grid, lists, entries = npz.load(file)
        return cls._wrap(grid, Store(grid, lists), entries)

    def __reduce__(self) -> Any:
        parts = self._grid, self.lists, self.entries
        if self._store.device is None:
            parts = self._grid, *export.compact(*parts)
        return _restored, tuple(map(tuple, parts[:2])) + parts[2:]

    def __repr__(self) -> str:
        partial, full = export.listed(*self._outline)
        one_graph = not self.entries.ndim and self._grid.q_len == self._grid.k_len
        advice = ""
        if one_graph and partial >= _MANY_BLOCKS and self.nnz <= _FEW_PAIRS * partial:
            pairs = self.nnz / partial
            advice = f", nearly empty: {pairs:.2g} pairs in each (see BitMask.reorder)"
        size = self.nbytes / 1e3
        memory = f"{size:.1f} kB" if size < 1e3 else f"{size / 1e3:.1f} MB"
        place = "" if self._store.device is None else f" on CUDA device {self._store.device}"
        return (
            f"<BitMask {self.shape}: {full} full and {partial} partial blocks "
            f"of {self._block_count()}, {memory}{place}{advice}>"
        )

    @property
    def _parts(self) -> tuple[Grid, BlockLists, Array]:
        return self._grid, self._store.host(), self.entries

    @property
    def _outline(self) -> tuple[Grid, BlockLists, Array]:
        return self._grid, self._store.outline(), self.entries

    def _block_count(self) -> int:
        return self.entries.size * self._grid.q_tiles * self._grid.k_tiles


# `repr` advises another order of a graph with as many partial blocks, of as few pairs on average.
_MANY_BLOCKS, _FEW_PAIRS = 64, 64

_WITHOUT_ENTRIES = 5  # arrays of masks that were pickled before sparse blocks were kept apart


def _restored(lengths: tuple[int, int], lists: tuple[Array, ...], entries: Array) -> BitMask:
    grid, found = Grid(*lengths), BlockLists(*lists)
    if not isinstance(found.words, np.ndarray):
        return BitMask._on_device(grid, found, entries)
    if len(lists) == _WITHOUT_ENTRIES:
        found = masks_blocks.canonical(grid, found)
    return BitMask._wrap(grid, Store(grid, found), entries)


def bits_of_sparse(name: str, arg: str, mask: Any) -> Any:
    """Return an argument that is a sparse matrix as a BitMask, and anything else as it is."""
    return BitMask._of_sparse(name, {arg: mask}) if checks.is_sparse(mask) else mask
