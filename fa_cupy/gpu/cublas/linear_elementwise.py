"""Elementwise steps of causal products, compiled by CuPy on first use."""

from __future__ import annotations

import cupy

mark = cupy.ElementwiseKernel(
    "T x", "raw int32 spoiled", "if (!isfinite(x)) spoiled[0] = 1", "fa_cupy_mark"
)

# One element of the states of an entry: the sums over its segments, in C order, become what stands
# before each of them, or after it if `inclusive`.
accumulate = cupy.ElementwiseKernel(
    "T first, int64 size, int64 count, bool reverse, bool inclusive",
    "T last, raw T sums",
    """
    const long long entry = i / size, element = i % size;
    T state = first;
    for (long long step = 0; step < count; ++step) {
        const long long index = reverse ? count - 1 - step : step;
        const ptrdiff_t place = (entry * count + index) * size + element;
        const T before = state;
        state += sums[place];
        sums[place] = inclusive ? state : before;
    }
    last = state;
    """,
    "fa_cupy_accumulate",
)

# A power of two near the largest of some values, inside the range whose sums stay finite.
unit = cupy.ElementwiseKernel(
    "T largest",
    "T found",
    "found = largest > T(0) && isfinite(largest) ? exp2(rint(log2(largest))) : T(1);"
    "found = min(max(found, T(9.094947017729282e-13)), T(1099511627776.0))",  # 2**-40, 2**40
    "fa_cupy_unit",
)

# `weight` is a sum of weights times `unit`.
normalise = cupy.ElementwiseKernel(
    "T weight, T unit, float64 eps",
    "T weighted",
    "weighted = weighted / (weight / unit + T(eps))",
    "fa_cupy_normalise",
)

# Feature maps, applied in place; each keeps NaN.
FEATURES = {
    name: cupy.ElementwiseKernel("", "T x", f"x = {formula}", f"fa_cupy_{name}")
    for name, formula in {
        "elu1": "x > T(0) ? x + T(1) : exp(x)",
        "relu": "x < T(0) ? T(0) : x",
        "exp": "exp(x)",
    }.items()
}

# From features and the gradients by them: these become those by what the features are of.
GRADIENTS = {
    name: cupy.ElementwiseKernel("T feature", "T grad", f"grad = {formula}", f"fa_cupy_d{name}")
    for name, formula in {
        "elu1": "feature < T(1) ? feature * grad : grad",  # exp(x) is the derivative of itself
        "relu": "feature <= T(0) ? T(0) : grad",
        "exp": "feature * grad",
    }.items()
}
