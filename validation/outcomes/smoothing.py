"""Calls of kernel regression, its gradients and non-local means."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import fa_cupy
from validation.outcomes.data import DTYPES, draw, some_dtypes
from validation.outcomes.record import Call

Shape = tuple[int, ...]
_KERNELS = "gaussian", "laplace", "matern32", "epanechnikov"


def calls() -> Iterator[Call]:
    """Yield all calls."""
    shapes: dict[str, tuple[Shape, Shape, Shape, Any]] = {
        "one dim": ((40, 1), (90, 1), (90,), 0.5),
        "three dims": ((2, 40, 3), (2, 90, 3), (2, 90, 2), 1.5),
        "a bandwidth for each dim": ((40, 2), (90, 2), (90, 3), np.array([0.8, 1.2])),
        "many dims": ((40, 12), (90, 12), (90, 2), 4.0),
    }
    for kernel in _KERNELS:
        for name, case in shapes.items():
            for dtype in some_dtypes(kernel + name):
                for function in (fa_cupy.kernel_regression, fa_cupy.kernel_regression_backward):
                    yield Call(
                        f"{function.__name__} {dtype} {kernel} {name}",
                        lambda xp, a=(function, dtype, kernel, case): _regression(xp, *a),
                    )
    for name, options in {
        "of the whole image": {"patch_distance": None},
        "nearby": {"patch_distance": 3, "sigma": 0.1},
    }.items():
        for dtype in some_dtypes(name):
            yield Call(
                f"non_local_means {dtype} {name}",
                lambda xp, a=(dtype, options): _denoised(xp, *a),
            )


def _regression(xp: Any, function: Any, dtype: str, kernel: str, case: tuple[Any, ...]) -> Any:
    *shapes, bandwidth = case
    x, samples, y = (
        xp.asarray(draw(arg, shape, DTYPES[dtype]))
        for arg, shape in zip("xXy", shapes, strict=True)
    )
    bandwidth = bandwidth if isinstance(bandwidth, float) else xp.asarray(bandwidth)
    if function is fa_cupy.kernel_regression:
        return function(x, samples, y, bandwidth, kernel)
    shape = x.shape[:-1] if y.ndim == 1 else (*x.shape[:-1], y.shape[-1])
    dout = xp.asarray(draw("dout", shape, DTYPES[dtype]))
    return function(dout, x, samples, y, bandwidth, kernel)


def _denoised(xp: Any, dtype: str, options: dict[str, Any]) -> Any:
    image = xp.asarray(draw("image", (20, 24, 3), DTYPES[dtype]))
    return fa_cupy.non_local_means(image, 0.8, 3, **options)
