"""The check that no index leaves its array: sound for any expression, and what its errors say."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cupy import Score, attention, attention_backward, plot
from fa_cupy.score import ranges, tree
from tests.support import expressions
from tests.support.expressions import SIZES

Z = np.zeros((1, 2, 6, 4))
X = np.arange(6.0)
G = np.arange(6)


def check(text, **arguments):
    attention(Z, Z, Z, score=Score(text, **arguments))


@given(text=expressions.integers(), top=st.integers(1, 40))
def test_accepted_indices_are_inside(text, top):
    """Whatever the integer expression is."""
    root, numbered = expressions.tree_of(f"0.5 * ({text})")
    arrays = [expressions.ARGUMENTS[name] for name in numbered]
    index = root.args[1].args[0] if root.args[1].op == "to_float" else root.args[1]
    if index.kind == "float":  # a literal, which is a float at once
        return
    load = tree.load(len(arrays), "float", [index])
    dtypes, shapes = [x.dtype.name for x in arrays], [x.shape for x in arrays]
    names, sizes = [*numbered, "of"], ranges.Sizes(**SIZES)
    every = np.meshgrid(*(np.arange(n) for n in SIZES.values()), indexing="ij")
    points = dict(zip(SIZES, (x.ravel() for x in every), strict=True))
    points |= {"s": np.zeros(points["b"].size)}
    (found,) = expressions.by_numpy([index], numbered, points)
    try:
        ranges.check("f", load, names, [*shapes, (top,)], [*dtypes, "float64"], sizes)
    except ValueError:
        return
    assert found.min() >= 0
    assert found.max() < top


@pytest.mark.parametrize(
    "text",
    [
        "s + x[i]",
        "s + x[h * 3 + 2]",
        "s + x[abs(i - j)]",
        "s + x[(i + 7 * j) % 6]",
        "s + x[(i - j) % 6]",
        "s + x[min(i + 3, 5)]",
        "s + x[max(i - 3, 0)]",
        "s + x[(i + j) // 2]",
        "s + x[-i + 5]",
        "s + x[where(s > 0, i, j)]",
        "s + x[(i % 3) ** 2 + 1]",
        "s + x[(i - 2) ** 2 % 6]",
        "s + x[g[i] % 6]",
        "s + x[min(max(g[i], 0), 5)]",
        "s + x[min(max(g[i] * g[j], 0), 5)]",
        "s + x[i * 0]",
        "s + x[j % 2 * 2 + i // 3]",
    ],
)
def test_indices_inside_are_accepted(text):
    check(text, x=X, **({"g": G} if "g" in text else {}))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("s + x[i + 1]", "x[i + 1], where i + 1 is from 1 to 6, and score.x has 6 elements along "),
        ("s + x[i - 1]", "where i - 1 is from -1 to 4"),
        ("s + x[-1]", "where -1 is from -1 to -1"),
        ("s + x[i - j]", "is from -5 to 5"),
        ("s + x[h * 5 + i]", "is from 0 to 10"),
        ("s + x[6]", "where 6 is from 6 to 6"),
        ("s + x[g[i]]", "is from -9223372036854775808 to 9223372036854775807"),
        (
            "s + x[g[i] // 2]",
            "want an index from 0 to 5 for all b, h, i and j (min, max or % 6 can",
        ),
        ("s + x[abs(g[i])] ", "is from -9223372036854775808 to"),
        ("s + x[i - 1] if i > 0 else s", "where i - 1 is from -1 to 4"),
        ("s + x[where(i > 0, i - 1, 0)]", "is from -1 to 4"),
        ("s + x[(i + 7 * j) % 7]", "is from 0 to 6"),
        ("s + x[where(s > 0, i, i + 1)]", "is from 0 to 6"),
        ("s + x[abs(i - j) - 1]", "is from -1 to 4"),
        ("s + y[h, i]", "score.y has 1 elements along axis 0"),
        ("s + i % j", "i % j, where j is from 0 to 5, want a divisor of at least 1 (max(n, 1)"),
        ("s + i // (j - 5)", "want a divisor of at least 1"),
        ("s + i % -3", "where -3 is from -3 to -3, want a divisor"),
        ("s + (i + 10) ** 20", "which is from 100000000000000000000 to "),
        ("s + i * 2000000000", "want what 32 bits hold (a float factor, as in 1.0 * i * j"),
    ],
)
def test_errors_say_which_range(text, why):
    arguments = {"x": X, "g": G, "y": X[None]}
    used = {name: x for name, x in arguments.items() if f"{name}[" in text}
    with pytest.raises(ValueError, match=r"^attention: score has ") as caught:
        check(text, **used)
    assert why in str(caught.value)


def test_ranges_are_those_of_the_call():
    """One score serves calls of many shapes."""
    score = Score("s + x[i]", x=X)
    for length in (1, 3, 6):
        z = np.zeros((length, 2))
        assert attention(z, z, z, score=score).shape == (length, 2)
    for z in (np.zeros((7, 2)), np.zeros((3, 7, 2))):
        with pytest.raises(ValueError, match=r"where i is from 0 to 6, and score\.x has 6"):
            attention(z, z, z, score=score)
        with pytest.raises(ValueError, match=r"^attention_backward: score has x\[i\]"):
            attention_backward(z, z, z, z, z, z[..., 0], score=score)
    with pytest.raises(ValueError, match=r"^plot\.scores: score has x\[i\]"):
        plot.scores(score, 7, 2)


def test_where_there_is_no_pair_there_is_no_index():
    score = Score("s + x[i + 100]", x=X)
    for rows, cols in ((0, 3), (3, 0)):
        assert attention(np.ones((rows, 2)), *np.ones((2, cols, 2)), score=score).sum() == 0


def test_arithmetic_of_64_bits_wraps_around():
    big = np.array([2**62, -(2**63)])
    score = Score("s * 0 + where(4 * g[0] == 0, 1, 0) + where(abs(g[1]) < 0, 2, 0)", g=big)
    _, lse = attention(np.ones((1, 1)), *np.ones((2, 1, 1)), score=score, return_lse=True)
    assert lse.item() == 3
