"""Calls of attention with key lengths, page tables and offsets, and of the cache of keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import fa_cupy
from fa_cupy import KVCache
from validation.outcomes.data import DTYPES, chance, draw, some_dtypes, whole
from validation.outcomes.record import GPU_TOLERANCE, Call

_LENGTHS = np.array([0, 100, 37], np.int32)
_TABLE = np.array([[5, 1], [0, 3], [5, 2]], np.int32)
_BOTTOM = {"is_causal": True, "causal_align": "bottom_right"}

# Name: whether there are pages, the number of queries, the arrays and the options.
_CASES: dict[str, tuple[bool, int, dict[str, Any]]] = {
    "of lengths": (False, 70, {"k_lengths": _LENGTHS, **_BOTTOM}),
    "of one length, bias and mask": (
        False,
        5,
        {
            "k_lengths": 77,
            "bias": draw("bias", (1, 128), np.float32),
            "mask": chance("mask", (3, 1, 5, 128), 0.6),
        },
    ),
    "of pages": (True, 70, {"page_table": _TABLE, "sinks": draw("sinks", (4, 1), np.float32)}),
    "of pages, one query": (True, 1, {"page_table": _TABLE, "k_lengths": _LENGTHS}),
}
_OFFSETS = {
    "q_offsets": np.array([3, 20, 20, 60]),
    "k_offsets": np.array([0, 1, 90, 128], np.int32),
}
_PACKED: dict[str, dict[str, Any]] = {
    "of offsets": {**_OFFSETS, **_BOTTOM},
    "of offsets, bias, mask and sinks": {
        **_OFFSETS,
        "bias": draw("bias", (1, 128), np.float32),
        "mask": chance("mask", (3, 1, 70, 128), 0.6),
        "sinks": draw("sinks", (4, 1), np.float32),
    },
}
_ERRORS: dict[str, dict[str, Any]] = {
    "length": {"k_lengths": np.array([3, 129, 4])},
    "length dtype": {"k_lengths": np.ones(3)},
    "length shape": {"k_lengths": np.ones(2, int)},
    "length alignment": {"k_lengths": 3, "is_causal": True},
    "table axes": {"page_table": np.array(3)},
    "table dtype": {"page_table": np.ones((3, 2))},
    "table of rows": {"page_table": np.full((3, 2), 3)},
    "offsets descend": {"q_offsets": np.array([0, 4, 3]), "k_offsets": np.array([0, 4, 5])},
    "offset": {"q_offsets": np.array([0, 6]), "k_offsets": np.array([0, 4])},
    "offsets dtype": {"q_offsets": np.ones(3)},
    "offsets without keys": {"q_offsets": np.array([0, 5])},
    "offsets of keys": {"k_offsets": np.array([0, 5])},
    "offsets and length": {"q_offsets": np.array([0, 5]), "k_lengths": 3},
}


def _solved(name: str, dtype: str) -> Callable[[Any], Any]:
    def run(xp: Any) -> Any:
        in_pages, q_len, options = _CASES[name]
        rows = (6, 2, 64, 16) if in_pages else (3, 2, 128, 16)
        shapes = {"q": (3, 4, q_len, 16), "k": rows, "v": (*rows[:-1], 24)}
        arrays = {arg: draw(arg, shape, DTYPES[dtype]) for arg, shape in shapes.items()}
        given = {
            arg: xp.asarray(x) if isinstance(x, np.ndarray) else x
            for arg, x in (arrays | options).items()
        }
        return fa_cupy.attention(**given, return_lse=True)

    return run


def _packed(name: str, dtype: str) -> Callable[[Any], Any]:
    def run(xp: Any) -> Any:
        shapes = {"q": (3, 4, 70, 16), "k": (3, 2, 128, 16), "v": (3, 2, 128, 24)}
        arrays = {arg: draw(arg, shape, DTYPES[dtype]) for arg, shape in shapes.items()}
        dout = xp.asarray(draw("dout", (3, 4, 70, 24), DTYPES[dtype]))
        given = {
            arg: xp.asarray(x) if isinstance(x, np.ndarray) else x
            for arg, x in (arrays | _PACKED[name]).items()
        }
        out, lse = fa_cupy.attention(**given, return_lse=True)
        return out, lse, *fa_cupy.attention_backward(dout=dout, out=out, lse=lse, **given)

    return run


def _cached(page_size: int | None) -> Callable[[Any], Any]:
    def run(xp: Any) -> Any:
        cache = KVCache(2, 16, 24, sequences=4, max_length=70, page_size=page_size, xp=xp)
        found = []
        for step, tokens in enumerate((30, 1, 17)):
            some = [0, 2, 3][step:]
            k, v = (
                xp.asarray(draw(arg, (len(some), 2, tokens, dim), np.float32))
                for arg, dim in (("k", 16), ("v", 24))
            )
            cache.append(k, v, some)
            q = xp.asarray(draw("q", (len(some), 4, 5, 16), np.float32))
            found.append(cache.attention(q, some, is_causal=True))
        cache.fork(3)
        cache.free(2)
        return found, cache.lengths, cache.free_pages, repr(cache)

    return run


def _wrong(changed: dict[str, Any]) -> Callable[[Any], Any]:
    def run(xp: Any) -> Any:
        q, k = (draw("q", (3, 4, rows, 16), np.float32) for rows in (5, 128))
        return fa_cupy.attention(q, k, k, **changed)

    return run


def calls() -> Iterator[Call]:
    """Yield calls with lengths and pages, calls of a cache, and wrong ones."""
    for name in _CASES:
        for dtype in some_dtypes(name):
            slack = GPU_TOLERANCE[dtype]  # parts of the keys are summed in another order
            yield Call(f"attention {name} {dtype}", _solved(name, dtype), slack=slack)
    for name in _PACKED:
        for dtype in some_dtypes(name):
            slack = GPU_TOLERANCE[dtype]
            yield Call(f"attention {name} {dtype}", _packed(name, dtype), slack=slack)
    for kind, page_size in (("contiguous", None), ("paged", 16)):
        yield Call(f"KVCache {kind}", _cached(page_size), slack=GPU_TOLERANCE["float32"])
    for name, changed in _ERRORS.items():
        yield Call(f"error attention {name}", _wrong(changed), fails=True, cpu=True)
    numbers = whole("sequences", (2,), 4, 9).tolist()

    def refused(xp: Any) -> Any:
        return KVCache(2, 16, sequences=4, max_length=70).attention(None, numbers)

    yield Call("error KVCache attention", refused, fails=True, cpu=True)
