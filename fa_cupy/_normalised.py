"""Linear attention: a causal product of features, normalised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fa_cupy import _calls, _options, _product

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
        float32 (float64 for float64 input). A callable gets each array as it was given and returns
        one of the same library with the same axes, of which the last may have another size.
    eps : float
        Added to the sums of weights; at least 0.
    out : array, shape (..., L, M), optional
        Where to write the output: of q's kind and dtype, overlapping no input.

    Returns
    -------
    array, shape (..., L, M)
        Of the kind and dtype of `q`, laid out in memory as `q` is.

    Raises
    ------
    TypeError, ValueError
        As `causal_product`.

    See Also
    --------
    attention : weights that are a softmax, in time proportional to L x L.

    Notes
    -----
    The sums of weights are a causal product with a column of ones beside the values, so one pass
    computes both [1]_. Where weights may be negative (``"identity"``), their sum may be near 0 and
    the quotient anything.

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
    feature = None
    if isinstance(feature_map, str) and feature_map in _FEATURE_MAPS:
        feature = None if feature_map == "identity" else feature_map
    elif callable(feature_map):
        _calls.require(name, q=q, k=k, v=v)
        q, k = _mapped(name, "q", q, feature_map), _mapped(name, "k", k, feature_map)
    else:
        raise ValueError(
            f"{name}: feature_map is {_options.show(feature_map)}, "
            f"want one of {', '.join(map(repr, _FEATURE_MAPS))} or a callable"
        )
    number = _options.finite(name, "eps", eps, minimum=0.0)
    native = _calls.to_native(name, q=q, k=k, v=v, out=out)
    *inputs, result = native.arrays
    problem = _product.product_problem(name, *inputs)
    _calls.check_out(name, result, problem, inputs)
    backend = _calls.backend_of(native, "product")
    with native.context:
        result = _calls.result_for(native, problem, inputs[0], result)
        result = backend.linear_attention(problem, *inputs, result, feature=feature, eps=number)
        return native.give_back(result) if out is None else out


def _mapped(name: str, arg: str, array: Any, feature_map: Callable[[Any], Any]) -> Any:
    """Return the features of an array, which have its axes but the last."""
    found = feature_map(array)
    shape, wanted = getattr(found, "shape", ()), getattr(array, "shape", ())
    if len(shape) > 1 and tuple(shape[:-1]) != tuple(wanted[:-1]):
        raise ValueError(
            f"{name}: feature_map gave shape {tuple(shape)} for {arg} of shape {tuple(wanted)}, "
            "want the same axes but the last"
        )
    return found
