"""
A text continued with a cache
=============================

A model of characters with one parameter: the next character is likely one that followed in similar
places of a text. Similar places are those with the same characters before them, so this is
attention: contexts are queries and keys, and the characters that follow are values. Each character
that is written becomes a key too. A cache of keys and values appends it and keeps the others.
"""

import re
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import numpy as np

from fa_cupy import KVCache, attention

rng = np.random.default_rng(0)

# %%
# Contexts as vectors
# -------------------
# The text is a part of Python's manual, which ``help`` shows. A context is the sum of 8 random
# vectors, one for each character at each place before the next one. The product of two contexts is
# then about the number of places at which they agree, where near places count more.

manual = (topics["naming"] + topics["import"] + topics["execmodel"]).lower()
text = " ".join(re.sub("[^a-z.,]+", " ", manual).split())[:10_000]
letters = sorted(set(text))
numbers = np.array([letters.index(letter) for letter in text])
near, dim = 0.6 ** np.arange(8), 128
vectors = rng.choice([-1, 1], (8, len(letters), dim)) * np.sqrt(near[:, None, None] / dim)
vectors = vectors.astype(np.float32)


def contexts(numbers):
    """Contexts of the characters of a text, and of the next one: (characters + 1, dim)."""
    padded = np.concatenate([np.zeros(8, int), numbers])
    return np.sum([vectors[i, padded[7 - i : len(padded) - i]] for i in range(8)], axis=0)


def following(numbers):
    """The characters of a text as values."""
    return np.eye(len(letters), dtype=np.float32)[numbers]


# %%
# The parameter
# -------------
# The scale of the scores says how similar a context must be. Each character is predicted from those
# before it, and the best scale is the one that makes the text most likely. One hundredth of the
# chance is for characters that have not occurred.

keys, values = contexts(numbers)[:-1], following(numbers)


def likelihood(scale):
    chances = attention(keys[1:], keys[:-1], values[:-1], scale=scale, is_causal=True)
    found = chances[np.arange(len(chances)), numbers[1:]]
    return np.log(0.99 * found + 0.01 / len(letters)).mean()


scale = max((2.0, 4.0, 6.0, 8.0, 12.0), key=likelihood)

# %%
# Four continuations
# ------------------
# The text is the beginning of four sequences, and is stored once: forks share its pages. In each
# step the cache gives the chances of the next characters, and one is chosen and appended.

count, steps = 4, 60
longest = len(text) + steps
cache = KVCache(1, dim, len(letters), sequences=count, max_length=longest, page_size=64)
cache.append(keys[None, None], values[None, None], [0])
for _ in range(1, count):
    cache.fork(0)

written, outputs = [numbers] * count, []
for _ in range(steps):
    q = np.stack([contexts(row[-8:])[-1:] for row in written])[:, None]  # (count, 1, 1, dim)
    output = cache.attention(q, scale=scale)[:, 0, 0]
    outputs.append(output)
    drawn = [rng.choice(len(letters), p=p / p.sum()) for p in output.astype(float)]
    written = [np.append(row, letter) for row, letter in zip(written, drawn, strict=True)]
    cache.append(q, following(drawn)[:, None, None])
chances = np.stack(outputs, axis=1)  # (sequence, step, character)

# %%
# Without a cache, all keys are computed anew. One call then has all steps: causality, counted from
# the last key, hides the characters that come later.

for row, found in zip(written, chances, strict=True):
    k, v = contexts(row)[:-1], following(row)
    q = k[len(text) :]
    whole = attention(q, k[:-1], v[:-1], scale=scale, is_causal=True, causal_align="bottom_right")
    assert np.allclose(whole, found, atol=1e-5)

# %%
# The last step of the last sequence by the formula, with NumPy.

k, v = contexts(written[-1])[:-1], following(written[-1])
weights = np.exp(scale * k[:-1] @ k[-1])
assert np.allclose(weights @ v[:-1] / weights.sum(), chances[-1, -1], atol=1e-5)

# %%
# Result
# ------
# The chances of the next characters of one sequence, and the ones that were chosen.

used = len(cache.k) - (cache.free_pages or 0)
print(f"{count} sequences of {len(written[0]):,} characters in {used} pages, scale {scale:g}")

figure, axes = plt.subplots(figsize=(9, 6), layout="constrained")
image = axes.imshow(chances[0].T, cmap="Blues", aspect="auto", vmin=0, vmax=1)
chosen = written[0][len(text) :]
axes.plot(np.arange(steps), chosen, "o", color="C1", markersize=3)
axes.set_xticks(np.arange(steps), [letters[i] for i in chosen], family="monospace")
axes.set_yticks(np.arange(len(letters)), letters, family="monospace", fontsize=8)
axes.set(xlabel="what is written", ylabel="character", title="chances of the next character")
figure.colorbar(image, ax=axes, label="chance")
plt.show()
