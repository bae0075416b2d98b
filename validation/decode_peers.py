"""Attention of few queries to many keys: inputs, implementations and checks on a GPU.

A call can take 10 us, less than Python needs for a launch, and a call that is repeated finds its
keys in the L2 cache. So one run of an implementation is a CUDA graph of many calls, which take
turns with copies of keys and values that together do not fit into the cache.

Arrays have an axis of copies in front. Keys and values are (copies, batch, heads, keys, dim),
contiguous, or (copies, pages, heads, page_size, dim).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from validation import cuda_graphs, peers
from validation.cases import ITEMSIZE, Decode
from validation.checks import Check, relative_error
from validation.peers import Call, UnavailableError

Arrays = tuple[Any, ...]  # q, k, v, and those of `_KEY_ARRAYS` that the case has
_KEY_ARRAYS = ("k_lengths", "page_table")
# The L2 cache of an H200 has 50 MB.
_BYTES = 256e6  # of keys and values, in all copies
_MOST_COPIES = 16
_LEAST_CALLS = 32  # of a graph
_DRAWN = 1 << 24  # elements at a time: their float32 numbers take memory too


# ---------------------------------------------------------------------------------------- inputs
def copies(case: Decode) -> int:
    """How many arrays of keys and of values there are: so many that no cache holds them."""
    return int(min(_MOST_COPIES, max(1, -(-_BYTES // case.bytes))))


def random_cupy(case: Decode, seed: int) -> Arrays:
    """Normal q, k and v on the GPU, and where the keys are if the case says so."""
    cp = peers.module("cupy")
    rng = cp.random.default_rng(seed)
    count, heads, dim = copies(case), case.key_heads, case.head_dim
    q_shape = count, case.batch, case.heads, case.queries, dim
    pages = case.batch * case.keys // case.page_size if case.page_size else 0
    kv_shape = (pages, heads, case.page_size, dim) if pages else (case.batch, heads, case.keys, dim)
    arrays = [_normal(cp, rng, shape, case) for shape in (q_shape, *[(count, *kv_shape)] * 2)]
    if pages or case.ragged:
        arrays.append(cp.asarray(np.array(case.lengths, np.int32)))
    if pages:
        order = np.random.default_rng(seed).permutation(pages).astype(np.int32)
        arrays.append(cp.asarray(order.reshape(case.batch, -1)))
    return tuple(arrays)


def _normal(cp: Any, rng: Any, shape: tuple[int, ...], case: Decode) -> Any:
    """Normal numbers, drawn in parts, because one array may have 2**31 elements."""
    integers = cp.empty(shape, f"u{ITEMSIZE[case.dtype]}")
    flat = integers.reshape(-1)
    for begin in range(0, flat.size, _DRAWN):
        part = flat[begin : begin + _DRAWN]
        part[...] = peers.normal(cp, rng, part.shape, case.dtype).view(part.dtype)
    return integers.view(peers.DTYPES[case.dtype])


def _keys(case: Decode, arrays: Arrays, name: str, place: tuple[int, int, int]) -> np.ndarray:
    """The keys ("k") or values ("v") of one head in float64, of a place (copy, batch, head)."""
    copy, batch, head = place
    array, head = arrays["qkv".index(name)], head * case.key_heads // case.heads
    if case.page_size:
        pages = peers.to_host(array[copy, :, head])[peers.to_host(arrays[-1][batch])]
        rows = pages.reshape(-1, case.head_dim)
    else:
        rows = peers.to_host(array[copy, batch, head])
    return np.asarray(rows[: case.lengths[batch]].astype(np.float64))


def check(case: Decode, arrays: Arrays) -> Check:
    """Relative Frobenius error of the first head of the first copy and the last of the last one.

    inf where any element of the whole result is not finite.
    """
    places = [(0, 0, 0), (len(arrays[0]) - 1, case.batch - 1, case.heads - 1)]

    def reference(place: tuple[int, int, int]) -> np.ndarray:
        q = peers.to_host(arrays[0][place]).astype(np.float64)
        k, v = (_keys(case, arrays, name, place) for name in "kv")
        scores = q @ k.T * case.head_dim**-0.5
        p = np.exp(scores - scores.max(-1, keepdims=True))
        return np.asarray(p @ v / p.sum(-1, keepdims=True))

    wanted = np.stack([reference(place) for place in places])
    return relative_error(case.dtype, places, np.arange(case.queries), wanted)


# ------------------------------------------------------------------------------- implementations
def _same(result: Any) -> Any:
    return result


def _calls(count: int) -> int:
    """How many calls a graph has: as many of each copy."""
    return count * -(-_LEAST_CALLS // count)


def fa_cupy(case: Decode, arrays: Arrays) -> Call:
    """This package, without the log-sum-exp."""
    from fa_cupy import attention

    q, k, v, *more = arrays
    options = dict(zip(_KEY_ARRAYS, more, strict=False))
    out, count = peers.module("cupy").empty_like(q.view("u2")).view(q.dtype), len(q)

    def attend(i: int) -> Any:
        return attention(q[i], k[i], v[i], out=out[i], **options)

    on_cpu = isinstance(q, np.ndarray)
    made = cuda_graphs.looped if on_cpu else cuda_graphs.captured
    launch = made(attend, count, _calls(count))
    out.view("u2")[...] = 0xFFFF  # NaN, as the calls before the capture have written results

    def run() -> Any:
        launch()
        return out

    return Call(run, _same, _same if on_cpu else None, calls=_calls(count))


def torch_sdpa(backend: str) -> Callable[[Decode, Arrays], Call]:
    """torch's scaled_dot_product_attention, held to one back end of the SDPBackend enumeration."""

    def prepare(case: Decode, arrays: Arrays) -> Call:
        torch = peers.module("torch")
        if len(arrays) > 3:
            raise UnavailableError("neither pages nor numbers of keys")
        on_cpu = isinstance(arrays[0], np.ndarray)
        if not on_cpu and not torch.cuda.is_available():
            raise UnavailableError("this torch has no CUDA")
        sdpa = torch.nn.functional.scaled_dot_product_attention
        attention = peers.module("torch.nn.attention")
        chosen = getattr(attention.SDPBackend, backend)
        q, k, v = map(peers.to_torch, arrays)
        count = len(q)

        def attend(i: int) -> Any:
            with attention.sdpa_kernel(chosen):
                return sdpa(q[i], k[i], v[i], enable_gqa=True)

        def native(outs: list[Any]) -> Any:
            return peers.from_torch(torch.stack(outs))

        made = cuda_graphs.looped if on_cpu else cuda_graphs.captured_by_torch
        run = made(attend, count, _calls(count))
        return Call(run, native, _same if on_cpu else None, calls=_calls(count))

    return prepare
