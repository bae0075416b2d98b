"""The two halves of a causal product, each for itself: running states, and reading from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fa_cupy.core import checks, dispatch, linear_problem


def prefix_state(
    k: Any,
    v: Any,
    ends: Sequence[int] | Any = None,
    *,
    q: Any = None,
    initial_state: Any = None,
    reverse: bool = False,
) -> Any:
    """Return running sums of outer products, or what queries read from them.

    The state at position p is ``initial_state + k[:p].mT @ v[:p]``, of shape (E, M), or with
    `reverse` ``initial_state + k[p:].mT @ v[p:]``.

    Parameters
    ----------
    k : array, shape (..., L, E)
        Keys, as in `causal_product`.
    v : array, shape (..., L, M)
        Values.
    ends : sequence of P ints from 0 to L, optional
        Positions, in any order; all of the sequence by default.
    q : array, shape (..., P, E), optional
        Queries: row i reads the state at ``ends[i]`` (all rows read the whole sequence's without
        `ends`). As in `causal_product`, `k` and `v` may have fewer heads. Where they have different
        numbers of heads, neither of them 1, `q` has to be given.
    initial_state : array, shape (..., E, M), optional
        What was summed before, of float32 (float64 for float64 input), with heads as in
        `causal_product`.
    reverse : bool
        Whether sums go from the last row to the first.

    Returns
    -------
    array
        Without `q`: the states, of shape (..., P, E, M), or (..., E, M) without `ends`; float32, or
        float64 for float64 input. With `q`: the rows ``q[i] @ state[i]``, of shape (..., P, M) and
        q's dtype, without an array of P states.

    Raises
    ------
    TypeError, ValueError
        As `causal_product`.
    NotImplementedError
        While a stream is captured into a CUDA graph. The capture can go on.

    See Also
    --------
    causal_product : where row i reads the state at ``i + 1`` (``i`` with `reverse`).

    Examples
    --------
    >>> import numpy as np
    >>> from fa_cupy import prefix_state
    >>> rng = np.random.default_rng(0)
    >>> k, v = rng.standard_normal((2, 1000, 8))
    >>> states = prefix_state(k, v, range(100, 1001, 100))  # after every 100 rows
    >>> states.shape
    (10, 8, 8)
    >>> bool(np.allclose(states[2], k[:300].T @ v[:300]))
    True

    Queries at times that lie between those of the keys:

    >>> times = np.sort(rng.random(1000))
    >>> q = rng.standard_normal((3, 8))
    >>> prefix_state(k, v, np.searchsorted(times, [0.7, 0.2, 0.5]), q=q).shape
    (3, 8)
    """
    name = "prefix_state"
    given = {"k": k, "v": v, "initial_state": initial_state}
    native = dispatch.to_native(name, **(given if q is None else {"q": q} | given))
    inputs = [None, *native.arrays] if q is None else native.arrays
    problem = linear_problem.product_problem(name, *inputs, aligned=False)
    reverse = checks.flag(name, "reverse", reverse)
    rows = 1 if q is None else problem.q_len
    if ends is None:
        found = np.full(rows, 0 if reverse else problem.k_len)
    else:
        found = linear_problem.positions(name, ends, problem.k_len)
    if q is not None and len(found) != rows:
        raise ValueError(f"{name}: ends has {len(found)} positions, q has {rows} rows")
    backend = dispatch.backend_of(native, "product")
    with native.context:
        if q is not None:
            result = backend.readings(problem, *inputs, found, reverse=reverse)
            return native.give_back(result)
        order = np.argsort(found, kind="stable")
        result = backend.states(problem, *inputs[1:], found[order], reverse=reverse)
        if ends is None:
            result = result[..., 0, :, :]
        elif (order[1:] < order[:-1]).any():
            result = result[..., np.argsort(order), :, :]
        return native.give_back(result)
