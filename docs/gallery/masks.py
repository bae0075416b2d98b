"""
Looking at masks
================

A ``BitMask`` consists of blocks of 128 x 128 pairs of a query and a key. Empty blocks are skipped,
full blocks are computed as without a mask, and partial blocks store one bit a pair, or the pairs if
there are few. A picture shows which blocks a mask has, and thus what it costs.
"""

import matplotlib.pyplot as plt
import numpy as np
from scipy import ndimage

from fa_cupy import BitMask, attention, plot

# %%
# Windows
# -------
# In a sequence, a position sees itself and the 150 before it. In an image, a pixel sees those whose
# rows and columns differ by at most 2. Pixels are numbered as in ``image.reshape(-1)``.

before = BitMask.from_window(800, (150, 0))
pixels = BitMask.from_window((20, 40), 2)

# %%
# Operators
# ---------
# Masks combine by ``&``, ``|``, ``^`` and ``~``, with each other and with arrays of bool. Here each
# position also sees those of the first 20 that are before it, and none sees the last 100, which are
# padding.

position = np.arange(800)
first = BitMask.from_function(lambda q, k: (k < 20) & (q >= k), (800, 800))
together = (before | first) & (position < 700)

# %%
# Dense arrays follow the same rules.

i, j = position[:, None], position
dense = ((i - j <= 150) & (j <= i)) | ((j < 20) & (j <= i))
assert np.array_equal(together, dense & (j < 700))

# %%
# Equal scores make means of all that is seen: with the mask of pixels, a uniform filter.

image = np.random.default_rng(0).random((20, 40))
flat = image.reshape(-1, 1)
mean = attention(0 * flat, flat, flat, mask=pixels).reshape(image.shape)
inner = slice(2, -2), slice(2, -2)  # away from the edges, where windows end
assert np.allclose(mean[inner], ndimage.uniform_filter(image, 5)[inner])

# %%
# Pictures
# --------
# ``fa_cupy.plot.mask`` draws a mask. Without ``ax`` it makes a figure of its own, with a legend.

shares = f"{together.block_density:.0%}, visible pairs {together.density:.0%}"
print(f"blocks that are computed {shares}")

panels = {
    "window": before,
    "window of an image": pixels,
    "(before | first) & kept": together,
    "~before": ~before,
}
figure, axes = plt.subplots(2, 2, figsize=(7, 7.4), layout="constrained")
for ax, (title, mask) in zip(axes.flat, panels.items(), strict=True):
    plot.mask(mask, ax=ax).set_title(title)
names = axes[0, 0].get_legend_handles_labels()
figure.legend(*names, loc="outside lower center", ncols=3)
plt.show()
