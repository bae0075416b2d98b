"""Attention of rows of thousands of dims, which tasks share out by dims and not by queries.

Nearly all of the time is in products then, and the BLAS library copies what it multiplies. Tasks of
some queries each would have it copy all keys and values, for few rows each time; those of some dims
have it copy each once. Parts of products are summed in the order of dims, whatever the threads.
"""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fa_cupy.core.attention_problem import Problem
from fa_cupy.cpu import thread_pool
from fa_cupy.cpu.tile_ops import Queries, Steps, exact
from fa_cupy.tiled import attention

Array = npt.NDArray[Any]

# The fewest dims and queries, and the most scores of a matrix, which are in memory for all parts.
_LEAST_DIM, _LEAST_QUERIES, _MOST_SCORES = 2048, 128, 1 << 18
# Parts of products are at most so many, of so many dims at least; of values, so many dims at most.
_MOST_PARTS, _LEAST_DIMS, _MOST_DIMS = 8, 1024, 4096


def suits(problem: Problem) -> bool:
    """Whether the dims of a problem, which has no mask of blocks, are shared out."""
    wide = max(problem.head_dim, problem.v_dim) >= _LEAST_DIM and problem.head_dim > 0
    few = problem.q_len * problem.k_len <= _MOST_SCORES
    return wide and few and problem.q_len >= _LEAST_QUERIES and problem.pages is None


def attend(problem: Problem, x: attention.Operands, dtype: np.dtype[Any], parallel: bool) -> bool:
    """Compute the attention of all queries of stacked batch entries.

    Parameters
    ----------
    problem : Problem
        Which `suits`.
    x : Operands
    dtype : numpy.dtype
        Of sums.
    parallel : bool
        Whether threads share the parts.

    Returns
    -------
    bool
        Whether the output is right; if not, it has to be computed in tiles.
    """
    products = _products(problem, x, dtype, parallel)
    if not Steps(dtype).finite(products):
        return False
    right = []

    def weigh(dims: slice) -> None:
        lse = x.lse if dims.start == 0 else np.empty_like(x.lse)
        some = replace(
            x, q=products, k=np.arange(problem.k_len)[None, :, None], v=x.v[:, :, dims],
            out=x.out[:, :, dims], lse=lse,
        )  # fmt: skip
        narrow = replace(problem, v_dim=some.v.shape[2])
        steps = _OfProducts.unused(dtype)
        assert isinstance(steps, _OfProducts)
        steps.acc = some.out if some.out.dtype == dtype else None
        with np.errstate(all="ignore"):
            rows = 0, problem.q_len
            right.append(attention.attend(steps, narrow, some, *rows, max(1, problem.k_len)))
        steps.acc = None
        steps.keep()

    thread_pool.run(_parts(problem.v_dim, _MOST_DIMS), lambda: weigh, parallel)
    return all(right)


def _products(
    problem: Problem, x: attention.Operands, dtype: np.dtype[Any], parallel: bool
) -> Array:
    """Return those of all queries and keys, (n, q_len, k_len).

    Queries are not scaled before: where that is needed, products are not finite.
    """
    parts = _parts(problem.head_dim, -(-problem.head_dim // _MOST_PARTS))
    products = np.empty((len(parts), len(x.q), problem.q_len, problem.k_len), dtype)

    def multiply(part: int) -> None:
        steps, dims = Steps.unused(dtype), parts[part]
        queries, keys = (steps.operand(n, a[:, :, dims]) for n, a in (("q", x.q), ("k", x.k)))
        with np.errstate(all="ignore"):
            steps.matmul(queries, keys.swapaxes(1, 2), products[part])
        steps.keep()

    thread_pool.run([*range(len(parts))], lambda: multiply, parallel)
    with np.errstate(all="ignore"):
        for product in products[1:]:
            np.add(products[0], product, out=products[0])
    found: Array = products[0]
    return found


@functools.lru_cache(maxsize=64)
def _parts(dim: int, size: int) -> list[slice]:
    """Return the dims of each part, `size` or a little more, in whole cache lines."""
    size = max(_LEAST_DIMS, -(-size // 16) * 16)
    return [slice(begin, min(begin + size, dim)) for begin in range(0, max(1, dim), size)]


class _OfProducts(Steps):
    """Steps for queries whose products with all keys are known: their dims are keys then.

    The keys of a tile are their numbers.
    """

    _kept: ClassVar[dict[Any, deque[Steps]]] = {t: deque(maxlen=4) for t in Steps._kept}

    acc: Array | None = None  # where the output may be summed up

    def scratch(self, name: str, shape: tuple[int, ...]) -> Array:
        if name == "acc" and self.acc is not None:
            return self.acc
        return super().scratch(name, shape)

    def queries(self, q: Array, factor: float) -> Queries:
        return Queries(q, exact(factor, self.dtype))

    def operand(self, name: str, x: Any) -> Any:
        return x if name == "k" else super().operand(name, x)

    def scores(self, queries: Queries, first: int, k: Any, out: Array) -> None:
        begin, end = int(k[0, 0, 0]), int(k[0, -1, 0]) + 1
        np.multiply(queries.q[:, first:, begin:end], queries.factor, out=out, casting="unsafe")
