"""Gradients of linear attention by its features and values: written once over a namespace.

Let `sums` be the product of features and values, with a last column of values of 1. Then the output
is the quotient of the other columns by the last one, and with ``weights = sums[..., -1:] + eps``::

    dsums[..., :-1] = dout / weights
    dsums[..., -1:] = -(dsums[..., :-1] * out).sum(-1)

The rest are gradients of a product. If all queries see all keys, there is one state, by which::

    dx = dsums @ state.mT
    dstate += x.mT @ dsums
    dy = values @ dstate.mT
    dvalues = y @ dstate
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from fa_cupy.core import broadcasting
from fa_cupy.core.linear_problem import Product, product_problem
from fa_cupy.keys.offsets import Offsets

Array = Any  # numpy.ndarray or cupy.ndarray
_NAME = "linear_attention_backward"


class Products(Protocol):
    """Products that a backend supplies, of arrays of float32 or float64."""

    xp: Any

    def product(self, problem: Product, x: Array, y: Array, values: Array, initial: Array) -> Array:
        """Return a causal product."""

    def backward(
        self, problem: Product, dsums: Array, x: Array, y: Array, values: Array, initial: Array,
        dstate: Array,
    ) -> tuple[Array, Array, Array, Array | None]:  # fmt: skip
        """Return its gradients."""

    def total(
        self, problem: Product, y: Array, values: Array, initial: Array, of_keys: bool
    ) -> Array:
        """Return the state after all rows, (*state_batch, E, M).

        Of packed sequences the states, (*state_batch, sequences, E, M): rows lie as those of the
        keys do, or of the queries.
        """

    def read(self, rows: Array, state: Array, of_keys: bool) -> Array:
        """Return ``rows @ state``: batch axes broadcast, and rows may have more heads.

        Of packed sequences each has its own state, as from `total`.
        """


class Given(NamedTuple):
    """What linear attention is computed from, in float32 or float64."""

    x: Array  # features of the queries, (..., Lq, E)
    y: Array  # features of the keys, (..., Lk, E)
    values: Array  # (..., Lk, M + 1); the last column is `unit`
    initial: Array | None  # (..., E, M + 1)
    eps: float
    is_causal: bool
    unit: Any = 1.0  # a number, or an array of one
    offsets: Offsets | None = None  # of packed sequences; the initial state is one of each


def gradients(
    products: Products, given: Given, dout: Array, dstate: Array | None
) -> tuple[Array, Array, Array, Array | None]:
    """Return the gradients by `x`, `y`, `values` and `initial`, each in the shape of its array.

    Parameters
    ----------
    products : Products
    given : Given
    dout : array
        Gradient of the output, (..., Lq, M).
    dstate : array or None
        Gradient of the last state.
    """
    x, y, values, initial = given[:4]
    aligned, offsets = given.is_causal, given.offsets
    problem = product_problem(_NAME, x, y, values, initial, aligned=aligned, offsets=offsets)
    if given.is_causal:
        sums = products.product(problem, x, y, values, initial)
        dsums = _through_division(products.xp, given, sums, dout)
        return products.backward(problem, dsums, x, y, values, initial, dstate)
    state = products.total(problem, y, values, initial, True)
    dsums = _through_division(products.xp, given, products.read(x, state, False), dout)
    of_queries = product_problem(_NAME, None, x, dsums, aligned=False, offsets=offsets)
    found = broadcasting.summed(products.total(of_queries, x, dsums, None, False), state.shape)
    if dstate is not None:
        found = found + dstate
    axes = state.ndim - (2 if offsets is None else 3)
    heads = state.shape[axes - 1] if axes else 1
    dx = products.read(dsums, state.swapaxes(-1, -2), False)
    dy = products.read(_with_heads(products.xp, values, heads), found.swapaxes(-1, -2), True)
    dvalues = products.read(_with_heads(products.xp, y, heads), found, True)
    return (
        broadcasting.summed(dx, x.shape),
        broadcasting.summed(dy, y.shape),
        broadcasting.summed(dvalues, values.shape),
        None if initial is None else broadcasting.summed(found, initial.shape),
    )


def _through_division(xp: Any, given: Given, sums: Array, dout: Array) -> Array:
    """Return the gradient by `sums`, (..., Lq, M + 1)."""
    weights = sums[..., -1:] / given.unit + sums.dtype.type(given.eps)
    dsums = xp.empty(sums.shape, sums.dtype)
    dsums[..., :-1] = dout / weights
    of_weights = (dsums[..., :-1] * (sums[..., :-1] / weights)).sum(axis=-1, keepdims=True)
    dsums[..., -1:] = -of_weights / given.unit
    # A row that nothing depends on has no part in the gradients, even if its sum of weights is 0.
    none = (dout == 0).all(axis=-1, keepdims=True)
    return xp.where(none, sums.dtype.type(0), dsums)


def _with_heads(xp: Any, x: Array, heads: int) -> Array:
    """Return `x` with as many heads as the states have, if it has fewer, but more than one."""
    if x.ndim > 2 and 1 < x.shape[-3] < heads:
        return xp.repeat(x, heads // x.shape[-3], axis=-3)
    return x
