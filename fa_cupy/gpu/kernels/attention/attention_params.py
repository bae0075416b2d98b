"""The parameters that all attention kernels share, and what follows from a problem for them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from fa_cupy.core.attention_problem import FLOAT_DTYPES, Problem, View, sum_dtype
from fa_cupy.dropout.arguments import Dropout
from fa_cupy.gpu.kernels.score import (
    MAX_SCORE_ARRAYS,
    SCORE_ARRAY,
    SCORE_FIELDS,
    fill_score,
    score_mod_of,
    score_pointers,
)

MAX_BATCH_AXES = 6
MAX_GRID = 2**31 - 1
#: Query and key indices are 32-bit inside a kernel; a tile may reach past the end.
MAX_LENGTH = 2**31 - 2**16
_INT32 = 2**31 - 1
_L2_BYTES = 32 << 20  # what keys and values can count on of an H200's 50 MiB

#: The arrays a launch points to, in the order of the struct. With sinks, they follow.
POINTERS = ("q", "k", "v", "bias", "out", "lse")
_OPERANDS = ("q", "k", "v", "out", "bias")
_ROWS = ("q", "k", "v", "out")
#: Rows and columns of a block of a mask.
MASK_BLOCK = 128

#: The same fields in the same order as ``struct MaskLists`` in ``cuda_src/common/block_lists.cuh``:
#: addresses, and a number. All 0 is no mask.
MASK_LISTS = np.dtype(
    [(name, np.uint64) for name in ("partial_begin", "partial_end", "partial", "words")]
    + [(name, np.uint64) for name in ("full_begin", "full_end", "full", "matrix_of_entry", "order")]
    + [("words_by_block", np.int64)],
    align=True,
)

# The same fields in the same order as ``struct AttentionParams`` in
# ``cuda_src/common/attention_params.cuh``, which checks the size when it is compiled.
_FIELDS: list[Any] = (
    [(name, np.uint64) for name in POINTERS]
    + [("first_batch", np.int64), ("aligned", np.int32), ("batch_axes", np.int32)]
    + [("mask", MASK_LISTS), ("bias_row", np.int64), ("bias_col", np.int64)]
    + [(f"{name}_batch", np.int64, (MAX_BATCH_AXES,)) for name in _OPERANDS]
    + [("batch_size", np.int64, (MAX_BATCH_AXES,))]
    + [(f"{name}_row", np.int32) for name in _ROWS]
    + [(name, np.int32) for name in ("q_len", "k_len", "head_dim", "v_dim", "q_tiles")]
    + [(name, np.int32) for name in ("lower", "upper", "bias_pairs")]
    + SCORE_FIELDS
    + [("sinks", np.uint64), ("sinks_batch", np.int64, (MAX_BATCH_AXES,))]
    + [("sinks_row", np.int64), ("sinks_kind", np.int32), ("score_heads", np.int32)]
    + [("score_arrays", SCORE_ARRAY, (MAX_SCORE_ARRAYS,))]
)
ATTENTION_PARAMS = np.dtype(_FIELDS, align=True)

#: The same fields in the same order as ``struct DropoutParams`` in ``cuda_src/common/dropout.cuh``.
DROPOUT_PARAMS = np.dtype(
    [
        ("seed_data", np.uint64),
        ("seed", np.uint64),
        ("first_entry", np.int64),
        ("threshold", np.uint32, (8,)),
        ("lower_threshold", np.uint32),
        ("factor", np.float32),
        ("inverse_factor", np.float32),
        ("heads", np.int32),
        ("sequences", np.int32),
        ("sequence", np.int32),
        ("places", np.uint64),
    ],
    align=True,
)
#: Of builds with dropout.
PARAMS_WITH_DROPOUT = np.dtype([*_FIELDS, ("dropout", DROPOUT_PARAMS)], align=True)
#: The parts of a mask, whose addresses calls with one give after those of the arrays.
MASK_PARTS = tuple(f"mask.{name}" for name in MASK_LISTS.names or ())


class MaskPointers(NamedTuple):
    """The addresses of a mask's lists, in the order of `MASK_LISTS`.

    Attributes
    ----------
    partial_begin, partial_end, partial, words, full_begin, full_end, full : int
        Addresses of the lists.
    matrix_of_entry : int
        Address of the matrix of each batch entry of the call, int32.
    order : int
        Address of the order in which rows of blocks are taken, int32; 0 for the usual one.
    words_by_block : int
        0 if the words are stored in the order of `partial`. Otherwise the number of blocks for
        which each row has room in `words`: block ``c`` of row ``t`` has words number
        ``t * words_by_block + c``.
    """

    partial_begin: int
    partial_end: int
    partial: int
    words: int
    full_begin: int
    full_end: int
    full: int
    matrix_of_entry: int
    order: int = 0
    words_by_block: int = 0


class Part(NamedTuple):
    """One launch of a problem.

    Attributes
    ----------
    offsets : tuple of int
        Bytes from `Traits.pointers` to the arrays of its entry 0.
    first_batch, blocks : int
        The entry of its first block, how many blocks there are.
    entry : int
        Its entry 0, counted over all batch entries of the problem.
    """

    offsets: tuple[int, ...]
    first_batch: int
    blocks: int
    entry: int = 0


def merge_axes(
    batch: tuple[int, ...], views: dict[str, View]
) -> tuple[list[int], dict[str, list[int]]]:
    """Merge neighbouring batch axes that every view walks as one.

    Parameters
    ----------
    batch : tuple of int
    views : dict of View
        Views over `batch`; their last two axes are left alone.

    Returns
    -------
    sizes : list of int
        The batch axes that are left, none of them 1.
    strides : dict of list of int
        Bytes along each of them, for each view.
    """
    sizes: list[int] = []
    strides: dict[str, list[int]] = {name: [] for name in views}
    for axis, size in enumerate(batch):
        if size == 1:
            continue
        here = {name: view.strides[axis] for name, view in views.items()}
        if sizes and all(strides[name][-1] == here[name] * size for name in views):
            sizes[-1] *= size
            for name in views:
                strides[name][-1] = here[name]
        else:
            sizes.append(size)
            for name in views:
                strides[name].append(here[name])
    return sizes, strides


def band_limits(problem: Problem) -> tuple[int, int]:
    """Return ``lower`` and ``upper`` of a problem, as a kernel's 32 bits hold them."""
    lower = -_INT32 if problem.lower is None else _clip(problem.lower)
    upper = _INT32 if problem.upper is None else _clip(problem.upper)
    return lower, upper


class Traits:
    """What follows from a forward problem and its output for the launches, derived once.

    Parameters
    ----------
    problem : Problem
        With sizes and row strides that fit 32 bits.
    out : View
        Of the output, over ``problem.batch``.

    Attributes
    ----------
    views : dict of View
        Of q, k, v and out, and of the bias and the sinks if there are any.
    item : dict of int
        Bytes of an element of each.
    sizes, strides : list of int, dict of list of int
        The batch axes that all of them walk, merged, and the bytes along each; see `merge_axes`.
    mapped_sizes, mapped_strides : list of int, dict of list of int
        The same of q, k, v and out, which may be walked by tensor maps, and of `key_views`.
    key_views : dict of View
        Of the arrays that say where keys are, if there are any: ``k_lengths``, ``page_table``.
    score : ScoreMod or None
        What kernels compute besides products times a positive scale.
    pointers : tuple of str
        The arrays that launches point to: `POINTERS`, and the sinks if there are any; the seed of
        dropout follows.
    """

    def __init__(self, problem: Problem, out: View) -> None:
        self.problem, self.out = problem, out
        self.views = {"q": problem.q, "k": problem.k, "v": problem.v, "out": out}
        self.item = dict.fromkeys(self.views, problem.dtype.itemsize)
        self.key_views: dict[str, View] = {}
        if problem.k_lengths is not None and problem.k_lengths_dtype is not None:
            self.key_views["k_lengths"] = problem.k_lengths
            self.item["k_lengths"] = problem.k_lengths_dtype.itemsize
        if problem.pages is not None:
            self.key_views["page_table"] = problem.pages.table
            self.item["page_table"] = problem.pages.dtype.itemsize
        # Entries of the same keys may have different numbers of them, or different pages.
        walked = {**self.views, **self.key_views}
        self.mapped_sizes, self.mapped_strides = merge_axes(problem.batch, walked)
        self.sizes, self.strides = self.mapped_sizes, self.mapped_strides
        if problem.bias is not None and problem.bias_dtype is not None:
            self.views["bias"], self.item["bias"] = problem.bias, problem.bias_dtype.itemsize
        if problem.sinks is not None and problem.sinks_dtype is not None:
            self.views["sinks"], self.item["sinks"] = problem.sinks, problem.sinks_dtype.itemsize
        if len(self.views) > len(_ROWS):
            self.sizes, self.strides = merge_axes(problem.batch, {**self.views, **self.key_views})
        #: How they lie in memory, for the fields ``<name>_bytes`` and ``<name>_batch`` of a struct,
        #: and where pages are, for those of their names.
        self.key_fields: dict[str, Any] = {}
        for name in self.key_views:
            item, steps = self.item[name], self.strides[name]
            own = [*[step // item for step in steps], *[0] * (MAX_BATCH_AXES - len(steps))]
            self.key_fields |= {f"{name}_bytes": item, f"{name}_batch": own}
        if (pages := problem.pages) is not None:
            item, size = problem.dtype.itemsize, pages.size
            self.key_fields |= {
                "page_size": size,
                "page_shift": size.bit_length() - 1 if size & (size - 1) == 0 else -1,
                "pages": pages.count,
                "page_table_col": pages.table.strides[-1] // self.item["page_table"],
                "k_page": pages.k_stride // item,
                "v_page": pages.v_stride // item,
            }
        self.score = score_mod_of(problem)
        score_arrays = {} if problem.score is None else score_pointers(problem)
        sinks = () if problem.sinks is None else ("sinks",)
        self.pointers = (*POINTERS, *sinks, *score_arrays.values())
        #: The field of ``AttentionParams`` that points to each.
        self.fields = {name: name for name in self.pointers if name not in score_arrays.values()}
        self.fields |= score_arrays
        if problem.dropout is not None:  # an address, or a number in place of it
            self.pointers += ("seed",)
            self.fields[problem.dropout.field] = "seed"

    def aligned(self, names: tuple[str, ...] = _ROWS) -> tuple[str, ...]:
        """Return the names of arrays whose rows begin at multiples of 16 bytes if the arrays do.

        None of them, if that does not hold for all.
        """
        bits = 0
        for name in names:
            for step in (*self.strides[name], self.views[name].strides[-2]):
                bits |= step
        return () if bits & 15 else names

    def query_tiles(self, tile_m: int) -> int:
        """Return the tiles of queries of a batch entry; with a mask, of whole blocks of rows."""
        block = tile_m if self.problem.mask is None else MASK_BLOCK
        return -(-self.problem.q_len // block) * (block // tile_m)


def make_params(traits: Traits, tile_m: int) -> tuple[np.ndarray[Any, Any], list[Part]]:
    """Return the parameter struct of a problem, all but addresses, and the launches it takes.

    Parameters
    ----------
    traits : Traits
    tile_m : int
        Query rows of a tile.

    Returns
    -------
    params : numpy.ndarray
        Shape (1,), dtype `ATTENTION_PARAMS` or `PARAMS_WITH_DROPOUT`.
    parts : list of Part
        One, unless there are more batch axes or tiles than a launch takes.
    """
    problem, views, item = traits.problem, traits.views, traits.item
    sizes, strides = traits.sizes, dict(traits.strides)
    outer = max(0, len(sizes) - MAX_BATCH_AXES)
    axes = len(sizes) - outer

    params = np.zeros(1, ATTENTION_PARAMS if problem.dropout is None else PARAMS_WITH_DROPOUT)
    p = params[0]
    for name, view in views.items():
        if name != "bias":
            p[f"{name}_row"] = view.strides[-2] // item[name]
        p[f"{name}_batch"][:axes] = [s // item[name] for s in strides[name][outer:]]
    p["batch_size"] = 1
    p["batch_size"][:axes] = sizes[outer:]
    if problem.score is not None:  # entries take the place of offsets
        p["bias_batch"][:axes] = [math.prod(sizes[axis + 1 :]) for axis in range(outer, len(sizes))]
    p["batch_axes"] = axes
    for name in ("q_len", "k_len", "head_dim", "v_dim"):
        p[name] = getattr(problem, name)
    p["q_tiles"] = traits.query_tiles(tile_m)
    p["lower"], p["upper"] = band_limits(problem)
    fill_score(p, problem, traits.score)
    if problem.dropout is not None:
        fill_dropout(p["dropout"], problem, problem.dropout)
    if problem.sinks_dtype is not None:
        p["sinks_kind"] = FLOAT_DTYPES.index(problem.sinks_dtype)

    if outer:
        row_bytes = sum_dtype(problem.dtype).itemsize * problem.q_len
        strides["lse"] = [row_bytes * math.prod(sizes[a + 1 :]) for a in range(outer)]
    found = list(parts(traits.pointers, sizes, outer, strides, int(p["q_tiles"])))
    return params, found


def fill_dropout(p: Any, problem: Problem, dropout: Dropout) -> None:
    """Write what a kernel knows of dropout, all but addresses and a launch's first entry."""
    fill_decisions(p, dropout)
    p["heads"] = math.prod(problem.out_shape[-3:-2])


def fill_decisions(p: Any, dropout: Dropout) -> None:
    """Write what decisions follow from besides the seed, and what they are multiplied by."""
    upper, lower = divmod(dropout.threshold, 1 << 32)
    p["threshold"] = [0xFFFFFFFF * (upper >> bit & 1) for bit in range(len(p["threshold"]))]
    p["lower_threshold"] = lower
    p["factor"], p["inverse_factor"] = dropout.factor, 1 - dropout.p
    p["sequences"], p["sequence"] = dropout.sequences, dropout.sequence


def mask_addresses(prefix: str = "", whole: bool = True) -> dict[str, str]:
    """Return which part of a mask each field points to.

    Parameters
    ----------
    prefix : str, optional
        Of the fields' paths.
    whole : bool, optional
        Whether the launch is all of the call: an order of work is for that only.
    """
    names = (f"mask.{name}" for name in MASK_LISTS.names or () if whole or name != "order")
    return {f"{prefix}{name}": name for name in names}


def parts(
    pointers: Sequence[str],
    sizes: list[int],
    outer: int,
    strides: dict[str, list[int]],
    blocks: int,
) -> Iterator[Part]:
    """Yield the launches of batch entries that take `blocks` blocks each.

    Parameters
    ----------
    pointers : sequence of str
        The arrays a launch points to.
    sizes, strides
        From `merge_axes`; a pointer without strides stays where it is.
    outer : int
        How many of the axes are walked by launches, not by a kernel.
    blocks : int
    """
    inner = math.prod(sizes[outer:])
    entries = max(1, MAX_GRID // blocks)
    for number, index in enumerate(itertools.product(*map(range, sizes[:outer]))):
        offsets = tuple(
            sum(i * s for i, s in zip(index, strides.get(name, ()), strict=False))
            for name in pointers
        )
        for first in range(0, inner, entries):
            yield Part(offsets, first, min(entries, inner - first) * blocks, number * inner)


def _clip(bound: int) -> int:
    return max(-_INT32, min(_INT32, bound))


def cached_entries(problem: Problem, size: list[int], steps: dict[str, list[int]]) -> int:
    """Return how many batch entries have their keys and values in the L2 cache at once.

    Parameters
    ----------
    problem : Problem
    size : list of int
        Batch axes, in the order in which entries are numbered.
    steps : dict of list of int
        Bytes along each of them, for k and v at least; 0 where an array broadcasts.
    """
    sharing = 1  # entries next to each other that read the same keys and values
    for n, k_step, v_step in reversed(list(zip(size, steps["k"], steps["v"], strict=True))):
        if n > 1 and (k_step or v_step):
            break
        sharing *= n
    one = problem.k_len * (problem.head_dim + problem.v_dim) * problem.dtype.itemsize
    return _L2_BYTES // max(1, one) * sharing
