"""
Attention on a graph
====================

On a graph, each node attends to its neighbours. A mask made from the edges hides all other pairs.
Blocks of 128 x 128 pairs without an edge are skipped, and a graph with few edges in each block is
computed edge by edge. Where there are many, a new order of the nodes, in which neighbours have
numbers close to each other, leaves fewer blocks with an edge and saves time.
"""

import matplotlib.pyplot as plt
import numpy as np
from scipy import sparse
from scipy.spatial import KDTree

from fa_cupy import BitMask, attention, attention_backward, plot

rng = np.random.default_rng(0)

# %%
# A graph
# -------
# 3,000 points in a square. Two of them are neighbours if their distance is at most 0.04, and each
# point is a neighbour of itself.

count = 3000
points = rng.random((count, 2))
pairs = KDTree(points).query_pairs(0.04, output_type="ndarray")
src = np.concatenate([pairs[:, 0], pairs[:, 1], np.arange(count)])
dst = np.concatenate([pairs[:, 1], pairs[:, 0], np.arange(count)])

# %%
# Values flow along the edges: node ``dst[e]`` is a query that sees the key ``src[e]``. A sparse
# matrix with queries as rows makes the same mask.

mask = BitMask.from_edges(src, dst, count)
graph = sparse.csr_array((np.ones(len(src)), (dst, src)), shape=(count, count))
assert mask.equals(BitMask.from_csr(graph))

# %%
# Nodes in another order
# ----------------------
# ``reorder`` returns the mask for the new order, and the order.

near, order = mask.reorder()
shares = f"{mask.block_density:.0%}, in the new order {near.block_density:.0%}"
print(f"blocks with an edge: {shares}")

# %%
# Attention
# ---------
# Queries, keys and values are taken in the new order, and the rows of the result are put back.

q, k, v = rng.standard_normal((3, count, 16))
out = np.empty_like(v)
out[order] = attention(q[order], k[order], v[order], mask=near)

# %%
# The same with SciPy, edge by edge: the scores are the data of a sparse matrix.

scores = np.exp((q[dst] * k[src]).sum(axis=1) / np.sqrt(16))
weights = sparse.csr_array((scores, (dst, src)), shape=(count, count))
direct = (weights @ v) / weights.sum(axis=1)[:, None]
assert np.allclose(out, direct)

# %%
# Edge weights
# ------------
# A sparse matrix as `bias` holds a number for each edge, which is added to its score. Its stored
# elements say which keys a query sees, so that no mask is needed. Here far neighbours weigh less.

distances = np.linalg.norm(points[dst] - points[src], axis=1)
bias = sparse.csr_array((-distances / 0.01, (dst, src)), shape=(count, count))
weighted, lse = attention(q, k, v, bias, return_lse=True)

weights = sparse.csr_array((scores * np.exp(-distances / 0.01), (dst, src)), shape=(count, count))
direct = (weights @ v) / weights.sum(axis=1)[:, None]
assert np.allclose(weighted, direct)

# %%
# The gradient is a sparse matrix with an element for each edge: by how much a loss grows with its
# weight. Here the loss is the sum of squares of the output.

(dbias,) = attention_backward(2 * weighted, q, k, v, weighted, lse, bias, need=["bias"])
step = sparse.csr_array((1e-6 * rng.standard_normal(bias.nnz), bias.indices, bias.indptr))
change = np.sum(attention(q, k, v, bias + step) ** 2) - np.sum(weighted**2)
assert np.isclose(change, (dbias.data * step.data).sum(), rtol=1e-3)

# %%
# Both masks
# ----------

figure, axes = plt.subplots(1, 2, figsize=(8, 4), layout="constrained")
plot.mask(mask, ax=axes[0]).set_title("nodes at random")
plot.mask(near, ax=axes[1]).set_title("neighbours close to each other")
names = axes[0].get_legend_handles_labels()
figure.legend(*names, loc="outside lower center", ncols=3)
plt.show()
