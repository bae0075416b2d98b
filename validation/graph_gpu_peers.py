"""Attention along the edges of graphs on a GPU, with gradients: inputs, implementations, checks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from validation import checks, graph_peers, peers, sparse_peers
from validation.cases import GraphAttention
from validation.checks import Check
from validation.graph_peers import Arrays, graph
from validation.peers import Call, UnavailableError

# Elements of an array of all pairs, which FlexAttention reads edges from, by an index of 32 bits:
# with 65,536 nodes it ended in an illegal memory access.
_MOST_BOOL = (1 << 31) - 1
_CHUNK = 1 << 18  # edges at a time on the host


def random_cupy(case: GraphAttention, seed: int) -> Arrays:
    """N(0, 1) q, k, v of shape (1, heads, nodes, dim)."""
    return tuple(peers.to_device(x[None]) for x in graph_peers.random_numpy(case, seed))


def random_gradients(case: GraphAttention, seed: int) -> Arrays:
    """The same, and the gradient of the output."""
    return (*random_cupy(case, seed), random_cupy(case, seed + 1)[0])


@functools.lru_cache(maxsize=3)
def _mask(case: GraphAttention, how: str = "") -> Any:
    """Return the mask of a graph; `how` may be "words" or "pairs", whatever suits it."""
    from fa_cupy import BitMask
    from fa_cupy.gpu.masks import pair_lists

    mask = BitMask.from_csr(graph(case))
    if how:
        chosen = pair_lists.lists_of(mask).counts if how == "pairs" else None
        mask._kept["pairs", peers.DTYPES[case.dtype]] = chosen
    return mask


def _forward(how: str) -> Callable[[GraphAttention, Arrays], Call]:
    def make(case: GraphAttention, arrays: Arrays) -> Call:
        from fa_cupy import attention

        mask = _mask(case, how)
        return Call(lambda: attention(*arrays, mask=mask), graph_peers._same)

    return make


def _backward(how: str) -> Callable[[GraphAttention, Arrays], Call]:
    def make(case: GraphAttention, arrays: Arrays) -> Call:
        from fa_cupy import attention, attention_backward

        (q, k, v, dout), mask = arrays, _mask(case, how)
        out, lse = attention(q, k, v, mask=mask, return_lse=True)
        return Call(
            lambda: attention_backward(dout, q, k, v, out, lse, mask=mask), graph_peers._same
        )

    return make


#: This package: as a call gets it, by blocks, with words for each block that has an edge, and pair
#: by pair.
forward = {f"fa_cupy{how and '_'}{how}": _forward(how) for how in ("", "words", "pairs")}
backward = {f"fa_cupy{how and '_'}{how}": _backward(how) for how in ("", "words", "pairs")}


# --------------------------------------------------------------------------------------- PyTorch
def _scatter(case: GraphAttention) -> Callable[..., Any]:
    """Attention by gathered rows, a softmax by ``scatter_reduce`` and a sum by ``index_add``."""
    torch = peers.module("torch")
    if not torch.cuda.is_available():
        raise UnavailableError("this torch has no CUDA")
    adjacency = graph(case).tocoo()
    rows, cols = (
        torch.from_numpy(x.astype(np.int64)).cuda() for x in (adjacency.row, adjacency.col)
    )

    def attend(q: Any, k: Any, v: Any) -> Any:
        index = rows.expand(*q.shape[:2], -1)
        scores = (q[:, :, rows].float() * k[:, :, cols]).sum(-1) * case.head_dim**-0.5
        zeros = torch.zeros(q.shape[:3], device=q.device)
        largest = (zeros - torch.inf).scatter_reduce(2, index, scores.detach(), "amax")
        weights = torch.exp(scores - largest.gather(2, index))
        sums = zeros.scatter_add(2, index, weights)
        values = weights[..., None] * v[:, :, cols]
        out = torch.zeros(v.shape, device=v.device).index_add(2, rows, values)
        return (out / sums[..., None]).to(q.dtype)

    return attend


def _flex(case: GraphAttention) -> Callable[..., Any]:
    """FlexAttention, compiled, with the blocks that have an edge and an array of all pairs."""
    torch = peers.module("torch")
    parts = peers.module("torch.nn.attention.flex_attention")
    if not torch.cuda.is_available():
        raise UnavailableError("this torch has no CUDA")
    if case.nodes**2 > _MOST_BOOL:
        raise UnavailableError("an array of all pairs would not fit")
    adjacency = graph(case).tocoo()
    ends = (torch.from_numpy(x.astype(np.int64)).cuda() for x in (adjacency.row, adjacency.col))
    seen = torch.zeros((case.nodes, case.nodes), dtype=torch.bool, device="cuda")
    seen[tuple(ends)] = True
    states = torch.from_numpy(_mask(case).block_states() != 0).cuda()
    count = states.sum(-1, dtype=torch.int32)[None, None]
    order = torch.argsort(states.to(torch.int8), dim=-1, descending=True, stable=True)
    mask = parts.BlockMask.from_kv_blocks(
        count, order.to(torch.int32)[None, None], BLOCK_SIZE=128, seq_lengths=(case.nodes,) * 2,
        mask_mod=lambda b, h, i, j: seen[i, j],
    )  # fmt: skip
    return functools.partial(sparse_peers._flex(), block_mask=mask)


def _torch_forward(
    make: Callable[[GraphAttention], Callable[..., Any]],
) -> Callable[[GraphAttention, Arrays], Call]:
    def call(case: GraphAttention, arrays: Arrays) -> Call:
        attend = make(case)
        q, k, v = (peers.to_torch(x) for x in arrays)
        return Call(lambda: attend(q, k, v), peers.from_torch)

    return call


def _torch_backward(
    make: Callable[[GraphAttention], Callable[..., Any]],
) -> Callable[[GraphAttention, Arrays], Call]:
    """What autograd calls for the same: the gradients alone."""

    def call(case: GraphAttention, arrays: Arrays) -> Call:
        torch, attend = peers.module("torch"), make(case)
        *leaves, dout = (peers.to_torch(x) for x in arrays)
        leaves = [x.detach().requires_grad_() for x in leaves]
        out = attend(*leaves)
        return Call(
            lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
            lambda grads: tuple(map(peers.from_torch, grads)),
        )

    return call


forward |= {"torch_scatter": _torch_forward(_scatter), "flex": _torch_forward(_flex)}
backward |= {"torch_scatter": _torch_backward(_scatter), "flex": _torch_backward(_flex)}


# ------------------------------------------------------------------------------------------ CuPy
def csr(case: GraphAttention, arrays: Arrays) -> Call:
    """Scores of all edges by CuPy, a softmax by scattered maxima, and products of cuSPARSE."""
    if case.dtype != "fp32":
        raise UnavailableError("float32 only, as sparse matrices of CuPy are")
    cp, cupyx = peers.module("cupy"), peers.module("cupyx")
    sparse = peers.module("cupyx.scipy.sparse")
    adjacency = graph(case).tocsr()
    begin, cols = (cp.asarray(x.astype(np.int32)) for x in (adjacency.indptr, adjacency.indices))
    rows = cp.asarray(adjacency.tocoo().row.astype(np.int32))
    shape = adjacency.shape
    q, k, v = (x[0] for x in arrays)

    def one(q: Any, k: Any, v: Any) -> Any:
        scores = cp.einsum("ed,ed->e", q[rows], k[cols]) * np.float32(case.head_dim**-0.5)
        largest = cp.full(case.nodes, -np.inf, np.float32)
        cupyx.scatter_max(largest, rows, scores)
        weights = cp.exp(scores - largest[rows])
        sums = cp.bincount(rows, weights, minlength=case.nodes).astype(np.float32)
        return sparse.csr_matrix((weights / sums[rows], cols, begin), shape=shape) @ v

    return Call(
        lambda: cp.stack([one(*x) for x in zip(q, k, v, strict=True)])[None], graph_peers._same
    )


forward["csr"] = csr


# ---------------------------------------------------------------------------------------- checks
def check(case: GraphAttention, arrays: Arrays) -> Check:
    """As `graph_peers.check`, of results on a device."""
    on_host = graph_peers.check(case, tuple(peers.to_host(x)[0] for x in arrays))
    return lambda out: on_host(peers.to_host(out)[0].astype(np.float64))


def gradients_check(case: GraphAttention, arrays: Arrays) -> Check:
    """Relative Frobenius error of the last head's gradients, the largest, in float64."""
    from scipy import sparse

    place = 0, case.heads - 1
    q, k, v, dout = (peers.to_host(x[place]).astype(np.float64) for x in arrays)
    adjacency, scale = graph(case), case.head_dim**-0.5
    begin, cols = adjacency.indptr, adjacency.indices
    rows = np.repeat(np.arange(case.nodes), np.diff(begin))

    def products(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        parts = [slice(i, i + _CHUNK) for i in range(0, len(cols), _CHUNK)]
        return np.concatenate([(a[rows[x]] * b[cols[x]]).sum(-1) for x in parts])

    def matrix(values: np.ndarray) -> Any:
        return sparse.csr_matrix((values, cols, begin), shape=adjacency.shape)

    scores = scale * products(q, k)
    p = np.exp(scores - np.maximum.reduceat(scores, begin[:-1])[rows])  # each row has an edge
    p /= np.add.reduceat(p, begin[:-1])[rows]
    dp = products(dout, v)
    ds = p * (dp - np.add.reduceat(p * dp, begin[:-1])[rows])
    wanted = [scale * (matrix(ds) @ k), scale * (matrix(ds).T @ q), matrix(p).T @ dout]
    return checks.gradients_error(case.dtype, place, wanted)
