"""Attention under masks, and packing masks: inputs, implementations and checks on a GPU.

Masks are drawn as they were for the table of peers that `report.best_peers` reads: in one order, by
torch's generator where torch is there, and otherwise by CuPy's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from validation import peers
from validation.cases import MaskedAttention, MaskPack, MaskSource
from validation.checks import Check, relative_error, sampled_rows
from validation.peers import Call, UnavailableError

Arrays = tuple[Any, ...]
BLOCK = 128
_SEED = 3
_DENSITIES = (1.0, 0.5, 0.25, 0.1)
_DOCUMENTS = 16


class Drawn(NamedTuple):
    """What masks of one size are made of, as CuPy arrays."""

    documents: Any  # (length,) int32, ascending: the document of each token
    boards: dict[float, Any]  # by density, (heads, blocks, blocks) bool
    elements: Any  # (length, length) bool


# ---------------------------------------------------------------------------------------- inputs
@functools.lru_cache(maxsize=1)
def drawn(length: int, heads: int) -> Drawn:
    """Everything random of the masks, always in the same order."""
    cp = peers.module("cupy")
    blocks = length // BLOCK
    try:
        torch = peers.module("torch")
        generator = torch.Generator(device="cuda").manual_seed(_SEED)
        give = {"generator": generator, "device": "cuda"}
        cuts = cp.from_dlpack(torch.randperm(length - 1, **give))

        def uniform(*shape: int) -> Any:
            return cp.from_dlpack(torch.rand(shape, **give))

    except (UnavailableError, RuntimeError):  # none, or one without CUDA
        rng = cp.random.default_rng(_SEED)
        cuts = cp.argsort(rng.random(length - 1))

        def uniform(*shape: int) -> Any:
            return rng.random(shape, dtype=cp.float32)

    begins = cp.zeros(length, cp.int32)
    begins[cuts[: _DOCUMENTS - 1] + 1] = 1
    boards = {}
    for density in _DENSITIES:
        boards[density] = (uniform(heads, blocks, blocks) < density) | cp.eye(blocks, dtype=bool)
    return Drawn(begins.cumsum().astype(cp.int32), boards, uniform(length, length) < 0.5)


def random_cupy(case: MaskedAttention, seed: int) -> Arrays:
    """q, k and v as `peers.random_cupy` draws them, and what the mask is made of, if anything."""
    return *peers.random_cupy(case, seed), *_made_of(case)


def _made_of(case: MaskedAttention) -> Arrays:
    kind, _, number = case.mask.partition(" ")
    if kind == "documents":
        return (drawn(case.length, case.heads).documents,)
    if kind == "blocks":
        return (drawn(case.length, case.heads).boards[float(number)],)
    if kind == "elements":
        elements = drawn(case.length, case.heads).elements
        if number:  # another matrix for each head: the same, moved along
            cp = peers.module("cupy")
            shifts = range(case.heads)
            elements = cp.stack([cp.roll(elements, 131 * i, axis=1) for i in shifts])
        return (elements,)
    return ()


def seen(case: MaskedAttention, made_of: Arrays, head: int, rows: np.ndarray) -> np.ndarray:
    """The rows of the mask of one head, as an array of bool on the host."""
    keys, rows = np.arange(case.length), rows[:, None]
    kind, _, number = case.mask.partition(" ")
    if kind == "causal":
        return keys <= rows
    if kind == "window":
        return (keys <= rows) & (keys > rows - int(number))
    if kind == "documents":
        document = peers.to_host(made_of[0])
        return document[rows] == document
    if kind == "blocks":
        return peers.to_host(made_of[0][head])[rows // BLOCK, keys // BLOCK]
    if kind == "elements":
        elements = made_of[0] if made_of[0].ndim == 2 else made_of[0][head]
        return peers.to_host(elements[peers.module("cupy").asarray(rows[:, 0])])
    return np.ones((len(rows), case.length), bool)


def bit_mask(case: MaskedAttention, made_of: Arrays) -> Any:
    """The mask of a case; None where there is none."""
    from fa_cupy import BitMask

    kind, _, number = case.mask.partition(" ")
    shape = case.length, case.length
    if kind == "elements":
        return BitMask.from_dense(made_of[0])
    if kind == "blocks":
        return BitMask.from_blocks(peers.to_host(made_of[0]), *shape)
    if kind == "documents":
        document = peers.to_host(made_of[0])
        return BitMask.from_function(
            lambda q, k: document[q] == document[k], shape, _document_states(document)
        )
    if kind in ("causal", "window"):
        width = int(number) if number else case.length
        return BitMask.from_function(
            lambda q, k: (k <= q) & (k > q - width), shape, _band_states(width)
        )
    return None


def _document_states(document: np.ndarray) -> Callable[..., Any]:
    """States of blocks of a mask whose documents follow one another."""
    from fa_cupy import BitMask

    def states(q_begin: int, q_end: int, k_begin: Any, k_end: Any) -> Any:
        first, last = document[q_begin], document[q_end - 1]
        full = (first == last) & (document[k_begin] == first) & (document[k_end - 1] == first)
        empty = (document[k_begin] > last) | (document[k_end - 1] < first)
        return np.where(empty, BitMask.EMPTY, np.where(full, BitMask.FULL, BitMask.PARTIAL))

    return states


def _band_states(width: int) -> Callable[..., Any]:
    """States of blocks of a mask under which a query sees `width` keys, its own the last."""
    from fa_cupy import BitMask

    def states(q_begin: int, q_end: int, k_begin: Any, k_end: Any) -> Any:
        full = (k_end - 1 <= q_begin) & (k_begin > q_end - 1 - width)
        empty = (k_begin > q_end - 1) | (k_end - 1 <= q_begin - width)
        return np.where(empty, BitMask.EMPTY, np.where(full, BitMask.FULL, BitMask.PARTIAL))

    return states


def masked_check(case: MaskedAttention, arrays: Arrays) -> Check:
    """As `checks.attention_check`, of rows that the mask leaves."""
    q, k, v, *made_of = arrays
    rows = sampled_rows(case.length)
    places = [(0, 0), (case.batch - 1, case.heads - 1)]

    def reference(place: tuple[int, int]) -> np.ndarray:
        q64, k64, v64 = (peers.to_host(x[place]).astype(np.float64) for x in (q, k, v))
        scores = q64[rows] @ k64.T * case.head_dim**-0.5
        scores[~seen(case, tuple(made_of), place[1], rows)] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        return np.asarray(p @ v64 / p.sum(-1, keepdims=True))

    return relative_error(case.dtype, places, rows, np.stack([reference(at) for at in places]))


# ------------------------------------------------------------------------------- implementations
def _same(result: Any) -> Any:
    return result


def fa_cupy(case: MaskedAttention, arrays: Arrays) -> Call:
    """This package with a `BitMask`, made beforehand; without a mask where the case has none."""
    from fa_cupy import attention

    q, k, v, *made_of = arrays
    mask = bit_mask(case, tuple(made_of))
    return Call(lambda: attention(q, k, v, mask=mask), _same)


def fa_cupy_array(case: MaskedAttention, arrays: Arrays) -> Call:
    """This package with an array of bool, which every call packs."""
    from fa_cupy import attention

    if not case.mask.startswith("elements"):
        raise UnavailableError("masks that are arrays only")
    q, k, v, elements = arrays
    return Call(lambda: attention(q, k, v, mask=elements), _same)


def fa_cupy_band(case: MaskedAttention, arrays: Arrays) -> Call:
    """This package told of a band by options."""
    from fa_cupy import attention

    kind, _, number = case.mask.partition(" ")
    if kind not in ("causal", "window"):
        raise UnavailableError("causal masks and windows only")
    window = (int(number) - 1, 0) if number else None
    q, k, v = arrays
    return Call(lambda: attention(q, k, v, is_causal=True, window=window), _same)


@functools.cache
def _flex() -> Any:
    """FlexAttention, compiled: once for each function that tells of a mask."""
    torch = peers.module("torch")
    flexible = peers.module("torch.nn.attention.flex_attention")
    # every case of every family compiles one
    for limit in ("recompile_limit", "cache_size_limit", "accumulated_recompile_limit"):
        if hasattr(torch._dynamo.config, limit):
            setattr(torch._dynamo.config, limit, 512)
    # Gradients are taken of one graph again and again, which must keep what it has saved.
    functions = peers.module("torch._functorch.config")
    if hasattr(functions, "donated_buffer"):
        functions.donated_buffer = False
    return torch.compile(flexible.flex_attention, dynamic=False, fullgraph=True)


def _all_of_a_block(_batch: Any, _head: Any, query: Any, _key: Any) -> Any:
    return query >= 0


def flex(case: MaskedAttention, arrays: Arrays) -> Call:
    """torch's FlexAttention with the blocks of the mask and a function for those that it cuts.

    The first call of each kind of mask compiles, for some seconds.
    """
    attend = flexible(case, arrays[3:])
    q, k, v = (peers.to_torch(x).contiguous() for x in arrays[:3])
    return Call(lambda: attend(q, k, v), peers.from_torch)


def flexible(case: MaskedAttention, made_of: Arrays) -> Callable[..., Any]:
    """FlexAttention of three tensors under the mask of a case."""
    torch = peers.module("torch")
    if not torch.cuda.is_available():
        raise UnavailableError("this torch has no CUDA")
    parts = peers.module("torch.nn.attention.flex_attention")
    kind, _, number = case.mask.partition(" ")
    if not kind or number == "heads":
        raise UnavailableError("not without a mask, nor with one for each head")
    of = None
    if made_of:  # bool travels as bytes, because not every DLPack has it
        of = torch.from_dlpack(made_of[0].view(f"i{made_of[0].itemsize}"))
        of = of.bool() if of.element_size() == 1 else of
    if kind == "blocks":
        count = of.sum(-1, dtype=torch.int32)[None]
        order = torch.argsort(of.to(torch.int8), dim=-1, descending=True, stable=True)
        index = order.to(torch.int32)[None]
        mask = parts.BlockMask.from_kv_blocks(
            torch.zeros_like(count), torch.zeros_like(index), count, index, BLOCK_SIZE=BLOCK,
            mask_mod=_all_of_a_block,
        )  # fmt: skip
    else:
        width = int(number) if number else 0
        tell = {
            "causal": lambda b, h, i, j: i >= j,
            "window": lambda b, h, i, j: (i >= j) & (i - j < width),
            "documents": lambda b, h, i, j: of[i] == of[j],
            "elements": lambda b, h, i, j: of[i, j],
        }[kind]
        size = case.length, case.length
        mask = parts.create_block_mask(tell, None, None, *size, device="cuda")
    return functools.partial(_flex(), block_mask=mask)


# --------------------------------------------------------------------------------------- packing
def random_masks(case: MaskPack, seed: int) -> Arrays:
    """An array of bool on the GPU, of random elements."""
    cp = peers.module("cupy")
    rng = cp.random.default_rng(seed)
    shape = case.heads, case.length, case.length
    return (rng.integers(0, 256, shape, dtype=cp.uint8) < 128,)


def pack(case: MaskPack, arrays: Arrays) -> Call:
    """What a call of attention does with an array of bool before its kernel runs.

    As a graph: from Python, two launches take longer than the device does for one matrix.
    """
    cp = peers.module("cupy")
    from fa_cupy.core.broadcasting import View
    from fa_cupy.gpu.masks.device_mask import pack as packed

    (mask,) = arrays
    view = View(mask.shape, mask.strides)
    cp.cuda.Device().synchronize()
    with cp.cuda.Stream(non_blocking=True) as stream:
        packed(mask, view)
        stream.synchronize()
        stream.begin_capture()
        result = packed(mask, view)
        graph = stream.end_capture()

    def run() -> Any:
        graph.launch(cp.cuda.get_current_stream())
        return result

    return Call(run, _same)


def copy(case: MaskPack, arrays: Arrays) -> Call:
    """A copy that moves as many bytes: half of them are read, half written."""
    cp = peers.module("cupy")
    source = cp.empty(int(case.bytes) // 2, cp.uint8)
    target = cp.empty_like(source)
    return Call(lambda: cp.copyto(target, source), _same)


def pack_check(case: MaskPack, arrays: Arrays) -> Check:
    """0 where the words of some rows of blocks are those of the mask, inf where one is not."""
    from fa_cupy import layouts

    (mask,) = arrays
    tiles = case.length // BLOCK

    def error(result: Any) -> float:
        if not isinstance(result, tuple):
            return 0.0  # a copy
        lists, entries = result
        for head, row in ((0, 0), (case.heads - 1, tiles - 1)):
            t = int(entries[head]) * tiles + row
            here = slice(int(lists.partial_begin[t]), int(lists.partial_end[t]))
            if not (peers.to_host(lists.partial[here]) == np.arange(tiles)).all():
                return float("inf")
            words = lists.words.reshape(-1, 8, 32, 2)[t * tiles : (t + 1) * tiles]
            dense = peers.to_host(mask[head, row * BLOCK : (row + 1) * BLOCK])
            want = dense.reshape(BLOCK, tiles, BLOCK).swapaxes(0, 1)
            if not (layouts.unpack(peers.to_host(words)) == want).all():
                return float("inf")
        return 0.0

    return error


def random_source(case: MaskSource, seed: int) -> Arrays:
    """Key numbers of each query on the GPU, of shape (length, keys): some come twice."""
    cp = peers.module("cupy")
    rng = cp.random.default_rng(seed)
    shape = case.length, case.keys
    return (rng.integers(0, case.length, shape, dtype=cp.int32),)


def _source(case: MaskSource, indices: Any, xp: Any, sparse: Any) -> Callable[[], Any]:
    from fa_cupy import BitMask

    if case.source == "indices":
        return lambda: BitMask.from_indices(indices, case.length)
    ends = xp.arange(case.length + 1, dtype=xp.int32) * case.keys
    ones = xp.ones(indices.size, xp.float32)
    parts = ones, xp.sort(indices, axis=1).reshape(-1), ends
    matrix = sparse.csr_matrix(parts, shape=(case.length, case.length))
    return lambda: BitMask.from_csr(matrix)


def from_source(case: MaskSource, arrays: Arrays) -> Call:
    """A mask from what is on the GPU."""
    cp = peers.module("cupy")
    return Call(_source(case, arrays[0], cp, peers.module("cupyx.scipy.sparse")), _same)


def from_source_cpu(case: MaskSource, arrays: Arrays) -> Call:
    """The same from what is on the CPU, by the host's clock."""
    sparse = peers.module("scipy.sparse")
    return Call(_source(case, peers.to_host(arrays[0]), np, sparse), _same, _same)


def source_check(case: MaskSource, arrays: Arrays) -> Check:
    """0 where the mask is the one that is made on the CPU, inf where it is not."""
    want = from_source_cpu(case, arrays).run()
    return lambda mask: 0.0 if mask.equals(want) else float("inf")
