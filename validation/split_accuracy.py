"""What products of float16 lose that stand for products of float32: by exact arithmetic in NumPy.

An operand is a sum of parts, each the rest of the ones before it rounded to float16, as
``cuda_src/common/split_float.cuh`` makes them. A product of two operands is a sum of products of
their parts. Products of two float16 numbers are exact in float64, and sums of them as good as
exact, so that what is found here is the error of the parts alone: tensor cores, which cut their
sums, add to it.

It is printed by ``python -m validation accuracy --split``, and stands in
``docs/kernels/full_precision.rst``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fa_cupy import reference
from validation import store

Array = NDArray[Any]

ULP = 2.0**-23  # of float32, relative to a number's power of two
HEAD_DIM, QUERIES, KEYS = 128, 256, 1024
_NEAR = 14  # the largest number of a row is brought to this power of two, or to the one before it
_PART_BITS = 11  # by which each part is multiplied, so that it does not become subnormal

#: Which products are formed, by how many they are: of which part of the one and of the other one.
SCHEMES: dict[int, tuple[tuple[int, int], ...]] = {
    1: ((0, 0),),
    3: ((0, 0), (0, 1), (1, 0)),
    4: ((0, 0), (0, 1), (1, 0), (1, 1)),
    6: ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0)),
}


class Errors(NamedTuple):
    """What so many products lose.

    Attributes
    ----------
    worst_product : float
        The largest error found of a product of two numbers, in ulp: units of 2**-23 of the product.
    score : float
        The root mean square of the errors of scores, in units of 2**-23 of what is summed: the sum
        of the magnitudes of its terms.
    worst_score : float
        The largest of them.
    output : float
        Of attention, in the norm of Frobenius, relative to float64.
    """

    worst_product: float
    score: float
    worst_score: float
    output: float


def parts(x: Array, count: int) -> list[Array]:
    """Return float64 arrays that add up to nearly `x`, each with the digits of float16.

    Parameters
    ----------
    x : ndarray
        Rows, which have an exponent each.
    count : int
    """
    most = np.abs(x).max(axis=-1, keepdims=True)
    exponent = np.where(most > 0, _NEAR + 1 - np.frexp(most)[1], 0) & ~1
    rest = np.ldexp(x.astype(np.float64), exponent)
    found = []
    for i in range(count):
        part = np.ldexp(rest, _PART_BITS * i).astype(np.float16).astype(np.float64)
        part = np.ldexp(part, -_PART_BITS * i)
        rest = rest - part
        found.append(np.ldexp(part, -exponent))
    return found


def product(x: Array, y: Array, count: int) -> Array:
    """Return x @ y.T of rows, by `count` products of parts."""
    scheme = SCHEMES[count]
    most = 1 + max(max(pair) for pair in scheme)
    a, b = parts(x, most), parts(y, most)
    found: Array = sum(a[i] @ b[j].swapaxes(-1, -2) for i, j in reversed(scheme))
    return found


def attention(q: Array, k: Array, v: Array, count: int) -> Array:
    """Return attention in float64 but for its two products, which are of `count` each."""
    scores = product(q, k, count) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    found = product(weights.astype(np.float32), v.T, count)
    return found / weights.sum(axis=-1, keepdims=True)


def draw(seed: int = 0) -> tuple[Array, Array, Array]:
    """Return normal q, k and v in float32."""
    rng = np.random.default_rng(seed)
    shapes = (QUERIES, HEAD_DIM), (KEYS, HEAD_DIM), (KEYS, HEAD_DIM)
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return q, k, v


def errors(count: int, seed: int = 0) -> Errors:
    """Return what `count` products lose of normal data; of single products also at the worst."""
    q, k, v = draw(seed)
    # Numbers just above a power of two, whose lower part has all of its bits, are off most.
    x = 1 + np.arange(2**13, dtype=np.float64)[:, None] * ULP
    worst = max(_worst_product(x, x, count), _worst_product(*_numbers(seed), count))
    return _errors(worst, (q, k, v), product(q, k, count), attention(q, k, v, count))


def of_float32(seed: int = 0) -> Errors:
    """Return the same of NumPy in float32: each product rounded, and each sum."""
    q, k, v = draw(seed)
    x, y = _numbers(seed)
    out = reference.plain(q, k, v, dtype=np.dtype(np.float32))
    return _errors(_relative(x * y, x, y), (q, k, v), q @ k.T, out)


def _errors(worst_product: float, arrays: Sequence[Array], scores: Array, out: Array) -> Errors:
    q, k, _ = (x.astype(np.float64) for x in arrays)
    off = np.abs(scores - q @ k.T) / (np.abs(q) @ np.abs(k).T) / ULP
    return Errors(
        worst_product=worst_product,
        score=float(np.sqrt(np.square(off).mean())),
        worst_score=float(off.max()),
        output=reference.relative_error(out, reference.attention(*arrays)[0]),
    )


def _numbers(seed: int) -> tuple[Array, Array]:
    """Return columns of normal numbers in float32."""
    rng = np.random.default_rng(seed + 1)
    x, y = rng.standard_normal((2, 1 << 16, 1)).astype(np.float32)
    return x, y


def _worst_product(x: Array, y: Array, count: int) -> float:
    """Return the largest error of products of numbers, each a row with its own exponent."""
    a, b = (parts(z, 3) for z in (x, y))
    return _relative(sum(a[i] * b[j] for i, j in reversed(SCHEMES[count])), x, y)


def _relative(found: Array, x: Array, y: Array) -> float:
    exact = x.astype(np.float64) * y
    return float((np.abs(found - exact) / np.abs(exact)).max() / ULP)


def rows() -> list[list[str]]:
    """Return the table, the first row its head."""
    head = ["products", "a product, worst", "a score", "a score, worst", "output"]
    found = [(f"{count} of float16", errors(count)) for count in SCHEMES]
    found.append(("float32 (NumPy)", of_float32()))

    def cells(of: Errors) -> list[str]:
        ulps = [f"{x:.1e}" if x < 0.01 or x >= 100 else f"{x:.2g}" for x in of[:3]]
        return [f"{ulp} ulp" for ulp in ulps] + [f"{of.output:.1e}"]

    return [head, *([name, *cells(of)] for name, of in found)]


def table(lines: Sequence[Sequence[str]] | None = None) -> str:
    """Return `rows` as text."""
    return store.align([list(line) for line in lines or rows()])
