"""
A bandwidth from the data
=========================

The bandwidth decides how smooth a kernel regression is. A good one predicts each sample well from
all the others. That error has a gradient with respect to the bandwidths, one for each coordinate,
so an optimizer of SciPy finds them. A coordinate without influence gets a large bandwidth.
"""

import matplotlib.pyplot as plt
import numpy as np
from scipy.optimize import check_grad, minimize

from fa_cupy import kernel_regression, kernel_regression_backward

rng = np.random.default_rng(0)

# %%
# Samples
# -------
# The values depend on the first coordinate strongly, on the second one weakly, and on the third one
# not at all. Their noise has a variance of 0.01, and no estimate has a smaller mean square error.

X = rng.uniform(-2, 2, (500, 3))
y = np.sin(3 * X[:, 0]) + 0.3 * X[:, 1] + 0.1 * rng.standard_normal(500)

# %%
# Error and gradient
# ------------------
# The mask leaves each sample out of the estimate at its own place. The gradient of the bandwidth is
# the last of the four that ``kernel_regression_backward`` returns. The unknowns are logarithms, so
# that bandwidths are positive.

others = ~np.eye(len(X), dtype=bool)


def loss_and_gradient(log_width):
    width = np.exp(log_width)
    error = kernel_regression(X, X, y, width, mask=others) - y
    dout = 2 * error / len(y)
    *_, dwidth = kernel_regression_backward(dout, X, X, y, width, mask=others)
    return np.mean(error**2), width * dwidth


# %%
# SciPy compares the gradient with differences of the error.

start = np.zeros(3)
difference = check_grad(
    lambda w: loss_and_gradient(w)[0],
    lambda w: loss_and_gradient(w)[1],
    start,
)
assert difference < 1e-5

# %%
# Optimize
# --------
# Bounds keep a bandwidth without influence from growing for ever.

path = [start]
found = minimize(
    loss_and_gradient,
    start,
    jac=True,
    method="L-BFGS-B",
    bounds=[(-4, 3)] * 3,
    callback=lambda w: path.append(w.copy()),
    options={"maxiter": 30},
)
width = np.exp(found.x)
assert width[0] < width[1] < width[2]
assert found.fun < 0.2 * loss_and_gradient(start)[0]
print(f"bandwidths {np.round(width, 2)}, mean square error {found.fun:.3f}")

# %%
# Result
# ------

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
for i, values in enumerate(np.exp(path).T):
    left.semilogy(values, "o-", markersize=3, label=f"coordinate {i + 1}")
left.set(xlabel="iteration", ylabel="bandwidth")
left.legend()
line = np.linspace(-2, 2, 200)
points = np.stack([line, 0 * line, 0 * line], axis=1)
right.plot(X[:, 0], y - 0.3 * X[:, 1], ".", ms=3, color="#c0c6cc", label="samples")
for label, widths in (("bandwidths of 1", np.ones(3)), ("bandwidths found", width)):
    right.plot(line, kernel_regression(points, X, y, widths), label=label)
right.set(xlabel="first coordinate")
right.legend(fontsize=8)
plt.show()
