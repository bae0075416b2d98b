"""Causal products and linear attention over a sequence that is spread over ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fa_cupy import _linear_attention
from fa_cupy.core import backends, broadcasting, checks, dispatch, linear_problem
from fa_cupy.core.arrays import Native
from fa_cupy.core.linear_problem import Product
from fa_cupy.distributed.communicator import (
    Communicator,
    Facts,
    agree,
    over_ranks,
    record_of,
    require,
)
from fa_cupy.distributed.order import dense

# By the type of q: what begins a call that was made before; see `_repeated`.
_REPEATED: dict[type, Any] = {}


def causal_product(
    q: Any,
    k: Any,
    v: Any,
    *,
    comm: Communicator,
    reverse: bool = False,
    return_state: bool = False,
) -> Any:
    """Causal product over a sequence of which each rank has a part, in the order of the ranks.

    Parameters
    ----------
    q : array, shape (..., L, E)
    k : array, shape (..., L, E)
    v : array, shape (..., L, M)
        The part of this rank: arrays as those of `fa_cupy.causal_product`. Rank r has the rows
        after those of rank ``r - 1``; L may differ from rank to rank.
    comm : Communicator
        The communicator of this rank: one from `local`, an `MpiCommunicator` or an
        `NcclCommunicator`.
    reverse : bool
        Whether to go from the last row of the last rank to the first row of the first one.
    return_state : bool
        Whether to return the state after the last row of this rank too: on the last rank (the first
        with `reverse`) that of the whole sequence.

    Returns
    -------
    out : array, shape (..., L, M)
        Of the rows of this rank; of the library, the dtype and the memory layout of `q`.
    state : array, shape (..., E, M)
        Only with `return_state`, as `fa_cupy.causal_product` returns it.

    Raises
    ------
    TypeError, ValueError
        With a message that names the argument. If the arguments of one rank are wrong, the others
        raise a `RankError`.
    RankError, TimeoutError
        If another rank has failed, or does not answer within the time-out of `comm`.
    NotImplementedError
        While a stream is captured into a CUDA graph.

    See Also
    --------
    causal_product_backward : its gradients.

    Notes
    -----
    Each rank computes the state of its own keys and values. A parallel prefix sum in log2(ranks)
    steps gives each rank the sum of the states before it, from which it computes its rows. A state
    has E * M numbers for each head, whatever the length is. Results have the same bits in each run.

    Ranks compare their arguments before any array is sent. There is one exception: threads with
    GPUs (`local`) that repeat a call with the same shapes. There, a rank does not wait for ranks
    whose states it does not need. If their arguments differ from its own, one of its next calls
    raises the error, or the call ``ranks(function)`` in which it runs.

    Examples
    --------
    >>> import numpy as np
    >>> import fa_cupy
    >>> from fa_cupy import distributed
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 1000, 32))
    >>> def part(comm):
    ...     own = [distributed.split(x, comm) for x in (q, k, v)]
    ...     return distributed.causal_product(*own, comm=comm)
    >>> with distributed.local(4) as ranks:
    ...     out = distributed.join(ranks(part))
    >>> bool(np.allclose(out, fa_cupy.causal_product(q, k, v)))
    True
    """
    with require("causal_product", comm).turn():
        return _product(q, k, v, comm, reverse, return_state)


def _product(q: Any, k: Any, v: Any, comm: Communicator, reverse: Any, return_state: Any) -> Any:
    name = "causal_product"
    found: list[Any] = []
    if not return_state and _repeated(name, comm, (q, k, v), reverse, found):
        (halves,) = found
        with comm.guard():
            (before,) = _states_before(comm, halves.xp, [(halves.state(), reverse)], name)
            return halves.finish(before)
    given = {"q": q, "k": k, "v": v}
    native, problem, record = _agreed(name, comm, given, reverse, return_state=return_state)
    q, k, v = native.arrays
    xp = sys.modules[native.backend]
    with comm.guard(), native.context:
        halves = None
        if native.backend == "cupy" and not return_state:
            halves = _gpu(q).forward(problem, q, k, v, bool(reverse), record)
        state = _own_state(k, v) if halves is None else halves.state()
        (before,) = _states_before(comm, xp, [(state, bool(reverse))], name)
        if halves is not None:
            return native.give_back(halves.finish(before))
        result = _linear_attention.causal_product(
            q, k, v, initial_state=before, reverse=reverse, return_state=return_state
        )
        if return_state:
            return tuple(native.give_back(x) for x in result)
        return native.give_back(result)


def causal_product_backward(
    dout: Any, q: Any, k: Any, v: Any, *, comm: Communicator, reverse: bool = False
) -> tuple[Any, Any, Any]:
    """Gradients of `fa_cupy.distributed.causal_product` with respect to its arrays.

    Parameters
    ----------
    dout : array, shape (..., L, M)
        Gradient of the output of this rank.
    q : array, shape (..., L, E)
    k : array, shape (..., L, E)
    v : array, shape (..., L, M)
    comm : Communicator
    reverse : bool
        The arguments of the product.

    Returns
    -------
    dq : array, shape (..., L, E)
    dk : array, shape (..., L, E)
    dv : array, shape (..., L, M)
        Those of the rows of this rank, as `fa_cupy.causal_product_backward` returns them.

    Raises
    ------
    TypeError, ValueError, RankError, TimeoutError, NotImplementedError
        As `causal_product` does.

    Notes
    -----
    The gradient of `q` needs the state of the ranks before this one, those of `k` and `v` need the
    gradient of the state from the ranks after it. The ranks add up both at the same time.

    Examples
    --------
    >>> import numpy as np
    >>> import fa_cupy
    >>> from fa_cupy import distributed
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 8, 300, 16))
    >>> def part(comm):
    ...     own = [distributed.split(x, comm) for x in (dout, q, k, v)]
    ...     return distributed.causal_product_backward(*own, comm=comm)
    >>> with distributed.local(2) as ranks:
    ...     dq, dk, dv = (distributed.join(parts) for parts in zip(*ranks(part)))
    >>> whole = fa_cupy.causal_product_backward(dout, q, k, v)
    >>> all(np.allclose(x, y) for x, y in zip((dq, dk, dv), whole))
    True
    """
    with require("causal_product_backward", comm).turn():
        return _gradients(dout, q, k, v, comm, reverse)


def _gradients(
    dout: Any, q: Any, k: Any, v: Any, comm: Communicator, reverse: Any
) -> tuple[Any, Any, Any]:
    name = "causal_product_backward"
    found: list[Any] = []
    if _repeated(name, comm, (dout, q, k, v), reverse, found):
        (halves,) = found
        with comm.guard():
            state, after = halves.states()
            directions = [(state, reverse), (after, not reverse)]
            return _three(halves.finish(*_states_before(comm, halves.xp, directions, name)))
    given = {"q": q, "k": k, "v": v, "dout": dout}
    native, problem, record = _agreed(name, comm, given, reverse)
    q, k, v, dout = native.arrays
    xp = sys.modules[native.backend]
    with comm.guard(), native.context:
        halves = None
        if native.backend == "cupy":
            halves = _gpu(q).backward(problem, dout, q, k, v, bool(reverse), record)
        if halves is not None:
            state, after = halves.states()
        else:
            state = _own_state(k, v)
            after = _linear_attention.prefix_state(q, dout)
            after = broadcasting.summed(after, problem.state_shape)
        directions = [(state, bool(reverse)), (after, not reverse)]
        before, dstate = _states_before(comm, xp, directions, name)
        if halves is not None:
            return _three(native.give_back(x) for x in halves.finish(before, dstate))
        grads = _linear_attention.causal_product_backward(
            dout, q, k, v, initial_state=before, reverse=reverse, dstate=dstate
        )
        return _three(native.give_back(x) for x in grads[:3])


def linear_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    comm: Communicator,
    feature_map: str | Callable[[Any], Any] = "elu1",
    eps: float = 1e-6,
    is_causal: bool = True,
) -> Any:
    """Linear attention over a sequence of which each rank has a part, in the order of the ranks.

    Rank r has the rows after those of rank ``r - 1``. There is no function for gradients.

    Parameters
    ----------
    q : array, shape (..., Lq, E)
    k : array, shape (..., Lk, E)
    v : array, shape (..., Lk, M)
        The part of this rank: arrays as those of `fa_cupy.linear_attention`.
    comm : Communicator
        The communicator of this rank: one from `local`, an `MpiCommunicator` or an
        `NcclCommunicator`.
    feature_map : {"elu1", "relu", "exp", "identity"} or callable
    eps : float
    is_causal : bool
        As in `fa_cupy.linear_attention`; the same on all ranks.

    Returns
    -------
    array, shape (..., Lq, M)
        Of the rows of this rank; of the library, the dtype and the memory layout of `q`.

    Raises
    ------
    TypeError, ValueError, RankError, TimeoutError, NotImplementedError
        As `causal_product` does.

    See Also
    --------
    causal_product : how the ranks share the work.

    Examples
    --------
    >>> import numpy as np
    >>> import fa_cupy
    >>> from fa_cupy import distributed
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 1000, 32))
    >>> def part(comm):
    ...     own = [distributed.split(x, comm) for x in (q, k, v)]
    ...     return distributed.linear_attention(*own, comm=comm)
    >>> with distributed.local(2) as ranks:
    ...     out = distributed.join(ranks(part))
    >>> bool(np.allclose(out, fa_cupy.linear_attention(q, k, v)))
    True
    """
    name = "linear_attention"
    comm = require(name, comm)
    options: dict[str, Any] = {"feature_map": feature_map, "eps": eps}
    found: dict[str, Any] = {}

    def describe() -> Facts:
        causal = checks.flag(name, "is_causal", is_causal)
        native, facts, _ = _described(name, {"q": q, "k": k, "v": v}, False, aligned=causal)
        # The function of one rank checks the options: with no query it returns the own state alone.
        with native.context:
            own_q, own_k, own_v = native.arrays
            _, found["state"] = _linear_attention.linear_attention(
                own_q[..., :0, :], own_k, own_v, is_causal=False, return_state=True, **options
            )
        named = feature_map if isinstance(feature_map, str) else "a callable"
        facts["the shape of the states"] = found["state"].shape
        return Facts({**facts, "feature_map": named, "eps": eps, "is_causal": causal}, None)

    agree(comm, name, describe)
    native, state = dispatch.to_native(name, q=q, k=k, v=v), found["state"]
    q, k, v = native.arrays
    xp = sys.modules[native.backend]
    with comm.guard(), native.context:
        if is_causal:
            (state,) = _states_before(comm, xp, [(state, False)], name)
        else:
            state = over_ranks(comm, xp, dense(state), f"{name}: states")
            k, v = k[..., :0, :], v[..., :0, :]
        result = _linear_attention.linear_attention(
            q, k, v, is_causal=is_causal, initial_state=state, **options
        )
        return native.give_back(result)


def _own_state(k: Any, v: Any) -> Any:
    """Return the sum over all own rows, whose arrays may have different numbers of heads."""
    heads = [x.shape[-3] if x.ndim > 2 else 1 for x in (k, v)]
    few, many = min(heads), max(heads)
    if not 1 < few < many:
        return _linear_attention.prefix_state(k, v)
    groups = (
        x.reshape(*x.shape[:-3], few, x.shape[-3] // few, *x.shape[-2:]) for x in (k, v)
    )  # which is a view
    state = _linear_attention.prefix_state(*groups)
    return state.reshape(*state.shape[:-4], many, *state.shape[-2:])


def _three(found: Iterable[Any]) -> tuple[Any, Any, Any]:
    dq, dk, dv = found
    return dq, dk, dv


def _gpu(q: Any) -> Any:
    """Return the module for products of CuPy arrays; repeated calls go there at once."""
    gpu = backends.gpu("distributed.states")
    _REPEATED[type(q)] = gpu.repeated
    return gpu


def _repeated(
    name: str, comm: Communicator, arrays: Sequence[Any], reverse: Any, found: list[Any]
) -> bool:
    """Begin a call like one before, and agree on it with the other ranks, whatever these do.

    The states are summed before the ranks agree, which they may do later. What has begun is
    appended to `found`.
    """
    begin = _REPEATED.get(type(arrays[0]))
    if begin is None or reverse.__class__ is not bool or len({*map(type, arrays)}) != 1:
        return False
    known = begin(name, arrays, reverse)
    if known is None:
        return False

    def describe() -> bytes:
        halves, record = known()
        found.append(halves)
        return bytes(record)

    agree(comm, name, describe, later=True)
    return True


def _agreed(
    name: str, comm: Communicator, given: Mapping[str, Any], reverse: Any, return_state: Any = False
) -> tuple[Native, Product, bytes]:
    """Check the arguments of a product together with the other ranks."""
    found: list[Any] = []

    def describe() -> bytes:
        native, facts, problem = _described(name, given, reverse)
        checks.flag(name, "return_state", return_state)
        if len(native.arrays) > 3:
            checks.check_gradient(name, "dout", native.arrays[3], problem.out_shape, problem.dtype)
        record = record_of(name, Facts(facts, None))
        found.extend((native, problem, record))
        return record

    agree(comm, name, describe)
    native, problem, record = found
    return native, problem, record


def _described(
    name: str, given: Mapping[str, Any], reverse: Any, *, aligned: bool = True
) -> tuple[Native, dict[str, Any], Product]:
    """Return native arrays, what all ranks have to have in common, and the problem of this rank."""
    native = dispatch.to_native(name, **given)
    if native.backend == "cupy":
        backends.gpu("workspace").refuse(name, "ranks compare their arguments on the host")
    problem = linear_problem.product_problem(name, *native.arrays[:3], aligned=aligned)
    shapes = {
        f"the shape of {arg} but its length": (*x.shape[:-2], x.shape[-1])
        for arg, x in zip("qkv", native.arrays, strict=False)
    }
    facts = {
        "the library": native.backend,
        "the dtype": problem.dtype.name,
        "reverse": checks.flag(name, "reverse", reverse),
        **shapes,
    }
    return native, facts, problem


def _states_before(
    comm: Communicator, xp: Any, states: Sequence[tuple[Any, bool]], name: str
) -> list[Any]:
    """Return the sums of the states of the ranks before this one, None on the first one.

    Each state has the direction in which its ranks follow each other: reversed or not. After step i
    a rank knows the sum of up to 2**i ranks before it [1]_. Earlier ranks are the first term of
    each addition.

    References
    ----------
    .. [1] W. D. Hillis and G. L. Steele, "Data parallel algorithms", Communications of the ACM
       29 (12), 1986.
    """
    last = comm.size - 1
    totals = [dense(state) for state, _ in states]
    sums: list[Any] = [None] * len(states)
    step = 1
    while step < comm.size:
        sends, receives, came = [], [], {}
        for i, (_, reverse) in enumerate(states):
            at = last - comm.rank if reverse else comm.rank
            if at + step <= last:
                sends.append((last - at - step if reverse else at + step, totals[i]))
            if at - step >= 0:
                came[i] = xp.empty(totals[i].shape, totals[i].dtype)
                receives.append((last - at + step if reverse else at - step, came[i]))
        comm.start(sends, receives, f"{name}: states at distance {step}").arrive()
        step *= 2
        with np.errstate(all="ignore"):
            for i, earlier in came.items():
                sums[i] = earlier if sums[i] is None else earlier + sums[i]
                if step < comm.size:
                    totals[i] = earlier + totals[i]
    return sums
