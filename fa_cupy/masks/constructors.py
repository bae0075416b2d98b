"""Constructors of bit masks: from arrays, sparse matrices, segments, windows, functions and more.

Each constructor processes one row of blocks at a time and keeps only the blocks that are not empty,
so it allocates no array of the whole matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fa_cupy.core import backends, broadcasting, checks
from fa_cupy.masks import blocks, build, patterns
from fa_cupy.masks import checks as inputs
from fa_cupy.masks.blocks import FULL, PARTIAL, WORDS, BlockLists, Blocks, Grid

Array = npt.NDArray[Any]
Mask = TypeVar("Mask", bound="Sources")


class Sources:
    """The constructors of `fa_cupy.BitMask`."""

    __slots__ = ()

    @classmethod
    def _of(
        cls: type[Mask],
        grid: Grid,
        matrices: Sequence[Blocks] | BlockLists,
        entries: Array,
        device: int | None = None,
    ) -> Mask:
        raise NotImplementedError

    @classmethod
    def _on_device(cls: type[Mask], grid: Grid, lists: Any, entries: Array) -> Mask:
        raise NotImplementedError

    @classmethod
    def from_dense(cls: type[Mask], mask: Any) -> Mask:
        """Pack an array of bool.

        Parameters
        ----------
        mask : array of bool, shape (..., Lq, Lk)
            True where a query may attend to a key. Batch axes of stride 0, as
            `numpy.broadcast_to` makes them, are packed once.

        Returns
        -------
        BitMask

        Raises
        ------
        TypeError, ValueError
            If `mask` is not an array of bool, or has fewer than 2 axes.

        Examples
        --------
        >>> import numpy as np
        >>> from fa_cupy import BitMask
        >>> BitMask.from_dense(np.tri(300, dtype=bool))
        <BitMask (300, 300): 3 full and 3 partial blocks of 9, 6.2 kB>
        """
        name = "BitMask.from_dense"
        native = inputs.native(name, mask=mask)
        mask = native.arrays[0]
        if mask.dtype != np.bool_:
            raise TypeError(f"{name}: mask has dtype {mask.dtype}, want bool (cast it: mask != 0)")
        grid = inputs.grid(name, "mask", mask.shape)
        if native.backend == "cupy":
            on_device = backends.gpu("masks.build")
            with native.context:
                return cls._on_device(grid, *on_device.from_dense(grid, mask))
        return build.from_rows(cls._of, grid, mask, build.add_dense)

    @classmethod
    def from_indices(cls: type[Mask], indices: Any, k_len: int) -> Mask:
        """Let each query see the keys at the given indices, such as those of its best scores.

        Parameters
        ----------
        indices : array of int, shape (..., Lq, K)
            Indices of keys for each query, in any order. An index may be repeated, and a negative
            one stands for no key, so that queries may see fewer than K keys.
        k_len : int
            Number of keys.

        Returns
        -------
        BitMask
            Of shape (..., Lq, k_len).

        Raises
        ------
        TypeError, ValueError
            If `indices` is not an array of integers below `k_len` with at least 2 axes.

        Examples
        --------
        >>> import numpy as np
        >>> from fa_cupy import BitMask
        >>> mask = BitMask.from_indices(np.array([[0, 2], [1, -1]]), 4)
        >>> mask.to_dense().astype(int)
        array([[1, 0, 1, 0],
               [0, 1, 0, 0]])
        """
        name = "BitMask.from_indices"
        native = inputs.native(name, indices=indices)
        indices = native.arrays[0]
        if indices.dtype.kind not in "iu":
            raise TypeError(f"{name}: indices has dtype {indices.dtype}, want integers")
        q_len = inputs.length(name, "indices.shape[-2]", indices.shape[-2])
        grid = Grid(q_len, inputs.length(name, "k_len", k_len))
        with native.context:
            largest = int(indices.max()) if indices.size else -1
            if largest >= grid.k_len:
                raise ValueError(f"{name}: indices has {largest}, want less than {grid.k_len}")
            if native.backend == "cupy":
                on_device = backends.gpu("masks.build")
                return cls._on_device(grid, *on_device.from_indices(grid, indices))
        return build.from_rows(cls._of, grid, indices, build.add_indices)

    @classmethod
    def from_csr(cls: type[Mask], matrix: Any) -> Mask:
        """Let queries see the keys at the nonzero elements of a sparse matrix.

        Parameters
        ----------
        matrix : sparse array or matrix, shape (Lq, Lk), or sequence of them
            Of `scipy.sparse` or `cupyx.scipy.sparse`. A pair is visible where its element is not 0:
            a stored 0 is hidden, and several stored elements of one pair are summed. Formats other
            than CSR are converted to it. A sequence of matrices of one shape gives a mask with a
            batch axis.

        Returns
        -------
        BitMask

        Raises
        ------
        TypeError, ValueError
            If `matrix` is not a sparse matrix, has indices outside of its shape, or is a sequence
            of matrices of several shapes.

        Examples
        --------
        >>> from scipy import sparse
        >>> from fa_cupy import BitMask
        >>> graph = sparse.random_array((500, 500), density=0.01, rng=0)
        >>> mask = BitMask.from_csr(graph)
        >>> (mask.to_csr() != (graph.tocsr() != 0)).nnz
        0
        """
        name = "BitMask.from_csr"
        batched = isinstance(matrix, Sequence) and not isinstance(matrix, (str, bytes))
        args = [f"matrix[{i}]" for i in range(len(matrix))] if batched else ["matrix"]
        if not args:
            raise ValueError(f"{name}: matrix has no elements, want at least one matrix")
        given = zip(args, matrix if batched else [matrix], strict=True)
        return cls._of_sparse(name, dict(given), batched)

    @classmethod
    def _of_sparse(
        cls: type[Mask], name: str, matrices: dict[str, Any], batched: bool = False
    ) -> Mask:
        """Return the mask of sparse matrices, which have the names of arguments of a function."""
        found = [inputs.as_csr(name, arg, x) for arg, x in matrices.items()]
        args, grid = [*matrices], Grid(*found[0].shape)
        for arg, csr in zip(args, found, strict=True):
            if csr.shape != grid:
                raise ValueError(
                    f"{name}: {arg} has shape {csr.shape}, {args[0]} has {tuple(grid)}"
                )

        entries = np.arange(len(found)) if batched else np.array(0)
        native = inputs.of_one_device(name, dict(zip(args, found, strict=True)))
        if native.backend == "cupy":
            on_device = backends.gpu("masks.build")
            with native.context:
                made = on_device.from_csr(grid, found)
                if isinstance(made, list):  # of few pairs, which are kept on the CPU
                    return cls._of(grid, made, entries, int(found[0].data.data.device_id))
                return cls._on_device(grid, made, entries)
        return cls._of(grid, [build.of_csr(grid, csr) for csr in found], entries)

    @classmethod
    def from_edges(cls: type[Mask], src: Any, dst: Any, n: int | tuple[int, int]) -> Mask:
        """Let each node of a graph see the nodes from which an edge leads to it.

        An edge from node ``src[e]`` to node ``dst[e]`` lets query ``dst[e]`` see key ``src[e]``: a
        node attends to those that send it messages. ``from_edges(*edge_index, n)`` takes the edges
        of PyTorch Geometric, ``from_edges(*graph.edges(), n)`` those of DGL.

        Parameters
        ----------
        src : array of int, shape (E,)
            The node where each edge begins: a key. In any order; an edge may be repeated.
        dst : array of int, shape (E,)
            The node where each edge ends: a query.
        n : int or (int, int)
            Number of nodes, or numbers of queries and keys of a graph with two kinds of nodes.

        Returns
        -------
        BitMask
            Of shape (n, n) or `n`. A node sees itself if it has an edge to itself. Arrays on a GPU
            are copied to the CPU, and the mask belongs to their device.

        Raises
        ------
        TypeError, ValueError
            If `src` and `dst` are not arrays of integers of one length, or have a node that is
            negative or not less than `n`.

        See Also
        --------
        BitMask.from_csr : the adjacency matrix of a graph, whose row i is query i.

        Examples
        --------
        >>> import numpy as np
        >>> from fa_cupy import BitMask
        >>> mask = BitMask.from_edges(np.array([0, 0, 3]), np.array([1, 2, 2]), 4)
        >>> mask.to_dense().astype(int)
        array([[0, 0, 0, 0],
               [1, 0, 0, 0],
               [1, 0, 0, 1],
               [0, 0, 0, 0]])
        """
        from scipy import sparse

        name = "BitMask.from_edges"
        grid = inputs.nodes(name, n)
        if dst is None:
            raise TypeError(f"{name}: dst is None, want an array")
        (src, dst), device = inputs.integers(name, src=src, dst=dst)
        for arg, nodes, count in (("src", src, grid.k_len), ("dst", dst, grid.q_len)):
            if nodes.shape != (src.size,):
                raise ValueError(f"{name}: {arg} has shape {nodes.shape}, want ({src.size},)")
            low, high = (int(nodes.min()), int(nodes.max())) if nodes.size else (0, -1)
            if low < 0 or high >= count:
                raise ValueError(
                    f"{name}: {arg} has nodes from {low} to {high}, want from 0 to {count - 1}"
                )
        places = (dst.astype(np.int64, copy=False), src.astype(np.int64, copy=False))
        edges = (np.ones(len(src), np.bool_), places)
        matrix = sparse.coo_array(edges, shape=grid).tocsr()
        matrix.sum_duplicates()
        return cls._of(grid, [build.of_csr(grid, matrix)], np.array(0), device)

    @classmethod
    def from_segments(cls: type[Mask], q_ids: Any, k_ids: Any = None) -> Mask:
        """Let queries see the keys of their segment, such as a document of a packed sequence.

        Parameters
        ----------
        q_ids : array of int, shape (..., Lq)
            The segment of each query: any integers, in any order. A query whose segment is
            negative, as of padding, sees no key.
        k_ids : array of int, shape (..., Lk), optional
            The segment of each key; those of the queries by default. No query sees a key whose
            segment is negative. Batch axes broadcast.

        Returns
        -------
        BitMask
            Of shape (..., Lq, Lk). Arrays on a GPU are copied to the CPU, and the mask belongs to
            their device.

        Raises
        ------
        TypeError, ValueError
            If `q_ids` or `k_ids` are not arrays of integers, or have batch axes that do not
            broadcast.

        Notes
        -----
        Only blocks of a query and a key of one segment are looked at, and blocks inside a segment
        are full. With segments of neighbouring positions the time is proportional to the length
        and to the number of these blocks.

        Examples
        --------
        >>> import numpy as np
        >>> from fa_cupy import BitMask
        >>> BitMask.from_segments(np.array([7, 7, 2, -1])).to_dense().astype(int)
        array([[1, 1, 0, 0],
               [1, 1, 0, 0],
               [0, 0, 1, 0],
               [0, 0, 0, 0]])
        """
        name = "BitMask.from_segments"
        (q_ids, k_ids), device = inputs.integers(name, q_ids=q_ids, k_ids=k_ids)
        others = q_ids if k_ids is None else k_ids
        grid = inputs.grid(name, "q_ids with k_ids", (q_ids.shape[-1], others.shape[-1]))
        try:
            batch = np.broadcast_shapes(q_ids.shape[:-1], others.shape[:-1])
        except ValueError:
            raise ValueError(
                f"{name}: q_ids has shape {q_ids.shape}, k_ids has {others.shape}, want batch axes "
                "that broadcast"
            ) from None
        given = [np.broadcast_to(x, (*batch, x.shape[-1])) for x in (q_ids, others)]
        own = [
            min(n, 1) if all(x.strides[axis] == 0 for x in given) else n
            for axis, n in enumerate(batch)
        ]
        matrices = [
            patterns.of_segments(grid, given[0][index], None if k_ids is None else given[1][index])
            for index in np.ndindex(*own)
        ]
        entries = np.broadcast_to(np.arange(len(matrices)).reshape(own), batch)
        return cls._of(grid, matrices, entries, device)

    @classmethod
    def from_window(cls: type[Mask], shape: int | Sequence[int], window: Any) -> Mask:
        """Let each element of a sequence, an image or a volume see those nearby.

        Parameters
        ----------
        shape : int or sequence of int
            Shape of an array of elements, such as (height, width). Element i of the array in C
            order (that of ``array.reshape(-1)``) is query i and key i.
        window : int, None, or sequence
            How many elements before and after its own an element sees along each axis, as the
            `window` of `fa_cupy.attention` and the radius of a filter of `scipy.ndimage`, whose
            size is ``2 * window + 1``. An int for all axes, or one element for each axis: an int,
            or a pair (before, after). None sets no limit. For one axis, a pair is enough. An
            element sees another if it does so along every axis.

        Returns
        -------
        BitMask
            Of shape (L, L) for L elements, on the CPU.

        Raises
        ------
        TypeError, ValueError
            If `shape` or `window` is something else, or for 2**31 elements or more.

        Notes
        -----
        Windows end at the edges of the array. The time is proportional to the number of blocks that
        are not empty. The bits of equal blocks are made once: it is fastest if the elements of
        ``array[0]`` are a multiple of 128 or few.

        Examples
        --------
        >>> import numpy as np
        >>> from fa_cupy import BitMask
        >>> near = BitMask.from_window((5, 6), 1)  # an image of 5 x 6 pixels
        >>> near.to_dense()[8].reshape(5, 6).astype(int)  # what pixel (1, 2) sees
        array([[0, 1, 1, 1, 0, 0],
               [0, 1, 1, 1, 0, 0],
               [0, 1, 1, 1, 0, 0],
               [0, 0, 0, 0, 0, 0],
               [0, 0, 0, 0, 0, 0]])
        >>> BitMask.from_window((5, 6), [(1, 0), None]).to_dense()[8].reshape(5, 6).astype(int)
        array([[1, 1, 1, 1, 1, 1],
               [1, 1, 1, 1, 1, 1],
               [0, 0, 0, 0, 0, 0],
               [0, 0, 0, 0, 0, 0],
               [0, 0, 0, 0, 0, 0]])
        """
        name = "BitMask.from_window"
        sizes = inputs.sizes(name, shape)
        reach = inputs.reach(name, sizes, window)
        length = math.prod(sizes)
        if length >= blocks.LONGEST:
            shown = checks.show(shape)
            raise ValueError(f"{name}: shape is {shown}, want fewer than 2**31 elements")
        grid = inputs.grid(name, "shape", (length, length))
        return cls._of(grid, [patterns.of_window(sizes, reach)], np.array(0))

    @classmethod
    def from_blocks(
        cls: type[Mask], states: Any, q_len: int, k_len: int, words: Any = None
    ) -> Mask:
        """Show and hide blocks of 128 queries and 128 keys, as a whole or in part.

        Parameters
        ----------
        states : array, shape (..., ceil(q_len / 128), ceil(k_len / 128))
            An array of bool, True for a full block; or of integers: ``BitMask.EMPTY`` (0),
            ``BitMask.PARTIAL`` (1) or ``BitMask.FULL`` (2).
        q_len, k_len : int
            Numbers of queries and keys. The last blocks may reach beyond them.
        words : array of uint32, shape (n, 8, 32, 2), optional
            Words of the n partial blocks, in C order of `states`, each block in the fragment order
            of `fa_cupy.layouts` (`fa_cupy.layouts.pack` makes it). Bits beyond the lengths are
            ignored.

        Returns
        -------
        BitMask

        Raises
        ------
        TypeError, ValueError
            For other shapes, dtypes or states, and for partial blocks without words.

        Examples
        --------
        >>> import numpy as np
        >>> from fa_cupy import BitMask
        >>> board = np.indices((4, 4)).sum(0) % 2 == 0
        >>> BitMask.from_blocks(board, 500, 500)
        <BitMask (500, 500): 8 full and 0 partial blocks of 16, 0.1 kB>
        """
        name = "BitMask.from_blocks"
        native = inputs.native(name, states=states, words=words)
        states, words = native.arrays
        grid = Grid(inputs.length(name, "q_len", q_len), inputs.length(name, "k_len", k_len))
        wanted = (grid.q_tiles, grid.k_tiles)
        if states.shape[-2:] != wanted:
            raise ValueError(
                f"{name}: states has shape {states.shape}, want (..., {wanted[0]}, {wanted[1]}) "
                f"for {grid.q_len} queries and {grid.k_len} keys"
            )
        full_value = True if states.dtype == np.bool_ else FULL
        with native.context:
            inputs.check_states(name, "states", states)
            count = 0 if full_value is True else int((states == PARTIAL).sum())
            inputs.check_words(name, words, count)
            if native.backend == "cupy":
                on_device = backends.gpu("masks.build")
                return cls._on_device(grid, *on_device.from_blocks(grid, states, words))
        words = np.empty((0, *WORDS), np.uint32) if words is None else words
        batch, matrices, first = states.shape[:-2], [], 0
        for index in np.ndindex(batch):
            matrix = states[index].reshape(-1)
            partial = np.flatnonzero(matrix == PARTIAL) if count else np.empty(0, np.int64)
            own = words[first : first + len(partial)].copy()
            first += len(partial)
            full = np.flatnonzero(matrix == full_value)
            matrices.append(blocks.tightened(grid, partial, own, full))
        return cls._of(grid, matrices, np.arange(len(matrices)).reshape(batch))

    @classmethod
    def from_function(
        cls: type[Mask],
        function: Callable[..., Any],
        shape: Sequence[int],
        block_states: Callable[..., Any] | None = None,
    ) -> Mask:
        """Let queries see the keys for which a function is True, called block by block on the CPU.

        Parameters
        ----------
        function : callable
            ``function(*batch, q, k)`` returns an array of bool for a row of blocks. `batch` are the
            indices of the batch entry as ints, `q` is an array of query indices of shape (m, 1),
            and `k` an array of key indices of shape (1, n). The result broadcasts to (m, n).
        shape : sequence of int
            Shape of the mask: (..., Lq, Lk). A batch axis of size 1 broadcasts in `attention`.
        block_states : callable, optional
            ``block_states(*batch, q_begin, q_end, k_begin, k_end)`` is called first, once for each
            row of blocks: `q_begin` and `q_end` are ints, `k_begin` and `k_end` arrays with an int
            for each block; ends are not included. It returns an array with ``BitMask.EMPTY``,
            ``BitMask.PARTIAL`` or ``BitMask.FULL`` for each block, and `function` is called for the
            partial ones only. Without `block_states` it is called for all blocks.

        Returns
        -------
        BitMask

        Raises
        ------
        TypeError, ValueError
            For other shapes, and if a function returns another shape, dtype or state.

        Examples
        --------
        A causal mask, for which `function` is called on the diagonal only:

        >>> import numpy as np
        >>> from fa_cupy import BitMask
        >>> def states(q_begin, q_end, k_begin, k_end):
        ...     full = np.where(k_end - 1 <= q_begin, BitMask.FULL, BitMask.PARTIAL)
        ...     return np.where(k_begin >= q_end, BitMask.EMPTY, full)
        >>> BitMask.from_function(lambda q, k: k <= q, (100_000, 100_000), states)
        <BitMask (100000, 100000): 305371 full and 782 partial blocks of 611524, 2.8 MB>
        """
        name = "BitMask.from_function"
        inputs.check_callable(name, "function", function, "a callable")
        if block_states is not None:
            inputs.check_callable(name, "block_states", block_states, "None or a callable")
        lengths = inputs.lengths(name, shape)
        batch, grid = lengths[:-2], Grid(*lengths[-2:])
        broadcasting.check_batch_axes(name, "shape", len(batch))
        matrices = [
            build.of_function(name, grid, function, block_states, index)
            for index in np.ndindex(*batch)
        ]
        return cls._of(grid, matrices, np.arange(len(matrices)).reshape(batch))
