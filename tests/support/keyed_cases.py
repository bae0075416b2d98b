"""Attention problems with key lengths, page tables and offsets, drawn by hypothesis."""

import dataclasses
import itertools
import math

import numpy as np
from hypothesis import strategies as st

from tests.support import packed_sequences
from tests.support.strategies import DTYPES, broadcastable, cases, normal

INTEGERS = (np.int32, np.int64)


def native_options(xp, options):
    """Options with their arrays in the namespace `xp`."""
    return {name: xp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}


@st.composite
def widened(draw, entries):
    """A shape that broadcasts with the batch axes before the heads, and may widen those of 1."""
    wide = tuple(draw(st.sampled_from([1, 1, 2])) if n == 1 else n for n in entries)
    return draw(broadcastable(wide))


def entries_of(case):
    """Return the batch axes before the heads; () where there are none."""
    shapes = [x.shape[:-2] for x in case.arrays if x is not None]
    rank = max(map(len, shapes))
    if rank < 2:
        return ()
    # Heads may be grouped: they take no part.
    return np.broadcast_shapes(*[shape[:-1] for shape in shapes])


@st.composite
def lengths(draw, shape, k_len):
    """An array of lengths of a shape; an int, or an array without axes, for ()."""
    some = st.integers(0, k_len) | st.sampled_from([0, k_len])
    size = math.prod(shape)
    numbers = draw(st.lists(some, min_size=size, max_size=size))
    found = np.array(numbers, draw(st.sampled_from(INTEGERS))).reshape(shape)
    return int(found) if shape == () and draw(st.booleans()) else found


def garbage_behind(case, rng):
    """Put NaN into keys and values that no entry has, and into the bias behind the ends."""
    k_len, ends = case.k.shape[-2], np.asarray(case.options["k_lengths"])
    last = int(ends.max(initial=0))
    case.k[..., last:, :] = np.nan
    case.v[..., last:, :] = np.nan
    # Where an array has the axes of the lengths, each entry has its own end.
    for x in (case.k, case.v):
        shape = x.shape[:-3]
        if ends.ndim and x.ndim - 3 >= ends.ndim and x.shape[-3 - ends.ndim : -3] == ends.shape:
            hidden = np.arange(k_len) >= ends[..., None]
            x[np.broadcast_to(hidden[..., None, :], (*shape, x.shape[-3], k_len))] = np.nan
    if case.bias is not None and case.bias.ndim and case.bias.shape[-1] == k_len:
        case.bias[..., last:] = np.nan


def make_finite(case):
    """Put numbers in place of what is not finite in queries, keys and values."""
    for x in (case.q, case.k, case.v):
        x[~np.isfinite(x.astype(np.float64))] = 1


@st.composite
def cases_with_lengths(draw, dtypes=DTYPES, finite=False):
    """Cases of `cases`, with the length of each batch entry's keys; what lies behind is NaN."""
    case = draw(cases(dtypes))
    if finite:
        make_finite(case)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = draw(widened(entries_of(case)))
    case.options["k_lengths"] = draw(lengths(shape, case.k.shape[-2]))
    _finish_options(draw, case)
    if draw(st.booleans()):
        garbage_behind(case, rng)
    return case


def _finish_options(draw, case):
    """Choose an alignment, and sinks."""
    if case.options.get("causal_align") is None:
        case.options["causal_align"] = draw(st.sampled_from(["top_left", "bottom_right"]))
    if draw(st.booleans()):
        rng = np.random.default_rng(draw(st.integers(0, 100)))
        case.options["sinks"] = normal(rng, draw(st.sampled_from([(), (1,), (1, 1)])), np.float32)


@st.composite
def paged_cases(draw, dtypes=DTYPES):
    """Cases whose keys and values lie in pages, with garbage in rows that no entry has."""
    case = draw(cases(dtypes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = draw(st.sampled_from([16, 16, 32, 48, 64, 128, 256]))
    per_sequence, count = draw(st.integers(0, 4 if size < 100 else 2)), draw(st.integers(1, 5))
    k_len, old_len = per_sequence * size, case.k.shape[-2]
    heads = [x.shape[-3] if x.ndim > 2 else 1 for x in (case.k, case.v)]
    dims = case.k.shape[-1], case.v.shape[-1]
    kv = [normal(rng, (count, n, size, d), case.q.dtype) for n, d in zip(heads, dims, strict=True)]
    case.k, case.v = kv
    if case.bias is not None:
        case.bias = _stretched(rng, case.bias, old_len, k_len)
    if case.mask is not None:
        case.mask = _stretched(rng, case.mask, old_len, k_len)
    shapes = [x.shape[:-2] for x in (case.q, case.bias, case.mask) if x is not None]
    entries = ()
    if case.q.ndim >= 4 or max(map(len, shapes)) >= 2:
        entries = np.broadcast_shapes(*[shape[:-1] for shape in shapes])
    table_shape = draw(widened(entries))
    table = rng.integers(0, count, (*table_shape, per_sequence))
    if draw(st.integers(0, 3)):
        case.options["k_lengths"] = draw(lengths(draw(widened_to(table_shape, entries)), k_len))
    _finish_options(draw, case)
    _hide(case, table, size, draw(st.booleans()))
    case.options["page_table"] = table.astype(draw(st.sampled_from(INTEGERS)))
    return case


@st.composite
def widened_to(draw, shape, entries):
    """A shape of lengths for a table of that shape."""
    both = np.broadcast_shapes(shape, entries)
    return draw(broadcastable(both))


def _stretched(rng, x, old, new):
    """A bias or mask for other keys: elements are drawn anew where there are keys in its axes."""
    if not x.ndim or x.shape[-1] != old or old == 1 == x.shape[-1]:
        return x
    shape = (*x.shape[:-1], new)
    return rng.random(shape) < 0.6 if x.dtype == bool else normal(rng, shape, x.dtype)


def _hide(case, table, size, numbers):
    """Put NaN into rows that no entry has, and into the table numbers that are not needed."""
    per_sequence = table.shape[-1]
    ends = np.asarray(case.options.get("k_lengths", per_sequence * size))
    rows = np.arange(per_sequence * size).reshape(per_sequence, size)
    needed = rows < ends[..., None, None]
    entry = np.broadcast_to(table[..., None], np.broadcast_shapes((*table.shape, 1), needed.shape))
    used = np.zeros((len(case.k), size), bool)
    place = np.broadcast_to(np.arange(size), entry.shape)
    shown = np.broadcast_to(needed, entry.shape)
    used[entry[shown], place[shown]] = True
    for x in (case.k, case.v):
        x[np.broadcast_to(~used[:, None], x.shape[:-1])] = np.nan
    if numbers:
        pages = -(-ends // size)
        over = np.broadcast_to(
            pages[..., None], np.broadcast_shapes((*pages.shape, 1), table.shape)
        )
        behind = np.arange(per_sequence) >= over
        extra = behind.ndim - table.ndim
        behind = behind.all(axis=tuple(range(extra)))
        axes = tuple(i for i, n in enumerate(table.shape) if n == 1 and behind.shape[i] != 1)
        table[behind.all(axis=axes, keepdims=True)] = -7


@st.composite
def offsets(draw, count, length):
    """Offsets of `count` sequences on an axis: some of them empty, with rows before and behind."""
    ends = st.integers(0, length) | st.sampled_from([0, length])
    numbers = draw(st.lists(ends, min_size=count + 1, max_size=count + 1))
    return np.sort(np.array(numbers, draw(st.sampled_from(INTEGERS))))


@st.composite
def packed_cases(draw, dtypes=DTYPES, finite=False):
    """Cases of `cases` with packed sequences; what is in none of them, or between them, is NaN."""
    case = draw(cases(dtypes))
    q_len, k_len = case.q.shape[-2], case.k.shape[-2]
    count = draw(st.integers(0, 7))
    case.options["q_offsets"] = of_keys = draw(offsets(count, q_len))
    if q_len != k_len or draw(st.booleans()):
        case.options["k_offsets"] = of_keys = draw(offsets(count, k_len))
        if case.options.get("causal_align") is None:
            align = st.sampled_from(["top_left", "bottom_right"])
            case.options["causal_align"] = draw(align)
    if draw(st.booleans()):
        rng = np.random.default_rng(draw(st.integers(0, 100)))
        shape = draw(st.sampled_from([(), (1,), (1, 1), (q_len,)]))
        case.options["sinks"] = normal(rng, shape, np.float32)
    if finite:
        make_finite(case)
    if draw(st.booleans()):
        _hide_others(case, of_keys)
    return case


def _hide_others(case, of_keys):
    """Put NaN into keys of no sequence, and into the bias of pairs of two sequences."""
    for x in (case.k, case.v):
        x[..., : of_keys[0], :] = np.nan
        x[..., of_keys[-1] :, :] = np.nan
    if case.bias is not None and case.bias.shape[-2:] == (case.q.shape[-2], case.k.shape[-2]):
        seen = np.zeros(case.bias.shape[-2:], bool)
        of_rows = case.options["q_offsets"]
        for q, k in zip(itertools.pairwise(of_rows), itertools.pairwise(of_keys), strict=True):
            seen[slice(*q), slice(*k)] = True
        case.bias[..., ~seen] = np.nan


@st.composite
def cases_of_any_offsets(draw, dtypes=DTYPES):
    """Cases of `cases` with offsets of any numbers, as they may lie in the memory of a device."""
    case = draw(cases(dtypes))
    make_finite(case)
    lengths = case.q.shape[-2], case.k.shape[-2]
    both = draw(packed_sequences.disordered(lengths, draw(st.integers(0, 4))))
    case.options["q_offsets"], case.options["k_offsets"] = both
    if case.options.get("causal_align") is None:
        case.options["causal_align"] = draw(st.sampled_from(["top_left", "bottom_right"]))
    return case


def by_mask(case):
    """The same case without offsets, by a mask; and which of its rows are of invalid sequences."""
    options, sizes = dict(case.options), (case.q.shape[-2], case.k.shape[-2])
    of_rows = options.pop("q_offsets")
    of_keys = options.pop("k_offsets", of_rows)
    names = ("is_causal", "causal_align", "window")
    band = {name: options.pop(name) for name in names if name in options}
    seen = packed_sequences.visible(of_rows, of_keys, sizes, **band)
    mask = seen if case.mask is None else seen & case.mask
    invalid = packed_sequences.invalid_rows(of_rows, of_keys, sizes)
    return dataclasses.replace(case, mask=mask, options=options), invalid
