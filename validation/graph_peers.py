"""Attention along the edges of graphs on the CPU: inputs, implementations and the check."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from validation import peers
from validation.cases import GraphAttention
from validation.checks import Check
from validation.peers import Call

Arrays = tuple[Any, ...]
_CHUNK = 1 << 18  # edges at a time: 64 MB of gathered rows of 64 numbers in float32


@functools.lru_cache(maxsize=2)
def graph(case: GraphAttention) -> Any:
    """Return the graph: each query is a node, and its keys are nodes, as a CSR matrix of ones.

    Of kind "random", any two nodes are neighbours with the same probability; of kind "geometric",
    nodes are points of a square in random order, and neighbours are close; of kind "window", nodes
    are the pixels of a square image, and neighbours a square around each. A node is its own
    neighbour.
    """
    from scipy import sparse, spatial

    rng = np.random.default_rng(5)
    n = case.nodes
    if case.kind == "window":
        from fa_cupy import BitMask

        reach = round(((case.edges / n) ** 0.5 - 1) / 2)
        near = BitMask.from_window([round(n**0.5)] * 2, reach).to_csr()
        return sparse.csr_matrix(near.astype(np.float32))
    if case.kind == "random":
        sources, targets = rng.integers(0, n, (2, case.edges - n))
    else:
        points = rng.random((n, 2))
        radius = np.sqrt((case.edges - n) / (np.pi * n * n))
        pairs = spatial.cKDTree(points).query_pairs(radius, output_type="ndarray").T
        sources, targets = np.concatenate([pairs, pairs[::-1]], axis=1)
    own = np.arange(n)
    rows, cols = np.concatenate([targets, own]), np.concatenate([sources, own])
    found = sparse.csr_matrix((np.ones(len(rows), np.float32), (rows, cols)), shape=(n, n))
    found.sum_duplicates()
    found.data[:] = 1
    return found


def bias(case: GraphAttention) -> Any:
    """Return the weights of the edges of the graph as a CSR matrix; None without weights."""
    if not case.weights:
        return None
    found = graph(case).copy()
    found.data = np.random.default_rng(6).standard_normal(found.nnz).astype(np.float32)
    return found


def random_numpy(case: GraphAttention, seed: int) -> Arrays:
    """N(0, 1) q, k and v of shape (heads, nodes, dim)."""
    rng = np.random.default_rng(seed)
    shape = case.heads, case.nodes, case.head_dim
    return tuple(peers.normal(np, rng, shape, case.dtype) for _ in range(3))


def _same(result: Any) -> Any:
    return result


def fa_cupy(case: GraphAttention, arrays: Arrays) -> Call:
    """Under the mask of the graph, its nodes in the order that they have."""
    from fa_cupy import BitMask, attention

    mask, weights = BitMask.from_csr(graph(case)), bias(case)
    return Call(lambda: attention(*arrays, weights, mask), _same, _same)


def fa_cupy_reordered(case: GraphAttention, arrays: Arrays) -> Call:
    """The same with neighbours close together: arrays are permuted before, the result after."""
    from fa_cupy import BitMask, attention

    mask, order = BitMask.from_csr(graph(case)).reorder()
    permuted = [np.ascontiguousarray(x[:, order]) for x in arrays]
    weights = bias(case)
    weights = None if weights is None else weights[order][:, order]

    def native(out: Any) -> Any:
        found = np.empty_like(out)
        found[:, order] = out
        return found

    return Call(lambda: attention(*permuted, weights, mask), native, _same)


def edges(case: GraphAttention, arrays: Arrays) -> Call:
    """Scores of all edges by NumPy, a softmax row by row, and a product by SciPy."""
    from scipy import sparse

    adjacency, weights = graph(case), bias(case)
    begin, cols = adjacency.indptr, adjacency.indices
    rows = np.repeat(np.arange(case.nodes), np.diff(begin))
    scale = np.float32(case.head_dim**-0.5)

    def one(q: Any, k: Any, v: Any) -> Any:
        scores = np.empty(len(cols), q.dtype)
        for start in range(0, len(cols), _CHUNK):
            part = slice(start, start + _CHUNK)
            np.einsum("ed,ed->e", q[rows[part]], k[cols[part]], out=scores[part])
        scores *= scale
        if weights is not None:
            scores += weights.data
        scores -= np.maximum.reduceat(scores, begin[:-1])[rows]  # each row has an edge
        np.exp(scores, out=scores)
        scores /= np.add.reduceat(scores, begin[:-1])[rows]
        return sparse.csr_matrix((scores, cols, begin), shape=adjacency.shape) @ v

    return Call(lambda: np.stack([one(*x) for x in zip(*arrays, strict=True)]), _same, _same)


def torch_scatter(case: GraphAttention, arrays: Arrays) -> Call:
    """Gathered rows, a softmax by ``scatter_reduce`` and a sum by ``index_add``, in PyTorch."""
    torch = peers.module("torch")
    adjacency, weights = graph(case).tocoo(), bias(case)
    added = 0 if weights is None else torch.from_numpy(weights.data)
    rows, cols = (torch.from_numpy(x.astype(np.int64)) for x in (adjacency.row, adjacency.col))
    q, k, v = (torch.from_numpy(x) for x in arrays)
    index = rows.expand(case.heads, -1)

    def run() -> Any:
        scores = (q[:, rows] * k[:, cols]).sum(-1) * case.head_dim**-0.5 + added
        largest = torch.full(q.shape[:2], -torch.inf).scatter_reduce(1, index, scores, "amax")
        weights = torch.exp(scores - largest.gather(1, index))
        sums = torch.zeros(q.shape[:2]).scatter_add(1, index, weights)
        out = torch.zeros(v.shape).index_add(1, rows, weights[..., None] * v[:, cols])
        return out / sums[..., None]

    return Call(run, lambda out: out.numpy(), _same)


def check(case: GraphAttention, arrays: Arrays) -> Check:
    """Relative Frobenius error of some queries of the last head, in float64."""
    adjacency, added, head = graph(case), bias(case), case.heads - 1
    chosen = np.linspace(0, case.nodes - 1, 500).astype(int)
    q, k, v = (x[head].astype(np.float64) for x in arrays)

    def row(i: int) -> np.ndarray:
        keys = adjacency.indices[adjacency.indptr[i] : adjacency.indptr[i + 1]]
        scores = k[keys] @ q[i] * case.head_dim**-0.5
        if added is not None:
            scores += added.data[adjacency.indptr[i] : adjacency.indptr[i + 1]]
        weights = np.exp(scores - scores.max())
        return np.asarray(weights @ v[keys] / weights.sum())

    want = np.stack([row(i) for i in chosen])

    def error(out: Any) -> float:
        if not np.isfinite(out).all():
            return float("inf")
        return float(np.linalg.norm(out[head, chosen] - want) / np.linalg.norm(want))

    return error


# ------------------------------------------------------------------------------- making masks
def source(case: Any, seed: int) -> Arrays:
    """What a mask is made of."""
    rng = np.random.default_rng(seed)
    if case.source == "segments":
        cuts = np.sort(rng.choice(case.length - 1, case.length // 1000 - 1, replace=False)) + 1
        return (np.searchsorted(cuts, np.arange(case.length), side="right").astype(np.int32),)
    if case.source == "csr":
        nodes = case.length
        made_of = graph(GraphAttention("fp32", 64, "random", nodes, case.keys * nodes, 1))
        return made_of.indptr, made_of.indices
    return (np.array([round(case.length**0.5)] * 2),)


def made(case: Any, arrays: Arrays) -> Call:
    """The constructor for that source."""
    from fa_cupy import BitMask

    makers: dict[str, Callable[[], Any]] = {
        "segments": lambda: BitMask.from_segments(*arrays),
        "csr": lambda: BitMask.from_csr(matrix),
        "window": lambda: BitMask.from_window(arrays[0].tolist(), case.keys),
    }
    if case.source == "csr":
        matrix = _matrix(*arrays)
    return Call(makers[case.source], _same, _same)


def _matrix(begin: np.ndarray, cols: np.ndarray) -> Any:
    from scipy import sparse

    shape = len(begin) - 1, len(begin) - 1
    return sparse.csr_matrix((np.ones(len(cols), np.float32), cols, begin), shape=shape)


def made_check(case: Any, arrays: Arrays) -> Check:
    """0 where some queries see the keys that they should, inf where one does not."""
    queries = np.linspace(0, case.length - 1, 200).astype(int)
    keys = np.arange(case.length)

    def seen(i: int) -> np.ndarray:
        if case.source == "segments":
            return np.flatnonzero(arrays[0] == arrays[0][i])
        if case.source == "csr":
            return np.asarray(arrays[1][arrays[0][i] : arrays[0][i + 1]])
        side = arrays[0][0]
        (y, x), (other_y, other_x) = divmod(i, side), np.divmod(keys, side)
        return np.flatnonzero((abs(other_y - y) <= case.keys) & (abs(other_x - x) <= case.keys))

    def error(mask: Any) -> float:
        rows = (mask[i : i + 1].to_csr().indices for i in queries)
        same = all(
            np.array_equal(row, np.sort(seen(i))) for i, row in zip(queries, rows, strict=True)
        )
        return 0.0 if same else float("inf")

    return error
