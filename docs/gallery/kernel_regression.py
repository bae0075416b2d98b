"""
Kernel regression
=================

A function is known at scattered points, with noise. Kernel regression estimates it elsewhere: the
estimate at a point is the mean of all samples, weighted by a kernel of their distance. This is the
estimate of Nadaraya and Watson.
"""

import matplotlib.pyplot as plt
import numpy as np
from scipy.spatial.distance import cdist

from fa_cupy import kernel_regression

rng = np.random.default_rng(0)

# %%
# Samples
# -------
# 4,000 points in a square, with the values of a smooth function and noise.


def function(points):
    return np.sin(3 * points[:, 0]) * np.cos(2 * points[:, 1])


samples = rng.uniform(-2, 2, (4000, 2))
values = function(samples) + 0.3 * rng.standard_normal(len(samples))

# %%
# Estimate
# --------
# The last axis of points and samples is that of the coordinates. The bandwidth is the distance over
# which the weights fall off.

side = np.linspace(-2, 2, 60)
grid = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
estimate = kernel_regression(grid, samples, values, 0.2)

# %%
# The direct formula has an array of all pairs, 3,600 x 4,000 numbers. ``kernel_regression`` has no
# such array, so it also works with a hundred times as many points.

weights = np.exp(-cdist(grid, samples, "sqeuclidean") / (2 * 0.2**2))
direct = weights @ values / weights.sum(axis=1)
assert np.allclose(estimate, direct, rtol=1e-5, atol=1e-5)

# %%
# Result
# ------

error = np.sqrt(np.mean((estimate - function(grid)) ** 2))
print(f"root mean square error {error:.3f}, noise of the samples 0.3")

figure, axes = plt.subplots(1, 3, figsize=(9, 3), layout="constrained", sharey=True)
colours = {"vmin": -1, "vmax": 1, "cmap": "RdBu_r"}
axes[0].scatter(*samples.T, c=values, s=3, **colours)
axes[1].pcolormesh(side, side, estimate.reshape(60, 60), **colours)
shown = axes[2].pcolormesh(side, side, function(grid).reshape(60, 60), **colours)
for ax, title in zip(axes, ("samples", "estimate", "function"), strict=True):
    ax.set(title=title, aspect="equal")
figure.colorbar(shown, ax=axes)
plt.show()
