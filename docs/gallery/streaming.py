"""
Linear attention on a stream
============================

Softmax attention needs all keys so far for each new row. Linear attention needs a state of fixed
size: a stream can be processed as it arrives, in constant memory. Here the rows of a signal come in
packets, and the state is passed on from one packet to the next.
"""

from time import perf_counter

import matplotlib.pyplot as plt
import numpy as np

from fa_cupy import linear_attention

rng = np.random.default_rng(0)

# %%
# A stream
# --------
# 20,000 rows in packets of 50. Queries, keys and values of a model would be functions of the rows;
# here they are random.

length, packet = 20_000, 50
q, k = rng.standard_normal((2, length, 32), dtype=np.float32)
v = np.cumsum(rng.standard_normal((length, 4), dtype=np.float32), axis=0) / 50

# %%
# Packet by packet
# ----------------
# ``return_state=True`` returns the state after the last row, and ``initial_state`` continues from
# it. Before the first row all sums are 0: a row for each feature, a column for each value, and one
# more for the sum of the features.

state, parts, seconds = np.zeros((32, 4 + 1), np.float32), [], []
for start in range(0, length, packet):
    rows = slice(start, start + packet)
    begin = perf_counter()
    arrays = q[rows], k[rows], v[rows]
    out, state = linear_attention(*arrays, initial_state=state, return_state=True)
    seconds.append(perf_counter() - begin)
    parts.append(out)
streamed = np.concatenate(parts)

# %%
# The result is that of one call for the whole signal, and that of the formula, here for the last
# row.

whole = linear_attention(q, k, v)
assert np.allclose(streamed, whole, rtol=1e-4, atol=1e-4)


def features(x):  # elu(x) + 1
    return np.where(x > 0, x + 1, np.exp(x))


weights = features(k.astype(float)) @ features(q[-1].astype(float))
assert np.allclose(streamed[-1], weights @ v / weights.sum(), rtol=1e-4, atol=1e-4)

# %%
# Result
# ------
# The time of a packet does not depend on how many came before.

print(f"state: {state.size} numbers after {length:,} rows")

figure, (upper, lower) = plt.subplots(2, 1, figsize=(7, 4.5), layout="constrained")
upper.plot(v[:, 0], label="values", linewidth=0.8)
upper.plot(streamed[:, 0], label="weighted mean of those before")
upper.set(xlabel="row", title="one column of the values and of the output")
upper.legend()
lower.plot(np.arange(0, length, packet), 1e3 * np.array(seconds), ".", markersize=3)
lower.set(xlabel="row", ylabel="ms", title="time of a packet")
lower.set_ylim(0, 5e3 * np.median(seconds))
plt.show()
