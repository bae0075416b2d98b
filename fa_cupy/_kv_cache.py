"""A cache of keys and values, to which a decoder appends tokens."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fa_cupy._attention import attention
from fa_cupy._bitmask import BitMask
from fa_cupy.core import checks
from fa_cupy.core.arrays import overlap
from fa_cupy.core.attention_problem import dtype_of
from fa_cupy.keys.gathered import as_integers
from fa_cupy.keys.layout import PAGE_MULTIPLE

_LIBRARIES = ("numpy", "cupy")
_TOO_MANY = 1 << 62  # bytes
# Arguments of attention that a cache does not take, and why.
_REFUSED = {
    **dict.fromkeys(("k", "v", "k_lengths", "page_table"), "the cache has its own"),
    **dict.fromkeys(("q_offsets", "k_offsets"), "a cache has no packed sequences"),
}


class _Change(NamedTuple):
    """What an append does to the pages of sequences."""

    table: npt.NDArray[Any]  # of all sequences
    uses: npt.NDArray[Any]  # of all pages
    taken: int  # pages from the end of the list of free ones
    copied: list[tuple[int, int]]  # (from, to)


class KVCache:
    """Keys and values of several sequences, to which tokens are appended.

    Memory for all tokens is allocated once. A contiguous cache has room for `max_length` tokens of
    each sequence. In a cache with pages, a sequence takes pages as it grows, and sequences share
    pages after `fork`.

    Parameters
    ----------
    heads : int
        Of keys and values; those of the queries may be a multiple, or 1.
    head_dim : int
        Length of the last axis of keys.
    v_dim : int, optional
        Length of the last axis of values; `head_dim` by default.
    sequences : int
        How many sequences there can be. They have the numbers 0 to ``sequences - 1`` and are empty
        at first.
    max_length : int
        The most tokens of a sequence.
    page_size : int, optional
        Tokens of a page, a multiple of 16. None for contiguous sequences.
    pages : int, optional
        How many pages there are; only with `page_size`. By default enough for all sequences to
        have `max_length` tokens.
    dtype : numpy.dtype
        float16, bfloat16 (`ml_dtypes.bfloat16`), float32 or float64.
    xp : module
        `numpy`, or `cupy` for a cache in the memory of CuPy's current device, which must be the
        current one in all calls of methods too.

    Attributes
    ----------
    k : array, shape (sequences, heads, k_len, head_dim) or (pages, heads, page_size, head_dim)
    v : array
        With `v_dim` in place of `head_dim`.
    k_len : int
        `max_length`, rounded up to a multiple of 16 or of `page_size`. A bias or a mask has so many
        columns.
    k_lengths : array of int32, shape (sequences,)
        The tokens of each sequence, in the memory of the device.
    page_table : array of int32, shape (sequences, pages_per_sequence), or None
        The pages of each sequence, in the memory of the device. Numbers after the last page of a
        sequence have no meaning.
    page_size, max_length : int

    Raises
    ------
    TypeError, ValueError
        By all methods, with a message that names the argument, before anything is written.

    See Also
    --------
    attention : takes `k_lengths` and `page_table`.

    Notes
    -----
    `k`, `v`, `k_lengths` and `page_table` stay where they are in memory, so that a CUDA graph that
    was captured from a call with them works on what the cache holds when it runs. `attention` with
    `sequences` that do not follow each other cannot be captured, because their numbers are copied
    from the host. Do not write to these arrays. A cache must not be used by several threads at the
    same time.

    On a GPU, kernels read keys and values of float16 and bfloat16 where they are. In float32 and
    float64, every call copies pages to where their rows follow each other.

    Examples
    --------
    >>> import numpy as np
    >>> from fa_cupy import KVCache
    >>> rng = np.random.default_rng(0)
    >>> cache = KVCache(2, 8, sequences=3, max_length=100, page_size=16, dtype=np.float64)
    >>> prompt = rng.standard_normal((3, 2, 20, 8))
    >>> cache.append(prompt, prompt)
    >>> token = rng.standard_normal((1, 2, 1, 8))
    >>> cache.append(token, token, sequences=[1])
    >>> cache.lengths
    array([20, 21, 20])

    Four heads of queries for the last token of each sequence:

    >>> q = rng.standard_normal((3, 4, 1, 8))
    >>> cache.attention(q, is_causal=True).shape
    (3, 4, 1, 8)

    A copy of a sequence takes no memory until it differs:

    >>> cache.free(2)
    >>> cache.free_pages, cache.fork(1), cache.free_pages
    (17, 2, 17)
    """

    def __init__(
        self,
        heads: int,
        head_dim: int,
        v_dim: int | None = None,
        *,
        sequences: int,
        max_length: int,
        page_size: int | None = None,
        pages: int | None = None,
        dtype: Any = np.float32,
        xp: Any = np,
    ) -> None:
        name = "KVCache"
        if getattr(xp, "__name__", None) not in _LIBRARIES:
            raise TypeError(f"{name}: xp is {checks.show(xp)}, want the module numpy or cupy")
        self._dtype = dtype_of(name, dtype)
        heads = _positive(name, "heads", heads)
        dims = [
            _positive(name, arg, dim)
            for arg, dim in (
                ("head_dim", head_dim),
                ("v_dim", head_dim if v_dim is None else v_dim),
            )
        ]
        count = _positive(name, "sequences", sequences)
        self.max_length = _positive(name, "max_length", max_length)
        self.page_size = None if page_size is None else _positive(name, "page_size", page_size)
        # Of contiguous sequences, each is one page where a call is for some of them.
        multiple = PAGE_MULTIPLE if self.page_size is None else self.page_size
        if self.page_size is None and pages is not None:
            raise ValueError(
                f"{name}: pages is {checks.show(pages)} without page_size, want both or neither"
            )
        if multiple % PAGE_MULTIPLE:
            raise ValueError(
                f"{name}: page_size is {page_size}, want a multiple of {PAGE_MULTIPLE}"
            )
        per_sequence = -(-self.max_length // multiple)
        self.k_len = per_sequence * multiple
        places, rows = count, self.page_size or self.k_len
        if self.page_size is not None:
            places = count * per_sequence if pages is None else _positive(name, "pages", pages)
        _check_size(
            name, places * heads * rows * max(dims) * self._dtype.itemsize, count * per_sequence
        )
        kind = f"u{self._dtype.itemsize}"  # CuPy does not fill arrays of bfloat16
        self.k, self.v = (
            xp.zeros((places, heads, rows, dim), kind).view(self._dtype) for dim in dims
        )
        self._lengths = np.zeros(count, np.int64)
        self.k_lengths = xp.zeros(count, np.int32)
        self.page_table = None
        if self.page_size is not None:
            self._table = np.zeros((count, per_sequence), np.int32)
            self.page_table = xp.zeros(self._table.shape, np.int32)
            self._uses = np.zeros(places, np.int64)  # sequences that have each page
            self._free = [*range(places)][::-1]

    @property
    def _xp(self) -> Any:
        # Not an attribute: a module can be neither copied nor pickled.
        return sys.modules[type(self.k).__module__.partition(".")[0]]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """The number of tokens of each sequence, as a new NumPy array."""
        return self._lengths.copy()

    @property
    def free_pages(self) -> int | None:
        """The number of pages that no sequence has; None for contiguous sequences."""
        return None if self.page_size is None else len(self._free)

    def __repr__(self) -> str:
        """Return the sizes of the cache, and how much of it is in use."""
        _, heads, _, head_dim = self.k.shape
        pages = "" if self.page_size is None else f", {self.free_pages} of {len(self.k)} pages free"
        return (
            f"<KVCache: {len(self._lengths)} sequences of up to {self.max_length} tokens, "
            f"{heads} heads of {head_dim}, {self._dtype.name}, {self._lengths.sum()} tokens{pages}>"
        )

    def append(self, k: Any, v: Any, sequences: Any = None) -> None:
        """Append tokens to sequences, as many to each of them.

        Parameters
        ----------
        k : array, shape (n, heads, tokens, head_dim)
            Of the library and the dtype of the cache.
        v : array, shape (n, heads, tokens, v_dim)
            As `k`.
        sequences : int or sequence of int, optional
            The n sequences, each of them once. All of them by default.

        Raises
        ------
        TypeError, ValueError
            For arrays that do not match the cache or overlap it in memory; also if a sequence would
            have more than `max_length` tokens, or there are too few free pages. The cache is then
            as before.
        """
        name = "KVCache.append"
        numbers = self._numbers(name, sequences)
        if len(np.unique(numbers)) < len(numbers):
            values, counts = np.unique(numbers, return_counts=True)
            twice = values[counts > 1][0]
            raise ValueError(f"{name}: sequences has {twice} more than once, want each once")
        for arg, x, like in (("k", k, self.k), ("v", v, self.v)):
            self._check(name, arg, x, (len(numbers), like.shape[1], None, like.shape[3]))
            if overlap(x, self.k) or overlap(x, self.v):
                raise ValueError(f"{name}: {arg} overlaps the cache in memory, want a copy")
        tokens = k.shape[2]
        if v.shape[2] != tokens:
            raise ValueError(f"{name}: v has {v.shape[2]} tokens, k has {tokens}")
        begin = self._lengths[numbers]
        for number, length in zip(numbers, begin, strict=True):
            if length + tokens > self.max_length:
                raise ValueError(
                    f"{name}: k has {tokens} tokens, want at most {self.max_length - length}: "
                    f"sequence {number} has {length} tokens, and max_length is {self.max_length}"
                )
        if not tokens or not len(numbers):
            return
        rows = begin[:, None] + np.arange(tokens)
        places, change = np.broadcast_to(numbers[:, None], rows.shape), None
        if self.page_size is not None:
            change = self._change(name, numbers, begin, begin + tokens)
            self._copy_pages(change.copied)
            pages, rows = np.divmod(rows, self.page_size)
            places = change.table[places, pages]
        self._write(places, rows, k, v)
        if change is not None:
            self._table, self._uses = change.table, change.uses
            del self._free[len(self._free) - change.taken :]
        self._lengths[numbers] += tokens
        self._show(pages=change is not None and change.taken > 0)

    def attention(self, q: Any, sequences: Any = None, **options: Any) -> Any:
        """Attention of queries to all tokens of their sequences.

        Parameters
        ----------
        q : array, shape (n, q_heads, Lq, head_dim)
            `q_heads` is a multiple of the heads of the cache. A single head is broadcast: it meets
            all heads of the cache, and results have as many.
        sequences : int or sequence of int, optional
            The n sequences. All of them by default.
        **options
            Those of `fa_cupy.attention`, but for `k_lengths`, `page_table` and offsets. `bias` and
            `mask` are arrays whose last axis has length `k_len` or 1, not a sparse matrix or a
            `BitMask`. `causal_align` is "bottom_right" by default: the last query stands at the
            last token.

        Returns
        -------
        out : array, shape (n, q_heads, Lq, v_dim)
            With the heads of the cache if `q` has one.
        lse : array, shape (n, q_heads, Lq)
            Likewise; only with ``return_lse=True``.

        Raises
        ------
        TypeError, ValueError
            For a `q` that does not match the cache, numbers of sequences out of range, and as
            `fa_cupy.attention` does.
        """
        name = "KVCache.attention"
        numbers = self._numbers(name, sequences)
        self._check(name, "q", q, (len(numbers), None, None, self.k.shape[3]))
        q_heads, heads = q.shape[1], self.k.shape[1]
        if q_heads % heads and q_heads != 1:
            raise ValueError(f"{name}: q has {q_heads} heads, want a multiple of {heads}, or 1")
        _check_options(name, options)
        options.setdefault("causal_align", "bottom_right")
        k, v, lengths, table = self.k, self.v, self.k_lengths, self.page_table
        if sequences is not None:
            index: Any = _as_slice(numbers)
            if index is None:
                index = self._xp.asarray(numbers)
            lengths = lengths[index]
            if table is not None:
                table = table[index]
            elif isinstance(index, slice):
                k, v = k[index], v[index]
            else:  # each sequence is a page
                table = index[:, None]
        return attention(q, k, v, k_lengths=lengths, page_table=table, **options)

    def fork(self, sequence: int, to: int | None = None) -> int:
        """Make an empty sequence one with the same tokens, and return its number.

        Pages are shared until one of the sequences appends to a page that is not full: it then gets
        a copy of its own. Contiguous sequences are copied.

        Parameters
        ----------
        sequence : int
            The sequence whose tokens are wanted.
        to : int, optional
            An empty sequence; the first one by default.

        Returns
        -------
        int
            The number of the sequence that was empty.

        Raises
        ------
        TypeError, ValueError
            If a number is out of range, `to` is not empty, or no sequence is.
        """
        name = "KVCache.fork"
        sequence = self._number(name, "sequence", sequence)
        if to is None:
            empty = [i for i in np.flatnonzero(self._lengths == 0) if i != sequence]
            if not empty:
                raise ValueError(f"{name}: no sequence is empty, want one (free it)")
            to = int(empty[0])
        to = self._number(name, "to", to)
        if to == sequence or self._lengths[to]:
            raise ValueError(
                f"{name}: to is {to}, which has {self._lengths[to]} tokens, want another sequence "
                "that is empty"
            )
        length = int(self._lengths[sequence])
        if self.page_size is None:
            for x in map(as_integers, (self.k, self.v)):
                x[to, :, :length] = x[sequence, :, :length]
        else:
            self._table[to] = self._table[sequence]
            self._uses[self._table[to, : self._pages_of(length)]] += 1
        self._lengths[to] = length
        self._show(pages=True)
        return to

    def free(self, sequence: int) -> None:
        """Make a sequence empty, and free the pages that no other sequence has.

        Parameters
        ----------
        sequence : int

        Raises
        ------
        TypeError, ValueError
            If the number is out of range.
        """
        sequence = self._number("KVCache.free", "sequence", sequence)
        if self.page_size is not None:
            pages = self._table[sequence, : self._pages_of(int(self._lengths[sequence]))]
            self._uses[pages] -= 1
            self._free += [int(page) for page in pages[::-1] if not self._uses[page]]
        self._lengths[sequence] = 0
        self._show(pages=False)

    def _change(self, name: str, numbers: Any, begin: Any, end: Any) -> _Change:
        """Return what is to be done before tokens begin to end of sequences are written."""
        assert self.page_size is not None
        wanted: list[tuple[int, int]] = []  # the sequences and which of their pages are new
        left: Counter[int] = Counter()  # sequences that will not have a page any more
        for number, first, last in zip(numbers, begin, end, strict=True):
            full, used = divmod(int(first), self.page_size)
            page = int(self._table[number, full]) if used else 0
            if used and self._uses[page] - left[page] > 1:
                left[page] += 1
                wanted.append((number, full))
            wanted += [(number, i) for i in range(self._pages_of(first), self._pages_of(last))]
        if len(wanted) > len(self._free):
            raise ValueError(
                f"{name}: {len(wanted)} pages are wanted, and {len(self._free)} of "
                f"{len(self._uses)} are free"
            )
        if not wanted:
            return _Change(self._table, self._uses, 0, [])
        table, uses = self._table.copy(), self._uses.copy()
        for page, count in left.items():
            uses[page] -= count
        copied = []
        for (number, i), page in zip(wanted, self._free[::-1], strict=False):
            if i < self._pages_of(self._lengths[number]):
                copied.append((int(table[number, i]), page))
            table[number, i], uses[page] = page, 1
        return _Change(table, uses, len(wanted), copied)

    def _copy_pages(self, copied: list[tuple[int, int]]) -> None:
        """Copy pages to others."""
        if copied:
            source, target = (self._xp.asarray(x) for x in np.array(copied).T)
            for x in map(as_integers, (self.k, self.v)):
                x[target] = x[source]

    def _write(self, places: Any, rows: Any, k: Any, v: Any) -> None:
        """Write tokens to these pages (n, tokens) and rows of them."""
        at = self._xp.asarray(places), slice(None), self._xp.asarray(rows)
        for x, new in ((self.k, k), (self.v, v)):
            as_integers(x)[at] = as_integers(new).swapaxes(1, 2)

    def _show(self, pages: bool) -> None:
        """Bring lengths, and pages if they have changed, up to date in the arrays of the device."""
        self.k_lengths[...] = self._xp.asarray(self._lengths.astype(np.int32))
        if pages and self.page_table is not None:
            self.page_table[...] = self._xp.asarray(self._table)

    def _pages_of(self, length: int) -> int:
        assert self.page_size is not None
        return -(-int(length) // self.page_size)

    def _number(self, name: str, arg: str, value: Any, more: str = "") -> int:
        count = len(self._lengths)
        wanted = f"an int from 0 to {count - 1}{more}"
        return checks.whole(name, arg, value, wanted, range(count))

    def _numbers(self, name: str, sequences: Any) -> npt.NDArray[np.int64]:
        """Return numbers of sequences as an array, checked."""
        if sequences is None:
            return np.arange(len(self._lengths))
        several = isinstance(sequences, Sequence) and not isinstance(sequences, (str, bytes))
        if not several and not (isinstance(sequences, np.ndarray) and sequences.ndim):
            return np.array([self._number(name, "sequences", sequences, " or a sequence of them")])
        values = [self._number(name, f"sequences[{i}]", x) for i, x in enumerate(sequences)]
        return np.array(values, np.int64)

    def _check(self, name: str, arg: str, x: Any, shape: tuple[int | None, ...]) -> None:
        """Raise unless `x` is an array of the cache's library and dtype, and of a shape."""
        if not isinstance(x, self._xp.ndarray) or isinstance(x, np.ma.MaskedArray):
            wanted = f"{self._xp.__name__}.ndarray"
            raise TypeError(f"{name}: {arg} is a {type(x).__name__}, want a {wanted}")
        if x.dtype != self._dtype:
            raise TypeError(f"{name}: {arg} has dtype {x.dtype}, the cache has {self._dtype}")
        if len(x.shape) != len(shape) or any(
            want not in (None, n) for n, want in zip(x.shape, shape, strict=True)
        ):
            axes = ["any" if n is None else str(n) for n in shape]
            raise ValueError(f"{name}: {arg} has shape {x.shape}, want ({', '.join(axes)})")


def _positive(name: str, arg: str, value: Any) -> int:
    number = checks.whole(name, arg, value, "an int >= 1")
    if number < 1:
        raise ValueError(f"{name}: {arg} is {checks.show(value)}, want an int >= 1")
    return number


def _check_size(name: str, size: int, entries: int) -> None:
    """Raise for arrays of so many bytes, or a table of so many pages, that no machine has."""
    most = max(size, 4 * entries)
    if most >= _TOO_MANY:
        raise ValueError(f"{name}: arrays of {most} bytes are asked for, want below 2**62")


def _check_options(name: str, options: dict[str, Any]) -> None:
    """Raise for options of attention that a cache has itself, or that its lengths do not allow."""
    for arg in options:
        if arg in _REFUSED:
            raise TypeError(f"{name}: {arg} is given, want it left out ({_REFUSED[arg]})")
    for arg in ("bias", "mask"):
        x = options.get(arg)
        if isinstance(x, BitMask) or checks.is_sparse(x):
            kind = "BitMask" if isinstance(x, BitMask) else "sparse matrix"
            raise TypeError(f"{name}: {arg} is a {kind}, want an array")


def _as_slice(numbers: npt.NDArray[np.int64]) -> slice | None:
    """Return numbers that follow each other as a slice."""
    if len(numbers) and (np.diff(numbers) == 1).all():
        return slice(int(numbers[0]), int(numbers[-1]) + 1)
    return None
