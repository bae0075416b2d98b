"""The reduced set of the sanitizers, causal products: every row of the table on small problems.

A row that computes products by itself is forced by leaving the others of its kind out of the table.
What helps such rows, sums of segments and their scan, is reached through them; at the end every row
of the table must have been loaded by some call.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from validation import attention_calls, peers

# Long enough to be split for one head where there are many multiprocessors, short enough not to be.
SPLIT, WHOLE = 2000, 150
WIDER = 40  # columns more than a row's dim
LIMIT = 1e-2  # relative error: beyond it a result is wrong rather than rounded


class Problem(NamedTuple):
    """One call: its function in `fa_cupy`, sizes of its arrays, and options.

    `states` asks for what goes into and comes out of a call beside its rows; `offset` moves arrays
    off the alignment that 16-byte copies need; `nan` is a row of v that holds one, or none.
    """

    function: str
    length: int
    qk_dim: int
    v_dim: int
    heads: tuple[int, int] = (1, 1)  # of q, and of k and v
    reverse: bool = False
    states: bool = False
    offset: int = 0
    nan: int | None = None


def problems(dim: int, extra: int, wide: bool = False) -> Iterator[Problem]:
    """Calls that reach every branch of the kernels of a row with this ``dim``.

    ``extra`` rows make the shapes of each row of the table its own, so that no plan of another row
    is met again; ``wide`` adds keys of more columns than ``dim``, which some kernels take in turns.
    """
    split, whole = SPLIT + extra, WHOLE + extra
    product = "causal_product"
    yield Problem(product, whole, dim, dim, (4, 2), states=True)
    yield Problem(product, whole, dim - 3, dim - 15, (2, 2), reverse=True, states=True)
    yield Problem(product, whole, dim - 8, dim - 16, (2, 2), nan=whole - 20)
    yield Problem(product, whole, dim, dim + WIDER, (2, 2), offset=1)
    yield Problem(product, split, dim, dim, states=True)
    yield Problem(product, split, dim, dim, reverse=True, offset=1)
    yield Problem(product, split, dim, dim, nan=split // 2)
    if wide:
        yield Problem(product, whole, dim + WIDER, dim, (2, 2), states=True)
    yield Problem(product, 1, dim, dim, (1 + extra, 1))
    yield Problem(product, 0, dim, dim, (1 + extra, 1), states=True)
    backward = "causal_product_backward"
    yield Problem(backward, whole, dim, dim, (4, 2))
    yield Problem(backward, whole, dim - 3, dim - 15, (2, 2), reverse=True, states=True)
    yield Problem(backward, whole, dim, dim, (2, 2), offset=1)
    yield Problem(backward, split, dim, dim, states=True)
    yield Problem(backward, 0, dim, dim, (1 + extra, 1), states=True)
    yield Problem("linear_attention", whole, dim, dim - 8, (4, 2))
    yield Problem("prefix_state", whole, dim, dim, (2, 2), states=True)


def arrays(dtype: np.dtype[Any], problem: Problem) -> dict[str, np.ndarray]:
    """Arguments of the call, by name, on the host."""
    rng = np.random.default_rng(1)
    q_heads, heads = problem.heads

    def draw(count: int, rows: int, columns: int, kind: Any = dtype) -> np.ndarray:
        return rng.standard_normal((1, count, rows, columns)).astype(np.float32).astype(kind)

    rows, qk_dim, v_dim = problem.length, problem.qk_dim, problem.v_dim
    found = {"k": draw(heads, rows, qk_dim), "v": draw(heads, rows, v_dim)}
    if problem.nan is not None:
        found["v"][..., problem.nan, 1] = np.nan
    if problem.function != "prefix_state":
        found["q"] = draw(q_heads, rows, qk_dim)
    if problem.function == "causal_product_backward":
        found["dout"] = draw(q_heads, rows, v_dim)
    if problem.states:
        of_state = dtype if dtype.itemsize == 8 else np.float32
        found["initial_state"] = draw(heads, qk_dim, v_dim, of_state)
        if problem.function == "causal_product_backward":
            found["dstate"] = draw(heads, qk_dim, v_dim, of_state)
    return found


def call(problem: Problem, sent: dict[str, Any]) -> list[np.ndarray]:
    """Make the call; return all of its results in float64 on the host."""
    import fa_cupy

    options: dict[str, Any] = {}
    if problem.function != "linear_attention":
        options["reverse"] = problem.reverse
    if problem.function == "causal_product":
        options["return_state"] = problem.states
    if problem.function == "prefix_state":
        options["ends"] = [0, problem.length // 2, problem.length]
    result = getattr(fa_cupy, problem.function)(**sent, **options)
    results = result if isinstance(result, tuple) else (result,)
    return [peers.to_host(x).astype(np.float64) for x in results]


def wrong(problem: Problem, host: dict[str, np.ndarray], results: list[np.ndarray]) -> bool:
    """Whether a product is not what the definition gives, or another result not finite."""
    from fa_cupy import reference

    if problem.function != "causal_product":
        return not all(np.isfinite(x).all() for x in results)
    out, state = reference.causal_product(**host, reverse=problem.reverse)
    wanted = [out, state[:, :: problem.heads[0] // problem.heads[1]]]
    pairs = zip(results, wanted[: len(results)], strict=True)
    return any(not reference.relative_error(x, y) <= LIMIT for x, y in pairs)


# ------------------------------------------------------------------------------- forcing a row
@contextlib.contextmanager
def table(rows: tuple[Any, ...]) -> Iterator[None]:
    """While entered, these are the rows there are, for every module that has the table."""
    from fa_cupy.gpu.kernels.linear.table import PRODUCTS

    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("fa_cupy.gpu.") and getattr(module, "PRODUCTS", None) is PRODUCTS:
                stack.enter_context(mock.patch.object(module, "PRODUCTS", rows))
        yield


def alone(row: Any, target: str, qk_dim: int | None = None) -> bool:
    """Whether a row computes products by itself, with keys of its dim or of another one."""
    from fa_cupy.gpu.kernels.linear import cost_model

    with table((row,)):
        dims = qk_dim or row.dim, row.dim
        return cost_model.choose(row.dtype, 1, WHOLE, *dims, target, 1) is not None


def forcing(row: Any, target: str) -> tuple[Any, ...]:
    """The table without the rows that could be taken in place of this one."""
    from fa_cupy.gpu.kernels.linear.table import PRODUCTS
    from fa_cupy.gpu.kernels.linear.variant import ProductSm90Variant

    itself = alone(row, target)

    def rival(other: Any) -> bool:
        if isinstance(row, ProductSm90Variant) and not isinstance(other, ProductSm90Variant):
            return False  # what serves arrays that tensor maps cannot walk
        return alone(other, target) if itself else other.source == row.source

    return tuple(other for other in PRODUCTS if other is row or not rival(other))


@contextlib.contextmanager
def forced(row: Any, target: str) -> Iterator[None]:
    """While entered, calls get this row if it can compute them."""
    from fa_cupy.gpu.kernels.linear.sm90 import cost_model as sm90_cost_model
    from fa_cupy.gpu.kernels.linear.sm90.chunk_state_sm90 import ChunkStateSm90
    from fa_cupy.gpu.kernels.linear.variant import ProductSm90Variant

    with contextlib.ExitStack() as stack:
        stack.enter_context(table(forcing(row, target)))
        if isinstance(row, ChunkStateSm90):  # no block does that itself then
            none = mock.patch.object(sm90_cost_model, "_own_prefix", return_value=())
            stack.enter_context(none)
        if isinstance(row, ProductSm90Variant):
            stack.enter_context(others_dear())
        yield


@contextlib.contextmanager
def others_dear() -> Iterator[None]:
    """While entered, kernels that need no tensor maps are never cheaper than those for SM90."""
    from fa_cupy.gpu.kernels.linear import cost_model

    with contextlib.ExitStack() as stack:
        for name, dear in (("_WAITING", 1e4), ("_SINGLE_WAITING", 1e4), ("_CLOCKS_PER_US", 0.1)):
            stack.enter_context(mock.patch.object(cost_model, name, dear))
        yield


def problems_of(row: Any, number: int, target: str) -> Iterator[Problem]:
    """`problems` for a row of the table, the ``number``-th."""
    return problems(row.dim, number, alone(row, target, row.dim + WIDER))


def run(target: str, share: int = 0, shares: int = 1) -> int:
    """Make every call once and look at each result; return how many there were.

    Parameters
    ----------
    target : str
    share, shares : int
        One of so many shares of the rows, and how many there are.

    Raises
    ------
    RuntimeError
        Where a result is wrong, or no call reached a row.
    """
    from fa_cupy.gpu.driver import compile
    from fa_cupy.gpu.kernels.linear.table import PRODUCTS

    reached: set[Any] = set()
    dtypes = {dtype.name: dtype for dtype in peers.DTYPES.values()}
    load = compile.load

    def spy(row: Any, *rest: Any) -> Any:
        reached.add(row)
        return load(row, *rest)

    calls = 0
    own = [row for row in PRODUCTS[share::shares] if target in row.targets]
    with mock.patch.object(compile, "load", spy):
        for number, row in enumerate(PRODUCTS):
            # One that helped the rows before it has met these problems with them.
            if row not in own or row in reached:
                continue
            listed = problems_of(row, number, target)
            with forced(row, target):
                for problem in listed:
                    host = arrays(dtypes[row.dtype], problem)
                    sent = {n: attention_calls.send(x, problem.offset) for n, x in host.items()}
                    if wrong(problem, host, call(problem, sent)):
                        raise RuntimeError(f"{row.name} {problem}: the result is wrong")
                    calls += 1
    missed = [row.name for row in own if row not in reached]
    if missed:
        raise RuntimeError(f"no call reached {', '.join(missed)}")
    return calls
