"""Trees against Python's own answer to their text, and against differences."""

import numpy as np
import pytest
from hypothesis import given

from fa_cupy.score import derivative, tree
from tests.support import expressions

S = tree.variable("s")


@given(text=expressions.expressions())
def test_numpy_says_what_python_says(text):
    root, numbered = expressions.tree_of(text)
    points = expressions.points(12)
    (found,) = expressions.by_numpy([root], numbered, points)
    for place, value in enumerate(found):
        point = {name: x[place] for name, x in points.items()}
        np.testing.assert_allclose(value, expressions.by_python(text, point), 1e-9, 1e-12)


def differences(values, slopes, step):
    """Whether central differences lie between the slopes around the middle, up to rounding."""
    low, _, high = values
    change = (high - low) / (2 * step)
    bounds = np.min(slopes, 0), np.max(slopes, 0)
    slack = 1e-5 * (1 + np.abs(slopes).max(0)) + 1e-9 * np.abs(values).max(0) / step
    return (change >= bounds[0] - slack) & (change <= bounds[1] + slack)


@given(text=expressions.smooth())
def test_slope_is_that_of_differences(text):
    root, numbered = expressions.tree_of(text)
    slope = derivative.derivative(root, S)
    points, step = expressions.points(), 1e-5
    values, slopes = [], []
    for shift in (-step, 0.0, step):
        moved = points | {"s": points["s"] + shift}
        value, by_s = expressions.by_numpy([root, slope], numbered, moved)
        values.append(value)
        slopes.append(by_s)
    assert differences(values, slopes, step).all()


@given(text=expressions.smooth())
def test_derivatives_by_elements_are_those_of_differences(text):
    """Each load of an element counts for itself, and all of them change with the array."""
    root, numbered = expressions.tree_of(text)
    loads = [node for node in tree.loads_of(root) if node.kind == "float"]
    points, step = expressions.points(), 1e-5
    for number in {node.value for node in loads}:
        name = numbered[number]
        if not isinstance(expressions.ARGUMENTS[name], np.ndarray):
            continue
        own = [derivative.derivative(root, node) for node in loads if node.value == number]
        with pytest.MonkeyPatch.context() as patch:
            values, slopes = [], []
            for shift in (-step, 0.0, step):
                moved = expressions.ARGUMENTS[name].astype(np.float64) + shift
                patch.setitem(expressions.ARGUMENTS, name, moved)
                value, *parts = expressions.by_numpy([root, *own], numbered, points)
                values.append(value)
                slopes.append(np.sum(parts, axis=0))
                patch.undo()
        assert differences(values, slopes, step).all()


@pytest.mark.parametrize(
    ("text", "s", "slope"),
    [
        ("abs(s)", 0.0, 0.0),
        ("min(s, 2 * s)", 0.0, 1.5),
        ("max(s, -s)", 0.0, 0.0),
        ("max(s, 3)", 3.0, 0.5),
        ("min(s, s)", 1.0, 1.0),
        ("where(s >= 0, 3 * s, s)", 0.0, 3.0),
        ("floor(s) * s", 2.0, 2.0),
        ("sqrt(s)", 4.0, 0.25),
        ("s ** 3", -2.0, 12.0),
        ("s ** -1", 2.0, -0.25),
        ("s ** 2.5", 0.0, 0.0),
        ("s ** 0.0", 0.0, 0.0),
        ("s ** (0.0 * i)", 0.0, 0.0),
        ("2 ** s", 0.0, np.log(2)),
        ("where(s > 0, log(s), 0)", -1.0, 0.0),
        ("where(s > 0, log(s), s)", 2.0, 0.5),
        ("(s / 1e30) ** 8 * 1e200", 1e30, 8e170),
    ],
)
def test_slopes_at_chosen_places(text, s, slope):
    root, _ = expressions.tree_of(text)
    by_s = derivative.derivative(root, S)
    (found,) = expressions.by_numpy([by_s], [], expressions.points(1) | {"s": np.array([s])})
    np.testing.assert_allclose(found, slope, rtol=1e-12)


def test_derivatives_of_expressions_that_change_are_not_kept_for_ever():
    for n in range(1200):
        root, _ = expressions.tree_of(f"{n}.5 * s")
        assert derivative.derivative(root, S) == tree.number(n + 0.5)
    assert derivative.derivative.cache_info().currsize <= 1024


def test_what_adds_to_s_has_the_slope_1():
    root, _ = expressions.tree_of("s - x[h] * abs(i - j) + exp(t)")
    assert derivative.derivative(root, S) == tree.number(1.0)


@pytest.mark.parametrize(
    ("text", "slope"),
    [
        ("c * tanh(s / c)", "1.0 - tanh(s / c) ** 2"),
        ("exp(-s * t)", "-(t * exp(-s * t))"),
        ("2 * tanh(s / 3) - t", "2 * ((1.0 - tanh(s / 3) ** 2) / 3)"),
        ("t - s / (t + 2)", "-(1.0 / (t + 2))"),
        ("where(t > 0, s, 3 * s)", "where(t > 0, 1.0, 3.0)"),
        ("floor(s) + x[h]", "0.0"),
    ],
)
def test_slopes_use_values_again_and_leave_out_0_and_1(text, slope):
    root, _ = expressions.tree_of(text)
    wanted, _ = expressions.tree_of(slope)
    assert derivative.derivative(root, S) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "exp(tanh(" * 25 + "s" + "))" * 25,
        "min(" * 30 + "s" + ", x[h] * s + t)" * 30,
        "(" * 50 + "s * x[h]" + ") ** 64" * 50,
        "*".join(["(s + t + x[h])"] * 50),
        "*".join(f"(s + {n} * t + x[h])" for n in range(40)),
        "9 ** 9 ** 9.0 * s + 2 ** 64.0 ** s",
    ],
    ids=lambda text: text[:12],
)
def test_no_text_takes_long(text):
    """As those do that a computer algebra system multiplies out."""
    root, _ = expressions.tree_of(text)
    assert len(tree.ordered(derivative.derivative(root, S)).steps) < 2500
