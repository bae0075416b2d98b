"""Linear attention: a causal product of features, normalised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fa_cupy.core import arrays, attention_problem, checks, dispatch, linear_problem

_FEATURE_MAPS = ("elu1", "relu", "exp", "identity")


def linear_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    feature_map: str | Callable[[Any], Any] = "elu1",
    eps: float = 1e-6,
    out: Any = None,
) -> Any:
    """Causal linear attention: a causal product of features, divided by the sums of its weights.

    With features ``x = f(q)`` and ``y = f(k)``, row i of the output is the mean of the rows
    ``v[j]`` up to i, weighted by ``x[i] @ y[j]``.

    Parameters
    ----------
    q : array, shape (..., L, E)
    k : array, shape (..., L, E)
    v : array, shape (..., L, M)
        As in `causal_product`.
    feature_map : {"elu1", "relu", "exp", "identity"} or callable
        What is applied to `q` and `k`: ``elu(x) + 1``, ``max(x, 0)``, ``exp(x)`` or nothing, in
        float32 (float64 for float64 input). A callable gets `q`, then `k`, as they were given (of
        NumPy arrays read-only views) and returns new arrays of the same library and dtype. The last
        axis may have another size, the same for both; the others stay. It must not store arrays
        that it allocates while a stream is captured: they are the graph's.
    eps : float
        Added to the sums of weights; at least 0. With 0, or what rounds to it in the dtype of the
        sums, the output is 0 / 0 = NaN where all weights are 0, and everywhere where E is 0.
    out : array, shape (..., L, M), optional
        Where to write the output: of q's kind and dtype, overlapping no input.

    Returns
    -------
    array, shape (..., L, M)
        Of the kind and dtype of `q`, laid out in memory as the given `q` is.

    Raises
    ------
    TypeError, ValueError
        As `causal_product`, before a callable runs; for what that returns, after it.
    NotImplementedError
        While a stream is captured into a CUDA graph: for float64. The capture can go on; a callable
        has run before.

    See Also
    --------
    attention : weights that are a softmax, in time proportional to L x L.

    Notes
    -----
    The sums of weights are a causal product with a column of ones beside the values, so one pass
    computes both [1]_. Where weights may be negative (``"identity"``), their sum may be near 0 and
    the quotient anything.

    Features have to stay in the range of their dtype, and weights and sums in that of the sums, as
    in `causal_product`: ``"exp"`` of 89 is infinite in float32, and infinity divided by infinity is
    NaN. The features of a callable have the dtype of `q`, of which float16 ends at 65,504.

    References
    ----------
    .. [1] A. Katharopoulos, A. Vyas, N. Pappas and F. Fleuret, "Transformers are RNNs: fast
       autoregressive transformers with linear attention", ICML, 2020.

    Examples
    --------
    >>> import numpy as np
    >>> from fa_cupy import linear_attention
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1000, 16))
    >>> out = linear_attention(q, k, v)
    >>> bool(np.allclose(out[0], v[0], atol=1e-5))  # the first row sees itself only
    True

    A feature map of one's own, here of quadratic features:

    >>> def pairs(x):
    ...     return (x[..., :, None] * x[..., None, :]).reshape(*x.shape[:-1], -1)
    >>> linear_attention(q, k, v, feature_map=pairs).shape
    (1000, 16)
    """
    name = "linear_attention"
    known = isinstance(feature_map, str) and feature_map in _FEATURE_MAPS
    if not known and not callable(feature_map):
        raise ValueError(
            f"{name}: feature_map is {checks.show(feature_map)}, "
            f"want one of {', '.join(map(repr, _FEATURE_MAPS))} or a callable"
        )
    number = checks.finite(name, "eps", eps, minimum=0.0)
    native = dispatch.to_native(name, q=q, k=k, v=v, out=out)
    *inputs, result = native.arrays
    problem = linear_problem.product_problem(name, *inputs)
    dispatch.check_out(name, result, problem, inputs)
    like, feature = inputs[0], None
    if known and feature_map != "identity":
        feature = feature_map
    backend = dispatch.backend_of(native, "product")
    with native.context:
        if callable(feature_map):  # which may allocate what belongs to this call
            features = _features(name, (q, k), inputs[:2], feature_map)
            inputs[:2] = features.values()
            problem = linear_problem.product_problem(name, *inputs)
            if out is not None:
                attention_problem.check_out(
                    name, result, problem.out_shape, problem.dtype, features.items()
                )
        if result is None:
            result = dispatch.allocator(native)(problem.out_shape, problem.dtype, like)
        result = backend.linear_attention(problem, *inputs, result, feature=feature, eps=number)
        return native.give_back(result) if out is None else out


def _features(
    name: str,
    given: tuple[Any, Any],
    inputs: Sequence[Any],
    feature_map: Callable[[Any], Any],
) -> dict[str, Any]:
    """Return the features of q and k as native arrays, by the names that errors give them.

    `given` are q and k as the caller has them, `inputs` the same as native arrays.
    """
    q, k = given
    of_q, of_k = "feature_map(q)", "feature_map(k)"
    found = {of_q: feature_map(_read_only(q)), of_k: feature_map(_read_only(k))}
    x, y = dispatch.to_native(name, q=q, **found).arrays[1:]
    attention_problem.common_dtype(name, {"q": inputs[0], of_q: x, of_k: y})
    for arg, array, features in zip("qk", inputs, (x, y), strict=True):
        if features.shape[:-1] != array.shape[:-1]:
            raise ValueError(
                f"{name}: feature_map({arg}) has shape {features.shape}, "
                f"{arg} has {array.shape}, want the same axes but the last"
            )
    if x.shape[-1] != y.shape[-1]:
        raise ValueError(f"{name}: {of_k} has dim {y.shape[-1]}, {of_q} has {x.shape[-1]}")
    # A buffer used twice holds the features of k only; views of q and k may meet in memory.
    if q is not k and arrays.overlap(x, y) and not arrays.overlap(x, inputs[0]):
        raise ValueError(f"{name}: {of_k} overlaps {of_q} in memory, want separate memory")
    return {of_q: x, of_k: y}


def _read_only(array: Any) -> Any:
    """Return a view that cannot be written to, where the library of `array` has such views."""
    if isinstance(array, np.ndarray):
        array = array.view()
        array.flags.writeable = False
    return array
