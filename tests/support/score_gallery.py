"""The scores of docs/use/score.rst, and others, for calls of any lengths and of up to 8 heads."""

from typing import NamedTuple

import ml_dtypes
import numpy as np

from fa_cupy import Score

HEADS, LONGEST = 8, 600
_RNG = np.random.default_rng(0)
_BUCKETS = 32


class Example(NamedTuple):
    """An expression and its arguments.

    Attributes
    ----------
    text : str
    arguments : dict
    grads : list of str
        The arrays that have gradients, as "score.x".
    """

    text: str
    arguments: dict
    grads: list

    def score(self, xp, order="C"):
        """The score with arrays of a namespace, in C order or with gaps in reversed axes ("A")."""
        arguments = {name: _sent(xp, x, order) for name, x in self.arguments.items()}
        return Score(self.text, **arguments)


def _sent(xp, x, order):
    if not isinstance(x, np.ndarray):
        return x
    if order == "C" or not x.ndim:
        return xp.asarray(x)
    wide = np.zeros([2 * n for n in x.shape], x.dtype)
    every = (slice(None, None, -2),) * x.ndim
    wide[every] = x
    return xp.asarray(wide)[every]


def _bucket(distance):
    """T5's bucket of a distance: half of them exact, the rest logarithmic."""
    half, near = _BUCKETS // 2, _BUCKETS // 4
    far = np.log(np.maximum(abs(distance), 1) / near) / np.log(128 / near)
    far = np.minimum(near + (far * (half - near)).astype(int), half - 1)
    return np.where(abs(distance) < near, abs(distance), far) + half * (distance < 0)


_PLACES = np.sort(_RNG.uniform(0, 6, LONGEST)).astype(np.float32)
_DISTANCE = "sqrt((x[i] - y[j]) ** 2 + 1e-6)"
_ROOT3 = 3**0.5

GALLERY = {
    "alibi": Example(
        "s - slopes[h] * abs(i - j)",
        {"slopes": (2.0 ** -np.arange(1, HEADS + 1)).astype(np.float32)},
        ["score.slopes"],
    ),
    "t5": Example(
        "s + table[bucket[i - j + n] % 32, h]",
        {
            "table": _RNG.standard_normal((_BUCKETS, HEADS)).astype(np.float32),
            "bucket": _bucket(np.arange(-LONGEST, LONGEST + 1)).astype(np.int32),
            "n": LONGEST,
        },
        [],
    ),
    "softcap": Example("cap * tanh(s / cap)", {"cap": 1.5}, []),
    "gaussian": Example(
        "s / 8 - (x[i] - y[j]) ** 2 / (2 * width ** 2)",
        {"x": _PLACES, "y": _PLACES + np.float32(0.01), "width": 1.5},
        ["score.x", "score.y"],
    ),
    "matern": Example(
        f"log(1 + root * {_DISTANCE} / w) - root * {_DISTANCE} / w + 0 * s",
        {"x": _PLACES, "y": _PLACES[::-1].copy(), "w": np.asarray(2.0), "root": _ROOT3},
        ["score.x", "score.w"],
    ),
    "soft window": Example("s - max(abs(i - j) - 16, 0) / width", {"width": 4.0}, []),
    "documents": Example(
        "s if document[i] == document[j] or j < prefix[b] else -inf",
        {
            "document": np.repeat(np.arange(LONGEST // 20), 20).astype(np.int64),
            "prefix": np.array([5, 40, 0, 3, 9, 1, 200, 8], np.int16),
        },
        [],
    ),
    "general": Example(
        "where(i >= j, s * y[b, h], min(s, 2) - 0.25) + x[(i // 4 + 3 * j) % 7] / (1 + i % 5)"
        " - sigmoid(s) * z[h, j]",
        {
            "x": _RNG.standard_normal(7).astype(np.float16),
            "y": (1 + 0.1 * _RNG.standard_normal((8, HEADS))),
            "z": _RNG.standard_normal((HEADS, LONGEST)).astype(ml_dtypes.bfloat16),
        },
        ["score.y", "score.z"],
    ),
}
