"""
Documents in one sequence
=========================

Documents of different lengths are put one after another into one sequence, instead of into a batch
with padding. Each token attends to the tokens before it in its own document. Offsets say where the
documents begin, or a mask of segments says which tokens belong together. The pairs of different
documents are not computed.
"""

import matplotlib.pyplot as plt
import numpy as np

from fa_cupy import BitMask, attention, plot

rng = np.random.default_rng(0)

# %%
# Documents
# ---------
# Seven documents with 4 heads. ``document`` has the number of the document of each token.

lengths = np.array([300, 40, 170, 90, 410, 20, 250])
document = np.repeat(np.arange(len(lengths)), lengths)
q, k, v = rng.standard_normal((3, 4, len(document), 32), dtype=np.float32)

# %%
# Offsets
# -------
# The documents lie end to end, so that offsets are all there is to say. Nothing is prepared, and
# this is the faster way.

offsets = np.concatenate([[0], np.cumsum(lengths)])
out = attention(q, k, v, q_offsets=offsets, is_causal=True)

# %%
# A mask
# ------
# A mask says the same. It also serves tokens in any order, and documents that share a part. A mask
# and causality compose: a key is visible where both allow it. Make the mask once and use it in all
# layers.

mask = BitMask.from_segments(document)
masked = attention(q, k, v, mask=mask, is_causal=True)
assert np.allclose(masked, out, atol=1e-5)

# %%
# The same with NumPy, one document after the other.

for number in range(len(lengths)):
    own = document == number
    scores = q[:, own] @ k[:, own].swapaxes(-1, -2) / np.sqrt(32)
    scores[:, ~np.tri(own.sum(), dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    direct = weights @ v[:, own] / weights.sum(axis=-1, keepdims=True)
    assert np.allclose(out[:, own], direct, atol=1e-5)

# %%
# Result
# ------
# With padding, each document would be as long as the longest, and all pairs of its queries and keys
# would be computed.

seen = mask & BitMask.from_window(len(document), (None, 0))
padded = len(lengths) * lengths.max() ** 2
print(f"visible pairs: {seen.nnz:,} of {padded:,} pairs of padded documents")

plot.mask(seen).set_title("pairs that a token sees")
plt.show()
