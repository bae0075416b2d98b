"""
Keys on disk
============

Keys and values that do not fit in memory are read from a file in chunks. Each chunk gives a part of
the result and the log-sum-exp of its scores, and ``merge_attention`` combines the parts exactly.
"""

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from scipy.special import logsumexp

from fa_cupy import attention, merge_attention

rng = np.random.default_rng(0)

# %%
# A file
# ------
# 200,000 keys and values with 32 numbers each, 51 MB. The files of a real problem would be larger
# than the memory; the code is the same.

count, dim, chunk = 200_000, 32, 20_000
folder = tempfile.TemporaryDirectory()
shape, path = (2, count, dim), Path(folder.name) / "keys_and_values.dat"
data = np.memmap(path, np.float32, mode="w+", shape=shape)
for start in range(0, count, chunk):
    part = rng.standard_normal((2, chunk, dim), dtype=np.float32)
    data[:, start : start + chunk] = part
data.flush()

# %%
# Chunk by chunk
# --------------
# The file is opened for reading. Only one chunk is in memory at a time. ``merge_attention`` takes
# the result so far and the new part, each with its log-sum-exp, and returns the result for all
# their keys, with its log-sum-exp.

keys, values = np.memmap(path, np.float32, mode="r", shape=shape)
q = 2 * rng.standard_normal((100, dim), dtype=np.float32)


def attend(keys, values):  # which are read from the file here
    return attention(q, np.array(keys), np.array(values), return_lse=True)


out, lse = attend(keys[:chunk], values[:chunk])
history = [out]
for start in range(chunk, count, chunk):
    rows = slice(start, start + chunk)
    part, part_lse = attend(keys[rows], values[rows])
    out, lse = merge_attention([out, part], [lse, part_lse])
    history.append(out)

# %%
# With all keys at once, by SciPy in float64 for the first ten queries, the result is the same.

scores = q[:10].astype(float) @ keys.T.astype(float) / np.sqrt(dim)
direct_lse = logsumexp(scores, axis=1)
direct = np.exp(scores - direct_lse[:, None]) @ values
assert np.allclose(lse[:10], direct_lse, atol=1e-4)
assert np.allclose(out[:10], direct, atol=1e-4)

# %%
# Result
# ------
# The estimate from the chunks so far comes closer to the result of all keys.

difference = [np.abs(part - out).max() for part in history]
print(f"largest error of the merged result {np.abs(out[:10] - direct).max():.1e}")

figure, ax = plt.subplots(figsize=(6, 3.2), layout="constrained")
ax.bar(np.arange(1, len(history) + 1), difference)
ax.set(xlabel="chunks that were read", ylabel="largest difference from all keys")
plt.show()

# %%
# The file is removed; before that, nothing may refer to it.

del data, keys, values
folder.cleanup()
