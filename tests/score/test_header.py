"""The functions of an expression's header, which g++ compiles, against NumPy."""

import numpy as np
import pytest

from fa_cupy.score import derivative, header, tree
from fa_cupy.score.program import Program
from tests.score.test_cuda import draw
from tests.support import expressions, score_code

S = tree.variable("s")
# Operations on integers that become floats, with literals among them.
KNOWN = (
    "s - 0.5 * min(abs(i - j), 5)",
    "s + (abs(i - j) + 1) * x[h]",
    "s * max(i - j, 0)",
    "s + abs(3 - abs(i * 2 - j)) * 1.5",
    "s - min(i, j, 3) + max(2, i)",
)


def case(text, exact):
    root, numbered = expressions.tree_of(text)
    program = Program(root, tuple(score_code.stored(name).dtype.name for name in numbered))
    return header.header(program, exact, sloped=True), numbered


@pytest.mark.emulator
@pytest.mark.parametrize("exact", [True, False])
def test_tiles_say_what_numpy_says(exact, tmp_path):
    """Where positions change by additions, and where they are converted one by one."""
    texts = [*KNOWN, *draw(expressions.smooth() | expressions.integers(), 40)]
    run = score_code.headers_on_the_cpu([case(text, exact) for text in texts], tmp_path)
    i, j = np.indices([expressions.SIZES[name] for name in "ij"]).reshape(2, -1)
    s = (2 * np.random.default_rng(0).standard_normal(i.size)).astype(np.float32)
    compared = 0
    for number, text in enumerate(texts):
        root, numbered = expressions.tree_of(text)
        roots = root, derivative.derivative(root, S)
        for b, h in np.ndindex(expressions.SIZES["b"], expressions.SIZES["h"]):
            points = {"b": np.full_like(i, b), "h": np.full_like(i, h), "i": i, "j": j, "s": s}
            want = expressions.by_numpy(roots, numbered, points, np.float32)
            exactly = expressions.by_numpy(roots, numbered, points)
            for got, expected, value in zip(run(number, b, h, s), want, exactly, strict=True):
                # Where float32 itself is far from float64, two ways to compute it are, too.
                near = np.isclose(expected, value, 5e-4, 5e-4, equal_nan=True)
                close = np.isclose(got, expected, 2e-3, 2e-3, equal_nan=True)
                assert close[:, near].all(), text
                compared += near.sum()
    assert compared > 0.9 * 2 * 6 * i.size * len(texts)
